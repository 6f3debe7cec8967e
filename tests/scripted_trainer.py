"""A trainer of a policy that is a script, for tests that kill it: `python scripted_trainer.py FILE --set OPTION …`.

It goes on with the run if there is one. Its weights are a list of what they were learned from, so that a checkpoint says
what the policy has seen.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from longrein.client import Client
from longrein.config import Config, load
from longrein.run import prepare
from longrein.trainer.loop import load_data, train
from longrein.trainer.progress import Silent
from longrein.trainer.tracking import Tracker
from longrein.trajectory.batch import Row

UPDATE_SECONDS = 0.1  # of learning, and of publishing: something to be killed in


class ScriptedStudent:
    """Has what the training loop asks of `Student`."""

    def __init__(self) -> None:
        self.version = 0
        self.learned: list[dict[str, int]] = []
        """Of every update the trained tokens by rollout."""

    async def start(self, client: Client) -> None: ...
    async def serve(self) -> None: ...
    async def stop(self) -> None: ...

    async def publish(self) -> None:
        await asyncio.sleep(UPDATE_SECONDS)

    async def apart(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(work, *arguments)

    async def update(self, rows: Sequence[Row]) -> dict[str, float]:
        await asyncio.sleep(UPDATE_SECONDS)
        tokens: dict[str, int] = {}
        for row in rows:
            tokens[row.rollout_id] = tokens.get(row.rollout_id, 0) + int(row.trained.sum())
        self.learned.append(tokens)
        self.version += 1
        return {"loss": 0.0}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "trainer.pt").write_text(json.dumps([self.version, self.learned]))

    def restore(self, folder: Path) -> None:
        self.version, self.learned = json.loads((folder / "trainer.pt").read_text())


async def run(config: Config) -> None:
    prepared = prepare(config, resume=(config.run.path / "metrics.jsonl").exists())
    student = ScriptedStudent()
    if prepared.resume is not None:
        student.restore(prepared.resume)
    tracker = Tracker(prepared.config, Silent())
    gateway = prepared.config.gateway
    async with Client(gateway.url, gateway.key, retry_seconds=120.0) as client:
        data = load_data(config)
        await train(
            prepared.config, data, student=cast(Any, student), client=client, tracker=tracker, resume=prepared.resume
        )


if __name__ == "__main__":
    asyncio.run(run(load(sys.argv[1], [word for word in sys.argv[2:] if word != "--set"])))
