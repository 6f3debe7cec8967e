"""OpenAI Responses: items → messages, answer → output items or server-sent events.

The items that a model writes in one go (reasoning, text, calls) are one assistant turn, as its template has it. Tools of
a namespace get its name in front, custom tools one argument; calls are given back in the form the client knows. The
text of a reasoning item goes out as its summary and, where a client asks for `reasoning.encrypted_content`, as that too
(encoded, not encrypted): clients that keep nothing else still bring it back.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longrein.gateway.dialects import (
    Answer,
    Choice,
    DialectError,
    Opened,
    Request,
    Sampling,
    leave_out,
    named_event,
    refuse_unknown,
    single_call,
    take,
    take_format,
    take_number,
    take_positive,
    take_tool_choice,
    take_top_logprobs,
    token_json,
)
from longrein.gateway.guides import Tool, arguments_schema, form_of
from longrein.gateway.logprobs import Token, tokens_within
from longrein.gateway.messages import Message, ToolCall
from longrein.gateway.parsing import Delta

Json = dict[str, Any]

name = "responses"
id_prefix = "resp_"

HONOURED = frozenset(
    "model input instructions tools tool_choice parallel_tool_calls stream max_output_tokens top_p temperature "
    "previous_response_id include text top_logprobs".split()
)
#: Fields that do not change what is sampled here. Every answer can be continued by its id, whatever `store` says.
IGNORED = frozenset(
    "store metadata client_metadata user safety_identifier prompt_cache_key prompt_cache_retention service_tier reasoning "
    "stream_options".split()
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled",),
    "background": (False,),
    "context_management": ([],),
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ENCODED = "longrein:"
LOGPROBS = "message.output_text.logprobs"
#: Items of tools that OpenAI's servers run; there are none here, so nobody's model wrote them.
_HOSTED_CALLS = frozenset("web_search_call file_search_call code_interpreter_call image_generation_call".split())


def parse(body: Json) -> Request:
    """Read a request body; raises `DialectError` naming the field."""
    refuse_unknown(body, HONOURED, IGNORED, NEUTRAL)
    take_number(body, "temperature", 0, 2)  # checked; the run file's policy decides
    tools, names, callable = _tools(take(body, "tools", list, "a list of tools", []))
    flat = {spoken: name for name, spoken in names.items()}
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise DialectError(400, "input: expected text or a list of items, not empty", param="input")
    messages = _messages(items, flat)
    instructions = take(body, "instructions", str, "a string", "")
    if instructions:
        messages.insert(0, Message("system", instructions))
    text = take(body, "text", dict, "an object", {})
    for name in text:
        if name not in ("format", "verbosity"):
            raise DialectError(400, f"text.{name}: unknown or unsupported field; leave it out", param=f"text.{name}")
    include = take(body, "include", list, "a list of strings", [])
    unknown = [one for one in include if one not in ("reasoning.encrypted_content", LOGPROBS)]
    if unknown:
        raise DialectError(400, f"include: {unknown[0]!r} is not known here; leave it out", param="include")
    named = {(kind, flat if space else name): flat for flat, (kind, space, name) in names.items()}
    choice = take_tool_choice(body, named)
    top_logprobs = take_top_logprobs(body) or 0
    return Request(
        model=take(body, "model", str, "a string", ""),
        messages=messages,
        tools=tools,
        use_tools=choice.kind != "none",
        sampling=Sampling(
            max_tokens=take_positive(body, "max_output_tokens"), top_p=take_number(body, "top_p", 0, 1) or 1.0
        ),
        stream=take(body, "stream", bool, "a boolean", False),
        form=form_of(choice, single_call(body), callable, take_format(text.get("format"), "text.format", nested=False)),
        logprobs=LOGPROBS in include or top_logprobs > 0,
        top_logprobs=top_logprobs,
        previous=take(body, "previous_response_id", str, "an id"),
        echo={key: value for key, value in body.items() if key != "input"},
    )


def continued(request: Request, before: Sequence[Message]) -> Request:
    """The request with the conversation of its `previous_response_id` in front; instructions are each request's own."""
    own = list(request.messages)
    if request.echo.get("instructions"):
        first = own.pop(0)
        kept = before[1:] if before and before[0].role == "system" else before
        return replace(request, messages=[first, *kept, *own])
    return replace(request, messages=[*before, *own])


