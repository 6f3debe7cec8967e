"""OpenAI Completions: prompts as text or token ids → text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from longrein.gateway.dialects import (
    DONE,
    MOST_REPLIES,
    Answer,
    Choice,
    DialectError,
    OpenAIWriter,
    Opened,
    Request,
    Sampling,
    event,
    refuse_unknown,
    take,
    take_include_usage,
    take_n,
    take_number,
    take_positive,
    take_stop,
    take_top_logprobs,
)
from longrein.gateway.logprobs import Token
from longrein.gateway.parsing import Delta

Json = dict[str, Any]

name = "completions"
id_prefix = "cmpl-"

HONOURED = frozenset(
    "model prompt stream stream_options max_tokens top_p top_k stop n logprobs return_token_ids temperature".split()
)
IGNORED = frozenset("user metadata seed".split())
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}


def parse(body: Json) -> Request:
    """Read a request body; raises `DialectError` naming the field."""
    refuse_unknown(body, HONOURED, IGNORED, NEUTRAL)
    take_number(body, "temperature", 0, 2)
    wanted = take_top_logprobs(body, "logprobs")
    prompts = _prompts(body.get("prompt"))
    return Request(
        model=take(body, "model", str, "a string", ""),
        messages=(),
        prompts=prompts,
        sampling=Sampling(
            max_tokens=take_positive(body, "max_tokens") or 16,  # the API's own default
            top_p=take_number(body, "top_p", 0, 1) or 1.0,
            top_k=max(0, take(body, "top_k", int, "an integer", 0)),
            stop=take_stop(body),
        ),
        n=take_n(body, len(prompts)),
        stream=take(body, "stream", bool, "a boolean", False),
        include_usage=take_include_usage(body),
        logprobs=wanted is not None,
        top_logprobs=wanted or 0,
        return_token_ids=take(body, "return_token_ids", bool, "a boolean", False),
    )


def _prompts(value: Any) -> list[str | list[int]]:
    """One text, one list of token ids, or a list of either."""
    listed = value if isinstance(value, list) and value and not _are_ids(value) else [value]
    if not all((isinstance(one, str) and one) or _are_ids(one) for one in listed):
        raise DialectError(
            400, "prompt: expected a text, a list of token ids, or a list of either, none of them empty", param="prompt"
        )
    if len(listed) > MOST_REPLIES:
        raise DialectError(400, f"prompt: expected at most {MOST_REPLIES} prompts, got {len(listed)}", param="prompt")
    return listed


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(id) is int and id >= 0 for id in value)


def _body(request: Request, id: str, created: int, choices: list[Json], usage: Json | None) -> Json:
    body: Json = {"id": id, "object": "text_completion", "created": created, "model": request.model, "choices": choices}
    if usage is not None or request.include_usage:
        body["usage"] = usage
    return body


def plain(request: Request, answer: Answer) -> Json:
    """The body of an answer that is not streamed."""
    choices = [_choice(request, choice, choice.text, choice.tokens, 0) for choice in answer.choices]
    return _body(request, answer.id, answer.created, choices, answer.usage())


def _choice(request: Request, choice: Choice, text: str, tokens: Sequence[Token], offset: int) -> Json:
    logprobs = _logprobs(request, tokens, offset) if tokens else None
    out: Json = {"index": choice.index, "text": text, "finish_reason": choice.finish_reason, "logprobs": logprobs}
    if request.return_token_ids:
        out["prompt_token_ids"], out["token_ids"] = choice.prompt_ids, choice.sampled_ids
    return out


def _logprobs(request: Request, tokens: Sequence[Token], offset: int) -> Json:
    """`offset`: characters of the answer before the first of `tokens`."""
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    top = [{one.text: one.logprob for one in (*token.top, token)} for token in tokens]
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": top if request.top_logprobs else None,
        "text_offset": offsets,
    }


error_body = DialectError.body


def writer(request: Request, opened: Opened) -> CompletionsWriter:
    """The stream of one request; its choices are told apart by their index."""
    return CompletionsWriter(request, opened)


@dataclass
class CompletionsWriter(OpenAIWriter):
    """Pieces of text, as they come."""

    _told: Counter[int] = field(default_factory=Counter)
    """Tokens of each choice whose log-probabilities have been sent."""
    _offset: Counter[int] = field(default_factory=Counter)
    """Characters of those."""

    def opening(self, index: int) -> list[bytes]:
        """Completions have no opening event."""
        return []

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        """The event of a piece of text."""
        logprobs = _logprobs(self.request, delta.tokens, self._offset[index]) if delta.tokens else None
        self._told[index] += len(delta.tokens)
        self._offset[index] += sum(len(token.text) for token in delta.tokens)
        return [self._event({"index": index, "text": delta.content, "finish_reason": None, "logprobs": logprobs})]

    def closing(self, answer: Answer) -> list[bytes]:
        """The last events: finish reasons, usage where it was asked for, the end."""
        events: list[bytes] = []
        for choice in answer.choices:
            untold = choice.tokens[self._told[choice.index] :]
            last = _choice(self.request, choice, "", untold, self._offset[choice.index])
            events.append(self._event(last))
        if self.request.include_usage:
            events.append(event(_body(self.request, answer.id, answer.created, [], answer.usage())))
        return [*events, DONE]

    def _event(self, choice: Json) -> bytes:
        return event(_body(self.request, self.opened.id, self.opened.created, [choice], None))
