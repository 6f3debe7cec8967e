"""Runs whose trainer is killed and that are gone on with, against runs that nothing happened to: real processes, weights."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from longrein.records import Outcome, RolloutState
from longrein.report import _token_report
from longrein.store import Store
from longrein.trainer import checkpoint
from longrein.trainer.journal import Past
from longrein.trajectory.report import render_markdown
from test_processes import STOP, longrein, metrics_of, output_of, processes_of, set_of, steps_of, until
from tiny_run import write_run

STUDENT, CHECKPOINT = "longrein.trainer.student:Student", "longrein.trainer.checkpoint"
#: Where a trainer dies, one start after the other.
DEATHS = [
    (f"{STUDENT}.imitate", 2, "after"),  # in the warm-up
    (f"{STUDENT}.update", 2, "after"),  # between learning and publishing
    (f"{CHECKPOINT}:_flush", 1, "before"),  # inside a checkpoint
    ("longrein.trainer.tracking:Tracker.step", 3, "after"),  # between publishing and a checkpoint
]

WARM_UP = """
[warmup]
steps = 3
teacher = "tiny_grader:teach"
pass_reward = 0.5
until = 1.0
check_after = 3
dev_tasks = 4
rollouts_per_step = 4
"""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("tiny"), WARM_UP)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    folder = checkpoint.latest(run)
    assert folder is not None
    return load_file(folder / "model.safetensors")


def numbers_of(run: Path) -> list[dict[str, Any]]:
    """The steps' numbers, without times."""
    untimed = re.compile(r"time.*|.*seconds|.*per_second")
    lines = [line for line in metrics_of(run) if line["kind"] in ("step", "warmup")]
    return [{name: value for name, value in line.items() if not untimed.fullmatch(name)} for line in lines]


@pytest.mark.timeout(900)
def test_a_run_whose_trainer_is_killed_again_and_again_ends_with_the_same_weights(run_file: Path) -> None:
    """One agent at a time, so that what is computed together, and its rounding, is the same in both runs."""
    options = [
        *("trainer.steps=4", "trainer.checkpoint_every=2", "agent.max_concurrent=1", "engine.cache_tokens=0"),
        *("algorithm.updates_per_batch=2", "eval.every=3", *STOP[:1], "run.max_restarts=0"),
    ]
    unbroken, broken = run_file.parent / "runs" / "unbroken", run_file.parent / "runs" / "broken"
    with longrein("train", run_file, *set_of("run.name=unbroken", *options)) as trainer:
        status, text = output_of(trainer)
        assert status == 0, text

    resume: list[str] = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for place, number, when in DEATHS:
        command = [sys.executable, str(Path(__file__).parent / "dying.py"), place, str(number), when, "train"]
        command += [str(run_file), *set_of("run.name=broken", *options), *resume]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stdout + ended.stderr
        resume = ["--resume"]
    with longrein("train", run_file, *set_of("run.name=broken", *options), "--resume") as trainer:
        status, text = output_of(trainer)
        assert status == 0, text

    assert numbers_of(broken) == numbers_of(unbroken)
    there, here = weights_of(unbroken), weights_of(broken)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in there)
    assert not list((broken / "checkpoints").glob(".*"))
    until(lambda: processes_of(run_file.parent) == [])
    for name in ("before", "step-3", "after"):
        rewards = [json.loads((run / f"eval-{name}.json").read_text())["rewards"] for run in (unbroken, broken)]
        assert rewards[0] == rewards[1]


PATIENT_AGENT = '''\
"""Talks for some turns, and never gives up. In the second step it waits after the first turn until it may go on."""
import json, os, time, urllib.request

task = json.load(open(os.environ["LONGREIN_TASK"]))
messages, word = [{"role": "user", "content": task["ask"]}], ""
for turn in range(4):
    body = {"model": "policy", "max_tokens": 16, "messages": messages, "stream": True}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
    )
    said = ""
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data.startswith("{"):
                choices = json.loads(data)["choices"]
                said += (choices[0]["delta"].get("content") or "") if choices else ""
    word += said
    while "s00002" in os.environ["OPENAI_BASE_URL"] and not os.path.exists("GO"):
        time.sleep(0.05)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
open("answer.txt", "w").write(word)
'''


@pytest.mark.timeout(600)
def test_agents_live_on_while_the_trainer_with_its_engine_is_away(run_file: Path) -> None:
    """The embedded engine dies with the trainer; calls wait for the next one, at another port."""
    run = run_file.parent / "runs" / "away"
    go = run_file.parent / "go"
    (run_file.parent / "patient.py").write_text(PATIENT_AGENT.replace("GO", str(go)))
    named = set_of("run.name=away", 'agent.command=["python", "patient.py"]', "warmup.steps=0", "agent.max_attempts=1")
    if os.geteuid() == 0:  # they look for a file outside of their directory
        named += set_of("agent.user=root")

    def record() -> Store:
        return Store.open(f"sqlite:///{run / 'store.sqlite'}", read_only=True)

    def begun() -> list[str]:
        """Rollouts of the second step that run and have been answered once."""
        store = record()
        try:
            running = [r.rollout_id for r in store.rollouts([RolloutState.running]) if "s00002" in r.rollout_id]
            return [name for name in running if store.calls(name, "0")]
        finally:
            store.close()

    with longrein("gateway", run_file, *named) as gateway:
        until((run / "gateway.json").exists, gateway)
        url = json.loads((run / "gateway.json").read_text())["url"]
        with longrein("controller", run_file, *named):
            theirs = [
                *set_of(
                    f"gateway.url={url}",
                    "trainer.checkpoint_every=1",
                    "trainer.steps=3",
                    *STOP,
                    "agent.controller=external",
                )
            ]
            with longrein("train", run_file, *named, *theirs) as trainer:
                until(lambda: bool(begun()), trainer)
                caught = begun()
                trainer.kill()
                trainer.wait()
            go.touch()  # they ask for more while there is no engine
            with longrein("train", run_file, *named, *theirs, "--resume") as trainer:
                status, text = output_of(trainer)
            assert status == 0, text
    assert steps_of(run) == [1, 2, 3]
    store = record()
    try:
        past = Past.read(run)
        assert past is not None
        for name in caught:
            [attempt] = store.attempts(name)
            assert attempt.outcome is Outcome.succeeded, attempt.reason
            assert len(past.lessons()[name]) == 1
        assert len({model.endpoint for model in store.models() if model.model == "policy"}) == 1
        assert {rollout.status.state for rollout in store.rollouts()} == {RolloutState.succeeded}
    finally:
        store.close()
    report = _token_report(run)
    assert report.differing == {}
    assert report.tokens.trained == sum(one.tokens for found in past.lessons().values() for one in found)
    assert "Learned from otherwise" not in render_markdown(report)
