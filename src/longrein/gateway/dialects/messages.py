"""Anthropic Messages: request → messages, answer → JSON or server-sent events.

Tool results stand in the order of the calls they answer, whatever order a client sends them in: Claude Code sends them
as they finish. Tools that are deferred (`defer_loading`) are shown where a tool result refers to them, not before.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longrein.gateway.dialects import (
    Answer,
    Choice,
    DialectError,
    Opened,
    PromptTooLong,
    Request,
    Sampling,
    bounded_stops,
    leave_out,
    named_event,
    named_tool,
    refuse_unknown,
    required,
    take,
    take_number,
    take_positive,
)
from longrein.gateway.guides import Schema, Tool, ToolChoice, arguments_schema, form_of
from longrein.gateway.messages import Message, ToolCall
from longrein.gateway.parsing import Delta

Json = dict[str, Any]

name = "messages"
id_prefix = "msg_"

HONOURED = frozenset(
    "model messages system tools tool_choice max_tokens stream stop_sequences top_p top_k temperature output_config".split()
)
#: Fields that do not change what is sampled here: whether a model thinks is its template's and its own affair.
IGNORED = frozenset("metadata thinking context_management service_tier cache_control betas".split())
NEUTRAL: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": ()}

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


def parse(body: Json) -> Request:
    """Read a request body; raises `DialectError` naming the field."""
    refuse_unknown(body, HONOURED, IGNORED, NEUTRAL)
    listed = take(body, "messages", list, "a list of messages")
    if not listed:
        raise DialectError(400, "messages: expected a list with at least one message", param="messages")
    take_number(body, "temperature", 0, 1)  # checked; the run file's policy decides
    listed_tools = take(body, "tools", list, "a list of tools", [])
    given = [_tool(tool, i) for i, tool in enumerate(listed_tools)]
    tools = [tool for tool in given if tool is not None]
    # A deferred tool is called like any other: where its text stands is the prompt's affair.
    callable = [
        Tool(
            tool["name"],
            arguments_schema(tool["input_schema"], tool.get("strict") is True, f"tools.{i}.input_schema"),
        )
        for i, tool in enumerate(listed_tools)
        if given[i] is not None
    ]
    choice, single = _tool_choice(body, {tool.name: tool.name for tool in callable})
    deferred = {tool["function"]["name"]: tool for tool, late in tools if late}
    messages: list[Message] = []
    system = _system(body.get("system"))
    if system:
        messages.append(Message("system", system))
    for i, message in enumerate(listed):
        messages.extend(_messages(message, i, messages, deferred))
    if messages[-1].role == "assistant":
        raise DialectError(
            400,
            "messages: the last one is the assistant's; this model does not continue a reply that was begun for it",
            param="messages",
        )
    return Request(
        model=take(body, "model", str, "a string", ""),
        messages=messages,
        tools=[tool for tool, late in tools if not late],
        use_tools=choice.kind != "none",
        sampling=Sampling(
            max_tokens=take_positive(body, "max_tokens"),
            top_p=take_number(body, "top_p", 0, 1) or 1.0,
            top_k=max(0, take(body, "top_k", int, "an integer", 0)),
            stop=_stop(body),
        ),
        stream=take(body, "stream", bool, "a boolean", False),
        form=form_of(choice, single, callable, _format(body)),
    )


def _stop(body: Json) -> tuple[str, ...]:
    stops = take(body, "stop_sequences", list, "a list of strings", [])
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise DialectError(400, "stop_sequences: expected strings, none of them empty", param="stop_sequences")
    return bounded_stops(stops, "stop_sequences")


def _tool_choice(body: Json, names: Mapping[str, str]) -> tuple[ToolChoice, str]:
    """The choice, and what allows one call at most as an error names it (empty: nothing)."""
    choice = take(body, "tool_choice", dict, "an object", {})
    one = take(choice, "disable_parallel_tool_use", bool, "a boolean", False)
    single = "tool_choice.disable_parallel_tool_use: True" if one else ""
    kind = choice.get("type", "auto")
    said = f"tool_choice.type: {kind!r}"
    if kind == "any":
        return required(said, bool(names)), single
    if kind == "tool":
        return named_tool(f"tool_choice.name: {choice.get('name')!r}", names.get(str(choice.get("name")))), single
    if kind not in ("auto", "none"):
        raise DialectError(400, f"{said}: expected auto, any, tool or none", param="tool_choice")
    return ToolChoice(kind), single


def _format(body: Json) -> tuple[str, Schema] | None:
    """The reply's schema, behind the words that an error names its field by."""
    wanted = take(take(body, "output_config", dict, "an object", {}), "format", dict, "an object")
    if wanted is None:
        return None
    said = f"output_config.format: {wanted.get('type')!r}"
    if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise DialectError(400, f"{said}: expected type json_schema and a schema", param="output_config.format")
    return said, Schema(wanted["schema"], True, "output_config.format.schema")


