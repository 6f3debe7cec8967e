"""Retries take over what nobody was given; equal requests of clients that are there are siblings."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from longrein.gateway.calls import TokenCalls
from longrein.gateway.engines import Chunk, EngineError, Feature, Generate
from longrein.gateway.tokens import TextModel

from .models import make_model_folder
from .serving import Served, serving

ASK = {"role": "user", "content": "Say something."}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("openai/v1/chat/completions", {"messages": [ASK]}),
    "completions": ("openai/v1/completions", {"prompt": "Say something.", "max_tokens": 100}),
    "responses": ("openai/v1/responses", {"input": [ASK]}),
    "messages": ("anthropic/v1/messages", {"messages": [ASK], "max_tokens": 100}),
}


@dataclass
class SteppedEngine:
    """Samples "one two" of its own prompt's number; the rest of a reply comes when the test says so."""

    model: TextModel
    name: str = "policy"
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    cancelled: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    requests: int = 0
    version: int = 0
    failures: int = 0
    """So many of the next requests fail in their midst."""

    def lacks(self, feature: Feature) -> str | None:
        return None

    async def generate(self, request: Generate) -> AsyncIterator[Chunk]:
        number, self.requests = self.requests, self.requests + 1
        try:
            ids = self.model.tokenizer.encode(f"one{number}", add_special_tokens=False).ids
            yield Chunk(ids, [-0.5] * len(ids), [(self.version, len(ids))])
            self.begun.release()
            await self.go_on.wait()
            if self.failures:
                self.failures -= 1
                raise EngineError("the engine broke")
            rest = [*self.model.tokenizer.encode(" two", add_special_tokens=False).ids, min(self.model.stop_ids)]
            yield Chunk(rest, [-0.5] * len(rest), [(self.version, len(rest))], "stop")
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.release()
            raise


@dataclass
class Harness:
    """A client of one attempt."""

    served: Served
    engine: SteppedEngine
    token: dict[str, str]

    @property
    def calls(self) -> TokenCalls:
        assert isinstance(self.served.gateway.calls, TokenCalls)
        return self.served.gateway.calls

    def ask(self, dialect: str, *, stream: bool, **headers: str) -> asyncio.Task[str]:
        """Ask in the background; the text of the whole answer."""
        end, body = BODIES[dialect]
        url = f"/proxy/rollout/r/attempt/0/mode/train/{end}"
        headers = {name.replace("_", "-"): value for name, value in headers.items()} | self.token

        async def whole() -> str:
            answer = await self.served.anonymous.post(url, json={**body, "stream": stream}, headers=headers)
            return answer.text if answer.status_code == 200 else f"HTTP {answer.status_code}: {answer.text}"

        return asyncio.ensure_future(whole())

    async def left(self) -> None:
        """Until the gateway knows that nobody listens any more."""
        while any(job.delivery.listeners for a in self.calls.attempts.values() for job in a.jobs):  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def drop(self, asked: asyncio.Task[str]) -> None:
        """Break off the connection of a request that is being answered."""
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await self.left()


@asynccontextmanager
async def harness(
    folder: Path, *, max_concurrent: int = 0, gate: dict[str, Any] | None = None, **gateway: Any
) -> AsyncIterator[Harness]:
    model = make_model_folder(folder / "model")
    (folder / "idle.py").write_text("def script(messages, tools):\n    return 'unused'\n")
    async with serving(
        folder,
        run={"dir": str(folder), "folder": str(folder)},
        model={"path": str(model), "name": "policy"},
        engine={"kind": "scripted", "script": "idle:script", "max_concurrent": max_concurrent},
        gateway=gateway,
        gate=gate or {},
    ) as served:
        calls = served.gateway.calls
        assert isinstance(calls, TokenCalls)
        engine = calls.policy = SteppedEngine(calls.model)
        yield Harness(served, engine, await served.start())


DIALECTS = pytest.mark.parametrize("dialect", BODIES)
STREAM = pytest.mark.parametrize("stream", [True, False])


@DIALECTS
@STREAM
async def test_five_equal_requests_at_once_give_five_samples(tmp_path: Path, dialect: str, stream: bool) -> None:
    async with harness(tmp_path) as client:
        asked = [client.ask(dialect, stream=stream) for _ in range(5)]
        for _ in asked:
            await client.engine.begun.acquire()
        client.engine.go_on.set()
        answers = await asyncio.gather(*asked)
        assert all(sum(f"one{i}" in answer for answer in answers) == 1 for i in range(5))
        calls = await client.served.calls()
        assert Counter(call["status"] for call in calls) == {"ok": 5}
        assert len({tuple(call["sampled"]) for call in calls}) == 5
        assert {call["fork"] for call in calls} == {None}


