"""What becomes of a reply whose endpoint fails. The endpoints are fake engines, spoken to over real HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from longrein.gateway.engines import EngineError
from longrein.gateway.engines.routing import choose_endpoint
from longrein.gateway.engines.tokens import TokensEngine, rest_seed
from longrein.records import ModelEndpoint

from ..running import KEY, running_gateway
from .fake_server import FakeServer, Refusal, Stream, collect, fake_server, request, whole

GENERATE = "/inference/v1/generate"


def event(*ids: int, finish: str | None = None, version: int = 0) -> dict[str, Any]:
    """What the embedded engine says of new tokens; a token's log-probability tells its id."""
    return {
        "token_ids": list(ids),
        "logprobs": [-id / 100 for id in ids],
        "versions": [[version, len(ids)]] if ids else [],
        "finish_reason": finish,
    }


def scripted(*answers: Any) -> Callable[[Any], Any]:
    """A route that gives one answer after the other, and the last for ever."""
    left = list(answers)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


@asynccontextmanager
async def fake_engine(*answers: Any) -> AsyncIterator[FakeServer]:
    async with fake_server({"/health": lambda body: {"status": "ok"}, GENERATE: scripted(*answers)}) as server:
        yield server


def over(http: httpx.AsyncClient, *servers: FakeServer, protocol: Any = "tokens") -> TokensEngine:
    endpoints = [ModelEndpoint("policy", server.url, protocol=protocol) for server in servers]
    return TokensEngine(http, lambda: endpoints)


def rollout_at(server: FakeServer, *others: FakeServer) -> str:
    """The id of a rollout whose calls go to `server`."""
    endpoints = [ModelEndpoint("policy", one.url) for one in (server, *others)]
    return next(id for id in map(str, range(1000)) if choose_endpoint(endpoints, id).endpoint == server.url)


