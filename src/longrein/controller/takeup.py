"""What an earlier controller left at the gateway and in the control folder, and what is to be done about it.

The gateway's record says which rollouts run and with which attempts; the journals say which of those attempts have a
supervisor, or how their agents ended. An attempt without a journal had no agent yet. A journal that belongs to no running
rollout is of an attempt that was cancelled or deleted, or of a record that was thrown away: what runs of it is ended.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from longrein.client import ApiError
from longrein.controller.adoption import Control, Journal
from longrein.controller.line import Line
from longrein.records import Attempt, EndAttempt, Outcome, Rollout, RolloutState

logger = logging.getLogger(__name__)

MOST = 2**31 - 1  # rollouts asked for where all are meant
WITHDRAWN = "its rollout was cancelled or deleted"
LOST = EndAttempt(Outcome.infrastructure_failed, reason="its controller is gone")


@dataclass(frozen=True)
class Left:
    """A rollout that was left running."""

    rollout: Rollout
    tried: int
    """Attempts that it had."""
    attempt: Attempt | None
    """Its last attempt, if that is to be gone on with: it runs, or has ended and has no reward yet. None: the next is due."""
    journal: Journal | None


async def take_up(line: Line, control: Control, max_attempts: int) -> list[Left]:
    """The rollouts to go on with; those that have no attempt left are failed, and what runs of others is ended.

    Raises `ApiError` at stop.
    """
    page = await line.insist(lambda: line.client.withdrawn("", 0))
    line.instance, line.withdrawn_after = page.instance, (page.instance, page.next_after)
    running = await line.insist(lambda: line.client.rollouts([RolloutState.running], limit=MOST))
    journals = {journal.of: journal for journal in control.journals()}
    found = []
    for rollout in running:
        attempts = await line.insist(lambda: line.client.attempts(rollout.rollout_id))  # noqa: B023
        if not attempts:  # somebody else's, who runs its agent without a controller
            continue
        left = await _left(line, control, rollout, attempts, journals)
        if left.attempt is None and left.tried >= max_attempts:
            await line.fail(rollout.rollout_id, "its controller ended before it did")
            continue
        if left.attempt is None:
            logger.info("rollout %s was left running; it gets another attempt", rollout.rollout_id)
        found.append(left)
    for journal in journals.values():
        await _end_stranger(line, control, journal)
    return found


async def _left(
    line: Line,
    control: Control,
    rollout: Rollout,
    attempts: Sequence[Attempt],
    journals: dict[tuple[str, str], Journal],
) -> Left:
    *earlier, last = attempts
    for attempt in earlier:
        if attempt.ended_at is None:
            await line.end_attempt(rollout.rollout_id, attempt.attempt_id, LOST)
    journal = journals.get((rollout.rollout_id, last.attempt_id))
    if journal is not None and journal.started_at == last.started_at:
        del journals[journal.of]
    else:  # of a record that was thrown away
        journal = None
    if last.ended_at is None or last.outcome in (Outcome.succeeded, Outcome.agent_failed):
        return Left(rollout, len(attempts), last, journal)
    if journal is not None:
        await control.end(journal)
        control.forget(*journal.of)
    return Left(rollout, len(attempts), None, None)


async def _end_stranger(line: Line, control: Control, journal: Journal) -> None:
    await control.end(journal)
    control.forget(*journal.of)
    with contextlib.suppress(ApiError):
        for attempt in await line.client.attempts(journal.rollout_id):
            if (attempt.attempt_id, attempt.started_at) == (journal.attempt_id, journal.started_at):
                end = EndAttempt(Outcome.infrastructure_failed, reason=WITHDRAWN)
                await line.client.end_attempt(*journal.of, end)
