"""Sampled text → reasoning, content and tool calls, while it streams.

`HermesParser` reads the ChatML family: `<think>…</think>`, then text, then `<tool_call>{"name": …, "arguments": …}`
blocks. Other families are read by the `renderers` package's parsers. What is malformed is never repaired: it is given
to the harness as it was sampled, as text, or as arguments where a stream has begun to give them.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from longrein.config import ConfigError
from longrein.gateway.families import recognise
from longrein.gateway.logprobs import Token
from longrein.gateway.messages import Message, ToolCall
from longrein.gateway.tokens import TextModel

Json = dict[str, Any]

log = logging.getLogger("longrein.gateway")


@dataclass(frozen=True)
class Delta:
    """What a chunk of sampled text adds to the reply."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None
    """A call that begins, with its arguments as far as they are there."""
    arguments: str = ""
    """More of the arguments of the call that began last."""
    tokens: tuple[Token, ...] = ()
    """The tokens sampled since the piece before, for clients that ask for log-probabilities."""


class ReplyParser(Protocol):
    """Reads one reply. `push` gets the new ids and their text, control tokens at the very end left out."""

    def push(self, ids: Sequence[int], text: str) -> list[Delta]: ...
    def finish(self) -> list[Delta]: ...


@dataclass
class ParserOptions:
    """What a reply's parser has to know of its request."""

    prompt_tail: str
    """The end of the prompt's text: a template may have opened the reasoning already."""
    prompt_ids: Sequence[int]
    tools: Sequence[Json]
    """Empty: nothing is read as a tool call."""
    call_id: Callable[[int], str]
    """Mints the id of the reply's n-th tool call."""
    stream: bool = False
    """Whether arguments are wanted as they come. What then turns out to be no JSON stands as the call's arguments, as
    it was sampled; otherwise a call that is malformed is text."""


THINK, THINK_END, CALL, CALL_END = "<think>", "</think>", "<tool_call>", "</tool_call>"

_STRING = r'"(?:[^"\\\x00-\x1f]|\\.)*"'
#: A call up to the object that its arguments are: behind this it cannot be anything else.
_CALL_HEAD = re.compile(rf'\s*\{{\s*(?:"(?:name|id)"\s*:\s*{_STRING}\s*,\s*)+"arguments"\s*:\s*(?=\{{)')


@dataclass
class ObjectEnd:
    """Finds the end of a JSON object that comes in pieces."""

    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False

    def push(self, text: str) -> int | None:
        """Where in `text` the object is closed (behind its brace), or None."""
        for i, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None


