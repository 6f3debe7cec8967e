"""From queued rollouts to finished ones: what the trainer waits for, fetched as it finishes.

One long poll on the gateway's list of finished rollouts serves every phase of a run. What a run asks for is named by its
place in it, so that a run that goes on asks for the same again: what is finished is taken from the record, what runs is
waited for. A rollout that failed while no trainer waited for it (the end of a run may have cut it short) is asked for
again under another id; one whose failure the run has acted on stays failed.

A rollout has a reward if its last attempt ended otherwise than by an infrastructure failure and somebody graded it; a
group is whole when all of its rollouts have one.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec

from longrein.client import Client
from longrein.records import (
    TERMINAL,
    Attempt,
    Event,
    Json,
    NewRollout,
    Outcome,
    Rollout,
    RolloutConfig,
    RolloutState,
    StatusChange,
)
from longrein.tasks import TaskOrder
from longrein.textfile import tail
from longrein.trainer.journal import Journal
from longrein.trajectory.batch import FinishedRollout

POLL_SECONDS = 20.0
FETCHES = 16


class RunFailed(Exception):
    """A run cannot go on. The message says why and shows what there is to see."""


@dataclass(frozen=True)
class Done:
    """A rollout that reached its end."""

    rollout: Rollout
    attempt: Attempt | None
    """The last attempt; None if none was started."""
    finished: FinishedRollout
    failure: str | None
    """Why it has no reward; None if it has one."""


Keep = Callable[[Done], bool]


@dataclass(eq=False)
class _Asked:
    """A rollout that is waited for."""

    new: NewRollout
    future: asyncio.Future[Done]
    keep: Keep
    tries: int = 1

    @property
    def rollout_id(self) -> str:
        assert self.new.rollout_id is not None
        return self.new.rollout_id if self.tries == 1 else f"{self.new.rollout_id}-again{self.tries - 1}"


class Collector:
    """Queues rollouts at the gateway and returns each as a future of its `Done`.

    Use it as an async context manager; within it one task long-polls for finished rollouts. An error of that task is
    raised by every future that is still open. `seen` is told of each rollout that comes; `journal` remembers which failed
    ones did; `needed` is awaited before anything is asked for that the policy has to sample.
    """

    def __init__(
        self,
        client: Client,
        seen: Callable[[Done], None] = lambda done: None,
        *,
        journal: Journal | None = None,
        needed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._client = client
        self._seen = seen
        self._journal = journal
        self._needed = needed
        self._open: dict[str, _Asked] = {}
        self._before: set[str] = set()
        """Rollouts that finished while nobody here waited for them."""
        self._after = 0
        self._fetching = asyncio.Semaphore(FETCHES)
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._closing = False

    @property
    def open(self) -> int:
        """Rollouts queued or running."""
        return len(self._open)

    async def __aenter__(self) -> Collector:
        while True:
            page = await self._client.terminal(self._after, limit=1000)
            self._after = page.next_after
            self._before.update(item.rollout_id for item in page.items)
            if not page.items:
                break
        self._spawn(self._poll)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True  # a cancellation can be lost in a library below; the poll then ends after its answer
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for asked in self._open.values():
            asked.future.cancel()
        self._open.clear()

    async def queue(self, rollouts: Sequence[NewRollout], keep: Keep | None = None) -> list[asyncio.Future[Done]]:
        """Queue rollouts (each with a `rollout_id` of its own); futures in their order.

        One that finished while nobody waited is taken from the record if `keep` says so: by default if it has a reward, or if the
        run has seen its failure. Otherwise it is asked for again, its id followed by `-again1` and so on. Raises
        `RunFailed` if the record has another task under an id.
        """
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        asked = [_Asked(new, loop.create_future(), keep or self._kept) for new in rollouts]
        await self._ask(asked)
        return [one.future for one in asked]

    def _kept(self, done: Done) -> bool:
        seen = self._journal is not None and self._journal.has_failed(done.rollout.rollout_id)
        return done.failure is None or seen

    async def _ask(self, asked: Sequence[_Asked]) -> None:
        for one in asked:
            self._open[one.rollout_id] = one
        if self._needed is not None and any(
            one.new.config.engine == "policy" and one.rollout_id not in self._before for one in asked
        ):
            await self._needed()
        wanted = [msgspec.structs.replace(one.new, rollout_id=one.rollout_id) for one in asked]
        for new, rollout in zip(wanted, await self._client.add_rollouts(wanted), strict=True):
            if (rollout.input, rollout.config.engine) != (new.input, new.config.engine):
                raise RunFailed(
                    f"rollout {rollout.rollout_id} is in the record with another task: the run file's tasks, their order or "
                    "run.seed were changed since it was recorded. Go on with the old ones, or start a run of another name "
                    "(--set run.name=NAME) or this one anew (--overwrite)"
                )
            if rollout.status.state in TERMINAL:
                self._spawn(self._fetch, rollout.rollout_id)

    async def withdraw(self, futures: Sequence[asyncio.Future[Done]]) -> None:
        """Let go of rollouts: those that still wait in the queue are taken out of it, others are not waited for."""
        ids = [rollout_id for rollout_id, asked in self._open.items() if asked.future in futures]
        for future in futures:
            future.cancel()
        for rollout_id in ids:
            self._open.pop(rollout_id, None)
            detail = await self._client.rollout(rollout_id)
            if detail.rollout.status.state is RolloutState.queuing:
                change = StatusChange(state=RolloutState.failed, error_message="not needed any more")
                await self._client.change_rollout(rollout_id, change)

    def _spawn(self, work: Callable[..., Awaitable[None]], *arguments: str) -> None:
        task = asyncio.get_running_loop().create_task(self._guard(work, *arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guard(self, work: Callable[..., Awaitable[None]], *arguments: str) -> None:
        try:
            await work(*arguments)
        except Exception as error:
            self._error = error
            for asked in self._open.values():
                if not asked.future.done():
                    asked.future.set_exception(error)
            self._open.clear()

    async def _poll(self) -> None:
        while not self._closing:
            page = await self._client.terminal(self._after, limit=1000, wait=POLL_SECONDS)
            self._after = page.next_after
            for item in page.items:
                if item.rollout_id in self._open:
                    self._spawn(self._fetch, item.rollout_id)
                else:
                    self._before.add(item.rollout_id)

    async def _fetch(self, rollout_id: str) -> None:
        async with self._fetching:
            done = await self._read(rollout_id)
        asked = self._open.pop(rollout_id, None)
        if asked is None or asked.future.done():
            return
        if rollout_id in self._before and not asked.keep(done):
            asked.tries += 1
            await self._ask([asked])
            return
        if done.failure is not None and self._journal is not None:
            self._journal.failed(rollout_id)
        self._seen(done)
        asked.future.set_result(done)

    async def _read(self, rollout_id: str) -> Done:
        detail, attempts = await asyncio.gather(self._client.rollout(rollout_id), self._client.attempts(rollout_id))
        last = attempts[-1] if attempts else None
        calls, rewards = [], []
        if last is not None:
            calls, rewards = await asyncio.gather(
                self._client.calls(rollout_id, last.attempt_id),
                self._client.events(rollout_id, last.attempt_id, "reward"),
            )
        reward, metrics, failure = grade_of(detail.rollout, last, rewards)
        finished = FinishedRollout(
            rollout_id=rollout_id,
            group_id=detail.rollout.group_id or rollout_id,
            is_train=detail.rollout.is_train,
            reward=reward,
            calls=calls,
            outcome=last.outcome if last else None,
            metrics=metrics,
            call_rewards=call_rewards_of(rewards),
        )
        return Done(detail.rollout, last, finished, failure)


def grade_of(
    rollout: Rollout, attempt: Attempt | None, rewards: Sequence[Event]
) -> tuple[float | None, dict[str, float], str | None]:
    """Reward, further metrics, and why there is no reward, from a finished rollout's last attempt.

    The last reward event of the attempt counts. An infrastructure failure, or a rollout
    that was failed, has no reward whatever was posted.
    """
    said = rollout.status.error_message or (attempt.reason if attempt else None)
    if attempt is None:
        return None, {}, said or "no attempt was started"
    if attempt.outcome is Outcome.infrastructure_failed:
        return None, {}, said or "infrastructure failure"
    if rollout.status.state is RolloutState.failed:  # cancelled, or its agent's failure is dropped by the run file
        return None, {}, said or "the rollout was failed"
    if not rewards:
        return None, {}, said or "nobody posted a reward"
    data = rewards[-1].data
    value = data.get("value")
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None, {}, f"the reward is {value!r}, not a finite number"
    further = data.get("metrics")
    numbers = further.items() if isinstance(further, dict) else ()
    metrics = {str(k): float(v) for k, v in numbers if isinstance(v, (int, float))}
    return float(value), metrics, None


def call_rewards_of(rewards: Sequence[Event]) -> dict[int, float]:
    """The grader's rewards of single calls, by the call's number, in an attempt's last reward event."""
    given = rewards[-1].data.get("calls") if rewards else None
    if not isinstance(given, dict):
        return {}
    return {int(n): float(r) for n, r in given.items() if str(n).isdigit() and isinstance(r, (int, float))}


