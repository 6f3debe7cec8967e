"""SGLang's protocol: against a fake server that answers as SGLang 0.5.23 does, and against a real one where there is one.

LONGREIN_SGLANG_URL=http://host:30000 pytest tests/gateway/engines/test_sglang.py
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.gateway.engines import EngineError
from longrein.gateway.engines.sglang import Reader
from longrein.gateway.engines.tokens import TokensEngine
from longrein.records import ModelEndpoint

from .fake_server import FakeServer, Refusal, Stream, collect, fake_server, request, whole

MODELS = {"object": "list", "data": [{"id": "served", "root": "served", "max_model_len": 64, "parent": None}]}


def event(ids: list[int], done: int, *, finish: Any = None, incremental: bool = False, **meta: Any) -> dict[str, Any]:
    """What SGLang says once `ids[:done]` are sampled: all of them, or with incremental output those since the last."""
    shown = ids[done - 1 : done] if incremental else ids[:done]
    info = {
        "id": "r/0/0",
        "finish_reason": finish,
        "prompt_tokens": 3,
        "weight_version": "default",
        "completion_tokens": done,
        "cached_tokens": 0,
        "output_token_logprobs": [[-id / 100, id, None] for id in shown],
        **meta,
    }
    return {"text": "x" * len(shown), "output_ids": shown, "meta_info": info}


def replying(*events: Any, then: Any = "end") -> dict[str, Any]:
    done = ["[DONE]"] if then == "end" else []
    return {
        "/health": lambda body: {},
        "/v1/models": lambda body: MODELS,
        "/generate": lambda body: Stream([*events, *done], then),
    }


def over(http: httpx.AsyncClient, *servers: FakeServer, version: int = 0) -> TokensEngine:
    endpoints = [ModelEndpoint("policy", server.url + "/v1", version, "sglang") for server in servers]
    return TokensEngine(http, lambda: endpoints)


STOP = {"type": "stop", "matched": 2}


@pytest.mark.parametrize("incremental", [False, True])
async def test_a_reply_of_a_fake_sglang(http: httpx.AsyncClient, incremental: bool) -> None:
    ids = [5, 6, 2]
    events = [event(ids, n, finish=STOP if n == 3 else None, incremental=incremental) for n in (1, 2, 3)]
    async with fake_server(replying(*events)) as server:
        reply = whole(await collect(over(http, server, version=4), request(stream=False)))
    assert (reply.ids, reply.finish, reply.versions) == (ids, "stop", [4, 4, 4])
    assert reply.logprobs == [-0.05, -0.06, -0.02]
    [body] = server.bodies("/generate")
    assert body["input_ids"] == [1, 2, 3]
    assert (body["return_logprob"], body["stream"], body["top_logprobs_num"]) == (True, True, 0)
    assert body["sampling_params"] == {
        **{"max_new_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
        **{"stop_token_ids": [2], "sampling_seed": 7, "skip_special_tokens": False, "no_stop_trim": True},
    }


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=8))
def test_however_the_tokens_come_each_is_read_once(steps: list[tuple[bool, int]]) -> None:
    total = sum(count for _, count in steps)
    ids = list(range(10, 10 + total))
    reader, done, read = Reader("http://fake", request(), lambda: 0), 0, []
    for incremental, count in steps:
        shown = ids[done : done + count] if incremental else ids[: done + count]
        done += count
        info = {"completion_tokens": done, "output_token_logprobs": [[-0.5, id, None] for id in shown]}
        read.append(reader.chunk(json.dumps({"output_ids": shown, "meta_info": info}).encode()))
    assert whole(read).ids == ids


async def test_versions_that_a_fake_sglang_tells(http: httpx.AsyncClient) -> None:
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    ids = [5, 6, 2]
    events = [
        event(ids, 1, weight_version="3"),
        event(ids, 3, finish=STOP, weight_version="4", weight_versions=spans),
    ]
    async with fake_server(replying(*events)) as server:
        reply = whole(await collect(over(http, server, version=1), request()))
    assert reply.versions == [3, 3, 4]


async def test_the_most_probable_tokens_and_a_guide(http: httpx.AsyncClient) -> None:
    tops = [[[-0.1, 9, None], [-2.0, 5, None]]]
    async with fake_server(replying(event([5], 1, finish=STOP, output_top_logprobs=tops))) as server:
        reply = whole(await collect(over(http, server), request(top_logprobs=2, guide="start: /a/")))
    assert reply.top == [[(9, -0.1), (5, -2.0)]]
    [body] = server.bodies("/generate")
    assert (body["top_logprobs_num"], body["sampling_params"]["ebnf"]) == (2, "start: /a/")


async def test_a_cut_reply_of_a_fake_sglang_is_gone_on_with(http: httpx.AsyncClient) -> None:
    first, second = Stream([event([5, 6], 2)], "cut"), Stream([event([2], 1, finish=STOP), "[DONE]"])
    answers = [first, second]
    async with fake_server({**replying(), "/generate": lambda body: answers.pop(0)}) as server:
        reply = whole(await collect(over(http, server), request()))
    assert (reply.ids, reply.finish) == ([5, 6, 2], "stop")
    assert server.bodies("/generate")[1]["input_ids"] == [1, 2, 3, 5, 6]


async def test_the_context_of_a_fake_sglang(http: httpx.AsyncClient) -> None:
    async with fake_server(replying(event([2], 1, finish=STOP))) as server:
        await collect(over(http, server), request(token_ids=[1] * 60))
        assert server.bodies("/generate")[0]["sampling_params"]["max_new_tokens"] == 4
        with pytest.raises(EngineError, match="64 tokens does not fit into the 64") as caught:
            await collect(over(http, server), request(token_ids=[1] * 64))
    assert caught.value.status == 400


async def test_greedy_tokens_are_certain(http: httpx.AsyncClient) -> None:
    async with fake_server(replying(event([5, 2], 2, finish=STOP))) as server:
        assert whole(await collect(over(http, server), request(temperature=0.0))).logprobs == [0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Refusal(400, {"error": {"message": "input too long"}}), "input too long"),
        (Stream([{"error": {"message": "bad grammar", "code": 400}}]), "bad grammar"),
        (Stream([event([], 0, finish={"type": "abort", "message": "no such", "status_code": 400})]), "no such"),
        (Stream([event([5], 1, output_token_logprobs=[])]), "fewer log-probabilities"),
    ],
)
async def test_what_a_fake_sglang_refuses_is_said(http: httpx.AsyncClient, answer: Any, said: str) -> None:
    async with fake_server({**replying(), "/generate": lambda body: answer}) as server:
        with pytest.raises(EngineError, match=said):
            await collect(over(http, server), request())
    assert len(server.bodies("/generate")) == 1


async def test_top_p_is_refused_because_its_log_probabilities_would_be_others(http: httpx.AsyncClient) -> None:
    async with fake_server(replying()) as server:
        with pytest.raises(EngineError, match="leave top_p and top_k out"):
            await collect(over(http, server), request(top_p=0.9))


REAL = os.environ.get("LONGREIN_SGLANG_URL", "")


@pytest.mark.skipif(not REAL, reason="LONGREIN_SGLANG_URL names no SGLang server")
class TestARealSglang:
    async def test_sampled_tokens_have_the_probabilities_they_were_sampled_with(self) -> None:
        endpoint = ModelEndpoint("policy", REAL, protocol="sglang")
        async with httpx.AsyncClient(timeout=None) as http:
            engine = TokensEngine(http, lambda: [endpoint])
            for temperature in (1.0, 0.7):
                asked = request(token_ids=list(range(10, 40)), max_tokens=16, temperature=temperature, top_logprobs=5)
                reply = whole(await collect(engine, asked))
                assert len(reply.ids) == len(reply.logprobs) == len(reply.versions) == len(reply.top)
                for id, p, top in zip(reply.ids, reply.logprobs, reply.top, strict=True):
                    assert p is not None
                    assert sum(math.exp(q) for _, q in top) <= 1.001
                    assert dict(top).get(id, p) == pytest.approx(p, abs=1e-4)

    async def test_a_reply_follows_its_guide(self) -> None:
        endpoint = ModelEndpoint("policy", REAL, protocol="sglang")
        async with httpx.AsyncClient(timeout=None) as http:
            engine = TokensEngine(http, lambda: [endpoint])
            asked = request(token_ids=list(range(10, 40)), max_tokens=8, guide='start: "1" | "2"')
            reply = whole(await collect(engine, asked))
        assert reply.finish == "stop"
