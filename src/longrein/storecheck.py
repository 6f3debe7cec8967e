"""`longrein store check`: whether a record is whole, from the database's pages up to what its rows say of each other.

Read-only, and of one moment: everything is read in one transaction, so that a gateway may go on writing meanwhile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec
import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine, Row
from sqlalchemy.exc import SQLAlchemyError

from longrein import schema
from longrein.database import open_reading, read_log, shown, sqlite_file, trouble, words
from longrein.records import TERMINAL, Call, CallKind, ForkCause, Mode, Outcome, RolloutState
from longrein.store import locate_run

#: Problems that are printed of each kind of record.
_SHOWN = 20


@dataclass
class Looked:
    """What was found in one kind of record."""

    what: str
    count: int = 0
    unit: str = ""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is worth knowing and nothing that is wrong."""

    def say(self, where: str, problem: str) -> None:
        self.problems.append(f"{where}: {problem}")


def command(run: str) -> int:
    """Check the record of a run (its folder, or the record's URL) and print what was found; the exit status."""
    url, _ = locate_run(run)
    found = check(url)
    _print(shown(url), found)
    return 1 if any(looked.problems for looked in found) else 0


def check(url: str) -> list[Looked]:
    """Look at every row of a record. Raises StoreError when it cannot be opened at all."""
    name = shown(url)
    try:
        engine = open_reading(url)
        try:
            with _one_moment(engine) as connection:
                pages = _database(connection, url)
                try:
                    schema.check_schema(connection, name, read_only=True)
                except SQLAlchemyError:
                    if pages.problems and "not a database" not in pages.problems[0]:
                        return [pages]
                    raise
                return [pages, *_records(connection)]
        finally:
            engine.dispose()
    except (SQLAlchemyError, OSError) as error:
        raise trouble(name, "read", error) from error


def _one_moment(engine: Engine) -> Connection:
    if engine.dialect.name == "sqlite":
        connection = engine.connect()
        connection.exec_driver_sql("BEGIN")
        return connection
    return engine.connect().execution_options(isolation_level="REPEATABLE READ")


def _database(connection: Connection, url: str) -> Looked:
    file = sqlite_file(url)
    if file is None:
        looked = Looked("database", unit="(PostgreSQL checks its own pages; pg_amcheck looks deeper)")
        looked.count = 1
        return looked
    looked = Looked("database", unit="pages")
    try:
        looked.count = int(connection.exec_driver_sql("PRAGMA page_count").scalar_one())
        for row in connection.exec_driver_sql(f"PRAGMA integrity_check({10 * _SHOWN})"):
            if row[0] != "ok":
                looked.say(file, row[0])
        log = read_log(file)
    except SQLAlchemyError as error:
        looked.say(file, words(error))
        return looked
    if log is not None and log.rest:
        looked.notes.append(
            f"{file}-wal: {log.rest} bytes behind the last whole transaction: one that is being written, or that was when "
            "its process or machine ended, or the log was cut"
        )
    return looked


def _records(connection: Connection) -> Iterator[Looked]:
    rollouts, attempts = Looked("rollouts"), Looked("attempts")
    calls, events, models = Looked("calls"), Looked("events"), Looked("models")
    states: dict[str, str] = {}
    known: dict[tuple[str, str], bool] = {}
    last: dict[str, str | None] = {}

    def guarded(looked: Looked, look: Callable[[], None]) -> Looked:
        try:
            look()
        except SQLAlchemyError as error:
            looked.say(f"table {looked.what}", f"cannot be read any further: {words(error)}")
        return looked

    yield guarded(rollouts, lambda: _rollouts(connection, rollouts, states, last))
    yield guarded(attempts, lambda: _attempts(connection, attempts, states, known))
    for rollout_id, attempt_id in last.items():
        if attempt_id is not None and (rollout_id, attempt_id) not in known:
            attempts.say(f"rollout {rollout_id}", f"its last attempt, {attempt_id}, is not in the record")
    yield guarded(calls, lambda: _calls(connection, calls, states, known))
    yield guarded(events, lambda: _events(connection, events, states, known))
    yield guarded(models, lambda: _models(connection, models))


def _each(connection: Connection, query: sa.Select[Any]) -> Iterator[Row[Any]]:
    """Rows, a few at a time: a run's calls do not fit into memory."""
    yield from connection.execution_options(yield_per=500).execute(query)


