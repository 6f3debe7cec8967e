"""Passing requests through to an OpenAI-compatible endpoint, streamed and not.

Three kinds of endpoint: the run file's (`engine.url`, text only), a teacher's (`warmup.teacher_url`, text only), and
those registered by POST /api/models, which are asked for token ids as Agent Lightning's gateway asks (vLLM's
`return_token_ids`). Whatever ids come back are recorded.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longrein.gateway.bounds import BadJson, lane, read_json
from longrein.gateway.budget import Grant, budget_of
from longrein.gateway.delivery import disconnected
from longrein.gateway.dialects import DONE, MOST_CHOICES, MOST_REPLIES, DialectError, event, messages
from longrein.gateway.engines.answers import Answers
from longrein.gateway.engines.lineage import Lineage, Lineages
from longrein.gateway.engines.routing import choose_endpoint
from longrein.gateway.engines.wire import LONGEST_EVENT
from longrein.records import Call, Json, Mode, Rollout, now
from longrein.schema import StoreError

if TYPE_CHECKING:
    from longrein.gateway.serve import Gateway

PATHS = {"chat": "chat/completions", "completions": "completions"}

# Seconds between tries while an endpoint cannot be reached or breaks off before it answers.
_WAITS = (0.2, 0.5, 1.0, 2.0)


class UpstreamError(Exception):
    """An endpoint did not answer as it should. `status` is its HTTP status, 502 where it gave none."""

    def __init__(self, message: str, status: int = 502):
        super().__init__(message)
        self.status = status


async def complete(http: httpx.AsyncClient, url: str, model: str, key: str, body: Json) -> Json:
    """One chat completion, not streamed: POST `{url}/chat/completions` with `model` put into `body`.

    Retried while the endpoint cannot be reached or answers 429 or 5xx. Raises UpstreamError.
    """
    request = msgspec.json.encode({**body, "model": model, "stream": False})
    target = f"{url.rstrip('/')}/chat/completions"
    for wait in (*_WAITS, None):
        try:
            response = await http.post(target, content=request, headers=_headers(key))
            status, words = response.status_code, f"{target} answered {response.status_code}: {response.text[:500]}"
        except httpx.TransportError as error:
            response, status, words = None, 502, f"{target} cannot be reached: {error or type(error).__name__}"
        if response is not None and response.is_success:
            value = _json(response.content)
            if isinstance(value, dict) and isinstance(value.get("choices"), list) and value["choices"]:
                return value
            raise UpstreamError(f"{target} answered without choices: {response.text[:500]}")
        if wait is None or (response is not None and status != 429 and status < 500):
            raise UpstreamError(words, status)
        await asyncio.sleep(max(wait, _retry_after(response)))
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class Upstream:
    """An endpoint, and how it is spoken to."""

    url: str
    """With its /v1."""
    model: str
    key: str
    engine: str
    """The name in the record."""
    version: int = 0
    gives_ids: bool = False


@dataclass
class Exchange:
    """One request on its way: what its record needs."""

    dialect: str
    rollout: Rollout
    attempt_id: str
    mode: Mode
    upstream: Upstream
    body: Json
    count: int
    """Choices asked for."""
    grant: Grant | None = None
    lineage: Lineage | None = None
    """Of the attempt; None until the request is let through the gate."""
    numbers: list[int] = field(default_factory=list)
    """Call numbers, one for each choice."""
    answers: Answers = field(default_factory=Answers)
    started_at: float = 0.0
    first_token_at: float | None = None
    committed: bool = False

    def end(self) -> None:
        """Give back to the attempt's budget what was not used."""
        if self.grant is not None:
            self.grant.end(sum(len(choice.ids) for choice in self.answers.choices))


