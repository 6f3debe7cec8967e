"""The gate in front of the model: while it is paused, calls wait (hold) or are turned away (refuse).

A held call goes on as soon as the gate opens. One that has waited `hold_seconds` is answered 429 with a Retry-After
of at most 30 seconds, so that a client's own retry loop brings it back.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from longrein.gateway.dialects import DialectError
from longrein.records import GateState, PauseRequest

#: Clients give up or ignore Retry-After values that are much longer.
LONGEST_RETRY_AFTER = 30.0


class Gate:
    """Open at first. Used from one event loop."""

    def __init__(self, on_pause: Literal["hold", "refuse"], hold_seconds: float):
        self.on_pause = on_pause
        self.hold_seconds = hold_seconds
        self._inflight = 0
        self._pause: PauseRequest | None = None
        self._closed = False
        self._opened = asyncio.Event()
        self._opened.set()
        self._paused_at = 0.0
        self._paused_seconds = 0.0

    def pause(self, request: PauseRequest) -> GateState:
        """Let no further call through. Calls that are through already go on; `inflight` counts them."""
        if self._pause is None:
            self._paused_at = time.monotonic()
        self._pause = request
        self._opened.clear()
        return self.state()

    def resume(self) -> GateState:
        """Open the gate; held calls go on."""
        if self._pause is not None:
            self._paused_seconds += time.monotonic() - self._paused_at
        self._pause = None
        self._opened.set()
        return self.state()

    def open_seconds(self) -> float:
        """A clock that stands still while the gate is paused."""
        now = time.monotonic() if self._pause is None else self._paused_at
        return now - self._paused_seconds

    async def opened(self) -> None:
        """Wait until the gate is open."""
        await self._opened.wait()

    def close(self) -> None:
        """The gateway is going down: held calls are answered now, with 503, and no further one is let through."""
        self._closed = True
        self._opened.set()

    def state(self) -> GateState:
        pause = self._pause
        return GateState(
            paused=pause is not None,
            retry_after_seconds=pause.retry_after_seconds if pause is not None else PauseRequest().retry_after_seconds,
            reason=pause.reason if pause is not None else None,
            inflight=self._inflight,
        )

    async def refuse_if_closed(self) -> None:
        """Raise what `enter` would raise without waiting; a call that would be held is not refused."""
        self._refuse_when_closed()
        if self._pause is not None and self.on_pause == "refuse":
            raise self._refusal()

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[None]:
        """Hold the call until the gate is open, then count it as in flight until the block ends.

        Raises DialectError: 429 with Retry-After when the call is refused or was held too long, 503 on shutdown.
        """
        await self.refuse_if_closed()
        try:
            async with asyncio.timeout(self.hold_seconds):
                # The gate may have been closed again between the wake-up and this call's turn.
                while self._pause is not None and not self._closed:
                    await self._opened.wait()
        except TimeoutError:
            raise self._refusal() from None
        self._refuse_when_closed()
        self._inflight += 1
        try:
            yield
        finally:
            self._inflight -= 1

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise DialectError(503, "the gateway is shutting down", type="api_error", code="shutting_down")

    def _refusal(self) -> DialectError:
        state = self.state()
        seconds = max(1, math.ceil(min(state.retry_after_seconds, LONGEST_RETRY_AFTER)))
        why = f": {state.reason}" if state.reason else ""
        return DialectError(
            429,
            f"the model is paused{why}; retry after {seconds} s",
            type="rate_limit_error",
            code="gateway_paused",
            headers={"Retry-After": str(seconds), "X-Agl-Paused": "true"},
        )
