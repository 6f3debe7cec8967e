"""OpenAI Chat Completions: request → messages, answer → JSON or server-sent events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from longrein.gateway.dialects import (
    DONE,
    Answer,
    Choice,
    DialectError,
    OpenAIWriter,
    Opened,
    Request,
    Sampling,
    event,
    refuse_unknown,
    single_call,
    take,
    take_format,
    take_include_usage,
    take_n,
    take_number,
    take_positive,
    take_stop,
    take_tool_choice,
    take_top_logprobs,
    token_json,
)
from longrein.gateway.guides import Tool, arguments_schema, form_of
from longrein.gateway.logprobs import Token
from longrein.gateway.messages import Message, ToolCall
from longrein.gateway.parsing import Delta

Json = dict[str, Any]

name = "chat"
id_prefix = "chatcmpl-"

HONOURED = frozenset(
    "model messages tools tool_choice parallel_tool_calls response_format stream stream_options max_tokens "
    "max_completion_tokens top_p top_k stop n logprobs top_logprobs return_token_ids temperature".split()
)
#: Fields that do not change what is sampled here. `temperature` is honoured as the run file's policy per mode.
IGNORED = frozenset(
    "user metadata store service_tier prompt_cache_key prompt_cache_retention safety_identifier reasoning_effort seed verbosity".split()
)
#: Fields that are accepted with these values only.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
}
ROLES = ("system", "developer", "user", "assistant", "tool")


def parse(body: Json) -> Request:
    """Read a request body; raises `DialectError` naming the field."""
    for name in ("functions", "function_call"):
        if body.get(name) is not None:
            raise DialectError(
                400, f"{name}: the legacy function interface is not served; use tools and tool_choice", param=name
            )
    refuse_unknown(body, HONOURED, IGNORED, NEUTRAL)
    messages = take(body, "messages", list, "a list of messages")
    if not messages:
        raise DialectError(400, "messages: expected a list with at least one message", param="messages")
    listed = take(body, "tools", list, "a list of tools", [])
    tools = [_tool(tool, i) for i, tool in enumerate(listed)]
    callable = [_callable(tool, i) for i, tool in enumerate(listed)]
    choice = take_tool_choice(body, {("function", tool.name): tool.name for tool in callable})
    take_number(body, "temperature", 0, 2)  # checked; the run file's policy decides
    logprobs = take(body, "logprobs", bool, "a boolean", False)
    top_logprobs = take_top_logprobs(body) or 0
    if top_logprobs and not logprobs:
        raise DialectError(400, "top_logprobs: needs logprobs: true", param="top_logprobs")
    return Request(
        model=take(body, "model", str, "a string", ""),
        messages=[_message(message, i) for i, message in enumerate(messages)],
        tools=tools,
        use_tools=choice.kind != "none",
        sampling=Sampling(
            max_tokens=take_positive(body, "max_completion_tokens") or take_positive(body, "max_tokens"),
            top_p=take_number(body, "top_p", 0, 1) or 1.0,
            top_k=max(0, take(body, "top_k", int, "an integer", 0)),
            stop=take_stop(body),
        ),
        n=take_n(body),
        stream=take(body, "stream", bool, "a boolean", False),
        include_usage=take_include_usage(body),
        form=form_of(
            choice,
            single_call(body),
            callable,
            take_format(body.get("response_format"), "response_format", nested=True),
        ),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        return_token_ids=take(body, "return_token_ids", bool, "a boolean", False),
    )


def _tool(tool: Any, index: int) -> Json:
    where = f"tools[{index}]"
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise DialectError(400, f"{where}: expected an object with type 'function' and a function", param=where)
    function = tool["function"]
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise DialectError(400, f"{where}.function.name: expected a name", param=f"{where}.function.name")
    # strict says how a guide takes the parameters; it says nothing to the model and is no part of the template's text.
    return {"type": "function", "function": {k: v for k, v in function.items() if k != "strict" and v is not None}}


def _callable(tool: Json, index: int) -> Tool:
    function, where = tool["function"], f"tools[{index}].function"
    parameters = take(function, "parameters", dict, "a JSON schema")
    return Tool(function["name"], arguments_schema(parameters, function.get("strict") is True, f"{where}.parameters"))


def _message(message: Any, index: int) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise DialectError(400, f"{where}: expected an object", param=where)
    role = message.get("role")
    if role == "function" or message.get("function_call") is not None:
        name = f"{where}.role" if role == "function" else f"{where}.function_call"
        raise DialectError(
            400, f"{name}: the legacy function interface is not served; use tool calls and role tool", param=name
        )
    if role not in ROLES:
        raise DialectError(
            400, f"{where}.role: expected one of {', '.join(ROLES)}, got {role!r}", param=f"{where}.role"
        )
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise DialectError(400, f"{where}.reasoning_content: expected a string", param=f"{where}.reasoning_content")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise DialectError(400, f"{where}.tool_calls: only assistant messages have a list of tool calls", param=where)
    call_id = message.get("tool_call_id") or ""
    if role == "tool" and not (isinstance(call_id, str) and call_id):
        raise DialectError(
            400, f"{where}.tool_call_id: a tool message names the call it answers", param=f"{where}.tool_call_id"
        )
    speaker = message.get("name")
    return Message(
        role="system" if role == "developer" else role,
        content=_content(message.get("content"), where),
        reasoning=reasoning if role == "assistant" else "",
        tool_calls=tuple(_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)),
        tool_call_id=call_id if role == "tool" else "",
        name=speaker if isinstance(speaker, str) and role != "assistant" else "",
    )


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DialectError(400, f"{where}.content: expected a string or a list of parts", param=f"{where}.content")
    parts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) and kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise DialectError(
                400,
                f"{where}.content[{i}]: {kind!r} content is not served by this model; send text",
                param=f"{where}.content",
            )
        parts.append(text)
    return "\n".join(parts)


def _call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(call.get("id"), str)
    ):
        raise DialectError(400, f"{where}: expected an object with id, type 'function' and function.name", param=where)
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        raise DialectError(
            400, f"{where}.function.arguments: expected a JSON string", param=f"{where}.function.arguments"
        )
    return ToolCall(call["id"], function["name"], arguments)


# Answers


def plain(request: Request, answer: Answer) -> Json:
    """The body of an answer that is not streamed."""
    body: Json = {
        "id": answer.id,
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [_choice(request, choice) for choice in answer.choices],
        "usage": answer.usage(),
    }
    if request.return_token_ids:
        body["prompt_token_ids"] = answer.choices[0].prompt_ids
    return body


def _choice(request: Request, choice: Choice) -> Json:
    message: Json = {"role": "assistant", "content": choice.message.content or None, "refusal": None}
    if not choice.message.tool_calls:
        message["content"] = choice.message.content
    if choice.message.reasoning:
        message["reasoning_content"] = choice.message.reasoning
    if choice.message.tool_calls:
        message["tool_calls"] = choice.message.to_json()["tool_calls"]
    out: Json = {
        "index": choice.index,
        "message": message,
        "finish_reason": choice.finish_reason,
        "logprobs": _logprobs(choice.tokens),
    }
    if request.return_token_ids:
        out["token_ids"] = choice.sampled_ids
    return out


def _logprobs(tokens: Sequence[Token]) -> Json | None:
    """Every sampled token, those of reasoning and calls included; None where nobody asked."""
    return None if not tokens else {"content": [token_json(token) for token in tokens], "refusal": None}


error_body = DialectError.body


def writer(request: Request, opened: Opened) -> ChatWriter:
    """The stream of one request; its choices are told apart by their index."""
    return ChatWriter(request, opened)


@dataclass
class ChatWriter(OpenAIWriter):
    """Pieces of messages, as they come."""

    _calls: Counter[int] = field(default_factory=Counter)
    """Tool calls of each choice so far."""
    _told: Counter[int] = field(default_factory=Counter)
    """Tokens of each choice whose log-probabilities have been sent."""

    def keep_alive(self) -> bytes:
        """A piece that says nothing: qwen-code counts comments as silence, and leaves after four minutes of it."""
        return self._piece(0, {})

    def opening(self, index: int) -> list[bytes]:
        """The first event of a choice."""
        return [self._piece(index, {"role": "assistant", "content": ""})]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        """The event of a piece."""
        piece: Json = {}
        if delta.content:
            piece["content"] = delta.content
        if delta.reasoning:
            piece["reasoning_content"] = delta.reasoning
        if delta.tool_call is not None:
            call = delta.tool_call
            function = {"name": call.name, "arguments": call.arguments}
            piece["tool_calls"] = [
                {"index": self._calls[index], "id": call.id, "type": "function", "function": function}
            ]
            self._calls[index] += 1
        elif delta.arguments:
            piece["tool_calls"] = [{"index": self._calls[index] - 1, "function": {"arguments": delta.arguments}}]
        self._told[index] += len(delta.tokens)
        return [self._piece(index, piece, delta.tokens)]

    def closing(self, answer: Answer) -> list[bytes]:
        """The last events: finish reasons, usage where it was asked for, the end."""
        events: list[bytes] = []
        for choice in answer.choices:
            last: Json = {
                "index": choice.index,
                "delta": {},
                "finish_reason": choice.finish_reason,
                "logprobs": _logprobs(choice.tokens[self._told[choice.index] :]),
            }
            if self.request.return_token_ids:
                last["token_ids"] = choice.sampled_ids
            events.append(self._chunk([last]))
        if self.request.include_usage:
            events.append(self._chunk([], answer.usage()))
        return [*events, DONE]

    def _piece(self, index: int, delta: Json, tokens: Sequence[Token] = ()) -> bytes:
        return self._chunk([{"index": index, "delta": delta, "finish_reason": None, "logprobs": _logprobs(tokens)}])

    def _chunk(self, choices: list[Json], usage: Json | None = None) -> bytes:
        body: Json = {
            "id": self.opened.id,
            "object": "chat.completion.chunk",
            "created": self.opened.created,
            "model": self.request.model,
            "choices": choices,
        }
        if self.request.include_usage:
            body["usage"] = usage
        return event(body)