class Passthrough:
    """Answers model requests by an endpoint's answers."""

    def __init__(self, gateway: Gateway):
        self.gateway = gateway
        self.lineages = Lineages(gateway.store)

    async def answer(self, http: Request, dialect: str, rollout: Rollout, attempt_id: str, mode: Mode) -> Response:
        """Answer one model request of an attempt."""
        try:
            budget = budget_of(http)
            async with lane(http.headers, self.gateway.workers, budget.spending.large) as way:
                content = await http.body()
                body = await way.run(lambda: _read_body(content))
            exchange = self._exchange(body, dialect, rollout, attempt_id, mode)
            # How many tokens come is the endpoint's affair: agent.max_tokens is refused with such a model.
            exchange.grant = budget.take([0] * exchange.count)
            work = asyncio.ensure_future(self._ask(exchange))
            gone = asyncio.ensure_future(disconnected(http.receive))
            try:
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    await _cancel(work)
                    await self._commit(exchange, "abandoned", 499, {"message": "the client went away"})
                    return Response(status_code=499)
                return work.result()
            except asyncio.CancelledError:
                await _cancel(work)
                await asyncio.shield(self._commit(exchange, "abandoned", 499, {"message": "the gateway went down"}))
                raise
            finally:
                gone.cancel()
        except DialectError as error:
            body = messages.error_body(error) if dialect == "messages" else error.body()
            return Response(
                msgspec.json.encode(body), error.status, headers=error.headers, media_type="application/json"
            )

    async def count(self, http: Request, dialect: str, rollout: Rollout, attempt_id: str) -> int:
        """Nobody here can count."""
        raise DialectError(404, "tokens are counted only for a model that is rendered here (model.path)")

    def end_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """Nothing outlives its client here."""

    async def close(self) -> None:
        """Requests end with their clients' connections."""

    # Before the endpoint

    def _exchange(self, body: Json, dialect: str, rollout: Rollout, attempt_id: str, mode: Mode) -> Exchange:
        if dialect not in PATHS:
            raise DialectError(
                400,
                f"{dialect} requests are answered only for a model that is rendered here (model.path); this gateway "
                f"passes {' and '.join(PATHS)} on to an endpoint",
            )
        self.gateway.access.name_model(rollout, body.get("model"))
        upstream = self._upstream(rollout)
        count = body.get("n")
        if count is None:
            count = 1
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_CHOICES:
            raise DialectError(400, f"n: expected an integer from 1 to {MOST_CHOICES}, got {count!r}", param="n")
        count *= _prompts_of(body)
        if count > MOST_REPLIES:
            raise DialectError(
                400, f"prompt: expected at most {MOST_REPLIES} replies of a request, got {count}", param="prompt"
            )
        options = self.gateway.config.gateway
        sent = {**body, "model": upstream.model}
        if upstream.engine != "teacher":
            sent["temperature"] = options.train_temperature if mode == "train" else options.val_temperature
        if upstream.gives_ids:
            sent["return_token_ids"] = True
            if mode == "train" and dialect == "chat":
                sent["logprobs"] = True
            elif mode == "train" and not sent.get("logprobs"):
                sent["logprobs"] = 1
        return Exchange(dialect, rollout, attempt_id, mode, upstream, sent, count)

    def _upstream(self, rollout: Rollout) -> Upstream:
        config = self.gateway.config
        if rollout.config.engine == "teacher":
            if not config.warmup.teacher_url:
                raise DialectError(
                    503, "this rollout asks for the teacher, but the run file names no endpoint (warmup.teacher_url)"
                )
            return Upstream(
                config.warmup.teacher_url, config.warmup.teacher_model, _key(config.warmup.teacher_key_env), "teacher"
            )
        if config.engine.kind == "openai":
            model = config.engine.model or config.model.name
            return Upstream(config.engine.url, model, _key(config.engine.api_key_env), config.engine.url)
        endpoints = [model for model in self.gateway.store.models() if model.protocol == "openai"]
        if not endpoints:
            raise DialectError(
                503,
                "no model server is registered: POST /api/models, or set model.path or engine.kind",
                type="api_error",
                code="no_server",
            )
        chosen = choose_endpoint(endpoints, rollout.rollout_id)
        return Upstream(chosen.endpoint, chosen.model, "", chosen.endpoint, chosen.version, gives_ids=True)

    # The endpoint

    async def _ask(self, exchange: Exchange) -> Response:
        """Pass the gate, send the request, and answer: whole, or with a stream that has begun."""
        async with AsyncExitStack() as stack:
            stack.callback(exchange.end)
            [passage] = self.gateway.gate.admit((exchange.rollout.rollout_id, exchange.attempt_id))
            await stack.enter_async_context(passage)
            exchange.started_at = now()
            exchange.lineage = self.lineages.of(exchange.rollout, exchange.attempt_id)
            exchange.numbers = exchange.lineage.take_numbers(exchange.count)
            response = await self._send(exchange)
            stack.push_async_callback(response.aclose)
            if response.is_success and "text/event-stream" in response.headers.get("content-type", ""):
                return Relay(self, exchange, response, stack.pop_all())
            try:
                content = await response.aread()
            except httpx.HTTPError as error:
                raise await self._unreachable(exchange, error) from None
            return await self._whole(exchange, response, content)

    async def _send(self, exchange: Exchange) -> httpx.Response:
        upstream = exchange.upstream
        target = f"{upstream.url.rstrip('/')}/{PATHS[exchange.dialect]}"
        content = msgspec.json.encode(exchange.body)
        http = self.gateway.http
        for wait in (*_WAITS, None):
            try:
                response = await http.send(
                    http.build_request("POST", target, content=content, headers=_headers(upstream.key)), stream=True
                )
                if exchange.body.get("stream") is not True or not response.is_success:
                    await response.aread()  # an endpoint that dies while it answers is asked again
                return response
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise await self._unreachable(exchange, error) from None
            except httpx.TransportError as error:
                if wait is None:
                    raise await self._unreachable(exchange, error) from None
                await asyncio.sleep(wait)
        raise AssertionError("unreachable")

    async def _unreachable(self, exchange: Exchange, error: Exception) -> DialectError:
        message = f"the model's endpoint {exchange.upstream.url} cannot be reached: {error or type(error).__name__}"
        await self._commit(exchange, "error", 502, {"message": message})
        return DialectError(502, message, type="api_error", code="upstream_unreachable")

    async def _whole(self, exchange: Exchange, response: httpx.Response, content: bytes) -> Response:
        """A plain answer, good or bad: recorded, then handed on as it came."""
        value = _json(content)
        status = response.status_code
        if response.is_success and isinstance(value, dict):
            exchange.answers.whole(value)
            await self._commit(exchange, "ok", status)
        else:
            if response.is_success:
                status, value = 502, None
            if not isinstance(value, dict):
                words = content[:500].decode(errors="replace")
                message = f"the model's endpoint answered {response.status_code} without JSON: {words}"
                value = DialectError(status, message, type="api_error", code="upstream_error").body()
                content = msgspec.json.encode(value)
            await self._commit(exchange, "error", status, _error_of(value))
        kept = {name: response.headers[name] for name in ("retry-after",) if name in response.headers}
        return Response(content, status, headers=kept, media_type="application/json")

    # The record

    async def _commit(self, exchange: Exchange, status: str, http_status: int, error: Json | None = None) -> None:
        """Record the request's calls, one for each choice; nothing for a request that never passed the gate."""
        lineage = exchange.lineage
        if exchange.committed or lineage is None:
            return
        exchange.committed = True
        body, upstream = exchange.body, exchange.upstream
        found = exchange.answers.choices
        calls: list[Call] = []
        for at, number in enumerate(exchange.numbers):
            choice = found[at] if at < len(found) else None
            if choice is None and at:
                break  # fewer choices than were asked for: the first stands for the whole request
            ids = choice.ids if choice else []
            call = Call(
                rollout_id=exchange.rollout.rollout_id,
                attempt_id=exchange.attempt_id,
                number=number,
                dialect=exchange.dialect,  # type: ignore[arg-type]
                mode=exchange.mode,
                model=upstream.model,
                engine=upstream.engine,
                sampled=ids,
                logprobs=choice.known_logprobs() if choice else None,
                versions=[(upstream.version, len(ids))] if ids else [],
                reply=choice.reply() if choice and status == "ok" else {},
                sampling={name: value for name, value in body.items() if name not in _NOT_SAMPLING},
                status=status,  # type: ignore[arg-type]
                finish_reason=choice.finish_reason if choice and status == "ok" else None,
                http_status=http_status,
                error=error,
                started_at=exchange.started_at,
                first_token_at=exchange.first_token_at,
                finished_at=now(),
            )
            if calls and choice is not None and choice.prompt_ids == found[0].prompt_ids:
                _place_beside(call, calls[0])
            else:
                lineage.place(call, choice.prompt_ids if choice else None, _messages(body), _tools(body))
            calls.append(call)
        await self.gateway.store.add_calls(calls)  # all or none: an answer counts as given as a whole
        for call in calls:
            lineage.add(call)