def _rollouts(connection: Connection, looked: Looked, states: dict[str, str], last: dict[str, str | None]) -> None:
    for row in _each(connection, sa.select(schema.rollouts).order_by(schema.rollouts.c.position)):
        looked.count += 1
        where = f"rollout {row.rollout_id}"
        states[row.rollout_id], last[row.rollout_id] = row.state, row.last_attempt_id
        try:
            schema.rollout_of(row)
        except (ValueError, TypeError) as error:
            looked.say(where, f"cannot be read: {error}")
    finished = {rollout_id for rollout_id, state in states.items() if state in [end.value for end in TERMINAL]}
    listed = set()
    for row in _each(connection, sa.select(schema.terminal)):
        if row.rollout_id in listed:
            looked.say(f"rollout {row.rollout_id}", "is twice in the list of finished rollouts")
        listed.add(row.rollout_id)
    for rollout_id in sorted(finished - listed):
        looked.say(f"rollout {rollout_id}", f"has {states[rollout_id]} and is not in the list of finished rollouts")
    for rollout_id in sorted(listed - finished):
        state = states.get(rollout_id)
        said = "is not in the record" if state is None else f"is {state}"
        looked.say(f"rollout {rollout_id}", f"is in the list of finished rollouts and {said}")


def _attempts(
    connection: Connection, looked: Looked, states: dict[str, str], known: dict[tuple[str, str], bool]
) -> None:
    open_before: dict[str, str] = {}
    for row in _each(connection, sa.select(schema.attempts).order_by(schema.attempts.c.position)):
        looked.count += 1
        where = f"attempt {row.attempt_id} of rollout {row.rollout_id}"
        known[row.rollout_id, row.attempt_id] = row.ended_at is None
        try:
            schema.attempt_of(row)
        except (ValueError, TypeError) as error:
            looked.say(where, f"cannot be read: {error}")
        state = states.get(row.rollout_id)
        if state is None:
            looked.say(where, "its rollout is not in the record")
        if (row.ended_at is None) != (row.outcome is None):
            looked.say(where, f"ended_at is {row.ended_at} and outcome is {row.outcome}")
        elif row.outcome is not None and row.outcome not in Outcome.__members__:
            looked.say(where, f"there is no outcome {row.outcome}")
        if row.token_hash is None:
            continue  # its agent named it itself: nobody starts or ends such an attempt
        if len(row.token_hash) != 32:
            looked.say(where, f"token_hash has {len(row.token_hash)} bytes, a SHA-256 has 32")
        if row.ended_at is not None:
            continue
        if row.rollout_id in open_before:
            looked.say(where, f"is open, and so is attempt {open_before[row.rollout_id]}")
        open_before[row.rollout_id] = row.attempt_id
        if state == RolloutState.queuing.value:
            looked.say(where, "is open, and its rollout still queues")
        elif state == RolloutState.succeeded.value:
            looked.say(where, "is open, and its rollout has succeeded")
        elif state == RolloutState.failed.value:
            looked.notes.append(f"{where}: was left open when its rollout was failed; its token is refused")


def _calls(connection: Connection, looked: Looked, states: dict[str, str], known: dict[tuple[str, str], bool]) -> None:
    of_call = schema.calls.c
    query = sa.select(schema.calls).order_by(of_call.rollout_id, of_call.attempt_id, of_call.number)
    rows = _each(connection, query)
    for (rollout_id, attempt_id), group in itertools.groupby(rows, lambda row: (row.rollout_id, row.attempt_id)):
        where = f"attempt {attempt_id} of rollout {rollout_id}"
        if rollout_id not in states:
            looked.say(where, "has calls, and the rollout is not in the record")
        elif (rollout_id, attempt_id) not in known:
            looked.say(where, "has calls and is not in the record")
        _attempts_calls(looked, where, group)


@dataclass(frozen=True)
class _Size:
    """What later calls may point to in one."""

    branch: int
    """Tokens of the prompt and of the sample."""
    conversation: int
    """Messages, the reply among them."""


def _attempts_calls(looked: Looked, attempt: str, rows: Iterable[Row[Any]]) -> None:
    sizes: dict[int, _Size | None] = {}  # None: cannot be read, which has been said
    for row in rows:
        looked.count += 1
        where = f"call {row.number} of {attempt}"
        if row.number in sizes:
            looked.say(where, "is there twice")
        try:
            call = schema.call_of(row)
        except (ValueError, TypeError) as error:
            for problem in _broken_columns(row) or [f"cannot be read: {error}"]:
                looked.say(where, problem)
            sizes[row.number] = None
            continue
        sizes[row.number] = _Size(call.prompt_length + call.sampled_count, call.messages_keep + len(call.messages) + 1)
        for problem in _problems_of_call(call, sizes):
            looked.say(where, problem)


def _broken_columns(row: Row[Any]) -> list[str]:
    """What keeps a row from being read as a call, by column."""
    found = []
    for name in ("prompt_delta", "sampled", "logprobs"):
        blob = row._mapping[name]
        if blob is not None and len(blob) % 4:
            found.append(f"{name} has {len(blob)} bytes, no multiple of 4")
    for name in ("versions", "messages", "tools", "reply", "sampling", "error", "pruned"):
        text = row._mapping[name]
        try:
            if text is not None:
                msgspec.json.decode(text)
        except (ValueError, TypeError) as error:
            found.append(f"{name} is not JSON: {error}")
    return found


