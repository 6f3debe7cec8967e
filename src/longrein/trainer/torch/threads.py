"""How many CPU threads a step of the engine may use.

An operation over n threads is over when the slowest of them is. On a machine whose cores are busy otherwise (with the
harnesses, above all) a thread that has lost its core makes all others wait for it, in each of a step's hundreds of
operations: two threads on two busy cores are several times slower than one.
"""

from __future__ import annotations

import os
import time

import psutil
import torch

#: Seconds over which the use of the other processes is measured: clock ticks are 10 ms.
WINDOW_SECONDS = 0.2
#: Share of a core that others may use while it still counts as free: two threads of which one loses half its time to
#: others are as fast as one.
TOLERATED = 0.6


class Threads:
    """Gives torch the cores that nothing else uses, `most` of them at the most. Used from the computing thread."""

    def __init__(self, most: int) -> None:
        self.most = self.used = most
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._since, self._busy, self._own = time.perf_counter(), _busy_seconds(), time.process_time()

    def adapt(self) -> None:
        """Take as many threads as the use of the machine since the last time leaves cores."""
        now = time.perf_counter()
        if self.most == 1 or now - self._since < WINDOW_SECONDS:
            return
        busy, own = _busy_seconds(), time.process_time()
        others = ((busy - self._busy) - (own - self._own)) / (now - self._since)
        self._since, self._busy, self._own = now, busy, own
        self._use(threads_beside(others, self._cores, self.most))

    def restore(self) -> None:
        """Take all: nothing of this process computes beside what comes next."""
        self._use(self.most)

    def _use(self, threads: int) -> None:
        if threads != self.used:
            torch.set_num_threads(threads)
            self.used = threads


def threads_beside(others: float, cores: int, most: int) -> int:
    """Threads to use on `cores` cores of which other processes use `others`."""
    return max(1, min(most, int(cores - others + TOLERATED)))


def _busy_seconds() -> float:
    """CPU seconds of all processes of the machine, since it started."""
    times = psutil.cpu_times()
    return sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
