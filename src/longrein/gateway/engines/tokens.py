"""Engines that take token ids over HTTP: the embedded one, and OpenAI-compatible completions with `return_token_ids`.

Endpoints register by POST /api/models with protocol `tokens` or `completions`. Calls of one rollout go to the same
endpoint (rendezvous hashing), where their prefix is cached; adding an endpoint moves only its share.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from longrein.gateway.engines import Chunk, EngineError, Feature, Generate
from longrein.records import ModelEndpoint

Json = dict[str, Any]

# An endpoint that refuses connections may be starting: these waits (seconds) bridge it.
_RETRY_WAITS = (0.1, 0.3, 1.0, 2.0)


def choose_endpoint(endpoints: Sequence[ModelEndpoint], key: str) -> ModelEndpoint:
    """Rendezvous hashing: the endpoint with the highest hash of (endpoint, key)."""
    return max(endpoints, key=lambda e: hashlib.sha256(f"{e.endpoint}\0{key}".encode()).digest())


@dataclass
class TokensEngine:
    """Samples at the registered endpoints of the model."""

    http: httpx.AsyncClient
    endpoints: Callable[[], Sequence[ModelEndpoint]]
    """The endpoints that answer for the model now."""
    name: str = "policy"

    def lacks(self, feature: Feature) -> str | None:
        """Only the tokens protocol has guides and the log-probabilities of other tokens."""
        if feature == "logprobs":
            return None
        others = [e for e in self.endpoints() if e.protocol != "tokens"]
        return f"the {others[0].protocol} protocol of the engine at {others[0].endpoint} has none" if others else None

    async def generate(self, request: Generate) -> AsyncIterator[Chunk]:
        for wait in (*_RETRY_WAITS, None):
            endpoints = self.endpoints()
            try:
                if not endpoints:
                    raise EngineError("no engine has registered for this model (POST /api/models)", 503)
                endpoint = choose_endpoint(endpoints, request.rollout_id)
                async with self._open(endpoint, request) as response:
                    await _check(response, endpoint, request)
                    async for chunk in _chunks(response, endpoint, request.stream):
                        yield chunk
                return
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if wait is None:
                    raise EngineError(f"the engine cannot be reached: {error}", 503) from None
            except httpx.HTTPError as error:
                raise EngineError(f"the engine broke off: {type(error).__name__}: {error}") from None
            except EngineError as error:
                if wait is None or error.status != 503:
                    raise
            await asyncio.sleep(wait)

    def _open(self, endpoint: ModelEndpoint, request: Generate):
        path, body = _tokens_body(request) if endpoint.protocol == "tokens" else _completions_body(endpoint, request)
        return self.http.stream(
            "POST",
            endpoint.endpoint.rstrip("/") + path,
            content=msgspec.json.encode(body),
            headers={"content-type": "application/json"},
            timeout=httpx.Timeout(10.0, read=None),
        )


def _tokens_body(request: Generate) -> tuple[str, Json]:
    sampling: Json = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop_token_ids": request.stop_token_ids,
        "seed": request.seed,
    }
    if request.guide is not None:
        sampling["guide"] = request.guide
    if request.top_logprobs:
        sampling["top_logprobs"] = request.top_logprobs
    body = {
        "request_id": request.request_id,
        "token_ids": request.token_ids,
        "stream": request.stream,
        "sampling_params": sampling,
    }
    return "/inference/v1/generate", body


def _completions_body(endpoint: ModelEndpoint, request: Generate) -> tuple[str, Json]:
    body: Json = {
        "model": endpoint.model,
        "prompt": request.token_ids,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stop_token_ids": request.stop_token_ids,
        "seed": request.seed,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": request.stream,
    }
    if request.top_k:
        body["top_k"] = request.top_k
    return "/completions", body


async def _check(response: httpx.Response, endpoint: ModelEndpoint, request: Generate) -> None:
    if response.status_code == 200:
        return
    text = (await response.aread()).decode(errors="replace")[:500]
    if response.status_code == 400 and request.guide is not None:
        raise EngineError(f"the engine at {endpoint.endpoint} cannot follow the guide: {text}", 400)
    status = 503 if response.status_code in (429, 503) else 502
    raise EngineError(f"the engine at {endpoint.endpoint} answered {response.status_code}: {text}", status)


async def _chunks(response: httpx.Response, endpoint: ModelEndpoint, stream: bool) -> AsyncIterator[Chunk]:
    """The chunks of a response; raises `EngineError` when it ends before its finish reason."""
    read = _tokens_chunk if endpoint.protocol == "tokens" else lambda data: _completions_chunk(data, endpoint)
    finished = False
    if not stream:
        yield read(await response.aread())
        return
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        chunk = read(data.encode())
        finished = finished or chunk.finish_reason is not None
        yield chunk
    if not finished:
        raise EngineError(f"the engine at {endpoint.endpoint} ended its stream before the reply was finished")


def _tokens_chunk(data: bytes) -> Chunk:
    try:
        return msgspec.json.decode(data, type=Chunk)
    except msgspec.DecodeError as error:
        raise EngineError(
            f"the engine's answer is not what the tokens protocol says: {error}: {data[:200]!r}"
        ) from None


def _completions_chunk(data: bytes, endpoint: ModelEndpoint) -> Chunk:
    try:
        body = msgspec.json.decode(data, type=Json)
        if "error" in body:
            raise EngineError(f"the engine at {endpoint.endpoint} failed: {body['error']}")
        choices = body["choices"]
        if not choices:
            return Chunk()
        choice = choices[0]
        ids = choice.get("token_ids") or []
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        if choice.get("text") and not ids:
            raise EngineError(
                f"the engine at {endpoint.endpoint} gave text without token ids: it does not honour return_token_ids"
            )
        versions = [(endpoint.version, len(ids))] if ids else []
        return Chunk(ids, logprobs if ids else None, versions, choice.get("finish_reason"))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(
            f"the engine at {endpoint.endpoint} answered no completion: {error}: {data[:200]!r}"
        ) from None
