"""Removing what was sampled from rollouts that are done with; what they came to stays.

Of a pruned rollout these stay: its input, states, attempts, rewards and other events, and of each call everything but
tokens, log-probabilities, messages, tools and reply: its kind, status, times and how many tokens it sampled, so that
reports add up as before.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from longrein import schema
from longrein.records import TERMINAL, Call, CallKind, Json, Pruned, PruneResult, now
from longrein.trajectory.kinds import untrained
from longrein.trajectory.tree import build_tree

log = logging.getLogger("longrein.store")

#: Rollouts that one transaction prunes, so that calls do not wait long to be recorded.
AT_ONCE = 8


def learned_step(metadata: Json) -> int | None:
    """The step that a trainer's rollout was collected for; 0 for what came before the first. None: nobody knows."""
    phase = metadata.get("phase")
    if not isinstance(phase, str):
        return None
    if phase == "train" or phase.startswith("eval-"):
        step = metadata.get("step")
        return step if isinstance(step, int) else None
    return 0 if phase in ("preflight", "warm-up") or phase.startswith("dev-") else None


def find_prunable(connection: Connection, through_step: int, prefix: str) -> list[str]:
    """Ids of finished rollouts that are not pruned yet, of steps up to `through_step`, whose ids begin with `prefix`."""
    of_rollout = schema.rollouts.c
    query = sa.select(of_rollout.rollout_id, of_rollout.metadata).where(
        of_rollout.state.in_([state.value for state in TERMINAL]), of_rollout.pruned_at.is_(None)
    )
    if prefix:
        query = query.where(sa.func.substr(of_rollout.rollout_id, 1, len(prefix)) == prefix)
    found = []
    for rollout_id, metadata in connection.execute(query.order_by(of_rollout.position)):
        step = learned_step(msgspec.json.decode(metadata))
        if step is not None and step <= through_step:
            found.append(rollout_id)
    return found


def prune(connection: Connection, rollout_ids: Sequence[str], kinds: Collection[CallKind]) -> PruneResult:
    """Prune finished rollouts; `kinds` are those that are trained. What was removed is counted.

    A rollout whose calls contradict each other is left as it is: `longrein store check` says what is wrong with it.
    """
    total = PruneResult()
    for rollout_id in rollout_ids:
        try:
            rows = _pruned_rows(connection, rollout_id, kinds)
        except (ValueError, TypeError) as error:
            log.warning("rollout %s is not pruned, its calls are damaged: %s", rollout_id, error)
            continue
        for row in rows:
            total.tokens += row.pop("count")
            connection.execute(_UPDATE_CALL, row)
        total.rollouts += 1
        total.calls += len(rows)
        _mark(connection, rollout_id)
    return total


_OF_ROLLOUT = (
    sa.select(schema.calls)
    .where(schema.calls.c.rollout_id == sa.bindparam("rollout_id"))
    .order_by(schema.calls.c.attempt_id, schema.calls.c.number)
)
_UPDATE_CALL = (
    sa.update(schema.calls)
    .where(
        schema.calls.c.rollout_id == sa.bindparam("of_rollout"),
        schema.calls.c.attempt_id == sa.bindparam("of_attempt"),
        schema.calls.c.number == sa.bindparam("of_number"),
    )
    .values(
        prompt_delta=b"",
        sampled=b"",
        logprobs=sa.bindparam("left_logprobs"),
        messages="[]",
        tools=None,
        reply="{}",
        pruned=sa.bindparam("left"),
    )
)


def _pruned_rows(connection: Connection, rollout_id: str, kinds: Collection[CallKind]) -> list[dict[str, Any]]:
    attempts: dict[str, list[Call]] = {}
    for row in connection.execute(_OF_ROLLOUT, {"rollout_id": rollout_id}):
        call = schema.call_of(row)
        attempts.setdefault(call.attempt_id, []).append(call)
    rows = []
    for calls in attempts.values():
        ended = [call.number for call in calls if call.sampled and untrained(call, kinds) is None]
        leaves = {leaf.call for leaf in build_tree(calls).leaves(ended)} if ended else set()
        rows += [_pruned_row(call, call.number in leaves) for call in calls if call.pruned is None]
    return rows


def _pruned_row(call: Call, leaf: bool) -> dict[str, Any]:
    known = call.logprobs
    whole = known is not None and len(known) == len(call.sampled) and all(map(math.isfinite, known))
    return {
        "of_rollout": call.rollout_id,
        "of_attempt": call.attempt_id,
        "of_number": call.number,
        "left_logprobs": b"" if whole else None,
        "left": schema.to_text(Pruned(len(call.sampled), leaf)),
        "count": len(call.sampled),
    }


def _mark(connection: Connection, rollout_id: str) -> None:
    of_event = schema.events.c
    connection.execute(  # calls that an agent of Agent Lightning's posted, tokens and all
        sa.delete(schema.events).where(of_event.rollout_id == rollout_id, of_event.event_type == "model_request")
    )
    of_rollout = schema.rollouts.c
    connection.execute(sa.update(schema.rollouts).where(of_rollout.rollout_id == rollout_id).values(pruned_at=now()))
