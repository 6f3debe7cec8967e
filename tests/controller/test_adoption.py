"""What outlives a controller, a launcher, a supervisor that are killed; and what is taken up, once, by the next one."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from gateway.serving import Served, serving
from longrein.client import ApiError, Client
from longrein.config import ConfigError
from longrein.controller.adoption import Control, Journal, take_control
from longrein.controller.local import Site, base_environment, go_on
from longrein.controller.reconcile import run_controller
from longrein.controller.supervisor import boot, start_time
from longrein.controller.warmstart import Exit, InfrastructureError, Launcher, Process, Program
from longrein.records import Attempt, NewEvent, NewRollout, Outcome, Rollout, RolloutState

from .fakes import FakeClient, controlling, make_config, until, write
from .processes import KEY, alive, journals, kill, longrein, options_of, processes_in

GRADER = "def grade(task, transcript, workspace, exit_status):\n    return {'reward': 1, 'exit': exit_status}\n"

# Says that it runs, and ends when it is told to.
AGENT = """
import os, sys, time
with open(sys.argv[1] + "/pids", "a") as file:
    file.write(f"{os.environ['LONGREIN_TASK']} {os.getpid()}\\n")
print("key", os.environ["OPENAI_API_KEY"], file=sys.stderr, flush=True)
while not os.path.exists(sys.argv[1] + "/go"):
    time.sleep(0.01)
