"""Canonical messages: one form for every dialect, for the chat template and for the record.

The template sees `Message.for_template`, which is what an ordinary server of the model would give it. `same` says
whether a message that comes back from a harness is the one that was given to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """As the text that was sampled or sent; usually JSON."""


@dataclass(frozen=True)
class Message:
    """One turn. `content` is text (lists of parts are joined); absent, null and empty are the same."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def to_json(self) -> Json:
        """The form in the record; empty fields are left out."""
        out: Json = {"role": self.role, "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        if self.tool_call_id:
            out["tool_call_id"] = self.tool_call_id
        if self.name:
            out["name"] = self.name
        return out

    @staticmethod
    def from_json(value: Json) -> Message:
        """Read `to_json`'s form back."""
        return Message(
            role=value["role"],
            content=value.get("content") or "",
            reasoning=value.get("reasoning_content") or "",
            tool_calls=tuple(
                ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"])
                for c in value.get("tool_calls", ())
            ),
            tool_call_id=value.get("tool_call_id") or "",
            name=value.get("name") or "",
        )

    def for_template(self) -> Json:
        """As the chat template gets it: arguments as parsed objects in their own key order (text when not JSON)."""
        out: Json = {"role": self.role, "content": self.content}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _parsed(c.arguments)}}
                for c in self.tool_calls
            ]
        if self.tool_call_id:
            out["tool_call_id"] = self.tool_call_id
        if self.name:
            out["name"] = self.name
        return out


class Arguments(dict[str, Any]):
    """A call's arguments as an object, with the text they came in for templates that write that."""

    text: str = ""


def _parsed(arguments: str) -> Any:
    try:
        value = json.loads(arguments) if arguments.strip() else {}
        if "\\u" in arguments:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text that could be rendered
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, dict):
        value = Arguments(value)
        value.text = arguments if arguments.strip() else "{}"
    return value


def same(a: Message, b: Message) -> bool:
    """Whether two messages are the same turn, for harnesses that trim, re-serialise or drop what they echo.

    Text is compared stripped, arguments as JSON values; reasoning that is missing on one side equals any, and so does
    text missing beside tool calls. Tool-call ids come back unchanged from every harness that has them.
    """
    if a == b:
        return True
    if a.role != b.role or a.tool_call_id != b.tool_call_id or len(a.tool_calls) != len(b.tool_calls):
        return False
    text_a, text_b = a.content.strip(), b.content.strip()
    if text_a != text_b and not (a.tool_calls and not (text_a and text_b)):
        return False
    if a.reasoning and b.reasoning and a.reasoning.strip() != b.reasoning.strip():
        return False
    return all(
        x.name == y.name
        and x.id == y.id
        and (x.arguments == y.arguments or _parsed(x.arguments) == _parsed(y.arguments))
        for x, y in zip(a.tool_calls, b.tool_calls, strict=True)
    )
