"""From queued rollouts to finished ones: what the trainer waits for, fetched as it finishes.

One long poll on the gateway's list of finished rollouts serves every phase of a run. A rollout has a reward if its last
attempt ended otherwise than by an infrastructure failure and somebody graded it; a group is whole when all of its
rollouts have one.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

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


class Collector:
    """Queues rollouts at the gateway and returns each as a future of its `Done`.

    Use it as an async context manager; within it one task long-polls for finished rollouts. An error of that task is
    raised by every future that is still open.
    """

    def __init__(self, client: Client, seen: Callable[[Done], None] = lambda done: None) -> None:
        self._client = client
        self._seen = seen
        self._open: dict[str, asyncio.Future[Done]] = {}
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
        while True:  # what finished before this run is nobody's
            page = await self._client.terminal(self._after, limit=1000)
            self._after = page.next_after
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
        for future in self._open.values():
            future.cancel()
        self._open.clear()

    async def queue(self, rollouts: Sequence[NewRollout]) -> list[asyncio.Future[Done]]:
        """Queue rollouts (each with a `rollout_id` of its own); futures in their order."""
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Done]] = []
        for rollout in rollouts:
            assert rollout.rollout_id is not None
            future: asyncio.Future[Done] = loop.create_future()
            self._open[rollout.rollout_id] = future
            futures.append(future)
        for rollout in await self._client.add_rollouts(list(rollouts)):
            if rollout.status.state in TERMINAL:  # one of the same id had finished before
                self._spawn(self._fetch, rollout.rollout_id)
        return futures

    async def withdraw(self, futures: Sequence[asyncio.Future[Done]]) -> None:
        """Let go of rollouts: those that still wait in the queue are taken out of it, others are not waited for."""
        ids = [rollout_id for rollout_id, future in self._open.items() if future in futures]
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
            for future in self._open.values():
                if not future.done():
                    future.set_exception(error)
            self._open.clear()

    async def _poll(self) -> None:
        while not self._closing:
            page = await self._client.terminal(self._after, limit=1000, wait=POLL_SECONDS)
            self._after = page.next_after
            for item in page.items:
                if item.rollout_id in self._open:
                    self._spawn(self._fetch, item.rollout_id)

    async def _fetch(self, rollout_id: str) -> None:
        async with self._fetching:
            detail, attempts = await asyncio.gather(self._client.rollout(rollout_id), self._client.attempts(rollout_id))
            last = attempts[-1] if attempts else None
            calls, rewards = [], []
            if last is not None:
                calls, rewards = await asyncio.gather(
                    self._client.calls(rollout_id, last.attempt_id),
                    self._client.events(rollout_id, last.attempt_id, "reward"),
                )
        future = self._open.pop(rollout_id, None)
        if future is None or future.done():
            return
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
        done = Done(detail.rollout, last, finished, failure)
        self._seen(done)
        future.set_result(done)


def grade_of(
    rollout: Rollout, attempt: Attempt | None, rewards: Sequence[Event]
) -> tuple[float | None, dict[str, float], str | None]:
    """Reward, further metrics, and why there is no reward, from a finished rollout's last attempt.

    The last reward event of the attempt counts. An infrastructure failure has no reward whatever was posted.
    """
    said = rollout.status.error_message or (attempt.reason if attempt else None)
    if attempt is None:
        return None, {}, said or "no attempt was started"
    if attempt.outcome is Outcome.infrastructure_failed:
        return None, {}, said or "infrastructure failure"
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


class Groups:
    """Collects whole groups of rollouts along the task order.

    A group with a rollout that has no reward is dropped as a whole and counted; its task goes back to the order once, and
    the next task takes its place. `max_failed` dropped groups in a row end the run. `start` counts the run's starts.

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
        start: int = 0,
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
        self._start = start
        self._second_try: set[int] = set()
        self._failed_in_a_row: list[Done] = []
        self.dropped = 0

    async def collect(self, count: int, step: int) -> list[Group]:
        """`count` whole groups, in the order in which they were begun."""
        whole: dict[int, Group] = {}
        running: set[asyncio.Task[tuple[int, Group]]] = set()
        begun = 0
        equal: dict[int, Group] = {}
        try:
            while len(whole) < count:
                while len(whole) + len(running) < count:
                    group = Group(f"{self._prefix}s{step:05d}-g{begun:03d}", self._order.next())
                    running.add(asyncio.create_task(self._run(begun, group, step)))
                    begun += 1
                finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for number, group in sorted((task.result() for task in finished), key=lambda pair: pair[0]):
                    if group.whole and group.equal and len(equal) < self._resample:
                        equal[number] = group
                        self._failed_in_a_row.clear()
                    elif group.whole:
                        whole[number] = group
                        self._second_try.discard(group.task)
                        self._failed_in_a_row.clear()
                    else:
                        self._drop(group)
        finally:
            for task in running:
                task.cancel()
        # Beyond the limit it is the first begun that are replaced, whichever came in first: a seed gives the same again.
        ended = sorted((whole | equal).items())
        replaced = [number for number, group in ended if group.equal][: len(equal)]
        self.equal = [group for number, group in ended if number in replaced]
        return [group for number, group in ended if number not in replaced]

    async def _run(self, number: int, group: Group, step: int) -> tuple[int, Group]:
        rollouts = [
            NewRollout(
                input=self._tasks[group.task],
                is_train=True,
                config=RolloutConfig(),
                metadata={"phase": "train", "start": self._start, "step": step, "task": group.task},
                rollout_id=f"{group.group_id}-r{member:02d}",
                group_id=group.group_id,
            )
            for member in range(self._size)
        ]
        group.done = list(await asyncio.gather(*await self._collector.queue(rollouts)))
        return number, group

    def _drop(self, group: Group) -> None:
        self.dropped += 1
        if group.task in self._second_try:
            self._second_try.discard(group.task)
        else:
            self._second_try.add(group.task)
            self._order.put_back(group.task)
        self._failed_in_a_row.append(next(d for d in group.done if d.failure is not None))
        if len(self._failed_in_a_row) >= self._max_failed:
            raise RunFailed(
                f"{len(self._failed_in_a_row)} groups in a row could not be completed "
                f"(trainer.max_failed_groups = {self._max_failed}). {commonest(self._failed_in_a_row, self._run_folder)}"
            )


def commonest(failed: Sequence[Done], run_folder: Path) -> str:
    """The commonest cause among failed rollouts and the end of one such rollout's log."""
    causes = Counter(d.failure for d in failed)
    cause, count = causes.most_common(1)[0]
    example = next(d for d in failed if d.failure == cause)
    share = "all of them" if count == len(failed) else f"{count} of {len(failed)}"
    return f"Commonest cause ({share}): {cause}\n{log_excerpt(example, run_folder)}".rstrip()


def log_excerpt(done: Done, run_folder: Path, lines: int = 20) -> str:
    """The last lines that a rollout's last attempt wrote: its standard error, else its standard output."""
    if done.attempt is None:
        return ""
    folder = run_folder / "attempts" / done.rollout.rollout_id / done.attempt.attempt_id
    for name in ("stderr.log", "stdout.log"):
        text = tail(folder / name, lines)
        if text:
            return f"--- end of {folder / name}\n{text}\n---"
    return f"(nothing was written to {folder / 'stderr.log'})" if folder.is_dir() else ""