@DIALECTS
@STREAM
async def test_a_drop_and_a_re_send_give_one_sample(tmp_path: Path, dialect: str, stream: bool) -> None:
    async with harness(tmp_path) as client:
        first = client.ask(dialect, stream=stream)
        await client.engine.begun.acquire()
        await client.drop(first)
        second = client.ask(dialect, stream=stream)
        client.engine.go_on.set()
        assert "one0" in (whole := await second)  # from the first token
        assert "two" in whole
        assert client.engine.requests == 1
        [call] = await client.served.calls()
        assert (call["status"], call["error"]) == ("ok", None)


@DIALECTS
async def test_a_retry_after_the_answer_was_finished_for_nobody_gets_it(tmp_path: Path, dialect: str) -> None:
    async with harness(tmp_path) as client:
        first = client.ask(dialect, stream=True)
        await client.engine.begun.acquire()
        await client.drop(first)
        client.engine.go_on.set()
        [call] = await client.served.recorded(1)
        assert call["status"] == "abandoned"  # no client was given it
        assert "two" in await client.ask(dialect, stream=True)
        assert client.engine.requests == 1
        [call] = await client.served.calls()
        assert (call["status"], call["error"], call["http_status"]) == ("ok", None, 200)
        # It was given: the next equal request is a sibling.
        assert "one1" in await client.ask(dialect, stream=True)
        assert [call["status"] for call in await client.served.calls()] == ["ok", "ok"]


async def test_a_finished_answer_is_kept_longer_than_the_grace(tmp_path: Path) -> None:
    async with harness(tmp_path, retry_grace=2.0) as client:
        first = client.ask("chat", stream=True)
        await client.engine.begun.acquire()
        await client.drop(first)
        client.engine.go_on.set()
        await client.served.recorded(1)
        [attempt] = client.calls.attempts.values()
        [job] = attempt.jobs
        assert job.expiry is not None
        while asyncio.get_running_loop().time() <= job.expiry.when():  # noqa: ASYNC110 (the timer tells nobody)
            await asyncio.sleep(0.05)
        assert "one0" in await client.ask("chat", stream=True)
        assert client.engine.requests == 1
        assert [call["status"] for call in await client.served.calls()] == ["ok"]


@STREAM
async def test_after_the_grace_a_retry_is_a_new_call(tmp_path: Path, stream: bool) -> None:
    async with harness(tmp_path, retry_grace=0.0) as client:
        first = client.ask("chat", stream=stream)
        await client.engine.begun.acquire()
        first.cancel()
        await client.engine.cancelled.acquire()  # generation ends with its client
        [abandoned] = await client.served.recorded(1)
        client.engine.go_on.set()
        assert "one1" in await client.ask("chat", stream=stream)
        calls = await client.served.calls()
        assert [call["status"] for call in calls] == ["abandoned", "ok"]
        assert abandoned["sampled"]  # counted, never trained
        assert calls[1]["parent"] is None


async def test_the_end_of_the_attempt_ends_the_grace(tmp_path: Path) -> None:
    async with harness(tmp_path, retry_grace=3600.0) as client:
        first = client.ask("chat", stream=True)
        await client.engine.begun.acquire()
        await client.drop(first)
        ended = await client.served.http.patch("/api/rollouts/r/attempts/0", json={"outcome": "agent_failed"})
        assert ended.status_code == 200, ended.text
        await client.engine.cancelled.acquire()
        [call] = await client.served.recorded(1)
        assert call["status"] == "abandoned"
        assert client.calls.attempts == {}


@STREAM
@pytest.mark.parametrize("early", [True, False])
async def test_nothing_is_kept_of_an_attempt_that_has_ended(tmp_path: Path, stream: bool, early: bool) -> None:
    """Whether its last call was answered before its end or after."""
    async with harness(tmp_path) as client:
        asked = client.ask("chat", stream=stream)
        await client.engine.begun.acquire()
        if not early:
            client.engine.go_on.set()
            await asked
        ended = await client.served.http.patch("/api/rollouts/r/attempts/0", json={"outcome": "succeeded"})
        assert ended.status_code == 200
        client.engine.go_on.set()
        assert "two" in await asked
        await client.left()
        assert client.calls.attempts == {}


async def test_a_client_that_says_it_asks_again_takes_over_while_the_old_connection_seems_alive(tmp_path: Path) -> None:
    async with harness(tmp_path) as client:
        old = client.ask("chat", stream=True)
        await client.engine.begun.acquire()
        new = client.ask("chat", stream=True, x_stainless_retry_count="1")
        sibling = client.ask("chat", stream=True)
        await client.engine.begun.acquire()
        client.engine.go_on.set()
        answers = await asyncio.gather(old, new, sibling)
        assert ["one0" in answer for answer in answers] == [True, True, False]
        assert client.engine.requests == 2


