"""What the dialects share: the request and the answer in one form, and errors in each dialect's own shape.

A dialect is a module that reads a request body into a `Request` (or raises `DialectError`), and writes a finished
`Answer` as a body or a stream of server-sent events.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from longrein.gateway.messages import Message
from longrein.gateway.parsing import Delta

Json = dict[str, Any]

log = logging.getLogger("longrein.gateway")


class DialectError(Exception):
    """A request that is answered with an error: its HTTP status, its words, the field, and the code clients know."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.type = status, message, param, code, type
        self.headers = dict(headers or {})

    def body(self) -> Json:
        """OpenAI's error shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class PromptTooLong(DialectError):
    """A prompt that does not fit into the model's context; each dialect has words for it that make clients compact."""

    def __init__(self, tokens: int, context: int, param: str):
        super().__init__(
            400,
            f"This model's maximum context length is {context} tokens. However, your messages resulted in {tokens} "
            f"tokens. Please reduce the length of the messages.",
            param=param,
            code="context_length_exceeded",
        )
        self.tokens, self.context = tokens, context


@dataclass(frozen=True)
class Sampling:
    max_tokens: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """A request of any dialect."""

    model: str
    messages: Sequence[Message]
    tools: Sequence[Json] = ()
    """As the template gets them: {"type": "function", "function": {…}}, in the order sent."""
    use_tools: bool = True
    """False (tool_choice = none): tools stand in the prompt, and nothing is read as a call."""
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    prompts: Sequence[str | Sequence[int]] | None = None
    """The completions dialect's prompts, instead of messages."""
    previous: str | None = None
    """The responses dialect's `previous_response_id`: the conversation that `messages` continue."""
    echo: Json = field(default_factory=dict, compare=False)
    """The body, for dialects whose answer repeats parts of it. A retry may differ in what only its client reads."""


@dataclass
class Choice:
    """One sampled answer, complete."""

    index: int
    message: Message
    text: str
    """All sampled text up to the stop, for the completions dialect."""
    finish_reason: str
    """stop, length or tool_calls."""
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float] | None
    pieces: list[str] = field(default_factory=list)
    """Text of each sampled id; filled when log-probabilities were asked for."""
    stopped: str | None = None
    """The stop string that ended it."""


@dataclass(frozen=True)
class Answer:
    id: str
    created: int
    model: str
    choices: Sequence[Choice]
    prompt_tokens: int
    """Of all prompts, each counted once however many answers it has."""
    cached_tokens: int
    """Prompt tokens that were sent before in this attempt."""

    def usage(self) -> Json:
        prompt = self.prompt_tokens
        sampled = sum(len(choice.sampled_ids) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Opened:
    """What is known of an answer before its first token."""

    id: str
    created: int
    prompt_tokens: int
    cached_tokens: int


class Writer(Protocol):
    """Writes one streamed answer as server-sent events."""

    def opening(self, index: int) -> list[bytes]: ...
    def delta(self, index: int, delta: Delta) -> list[bytes]: ...
    def closing(self, answer: Answer) -> list[bytes]: ...
    def error(self, error: DialectError) -> list[bytes]: ...
    def keep_alive(self) -> bytes: ...


@dataclass
class OpenAIWriter:
    """What the streams of Chat Completions and Completions share."""

    request: Request
    opened: Opened

    def error(self, error: DialectError) -> list[bytes]:
        """A failure after the headers have left."""
        return [event(error.body())]

    def keep_alive(self) -> bytes:
        """A comment."""
        return KEEP_ALIVE


class Dialect(Protocol):
    """What calls.py asks of a dialect's module."""

    name: str
    id_prefix: str

    def parse(self, body: Json) -> Request: ...
    def plain(self, request: Request, answer: Answer) -> Json: ...
    def writer(self, request: Request, opened: Opened) -> Writer: ...
    def error_body(self, error: DialectError) -> Json: ...


def event(value: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: Json) -> bytes:
    """One server-sent event with its type as its name."""
    return b"event: " + value["type"].encode() + b"\n" + event(value)


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


# Reading fields


def take(body: Json, name: str, kind: type | tuple[type, ...], what: str, default: Any = None) -> Any:
    """Field `name`, checked; null counts as absent."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) and kind is not bool and not (isinstance(kind, tuple) and bool in kind):
        raise DialectError(400, f"{name}: expected {what}, got a boolean", param=name)
    if not isinstance(value, kind):
        raise DialectError(400, f"{name}: expected {what}, got {type(value).__name__}", param=name)
    return value


def take_positive(body: Json, name: str) -> int | None:
    value = take(body, name, int, "a positive integer")
    if value is not None and value < 1:
        raise DialectError(400, f"{name}: expected a positive integer, got {value}", param=name)
    return value


def take_number(body: Json, name: str, low: float, high: float) -> float | None:
    value = take(body, name, (int, float), "a number")
    if value is not None and not low <= value <= high:
        raise DialectError(400, f"{name}: expected a number from {low} to {high}, got {value}", param=name)
    return value


def take_stop(body: Json) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise DialectError(400, "stop: expected a string or a list of strings, none of them empty", param="stop")
    return tuple(stops)


def uses_tools(body: Json) -> bool:
    """Whether OpenAI's `tool_choice` lets the model call tools; a choice that needs guided decoding is refused."""
    choice = body.get("tool_choice")
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    raise DialectError(
        400,
        f"tool_choice: {choice!r} needs guided decoding, which this engine does not have; use 'auto' or 'none'",
        param="tool_choice",
        code="unsupported_parameter",
    )


_left_out: set[str] = set()


def leave_out(kind: str) -> None:
    """Report once that tools of a kind are left out: the API's own servers would run them, and there are none here."""
    if kind not in _left_out:
        _left_out.add(kind)
        log.warning("tools of type %r are left out: the API's own servers would run them", kind)


def refuse_unknown(
    body: Json, honoured: frozenset[str], ignored: frozenset[str], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    """Every field is honoured, ignored without changing the outcome, neutral as it is, or refused by name."""
    for name, value in body.items():
        if name in honoured or name in ignored or value is None:
            continue
        if name in neutral:
            if value in neutral[name] and not (
                isinstance(value, bool) and True not in neutral[name] and False not in neutral[name]
            ):
                continue
            raise DialectError(
                400,
                f"{name}: {value!r} cannot be honoured here: the sampled tokens would be another distribution's than the "
                f"trained policy's, or the engine has no such feature; leave it out",
                param=name,
                code="unsupported_parameter",
            )
        raise DialectError(
            400, f"{name}: unknown or unsupported field; leave it out", param=name, code="unknown_parameter"
        )
