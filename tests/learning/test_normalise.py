from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.learning.normalise import token_weights

lengths_and_owners = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=20).filter(
    lambda rows: any(length for length, _ in rows)
)


def totals(lengths, owners, normaliser, constant=0):
    return token_weights(lengths, owners, normaliser, constant) * np.asarray(lengths)


@given(lengths_and_owners)
def test_every_rollout_every_sequence_or_every_token_is_one_vote(rows):
    lengths, owners = zip(*rows, strict=True)
    votes = {owner for length, owner in rows if length}
    by_rollout = totals(lengths, owners, "rollout")
    for owner in votes:
        own = sum(total for total, (_, who) in zip(by_rollout, rows, strict=True) if who == owner)
        assert own == pytest.approx(1 / len(votes))
    sequences = sum(length > 0 for length in lengths)
    assert totals(lengths, owners, "sequence") == pytest.approx([(n > 0) / sequences for n in lengths])
    assert totals(lengths, owners, "token") == pytest.approx([n / sum(lengths) for n in lengths])
    for normaliser in ("rollout", "sequence", "token"):
        assert totals(lengths, owners, normaliser).sum() == pytest.approx(1.0)


@given(lengths_and_owners, st.integers(1, 100))
def test_with_a_constant_length_a_rollout_weighs_as_much_as_it_is_long(rows, constant):
    lengths, owners = zip(*rows, strict=True)
    votes = len({owner for length, owner in rows if length})
    assert totals(lengths, owners, "constant", constant) == pytest.approx([n / (votes * constant) for n in lengths])


def test_worked_example():
    lengths, owners = [50, 100, 30, 30, 30, 40], [0, 0, 1, 1, 1, 2]
    assert token_weights(lengths, owners) == pytest.approx([1 / 450] * 2 + [1 / 270] * 3 + [1 / 120])
    assert token_weights(lengths, owners, "token") == pytest.approx([1 / 280] * 6)
    assert token_weights(lengths, owners, "sequence") == pytest.approx([1 / (6 * n) for n in lengths])
    assert token_weights(lengths, owners, "constant", 200) == pytest.approx([1 / 600] * 6)


def test_the_papers_equation_16_and_not_the_division_by_rows_of_its_published_loss():
    """Three rollouts, six rows: dividing by rows leaves weights that sum to a half, and rollouts unequal to no one."""
    lengths, owners = np.array([50, 100, 30, 30, 30, 40]), np.array([0, 0, 1, 1, 1, 2])
    of_rollout = np.bincount(owners, lengths)[owners]
    shipped = 1 / (len(lengths) * of_rollout)
    assert (shipped * lengths).sum() == pytest.approx(3 / 6)
    ours = token_weights(lengths.tolist(), owners.tolist())
    assert (ours * lengths).sum() == pytest.approx(1.0)
    assert ours == pytest.approx(shipped * 6 / 3)


def test_rows_without_a_trained_token_count_in_nothing():
    assert token_weights([0, 4, 0], [0, 1, 1]).tolist() == [0, 1 / 4, 0]
    assert token_weights([0, 4], [0, 1], "sequence").tolist() == [0, 1 / 4]
    assert token_weights([0, 0], [0, 1]).tolist() == [0, 0]
    assert token_weights([], []).tolist() == []


def test_a_constant_needs_a_length():
    with pytest.raises(ValueError, match="at least 1 token, not 0"):
        token_weights([3], [0], "constant")
