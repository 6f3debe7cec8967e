"""The controller's line to the gateway: requests that wait for a gateway that is away, and for nothing after a stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from longrein.client import ApiError, Client
from longrein.controller.local import STOPPED
from longrein.records import EndAttempt, RolloutState, StatusChange

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 15.0
REQUESTS = 4  # asked of the gateway at once; more make each of them dearer (a pool of connections to search)
STOP_SECONDS = 5.0  # longest wait for the gateway once the controller is to stop


@dataclass
class Line:
    client: Client
    stop: asyncio.Event
    instance: str = ""
    """Names the gateway's process, as last heard."""
    withdrawn_after: tuple[str, int] = ("", 0)
    """Position in the list of withdrawn rollouts, and of which process that is."""
    away_at: float = float("-inf")
    """When the gateway was last found away (monotonic)."""
    requests: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(REQUESTS))

    async def insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the gateway until it answers. Once the controller is to stop, a gateway that is away is an error."""
        pause = FIRST_PAUSE
        while True:
            try:
                async with self.requests:
                    answer = await self.or_stop(ask(), late=STOP_SECONDS)
                if answer is None:  # which no request answers
                    raise ApiError(0, f"{STOPPED} before the gateway answered")
                return answer
            except ApiError as error:
                if not self.note_away(error) or self.stop.is_set():
                    raise
                logger.warning("the gateway is away (%s); asking again in %.1f s", error, pause)
            await self.or_stop(asyncio.sleep(pause))
            pause = min(2 * pause, LONGEST_PAUSE)

    def note_away(self, error: ApiError) -> bool:
        """Whether an error says that the gateway cannot be reached or is broken; remembers when."""
        away = error.status == 0 or error.status >= 500
        if away:
            self.away_at = time.monotonic()
        return away

    async def or_stop(self, work: Awaitable[T], late: float = 0.0) -> T | None:
        """The result of `work`, or None if the controller is to stop and `late` seconds later there is none; cancels it."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and late:
                await asyncio.wait({task}, timeout=late)
            return task.result() if task.done() else None
        finally:
            stopping.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def end_attempt(self, rollout_id: str, attempt_id: str, end: EndAttempt) -> None:
        """End an attempt, unless it has ended: by a request whose answer was lost."""
        try:
            await self.insist(lambda: self.client.end_attempt(rollout_id, attempt_id, end))
        except ApiError as error:
            if error.status != 409:
                raise

    async def fail(self, rollout_id: str, why: str) -> None:
        change = StatusChange(state=RolloutState.failed, error_message=why)
        await self.insist(lambda: self.client.change_rollout(rollout_id, change))

    async def current_instance(self) -> str:
        """The gateway's process as it is now."""
        self.instance = (await self.insist(lambda: self.client.withdrawn("", 0))).instance
        return self.instance

    async def withdrawn(self, ours: Callable[[], list[str]], wait: float) -> set[str]:
        """Rollouts that were finished or deleted by somebody while an attempt of them ran; waits for the first.

        A gateway that was started again cannot tell them: then they are looked for among `ours`. Raises `ApiError`.
        """
        page = await self.client.withdrawn(*self.withdrawn_after, wait)
        found = set(page.items)
        if not page.complete:
            states = {rollout_id: await self._state(rollout_id) for rollout_id in ours()}
            found = {
                name for name, state in states.items() if state not in (RolloutState.queuing, RolloutState.running)
            }
        self.instance, self.withdrawn_after = page.instance, (page.instance, page.next_after)
        return found

    async def _state(self, rollout_id: str) -> RolloutState | None:
        """A rollout's state; None if it was deleted."""
        try:
            return (await self.client.rollout(rollout_id)).rollout.status.state
        except ApiError as error:
            if error.status != 404:
                raise
            return None
