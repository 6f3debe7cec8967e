"""The simulated engine: what a reply is and when it comes, by a clock that the test turns."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from longrein.config import ConfigError, Simulated, load
from longrein.gateway.engines import Chunk, Generate
from longrein.gateway.engines.simulated import SimulatedEngine
from longrein.gateway.loading import load_text_model
from longrein.gateway.tokens import TextModel
from longrein.trainer.loop import refuse_untrainable

from ..models import make_model_folder
from ..running import running_gateway


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(str(make_model_folder(tmp_path_factory.mktemp("model"))), name="policy")


class Clock:
    """Time passes only while somebody sleeps; the gateway is `late` by so much at each wake-up."""

    def __init__(self, late: float = 0.0):
        self.now, self.late = 100.0, late

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late


def ask(seed: int = 1, *, stream: bool = True, max_tokens: int = 10_000) -> Generate:
    return Generate(
        request_id="r", rollout_id="r", token_ids=[1], max_tokens=max_tokens, temperature=1.0, top_p=1.0, top_k=0,
        stop_token_ids=[], seed=seed, stream=stream,
    )  # fmt: skip


async def play(engine: SimulatedEngine, clock: Clock, request: Generate) -> list[tuple[float, Chunk]]:
    """Each chunk with the seconds after which it came."""
    start = clock.now
    return [(clock.now - start, chunk) async for chunk in engine.generate(request)]


def engine_of(model: TextModel, clock: Clock, **options: float) -> SimulatedEngine:
    return SimulatedEngine(Simulated.model_validate(options), model, clock=clock, sleep=clock.sleep)


async def test_tokens_come_at_their_times(model: TextModel) -> None:
    clock = Clock()
    engine = engine_of(model, clock, tokens_per_second=10, first_token_seconds=0.5, reply_tokens=20)
    came = await play(engine, clock, ask())
    assert [time for time, _ in came] == pytest.approx([0.5 + i / 10 for i in range(20)])
    assert [len(chunk.token_ids) for _, chunk in came] == [1] * 20
    assert [chunk.finish_reason for _, chunk in came] == [None] * 19 + ["stop"]
    ids = [id for _, chunk in came for id in chunk.token_ids]
    [(time, whole)] = await play(engine, clock, ask(stream=False))
    assert time == pytest.approx(0.5 + 19 / 10)
    assert (whole.token_ids, whole.finish_reason, whole.versions) == (ids, "stop", [(0, 20)])
    assert ids[-1] in model.stop_ids
    assert whole.logprobs == [pytest.approx(-math.log(len(engine.words)))] * 19 + [0.0]


async def test_a_late_wake_up_delays_no_later_token(model: TextModel) -> None:
    clock = Clock(late=0.25)
    engine = engine_of(model, clock, tokens_per_second=10, first_token_seconds=0.0, reply_tokens=20)
    came = await play(engine, clock, ask())
    assert sum(len(chunk.token_ids) for _, chunk in came) == 20
    assert came[-1][0] == pytest.approx(1.9, abs=0.26)
    assert max(len(chunk.token_ids) for _, chunk in came) > 1  # those that were due meanwhile come together


async def test_a_call_follows_from_its_seed(model: TextModel) -> None:
    options = {"reply_spread": 0.5, "first_token_spread": 0.5}
    clocks = Clock(), Clock()
    first, again = (engine_of(model, clock, **options) for clock in clocks)
    for seed in range(5):
        assert await play(first, clocks[0], ask(seed)) == await play(again, clocks[1], ask(seed))
    replies = [first.reply(seed) for seed in range(400)]
    assert len({tuple(ids) for ids, _ in replies}) == 400
    lengths, waits = [len(ids) for ids, _ in replies], [first for _, first in replies]
    assert statistics.median(lengths) == pytest.approx(200, rel=0.15)
    assert statistics.median(waits) == pytest.approx(0.2, rel=0.15)
    assert statistics.stdev(map(math.log, lengths)) == pytest.approx(0.5, rel=0.15)


async def test_a_limit_cuts_the_reply(model: TextModel) -> None:
    clock = Clock()
    engine = engine_of(model, clock)
    for stream in (True, False):
        came = await play(engine, clock, ask(max_tokens=7, stream=stream))
        assert [id for _, chunk in came for id in chunk.token_ids] == engine.reply(1)[0][:7]
        assert came[-1][1].finish_reason == "length"


def test_a_gateway_over_it(tmp_path: Path) -> None:
    options = ["engine.kind=simulated", "engine.script=", "engine.simulated.reply_tokens=12"]
    with running_gateway(tmp_path, [*options, "engine.simulated.tokens_per_second=1e6"]) as gateway:
        rollout, token = gateway.rollout()
        asked = {"messages": [{"role": "user", "content": "Say something."}], "logprobs": True}
        answer = gateway.chat(rollout, token, asked)
        assert answer.status_code == 200, answer.text
        [call] = gateway.calls(rollout)
        assert len(call.sampled) == 12
        assert call.reply["content"] == answer.json()["choices"][0]["message"]["content"]
        assert call.reply["content"].replace(" ", "").isalpha()
        refused = gateway.chat(rollout, token, {**asked, "top_logprobs": 2})
        assert refused.status_code == 400
        assert "top_logprobs: a simulated engine" in refused.text


def test_it_is_no_engine_to_train_with() -> None:
    with pytest.raises(ConfigError, match="'simulated' gives no tokens that this learner could train"):
        refuse_untrainable(load(None, ["engine.kind=simulated", "model.path=/m"]))
