from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrein.trajectory.packing import Bundle, pack, shared_prefixes
from longrein.trajectory.tree import common_prefix

row = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda ids: np.array(ids, np.int32))
rows = st.lists(row, min_size=0, max_size=12)


def saved(bundles):
    return sum((len(bundle.rows) - 1) * bundle.trunk for bundle in bundles)


def best_division(tokens):
    """The most tokens that any division of the sorted rows into intervals saves, by dynamic programming."""
    ordered = sorted(r.tolist() for r in tokens)
    common = [common_prefix(np.array(a), np.array(b)) for a, b in pairwise(ordered)]
    best = [0] * (len(ordered) + 1)
    for stop in range(1, len(ordered) + 1):
        values = [best[stop - 1]]
        for start in range(stop - 1):
            trunk = min(*common[start : stop - 1], min(len(r) for r in ordered[start:stop]) - 1)
            values.append(best[start] + (stop - start - 1) * trunk)
        best[stop] = max(values)
    return best[-1]


@given(rows)
@settings(max_examples=300, deadline=None)
def test_bundles_hold_every_row_once_behind_a_prefix_they_share(tokens):
    bundles = shared_prefixes(tokens)
    assert sorted(index for bundle in bundles for index in bundle.rows) == list(range(len(tokens)))
    for bundle in bundles:
        first = tokens[bundle.rows[0]][: bundle.trunk]
        for index in bundle.rows:
            assert len(tokens[index]) > bundle.trunk
            assert tokens[index][: bundle.trunk].tolist() == first.tolist()


@given(rows)
@settings(max_examples=300, deadline=None)
def test_the_division_saves_the_most_that_one_level_can(tokens):
    # Rows that are prefixes of others cost the choice a token each, since a row keeps one token out of its trunk.
    assert best_division(tokens) - len(tokens) <= saved(shared_prefixes(tokens)) <= best_division(tokens)


def test_groups_are_chosen_over_the_system_prompt_that_all_of_them_share():
    system = [1] * 20
    prompts = [system + [2] * 30, system + [3] * 30]
    tokens = [np.array(prompts[i % 2] + [4 + i] * 5, np.int32) for i in range(8)]
    assert sorted(shared_prefixes(tokens), key=lambda b: b.rows) == [Bundle(50, (0, 2, 4, 6)), Bundle(50, (1, 3, 5, 7))]


@given(rows, st.integers(1, 60), st.sampled_from([None, 1, 3]))
@settings(max_examples=300, deadline=None)
def test_micro_batches_hold_every_row_once_within_the_budget(tokens, budget, min_trunk):
    lengths = [len(r) for r in tokens]
    packed = pack(tokens, budget, min_trunk)
    assert sorted(index for micro_batch in packed for index in micro_batch.rows) == list(range(len(tokens)))
    for micro_batch in packed:
        assert micro_batch.computed_tokens(lengths) <= budget or len(micro_batch.rows) == 1
        assert all(bundle.trunk == 0 or bundle.trunk >= (min_trunk or 0) for bundle in micro_batch.bundles)
        assert len({bundle.trunk > 0 for bundle in micro_batch.bundles}) == 1
    plain = sum(micro_batch.computed_tokens(lengths) for micro_batch in pack(tokens, budget, None))
    assert sum(micro_batch.computed_tokens(lengths) for micro_batch in packed) <= plain


def test_a_shared_prompt_is_paid_once():
    tokens = [np.array([1] * 100 + [2 + i] * 60, np.int32) for i in range(8)]
    (micro_batch,) = pack(tokens, budget=4096)
    assert micro_batch.bundles == (Bundle(100, tuple(range(8))),)
    assert micro_batch.computed_tokens([160] * 8) == 100 + 8 * 60


@pytest.mark.parametrize("budget", [300, 500])
def test_a_bundle_too_large_for_the_budget_is_cut(budget):
    tokens = [np.array([1] * 100 + [2 + i] * 60, np.int32) for i in range(8)]
    packed = pack(tokens, budget)
    assert len(packed) == -(-8 // ((budget - 100) // 60))
    assert all(bundle.trunk == 100 for micro_batch in packed for bundle in micro_batch.bundles)
