"""What a flag does to the attempt that is graded: recorded, zeroed, dropped."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from audit.transcripts import attempt, bash, said
from gateway.models import make_model_folder
from gateway.serving import KEY, serving
from longrein import cli
from longrein.client import ApiError, Client
from longrein.config import ConfigError
from longrein.controller.reconcile import run_controller
from longrein.records import NewEvent, NewRollout, RolloutState

from .fakes import FakeClient, controlling, make_config, write

GRADER = "def grade(task, transcript, workspace, exit_status):\n    return {'reward': 0.75, 'steps': len(transcript)}\n"


async def graded(tmp_path: Path, audit: dict[str, Any], **sections: Any) -> FakeClient:
    """Two rollouts, of which `hack` looked into git's history, run and graded."""
    write(tmp_path, "grader.py", GRADER)
    client = FakeClient()
    await client.add_rollouts([NewRollout({}, rollout_id=name) for name in ("hack", "honest")])
    client.recorded["hack", "0"] = attempt([bash("git log --all"), bash("nohup x &"), said("Done.")], rollout="hack")
    client.recorded["honest", "0"] = attempt([bash("git status"), said("Done.")], rollout="honest")
    for name in ("hack", "honest") if sections else ():
        await client.add_event(name, "0", NewEvent("reward", {"value": 0.5}))
    async with controlling(make_config(tmp_path, audit=audit, **sections), client):
        await client.until_finished()
    return client


def posted(client: FakeClient, rollout: str, kind: str) -> list[dict[str, Any]]:
    return [event.data for event in client.posted.get((rollout, "0"), []) if event.event_type == kind]


async def test_by_default_flags_are_recorded_and_rewards_stay(tmp_path: Path) -> None:
    client = await graded(tmp_path, {})
    (reward,) = posted(client, "hack", "reward")
    assert (reward["value"], reward["source"]) == (0.75, "grader")
    assert reward["metrics"] == {"steps": 4.0, "audit/git-history": 1.0, "audit/background": 1.0}
    first, second = posted(client, "hack", "audit")
    assert (first["rule"], first["action"]) == ("git-history", "report")
    assert first["flags"] == [{"call": 0, "place": "command", "excerpt": "git log --all"}]
    assert second["rule"] == "background"
    assert posted(client, "honest", "audit") == []
    assert posted(client, "honest", "reward") == [{"value": 0.75, "source": "grader", "metrics": {"steps": 3.0}}]


async def test_zero_makes_the_reward_zero_and_keeps_the_graders(tmp_path: Path) -> None:
    client = await graded(tmp_path, {"action": "zero"})
    (reward,) = posted(client, "hack", "reward")
    assert (reward["value"], reward["graded"], reward["source"]) == (0.0, 0.75, "audit")
    assert reward["reason"] == "audit: git-history"
    assert reward["metrics"]["audit/zeroed"] == 1.0
    assert client.store["hack"].status.state is RolloutState.succeeded
    assert posted(client, "honest", "reward")[0]["value"] == 0.75


async def test_drop_leaves_the_rollout_without_a_reward_and_names_the_rule(tmp_path: Path) -> None:
    client = await graded(tmp_path, {"actions": {"background": "drop"}})
    assert posted(client, "hack", "reward") == []
    assert [data["action"] for data in posted(client, "hack", "audit")] == ["report", "drop"]
    status = client.store["hack"].status
    assert (status.state, status.error_message) == (
        RolloutState.failed,
        "audit: dropped by rule background (call 1, command): nohup x",
    )
    assert client.store["honest"].status.state is RolloutState.succeeded


async def test_a_reward_of_the_agents_own_is_zeroed_by_a_later_one(tmp_path: Path) -> None:
    client = await graded(tmp_path, {"action": "zero"}, reward={"from": "agent", "function": ""})
    rewards = posted(client, "hack", "reward")
    assert [reward["value"] for reward in rewards] == [0.5, 0.0]
    assert (rewards[-1]["graded"], rewards[-1]["source"]) == (0.5, "audit")
    assert [reward["value"] for reward in posted(client, "honest", "reward")] == [0.5]


async def test_off_does_not_look(tmp_path: Path) -> None:
    client = await graded(tmp_path, {"action": "off"})
    assert posted(client, "hack", "audit") == []
    assert posted(client, "hack", "reward")[0]["metrics"] == {"steps": 4.0}


async def test_rules_that_cannot_be_used_end_the_controller_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"audit\.disable: there is no rule 'nothing'"):
        await run_controller(make_config(tmp_path, audit={"disable": ["nothing"]}), FakeClient(), asyncio.Event())


async def test_an_event_that_the_gateway_did_not_take_is_posted_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "grader.py", GRADER)
    client = FakeClient()
    await client.add_rollouts([NewRollout({}, rollout_id="hack")])
    client.recorded["hack", "0"] = attempt([bash("git log --all")], rollout="hack")
    failures = [ApiError(503, "away"), None, None]
    client.broken = lambda method: failures.pop(0) if method == "add_event" and failures else None
    with caplog.at_level(logging.WARNING):
        async with controlling(make_config(tmp_path), client):
            await client.until_finished()
    assert [data["rule"] for data in posted(client, "hack", "audit")] == ["git-history"]
    assert posted(client, "hack", "reward")[0]["value"] == 0.75


AGENT = """
import json, os, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "fix it"}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
"""
SCRIPT = "def script(messages, tools):\n    return 'I look.\\n```bash\\ngit --no-pager reflog\\n```'\n"


async def test_through_a_real_gateway_and_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "played_hack.py", SCRIPT)
    write(tmp_path, "agent.py", AGENT)
    write(tmp_path, "grader.py", GRADER)
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(tmp_path), "name": "record", "folder": str(tmp_path)},
        "model": {"name": "policy", "path": str(make_model_folder(tmp_path / "model"))},
        "engine": {"kind": "scripted", "script": "played_hack:script"},
    }
    config = make_config(tmp_path, agent={"command": ["python", "agent.py"]}, audit={"action": "zero"})
    async with (
        serving(tmp_path, **sections) as served,
        Client(served.url, KEY) as client,
        controlling(config, client),
    ):
        await client.add_rollouts([NewRollout({}, rollout_id="hack")])
        after = total = 0
        while not total:
            page = await client.terminal(after, wait=20)
            after, total = page.next_after, page.total_terminal
        (reward,) = await client.events("hack", "0", "reward")
        assert (reward.data["value"], reward.data["graded"]) == (0.0, 0.75), reward.data
        (event,) = await client.events("hack", "0", "audit")
        assert event.data["flags"] == [{"call": 0, "place": "command", "excerpt": "git reflog"}]
        assert await asyncio.to_thread(cli.main, ["audit", str(tmp_path / "record"), "--format", "jsonl"]) == 1
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert (line["rule"], line["rollout"], line["reward"]) == ("git-history", "hack", 0.75)
