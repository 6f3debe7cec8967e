"""A run that is broken off anywhere and gone on with comes to what it would have come to: the same updates from the same
rollouts in the same order, every step in its metrics once, nothing sampled twice that was finished.

The gateway is in memory and lives on; the trainer dies by an exception that nothing catches. Runs of real processes that
are killed are in tests/test_kills.py and tests/test_resumption.py.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from fake_gateway import FakeClient, Play
from fake_student import FakeStudent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longrein.config import Config, load
from longrein.records import NewRollout, Outcome, Rollout, RolloutState
from longrein.trainer import checkpoint
from longrein.trainer.collect import Collector, RunFailed
from longrein.trainer.evaluate import load_all
from longrein.trainer.journal import JOURNAL, Begun, Failed, GaveUp, Journal, Learned, Lesson, Past
from longrein.trainer.loop import Data, id_prefix, train, withdraw_warm_up
from longrein.trainer.progress import Silent
from longrein.trainer.tracking import METRICS, Tracker, read_metrics

DATA = Data(train=[{"n": n} for n in range(9)], held_out=[{"h": n} for n in range(4)], dev=[{"d": n} for n in range(4)])
OPTIONS = [
    *("trainer.steps=7", "trainer.checkpoint_every=2", "algorithm.groups_per_step=2", "algorithm.group_size=4"),
    *("algorithm.updates_per_batch=2", "eval.every=2", "eval.untuned=true", "task.dev=x"),
    *("warmup.steps=3", "warmup.teacher=a:b", "warmup.until=0.2", "warmup.check_after=2", "warmup.rollouts_per_step=3"),
]


@pytest.fixture(autouse=True)
def _no_power_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


class Killed(BaseException):
    """The end of a trainer, at once."""


class World:
    """A gateway with its record, and the trainers that come and go in a run's folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.config = load(None, [f"run.dir={folder}", *OPTIONS, *options])
        self.config.run.path.mkdir(parents=True)
        self.student = FakeStudent()
        self.client = FakeClient(self.play)
        self.ticks: list[str] = []

    def play(self, rollout: Rollout) -> Play:
        """Some rollouts fail whenever they are tried, so that groups are dropped."""
        tried = re.sub(r"-again\d+", "", rollout.rollout_id)
        if rollout.is_train and tried in ("s00001-g001-r02", "s00003-g000-r01", "s00003-g001-r00", "s00006-g001-r03"):
            return Play(outcome=Outcome.infrastructure_failed, reason="no node")
        return self.student.play(rollout)

    def play_well(self, rollout: Rollout) -> Play:
        return self.student.play(rollout)

    async def start(self, dies_at: int | None = None) -> None:
        """Start a trainer; it raises `Killed` at its so-many-th step."""
        left = itertools.count()
        self.ticks = []

        def tick(where: str) -> None:
            self.ticks.append(where)
            if next(left) == dies_at:
                raise Killed

        resume = checkpoint.latest(self.config.run.path)
        self.student = FakeStudent(tick=tick, gain=0.05)
        if resume is not None:
            self.student.restore(resume)
        tracker = Tracker(self.config, Silent())
        record = tracker.step

        def recorded(step: int, values: Any) -> None:
            tick("before a step is recorded")
            record(step, values)
            tick("after a step is recorded")

        tracker.step = recorded
        ask = self.client.add_rollouts

        async def add_rollouts(new: list[NewRollout]) -> list[Rollout]:
            tick("before asking")
            answer = await ask(new)
            tick("after asking")
            return answer

        self.client.add_rollouts = add_rollouts
        given = cast(Any, self.student), cast(Any, self.client)
        try:
            await train(self.config, DATA, student=given[0], client=given[1], tracker=tracker, resume=resume)
        finally:
            self.client.add_rollouts = ask
            tracker.close()

    def outcome(self) -> dict[str, Any]:
        """What the run came to, without its times."""
        untimed = re.compile(r"time|.*per_second")
        steps = [line for line in read_metrics(self.config.run.path) if line["kind"] in ("step", "warmup")]
        past = Past.read(self.config.run.path)
        assert past is not None
        assert past.undone == {}
        return {
            "history": self.student.history,
            "version": self.student.version,
            "steps": [{k: v for k, v in line.items() if not untimed.match(k)} for line in steps],
            "evaluations": [(e.name, e.step, e.version, e.rewards) for e in load_all(self.config.run.path)],
            "learned": list(past.learned.values()),
            "order": checkpoint_of(self.config).order,
            "groups": checkpoint_of(self.config).groups["dropped"],
        }


