"""The cold start: supervised learning from a teacher's rollouts, recorded through the same harness and gateway.

Policy gradients have nothing to start from while the policy never succeeds. A teacher (the run file's `[warmup]`) answers
the harness's calls, only rollouts whose reward passes a bar are learned from, and the warm-up stops as soon as the policy
itself reaches a bar on tasks of its own (`task.dev`), so that reinforcement learning finds something to improve.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from longrein.config import Config
from longrein.records import Json, NewRollout, RolloutConfig
from longrein.tasks import TaskOrder
from longrein.trainer.collect import Collector, Done, RunFailed, attempts_of, commonest, failures
from longrein.trainer.evaluate import run_policy
from longrein.trainer.journal import Journal, Learned, lessons
from longrein.trainer.progress import percent
from longrein.trainer.student import Student
from longrein.trainer.tracking import Tracker
from longrein.trajectory.batch import make_demonstrations

EMPTY_BATCHES = 3  # batches in a row without one demonstration that passes, after which the teacher is held to be wrong


@dataclass(frozen=True)
class WarmupReport:
    """What the warm-up did."""

    steps: int
    demonstrations: int
    rejected: int
    reward: float
    """Mean reward on the dev tasks at the last check."""
    reached: bool
    seconds: float

    def __str__(self) -> str:
        return (
            f"warm-up: {self.steps} steps on {self.demonstrations} demonstrations ({self.rejected} did not pass), "
            f"dev reward {percent(self.reward)}, {self.seconds:.0f} s"
        )


async def warm_up(
    config: Config,
    *,
    student: Student,
    collector: Collector,
    tracker: Tracker,
    tasks: Sequence[Json],
    dev_tasks: Sequence[Json],
    journal: Journal | None = None,
    prefix: str = "",
) -> WarmupReport:
    """Learn from the teacher until the policy's mean reward on the dev tasks reaches `warmup.until`.

    The teacher's next rollouts run while the learner computes. A bar that is not reached within `warmup.steps` is a
    warning. Raises `RunFailed` when the teacher's rollouts do not pass.
    """
    options = config.warmup
    began = time.monotonic()
    demonstrations = Demonstrations(config, collector, tasks, prefix)
    reward, step = 0.0, 0
    dev = list(dev_tasks[: options.dev_tasks])
    await demonstrations.queue()
    try:
        for step in count():
            if _is_check(step, options.check_after, options.check_every, options.steps):
                with tracker.phase("warm-up check", f"step {step}"):
                    await student.publish()
                    done = await run_policy(collector, dev, phase=f"dev-{step:04d}", step=step, prefix=prefix)
                    reward = _mean_reward(done, config)
                tracker.warmup(step, {"dev/reward": reward, "version": student.version})
                if reward >= options.until or step >= options.steps:
                    break
            with tracker.phase("warm-up", f"step {step + 1}"):
                passed = await demonstrations.next()
                batch = make_demonstrations([done.finished for done in passed], config.algorithm.train_kinds)
                values = await student.imitate(batch.rows, options.learning_rate)
            if journal is not None:
                attempts = attempts_of(passed)
                journal.learned(Learned("warm-up", step + 1, 0, student.version, lessons(attempts, batch.rows)))
            tracker.warmup(step + 1, {**values, "demonstrations": len(passed)})
    finally:
        await demonstrations.abandon()
    report = WarmupReport(
        steps=step,
        demonstrations=demonstrations.passed,
        rejected=demonstrations.rejected,
        reward=reward,
        reached=reward >= options.until,
        seconds=time.monotonic() - began,
    )
    tracker.note(str(report))
    if not report.reached:
        tracker.warn(
            f"the warm-up's bar was not reached: dev reward {percent(reward)} after {step} steps, warmup.until is "
            f"{percent(options.until)}; raise warmup.steps or warmup.learning_rate"
        )
    return report


def _is_check(step: int, first: int, every: int, last: int) -> bool:
    return step >= last or (step >= first and (step - first) % every == 0)


def _mean_reward(done: Sequence[Done], config: Config) -> float:
    rewards = [one.finished.reward for one in done if one.finished.reward is not None]
    if not rewards:
        raise RunFailed(f"the warm-up's check: no rollout was graded. {commonest(failures(done), config.run.path)}")
    return sum(rewards) / len(rewards)


class Demonstrations:
    """The teacher's rollouts, one batch of `warmup.rollouts_per_step` queued ahead of the one in use."""

    def __init__(self, config: Config, collector: Collector, tasks: Sequence[Json], prefix: str) -> None:
        self._config = config
        self._collector = collector
        self._tasks = tasks
        self._prefix = prefix
        self._order = TaskOrder(len(tasks), seed=f"warmup/{config.run.seed}", shuffle=config.task.shuffle)
        self._batch = 0
        self._ahead: list[asyncio.Future[Done]] = []
        self.passed = 0
        self.rejected = 0

    async def queue(self) -> None:
        """Queue one batch."""
        rollouts = []
        for member in range(self._config.warmup.rollouts_per_step):
            index, rollout_id = self._order.next(), f"{self._prefix}teacher-{self._batch:04d}-r{member:02d}"
            rollouts.append(
                NewRollout(
                    input=self._tasks[index],
                    is_train=True,
                    config=RolloutConfig(engine="teacher"),
                    metadata={"phase": "warm-up", "step": self._batch, "task": index},
                    rollout_id=rollout_id,
                    group_id=rollout_id,
                )
            )
        self._batch += 1
        self._ahead = await self._collector.queue(rollouts)

    async def next(self) -> list[Done]:
        """The rollouts of the batch ahead that pass; the batch after it is queued before this returns."""
        bar = self._config.warmup.pass_reward
        tried: list[Done] = []
        for _ in range(EMPTY_BATCHES):
            done = list(await asyncio.gather(*self._ahead))
            await self.queue()
            passed = [one for one in done if one.finished.reward is not None and one.finished.reward >= bar]
            self.passed += len(passed)
            self.rejected += len(done) - len(passed)
            if passed:
                return passed
            tried += done
        failed = failures(tried)
        why = commonest(failed, self._config.run.path) if failed else f"Rewards: {[d.finished.reward for d in tried]}"
        raise RunFailed(f"none of {len(tried)} rollouts of the teacher reached warmup.pass_reward = {bar}. {why}")

    async def abandon(self) -> None:
        """Let go of the batch that is queued ahead."""
        await self._collector.withdraw(self._ahead)