def _tool(tool: Any, index: int) -> tuple[Json, bool] | None:
    """(as the template gets it, whether it is deferred); None for a tool that Anthropic's servers would run."""
    where = f"tools.{index}"
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise DialectError(400, f"{where}.name: expected an object with a name", param=where)
    if tool.get("type") not in (None, "custom"):
        leave_out(str(tool["type"]))
        return None
    if not isinstance(tool.get("input_schema"), dict):
        raise DialectError(400, f"{where}.input_schema: expected a JSON schema", param=where)
    function: Json = {"name": tool["name"]}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}, bool(tool.get("defer_loading"))


def _system(value: Any) -> str:
    # A billing line differs between an agent and its sub-agents and says nothing to a model.
    texts = _texts(value, "system")
    return "\n".join(text for text in texts if not text.startswith("x-anthropic-billing-header:"))


def _texts(value: Any, where: str) -> list[str]:
    """The texts of a string or of a list of text blocks."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise DialectError(400, f"{where}: expected a string or a list of blocks", param=where)
    return [_text(block, f"{where}.{i}") for i, block in enumerate(value)]


def _text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text" or not isinstance(block.get("text"), str):
        raise DialectError(400, f"{where}: {kind!r} content is not served by this model; send text", param=where)
    return block["text"]


def _messages(message: Any, index: int, before: Sequence[Message], deferred: Mapping[str, Json]) -> list[Message]:
    where = f"messages.{index}"
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise DialectError(400, f"{where}.role: expected user, assistant or system, got {role!r}", param=where)
    content = message.get("content")
    if role == "assistant":
        return [_assistant(content, f"{where}.content")]
    if role == "system" or not isinstance(content, list):
        return [Message(role, "\n".join(_texts(content, f"{where}.content")))]
    texts: list[str] = []
    results: list[Message] = []
    for i, block in enumerate(content):
        if isinstance(block, dict) and block.get("type") == "tool_result":
            results.append(_result(block, f"{where}.content.{i}", deferred))
        else:
            texts.append(_text(block, f"{where}.content.{i}"))
    asked = [call.id for call in before[-1].tool_calls] if before else []
    order = {id: place for place, id in enumerate(asked)}
    results.sort(key=lambda result: order.get(result.tool_call_id, len(order)))
    return [*results, *([Message("user", "\n".join(texts))] if texts or not results else [])]


def _result(block: Json, where: str, deferred: Mapping[str, Json]) -> Message:
    id = block.get("tool_use_id")
    if not isinstance(id, str) or not id:
        raise DialectError(400, f"{where}.tool_use_id: a tool result names the call it answers", param=where)
    content = block.get("content")
    if isinstance(content, list):
        content = [_shown(part, f"{where}.content.{i}", deferred) for i, part in enumerate(content)]
    return Message("tool", "\n".join(_texts(content, f"{where}.content")), tool_call_id=id)


def _shown(part: Any, where: str, deferred: Mapping[str, Json]) -> Any:
    """A reference to a deferred tool as the text that defines it; any other part as it is."""
    if not isinstance(part, dict) or part.get("type") != "tool_reference":
        return part
    tool = deferred.get(str(part.get("tool_name")))
    if tool is None:
        raise DialectError(400, f"{where}.tool_name: {part.get('tool_name')!r} is no deferred tool", param=where)
    return {"type": "text", "text": json.dumps(tool, ensure_ascii=False)}


def _assistant(content: Any, where: str) -> Message:
    if isinstance(content, str):
        return Message("assistant", content)
    if not isinstance(content, list):
        raise DialectError(400, f"{where}: expected a string or a list of blocks", param=where)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            if not isinstance(block.get("id"), str) or not isinstance(block.get("name"), str):
                raise DialectError(400, f"{where}.{i}: expected an id and a name", param=where)
            calls.append(ToolCall(block["id"], block["name"], json.dumps(block.get("input") or {}, ensure_ascii=False)))
        elif kind != "redacted_thinking":
            texts.append(_text(block, f"{where}.{i}"))
    return Message("assistant", "".join(texts), "".join(thoughts), tuple(calls))


# Answers


def error_body(error: DialectError) -> Json:
    """Anthropic's error shape; a prompt that is too long in the words that make clients compact."""
    message = error.message
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.tokens} tokens > {error.context} maximum"
    return {"type": "error", "error": {"type": error_type(error.status), "message": message}}


