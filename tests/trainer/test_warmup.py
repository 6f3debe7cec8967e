"""The cold start: which demonstrations are learned from, when it stops, what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from fake_gateway import FakeClient, Play
from fake_student import FakeStudent

from longrein.client import Client
from longrein.config import load
from longrein.records import Rollout
from longrein.trainer.collect import Collector, RunFailed
from longrein.trainer.progress import Silent
from longrein.trainer.tracking import Tracker, read_metrics
from longrein.trainer.warmup import WarmupReport, warm_up


async def run(
    folder: Path, student: FakeStudent, *overrides: str, play: Callable[[Rollout], Play] | None = None
) -> tuple[WarmupReport, FakeClient]:
    defaults = ["warmup.steps=6", "warmup.teacher=a:b", "task.dev=x", "warmup.rollouts_per_step=4"]
    config = load(None, [f"run.dir={folder}", *defaults, *overrides])
    config.run.path.mkdir(parents=True)
    client = FakeClient(play or student.play)
    tracker = Tracker(config, Silent())
    async with Collector(cast(Client, client), needed=student.serve) as collector:
        report = await warm_up(
            config,
            student=cast(Any, student),
            collector=collector,
            tracker=tracker,
            tasks=[{"n": n} for n in range(10)],
            dev_tasks=[{"d": n} for n in range(8)],
        )
    tracker.close()
    return report, client


async def test_it_stops_at_the_bar(tmp_path: Path) -> None:
    student = FakeStudent(gain=0.25)
    report, client = await run(tmp_path, student, "warmup.until=0.5", "warmup.check_after=1")
    assert (report.steps, report.reward, report.reached) == (2, 0.5, True)
    assert (report.demonstrations, report.rejected) == (8, 0)
    assert len(student.imitated) == 2
    assert student.published == [1, 2]
    teacher = [rollout for rollout in client.known.values() if rollout.config.engine == "teacher"]
    dev = [rollout for rollout in client.known.values() if rollout.config.engine == "policy"]
    assert all(rollout.is_train for rollout in teacher)
    assert not any(rollout.is_train for rollout in dev)


async def test_a_policy_that_passes_already_learns_nothing(tmp_path: Path) -> None:
    student = FakeStudent(skill=0.5)
    report, _ = await run(tmp_path, student)
    assert (report.steps, report.reached, student.imitated) == (0, True, [])


async def test_checks_come_when_the_run_file_says(tmp_path: Path) -> None:
    student = FakeStudent(gain=0.0)
    overrides = ("warmup.steps=7", "warmup.check_after=2", "warmup.check_every=3", "warmup.dev_tasks=5")
    report, client = await run(tmp_path, student, *overrides)
    checks = [ids for ids in client.batches if ids[0].startswith("dev-")]
    assert [ids[0][:8] for ids in checks] == ["dev-0002", "dev-0005", "dev-0007"]
    assert all(len(ids) == 5 for ids in checks)
    assert (report.steps, report.reached) == (7, False)
    warnings = [line["text"] for line in read_metrics(tmp_path / "run") if line["kind"] == "warning"]
    assert len(warnings) == 1
    assert "bar was not reached: dev reward 0.0 % after 7 steps" in warnings[0]


async def test_only_demonstrations_that_pass_are_learned_from(tmp_path: Path) -> None:
    student = FakeStudent(gain=1.0)

    def play(rollout: Rollout) -> Play:
        if rollout.config.engine == "policy":
            return student.play(rollout)
        return Play(reward=1.0 if rollout.rollout_id.endswith(("0", "2")) else 0.5)

    report, _ = await run(tmp_path, student, play=play)
    assert {row.rollout_id[-3:] for row in student.imitated[0]} == {"r00", "r02"}
    assert report.rejected == report.demonstrations
    total = sum(row.weights.sum() for row in student.imitated[0])
    assert total == pytest.approx(1.0)


async def test_the_next_demonstrations_are_queued_before_the_learner_computes(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watching(FakeStudent):
        async def imitate(self, rows: Any, learning_rate: float) -> dict[str, float]:
            seen.append(sum(ids[0].startswith("teacher") for ids in client_of["it"].batches))
            return await super().imitate(rows, learning_rate)

    client_of: dict[str, FakeClient] = {}
    student = Watching(gain=0.5)

    def play(rollout: Rollout) -> Play:
        return student.play(rollout)

    defaults = ["warmup.steps=3", "warmup.teacher=a:b", "task.dev=x", "warmup.until=1.0", "warmup.check_after=2"]
    config = load(None, [f"run.dir={tmp_path}", *defaults])
    config.run.path.mkdir(parents=True)
    client = client_of["it"] = FakeClient(play)
    tracker = Tracker(config, Silent())
    async with Collector(cast(Client, client)) as collector:
        await warm_up(
            config, student=cast(Any, student), collector=collector, tracker=tracker, tasks=[{}], dev_tasks=[{}]
        )
    tracker.close()
    assert seen == [2, 3]


@pytest.mark.parametrize(
    ("play", "said"),
    [
        (Play(reward=0.0), "Rewards: "),
        (Play(reward=None, reason="the teacher is not there"), "the teacher is not there"),
    ],
)
async def test_a_teacher_that_never_passes_ends_the_run(tmp_path: Path, play: Play, said: str) -> None:
    student = FakeStudent()
    with pytest.raises(RunFailed, match="none of 12 rollouts of the teacher") as caught:
        await run(tmp_path, student, play=lambda r: play if r.config.engine == "teacher" else student.play(r))
    assert said in str(caught.value)
