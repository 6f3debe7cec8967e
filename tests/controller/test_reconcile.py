"""The controller's loop with real agents and graders, against an in-memory gateway."""

import asyncio
import json
import logging
import os
import sys
from pathlib import Path

import psutil
import pytest

from longrein.client import ApiError
from longrein.config import ConfigError
from longrein.controller import local
from longrein.controller.reconcile import Change, run_controller, transcript
from longrein.records import Call, NewEvent, NewRollout, Outcome, RolloutConfig, RolloutState, Usage

from .fakes import FakeClient, controlling, make_config, until, write

GRADER = """
def grade(task, transcript, workspace, exit_status):
    return {"reward": task.get("worth", 1), "exit": exit_status or 0, "messages": len(transcript)}
"""


def reward_of(client: FakeClient, rollout_id: str, attempt: str = "0") -> dict:
    (event,) = client.posted[rollout_id, attempt]
    assert event.event_type == "reward"
    return event.data


def left_over(marker: str) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        if marker in " ".join(process.info["cmdline"] or []) or (process.info["environ"] or {}).get("MARK") == marker:
            found.append(f"{process.pid} {process.info['cmdline']}")
    return found


async def test_a_rollout_is_run_graded_and_finished(tmp_path: Path) -> None:
    write(tmp_path, "grader.py", GRADER)
    config = make_config(tmp_path, agent={"command": ["sh", "-c", "echo hello; echo {task.name} > out"]})
    client = FakeClient()
    await client.add_rollouts([NewRollout({"name": "a b", "worth": 0.5}, rollout_id="x")])
    seen: list[Change] = []
    async with controlling(config, client, on_change=seen.append):
        await client.until_finished()
    assert client.store["x"].status.state is RolloutState.succeeded
    assert reward_of(client, "x") == {"value": 0.5, "source": "grader", "metrics": {"exit": 0.0, "messages": 0.0}}
    (attempt,) = client.tries["x"]
    assert (attempt.outcome, attempt.exit_code, attempt.reason) == (Outcome.succeeded, 0, None)
    assert isinstance(attempt.usage, Usage)
    assert attempt.usage.wall_seconds > 0
    assert attempt.usage.max_rss_bytes > 100_000
    folder = tmp_path / "runs/r/attempts/x/0"
    assert (folder / "stdout.log").read_text() == "hello\n"
    assert (folder / "work/out").read_text() == "a b\n"
    assert json.loads((folder / "task.json").read_text()) == {"name": "a b", "worth": 0.5}
    assert [(c.what, c.rollout_id, c.attempt_id) for c in seen] == [
        (w, "x", "0") for w in ("started", "ended", "finished")
    ]


async def test_an_agents_failure_is_graded_and_keeps_the_end_of_its_stderr(tmp_path: Path) -> None:
    write(tmp_path, "grader.py", GRADER)
    script = "for i in $(seq 1 100); do echo line $i key=$OPENAI_API_KEY >&2; done; exit 3"
    config = make_config(tmp_path, agent={"command": ["sh", "-c", script]})
    client = FakeClient()
    await client.add_rollouts([NewRollout({}, rollout_id="x")])
    async with controlling(config, client):
        await client.until_finished()
    (attempt,) = client.tries["x"]
    assert (attempt.outcome, attempt.exit_code) == (Outcome.agent_failed, 3)
    assert attempt.reason is not None
    lines = attempt.reason.splitlines()
    assert lines[0].startswith("exit code 3")
    assert lines[1:] == [f"line {i} key=(token)" for i in range(81, 101)]
    assert client.store["x"].status.state is RolloutState.succeeded
    assert client.store["x"].status.error_message == attempt.reason
    assert reward_of(client, "x")["metrics"]["exit"] == 3.0


async def test_a_timeout_ends_every_process_even_daemons_that_ignore_sigterm(tmp_path: Path) -> None:
    write(tmp_path, "grader.py", GRADER)
    agent = write(
        tmp_path,
        "agent.py",
        """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.environ.clear()
        os.execve(sys.executable, ["python", "-c", "import time; time.sleep(600)", "daemon-" + sys.argv[1]], {})
    os._exit(0)
os.wait()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("ready", "w").close()
time.sleep(600)
""",
    )
    mark = f"mark-{os.getpid()}-timeout"
    config = make_config(tmp_path, agent={"command": ["python", str(agent), mark], "grace_seconds": 0.2})
    client = FakeClient()
    await client.add_rollouts([NewRollout({}, rollout_id="x", config=RolloutConfig(timeout_seconds=1.5))])
    async with controlling(config, client):
        await client.until_finished()
        (attempt,) = client.tries["x"]
        assert (attempt.outcome, attempt.exit_code) == (Outcome.agent_failed, -9)
        assert (attempt.reason or "").startswith("timeout after 1.5 s")
        assert (tmp_path / "runs/r/attempts/x/0/work/ready").exists()
        assert left_over(mark) == []
    assert client.store["x"].status.state is RolloutState.succeeded  # graded as it stands


