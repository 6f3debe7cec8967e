"""Token engines over HTTP: what they are sent, what their answers become, and what happens when they die."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from longrein.gateway.engines import Chunk, EngineError, Generate
from longrein.gateway.engines.tokens import TokensEngine, choose_endpoint
from longrein.records import ModelEndpoint

from .running import KEY, running_gateway


@dataclass
class FakeEngine:
    """A bare HTTP/1.1 server that answers every request with given bytes and then closes the connection."""

    answer: Callable[[dict[str, Any]], bytes]
    requests: list[dict[str, Any]] = field(default_factory=list)
    closed_early: asyncio.Event = field(default_factory=asyncio.Event)
    hang: bool = False
    url: str = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(
            next(line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length"))
        )
        body = json.loads(await reader.readexactly(length))
        self.requests.append({"path": head.split(" ")[1], "body": body})
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + self.answer(body)
        )
        await writer.drain()
        if self.hang:
            await reader.read()  # until the client hangs up
            self.closed_early.set()
        writer.close()


@asynccontextmanager
async def fake_engine(answer: Callable[[dict[str, Any]], bytes], *, hang: bool = False) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(answer, hang=hang)
    server = await asyncio.start_server(engine._serve, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()


def sse(*events: Any) -> bytes:
    return b"".join(
        b"data: " + (e.encode() if isinstance(e, str) else json.dumps(e).encode()) + b"\n\n" for e in events
    )


def ask(**changes: Any) -> Generate:
    values: dict[str, Any] = {
        "request_id": "r/0/0", "rollout_id": "r", "token_ids": [1, 2, 3], "max_tokens": 8, "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "stop_token_ids": [2], "seed": 7, "stream": True,
    }  # fmt: skip
    return Generate(**{**values, **changes})


async def collect(engine: TokensEngine, request: Generate) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


async def test_the_tokens_protocol(http: httpx.AsyncClient) -> None:
    first = {"token_ids": [5], "logprobs": [-0.5], "versions": [[3, 1]], "finish_reason": None}
    last = {"token_ids": [2], "logprobs": [-0.25], "versions": [[4, 1]], "finish_reason": "stop"}
    async with fake_engine(lambda body: sse(first, last, "[DONE]")) as server:
        endpoint = ModelEndpoint("policy", server.url, protocol="tokens")
        chunks = await collect(TokensEngine(http, lambda: [endpoint]), ask())
    assert [c.token_ids for c in chunks] == [[5], [2]]
    assert [c.versions for c in chunks] == [[(3, 1)], [(4, 1)]]
    assert chunks[-1].finish_reason == "stop"
    assert server.requests[0]["path"] == "/inference/v1/generate"
    assert server.requests[0]["body"]["sampling_params"]["seed"] == 7


async def test_completions_with_token_ids(http: httpx.AsyncClient) -> None:
    def answer(body: dict[str, Any]) -> bytes:
        assert body["prompt"] == [1, 2, 3]
        assert body["return_token_ids"] is True
        choice = {
            "text": "x",
            "token_ids": [5, 2],
            "logprobs": {"token_logprobs": [-0.5, -0.1]},
            "finish_reason": "stop",
        }
        return json.dumps({"choices": [choice]}).encode()

    async with fake_engine(answer) as server:
        endpoint = ModelEndpoint("policy", server.url, version=9, protocol="completions")
        [chunk] = await collect(TokensEngine(http, lambda: [endpoint]), ask(stream=False))
    assert (chunk.token_ids, chunk.logprobs, chunk.versions) == ([5, 2], [-0.5, -0.1], [(9, 2)])


async def test_text_without_ids_is_an_error_that_says_so(http: httpx.AsyncClient) -> None:
    async with fake_engine(lambda body: json.dumps({"choices": [{"text": "x"}]}).encode()) as server:
        endpoint = ModelEndpoint("policy", server.url, protocol="completions")
        with pytest.raises(EngineError, match="return_token_ids"):
            await collect(TokensEngine(http, lambda: [endpoint]), ask(stream=False))


async def test_a_stream_that_ends_before_its_finish_is_an_error(http: httpx.AsyncClient) -> None:
    async with fake_engine(lambda body: sse({"token_ids": [5], "logprobs": [-0.5], "versions": [[0, 1]]})) as server:
        endpoint = ModelEndpoint("policy", server.url, protocol="tokens")
        with pytest.raises(EngineError, match="before the reply was finished"):
            await collect(TokensEngine(http, lambda: [endpoint]), ask())


async def test_leaving_early_hangs_up_on_the_engine(http: httpx.AsyncClient) -> None:
    async with fake_engine(
        lambda body: sse({"token_ids": [5], "logprobs": [0.0], "versions": [[0, 1]]}), hang=True
    ) as server:
        stream = TokensEngine(http, lambda: [ModelEndpoint("policy", server.url, protocol="tokens")]).generate(ask())
        assert (await anext(stream)).token_ids == [5]
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(server.closed_early.wait(), 10)


async def test_an_engine_that_is_not_there_is_named(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrein.gateway.engines.tokens._RETRY_WAITS", (0.0, 0.0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = ModelEndpoint("policy", f"http://127.0.0.1:{free.getsockname()[1]}", protocol="tokens")
        with pytest.raises(EngineError, match="cannot be reached") as caught:
            await collect(TokensEngine(http, lambda: [endpoint]), ask())
    assert caught.value.status == 503
    with pytest.raises(EngineError, match="no engine has registered"):
        await collect(TokensEngine(http, list), ask())


def test_adding_an_endpoint_moves_only_its_share() -> None:
    endpoints = [ModelEndpoint("m", f"http://host{i}") for i in range(4)]
    before = {f"rollout{i}": choose_endpoint(endpoints, f"rollout{i}").endpoint for i in range(400)}
    more = [*endpoints, ModelEndpoint("m", "http://new")]
    after = {key: choose_endpoint(more, key).endpoint for key in before}
    moved = [key for key in before if before[key] != after[key]]
    assert all(after[key] == "http://new" for key in moved)
    assert 40 < len(moved) < 140


async def test_an_engine_that_dies_mid_stream_is_an_error_event_and_what_was_sampled_is_kept(tmp_path: Path) -> None:
    ids = [40, 41, 42]
    event = {"token_ids": ids, "logprobs": [-0.5] * 3, "versions": [[0, 3]], "finish_reason": None}
    async with fake_engine(lambda body: sse(event)) as server:
        with running_gateway(tmp_path, ["engine.kind=embedded"]) as gateway:
            models = [{"model": "policy", "endpoint": server.url, "protocol": "tokens"}]
            async with httpx.AsyncClient(
                base_url=gateway.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60
            ) as run:
                (await run.post("/api/models", json=models)).raise_for_status()
                rollout, token = gateway.rollout()
                url = f"{gateway.base_url(rollout)}/chat/completions"
                body = {"messages": [{"role": "user", "content": "go"}], "stream": True}
                headers = {"authorization": f"Bearer {token}"}
                streamed = await run.post(url, json=body, headers=headers)
                plain = await run.post(url, json={**body, "stream": False}, headers=headers)
            assert streamed.status_code == 200
            last = [line for line in streamed.text.splitlines() if line.startswith("data: ")][-1]
            assert json.loads(last[6:])["error"]["code"] == "engine_error"
            assert "[DONE]" not in streamed.text
            assert plain.status_code == 502
            first, second = gateway.calls(rollout)
            assert (first.status, first.sampled) == ("error", ids)
            assert (second.status, second.http_status) == ("error", 502)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=10) as client:
        yield client
