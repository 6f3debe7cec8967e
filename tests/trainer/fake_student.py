"""A policy without weights: its success rate grows with every update it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fake_gateway import Play

from longrein.records import Rollout
from longrein.trajectory.batch import Row


class _FakePolicy:
    lora = False

    def __init__(self, owner: FakeStudent) -> None:
        self._owner = owner

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "skill").write_text(repr(self._owner.skill))


class _FakeLearner:
    def state_dict(self) -> dict[str, Any]:
        return {}


class FakeStudent:
    """Has what the training loop asks of `Student`. `play` gives rollouts rewards by the present `skill`."""

    def __init__(self, skill: float = 0.0, gain: float = 0.25) -> None:
        self.skill = skill
        self.gain = gain
        self.version = 0
        self.published: list[int] = []
        self.updates: list[list[Row]] = []
        self.imitated: list[list[Row]] = []
        self.prepared: list[tuple[int, list[Row]]] = []
        """How many updates there were before, and the rows."""
        self.running = False
        self.policy = _FakePolicy(self)
        self.learner = _FakeLearner()

    async def start(self, client: Any) -> None:
        self.running = True
        await self.publish()

    async def stop(self) -> None:
        self.running = False

    async def apart(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    async def update(self, rows: Sequence[Row]) -> dict[str, float]:
        self.updates.append(list(rows))
        self._learned()
        return {"loss": 0.5, "grad_norm": 1.0}

    async def prepare(self, rows: Sequence[Row]) -> None:
        self.prepared.append((len(self.updates), list(rows)))
        for row in rows:
            row.columns["reference"] = np.where(row.trained, np.float32(-1.0), np.float32(0.0))

    async def imitate(self, rows: Sequence[Row], learning_rate: float) -> dict[str, float]:
        self.imitated.append(list(rows))
        self._learned()
        return {"loss": learning_rate}

    def _learned(self) -> None:
        self.version += 1
        self.skill = min(1.0, self.skill + self.gain)

    async def publish(self) -> None:
        self.published.append(self.version)

    def play(self, rollout: Rollout) -> Play:
        """The teacher succeeds; of every four rollouts of the policy `4 * skill` do."""
        if rollout.config.engine == "teacher":
            return Play(reward=1.0)
        member = int(rollout.rollout_id[-2:]) if not rollout.rollout_id.endswith("preflight") else 0
        place = rollout.metadata.get("task", 0) if not rollout.is_train else member
        return Play(reward=float(place % 4 < 4 * self.skill))
