"""The policy that is trained, the learner that updates it and the engine that samples from it, as one thing.

A policy version is the number of optimizer updates the weights have seen. An update freezes the embedded engine at a
token boundary (it may compute with the very weights that change) and it stays frozen until the new version is
published. Engines that are servers of their own sample on until they are given the new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from longrein.client import Client
from longrein.records import ModelEndpoint

if TYPE_CHECKING:
    from longrein.trainer.torch.learner import Learner
    from longrein.trainer.torch.policy import Policy
    from longrein.trajectory.batch import Row

T = TypeVar("T")


class PolicyEngine(Protocol):
    """What samples from the policy: the embedded engine, or servers that are given its weights."""

    @property
    def protocol(self) -> Literal["tokens", "vllm"]:
        """How the gateway speaks to it."""
        ...

    async def start(self) -> object:
        """Be ready to be given weights."""
        ...

    async def stop(self) -> None: ...

    async def hold(self) -> None:
        """Let nobody read the policy's weights until `release`."""
        ...

    def release(self) -> None: ...

    async def compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work(*arguments)` in the thread that computes."""
        ...

    def exchanging(self, version: int, client: Client, name: str) -> AbstractAsyncContextManager[list[str]]:
        """Take the policy's weights as `version`; the addresses of the model `name` that have them.

        Inside the block nothing is sampled yet.
        """
        ...


@dataclass
class Student:
    """Policy, learner and engine; `version` counts the updates."""

    policy: Policy
    learner: Learner
    engine: PolicyEngine
    name: str
    """The model's name at the gateway."""
    version: int = 0
    client: Client | None = None
    _held: bool = False

    async def start(self, client: Client) -> None:
        """Serve the policy and register it at the gateway."""
        self.client = client
        await self.engine.start()
        others = [known for known in await client.models() if not self._replaces(known)]
        await client.clear_models()
        if others:
            await client.put_models(others)
        await self.publish()

    def _replaces(self, known: ModelEndpoint) -> bool:
        """Whether an endpoint answers for the policy and will not be given its weights, such as one of a past run."""
        given = known.protocol == self.engine.protocol == "vllm"
        return known.model == self.name and known.protocol != "openai" and not given

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

    async def prepare(self, rows: Sequence[Row]) -> None:
        """Compute what the algorithm needs of a step's rows before the first of its updates, into their columns."""
        await self.apart(self.learner.prepare, rows)

    async def publish(self) -> None:
        """Give the engine the newest weights, tell the gateway their version, and let sampling go on."""
        assert self.client is not None, "start comes first"
        await self._hold()
        async with self.engine.exchanging(self.version, self.client, self.name) as urls:
            models = [ModelEndpoint(self.name, url, self.version, self.engine.protocol) for url in urls]
            await self.client.put_models(models)
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
