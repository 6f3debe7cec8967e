"""A real vLLM behind a real gateway, and a training step through both. Run by `make test-vllm`; skipped without vLLM."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import msgspec
import pytest

from gateway.engines.fake_server import collect, request, whole
from gateway.serving import KEY, Served, path, serving
from longrein.client import Client
from longrein.gateway.engines import EngineError
from longrein.gateway.engines.routing import choose_endpoint
from longrein.gateway.engines.tokens import TokensEngine
from longrein.gateway.loading import load_text_model
from longrein.records import Call, ModelEndpoint
from longrein.store import Store
from longrein.trainer.student import Student
from longrein.trainer.vllm import VllmServers

from .vllm_server import CONTEXT, MODEL, TRAINABLE, Vllm, missing, vllm

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    pytest.mark.timeout(1200),
]

ASK = [{"role": "user", "content": "Write a long story about a horse and its trainer."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """A server with all that Longrein asks for."""
    with vllm(tmp_path_factory.mktemp("vllm") / "log", TRAINABLE) as running:
        yield running


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """A server as vLLM starts it by default: no generate route, log-probabilities from before the temperature."""
    with vllm(tmp_path_factory.mktemp("plain") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def scorer() -> Any:
    return Scorer(MODEL)


class Scorer:
    """The same weights in transformers, float32."""

    def __init__(self, folder: Path):
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(self, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Of each sampled token, given what stands before it."""
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
            scores = (logits / temperature).log_softmax(-1)
            return scores.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()

    def distance(self, call: Call, prompt: Sequence[int], temperature: float = 1.0) -> float:
        """The mean difference of a call's log-probabilities; bfloat16 against float32 makes some hundredths."""
        assert call.logprobs is not None
        assert len(call.logprobs) == len(call.sampled)
        exact = self.logprobs(prompt, call.sampled, temperature)
        return sum(abs(a - b) for a, b in zip(call.logprobs, exact, strict=True)) / len(exact)


#: Mean difference that bfloat16 against float32 stays below.
CLOSE = 0.15


def sections(*servers: Vllm, **engine: Any) -> dict[str, Any]:
    return {
        "model": {"name": "policy", "path": str(MODEL), "context": CONTEXT},
        "engine": {"kind": "vllm", "urls": [server.url for server in servers], **engine},
    }


async def recorded(served: Served, count: int, rollout: str = "r") -> list[Call]:
    return msgspec.convert(await served.recorded(count, rollout), list[Call])


