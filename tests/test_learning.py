"""A model made on the spot learns through a real harness: the whole way of examples/tiny, and the reward rises.

What a run without learning would show is chance: the difference of two evaluations of 64 tasks has a standard deviation
of less than 9 points (of 100) whatever the policy, so the margin asked for is more than three of them above none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longrein.trainer.evaluate import load_all, paired_rise
from longrein.trainer.tracking import read_metrics

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny"
MARGIN = 0.3


def run(*command: str) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_held_out_reward_rises_through_the_agents_sdk(tmp_path: Path):
    pytest.importorskip("agents", reason="the extra `examples` (openai-agents) is not installed")
    model = tmp_path / "model"
    run(str(EXAMPLE / "model.py"), str(model))
    options = {"run.dir": str(tmp_path), "model.path": str(model), "eval.tasks": "64"}
    settings = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    printed = run("-m", "longrein.cli", "train", str(EXAMPLE / "run.toml"), *settings)

    folder = tmp_path / "tiny"
    evaluations = {e.name: e for e in load_all(folder)}
    before, after = evaluations["before"], evaluations["after"]
    rise = paired_rise(before, after, seed=0)
    assert rise is not None
    assert rise.mean >= MARGIN, printed
    assert rise.low > 0, printed

    # The reward came through the harness, and every sampled token of it is accounted for.
    steps = [line for line in read_metrics(folder) if line["kind"] == "step"]
    assert steps
    for line in steps:
        untrained = sum(value for name, value in line.items() if name.startswith("tokens/untrained/"))
        assert line["tokens/sampled"] == line["tokens/trained"] + untrained
    assert (folder / "curve.png").stat().st_size > 0
