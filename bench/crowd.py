"""Many cheap agents in one process, for load.py: `python bench/crowd.py OPTIONS` with `Options` as JSON.

An agent is a connection and a conversation: it asks, reads the streamed answer, waits as long as a tool would take, and
asks again with all that was said. Its HTTP reads no more than these servers write, so that a thousand agents take a part of
one core. Commands come on stdin, one JSON object a line: {"agents": 1200} for more agents, {"stop": true} to end. On stdout
there is a line each second with what was answered, and at the end one with all that was seen.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import uvloop
from msgspec import Struct

WORDS = "the file look cat echo out of a line that says how many things were found in every folder".split()
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)")
#: The first piece of content that says anything.
_SAYS = re.compile(rb'"content": ?"[^"]')


class Options(Struct):
    host: str
    port: int
    key: str
    first: int
    """Number of the first agent of this process."""
    agents: int
    turns: int
    """Of a rollout; each agent's first one is shorter, so that conversations of all lengths are under way."""
    words: int
    """Of what a tool says."""
    tool_seconds: float
    cycle_seconds: float
    """Over which agents begin."""
    stream: bool
    attempts: bool
    """Whether attempts are started and ended, with tokens of their own (not by Agent Lightning)."""


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    message: _Delta = msgspec.field(default_factory=_Delta)


class _Event(Struct):
    choices: list[_Choice] = []
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


@dataclass
class Answer:
    status: int
    body: bytes
    headers_at: float
    first_at: float
    """When the first word came."""
    ended_at: float

    def said(self, stream: bool) -> str:
        """The content. Raises ValueError when the answer is not whole."""
        if not stream:
            return _EVENT.decode(self.body).choices[0].message.content or ""
        lines = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        if not lines or lines.pop() != b"[DONE]":
            raise ValueError("the stream is not whole")
        events = [_EVENT.decode(line) for line in lines]
        if any(event.error is not None for event in events):
            raise ValueError("the stream has an error")
        return "".join(choice.delta.content or "" for event in events for choice in event.choices)