def checkpoint_of(config: Config) -> checkpoint.TrainerState:
    folder = checkpoint.latest(config.run.path)
    assert folder is not None
    return checkpoint.read_state(folder)


async def unbroken_in(folder: Path) -> World:
    world = World(folder)
    await world.start()
    return world


async def test_an_unbroken_run_has_all_that_the_others_are_compared_by(tmp_path: Path) -> None:
    world = await unbroken_in(tmp_path)
    outcome, where = world.outcome(), Counter(world.ticks)
    assert outcome["groups"] >= 3
    assert len(outcome["history"]) == outcome["version"] > 8
    assert [line["step"] for line in outcome["steps"] if line["kind"] == "step"] == [1, 2, 3, 4, 5, 6, 7]
    assert len(outcome["evaluations"]) == 2 + 3 + 1
    assert min(where.values()) >= 2, where  # each kind of moment comes


async def test_a_run_that_is_broken_off_at_any_moment_comes_to_the_same(tmp_path: Path) -> None:
    world = await unbroken_in(tmp_path / "unbroken")
    expected, moments = world.outcome(), len(world.ticks)
    for moment in range(moments):
        broken = World(tmp_path / str(moment))
        with pytest.raises(Killed):
            await broken.start(dies_at=moment)
        where = broken.ticks[-1]
        await broken.start()
        assert broken.outcome() == expected, f"{where}, moment {moment}"
        assert {name for name in broken.client.known if "-again" not in name} == set(world.client.known), where


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moments=st.lists(st.integers(0, 80), min_size=2, max_size=6))
async def test_and_so_does_one_that_is_broken_off_again_and_again(tmp_path_factory: Any, moments: list[int]) -> None:
    expected = (await unbroken_in(tmp_path_factory.mktemp("unbroken"))).outcome()
    broken = World(tmp_path_factory.mktemp("broken"))
    for moment in moments:
        try:
            await broken.start(dies_at=moment)
        except Killed:
            continue
    await broken.start()
    assert broken.outcome() == expected


