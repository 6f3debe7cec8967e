"""The training loop against a gateway and a policy in memory: order, updates, failures, going on after a stop."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from fake_gateway import FakeClient, Play, call
from fake_student import FakeStudent
from hypothesis import given
from hypothesis import strategies as st

from longrein.client import ApiError
from longrein.config import Config, ConfigError, load
from longrein.records import Attempt, Outcome, Rollout
from longrein.trainer import checkpoint
from longrein.trainer.collect import Done, RunFailed
from longrein.trainer.evaluate import load_all
from longrein.trainer.loop import Data, divide, load_data, refuse_untrainable, train
from longrein.trainer.preflight import problem_of
from longrein.trainer.progress import Silent
from longrein.trainer.tracking import Tracker, read_metrics
from longrein.trajectory.batch import FinishedRollout

DATA = Data(
    train=[{"n": n} for n in range(20)], held_out=[{"h": n} for n in range(4)], dev=[{"d": n} for n in range(4)]
)


def config_in(folder: Path, *overrides: str) -> Config:
    base = [f"run.dir={folder}", "trainer.steps=3", "algorithm.groups_per_step=2", "algorithm.group_size=4"]
    config = load(None, [*base, "task.shuffle=false", "task.dev=x", *overrides])
    config.run.path.mkdir(parents=True, exist_ok=True)
    return config


async def run(config: Config, student: FakeStudent, client: FakeClient | None = None) -> FakeClient:
    client = client or FakeClient(student.play)
    tracker = Tracker(config, Silent())
    resume = checkpoint.latest(config.run.path)
    try:
        await train(config, DATA, student=cast(Any, student), client=cast(Any, client), tracker=tracker, resume=resume)
    finally:
        tracker.close()
    assert not student.running
    return client


def stages(client: FakeClient) -> list[str]:
    """What was queued, in order, without repetitions."""
    names = [re.sub(r"(s\d{5}|eval-step-\d+|eval-[a-z]+|dev-\d+|[a-z]+).*", r"\1", ids[0]) for ids in client.batches]
    return [name for number, name in enumerate(names) if number == 0 or names[number - 1] != name]


async def test_a_run_goes_from_a_first_attempt_to_a_last_evaluation(tmp_path: Path) -> None:
    student = FakeStudent()
    config = config_in(
        tmp_path,
        *("eval.untuned=true", "eval.untuned_tasks=2", "eval.every=2"),
        *("warmup.steps=5", "warmup.teacher=a:b", "warmup.until=0.25"),
    )
    client = await run(config, student)
    assert stages(client) == [
        *("preflight", "eval-untuned", "teacher", "dev-0000", "teacher", "dev-0001"),
        *("eval-before", "s00001", "s00002", "eval-step-2", "s00003", "eval-after"),
    ]
    assert [(e.name, e.mean) for e in load_all(config.run.path)] == [
        *[("untuned", 0.0), ("before", 0.25), ("step-2", 0.75), ("after", 1.0)]
    ]
    tasks = [len(e.rewards) for e in load_all(config.run.path)]
    assert tasks == [2, *[len(DATA.held_out)] * 3]
    assert student.published == [0, 0, 1, 2, 3, 4]
    lines = read_metrics(config.run.path)
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["reward/mean"] for line in steps] == [0.25, 0.5, 0.75]
    assert [line["version"] for line in steps] == [2, 3, 4]
    assert steps[0]["tokens/trained"] == 2 * 4 * 3
    phases = Counter(line["phase"] for line in lines if line["kind"] == "phase")
    assert phases["collect"] == phases["learn"] == phases["publish"] == 3
    folder = checkpoint.latest(config.run.path)
    assert folder is not None
    assert folder.name == "step-000003"
    assert (folder / "skill").read_text() == "1.0"


async def test_each_rollout_is_whole_in_one_update_and_advantages_come_first(tmp_path: Path) -> None:
    student = FakeStudent(skill=0.25, gain=0.0)
    config = config_in(tmp_path, "algorithm.updates_per_batch=3", "trainer.steps=1")

    def play(rollout: Rollout) -> Play:
        two = [call(rollout.rollout_id, n, sampled=4, parent=None, prefix=None) for n in range(2)]
        played = student.play(rollout)
        return Play(reward=played.reward, calls=two)

    await run(config, student, FakeClient(play))
    parts = [{row.rollout_id for row in rows} for rows in student.updates]
    assert len(parts) == 3
    assert sum(len(part) for part in parts) == len(set().union(*parts)) == 8
    for rows in student.updates:
        assert sum(row.weights.sum() for row in rows) == pytest.approx(1.0)
    advantage = {row.rollout_id: row.advantages.max() for rows in student.updates for row in rows}
    for group in ("s00001-g000", "s00001-g001"):  # 1 of 4 succeeded: (1 - 0.25) / 0.5 and (0 - 0.25) / 0.5
        assert advantage[f"{group}-r00"] == pytest.approx(1.5, rel=1e-4)
    assert read_metrics(config.run.path)[-1]["kind"] in {"note", "phase"}


async def test_a_step_without_any_advantage_changes_nothing_and_is_warned_about(tmp_path: Path) -> None:
    student = FakeStudent(skill=1.0)
    config = config_in(tmp_path, "trainer.steps=1")
    await run(config, student)
    assert student.updates == []
    assert student.published == [0]
    assert any(
        "all rewards were equal" in line["text"] for line in read_metrics(config.run.path) if line["kind"] == "warning"
    )


async def test_groups_of_equal_rewards_are_replaced_counted_and_reported(tmp_path: Path) -> None:
    student = FakeStudent(skill=0.25, gain=0.0)
    config = config_in(tmp_path, "algorithm.dynamic_sampling=2", "trainer.steps=1", "task.kind=n")

    def play(rollout: Rollout) -> Play:
        return Play(reward=0.0) if rollout.input.get("n") in (0, 1, 2) else student.play(rollout)

    await run(config, student, FakeClient(play))
    lines = read_metrics(config.run.path)
    (replaced,) = [line for line in lines if line["kind"] == "replaced"]
    assert replaced["groups"] == ["s00001-g000", "s00001-g001"]
    (step,) = [line for line in lines if line["kind"] == "step"]
    assert step["groups/replaced"] == 2
    assert step["groups/zero_variance"] == 3 / 4  # task 2's group is beyond the limit, and kept
    assert step["tokens/untrained/equal rewards"] == 2 * 4 * 3
    assert step["tokens/sampled"] == step["tokens/trained"] + step["tokens/untrained/equal rewards"] == 4 * 4 * 3
    assert {name: step[f"reward/kind/{name}"] for name in "0123"} == {"0": 0, "1": 0, "2": 0, "3": 0.25}
    (rows,) = student.updates
    assert {row.group_id for row in rows} == {"s00001-g002", "s00001-g003"}


async def test_what_an_algorithm_computes_beforehand_is_computed_once_a_step_of_all_rows(tmp_path: Path) -> None:
    student = FakeStudent(skill=0.25, gain=0.0)
    options = ["kl_coefficient=0.1", "kl_in=reward", "kl_estimator=k1", "updates_per_batch=2"]
    config = config_in(tmp_path, "trainer.steps=2", *(f"algorithm.{option}" for option in options))
    await run(config, student)
    assert [(before, len(rows)) for before, rows in student.prepared] == [(0, 8), (2, 8)]
    assert [len(rows) for rows in student.updates] == [4] * 4
    steps = [line for line in read_metrics(config.run.path) if line["kind"] == "step"]
    assert steps[0]["reward/kl"] == pytest.approx(-0.1 * 0.5 * 3)
    assert steps[0]["staleness/max"] == 0
    assert steps[1]["staleness/max"] == 2  # the fake gateway's tokens are all of version 0


async def test_a_step_without_any_advantage_is_learned_from_where_there_is_another_gradient(tmp_path: Path) -> None:
    student = FakeStudent(skill=1.0)
    await run(config_in(tmp_path, "trainer.steps=1", "algorithm.entropy_coefficient=0.01"), student)
    assert len(student.updates) == 1


async def test_a_constant_normaliser_reaches_the_batch(tmp_path: Path) -> None:
    student = FakeStudent(skill=0.25)
    options = ["algorithm.normaliser=constant", "algorithm.normaliser_tokens=10"]
    await run(config_in(tmp_path, "trainer.steps=1", *options), student)
    assert {weight for row in student.updates[0] for weight in row.weights[row.trained]} == {1 / 80}


async def test_max_seconds_ends_learning_and_evaluation_follows(tmp_path: Path) -> None:
    student = FakeStudent()
    config = config_in(tmp_path, "trainer.max_seconds=0.000001", "trainer.steps=50")
    client = await run(config, student)
    assert stages(client) == ["preflight", "eval-before", "s00001", "eval-after"]


async def test_a_run_goes_on_where_its_last_checkpoint_was(tmp_path: Path) -> None:
    config = config_in(tmp_path, "trainer.steps=2", "trainer.checkpoint_every=1")
    first = await run(config, FakeStudent())
    longer = config_in(tmp_path, "trainer.steps=4", "trainer.checkpoint_every=1")
    student = FakeStudent(skill=0.5)
    second = await run(longer, student)
    assert stages(second) == ["preflight", "s00003", "s00004", "eval-after"]
    inputs = [r.input["n"] for c in (first, second) for r in c.known.values() if r.is_train]
    assert inputs == [n for n in range(8) for _ in range(4)]
    again = await run(longer, FakeStudent())  # finished: nothing is left to do
    assert stages(again) == []


async def test_a_run_without_a_checkpoint_is_begun_again_from_what_is_recorded(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    student = FakeStudent(skill=0.25)
    client = FakeClient(
        lambda rollout: Play(reward=None) if rollout.rollout_id.startswith("s00002") else student.play(rollout)
    )
    with pytest.raises(RunFailed, match="nobody posted a reward"):
        await run(config, student, client)
    known = set(client.known)
    again = FakeStudent(skill=0.25)
    client.play = again.play
    await run(config, again, client)
    assert again.version == 3
    fresh = client.known.keys() - known
    assert {name for name in fresh if not name.startswith(("s00003", "eval-after"))} == {
        f"s00002-g{group:03d}-r{member:02d}-again1" for group in range(2) for member in range(4)
    }


async def test_an_external_gateways_record_gets_ids_that_no_other_run_has(tmp_path: Path) -> None:
    config = config_in(tmp_path, "gateway.url=http://x", "run.name=my run", "trainer.steps=1")
    client = await run(config, FakeStudent())
    assert all(re.match(r"my-run-[0-9a-f]{6}-", rollout_id) for rollout_id in client.known)


@given(count=st.integers(1, 40), parts=st.integers(1, 6))
def test_rollouts_are_divided_evenly_and_none_twice(count: int, parts: int) -> None:
    rollouts = [FinishedRollout(f"r{n}", "g", True, 1.0, []) for n in range(count)]
    divided = divide(rollouts, parts, "0/1")
    assert sorted(r.rollout_id for part in divided for r in part) == sorted(r.rollout_id for r in rollouts)
    sizes = [len(part) for part in divided]
    assert max(sizes) - min(sizes) <= 1
    assert len(divided) == min(count, parts)
    assert divided == divide(rollouts, parts, "0/1")


@pytest.mark.parametrize(
    ("outcome", "calls", "failure", "said"),
    [
        (
            Outcome.infrastructure_failed,
            0,
            "no such command",
            "the agent did not start or could not go on: no such command",
        ),
        (Outcome.agent_failed, 0, None, "the agent ended (exit code 3) without a call to the model"),
        (Outcome.succeeded, 2, "the grader raised KeyError", "made 2 calls, but there is no reward: the grader raised"),
    ],
)
def test_a_first_attempt_says_which_of_the_three_did_not_happen(
    outcome: Outcome, calls: int, failure: str | None, said: str
) -> None:
    attempt = Attempt("r", "0", outcome=outcome, exit_code=3)
    finished = FinishedRollout(
        "r", "r", False, None if failure else 0.0, [call(number=n) for n in range(calls)], outcome
    )
    assert said in (problem_of(Done(Rollout("r", {}), attempt, finished, failure)) or "")


def test_a_first_attempt_whose_calls_were_all_refused_shows_the_refusal() -> None:
    refused = call(status="error", http_status=400, error={"message": "unknown model 'gpt-4'"}, sampled=0)
    done = Done(
        Rollout("r", {}),
        Attempt("r", "0", outcome=Outcome.agent_failed),
        FinishedRollout("r", "r", False, 0.0, [refused]),
        None,
    )
    assert problem_of(done) == "every call to the model was refused: 400 unknown model 'gpt-4'"
    fine = Done(Rollout("r", {}), Attempt("r", "0"), FinishedRollout("r", "r", False, 0.0, [call()]), None)
    assert problem_of(fine) is None


async def test_a_first_attempt_that_fails_ends_the_run_with_its_log(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    log = config.run.path / "attempts" / "preflight" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("ModuleNotFoundError: No module named 'agents'\n")
    client = FakeClient(lambda rollout: Play(outcome=Outcome.agent_failed, reason="exit code 1", calls=[]))
    with pytest.raises(RunFailed, match=r"(?s)ended \(exit code 1\) without a call.*No module named 'agents'"):
        await run(config, FakeStudent(), client)


def test_tasks_that_are_needed_are_read_and_others_are_not(tmp_path: Path) -> None:
    for name, count in (("train", 3), ("held", 5)):
        (tmp_path / f"{name}.jsonl").write_text('{"a": 1}\n' * count)
    sources = [f"task.train={tmp_path}/train.jsonl", f"task.held_out={tmp_path}/held.jsonl"]
    data = load_data(load(None, [*sources, "eval.tasks=2"]))
    assert (len(data.train), len(data.held_out), data.dev) == (3, 2, [])
    with pytest.raises(ConfigError, match=r"task\.held_out: no tasks are named"):
        load_data(load(None, sources[:1]))
    assert load_data(load(None, [*sources[:1], "eval.before=false", "eval.after=false"])).held_out == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine.kind=openai", "engine.url=http://x/v1"], "engine.kind"),
        (["engine.kind=sglang", "model.path=/m"], "engine.kind: this trainer gives its weights to vLLM"),
        ([], "model.path"),
        (["model.path=/m"], "agent.command"),
    ],
)
def test_what_cannot_train_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        refuse_untrainable(load(None, overrides))


@pytest.mark.parametrize(
    ("keep", "every", "through"),
    [
        ("all", 2, []),
        # Step 0 has a checkpoint: the warm-up and the first evaluation are behind it. Step 3 has none yet.
        ("rewards", 2, [0, 2, 2, 4, 4, 5]),
        ("2", 2, [0, 1, 2, 3, 3]),
        ("9", 2, []),
    ],
)
async def test_what_a_checkpoint_is_past_is_pruned_and_nothing_later(
    tmp_path: Path, keep: str, every: int, through: list[int]
) -> None:
    options = ("trainer.steps=5", f"trainer.checkpoint_every={every}", f"store.keep={keep}")
    client = await run(config_in(tmp_path, *options), FakeStudent())
    assert [request.through_step for request in client.pruned] == through
    assert {request.prefix for request in client.pruned} <= {""}


async def test_a_run_prunes_its_own_rollouts_only_and_goes_on_when_it_cannot(tmp_path: Path) -> None:
    options = ("trainer.checkpoint_every=1", "store.keep=rewards", "store.url=sqlite:///shared", "run.name=one")
    config = config_in(tmp_path, *options)
    student = FakeStudent()
    client = FakeClient(student.play)
    client.fail_prunes = ApiError(503, "no room")
    await run(config, student, client)
    (prefix,) = {request.prefix for request in client.pruned}
    assert re.fullmatch(r"one-[0-9a-f]{6}-", prefix)
    assert all(rollout_id.startswith(prefix) for rollout_id in client.known)
    warnings = [line["text"] for line in read_metrics(config.run.path) if line["kind"] == "warning"]
    assert "the store is not pruned now: 503: no room" in warnings
