"""Which of a model's endpoints can be used now.

While calls are being sampled every endpoint is asked for its health now and then. One that fails a call is out of use
until it answers a check, which is made at once; one that fails its checks is lost: calls that wait for its tokens are
told. It is asked more often then, and comes back when it answers. Without calls nothing is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

import httpx

from longrein.gateway.engines import EngineError
from longrein.gateway.engines.wire import Broken, Server
from longrein.records import ModelEndpoint

log = logging.getLogger("longrein.gateway")

#: Seconds between two checks of an endpoint that is in, and of one that is out.
CHECK_EVERY, RETURN_EVERY = 5.0, 0.5
#: Longest check in seconds, and how many in a row may fail: a busy server answers late (SGLang waits for a token).
CHECK_SECONDS, CHECKS = 20.0, 3

Connect = Callable[[ModelEndpoint], Server]


@dataclass(eq=False)
class Member:
    """An endpoint as it is known here."""

    endpoint: ModelEndpoint
    server: Server
    fault: str | None = None
    """Why it is out; None: it is in."""
    lost: bool = False
    """Out, and nothing is to be expected of what it is sampling."""
    failed_checks: int = 0
    _waits: set[asyncio.Timeout] = field(default_factory=set)

    def version(self) -> int:
        """The policy version that it is registered with now."""
        return self.endpoint.version

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Wait for something from the endpoint. Raises `Broken` as soon as it is lost."""
        if self.lost:
            raise Broken(self._words())
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            raise Broken(self._words()) from None

    def out(self, fault: str) -> None:
        """Take it out of use: no further call goes there."""
        if self.fault is None:
            log.warning("engine %s is out of use: %s", self.endpoint.endpoint, fault)
        self.fault = fault

    def lose(self, fault: str) -> None:
        """Take it out of use, and tell whoever waits for it."""
        self.out(fault)
        self.lost = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now)

    def back(self) -> None:
        log.warning("engine %s is back in use", self.endpoint.endpoint)
        self.fault, self.lost = None, False

    def _words(self) -> str:
        return self.fault or f"the engine at {self.endpoint.endpoint} was out of use"


class Fleet:
    """The endpoints of a model. Used from one event loop."""

    def __init__(self, connect: Connect):
        self._connect = connect
        self._members: dict[tuple[str, str], Member] = {}
        self._calls = 0
        self._watcher: asyncio.Task[None] | None = None
        self._look = asyncio.Event()
        self._changed = asyncio.Event()

    def members(self, endpoints: Sequence[ModelEndpoint]) -> list[Member]:
        """The members of these endpoints, in their order; those of others are forgotten."""
        kept: dict[tuple[str, str], Member] = {}
        for endpoint in endpoints:
            key = (endpoint.protocol, endpoint.endpoint)
            member = self._members.get(key) or Member(endpoint, self._connect(endpoint))
            member.endpoint = endpoint
            kept[key] = member
        self._members = kept
        return list(kept.values())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Check the endpoints as long as anybody is in here."""
        self._calls += 1
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._watcher.cancel()
                self._watcher = None

    def failed(self, member: Member, fault: str) -> None:
        """A call to the endpoint failed: take it out until it answers a check, which is made now."""
        member.out(fault)
        self._look.set()

    async def change(self, seconds: float) -> None:
        """Return when an endpoint has come back, or after so many seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def _watch(self) -> None:
        while True:
            self._look.clear()
            await asyncio.gather(*(self.check(member) for member in self._members.values()))
            any_out = any(member.fault is not None for member in self._members.values())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), RETURN_EVERY if any_out else CHECK_EVERY)

    async def check(self, member: Member) -> None:
        """Ask an endpoint for its health, and take it out or in by that."""
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                await member.server.check(member.endpoint.version)
        except (Broken, EngineError, httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            member.failed_checks += 1
            gone = isinstance(error, httpx.ConnectError)
            if member.fault is not None or gone or member.failed_checks >= CHECKS:
                words = str(error) or type(error).__name__
                member.lose(f"the engine at {member.endpoint.endpoint} fails its health check: {words}")
            return
        member.failed_checks = 0
        if member.fault is not None:
            member.back()
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
