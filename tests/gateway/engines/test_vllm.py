"""vLLM's protocol, against a fake server that answers as vLLM 0.32.0 does; tests/cluster/test_vllm.py asks a real one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from longrein.gateway.engines import EngineError
from longrein.gateway.engines.tokens import TokensEngine
from longrein.records import ModelEndpoint

from .fake_server import FakeServer, Refusal, Stream, collect, fake_server, request, whole

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
MODELS = {
    "object": "list",
    "data": [
        {"id": "adapter", "object": "model", "parent": "served", "max_model_len": None},
        {"id": "served", "object": "model", "parent": None, "max_model_len": 64},
    ],
}
FORBIDDEN = Refusal(403, {"error": {"message": "scale out endpoints are disabled", "code": 403}})


def generated(*ids: int, finish: str | None = None, spans: Any = None, top: Any = ()) -> dict[str, Any]:
    """An event of the generate route; a token's log-probability tells its id."""
    places = [
        {
            "token_id": id,
            "logprob": -id / 100,
            "rank": 1,
            "top_logprobs": [{"token_id": t, "logprob": p} for t, p in top],
        }
        for id in ids
    ]
    choice = {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": list(ids),
        "weight_versions": spans,
    }
    return {"request_id": "x", "usage": None, "choices": [{**choice, "logprobs": {"content": places}}]}


def completed(*ids: int, finish: str | None = None, top: Any = None, text: str = "x") -> dict[str, Any]:
    """An event of the completions route."""
    logprobs = {
        "token_logprobs": [-id / 100 for id in ids],
        "tokens": [f"token_id:{id}" for id in ids],
        "top_logprobs": [top or {f"token_id:{id}": -id / 100} for id in ids],
        "text_offset": [0] * len(ids),
    }
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": list(ids), "logprobs": logprobs}
    return {"id": "cmpl-x", "object": "text_completion", "model": "served", "choices": [choice]}


def certain_if(processed: bool) -> Callable[[Any], Any]:
    """The completions route as the probe of log-probabilities sees it: one token is allowed."""

    def answer(body: Any) -> Any:
        [token] = body["allowed_token_ids"]
        choice = completed(token, finish="length")
        choice["choices"][0]["logprobs"]["token_logprobs"] = [0.0 if processed or token == 0 else -3.5]
        return choice

    return answer


def vllm(**routes: Any) -> dict[str, Callable[[Any], Any]]:
    """The routes of a server; `generate` and `completions` are their answers."""
    found: dict[str, Callable[[Any], Any]] = {"/health": lambda body: {}, "/v1/models": lambda body: MODELS}
    for name, path in (("generate", GENERATE), ("completions", COMPLETIONS), ("weight_info", "/weight_info")):
        if name in routes:
            answer = routes[name]
            found[path] = answer if callable(answer) else (lambda body, answer=answer: answer)
    return found


def over(http: httpx.AsyncClient, *servers: FakeServer, version: int = 0) -> TokensEngine:
    endpoints = [ModelEndpoint("policy", server.url + "/v1", version, "vllm") for server in servers]
    return TokensEngine(http, lambda: endpoints)


async def test_a_reply_of_a_fake_vllm_over_the_generate_route(http: httpx.AsyncClient) -> None:
    spans = [{"version": "default", "start": 0, "end": 3}]
    answer = Stream([generated(5), generated(6), generated(2, finish="stop", spans=spans), "[DONE]"])
    async with fake_server(vllm(generate=answer)) as server:
        reply = whole(await collect(over(http, server, version=4), request(stream=False)))
    assert (reply.ids, reply.finish, reply.versions) == ([5, 6, 2], "stop", [4, 4, 4])
    assert reply.logprobs == [-0.05, -0.06, -0.02]
    [body] = server.bodies(GENERATE)
    assert body == {
        "request_id": "r/0/0",
        "token_ids": [1, 2, 3],
        "stream": True,
        "sampling_params": {
            **{"max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
            **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [2], "seed": 7, "logprobs": 0},
            **{"detokenize": False, "skip_special_tokens": False},
        },
    }


