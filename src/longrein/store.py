"""The durable record of a run: rollouts, attempts, calls, events and models.

SQLite by default, PostgreSQL by URL. One process writes (the gateway); another that tries is refused. Its writes go to
one thread (`writer.py`), and a write's future resolves after COMMIT: what was acknowledged survives kill -9 of the
process, and with `fsync` a power loss too. A write that cannot be made raises StoreError and leaves nothing behind.

Reads are plain functions: they see what was committed, from any thread or process, and never block the writer.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine, Row
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from longrein import pruning, schema
from longrein.config import Config, ConfigError, load
from longrein.database import Opened, give_back_space, open_reading, open_writing, shown, trouble, vacuum
from longrein.records import (
    TERMINAL,
    TRANSITIONS,
    Attempt,
    Call,
    CallKind,
    EndAttempt,
    Event,
    ModelEndpoint,
    PruneResult,
    Rollout,
    RolloutState,
    StatusChange,
    TerminalItem,
    TerminalPage,
    now,
)
from longrein.schema import StoreError
from longrein.trajectory.kinds import TRAINED_KINDS
from longrein.writer import Writer

__all__ = ["Conflict", "NotFound", "Store", "StoreError", "locate_run", "store_url"]

T = TypeVar("T")


class NotFound(Exception):
    """No such rollout or attempt."""


class Conflict(Exception):
    """The record's present state does not allow this change."""


def store_url(config: Config) -> str:
    """Where a run's record is: `store.url`, or a SQLite file in the run's folder."""
    return config.store.url or f"sqlite:///{config.run.path / 'store.sqlite'}"


def locate_run(run: str | Path) -> tuple[str, Config]:
    """The URL of a run's record and the run's configuration (the default one where `run` is a URL itself).

    `run` is the folder that `longrein train` or `longrein gateway` wrote, or a SQLAlchemy URL. Raises ConfigError.
    """
    if "://" in str(run):
        return str(run), load(None)
    folder = Path(run)
    config = load(folder / "config.toml") if (folder / "config.toml").exists() else load(None)
    own = config.run.model_copy(update={"dir": str(folder.resolve().parent), "name": folder.resolve().name})
    config = config.model_copy(update={"run": own})
    if not config.store.url and not (folder / "store.sqlite").exists():
        what = "holds no record (no store.sqlite)" if folder.is_dir() else "no such run folder"
        raise ConfigError(
            f"{folder}: {what}; give the folder that `longrein train` wrote (runs/NAME), or the record's URL"
        )
    return store_url(config), config


# Statements of every call, made once: putting one together costs more than running it.
_ROLLOUT = sa.select(schema.rollouts).where(schema.rollouts.c.rollout_id == sa.bindparam("rollout_id"))
_ATTEMPT = sa.select(schema.attempts).where(
    schema.attempts.c.rollout_id == sa.bindparam("rollout_id"),
    schema.attempts.c.attempt_id == sa.bindparam("attempt_id"),
)
_ATTEMPT_OF_TOKEN = sa.select(schema.attempts).where(schema.attempts.c.token_hash == sa.bindparam("token_hash"))
_MODELS = sa.select(schema.models).order_by(schema.models.c.position)
_ADD_CALL = sa.insert(schema.calls)
_ADD_EVENT = sa.insert(schema.events)

#: Rollouts that are read at once where all of them are gone through.
_PAGE = 256


