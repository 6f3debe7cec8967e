"""An agent in a sandbox, or of another user, outlives its controller and is gone on with by the next."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longrein.records import Outcome
from longrein.sandbox.bubblewrap import find_bubblewrap

from .arena import arena

DEADLINE = 120.0


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
def test_a_confined_agent_is_adopted(tmp_path: Path, sandbox: str) -> None:
    if sandbox == "bubblewrap" and find_bubblewrap() is None:
        pytest.skip("bubblewrap is not installed (pip install 'longrein[sandbox]')")
    with arena(tmp_path / "arena", [f"agent.sandbox={sandbox}"]) as run:
        run.start([{"id": "patient", "attack": "patient", "graded": True}])
        work = run.run / "attempts" / "patient" / "0" / "work"
        until((work / "waiting").exists)
        run.controller.kill()
        run.controller.wait()
        run.controller = run.start_controller()
        until(lambda: "runs on, as process" in (run.gateway.folder / "controller.log").read_text())
        (work / "go").touch()
        result = run.finished(["patient"])["patient"]
        assert (result.reward, [each.outcome for each in result.attempts]) == (1.0, [Outcome.succeeded]), run.log()
        assert result.printed.endswith("done\n")
        if os.geteuid() == 0:
            assert work.parent.stat().st_mode & 0o777 == 0o700
