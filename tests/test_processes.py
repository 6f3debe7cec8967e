"""Gateway, controller and trainer as processes of their own, against each other over HTTP; and what becomes of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from longrein.config import load
from longrein.processes import ChildFailed, Children
from longrein.records import RolloutState
from longrein.run import prepare, start_gateway
from longrein.store import Store
from longrein.trainer import checkpoint
from tiny_run import write_run

DEADLINE = 120.0

STOP = "trainer.preflight=false", "eval.before=false", "eval.after=false"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("tiny"))


@contextmanager
def longrein(command: str, file: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`longrein COMMAND FILE ARGUMENTS…`, ended when the block ends."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "longrein.cli", command, str(file), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def output_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    text, _ = process.communicate(timeout=DEADLINE)
    return process.returncode, text


def until(true: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until `true()`; a process that ends before has failed."""
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in metrics_of(run) if line["kind"] == "step"]


def processes_of(folder: Path) -> list[str]:
    """Command lines of the living processes that have to do with a run."""
    found = []
    for process in psutil.process_iter(["cmdline", "status", "cwd"]):
        line = " ".join(process.info["cmdline"] or [])
        inside = str(folder) in line or str(process.info["cwd"] or "").startswith(str(folder))
        if inside and process.pid != os.getpid() and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(f"{process.pid} {line}")
    return found


def set_of(*options: str) -> list[str]:
    return [part for option in options for part in ("--set", option)]


def test_three_processes_train_together(run_file: Path) -> None:
    run = run_file.parent / "runs" / "three"
    named = set_of("run.name=three")
    with longrein("gateway", run_file, *named) as gateway:
        until((run / "gateway.json").exists, gateway)
        url = json.loads((run / "gateway.json").read_text())["url"]
        assert oct((run / "key").stat().st_mode & 0o777) == "0o600"
        with longrein("controller", run_file, *named) as controller:
            theirs = set_of(f"gateway.url={url}", "agent.controller=external", "trainer.steps=1", *STOP[:2])
            with longrein("train", run_file, *named, *theirs) as trainer:
                status, text = output_of(trainer)
            assert status == 0, text
            assert "held-out reward after" in text
            assert controller.poll() is None
            assert gateway.poll() is None
            for process in (controller, gateway):
                process.terminate()
                status, text = output_of(process)
                assert status == 0, text
    assert steps_of(run) == [1]
    store = Store.open(f"sqlite:///{run / 'store.sqlite'}", read_only=True)
    rollouts = store.rollouts()
    assert {rollout.status.state for rollout in rollouts} == {RolloutState.succeeded}
    assert len(rollouts) == 2 * 4 + 4
    assert all(len(store.calls(r.rollout_id, "0")) == 1 for r in rollouts)
    store.close()
    assert processes_of(run_file.parent) == []


def test_a_checkpoint_is_served_as_an_openai_endpoint(run_file: Path) -> None:
    with longrein("serve", run_file.parent / "model", "--port", "0") as server:
        assert server.stdout is not None
        said: dict[str, str] = {}
        for line in server.stdout:
            name, equals, value = line.strip().partition("=")
            if equals:
                said[name] = value
            if line.startswith("Ctrl-C"):
                break
        headers = {"authorization": f"Bearer {said['OPENAI_API_KEY']}"}
        asked = {"model": "policy", "max_tokens": 3, "messages": [{"role": "user", "content": "say a"}]}
        answer = httpx.post(f"{said['OPENAI_BASE_URL']}/chat/completions", json=asked, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] <= 3
        server.send_signal(signal.SIGINT)
        status, text = output_of(server)
    assert status == 128 + signal.SIGINT, text