Spoken = tuple[str, str, str]
"""A tool as the client knows it: its item type (function or custom), its namespace and its name."""


def _tools(listed: Sequence[Any]) -> tuple[list[Json], dict[str, Spoken], list[Tool]]:
    """The tools as the template gets them, what the client calls each, and what may be called."""
    tools: list[Json] = []
    names: dict[str, Spoken] = {}
    callable: list[Tool] = []

    def add(tool: Any, where: str, namespace: str) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and not namespace:
            for i, one in enumerate(take(tool, "tools", list, "a list of tools", [])):
                add(one, f"{where}.tools[{i}]", str(tool.get("name", "")))
            return
        if kind not in ("function", "custom"):
            if not isinstance(kind, str):
                raise DialectError(400, f"{where}: expected an object with a type", param=where)
            leave_out(kind)
            return
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise DialectError(400, f"{where}.name: expected a name", param=where)
        name = f"{namespace}__{tool['name']}" if namespace else tool["name"]
        function: Json = {"name": name}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        if kind == "custom":
            function["parameters"] = {
                "type": "object",
                "properties": {"input": {"type": "string"}},
                "required": ["input"],
            }
        elif isinstance(tool.get("parameters"), dict):
            function["parameters"] = tool["parameters"]
        tools.append({"type": "function", "function": function})
        names[name] = (kind, namespace, tool["name"])
        arguments = arguments_schema(function.get("parameters"), tool.get("strict") is True, f"{where}.parameters")
        callable.append(Tool(name, arguments))

    for i, tool in enumerate(listed):
        add(tool, f"tools[{i}]", "")
    return tools, names, callable


# Items → messages


@dataclass
class _Turn:
    """An assistant turn that is being put together."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message("assistant", "".join(self.texts), "".join(self.reasoning), tuple(self.calls))


def _messages(items: Sequence[Any], flat: Mapping[Spoken, str]) -> list[Message]:
    messages: list[Message] = []
    turn: _Turn | None = None
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise DialectError(400, f"{where}: expected an object", param=where)
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            raise DialectError(400, f"{where}.type: expected a string, got {type(kind).__name__}", param=where)
        if kind in _HOSTED_CALLS:
            continue
        spoken = kind in ("reasoning", "function_call", "custom_tool_call") or (
            kind == "message" and item.get("role") == "assistant"
        )
        if turn is not None and (not spoken or _begins_a_turn(kind, turn)):
            messages.append(turn.message())
            turn = None
        if not spoken:
            messages.append(_other(item, kind, where))
            continue
        turn = turn or _Turn()
        if kind == "reasoning":
            turn.reasoning.append(_reasoning(item, where))
        elif kind == "message":
            turn.texts.append("".join(_parts(item.get("content"), f"{where}.content")))
        else:
            turn.calls.append(_call(item, kind, where, flat))
    return [*messages, turn.message()] if turn is not None else messages


def _begins_a_turn(kind: str, turn: _Turn) -> bool:
    """A model thinks, then speaks, then calls: what comes out of this order is the next turn's."""
    if kind == "reasoning":
        return bool(turn.texts or turn.calls)
    return kind == "message" and bool(turn.texts or turn.calls)


