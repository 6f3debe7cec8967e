import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_calls import make_call, random_calls

from longrein.trajectory.tree import TreeError, build_tree, common_prefix


def contexts(tree):
    return {number: tree.tokens(tree.path(node)).tolist() for number, node in tree.ends.items()}


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 25))
@settings(max_examples=200, deadline=None)
def test_every_context_is_the_prompt_and_the_sample_and_every_sampled_token_has_one_node(seed, count):
    calls, prompts = random_calls(np.random.default_rng(seed), count)
    tree = build_tree(calls)
    assert contexts(tree) == {call.number: prompts[call.number] + call.sampled for call in calls}
    held = {call.number: [0] * len(call.sampled) for call in calls}
    for index, node in enumerate(tree.nodes[1:], 1):
        assert node.start == tree.nodes[node.parent].end
        assert index in tree.nodes[node.parent].children[int(node.tokens[0])]
        if node.call is not None:
            for place, token in enumerate(node.tokens, node.offset):
                assert calls[node.call].sampled[place] == token
                held[node.call][place] += 1
    assert all(count == 1 for places in held.values() for count in places)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 25))
@settings(max_examples=100, deadline=None)
def test_context_that_two_calls_share_is_held_once(seed, count):
    calls, _ = random_calls(np.random.default_rng(seed), count)
    tree = build_tree(calls)
    for node in tree.nodes:
        for children in node.children.values():
            assert sum(tree.nodes[child].call is None for child in children) <= 1


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 25))
@settings(max_examples=100, deadline=None)
def test_leaves_are_the_contexts_that_no_other_runs_through(seed, count):
    calls, _ = random_calls(np.random.default_rng(seed), count)
    tree = build_tree(calls)
    wanted = [call.number for call in calls if call.sampled and call.status == "ok"]
    paths = {number: tree.path(tree.ends[number]) for number in wanted}
    leaves = [leaf.call for leaf in tree.leaves(wanted)]
    expected = [
        number
        for number in wanted
        if not any(other != number and paths[number][-1] in paths[other] for other in wanted)
    ]
    assert leaves == expected


def test_a_chain_is_one_leaf_and_takes_linear_space():
    calls, prompt = [], [1, 2, 3]
    for number in range(500):
        calls.append(make_call(number, prompt, [7, 8], prefix=calls[-1] if calls else None))
        prompt = [*prompt, 7, 8, 4, 5]
    tree = build_tree(calls)
    assert [leaf.call for leaf in tree.leaves()] == [499]
    assert sum(len(node.tokens) for node in tree.nodes) == sum(len(c.prompt_delta) + len(c.sampled) for c in calls)


def test_a_history_sent_anew_is_merged_with_the_one_recorded():
    first = make_call(0, [1, 2], [3, 4])
    second = make_call(1, [1, 2, 3, 4, 5], [6])
    tree = build_tree([first, second])
    assert [leaf.call for leaf in tree.leaves()] == [1]
    assert sum(len(node.tokens) for node in tree.nodes) == 6


def test_siblings_share_their_prompt_and_keep_their_samples_apart():
    first = make_call(0, [1, 2], [3, 4])
    second = make_call(1, [1, 2], [3, 4])
    tree = build_tree([first, second])
    assert [leaf.call for leaf in tree.leaves()] == [0, 1]
    assert sorted((node.call, len(node.tokens)) for node in tree.nodes if node.call is not None) == [(0, 2), (1, 2)]
    assert sum(len(node.tokens) for node in tree.nodes) == 6


def test_an_undeclared_continuation_follows_the_sibling_that_shares_most():
    siblings = [make_call(0, [1], [2, 3, 4]), make_call(1, [1], [2, 3, 5])]
    tree = build_tree([*siblings, make_call(2, [1, 2, 3, 5, 6], [7])])
    assert [leaf.call for leaf in tree.leaves()] == [0, 2]


def test_a_stop_token_that_the_next_prompt_leaves_out_is_a_branch_of_its_own():
    first = make_call(0, [1, 2], [3, 9])
    second = make_call(1, [1, 2, 3, 5], [6], prefix=first, prefix_length=3)
    tree = build_tree([first, second])
    assert [tree.tokens(leaf.path).tolist() for leaf in tree.leaves()] == [[1, 2, 3, 9], [1, 2, 3, 5, 6]]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda first: make_call(1, [1, 2, 3, 4, 5], [6], prefix=first, prefix_length=5), "has 4 tokens"),
        (lambda first: make_call(0, [1], [6]), "call 0 is there twice"),
        (lambda first: make_call(1, [1, 2], [6], prefix=make_call(7, [1], [2])), "call 7, is not among"),
    ],
)
def test_pointers_that_cannot_be_followed_are_named(broken, message):
    first = make_call(0, [1, 2], [3, 4])
    with pytest.raises(TreeError, match=message):
        build_tree([first, broken(first)])


def test_a_prompt_length_that_does_not_add_up_is_named():
    call = make_call(0, [1, 2], [3])
    call.prompt_length = 7
    with pytest.raises(TreeError, match="call 0: prompt_length is 7"):
        build_tree([call])


@given(st.lists(st.integers(0, 1), max_size=150), st.lists(st.integers(0, 1), max_size=150), st.integers(0, 140))
def test_common_prefix(a, b, shared):
    b = a[:shared] + b
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == expected