class Relay(Response):
    """A stream handed on event by event; its calls are committed before the event that ends it leaves."""

    def __init__(self, calls: Passthrough, exchange: Exchange, upstream: httpx.Response, held: AsyncExitStack):
        super().__init__()
        self._calls, self._exchange, self._upstream, self._held = calls, exchange, upstream, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            gone.cancel()
            await asyncio.shield(self._end(pump))

    async def _end(self, pump: asyncio.Future[None]) -> None:
        try:
            await _cancel(pump)
            await self._calls._commit(self._exchange, "abandoned", 499, {"message": "the client went away"})
        finally:
            await self._held.aclose()

    async def _pump(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        exchange = self._exchange
        error = "the model's endpoint ended the stream early"
        try:
            async for block in server_sent_events(self._upstream.aiter_bytes()):
                data = data_of(block)
                if data != b"[DONE]":
                    exchange.answers.chunk(_json(data) if data else None)
                    if exchange.first_token_at is None and exchange.answers.begun():
                        exchange.first_token_at = now()
                if data == b"[DONE]" or exchange.answers.finished(exchange.count):
                    await self._calls._commit(exchange, "ok", 200)
                await send({"type": "http.response.body", "body": block, "more_body": True})
        except httpx.HTTPError as problem:
            error = f"the model's endpoint broke off the stream: {problem or type(problem).__name__}"
        except StoreError as problem:  # the event that ends the answer is held back: the call is not recorded
            failure = DialectError(503, str(problem), type="api_error", code="store")
            await send({"type": "http.response.body", "body": event(failure.body()) + DONE, "more_body": True})
        if not exchange.committed:
            failure = DialectError(502, error, type="api_error", code="upstream_error")
            await self._calls._commit(exchange, "error", 502, {"message": error})
            await send({"type": "http.response.body", "body": event(failure.body()) + DONE, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


# --- Pieces ---------------------------------------------------------------------------------------------------------

# Fields of a request that are recorded elsewhere, or say nothing about how tokens were sampled.
_NOT_SAMPLING = {"messages", "prompt", "tools", "model", "stream", "stream_options", "return_token_ids"}


async def server_sent_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Cut a stream of bytes into events, each with the blank line that ends it; a last one without it is dropped."""
    waiting = b""
    async for chunk in chunks:
        waiting += chunk
        if len(waiting) > LONGEST_EVENT:
            raise httpx.RemoteProtocolError(f"an event of more than {LONGEST_EVENT} bytes")
        while True:
            ends = [at + len(end) for end in (b"\n\n", b"\r\n\r\n") if (at := waiting.find(end)) >= 0]
            if not ends:
                break
            block, waiting = waiting[: min(ends)], waiting[min(ends) :]
            yield block


def data_of(block: bytes) -> bytes:
    """An event's data lines, joined; empty for a comment."""
    lines = [line[5:].removeprefix(b" ") for line in block.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def _place_beside(call: Call, first: Call) -> None:
    """Fill in the pointers of a further choice of a request: its prompt is the first one's."""
    call.parent, call.messages_keep, call.messages = first.parent, first.messages_keep, first.messages
    call.tools, call.fork = first.tools, first.fork
    if first.prompt_length:
        call.prefix, call.prefix_length, call.prompt_length = first.number, first.prompt_length, first.prompt_length


def _read_body(content: bytes) -> Json:
    try:
        body = read_json(content)
    except BadJson as error:
        raise DialectError(400, str(error)) from None
    if not isinstance(body, dict):
        raise DialectError(400, f"the body has to be a JSON object, not {type(body).__name__}")
    return body


def _messages(body: Mapping[str, Any]) -> list[Json]:
    messages = body.get("messages")
    if isinstance(messages, list):
        return [message if isinstance(message, dict) else {"content": message} for message in messages]
    return [{"role": "prompt", "content": body["prompt"]}] if "prompt" in body else []


def _prompts_of(body: Mapping[str, Any]) -> int:
    """How many prompts a request has: `prompt` is a text, token ids, or a list of either."""
    prompt = body.get("prompt")
    listed = isinstance(prompt, list) and any(isinstance(one, (str, list)) for one in prompt)
    return len(prompt) if isinstance(prompt, list) and listed else 1


def _tools(body: Mapping[str, Any]) -> list[Json]:
    tools = body.get("tools")
    return tools if isinstance(tools, list) else []


def _error_of(body: Json) -> Json:
    error = body.get("error", body)
    return error if isinstance(error, dict) else {"message": str(error)}


def _json(content: bytes) -> Any:
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(content)
    return None


def _headers(key: str) -> dict[str, str]:
    return {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})


def _key(variable: str) -> str:
    return os.environ.get(variable, "") if variable else ""


def _retry_after(response: httpx.Response | None) -> float:
    """Seconds that an endpoint asks to wait, 8 at most; 0 where it says nothing."""
    value = response.headers.get("retry-after", "") if response is not None else ""
    return min(float(value), 8.0) if value.isascii() and value.isdigit() else 0.0


async def _cancel(work: asyncio.Future[Any]) -> None:
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