@pytest.mark.parametrize("refusal", [FORBIDDEN, Refusal(404, {"detail": "Not Found"})])
async def test_without_that_route_completions_are_asked_and_it_is_not_tried_again(
    http: httpx.AsyncClient, refusal: Refusal
) -> None:
    answer = Stream([completed(5), completed(2, finish="stop", text=""), "[DONE]"])
    async with fake_server(vllm(generate=refusal, completions=answer)) as server:
        engine = over(http, server, version=9)
        replies = [whole(await collect(engine, request())) for _ in range(2)]
    for reply in replies:
        assert (reply.ids, reply.logprobs, reply.versions) == ([5, 2], [-0.05, -0.02], [9, 9])
    assert len(server.bodies(GENERATE)) == 1
    body = server.bodies(COMPLETIONS)[0]
    assert (body["model"], body["prompt"], body["return_token_ids"]) == ("served", [1, 2, 3], True)
    assert (body["logprobs"], body["seed"], body["stop_token_ids"], body["stream"]) == (0, 7, [2], True)


async def test_the_version_of_each_token_is_the_one_registered_when_it_comes(http: httpx.AsyncClient) -> None:
    endpoints = [ModelEndpoint("policy", "", 3, "vllm")]
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    async with fake_server(vllm(generate=Stream([generated(5)], "hang"))) as server:
        endpoints[0].endpoint = server.url
        engine = TokensEngine(http, lambda: endpoints)
        stream = engine.generate(request())
        chunks = [await anext(stream)]
        endpoints[0] = ModelEndpoint("policy", server.url, 4, "vllm")
        engine.refresh()
        last = Stream([generated(6), generated(2, finish="stop", spans=spans)])
        server.routes[GENERATE] = lambda body: last
        await server.cut()
        chunks += [chunk async for chunk in stream]
    assert whole(chunks).versions == [3, 4, 4]


