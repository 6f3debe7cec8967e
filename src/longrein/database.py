"""Opening databases: the one place that knows SQLite from PostgreSQL."""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
import urllib.parse
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from longrein.schema import StoreError

_BUSY_SECONDS = 30.0
_CONNECT_SECONDS = 10
#: How long the lock of a PostgreSQL record is waited for.
LOCK_SECONDS = 5


@dataclass
class Opened:
    """A database that this process writes, and no other while it is open."""

    writer: Engine
    """For the one thread that writes."""
    reader: Engine
    lock: Lock | None
    """What keeps a second writer out of a SQLite file. PostgreSQL's is held by the writer's connection."""

    def close(self) -> None:
        """Let go of everything, when the last write is done."""
        self.reader.dispose()
        _leave_plain(self.writer)
        self.writer.dispose()
        if self.lock is not None:
            self.lock.close()


def open_writing(url: str, fsync: bool) -> Opened:
    """Open a database for the only process that writes it. Raises StoreError when another one does."""
    file = sqlite_file(url)
    if file is None:
        return _open_postgres(url, fsync)
    lock = Lock(file)
    try:
        _refuse_broken_log(file)
    except BaseException:
        lock.close()
        raise
    arguments = {"timeout": _BUSY_SECONDS, "check_same_thread": False}
    writer = sa.create_engine(url, connect_args=arguments)

    def prepare(dbapi: Any, _: Any) -> None:
        # The driver's own transaction handling breaks savepoints: begin below does it instead.
        dbapi.isolation_level = None
        # Says something to a new file only: pages that pruning frees can be given back to the file system.
        dbapi.execute("PRAGMA auto_vacuum = INCREMENTAL")
        # WAL: readers and the writer do not wait for each other. NORMAL survives the death of a process, FULL a
        # power loss as well.
        dbapi.execute("PRAGMA journal_mode = WAL")
        dbapi.execute(f"PRAGMA synchronous = {'FULL' if fsync else 'NORMAL'}")

    event.listen(writer, "connect", prepare)
    event.listen(writer, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    reader = sa.create_engine(url, connect_args=arguments)
    event.listen(reader, "connect", _without_transactions)
    return Opened(writer, reader, lock)


def open_reading(url: str) -> Engine:
    """An engine that only reads: it creates no file, and the writer never waits for it."""
    file = sqlite_file(url)
    if file is None:
        return _postgres_reader(url)
    with open(file, "rb") as opened:
        header = opened.read(20)
    _refuse_broken_log(file)
    # A file in WAL mode without its -wal has no writer (it was copied): opened as it is, or SQLite would create one.
    left_alone = header[18:20] == b"\x02\x02" and not os.path.exists(file + "-wal")
    query = {"mode": "ro", "uri": "true"} | ({"immutable": "1"} if left_alone else {})
    target = sa.URL.create("sqlite", database=f"file:{urllib.parse.quote(os.path.abspath(file))}", query=query)
    engine = sa.create_engine(target, connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False})
    event.listen(engine, "connect", _without_transactions)
    return engine


# --- SQLite -----------------------------------------------------------------------------------------------------------