class Store:
    """See the module. Opened by `Store.open`, closed by `close`."""

    def __init__(self, engine: Engine, reader: Engine, name: str, *, opened: Opened | None) -> None:
        self.engine = engine
        self._reader = reader
        self._name = name
        self._opened = opened
        self._writer = Writer(engine, name) if opened is not None else None

    @classmethod
    def open(cls, url: str, *, fsync: bool = False, read_only: bool = False) -> Store:
        """Open the record at a SQLAlchemy URL; create it, or bring its schema up to date, unless `read_only`.

        A read-only store creates no file and takes no lock that the writer waits for. Raises StoreError, also while
        another process has it open for writing.
        """
        name = shown(url)
        opened: Opened | None = None
        try:
            if read_only:
                engine = reader = open_reading(url)
            else:
                opened = open_writing(url, fsync)
                engine, reader = opened.writer, opened.reader
            try:
                with engine.begin() as connection:
                    schema.check_schema(connection, name, read_only=read_only)
            except BaseException:
                engine.dispose()
                if opened is not None:
                    opened.close()
                raise
        except (SQLAlchemyError, ImportError, OSError) as error:
            raise trouble(name, "opened", error) from error
        return cls(engine, reader, name, opened=opened)

    def close(self) -> None:
        """Finish the writes that are waiting, then let go of the database."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._reader.dispose()
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        self.engine.dispose()

    async def _write(self, operation: Callable[[Connection], T]) -> T:
        if self._writer is None:
            raise StoreError(f"{self._name}: the record is open for reading only, or closed")
        return await self._writer.write(operation)

    async def add_rollouts(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Add rollouts in this order. One whose id is known is left as it is and returned as it stands."""

        def operation(connection: Connection) -> list[Rollout]:
            return [self._add_rollout(connection, rollout) for rollout in rollouts]

        return await self._write(operation)

    def _add_rollout(self, connection: Connection, rollout: Rollout) -> Rollout:
        known = _find_rollout(connection, rollout.rollout_id)
        if known is None:
            connection.execute(sa.insert(schema.rollouts).values(schema.rollout_row(rollout)))
            if rollout.status.state in TERMINAL:
                connection.execute(sa.insert(schema.terminal).values(rollout_id=rollout.rollout_id))
        return known or rollout

    async def change_rollout(self, rollout_id: str, change: StatusChange) -> Rollout:
        """Change what `change` names. Raises NotFound, or Conflict for a transition that does not exist."""

        def operation(connection: Connection) -> Rollout:
            return _change_rollout(connection, rollout_id, change)

        return await self._write(operation)

    async def fail_queuing(self, rollout_id: str, why: str) -> bool:
        """Fail a rollout if it is still queuing; whether it was."""

        def operation(connection: Connection) -> bool:
            rollout = _find_rollout(connection, rollout_id)
            if rollout is None or rollout.status.state is not RolloutState.queuing:
                return False
            _change_rollout(connection, rollout_id, StatusChange(state=RolloutState.failed, error_message=why))
            return True

        return await self._write(operation)

    async def delete_rollout(self, rollout_id: str) -> None:
        """Remove a rollout and all that belongs to it; nothing when it is unknown."""

        def operation(connection: Connection) -> None:
            for table in (schema.events, schema.calls, schema.attempts, schema.terminal, schema.rollouts):
                connection.execute(sa.delete(table).where(table.c.rollout_id == rollout_id))

        await self._write(operation)

    async def start_attempt(self, rollout_id: str, token_hash: bytes) -> tuple[Rollout, Attempt]:
        """Start the next attempt; a queuing rollout becomes running.

        Raises NotFound, or Conflict when the rollout has finished or its last attempt still runs.
        """

        def operation(connection: Connection) -> tuple[Rollout, Attempt]:
            rollout = _require_rollout(connection, rollout_id)
            if rollout.status.state in TERMINAL:
                raise Conflict(f"rollout {rollout_id} has {rollout.status.state.value}; it takes no further attempt")
            attempts = _find_attempts(connection, rollout_id)
            for row in attempts:
                if row.ended_at is None and row.token_hash is not None:
                    raise Conflict(f"attempt {row.attempt_id} of rollout {rollout_id} still runs; end it first")
            taken = {row.attempt_id for row in attempts}
            number = len(attempts)
            while str(number) in taken:
                number += 1
            attempt = _insert_attempt(connection, rollout_id, str(number), token_hash)
            change = StatusChange(last_attempt_id=attempt.attempt_id)
            if rollout.status.state is RolloutState.queuing:
                change.state = RolloutState.running
            return _change_rollout(connection, rollout_id, change), attempt

        return await self._write(operation)

    async def ensure_attempt(self, rollout_id: str, attempt_id: str) -> Attempt:
        """The attempt, made without a token when it is not there: Agent Lightning's agents only name theirs."""

        def operation(connection: Connection) -> Attempt:
            return _ensure_attempt(connection, rollout_id, attempt_id)

        return await self._write(operation)

    async def end_attempt(self, rollout_id: str, attempt_id: str, end: EndAttempt) -> Attempt:
        """End an attempt; its rollout's state stays. Raises NotFound, or Conflict when it has ended before."""

        def operation(connection: Connection) -> Attempt:
            row = _find_attempt(connection, rollout_id, attempt_id)
            if row is None:
                raise NotFound(f"no attempt {attempt_id} of rollout {rollout_id}")
            if row.ended_at is not None:
                raise Conflict(f"attempt {attempt_id} of rollout {rollout_id} has ended before, as {row.outcome}")
            connection.execute(
                sa.update(schema.attempts)
                .where(schema.attempts.c.position == row.position)
                .values(
                    ended_at=now(),
                    outcome=end.outcome.value,
                    exit_code=end.exit_code,
                    reason=end.reason,
                    usage=None if end.usage is None else schema.to_text(end.usage),
                )
            )
            ended = _find_attempt(connection, rollout_id, attempt_id)
            assert ended is not None
            return schema.attempt_of(ended)

        return await self._write(operation)

    async def add_call(self, call: Call) -> None:
        """Record a call; its attempt is made when it is not there. NotFound: no such rollout; Conflict: number taken."""
        await self.add_calls([call])

    async def add_calls(self, calls: Sequence[Call]) -> None:
        """Record calls, all of them or none. Raises as `add_call` does."""
        rows = [schema.call_row(call) for call in calls]

        def operation(connection: Connection) -> None:
            for call, row in zip(calls, rows, strict=True):
                _ensure_attempt(connection, call.rollout_id, call.attempt_id)
                try:
                    connection.execute(_ADD_CALL, row)
                except IntegrityError as error:
                    raise Conflict(
                        f"call {call.number} of attempt {call.attempt_id} of rollout {call.rollout_id} is recorded already"
                    ) from error

        await self._write(operation)

    async def mark_calls(
        self, rollout_id: str, attempt_id: str, numbers: Sequence[int], status: str, error: dict[str, Any] | None
    ) -> None:
        """Change whether recorded calls count as answered (`ok`) or as given up (`abandoned`), and why."""
        of_call = schema.calls.c
        which = (of_call.rollout_id == rollout_id, of_call.attempt_id == attempt_id, of_call.number.in_(numbers))
        values = {"status": status, "error": None if error is None else schema.to_text(error)}

        def operation(connection: Connection) -> None:
            connection.execute(sa.update(schema.calls).where(*which).values(values))

        await self._write(operation)

    async def add_event(self, event: Event, *, while_running: bool = False) -> None:
        """Record an event; its attempt is made when it is not there. Raises NotFound for an unknown rollout, and Conflict
        where the event belongs to a running attempt and this one has ended."""
        row = {name: getattr(event, name) for name in Event.__struct_fields__} | {"data": schema.to_text(event.data)}

        def operation(connection: Connection) -> None:
            attempt = _ensure_attempt(connection, event.rollout_id, event.attempt_id)
            if while_running and attempt.ended_at is not None:
                raise Conflict(f"attempt {event.attempt_id} of rollout {event.rollout_id} has ended")
            connection.execute(_ADD_EVENT, row)

        await self._write(operation)

    async def put_models(self, models: list[ModelEndpoint]) -> list[ModelEndpoint]:
        """Add endpoints; one known by model and endpoint takes the new version and protocol. Returns `models`."""

        def operation(connection: Connection) -> list[ModelEndpoint]:
            for model in models:
                same = (schema.models.c.model == model.model) & (schema.models.c.endpoint == model.endpoint)
                values = {"version": model.version, "protocol": model.protocol}
                if not connection.execute(sa.update(schema.models).where(same).values(values)).rowcount:
                    names = {"model": model.model, "endpoint": model.endpoint}
                    connection.execute(sa.insert(schema.models).values(values | names))
            return models

        return await self._write(operation)

    async def clear_models(self) -> None:
        """Forget all endpoints."""

        def operation(connection: Connection) -> None:
            connection.execute(sa.delete(schema.models))

        await self._write(operation)

    async def prune(
        self, through_step: int, prefix: str = "", kinds: Collection[CallKind] = TRAINED_KINDS
    ) -> PruneResult:
        """Remove tokens and messages of finished rollouts of steps up to `through_step`; see `pruning.py`.

        Only rollouts whose ids begin with `prefix`, and only those of a trainer (which have a phase and a step). The
        space goes back to the file system where it can be given back in pieces.
        """
        ids = self._read(lambda connection: pruning.find_prunable(connection, through_step, prefix))
        total = PruneResult()
        for at in range(0, len(ids), pruning.AT_ONCE):
            part = ids[at : at + pruning.AT_ONCE]
            done = await self._write(lambda connection, part=part: pruning.prune(connection, part, kinds))
            total.rollouts += done.rollouts
            total.calls += done.calls
            total.tokens += done.tokens
        while await self._write(give_back_space):
            pass
        return total

    def vacuum(self) -> None:
        """Write a SQLite file anew, without its free space. Nobody may write meanwhile. Raises StoreError."""
        try:
            vacuum(self.engine)
        except (SQLAlchemyError, sqlite3.Error) as error:
            raise trouble(self._name, "vacuumed", error) from error

    # --- Reading

    def _read(self, look: Callable[[Connection], T]) -> T:
        """What `look` finds. A connection that was lost (the server has been started again) is replaced once."""
        for last in (False, True):
            try:
                with self._reader.connect() as connection:
                    return look(connection)
            except SQLAlchemyError as error:
                lost = isinstance(error, DBAPIError) and error.connection_invalidated
                if last or not lost:
                    raise trouble(self._name, "read", error) from error
        raise AssertionError("unreachable")

    def _all(self, query: sa.Executable, parameters: dict[str, Any] | None = None) -> Sequence[Row[Any]]:
        return self._read(lambda connection: connection.execute(query, parameters).all())

    def _records(self, of: Callable[[Row[Any]], T], rows: Sequence[Row[Any]]) -> list[T]:
        """Rows as records. Raises StoreError for one that is damaged."""
        found = []
        for row in rows:
            try:
                found.append(of(row))
            except (ValueError, TypeError) as error:
                names = ("rollout_id", "attempt_id", "number")
                where = ", ".join(f"{name} {row._mapping[name]}" for name in names if name in row._mapping)
                raise StoreError(
                    f"{self._name}: the record of {where} is damaged: {error}; `longrein store check` lists all that is"
                ) from error
        return found

    def rollouts(self, states: Sequence[RolloutState] | None = None, limit: int = 500) -> list[Rollout]:
        """Rollouts in one of `states` (None: all), oldest first, at most `limit`."""
        query = sa.select(schema.rollouts).order_by(schema.rollouts.c.position).limit(limit)
        if states is not None:
            query = query.where(schema.rollouts.c.state.in_([state.value for state in states]))
        return self._records(schema.rollout_of, self._all(query))

    def each_rollout(self) -> Iterator[Rollout]:
        """All rollouts, oldest first, read in pieces."""
        position = schema.rollouts.c.position
        query = sa.select(schema.rollouts).order_by(position).limit(_PAGE)
        after = 0
        while rows := self._all(query.where(position > after)):
            yield from self._records(schema.rollout_of, rows)
            after = rows[-1].position

    def rollout(self, rollout_id: str) -> Rollout | None:
        found = self._records(schema.rollout_of, self._all(_ROLLOUT, {"rollout_id": rollout_id}))
        return found[0] if found else None

    def attempts(self, rollout_id: str) -> list[Attempt]:
        """A rollout's attempts, oldest first."""
        return self._records(schema.attempt_of, self._read(lambda connection: _find_attempts(connection, rollout_id)))

    def attempt(self, rollout_id: str, attempt_id: str) -> Attempt | None:
        rows = self._all(_ATTEMPT, {"rollout_id": rollout_id, "attempt_id": attempt_id})
        return self._records(schema.attempt_of, rows)[0] if rows else None

    def attempt_of_token(self, token_hash: bytes) -> Attempt | None:
        """The attempt, ended or not, whose token has this SHA-256."""
        rows = self._all(_ATTEMPT_OF_TOKEN, {"token_hash": token_hash})
        return self._records(schema.attempt_of, rows)[0] if rows else None

    def attempts_with_records(self, rollout_id: str) -> list[str]:
        """Ids of the attempts that have calls or events, oldest first."""
        of_attempt = [
            sa.exists().where(table.c.rollout_id == rollout_id, table.c.attempt_id == schema.attempts.c.attempt_id)
            for table in (schema.calls, schema.events)
        ]
        query = sa.select(schema.attempts.c.attempt_id).where(
            schema.attempts.c.rollout_id == rollout_id, sa.or_(*of_attempt)
        )
        return [row.attempt_id for row in self._all(query.order_by(schema.attempts.c.position))]

    def calls(self, rollout_id: str, attempt_id: str) -> list[Call]:
        """An attempt's calls in order of number."""
        query = sa.select(schema.calls).where(
            schema.calls.c.rollout_id == rollout_id, schema.calls.c.attempt_id == attempt_id
        )
        return self._records(schema.call_of, self._all(query.order_by(schema.calls.c.number)))

    def next_call_number(self, rollout_id: str, attempt_id: str) -> int:
        """One more than the largest number of the attempt's calls; 0 without calls."""
        query = sa.select(sa.func.max(schema.calls.c.number)).where(
            schema.calls.c.rollout_id == rollout_id, schema.calls.c.attempt_id == attempt_id
        )
        largest = self._all(query)[0][0]
        return 0 if largest is None else largest + 1

    def spent(self, rollout_id: str, attempt_id: str) -> tuple[int, int]:
        """(calls, sampled tokens) of an attempt, whatever became of the calls."""
        sampled = sa.func.coalesce(sa.func.sum(sa.func.length(schema.calls.c.sampled)), 0)
        query = sa.select(sa.func.count().label("calls"), sampled.label("size")).where(
            schema.calls.c.rollout_id == rollout_id, schema.calls.c.attempt_id == attempt_id
        )
        row = self._all(query)[0]._mapping
        return row["calls"], int(row["size"]) // 4

    def event_count(self, rollout_id: str, attempt_id: str) -> int:
        """How many events are stored of an attempt."""
        query = sa.select(sa.func.count()).where(
            schema.events.c.rollout_id == rollout_id, schema.events.c.attempt_id == attempt_id
        )
        return self._all(query)[0][0]

    def events(self, rollout_id: str, attempt_id: str, event_type: str | None = None) -> list[Event]:
        """An attempt's stored events in the order in which they came."""
        query = sa.select(schema.events).where(
            schema.events.c.rollout_id == rollout_id, schema.events.c.attempt_id == attempt_id
        )
        if event_type is not None:
            query = query.where(schema.events.c.event_type == event_type)
        return self._records(schema.event_of, self._all(query.order_by(schema.events.c.position)))

    def terminal(self, after: int, limit: int) -> TerminalPage:
        """Finished rollouts behind position `after`, in the order in which they finished."""
        query = (
            sa.select(schema.terminal.c.position, schema.rollouts)
            .join(schema.rollouts, schema.rollouts.c.rollout_id == schema.terminal.c.rollout_id)
            .where(schema.terminal.c.position > after)
            .order_by(schema.terminal.c.position)
            .limit(limit)
        )
        rows = self._all(query)
        total = self._all(sa.select(sa.func.count()).select_from(schema.terminal))[0][0]
        items = [_terminal_item(rollout) for rollout in self._records(schema.rollout_of, rows)]
        return TerminalPage(items=items, next_after=rows[-1][0] if rows else after, total_terminal=total)

    def models(self) -> list[ModelEndpoint]:
        return self._records(schema.model_of, self._all(_MODELS))