class Connection(asyncio.Protocol):
    """One request at a time over HTTP/1.1."""

    def __init__(self) -> None:
        self.open = True
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[Answer] | None = None
        self._reset()

    def _reset(self) -> None:
        self._pieces: list[bytes] = []
        self._body_at = -1
        self._length: int | None = None
        """None: chunked."""
        self._received = 0
        self._status = 0
        self._tail = b""
        self._headers_at = self._first_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionError("the connection broke"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def ask(self, request: bytes) -> Answer:
        """Raises ConnectionError."""
        assert self._transport is not None
        self._reset()
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answered

    def data_received(self, data: bytes) -> None:
        if self._answered is None or self._answered.done():
            return
        now = time.monotonic()
        self._headers_at = self._headers_at or now
        self._pieces.append(data)
        self._received += len(data)
        if not self._first_at and _SAYS.search(data):
            self._first_at = now
        if self._body_at < 0 and not self._read_head():
            return
        if self._length is None:
            self._tail = (self._tail + data)[-5:]
            ended = self._tail == b"0\r\n\r\n"
        else:
            ended = self._received >= self._body_at + self._length
        if ended:
            body = b"".join(self._pieces)[self._body_at :]
            whole = _dechunked(body) if self._length is None else body
            self._answered.set_result(Answer(self._status, whole, self._headers_at, self._first_at or now, now))

    def _read_head(self) -> bool:
        joined = b"".join(self._pieces)
        end = joined.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = joined[:end].lower()
        found = _LENGTH.search(head)
        self._pieces, self._body_at, self._status = [joined], end + 4, int(head[9:12])
        self._length = None if b"\r\ntransfer-encoding: chunked" in head else int(found.group(1)) if found else 0
        return True


def _dechunked(body: bytes) -> bytes:
    parts, at = [], 0
    while size := int(body[at : (line := body.index(b"\r\n", at))], 16):
        parts.append(body[line + 2 : line + 2 + size])
        at = line + 4 + size
    return b"".join(parts)


@dataclass
class Crowd:
    """The agents of this process, and what they have seen."""

    options: Options
    stopping: bool = False
    started: int = 0
    answers: list[Sequence[float]] = field(default_factory=list)
    """(when it ended, seconds from the request to headers, to the first word, to the end) since the last line."""
    errors: Counter[str] = field(default_factory=Counter)
    seen: dict[str, list[int]] = field(default_factory=dict)
    """By rollout: a checksum of each answer that was seen whole."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def grow(self, agents: int) -> None:
        while self.started < agents:
            self.tasks.add(asyncio.ensure_future(self._agent(self.options.first + self.started)))
            self.started += 1

    async def _agent(self, number: int) -> None:
        rng = random.Random(number)
        await asyncio.sleep(rng.uniform(0, self.options.cycle_seconds))
        turns = rng.randint(1, self.options.turns)
        connection: Connection | None = None
        while not self.stopping:
            try:
                if connection is None or not connection.open:
                    connection = await self._connected()
                await self._rollout(connection, rng, turns)
            except OSError as error:
                self.errors[f"{type(error).__name__}: {error}"] += 1
                await asyncio.sleep(1.0)
            turns = self.options.turns
        if connection is not None:
            connection.close()

    async def _connected(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self.options.host, self.options.port)
        return connection

    async def _control(self, connection: Connection, method: str, path: str, body: Any) -> Any:
        answer = await connection.ask(self._request(method, path, self.options.key, msgspec.json.encode(body)))
        if not 200 <= answer.status < 300:
            raise OSError(f"{method} {path.split('/')[2]}: {answer.status}: {answer.body[:200]!r}")
        return msgspec.json.decode(answer.body) if answer.body else None

    def _request(self, method: str, path: str, key: str, body: bytes) -> bytes:
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self.options.host}\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _rollout(self, connection: Connection, rng: random.Random, turns: int) -> None:
        options = self.options
        [made] = await self._control(connection, "POST", "/api/rollouts", [{"input": {}}])
        rollout, attempt, key = made["rollout_id"], "0", options.key
        if options.attempts:
            started = await self._control(connection, "POST", f"/api/rollouts/{rollout}/attempts", {})
            attempt, key = started["attempt"]["attempt_id"], started["token"]
        path = f"/proxy/rollout/{rollout}/attempt/{attempt}/mode/train/openai/v1/chat/completions"
        messages = [_message("system", "You are a careful engineer.")]
        seen = self.seen[rollout] = []
        for _ in range(turns):
            messages.append(_message("user", " ".join(rng.choices(WORDS, k=options.words))))
            said = await self._answered(connection, path, key, messages)
            if said is not None:
                seen.append(checksum(said))
                messages.append(_message("assistant", said))
            if self.stopping:
                break
            await asyncio.sleep(options.tool_seconds * rng.uniform(0.5, 1.5))
        if options.attempts:
            ended = {"outcome": "succeeded"}
            await self._control(connection, "PATCH", f"/api/rollouts/{rollout}/attempts/{attempt}", ended)
            await self._control(connection, "PATCH", f"/api/rollouts/{rollout}", {"status": {"state": "succeeded"}})

    async def _answered(self, connection: Connection, path: str, key: str, messages: list[bytes]) -> str | None:
        stream = b',"stream":true' if self.options.stream else b""
        body = b'{"model":"policy"' + stream + b',"messages":[' + b",".join(messages) + b"]}"
        asked = time.monotonic()
        answer = await connection.ask(self._request("POST", path, key, body))
        if answer.status != 200:
            self.errors[f"HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}"] += 1
            return None
        try:
            said = answer.said(self.options.stream)
        except (ValueError, msgspec.DecodeError) as error:
            self.errors[str(error)] += 1
            return None
        times = (answer.headers_at - asked, answer.first_at - asked, answer.ended_at - asked)
        self.answers.append((answer.ended_at, *times))
        return said


def _message(role: str, content: str) -> bytes:
    return msgspec.json.encode({"role": role, "content": content})


def checksum(text: str) -> int:
    """By which an answer that was seen and one that was recorded are compared."""
    return zlib.crc32(text.encode())


async def main(options: Options) -> None:
    crowd = Crowd(options)
    crowd.grow(options.agents)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    listening = asyncio.ensure_future(_obey(crowd, commands))
    while not listening.done():
        await asyncio.wait({listening}, timeout=1.0)
        _tell(crowd)
    await asyncio.gather(*crowd.tasks)
    _tell(crowd)
    print(json.dumps({"seen": crowd.seen}), flush=True)


async def _obey(crowd: Crowd, commands: asyncio.StreamReader) -> None:
    while not crowd.stopping and (line := await commands.readline()):
        command = json.loads(line)
        crowd.grow(command.get("agents", 0))
        crowd.stopping = command.get("stop", False)
    crowd.stopping = True


def _tell(crowd: Crowd) -> None:
    answers, crowd.answers = crowd.answers, []
    print(json.dumps({"answers": answers, "errors": crowd.errors}), flush=True)


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Options)))
