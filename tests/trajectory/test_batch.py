import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_calls import make_call, random_calls

from longrein.records import Outcome
from longrein.trajectory.batch import FinishedRollout, Ledger, make_batch, make_demonstrations


def finished(name, calls, *, group="g", is_train=True, reward: float | None = 1.0, outcome=Outcome.succeeded):
    return FinishedRollout(name, group, is_train, reward, calls, outcome)


def trained_tokens(batch):
    """(rollout, context before it, token) of every trained position, with its log-probability and version."""
    for row in batch.rows:
        for position in np.flatnonzero(row.trained):
            key = (row.rollout_id, tuple(row.tokens[:position].tolist()), int(row.tokens[position]))
            yield key, float(row.logprobs[position]), int(row.versions[position])


@given(seed=st.integers(0, 2**32 - 1), counts=st.lists(st.integers(0, 15), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_every_sampled_token_is_trained_once_in_its_own_context_or_counted(seed, counts):
    rng = np.random.default_rng(seed)
    made = [random_calls(rng, count) for count in counts]
    rollouts = [
        finished(
            f"r{i}",
            calls,
            is_train=bool(rng.random() < 0.9),
            reward=None if rng.random() < 0.1 else float(rng.random()),
            outcome=Outcome.infrastructure_failed if rng.random() < 0.1 else Outcome.succeeded,
        )
        for i, (calls, _) in enumerate(made)
    ]
    advantages = {rollout.rollout_id: float(rng.normal()) for rollout in rollouts if rng.random() < 0.9}
    batch = make_batch(rollouts, advantages)

    expected, tokens_of = [], {}
    for rollout, (calls, prompts) in zip(rollouts, made, strict=True):
        usable = rollout.is_train and rollout.reward is not None and rollout.outcome is Outcome.succeeded
        for call in calls:
            if not usable or rollout.rollout_id not in advantages or call.status != "ok" or call.kind != "main":
                continue
            if call.logprobs is None:
                continue
            context = prompts[call.number]
            for place, token in enumerate(call.sampled):
                key = (rollout.rollout_id, tuple(context + call.sampled[:place]), token)
                expected.append((key, float(np.float32(call.logprobs[place])), call.number))
                tokens_of[rollout.rollout_id] = tokens_of.get(rollout.rollout_id, 0) + 1
    assert sorted(trained_tokens(batch)) == sorted(expected)
    assert batch.ledger.trained == len(expected)
    assert batch.ledger.sampled == sum(len(call.sampled) for calls, _ in made for call in calls)

    assert sum(row.weights.sum() for row in batch.rows) == pytest.approx(1.0 if expected else 0.0)
    for row in batch.rows:
        assert row.trained.any()
        assert row.weights[row.trained] == pytest.approx(1 / (len(tokens_of) * tokens_of[row.rollout_id]))
        assert np.all(row.advantages[row.trained] == np.float32(advantages[row.rollout_id]))
        for values, elsewhere in ((row.weights, 0), (row.advantages, 0), (row.logprobs, 0), (row.versions, -1)):
            assert np.all(values[~row.trained] == elsewhere)


def worked_example():
    """A, B and C of Eq. 16's example: samples of {50, 100}, {30, 30, 30} and {40} tokens."""

    def rollout(name, lengths):
        return finished(name, [make_call(i, [i + 1], [9] * length) for i, length in enumerate(lengths)])

    return [rollout("A", [50, 100]), rollout("B", [30, 30, 30]), rollout("C", [40])]


def test_weights_are_those_of_equation_16():
    batch = make_batch(worked_example(), {"A": 1.0, "B": 0.0, "C": -1.0})
    weights = {row.rollout_id: row.weights.max() for row in batch.rows}
    assert weights == pytest.approx({"A": 1 / 3 / 150, "B": 1 / 3 / 90, "C": 1 / 3 / 40})
    assert [(row.rollout_id, int(row.trained.sum())) for row in batch.rows] == [
        ("A", 50),
        ("A", 100),
        ("B", 30),
        ("B", 30),
        ("B", 30),
        ("C", 40),
    ]


def test_a_chain_is_one_row_with_two_trained_stretches():
    first = make_call(0, [1, 2], [3, 4])
    second = make_call(1, [1, 2, 3, 4, 5], [6], prefix=first)
    (row,) = make_batch([finished("r", [first, second])], {"r": 0.5}).rows
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.trained.tolist() == [False, False, True, True, False, True]
    assert row.versions.tolist() == [-1, -1, 0, 0, -1, 1]
    assert row.logprobs.tolist() == pytest.approx([0, 0, -1, -1.001, 0, -2])


def test_a_version_that_changes_within_a_call_is_kept_per_token():
    call = make_call(0, [1], [2, 3, 4], versions=[(4, 1), (5, 2)])
    assert make_batch([finished("r", [call])], {"r": 1.0}).rows[0].versions.tolist() == [-1, 4, 5, 5]


@pytest.mark.parametrize(
    ("fields", "call_fields", "reason"),
    [
        ({"is_train": False}, {}, "evaluation"),
        ({"outcome": Outcome.infrastructure_failed}, {}, "failed rollout"),
        ({"reward": None}, {}, "no reward"),
        ({}, {"status": "abandoned"}, "abandoned"),
        ({}, {"status": "error"}, "call error"),
        ({}, {"kind": "title"}, "side call"),
        ({}, {"logprobs": None}, "no log-probabilities"),
        ({}, {"logprobs": [0.0, float("nan")]}, "no log-probabilities"),
    ],
)
def test_what_is_not_trained_is_counted_with_its_reason(fields, call_fields, reason):
    batch = make_batch([finished("r", [make_call(0, [1], [2, 3], **call_fields)], **fields)], {"r": 1.0})
    assert batch.rows == []
    assert batch.ledger == Ledger(0, {reason: 2})
    assert batch.ledger.metrics() == {"tokens/sampled": 2, "tokens/trained": 0, f"tokens/untrained/{reason}": 2}


def test_a_rollout_without_an_advantage_is_a_dropped_group():
    batch = make_batch([finished("r", [make_call(0, [1], [2, 3])])], {})
    assert batch.ledger == Ledger(0, {"group dropped": 2})


def test_a_rollout_failed_by_its_agent_is_trained_as_it_was_graded():
    batch = make_batch([finished("r", [make_call(0, [1], [2])], outcome=Outcome.agent_failed, reward=0.0)], {"r": -1.0})
    assert batch.ledger == Ledger(1)


def test_demonstrations_need_no_log_probabilities_and_have_advantage_1():
    shown = finished("shown", [make_call(0, [1], [2, 3], logprobs=None, versions=[])])
    ungraded = finished("ungraded", [make_call(0, [1], [4], logprobs=None)], reward=None)
    batch = make_demonstrations([shown, ungraded])
    assert [row.rollout_id for row in batch.rows] == ["shown"]
    assert batch.rows[0].advantages.tolist() == [0, 1, 1]
    assert batch.rows[0].weights.sum() == pytest.approx(1)
    assert batch.ledger == Ledger(2, {"no reward": 1})


def test_records_that_contradict_themselves_name_the_rollout_and_the_call():
    with pytest.raises(ValueError, match="rollout r: call 0: versions name 3 tokens and 1 were sampled"):
        make_batch([finished("r", [make_call(0, [1], [2], versions=[(0, 3)])])], {"r": 1.0})
    with pytest.raises(ValueError, match="rollout r: call 0 has an empty prompt"):
        make_batch([finished("r", [make_call(0, [], [2])])], {"r": 1.0})


def test_ledgers_add_up():
    both = Ledger(2, {"abandoned": 1}) + Ledger(3, {"abandoned": 4, "evaluation": 5})
    assert both == Ledger(5, {"abandoned": 5, "evaluation": 5})
    assert both.sampled == 15
