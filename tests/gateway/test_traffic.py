"""Recorded requests of real harnesses, replayed through a real gateway: the tree, the forks and their causes.

Each harness was recorded with a scripted conversation: odd white space, reasoning, a tool call whose arguments are not
canonical JSON, then two parallel calls, then a final text. The scripted engine plays the same replies; ids of tool
calls are put into the recorded requests as the gateway minted them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from longrein.records import Call
from longrein.trajectory.prompts import prompt_ids
from longrein.trajectory.tree import build_tree

from .running import RunningGateway, running_gateway

TRAFFIC = Path(__file__).parent.parent / "data" / "traffic"


def recorded(harness: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TRAFFIC / f"{harness}.jsonl").read_text(encoding="utf-8").splitlines()]


def as_sampled(reply: dict[str, Any], canonical: bool) -> str:
    """What a model would have had to write for this reply."""
    text = f"<think>{reply['reasoning_content']}</think>" if reply.get("reasoning_content") else ""
    text += reply.get("content") or ""
    for i, call in enumerate(reply.get("tool_calls") or []):
        function = call["function"]
        arguments = function["arguments"]
        if canonical:
            arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
        text += (
            "\n" if i or reply.get("content") else ""
        ) + f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'
    return text


Replay = Callable[..., list[Call]]


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replay]:
    """Plays a harness's recorded run: the calls that the gateway records. One gateway a template and history."""
    with ExitStack() as stack:
        gateways: dict[tuple[str, str], RunningGateway] = {}

        def play(harness: str, *, canonical: bool, template: str = "hermes", history: str = "faithful") -> list[Call]:
            if (template, history) not in gateways:
                folder = tmp_path_factory.mktemp(f"{template}-{history}")
                options = [f"gateway.history={history}"]
                gateways[template, history] = stack.enter_context(running_gateway(folder, options, template=template))
            return _replay(gateways[template, history], harness, canonical)

        yield play


def _replay(gateway: RunningGateway, harness: str, canonical: bool) -> list[Call]:
    lines = recorded(harness)
    plan = [{"say": as_sampled(line["reply"], canonical)} for line in lines]
    (gateway.folder / "plan.json").write_text(json.dumps(plan))
    rollout, token = gateway.rollout()
    ids: dict[str, str] = {}
    for line in lines:
        text = json.dumps(line["body"])
        if canonical:  # the harness echoes what it was given: what is recorded in the longer spelling came from us
            text = text.replace('{\\"command\\":  ', '{\\"command\\": ').replace("caf\\\\u00e9", "caf\\u00e9")
        for theirs, ours in ids.items():
            text = text.replace(theirs, ours)
        answer = gateway.chat(rollout, token, json.loads(text))
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        calls = line["reply"].get("tool_calls") or []
        ids.update({c["id"]: o["id"] for c, o in zip(calls, message.get("tool_calls") or [], strict=True)})
        assert message.get("reasoning_content") == line["reply"].get("reasoning_content")
        assert (message["content"] or "").strip() == (line["reply"].get("content") or "").strip()
    return gateway.calls(rollout)


@pytest.mark.parametrize(
    ("harness", "canonical", "forks"),
    [
        # Byte-exact echoes: what the template writes differently is the only cause there is.
        ("mini", True, [None, None, None]),
        ("mini", False, [None, "template", "template"]),
        # Reasoning is dropped by the harness.
        ("openhands", True, [None, "reasoning", "reasoning"]),
        ("langgraph", True, [None, "reasoning", "reasoning"]),
        ("autogen", True, [None, "reasoning", "reasoning"]),
        ("autogen", False, [None, "template", "template"]),
        # The closing call of reflect_on_tool_use drops the tools, which stand in the system prompt.
        ("autogen-calc-mcp", True, [None, "tools"]),
    ],
)
def test_forks_and_their_causes(replay: Replay, harness: str, canonical: bool, forks: list[str | None]) -> None:
    calls = replay(harness, canonical=canonical)
    assert [c.fork for c in calls] == forks
    assert [c.parent for c in calls] == [None, *range(len(calls) - 1)]  # every call continues the one before
    by_number = {c.number: c for c in calls}
    for call in calls[1:]:
        before = by_number[call.number - 1]
        whole = prompt_ids(by_number, before) + before.sampled
        prompt = prompt_ids(by_number, call)
        assert (prompt[: len(whole)] == whole) == (call.fork is None)
    # Each sampled token stands in the tree once, in the branch it was sampled in.
    tree = build_tree(calls)
    assert len(list(tree.leaves())) == sum(fork is not None for fork in forks) + 1


@pytest.mark.parametrize("harness", ["openhands", "langgraph", "autogen"])
def test_history_sampled_keeps_one_chain_where_reasoning_is_dropped(replay: Replay, harness: str) -> None:
    calls = replay(harness, canonical=True, history="sampled")
    assert [c.fork for c in calls] == [None] * len(calls)
    assert len(list(build_tree(calls).leaves())) == 1


def test_a_template_without_reasoning_in_history_forks_as_template(replay: Replay) -> None:
    """mini echoes reasoning exactly, and the DeepSeek-like template drops it."""
    calls = replay("mini", canonical=True, template="deepseek")
    assert [c.fork for c in calls] == [None, "template", "template"]


def test_storage_is_what_is_new(replay: Replay) -> None:
    calls = replay("openhands", canonical=True)
    assert calls[0].prompt_length > 10_000
    assert sum(len(c.prompt_delta) for c in calls[1:]) < 1_000
    assert sum(len(json.dumps(c.messages)) for c in calls[1:]) < 4_000
    assert [c.tools is None for c in calls] == [False, True, True]
