"""A policy without weights: its success rate grows with every update it is given."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fake_gateway import Play

from longrein.records import Rollout
from longrein.trajectory.batch import Row


class FakeStudent:
    """Has what the training loop asks of `Student`. `play` gives rollouts rewards by the present `skill`.

    `tick(where)` is called at every step of its life: what it raises there ends the run.
    """

    def __init__(
        self, skill: float = 0.0, gain: float = 0.25, tick: Callable[[str], None] = lambda where: None
    ) -> None:
        self.skill = skill
        self.gain = gain
        self.tick = tick
        self.version = 0
        self.published: list[int] = []
        self.updates: list[list[Row]] = []
        self.imitated: list[list[Row]] = []
        self.history: list[list[str]] = []
        """The rollouts of every update that the skill comes from."""
        self.prepared: list[tuple[int, list[Row]]] = []
        """How many updates there were before, and the rows."""
        self.running = False
        self.serving = False

    async def start(self, client: Any) -> None:
        self.running = True

    async def serve(self) -> None:
        if not self.serving:
            self.serving = True
            self.published.append(self.version)

    async def stop(self) -> None:
        self.running = False

    async def apart(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    async def update(self, rows: Sequence[Row]) -> dict[str, float]:
        self.tick("before an update")
        self.updates.append(list(rows))
        self._learned(rows)
        self.tick("after an update")
        return {"loss": 0.5, "grad_norm": 1.0}

    async def prepare(self, rows: Sequence[Row]) -> None:
        self.prepared.append((len(self.updates), list(rows)))
        for row in rows:
            row.columns["reference"] = np.where(row.trained, np.float32(-1.0), np.float32(0.0))

    async def imitate(self, rows: Sequence[Row], learning_rate: float) -> dict[str, float]:
        self.tick("before imitating")
        self.imitated.append(list(rows))
        self._learned(rows)
        self.tick("after imitating")
        return {"loss": learning_rate}

    def _learned(self, rows: Sequence[Row]) -> None:
        self.version += 1
        self.skill = min(1.0, self.skill + self.gain)
        self.history.append([row.rollout_id for row in rows])

    async def publish(self) -> None:
        self.tick("before publishing")
        if self.serving:
            self.published.append(self.version)
        self.tick("after publishing")

    def save(self, folder: Path) -> None:
        self.tick("before a checkpoint")
        folder.mkdir(parents=True)
        (folder / "skill").write_text(repr(self.skill))
        self.tick("inside a checkpoint")
        (folder / "trainer.pt").write_text(json.dumps([self.skill, self.version, self.history]))
        self.tick("after a checkpoint's files")

    def restore(self, folder: Path) -> None:
        self.skill, self.version, self.history = json.loads((folder / "trainer.pt").read_text())

    def play(self, rollout: Rollout) -> Play:
        """The teacher succeeds; of every four rollouts of the policy `4 * skill` do."""
        if rollout.config.engine == "teacher":
            return Play(reward=1.0)
        member = re.search(r"-r(\d\d)", rollout.rollout_id)
        place = int(member[1]) if member and rollout.is_train else rollout.metadata.get("task", 0)
        return Play(reward=float(place % 4 < 4 * self.skill))