async def test_versions_that_a_fake_vllm_tells_otherwise_are_reported(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    spans = [{"version": "8", "start": 0, "end": 2}]
    answer = Stream([generated(5), generated(2, finish="stop", spans=spans)])
    async with fake_server(vllm(generate=answer)) as server:
        with caplog.at_level(logging.WARNING):
            reply = whole(await collect(over(http, server, version=7), request()))
    assert reply.versions == [7, 8]
    assert "recorded otherwise" in caplog.text


@pytest.mark.parametrize("route", ["generate", "completions"])
async def test_the_most_probable_tokens(http: httpx.AsyncClient, route: str) -> None:
    # The sampled token is told too where it is not among them.
    tops = [(5, -3.0), (9, -0.1), (8, -1.0)]
    by_name = {f"token_id:{id}": p for id, p in tops}
    event = (
        generated(5, finish="length", top=tops) if route == "generate" else completed(5, finish="length", top=by_name)
    )
    routes = vllm(**{"generate": FORBIDDEN, route: Stream([event])})
    async with fake_server(routes) as server:
        reply = whole(await collect(over(http, server), request(top_logprobs=2)))
    assert reply.top == [[(9, -0.1), (8, -1.0)]]


async def test_a_guide_goes_where_vllm_takes_grammars(http: httpx.AsyncClient) -> None:
    answer = Stream([generated(2, finish="stop")])
    async with fake_server(vllm(generate=answer, completions=certain_if(True))) as server:
        await collect(over(http, server), request(guide="start: /a/"))
    assert server.bodies(GENERATE)[0]["sampling_params"]["structured_outputs"] == {"grammar": "start: /a/"}


RESHAPED = [{"temperature": 0.7}, {"guide": "start: /a/"}, {"top_p": 0.9}, {"top_k": 5}]


@pytest.mark.parametrize("changes", RESHAPED)
async def test_log_probabilities_of_another_distribution_are_refused(http: httpx.AsyncClient, changes: Any) -> None:
    answer = Stream([generated(2, finish="stop")])
    async with fake_server(vllm(generate=answer, completions=certain_if(False))) as server:
        engine = over(http, server)
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs") as caught:
            await collect(engine, request(**changes))
        assert caught.value.status == 400
        assert server.bodies(GENERATE) == []
        await collect(engine, request())
        await collect(engine, request(temperature=0.0))


@pytest.mark.parametrize("changes", RESHAPED)
async def test_log_probabilities_as_sampled_are_taken_and_it_is_found_out_once(
    http: httpx.AsyncClient, changes: Any
) -> None:
    answer = Stream([generated(2, finish="stop")])
    async with fake_server(vllm(generate=answer, completions=certain_if(True))) as server:
        engine = over(http, server)
        for _ in range(2):
            assert whole(await collect(engine, request(**changes))).ids == [2]
    assert [body["allowed_token_ids"] for body in server.bodies(COMPLETIONS)] == [[0], [1]]


async def test_greedy_tokens_are_certain(http: httpx.AsyncClient) -> None:
    async with fake_server(vllm(generate=Stream([generated(5, 2, finish="stop")]))) as server:
        assert whole(await collect(over(http, server), request(temperature=0.0))).logprobs == [0.0, 0.0]


async def test_the_context_of_a_fake_vllm(http: httpx.AsyncClient) -> None:
    async with fake_server(vllm(generate=Stream([generated(2, finish="stop")]))) as server:
        engine = over(http, server)
        await collect(engine, request(token_ids=[1] * 60))
        assert server.bodies(GENERATE)[0]["sampling_params"]["max_tokens"] == 4
        with pytest.raises(EngineError, match="64 tokens does not fit into the 64"):
            await collect(engine, request(token_ids=[1] * 64))


async def test_a_cut_reply_of_a_fake_vllm_is_gone_on_with(http: httpx.AsyncClient) -> None:
    answers = [Stream([generated(5), generated(6)], "cut"), Stream([generated(2, finish="stop")])]
    async with fake_server(vllm(generate=lambda body: answers.pop(0))) as server:
        reply = whole(await collect(over(http, server, version=2), request()))
    assert (reply.ids, reply.versions) == ([5, 6, 2], [2, 2, 2])
    assert server.bodies(GENERATE)[1]["token_ids"] == [1, 2, 3, 5, 6]


async def test_an_abort_of_a_fake_vllm_is_gone_on_with(http: httpx.AsyncClient) -> None:
    answers = [Stream([generated(5), generated(finish="abort", spans=[])]), Stream([generated(2, finish="stop")])]
    async with fake_server(vllm(generate=lambda body: answers.pop(0))) as server:
        assert whole(await collect(over(http, server), request())).ids == [5, 2]


async def test_a_server_with_the_weights_it_started_with_is_left_out(http: httpx.AsyncClient) -> None:
    answer = Stream([generated(2, finish="stop")])
    info = {"weight_version": "default"}
    async with (
        fake_server(vllm(generate=answer, weight_info=lambda body: info)) as restarted,
        fake_server(vllm(generate=answer, weight_info={"weight_version": "5"})) as other,
    ):
        engine = over(http, restarted, other, version=5)
        with engine.fleet.watched():
            stale, good = engine.fleet.members(engine.endpoints())
            while stale.fault is None:
                await engine.fleet.change(0.01)
            assert "has the weights 'default', not those of version 5" in stale.fault
            await collect(engine, request())
            assert (restarted.bodies(GENERATE), len(other.bodies(GENERATE)), good.fault) == ([], 1, None)
            info["weight_version"] = "5"
            await engine.fleet.change(60)
            assert stale.fault is None


@pytest.mark.parametrize(
    ("answer", "asked", "status", "said"),
    [
        (Refusal(400, {"error": {"message": "too long"}}), {}, 502, "too long"),
        (Stream([{"error": {"message": "bad seed", "code": 400}}]), {}, 502, "bad seed"),
        (Stream([{"error": {"message": "Grammar error", "code": 400}}]), {"guide": "("}, 400, "backend guidance"),
        (Stream([{"error": {"message": "internal", "code": 500}}]), {"guide": "("}, 502, "backend guidance"),
        (Stream([completed(text="words")]), {}, 502, "too old for return_token_ids"),
        (Stream([{"choices": [{"token_ids": [5], "logprobs": None}]}]), {}, 502, "0 log-probabilities of 1 tokens"),
    ],
)
async def test_what_a_fake_vllm_refuses_is_said(
    http: httpx.AsyncClient, answer: Any, asked: dict[str, Any], status: int, said: str
) -> None:
    async with fake_server(vllm(generate=answer, completions=certain_if(True))) as server:
        with pytest.raises(EngineError, match=said) as caught:
            await collect(over(http, server), request(**asked))
    assert caught.value.status == status
