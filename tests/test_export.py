"""`longrein export`: what is read back from the file is what the record holds."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longrein import cli, export
from longrein.config import ConfigError, load
from longrein.learning.advantage import rollout_advantages
from longrein.records import (
    Attempt,
    Call,
    EndAttempt,
    Event,
    Outcome,
    Rollout,
    RolloutConfig,
    RolloutState,
    StatusChange,
)
from longrein.store import Store
from longrein.trajectory.export import rows
from trajectory.recorded_calls import random_calls

pytest_plugins = ["postgres_server"]

TOKEN_COLUMNS = ("input_ids", "loss_mask", "logprobs", "versions")


async def write(store: Store, name: str, reward: float | None, calls: list[Call] | None = None, **fields: Any) -> None:
    fields = {"metadata": {"phase": "train", "step": 1}, "group_id": "g"} | fields
    await store.add_rollouts([Rollout(name, {"question": name}, **fields)])
    await store.start_attempt(name, name.encode().ljust(32, b"\0"))
    if calls is None:
        calls, _ = random_calls(np.random.default_rng(len(name)), 6)
    for call in calls:
        call.rollout_id = name
        call.messages, call.reply = [{"role": "user", "content": "é\n"}], {"role": "assistant", "content": "b"}
    await asyncio.gather(*(store.add_call(call) for call in calls))
    if reward is not None:
        await store.add_event(Event("reward", name, "0", 1.0, {"value": reward, "metrics": {"tests": 2}}))
    await store.end_attempt(name, "0", EndAttempt(outcome=Outcome.succeeded))
    await store.change_rollout(name, StatusChange(state=RolloutState.succeeded))


async def a_run(location: str) -> dict[str, float | None]:
    """Rollouts of a whole group, of one that lacks a reward, of an evaluation and of a teacher, and one that runs."""
    store = Store.open(location)
    await write(store, "a", 1.0)
    await write(store, "bb", 0.0)
    await write(store, "c", 1.0, group_id="h")
    await write(store, "dd", None, group_id="h")
    await write(store, "val", 0.25, is_train=False, group_id="v", metadata={"phase": "eval-after", "step": 1})
    await write(store, "taught", 1.0, group_id="t", config=RolloutConfig(engine="teacher"))
    await store.add_rollouts([Rollout("runs", {})])
    await store.start_attempt("runs", b"r" * 32)
    store.close()
    good, bad = rollout_advantages([1.0, 0.0], "grpo").tolist()
    return {"a": good, "bb": bad, "c": None, "dd": None, "val": None, "taught": None}


def expected(location: str, advantages: dict[str, float | None]) -> list[dict[str, Any]]:
    """The rows that a file has to have, by the pure function over the record."""
    store = Store.open(location, read_only=True)
    found = []
    for name, advantage in advantages.items():
        rollout, attempt = store.rollout(name), store.attempt(name, "0")
        assert isinstance(rollout, Rollout)
        assert isinstance(attempt, Attempt)
        events = store.events(name, "0", "reward")
        for row in rows(
            rollout,
            attempt,
            store.calls(name, "0"),
            reward=events[0].data["value"] if events else None,
            metrics={"tests": 2.0} if events else {},
            advantage=advantage,
        ):
            row["logprobs"] = [None if np.isnan(value) else value for value in row["logprobs"].tolist()]
            row["versions"] = [None if value < 0 else value for value in row["versions"].tolist()]
            row["input_ids"], row["loss_mask"] = row["input_ids"].tolist(), row["loss_mask"].tolist()
            found.append(row)
    store.close()
    return found


def content(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_back(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".jsonl":
        return content(file)
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet is tested where pyarrow is installed")
    table = parquet.read_table(file)
    assert table.schema.equals(export.arrow_schema())
    return table.to_pylist()


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
async def test_what_is_read_back_is_what_the_record_holds(
    location: str, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_ROWS_AT_ONCE", 4)  # several row groups
    advantages = await a_run(location)
    progress: list[tuple[int, int]] = []
    kind = name.removeprefix("out.")
    done = await asyncio.to_thread(
        export.export,
        location,
        load(None),
        tmp_path / name,
        file_format=kind,  # type: ignore[arg-type]
        seen=lambda done, total: progress.append((done, total)),
    )
    wanted = expected(location, advantages)
    assert len(wanted) > 10
    assert read_back(tmp_path / name) == wanted
    assert progress == [(number, 7) for number in range(1, 8)]
    assert (done.rollouts, done.trajectories) == (6, len(wanted))
    assert done.in_loss == sum(sum(row["loss_mask"]) for row in wanted)
    assert done.left_out == {"not finished": 1}
    assert [file for file in os.listdir(tmp_path) if file.startswith(".out")] == []


async def test_what_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await a_run(f"sqlite:///{tmp_path / 'store.sqlite'}")

    def chosen(*options: str) -> tuple[set[str], set[str], str]:
        """Rollouts, the kinds of calls in the loss, and what was said."""
        file = tmp_path / "out.jsonl"
        arguments = ["export", str(tmp_path), "--format", "jsonl", "--output", str(file), *options]
        assert cli.main(arguments) == 0
        found = read_back(file)
        kinds = {call["kind"] for row in found for call in row["calls"] if call["in_loss"]}
        return {row["rollout_id"] for row in found}, kinds, capsys.readouterr().out

    names, kinds, said = chosen()
    assert names == {"a", "bb", "c", "dd", "val", "taught"}
    assert kinds == {"main"}
    assert "1 rollouts left out: not finished" in said
    assert chosen("--split", "val")[0] == {"val"}
    assert chosen("--split", "train")[0] == {"a", "bb", "c", "dd", "taught"}
    names, _, said = chosen("--min-reward", "0.25")
    assert names == {"a", "c", "val", "taught"}
    assert "2 rollouts left out: a reward below 0.25, or none" in said
    assert chosen("--kinds", "title")[1] == {"title"}
    assert chosen("--kinds", "title", "main")[1] == {"title", "main"}


async def test_pruned_rollouts_are_left_out_and_counted(tmp_path: Path) -> None:
    where = f"sqlite:///{tmp_path / 'store.sqlite'}"
    await a_run(where)
    store = Store.open(where)
    await store.prune(1, prefix="a")
    store.close()
    done = await asyncio.to_thread(export.export, where, load(None), tmp_path / "x", file_format="jsonl")
    assert done.left_out == {"pruned (store.keep)": 1, "not finished": 1}
    assert {row["rollout_id"] for row in content(tmp_path / "x")} >= {"bb", "c"}


async def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = f"sqlite:///{tmp_path / 'store.sqlite'}"
    await a_run(where)
    output = tmp_path / "out.jsonl"
    output.write_text("before")

    def break_off(*arguments: Any, **fields: Any) -> Any:
        raise RuntimeError("in the midst")

    monkeypatch.setattr(export, "rows", break_off)
    with pytest.raises(RuntimeError):
        await asyncio.to_thread(export.export, where, load(None), output, file_format="jsonl")
    assert output.read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "store.sqlite"]
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"--output .*nowhere/out: cannot be written: No such file"):
        await asyncio.to_thread(export.export, where, load(None), tmp_path / "nowhere" / "out", file_format="jsonl")


EXPORT = """
import resource, sys
from pathlib import Path
from longrein import export
from longrein.config import load
import pyarrow.parquet
done = export.export(sys.argv[1], load(None), Path(sys.argv[2]), file_format="parquet")
print(done.tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


async def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """Five times the rollouts take no more than a fraction of what their tokens would."""
    pytest.importorskip("pyarrow", reason="Parquet is tested where pyarrow is installed")
    peaks, tokens = [], []
    for count in (40, 200):
        where = f"sqlite:///{tmp_path / f'{count}.sqlite'}"
        store = Store.open(where)
        ids = np.random.default_rng(0).integers(0, 2**31, 20_000).tolist()
        for number in range(count):
            call = Call(
                rollout_id="", attempt_id="0", number=0, dialect="chat", mode="train", model="m", engine="policy",
                prompt_delta=[1], prompt_length=1, sampled=ids, logprobs=[-1.0] * len(ids), versions=[(0, len(ids))],
            )  # fmt: skip
            await write(store, f"r{number}", 1.0, [call])
        store.close()
        command = [sys.executable, "-c", EXPORT, where, str(tmp_path / "out.parquet")]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        read, peak = map(int, done.stdout.split())
        tokens.append(read)
        peaks.append(peak * 1024)
    assert tokens == [40 * 20_001, 200 * 20_001]
    # A token is 13 bytes in four columns; what is kept for one row group of half a million is there in both.
    assert peaks[1] - peaks[0] < 0.5 * 13 * (tokens[1] - tokens[0])
