"""The one thread that writes the record: it takes all writes that wait into one transaction (group commit).

Each write runs behind a savepoint, so that one that fails fails alone. Its future resolves after COMMIT. When the
database fails as a whole (no room, a server that is away) the writes of the group fail with what it says, nothing of
them is kept, and the next group is tried as if nothing had happened: no restart is needed.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from longrein.database import trouble

T = TypeVar("T")

#: Writes that one transaction takes at most, so that the first of a flood is not kept waiting for the last.
_LARGEST_GROUP = 512


class _Write:
    """One operation on its way to the writer thread, and the future its result goes to."""

    __slots__ = ("error", "future", "loop", "operation", "result")

    def __init__(self, operation: Callable[[Connection], Any]) -> None:
        self.operation = operation
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.result: Any = None
        self.error: Exception | None = None


class Writer:
    """Writes to `engine`, whose record is called `name` in errors, until it is closed."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="longrein-store", daemon=True)
        self._thread.start()

    async def write(self, operation: Callable[[Connection], T]) -> T:
        """Run `operation` in a transaction; its result once that is committed. Raises StoreError, or what it raises."""
        write = _Write(operation)
        self._queue.put(write)
        return await write.future

    def close(self) -> None:
        """Finish the writes that are waiting."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        last = False
        while not last:
            group: list[_Write] = []
            item = self._queue.get()
            while item is not None:
                group.append(item)
                if len(group) == _LARGEST_GROUP:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            last = item is None
            if group:
                self._write_group(group)

    def _write_group(self, group: Sequence[_Write]) -> None:
        error = self._commit(group)
        if error is not None:
            failure = trouble(self._name, "written", error) if isinstance(error, SQLAlchemyError) else error
            for write in group:
                write.error = failure
        by_loop: dict[asyncio.AbstractEventLoop, list[_Write]] = {}
        for write in group:
            by_loop.setdefault(write.loop, []).append(write)
        for loop, writes in by_loop.items():
            with suppress(RuntimeError):  # the loop that asked is closed: nobody waits any more
                loop.call_soon_threadsafe(_resolve, writes)

    def _commit(self, group: Sequence[_Write]) -> Exception | None:
        """Write a group in one transaction; why none of it was written, if so.

        A connection that was lost before the COMMIT (the server has been started again) is replaced once. What became of
        a COMMIT whose answer was lost nobody knows: that is an error, and is not tried again.
        """
        for last in (False, True):
            committing = False
            try:
                with self._engine.begin() as connection:
                    for write in group:
                        self._run(connection, write)
                    committing = True
                return None
            except Exception as error:
                if last or committing or not (isinstance(error, DBAPIError) and error.connection_invalidated):
                    return error
        raise AssertionError("unreachable")

    def _run(self, connection: Connection, write: _Write) -> None:
        connection.exec_driver_sql("SAVEPOINT one")
        try:
            write.result, write.error = write.operation(connection), None
        except Exception as error:
            if _transaction_is_lost(connection, error):
                raise
            connection.exec_driver_sql("ROLLBACK TO SAVEPOINT one")
            write.error = trouble(self._name, "written", error) if isinstance(error, SQLAlchemyError) else error
        connection.exec_driver_sql("RELEASE SAVEPOINT one")


def _transaction_is_lost(connection: Connection, error: Exception) -> bool:
    """Whether an error ended the whole transaction: the connection broke, or SQLite rolled back (no room, no memory)."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return connection.dialect.name == "sqlite" and not getattr(
        connection.connection.dbapi_connection, "in_transaction", True
    )


def _resolve(writes: Sequence[_Write]) -> None:
    for write in writes:
        if write.future.done():  # cancelled: the write stands, nobody waits for it
            continue
        if write.error is not None:
            write.future.set_exception(write.error)
        else:
            write.future.set_result(write.result)