@dataclass
class HermesParser:
    """The ChatML family, incrementally: emits what can no longer turn out to be something else."""

    options: ParserOptions
    _pending: str = ""
    _state: str = "start"  # start, reasoning, content, call, arguments, tail, after
    _head: str = ""  # of the call whose arguments are read
    _object: ObjectEnd = field(default_factory=ObjectEnd)
    _arguments: list[str] = field(default_factory=list)
    _calls: int = 0
    _spoke: bool = False  # content has been emitted

    def __post_init__(self) -> None:
        if self.options.prompt_tail.rstrip().endswith(THINK):
            self._state = "reasoning"

    def push(self, ids: Sequence[int], text: str) -> list[Delta]:
        self._pending += text
        return self._read(final=False)

    def finish(self) -> list[Delta]:
        return self._read(final=True)

    def _read(self, final: bool) -> list[Delta]:
        out: list[Delta] = []
        while True:
            before = (self._state, len(self._pending))
            getattr(self, "_in_" + self._state)(out, final)
            if (self._state, len(self._pending)) == before:
                return out

    def _in_start(self, out: list[Delta], final: bool) -> None:
        text = self._pending.lstrip()
        if text.startswith(THINK):
            self._pending = text[len(THINK) :]
            self._state = "reasoning"
        elif final or not THINK.startswith(text):
            self._state = "content"

    def _in_reasoning(self, out: list[Delta], final: bool) -> None:
        reasoning, found, rest = self._pending.partition(THINK_END)
        if found:
            self._emit(out, reasoning=reasoning)
            self._pending, self._state = rest, "content"
            return
        hold = 0 if final else _overlap(self._pending, THINK_END)
        ready = self._pending[: len(self._pending) - hold]
        self._emit(out, reasoning=ready)
        self._pending = self._pending[len(ready) :]

    def _in_content(self, out: list[Delta], final: bool) -> None:
        if not self.options.tools:
            self._emit(out, content=self._pending)
            self._pending = ""
            return
        content, found, _ = self._pending.partition(CALL)
        if found:
            # One line break before a call is the template's, not the content's.
            self._emit(out, content=content.removesuffix("\n") if self._spoke or content.strip() else "")
            self._pending, self._state = self._pending[len(content) :], "call"
            return
        hold = 0 if final else max(_overlap(self._pending, CALL), _trailing_space(self._pending))
        ready = self._pending[: len(self._pending) - hold]
        self._emit(out, content=ready)
        self._pending = self._pending[len(ready) :]

    def _in_call(self, out: list[Delta], final: bool) -> None:
        if self.options.stream and (head := self._begun_call()) is not None:
            call, self._head = head
            out.append(Delta(tool_call=call))
            self._calls += 1
            self._pending = self._pending[len(CALL) + len(self._head) :]
            self._state, self._object, self._arguments = "arguments", ObjectEnd(), []
            return
        body, found, rest = self._pending[len(CALL) :].partition(CALL_END)
        if not found and not final:
            return
        call = _read_call(body, self.options.call_id(self._calls)) if found else None
        if call is None:
            self._emit(out, content=CALL + body + (CALL_END if found else ""))
            self._pending, self._state = rest, "content"
        else:
            out.append(Delta(tool_call=call))
            self._calls += 1
            self._pending, self._state = rest, "after"

    def _begun_call(self) -> tuple[ToolCall, str] | None:
        """(the call without arguments, the text before them) once its arguments begin."""
        found = _CALL_HEAD.match(self._pending, len(CALL))
        if found is None:
            return None
        try:
            known = json.loads(found.group() + "{}}")
        except ValueError:  # a string with an escape that JSON does not have
            return None
        name, id = known.get("name"), known.get("id")
        if not name:
            return None
        return ToolCall(id or self.options.call_id(self._calls), name, ""), found.group()

    def _in_arguments(self, out: list[Delta], final: bool) -> None:
        """The object goes out as it comes, to its closing brace; the closing tag ends it wherever it stands."""
        cut = self._pending.find(CALL_END)
        hold = 0 if final or cut >= 0 else _overlap(self._pending, CALL_END)
        ready = self._pending[:cut] if cut >= 0 else self._pending[: len(self._pending) - hold]
        end = self._object.push(ready)
        piece = ready if end is None else ready[:end]
        if piece:
            self._arguments.append(piece)
            out.append(Delta(arguments=piece))
        self._pending = self._pending[len(piece) :]
        if end is not None:
            self._state = "tail"
        elif cut >= 0:
            self._pending, self._state = self._pending[len(CALL_END) :], "after"

    def _in_tail(self, out: list[Delta], final: bool) -> None:
        """Between the arguments and the closing tag."""
        tail, found, rest = self._pending.partition(CALL_END)
        if not found and not final:
            return
        arguments = "".join(self._arguments)
        if found and _is_json(arguments) and not _is_json(self._head + arguments + tail):
            out.append(Delta(arguments=tail))  # the call as a whole is malformed: its arguments may not seem good
        self._pending, self._state = rest, "after"

    def _in_after(self, out: list[Delta], final: bool) -> None:
        """Between calls: white space is the template's; anything else is content again."""
        stripped = self._pending.lstrip()
        if stripped.startswith(CALL):
            self._pending, self._state = stripped, "call"
        elif final and not stripped:
            self._pending = ""
        elif final or not CALL.startswith(stripped):
            self._state = "content"

    def _emit(self, out: list[Delta], content: str = "", reasoning: str = "") -> None:
        self._spoke = self._spoke or bool(content)
        if content or reasoning:
            out.append(Delta(content=content, reasoning=reasoning))


@dataclass
class PlainParser:
    """Everything is content (model.parser = none, and the completions dialect)."""

    def push(self, ids: Sequence[int], text: str) -> list[Delta]:
        return [Delta(content=text)] if text else []

    def finish(self) -> list[Delta]:
        return []


def make_parser(name: str, model: TextModel, model_path: str) -> Callable[[ParserOptions], ReplyParser]:
    """The parser that model.parser names. `auto`: the family that `renderers` knows the model by its hub name, else the
    one whose tool calls the chat template writes, else Hermes.

    Raises `ConfigError` for a family that does not exist, with the known ones, or that does not fit the tokenizer.
    """
    return _named_parser(parser_name(model, model_path) if name == "auto" else name, model, model_path)


