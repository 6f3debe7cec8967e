"""What the protocols of token engines have in common: a request over HTTP, its answer event by event, its refusals."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import httpx
import msgspec
from msgspec import Struct

from longrein.gateway.engines import Chunk, EngineError, Generate
from longrein.records import Json

T = TypeVar("T")

_HEADERS = {"content-type": "application/json"}
#: Bytes of one event of a stream, beyond which an endpoint does not speak its protocol.
LONGEST_EVENT = 64 * 1024 * 1024


class Broken(Exception):
    """An endpoint failed, not the request: it may be served elsewhere, or there again later.

    `busy`: the endpoint lives and only has too much to do.
    """

    def __init__(self, message: str, *, busy: bool = False):
        super().__init__(message)
        self.busy = busy


class Server(Protocol):
    """An endpoint, spoken to in its own protocol."""

    context: int | None
    """Longest prompt plus reply in tokens that it takes; None while that is not known."""

    async def check(self, version: int) -> None:
        """Return if it can serve calls with the weights of `version` now. Raises `Broken` or an httpx error."""
        ...

    def sample(self, request: Generate, version: Callable[[], int]) -> AsyncGenerator[Chunk, None]:
        """Sample, until a chunk with a finish reason. `version()` is the one that the endpoint is registered with now.

        Raises `Broken` or an httpx error where the endpoint failed, `EngineError` where the request cannot be served.
        """
        ...


class Card(Struct):
    """A model as a server lists it; adapters name their `parent`."""

    id: str
    max_model_len: int | None = None
    parent: str | None = None


class Cards(Struct):
    data: list[Card]


async def base_model(http: httpx.AsyncClient, url: str) -> Card:
    """The model that a server serves, by its `/v1/models`."""
    answer = await http.get(f"{url}/v1/models")
    await refuse_failure(answer, url)
    for card in read_as(Cards, answer.content, url).data:
        if card.parent is None:
            return card
    raise EngineError(f"the engine at {url} serves no model")


@asynccontextmanager
async def posted(http: httpx.AsyncClient, url: str, body: Json) -> AsyncIterator[httpx.Response]:
    """POST `body`; the answer with its content still to be read, whatever its status. Leaving closes the connection."""
    async with http.stream("POST", url, content=msgspec.json.encode(body), headers=_HEADERS) as answer:
        yield answer


async def refuse_failure(response: httpx.Response, url: str, request: Generate | None = None) -> None:
    """Return if the answer is a success.

    Raises `Broken` for 429 and 5xx and `EngineError` for all else, with the server's words. A guide that the server
    refuses is the client's mistake (400).
    """
    status = response.status_code
    if response.is_success:
        return
    text = (await response.aread()).decode(errors="replace")[:500]
    if status == 400 and request is not None and request.guide is not None:
        raise EngineError(f"the engine at {url} cannot follow the guide: {text}", 400)
    raise failure(f"the engine at {url} answered {status}: {text}", status)


def failure(message: str, status: int) -> Broken | EngineError:
    """What an answer with this HTTP status, or an error event with this code, means."""
    if status in (429, 503):
        return Broken(message, busy=True)
    return Broken(message) if status >= 500 else EngineError(message)


async def events(response: httpx.Response) -> AsyncIterator[list[bytes]]:
    """The data of a stream of server-sent events, those that arrive together in one list, up to `[DONE]`."""
    waiting = b""
    async for piece in response.aiter_bytes():
        *lines, waiting = (waiting + piece).split(b"\n")
        if len(waiting) > LONGEST_EVENT:
            raise Broken(f"an engine sent an event of more than {LONGEST_EVENT} bytes")
        found = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if b"[DONE]" in found:
            found = found[: found.index(b"[DONE]")]
            if found:
                yield found
            return
        if found:
            yield found


def read_as(kind: type[T], data: bytes, url: str) -> T:
    """JSON of the form that the protocol says. Raises `EngineError` with what came instead."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"the engine at {url} does not speak its protocol: {error}: {data[:200]!r}") from None


async def chunks(response: httpx.Response, url: str, read: Callable[[bytes], Chunk]) -> AsyncIterator[Chunk]:
    """The chunks of a stream, those that arrive together as one. Raises `Broken` when it ends before its reply does."""
    async for found in events(response):
        chunk = joined([read(data) for data in found])
        if chunk.token_ids or chunk.finish_reason is not None:
            yield chunk
        if chunk.finish_reason is not None:
            return
    raise Broken(f"the engine at {url} ended its stream before the reply was finished")


def joined(parts: Sequence[Chunk]) -> Chunk:
    """Consecutive chunks as one."""
    if len(parts) == 1:
        return parts[0]
    whole = Chunk([], [], [], None, [])
    for part in parts:
        whole.token_ids.extend(part.token_ids)
        whole.logprobs = _extended(whole.logprobs, part.logprobs, part)
        whole.top_logprobs = _extended(whole.top_logprobs, part.top_logprobs, part)
        whole.versions.extend(part.versions)
        whole.finish_reason = part.finish_reason or whole.finish_reason
    if not whole.token_ids:
        whole.logprobs = whole.top_logprobs = None
    return whole


def _extended(known: list[Any] | None, more: list[Any] | None, part: Chunk) -> list[Any] | None:
    """One value for each token, or None as soon as they are missing for any."""
    if not part.token_ids:
        return known
    return None if known is None or more is None else known + more


def fitted(request: Generate, context: int | None, url: str) -> Generate:
    """The request with as many tokens as a server of this context can give. Raises `EngineError` when it is none."""
    if context is None or len(request.token_ids) + request.max_tokens <= context:
        return request
    room = context - len(request.token_ids)
    if room < 1:
        raise EngineError(
            f"the prompt of {len(request.token_ids)} tokens does not fit into the {context} tokens of the engine at {url}",
            400,
        )
    return replace(request, max_tokens=room)


def version_runs(
    spans: Sequence[tuple[str, int, int]], start: int, count: int, registered: int
) -> list[tuple[int, int]]:
    """Run lengths [(version, tokens), …] of the reply's tokens `start` to `start + count`.

    `spans` are (version, first, end) as a server tells them, by position in the reply; where it tells none, or a version
    that is no number, the tokens have the version that the endpoint is `registered` with.
    """
    runs: list[tuple[int, int]] = []
    at, end = start, start + count
    for told, _, last in spans:
        length = min(last, end) - at
        if length > 0:
            runs.append((version_of(told, registered), length))
            at += length
    if at < end:
        runs.append((version_of(spans[-1][0], registered) if spans else registered, end - at))
    return runs


def version_of(told: str | int | None, registered: int) -> int:
    """The policy version that a server's word for its weights means."""
    if isinstance(told, int):
        return told
    return int(told) if told is not None and re.fullmatch("[0-9]{1,18}", told) else registered
