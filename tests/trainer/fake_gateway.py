"""A gateway and controller in memory, for tests of what the trainer does with rollouts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from longrein.records import (
    TERMINAL,
    Attempt,
    Call,
    Event,
    ModelEndpoint,
    NewRollout,
    Outcome,
    PruneRequest,
    PruneResult,
    Rollout,
    RolloutDetail,
    RolloutState,
    RolloutStatus,
    StatusChange,
    TerminalItem,
    TerminalPage,
)


@dataclass
class Play:
    """What becomes of a rollout. `reward` None: nobody posts one. `outcome` None: it stays queued."""

    reward: Any = 1.0
    outcome: Outcome | None = Outcome.succeeded
    reason: str | None = None
    attempts: int = 1
    calls: list[Call] | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def call(rollout_id: str = "r", number: int = 0, sampled: int = 3, **changes: Any) -> Call:
    """A whole call with `sampled` tokens after a prompt of two."""
    values: dict[str, Any] = {
        "rollout_id": rollout_id,
        "attempt_id": "0",
        "number": number,
        "dialect": "chat",
        "mode": "train",
        "model": "policy",
        "engine": "policy",
        "prompt_delta": [1, 2],
        "prompt_length": 2,
        "sampled": list(range(3, 3 + sampled)),
        "logprobs": [-0.5] * sampled,
        "versions": [(0, sampled)],
        "finish_reason": "stop",
    }
    return Call(**(values | changes))


class FakeClient:
    """Plays every queued rollout at once by `play(rollout)`; has the methods of `longrein.client.Client` used here."""

    def __init__(self, play: Callable[[Rollout], Play] = lambda rollout: Play()) -> None:
        self.play = play
        self.known: dict[str, Rollout] = {}
        self.plays: dict[str, Play] = {}
        self.order: list[str] = []
        self.batches: list[list[str]] = []
        self.models: list[ModelEndpoint] = []
        self.fail_polls: Exception | None = None
        self.pruned: list[PruneRequest] = []
        self.fail_prunes: Exception | None = None
        self._changed = asyncio.Condition()

    async def add_rollouts(self, new: list[NewRollout]) -> list[Rollout]:
        answer = []
        self.batches.append([rollout.rollout_id or "" for rollout in new])
        for one in new:
            assert one.rollout_id is not None
            if one.rollout_id not in self.known:
                rollout = Rollout(
                    rollout_id=one.rollout_id,
                    input=one.input,
                    is_train=one.is_train,
                    config=one.config,
                    metadata=one.metadata,
                    group_id=one.group_id,
                )
                self.known[one.rollout_id] = rollout
                answer.append(rollout)
                await self._finish(rollout)
            else:
                answer.append(self.known[one.rollout_id])
        return answer

    async def _finish(self, rollout: Rollout) -> None:
        play = self.play(rollout)
        self.plays[rollout.rollout_id] = play
        if play.outcome is None:
            return
        good = play.outcome is not Outcome.infrastructure_failed
        await self._end(rollout, RolloutState.succeeded if good else RolloutState.failed)

    async def _end(self, rollout: Rollout, state: RolloutState, message: str | None = None) -> None:
        rollout.status = RolloutStatus(state=state, error_message=message)
        async with self._changed:
            self.order.append(rollout.rollout_id)
            self._changed.notify_all()

    async def terminal(self, after: int, limit: int = 1000, wait: float = 0.0) -> TerminalPage:
        if self.fail_polls is not None:
            raise self.fail_polls
        async with self._changed:
            if wait and len(self.order) <= after:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), wait)
            ids = self.order[after : after + limit]
        if self.fail_polls is not None:
            raise self.fail_polls
        items = [TerminalItem(rollout_id=i, state=self.known[i].status.state, data_id="", is_train=True) for i in ids]
        return TerminalPage(items=items, next_after=after + len(ids), total_terminal=len(self.order))

    async def wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def rollout(self, rollout_id: str) -> RolloutDetail:
        return RolloutDetail(rollout=self.known[rollout_id], attempts=["0"])

    async def rollouts(self, states: list[RolloutState], limit: int = 500, wait: float = 0.0) -> list[Rollout]:
        return [rollout for rollout in self.known.values() if rollout.status.state in states]

    async def change_rollout(self, rollout_id: str, change: StatusChange) -> Rollout:
        rollout = self.known[rollout_id]
        assert rollout.status.state not in TERMINAL
        assert change.state is not None
        await self._end(rollout, change.state, change.error_message)
        return rollout

    async def attempts(self, rollout_id: str) -> list[Attempt]:
        play = self.plays[rollout_id]
        return [
            Attempt(rollout_id=rollout_id, attempt_id=str(n), outcome=play.outcome, exit_code=0, reason=play.reason)
            for n in range(play.attempts)
        ]

    async def calls(self, rollout_id: str, attempt: str | None = None) -> list[Call]:
        play = self.plays[rollout_id]
        return [call(rollout_id)] if play.calls is None else play.calls

    async def events(self, rollout_id: str, attempt: str | None = None, event_type: str | None = None) -> list[Event]:
        play = self.plays[rollout_id]
        if play.reward is None:
            return []
        values = [-1.0, play.reward]  # the last one counts
        return [Event("reward", rollout_id, "0", 0.0, {"value": value, "metrics": play.metrics}) for value in values]

    async def prune(self, request: PruneRequest) -> PruneResult:
        self.pruned.append(request)
        if self.fail_prunes is not None:
            raise self.fail_prunes
        return PruneResult()

    async def put_models(self, models: list[ModelEndpoint]) -> None:
        self.models.extend(models)