def error_type(status: int) -> str:
    return ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def _usage(prompt: int, cached: int, sampled: int) -> Json:
    """Anthropic counts cached prompt tokens apart from the others."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
    }


def _signature(thinking: str) -> str:
    """What clients echo with a thinking block; it proves nothing here."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


def _input(arguments: str) -> Json:
    """A call's arguments as the object that the protocol wants."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _stop_reason(choice: Choice) -> str:
    if choice.stopped is not None and choice.finish_reason == "stop":
        return "stop_sequence"
    return _STOP_REASONS.get(choice.finish_reason, "end_turn")


def plain(request: Request, answer: Answer) -> Json:
    """The body of an answer that is not streamed."""
    (choice,) = answer.choices
    message = choice.message
    content: list[Json] = []
    if message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": _signature(message.reasoning)})
    if message.content:
        content.append({"type": "text", "text": message.content})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
        for call in message.tool_calls
    ]
    return {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": _stop_reason(choice),
        "stop_sequence": choice.stopped,
        "usage": _usage(answer.prompt_tokens, answer.cached_tokens, len(choice.sampled_ids)),
    }


def writer(request: Request, opened: Opened) -> MessagesWriter:
    """The stream of one request."""
    return MessagesWriter(request, opened)


@dataclass
class MessagesWriter:
    """Content blocks one after the other, each begun by the first piece of its kind."""

    request: Request
    opened: Opened
    _kind: str = ""
    """Of the block that is open."""
    _blocks: int = 0
    _thinking: list[str] = field(default_factory=list)

    def opening(self, index: int) -> list[bytes]:
        """The message without content."""
        message = {
            "id": self.opened.id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self.opened.prompt_tokens, self.opened.cached_tokens, 0),
        }
        return [named_event({"type": "message_start", "message": message})]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        """The events of a piece."""
        events: list[bytes] = []
        if delta.reasoning:
            events += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking.append(delta.reasoning)
            events.append(self._piece({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.content:
            events += self._block("text", {"type": "text", "text": ""})
            events.append(self._piece({"type": "text_delta", "text": delta.content}))
        if delta.tool_call is not None:
            call = delta.tool_call
            events += self._end()
            events += self._block("tool_use", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            if call.arguments:  # it came whole
                text = json.dumps(_input(call.arguments), ensure_ascii=False)
                events.append(self._piece({"type": "input_json_delta", "partial_json": text}))
        if delta.arguments:
            events.append(self._piece({"type": "input_json_delta", "partial_json": delta.arguments}))
        return events

    def closing(self, answer: Answer) -> list[bytes]:
        """The end of the last block, the reason to stop, usage, the end."""
        (choice,) = answer.choices
        usage = _usage(answer.prompt_tokens, answer.cached_tokens, len(choice.sampled_ids))
        delta = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stopped}
        return [
            *self._end(),
            named_event({"type": "message_delta", "delta": delta, "usage": usage}),
            named_event({"type": "message_stop"}),
        ]

    def error(self, error: DialectError) -> list[bytes]:
        """A failure after the headers have left."""
        return [named_event(error_body(error))]

    def keep_alive(self) -> bytes:
        """An event of its own, which clients expect at any time."""
        return named_event({"type": "ping"})

    def _block(self, kind: str, block: Json) -> list[bytes]:
        if self._kind == kind:
            return []
        ended = self._end()
        self._kind = kind
        start = {"type": "content_block_start", "index": self._blocks, "content_block": block}
        return [*ended, named_event(start)]

    def _piece(self, delta: Json) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _end(self) -> list[bytes]:
        if not self._kind:
            return []
        events = []
        if self._kind == "thinking":
            events.append(self._piece({"type": "signature_delta", "signature": _signature("".join(self._thinking))}))
        events.append(named_event({"type": "content_block_stop", "index": self._blocks}))
        self._kind, self._blocks, self._thinking = "", self._blocks + 1, []
        return events
