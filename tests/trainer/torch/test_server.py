"""The engine's HTTP: real requests to a real server, with steps that go one by one where a test needs to know when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch

from longrein import config
from longrein.trainer.loop import make_student
from longrein.trainer.torch.policy import Policy
from longrein.trainer.torch.sampler import Sample, Sampler, Sampling
from longrein.trainer.torch.server import EngineServer

ENGINE = config.Engine.model_validate({"max_batch": 8, "cache_tokens": 4096, "threads": 1})


class Pace:
    """Lets the computing thread make as many steps as it is told to."""

    def __init__(self, server: EngineServer) -> None:
        self._permits = threading.Semaphore(0)
        self._sampler: Any = server._sampler
        self._step = server._sampler.step
        self._sampler.step = self._wait_and_step

    def _wait_and_step(self) -> list[Sample]:
        self._permits.acquire()
        return self._step()

    def go(self) -> None:
        """Pace no longer."""
        self._sampler.step = self._step
        self.allow(1000)

    def allow(self, steps: int) -> None:
        self._permits.release(steps)


@pytest.fixture
async def server(policy: Policy) -> AsyncIterator[EngineServer]:
    server = EngineServer(policy, ENGINE)
    yield server
    await server.stop()


@pytest.fixture
async def http(server: EngineServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=await server.start(), timeout=60) as client:
        yield client


@pytest.fixture
def pace(server: EngineServer) -> Iterator[Pace]:
    pace = Pace(server)
    yield pace
    pace.go()  # before the server stops: it waits for the step that goes on


def body(
    prompt: list[int] | None = None, request_id: str = "a", stream: bool = False, **sampling: Any
) -> dict[str, Any]:
    options = {
        "max_tokens": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "stop_token_ids": [],
        "seed": 3,
    } | sampling
    return {"request_id": request_id, "token_ids": prompt or [5, 6, 7], "stream": stream, "sampling_params": options}


async def chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    """The chunks of a stream; None for its [DONE]."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield None if line == "data: [DONE]" else msgspec.json.decode(line[6:])


async def generate(http: httpx.AsyncClient, asked: dict[str, Any]) -> dict[str, Any]:
    response = await http.post("/inference/v1/generate", json=asked)
    assert response.status_code == 200, response.text
    return response.json()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something that other threads and connections do has happened."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def requests(server: EngineServer) -> int:
    return int(server.stats()["requests"])


def decoded(server: EngineServer) -> int:
    return int(server.stats()["decoded_tokens"])


async def test_an_answer_is_what_the_sampler_samples(http: httpx.AsyncClient, policy: Policy) -> None:
    answer = await generate(http, body(max_tokens=9))
    sampler = Sampler(policy.model, max_batch=1, cache_tokens=0)
    alone = Sample(np.array([5, 6, 7], np.int32), Sampling(9, seed=3))
    sampler.add(alone)
    while alone.finish_reason is None:
        sampler.step()
    assert answer["token_ids"] == alone.sampled
    assert answer["logprobs"] == pytest.approx(alone.logprobs, abs=1e-5)
    assert answer["versions"] == [[0, 9]]
    assert answer["finish_reason"] == "length"


async def test_a_stop_token_ends_and_is_part_of_the_answer(http: httpx.AsyncClient) -> None:
    tokens = (await generate(http, body(max_tokens=9)))["token_ids"]
    answer = await generate(http, body(max_tokens=9, stop_token_ids=[tokens[4]]))
    end = tokens.index(tokens[4]) + 1
    assert (answer["token_ids"], answer["finish_reason"]) == (tokens[:end], "stop")


