"""What samples tokens for the gateway: token ids in; ids, log-probabilities and policy versions out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from msgspec import Struct

Json = dict[str, Any]


@dataclass(frozen=True)
class Generate:
    """One sequence to sample."""

    request_id: str
    rollout_id: str
    """Calls of one rollout go to the same endpoint, where their prefix is cached."""
    token_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    seed: int
    stream: bool
    """Whether tokens are wanted as they come, or all at the end."""
    guide: str | None = None
    """A Lark grammar in llguidance's form that the reply has to follow; engines without guided decoding refuse it."""
    top_logprobs: int = 0
    """How many of the most probable tokens are wanted beside each sampled one."""
    messages: list[Json] = field(default_factory=list)
    """As the template gets them; only engines that are functions look at them."""
    tools: list[Json] = field(default_factory=list)


class Chunk(Struct):
    """Newly sampled tokens. `finish_reason` (stop, length, abort) comes with the last."""

    token_ids: list[int] = []
    logprobs: list[float] | None = None
    versions: list[tuple[int, int]] = []
    finish_reason: str | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """For each new token the most probable ones, (id, log-probability), most probable first; None: not asked for."""


class EngineError(Exception):
    """The engine could not answer. `status` is what the client gets if nothing has been sent yet."""

    def __init__(self, message: str, status: int = 502):
        super().__init__(message)
        self.status = status


Feature = Literal["guide", "logprobs", "top_logprobs"]
"""What not every engine has: following a guide, log-probabilities of sampled tokens, those of other tokens."""


class Engine(Protocol):
    name: str

    def lacks(self, feature: Feature) -> str | None:
        """Why the engine does not have a feature, in words for an error; None when it has it."""
        ...

    def generate(self, request: Generate) -> AsyncIterator[Chunk]:
        """Sample; leaving the iterator early cancels the generation."""
        ...