def _terminal_item(rollout: Rollout) -> TerminalItem:
    data_id = rollout.input.get("data_id") or rollout.input.get("instance_id") or ""
    return TerminalItem(
        rollout_id=rollout.rollout_id, state=rollout.status.state, data_id=str(data_id), is_train=rollout.is_train
    )


# --- Steps ----------------------------------------------------------------------------------------------------


def _find_rollout(connection: Connection, rollout_id: str) -> Rollout | None:
    row = connection.execute(_ROLLOUT, {"rollout_id": rollout_id}).one_or_none()
    return None if row is None else schema.rollout_of(row)


def _require_rollout(connection: Connection, rollout_id: str) -> Rollout:
    rollout = _find_rollout(connection, rollout_id)
    if rollout is None:
        raise NotFound(f"no rollout {rollout_id}")
    return rollout


def _find_attempts(connection: Connection, rollout_id: str) -> Sequence[Row[Any]]:
    query = (
        sa.select(schema.attempts)
        .where(schema.attempts.c.rollout_id == rollout_id)
        .order_by(schema.attempts.c.position)
    )
    return connection.execute(query).all()


def _find_attempt(connection: Connection, rollout_id: str, attempt_id: str) -> Row[Any] | None:
    return connection.execute(_ATTEMPT, {"rollout_id": rollout_id, "attempt_id": attempt_id}).one_or_none()