@dataclass
class Group:
    """The rollouts of one task that are compared with each other."""

    group_id: str
    task: int
    done: list[Done] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return bool(self.done) and all(d.failure is None for d in self.done)

    @property
    def rewards(self) -> list[float]:
        return [d.finished.reward for d in self.done if d.finished.reward is not None]

    @property
    def equal(self) -> bool:
        """Whether nothing can be learned from comparing its rollouts: no two have different rewards."""
        steps = {reward for done in self.done for reward in done.finished.call_rewards.values()}
        return len(set(self.rewards)) == 1 and len(steps) <= 1


class Failure(msgspec.Struct, frozen=True):
    """A rollout without a reward, as far as an error message tells of it."""

    rollout_id: str
    attempt_id: str | None
    cause: str | None


def attempts_of(done: Sequence[Done]) -> dict[str, str]:
    """The id of the attempt that counts, by rollout id."""
    return {d.rollout.rollout_id: d.attempt.attempt_id for d in done if d.attempt is not None}


def failures(done: Sequence[Done]) -> list[Failure]:
    """Of some rollouts those without a reward."""
    return [
        Failure(d.rollout.rollout_id, d.attempt.attempt_id if d.attempt else None, d.failure)
        for d in done
        if d.failure is not None
    ]


class _GroupsState(msgspec.Struct, forbid_unknown_fields=True):
    second_try: list[int] = []
    failed_in_a_row: list[Failure] = []
    dropped: int = 0


