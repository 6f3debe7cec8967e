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

from longrein.gateway.guides import Form, Schema, ToolChoice
from longrein.gateway.logprobs import Likely, Token
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
    form: Form | None = None
    """What the reply has to be, where the request says so: sampled under a guide."""
    logprobs: bool = False
    top_logprobs: int = 0
    """How many of the most probable tokens are wanted beside each sampled one."""
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
    tokens: Sequence[Token] = ()
    """The sampled ids as clients see them; filled when log-probabilities were asked for."""
    content_tokens: Sequence[Token] = ()
    """Those that the message's content is made of."""
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


#: Replies that one prompt may ask for, and a whole request; OpenAI takes 128 of a prompt.
MOST_CHOICES, MOST_REPLIES = 128, 1024
#: Every stop string is looked for at every token.
MOST_STOPS, LONGEST_STOP = 32, 256


def take_n(body: Json, prompts: int = 1) -> int:
    """How many replies each prompt gets."""
    n = take_positive(body, "n") or 1
    most = min(MOST_CHOICES, MOST_REPLIES // prompts)
    if n > most:
        raise DialectError(400, f"n: expected at most {most} for a request of {prompts} prompts, got {n}", param="n")
    return n


def take_stop(body: Json) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise DialectError(400, "stop: expected a string or a list of strings, none of them empty", param="stop")
    return bounded_stops(stops, "stop")


def bounded_stops(stops: Sequence[str], name: str) -> tuple[str, ...]:
    """Stop strings, if they are few and short enough."""
    if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        raise DialectError(
            400, f"{name}: expected at most {MOST_STOPS} strings of at most {LONGEST_STOP} characters", param=name
        )
    return tuple(stops)


MOST_TOP_LOGPROBS = 20


def take_top_logprobs(body: Json, name: str = "top_logprobs") -> int | None:
    """How many of the most probable tokens are wanted; None where nothing is said."""
    value = take(body, name, int, "an integer")
    if value is not None and not 0 <= value <= MOST_TOP_LOGPROBS:
        raise DialectError(400, f"{name}: expected an integer from 0 to {MOST_TOP_LOGPROBS}, got {value}", param=name)
    return value


def take_include_usage(body: Json) -> bool:
    """`stream_options.include_usage`; the API's other option pads events and says nothing."""
    options = take(body, "stream_options", dict, "an object", {})
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            where = f"stream_options.{name}"
            raise DialectError(400, f"{where}: unknown or unsupported option; leave it out", param=where)
    return take(options, "include_usage", bool, "a boolean", False)


def take_tool_choice(body: Json, named: Mapping[tuple[str, str], str]) -> ToolChoice:
    """OpenAI's `tool_choice`. `named` are the tools' names, by the type and the name that the client calls them."""
    choice = body.get("tool_choice")
    said = f"tool_choice: {choice!r}"
    match choice:
        case None | "auto":
            return ToolChoice("auto")
        case "none":
            return ToolChoice("none")
        case "required":
            return required(said, bool(named))
        case {"type": str(kind), "name": str(name)} | {"type": str(kind), "function": {"name": str(name)}}:
            return named_tool(said, named.get((kind, name)))
    raise DialectError(
        400,
        f"{said} is not served here; use 'auto', 'none', 'required' or one tool by its name",
        param="tool_choice",
        code="unsupported_parameter",
    )


def required(said: str, any_tool: bool) -> ToolChoice:
    """The choice of calling at least once."""
    if not any_tool:
        raise DialectError(400, f"{said} needs tools, and there are none", param="tool_choice")
    return ToolChoice("required", said)


def named_tool(said: str, name: str | None) -> ToolChoice:
    """The choice of calling one tool, by the name that the model knows it by."""
    if name is None:
        raise DialectError(400, f"{said} names no tool of the request", param="tool_choice")
    return ToolChoice("named", said, name)


def single_call(body: Json) -> str:
    """What allows one call at most, as an error names it; empty where nothing does."""
    return "" if take(body, "parallel_tool_calls", bool, "a boolean", True) else "parallel_tool_calls: False"


def take_format(value: Any, field: str, nested: bool) -> tuple[str, Schema] | None:
    """A response format: as an error names it, and its schema; None for text.

    `nested`: whether a schema and its options stand one level down, in `json_schema`.
    """
    if value is None or value == {"type": "text"}:
        return None
    value = value if isinstance(value, dict) else {}
    kind = value.get("type")
    said = f"{field}: {kind!r}"
    if kind == "json_object":
        return said, Schema({"type": "object"}, True, field)
    if kind != "json_schema":
        raise DialectError(
            400,
            f"{said} is not served here; use text, json_object or json_schema",
            param=field,
            code="unsupported_parameter",
        )
    where = f"{field}.json_schema" if nested else field
    described = value.get("json_schema") if nested else value
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise DialectError(400, f"{where}.schema: expected a JSON schema", param=f"{where}.schema")
    return said, Schema(described["schema"], described.get("strict") is True, f"{where}.schema")


def likely_json(token: Likely) -> Json:
    """A token in the shape that OpenAI's dialects share."""
    return {"token": token.text, "bytes": token.bytes, "logprob": token.logprob}


def token_json(token: Token) -> Json:
    """A sampled token in the shape that OpenAI's dialects share."""
    return {**likely_json(token), "top_logprobs": [likely_json(other) for other in token.top]}


_left_out: set[str] = set()
#: Kinds that are reported; a client could think up more without end.
_MOST_LEFT_OUT = 64


def leave_out(kind: str) -> None:
    """Report once that tools of a kind are left out: the API's own servers would run them, and there are none here."""
    if kind not in _left_out and len(_left_out) < _MOST_LEFT_OUT:
        _left_out.add(kind)
        log.warning("tools of type %.64r are left out: the API's own servers would run them", kind)


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