def _other(item: Json, kind: str, where: str) -> Message:
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise DialectError(400, f"{where}.role: expected one of {', '.join(ROLES)}, got {role!r}", param=where)
        return Message(ROLES[role], "\n".join(_parts(item.get("content"), f"{where}.content")))
    if kind in ("function_call_output", "custom_tool_call_output"):
        id = item.get("call_id")
        if not isinstance(id, str) or not id:
            raise DialectError(400, f"{where}.call_id: an output names the call it answers", param=where)
        return Message("tool", "\n".join(_parts(item.get("output"), f"{where}.output")), tool_call_id=id)
    raise DialectError(400, f"{where}.type: {kind!r} items are not served here", param=where)


def _parts(content: Any, where: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise DialectError(400, f"{where}: expected a string or a list of parts", param=where)
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(text, str):
            raise DialectError(
                400, f"{where}[{i}]: {kind!r} content is not served by this model; send text", param=where
            )
        texts.append(text)
    return texts


def _call(item: Json, kind: str, where: str, flat: Mapping[Spoken, str]) -> ToolCall:
    id, name = item.get("call_id"), item.get("name")
    if not isinstance(id, str) or not isinstance(name, str):
        raise DialectError(400, f"{where}: expected a call_id and a name", param=where)
    namespace = item.get("namespace") or ""
    if not isinstance(namespace, str):
        raise DialectError(400, f"{where}.namespace: expected a string", param=where)
    spoken = ("custom" if kind == "custom_tool_call" else "function", namespace, name)
    name = flat.get(spoken, f"{namespace}__{name}" if namespace else name)
    if kind == "custom_tool_call":
        return ToolCall(id, name, json.dumps({"input": str(item.get("input", ""))}, ensure_ascii=False))
    arguments = item.get("arguments", "")
    if not isinstance(arguments, str):
        raise DialectError(400, f"{where}.arguments: expected a JSON string", param=where)
    return ToolCall(id, name, arguments)


def _reasoning(item: Json, where: str) -> str:
    encoded = item.get("encrypted_content")
    if isinstance(encoded, str) and encoded.startswith(ENCODED):
        try:
            return base64.b64decode(encoded[len(ENCODED) :], validate=True).decode()
        except ValueError:  # of what base64 and UTF-8 are not
            raise DialectError(400, f"{where}.encrypted_content: was not written here", param=where) from None
    for name in ("content", "summary"):
        parts = item.get(name)
        texts = [part["text"] for part in parts if _has_text(part)] if isinstance(parts, list) else []
        if texts:
            return "".join(texts)
    return ""


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


# Answers


error_body = DialectError.body


def _item_id(answer_id: str, kind: str, index: int) -> str:
    return f"{kind}_{answer_id.removeprefix(id_prefix)}{index}"


def _items(request: Request, answer_id: str, message: Message, tokens: Sequence[Token]) -> list[Json]:
    """The output items of a finished reply."""
    items: list[Json] = []
    if message.reasoning:
        items.append(_reasoning_item(request, _item_id(answer_id, "rs", 0), message.reasoning))
    if message.content or not message.tool_calls:
        items.append(_message_item(_item_id(answer_id, "msg", len(items)), message.content, tokens))
    names = _tools(request.echo.get("tools") or [])[1]
    for call in message.tool_calls:
        items.append(_call_item(names, _item_id(answer_id, "fc", len(items)), call))
    return items


def _reasoning_item(request: Request, id: str, text: str) -> Json:
    item: Json = {"type": "reasoning", "id": id, "summary": [{"type": "summary_text", "text": text}]}
    if "reasoning.encrypted_content" in (request.echo.get("include") or ()):
        item["encrypted_content"] = ENCODED + base64.b64encode(text.encode()).decode()
    return item


def _message_item(id: str, text: str, tokens: Sequence[Token] = ()) -> Json:
    logprobs = [token_json(token) for token in tokens]
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": "message", "id": id, "role": "assistant", "status": "completed", "content": [part]}


def _call_item(names: Mapping[str, Spoken], id: str, call: ToolCall) -> Json:
    kind, namespace, name = names.get(call.name, ("function", "", call.name))
    item: Json = {"type": "function_call", "id": id, "call_id": call.id, "name": name, "status": "completed"}
    if namespace:
        item["namespace"] = namespace
    if kind == "custom":
        try:
            value = json.loads(call.arguments)["input"]
        except (ValueError, KeyError, TypeError):
            value = call.arguments
        return {**item, "type": "custom_tool_call", "input": value if isinstance(value, str) else json.dumps(value)}
    return {**item, "arguments": call.arguments}


def _response(request: Request, id: str, created: int, status: str) -> Json:
    """A response object without its output."""
    echo = request.echo
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": echo.get("instructions"),
        "max_output_tokens": echo.get("max_output_tokens"),
        "metadata": echo.get("metadata") or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": echo.get("parallel_tool_calls") is not False,
        "previous_response_id": request.previous,
        "reasoning": echo.get("reasoning") or {"effort": None, "summary": None},
        "store": bool(echo.get("store", True)),
        "temperature": echo.get("temperature"),
        "text": {"format": {"type": "text"}} | (echo.get("text") or {}),
        "tool_choice": echo.get("tool_choice") or "auto",
        "tools": echo.get("tools") or [],
        "top_logprobs": request.top_logprobs,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _finished(request: Request, answer: Answer, choice: Choice, output: list[Json]) -> Json:
    cut = choice.finish_reason == "length"
    sampled = len(choice.sampled_ids)
    body = _response(request, answer.id, answer.created, "incomplete" if cut else "completed")
    body["output"] = output
    body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    body["usage"] = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + sampled,
    }
    return body


