"""What becomes of agents that fail, run into their timeout, or whose rollout is cancelled or deleted."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.serving import serving
from longrein.client import Client
from longrein.records import (
    Call,
    NewEvent,
    NewRollout,
    Outcome,
    RolloutConfig,
    RolloutState,
    StatusChange,
)

from .fakes import FakeClient, controlling, make_config, until, write
from .processes import KEY, journals, processes_in

GRADER = "def grade(task, transcript, workspace, exit_status):\n    return 1\n"

#: How long the agents of the tests below sleep, if nobody ends them.
LONG = "sleep 600"


async def run(tmp_path: Path, command: str, client: FakeClient, *, seconds: float | None = None, **agent: Any) -> None:
    write(tmp_path, "grader.py", GRADER)
    config = make_config(tmp_path, agent={"command": ["sh", "-c", command], **agent})
    await client.add_rollouts([NewRollout({}, rollout_id="x", config=RolloutConfig(timeout_seconds=seconds))])
    async with controlling(config, client):
        await client.until_finished()


@pytest.mark.parametrize("policy", ["grade", "zero", "drop"])
@pytest.mark.parametrize("option", ["on_failure", "on_timeout"])
async def test_failures_and_timeouts_are_scored_as_the_run_file_says(tmp_path: Path, option: str, policy: str) -> None:
    client = FakeClient()
    fails = option == "on_failure"
    other = {"on_timeout" if fails else "on_failure": "drop" if policy != "drop" else "grade"}  # which has no say
    command = "echo nothing works >&2; exit 3" if fails else LONG
    await run(tmp_path, command, client, seconds=None if fails else 0.3, **{option: policy}, **other)
    (attempt,) = client.tries["x"]
    assert attempt.outcome is Outcome.agent_failed
    status = client.store["x"].status
    posted = [event.data for event in client.posted.get(("x", "0"), [])]
    assert (attempt.reason or "").startswith("exit code 3" if fails else "timeout after 0.3 s")
    if policy == "drop":
        assert (status.state, posted) == (RolloutState.failed, [])
        assert f"(dropped: agent.{option} = 'drop')" in (status.error_message or "")
        assert (attempt.reason or "") in (status.error_message or "")
        return
    assert (status.state, status.error_message) == (RolloutState.succeeded, attempt.reason)
    graded = {"value": 1.0, "source": "grader"}
    assert posted == [
        graded if policy == "grade" else {"value": 0.0, "source": "controller", "reason": f"agent.{option} = 'zero'"}
    ]


async def test_a_zero_outweighs_what_the_agent_had_posted_itself(tmp_path: Path) -> None:
    client = FakeClient()
    config = make_config(
        tmp_path,
        agent={"command": ["sh", "-c", "exit 1"], "on_failure": "zero"},
        reward={"from": "agent", "function": ""},
    )
    await client.add_rollouts([NewRollout({}, rollout_id="x")])
    await client.add_event("x", "0", NewEvent("reward", {"value": 1.0}))
    async with controlling(config, client):
        await client.until_finished()
    assert [event.data["value"] for event in client.posted["x", "0"]] == [1.0, 0.0]


async def test_success_and_infrastructure_failures_are_not_scored_as_failures(tmp_path: Path) -> None:
    client = FakeClient()
    await run(tmp_path, "exit 0", client, on_failure="drop", on_timeout="drop")
    assert client.store["x"].status.state is RolloutState.succeeded
    client = FakeClient()
    failed: dict[str, Any] = {"status": "error", "http_status": 502, "error": {"message": "engine died"}}
    client.recorded["x", "0"] = [
        Call(rollout_id="x", attempt_id="0", number=0, dialect="chat", mode="train", model="m", engine="e", **failed)
    ]
    await run(tmp_path, "exit 1", client, on_failure="zero", max_attempts=1)
    assert client.store["x"].status.state is RolloutState.failed
    assert client.posted == {}


async def test_an_agent_that_fails_under_a_gateway_that_was_started_again_is_tried_again(tmp_path: Path) -> None:
    write(tmp_path, "grader.py", GRADER)
    go = tmp_path / "go"
    command = f"touch {tmp_path}/runs; while [ ! -e {go} ]; do sleep 0.02; done; exit 1"
    client = FakeClient()
    await client.add_rollouts([NewRollout({}, rollout_id="x")])
    async with controlling(make_config(tmp_path, agent={"command": ["sh", "-c", command]}), client):
        await until(lambda: len(journals(tmp_path / "runs/r")) == 1)
        client.instance = "two"  # nobody saw it go
        go.touch()
        await client.until_finished()
    first, second = client.tries["x"]
    assert (first.outcome, second.outcome) == (Outcome.infrastructure_failed, Outcome.agent_failed)
    assert (first.reason or "").startswith("the gateway was away while the agent ran; the agent: exit code 1")


# --- Cancelled and deleted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_cancelled_or_deleted_rollouts_agent_is_ended_and_its_slot_free(tmp_path: Path, deleted: bool) -> None:
    write(tmp_path, "grader.py", GRADER)
    command = ["sh", "-c", f"case $LONGREIN_TASK in */long/*) setsid {LONG} & {LONG};; esac"]
    config = make_config(tmp_path, agent={"command": command, "max_concurrent": 1, "grace_seconds": 0.2})
    run_folder = tmp_path / "runs/r"
    async with serving(tmp_path / "gateway") as served, Client(served.url, KEY) as client, controlling(config, client):
        await client.add_rollouts([NewRollout({}, rollout_id="long")])
        await until(lambda: len(processes_in(run_folder / "attempts/long")) == 3)
        await client.add_rollouts([NewRollout({}, rollout_id="next")])
        if deleted:
            await client.delete_rollout("long")
        else:
            change = StatusChange(state=RolloutState.failed, error_message="not wanted any more")
            await client.change_rollout("long", change)
        await until(lambda: processes_in(run_folder / "attempts/long") == [])
        async with asyncio.timeout(60):
            while (await client.rollout("next")).rollout.status.state is not RolloutState.succeeded:
                await client.terminal(0, wait=1.0)
        if not deleted:
            (attempt,) = await client.attempts("long")
            assert (attempt.outcome, attempt.reason) == (
                Outcome.infrastructure_failed,
                "its rollout was cancelled or deleted",
            )
            assert (await client.rollout("long")).rollout.status.error_message == "not wanted any more"
            assert await client.events("long", "0", "reward") == []
        await until(lambda: journals(run_folder) == [])


async def test_what_was_cancelled_while_the_gateway_was_started_again_is_found(tmp_path: Path) -> None:
    write(tmp_path, "grader.py", GRADER)
    config = make_config(tmp_path, agent={"command": ["sh", "-c", LONG], "grace_seconds": 0.2})
    client = FakeClient()

    async def rollout(rollout_id: str) -> Any:
        return await FakeDetail.of(client, rollout_id)

    client.rollout = rollout  # type: ignore[method-assign]
    await client.add_rollouts([NewRollout({}, rollout_id=name) for name in ("kept", "cancelled")])
    async with controlling(config, client):
        await until(lambda: len(journals(tmp_path / "runs/r")) == 2)
        client.store["cancelled"].status.state = RolloutState.failed
        client.instance = "two"
        await client._notify()
        await client.until(lambda: client.tries["cancelled"][0].outcome is not None)
        assert client.tries["kept"][0].outcome is None
    assert client.tries["cancelled"][0].reason == "its rollout was cancelled or deleted"


class FakeDetail:
    """What GET /api/rollouts/{id} answers."""

    def __init__(self, rollout: Any) -> None:
        self.rollout = rollout

    @classmethod
    async def of(cls, client: FakeClient, rollout_id: str) -> "FakeDetail":
        return cls(client._rollout(rollout_id))
