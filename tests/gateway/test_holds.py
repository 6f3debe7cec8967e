"""Pauses and full queues as clients of every dialect see them, streamed and plain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from .test_retries import BODIES, DIALECTS, STREAM, Harness, harness


def url_of(dialect: str) -> str:
    return f"/proxy/rollout/r/attempt/0/mode/train/{BODIES[dialect][0]}"


@asynccontextmanager
async def asking(client: Harness, dialect: str, *, stream: bool) -> AsyncIterator[httpx.Response]:
    """A request whose answer has begun: its headers have come."""
    body = {**BODIES[dialect][1], "stream": stream}
    async with client.served.anonymous.stream("POST", url_of(dialect), json=body, headers=client.token) as response:
        yield response


async def pause(client: Harness, **request: Any) -> dict[str, Any]:
    answer = await client.served.http.post("/proxy/pause", json=request)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def resume(client: Harness) -> None:
    assert (await client.served.http.post("/proxy/resume")).status_code == 200


async def state(client: Harness) -> dict[str, Any]:
    return (await client.served.http.get("/proxy/state")).json()


async def waiting(client: Harness, count: int) -> None:
    """Until so many calls wait in the gate."""
    while (await state(client))["waiting"] != count:  # noqa: ASYNC110 (over HTTP there is no event)
        await asyncio.sleep(0.005)


def check_refusal(dialect: str, response: httpx.Response, said: str) -> None:
    """A 429 in the dialect's shape, with a Retry-After that clients honour."""
    assert response.status_code == 429, response.text
    assert response.headers["content-type"] == "application/json"
    assert 1 <= int(response.headers["retry-after"]) <= 30
    body = response.json()
    if dialect == "messages":
        assert body["type"] == "error"
    assert body["error"]["type"] == "rate_limit_error"
    assert said in body["error"]["message"]


