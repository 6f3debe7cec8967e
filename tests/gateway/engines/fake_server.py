"""A fake engine over real HTTP: what it answers is a script, and its connections break when the script says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from longrein.gateway.engines import Chunk, Generate
from longrein.gateway.engines.tokens import TokensEngine


@dataclass
class Refusal:
    """An answer that is not a success."""

    status: int
    body: Any = field(default_factory=dict)


@dataclass
class Stream:
    """Server-sent events, and what comes behind them: the end of the answer, a cut connection, or nothing any more."""

    events: Sequence[Any]
    then: Literal["end", "cut", "hang"] = "end"


@dataclass
class Asked:
    path: str
    body: Any


@dataclass
class FakeServer:
    """`routes` maps a path to what a request there is answered; a path that is not in it is answered 404."""

    routes: dict[str, Callable[[Any], Any]]
    asked: list[Asked] = field(default_factory=list)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client leaves an answer that hangs."""
    open: int = 0
    most_open: int = 0
    url: str = ""
    _listener: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def bodies(self, path: str) -> list[Any]:
        """The bodies of the requests to a path."""
        return [one.body for one in self.asked if one.path == path]

    async def start(self, port: int = 0) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def cut(self) -> None:
        """Reset the open connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def die(self) -> None:
        """As a process that is killed: no new connections, and all that are open are reset."""
        assert self._listener is not None
        self._listener.close()
        await self.cut()

    async def come_back(self) -> None:
        """Listen again at the same address."""
        await self.start(int(self.url.rsplit(":", 1)[1]))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lengths = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length")]
            content = await reader.readexactly(int(lengths[0])) if lengths else b""
            path = head.split(" ")[1]
            asked = Asked(path, json.loads(content) if content else None)
            self.asked.append(asked)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            try:
                await self._answer(asked, reader, writer)
            finally:
                self.open -= 1
        self._writers.discard(writer)
        writer.close()

    async def _answer(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        route = self.routes.get(asked.path.split("?")[0])
        answer = route(asked.body) if route is not None else Refusal(404, {"detail": "Not Found"})
        if asyncio.iscoroutine(answer):
            answer = await answer
        if not isinstance(answer, Stream):
            status, body = (answer.status, answer.body) if isinstance(answer, Refusal) else (200, answer)
            writer.write(_head(status, "application/json") + json.dumps(body).encode())
            await writer.drain()
            return
        # A length that is not reached tells a cut connection from an end; a reset could overtake what was sent before.
        length = "content-length: 1000000\r\n" if answer.then == "cut" else ""
        writer.write(_head(200, "text/event-stream", length) + sse(*answer.events))
        try:
            await writer.drain()
            if answer.then == "hang":
                await reader.read()  # until the client hangs up
        finally:
            if answer.then == "hang":
                self.hung_up.set()


def _head(status: int, kind: str, more: str = "") -> bytes:
    return f"HTTP/1.1 {status} Fake\r\ncontent-type: {kind}\r\n{more}connection: close\r\n\r\n".encode()


def sse(*events: Any) -> bytes:
    return b"".join(
        b"data: " + (e.encode() if isinstance(e, str) else json.dumps(e).encode()) + b"\n\n" for e in events
    )


@asynccontextmanager
async def fake_server(routes: dict[str, Callable[[Any], Any]]) -> AsyncIterator[FakeServer]:
    server = FakeServer(routes)
    await server.start()
    try:
        yield server
    finally:
        await server.die()


def request(**changes: Any) -> Generate:
    """A request of three prompt tokens."""
    values: dict[str, Any] = {
        "request_id": "r/0/0", "rollout_id": "r", "token_ids": [1, 2, 3], "max_tokens": 8, "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "stop_token_ids": [2], "seed": 7, "stream": True,
    }  # fmt: skip
    return Generate(**{**values, **changes})


async def collect(engine: TokensEngine, asked: Generate) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(asked)]


@dataclass
class Whole:
    """A reply, put together."""

    ids: list[int]
    logprobs: list[float | None]
    versions: list[int]
    """One for each token."""
    finish: str | None
    top: list[Any]


def whole(chunks: Sequence[Chunk]) -> Whole:
    return Whole(
        [id for chunk in chunks for id in chunk.token_ids],
        [p for chunk in chunks for p in (chunk.logprobs or [None] * len(chunk.token_ids))],
        [version for chunk in chunks for version, count in chunk.versions for _ in range(count)],
        chunks[-1].finish_reason if chunks else None,
        [top for chunk in chunks for top in (chunk.top_logprobs or [])],
    )
