"""Rollouts that were taken from their agents: finished or deleted by somebody else while an attempt of them ran.

Whoever runs agents long-polls for them and stops those agents. The list is kept in memory: a gateway that was started
again, or one that was not asked for long, says that it cannot tell all, and the asker compares with what runs.
"""

from __future__ import annotations

import uuid
from collections import deque

from longrein.records import WithdrawnPage

#: Rollouts that are remembered.
REMEMBERED = 10_000


class Withdrawals:
    """`instance` names this gateway's process: another one is another gateway, whatever its address."""

    def __init__(self) -> None:
        self.instance = uuid.uuid4().hex
        self._ids: deque[str] = deque(maxlen=REMEMBERED)
        self._count = 0

    def add(self, rollout_id: str) -> None:
        self._ids.append(rollout_id)
        self._count += 1

    def page(self, instance: str, after: int) -> WithdrawnPage:
        """What was withdrawn behind position `after` of this instance."""
        first = self._count - len(self._ids)
        if instance != self.instance or not first <= after <= self._count:
            return WithdrawnPage(self.instance, [], self._count, complete=False)
        return WithdrawnPage(self.instance, list(self._ids)[after - first :], self._count, complete=True)