class Groups:
    """Collects whole groups of rollouts along the task order.

    A group with a rollout that has no reward is dropped as a whole and counted, and the next task takes its place. Its
    own task goes back to the order once, when the step is done: so which task a group of a step has depends on nothing
    but the order and how many groups were dropped before it, and is the same when the step is done again. `max_failed`
    dropped groups in a row end the run.

    Up to `resample` groups of a step whose rewards are all equal are set aside in `equal`, and the next task takes the
    place of each: dynamic sampling, DAPO (arXiv 2503.14476), Eq. 11. Their tasks come again in the next epoch.
    """

    def __init__(
        self,
        collector: Collector,
        tasks: Sequence[Json],
        order: TaskOrder,
        *,
        size: int,
        max_failed: int,
        run_folder: Path,
        prefix: str = "",
        resample: int = 0,
    ) -> None:
        self._resample = resample
        self.equal: list[Group] = []
        """Those of the last step that others took the place of."""
        self._collector = collector
        self._tasks = tasks
        self._order = order
        self._size = size
        self._max_failed = max_failed
        self._run_folder = run_folder
        self._prefix = prefix
        self._second_try: set[int] = set()
        self._failed_in_a_row: list[Failure] = []
        self.dropped = 0

    def state_dict(self) -> Json:
        """What the next step depends on, beside the task order."""
        return msgspec.to_builtins(_GroupsState(sorted(self._second_try), self._failed_in_a_row, self.dropped))

    def load_state_dict(self, state: Json) -> None:
        """Go on from what `state_dict` gave."""
        read = msgspec.convert(state, _GroupsState)
        self._second_try, self._failed_in_a_row = set(read.second_try), list(read.failed_in_a_row)
        self.dropped = read.dropped

    async def collect(self, count: int, step: int) -> list[Group]:
        """`count` whole groups, in the order in which they were begun."""
        ended: dict[int, Group] = {}
        whole = replaced = 0
        running: set[asyncio.Task[tuple[int, Group]]] = set()
        begun = 0
        try:
            while whole < count:
                while whole + len(running) < count:
                    group = Group(f"{self._prefix}s{step:05d}-g{begun:03d}", self._order.next())
                    running.add(asyncio.create_task(self._run(begun, group, step)))
                    begun += 1
                finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for number, group in sorted((task.result() for task in finished), key=lambda pair: pair[0]):
                    ended[number] = group
                    if group.whole:
                        if group.equal and replaced < self._resample:
                            replaced += 1
                        else:
                            whole += 1
                        self._failed_in_a_row.clear()
                    else:
                        self._drop(group)
        finally:
            for task in running:
                task.cancel()
        groups = [ended[number] for number in sorted(ended)]
        self._put_back(groups)
        # Beyond the limit it is the first begun that are replaced, whichever came in first: a seed gives the same again.
        self.equal = [group for group in groups if group.whole and group.equal][:replaced]
        aside = {group.group_id for group in self.equal}
        return [group for group in groups if group.whole and group.group_id not in aside]

    async def _run(self, number: int, group: Group, step: int) -> tuple[int, Group]:
        rollouts = [
            NewRollout(
                input=self._tasks[group.task],
                is_train=True,
                config=RolloutConfig(),
                metadata={"phase": "train", "step": step, "task": group.task},
                rollout_id=f"{group.group_id}-r{member:02d}",
                group_id=group.group_id,
            )
            for member in range(self._size)
        ]
        group.done = list(await asyncio.gather(*await self._collector.queue(rollouts)))
        return number, group

    def _drop(self, group: Group) -> None:
        self.dropped += 1
        self._failed_in_a_row.append(failures(group.done)[0])
        if len(self._failed_in_a_row) >= self._max_failed:
            raise RunFailed(
                f"{len(self._failed_in_a_row)} groups in a row could not be completed "
                f"(trainer.max_failed_groups = {self._max_failed}). {commonest(self._failed_in_a_row, self._run_folder)}"
            )

    def _put_back(self, groups: Sequence[Group]) -> None:
        """Give the dropped ones' tasks their second try."""
        for group in groups:
            if group.whole or group.task in self._second_try:
                self._second_try.discard(group.task)
            else:
                self._second_try.add(group.task)
                self._order.put_back(group.task)


def commonest(failed: Sequence[Failure], run_folder: Path) -> str:
    """The commonest cause among failed rollouts and the end of one such rollout's log."""
    causes = Counter(failure.cause for failure in failed)
    cause, count = causes.most_common(1)[0]
    example = next(failure for failure in failed if failure.cause == cause)
    share = "all of them" if count == len(failed) else f"{count} of {len(failed)}"
    excerpt = log_excerpt(run_folder, example.rollout_id, example.attempt_id)
    return f"Commonest cause ({share}): {cause}\n{excerpt}".rstrip()


def log_excerpt(run_folder: Path, rollout_id: str, attempt_id: str | None, lines: int = 20) -> str:
    """The last lines that an attempt wrote: its standard error, else its standard output."""
    if attempt_id is None:
        return ""
    folder = run_folder / "attempts" / rollout_id / attempt_id
    for name in ("stderr.log", "stdout.log"):
        text = tail(folder / name, lines)
        if text:
            return f"--- end of {folder / name}\n{text}\n---"
    return f"(nothing was written to {folder / 'stderr.log'})" if folder.is_dir() else ""
