"""Reading the answers of OpenAI-compatible endpoints, whole or in stream chunks, with the token ids they may carry.

vLLM, asked by `return_token_ids`, puts the prompt's ids at the top level (chat) or into each choice (completions) of
an answer or of a stream's first chunk, and the sampled ids into each choice as `token_ids`. What is absent or not of
this form is not known; nothing here raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longrein.records import Json

_JOINED = ("content", "reasoning_content", "reasoning", "refusal")


@dataclass
class Choice:
    """One sampled answer of a request, as far as it has come."""

    prompt_ids: list[int] | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    message: Json = field(default_factory=lambda: {"role": "assistant"})
    calls: dict[int, Json] = field(default_factory=dict)
    """Tool calls that a stream has told of, by their index."""
    finish_reason: str | None = None

    def known_logprobs(self) -> list[float] | None:
        """One for each sampled id, or None: a gap would put all later ones in the wrong place."""
        known = [value for value in self.logprobs if value is not None]
        return known if known and len(known) == len(self.logprobs) == len(self.ids) else None

    def reply(self) -> Json:
        """The assistant message."""
        message = dict(self.message)
        if self.calls:
            message["tool_calls"] = [self.calls[index] for index in sorted(self.calls)]
        return message

    def read(self, value: Mapping[str, Any]) -> None:
        """Take in a choice of a whole answer, or of one chunk."""
        prompt = token_ids(value.get("prompt_token_ids"))
        if prompt and self.prompt_ids is None:
            self.prompt_ids = prompt
        self.ids.extend(token_ids(value.get("token_ids")))
        self.logprobs.extend(_logprobs(value.get("logprobs")))
        if isinstance(value.get("finish_reason"), str):
            self.finish_reason = value["finish_reason"]
        if isinstance(value.get("message"), dict):
            self.message.update(value["message"])
        if isinstance(value.get("text"), str):
            self.message["content"] = _text(self.message.get("content")) + value["text"]
        if isinstance(value.get("delta"), dict):
            self._read_delta(value["delta"])

    def _read_delta(self, delta: Mapping[str, Any]) -> None:
        for name in _JOINED:
            if isinstance(delta.get(name), str):
                self.message[name] = _text(self.message.get(name)) + delta[name]
        parts = delta.get("tool_calls")
        for part in parts if isinstance(parts, list) else ():
            if not isinstance(part, dict):
                continue
            index = part.get("index")
            call = self.calls.setdefault(index if isinstance(index, int) else len(self.calls), {"type": "function"})
            if part.get("id"):
                call["id"] = part["id"]
            function = part.get("function")
            if isinstance(function, dict):
                known = call.setdefault("function", {"name": "", "arguments": ""})
                for name in ("name", "arguments"):
                    known[name] += _text(function.get(name))


class Answers:
    """All choices of one request."""

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}
        self._prompt_ids: list[int] | None = None

    @property
    def choices(self) -> list[Choice]:
        """In order of index."""
        found = [self._choices[index] for index in sorted(self._choices)]
        for choice in found:
            choice.prompt_ids = choice.prompt_ids or self._prompt_ids
        return found

    def whole(self, value: Mapping[str, Any]) -> None:
        """Take in the body of a plain answer."""
        self.chunk(value)

    def chunk(self, value: Any) -> None:
        """Take in one chunk of a stream."""
        if not isinstance(value, Mapping):
            return
        prompt = token_ids(value.get("prompt_token_ids"))
        if prompt and self._prompt_ids is None:
            self._prompt_ids = prompt
        choices = value.get("choices")
        for at, choice in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(choice, dict):
                index = choice.get("index")
                self._choices.setdefault(index if isinstance(index, int) else at, Choice()).read(choice)

    def begun(self) -> bool:
        """Whether anything sampled has come."""
        return any(choice.ids or choice.calls or len(choice.message) > 1 for choice in self._choices.values())

    def finished(self, count: int) -> bool:
        """Whether each of `count` choices has its finish reason."""
        done = [choice for choice in self._choices.values() if choice.finish_reason is not None]
        return len(done) >= count


def read_choices(response: Mapping[str, Any]) -> list[Choice]:
    """The choices of a plain answer's body."""
    answers = Answers()
    answers.whole(response)
    return answers.choices


def token_ids(value: Any) -> list[int]:
    """A list of token ids; empty when it is anything else."""
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 2**31 for item in value):
        return value
    return []


def _logprobs(value: Any) -> list[float | None]:
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("content"), list):
        found = [item.get("logprob") if isinstance(item, dict) else None for item in value["content"]]
    elif isinstance(value.get("token_logprobs"), list):
        found = value["token_logprobs"]
    else:
        return []
    return [_finite(item) for item in found]


def _finite(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
