"""Sampling at the endpoints of a model, whatever becomes of one of them.

Endpoints register by POST /api/models (or stand in the run file). Calls of one rollout go to the same endpoint, where
their prefix is cached. When an endpoint breaks off, the tokens so far become part of the prompt and the rest is sampled
at another endpoint, or at the same once it is back: nobody who reads the reply can tell.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

import httpx

from longrein.gateway.engines import Chunk, EngineError, Feature, Generate
from longrein.gateway.engines.embedded import EmbeddedServer
from longrein.gateway.engines.health import Fleet, Member
from longrein.gateway.engines.routing import choose_endpoint
from longrein.gateway.engines.sglang import SglangServer
from longrein.gateway.engines.vllm import VllmServer
from longrein.gateway.engines.wire import Broken, Server
from longrein.records import ModelEndpoint

log = logging.getLogger("longrein.gateway")

#: How often one call may be broken off before it fails, and how often an endpoint may have too much to do for it.
MOST_BREAKS, MOST_BUSY = 8, 64
#: Seconds that a call waits for an endpoint: for one that is out to come back, and for one to register at all.
PATIENCE_SECONDS, REGISTRATION_SECONDS = 120.0, 3.0
#: Seconds before an endpoint that just failed a call is asked again: the first time, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0

SERVERS: dict[str, Callable[[httpx.AsyncClient, str], Server]] = {
    "tokens": EmbeddedServer,
    "vllm": VllmServer,
    "sglang": SglangServer,
}


class TokensEngine:
    """Samples at the registered endpoints of a model."""

    name = "policy"

    def __init__(self, http: httpx.AsyncClient, endpoints: Callable[[], Sequence[ModelEndpoint]]):
        """`endpoints()` gives those that are registered now."""
        self.http = http
        self.endpoints = endpoints
        self.fleet = Fleet(self._connect)

    def refresh(self) -> None:
        """The registered endpoints, or their versions, have changed."""
        self.fleet.members(self.endpoints())

    async def context(self) -> int | None:
        """Longest prompt plus reply in tokens that every endpoint takes, as far as they answer; None: not known."""
        members = self.fleet.members(self.endpoints())
        unknown = [m for m in members if m.server.context is None and m.endpoint.protocol != "tokens"]
        await asyncio.gather(*(self.fleet.check(member) for member in unknown))
        return min((m.server.context for m in members if m.server.context is not None), default=None)

    def lacks(self, feature: Feature) -> str | None:
        """Nothing: each protocol has guides and log-probabilities. What a server cannot do it says itself."""
        return None

    def _connect(self, endpoint: ModelEndpoint) -> Server:
        server = SERVERS.get(endpoint.protocol)
        if server is None:
            raise EngineError(
                f"the endpoint {endpoint.endpoint} has the protocol {endpoint.protocol!r}; expected {', '.join(SERVERS)}"
            )
        return server(self.http, endpoint.root)

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """Sample; leaving the iterator early cancels the generation at its endpoint. Raises `EngineError`."""
        with self.fleet.watched():
            reply = Reply(request)
            while reply.finish is None:
                member = await self._member(reply)
                stream = member.server.sample(reply.rest(), member.version)
                try:
                    while reply.finish is None:
                        async with member.waiting():
                            chunk = await anext(stream, Chunk(finish_reason="abort"))
                        for given in reply.take(chunk):
                            yield given
                        if chunk.finish_reason == "abort":
                            raise Broken(f"the engine at {member.endpoint.endpoint} aborted the request", busy=True)
                except (Broken, httpx.HTTPError, httpx.InvalidURL) as error:
                    await self._mend(reply, member, error)
                finally:
                    await stream.aclose()
            if reply.owed is not None:
                yield reply.owed

    async def _member(self, reply: Reply) -> Member:
        """The endpoint for the rest of a reply, once there is one. Raises `EngineError` when none comes in time."""
        clock = asyncio.get_running_loop()
        began, none_since, fault = clock.time(), None, ""
        while True:
            members = self.fleet.members(self.endpoints())
            usable = [member for member in members if member.fault is None]
            fresh = [member for member in usable if member.endpoint.endpoint != reply.failed_at]
            if usable:
                chosen = choose_endpoint([m.endpoint for m in fresh or usable], reply.request.rollout_id)
                return next(m for m in usable if m.endpoint is chosen)
            if members:
                none_since, fault = None, "; ".join(member.fault or "" for member in members)
                since, patience = began, PATIENCE_SECONDS
            else:  # for a moment only, when one engine takes the place of another, however long this call has waited
                none_since = clock.time() if none_since is None else none_since
                since, patience = none_since, REGISTRATION_SECONDS
            if clock.time() - since >= patience:
                raise EngineError(fault or "no engine has registered for this model (POST /api/models)", 503)
            await self.fleet.change(min(0.2, patience) if not members else 1.0)

    async def _mend(self, reply: Reply, member: Member, error: Exception) -> None:
        """After a break: see to it that the rest is sampled, or raise `EngineError`."""
        words = str(error) or type(error).__name__
        if not isinstance(error, Broken):
            words = f"the engine at {member.endpoint.endpoint} broke off: {words}"
        if isinstance(error, Broken) and error.busy:
            reply.busy += 1
            if reply.busy > MOST_BUSY:
                raise EngineError(words, 503) from None
        else:
            reply.breaks += 1
            self.fleet.failed(member, words)
            if reply.breaks > reply.most_breaks:
                raise EngineError(f"the reply was broken off {reply.breaks} times, the last time so: {words}") from None
        reply.broken(words, member.endpoint.endpoint)
        log.info("call %s goes on after %d tokens: %s", reply.request.request_id, len(reply.ids), words)
        await asyncio.sleep(reply.pause())


@dataclass
class Reply:
    """What has been sampled of a request, over all the endpoints that were asked."""

    request: Generate
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    owed: Chunk | None = None
    """A last chunk that no endpoint gave."""
    failed_at: str | None = None
    """The endpoint that failed last."""
    breaks: int = 0
    busy: int = 0
    parts: int = 0
    _fruitless: int = 0
    """Breaks since the last token."""
    _kept: list[Chunk] = field(default_factory=list)
    """Not given out yet."""

    @property
    def _keeps(self) -> bool:
        """A guided reply cannot be gone on with: its grammar would begin anew. Unless streamed it is given out whole."""
        return self.request.guide is not None and not self.request.stream

    @property
    def most_breaks(self) -> int:
        """A server may fail because of the guide, and would again."""
        return MOST_BREAKS if self.request.guide is None else 1

    def rest(self) -> Generate:
        """The request for what is still to be sampled."""
        self.parts += 1
        request, done = self.request, len(self.ids)
        if self.parts == 1:
            return request
        return replace(
            request,
            request_id=f"{request.request_id}#{self.parts}",
            token_ids=[*request.token_ids, *self.ids],
            max_tokens=request.max_tokens - done,
            seed=rest_seed(request.seed, done),
        )

    def take(self, chunk: Chunk) -> list[Chunk]:
        """Take in a chunk; what can be given out."""
        self.ids.extend(chunk.token_ids)
        if chunk.token_ids:
            self._fruitless = 0
        if chunk.finish_reason == "abort":
            chunk = Chunk(chunk.token_ids, chunk.logprobs, chunk.versions, None, chunk.top_logprobs)
        self.finish = chunk.finish_reason
        if self._keeps:
            self._kept.append(chunk)
            return self._kept if self.finish is not None else []
        return [chunk] if chunk.token_ids or chunk.finish_reason is not None else []

    def broken(self, words: str, url: str) -> None:
        """The endpoint at `url` broke off. Raises `EngineError` if that cannot be mended."""
        self.failed_at = url
        self._fruitless += 1
        if self._keeps:
            self.ids, self._kept = [], []
        elif self.ids and self.request.guide is not None:
            raise EngineError(f"{words}; a guided reply that was given out in part cannot be gone on with")
        elif self.ids and self.ids[-1] in self.request.stop_token_ids:
            self._end("stop")
        elif len(self.ids) >= self.request.max_tokens:
            self._end("length")

    def pause(self) -> float:
        """Seconds to wait before the next try."""
        if self.finish is not None or self._fruitless <= 1:
            return 0.0
        return min(FIRST_PAUSE * 2.0 ** (self._fruitless - 2), LONGEST_PAUSE)

    def _end(self, reason: str) -> None:
        """Everything had come but the end."""
        self.finish, self.owed = reason, Chunk(finish_reason=reason)


def rest_seed(seed: int, done: int) -> int:
    """The seed for what comes behind the first `done` tokens of a reply (63 bits)."""
    if not done:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}\0{done}".encode()).digest()[:8], "big") >> 1
