"""Rollouts that wait too long to be started fail.

A rollout may wait in the queue for `config.queue_seconds`, or for `agent.queue_seconds` if it names no time of its own. The
gateway sees to it, because there may be nobody who starts rollouts. The clock stands still while the gate is paused, and
waiting begins anew when the gateway is started again: a rollout may wait longer than it says, never shorter.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
from collections.abc import Callable, Iterable

from longrein.gateway.gate import Gate
from longrein.records import Rollout, RolloutState
from longrein.store import Store, StoreError

log = logging.getLogger("longrein.gateway")

#: Pause after which a record that could not be written is tried again.
AGAIN_SECONDS = 5.0


class QueueClock:
    """Fails rollouts whose time in the queue is over. `changed` is called for each."""

    def __init__(self, store: Store, gate: Gate, seconds: float, changed: Callable[[], None]):
        self._store = store
        self._gate = gate
        self._seconds = seconds
        self._changed = changed
        self._due: list[tuple[float, int, str, float]] = []
        self._numbers = itertools.count()
        self._earlier = asyncio.Event()

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """These wait from now on, as far as they are queuing."""
        for rollout in rollouts:
            own = rollout.config.queue_seconds
            seconds = self._seconds if own is None else own
            if seconds and rollout.status.state is RolloutState.queuing:
                due = (self._gate.open_seconds() + seconds, next(self._numbers), rollout.rollout_id, seconds)
                heapq.heappush(self._due, due)
                if self._due[0] is due:
                    self._earlier.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        self.add(self._store.rollouts([RolloutState.queuing], limit=2**31 - 1))
        while True:
            await self._gate.opened()
            self._earlier.clear()
            left = self._due[0][0] - self._gate.open_seconds() if self._due else None
            if left is not None and left <= 0:
                await self._fail(heapq.heappop(self._due))
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._earlier.wait(), left)

    async def _fail(self, due: tuple[float, int, str, float]) -> None:
        _, _, rollout_id, seconds = due
        why = (
            f"waited {seconds:g} s in the queue and was not started (agent.queue_seconds, or queue_seconds in the rollout's "
            "config); start a controller, or raise agent.max_concurrent or the limit"
        )
        try:
            if await self._store.fail_queuing(rollout_id, why):
                log.warning("rollout %s: %s", rollout_id, why)
                self._changed()
        except StoreError as error:
            log.error("rollout %s has waited too long in the queue, and cannot be failed: %s", rollout_id, error)
            heapq.heappush(self._due, (self._gate.open_seconds() + AGAIN_SECONDS, *due[1:]))
