"""What the store does when its database fails: no room, no right to write, damage, a server that goes away."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, OperationalError

from longrein import database, storecheck
from longrein.database import read_log
from longrein.records import Call, EndAttempt, Outcome, Rollout
from longrein.store import Conflict, Store, StoreError

if TYPE_CHECKING:
    from postgres_server import PostgresServer

pytest_plugins = ["postgres_server"]


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'store.sqlite'}"


def call(number: int, size: int = 1) -> Call:
    """A call of about `size` kilobytes."""
    return Call(
        rollout_id="r",
        attempt_id="0",
        number=number,
        dialect="chat",
        mode="train",
        model="m",
        engine="policy",
        prompt_delta=list(range(200 * size)),
        prompt_length=200 * size,
        sampled=[number, 7],
        logprobs=[-0.5, -1.0],
        versions=[(0, 2)],
    )


async def record(store: Store, numbers: range, size: int = 1) -> tuple[set[int], list[Exception]]:
    """Record calls at once: the numbers of those that were acknowledged, and the errors of the others."""
    results = await asyncio.gather(*(store.add_call(call(n, size)) for n in numbers), return_exceptions=True)
    pairs = list(zip(numbers, results, strict=True))
    return (
        {number for number, result in pairs if result is None},
        [result for _, result in pairs if isinstance(result, Exception)],
    )


def problems(where: str) -> list[str]:
    return [problem for looked in storecheck.check(where) for problem in looked.problems]


# --- No room ----------------------------------------------------------------------------------------------------------


def limit_pages(store: Store, pages: int) -> None:
    """Let the writer's connection have so many pages: beyond them SQLite says what it says on a full disk."""
    with store.engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")


async def test_without_room_a_write_is_an_error_leaves_nothing_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    store = Store.open(url(tmp_path))
    await store.add_rollouts([Rollout("r", {})])
    with store.engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    limit_pages(store, pages + 20)
    acknowledged, errors = set[int](), list[Exception]()
    for first in range(0, 200, 10):
        fine, failed = await record(store, range(first, first + 10), size=4)
        acknowledged |= fine
        errors += failed
    assert errors
    for error in errors:
        assert isinstance(error, StoreError)
        assert str(error) == (
            f"{url(tmp_path)}: the record cannot be written: database or disk is full; make room where it lies, then "
            "writing goes on by itself"
        )
    assert {one.number for one in store.calls("r", "0")} == acknowledged
    assert problems(url(tmp_path)) == []
    limit_pages(store, 1_000_000)
    assert await record(store, range(200, 210), size=4) == (set(range(200, 210)), [])
    assert {one.number for one in store.calls("r", "0")} == acknowledged | set(range(200, 210))
    store.close()


async def test_when_sqlite_rolls_everything_back_nothing_of_the_group_is_acknowledged(tmp_path: Path) -> None:
    store = Store.open(url(tmp_path))
    await store.add_rollouts([Rollout("r", {})])

    def roll_back(connection: sa.Connection) -> None:
        dbapi = connection.connection.dbapi_connection
        assert isinstance(dbapi, sqlite3.Connection)
        dbapi.execute("ROLLBACK")  # as SQLite itself does where it has no room or memory left
        raise OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full"))

    results = await asyncio.gather(
        store.add_call(call(0)), store._write(roll_back), store.add_call(call(1)), return_exceptions=True
    )
    assert [type(result) for result in results] == [StoreError] * 3
    assert "disk is full" in str(results[2])
    assert store.calls("r", "0") == []
    assert await record(store, range(2)) == ({0, 1}, [])
    store.close()


# --- No right to write ------------------------------------------------------------------------------------------------

OPEN = """
import os, sys
import sqlalchemy
from longrein.store import Store, StoreError
sqlalchemy.create_engine("sqlite://").connect().close()
if len(sys.argv) > 3:  # become a user without rights, now that all is imported
    os.setgroups([])
    os.setgid(int(sys.argv[3]))
    os.setuid(int(sys.argv[4]))
try:
    store = Store.open(sys.argv[1], read_only=sys.argv[2] == "reading")
except StoreError as error:
    print(error)
else:
    print(len(store.rollouts()), "rollouts")
    store.close()
"""


