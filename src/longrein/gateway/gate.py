"""The gate in front of the model: the one place where calls wait for their turn.

A call waits while the gate is paused (`hold`; or it is turned away, `refuse`), and while as many calls as may
(`max_concurrent`) are being sampled. Those who wait are let through in turns, one call of each attempt after the other,
so that an attempt with many calls does not keep the others waiting. A call that has been held `hold_seconds` is answered
429, and so is one that comes while `max_waiting` calls wait: with a Retry-After of at most 30 seconds, by which a client's
own retry loop brings it back.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal

from longrein.gateway.dialects import DialectError
from longrein.records import GateState, PauseRequest

#: Clients give up or ignore Retry-After values that are much longer.
LONGEST_RETRY_AFTER = 30.0
#: Retry-After of a call that finds too many waiting.
BUSY_RETRY_AFTER = 5.0


class Passage:
    """One call's way through the gate. `async with passage:` waits for its turn; the end of the block makes room.

    Raises DialectError where the call is refused while it waits.
    """

    __slots__ = ("_gate", "attempt", "held_since", "state", "turn")

    def __init__(self, gate: Gate, attempt: Hashable):
        self._gate = gate
        self.attempt = attempt
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.state: Literal["waiting", "through", "gone"] = "waiting"
        self.held_since: float | None = None
        """When a pause began to hold it, by the event loop's clock."""

    async def __aenter__(self) -> None:
        try:
            await self.turn
        except BaseException:
            self.leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Give up the place in the queue, or make room for another; nothing if that has been done."""
        self._gate.left(self)


class Gate:
    """Open at first. Used from one event loop. 0 sets no limit for `max_waiting` and `max_concurrent`."""

    def __init__(
        self,
        on_pause: Literal["hold", "refuse"],
        hold_seconds: float,
        *,
        max_waiting: int = 0,
        max_concurrent: int = 0,
    ):
        self.on_pause = on_pause
        self.hold_seconds = hold_seconds
        self.max_waiting = max_waiting
        self.max_concurrent = max_concurrent
        self._inflight = 0
        self._waiting: OrderedDict[Hashable, deque[Passage]] = OrderedDict()
        """By attempt: the attempt whose turn is next comes first."""
        self._waiting_count = 0
        self._pause: PauseRequest | None = None
        self._closed = False
        self._opened = asyncio.Event()
        self._opened.set()
        self._paused_at = 0.0
        self._paused_seconds = 0.0
        self._expiry: asyncio.TimerHandle | None = None
        """Refuses calls that have been held too long."""

    # For the operator and the trainer

    def pause(self, request: PauseRequest) -> GateState:
        """Let no further call through. Calls that are through already go on; `inflight` counts them."""
        if self._pause is None:
            self._paused_at = time.monotonic()
        self._pause = request
        self._opened.clear()
        self._hold(list(self._all_waiting()))
        return self.state()

    def resume(self) -> GateState:
        """Open the gate; held calls go on."""
        if self._pause is not None:
            self._paused_seconds += time.monotonic() - self._paused_at
        self._pause = None
        self._opened.set()
        # Not at once: a gate that is paused again before anything else happens lets nobody through.
        asyncio.get_running_loop().call_soon(self._open)
        return self.state()

    def open_seconds(self) -> float:
        """A clock that stands still while the gate is paused."""
        now = time.monotonic() if self._pause is None else self._paused_at
        return now - self._paused_seconds

    async def opened(self) -> None:
        """Wait until the gate is open."""
        await self._opened.wait()

    def close(self) -> None:
        """The gateway is going down: calls that wait are answered now, with 503, and no further one is let through."""
        self._closed = True
        self._opened.set()
        for passage in list(self._all_waiting()):
            self._refuse(passage, _shutting_down())

    def state(self) -> GateState:
        pause = self._pause
        return GateState(
            paused=pause is not None,
            retry_after_seconds=pause.retry_after_seconds if pause is not None else PauseRequest().retry_after_seconds,
            reason=pause.reason if pause is not None else None,
            inflight=self._inflight,
            waiting=self._waiting_count,
        )

    # For calls

    def refuse(self, calls: int = 1) -> None:
        """Raise what `admit` would raise for a request of so many calls. One that may wait is not refused."""
        if self._closed:
            raise _shutting_down()
        if self._pause is not None and self.on_pause == "refuse":
            raise self._paused()
        # One that comes first may wait whatever its number: it would be turned away for ever.
        if (
            self.max_waiting
            and self._waiting_count
            and self._waiting_count + self._would_wait(calls) > self.max_waiting
        ):
            raise self._too_many()

    def admit(self, attempt: Hashable, calls: int = 1) -> list[Passage]:
        """Places for a request's calls, in its attempt's queue or through the gate already; each is to be left.

        Raises DialectError: 429 with Retry-After when the gate refuses or too many wait, 503 on shutdown.
        """
        self.refuse(calls)
        passages = [Passage(self, attempt) for _ in range(calls)]
        self._waiting.setdefault(attempt, deque()).extend(passages)
        self._waiting_count += calls
        if self._pause is not None:
            self._hold(passages)
        self._let_through()
        return passages

    def left(self, passage: Passage) -> None:
        """See `Passage.leave`."""
        state, passage.state = passage.state, "gone"
        if state == "waiting":
            self._remove(passage)
        elif state == "through":
            self._inflight -= 1
            self._let_through()
        if passage.turn.done() and not passage.turn.cancelled():
            passage.turn.exception()  # an error that nobody waited for is no mistake

    # Inside

    def _would_wait(self, calls: int) -> int:
        if self._pause is not None:
            return calls
        return max(0, calls - (self.max_concurrent - self._inflight)) if self.max_concurrent else 0

    def _all_waiting(self) -> Iterator[Passage]:
        return (passage for queue in self._waiting.values() for passage in queue)

    def _open(self) -> None:
        self._let_through()
        if self._pause is None:
            for passage in self._all_waiting():
                passage.held_since = None  # it waits for other calls now

    def _let_through(self) -> None:
        while self._waiting and self._pause is None and not self._closed:
            if self.max_concurrent and self._inflight >= self.max_concurrent:
                break
            attempt, queue = next(iter(self._waiting.items()))
            passage = queue.popleft()
            self._waiting_count -= 1
            self._waiting.move_to_end(attempt)
            if not queue:
                del self._waiting[attempt]
            if passage.turn.done():  # its task has been cancelled and has not got round to leaving
                passage.state = "gone"
                continue
            passage.state, passage.held_since = "through", None
            self._inflight += 1
            passage.turn.set_result(None)

    def _remove(self, passage: Passage) -> None:
        queue = self._waiting.get(passage.attempt)
        if queue is None or passage not in queue:
            return
        queue.remove(passage)
        self._waiting_count -= 1
        if not queue:
            del self._waiting[passage.attempt]

    def _refuse(self, passage: Passage, error: DialectError) -> None:
        self._remove(passage)
        passage.state = "gone"
        if not passage.turn.done():
            passage.turn.set_exception(error)

    def _hold(self, passages: Sequence[Passage]) -> None:
        """Note since when these are held, and see to it that none is for longer than it may be."""
        now = asyncio.get_running_loop().time()
        for passage in passages:
            if passage.held_since is None:
                passage.held_since = now
        if self._expiry is None and passages:
            first = min(passage.held_since or now for passage in passages)
            self._expiry = asyncio.get_running_loop().call_at(first + self.hold_seconds, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        if self._pause is None:
            return
        now = asyncio.get_running_loop().time()
        for passage in list(self._all_waiting()):
            # The loop's clock may be a tick short of the time that a timer was set for.
            if passage.held_since is not None and passage.held_since + self.hold_seconds <= now + 0.01:
                self._refuse(passage, self._paused())
        self._hold(list(self._all_waiting()))

    def _paused(self) -> DialectError:
        assert self._pause is not None
        seconds = _retry_after(self._pause.retry_after_seconds)
        why = f": {self._pause.reason}" if self._pause.reason else ""
        return DialectError(
            429,
            f"the model is paused{why}; retry after {seconds} s",
            type="rate_limit_error",
            code="gateway_paused",
            headers={"Retry-After": str(seconds), "X-Agl-Paused": "true"},
        )

    def _too_many(self) -> DialectError:
        seconds = _retry_after(BUSY_RETRY_AFTER if self._pause is None else self._pause.retry_after_seconds)
        return DialectError(
            429,
            f"{self._waiting_count} calls wait for the model, and gate.max_waiting is {self.max_waiting}; retry after "
            f"{seconds} s",
            type="rate_limit_error",
            code="too_many_waiting",
            headers={"Retry-After": str(seconds)},
        )


def _retry_after(seconds: float) -> int:
    return max(1, math.ceil(min(seconds, LONGEST_RETRY_AFTER)))


def _shutting_down() -> DialectError:
    return DialectError(503, "the gateway is shutting down", type="api_error", code="shutting_down")