def sqlite_file(url: str) -> str | None:
    """The file of a SQLite URL; None for another database. A database in memory is refused: it would not last."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return None
    if not parsed.database or parsed.database == ":memory:":
        raise StoreError("store.url: a SQLite record needs a file, e.g. sqlite:///runs/store.sqlite")
    return parsed.database


class Lock:
    """Held on FILE-lock while a process writes a SQLite file; it ends with the process, however that ends."""

    def __init__(self, file: str) -> None:
        self._name = os.path.realpath(file) + "-lock"
        self._descriptor = -1
        try:
            import fcntl
        except ImportError:  # native Windows
            return
        while True:
            descriptor = os.open(self._name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise StoreError(
                    f"{file}: another process writes this record; end that one (a gateway), or give this run a record of "
                    "its own (run.name, store.url)"
                ) from None
            except OSError as error:
                os.close(descriptor)
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                return  # a file system without locks
            # The holder before may have removed the file between the two steps: a lock on it would keep nobody out.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self._name)):
                    self._descriptor = descriptor
                    return
            os.close(descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.unlink(self._name)
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(frozen=True)
class Log:
    """What stands in FILE-wal: transactions that are not in FILE yet."""

    whole: int
    """Bytes up to the end of the last whole transaction."""
    rest: int
    """Bytes behind it that belong to it: a write that was not finished, or what is left of a log that was cut."""


_LOG_HEADER = 32
_FRAME_HEADER = 24


def read_log(file: str) -> Log | None:
    """The log beside a SQLite file; None where there is none. Raises StoreError when its header is not that of a log.

    The format is described at sqlite.org/walformat.html. What follows the first frame whose salts or checksum do not
    continue the ones before it is left from an earlier round and is not counted.
    """
    try:
        with open(file + "-wal", "rb") as opened:
            data = opened.read()
    except FileNotFoundError:
        return None
    if len(data) <= _LOG_HEADER:
        return None
    _require_log_header(file, data[:_LOG_HEADER], len(data))
    order = ">" if data[3] & 1 else "<"
    page, salts = int.from_bytes(data[8:12], "big"), data[16:24]
    page = 65536 if page == 1 else page
    sums, at, whole = struct.unpack(">II", data[24:32]), _LOG_HEADER, _LOG_HEADER
    while at + _FRAME_HEADER + page <= len(data):
        head = data[at : at + _FRAME_HEADER]
        sums = _log_checksum(data[at : at + 8] + data[at + _FRAME_HEADER : at + _FRAME_HEADER + page], order, sums)
        if head[8:16] != salts or sums != struct.unpack(">II", head[16:24]):
            break
        at += _FRAME_HEADER + page
        if head[4:8] != b"\0\0\0\0":  # the database's size in pages: only the frame that commits has it
            whole = at
    rest = at - whole
    if at < len(data) and salts.startswith(data[at + 8 : at + 16]):  # one more frame of this round, damaged or cut
        rest = len(data) - whole
    return Log(whole, rest)


def _refuse_broken_log(file: str) -> None:
    """SQLite takes a log without a valid header for an empty one, and would begin it anew."""
    try:
        with open(file + "-wal", "rb") as opened:
            header = opened.read(_LOG_HEADER)
            size = os.fstat(opened.fileno()).st_size
    except FileNotFoundError:
        return
    if size > _LOG_HEADER:
        _require_log_header(file, header, size)


def _require_log_header(file: str, header: bytes, size: int) -> None:
    magic = int.from_bytes(header[:4], "big")
    order = ">" if magic & 1 else "<"
    if magic | 1 == 0x377F0683 and _log_checksum(header[:24], order, (0, 0)) == struct.unpack(">II", header[24:32]):
        return
    raise StoreError(
        f"{file}-wal: the log beside the record is damaged: its first {_LOG_HEADER} bytes are not the header of a SQLite "
        f"log, so the writes in its {size} bytes cannot be read. Put back a copy of it; or remove it, and go on with what "
        f"{file} alone holds"
    )


def _log_checksum(data: bytes, order: str, start: tuple[int, int]) -> tuple[int, int]:
    first, second = start
    for one, other in struct.iter_unpack(f"{order}II", data):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second


def _without_transactions(dbapi: Any, _: Any) -> None:
    dbapi.isolation_level = None


def _leave_plain(engine: Engine) -> None:
    if engine.dialect.name == "sqlite":
        # Leaves one plain file, which read-only openers need no other file for. A reader who is at it now prevents
        # it; then the file stays in WAL mode, which is as good for all but read-only media.
        with suppress(SQLAlchemyError, sqlite3.Error), engine.connect() as connection:
            dbapi = connection.connection.dbapi_connection
            assert dbapi is not None
            connection.rollback()
            dbapi.execute("PRAGMA busy_timeout = 0")  # type: ignore[attr-defined]
            dbapi.execute("PRAGMA journal_mode = DELETE")  # type: ignore[attr-defined]


def give_back_space(connection: sa.Connection, pages: int = 2000) -> bool:
    """Give free pages of a SQLite file back to the file system, so many at most; whether there are more.

    PostgreSQL uses freed space again by itself. So does a file that was made before files gave pages back; VACUUM
    makes it one that does.
    """
    if connection.dialect.name != "sqlite":
        return False

    def value(pragma: str) -> int:
        return int(connection.exec_driver_sql(f"PRAGMA {pragma}").scalar_one())

    free = value("freelist_count")
    if not free or value("auto_vacuum") != 2:
        return False
    dbapi = connection.connection.dbapi_connection
    assert dbapi is not None
    dbapi.execute(f"PRAGMA incremental_vacuum({pages})").fetchall()  # type: ignore[attr-defined]  (a step for each page)
    return 0 < value("freelist_count") < free


def vacuum(engine: Engine) -> None:
    """Write a SQLite file anew without its free space. It takes as much room again meanwhile, and nobody may write."""
    with engine.connect() as connection:
        dbapi = connection.connection.dbapi_connection
        assert dbapi is not None
        connection.rollback()
        dbapi.execute("PRAGMA auto_vacuum = INCREMENTAL")  # type: ignore[attr-defined]
        dbapi.execute("VACUUM")  # type: ignore[attr-defined]


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


def _postgres_url(url: str) -> sa.URL:
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "postgresql":
        raise StoreError(
            f"store.url: {parsed.get_backend_name()} is no database that a record can be in; use sqlite:///FILE or "
            "postgresql://USER@HOST/DATABASE"
        )
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername != "postgresql+psycopg":
        raise StoreError(
            f"store.url: {parsed.drivername} is not supported; write postgresql:// (the driver is psycopg)"
        )
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise StoreError(
            f"store.url: PostgreSQL needs psycopg ({error}); install it with `pip install 'longrein[postgres]'`"
        ) from error
    return parsed


def _open_postgres(url: str, fsync: bool) -> Opened:
    name, target = shown(url), _postgres_url(url)
    from psycopg.errors import LockNotAvailable

    def prepare(dbapi: Any, _: Any) -> None:
        dbapi.rollback()
        dbapi.autocommit = True
        # Never off: the server keeps its log in memory then, and its death would take acknowledged commits with it.
        dbapi.execute(f"SET synchronous_commit TO {'on' if fsync else 'local'}")
        if dbapi.execute("SELECT current_schema()").fetchone() == (None,):
            dbapi.close()
            raise StoreError(f"{name}: the search_path names no schema that is there; create it, or name another")
        # One lock for each schema of a database. It ends with this connection; that of a writer that was killed ends as
        # soon as the server sees it, which may take a moment.
        dbapi.execute(f"SET lock_timeout TO '{LOCK_SECONDS}s'")
        try:
            dbapi.execute("SELECT pg_advisory_lock(hashtext('longrein'), hashtext(current_schema()))")
        except LockNotAvailable:
            dbapi.close()
            raise StoreError(
                f"{name}: another process writes this record; end that one (a gateway), or give this run a database or a "
                "schema of its own (…?options=-csearch_path%3DSCHEMA)"
            ) from None
        dbapi.execute("RESET lock_timeout")
        dbapi.autocommit = False

    arguments = {"connect_timeout": _CONNECT_SECONDS, "application_name": "longrein writer"}
    writer = sa.create_engine(target, connect_args=arguments, pool_size=1, max_overflow=0)
    event.listen(writer, "connect", prepare)
    return Opened(writer, _postgres_reader(url), None)


def _postgres_reader(url: str) -> Engine:
    arguments = {"connect_timeout": _CONNECT_SECONDS, "application_name": "longrein reader"}
    engine = sa.create_engine(_postgres_url(url), connect_args=arguments, isolation_level="AUTOCOMMIT")

    def prepare(dbapi: Any, _: Any) -> None:
        dbapi.rollback()
        dbapi.autocommit = True
        dbapi.execute("SET default_transaction_read_only TO on")

    event.listen(engine, "connect", prepare)
    return engine


# --- Words ------------------------------------------------------------------------------------------------------------

#: What a database says → what to do about it.
_ADVICE = (
    ("disk is full", "make room where it lies, then writing goes on by itself"),
    ("No space left", "make room where it lies, then writing goes on by itself"),
    ("could not extend file", "make room where it lies, then writing goes on by itself"),
    ("disk I/O error", "see whether its disk is full, broken or limited (ulimit -f); when it is not, writing goes on"),
    ("readonly database", "make the file and its folder writable for this user, or move the record"),
    ("read-only", "connect to a server that takes writes, as a user who may write"),
    ("unable to open database file", "its folder has to be there and to be writable for this user"),
    ("Permission denied", "make the file and its folder accessible to this user"),
    ("Read-only file system", "put the record (store.url, run.dir) where it can be written"),
    ("not a database", "expected a SQLite file that Longrein wrote; name another, or move this one away"),
    (
        "malformed",
        "the file is damaged: `longrein store check` says where; go on from a copy, or use `sqlite3 FILE .recover`",
    ),
    ("database is locked", "another program holds it; end that one"),
    ("Connection refused", "start the server, or correct store.url"),
    ("No such file or directory", "start the server, or correct the name"),
    ("does not exist", "create it, or correct store.url"),
    ("authentication failed", "correct the user or the password in store.url"),
)


def trouble(name: str, done: str, error: BaseException) -> StoreError:
    """A database's error as one that names the record, what could not be done (`written`, …) and what to do."""
    said = " ".join(words(error).split())
    advice = next((advice for fragment, advice in _ADVICE if fragment in said), "")
    return StoreError(f"{name}: the record cannot be {done}: {said}" + (f"; {advice}" if advice else ""))


def words(error: BaseException) -> str:
    """What a database's error says, without SQLAlchemy's wrapping."""
    cause: BaseException = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return str(cause) or type(cause).__name__


def shown(url: str) -> str:
    """The URL as it may be shown, without a password."""
    try:
        return sa.make_url(url).difference_update_query(["password"]).render_as_string(hide_password=True)
    except ArgumentError:
        raise StoreError(
            f"store.url: {url!r} is not a SQLAlchemy URL; expected e.g. sqlite:///runs/store.sqlite"
        ) from None
