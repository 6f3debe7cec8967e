"""Evaluations: means, intervals, and the paired rise."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from fake_gateway import FakeClient, Play
from hypothesis import given, settings
from hypothesis import strategies as st

from longrein.client import Client
from longrein.records import Outcome, Rollout
from longrein.trainer.collect import Collector, RunFailed
from longrein.trainer.evaluate import Evaluation, evaluate, interval, load_all, paired_rise, save, wilson


def made(name: str, rewards: dict[str, list[float]], started_at: float = 0.0) -> Evaluation:
    found = interval(rewards, 0)
    return Evaluation(name, 0, 0, found.mean, found.low, found.high, rewards, 0, started_at, 1.0)


def test_wilsons_interval_has_its_known_values() -> None:
    low, high = wilson(8, 10)  # 0.4902 to 0.9433, as tabulated
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert wilson(0, 200)[0] == pytest.approx(0.0, abs=1e-12)
    assert 0.018 < wilson(0, 200)[1] < 0.019
    assert wilson(200, 200)[1] == pytest.approx(1.0)


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 99).map(str), st.lists(st.floats(-2, 2), min_size=2, max_size=3), min_size=1, max_size=12
    )
)
def test_a_mean_is_over_tasks_and_lies_in_its_interval(rewards: dict[str, list[float]]) -> None:
    found = interval(rewards, seed=1)
    means = [sum(r) / len(r) for r in rewards.values()]
    assert found.mean == pytest.approx(sum(means) / len(means), abs=1e-12)
    assert min(means) - 1e-9 <= found.low <= found.mean + 1e-9
    assert found.mean - 1e-9 <= found.high <= max(means) + 1e-9
    assert interval(rewards, seed=1) == found


def test_zero_and_one_with_one_rollout_a_task_take_wilsons_interval() -> None:
    rewards = {str(n): [float(n < 8)] for n in range(10)}
    found = interval(rewards, 0)
    assert (found.low, found.high) == wilson(8, 10)
    assert interval({k: v * 2 for k, v in rewards.items()}, 0).low != found.low


def test_the_paired_rise_is_over_tasks_that_both_graded() -> None:
    before = made("before", {str(n): [0.0] for n in range(20)})
    after = made("after", {str(n): [float(n % 2)] for n in range(10, 40)})
    rise = paired_rise(before, after, 0)
    assert rise is not None
    assert rise.mean == 0.5
    assert 0.1 < rise.low < 0.5 < rise.high < 0.9
    assert paired_rise(before, made("other", {"x": [1.0]}), 0) is None


def test_a_pair_removes_what_tasks_differ_in() -> None:
    """Tasks of very different difficulty, each a little better afterwards: unpaired intervals overlap, the rise is sure."""
    before = made("before", {str(n): [n / 20] for n in range(20)})
    after = made("after", {str(n): [n / 20 + 0.05] for n in range(20)})
    rise = paired_rise(before, after, 0)
    assert before.high > after.low
    assert rise is not None
    assert rise.low == pytest.approx(0.05)


async def test_an_evaluation_counts_graded_rollouts_and_is_written(tmp_path: Path) -> None:
    def play(rollout: Rollout) -> Play:
        if rollout.input["n"] == 2:
            return Play(outcome=Outcome.infrastructure_failed)
        return Play(reward=float(rollout.input["n"]))

    client = FakeClient(play)
    async with Collector(cast(Client, client)) as collector:
        found, done = await evaluate(
            collector,
            [{"n": n} for n in range(3)],
            name="before",
            step=0,
            version=7,
            seed=0,
            run_folder=tmp_path,
            rollouts_per_task=2,
        )
    assert (found.mean, found.failed, found.version, len(done)) == (0.5, 2, 7, 6)
    assert found.rewards == {"0": [0.0, 0.0], "1": [1.0, 1.0]}
    assert not any(rollout.is_train for rollout in client.known.values())
    assert load_all(tmp_path) == [found]


async def test_an_evaluation_without_one_grade_ends_the_run(tmp_path: Path) -> None:
    client = FakeClient(lambda rollout: Play(reward=None, reason="the grader raised KeyError: 'x'"))
    async with Collector(cast(Client, client)) as collector:
        with pytest.raises(RunFailed, match=r"none of its 1 rollouts was graded.*KeyError"):
            await evaluate(collector, [{}], name="a", step=0, version=0, seed=0, run_folder=tmp_path)


def test_evaluations_come_back_in_the_order_they_were_made(tmp_path: Path) -> None:
    for at, name in enumerate(["untuned", "before", "after"]):
        save(made(name, {"0": [1.0]}, started_at=float(at)), tmp_path)
    assert [e.name for e in load_all(tmp_path)] == ["untuned", "before", "after"]
