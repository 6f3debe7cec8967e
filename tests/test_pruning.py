"""What `store.keep` removes and what stays: reports add up as before, and what may be needed is never touched."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from gateway.serving import serving
from longrein import cli, storecheck
from longrein.client import ApiError, Client
from longrein.config import ConfigError, load
from longrein.records import (
    Call,
    EndAttempt,
    Event,
    NewRollout,
    Outcome,
    PruneRequest,
    PruneResult,
    Rollout,
    RolloutState,
    StatusChange,
)
from longrein.store import Store, StoreError
from longrein.trainer.tracking import read_metrics
from longrein.trajectory.report import Report, build_report
from tiny_run import write_run
from trajectory.recorded_calls import random_calls

pytest_plugins = ["postgres_server"]


async def finish(store: Store, rollout_id: str, metadata: dict[str, Any], calls: list[Call] | None = None) -> None:
    """A finished rollout with these calls, graded 1."""
    await store.add_rollouts([Rollout(rollout_id, {"n": 1}, metadata=metadata, group_id="g")])
    await store.start_attempt(rollout_id, rollout_id.encode().ljust(32, b"\0"))
    for call in calls or []:
        call.rollout_id = rollout_id
    await asyncio.gather(*(store.add_call(call) for call in calls or []))
    await store.add_event(Event("reward", rollout_id, "0", 1.0, {"value": 1.0}))
    await store.end_attempt(rollout_id, "0", EndAttempt(outcome=Outcome.succeeded))
    await store.change_rollout(rollout_id, StatusChange(state=RolloutState.succeeded))


def report_of(store: Store) -> Report:
    rollouts = store.rollouts()
    calls = {(rollout.rollout_id, "0"): store.calls(rollout.rollout_id, "0") for rollout in rollouts}
    rewards = {
        rollout.rollout_id: event.data["value"]
        for rollout in rollouts
        for event in store.events(rollout.rollout_id, "0", "reward")
    }
    return build_report(rollouts, calls, rewards, [])


async def test_a_report_says_the_same_of_a_pruned_record(location: str) -> None:
    store = Store.open(location)
    for seed in range(25):
        calls, _ = random_calls(np.random.default_rng(seed), 8)
        for call in calls:
            call.messages, call.reply, call.fork = [{"role": "user"}], {"role": "assistant"}, "template"
        calls[0].logprobs = [float("nan")] * len(calls[0].sampled)
        await finish(store, f"r{seed}", {"phase": "train", "step": 0}, calls)
        await store.add_event(Event("model_request", f"r{seed}", "0", 1.0, {"prompt_token_ids": [1, 2]}))
    before = report_of(store)
    assert before.samples > 25
    done = await store.prune(0)
    assert (done.rollouts, done.calls, done.tokens) == (25, 200, before.tokens.sampled)
    after = report_of(store)
    assert after.pruned == 25
    after.pruned = 0
    assert after == before
    for call in store.calls("r3", "0"):
        assert (call.prompt_delta, call.sampled, call.messages, call.reply) == ([], [], [], {})
    assert [event.event_type for event in store.events("r3", "0")] == ["reward"]
    assert await store.prune(0) == PruneResult()
    assert [problem for looked in storecheck.check(location) for problem in looked.problems] == []
    store.close()


async def test_only_finished_rollouts_of_a_trainer_up_to_the_step_are_pruned(location: str) -> None:
    store = Store.open(location)
    kept = {
        "later": {"phase": "train", "step": 3},
        "other": {"step": 1},
        "odd": {"phase": "train"},
        "elsewhere": {"phase": "eval-step-4", "step": 4},
    }
    gone = {
        "step": {"phase": "train", "start": 0, "step": 2},
        "eval": {"phase": "eval-before", "step": 0},
        "teacher": {"phase": "warm-up", "step": 40},
        "dev": {"phase": "dev-0030", "step": 30},
        "first": {"phase": "preflight"},
    }
    names = [*kept, *gone, "run-2-step"]
    for name in names:
        calls, _ = random_calls(np.random.default_rng(1), 3)
        await finish(store, name, (kept | gone).get(name, gone["step"]), calls)
    await store.add_rollouts([Rollout("busy", {}, metadata={"phase": "train", "step": 1})])
    await store.start_attempt("busy", b"t" * 32)
    await store.add_call(random_calls(np.random.default_rng(1), 1)[0][0].__class__(
        rollout_id="busy", attempt_id="0", number=0, dialect="chat", mode="train", model="m", engine="policy",
        sampled=[1],
    ))  # fmt: skip

    def pruned() -> set[str]:
        return {name for name in [*names, "busy"] if any(call.pruned for call in store.calls(name, "0"))}

    assert (await store.prune(2, prefix="run-2-")).rollouts == 1
    assert pruned() == {"run-2-step"}
    assert (await store.prune(2)).rollouts == len(gone)
    assert pruned() == {*gone, "run-2-step"}
    assert (await store.prune(3)).rollouts == 1
    store.close()


async def test_the_space_goes_back_to_the_file_system(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    store = Store.open(f"sqlite:///{file}")
    for number in range(40):
        call = Call(
            rollout_id="", attempt_id="0", number=0, dialect="chat", mode="train", model="m", engine="policy",
            sampled=list(range(20_000)), logprobs=[-1.0] * 20_000, versions=[(0, 20_000)],
        )  # fmt: skip
        await finish(store, f"r{number}", {"phase": "train", "step": number // 20}, [call])
    store.close()
    full = file.stat().st_size
    store = Store.open(f"sqlite:///{file}")
    await store.prune(0)
    store.close()
    half = file.stat().st_size
    assert half < 0.6 * full
    store = Store.open(f"sqlite:///{file}")
    assert all(call.sampled == list(range(20_000)) for call in store.calls("r39", "0"))
    await store.prune(1)
    store.close()
    assert file.stat().st_size < 0.05 * full


async def test_the_gateway_prunes_for_the_run_key_and_for_nobody_else(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        calls, _ = random_calls(np.random.default_rng(1), 3)
        await finish(served.gateway.store, "r", {"phase": "train", "step": 1}, calls)
        token = await served.start("s")
        answer = await served.anonymous.post("/api/store/prune", json={"through_step": 1}, headers=token)
        assert answer.status_code == 403
        assert (await served.anonymous.post("/api/store/prune", json={"through_step": 1})).status_code == 401
        assert (await served.http.post("/api/store/prune", json={"through_step": "all"})).status_code == 422
        async with Client(served.url, "run-key") as client:
            assert (await client.prune(PruneRequest(through_step=0))).rollouts == 0
            assert (await client.prune(PruneRequest(through_step=1))).rollouts == 1
            events = await client.events("r", "0")
        asked = [event.data for event in events if event.event_type == "model_request"]
        assert [(data["pruned"], data["prompt_token_ids"]) for data in asked] == [(True, [])] * 3


async def test_a_client_waits_for_a_record_that_has_no_room_now(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        engine = served.gateway.store.engine
        with engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        big = [NewRollout(input={"text": "x" * 200_000}, rollout_id="r")]
        async with Client(served.url, "run-key", retry_seconds=0.0) as client:
            with pytest.raises(ApiError, match=r"503: .*disk is full; make room"):
                await client.add_rollouts(big)
        asked, loop = asyncio.Event(), asyncio.get_running_loop()
        sa.event.listen(engine, "rollback", lambda _: loop.call_soon_threadsafe(asked.set))  # type: ignore[attr-defined]
        async with Client(served.url, "run-key", retry_seconds=60.0) as client:
            adding = asyncio.create_task(client.add_rollouts(big))
            await asyncio.wait_for(asked.wait(), 60)
            with engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
            assert [rollout.rollout_id for rollout in await adding] == ["r"]


def test_pruning_needs_checkpoints() -> None:
    for keep in ("rewards", "3"):
        with pytest.raises(ConfigError, match=r"store\.keep: .* removes only what a checkpoint has got past"):
            load(None, [f"store.keep={keep}"])
        assert str(load(None, [f"store.keep={keep}", "trainer.checkpoint_every=2"]).store.keep) == keep
    for wrong in ("0", "some", "-1", "1.5"):
        with pytest.raises(ConfigError, match=r"store\.keep"):
            load(None, [f"store.keep={wrong}", "trainer.checkpoint_every=2"])


async def test_a_record_is_pruned_by_hand_when_nobody_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    store = Store.open(f"sqlite:///{folder / 'store.sqlite'}")
    for step in range(1, 6):
        calls, _ = random_calls(np.random.default_rng(1), 3)
        await finish(store, f"s{step}", {"phase": "train", "step": step}, calls)
    (folder / "metrics.jsonl").write_text("".join(f'{{"kind":"step","step":{step}}}\n' for step in range(1, 6)))

    def prune(*arguments: str) -> tuple[int, str]:
        status: list[int] = []

        def run() -> None:
            status.append(cli.main(["store", "prune", str(folder), *arguments]))

        import threading  # the command has an event loop of its own

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        printed = capsys.readouterr()
        return status[0], printed.out + printed.err

    assert prune("--keep", "rewards") == (
        2,
        f"longrein: {folder}: has no checkpoint, so nothing is past one; everything stays\n",
    )
    checkpoint = folder / "checkpoints" / "step-000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text('{"step":4,"version":4,"order":{},"seconds":1.0}')
    (checkpoint / "trainer.pt").write_bytes(b"")
    (folder / "checkpoints" / "latest").write_text("step-000004\n")
    status, said = prune("--keep", "rewards")
    assert (status, "another process writes this record" in said) == (1, True)
    store.close()
    assert prune()[0] == 2
    assert "expected rewards, or a number" in prune("--keep", "none")[1]
    status, said = prune("--keep", "3")
    assert (status, "2 rollouts pruned (through step 2)" in said) == (0, True)
    status, said = prune("--keep", "rewards", "--vacuum")
    assert (status, "2 rollouts pruned (through step 4)" in said) == (0, True)
    store = Store.open(f"sqlite:///{folder / 'store.sqlite'}", read_only=True)
    assert not any(call.pruned for call in store.calls("s5", "0"))
    store.close()


def test_vacuum_makes_an_older_file_one_that_gives_space_back(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    engine = sa.create_engine(f"sqlite:///{file}")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE longrein_schema (version INTEGER NOT NULL)")
        connection.exec_driver_sql("INSERT INTO longrein_schema VALUES (2)")
        assert connection.exec_driver_sql("PRAGMA auto_vacuum").scalar_one() == 0
    engine.dispose()
    store = Store.open(f"sqlite:///{file}")
    store.vacuum()
    store.close()
    with sa.create_engine(f"sqlite:///{file}").connect() as connection:
        assert connection.exec_driver_sql("PRAGMA auto_vacuum").scalar_one() == 2
    assert os.listdir(tmp_path) == ["store.sqlite"]


def test_a_damaged_rollout_is_left_as_it_is(tmp_path: Path) -> None:
    async def work() -> None:
        store = Store.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
        for name in ("a", "b"):
            calls, _ = random_calls(np.random.default_rng(1), 3)
            await finish(store, name, {"phase": "train", "step": 1}, calls)
        with store.engine.begin() as connection:
            connection.execute(sa.text("UPDATE calls SET sampled = X'010203' WHERE rollout_id = 'a' AND number = 0"))
        assert (await store.prune(1)).rollouts == 1
        with pytest.raises(StoreError, match="damaged"):
            store.calls("a", "0")
        store.close()

    asyncio.run(work())


def test_a_run_that_prunes_is_reported_whole(tmp_path: Path) -> None:
    """Through real processes: what the report says was trained is what the trainer counted, pruned or not."""
    file = write_run(tmp_path)
    options = (
        "trainer.checkpoint_every=1",
        "store.keep=1",
        "eval.after=false",
        "trainer.preflight=false",
        "trainer.steps=3",
    )
    command = [sys.executable, "-m", "longrein.cli", "train", str(file)]
    for option in (f"run.dir={tmp_path}", "run.name=kept", *options):
        command += ["--set", option]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "kept"
    steps = [line for line in read_metrics(folder) if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3]
    store = Store.open(f"sqlite:///{folder / 'store.sqlite'}", read_only=True)
    pruned = {
        rollout.metadata["step"]: all(call.pruned for call in store.calls(rollout.rollout_id, "0"))
        for rollout in store.rollouts()
    }
    store.close()
    assert pruned == {0: True, 1: True, 2: True, 3: False}
    report = (folder / "report.md").read_text()
    assert f"| trained | {sum(line['tokens/trained'] for line in steps):.0f} |" in report
    assert "| of these pruned to counts and rewards | " in report
    assert cli.main(["store", "check", str(folder)]) == 0


async def test_an_audit_says_what_it_could_not_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
    for step in (1, 2):
        calls, _ = random_calls(np.random.default_rng(1), 3)
        await finish(store, f"s{step}", {"phase": "train", "step": step}, calls)
    assert cli.main(["audit", str(tmp_path)]) == 0
    assert "not looked at" not in capsys.readouterr().err
    await store.prune(1)
    store.close()
    assert cli.main(["audit", str(tmp_path)]) == 0
    assert "1 attempt not looked at: pruned (store.keep)" in capsys.readouterr().err
