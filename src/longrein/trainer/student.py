"""The policy that is trained, the learner that updates it and the engine that samples from it, as one thing.

A policy version is the number of optimizer updates the weights have seen. An update freezes the engine at a token
boundary (it may compute with the very weights that change) and it stays frozen until the new version is published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from longrein.client import Client
from longrein.records import ModelEndpoint

if TYPE_CHECKING:
    from longrein.trainer.torch.learner import Learner
    from longrein.trainer.torch.policy import Policy
    from longrein.trainer.torch.server import EngineServer
    from longrein.trajectory.batch import Row

T = TypeVar("T")


@dataclass
class Student:
    """Policy, learner and engine; `version` counts the updates."""

    policy: Policy
    learner: Learner
    engine: EngineServer
    name: str
    """The model's name at the gateway."""
    version: int = 0
    url: str = ""
    """Where the engine listens, once started."""
    client: Client | None = None
    _held: bool = False

    async def start(self, client: Client) -> None:
        """Serve the policy and register it at the gateway."""
        self.client = client
        self.url = await self.engine.start()
        others = [known for known in await client.models() if (known.model, known.protocol) != (self.name, "tokens")]
        await client.clear_models()  # an engine of the same name that a process left, which is gone
        if others:
            await client.put_models(others)
        await self.publish()

    async def stop(self) -> None:
        await self.engine.stop()

    async def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """One optimizer update of the policy loss over `rows`; the engine is frozen until `publish`."""
        await self._hold()
        metrics = await self.engine.compute(self.learner.update, rows)
        self.version += 1
        return metrics

    async def imitate(self, rows: Sequence[Row], learning_rate: float) -> dict[str, float]:
        """One supervised update over `rows`; the engine is frozen until `publish`."""
        await self._hold()
        metrics = await self.engine.compute(self.learner.supervised, rows, learning_rate)
        self.version += 1
        return metrics

    async def publish(self) -> None:
        """Give the engine the newest weights, tell the gateway their version, and let sampling go on."""
        assert self.client is not None, "start comes first"
        await self._hold()
        await self.engine.refresh(self.version)
        endpoint = ModelEndpoint(model=self.name, endpoint=self.url, version=self.version, protocol="tokens")
        await self.client.put_models([endpoint])
        self.engine.release()
        self._held = False

    async def apart(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work(*arguments)`, which reads the weights, while nothing is sampled."""
        held = self._held
        await self._hold()
        try:
            return await self.engine.compute(work, *arguments)
        finally:
            if not held:
                self.engine.release()
                self._held = False

    async def _hold(self) -> None:
        if not self._held:
            await self.engine.hold()
            self._held = True
