"""From an attempt's calls to trajectories that other trainers read. Pure.

A trajectory is one context that the model ended in (a leaf of the attempt's tree): its messages, its token ids, and for
each of these whether it is in the loss, its log-probability and its policy version. Trajectories of one attempt share
tokens; the loss mask holds each sampled token in exactly one of them, the first that has it. docs/export.md is the
schema.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from longrein.records import Attempt, Call, CallKind, Json, Rollout
from longrein.trajectory.batch import token_versions
from longrein.trajectory.kinds import TRAINED_KINDS, unsupervised
from longrein.trajectory.prompts import messages_of, tools_of
from longrein.trajectory.tree import Tree, build_tree


@dataclass(frozen=True)
class Stretch:
    """What one call sampled of a trajectory, or a part of it where a later call continues only that."""

    call: Call
    start: int
    """Position of its first token in the trajectory."""
    length: int
    in_loss: bool
    """Whether the mask holds it here; else an earlier trajectory's does, or it is not of a kind that is exported."""


@dataclass(frozen=True)
class Trajectory:
    """One leaf context, T tokens long; T = 0 where the endpoint gave no token ids."""

    call: Call
    """The call that ended there."""
    messages: list[Json]
    """Its conversation, the reply last."""
    tools: list[Json]
    tokens: np.ndarray
    """int32 [T]"""
    mask: np.ndarray
    """bool [T]: sampled, and counted in this trajectory."""
    logprobs: np.ndarray
    """float32 [T]: of every sampled token, NaN where there is none."""
    versions: np.ndarray
    """int32 [T]: of every sampled token, -1 where there is none."""
    stretches: list[Stretch]


def trajectories(calls: Sequence[Call], kinds: Collection[CallKind] = TRAINED_KINDS) -> list[Trajectory]:
    """The trajectories of one attempt: of the calls of these kinds whose answers were given.

    In the order of the calls that they end with. Raises ValueError for calls that contradict each other or are pruned.
    """
    if any(call.pruned for call in calls):
        raise ValueError("the attempt is pruned: its tokens and messages are not in the record any more")
    by_number = {call.number: call for call in calls}
    chosen = {call.number for call in calls if unsupervised(call, kinds) is None}
    tree = build_tree(calls)
    claimed: set[int] = set()
    found = []
    for number, path in sorted(_ends(tree, by_number, chosen)):
        call = by_number[number]
        found.append(
            Trajectory(
                call,
                [*messages_of(by_number, call), *([call.reply] if call.reply else [])],
                tools_of(by_number, call),
                *_columns(tree, path, by_number),
                _stretches(tree, path, by_number, chosen, claimed),
            )
        )
        for stretch in found[-1].stretches:
            found[-1].mask[stretch.start : stretch.start + stretch.length] = stretch.in_loss
    return found


def _ends(tree: Tree, calls: Mapping[int, Call], chosen: Collection[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(call, path) of each trajectory: the leaves of calls with tokens, and the ends of conversations without any."""
    for leaf in tree.leaves([number for number in chosen if calls[number].sampled]):
        yield leaf.call, leaf.path
    continued = {calls[number].parent for number in chosen}
    for number in chosen:
        if not calls[number].sampled and calls[number].reply and number not in continued:
            yield number, tree.path(tree.ends[number])


def _columns(
    tree: Tree, path: Sequence[int], calls: Mapping[int, Call]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, an empty mask, log-probabilities and versions of a context."""
    tokens = tree.tokens(path)
    logprobs = np.full(len(tokens), np.nan, np.float32)
    versions = np.full(len(tokens), -1, np.int32)
    for node in (tree.nodes[index] for index in path):
        if node.call is None:
            continue
        call, here = calls[node.call], slice(node.start, node.end)
        there = slice(node.offset, node.offset + len(node.tokens))
        if call.logprobs is not None and len(call.logprobs) == len(call.sampled):
            logprobs[here] = np.asarray(call.logprobs, np.float32)[there]
        if call.versions:
            versions[here] = token_versions(call)[there]
    return tokens, np.zeros(len(tokens), bool), logprobs, versions


def _stretches(
    tree: Tree, path: Sequence[int], calls: Mapping[int, Call], chosen: Collection[int], claimed: set[int]
) -> list[Stretch]:
    """The sampled parts of a context; `claimed` are the nodes that earlier trajectories have in their masks."""
    found = []
    for index in path:
        node = tree.nodes[index]
        if node.call is None:
            continue
        fresh = node.call in chosen and index not in claimed
        claimed.add(index)
        found.append(Stretch(calls[node.call], node.start, len(node.tokens), fresh))
    return found


def rows(
    rollout: Rollout,
    attempt: Attempt,
    calls: Sequence[Call],
    *,
    reward: float | None,
    metrics: Mapping[str, float],
    advantage: float | None,
    kinds: Collection[CallKind] = TRAINED_KINDS,
) -> Iterator[Json]:
    """The trajectories of a finished rollout as rows of the schema; the token columns are numpy arrays of one length."""
    phase, step = rollout.metadata.get("phase"), rollout.metadata.get("step")
    for number, one in enumerate(trajectories(calls, kinds)):
        yield {
            "rollout_id": rollout.rollout_id,
            "group_id": rollout.group_id,
            "attempt_id": attempt.attempt_id,
            "trajectory": number,
            "split": "train" if rollout.is_train else "val",
            "phase": phase if isinstance(phase, str) else None,
            "step": step if isinstance(step, int) else None,
            "task": msgspec.json.encode(rollout.input).decode(),
            "model": one.call.model,
            "engine": one.call.engine,
            "messages": [_message(message) for message in one.messages],
            "tools": msgspec.json.encode(one.tools).decode(),
            "input_ids": one.tokens,
            "loss_mask": one.mask,
            "logprobs": one.logprobs,
            "versions": one.versions,
            "calls": [_stretch(stretch) for stretch in one.stretches],
            "kind": one.call.kind,
            "finish_reason": one.call.finish_reason,
            "reward": reward,
            "advantage": advantage,
            "metrics": msgspec.json.encode(metrics).decode(),
            "state": rollout.status.state.value,
            "outcome": attempt.outcome.value if attempt.outcome is not None else None,
        }


def _stretch(stretch: Stretch) -> Json:
    call = stretch.call
    return {
        "number": call.number,
        "parent": call.parent,
        "kind": call.kind,
        "fork": call.fork,
        "status": call.status,
        "finish_reason": call.finish_reason,
        "start": stretch.start,
        "length": stretch.length,
        "in_loss": stretch.in_loss,
    }


def _message(message: Json) -> Json:
    """A message in the schema's one form; what has no place in it (audio, images) is left in as JSON text."""
    tool_calls = message.get("tool_calls")
    return {
        "role": str(message.get("role", "")),
        "content": _text(message.get("content")),
        "reasoning_content": _text(message.get("reasoning_content") or message.get("reasoning")),
        "tool_calls": [_tool_call(one) for one in tool_calls] if isinstance(tool_calls, list) and tool_calls else None,
        "tool_call_id": _text(message.get("tool_call_id")),
        "name": _text(message.get("name")),
    }


def _tool_call(call: object) -> Json:
    whole = call if isinstance(call, dict) else {}
    function = whole.get("function")
    function = function if isinstance(function, dict) else {}
    return {
        "id": _text(whole.get("id")),
        "type": "function",
        "function": {"name": _text(function.get("name")), "arguments": _text(function.get("arguments"))},
    }


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text", "")) for part in value)
    return msgspec.json.encode(value).decode()
