"""From rewards to the advantage of every trained token: groups, calls, tokens; what is normalised over a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_gateway import call

from longrein.config import Algorithm, ConfigError
from longrein.trainer.credit import Credit, staleness
from longrein.trajectory.batch import FinishedRollout, Row, make_batch


def rollout(name: str, reward: float | None, *lengths: int, calls: dict[int, float] | None = None) -> FinishedRollout:
    """One conversation whose calls sample so many tokens each, appended to one another."""
    made, before = [], 2
    for number, length in enumerate(lengths):
        prefix: dict[str, Any] = (
            {"prefix": number - 1, "parent": number - 1, "prefix_length": before, "prompt_delta": [9, 9]}
            if number
            else {"prompt_delta": [1, 2]}
        )
        prompt = before + 2 if number else 2
        made.append(call(name, number, length, prompt_length=prompt, **prefix))
        before = prompt + length
    return FinishedRollout(name, name[0], True, reward, made, call_rewards=calls or {})


def assigned(
    options: dict[str, Any], rollouts: list[FinishedRollout], columns: dict[str, float] | None = None, folder: str = ""
) -> tuple[list[Row], dict[str, float]]:
    rows = make_batch(rollouts, {r.rollout_id: 0.0 for r in rollouts if r.reward is not None}).rows
    for row in rows:
        row.columns.update(
            {name: np.full(len(row.tokens), value, np.float32) for name, value in (columns or {}).items()}
        )
    metrics = Credit.of(Algorithm.model_validate(options), folder).assign(rollouts, rows)
    return rows, metrics


def advantages(rows: list[Row]) -> dict[str, list[float]]:
    return {row.rollout_id: row.advantages[row.trained].astype(float).round(6).tolist() for row in rows}


def test_an_outcome_is_the_same_for_all_of_a_rollouts_tokens_and_context_has_none() -> None:
    rows, metrics = assigned({"advantage": "dr_grpo"}, [rollout("a1", 1.0, 2, 3), rollout("a2", 0.0, 1)])
    assert advantages(rows) == {"a1": [0.5] * 5, "a2": [-0.5]}
    assert all(not row.advantages[~row.trained].any() for row in rows)
    assert metrics == {}


def test_group_statistics_come_before_anything_is_dropped() -> None:
    """A rollout without a trainable token is in no row, and still one of those that the others are compared with."""
    silent = FinishedRollout("a2", "a", True, 0.0, [])
    rows, _ = assigned({"advantage": "dr_grpo"}, [rollout("a1", 1.0, 2), silent])
    assert advantages(rows) == {"a1": [0.5, 0.5]}


def test_process_rewards_are_added_to_the_outcome_call_by_call() -> None:
    options = {"advantage": "reinforce", "process_weight": 0.5, "process_discount": 0.5}
    rows, _ = assigned(options, [rollout("a1", 1.0, 1, 2, calls={0: 2.0, 1: 4.0})])
    assert advantages(rows) == {"a1": [1 + 0.5 * (2 + 0.5 * 4), *[1 + 0.5 * 4] * 2]}
    without, _ = assigned({**options, "process_weight": 0.0}, [rollout("a1", 1.0, 1, 2, calls={0: 2.0, 1: 4.0})])
    assert advantages(without) == {"a1": [1.0] * 3}


def test_overlong_replies_cost_before_rollouts_are_compared() -> None:
    options = {"advantage": "dr_grpo", "overlong_tokens": 6, "overlong_buffer": 4, "overlong_penalty": 2.0}
    rows, metrics = assigned(options, [rollout("a1", 1.0, 4, 1), rollout("a2", 1.0, 2, 2)])
    assert advantages(rows) == {"a1": [-0.5] * 5, "a2": [0.5] * 4}
    assert metrics["reward/overlong"] == pytest.approx(-0.5)


def test_the_divergence_in_the_reward_is_a_rollouts_sum() -> None:
    options = {"advantage": "dr_grpo", "kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    rows, metrics = assigned(options, [rollout("a1", 1.0, 4), rollout("a2", 1.0, 2)], {"reference": -1.5})
    # Sampled at -0.5: each token costs 0.1 · 1.
    assert advantages(rows) == {"a1": [-0.1] * 4, "a2": [0.1] * 2}
    assert metrics["reward/kl"] == pytest.approx(-0.3)


def test_reinforce_plus_plus_has_no_groups_and_one_vote_a_rollout() -> None:
    rows, _ = assigned({"advantage": "reinforce++"}, [rollout("a1", 1.0, 9), rollout("b1", 0.0, 1)])
    assert advantages(rows) == {"a1": [pytest.approx(0.707107)] * 9, "b1": [pytest.approx(-0.707107)]}
    discounted, _ = assigned(
        {"advantage": "reinforce++", "discount": 0.5}, [rollout("a1", 1.0, 1, 1), rollout("b1", 0.0, 1)]
    )
    first, last = advantages(discounted)["a1"]
    assert first < last
    baseline, _ = assigned(
        {"advantage": "reinforce++_baseline"},
        [rollout("a1", 1.0, 5), rollout("a2", 0.0, 1), rollout("b1", 9.0, 1), rollout("b2", 9.0, 1)],
    )
    found = advantages(baseline)
    assert found["b1"] == found["b2"] == [0.0]
    assert found["a1"][0] == -found["a2"][0] > 0


def test_gae_goes_along_the_calls_and_gives_the_value_head_its_returns() -> None:
    options = {"advantage": "gae", "gae_lambda": 0.5}
    rows, _ = assigned(options, [rollout("a1", 1.0, 1, 2, calls={0: 0.5}), rollout("b1", 0.0, 1)], {"values": 0.25})
    # δ = 0.5, 0, 0.75 for the tokens of a1 (the process reward at the end of call 0), -0.25 for b1.
    plain = np.array([0.5 + 0.5 * 0.375, 0.375, 0.75, -0.25])
    returned = np.concatenate([row.columns["returns"][row.trained] for row in rows])
    assert returned == pytest.approx(plain + 0.25)
    votes = np.array([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    centred = plain - votes @ plain
    expected = centred / np.sqrt(2 * (votes @ centred**2) + 1e-8)
    assert np.concatenate([row.advantages[row.trained] for row in rows]) == pytest.approx(expected, rel=1e-5)


def test_tokens_of_a_rollout_with_branches_stand_in_the_order_of_their_calls() -> None:
    """Call 2 goes on where call 0 ended, call 1 began anew: the rows are (1) and (0, 2)."""
    calls = [
        call("a1", 0, 2),
        call("a1", 1, 1, prompt_delta=[7, 7]),
        call("a1", 2, 1, prefix=0, parent=0, prefix_length=4, prompt_delta=[9], prompt_length=5),
    ]
    one = FinishedRollout("a1", "a", True, 1.0, calls, call_rewards={})
    rows, _ = assigned({"advantage": "gae", "gae_lambda": 1.0, "discount": 0.5}, [one], {"values": 0.0})
    returned = {
        int(c): row.columns["returns"][i]
        for row in rows
        for i, c in enumerate(row.calls if row.calls is not None else [])
        if c >= 0
    }
    assert returned == {0: 0.25, 1: 0.5, 2: 1.0}


def test_a_method_is_named_by_import_path(tmp_path: Path) -> None:
    (tmp_path / "own_advantage.py").write_text("def largest(rewards):\n    return rewards - rewards.max()\n")
    rows, _ = assigned(
        {"advantage": "own_advantage:largest"}, [rollout("a1", 1.0, 1), rollout("a2", 0.0, 1)], folder=str(tmp_path)
    )
    assert advantages(rows) == {"a1": [0.0], "a2": [-1.0]}
    with pytest.raises(ConfigError, match=r"algorithm\.advantage: module own_advantage has no function 'smallest'"):
        Credit.of(Algorithm(advantage="own_advantage:smallest"), str(tmp_path))


def test_staleness_is_in_updates_and_of_tokens_whose_version_is_known() -> None:
    old = call("a1", 0, 3, versions=[(2, 1), (4, 2)])
    unknown = call("a2", 0, 3, versions=[])
    finished = [FinishedRollout(c.rollout_id, "a", True, 1.0, [c]) for c in (old, unknown)]
    rows = make_batch(finished, {"a1": 0.0, "a2": 0.0}).rows
    assert staleness(rows, 5) == {"staleness/mean": pytest.approx(5 / 3), "staleness/max": 3.0}
    assert staleness(rows[1:], 5) == {}
