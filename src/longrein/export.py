"""`longrein export`: a run's trajectories as a Parquet or JSON-lines file that other trainers read.

The record is opened read-only and gone through once rollout by rollout, so that memory stays small however long the run
is. The file is written beside its place and renamed when it is whole. docs/export.md is the schema.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np

from longrein.config import Config, ConfigError
from longrein.records import TERMINAL, Attempt, CallKind, Json, Rollout
from longrein.store import Store, StoreError, locate_run
from longrein.trajectory.export import rows

if TYPE_CHECKING:
    import pyarrow as pa

Split = Literal["train", "val", "all"]

#: Tokens and trajectories that are kept in memory before they are written (one row group of a Parquet file).
_TOKENS_AT_ONCE = 1 << 19
_ROWS_AT_ONCE = 1024


@dataclass
class Exported:
    """What was written and what was left out."""

    rollouts: int = 0
    trajectories: int = 0
    tokens: int = 0
    in_loss: int = 0
    """Sampled tokens that the masks hold."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Why → rollouts."""

    def leave_out(self, why: str) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + 1

    def __str__(self) -> str:
        text = (
            f"{self.trajectories:,} trajectories of {self.rollouts:,} rollouts, {self.tokens:,} tokens, "
            f"{self.in_loss:,} of them in the loss"
        )
        return text + "".join(f"; {count:,} rollouts left out: {why}" for why, count in self.left_out.items())


def command(
    run: str,
    output: str,
    *,
    file_format: Literal["parquet", "jsonl"],
    split: Split,
    min_reward: float | None,
    kinds: Collection[CallKind] | None,
) -> None:
    """Export a run (its folder or the URL of its record) to a file, and say what was written."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    url, config = locate_run(run)
    console = Console(stderr=True)
    columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("")

        def seen(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        done = export(
            url,
            config,
            Path(output),
            file_format=file_format,
            split=split,
            min_reward=min_reward,
            kinds=kinds,
            seen=seen,
        )
    print(f"{output}: {done}")


class _Seen(Protocol):
    def __call__(self, done: int, total: int) -> None: ...


def export(
    url: str,
    config: Config,
    output: Path,
    *,
    file_format: Literal["parquet", "jsonl"],
    split: Split = "all",
    min_reward: float | None = None,
    kinds: Collection[CallKind] | None = None,
    seen: _Seen = lambda done, total: None,
) -> Exported:
    """Write the trajectories of all finished rollouts to `output`.

    `kinds` are the kinds of calls whose tokens are in the loss (None: those that the run trains); `min_reward` leaves
    out rollouts with less, or with none. Raises ConfigError where the file cannot be written, StoreError where the
    record cannot be read.
    """
    from longrein.trainer.collect import grade_of

    chosen = config.algorithm.train_kinds if kinds is None else kinds
    found = Exported()
    store = Store.open(url, read_only=True)
    try:
        grades = _grades(store)
        advantages = _advantages(grades, config)
        with _whole_file(output) as part, _writer(part, file_format) as write:
            for number, rollout in enumerate(store.each_rollout(), start=1):
                seen(number, max(number, len(grades)))
                attempt = _last_attempt(store, rollout)
                why = _left_out(rollout, split)
                if why is not None or attempt is None:
                    found.leave_out(why or "never started")
                    continue
                events = store.events(rollout.rollout_id, attempt.attempt_id, "reward")
                reward, metrics, _ = grade_of(rollout, attempt, events)
                if min_reward is not None and (reward is None or reward < min_reward):
                    found.leave_out(f"a reward below {min_reward:g}, or none")
                    continue
                calls = store.calls(rollout.rollout_id, attempt.attempt_id)
                if any(call.pruned for call in calls):
                    found.leave_out("pruned (store.keep)")
                    continue
                before = found.trajectories
                try:
                    for row in rows(
                        rollout,
                        attempt,
                        calls,
                        reward=reward,
                        metrics=metrics,
                        advantage=advantages.get(rollout.rollout_id),
                        kinds=chosen,
                    ):
                        found.trajectories += 1
                        found.tokens += len(row["input_ids"])
                        found.in_loss += int(row["loss_mask"].sum())
                        write(row)
                except ValueError as error:
                    raise StoreError(
                        f"rollout {rollout.rollout_id}: {error}; `longrein store check` lists all that is wrong"
                    ) from error
                if found.trajectories > before:
                    found.rollouts += 1
                else:
                    found.leave_out("without an answered call of these kinds")
    finally:
        store.close()
    return found


@dataclass(frozen=True)
class _Grade:
    group_id: str | None
    learned: bool
    """Whether it is one that a trainer collected to learn from."""
    reward: float | None


def _grades(store: Store) -> dict[str, _Grade]:
    """By rollout id: a few bytes each, since an advantage needs the rewards of the whole group."""
    from longrein.trainer.collect import grade_of

    grades = {}
    for rollout in store.each_rollout():
        learned = rollout.is_train and rollout.config.engine == "policy" and rollout.group_id is not None
        reward = None
        if learned and rollout.status.state in TERMINAL:
            attempt = _last_attempt(store, rollout)
            if attempt is not None:
                events = store.events(rollout.rollout_id, attempt.attempt_id, "reward")
                reward, _, _ = grade_of(rollout, attempt, events)
        grades[rollout.rollout_id] = _Grade(rollout.group_id, learned, reward)
    return grades


def _advantages(grades: Mapping[str, _Grade], config: Config) -> dict[str, float]:
    """The advantages of whole groups, by the run's `algorithm.advantage`."""
    from longrein.learning.advantage import group_advantages

    learned = {rollout_id: grade for rollout_id, grade in grades.items() if grade.learned}
    broken = {grade.group_id for grade in learned.values() if grade.reward is None}
    whole = {rollout_id: grade for rollout_id, grade in learned.items() if grade.group_id not in broken}
    return group_advantages(
        {rollout_id: grade.reward for rollout_id, grade in whole.items() if grade.reward is not None},
        {rollout_id: grade.group_id or rollout_id for rollout_id, grade in whole.items()},
        config.algorithm.advantage,
    ).values