async def chat(served: Served, headers: dict[str, str], mode: str = "train", rollout: str = "r", **more: Any) -> Any:
    body = {"messages": ASK, "max_tokens": 24, **more}
    answer = await served.anonymous.post(path(rollout, mode=mode), json=body, headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer


def text_of(events: str) -> str:
    """The content of a streamed chat answer, which has to be whole."""
    lines = [line[6:] for line in events.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert not [chunk for chunk in chunks if "error" in chunk]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def test_tokens_and_log_probabilities_are_those_of_the_model(
    server: Vllm, scorer: Scorer, tmp_path: Path
) -> None:
    async with serving(tmp_path, **sections(server)) as served:
        headers = await served.start()
        plain = (await chat(served, headers)).json()
        streamed = text_of((await chat(served, headers, stream=True)).text)
        await chat(served, await served.start("v", is_train=False), mode="val", rollout="v")
        calls = [*await recorded(served, 2), *await recorded(served, 1, "v")]
    model = load_text_model(str(MODEL), name="policy")
    assert model.decode(calls[0].sampled).removesuffix("<|im_end|>") == plain["choices"][0]["message"]["content"]
    assert model.decode(calls[1].sampled).removesuffix("<|im_end|>") == streamed
    assert calls[0].sampled != calls[1].sampled  # each call has a seed of its own
    for call in calls:
        prompt = calls[0].prompt_delta
        assert call.versions == [(0, len(call.sampled))]
        temperature = call.sampling["temperature"]
        assert scorer.distance(call, prompt, temperature) < CLOSE
    assert calls[2].sampling["temperature"] == 0.7
    assert scorer.distance(calls[2], calls[0].prompt_delta, 0.7) < scorer.distance(calls[2], calls[0].prompt_delta, 1.0)


async def test_a_seed_gives_the_same_tokens_again(server: Vllm) -> None:
    async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
        engine = TokensEngine(http, lambda: [ModelEndpoint("policy", server.url, protocol="vllm")])
        prompt = list(range(10, 60))
        first, second = [whole(await collect(engine, request(token_ids=prompt, seed=2**62 + 1))) for _ in range(2)]
        other = whole(await collect(engine, request(token_ids=prompt, seed=2**62 + 2)))
    assert first.ids == second.ids != other.ids


async def test_a_guided_reply_follows_its_grammar_with_the_probabilities_it_had(server: Vllm, scorer: Scorer) -> None:
    model = load_text_model(str(MODEL), name="policy")
    prompt = model.tokenizer.encode("Is a horse an animal? Answer:", add_special_tokens=False).ids
    guide = '%llguidance {}\nstart: " yes" | " no" | " {" NUMBER "}"\nNUMBER: /[0-9]{1,3}/'
    async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
        engine = TokensEngine(http, lambda: [ModelEndpoint("policy", server.url, protocol="vllm")])
        stop = sorted(model.stop_ids)
        for seed in range(4):
            asked = request(token_ids=prompt, guide=guide, stop_token_ids=stop, seed=seed, top_logprobs=3)
            reply = whole(await collect(engine, asked))
            text = model.decode([id for id in reply.ids if id not in model.stop_ids])
            assert text in (" yes", " no") or (text.startswith(" {") and text[2:-1].isdigit())
            assert reply.finish == "stop"
            unguided = scorer.logprobs(prompt, reply.ids)
            for told, free in zip(reply.logprobs, unguided, strict=True):
                assert told is not None
                assert told > free - 0.5  # fewer tokens were possible
            assert sum(p for p in reply.logprobs if p is not None) > sum(unguided)
            for id, p, top in zip(reply.ids, reply.logprobs, reply.top, strict=True):
                assert sum(math.exp(q) for _, q in top) < 1.01
                assert dict(top).get(id, p) == p
        with pytest.raises(EngineError, match="Grammar error") as caught:
            await collect(engine, request(token_ids=prompt, guide="start: (((", stop_token_ids=stop))
    assert caught.value.status == 400


async def test_a_server_without_the_generate_route_and_with_raw_log_probabilities(
    plain_server: Vllm, scorer: Scorer
) -> None:
    prompt = list(range(10, 60))
    async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
        engine = TokensEngine(http, lambda: [ModelEndpoint("policy", plain_server.url + "/v1", 7, protocol="vllm")])
        await http.post(f"{plain_server.url}/update_weight_version", json={"new_version": "7"})
        reply = whole(await collect(engine, request(token_ids=prompt, stop_token_ids=[2], top_logprobs=2)))
        assert reply.versions == [7] * len(reply.ids)
        assert [len(top) for top in reply.top] == [2] * len(reply.ids)
        exact = scorer.logprobs(prompt, reply.ids)
        assert sum(abs((a or 0) - b) for a, b in zip(reply.logprobs, exact, strict=True)) / len(exact) < CLOSE
        for changes in ({"temperature": 0.7}, {"guide": 'start: "a"'}):
            with pytest.raises(EngineError, match="processed_logprobs"):
                await collect(engine, request(token_ids=prompt, **changes))
        await http.post(f"{plain_server.url}/update_weight_version", json={"new_version": "0"})


async def test_a_client_that_goes_away_ends_the_generation_in_the_server(server: Vllm) -> None:
    before = server.metric("vllm:generation_tokens_total")
    async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
        engine = TokensEngine(http, lambda: [ModelEndpoint("policy", server.url, protocol="vllm")])
        asked = request(token_ids=list(range(10, 60)), max_tokens=450, stop_token_ids=[])
        async with aclosing(engine.generate(asked)) as stream:
            await anext(stream)
    while server.metric("vllm:num_requests_running"):  # noqa: ASYNC110 (another process)
        await asyncio.sleep(0.05)
    assert 0 < server.metric("vllm:generation_tokens_total") - before < 400


async def test_a_stream_outlives_the_server_that_it_began_at(
    server: Vllm, plain_server: Vllm, scorer: Scorer, tmp_path: Path
) -> None:
    endpoints = [ModelEndpoint("policy", one.url) for one in (server, plain_server)]
    rollout = next(id for id in map(str, range(99)) if choose_endpoint(endpoints, id).endpoint == plain_server.url)
    async with serving(tmp_path, **sections(server, plain_server)) as served:
        headers = await served.start(rollout)
        body = {"messages": ASK, "max_tokens": 120, "stream": True}
        events = ""
        async with served.anonymous.stream("POST", path(rollout), json=body, headers=headers, timeout=300) as answer:
            async for piece in answer.aiter_text():
                events += piece
                if events.count('"content"') > 12 and plain_server.process.poll() is None:
                    plain_server.kill()
        streamed = text_of(events)
        [call] = await recorded(served, 1, rollout)
    assert plain_server.process.poll() is not None
    model = load_text_model(str(MODEL), name="policy")
    assert model.decode(call.sampled).removesuffix("<|im_end|>") == streamed
    assert call.finish_reason in ("stop", "length")
    assert len(call.sampled) > 12
    assert call.versions == [(0, len(call.sampled))]
    assert scorer.distance(call, call.prompt_delta) < CLOSE


class SameWeights:
    """A policy whose versions all have the weights that the server began with."""

    def save(self, folder: Path) -> None:
        shutil.copytree(MODEL, folder)


@pytest.mark.parametrize("in_flight", ["freeze", "drain"])
async def test_a_reply_goes_on_with_new_weights_or_is_finished_before(
    server: Vllm, tmp_path: Path, in_flight: Literal["freeze", "drain"]
) -> None:
    policy, computer = cast(Any, SameWeights()), ThreadPoolExecutor(1)
    engine = VllmServers(policy, [server.url], tmp_path / "weights", computer, in_flight=in_flight)
    student = Student(policy, cast(Any, None), engine, "policy")
    async with serving(tmp_path, **sections(server)) as served, Client(served.url, KEY) as client:
        await student.start(client)
        await student.serve()
        headers = await served.start()
        body = {"messages": ASK, "max_tokens": 250, "stream": True}
        publishing: asyncio.Future[None] | None = None
        events = ""
        async with served.anonymous.stream("POST", path(), json=body, headers=headers, timeout=300) as answer:
            async for piece in answer.aiter_text():
                events += piece
                if publishing is None and events.count('"content"') > 5:
                    student.version = 1
                    publishing = asyncio.ensure_future(student.publish())
        assert text_of(events)
        assert publishing is not None
        await publishing
        await student.stop()
        [call] = await recorded(served, 1)
    versions = [version for version, _ in call.versions]
    assert versions == ([0, 1] if in_flight == "freeze" else [0])
    assert sum(count for _, count in call.versions) == len(call.sampled)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version-000001"]


AGENT = '''\
"""Asks the model once and keeps what it said."""
import json, os, urllib.request

task = json.load(open(os.environ["LONGREIN_TASK"]))
body = {"model": "policy", "max_tokens": 12, "messages": [{"role": "user", "content": task["ask"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps(body).encode(),
    headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
)
with urllib.request.urlopen(request) as answer:
    open("answer.txt", "w").write(json.load(answer)["choices"][0]["message"]["content"] or "")
'''

GRADER = '''\
"""Short words are good."""


def grade(task, transcript, workspace, exit_status):
    words = (workspace / "answer.txt").read_text().split()
    return sum(len(word) < 4 for word in words) / (len(words) or 1)
'''


def test_a_training_step_through_vllm(server: Vllm, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "short_grader.py").write_text(GRADER)
    tasks = [{"ask": f"Say something about the number {n}."} for n in range(6)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (tmp_path / "run.toml").write_text(
        f"""\
[run]
dir = "{tmp_path}/runs"
name = "vllm"
[model]
path = "{MODEL}"
context = {CONTEXT}
device = "cpu"
[engine]
kind = "vllm"
urls = ["{server.url}"]
[gateway]
val_temperature = 1.0
[agent]
command = ["python", "agent.py"]
max_concurrent = 8
[task]
train = "tasks.jsonl"
held_out = "tasks.jsonl"
[reward]
function = "short_grader:grade"
[algorithm]
group_size = 4
groups_per_step = 2
[trainer]
steps = 1
learning_rate = 1e-4
[eval]
before = false
tasks = 4
[tracking]
progress = "lines"
"""
    )
    command = [sys.executable, "-m", "longrein.cli", "train", str(tmp_path / "run.toml")]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    assert httpx.get(f"{server.url}/weight_info", trust_env=False).json() == {"weight_version": "1"}
    folder = tmp_path / "runs" / "vllm"
    assert [path.name for path in (folder / "weights").iterdir()] == ["version-000001"]
    store = Store.open(f"sqlite:///{folder / 'store.sqlite'}", read_only=True)
    calls = [call for rollout in store.rollouts() for call in store.calls(rollout.rollout_id, "0")]
    store.close()
    learned = [call for call in calls if call.mode == "train" and call.rollout_id.startswith("s00001")]
    evaluated = [call for call in calls if "eval" in call.rollout_id]
    assert (len(learned), len(evaluated)) == (8, 4)
    assert {version for call in learned for version, _ in call.versions} == {0}
    assert {version for call in evaluated for version, _ in call.versions} == {1}
    before, after = Scorer(MODEL), Scorer(folder / "checkpoints" / "step-000001")
    for group, right, wrong in ((learned, before, after), (evaluated, after, before)):
        near = sum(right.distance(call, call.prompt_delta) for call in group) / len(group)
        far = sum(wrong.distance(call, call.prompt_delta) for call in group) / len(group)
        assert near < CLOSE
        assert near < far / 2