async def test_a_daemon_does_not_outlive_an_agent_that_ends_by_itself(tmp_path: Path) -> None:
    write(tmp_path, "grader.py", GRADER)
    mark = f"mark-{os.getpid()}-daemon"
    # The daemon has a session, a parent and an environment that tell nothing of the agent.
    script = f"(setsid env -i {sys.executable} -c 'import time; time.sleep(600)' {mark} & ) ; sleep 0.3"
    config = make_config(tmp_path, agent={"command": ["sh", "-c", script]})
    client = FakeClient()
    await client.add_rollouts([NewRollout({}, rollout_id="x")])
    async with controlling(config, client):
        await client.until_finished()
        assert left_over(mark) == []
    assert client.tries["x"][0].outcome is Outcome.succeeded


async def test_stop_ends_agents_and_fails_their_rollouts(tmp_path: Path) -> None:
    write(tmp_path, "grader.py", GRADER)
    mark = f"mark-{os.getpid()}-stop"
    script = "trap 'echo asked > asked; exit 0' TERM; touch ready; while true; do sleep 0.05; done"
    config = make_config(
        tmp_path,
        agent={"command": ["sh", "-c", script], "env": {"MARK": mark}, "max_concurrent": 2, "grace_seconds": 5},
    )
    client = FakeClient()
    await client.add_rollouts([NewRollout({}, rollout_id=name) for name in "abc"])
    attempts = tmp_path / "runs/r/attempts"
    async with controlling(config, client) as stop:
        await until(lambda: len(list(attempts.glob("*/0/work/ready"))) == 2)
        stop.set()
    assert left_over(mark) == []
    assert [client.store[name].status.state.value for name in "abc"] == ["failed", "failed", "queuing"]
    assert client.store["a"].status.error_message == local.STOPPED
    assert client.tries["a"][0].outcome is Outcome.infrastructure_failed
    assert (attempts / "a/0/work/asked").exists()
    assert not client.posted


async def test_slots_bound_the_agents_and_are_refilled(tmp_path: Path) -> None:
    write(tmp_path, "grader.py", GRADER)
    script = f"echo + >> {tmp_path}/log; sleep 0.05; echo - >> {tmp_path}/log"
    config = make_config(tmp_path, agent={"command": ["sh", "-c", script], "max_concurrent": 3})
    client = FakeClient()
    seen: list[Change] = []
    async with controlling(config, client, on_change=seen.append):
        await client.add_rollouts([NewRollout({}) for _ in range(12)])
        await client.until_finished()
    assert all(r.status.state is RolloutState.succeeded for r in client.store.values())
    depth = [0]
    for sign in (tmp_path / "log").read_text().split():
        depth.append(depth[-1] + (1 if sign == "+" else -1))
    assert max(depth) == 3
    assert max(c.running for c in seen) == 3


async def test_infrastructure_failures_are_retried_then_fail_the_rollout(tmp_path: Path) -> None:
    write(tmp_path, "grader.py", GRADER)
    # The first attempt loses its supervisor: the agent kills its parent.
    config = make_config(
        tmp_path,
        agent={
            "command": [
                "sh",
                "-c",
                "test {task.always} = yes || case $LONGREIN_TASK in */1/*) exit 0;; esac; kill -9 $PPID; sleep 60",
            ],
            "max_attempts": 2,
        },
    )
    client = FakeClient()
    await client.add_rollouts(
        [NewRollout({"always": "no"}, rollout_id="once"), NewRollout({"always": "yes"}, rollout_id="always")]
    )
    async with controlling(config, client):
        await client.until_finished()
    assert [a.outcome for a in client.tries["once"]] == [Outcome.infrastructure_failed, Outcome.succeeded]
    assert client.store["once"].status.state is RolloutState.succeeded
    assert [a.outcome for a in client.tries["always"]] == [Outcome.infrastructure_failed] * 2
    assert client.store["always"].status.state is RolloutState.failed
    assert "supervisor was killed" in (client.store["always"].status.error_message or "")
    assert set(client.posted) == {("once", "1")}