@pytest.fixture
def quick_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep-alives at once."""
    monkeypatch.setattr("longrein.gateway.calls.KEEP_ALIVE_SECONDS", 0.02)
    monkeypatch.setattr("longrein.gateway.delivery.KEEP_ALIVE_SECONDS", 0.02)
    monkeypatch.setattr("longrein.gateway.delivery.PATIENCE_SECONDS", 0.02)


@DIALECTS
@STREAM
@pytest.mark.usefixtures("quick_signs")
async def test_a_held_call_has_its_headers_and_signs_of_life_and_goes_on_with_the_new_weights(
    tmp_path: Path, dialect: str, stream: bool
) -> None:
    async with harness(tmp_path) as client:
        await pause(client, reason="new weights")
        async with asking(client, dialect, stream=stream) as response:
            assert response.status_code == 200
            pieces = response.aiter_text()
            signs = [await anext(pieces) for _ in range(3)]
            assert all(sign.strip() for sign in signs) == stream  # keep-alives, or the spaces before a plain answer
            assert await state(client) == {
                "paused": True, "retry_after_seconds": 5.0, "reason": "new weights", "inflight": 0, "waiting": 1,
            }  # fmt: skip
            assert client.engine.requests == 0
            client.engine.version = 7
            client.engine.go_on.set()
            await resume(client)
            text = "".join(signs) + "".join([piece async for piece in pieces])
        if not stream:
            assert "one0 two" in json.dumps(json.loads(text))
        assert "one0" in text
        assert "two" in text
        assert "error" not in text or '"error":null' in text
        [call] = await client.served.calls()
        assert (call["status"], call["versions"]) == ("ok", [[7, len(call["sampled"])]])


@DIALECTS
@STREAM
async def test_a_call_that_is_being_sampled_goes_on_in_a_pause(tmp_path: Path, dialect: str, stream: bool) -> None:
    async with harness(tmp_path) as client:
        asked = client.ask(dialect, stream=stream)
        await client.engine.begun.acquire()
        assert (await pause(client))["inflight"] == 1
        client.engine.go_on.set()
        assert "two" in await asked
        assert (await state(client))["inflight"] == 0
        assert [call["status"] for call in await client.served.calls()] == ["ok"]


@DIALECTS
async def test_a_plain_call_that_is_held_too_long_is_refused(tmp_path: Path, dialect: str) -> None:
    async with harness(tmp_path, gate={"hold_seconds": 0.05}) as client:
        await pause(client, retry_after_seconds=300, reason="new weights")
        answer = await client.served.anonymous.post(url_of(dialect), json=BODIES[dialect][1], headers=client.token)
        check_refusal(dialect, answer, "the model is paused: new weights")
        assert answer.headers["retry-after"] == "30"
        [call] = await client.served.calls()
        assert (call["status"], call["http_status"], call["sampled"]) == ("error", 429, [])


@DIALECTS
async def test_a_stream_that_is_held_too_long_ends_with_its_dialects_error(tmp_path: Path, dialect: str) -> None:
    async with harness(tmp_path, gate={"hold_seconds": 0.05}) as client:
        await pause(client, reason="new weights")
        async with asking(client, dialect, stream=True) as response:
            assert response.status_code == 200
            text = (await response.aread()).decode()
        assert "the model is paused: new weights" in text
        assert (await state(client))["waiting"] == 0
        [call] = await client.served.calls()
        assert (call["status"], call["http_status"]) == ("error", 429)


@DIALECTS
@STREAM
async def test_refuse_answers_a_pause_as_the_reference_does(tmp_path: Path, dialect: str, stream: bool) -> None:
    async with harness(tmp_path, gate={"on_pause": "refuse"}) as client:
        await pause(client, retry_after_seconds=9, reason="new weights")
        async with asking(client, dialect, stream=stream) as response:
            await response.aread()
            check_refusal(dialect, response, "the model is paused: new weights")
            assert (response.headers["retry-after"], response.headers["x-agl-paused"]) == ("9", "true")
        assert await client.served.calls() == []
        await resume(client)
        client.engine.go_on.set()
        assert "two" in await client.ask(dialect, stream=stream)


@DIALECTS
@STREAM
async def test_a_full_queue_refuses_before_any_header(tmp_path: Path, dialect: str, stream: bool) -> None:
    async with harness(tmp_path, max_concurrent=1, gate={"max_waiting": 1}) as client:
        first = client.ask(dialect, stream=stream)
        await client.engine.begun.acquire()
        second = client.ask(dialect, stream=stream)
        await waiting(client, 1)
        for _ in range(3):
            async with asking(client, dialect, stream=stream) as response:
                await response.aread()
                check_refusal(dialect, response, "gate.max_waiting is 1")
        assert client.engine.requests == 1
        client.engine.go_on.set()
        assert "one0" in await first
        assert "one1" in await second
        calls = await client.served.calls()
        assert [(call["number"], call["status"]) for call in calls] == [(0, "ok"), (1, "ok")]  # refusals take no number
        assert "one2" in await client.ask(dialect, stream=stream)


async def test_held_calls_fill_the_queue_too(tmp_path: Path) -> None:
    async with harness(tmp_path, gate={"max_waiting": 2}) as client:
        await pause(client, retry_after_seconds=300)
        held = [client.ask("chat", stream=True) for _ in range(2)]
        await waiting(client, 2)
        async with asking(client, "chat", stream=True) as response:
            await response.aread()
            check_refusal("chat", response, "2 calls wait")
            assert response.headers["retry-after"] == "30"
        client.engine.go_on.set()
        await resume(client)
        assert all("two" in answer for answer in await asyncio.gather(*held))


async def test_a_client_that_leaves_while_its_call_waits_makes_room(tmp_path: Path) -> None:
    async with harness(tmp_path, max_concurrent=1, gate={"max_waiting": 1}, retry_grace=0.0) as client:
        first = client.ask("chat", stream=True)
        await client.engine.begun.acquire()
        second = client.ask("chat", stream=True)
        await waiting(client, 1)
        second.cancel()
        await waiting(client, 0)
        third = client.ask("chat", stream=True)
        await waiting(client, 1)
        client.engine.go_on.set()
        assert "two" in await first
        assert "two" in await third
        calls = await client.served.calls()
        assert sorted(call["status"] for call in calls) == ["abandoned", "ok", "ok"]


async def test_several_answers_of_a_request_are_several_calls(tmp_path: Path) -> None:
    async with harness(tmp_path, max_concurrent=2) as client:
        body = {**BODIES["chat"][1], "n": 3}
        asked = asyncio.ensure_future(client.served.anonymous.post(url_of("chat"), json=body, headers=client.token))
        await client.engine.begun.acquire()
        await client.engine.begun.acquire()
        assert (await state(client))["inflight"] == 2
        assert (await state(client))["waiting"] == 1
        client.engine.go_on.set()
        answer = await asked
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]


async def test_a_gateway_that_goes_down_answers_those_that_wait(tmp_path: Path) -> None:
    async with harness(tmp_path) as client:
        await pause(client)
        plain = asyncio.ensure_future(
            client.served.anonymous.post(url_of("chat"), json=BODIES["chat"][1], headers=client.token)
        )
        await waiting(client, 1)
        client.served.server.should_exit = True
        assert (await plain).status_code == 503