def parser_name(model: TextModel, model_path: str) -> str:
    """What `auto` stands for. Says in the log when nothing is recognised."""
    names = recognise(model.source)
    if not Path(model_path).exists():
        from renderers.base import MODEL_RENDERER_MAP

        family = MODEL_RENDERER_MAP.get(model_path)
        # Qwen 3 speaks Hermes, which our own parser reads while it streams.
        if family is not None and family != "default":
            names = ("hermes",) if family == "qwen3" else (family, *names)
    refused: list[str] = []
    for name in names:
        try:
            _named_parser(name, model, model_path)
        except ConfigError as error:
            refused.append(str(error))
        else:
            return name
    log.warning(
        "model.parser: no parser is recognised for %s (%s); its replies are read as hermes: name one if that is wrong",
        model_path,
        refused[0] if refused else "its chat template writes no known form of tool call",
    )
    return "hermes"


def _named_parser(name: str, model: TextModel, model_path: str) -> Callable[[ParserOptions], ReplyParser]:
    if name == "none":
        return lambda options: PlainParser()
    if name == "hermes":
        return HermesParser
    if name == "mistral":
        from longrein.gateway.mistral import MistralParser

        return MistralParser
    from longrein.gateway.renderer import renderer_parser

    return renderer_parser(name, model, model_path)


def read_json(text: str) -> Any:
    """What strict JSON stands for. Raises `ValueError` for what a harness or a template could not read again: NaN,
    half a surrogate pair, objects nested too deep."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _read_call(body: str, call_id: str) -> ToolCall | None:
    """A call's JSON, its arguments as the very text the model wrote; None when it is not a call."""
    try:
        value = read_json(body)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", {})
    id = value["id"] if isinstance(value.get("id"), str) and value["id"] else call_id
    if isinstance(arguments, str):
        return ToolCall(id, value["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(id, value["name"], _raw_value(body, "arguments") or "{}")


def _raw_value(body: str, key: str) -> str | None:
    """The text of a top-level value of a JSON object that is known to be valid; the last one of equal keys."""
    decoder = json.JSONDecoder()
    found = None
    at = body.index("{") + 1
    while True:
        at = _skip(body, at)
        if body[at] == "}":
            return found
        name, at = decoder.raw_decode(body, at)
        at = _skip(body, _skip(body, at) + 1)  # the colon
        _, end = decoder.raw_decode(body, at)
        if name == key:
            found = body[at:end]
        at = _skip(body, end)
        if body[at] == ",":
            at += 1


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that could begin `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def _trailing_space(text: str) -> int:
    """Length of trailing white space together with a possible start of a call behind it."""
    overlap = _overlap(text, CALL)
    body = text[: len(text) - overlap]
    return len(text) - len(body.rstrip())


def message_of(deltas: Sequence[Delta]) -> Message:
    """The assistant message that a whole reply's deltas make."""
    calls: list[ToolCall] = []
    pieces: list[list[str]] = []
    for delta in deltas:
        if delta.tool_call is not None:
            calls.append(delta.tool_call)
            pieces.append([delta.tool_call.arguments])
        if delta.arguments:
            pieces[-1].append(delta.arguments)
    return Message(
        role="assistant",
        content="".join(d.content for d in deltas),
        reasoning="".join(d.reasoning for d in deltas),
        tool_calls=tuple(replace(call, arguments="".join(parts)) for call, parts in zip(calls, pieces, strict=True)),
    )


@dataclass
class StopStrings:
    """Cuts text at the stop string that is complete first; text that could still begin one is held back."""

    stops: Sequence[str]
    stopped: str | None = None
    _held: str = ""

    def push(self, text: str, final: bool = False) -> str:
        """Text that may be given on. After a match `stopped` names it and nothing more comes."""
        if not self.stops:
            return text
        if self.stopped is not None:
            return ""
        self._held += text
        # The one that was complete first: there the reply ends, however the text came in pieces.
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            out, self._held = self._held[:at], ""
            return out
        hold = 0 if final else max((_overlap(self._held, stop) for stop in self.stops), default=0)
        out = self._held[: len(self._held) - hold]
        self._held = self._held[len(out) :]
        return out