async def test_a_stream_gives_the_same_tokens_in_pieces(http: httpx.AsyncClient) -> None:
    whole = await generate(http, body(max_tokens=40))
    async with http.stream("POST", "/inference/v1/generate", json=body(max_tokens=40, stream=True)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        pieces = [piece async for piece in chunks(response)]
    assert pieces.pop() is None
    assert [id for piece in pieces if piece for id in piece["token_ids"]] == whole["token_ids"]
    assert [p for piece in pieces if piece for p in piece["logprobs"]] == pytest.approx(whole["logprobs"], abs=1e-5)
    assert [piece["finish_reason"] for piece in pieces if piece] == [None] * (len(pieces) - 1) + ["length"]


async def test_many_requests_at_once(http: httpx.AsyncClient, server: EngineServer) -> None:
    prompts = [[5, 6, 7, 8 + i % 4, *range(9, 20)] for i in range(24)]
    asked = [body(p, str(i), max_tokens=3 + i % 5, seed=i, stream=i % 2 == 0) for i, p in enumerate(prompts)]

    async def ask(one: dict[str, Any]) -> int:
        if not one["stream"]:
            return len((await generate(http, one))["token_ids"])
        async with http.stream("POST", "/inference/v1/generate", json=one) as response:
            return sum([len(piece["token_ids"]) async for piece in chunks(response) if piece])

    assert await asyncio.gather(*map(ask, asked)) == [3 + i % 5 for i in range(24)]
    stats = server.stats()
    assert stats["decoded_tokens"] == sum(3 + i % 5 for i in range(24))
    assert stats["prefilled_tokens"] + stats["reused_tokens"] == sum(len(p) - 1 for p in prompts)
    assert stats["reused_tokens"] > stats["prefilled_tokens"]
    assert stats["requests"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5, 97]}, "ids from 0 to 96"),
        ({"prompt": "x"}, "unknown field `prompt`"),
        ({"sampling_params": {"max_tokens": 4, "min_p": 0.1}}, "unknown field `min_p`"),
        ({"sampling_params": {"max_tokens": 254}}, "context of 256"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"max_tokens": 4, "temperature": -1.0}}, "temperature"),
        ({"sampling_params": {"max_tokens": 4, "temperature": 1e-9}}, "temperature"),
        ({"sampling_params": {"max_tokens": 4, "top_p": 0.0}}, "top_p"),
        ({"sampling_params": {"max_tokens": 4, "top_k": -1}}, "top_k"),
        ({"sampling_params": {"max_tokens": 4, "seed": -1}}, "seed"),
    ],
)
async def test_what_cannot_be_sampled_is_refused(http: httpx.AsyncClient, change: dict[str, Any], message: str) -> None:
    response = await http.post("/inference/v1/generate", json=body() | change)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


async def test_a_prompt_that_just_fits(http: httpx.AsyncClient) -> None:
    assert len((await generate(http, body(max_tokens=253)))["token_ids"]) == 253


async def test_health_and_info(http: httpx.AsyncClient, server: EngineServer, policy: Policy) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    await server.hold()
    await server.refresh(5)
    server.release()
    info = (await http.get("/info")).json()
    assert info == {"model": str(policy.folder), "version": 5, "context": 256, "vocab_size": 97}


async def test_new_weights_under_a_running_request(
    http: httpx.AsyncClient, server: EngineServer, pace: Pace, policy: Policy
) -> None:
    async with http.stream("POST", "/inference/v1/generate", json=body(max_tokens=6, stream=True)) as response:
        pieces = chunks(response)
        pace.allow(2)
        got = [await anext(pieces)]
        holding = asyncio.create_task(server.hold())
        pace.allow(2)  # a step that had begun is ended before the engine stands still
        await holding
        before = decoded(server)
        with torch.no_grad():
            policy.model.get_output_embeddings().weight[:] = 0  # type: ignore[operator, union-attr, index]
        await server.refresh(1)
        assert decoded(server) == before
        server.release()
        pace.allow(10)
        got += [piece async for piece in pieces]
    versions = [version for piece in got if piece for version, count in piece["versions"] for _ in range(count)]
    assert versions == [0] * before + [1] * (6 - before)
    logprobs = [p for piece in got if piece for p in piece["logprobs"]]
    assert logprobs[before:] == pytest.approx([-np.log(97)] * (6 - before), abs=1e-5)


async def test_holds_are_counted(http: httpx.AsyncClient, server: EngineServer) -> None:
    await asyncio.gather(server.hold(), server.hold())
    answer = asyncio.create_task(generate(http, body()))
    await until(lambda: requests(server) == 1)
    server.release()
    await server.hold()  # the first hold still stands
    assert decoded(server) == 0
    server.release()
    server.release()
    assert len((await answer)["token_ids"]) == 6
    with pytest.raises(RuntimeError, match="release without hold"):
        server.release()
    with pytest.raises(RuntimeError, match="needs hold"):
        await server.refresh(2)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_ends_its_request(
    http: httpx.AsyncClient, server: EngineServer, pace: Pace, stream: bool
) -> None:
    asking = asyncio.create_task(http.post("/inference/v1/generate", json=body(max_tokens=200, stream=stream)))
    await until(lambda: requests(server) == 1)
    pace.allow(1)
    await until(lambda: decoded(server) > 0)
    asking.cancel()
    await until(lambda: requests(server) == 0)
    pace.allow(2)  # one may have begun before
    await until(lambda: not server._sampler.running)
    assert decoded(server) <= 2


