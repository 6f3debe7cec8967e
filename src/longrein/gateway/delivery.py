"""How an answer reaches those who asked for it.

A request is sampled apart from the connection it came on. What is to be sent is kept from the first byte, so that a
client that comes back is given all of it. That nobody listens any more is reported (`on_left`); the answer itself does not
care.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longrein.gateway.dialects import DialectError

#: Seconds without an event after which a stream gets a keep-alive, and a plain answer that waits one more space.
KEEP_ALIVE_SECONDS = 10.0
#: Seconds after which a plain answer that still waits sends its headers and the first space. Until then a failure has
#: an HTTP status; later it can only break the connection off.
PATIENCE_SECONDS = 20.0

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(eq=False)
class Delivery:
    """One answer on its way: what has been written of it, and how many listen."""

    on_left: Callable[[], None] = lambda: None
    """Called when the last listener has gone, with its answer or without."""
    written: list[bytes] = field(default_factory=list)
    ended: bool = False
    error: DialectError | None = None
    """Why there is no answer; a stream has it as its last event, too."""
    given: bool = False
    """Whether a client was given the whole."""
    listeners: int = 0
    wrote_at: float = field(default_factory=time.monotonic)
    heard: set[Listener] = field(default_factory=set)
    """By whom: those that are told when there is more."""

    def write(self, *pieces: bytes) -> None:
        """Add to the answer."""
        self.written.extend(pieces)
        self.wrote_at = time.monotonic()
        self._tell()

    def end(self, error: DialectError | None = None) -> None:
        """Nothing more comes."""
        self.ended, self.error = True, error
        self._tell()

    def _tell(self) -> None:
        for listener in self.heard:
            listener.wake()

    def join(self) -> None:
        """Count a client, from the moment that its request is known. The response counts it out."""
        self.listeners += 1

    def leave(self) -> None:
        """A client has been given the answer, or has gone."""
        self.listeners -= 1
        if not self.listeners:
            self.on_left()


class Listener:
    """One client's wait for what is written. `close` ends it."""

    def __init__(self, delivery: Delivery, receive: Receive):
        self._delivery = delivery
        self._news = asyncio.Event()
        self.wake = self._news.set
        self.gone = asyncio.ensure_future(disconnected(receive))
        """Done when the client has gone."""
        self.gone.add_done_callback(lambda _: self.wake())
        delivery.heard.add(self)

    async def news(self, timeout: float | None = None) -> None:
        """Until there is something new since the last time, or no more to come, or the client has gone, or time is up."""
        if self._delivery.ended or self.gone.done():
            return
        timer = asyncio.get_running_loop().call_later(timeout, self.wake) if timeout is not None else None
        try:
            await self._news.wait()
        finally:
            if timer is not None:
                timer.cancel()
        self._news.clear()

    def close(self) -> None:
        self._delivery.heard.discard(self)
        self.gone.cancel()


def streamed(delivery: Delivery) -> Response:
    """The answer as server-sent events; its headers leave at once."""
    return _Stream(delivery)


async def plain(http: HttpRequest, delivery: Delivery) -> Response:
    """The answer as one JSON body, once it is there; a slow one begins with white space, as life for the client.

    Raises the `DialectError` that stands for the answer.
    """
    late = time.monotonic() + PATIENCE_SECONDS
    listener = Listener(delivery, http.receive)
    try:
        while not delivery.ended and not listener.gone.done() and (left := late - time.monotonic()) > 0:
            await listener.news(left)
        if delivery.error is not None:
            raise delivery.error
    except BaseException:
        delivery.leave()
        raise
    finally:
        listener.close()
    return _Whole(delivery) if delivery.ended else _Slow(delivery)


class _Stream(Response):
    """Server-sent events, as they are written."""

    def __init__(self, delivery: Delivery) -> None:
        super().__init__(media_type="text/event-stream", headers=_STREAM_HEADERS)
        del self.headers["content-length"]
        self._delivery = delivery

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery, sent = self._delivery, 0
        listener = Listener(delivery, receive)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not listener.gone.done():
                pieces, ended = delivery.written[sent:], delivery.ended
                if pieces:
                    await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": True})
                    sent += len(pieces)
                if ended:
                    # The client has been sent everything: one that hangs up now has had its answer.
                    delivery.given = delivery.given or delivery.error is None
                    await send({"type": "http.response.body", "body": b""})
                    return
                if sent == len(delivery.written):
                    await listener.news()
        finally:
            listener.close()
            delivery.leave()


class _Whole(Response):
    """A finished answer."""

    def __init__(self, delivery: Delivery) -> None:
        super().__init__(b"".join(delivery.written), media_type="application/json")
        self._delivery = delivery

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
            self._delivery.given = True
        finally:
            self._delivery.leave()


class _Slow(Response):
    """An answer that is still awaited: 200, then a space now and then, then the body.

    If there is none in the end, the response breaks off: clients ask again, as they do for any broken connection.
    """

    def __init__(self, delivery: Delivery) -> None:
        super().__init__(media_type="application/json")
        del self.headers["content-length"]
        self._delivery = delivery

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        delivery = self._delivery
        listener = Listener(delivery, receive)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not delivery.ended and not listener.gone.done():
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
                await listener.news(KEEP_ALIVE_SECONDS)
            if delivery.ended and delivery.error is None and not listener.gone.done():
                await send({"type": "http.response.body", "body": b"".join(delivery.written)})
                delivery.given = True
        finally:
            listener.close()
            delivery.leave()


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone away. The request's body has to have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
