"""A stronger model behind an OpenAI-compatible endpoint as the teacher of a warm-up.

It answers with a message; the student's own template writes that message as the tokens the student would have had to
sample. Such calls have no log-probabilities and are only learned supervised.
"""

from __future__ import annotations

import os
from typing import Any

import httpx
import msgspec

from longrein.config import Warmup
from longrein.gateway.engines.openai import complete
from longrein.gateway.engines.scripted import ScriptedEngine, reply_ids
from longrein.gateway.messages import Message
from longrein.gateway.tokens import TextModel

Json = dict[str, Any]


def remote_teacher(http: httpx.AsyncClient, warmup: Warmup, model: TextModel) -> ScriptedEngine:
    """The engine that asks `warmup.teacher_url`."""
    key = os.environ.get(warmup.teacher_key_env, "") if warmup.teacher_key_env else ""

    async def ask(messages: list[Json], tools: list[Json]) -> list[int]:
        body: Json = {"model": warmup.teacher_model, "messages": [_wire(m) for m in messages]}
        if tools:
            body["tools"] = tools
        answer = await complete(http, warmup.teacher_url, warmup.teacher_model, key, body)
        return reply_ids(model, messages, tools, answer["choices"][0]["message"])

    return ScriptedEngine(ask, model, name="teacher", certain=False)


def _wire(message: Json) -> Json:
    """A template's message back as OpenAI's: arguments as JSON text."""
    calls = [
        {**c, "function": {**c["function"], "arguments": _text(c["function"]["arguments"])}}
        for c in message.get("tool_calls", ())
    ]
    return Message.from_json({**message, "tool_calls": calls}).to_json()


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