async def test_abort(http: httpx.AsyncClient, server: EngineServer, pace: Pace) -> None:
    asking = asyncio.create_task(generate(http, body(max_tokens=200)))
    pace.allow(3)
    await until(lambda: decoded(server) == 3)
    assert (await http.post("/abort", json={"request_id": "a"})).status_code == 200
    pace.allow(2)
    answer = await asking
    assert answer["finish_reason"] == "abort"
    assert len(answer["token_ids"]) in (3, 4)
    assert (await http.post("/abort", json={"request_id": "a"})).status_code == 404
    assert (await http.post("/abort", json={"id": "a"})).status_code == 400


async def test_a_request_id_is_used_once_at_a_time(http: httpx.AsyncClient, server: EngineServer, pace: Pace) -> None:
    asking = asyncio.create_task(generate(http, body()))
    await until(lambda: requests(server) == 1)
    response = await http.post("/inference/v1/generate", json=body())
    assert response.status_code == 400
    assert "being answered already" in response.json()["error"]["message"]
    pace.allow(10)
    await asking
    pace.allow(10)
    await generate(http, body())


@pytest.mark.parametrize("stream", [True, False])
async def test_a_step_that_fails_is_told_and_the_next_request_is_served(
    http: httpx.AsyncClient, server: EngineServer, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = server._sampler.engine

    def fail(running: object) -> None:
        raise ValueError("no such luck")

    engine.decode = fail
    response = await http.post("/inference/v1/generate", json=body(stream=stream))
    assert "ValueError: no such luck" in response.text
    assert response.status_code == (200 if stream else 500)
    assert "a step of the engine failed" in caplog.text
    assert len((await generate(http, body()))["token_ids"]) == 6


async def test_diverged_weights_are_an_error_and_no_tokens(
    http: httpx.AsyncClient, server: EngineServer, policy: Policy
) -> None:
    await server.hold()
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[:] = float("nan")  # type: ignore[operator, union-attr, index]
    await server.refresh(1)
    server.release()
    response = await http.post("/inference/v1/generate", json=body())
    assert response.status_code == 500
    assert "logits are not finite" in response.json()["error"]["message"]


async def test_stopping_ends_requests_and_the_thread(policy: Policy) -> None:
    server = EngineServer(policy, ENGINE)
    async with httpx.AsyncClient(base_url=await server.start(), timeout=60) as http:
        await server.hold()
        asking = asyncio.create_task(http.post("/inference/v1/generate", json=body()))
        await until(lambda: requests(server) == 1)
        await server.stop()
        response = await asking
    assert response.status_code == 500
    assert "stopping" in response.text
    with pytest.raises(RuntimeError):
        server._computer.submit(print)


@pytest.mark.parametrize("option", ["auto", "recompute"])
async def test_the_run_file_says_whether_frozen_replies_are_computed_anew(model_folder: Any, option: str) -> None:
    """Under weights that have changed in every layer, tokens have the probabilities of a fresh pass, or have not."""
    sections = {
        "model": {"path": str(model_folder("llama")), "device": "cpu"},
        "engine": {"max_batch": 8, "threads": 1},
        "gate": {"kv_after_update": option},
    }
    student = await make_student(config.Config.model_validate(sections), None)
    server, policy = student.engine, student.policy
    assert isinstance(server, EngineServer)
    pace = Pace(server)
    try:
        prompt = list(range(5, 25))
        asked = body(prompt, max_tokens=12, stream=True)
        async with (
            httpx.AsyncClient(base_url=await server.start(), timeout=60) as http,
            http.stream("POST", "/inference/v1/generate", json=asked) as response,
        ):
            pieces = chunks(response)
            pace.allow(4)
            got = [await anext(pieces)]
            holding = asyncio.create_task(server.hold())
            pace.allow(2)
            await holding
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.mul_(1.2)
            before = decoded(server)
            await server.refresh(1)
            server.release()
            pace.go()
            got += [piece async for piece in pieces]
    finally:
        pace.go()
        await server.stop()
    ids = [id for piece in got if piece for id in piece["token_ids"]]
    logprobs = [p for piece in got if piece for p in piece["logprobs"]]
    versions = [version for piece in got if piece for version, count in piece["versions"] for _ in range(count)]
    assert versions == [0] * before + [1] * (12 - before)
    with torch.inference_mode():
        logits = policy.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    fresh = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[before:, 0].tolist()
    assert (logprobs[before:] == pytest.approx(fresh, abs=1e-3)) == (option == "recompute")
