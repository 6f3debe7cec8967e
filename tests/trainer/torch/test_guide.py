"""Guided samples of a random model: they keep their form, and are recorded under what they were sampled from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from longrein import config
from longrein.gateway.guides import Form, Schema, Tool, arguments_schema, hermes_guide
from longrein.gateway.parsing import HermesParser, ParserOptions, message_of
from longrein.trainer.torch.guide import GuideError, Guides, unpacked
from longrein.trainer.torch.policy import Policy, load_policy
from longrein.trainer.torch.sampler import Sample, Sampler, Sampling, sample
from longrein.trainer.torch.server import EngineServer
from random_model import make_random_model
from schemas import object_schemas, schemas

NAMES = ["bash", "look up"]
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Model:
    """The policy, its tokenizer, and its guides."""

    def __init__(self, folder: Path) -> None:
        self.policy: Policy = load_policy(config.Model(path=str(folder), device="cpu"), seed=0)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.end = self.tokenizer.encode("<|end|>").ids[0]
        self.guides = Guides(folder, self.policy.vocab_size)

    def prompt(self, text: str) -> np.ndarray:
        return np.asarray(self.tokenizer.encode(text).ids, np.int32)

    def asked(self, text: str, guide: str | None, **sampling: Any) -> Sample:
        stops = frozenset([self.end, 0])
        begun = None if guide is None else self.guides.begin(guide, stops)
        return Sample(self.prompt(text), Sampling(1500, stop_token_ids=stops, **sampling), begun)

    def run(self, *samples: Sample) -> None:
        sampler = Sampler(self.policy.model, max_batch=8, cache_tokens=4096)
        for one in samples:
            sampler.add(one)
        while sampler.running or sampler.waiting:
            sampler.step()

    def said(self, one: Sample) -> str:
        assert (one.finish_reason, one.failure) == ("stop", None)
        return self.tokenizer.decode(one.sampled[:-1], skip_special_tokens=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_random_model(tmp_path_factory.mktemp("guided") / "model"))


def content_guide(schema: dict[str, Any]) -> str:
    return hermes_guide(Form("f", "f", content=Schema(schema, True, "f")), "none", ())


CITY = content_guide(
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "warm": {"type": "boolean"}},
        "required": ["city", "warm"],
        "additionalProperties": False,
    }
)


@SLOW
@given(schema=schemas(), seed=st.integers(0, 2**32), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_content_fits_its_schema(model: Model, schema: dict[str, Any], seed: int, temperature: float) -> None:
    one = model.asked("say", content_guide(schema), seed=seed, temperature=temperature)
    model.run(one)
    jsonschema.validate(json.loads(model.said(one)), schema)


@SLOW
@given(parameters=st.lists(object_schemas(), min_size=1, max_size=2), seed=st.integers(0, 2**32), one=st.booleans())
def test_calls_are_read_and_their_arguments_fit(
    model: Model, parameters: list[dict[str, Any]], seed: int, one: bool
) -> None:
    tools = [Tool(name, arguments_schema(p, True, "f")) for name, p in zip(NAMES, parameters, strict=False)]
    form = Form("tool_choice", "required", 1, 1 if one else None, tuple(tools))
    asked = model.asked("say", hermes_guide(form, "none", ()), seed=seed)
    model.run(asked)
    parser = HermesParser(ParserOptions("", (), [{}], str))
    said = message_of([*parser.push([], model.said(asked)), *parser.finish()])
    assert said.content.strip() == ""
    assert 1 <= len(said.tool_calls) <= (1 if one else 1000)
    for call in said.tool_calls:
        schema = dict(zip(NAMES, parameters, strict=False))[call.name]
        jsonschema.validate(json.loads(call.arguments), schema)


def masked_logprobs(model: Model, one: Sample, guide: str, temperature: float) -> list[float]:
    """Log-probabilities of a sample's tokens by plain passes over the text and llguidance's own masks."""
    text = (model.guides.folder / "tokenizer.json").read_text()
    matcher = LLMatcher(LLTokenizer(text, n_vocab=model.policy.vocab_size, eos_token=model.end), guide)
    with torch.no_grad():
        logits = model.policy.model(torch.from_numpy(one.all_ids()[None].astype(np.int64))).logits[0].double()
    found = []
    for i, token in enumerate(one.sampled):
        row = logits[len(one.ids) - 1 + i] / temperature
        bias = torch.tensor(list(matcher.compute_logit_bias())) > 0
        bias[[model.end, 0]] = matcher.is_accepting()
        found.append(float(row.masked_fill(~bias, float("-inf")).log_softmax(-1)[token]))
        if token not in one.sampling.stop_token_ids:
            assert matcher.consume_token(token)
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_masked_distribution(model: Model, temperature: float) -> None:
    several = [model.asked("say", CITY, seed=seed, temperature=temperature) for seed in range(6)]
    model.run(*several)
    for one in several:
        assert one.logprobs == pytest.approx(masked_logprobs(model, one, CITY, temperature), abs=1e-4)
    assert len({tuple(one.sampled) for one in several}) > 1
    assert any(p < -1 for one in several for p in one.logprobs)


def test_a_guide_changes_nothing_for_those_beside_it(model: Model) -> None:
    alone = Sample(model.prompt("tell me"), Sampling(40, seed=5, top_logprobs=2))
    model.run(alone)
    beside = Sample(model.prompt("tell me"), Sampling(40, seed=5, top_logprobs=2))
    guided = model.asked("tell me", CITY, seed=5)
    model.run(model.asked("say", CITY, seed=1), beside, guided)
    assert beside.sampled == alone.sampled
    assert beside.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert guided.sampled != alone.sampled
    assert min(alone.logprobs) < -1


def test_the_most_probable_token_is_the_most_probable_of_those_allowed(model: Model) -> None:
    one = model.asked("say", CITY, temperature=0.0, top_logprobs=3)
    model.run(one)
    assert set(json.loads(model.said(one))) == {"city", "warm"}
    assert one.logprobs == [0.0] * len(one.sampled)
    assert one.top_logprobs == [[(token, 0.0)] for token in one.sampled]


def test_top_logprobs_are_the_distribution_sampled_from() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0]] * 4)
    options = [
        Sampling(1, top_logprobs=3),
        Sampling(1),
        Sampling(1, top_logprobs=9, temperature=0.5),
        Sampling(1, top_logprobs=3, top_k=2),
    ]
    bits = np.asarray([0b01111], np.int32)
    tokens, logprobs, likely = sample(logits, options, [0.4] * 4, {0: bits, 3: bits})
    for row, kept, width in ((0, [0, 1, 2, 3], 3), (2, [0, 1, 2, 3, 4], 5), (3, [0, 1], 2)):
        expected = (logits[row, kept] / options[row].temperature).log_softmax(-1)
        values, places = expected.topk(width)
        assert [id for id, _ in likely[row]] == [kept[i] for i in places.tolist()]
        assert [p for _, p in likely[row]] == pytest.approx(values.tolist(), abs=1e-6)
        assert dict(likely[row])[tokens[row]] == logprobs[row]
    assert likely[1] == []


@given(st.sets(st.integers(0, 99)))
def test_bits_are_unpacked_as_llguidance_packs_them(ids: set[int]) -> None:
    words = np.zeros(4, np.uint32)
    for id in ids:
        words[id // 32] |= np.uint32(1 << (id % 32))
    row = unpacked(torch.from_numpy(words.view(np.int32)[None].copy()), 100)[0]
    assert set(row.nonzero()[:, 0].tolist()) == ids
    assert np.array_equal(Guides(Path(), 100)._bits(frozenset(ids)), words.view(np.int32))


def test_guides_that_cannot_be_followed_say_why(model: Model, model_folder: Any, monkeypatch: Any) -> None:
    stops = frozenset([model.end])
    with pytest.raises(GuideError, match="nowhere"):
        model.guides.begin("start: nowhere", stops)
    with pytest.raises(GuideError, match="stop_token_ids"):
        model.guides.begin(CITY, frozenset())
    words = Guides(model_folder("llama"), 97)
    with pytest.raises(GuideError, match="cannot use the tokenizer"):
        words.begin(CITY, stops)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GuideError, match=r"pip install 'longrein\[guided\]'"):
        model.guides.begin(CITY, stops)


class BrokenMatcher:
    """Fakes the one thing that a real one does only for huge grammars: to give up in the middle of a reply."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher, self._left = matcher, 3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def consume_token(self, token: int) -> bool:
        self._left -= 1
        return self._left > 0 and self._matcher.consume_token(token)

    def get_error(self) -> str:
        return "too complex"


