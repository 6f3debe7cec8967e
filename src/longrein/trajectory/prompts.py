"""Whole prompts out of the record's deltas: token ids, messages and tools of a call.

A call stores what it adds to an earlier call of its attempt. These functions follow the pointers back, without
recursion, in time proportional to what they return plus the number of calls passed. `calls` maps a call's number to
the call, for one attempt.
"""

from __future__ import annotations

from collections.abc import Mapping

from longrein.records import Call, Json


def prompt_ids(calls: Mapping[int, Call], call: Call) -> list[int]:
    """The token ids of `call`'s whole prompt, `call.prompt_length` of them.

    Raises ValueError when a pointer names a call that is not in `calls`, or more ids than that call's branch has.
    """
    return _branch_head(calls, call, call.prompt_length)


def branch_ids(calls: Mapping[int, Call], call: Call) -> list[int]:
    """`call`'s branch: the ids of its prompt, then the ids that were sampled."""
    return [*prompt_ids(calls, call), *call.sampled]


def _branch_head(calls: Mapping[int, Call], call: Call, length: int) -> list[int]:
    """The first `length` ids of `call`'s prompt."""
    pieces: list[list[int]] = [call.prompt_delta]
    here, need = call, call.prefix_length
    if call.prefix_length + len(call.prompt_delta) != length:
        raise ValueError(
            f"call {call.number}: prompt_length is {length}, but prefix_length {call.prefix_length} and "
            f"{len(call.prompt_delta)} ids of its own make {call.prefix_length + len(call.prompt_delta)}"
        )
    while need:
        here = _pointed(calls, here, here.prefix, "prefix")
        if need > here.prompt_length + len(here.sampled):
            raise ValueError(
                f"a later call continues {need} ids of call {here.number}, whose branch has "
                f"{here.prompt_length + len(here.sampled)}"
            )
        if need > here.prompt_length:
            pieces.append(here.sampled[: need - here.prompt_length])
            need = here.prompt_length
        if need > here.prefix_length:
            pieces.append(here.prompt_delta[: need - here.prefix_length])
            need = here.prefix_length
    return [token for piece in reversed(pieces) for token in piece]


def messages_of(calls: Mapping[int, Call], call: Call) -> list[Json]:
    """All messages of `call`'s request, in order, without its reply.

    Raises ValueError when a pointer names a call that is not in `calls`, or more messages than its conversation has.
    """
    pieces: list[list[Json]] = [call.messages]
    here, need = call, call.messages_keep
    while need:
        here = _pointed(calls, here, here.parent, "parent")
        length = here.messages_keep + len(here.messages) + 1
        if need > length:
            raise ValueError(
                f"a later call keeps {need} messages of call {here.number}, whose conversation has {length}"
            )
        if need > here.messages_keep:
            pieces.append([*here.messages, here.reply][: need - here.messages_keep])
            need = here.messages_keep
    return [message for piece in reversed(pieces) for message in piece]


def tools_of(calls: Mapping[int, Call], call: Call) -> list[Json]:
    """The tools of `call`'s request; [] when it had none."""
    here = call
    while here.tools is None:
        if here.parent is None:
            return []
        here = _pointed(calls, here, here.parent, "parent")
    return here.tools


def _pointed(calls: Mapping[int, Call], call: Call, number: int | None, name: str) -> Call:
    if number is None or number not in calls:
        raise ValueError(f"call {call.number}: its {name} is call {number}, which is not in the record")
    return calls[number]