def test_what_happens_to_its_processes_ends_a_run_and_it_can_be_gone_on_with(run_file: Path) -> None:
    run = run_file.parent / "runs" / "ended"
    options = set_of("run.name=ended", "run.max_restarts=0", "trainer.steps=1000", "trainer.checkpoint_every=1", *STOP)

    with longrein("train", run_file, *options) as trainer:  # its gateway is killed
        until(lambda: len(steps_of(run)) >= 2, trainer)
        os.kill(json.loads((run / "gateway.json").read_text())["pid"], signal.SIGKILL)
        status, text = output_of(trainer)
    assert status == 1
    assert "longrein: the gateway process was ended by signal 9" in text
    assert f"--- end of {run / 'logs' / 'gateway.log'}" in text
    assert "Traceback" not in text
    assert processes_of(run_file.parent) == []

    first = len(steps_of(run))
    with longrein("train", run_file, *options, "--resume") as trainer:  # Ctrl-C
        until(lambda: len(steps_of(run)) >= first + 2, trainer)
        with longrein("train", run_file, *options, "--resume") as second:
            status, text = output_of(second)
        assert (status, "a run is going on there" in text) == (2, True)
        trainer.send_signal(signal.SIGINT)
        status, text = output_of(trainer)
    assert status == 128 + signal.SIGINT, text
    assert "--resume` goes on from the last checkpoint" in text
    assert processes_of(run_file.parent) == []

    steps = steps_of(run)
    assert steps == list(range(1, len(steps) + 1))  # each once
    latest = checkpoint.latest(run)
    assert latest is not None
    assert checkpoint.read_state(latest).step >= steps[-1] - 1


def test_a_gateway_and_a_controller_that_are_killed_are_started_again(run_file: Path) -> None:
    run = run_file.parent / "runs" / "again"
    options = set_of("run.name=again", "run.max_restarts=1", "trainer.steps=1000", "agent.max_attempts=9", *STOP)

    def note() -> dict[str, Any]:
        return json.loads((run / "gateway.json").read_text())

    def goes_on() -> None:
        done = len(steps_of(run))
        until(lambda: len(steps_of(run)) >= done + 2, trainer)

    with longrein("train", run_file, *options) as trainer:
        until(lambda: len(steps_of(run)) >= 1, trainer)
        first = note()
        os.kill(first["pid"], signal.SIGKILL)
        goes_on()
        assert note()["url"] == first["url"]  # which harnesses know
        assert note()["pid"] != first["pid"]
        controllers = [int(line.split()[0]) for line in processes_of(run_file.parent) if " controller " in line]
        assert len(controllers) == 1
        os.kill(controllers[0], signal.SIGKILL)
        goes_on()
        os.kill(note()["pid"], signal.SIGKILL)  # once too often
        status, text = output_of(trainer)
    assert status == 1
    assert "longrein: the gateway process was ended by signal 9" in text
    said = [line["text"] for line in metrics_of(run) if line["kind"] == "warning"]
    assert [text.split(";")[0] for text in said if "started again" in text] == [
        "the gateway process was ended by signal 9",
        "the controller process was ended by signal 9",
    ]
    assert processes_of(run_file.parent) == []


PARENT = """
import asyncio, sys
from pathlib import Path
from longrein.config import load
from longrein.processes import Children
from longrein.run import Prepared, start_child_of, start_gateway, prepare

async def main():
    prepared = prepare(load(sys.argv[1], ["run.name=orphans"]))
    async with Children(5.0) as children:
        url = await start_gateway(children, prepared)
        controller = await start_child_of(children, "controller", prepared, url)
        print(controller.process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_children_end_with_a_parent_that_is_killed(run_file: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(run_file)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        controller = int(parent.stdout.readline())
        gateway = json.loads((run_file.parent / "runs" / "orphans" / "gateway.json").read_text())["pid"]
        assert psutil.pid_exists(controller)
        assert psutil.pid_exists(gateway)
        parent.kill()
    until(lambda: processes_of(run_file.parent) == [])
    assert not (run_file.parent / "runs" / "orphans" / "gateway.json").exists()  # it ended in an orderly way


async def test_a_gateway_that_cannot_start_is_an_error_with_its_words(run_file: Path) -> None:
    (run_file.parent / "broken.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    prepared = prepare(load(run_file, ["run.name=broken", f"model.chat_template={run_file.parent}/broken.jinja"]))
    with pytest.raises(ChildFailed, match=r"(?s)gateway process ended with exit status 2.*has no generation prompt"):
        async with Children(5.0) as children:
            await start_gateway(children, prepared)
    assert processes_of(run_file.parent) == []