async def test_a_request_that_differs_is_no_retry(tmp_path: Path) -> None:
    async with harness(tmp_path) as client:
        first = client.ask("chat", stream=True)
        await client.engine.begun.acquire()
        await client.drop(first)
        client.engine.go_on.set()
        url = "/proxy/rollout/r/attempt/0/mode/train/openai/v1/chat/completions"
        other = {"messages": [ASK], "stream": True, "max_tokens": 7}
        answer = await client.served.anonymous.post(url, json=other, headers=client.token)
        assert "one1" in answer.text


@STREAM
async def test_an_answer_that_failed_is_asked_for_anew(tmp_path: Path, stream: bool) -> None:
    async with harness(tmp_path) as client:
        client.engine.failures = 1
        client.engine.go_on.set()
        first = await client.ask("chat", stream=stream)
        assert "the engine broke" in first
        assert "one1" in await client.ask("chat", stream=stream)
        assert [call["status"] for call in await client.served.calls()] == ["error", "ok"]


async def test_all_answers_of_n_are_taken_over_together(tmp_path: Path) -> None:
    async with harness(tmp_path) as client:
        url = "/proxy/rollout/r/attempt/0/mode/train/openai/v1/chat/completions"
        body = {"messages": [ASK], "n": 3}

        async def ask() -> httpx.Response:
            return await client.served.anonymous.post(url, json=body, headers=client.token)

        first = asyncio.ensure_future(ask())
        for _ in range(3):
            await client.engine.begun.acquire()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await client.left()
        client.engine.go_on.set()
        choices = json.loads((await ask()).text)["choices"]
        assert [choice["message"]["content"] for choice in choices] == ["one0 two", "one1 two", "one2 two"]
        assert client.engine.requests == 3


async def test_a_slow_plain_answer_begins_with_white_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrein.gateway.delivery.PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr("longrein.gateway.delivery.KEEP_ALIVE_SECONDS", 0.02)
    async with harness(tmp_path) as client:
        url = "/proxy/rollout/r/attempt/0/mode/train/openai/v1/chat/completions"
        request = client.served.anonymous.build_request("POST", url, json={"messages": [ASK]}, headers=client.token)
        answer = await client.served.anonymous.send(request, stream=True)
        assert answer.status_code == 200  # while it is being sampled
        pieces = answer.aiter_raw()
        assert [await anext(pieces) for _ in range(3)] == [b" ", b" ", b" "]
        client.engine.go_on.set()
        text = b"".join([piece async for piece in pieces]).decode()
        assert json.loads(text)["choices"][0]["message"]["content"] == "one0 two"
        [call] = await client.served.calls()
        assert call["status"] == "ok"


async def test_a_slow_plain_answer_sends_a_space_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrein.gateway.delivery.PATIENCE_SECONDS", 0.02)
    async with harness(tmp_path) as client:
        url = "/proxy/rollout/r/attempt/0/mode/train/openai/v1/chat/completions"
        request = client.served.anonymous.build_request("POST", url, json={"messages": [ASK]}, headers=client.token)
        answer = await client.served.anonymous.send(request, stream=True)
        pieces = answer.aiter_raw()
        sent = await anext(pieces)
        await client.served.calls()  # a round through the gateway: whatever would be sent without waiting has been
        client.engine.go_on.set()
        sent += b"".join([piece async for piece in pieces])
        assert sent.startswith(b" {")


async def test_a_slow_plain_answer_that_fails_breaks_the_connection_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longrein.gateway.delivery.PATIENCE_SECONDS", 0.02)
    async with harness(tmp_path) as client:
        client.engine.failures = 1
        url = "/proxy/rollout/r/attempt/0/mode/train/openai/v1/chat/completions"
        request = client.served.anonymous.build_request("POST", url, json={"messages": [ASK]}, headers=client.token)
        answer = await client.served.anonymous.send(request, stream=True)
        client.engine.go_on.set()
        with pytest.raises(httpx.RemoteProtocolError):
            await answer.aread()  # an SDK asks again
        assert "one1" in await client.ask("chat", stream=False)


@pytest.mark.parametrize(
    ("dialect", "life"),
    [("chat", ":"), ("completions", ":"), ("responses", "response.in_progress"), ("messages", "event: ping")],
)
async def test_a_stream_on_which_nothing_comes_is_kept_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, life: str
) -> None:
    monkeypatch.setattr("longrein.gateway.calls.KEEP_ALIVE_SECONDS", 0.02)
    async with harness(tmp_path) as client:
        end, body = BODIES[dialect]
        url = f"/proxy/rollout/r/attempt/0/mode/train/{end}"
        (await client.served.http.post("/proxy/pause", json={})).raise_for_status()
        request = client.served.anonymous.build_request(
            "POST", url, json={**body, "stream": True}, headers=client.token
        )
        answer = await client.served.anonymous.send(request, stream=True)
        lines = answer.aiter_lines()
        seen = 0
        async for line in lines:
            seen += life in line
            if seen == 3:
                break
        (await client.served.http.post("/proxy/resume")).raise_for_status()
        client.engine.go_on.set()
        assert "two" in "\n".join([line async for line in lines])