@pytest.fixture
def shelf() -> Iterator[Path]:
    """A folder that other users can enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="longrein-shelf-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def open_without_rights(where: str, mode: str) -> str:
    """What a user without rights finds."""
    from postgres_server import unprivileged

    user = unprivileged()
    become = [str(user["group"]), str(user["user"])] if user else []
    command = [sys.executable, "-c", OPEN, where, mode, *become]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_record_that_may_not_be_written_is_read_and_says_why_it_is_not_opened(shelf: Path) -> None:
    where = url(shelf)
    store = Store.open(where)
    asyncio.run(store.add_rollouts([Rollout("r", {})]))
    store.close()
    (shelf / "store.sqlite").chmod(0o444)
    shelf.chmod(0o555)
    assert open_without_rights(where, "reading") == "1 rollouts"
    said = open_without_rights(where, "writing")
    assert said.startswith(f"{where}: the record cannot be opened: ")
    assert "make the file and its folder accessible to this user" in said
    assert [path.name for path in shelf.iterdir()] == ["store.sqlite"]
    shelf.chmod(0o755)
    (shelf / "store.sqlite").chmod(0o000)
    assert "make the file and its folder accessible" in open_without_rights(where, "reading")


# --- Damage -----------------------------------------------------------------------------------------------------------


async def filled(folder: Path, calls: int = 200) -> Path:
    """A whole record of one rollout with many calls; its file."""
    store = Store.open(url(folder))
    await store.add_rollouts([Rollout("r", {})])
    assert (await record(store, range(calls)))[1] == []
    store.close()
    return folder / "store.sqlite"


async def test_overwritten_and_missing_pages_are_errors_that_name_the_file(tmp_path: Path) -> None:
    file = await filled(tmp_path)
    whole = file.read_bytes()
    assert problems(url(tmp_path)) == []
    middle = len(whole) // 2 // 4096 * 4096
    for broken in (
        whole[:middle] + b"\xa5" * 8192 + whole[middle + 8192 :],
        whole[:middle] + bytes(8192) + whole[middle + 8192 :],
        whole[:middle],
    ):
        file.write_bytes(broken)
        found = problems(url(tmp_path))
        assert found
        assert any(str(file) in problem for problem in found)
        if len(broken) < len(whole):
            with pytest.raises(StoreError, match=rf"{file}: the record cannot be opened: .*`longrein store check`"):
                Store.open(url(tmp_path))
            continue
        store = Store.open(url(tmp_path))
        with pytest.raises(StoreError, match=rf"{file}: the record cannot be read: .*`longrein store check`"):
            store.calls("r", "0")
        store.close()
    file.write_bytes(b"\0" * 100 + whole[100:])
    for read_only in (False, True):
        with pytest.raises(StoreError, match="not a database; expected a SQLite file that Longrein wrote"):
            Store.open(url(tmp_path), read_only=read_only)
    with pytest.raises(StoreError, match="not a database"):
        storecheck.check(url(tmp_path))


WRITER = """
import asyncio, sys
from longrein.records import Call, Rollout
from longrein.store import Store