def _insert_attempt(connection: Connection, rollout_id: str, attempt_id: str, token_hash: bytes | None) -> Attempt:
    attempt = Attempt(rollout_id=rollout_id, attempt_id=attempt_id, started_at=now())
    connection.execute(
        sa.insert(schema.attempts).values(
            rollout_id=rollout_id, attempt_id=attempt_id, token_hash=token_hash, started_at=attempt.started_at
        )
    )
    return attempt


def _ensure_attempt(connection: Connection, rollout_id: str, attempt_id: str) -> Attempt:
    row = _find_attempt(connection, rollout_id, attempt_id)
    if row is not None:
        return schema.attempt_of(row)
    _require_rollout(connection, rollout_id)
    return _insert_attempt(connection, rollout_id, attempt_id, None)


def _change_rollout(connection: Connection, rollout_id: str, change: StatusChange) -> Rollout:
    rollout = _require_rollout(connection, rollout_id)
    status = rollout.status
    values = {name: value for name in change.__struct_fields__ if (value := getattr(change, name)) is not None}
    if not values:
        return rollout
    if change.state is not None and (status.state, change.state) not in TRANSITIONS:
        raise Conflict(f"rollout {rollout_id}: there is no way from {status.state.value} to {change.state.value}")
    for name, value in values.items():
        setattr(status, name, value)
    status.version += 1
    status.updated_at = now()
    row = schema.rollout_row(rollout)
    changed = {name: row[name] for name in (*values, "version", "updated_at")}
    connection.execute(sa.update(schema.rollouts).where(schema.rollouts.c.rollout_id == rollout_id).values(changed))
    if change.state in TERMINAL:
        connection.execute(sa.insert(schema.terminal).values(rollout_id=rollout_id))
    return rollout
