"""What a call is for, from recorded traffic of real harnesses and by example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longrein.gateway.conversation import History, Recorded
from longrein.gateway.dialects import Request, chat, responses
from longrein.gateway.dialects import messages as anthropic
from longrein.gateway.kinds import kind_of
from longrein.gateway.messages import Message
from longrein.records import CallKind

TOOLS = [{"type": "function", "function": {"name": "bash"}}]


def recorded(
    messages: list[Message], *, tools: Any = TOOLS, kind: CallKind = "main", parent: Recorded | None = None
) -> Recorded:
    keep = parent.conversation_length if parent is not None else 0
    own = tuple(messages[keep:])
    reply = Message("assistant", "done")
    return Recorded(0, None, 0, 0, "", [], parent, keep, own, tools, kind=kind, reply=reply)


def kind(
    messages: list[Message],
    *,
    tools: Any = TOOLS,
    headers: dict[str, str] | None = None,
    parent: Recorded | None = None,
    before: list[Recorded] | None = None,
) -> CallKind:
    history = History(calls=before or ([parent] if parent is not None else []))
    return kind_of(headers or {}, Request("policy", messages, tools), messages, parent, history)


SYSTEM = Message("system", "You are a coding agent.")
TASK = Message("user", "Fix the bug in the file that generates titles.")
DONE = Message("assistant", "done")


def test_an_agents_own_work() -> None:
    first = recorded([SYSTEM, TASK])
    assert kind([SYSTEM, TASK]) == "main"
    assert kind([TASK], tools=()) == "main"
    assert kind([SYSTEM, TASK, DONE, Message("user", "go on")], parent=first) == "main"
    # A closing call without tools: AutoGen's reflection, the last step of smolagents.
    assert kind([SYSTEM, TASK, DONE, Message("tool", "42", tool_call_id="c")], tools=(), parent=first) == "main"
    # A new conversation of the same agent, after a summary replaced the old one.
    assert kind([SYSTEM, Message("user", "This session is being continued")], before=[first]) == "main"


@pytest.mark.parametrize("name", ["x-claude-code-agent-id", "x-parent-session-id", "x-codex-parent-thread-id"])
def test_a_header_names_a_sub_agent_and_its_chain_stays_one(name: str) -> None:
    assert kind([SYSTEM, TASK], headers={name: "a1"}) == "sub-agent"
    sub = recorded([SYSTEM, TASK], kind="sub-agent")
    assert kind([SYSTEM, TASK, DONE, Message("user", "more")], parent=sub) == "sub-agent"


def test_another_system_prompt_with_tools_is_a_sub_agent() -> None:
    other = Message("system", "You are a general-purpose subagent.")
    assert kind([other, TASK], before=[recorded([SYSTEM, TASK])]) == "sub-agent"
    assert kind([other, TASK], before=[]) == "main"  # the first of an attempt is the agent itself


@pytest.mark.parametrize(
    "text",
    [
        "You are a title generator. You output ONLY a thread title.",
        "Generate a concise, sentence-case title for this session.",
        "Write a 5-word title for the conversation",
    ],
)
def test_titles(text: str) -> None:
    assert kind([Message("system", text), TASK], tools=()) == "title"
    assert kind([Message("user", text)], tools=()) == "title"


def test_no_header_makes_a_title() -> None:
    for headers in ({"x-kind": "title"}, {"x-session-id": "title"}):
        assert kind([SYSTEM, TASK], headers=headers) == "main"
    # With tools to work with it is an agent, whatever its task says.
    assert kind([SYSTEM, Message("user", "Write a title for the page")]) == "main"


@pytest.mark.parametrize(
    ("system", "last", "tools"),
    [
        (SYSTEM, "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. Summarize.", TOOLS),
        (SYSTEM, "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary.", ()),
        (Message("system", "You are a context summarization agent."), "history: …", ()),
        (Message("system", "You summarize the conversation so that it can be continued."), "Now.", ()),
    ],
)
def test_summaries(system: Message, last: str, tools: Any) -> None:
    first = recorded([SYSTEM, TASK])
    said = [system, TASK, DONE, Message("user", last)]
    assert kind(said, tools=tools, parent=first if system is SYSTEM else None, before=[first]) == "compaction"


def test_what_follows_a_summary_is_no_summary() -> None:
    summary = recorded([SYSTEM, TASK], kind="compaction")
    assert kind([SYSTEM, TASK, DONE, Message("user", "go on")], parent=summary) == "main"


def traffic(name: str) -> list[dict[str, Any]]:
    file = Path(__file__).parent.parent / "data" / "traffic" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("name", "dialect", "kinds"),
    [
        ("mini", chat, ["main"] * 3),
        ("openhands", chat, ["main"] * 3),
        ("qwen", chat, ["main"] * 3),
        ("claude", anthropic, ["main"] * 3),
        ("codex", responses, ["main"] * 3),
        ("opencode", chat, ["title", "main", "main", "main"]),
        ("claude-subagents", anthropic, ["main", *["sub-agent"] * 6, "main", "main"]),
    ],
)
def test_recorded_runs(name: str, dialect: Any, kinds: list[CallKind]) -> None:
    found: list[CallKind] = []
    for line in traffic(name):
        request = dialect.parse(line["body"])
        found.append(kind_of(line.get("headers", {}), request, request.messages, None, History()))
    assert found == kinds