async def test_what_was_learned_before_is_learned_again_before_the_engine_serves(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(Killed):
        await world.start(dies_at=await first(tmp_path / "look", lambda t: t.count("after a step is recorded") == 3))
    reached = world.student.version
    assert checkpoint_of(world.config).version == reached - 2
    await world.start()
    assert world.student.published[0] == reached


async def first(folder: Path, true: Callable[[list[str]], bool]) -> int:
    """The first moment of an unbroken run up to which `true` holds."""
    ticks = (await unbroken_in(folder)).ticks
    return next(n for n in range(len(ticks)) if true(ticks[: n + 1]))


async def test_steps_that_are_done_again_stand_once_in_the_metrics_and_the_others_are_marked(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(Killed):
        await world.start(dies_at=await first(tmp_path / "look", lambda t: t.count("after a step is recorded") == 3))
    with (world.config.run.path / METRICS).open("ab") as file:
        file.write(b'{"kind": "ste')  # cut off
    await world.start()
    lines = read_metrics(world.config.run.path)
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4, 5, 6, 7]
    assert [(line["was"], line["step"]) for line in lines if line["kind"] == "undone"] == [("step", 3)]
    assert [line["step"] for line in lines if line["kind"] == "begin"] == [0, 2]
    for line in (world.config.run.path / METRICS).read_text().splitlines():
        json.loads(line)


# --- What failed --------------------------------------------------------------------------------------------------


async def test_a_rollout_that_failed_while_nobody_waited_is_asked_for_again(tmp_path: Path) -> None:
    """The end of a trainer takes its controller with it, which fails what it runs."""
    world = World(tmp_path, "warmup.steps=0", "eval.untuned=false")
    unfinished: list[str] = []

    def play(rollout: Rollout) -> Play:
        if rollout.rollout_id == "s00002-g000-r01":
            unfinished.append(rollout.rollout_id)
            return Play(outcome=None)
        return world.student.play(rollout)

    world.client.play = play
    asked = world.client.add_rollouts

    async def dies(new: list[NewRollout]) -> list[Rollout]:
        answer = await asked(new)
        if unfinished:
            raise Killed
        return answer

    world.client.add_rollouts = dies
    with pytest.raises(Killed):
        await world.start()
    world.client.add_rollouts = asked
    world.client.plays[unfinished[0]] = Play(outcome=Outcome.infrastructure_failed, reason="the controller was stopped")
    await world.client._end(world.client.known[unfinished[0]], RolloutState.failed, "the controller was stopped")
    world.client.play = world.student.play
    await world.start()
    lessons = Past.read(world.config.run.path)
    assert lessons is not None
    group = {name for name in lessons.lessons() if name.startswith("s00002-g000")}
    assert group == {f"s00002-g000-r{n}" for n in ("00", "01-again1", "02", "03")}
    assert checkpoint_of(world.config).groups["dropped"] == 0


async def test_a_run_that_gave_up_tries_again_what_had_failed(tmp_path: Path) -> None:
    world = World(tmp_path, "warmup.steps=0", "trainer.max_failed_groups=2")
    world.client.play = lambda rollout: Play(outcome=Outcome.infrastructure_failed) if rollout.is_train else Play()
    with pytest.raises(RunFailed, match="2 groups in a row"):
        await world.start()
    world.client.play = world.play_well
    await world.start()
    assert checkpoint_of(world.config).step == 7
    assert checkpoint_of(world.config).groups["dropped"] == 0


async def test_a_first_attempt_that_failed_is_made_again(tmp_path: Path) -> None:
    world = World(tmp_path, "warmup.steps=0", "trainer.steps=1")
    world.client.play = lambda rollout: Play(calls=[])
    with pytest.raises(RunFailed, match="without a call to the model"):
        await world.start()
    world.client.play = world.play_well
    await world.start()
    assert "preflight-again1" in world.client.known


async def test_failures_in_a_row_are_counted_over_a_resumption(tmp_path: Path) -> None:
    options = (
        "warmup.steps=0",
        "algorithm.groups_per_step=1",
        "trainer.checkpoint_every=1",
        "trainer.max_failed_groups=3",
    )
    world = World(tmp_path, *options)
    bad = {f"s{step:05d}-g{group:03d}-r00" for step, group in ((2, 1), (2, 2), (3, 0))}

    def play(rollout: Rollout) -> Play:
        failed = rollout.rollout_id.startswith(tuple(bad))
        return Play(outcome=Outcome.infrastructure_failed) if failed else world.student.play(rollout)

    world.client.play = play
    await world.start()  # two in a row at most
    state = checkpoint_of(world.config)
    assert state.groups["failed_in_a_row"] == []
    assert state.groups["dropped"] == 1


# --- What does not fit --------------------------------------------------------------------------------------------


async def test_tasks_that_were_changed_are_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(Killed):
        await world.start(dies_at=30)
    world.config = world.config.model_copy(update={"run": world.config.run.model_copy(update={"seed": 5})})
    with pytest.raises(RunFailed, match="is in the record with another task: the run file's tasks, their order or"):
        await world.start()


async def test_a_step_that_is_learned_from_other_rollouts_is_warned_about(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(Killed):
        await world.start(dies_at=await first(tmp_path / "look", lambda t: t.count("after a step is recorded") == 3))
    file = world.config.run.path / JOURNAL
    file.write_text(file.read_text().replace("s00003-g002-r00", "s00003-g009-r00"))
    await world.start()
    warnings = [line["text"] for line in read_metrics(world.config.run.path) if line["kind"] == "warning"]
    assert any("step 3 was learned from other rollouts or tokens before" in text for text in warnings)


async def test_what_a_run_wanted_for_its_warm_up_is_withdrawn_when_it_goes_on_behind_it() -> None:
    client = FakeClient(lambda rollout: Play(outcome=None))
    wanted = {"x-teacher": "warm-up", "x-dev": "dev-0002", "x-s": "train", "y-teacher": "warm-up"}
    await client.add_rollouts([NewRollout({}, rollout_id=n, metadata={"phase": p}) for n, p in wanted.items()])
    await withdraw_warm_up(cast(Any, client), "x-")
    failed = {name for name, rollout in client.known.items() if rollout.status.state is RolloutState.failed}
    assert failed == {"x-teacher", "x-dev"}


def test_a_prefix_is_the_same_at_every_start(tmp_path: Path) -> None:
    def config(name: str, *options: str) -> Config:
        made = load(None, [f"run.dir={tmp_path}", f"run.name={name}", *options])
        made.run.path.mkdir(exist_ok=True)
        return made

    shared = id_prefix(config("a", "gateway.url=http://x"))
    assert re.fullmatch(r"a-[0-9a-f]{6}-", shared)
    assert id_prefix(config("a", "gateway.url=http://x")) == shared
    assert id_prefix(config("b", "gateway.url=http://x")) != shared
    assert id_prefix(config("c")) == id_prefix(config("c", "gateway.url=http://x")) == ""


async def test_the_policy_serves_before_it_is_needed_and_not_for_what_is_recorded(tmp_path: Path) -> None:
    client = FakeClient()
    needed: list[int] = []

    async def need() -> None:
        needed.append(len(client.known))

    async with Collector(cast(Any, client), needed=need) as collector:
        await (await collector.queue([NewRollout({}, rollout_id="a")]))[0]
    async with Collector(cast(Any, client), needed=need) as collector:
        await (await collector.queue([NewRollout({}, rollout_id="a")]))[0]
        assert needed == [0]
        await (await collector.queue([NewRollout({}, rollout_id="b")]))[0]
    assert needed == [0, 1]


# --- The journal --------------------------------------------------------------------------------------------------


def learned(step: int, part: int = 0, name: str = "r", phase: Any = "train") -> Learned:
    return Learned(phase, step, part, step, [Lesson(f"{name}{step}", "0", 3)])


def test_a_start_undoes_what_lies_behind_its_checkpoint() -> None:
    past = Past()
    for entry in (Begun(-1), learned(1, phase="warm-up"), learned(1), learned(2), learned(3), Begun(1)):
        past.take(entry)
    assert list(past.learned) == [("warm-up", 1, 0), ("train", 1, 0)]
    assert list(past.undone) == [("train", 2, 0), ("train", 3, 0)]
    past.take(learned(2))
    assert list(past.undone) == [("train", 3, 0)]
    past.take(Begun(-1))
    assert past.learned == {}
    past.take(learned(1))
    assert past.lessons() == {"r1": [Lesson("r1", "0", 3)]}


def test_failures_are_remembered_unless_the_run_gave_up_on_them() -> None:
    past = Past()
    for entry in (Failed("a"), learned(1), Failed("b"), GaveUp(), Failed("c")):
        past.take(entry)
    assert [past.failed(name) for name in "abc"] == [True, False, True]


def test_a_line_that_was_cut_off_is_no_line_and_the_next_one_is(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None)
    journal.learned(learned(1))
    journal.close()
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"kind":"learned","phase":"tr')
    journal = Journal(tmp_path, 1)
    assert journal.learned(learned(2))
    journal.close()
    past = Past.read(tmp_path)
    assert past is not None
    assert list(past.learned) == [("train", 1, 0), ("train", 2, 0)]
