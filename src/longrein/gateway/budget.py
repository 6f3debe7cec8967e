"""What an attempt may use of the model: calls, sampled tokens, calls at once (`agent.max_calls` and its like).

What was used is counted from the record, so that a gateway that is started again goes on where the old one was. A call
is one sampled reply: a request with n = 4 is four. Tokens are sampled ones; prompts are bounded by the model's context
and do not count. Calls in flight hold what they may still use: together they can never use more than is left.

The budget binds attempt tokens. Calls with the run key are counted, and never refused.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest

from longrein.config import Agent
from longrein.gateway.dialects import DialectError
from longrein.records import Rollout
from longrein.store import Store

#: Attempts kept in memory while nothing of them runs; others are counted anew from the record.
ATTEMPTS_IN_MEMORY = 4096


@dataclass(eq=False)
class Spending:
    """What one attempt has used, and what its calls in flight may still use."""

    calls: int
    """Those in flight included."""
    tokens: int
    """Of calls that have ended."""
    running: int = 0
    reserved: int = 0
    """Tokens that the calls in flight may sample."""
    in_hand: int = 0
    """Model requests of the attempt's token whose connection is open."""
    ended: bool = False
    """The attempt is over; a request that was authorised before and read only now comes too late."""
    large: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One large request of an attempt is read at a time: it waits for itself, nobody else for it."""


@dataclass(eq=False)
class Grant:
    """Calls that may be sampled, with the most tokens of each. `end` gives back what they did not use."""

    max_tokens: Sequence[int]
    _spending: Spending
    _open: bool = True

    def end(self, sampled: int) -> None:
        """The calls have ended with so many tokens. Only the first time counts."""
        if self._open:
            self._open = False
            self._spending.running -= len(self.max_tokens)
            self._spending.reserved -= sum(self.max_tokens)
            self._spending.tokens += sampled


@dataclass(frozen=True)
class Budget:
    """An attempt's spending under the run file's limits; 0 is no limit."""

    spending: Spending
    agent: Agent
    bound: bool
    """Whether it can be refused; the run key cannot."""

    def enter(self) -> Callable[[], None]:
        """Count a request in; what is returned counts it out. Raises `DialectError` (429) where too many are open."""
        if not self.bound:
            return lambda: None
        most, spending = self.agent.max_concurrent_calls, self.spending
        if most and spending.in_hand >= most:
            raise _busy(f"{spending.in_hand} requests of this attempt are open (agent.max_concurrent_calls = {most})")
        spending.in_hand += 1

        def leave() -> None:
            spending.in_hand -= 1

        return leave

    def take(self, wanted: Sequence[int]) -> Grant:
        """Reserve one call for each of `wanted`, the most tokens that it may sample; fewer where fewer are left.

        Raises `DialectError`: 403 once the budget is used up, 429 where calls in flight hold what is left of it.
        """
        spending, count = self.spending, len(wanted)
        if self.bound:
            if spending.ended:
                raise DialectError(403, "the attempt of this token has ended", type="permission_error")
            self._refuse_calls(count)
            wanted = self._affordable(wanted)
        spending.calls += count
        spending.running += count
        spending.reserved += sum(wanted)
        return Grant(wanted, spending)

    def _refuse_calls(self, count: int) -> None:
        agent, spending = self.agent, self.spending
        if agent.max_calls and spending.calls + count > agent.max_calls:
            raise _used_up(f"{spending.calls} of agent.max_calls = {agent.max_calls} calls", count, "calls")
        if agent.max_concurrent_calls and count > agent.max_concurrent_calls:
            raise DialectError(
                403,
                f"this request asks for {count} replies at once, and agent.max_concurrent_calls = "
                f"{agent.max_concurrent_calls}: ask for fewer",
                type="permission_error",
                code="budget_exceeded",
            )
        if agent.max_concurrent_calls and spending.running + count > agent.max_concurrent_calls:
            raise _busy(
                f"{spending.running} calls of this attempt are in flight (agent.max_concurrent_calls = "
                f"{agent.max_concurrent_calls})"
            )

    def _affordable(self, wanted: Sequence[int]) -> Sequence[int]:
        limit, spending = self.agent.max_tokens, self.spending
        left = limit - spending.tokens - spending.reserved
        if not limit or sum(wanted) <= left:
            return wanted
        share = left // len(wanted)
        if share >= 1:
            return [min(one, share) for one in wanted]
        if limit - spending.tokens >= len(wanted):
            raise _busy(f"the calls in flight may need all that is left of agent.max_tokens = {limit}")
        raise _used_up(f"{spending.tokens} of agent.max_tokens = {limit} sampled tokens", len(wanted), "tokens")


def _used_up(what: str, more: int, unit: str) -> DialectError:
    return DialectError(
        403,
        f"this attempt has used {what}, and the request needs {more} more: its budget of {unit} is used up",
        type="permission_error",
        code="budget_exceeded",
    )


def _busy(what: str) -> DialectError:
    return DialectError(
        429,
        f"{what}: ask again when one has ended",
        type="rate_limit_error",
        code="too_many_calls_at_once",
        headers={"Retry-After": "1"},
    )


class Budgets:
    """The budgets of the attempts that call. Used from one event loop."""

    def __init__(self, agent: Agent, store: Store):
        self._agent, self._store = agent, store
        self._spending: OrderedDict[tuple[str, str, float], Spending] = OrderedDict()

    def of(self, rollout: Rollout, attempt_id: str, *, bound: bool) -> Budget:
        """The budget of an attempt. `bound`: whether its own token asks."""
        # A rollout that was deleted and posted again under its id is another one.
        key = (rollout.rollout_id, attempt_id, rollout.status.created_at)
        spending = self._spending.get(key)
        if spending is None:
            spending = self._spending[key] = Spending(*self._store.spent(rollout.rollout_id, attempt_id))
            if len(self._spending) > ATTEMPTS_IN_MEMORY:
                idle = [old for old, other in self._spending.items() if _idle(other) and old != key]
                for old in idle[: len(self._spending) - ATTEMPTS_IN_MEMORY]:
                    del self._spending[old]
        self._spending.move_to_end(key)
        return Budget(spending, self._agent, bound)

    def forget(self, rollout_id: str, attempt_id: str) -> None:
        """The attempt has ended; what is still in flight of it ends by itself."""
        for key in [key for key in self._spending if key[:2] == (rollout_id, attempt_id)]:
            self._spending.pop(key).ended = True


def _idle(spending: Spending) -> bool:
    return not (spending.running or spending.in_hand or spending.large.locked())


def budget_of(http: HttpRequest) -> Budget:
    """The budget that the route has put beside a model request."""
    return http.state.budget