async def test_a_streamed_and_a_plain_reply(http: httpx.AsyncClient) -> None:
    streamed = Stream([event(5, version=3), event(2, version=4, finish="stop"), "[DONE]"])
    async with fake_engine(streamed, event(6, 2, finish="stop")) as server:
        engine = over(http, server)
        reply = whole(await collect(engine, request()))
        plain = whole(await collect(engine, request(stream=False)))
    assert (reply.ids, reply.logprobs, reply.versions) == ([5, 2], [-0.05, -0.02], [3, 4])
    assert (plain.ids, plain.finish) == ([6, 2], "stop")
    first, second = server.bodies(GENERATE)
    assert (first["stream"], second["stream"]) == (True, False)
    assert first["sampling_params"] == {
        **{"max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [2], "seed": 7}
    }


@pytest.mark.parametrize("then", ["end", "cut"])
async def test_a_reply_that_breaks_off_is_gone_on_with_at_the_same_endpoint(http: httpx.AsyncClient, then: Any) -> None:
    answers = (Stream([event(5, 6)], then), Stream([event(7, version=1), event(2, version=1, finish="stop")]))
    async with fake_engine(*answers) as server:
        reply = whole(await collect(over(http, server), request(max_tokens=8)))
    assert reply.ids == [5, 6, 7, 2]
    assert reply.logprobs == [-0.05, -0.06, -0.07, -0.02]
    assert reply.versions == [0, 0, 1, 1]
    assert reply.finish == "stop"
    first, second = server.bodies(GENERATE)
    assert second["token_ids"] == [1, 2, 3, 5, 6]
    assert second["sampling_params"]["max_tokens"] == 6
    assert second["sampling_params"]["seed"] == rest_seed(7, 2) != first["sampling_params"]["seed"]
    assert second["request_id"] != first["request_id"]


async def test_another_endpoint_takes_over_from_one_that_dies(http: httpx.AsyncClient) -> None:
    hanging = Stream([event(5)], "hang")
    async with fake_engine(hanging) as dying, fake_engine(Stream([event(2, finish="stop")])) as other:
        engine = over(http, dying, other)
        async with aclosing(engine.generate(request(rollout_id=rollout_at(dying, other)))) as stream:
            chunks = [await anext(stream)]
            await dying.die()
            chunks += [chunk async for chunk in stream]
    assert whole(chunks).ids == [5, 2]
    assert other.bodies(GENERATE)[0]["token_ids"] == [1, 2, 3, 5]


async def test_a_call_waits_for_the_only_endpoint_to_come_back(http: httpx.AsyncClient) -> None:
    answers = (Stream([event(5)], "hang"), Stream([event(2, finish="stop")]))
    async with fake_engine(*answers) as server, aclosing(over(http, server).generate(request())) as stream:
        chunks = [await anext(stream)]
        await server.die()
        rest = asyncio.ensure_future(anext(stream))
        await asyncio.wait({rest}, timeout=0.1)
        assert not rest.done()
        await server.come_back()
        chunks.append(await rest)
    assert whole(chunks).ids == [5, 2]


async def test_an_endpoint_that_no_longer_answers_its_checks_is_left(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longrein.gateway.engines.health.CHECK_EVERY", 0.01)
    async with (
        fake_engine(Stream([event(5)], "hang")) as stuck,
        fake_engine(Stream([event(2, finish="stop")])) as other,
    ):
        engine = over(http, stuck, other)
        async with aclosing(engine.generate(request(rollout_id=rollout_at(stuck, other)))) as stream:
            chunks = [await anext(stream)]
            stuck.routes["/health"] = lambda body: Refusal(500)
            chunks += [chunk async for chunk in stream]
            assert whole(chunks).ids == [5, 2]
        await asyncio.wait_for(stuck.hung_up.wait(), 10)


async def test_a_call_that_fails_leaves_the_other_calls_at_its_endpoint_alone(http: httpx.AsyncClient) -> None:
    async with fake_engine(Stream([event(5)], "hang"), Refusal(500), Stream([event(2, finish="stop")])) as server:
        engine = over(http, server)
        async with aclosing(engine.generate(request())) as undisturbed:
            await anext(undisturbed)
            rest = asyncio.ensure_future(anext(undisturbed))
            assert whole(await collect(engine, request())).ids == [2]
            assert not rest.done()
            rest.cancel()
            await asyncio.wait({rest})
    assert len(server.bodies(GENERATE)) == 3


async def test_an_endpoint_that_is_out_gets_no_calls_until_it_is_back(http: httpx.AsyncClient) -> None:
    ok = Stream([event(2, finish="stop")])
    async with fake_engine(ok) as sick, fake_engine(ok) as other:
        engine = over(http, sick, other)
        sick.routes["/health"] = sick.routes[GENERATE] = lambda body: Refusal(500)
        asked = request(rollout_id=rollout_at(sick, other))
        with engine.fleet.watched():
            await collect(engine, asked)
            await collect(engine, asked)
            assert (len(sick.bodies(GENERATE)), len(other.bodies(GENERATE))) == (1, 2)
            sick.routes |= {"/health": lambda body: {}, GENERATE: lambda body: ok}
            await engine.fleet.change(60)
            await collect(engine, asked)
            assert (len(sick.bodies(GENERATE)), len(other.bodies(GENERATE))) == (2, 2)


async def test_without_calls_nothing_is_asked(http: httpx.AsyncClient) -> None:
    async with fake_engine(Stream([event(5)], "hang")) as server:
        engine = over(http, server)
        async with aclosing(engine.generate(request())) as stream:
            await anext(stream)
            watcher = engine.fleet._watcher
            assert watcher is not None
        await asyncio.wait({watcher})
        assert engine.fleet._watcher is None


@pytest.mark.parametrize(("last", "more", "finish"), [(2, 8, "stop"), (5, 1, "length")])
async def test_a_reply_of_which_only_the_end_was_missing_is_not_sampled_on(
    http: httpx.AsyncClient, last: int, more: int, finish: str
) -> None:
    async with fake_engine(Stream([event(last)], "cut")) as server:
        reply = whole(await collect(over(http, server), request(max_tokens=more)))
    assert (reply.ids, reply.finish) == ([last], finish)
    assert len(server.bodies(GENERATE)) == 1


async def test_a_reply_that_always_breaks_off_fails_in_the_end(http: httpx.AsyncClient) -> None:
    async with fake_engine(Stream([event(5)], "cut")) as server:
        with pytest.raises(EngineError, match="was broken off 9 times"):
            await collect(over(http, server), request(max_tokens=100))
    assert len(server.bodies(GENERATE)) == 9


async def test_an_abort_by_the_engine_is_a_break(http: httpx.AsyncClient) -> None:
    async with fake_engine(Stream([event(5, finish="abort")]), Stream([event(2, finish="stop")])) as server:
        reply = whole(await collect(over(http, server), request()))
    assert (reply.ids, reply.finish) == ([5, 2], "stop")


async def test_an_engine_with_too_much_to_do_is_asked_again_and_stays_in(http: httpx.AsyncClient) -> None:
    async with fake_engine(*[Refusal(429)] * 20, Stream([event(2, finish="stop")])) as server:
        engine = over(http, server)
        assert whole(await collect(engine, request())).ids == [2]
        assert [member.fault for member in engine.fleet.members(engine.endpoints())] == [None]


async def test_a_request_that_is_refused_is_not_tried_elsewhere(http: httpx.AsyncClient) -> None:
    async with fake_engine(Refusal(400, {"error": "token_ids: the prompt is empty"})) as server:
        with pytest.raises(EngineError, match=r"answered 400.*the prompt is empty"):
            await collect(over(http, server), request())
        with pytest.raises(EngineError, match="cannot follow the guide") as caught:
            await collect(over(http, server), request(guide="nonsense"))
    assert caught.value.status == 400
    assert len(server.bodies(GENERATE)) == 2


async def test_a_guided_reply_begins_anew_unless_it_was_given_out(http: httpx.AsyncClient) -> None:
    async with fake_engine(event(5), event(6, 2, finish="stop")) as server:
        reply = whole(await collect(over(http, server), request(guide="start: /a+/", stream=False)))
    assert reply.ids == [6, 2]
    assert [body["token_ids"] for body in server.bodies(GENERATE)] == [[1, 2, 3]] * 2
    async with fake_engine(Stream([event(5)], "cut")) as server:
        with pytest.raises(EngineError, match="guided reply that was given out in part"):
            await collect(over(http, server), request(guide="start: /a+/"))


async def test_leaving_early_hangs_up_on_the_engine(http: httpx.AsyncClient) -> None:
    async with fake_engine(Stream([event(5)], "hang")) as server:
        async with aclosing(over(http, server).generate(request())) as stream:
            assert (await anext(stream)).token_ids == [5]
        await asyncio.wait_for(server.hung_up.wait(), 10)


async def test_being_cancelled_hangs_up_on_the_engine(http: httpx.AsyncClient) -> None:
    async with fake_engine(Stream([], "hang")) as server:
        asking = asyncio.ensure_future(collect(over(http, server), request()))
        while not server.bodies(GENERATE):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait_for(server.hung_up.wait(), 10)


async def test_an_engine_that_is_not_there_is_named(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrein.gateway.engines.tokens.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("longrein.gateway.engines.tokens.REGISTRATION_SECONDS", 0.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = ModelEndpoint("policy", f"http://127.0.0.1:{free.getsockname()[1]}", protocol="tokens")
        with pytest.raises(EngineError, match=endpoint.endpoint) as caught:
            await collect(TokensEngine(http, lambda: [endpoint]), request())
    assert caught.value.status == 503
    with pytest.raises(EngineError, match="no engine has registered"):
        await collect(TokensEngine(http, list), request())


async def test_an_answer_that_is_none_is_shown(http: httpx.AsyncClient) -> None:
    async with fake_engine(Stream(["nonsense"])) as server:
        with pytest.raises(EngineError, match=r"does not speak its protocol.*nonsense"):
            await collect(over(http, server), request())


async def test_a_harness_does_not_notice_that_a_stream_broke(tmp_path: Path) -> None:
    stop = 2  # <|im_end|> of the model folder
    answers = (
        Stream([event(40, 41)], "cut"), Stream([event(42), event(stop, finish="stop")]),
        event(43, stop, finish="stop"),
    )  # fmt: skip
    async with fake_engine(*answers) as server:
        with running_gateway(tmp_path, ["engine.kind=embedded"]) as gateway:
            models = [{"model": "policy", "endpoint": server.url, "protocol": "tokens"}]
            key = {"authorization": f"Bearer {KEY}"}
            async with httpx.AsyncClient(base_url=gateway.url, headers=key, timeout=60) as run:
                (await run.post("/api/models", json=models)).raise_for_status()
                rollout, token = gateway.rollout()
                url = f"{gateway.base_url(rollout)}/chat/completions"
                body = {"messages": [{"role": "user", "content": "go"}], "stream": True}
                headers = {"authorization": f"Bearer {token}"}
                streamed = await run.post(url, json=body, headers=headers)
            lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
            assert lines[-1] == "[DONE]"
            assert not any("error" in json.loads(line) for line in lines[:-1])
            [call] = gateway.calls(rollout)
            assert (call.status, call.sampled, call.finish_reason) == ("ok", [40, 41, 42, stop], "stop")
            assert call.logprobs == pytest.approx([-0.4, -0.41, -0.42, -0.02])


async def test_an_engine_that_takes_the_place_of_a_dead_one_is_given_the_calls_that_wait(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longrein.gateway.engines.tokens.REGISTRATION_SECONDS", 0.05)
    clock = asyncio.get_running_loop()
    async with fake_engine(Stream([event(7, finish="stop")])) as server:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            dead = ModelEndpoint("policy", f"http://127.0.0.1:{free.getsockname()[1]}", protocol="tokens")
        living = ModelEndpoint("policy", server.url, protocol="tokens")
        began = clock.time()
        replaced = iter([[], [living]])

        def endpoints() -> list[ModelEndpoint]:
            """The dead one for longer than a call waits for a first one; then for a moment none."""
            return [dead] if clock.time() - began < 0.2 else next(replaced, [living])

        assert [id for chunk in await collect(TokensEngine(http, endpoints), request()) for id in chunk.token_ids] == [
            7
        ]
