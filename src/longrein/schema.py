"""The tables of the record, how they are brought up to date, and how rows become records.

Token ids are little-endian int32 blobs, log-probabilities float32 blobs, JSON values text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from longrein.records import (
    Attempt,
    Call,
    Event,
    ModelEndpoint,
    Outcome,
    Pruned,
    Rollout,
    RolloutConfig,
    RolloutState,
    RolloutStatus,
    Usage,
)


class StoreError(Exception):
    """The record cannot be opened or written. The message names it and what to do."""


_tables = sa.MetaData()
_Position = sa.BigInteger().with_variant(sa.Integer, "sqlite")


class _WithoutNul(sa.TypeDecorator[str]):
    """PostgreSQL has no text with a NUL in it: each becomes U+FFFD there. JSON spells them as escapes and keeps them."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else value.replace("\0", "\ufffd")


_Text = sa.Text().with_variant(_WithoutNul(), "postgresql")


def _position() -> sa.Column[int]:
    """A number that grows with every row and is never used again."""
    return sa.Column("position", _Position, primary_key=True, autoincrement=True)


_schema = sa.Table("longrein_schema", _tables, sa.Column("version", sa.Integer, nullable=False))

rollouts = sa.Table(
    "rollouts",
    _tables,
    _position(),
    sa.Column("rollout_id", _Text, nullable=False, unique=True),
    sa.Column("group_id", _Text),
    sa.Column("is_train", sa.Boolean, nullable=False),
    sa.Column("input", _Text, nullable=False),
    sa.Column("config", _Text, nullable=False),
    sa.Column("metadata", _Text, nullable=False),
    sa.Column("state", _Text, nullable=False),
    sa.Column("k8s_job_name", _Text),
    sa.Column("last_attempt_id", _Text),
    sa.Column("error_message", _Text),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("updated_at", sa.Double, nullable=False),
    sa.Column("pruned_at", sa.Double),
    sa.Index("rollouts_by_state", "state", "position"),
    sqlite_autoincrement=True,
)

terminal = sa.Table(
    "terminal",
    _tables,
    _position(),
    sa.Column("rollout_id", _Text, nullable=False, unique=True),
    sqlite_autoincrement=True,
)