async def main():
    store = Store.open(sys.argv[1])
    await store.add_rollouts([Rollout(rollout_id="r", input={})])
    for number in range(int(sys.argv[2])):
        await store.add_call(Call(rollout_id="r", attempt_id="0", number=number, dialect="chat", mode="train", model="m",
                                  engine="policy", sampled=[number, 7], logprobs=[-0.5, -float(number)]))
    print("done", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def killed_writer(where: str, calls: int) -> None:
    """Record calls in a process that is killed: they stand in the log beside the file."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, where, str(calls)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()


def test_of_a_log_that_was_cut_what_is_whole_is_read_and_nothing_is_half(tmp_path: Path) -> None:
    killed_writer(url(tmp_path), 40)
    names = ("store.sqlite", "store.sqlite-wal")
    data = {name: (tmp_path / name).read_bytes() for name in names}
    log = data["store.sqlite-wal"]
    found = read_log(str(tmp_path / "store.sqlite"))
    assert found is not None
    # The first transaction made the schema; before its end there is no record.
    frame = 24 + 4096
    ends = [at + frame for at in range(32, len(log), frame) if log[at + 4 : at + 8] != bytes(4)]
    begun = ends[0]
    inside = [end - frame for end in ends if end - frame not in (32, *ends)]  # between two pages of one transaction
    assert inside
    before = -1
    for cut in sorted(
        {len(log) * part // 13 for part in range(1, 13)} | {found.whole, found.whole - 1, 40, inside[0], inside[-1]}
    ):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / names[0]).write_bytes(data[names[0]])
        (folder / names[1]).write_bytes(log[:cut])
        left = read_log(str(folder / names[0]))
        assert left is not None
        assert left.whole == max((end for end in ends if end <= cut), default=32)
        assert left.whole + left.rest == cut
        if cut < begun:
            with pytest.raises(StoreError, match="not a Longrein record"):
                storecheck.check(url(folder))
            continue
        looked = storecheck.check(url(folder))
        assert [problem for one in looked for problem in one.problems] == []
        assert bool(looked[0].notes) == bool(left.rest)
        store = Store.open(url(folder))
        numbers = [one.number for one in store.calls("r", "0")]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= before
        before = len(numbers)
        store.close()
    assert before == 40


def test_a_log_without_its_header_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    killed_writer(url(tmp_path), 5)
    log = tmp_path / "store.sqlite-wal"
    log.write_bytes(b"\0" * 32 + log.read_bytes()[32:])
    for read_only in (False, True):
        with pytest.raises(StoreError, match=rf"{log}: the log beside the record is damaged.*Put back a copy of it"):
            Store.open(url(tmp_path), read_only=read_only)


async def test_a_damaged_row_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = await filled(tmp_path, 3)
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE calls SET sampled = X'0102030405' WHERE number = 1")
    connection.close()
    store = Store.open(url(tmp_path))
    with pytest.raises(StoreError, match=r"rollout_id r, attempt_id 0, number 1 is damaged: .*longrein store check"):
        store.calls("r", "0")
    store.close()


# --- One writer -------------------------------------------------------------------------------------------------------


def test_a_second_process_may_read_and_not_write(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_SECONDS", 1)
    store = Store.open(location)
    asyncio.run(store.add_rollouts([Rollout("r", {})]))
    with pytest.raises(StoreError, match="another process writes this record"):
        Store.open(location)
    for mode, found in (("reading", "1 rollouts"), ("writing", "another process writes this record")):
        done = subprocess.run([sys.executable, "-c", OPEN, location, mode], capture_output=True, text=True, check=False)
        assert found in done.stdout, done.stderr
    assert asyncio.run(record(store, range(3))) == ({0, 1, 2}, [])
    store.close()
    again = Store.open(location)
    assert len(again.calls("r", "0")) == 3
    again.close()


# --- A server that goes away ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_server_that_is_started_again_is_gone_on_with(own_postgres: PostgresServer, mode: str) -> None:
    where = own_postgres.fresh()
    store = Store.open(where)
    await store.add_rollouts([Rollout("r", {})])
    acknowledged: set[int] = set()
    errors: list[Exception] = []
    numbers = iter(range(1_000_000))
    over = asyncio.Event()

    async def write() -> None:
        while not over.is_set():
            number = next(numbers)
            try:
                await store.add_call(call(number))
                acknowledged.add(number)
            except (StoreError, Conflict) as error:
                errors.append(error)
                await asyncio.sleep(0.01)

    async def until(count: int) -> None:
        wanted = len(acknowledged) + count
        while len(acknowledged) < wanted:  # noqa: ASYNC110 (what is waited for is the database)
            await asyncio.sleep(0.01)

    writing = [asyncio.create_task(write()) for _ in range(6)]
    await until(50)
    await asyncio.to_thread(own_postgres.stop, mode)
    while not errors:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(StoreError, match="the record cannot be read"):
        store.rollouts()
    await asyncio.to_thread(own_postgres.start)
    await until(50)
    over.set()
    await asyncio.gather(*writing)
    assert all(isinstance(error, StoreError) and "cannot be written" in str(error) for error in errors)
    there = {one.number: one for one in store.calls("r", "0")}
    assert acknowledged <= set(there)
    assert len(set(there) - acknowledged) <= 6  # in flight when the server went: written or not, never half
    assert all(one == call(number) for number, one in there.items())
    assert problems(where) == []
    # The idle connections of readers and of the writer were lost as well: nobody notices.
    await asyncio.to_thread(own_postgres.stop)
    await asyncio.to_thread(own_postgres.start)
    assert len(store.rollouts()) == 1
    await store.add_call(call(2_000_000))
    store.close()


def test_a_server_that_is_not_there_is_an_error_that_says_so(own_postgres: PostgresServer) -> None:
    where = own_postgres.url()
    missing = where.replace("/postgres?", "/nowhere?")
    with pytest.raises(StoreError, match=r'database "nowhere" does not exist; create it, or correct store\.url'):
        Store.open(missing)
    with pytest.raises(StoreError, match="search_path names no schema that is there"):
        Store.open(own_postgres.url("missing"))
    own_postgres.stop()
    for read_only in (False, True):
        with pytest.raises(StoreError, match=r"the record cannot be opened: .*; start the server, or correct"):
            Store.open(where, read_only=read_only)


def test_another_database_or_driver_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"mysql is no database that a record can be in; use sqlite:///FILE"):
        Store.open("mysql://a@b/c")
    assert database.shown("postgresql://u:one@h/d?password=two&host=x") == "postgresql://u:***@h/d?host=x"
    with pytest.raises(StoreError, match=r"postgresql\+psycopg2 is not supported; write postgresql://"):
        Store.open("postgresql+psycopg2://a@b/c")


@pytest.mark.parametrize(("fsync", "setting"), [(False, "local"), (True, "on")])
def test_the_server_writes_its_log_before_it_answers_a_commit(
    postgres: PostgresServer, fsync: bool, setting: str
) -> None:
    store = Store.open(postgres.fresh(), fsync=fsync)
    with store.engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW synchronous_commit").scalar_one() == setting
    store.close()


async def test_a_reader_cannot_write(location: str) -> None:
    store = Store.open(location)
    reader = Store.open(location, read_only=True)
    with pytest.raises(DBAPIError), reader.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM rollouts")
    reader.close()
    store.close()


async def test_two_runs_have_schemas_of_their_own_in_one_database(postgres: PostgresServer) -> None:
    stores = [Store.open(postgres.fresh()) for _ in range(2)]
    for number, store in enumerate(stores):
        await store.add_rollouts([Rollout("r", {"number": number})])
        await store.start_attempt("r", bytes([number]) * 32)
        await store.end_attempt("r", "0", EndAttempt(outcome=Outcome.succeeded))
    found: list[Any] = [store.rollouts()[0].input for store in stores]
    assert found == [{"number": 0}, {"number": 1}]
    for store in stores:
        store.close()