sys.exit(int(open(sys.argv[1] + "/go").read() or 0))
"""


@pytest_asyncio.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path / "gateway") as served:
        yield served


def setting(tmp_path: Path, url: str, **agent: Any) -> list[str]:
    write(tmp_path, "agent.py", AGENT)
    write(tmp_path, "grader.py", GRADER)
    agent = {"command": ["python", "agent.py", str(tmp_path)], "grace_seconds": 0.5, "max_concurrent": 2, **agent}
    return options_of(tmp_path, agent=agent, reward={"function": "grader:grade"}, gateway={"url": url})


def pids(tmp_path: Path) -> list[tuple[str, int]]:
    """The attempts that began, and their agents."""
    file = tmp_path / "pids"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(Path(task).parent.name, int(pid)) for task, pid in map(str.split, lines)]


async def finished(client: Client, count: int) -> None:
    after = total = 0
    async with asyncio.timeout(120):
        while total < count:
            page = await client.terminal(after, wait=20)
            after, total = page.next_after, page.total_terminal


async def rewards(client: Client, rollout_id: str, attempt_id: str) -> list[Any]:
    return [event.data["value"] for event in await client.events(rollout_id, attempt_id, "reward")]


# --- The controller is killed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("preload", [[], ["json"]])
async def test_the_next_controller_goes_on_with_a_running_agent(
    tmp_path: Path, gateway: Served, preload: list[str]
) -> None:
    options = setting(tmp_path, gateway.url, preload=preload)
    log = tmp_path / "log"
    async with Client(gateway.url, KEY) as client:
        await client.add_rollouts([NewRollout({}, rollout_id="x")])
        async with longrein("controller", log, *options) as first:
            await until(lambda: len(pids(tmp_path)) == 1)
            await kill(first)
        (journal,) = journals(tmp_path / "runs/r")
        agent = pids(tmp_path)[0][1]
        assert journal["agent"][0] == agent
        assert alive(agent)
        async with longrein("controller", log, *options):
            await until(lambda: f"attempt 0 of rollout x runs on, as process {agent}" in log.read_text())
            assert alive(agent)
            (tmp_path / "go").write_text("3")
            await finished(client, 1)
        (attempt,) = await client.attempts("x")
        assert (attempt.outcome, attempt.exit_code) == (Outcome.agent_failed, 3)
        assert "key (token)" in (attempt.reason or "")  # which this controller never knew
        assert await rewards(client, "x", "0") == [1.0]
        assert pids(tmp_path) == [("0", agent)]
    assert journals(tmp_path / "runs/r") == []
    assert processes_in(tmp_path) == []


async def test_an_agent_that_ended_meanwhile_is_graded_by_the_next_controller(tmp_path: Path, gateway: Served) -> None:
    options = setting(tmp_path, gateway.url)
    async with Client(gateway.url, KEY) as client:
        await client.add_rollouts([NewRollout({}, rollout_id="x")])
        async with longrein("controller", tmp_path / "log", *options) as first:
            await until(lambda: len(pids(tmp_path)) == 1)
            await kill(first)
        (tmp_path / "go").write_text("0")
        await until(lambda: "exit" in journals(tmp_path / "runs/r")[0])
        await until(lambda: processes_in(tmp_path) == [])
        async with longrein("controller", tmp_path / "log", *options):
            await finished(client, 1)
        (attempt,) = await client.attempts("x")
        assert (attempt.outcome, attempt.exit_code) == (Outcome.succeeded, 0)
        assert await rewards(client, "x", "0") == [1.0]


async def test_nobody_comes_and_the_agent_is_ended_then_tried_again(tmp_path: Path, gateway: Served) -> None:
    options = setting(tmp_path, gateway.url, adopt_seconds=0.3)
    async with Client(gateway.url, KEY) as client:
        await client.add_rollouts([NewRollout({}, rollout_id="x")])
        async with longrein("controller", tmp_path / "log", *options) as first:
            await until(lambda: len(pids(tmp_path)) == 1)
            await kill(first)
        await until(lambda: processes_in(tmp_path) == [])
        (tmp_path / "go").write_text("0")
        async with longrein("controller", tmp_path / "log", *options):
            await finished(client, 1)
        lost, good = await client.attempts("x")
        assert (lost.outcome, good.outcome) == (Outcome.infrastructure_failed, Outcome.succeeded)
        assert lost.reason == "no controller came back within 0.3 s (agent.adopt_seconds)"
        assert await rewards(client, "x", "0") == []
        assert await rewards(client, "x", "1") == [1.0]


async def test_an_agents_time_goes_on_with_the_next_controller(tmp_path: Path, gateway: Served) -> None:
    options = setting(tmp_path, gateway.url, timeout_seconds=4.0)
    log = tmp_path / "log"
    async with Client(gateway.url, KEY) as client:
        await client.add_rollouts([NewRollout({}, rollout_id="x")])
        async with longrein("controller", log, *options) as first:
            await until(lambda: len(pids(tmp_path)) == 1)
            await kill(first)
        async with longrein("controller", log, *options):
            await finished(client, 1)
        (attempt,) = await client.attempts("x")
        assert attempt.outcome is Outcome.agent_failed
        assert (attempt.reason or "").startswith("timeout after 4 s")
    assert processes_in(tmp_path) == []


async def test_what_was_cancelled_or_deleted_while_there_was_no_controller_is_ended(
    tmp_path: Path, gateway: Served
) -> None:
    options = setting(tmp_path, gateway.url)
    async with Client(gateway.url, KEY) as client:
        await client.add_rollouts([NewRollout({}, rollout_id=name) for name in ("cancelled", "deleted")])
        async with longrein("controller", tmp_path / "log", *options) as first:
            await until(lambda: len(pids(tmp_path)) == 2)
            await kill(first)
        change = {"status": {"state": "failed", "error_message": "not wanted"}}
        assert (await gateway.http.patch("/api/rollouts/cancelled", json=change)).status_code == 200
        await client.delete_rollout("deleted")
        async with longrein("controller", tmp_path / "log", *options):
            await until(lambda: not any(alive(pid) for _, pid in pids(tmp_path)))
            await until(lambda: journals(tmp_path / "runs/r") == [])
        (attempt,) = await client.attempts("cancelled")
        assert attempt.outcome is Outcome.infrastructure_failed
        assert (await client.rollout("cancelled")).rollout.status.error_message == "not wanted"
    assert processes_in(tmp_path) == []


async def test_an_orderly_stop_ends_agents_that_were_taken_over_too(tmp_path: Path, gateway: Served) -> None:
    options = setting(tmp_path, gateway.url)
    log = tmp_path / "log"
    async with Client(gateway.url, KEY) as client:
        await client.add_rollouts([NewRollout({}, rollout_id="x")])
        async with longrein("controller", log, *options) as first:
            await until(lambda: len(pids(tmp_path)) == 1)
            await kill(first)
        async with longrein("controller", log, *options) as second:
            await until(lambda: "runs on, as process" in log.read_text())
        assert second.returncode == 0
        status = (await client.rollout("x")).rollout.status
        assert (status.state, status.error_message) == (RolloutState.failed, "the controller was stopped")
    assert processes_in(tmp_path) == []


# --- What stands between an ended agent and its reward ------------------------------------------------------------


@pytest.mark.parametrize("posted", [False, True])
async def test_what_was_not_graded_is_graded_and_what_was_is_not(
    tmp_path: Path, posted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longrein.controller.line.FIRST_PAUSE", 0.01)
    write(tmp_path, "grader.py", GRADER)
    client = FakeClient()
    await client.add_rollouts([NewRollout({}, rollout_id="x")])
    await client.start_attempt("x")
    attempt = client.tries["x"][0]
    attempt.ended_at, attempt.outcome, attempt.exit_code = 1.0, Outcome.agent_failed, 7
    if posted:
        await client.add_event("x", "0", NewEvent("reward", {"value": 0.5, "source": "grader"}))
    failures = iter([ApiError(0, "refused"), ApiError(503, "starting")])  # a gateway that is not quite there
    client.broken = lambda method: next(failures, None) if method == "events" else None
    async with controlling(make_config(tmp_path), client):
        await client.until_finished()
    assert client.store["x"].status.state is RolloutState.succeeded
    assert len(client.tries["x"]) == 1
    (event,) = client.posted["x", "0"]
    assert (event.data["value"], event.data.get("metrics")) == ((0.5, None) if posted else (1.0, {"exit": 7.0}))


async def test_a_reward_whose_answer_is_lost_is_posted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrein.controller.line.FIRST_PAUSE", 0.01)
    write(tmp_path, "grader.py", GRADER)
    client = FakeClient()
    add, losses = client.add_event, []

    async def add_event(rollout_id: str, attempt_id: str, event: NewEvent):
        made = await add(rollout_id, attempt_id, event)
        if not losses:
            losses.append(made)
            raise ApiError(0, "the answer is lost")
        return made

    client.add_event = add_event  # type: ignore[method-assign]
    await client.add_rollouts([NewRollout({}, rollout_id="x")])
    async with controlling(make_config(tmp_path), client):
        await client.until_finished()
    assert len(losses) == len(client.posted["x", "0"]) == 1


# --- One controller to a run --------------------------------------------------------------------------------------


async def test_a_second_controller_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    client = FakeClient()
    write(tmp_path, "grader.py", GRADER)
    async with controlling(config, client):
        await client.add_rollouts([NewRollout({}, rollout_id="x")])
        await client.until_finished()
        with pytest.raises(
            ConfigError, match=rf"a controller of the run .*runs/r works already \(process {os.getpid()}\)"
        ):
            await run_controller(config, client, asyncio.Event())
        command = [sys.executable, "-m", "longrein.cli", "controller"]
        for option in [*options_of(tmp_path, gateway={"url": "http://127.0.0.1:1", "key": "k"})]:
            command += ["--set", option]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "works already" in done.stderr
    with take_control(tmp_path / "runs/r/control", 1.0):
        pass  # the lock ended with it


# --- Journals, numbers that are used again, supervisors that are killed ---------------------------------------------


async def spawn(launcher: Launcher, control: Control | None, folder: Path, *command: str, **request: Any) -> Process:
    task_file = folder / "task.json"
    attempt = Attempt("r", "0", started_at=5.5)
    return await launcher.spawn(
        Program("exec", "/bin/sh", ["sh", "-c", *command]),
        environment={**base_environment(), "LONGREIN_TASK": str(task_file)},
        directory=folder,
        stdout=folder / "stdout.log",
        stderr=folder / "stderr.log",
        control={**control.request(attempt, task_file), **request} if control else None,
    )


@pytest_asyncio.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[Launcher]:
    launcher = Launcher(sys.executable, [], base_environment(), tmp_path / "launcher.log")
    yield launcher
    await launcher.close()


def drop(process: Process) -> None:
    """Let go of an agent as a killed controller does: without a word."""
    process._writer.transport.abort()


async def test_a_supervisor_is_found_under_a_path_of_any_length(tmp_path: Path, launcher: Launcher) -> None:
    folder = tmp_path / ("long-" * 30) / "control"
    with take_control(folder, 60.0) as control:
        process = await spawn(launcher, control, tmp_path, "sleep 600")
        assert oct(folder.stat().st_mode & 0o777) == "0o700"
        drop(process)
        (journal,) = control.journals()
        assert (journal.of, journal.started_at, journal.exit) == (("r", "0"), 5.5, None)
        assert journal.agent == (process.pid, start_time(process.pid))
        taken = await control.adopt(journal)
        assert isinstance(taken, Process)
        assert (taken.pid, taken.watched_seconds > 0) == (process.pid, True)
        drop(taken)
        again = await control.adopt(journal)
        assert isinstance(again, Process)
        assert again.watched_seconds > taken.watched_seconds
        again.end(0.0, "timeout")
        ended = await again.wait()
        assert (ended.code, ended.cut) in ((-signal.SIGTERM, "timeout"), (-signal.SIGKILL, "timeout"))
        told = await control.adopt(journal)  # nobody is there any more; the journal says it
        assert told == ended
        control.forget("r", "0")
        assert control.journals() == []


async def test_the_time_under_earlier_controllers_counts_and_held_time_does_not(
    tmp_path: Path, launcher: Launcher
) -> None:
    agent = make_config(tmp_path, agent={"timeout_seconds": 600.0}).agent
    rollout, attempt = Rollout("r", {}), Attempt("r", "0", started_at=5.5)
    with take_control(tmp_path / "control", 60.0) as control:

        async def taken_over(held: float) -> str:
            """How an agent ends that ran 1000 s, for `held` of which the gateway was away; it is stopped at once."""
            drop(await spawn(launcher, control, tmp_path, "sleep 600"))
            (journal,) = control.journals()
            found = await control.adopt(journal)
            assert isinstance(found, Process)
            found.watched_seconds = 1000.0
            stop = asyncio.Event()
            stop.set()
            site = Site(agent, tmp_path, tmp_path / "attempts", "", launcher, lambda: held, control)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Control, "adopt", lambda self, journal: asyncio.sleep(0, found))
                if held < 400:
                    stop.clear()
                return (await go_on(site, rollout, attempt, journal, stop)).reason or ""

        assert (await taken_over(0.0)).startswith("timeout after 600 s")
        assert await taken_over(500.0) == "the controller was stopped"


async def test_a_supervisor_that_comes_after_the_next_controller_starts_nothing(
    tmp_path: Path, launcher: Launcher
) -> None:
    with take_control(tmp_path / "control", 60.0) as control:
        with pytest.raises(InfrastructureError, match="supervisor"):
            await spawn(launcher, control, tmp_path, "touch ran", controller="1 2\n")
        assert control.journals() == []
        await launcher.close()  # after which no supervisor is left
    assert not (tmp_path / "ran").exists()
    assert [file.suffix for file in (tmp_path / "control").iterdir()] == [""]


async def test_a_number_that_is_used_again_is_neither_adopted_nor_killed(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)  # noqa: ASYNC220
    with other, take_control(tmp_path, 60.0) as control:
        start = start_time(other.pid)
        assert start is not None
        facts: dict[str, Any] = {"started_at": 1.0, "began": 1.0, "held": 0.0, "gateway": "", "task_file": "/none"}
        for wrong in ({"start": start - 1, "boot": boot()}, {"start": start, "boot": "another"}):
            process = (other.pid, wrong["start"])
            journal = Journal("r", "0", **facts, boot=wrong["boot"], supervisor=process, agent=process, exit=None)
            with pytest.raises(InfrastructureError):
                await control.adopt(journal)
            await control.end(journal)
            assert other.poll() is None
        same = (other.pid, start)
        await control.end(Journal("r", "0", **facts, boot=boot(), supervisor=same, agent=same, exit=None))
        assert other.wait(30) == -signal.SIGKILL


async def test_an_unfinished_line_of_a_journal_is_no_line(tmp_path: Path, launcher: Launcher) -> None:
    with take_control(tmp_path / "control", 60.0) as control:
        process = await spawn(launcher, control, tmp_path, "exit 4")
        assert (await process.wait()).code == 4
        process.close()
        (file,) = (tmp_path / "control").glob("*.jsonl")
        whole = file.read_bytes()
        (journal,) = control.journals()
        assert isinstance(journal.exit, Exit)
        file.write_bytes(whole[:-1])
        assert control.journals()[0].exit is None
        first, second, third = whole.splitlines(keepends=True)
        file.write_bytes(first + second[:9] + third)
        assert (control.journals()[0].agent, control.journals()[0].exit) == (None, None)
        file.write_bytes(whole[:20])
        assert control.journals() == []


# Leaves a child in a session of its own, and one that is a bare fork.
TWINS = """
import os, subprocess, sys, time
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
pid = os.fork()
print(pid or os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("preload", [[], ["json", "subprocess"]])
async def test_nothing_is_left_when_launcher_and_supervisor_are_killed(tmp_path: Path, preload: list[str]) -> None:
    write(tmp_path, "agent.py", TWINS)
    write(tmp_path, "grader.py", GRADER)
    config = make_config(tmp_path, agent={"command": ["python", "agent.py"], "preload": preload, "max_attempts": 1})
    client = FakeClient()
    await client.add_rollouts([NewRollout({}, rollout_id="x")])
    said = tmp_path / "runs/r/attempts/x/0/stdout.log"
    async with controlling(config, client):
        await until(lambda: said.exists() and len(said.read_text().split()) == 3)
        (journal,) = journals(tmp_path / "runs/r")
        family = {*map(int, said.read_text().split()), journal["agent"][0], journal["supervisor"][0]}
        launcher = psutil.Process(journal["supervisor"][0]).ppid()
        os.kill(launcher, signal.SIGSTOP)  # so that it does not clear up
        os.kill(journal["supervisor"][0], signal.SIGKILL)
        os.kill(launcher, signal.SIGKILL)
        await client.until_finished()
        assert [pid for pid in family if alive(pid)] == []
    (attempt,) = client.tries["x"]
    assert attempt.outcome is Outcome.infrastructure_failed
    assert "supervisor was killed" in (attempt.reason or "")
    assert client.store["x"].status.state is RolloutState.failed


async def test_what_is_left_of_all_is_killed_by_the_next_controller(tmp_path: Path, gateway: Served) -> None:
    options = setting(tmp_path, gateway.url)
    async with Client(gateway.url, KEY) as client:
        await client.add_rollouts([NewRollout({}, rollout_id="x")])
        async with longrein("controller", tmp_path / "log", *options) as first:
            await until(lambda: len(pids(tmp_path)) == 1)
            (journal,) = journals(tmp_path / "runs/r")
            launcher = psutil.Process(journal["supervisor"][0]).ppid()
            for pid in (first.pid, launcher, journal["supervisor"][0]):
                os.kill(pid, signal.SIGKILL)
            await first.wait()
        await until(lambda: not alive(journal["agent"][0]))  # killed with its supervisor
        (tmp_path / "go").write_text("0")
        async with longrein("controller", tmp_path / "log", *options):
            await finished(client, 1)
        lost, good = await client.attempts("x")
        assert (lost.outcome, good.outcome) == (Outcome.infrastructure_failed, Outcome.succeeded)
        assert "supervisor was lost" in (lost.reason or "")
    assert processes_in(tmp_path) == []


def test_the_journal_holds_no_token(tmp_path: Path) -> None:
    with take_control(tmp_path, 60.0) as control:
        request = control.request(Attempt("r", "0", started_at=1.0), tmp_path / "task.json")
    assert "lr-at" not in json.dumps(request)