def plain(request: Request, answer: Answer) -> Json:
    """The body of an answer that is not streamed."""
    (choice,) = answer.choices
    return _finished(request, answer, choice, _items(request, answer.id, choice.message, choice.content_tokens))


def writer(request: Request, opened: Opened) -> ResponsesWriter:
    """The stream of one request."""
    return ResponsesWriter(request, opened)


@dataclass
class ResponsesWriter:
    """Items one after the other, each begun by the first piece of its kind; every event has the next number."""

    request: Request
    opened: Opened
    _number: int = 0
    _output: list[Json] = field(default_factory=list)
    _kind: str = ""
    """Of the item that is open: reasoning, message or call."""
    _text: list[str] = field(default_factory=list)
    _call: ToolCall | None = None
    _tokens: list[Token] = field(default_factory=list)
    """Of the message that is open, where log-probabilities were asked for."""
    _names: Mapping[str, Spoken] = field(default_factory=dict)

    def opening(self, index: int) -> list[bytes]:
        """The response without output; nothing if a keep-alive has begun it."""
        if self._number:
            return []
        self._names = _tools(self.request.echo.get("tools") or [])[1]
        begun = _response(self.request, self.opened.id, self.opened.created, "in_progress")
        return [self._event("created", response=begun), self._event("in_progress", response=begun)]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        """The events of a piece."""
        events: list[bytes] = []
        if delta.reasoning:
            events += self._begin("reasoning")
            events.append(self._in_item("reasoning_summary_text.delta", summary_index=0, delta=delta.reasoning))
            self._text.append(delta.reasoning)
        if delta.content:
            events += self._begin("message")
            tokens = tokens_within(delta.tokens, delta.content)
            logprobs = [token_json(token) for token in tokens]
            events.append(self._in_item("output_text.delta", content_index=0, delta=delta.content, logprobs=logprobs))
            self._text.append(delta.content)
            self._tokens.extend(tokens)
        if delta.tool_call is not None:
            events += self._begin_call(delta.tool_call)
        if delta.arguments:
            events += self._more_arguments(delta.arguments)
        return events

    def closing(self, answer: Answer) -> list[bytes]:
        """The end of the last item, the whole response."""
        (choice,) = answer.choices
        events = self._end()
        if not self._output:
            events += [*self._begin("message"), *self._end()]
        finished = _finished(self.request, answer, choice, self._output)
        return [*events, self._event(finished["status"], response=finished)]

    def error(self, error: DialectError) -> list[bytes]:
        """A failure after the headers have left."""
        begun = self.opening(0)
        failed = _response(self.request, self.opened.id, self.opened.created, "failed")
        failed["error"] = {"code": error.code or "server_error", "message": error.message}
        return [*begun, self._event("failed", response=failed)]

    def keep_alive(self) -> bytes:
        """An event of the protocol: clients that time a stream out count comments as silence.

        While the request still waits, the first one begins the response: clients want `created` before all others.
        """
        if not self._number:
            return b"".join(self.opening(0))
        begun = _response(self.request, self.opened.id, self.opened.created, "in_progress")
        return self._event("in_progress", response=begun)

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(value)

    def _in_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._id(), output_index=len(self._output), **fields)

    def _id(self) -> str:
        prefix = {"reasoning": "rs", "message": "msg"}.get(self._kind, "fc")
        return _item_id(self.opened.id, prefix, len(self._output))

    def _begin(self, kind: str) -> list[bytes]:
        if self._kind == kind:
            return []
        events = self._end()
        self._kind, self._text, self._tokens = kind, [], []
        if kind == "reasoning":
            item: Json = {"type": "reasoning", "id": self._id(), "summary": []}
            part: Json = {"type": "summary_text", "text": ""}
            return [
                *events,
                self._event("output_item.added", output_index=len(self._output), item=item),
                self._in_item("reasoning_summary_part.added", summary_index=0, part=part),
            ]
        item = {**_message_item(self._id(), ""), "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            *events,
            self._event("output_item.added", output_index=len(self._output), item=item),
            self._in_item("content_part.added", content_index=0, part=part),
        ]

    def _end(self) -> list[bytes]:
        if not self._kind:
            return []
        text = "".join(self._text)
        if self._kind == "call":
            return self._end_call(text)
        if self._kind == "reasoning":
            item = _reasoning_item(self.request, self._id(), text)
            events = [
                self._in_item("reasoning_summary_text.done", summary_index=0, text=text),
                self._in_item("reasoning_summary_part.done", summary_index=0, part=item["summary"][0]),
            ]
        else:
            item = _message_item(self._id(), text, self._tokens)
            part = item["content"][0]
            events = [
                self._in_item("output_text.done", content_index=0, text=text, logprobs=part["logprobs"]),
                self._in_item("content_part.done", content_index=0, part=part),
            ]
        events.append(self._event("output_item.done", output_index=len(self._output), item=item))
        self._output.append(item)
        self._kind = ""
        return events

    def _begin_call(self, call: ToolCall) -> list[bytes]:
        events = self._end()
        self._kind, self._text, self._call = "call", [], call
        item = _call_item(self._names, self._id(), replace(call, arguments=""))
        begun = {**item, "status": "in_progress"}
        events.append(self._event("output_item.added", output_index=len(self._output), item=begun))
        return [*events, *self._more_arguments(call.arguments)]

    def _more_arguments(self, arguments: str) -> list[bytes]:
        self._text.append(arguments)
        # A custom tool's input stands inside the arguments; it is known once they are whole.
        if not arguments or self._custom():
            return []
        return [self._in_item("function_call_arguments.delta", delta=arguments)]

    def _custom(self) -> bool:
        assert self._call is not None
        return self._names.get(self._call.name, ("function",))[0] == "custom"

    def _end_call(self, arguments: str) -> list[bytes]:
        assert self._call is not None
        item = _call_item(self._names, self._id(), replace(self._call, arguments=arguments))
        if self._custom():
            events = [
                self._in_item("custom_tool_call_input.delta", delta=item["input"]),
                self._in_item("custom_tool_call_input.done", input=item["input"]),
            ]
        else:
            events = [self._in_item("function_call_arguments.done", arguments=item["arguments"], name=item["name"])]
        events.append(self._event("output_item.done", output_index=len(self._output), item=item))
        self._output.append(item)
        self._kind = ""
        return events