def _last_attempt(store: Store, rollout: Rollout) -> Attempt | None:
    attempts = store.attempts(rollout.rollout_id)
    return attempts[-1] if attempts else None


def _left_out(rollout: Rollout, split: Split) -> str | None:
    if rollout.status.state not in TERMINAL:
        return "not finished"
    if split != "all" and rollout.is_train != (split == "train"):
        return f"not of split {split}"
    return None


# --- Files ------------------------------------------------------------------------------------------------------------


@contextmanager
def _whole_file(output: Path) -> Iterator[Path]:
    """A file beside `output` that takes its place when the block ends well, and is removed when it does not."""
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as opened:
            os.fsync(opened.fileno())
        part.replace(output)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


class _Write(Protocol):
    def __call__(self, row: Json) -> None: ...


def _writer(file: Path, file_format: Literal["parquet", "jsonl"]) -> AbstractContextManager[_Write]:
    return _parquet(file) if file_format == "parquet" else _json_lines(file)


@contextmanager
def _json_lines(file: Path) -> Iterator[_Write]:
    with file.open("wb") as opened:

        def write(row: Json) -> None:
            plain = row | {
                "input_ids": row["input_ids"].tolist(),
                "loss_mask": row["loss_mask"].tolist(),
                "logprobs": [None if np.isnan(value) else float(value) for value in row["logprobs"]],
                "versions": [None if value < 0 else value for value in row["versions"].tolist()],
            }
            opened.write(msgspec.json.encode(plain) + b"\n")

        yield write


@contextmanager
def _parquet(file: Path) -> Iterator[_Write]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(
            f"--format parquet: needs pyarrow ({error}); install it with `pip install 'longrein[export]'`, or use --format jsonl"
        ) from error
    schema = arrow_schema()
    waiting: list[Json] = []
    tokens = 0
    with pq.ParquetWriter(file, schema, compression="zstd") as opened:

        def flush() -> None:
            nonlocal tokens
            if waiting:
                arrays = [_column(schema.field(name), [row[name] for row in waiting]) for name in schema.names]
                opened.write_table(pa.Table.from_arrays(arrays, schema=schema))
                waiting.clear()
            tokens = 0

        def write(row: Json) -> None:
            nonlocal tokens
            waiting.append(row)
            tokens += len(row["input_ids"])
            if tokens >= _TOKENS_AT_ONCE or len(waiting) >= _ROWS_AT_ONCE:
                flush()

        yield write
        flush()


def arrow_schema() -> pa.Schema:
    """The schema of docs/export.md."""
    import pyarrow as pa

    text, count = pa.string(), pa.int32()
    function = pa.struct([("name", text), ("arguments", text)])
    tool_call = pa.struct([("id", text), ("type", text), ("function", function)])
    message = pa.struct(
        [
            ("role", text),
            ("content", text),
            ("reasoning_content", text),
            ("tool_calls", pa.list_(tool_call)),
            ("tool_call_id", text),
            ("name", text),
        ]
    )
    call = pa.struct(
        [
            ("number", count),
            ("parent", count),
            ("kind", text),
            ("fork", text),
            ("status", text),
            ("finish_reason", text),
            ("start", count),
            ("length", count),
            ("in_loss", pa.bool_()),
        ]
    )
    return pa.schema(
        [
            ("rollout_id", text),
            ("group_id", text),
            ("attempt_id", text),
            ("trajectory", count),
            ("split", text),
            ("phase", text),
            ("step", pa.int64()),
            ("task", text),
            ("model", text),
            ("engine", text),
            ("messages", pa.list_(message)),
            ("tools", text),
            ("input_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(pa.float32())),
            ("versions", pa.list_(pa.int32())),
            ("calls", pa.list_(call)),
            ("kind", text),
            ("finish_reason", text),
            ("reward", pa.float64()),
            ("advantage", pa.float64()),
            ("metrics", text),
            ("state", text),
            ("outcome", text),
        ]
    )


def _column(column: pa.Field, values: list[Any]) -> pa.Array:
    """Values of one column; per-token arrays are taken over whole, without a Python object for each token."""
    import pyarrow as pa

    if column.name not in ("input_ids", "loss_mask", "logprobs", "versions"):
        return pa.array(values, column.type)
    lengths = np.cumsum([0, *(len(value) for value in values)])
    flat = np.concatenate(values)
    missing = {"logprobs": np.isnan, "versions": lambda one: one < 0}.get(column.name)
    items = pa.array(flat, column.type.value_type, mask=None if missing is None else missing(flat))
    return pa.ListArray.from_arrays(pa.array(lengths, pa.int32()), items, type=column.type)