async def test_an_engines_failure_is_not_the_agents(tmp_path: Path) -> None:
    write(tmp_path, "grader.py", GRADER)
    config = make_config(tmp_path, agent={"command": ["sh", "-c", "exit 1"]})
    client = FakeClient()
    call = Call(
        rollout_id="x", attempt_id="0", number=0, dialect="chat", mode="train", model="m", engine="policy",
        status="error", http_status=502, error={"message": "engine died"},
    )  # fmt: skip
    client.recorded["x", "0"] = [call]
    await client.add_rollouts([NewRollout({}, rollout_id="x")])
    async with controlling(config, client):
        await client.until_finished()
    assert [a.outcome for a in client.tries["x"]] == [Outcome.infrastructure_failed, Outcome.agent_failed]
    assert "502: engine died" in (client.tries["x"][0].reason or "")


async def test_a_gateway_that_goes_away_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("reconcile", "line"):
        monkeypatch.setattr(f"longrein.controller.{module}.FIRST_PAUSE", 0.01)
    write(tmp_path, "grader.py", GRADER)
    client = FakeClient()
    failures = {"rollouts": 2, "start_attempt": 2, "end_attempt": 2, "add_event": 1, "change_rollout": 1, "calls": 1}

    def broken(method: str) -> Exception | None:
        failures[method] = failures.get(method, 0) - 1
        error = ApiError(0, "refused") if failures[method] % 2 else ApiError(503, "starting")
        return error if failures[method] >= 0 else None

    client.broken = broken
    await client.add_rollouts([NewRollout({}, rollout_id="x")])
    async with controlling(make_config(tmp_path), client):
        await client.until_finished()
    assert client.store["x"].status.state is RolloutState.succeeded
    assert [a.outcome for a in client.tries["x"]] == [Outcome.succeeded]


async def test_clocks_stand_still_while_the_gateway_is_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrein.controller.reconcile.GATE_SECONDS", 0.05)
    write(tmp_path, "grader.py", GRADER)
    client = FakeClient()
    client.paused = True
    config = make_config(tmp_path, agent={"command": ["sh", "-c", "sleep 1.5"], "timeout_seconds": 0.7})
    await client.add_rollouts([NewRollout({}, rollout_id="x")])
    async with controlling(config, client):
        await client.until_finished()
        assert client.tries["x"][0].outcome is Outcome.succeeded
        client.paused = False
        await client.add_rollouts([NewRollout({}, rollout_id="y")])
        await client.until_finished()
        assert client.tries["y"][0].outcome is Outcome.agent_failed


async def test_what_an_earlier_controller_left_is_taken_up(tmp_path: Path) -> None:
    write(tmp_path, "grader.py", GRADER)
    client = FakeClient()
    names = ["open", "spent", "foreign"]
    await client.add_rollouts([NewRollout({}, rollout_id=name) for name in names])
    await client.start_attempt("open")
    for _ in range(2):
        await client.start_attempt("spent")
        client.tries["spent"][-1].ended_at = 1.0
    client.store["foreign"].status.state = RolloutState.running  # run by somebody without attempts
    async with controlling(make_config(tmp_path), client):
        await client.until(lambda: client.store["open"].status.state is RolloutState.succeeded)
    assert [a.outcome for a in client.tries["open"]] == [Outcome.infrastructure_failed, Outcome.succeeded]
    assert client.store["spent"].status.state is RolloutState.failed
    assert client.store["foreign"].status.state is RolloutState.running


async def test_a_rollout_that_cannot_be_started_does_not_hold_up_others(tmp_path: Path) -> None:
    write(tmp_path, "grader.py", GRADER)
    client = FakeClient()
    start, refusals = client.start_attempt, []

    async def start_attempt(rollout_id: str):
        if rollout_id.startswith("bad"):
            refusals.append(rollout_id)
            raise ApiError(409, "not now")
        return await start(rollout_id)

    client.start_attempt = start_attempt  # type: ignore[method-assign]
    names = ["bad0", "bad1", "bad2", "good0", "good1"]
    await client.add_rollouts([NewRollout({}, rollout_id=name) for name in names])
    async with controlling(make_config(tmp_path, agent={"max_concurrent": 1}), client):
        await client.until(lambda: all(client.store[n].status.state is RolloutState.succeeded for n in names[3:]))
    assert sorted(refusals) == names[:3]


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"command": ["no-such-program-x"]}, "no program 'no-such-program-x' in PATH"),
        ({"command": ["./missing.sh"]}, "there is no './missing.sh'"),
        ({"command": ["true", "{task.answer.deep}"]}, "agent.command: the task has no field 'answer.deep'; its fields are: q"),
        ({"env": {"A": "{task.z}"}}, "agent.env: A: the task has no field 'z'"),
        ({"env": {"OPENAI_API_KEY": "x"}}, "OPENAI_API_KEY is set by Longrein"),
        ({"workspace": "/no/such/folder"}, "agent.workspace: /no/such/folder is not a folder"),
        ({"command": []}, "set agent.command or agent.agent_class"),
        ({"preload": ["no_such_module_x"], "command": ["python", "a.py"]}, "importing no_such_module_x failed"),
    ],
)  # fmt: skip
async def test_what_no_attempt_can_start_is_not_retried(tmp_path: Path, agent: dict, message: str) -> None:
    client = FakeClient()
    await client.add_rollouts([NewRollout({"q": 1}, rollout_id="x")])
    config = make_config(tmp_path, agent={"max_attempts": 3, **agent}, reward={"from": "agent"})
    async with controlling(config, client):
        await client.until_finished()
    status = client.store["x"].status
    assert status.state is RolloutState.failed
    assert message in (status.error_message or "")
    assert len(client.tries["x"]) == 1


