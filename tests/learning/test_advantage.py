import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.learning.advantage import (
    dr_grpo,
    gae,
    group_advantages,
    grpo,
    process_advantages,
    reinforce,
    returns,
    rloo,
    rollout_advantages,
    whiten,
)

rewards_of_a_group = st.lists(st.floats(-100, 100), min_size=2, max_size=16).map(np.array)


def test_grpo_divides_by_the_sample_standard_deviation():
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    assert grpo(rewards) == pytest.approx(np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6), abs=1e-12)


def test_the_other_methods():
    rewards = np.array([1.0, 0.0, 0.5])
    assert dr_grpo(rewards).tolist() == [0.5, -0.5, 0.0]
    assert rloo(rewards) == pytest.approx([1 - 0.25, 0 - 0.75, 0.5 - 0.5])
    assert reinforce(rewards).tolist() == [1.0, 0.0, 0.5]


@given(rewards_of_a_group)
def test_baselines_leave_no_mean(rewards):
    for method in (grpo, dr_grpo, rloo):
        assert method(rewards).mean() == pytest.approx(0, abs=1e-9)


@given(rewards_of_a_group)
def test_rloo_is_the_reward_less_the_mean_of_the_others(rewards):
    expected = [rewards[i] - np.delete(rewards, i).mean() for i in range(len(rewards))]
    assert rloo(rewards) == pytest.approx(expected, abs=1e-9)


def test_a_group_of_one_has_no_one_to_be_compared_with():
    one = np.array([3.0])
    assert [method(one).tolist() for method in (grpo, dr_grpo, rloo, reinforce)] == [[0], [0], [3], [3]]


def test_groups_are_compared_within_themselves_and_equal_ones_are_reported():
    rewards = {"a1": 1.0, "b1": 5.0, "a2": 0.0, "b2": 5.0}
    groups = {"a1": "a", "a2": "a", "b1": "b", "b2": "b"}
    result = group_advantages(rewards, groups, "dr_grpo")
    assert result.values == {"a1": 0.5, "a2": -0.5, "b1": 0.0, "b2": 0.0}
    assert result.zero_variance == ("b",)
    assert set(group_advantages(rewards, groups, "grpo").values.values()) == {0.0, *grpo(np.array([1.0, 0.0]))}


def test_the_reports_example_baseline_is_over_rollouts_and_not_over_samples():
    # Reward 1 with three samples and reward 0 with one: the baseline is 1/2, not 3/4.
    result = group_advantages({"r1": 1.0, "r2": 0.0}, {"r1": "g", "r2": "g"}, "dr_grpo")
    assert result.values == {"r1": 0.5, "r2": -0.5}


@given(st.floats(-10, 10), st.integers(2, 16))
def test_equal_rewards_have_exactly_no_advantage(reward, count):
    for method in ("grpo", "dr_grpo", "rloo"):
        assert rollout_advantages([reward] * count, method).tolist() == [0.0] * count


def test_a_reward_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="reward nan is not a finite number"):
        group_advantages({"a": 1.0, "b": float("nan")}, {"a": "g", "b": "g"}, "grpo")


def test_a_method_of_ones_own_is_held_to_its_shape():
    groups = {"a": "g", "b": "g"}
    assert group_advantages({"a": 1.0, "b": 3.0}, groups, lambda r: r - r.min()).values == {"a": 0.0, "b": 2.0}
    for wrong in (lambda r: r[:1], lambda r: r * np.nan):
        with pytest.raises(ValueError, match=r"for 2 rewards, expected as many finite advantages"):
            group_advantages({"a": 1.0, "b": 3.0}, groups, wrong)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=10), st.floats(0.1, 1))
def test_returns_are_discounted_sums(rewards, discount):
    expected = [sum(r * discount**k for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    assert returns(np.array(rewards), discount) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=10), st.floats(0.1, 1))
def test_gae_between_its_two_ends(pairs, discount):
    rewards, values = (np.array(column) for column in zip(*pairs, strict=True))
    monte_carlo, gains = gae(rewards, values, discount, 1.0)
    assert monte_carlo == pytest.approx(returns(rewards, discount) - values, abs=1e-9)
    assert gains == pytest.approx(returns(rewards, discount), abs=1e-9)
    one_step, _ = gae(rewards, values, discount, 0.0)
    assert one_step == pytest.approx(rewards + discount * np.append(values[1:], 0) - values, abs=1e-9)


@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(1, 9)), min_size=2, max_size=12))
def test_whitened_values_have_no_mean_and_one_vote_a_rollout(pairs):
    values, lengths = zip(*pairs, strict=True)
    votes = np.repeat([1 / n for n in lengths], lengths)
    found = whiten(np.repeat(values, lengths), votes, len(values))
    if np.ptp(values) < 1e-3:
        return
    plain = whiten(np.array(values))
    assert found == pytest.approx(np.repeat(plain, lengths), rel=1e-6, abs=1e-6)
    assert plain.mean() == pytest.approx(0, abs=1e-6)
    assert plain.std(ddof=1) == pytest.approx(1, rel=1e-2)


def test_equal_values_and_a_single_one_whiten_to_nothing():
    assert whiten(np.array([0.1] * 3)).tolist() == [0.0] * 3
    assert whiten(np.array([7.0])).tolist() == [0.0]
    assert whiten(np.array([])).tolist() == []


def test_process_rewards_go_to_their_call_and_discounted_to_the_calls_before():
    rewards = [{0: 1.0, 2: 4.0}, {1: 2.0}]
    found = process_advantages(rewards, [[0, 1, 2], [0, 1]], "reinforce", 0.5)
    assert found == [{0: 1.0 + 0.25 * 4, 1: 2.0, 2: 4.0}, {0: 1.0, 1: 2.0}]
    mean = 7 / 3
    centred = process_advantages(rewards, [[0, 1, 2], [0, 1]], "dr_grpo", 1.0)
    assert centred[0] == pytest.approx({0: 5 - 2 * mean, 1: 4 - mean, 2: 4 - mean})
    assert centred[1] == pytest.approx({0: 2 - mean, 1: 2 - mean})


def test_a_reward_of_an_untrained_call_is_credited_to_the_trained_ones_before_it():
    assert process_advantages([{1: 4.0}], [[0, 2]], "reinforce", 0.5) == [{0: 2.0, 2: 0.0}]
    assert process_advantages([{}], [[0, 2]], "grpo", 0.5) == [{0: 0.0, 2: 0.0}]