_WORDS: tuple[tuple[str, Sequence[Any]], ...] = (
    ("dialect", ("chat", "completions", "responses", "messages")),
    ("mode", get_args(Mode)),
    ("kind", get_args(CallKind)),
    ("fork", (None, *get_args(ForkCause))),
    ("status", ("ok", "error", "abandoned")),
)


def _problems_of_call(call: Call, sizes: Mapping[int, _Size | None]) -> Iterator[str]:
    for name, words_known in _WORDS:
        if getattr(call, name) not in words_known:
            yield f"there is no {name} {getattr(call, name)!r}"
    for name in ("prefix", "parent"):
        pointed = getattr(call, name)
        if pointed is not None and not 0 <= pointed < call.number:
            yield f"its {name} is call {pointed}, which does not come before it"
        elif pointed is not None and pointed not in sizes:
            yield f"its {name} is call {pointed}, which is not in the record"
    prefix, parent = (sizes.get(number) if number is not None else None for number in (call.prefix, call.parent))
    limit = prefix.branch if prefix is not None else 0
    if not 0 <= call.prefix_length <= limit and (call.prefix is None or prefix is not None):
        said = f"the branch of call {call.prefix} has {limit} tokens" if prefix is not None else "there is no prefix"
        yield f"prefix_length is {call.prefix_length}, and {said}"
    sampled = call.sampled_count
    if sum(count for _, count in call.versions) not in (sampled, 0):
        yield f"versions name {sum(count for _, count in call.versions)} tokens, and {sampled} were sampled"
    if call.pruned is not None:
        left = ("prompt_delta", "sampled", "messages", "reply")
        if any(getattr(call, name) for name in left) or call.logprobs:
            yield "is pruned, and tokens or messages of it are there"
        return
    if call.prompt_length != call.prefix_length + len(call.prompt_delta):
        yield (
            f"prompt_length is {call.prompt_length}, but prefix_length {call.prefix_length} and "
            f"{len(call.prompt_delta)} ids of its own make {call.prefix_length + len(call.prompt_delta)}"
        )
    if call.logprobs is not None and len(call.logprobs) != sampled:
        yield f"{len(call.logprobs)} log-probabilities for {sampled} sampled tokens"
    if any(bool((np.asarray(ids) < 0).any()) for ids in (call.prompt_delta, call.sampled) if ids):
        yield "has a token id below 0"
    limit = parent.conversation if parent is not None else 0
    if not 0 <= call.messages_keep <= limit and (call.parent is None or parent is not None):
        said = f"the conversation of call {call.parent} has {limit}" if parent is not None else "there is no parent"
        yield f"messages_keep is {call.messages_keep}, and {said}"


def _events(connection: Connection, looked: Looked, states: dict[str, str], known: dict[tuple[str, str], bool]) -> None:
    for row in _each(connection, sa.select(schema.events).order_by(schema.events.c.position)):
        looked.count += 1
        where = f"event {row.position} ({row.event_type})"
        attempt = f"attempt {row.attempt_id} of rollout {row.rollout_id}"
        if row.rollout_id not in states:
            looked.say(where, f"its rollout {row.rollout_id} is not in the record")
        elif (row.rollout_id, row.attempt_id) not in known:
            looked.say(where, f"its attempt, {attempt}, is not in the record")
        try:
            event = schema.event_of(row)
        except (ValueError, TypeError) as error:
            looked.say(f"{where} of {attempt}", f"cannot be read: {error}")
            continue
        value = event.data.get("value") if isinstance(event.data, dict) else None
        if row.event_type == "reward" and not (isinstance(value, (int, float)) and math.isfinite(value)):
            looked.say(f"{where} of {attempt}", f"its value is {value!r}, not a finite number")


def _models(connection: Connection, looked: Looked) -> None:
    protocols = ("openai", "tokens", "vllm", "sglang")
    for row in _each(connection, sa.select(schema.models).order_by(schema.models.c.position)):
        looked.count += 1
        if row.protocol not in protocols:
            looked.say(f"model {row.model} at {row.endpoint}", f"there is no protocol {row.protocol!r}")


def _print(name: str, found: Sequence[Looked]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=name, title_justify="left")
    for column, justify in (("record", "left"), ("looked at", "right"), ("problems", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for looked in found:
        table.add_row(looked.what, f"{looked.count:,} {looked.unit}".strip(), str(len(looked.problems)))
    console = Console(soft_wrap=True)
    console.print(table)
    for looked in found:
        for what, lines in (("problem", looked.problems), ("note", looked.notes)):
            for line in lines[:_SHOWN]:
                console.print(f"{what}: {line}", highlight=False, markup=False)
            if len(lines) > _SHOWN:
                console.print(f"{what}: {len(lines) - _SHOWN} more in {looked.what}", highlight=False, markup=False)
