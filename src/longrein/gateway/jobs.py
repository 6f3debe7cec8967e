"""Requests that are being answered, and those whose answer nobody was given: what a retry may take over.

A request is a retry of an earlier one of its attempt if it asks the very same and the earlier one's client has gone
without its answer, or if the client says that it asks again (`x-stainless-retry-count`) while an equal request is
unfinished or undelivered. It gets that one's answer, from the first token. Equal requests whose clients are all there,
and equal requests after an answer that was given, are siblings: each is sampled on its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from longrein.gateway.budget import Grant
from longrein.gateway.conversation import History, Plan, Recorded
from longrein.gateway.delivery import Delivery
from longrein.gateway.dialects import Choice, Dialect, Request
from longrein.gateway.engines import Engine
from longrein.gateway.gate import Passage
from longrein.gateway.logprobs import Token
from longrein.gateway.messages import Message
from longrein.gateway.parsing import Delta
from longrein.records import CallKind, Mode, Rollout

#: Finished answers of an attempt that nobody was given and that are kept for a retry; the oldest go first.
UNDELIVERED_KEPT = 32


@dataclass
class Running:
    """A call that is being sampled: everything its record and its answer need."""

    recorded: Recorded
    messages: Sequence[Message]
    plan: Plan
    prompt_ids: list[int]
    prompt_tail: str
    """The end of the prompt's text."""
    kind: CallKind
    index: int
    """Among the request's answers."""
    seed: int
    max_tokens: int
    started_at: float
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    """What was sampled as the client sees it; filled when it asks for log-probabilities."""
    told: int = 0
    """Of `tokens`, those that stand in `deltas`."""
    finish_reason: str | None = None
    stopped: str | None = None
    """The stop string that ended it."""
    first_token_at: float | None = None


@dataclass(eq=False)
class Job:
    """A request that was admitted: its calls (one for each prompt and each of n), and where it came from."""

    asked: Request
    """As it was parsed: what a retry is equal to."""
    dialect: Dialect
    request: Request
    rollout: Rollout
    attempt: Attempt
    mode: Mode
    engine: Engine
    running: list[Running]
    grant: Grant
    temperature: float
    guide: str | None
    """The grammar that its replies follow."""
    id: str
    created: int
    delivery: Delivery = field(default_factory=Delivery)
    passages: list[Passage] = field(default_factory=list)
    """Through the gate, one for each call."""
    choices: list[Choice] = field(default_factory=list)
    """Of a finished job."""
    recorded: bool = False
    counted: bool = True
    """Whether the record of a finished job is to say that its answer was given."""
    work: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None
    """Ends the job when nobody has come back for it."""

    @property
    def attempt_id(self) -> str:
        return self.attempt.attempt_id

    @property
    def prompt_tokens(self) -> int:
        """Of all its prompts, each counted once."""
        return sum(call.plan.length for call in self.running[:: self.request.n])

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were sent before in this attempt."""
        return sum(call.plan.prefix_length for call in self.running[:: self.request.n])

    def leave_gate(self) -> None:
        """Nothing of it waits any more: it has ended."""
        for passage in self.passages:
            passage.leave()


@dataclass(eq=False)
class Attempt:
    """What the gateway keeps in memory of an attempt that calls."""

    key: tuple[str, str, float]
    """Its rollout's id, its own, and when the rollout was created."""
    attempt_id: str
    history: History
    clock: float
    """The attempt's start: what a template takes for now."""
    jobs: list[Job] = field(default_factory=list)
    """Unfinished ones, and finished ones that nobody was given."""
    ended: bool = False
    planning: int = 0
    """Requests that are being read and planned."""

    def as_it_stands(self) -> Attempt:
        """The attempt with the history that it has now, for work beside the event loop: calls are only ever added."""
        return replace(self, history=History(list(self.history.calls), self.history.admitted))

    def taken_over(self, asked: Request, dialect: Dialect, mode: Mode, *, asks_again: bool) -> Job | None:
        """The job that a request is a retry of."""
        equal = [
            job
            for job in self.jobs
            if job.dialect is dialect and job.mode == mode and _alive(job) and job.asked == asked
        ]
        left = [job for job in equal if not job.delivery.listeners]
        return next(iter(left or (equal if asks_again else ())), None)

    def keep(self, job: Job) -> None:
        """Keep a finished job for a retry."""
        finished = [one for one in self.jobs if one.delivery.ended]
        for oldest in finished[: max(0, len(finished) - UNDELIVERED_KEPT)]:
            self.forget(oldest)

    def forget(self, job: Job) -> None:
        if job in self.jobs:
            self.jobs.remove(job)
        job.delivery.on_left = _nobody_cares  # without the circle that it was part of, its memory is free at once


def _nobody_cares() -> None: ...


def _alive(job: Job) -> bool:
    return (
        job.delivery.error is None and not job.delivery.given and not (job.work is not None and job.work.cancelling())
    )
