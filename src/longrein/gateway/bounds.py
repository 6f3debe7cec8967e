"""What a request may cost: the size and time of its head and its body, the form of its JSON, and where its work is done.

A request that is too much costs its sender an error. One that is merely large is read, rendered and encoded in threads
of its own, one at a time for each attempt, so that the event loop goes on serving everybody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

T = TypeVar("T")

#: Of a request's head: bytes of its URL, number of its headers, bytes of it all, and seconds until it is whole.
LARGEST_URL, MOST_HEADERS, LARGEST_HEAD, HEAD_SECONDS = 8 * 1024, 128, 64 * 1024, 30.0
#: Of a JSON body: how deep it nests, and how many objects and lists it has.
MOST_DEPTH, MOST_CONTAINERS = 100, 500_000
#: Integers beyond 64 bits have no place in a record.
SMALLEST, LARGEST = -(2**63), 2**64 - 1
#: Bytes of a body from which its work is done in a thread; what is smaller costs less than a thread's waking.
LARGE_BYTES = 256 * 1024
#: Threads for large requests. They share Python's lock with the event loop: more would only slow it down.
THREADS = 2


# --- JSON -----------------------------------------------------------------------------------------------------------


class BadJson(Exception):
    """A body that is no JSON, or has what is not read here (`valid`). The message says which."""

    def __init__(self, message: str, *, valid: bool = True):
        super().__init__(message)
        self.valid = valid


def read_json(content: bytes) -> Any:
    """The value of a JSON text. Raises `BadJson`."""
    try:
        value = msgspec.json.decode(content)
    except RecursionError:
        raise BadJson(f"the body is nested deeper than {MOST_DEPTH} levels") from None
    except msgspec.ValidationError as error:  # a number that no float holds
        raise BadJson(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        words = str(error) if "(byte " in str(error) else f"{error} (byte {len(content)})"
        raise BadJson(f"the body is not valid JSON: {words}", valid=False) from None
    _check(value)
    return value


def _check(value: Any) -> None:
    """Look at every value, level by level: what follows may recurse into it and write it down."""
    level, depth, containers = [[value]], -1, -1
    while level:
        depth, containers = depth + 1, containers + len(level)
        if depth > MOST_DEPTH:
            raise BadJson(f"the body is nested deeper than {MOST_DEPTH} levels")
        if containers > MOST_CONTAINERS:
            raise BadJson(f"the body has more than {MOST_CONTAINERS} objects and lists")
        below: list[Any] = []
        for container in level:
            for item in container.values() if type(container) is dict else container:
                kind = type(item)
                if kind is dict or kind is list:
                    below.append(item)
                elif kind is int and not SMALLEST <= item <= LARGEST:
                    raise BadJson("the body has an integer of more than 64 bits")
        level = below


# --- The head and the body ------------------------------------------------------------------------------------------


class Bounds:
    """ASGI middleware: refuses a head that is too large, and a body that is too large or takes too long to arrive."""

    def __init__(self, app: ASGIApp, largest: int, seconds: float, refuse: Callable[[Request, int, str], Response]):
        """`largest` bytes and `seconds` of a body; `refuse` makes the answer of an error in the shape of its path."""
        self._app, self._largest, self._seconds, self._refuse = app, largest, seconds, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fault = _head_fault(scope)
        if fault is not None:
            await self._refuse(Request(scope), *fault)(scope, receive, send)
            return
        body = _Body(receive, scope, self._largest, self._seconds)
        await self._app(scope, body.receive, send)


def _head_fault(scope: Scope) -> tuple[int, str] | None:
    """(status, words) of a head that is refused."""
    headers = scope["headers"]
    url = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    if url > LARGEST_URL:
        return 414, f"the URL has {url} bytes, more than {LARGEST_URL}"
    if len(headers) > MOST_HEADERS:
        return 431, f"the request has {len(headers)} headers, more than {MOST_HEADERS}"
    size = sum(len(name) + len(value) for name, value in headers)
    if size > LARGEST_HEAD:
        return 431, f"the request's headers have {size} bytes, more than {LARGEST_HEAD}"
    if not scope["path"].isprintable():
        return 400, "the URL's path has a character that cannot be printed"
    return None


class _Body:
    """A request's body on its way in."""

    def __init__(self, receive: Receive, scope: Scope, largest: int, seconds: float):
        self._receive, self._largest, self._seconds = receive, largest, seconds
        length = dict(scope["headers"]).get(b"content-length", b"0")
        self._too_long = length.isdigit() and int(length[:20]) > largest
        self._read = 0
        self._whole = False
        self._deadline: float | None = None

    async def receive(self) -> Message:
        """The next piece. Raises HTTPException: 413 before more than is allowed is read, 408 once it is too late."""
        if self._too_long:
            raise self._too_large()
        if self._whole:
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(
                408,
                f"the body took longer than gateway.body_seconds = {self._seconds:g}",
                headers={"Connection": "close"},
            ) from None
        self._whole = not message.get("more_body", False)
        self._read += len(message.get("body", b""))
        if self._read > self._largest:
            raise self._too_large()
        return message

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is larger than gateway.max_body_bytes = {self._largest}")


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which closes connections whose head does not become whole, by its size or its slowness."""

    _in_head = True
    _head_bytes = 0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > LARGEST_HEAD + LARGEST_URL:
            self._close(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._late is None:
            self._begin()

    def on_headers_complete(self) -> None:
        self._end()
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def _begin(self) -> None:
        self._late = self.loop.call_later(HEAD_SECONDS, self._close, b"408 Request Timeout")

    def _end(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self, status: bytes) -> None:
        self._end()
        if self.transport.is_closing():
            return
        if self._head_bytes and (self.cycle is None or self.cycle.response_complete):
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()


# --- Where the work is done -----------------------------------------------------------------------------------------


class Workers:
    """Threads for the work of large requests."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "longrein-large")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Let what is done be done; nothing more is begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Lane:
    """How one request's work is done: at once if it is small, in a thread if it is large."""

    def __init__(self, workers: Workers, one_at_a_time: asyncio.Lock, large: bool):
        self._workers, self._one_at_a_time, self._large = workers, one_at_a_time, large

    async def run(self, work: Callable[[], T], *, costly: bool = False) -> T:
        """`work()`. `costly`: whether it may take long though the request is small."""
        if self._large:
            return await self._workers.run(work)
        if costly:
            async with self._one_at_a_time:
                return await self._workers.run(work)
        return work()


@asynccontextmanager
async def lane(headers: Mapping[str, str], workers: Workers, one_at_a_time: asyncio.Lock) -> AsyncIterator[Lane]:
    """The lane of a request with these headers. A large one waits for those of its attempt before it, unread."""
    length = headers.get("content-length", "0" if "transfer-encoding" not in headers else "")
    if length.isdigit() and int(length[:20]) <= LARGE_BYTES:
        yield Lane(workers, one_at_a_time, large=False)
        return
    async with one_at_a_time:
        yield Lane(workers, one_at_a_time, large=True)


class Held(Response):
    """A response, and what is to be done once it has been sent or has failed."""

    def __init__(self, response: Response, release: Callable[[], None]):
        super().__init__()
        self._response, self._release = response, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._release()
