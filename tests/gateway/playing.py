"""Plays conversations through a history as the gateway does, with replies as each family's models write them.

Replies come in ids that need not be the tokenizer's own choice: models sample such.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longrein.gateway.conversation import History, Plan, Recorded, plan_prompt
from longrein.gateway.messages import Message
from longrein.gateway.parsing import ParserOptions, make_parser, message_of
from longrein.gateway.tokens import Rendered, TextModel
from longrein.records import Call

Json = dict[str, Any]

TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
]


def composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def without_last_stop(model: TextModel, ids: list[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] in model.stop_ids else ids


# Replies as models write them


@dataclass(frozen=True)
class Said:
    """What a model means to say; `calls` are the texts of arguments objects."""

    text: str
    reasoning: str | None
    calls: tuple[str, ...]
    stopped: bool
    cut: float
    """A reply without a stop token is cut after this share of its text."""


def as_text(family: str, said: Said) -> str:
    text = _WRITERS[family](said)
    return text if said.stopped else text[: int(len(text) * said.cut)]


def _hermes(said: Said) -> str:
    text = said.text if said.reasoning is None else f"<think>{said.reasoning}</think>{said.text}"
    return text + _json_calls(said.calls, first="\n" if said.text else "")


def _json_calls(calls: Sequence[str], first: str) -> str:
    blocks = [f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>' for arguments in calls]
    return first * bool(blocks) + "\n".join(blocks)


def _qwen3(said: Said) -> str:
    return f"<think>\n{said.reasoning or ''}\n</think>\n\n{said.text}" + _json_calls(said.calls, "\n" * bool(said.text))


def _qwen35(said: Said) -> str:
    text = f"{said.reasoning or ''}\n</think>\n\n{said.text}"
    for i, arguments in enumerate(said.calls):
        text += "\n\n" * (i == 0 and bool(said.text)) + "\n" * (i > 0) + "<tool_call>\n<function=bash>\n"
        for key, value in json.loads(arguments).items():
            value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"<parameter={key}>\n{value}\n</parameter>\n"
        text += "</function>\n</tool_call>"
    return text


def _deepseek(said: Said) -> str:
    text = said.text if said.reasoning is None else f"<think>{said.reasoning}</think>{said.text}"
    blocks = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for arguments in said.calls
    ]
    return text + (f"<｜tool▁calls▁begin｜>{chr(10).join(blocks)}<｜tool▁calls▁end｜>" if blocks else "")


def _llama3(said: Said) -> str:
    return f'{{"name": "bash", "parameters": {said.calls[0]}}}' if said.calls else said.text


def _mistral(said: Said) -> str:
    if not said.calls:
        return " " + said.text
    calls = ", ".join(f'{{"name": "bash", "arguments": {arguments}}}' for arguments in said.calls)
    return f"[TOOL_CALLS] [{calls}]"


_WRITERS: dict[str, Callable[[Said], str]] = {
    "hermes": _hermes,
    "qwen3": _qwen3,
    "qwen3.5": _qwen35,
    "deepseek": _deepseek,
    "llama3": _llama3,
    "mistral": _mistral,
}


def sampled_ids(model: TextModel, text: str, seed: int, stopped: bool) -> list[int]:
    """Ids that a model might sample for `text`: cut at random places, each piece encoded on its own."""
    chance = random.Random(seed)
    added = {token.content: id for id, token in model.tokenizer.get_added_tokens_decoder().items()}
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, sorted(added, key=len, reverse=True))) + ")", text):
        if part in added:
            ids.append(added[part])
            continue
        cuts = sorted(chance.randrange(len(part) + 1) for _ in range(chance.randrange(4)))
        for start, end in itertools.pairwise([0, *cuts, len(part)]):
            ids += model.encode(Rendered(part[start:end]))
    return [*ids, min(model.stop_ids)] if stopped else ids


# What harnesses send back


def echo(reply: Message, how: str) -> Message:
    calls, content, reasoning = reply.tool_calls, reply.content, reply.reasoning
    if how in ("python", "all"):
        calls = tuple(replace(c, arguments=json.dumps(json.loads(c.arguments), ensure_ascii=False)) for c in calls)
    if how == "compact":
        calls = tuple(replace(c, arguments=json.dumps(json.loads(c.arguments), separators=(",", ":"))) for c in calls)
    if how in ("no reasoning", "all"):
        reasoning = ""
    if how == "trimmed reasoning":
        reasoning = reasoning.rstrip()
    if how in ("stripped", "all"):
        content = content.strip()
    if how == "no text beside calls" and calls:
        content = ""
    return Message("assistant", content, reasoning, calls)


ECHOES = ["exact", "python", "compact", "no reasoning", "trimmed reasoning", "stripped", "no text beside calls", "all"]


@dataclass
class Attempt:
    """Plays calls as the gateway does: plan, record, read the reply."""

    model: TextModel
    family: str
    folder: Path
    mode: str = "faithful"
    tools: list[Json] = field(default_factory=lambda: list(TOOLS))
    history: History = field(default_factory=History)
    plans: list[Plan] = field(default_factory=list)
    recorded: list[Recorded] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.make = make_parser("auto", self.model, str(self.folder))

    def render(self, messages: Sequence[Message], generation_prompt: bool) -> Rendered:
        templated = [m.for_template() for m in messages]
        return self.model.render(templated, self.tools, generation_prompt=generation_prompt, clock=0.0)

    def plan(self, messages: Sequence[Message]) -> Plan:
        return plan_prompt(self.history, self.model, messages, self.tools, self.render, self.mode)

    def call(self, messages: Sequence[Message], text: str, *, seed: int = 0, stopped: bool = True) -> Message:
        plan = self.plan(messages)
        recorded = self.history.admit(plan, messages, self.tools)
        number = recorded.number
        ids = sampled_ids(self.model, text, seed, stopped)
        text = self.model.decode(without_last_stop(self.model, ids))
        prompt = [*(plan.prefix.branch()[: plan.prefix_length] if plan.prefix else []), *plan.new_ids]
        short = self.model.short_call_ids
        options = ParserOptions(
            plan.new_text[-64:] or self.model.generation_prompt, prompt, self.tools,
            lambda i: f"{number:05d}{i:04d}" if short else f"call_{number}_{i}",
        )  # fmt: skip
        parser = self.make(options)
        reply = message_of([*parser.push(ids, text), *parser.finish()])
        self.history.add(recorded, self.model, ids, reply)
        self.plans.append(plan)
        self.recorded.append(recorded)
        parent_tools = recorded.parent.tools if recorded.parent is not None else []
        self.calls.append(
            Call(
                rollout_id="r", attempt_id="0", number=number, dialect="chat", mode="train", model="m", engine="policy",
                parent=plan.parent.number if plan.parent else None, fork=plan.fork,
                prefix=plan.prefix.number if plan.prefix else None, prefix_length=plan.prefix_length,
                prompt_delta=plan.new_ids, prompt_length=plan.length, sampled=ids,
                messages_keep=plan.messages_keep, messages=[m.to_json() for m in recorded.messages],
                tools=None if list(parent_tools) == self.tools else self.tools, reply=reply.to_json(),
            )
        )  # fmt: skip
        return reply

    def prompt(self, plan: Plan) -> list[int]:
        return [*(plan.prefix.branch()[: plan.prefix_length] if plan.prefix else []), *plan.new_ids]
