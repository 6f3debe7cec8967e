"""Opening databases: the one place that knows SQLite from another one."""

from __future__ import annotations

import os
import sqlite3
import urllib.parse
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from longrein.schema import StoreError

_BUSY_SECONDS = 30.0


def _sqlite_file(url: str) -> str | None:
    """The file of a SQLite URL; None for another database. A database in memory is refused: it would not last."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    if not parsed.database or parsed.database == ":memory:":
        raise StoreError("store.url: a SQLite record needs a file, e.g. sqlite:///runs/store.sqlite")
    return parsed.database


def open_writing(url: str, fsync: bool) -> tuple[Engine, Engine]:
    """The engine of the writer thread and that of the readers."""
    if _sqlite_file(url) is None:
        return sa.create_engine(url), sa.create_engine(url, isolation_level="AUTOCOMMIT")
    arguments = {"timeout": _BUSY_SECONDS, "check_same_thread": False}
    writer = sa.create_engine(url, connect_args=arguments)

    def prepare(dbapi: Any, _: Any) -> None:
        # The driver's own transaction handling breaks savepoints: begin below does it instead.
        dbapi.isolation_level = None
        # WAL: readers and the writer do not wait for each other. NORMAL survives the death of a process, FULL a
        # power loss as well.
        dbapi.execute("PRAGMA journal_mode = WAL")
        dbapi.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")

    event.listen(writer, "connect", prepare)
    event.listen(writer, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    reader = sa.create_engine(url, connect_args=arguments)
    event.listen(reader, "connect", _without_transactions)
    return writer, reader


def _without_transactions(dbapi: Any, _: Any) -> None:
    dbapi.isolation_level = None


def open_reading(url: str) -> Engine:
    """An engine that only reads: it creates no file, and the writer never waits for it."""
    file = _sqlite_file(url)
    if file is None:
        return sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with open(file, "rb") as opened:
        header = opened.read(20)
    # A file in WAL mode without its -wal has no writer (it was copied): opened as it is, or SQLite would create one.
    left_alone = header[18:20] == b"\x02\x02" and not os.path.exists(file + "-wal")
    query = {"mode": "ro", "uri": "true"} | ({"immutable": "1"} if left_alone else {})
    target = sa.URL.create("sqlite", database=f"file:{urllib.parse.quote(os.path.abspath(file))}", query=query)
    engine = sa.create_engine(target, connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False})
    event.listen(engine, "connect", _without_transactions)
    return engine


def close_writing(engine: Engine) -> None:
    """What is left to do when the last write is done; the engine's connections are closed by the caller."""
    if engine.dialect.name == "sqlite":
        # Leaves one plain file, which read-only openers need no other file for. A reader who is at it now prevents
        # it; then the file stays in WAL mode, which is as good for all but read-only media.
        with suppress(SQLAlchemyError, sqlite3.Error), engine.connect() as connection:
            dbapi = connection.connection.dbapi_connection
            assert dbapi is not None
            connection.rollback()
            dbapi.execute("PRAGMA busy_timeout = 0")  # type: ignore[attr-defined]
            dbapi.execute("PRAGMA journal_mode = DELETE")  # type: ignore[attr-defined]


def words(error: BaseException) -> str:
    """What a database's error says, without SQLAlchemy's wrapping."""
    cause: BaseException = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return str(cause) or type(cause).__name__


def shown(url: str) -> str:
    """The URL as it may be shown, without a password."""
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        raise StoreError(
            f"store.url: {url!r} is not a SQLAlchemy URL; expected e.g. sqlite:///runs/store.sqlite"
        ) from None
