"""Held-out evaluation: rewards per task, their mean with a 95 % interval, and the paired rise between two evaluations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from longrein.records import Json, NewRollout, RolloutConfig, now
from longrein.trainer.collect import Collector, Done, RunFailed, commonest, failures

RESAMPLES = 10_000
_Z = 1.959963984540054  # the normal distribution's 97.5 % quantile


class Interval(msgspec.Struct, frozen=True):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


class Evaluation(msgspec.Struct, frozen=True):
    """What one evaluation found. Written to `eval-NAME.json` in the run's folder."""

    name: str
    step: int
    version: int
    """Policy version that was evaluated."""
    mean: float
    low: float
    high: float
    rewards: dict[str, list[float]]
    """Rewards of each task's rollouts, by the task's index."""
    failed: int
    """Rollouts without a reward; they count nowhere."""
    started_at: float
    seconds: float

    @property
    def interval(self) -> Interval:
        return Interval(self.mean, self.low, self.high)


async def evaluate(
    collector: Collector,
    tasks: Sequence[Json],
    *,
    name: str,
    step: int,
    version: int,
    seed: int,
    run_folder: Path,
    rollouts_per_task: int = 1,
    prefix: str = "",
) -> tuple[Evaluation, list[Done]]:
    """Run the policy on `tasks` in mode val and grade it. Raises `RunFailed` if no rollout could be graded."""
    began = now()
    done = await run_policy(
        collector, tasks, phase=f"eval-{name}", step=step, rollouts_per_task=rollouts_per_task, prefix=prefix
    )
    rewards: dict[str, list[float]] = {}
    for one in done:
        if one.finished.reward is not None:
            rewards.setdefault(str(one.rollout.metadata["task"]), []).append(one.finished.reward)
    if not rewards:
        raise RunFailed(
            f"evaluation {name!r}: none of its {len(done)} rollouts was graded. {commonest(failures(done), run_folder)}"
        )
    found = interval(rewards, seed)
    evaluation = Evaluation(
        name=name,
        step=step,
        version=version,
        mean=found.mean,
        low=found.low,
        high=found.high,
        rewards=rewards,
        failed=sum(one.failure is not None for one in done),
        started_at=began,
        seconds=now() - began,
    )
    save(evaluation, run_folder)
    return evaluation, done


async def run_policy(
    collector: Collector, tasks: Sequence[Json], *, phase: str, step: int, rollouts_per_task: int = 1, prefix: str = ""
) -> list[Done]:
    """Run the policy on every task in mode val; the finished rollouts in task order."""
    rollouts = [
        NewRollout(
            input=task,
            is_train=False,
            config=RolloutConfig(),
            metadata={"phase": phase, "step": step, "task": index},
            rollout_id=f"{prefix}{phase}-s{step:05d}-t{index:04d}-r{member:02d}",
            group_id=f"{prefix}{phase}-s{step:05d}-t{index:04d}",
        )
        for index, task in enumerate(tasks)
        for member in range(rollouts_per_task)
    ]
    return list(await asyncio.gather(*await collector.queue(rollouts)))


def interval(rewards: Mapping[str, Sequence[float]], seed: int) -> Interval:
    """Mean over tasks of the mean over a task's rollouts, with a 95 % interval.

    Wilson's score interval where every task has one reward and all are 0 or 1 (Wilson 1927, Eq. 6 without continuity
    correction), else the percentile bootstrap over tasks.
    """
    values = _task_means(rewards, sorted(rewards))
    if all(len(r) == 1 for r in rewards.values()) and bool(np.isin(values, (0.0, 1.0)).all()):
        low, high = wilson(int(values.sum()), len(values))
        return Interval(float(values.mean()), low, high)
    return _bootstrap(values, seed)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion."""
    share = successes / trials
    scale = 1 + _Z**2 / trials
    centre = (share + _Z**2 / (2 * trials)) / scale
    half = _Z * math.sqrt(share * (1 - share) / trials + _Z**2 / (4 * trials**2)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_rise(before: Evaluation, after: Evaluation, seed: int) -> Interval | None:
    """Mean difference `after - before` over the tasks that both graded, with a 95 % bootstrap interval over tasks.

    None if they have no task in common.
    """
    common = sorted(before.rewards.keys() & after.rewards.keys())
    if not common:
        return None
    return _bootstrap(_task_means(after.rewards, common) - _task_means(before.rewards, common), seed)


def _task_means(rewards: Mapping[str, Sequence[float]], tasks: Sequence[str]) -> np.ndarray:
    return np.array([float(np.mean(rewards[task])) for task in tasks], dtype=np.float64)


def _bootstrap(values: np.ndarray, seed: int) -> Interval:
    generator = np.random.default_rng(seed)
    size = (RESAMPLES // 20, len(values))  # in parts, so that memory stays small for many tasks
    means = [values[generator.integers(0, len(values), size=size)].mean(axis=1) for _ in range(20)]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high))


def save(evaluation: Evaluation, run_folder: Path) -> None:
    """Write `eval-NAME.json`, whole or not at all."""
    file = run_folder / f"eval-{evaluation.name}.json"
    part = file.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(evaluation) + b"\n")
    part.replace(file)


def load_all(run_folder: Path) -> list[Evaluation]:
    """The evaluations of a run, in the order in which they were made."""
    files = run_folder.glob("eval-*.json")
    found = [msgspec.json.decode(file.read_bytes(), type=Evaluation) for file in files]
    return sorted(found, key=lambda e: e.started_at)
