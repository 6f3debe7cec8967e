from __future__ import annotations

from typing import Any

import pytest
import torch

from longrein.trainer.torch import threads
from longrein.trainer.torch.threads import Threads, threads_beside


@pytest.mark.parametrize(
    ("others", "cores", "most", "expected"),
    [
        (0.0, 2, 2, 2),
        (0.2, 2, 2, 2),
        (0.5, 2, 2, 2),
        (0.7, 2, 2, 1),
        (1.9, 2, 2, 1),
        (0.0, 8, 4, 4),
        (4.5, 8, 4, 4),
        (5.0, 8, 4, 3),
        (0.0, 2, 1, 1),
    ],
)
def test_threads_are_the_cores_that_others_leave(others: float, cores: int, most: int, expected: int) -> None:
    assert threads_beside(others, cores, most) == expected


def test_threads_follow_the_use_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: dict[str, Any] = {"now": 0.0, "busy": 0.0, "own": 0.0}
    monkeypatch.setattr(threads.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(threads.time, "process_time", lambda: clock["own"])
    monkeypatch.setattr(threads, "_busy_seconds", lambda: clock["busy"])
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    used = torch.get_num_threads()
    try:
        some = Threads(2)
        clock.update(now=1.0, busy=2.0, own=1.0)  # a core of ours, a core of others
        some.adapt()
        assert torch.get_num_threads() == 1
        clock.update(now=1.1, busy=2.1, own=1.1)  # too short to measure
        some.adapt()
        assert torch.get_num_threads() == 1
        clock.update(now=2.0, busy=3.1, own=2.0)
        some.adapt()
        assert torch.get_num_threads() == 2
        clock.update(now=3.0, busy=5.1, own=3.0)
        some.adapt()
        some.restore()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(used)
