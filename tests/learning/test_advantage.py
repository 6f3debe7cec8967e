import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.learning.advantage import dr_grpo, group_advantages, grpo, reinforce, rloo, rollout_advantages

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
