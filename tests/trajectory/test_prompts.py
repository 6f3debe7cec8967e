from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrein.records import Call
from longrein.trajectory.prompts import branch_ids, messages_of, prompt_ids, tools_of


def call(number: int, **fields: Any) -> Call:
    return Call(
        rollout_id="r",
        attempt_id="0",
        number=number,
        dialect="chat",
        mode="train",
        model="m",
        engine="policy",
        **fields,
    )


@st.composite
def recorded(draw: st.DrawFn) -> tuple[dict[int, Call], dict[int, list[int]], dict[int, list[dict[str, object]]]]:
    """Random attempts, made the way a gateway makes them, beside the whole prompts and messages they stand for."""
    calls: dict[int, Call] = {}
    prompts: dict[int, list[int]] = {}
    conversations: dict[int, list[dict[str, object]]] = {}
    ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)
    for number in range(draw(st.integers(1, 12))):
        source = draw(st.none() | st.sampled_from(sorted(calls))) if calls else None
        branch = prompts[source] + calls[source].sampled if source is not None else []
        length = draw(st.integers(0, len(branch)))
        delta = draw(ids)
        before = [*conversations[source], calls[source].reply] if source is not None else []
        keep = draw(st.integers(0, len(before)))
        messages: list[dict[str, object]] = [{"content": f"{number}.{i}"} for i in range(draw(st.integers(0, 3)))]
        calls[number] = call(
            number,
            prefix=source,
            prefix_length=length,
            prompt_delta=delta,
            prompt_length=length + len(delta),
            sampled=draw(ids),
            parent=source,
            messages_keep=keep,
            messages=messages,
            reply={"content": f"reply {number}"},
        )
        prompts[number] = branch[:length] + delta
        conversations[number] = before[:keep] + messages
    return calls, prompts, conversations


@given(recorded())
@settings(deadline=None)
def test_deltas_give_back_every_prompt_and_conversation(
    record: tuple[dict[int, Call], dict[int, list[int]], dict[int, list[dict[str, object]]]],
) -> None:
    calls, prompts, conversations = record
    for number, one in calls.items():
        assert prompt_ids(calls, one) == prompts[number]
        assert branch_ids(calls, one) == prompts[number] + one.sampled
        assert messages_of(calls, one) == conversations[number]


def test_a_very_long_chain_needs_no_recursion() -> None:
    calls = {0: call(0, prompt_delta=[0], prompt_length=1, sampled=[1], messages=[{"n": 0}], reply={"r": 0})}
    for number in range(1, 3000):
        calls[number] = call(
            number,
            prefix=number - 1,
            prefix_length=2 * number,
            prompt_delta=[],
            prompt_length=2 * number,
            sampled=[number, number],
            parent=number - 1,
            messages_keep=number + 1,
            reply={"r": number},
        )
    assert len(prompt_ids(calls, calls[2999])) == 5998
    assert len(messages_of(calls, calls[2999])) == 3000


def test_tools_come_from_the_nearest_call_that_names_them() -> None:
    calls = {
        0: call(0, tools=[{"a": 1}]),
        1: call(1, parent=0),
        2: call(2, parent=1, tools=[]),
        3: call(3, parent=2),
        4: call(4),
    }
    assert [tools_of(calls, calls[n]) for n in range(5)] == [[{"a": 1}], [{"a": 1}], [], [], []]


@pytest.mark.parametrize(
    "broken",
    [
        call(1, prefix=7, prefix_length=1, prompt_length=1),
        call(1, prefix=None, prefix_length=1, prompt_length=1),
        call(1, prefix=0, prefix_length=5, prompt_length=5),
        call(1, prefix=0, prefix_length=1, prompt_length=2),
    ],
)
def test_a_broken_record_is_an_error_that_names_the_call(broken: Call) -> None:
    calls = {0: call(0, prompt_delta=[1, 2], prompt_length=2, sampled=[3]), 1: broken}
    with pytest.raises(ValueError, match=r"call [01]"):
        prompt_ids(calls, broken)


def test_more_messages_than_there_are_is_an_error() -> None:
    calls = {0: call(0, messages=[{}]), 1: call(1, parent=0, messages_keep=3)}
    with pytest.raises(ValueError, match="keeps 3 messages of call 0, whose conversation has 2"):
        messages_of(calls, calls[1])
