"""The policy that is trained, the learner that updates it and the engine that samples from it, as one thing.

A policy version is the number of optimizer updates the weights have seen. An update freezes the embedded engine at a
token boundary (it may compute with the very weights that change) and it stays frozen until the new version is
published. Engines that are servers of their own sample on until they are given the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
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
    _serving: bool = False
    _first: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, client: Client) -> None:
        """Start the engine. The gateway hears of it by `serve`."""
        self.client = client
        await self.engine.start()

    async def serve(self) -> None:
        """Register the policy at the gateway, in place of engines of earlier starts; nothing when it is registered.

        A resumed run calls it when something is to be sampled: by then it has learned again what it had learned before,
        and calls that were broken off by its end go on with the weights that they began with.
        """
        async with self._first:
            if not self._serving:
                await self._give(self._replace)
                self._serving = True

    async def _replace(self, models: list[ModelEndpoint]) -> None:
        assert self.client is not None, "start comes first"
        others = [known for known in await self.client.models() if not self._replaces(known)]
        await self.client.clear_models()
        await self.client.put_models([*others, *models])

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
        """Give the engine the newest weights, tell the gateway their version, and let sampling go on.

        Before `serve` nobody samples, and nothing is done.
        """
        if self._serving:
            assert self.client is not None, "start comes first"
            await self._give(self.client.put_models)

    async def _give(self, register: Callable[[list[ModelEndpoint]], Awaitable[object]]) -> None:
        assert self.client is not None, "start comes first"
        await self._hold()
        async with self.engine.exchanging(self.version, self.client, self.name) as urls:
            await register([ModelEndpoint(self.name, url, self.version, self.engine.protocol) for url in urls])
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

    def save(self, folder: Path) -> None:
        """Write the model into a new `folder`, and beside it what `restore` reads (`trainer.pt`)."""
        import torch

        self.policy.save(folder)
        random = {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        values: dict[str, Any] = {"learner": self.learner.state_dict(), "random": random}
        if self.policy.lora:  # the folder holds merged weights; going on needs the adapters themselves
            named = self.policy.model.named_parameters()
            values["adapters"] = {name: p.detach().cpu() for name, p in named if p.requires_grad}
        torch.save(values, folder / "trainer.pt")

    def restore(self, folder: Path) -> None:
        """Give the learner (and LoRA adapters, and random generators) the state that `save` wrote."""
        import torch

        values = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
        self.learner.load_state_dict(values["learner"])
        adapters = values.get("adapters")
        if adapters is not None:
            parameters = dict(self.policy.model.named_parameters())
            with torch.no_grad():
                for name, value in adapters.items():
                    parameters[name].copy_(value)
        torch.set_rng_state(values["random"]["cpu"])
        if torch.cuda.is_available() and values["random"]["cuda"]:
            torch.cuda.set_rng_state_all(values["random"]["cuda"])