attempts = sa.Table(
    "attempts",
    _tables,
    _position(),
    sa.Column("rollout_id", _Text, nullable=False),
    sa.Column("attempt_id", _Text, nullable=False),
    sa.Column("token_hash", sa.LargeBinary, unique=True),
    sa.Column("started_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double),
    sa.Column("outcome", _Text),
    sa.Column("exit_code", sa.Integer),
    sa.Column("reason", _Text),
    sa.Column("usage", _Text),
    sa.UniqueConstraint("rollout_id", "attempt_id"),
    sqlite_autoincrement=True,
)

calls = sa.Table(
    "calls",
    _tables,
    sa.Column("rollout_id", _Text, primary_key=True),
    sa.Column("attempt_id", _Text, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("dialect", _Text, nullable=False),
    sa.Column("mode", _Text, nullable=False),
    sa.Column("model", _Text, nullable=False),
    sa.Column("engine", _Text, nullable=False),
    sa.Column("kind", _Text, nullable=False),
    sa.Column("parent", sa.Integer),
    sa.Column("fork", _Text),
    sa.Column("prefix", sa.Integer),
    sa.Column("prefix_length", sa.Integer, nullable=False),
    sa.Column("prompt_delta", sa.LargeBinary, nullable=False),
    sa.Column("prompt_length", sa.Integer, nullable=False),
    sa.Column("sampled", sa.LargeBinary, nullable=False),
    sa.Column("logprobs", sa.LargeBinary),
    sa.Column("versions", _Text, nullable=False),
    sa.Column("messages_keep", sa.Integer, nullable=False),
    sa.Column("messages", _Text, nullable=False),
    sa.Column("tools", _Text),
    sa.Column("reply", _Text, nullable=False),
    sa.Column("sampling", _Text, nullable=False),
    sa.Column("status", _Text, nullable=False),
    sa.Column("finish_reason", _Text),
    sa.Column("http_status", sa.Integer, nullable=False),
    sa.Column("error", _Text),
    sa.Column("started_at", sa.Double, nullable=False),
    sa.Column("first_token_at", sa.Double),
    sa.Column("finished_at", sa.Double, nullable=False),
    sa.Column("pruned", _Text),
)

events = sa.Table(
    "events",
    _tables,
    _position(),
    sa.Column("rollout_id", _Text, nullable=False),
    sa.Column("attempt_id", _Text, nullable=False),
    sa.Column("event_type", _Text, nullable=False),
    sa.Column("timestamp", sa.Double, nullable=False),
    sa.Column("data", _Text, nullable=False),
    sa.Index("events_by_attempt", "rollout_id", "attempt_id", "position"),
    sqlite_autoincrement=True,
)

models = sa.Table(
    "models",
    _tables,
    _position(),
    sa.Column("model", _Text, nullable=False),
    sa.Column("endpoint", _Text, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("protocol", _Text, nullable=False),
    sa.UniqueConstraint("model", "endpoint"),
    sqlite_autoincrement=True,
)


def _prunable(connection: Connection) -> None:
    """Version 2: what was sampled can be removed, and only its count kept. vLLM's protocol has its present name."""
    connection.execute(sa.text("ALTER TABLE rollouts ADD COLUMN pruned_at DOUBLE PRECISION"))
    connection.execute(sa.text("ALTER TABLE calls ADD COLUMN pruned TEXT"))
    connection.execute(sa.text("UPDATE models SET protocol = 'vllm' WHERE protocol = 'completions'"))


#: MIGRATIONS[i] turns a store of schema version i + 1 into one of version i + 2, inside a transaction.
MIGRATIONS: list[Callable[[Connection], None]] = [_prunable]


def schema_version() -> int:
    """The schema version that this program writes."""
    return 1 + len(MIGRATIONS)


def check_schema(connection: Connection, name: str, *, read_only: bool) -> None:
    """Create the schema, or bring it up to date."""
    wanted = schema_version()
    tables = sa.inspect(connection).get_table_names()
    if _schema.name not in tables:
        if tables or read_only:
            raise StoreError(f"{name}: this database is not a Longrein record (no table {_schema.name})")
        _tables.create_all(connection)
        connection.execute(sa.insert(_schema).values(version=wanted))
        return
    found = connection.execute(sa.select(_schema.c.version)).scalar_one()
    if found > wanted:
        raise StoreError(
            f"{name}: the record has schema version {found}, this Longrein knows versions up to {wanted}; "
            "use the Longrein that wrote it, or a newer one"
        )
    if found < wanted:
        if read_only:
            raise StoreError(
                f"{name}: the record has schema version {found}, this Longrein reads version {wanted}; "
                "start `longrein gateway` on it once to bring it up to date"
            )
        for migrate in MIGRATIONS[found - 1 :]:
            migrate(connection)
        connection.execute(sa.update(_schema).values(version=wanted))


# --- Rows and records -----------------------------------------------------------------------------------------------


def to_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


_json = msgspec.json.decode
_read_config = msgspec.json.Decoder(RolloutConfig).decode
_read_usage = msgspec.json.Decoder(Usage).decode
_read_versions = msgspec.json.Decoder(list[tuple[int, int]]).decode
_read_pruned = msgspec.json.Decoder(Pruned).decode


def _ints(values: Sequence[int]) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


def _floats(values: Sequence[float]) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    status = rollout.status
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "is_train": rollout.is_train,
        "input": to_text(rollout.input),
        "config": to_text(rollout.config),
        "metadata": to_text(rollout.metadata),
        "state": status.state.value,
        "k8s_job_name": status.k8s_job_name,
        "last_attempt_id": status.last_attempt_id,
        "error_message": status.error_message,
        "version": status.version,
        "created_at": status.created_at,
        "updated_at": status.updated_at,
    }


def rollout_of(row: Row[Any]) -> Rollout:
    value = row._mapping
    status = RolloutStatus(
        state=RolloutState(value["state"]),
        k8s_job_name=value["k8s_job_name"],
        last_attempt_id=value["last_attempt_id"],
        error_message=value["error_message"],
        version=value["version"],
        created_at=value["created_at"],
        updated_at=value["updated_at"],
    )
    return Rollout(
        rollout_id=value["rollout_id"],
        input=_json(value["input"]),
        is_train=bool(value["is_train"]),
        config=_read_config(value["config"]),
        metadata=_json(value["metadata"]),
        status=status,
        group_id=value["group_id"],
    )


def attempt_of(row: Row[Any]) -> Attempt:
    value = row._mapping
    return Attempt(
        rollout_id=value["rollout_id"],
        attempt_id=value["attempt_id"],
        started_at=value["started_at"],
        ended_at=value["ended_at"],
        outcome=None if value["outcome"] is None else Outcome(value["outcome"]),
        exit_code=value["exit_code"],
        reason=value["reason"],
        usage=None if value["usage"] is None else _read_usage(value["usage"]),
    )


def call_row(call: Call) -> dict[str, Any]:
    row = {name: getattr(call, name) for name in Call.__struct_fields__}
    return row | {
        "prompt_delta": _ints(call.prompt_delta),
        "sampled": _ints(call.sampled),
        "logprobs": None if call.logprobs is None else _floats(call.logprobs),
        "versions": to_text(call.versions),
        "messages": to_text(call.messages),
        "tools": None if call.tools is None else to_text(call.tools),
        "reply": to_text(call.reply),
        "sampling": to_text(call.sampling),
        "error": None if call.error is None else to_text(call.error),
        "pruned": None if call.pruned is None else to_text(call.pruned),
    }


def call_of(row: Row[Any]) -> Call:
    value = dict(row._mapping)
    logprobs, tools, error, pruned = value["logprobs"], value["tools"], value["error"], value["pruned"]
    return Call(
        **value
        | {
            "prompt_delta": np.frombuffer(value["prompt_delta"], dtype="<i4").tolist(),
            "sampled": np.frombuffer(value["sampled"], dtype="<i4").tolist(),
            "logprobs": None if logprobs is None else np.frombuffer(logprobs, dtype="<f4").tolist(),
            "versions": _read_versions(value["versions"]),
            "messages": _json(value["messages"]),
            "tools": None if tools is None else _json(tools),
            "reply": _json(value["reply"]),
            "sampling": _json(value["sampling"]),
            "error": None if error is None else _json(error),
            "pruned": None if pruned is None else _read_pruned(pruned),
        }
    )


def event_of(row: Row[Any]) -> Event:
    value = row._mapping
    return Event(
        event_type=value["event_type"],
        rollout_id=value["rollout_id"],
        attempt_id=value["attempt_id"],
        timestamp=value["timestamp"],
        data=_json(value["data"]),
    )


def model_of(row: Row[Any]) -> ModelEndpoint:
    value = row._mapping
    return ModelEndpoint(
        model=value["model"], endpoint=value["endpoint"], version=value["version"], protocol=value["protocol"]
    )