async def test_a_grader_that_raises_fails_the_rollout_only(tmp_path: Path) -> None:
    write(
        tmp_path,
        "grader.py",
        "def grade(task, *_):\n    if task['bad']: raise KeyError('nothing there')\n    return 1\n",
    )
    client = FakeClient()
    await client.add_rollouts([NewRollout({"bad": True}, rollout_id="x"), NewRollout({"bad": False}, rollout_id="y")])
    async with controlling(make_config(tmp_path), client):
        await client.until_finished()
    status = client.store["x"].status
    log = tmp_path / "runs/r/logs/grader.log"
    assert status.state is RolloutState.failed
    assert status.error_message == (
        f"reward.function grader:grade raised KeyError: 'nothing there' for rollout x attempt 0; its log is {log}"
    )
    assert "Traceback" in log.read_text()
    assert ("x", "0") not in client.posted
    assert reward_of(client, "y") == {"value": 1.0, "source": "grader"}


async def test_a_grader_that_rewards_a_call_that_was_not_made_is_said_so(tmp_path: Path) -> None:
    write(tmp_path, "grader.py", "def grade(*_):\n    return {'reward': 1, 'calls': {3: 0.5}}\n")
    client = FakeClient()
    await client.add_rollouts([NewRollout({}, rollout_id="x")])
    async with controlling(make_config(tmp_path), client):
        await client.until_finished()
    assert client.store["x"].status.state is RolloutState.failed
    assert client.store["x"].status.error_message == (
        "the grader rewards call 3, and the attempt has no call of that number"
    )
    assert ("x", "0") not in client.posted


async def test_a_reward_from_the_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient()
    await client.add_rollouts([NewRollout({}, rollout_id=name) for name in ("none", "two", "nan")])
    await client.add_event("two", "0", NewEvent("reward", {"value": 0}))
    await client.add_event("two", "0", NewEvent("reward", {"value": True}))
    await client.add_event("nan", "0", NewEvent("reward", {"value": "high"}))
    with caplog.at_level(logging.WARNING):
        async with controlling(make_config(tmp_path, reward={"from": "agent", "function": ""}), client):
            await client.until_finished()
    assert client.store["two"].status.state is RolloutState.succeeded
    assert client.store["none"].status.state is RolloutState.failed
    assert "no reward was posted" in (client.store["none"].status.error_message or "")
    assert "'high'" in (client.store["nan"].status.error_message or "")
    assert sum("anything in an agent's process can post one" in r.message for r in caplog.records) == 1


async def test_native_windows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import psutil, sys; sys.modules['resource'] = None; import longrein.controller.reconcile"  # which Windows lacks
    importing = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await importing.wait() == 0
    monkeypatch.setattr(local.sys, "platform", "win32")
    with pytest.raises(ConfigError, match="WSL2"):
        await run_controller(make_config(tmp_path), FakeClient(), asyncio.Event())


def test_the_transcript_is_the_last_answered_main_call() -> None:
    def call(number: int, **fields: object) -> Call:
        base = {
            "rollout_id": "r",
            "attempt_id": "0",
            "dialect": "chat",
            "mode": "train",
            "model": "m",
            "engine": "policy",
        }
        return Call(**{**base, "number": number, **fields})  # type: ignore[arg-type]

    user, reply, tool, done = (
        {"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a"), ("tool", "t"), ("assistant", "b"))
    )
    calls = [
        call(0, messages=[user], reply=reply),
        call(1, parent=0, messages_keep=2, messages=[tool], reply=done),
        call(2, kind="title", messages=[{"role": "user", "content": "title?"}], reply={"role": "assistant", "content": "T"}),
        call(3, parent=1, messages_keep=4, messages=[user], status="error", http_status=400),
    ]  # fmt: skip
    assert transcript(calls) == [user, reply, tool, done]
    assert transcript([]) == []
