"""What is exported equals the tree: every sampled token is in one mask once, with its own log-probability and version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_calls import make_call, random_calls

from longrein.records import Attempt, Outcome, Pruned, Rollout
from longrein.trajectory.batch import FinishedRollout, make_batch
from longrein.trajectory.export import rows, trajectories
from longrein.trajectory.kinds import unsupervised
from longrein.trajectory.tree import build_tree

KINDS = [("main",), ("main", "title"), ("title",)]


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 12), kinds=st.sampled_from(KINDS))
@settings(max_examples=150, deadline=None)
def test_masks_count_every_sampled_token_once(seed: int, count: int, kinds: tuple) -> None:
    calls, prompts = random_calls(np.random.default_rng(seed), count)
    by_number = {call.number: call for call in calls}
    found = trajectories(calls, kinds)
    held: dict[tuple[int, int], int] = {}
    for one in found:
        leaf = one.call
        if leaf.sampled:
            assert one.tokens.tolist() == [*prompts[leaf.number], *leaf.sampled]
        assert len(one.tokens) == len(one.mask) == len(one.logprobs) == len(one.versions)
        sampled = np.zeros(len(one.tokens), bool)
        offsets: dict[int, int] = {}
        for stretch in one.stretches:
            call, here = stretch.call, slice(stretch.start, stretch.start + stretch.length)
            sampled[here] = True
            offset = offsets.setdefault(call.number, 0)
            offsets[call.number] += stretch.length
            there = slice(offset, offset + stretch.length)
            assert one.tokens[here].tolist() == call.sampled[there]
            assert (one.mask[here] == stretch.in_loss).all()
            if call.logprobs is None:
                assert np.isnan(one.logprobs[here]).all()
            else:
                assert one.logprobs[here].tolist() == np.asarray(call.logprobs, np.float32)[there].tolist()
            assert (one.versions[here] == call.number).all()  # as the calls were made
            if stretch.in_loss:
                for place in range(offset, offset + stretch.length):
                    held[call.number, place] = held.get((call.number, place), 0) + 1
        assert not one.mask[~sampled].any()
        assert np.isnan(one.logprobs[~sampled]).all()
        assert (one.versions[~sampled] == -1).all()
    chosen = [call for call in calls if unsupervised(call, kinds) is None]
    assert held == {(call.number, place): 1 for call in chosen for place in range(len(call.sampled))}
    ends = build_tree(calls).leaves([call.number for call in chosen if call.sampled])
    assert [one.call.number for one in found if one.call.sampled] == [leaf.call for leaf in ends]
    assert [one.call.number for one in found] == sorted(one.call.number for one in found)
    assert by_number.keys() >= {one.call.number for one in found}


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_the_masks_are_those_of_the_batch_that_is_learned_from(seed: int) -> None:
    calls, _ = random_calls(np.random.default_rng(seed), 8)
    for call in calls:
        call.logprobs = [-1.0] * len(call.sampled)
        if not call.prompt_length:
            return
    rollout = FinishedRollout("r", "g", True, 1.0, calls, Outcome.succeeded)
    learned = make_batch([rollout], {"r": 0.5}, ["main"]).rows
    written = [one for one in trajectories(calls, ["main"]) if one.call.sampled]
    assert [row.tokens.tolist() for row in learned] == [one.tokens.tolist() for one in written]
    assert [row.trained.tolist() for row in learned] == [one.mask.tolist() for one in written]


def test_a_row_says_where_it_comes_from() -> None:
    user, tool = (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    )
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f"}}]
    first = make_call(
        0, [1, 2], [3, 4], fork="new", messages=[user], reply=said, tools=tools, finish_reason="tool_calls"
    )
    second = make_call(
        1, [1, 2, 3, 4, 5], [6], prefix=first, parent=0, messages_keep=2, messages=[tool],
        reply={"role": "assistant", "content": "x", "reasoning_content": "y"}, finish_reason="stop",
    )  # fmt: skip
    rollout = Rollout("r", {"q": "?"}, metadata={"phase": "train", "step": 3}, group_id="g")
    attempt = Attempt("r", "1", outcome=Outcome.succeeded)
    (row,) = rows(rollout, attempt, [first, second], reward=0.5, metrics={"tests": 2.0}, advantage=-1.0)
    arrays = {name: row.pop(name).tolist() for name in ("input_ids", "loss_mask", "versions")}
    assert arrays == {
        "input_ids": [1, 2, 3, 4, 5, 6],
        "loss_mask": [False, False, True, True, False, True],
        "versions": [-1, -1, 0, 0, -1, 1],
    }
    assert row.pop("logprobs")[2:4].tolist() == np.asarray(first.logprobs, np.float32).tolist()
    empty = {"content": None, "reasoning_content": None, "tool_calls": None, "tool_call_id": None, "name": None}
    function = {"name": "f", "arguments": "{}"}
    assert row.pop("messages") == [
        empty | {"role": "user", "content": "ab"},
        empty | {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        empty | {"role": "tool", "tool_call_id": "c1", "content": "3"},
        empty | {"role": "assistant", "content": "x", "reasoning_content": "y"},
    ]
    shared = {"kind": "main", "status": "ok", "in_loss": True}
    assert row.pop("calls") == [
        {"number": 0, "parent": None, "fork": "new", "finish_reason": "tool_calls", "start": 2, "length": 2} | shared,
        {"number": 1, "parent": 0, "fork": None, "finish_reason": "stop", "start": 5, "length": 1} | shared,
    ]
    assert row == {
        "rollout_id": "r", "group_id": "g", "attempt_id": "1", "trajectory": 0, "split": "train", "phase": "train",
        "step": 3, "task": '{"q":"?"}', "model": "policy", "engine": "policy",
        "tools": '[{"type":"function","function":{"name":"f"}}]', "kind": "main", "finish_reason": "stop",
        "reward": 0.5, "advantage": -1.0, "metrics": '{"tests":2.0}', "state": "queuing", "outcome": "succeeded",
    }  # fmt: skip


def test_conversations_without_token_ids_are_exported_as_text() -> None:
    texts = [
        make_call(0, [], [], messages=[{"role": "user", "content": "a"}], reply={"role": "assistant", "content": "b"}),
        make_call(1, [], [], parent=0, messages_keep=2, messages=[{"role": "user", "content": "c"}], reply={"role": "assistant", "content": "d"}),
    ]  # fmt: skip
    (one,) = trajectories(texts)
    assert [message["content"] for message in one.messages] == ["a", "b", "c", "d"]
    assert len(one.tokens) == 0


def test_a_pruned_attempt_has_no_trajectories() -> None:
    with pytest.raises(ValueError, match="pruned"):
        trajectories([make_call(0, [], [], pruned=Pruned(3, True))])