def test_a_guide_that_gives_up_ends_its_own_sample_alone(model: Model) -> None:
    one, other = model.asked("say", CITY, seed=1), model.asked("say", CITY, seed=2)
    assert one.guide is not None
    broken: Any = BrokenMatcher(one.guide.matcher)
    one.guide.matcher = broken
    model.run(one, other)
    assert (one.finish_reason, len(one.sampled)) == ("abort", 3)
    assert one.failure is not None
    assert "too complex" in one.failure
    json.loads(model.said(other))


async def test_over_http(model: Model) -> None:
    server = EngineServer(model.policy, config.Engine.model_validate({"max_batch": 4, "threads": 1}))
    try:
        async with httpx.AsyncClient(base_url=await server.start(), timeout=60) as http:

            async def ask(id: str = "a", **more: Any) -> httpx.Response:
                sampling = {"max_tokens": 900, "stop_token_ids": [model.end], "seed": 4, "guide": CITY, **more}
                prompt = model.prompt("say").tolist()
                body = {"request_id": id, "token_ids": prompt, "sampling_params": sampling}
                return await http.post("/inference/v1/generate", json=body)

            answer = (await ask(top_logprobs=2)).json()
            ids, likely = answer["token_ids"], answer["top_logprobs"]
            assert set(json.loads(model.tokenizer.decode(ids[:-1]))) == {"city", "warm"}
            assert len(likely) == len(ids) == len(answer["logprobs"])
            assert all(1 <= len(row) <= 2 and row == sorted(row, key=lambda pair: -pair[1]) for row in likely)
            assert (await ask()).json()["top_logprobs"] is None
            refusals: list[tuple[dict[str, Any], str]] = [
                ({"guide": "start: nowhere"}, "guide: "),
                ({"stop_token_ids": []}, "guide: a guided sample needs stop_token_ids"),
                ({"top_logprobs": -1}, "top_logprobs"),
            ]
            for more, words in refusals:
                refused = await ask(**more)
                assert refused.status_code == 400
                assert words in refused.json()["error"]["message"]
    finally:
        await server.stop()
