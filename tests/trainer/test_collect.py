"""Rollouts and groups as the trainer collects them: what has a reward, what is dropped, when a run ends."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from fake_gateway import FakeClient, Play

from longrein.client import Client
from longrein.records import Attempt, Event, NewRollout, Outcome, Rollout, RolloutState, RolloutStatus
from longrein.tasks import TaskOrder
from longrein.trainer.collect import (
    Collector,
    Done,
    Group,
    Groups,
    RunFailed,
    call_rewards_of,
    commonest,
    failures,
    grade_of,
)
from longrein.trajectory.batch import FinishedRollout


def new(rollout_id: str, **values: Any) -> NewRollout:
    return NewRollout(input={"n": 1}, rollout_id=rollout_id, **values)


@asynccontextmanager
async def collecting(client: FakeClient) -> AsyncIterator[Collector]:
    async with Collector(cast(Client, client)) as collector:
        yield collector


async def collect_one(play: Play) -> Done:
    async with collecting(FakeClient(lambda rollout: play)) as collector:
        (future,) = await collector.queue([new("a", group_id="g")])
        return await future


async def test_a_finished_rollout_has_calls_and_the_last_reward() -> None:
    done = await collect_one(Play(reward=0.25, metrics={"length": 3}))
    assert done.failure is None
    assert done.finished.reward == 0.25
    assert done.finished.group_id == "g"
    assert done.finished.metrics == {"length": 3.0}
    assert [len(c.sampled) for c in done.finished.calls] == [3]


@pytest.mark.parametrize(("value", "reward"), [(True, 1.0), (False, 0.0), (3, 3.0)])
async def test_truth_values_and_whole_numbers_are_rewards(value: Any, reward: float) -> None:
    assert (await collect_one(Play(reward=value))).finished.reward == reward


@pytest.mark.parametrize(
    ("play", "said"),
    [
        (Play(reward=None), "nobody posted a reward"),
        (Play(reward=math.nan), "not a finite number"),
        (Play(reward="good"), "not a finite number"),
        (Play(attempts=0, outcome=Outcome.infrastructure_failed), "no attempt was started"),
        (Play(outcome=Outcome.infrastructure_failed, reason="no such command: agnt"), "no such command: agnt"),
    ],
)
async def test_a_rollout_without_a_usable_reward_says_why(play: Play, said: str) -> None:
    done = await collect_one(play)
    assert done.finished.reward is None
    assert said in (done.failure or "")


async def test_an_infrastructure_failure_is_never_given_a_reward() -> None:
    done = await collect_one(Play(reward=1.0, outcome=Outcome.infrastructure_failed))
    assert done.finished.reward is None


async def test_an_agents_own_failure_is_graded_as_it_stands() -> None:
    done = await collect_one(Play(reward=0.5, outcome=Outcome.agent_failed, reason="timeout"))
    assert (done.finished.reward, done.failure) == (0.5, None)


def test_a_failed_rollout_has_no_reward_whatever_was_posted() -> None:
    attempt = Attempt("a", "0", outcome=Outcome.agent_failed, reason="exit code 3")
    posted = [Event("reward", "a", "0", 1.0, {"value": 1.0})]
    for state, reward in ((RolloutState.failed, None), (RolloutState.succeeded, 1.0)):
        rollout = Rollout("a", {}, status=RolloutStatus(state=state, error_message="dropped"))
        assert grade_of(rollout, attempt, posted) == (reward, {}, "dropped" if reward is None else None)


async def test_what_finished_before_is_not_looked_at_and_an_equal_id_is_found_again() -> None:
    client = FakeClient()
    await client.add_rollouts([new("old")])
    async with collecting(client) as collector:
        fresh, old = await collector.queue([new("fresh"), new("old")])
        assert (await fresh).rollout.rollout_id == "fresh"
        assert (await old).rollout.rollout_id == "old"


async def test_many_rollouts_come_back_each_to_its_future() -> None:
    async with collecting(FakeClient()) as collector:
        futures = await collector.queue([new(f"r{n}") for n in range(300)])
        done = await asyncio.gather(*futures)
        assert [d.rollout.rollout_id for d in done] == [f"r{n}" for n in range(300)]
        assert collector.open == 0


async def test_a_poll_that_fails_fails_what_is_waited_for_and_what_is_queued_later() -> None:
    client = FakeClient(lambda rollout: Play(outcome=None))
    async with collecting(client) as collector:
        (future,) = await collector.queue([new("a")])
        client.fail_polls = RuntimeError("the gateway is gone")
        await client.wake()
        with pytest.raises(RuntimeError, match="the gateway is gone"):
            await future
        with pytest.raises(RuntimeError, match="the gateway is gone"):
            await collector.queue([new("b")])


async def test_withdrawn_rollouts_leave_the_queue() -> None:
    client = FakeClient(lambda rollout: Play(outcome=None if rollout.rollout_id == "waits" else Outcome.succeeded))
    async with collecting(client) as collector:
        waits, done = await collector.queue([new("waits"), new("done")])
        await done
        await collector.withdraw([waits, done])
        assert waits.cancelled()
        assert collector.open == 0
    assert client.known["waits"].status.error_message == "not needed any more"


def groups_of(
    collector: Collector, folder: Path, *, tasks: int = 10, size: int = 2, max_failed: int = 3, resample: int = 0
) -> Groups:
    return Groups(
        collector,
        [{"n": n} for n in range(tasks)],
        TaskOrder(tasks, seed=0, shuffle=False),
        size=size,
        max_failed=max_failed,
        run_folder=folder,
        resample=resample,
    )


def fails(which: Callable[[Rollout], bool], reason: str = "no node") -> Callable[[Rollout], Play]:
    bad = Play(outcome=Outcome.infrastructure_failed, reason=reason)
    return lambda rollout: bad if which(rollout) else Play()


def tasks_of(groups: list[Group]) -> list[int]:
    return [group.task for group in groups]


async def test_groups_are_whole_and_follow_the_task_order(tmp_path: Path) -> None:
    client = FakeClient()
    async with collecting(client) as collector:
        groups = groups_of(collector, tmp_path)
        first, second = await groups.collect(3, step=1), await groups.collect(2, step=2)
    assert (tasks_of(first), tasks_of(second)) == ([0, 1, 2], [3, 4])
    assert all(len(group.done) == 2 and group.whole for group in first + second)
    assert len({d.rollout.rollout_id for g in first + second for d in g.done}) == 10
    assert all(len(batch) == 2 for batch in client.batches)


async def test_a_group_with_one_failed_rollout_is_dropped_whole_and_its_task_tried_once_more(tmp_path: Path) -> None:
    tried: list[int] = []

    def play(rollout: Rollout) -> Play:
        n = rollout.input["n"]
        tried.append(n)
        bad = n == 1 and rollout.rollout_id.endswith("r01")
        return Play(outcome=Outcome.infrastructure_failed, reason="no node") if bad else Play()

    async with collecting(FakeClient(play)) as collector:
        groups = groups_of(collector, tmp_path, max_failed=8)
        got = [await groups.collect(2, step) for step in (1, 2, 3)]
    assert sorted(task for groups_ in got for task in tasks_of(groups_)) == [0, 2, 3, 4, 5, 6]
    assert tried.count(1) == 4  # two groups of two, not a third
    assert groups.dropped == 2


async def test_a_success_between_failures_starts_the_count_anew(tmp_path: Path) -> None:
    async with collecting(FakeClient(fails(lambda rollout: rollout.input["n"] % 2 == 0))) as collector:
        groups = groups_of(collector, tmp_path, tasks=6, max_failed=5)
        got = [task for step in range(6) for task in tasks_of(await groups.collect(1, step))]
    assert all(task % 2 == 1 for task in got)
    assert groups.dropped > 5


async def test_too_many_failed_groups_in_a_row_end_the_run_with_the_cause_and_its_log(tmp_path: Path) -> None:
    async with collecting(FakeClient(fails(lambda rollout: True, "exit code 127"))) as collector:
        log = tmp_path / "attempts" / "s00007-g000-r00" / "0" / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text("line one\nagent.py: cannot open its configuration\n")
        with pytest.raises(RunFailed) as caught:
            await groups_of(collector, tmp_path).collect(1, step=7)
    text = str(caught.value)
    assert "3 groups in a row could not be completed (trainer.max_failed_groups = 3)" in text
    assert "Commonest cause (all of them): exit code 127" in text
    assert "agent.py: cannot open its configuration" in text


async def test_the_commonest_cause_is_named_with_its_share(tmp_path: Path) -> None:
    plays = {"a": "no node", "b": "disk full", "c": "no node"}
    client = FakeClient(lambda r: Play(outcome=Outcome.infrastructure_failed, reason=plays[r.rollout_id]))
    async with collecting(client) as collector:
        done = await asyncio.gather(*await collector.queue([new(name) for name in plays]))
    assert commonest(failures(done), tmp_path).startswith("Commonest cause (2 of 3): no node")


@pytest.mark.parametrize("seed", range(8))
async def test_which_task_a_group_has_does_not_depend_on_who_ends_first(tmp_path: Path, seed: int) -> None:
    """So that a step that is done again asks for the same: two of three groups fail, in any order."""
    dice = random.Random(seed)
    client = FakeClient(lambda rollout: Play(outcome=None))

    async def end_all() -> None:
        while True:
            left = [r for r in client.known.values() if r.status.state is RolloutState.queuing]
            if left:
                one = dice.choice(left)
                bad = one.input["n"] in (0, 2, 4)
                play = Play(outcome=Outcome.infrastructure_failed if bad else Outcome.succeeded)
                client.plays[one.rollout_id] = play
                await client._end(one, RolloutState.failed if bad else RolloutState.succeeded)
            await asyncio.sleep(0)

    ending = asyncio.create_task(end_all())
    async with collecting(client) as collector:
        groups = groups_of(collector, tmp_path, tasks=20, size=1, max_failed=20)
        for step in range(3):
            await groups.collect(3, step)
    ending.cancel()
    by_id = {name: rollout.input["n"] for name, rollout in sorted(client.known.items())}
    assert list(by_id.values()) == [0, 1, 2, 3, 4, 5, 0, 2, 4, 6, 7, 8, 9, 10, 11]


def equal_where(which: Callable[[int], bool]) -> Callable[[Rollout], Play]:
    """Every second rollout of a group succeeds, or all of those whose task is `which`."""
    return lambda r: Play(reward=1.0 if which(r.input["n"]) else float(r.rollout_id.endswith("0")))


async def test_groups_of_equal_rewards_are_replaced_up_to_the_limit(tmp_path: Path) -> None:
    async with collecting(FakeClient(equal_where(lambda n: n < 5))) as collector:
        groups = groups_of(collector, tmp_path, resample=3)
        first = await groups.collect(2, step=1)
        replaced = tasks_of(groups.equal)
        second = await groups.collect(2, step=2)
    assert len(first) == 2
    assert len(replaced) == 3
    assert all(len(group.done) == 2 for group in groups.equal + first)
    assert sorted(replaced + tasks_of(first)) == [0, 1, 2, 3, 4]
    assert (tasks_of(second), groups.equal) == ([5, 6], [])


async def test_which_groups_are_replaced_does_not_hang_on_which_came_in_first(tmp_path: Path) -> None:
    """The first group comes in last, and is replaced all the same."""
    late = asyncio.Event()

    class Late(FakeClient):
        async def _finish(self, rollout: Rollout) -> None:
            if rollout.input["n"] == 0:
                waits = asyncio.create_task(self._later(rollout))
                waiting.append(waits)
            else:
                await super()._finish(rollout)
                if rollout.input["n"] == 2:
                    late.set()

        async def _later(self, rollout: Rollout) -> None:
            await late.wait()
            await super()._finish(rollout)

    waiting: list[asyncio.Task[None]] = []
    async with collecting(Late(equal_where(lambda n: True))) as collector:
        groups = groups_of(collector, tmp_path, resample=1)
        kept = await groups.collect(2, step=1)
    assert (tasks_of(groups.equal), tasks_of(kept)) == ([0], [1, 2])


async def test_without_a_limit_above_0_equal_groups_are_learned_from_as_they_are(tmp_path: Path) -> None:
    async with collecting(FakeClient(equal_where(lambda n: True))) as collector:
        groups = groups_of(collector, tmp_path)
        assert tasks_of(await groups.collect(2, step=1)) == [0, 1]
        assert groups.equal == []


def test_a_group_whose_calls_were_rewarded_differently_is_not_equal() -> None:
    def done(name: str, **calls: float) -> Done:
        rewards = {int(number[1:]): reward for number, reward in calls.items()}
        return Done(Rollout(name, {}), None, FinishedRollout(name, "g", True, 1.0, [], call_rewards=rewards), None)

    assert Group("g", 0, [done("a", c0=1.0), done("b", c0=1.0)]).equal
    assert not Group("g", 0, [done("a", c0=1.0), done("b", c0=0.5)]).equal


def test_rewards_of_calls_are_those_of_the_last_reward_event() -> None:
    def event(**data: Any) -> Event:
        return Event("reward", "r", "0", 0.0, data)

    assert call_rewards_of([event(value=1, calls={"7": 1}), event(value=1, calls={"0": 0.5, "2": -1})]) == {
        0: 0.5,
        2: -1.0,
    }
    assert call_rewards_of([event(value=1)]) == call_rewards_of([]) == {}
