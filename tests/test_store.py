from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longrein import schema
from longrein.records import (
    Call,
    EndAttempt,
    Event,
    ModelEndpoint,
    Outcome,
    Rollout,
    RolloutState,
    RolloutStatus,
    StatusChange,
    Usage,
)
from longrein.store import Conflict, NotFound, Store, StoreError

pytest_plugins = ["postgres_server"]


def url(folder: Path) -> str:
    return f"sqlite:///{folder / 'store.sqlite'}"


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.fixture
def store(location: str) -> Iterator[Store]:
    opened = Store.open(location)
    yield opened
    opened.close()


def rollout(name: str, **fields: Any) -> Rollout:
    return Rollout(rollout_id=name, input={"data_id": f"task-{name}"}, status=RolloutStatus(created_at=1.0), **fields)


def call(number: int, **fields: Any) -> Call:
    named: dict[str, Any] = {"rollout_id": "r", "attempt_id": "0"} | fields
    return Call(number=number, dialect="chat", mode="train", model="m", engine="policy", **named)


def event(number: int, kind: str = "note") -> Event:
    return Event(event_type=kind, rollout_id="r", attempt_id="0", timestamp=float(number), data={"n": number})


async def test_rollouts_are_kept_as_they_were_given_and_listed_oldest_first(store: Store) -> None:
    given = [rollout(name, group_id="g", metadata={"é": [1, None]}, is_train=name != "b") for name in "cab"]
    assert await store.add_rollouts(given) == given
    assert store.rollouts() == given
    assert store.rollouts(limit=2) == given[:2]
    assert store.rollout("a") == given[1]
    assert store.rollout("x") is None


async def test_adding_a_known_rollout_changes_nothing(store: Store) -> None:
    first = (await store.add_rollouts([rollout("r")]))[0]
    await store.add_event(event(1))
    again = rollout("r", is_train=False)
    again.input = {"other": 1}
    assert await store.add_rollouts([again, rollout("s")]) == [first, rollout("s")]
    assert store.rollout("r") == first
    assert len(store.events("r", "0")) == 1


async def test_transitions(store: Store) -> None:
    states = list(RolloutState)
    allowed = {("queuing", "running"), ("queuing", "failed"), ("running", "succeeded"), ("running", "failed")}
    for start in states:
        for end in states:
            name = f"{start.value}-{end.value}"
            given = rollout(name)
            given.status.state = start
            await store.add_rollouts([given])
            change = StatusChange(state=end, error_message="why")
            if (start.value, end.value) in allowed:
                changed = await store.change_rollout(name, change)
                assert (changed.status.state, changed.status.error_message, changed.status.version) == (end, "why", 1)
                assert changed.status.updated_at > 0
                assert store.rollout(name) == changed
            else:
                with pytest.raises(Conflict, match=f"no way from {start.value} to {end.value}"):
                    await store.change_rollout(name, change)
                assert store.rollout(name) == given
    with pytest.raises(NotFound, match="no rollout nowhere"):
        await store.change_rollout("nowhere", StatusChange())


async def test_an_empty_change_is_no_change(store: Store) -> None:
    (given,) = await store.add_rollouts([rollout("r")])
    assert await store.change_rollout("r", StatusChange()) == given


async def test_terminal_pages_are_in_order_of_completion_and_positions_are_never_reused(store: Store) -> None:
    await store.add_rollouts([rollout(name) for name in "abcd"])
    for name in "dba":
        await store.change_rollout(name, StatusChange(state=RolloutState.failed))
    page = store.terminal(0, 2)
    assert [item.rollout_id for item in page.items] == ["d", "b"]
    assert page.items[0].data_id == "task-d"
    assert page.total_terminal == 3
    page = store.terminal(page.next_after, 2)
    assert [item.rollout_id for item in page.items] == ["a"]
    assert store.terminal(page.next_after, 2).items == []
    assert store.terminal(page.next_after, 2).next_after == page.next_after
    await store.delete_rollout("a")
    await store.change_rollout("c", StatusChange(state=RolloutState.failed))
    assert [item.rollout_id for item in store.terminal(page.next_after, 2).items] == ["c"]


async def test_attempts_are_numbered_started_and_ended(store: Store) -> None:
    await store.add_rollouts([rollout("r")])
    started, attempt = await store.start_attempt("r", b"h" * 32)
    assert (attempt.attempt_id, started.status.state, started.status.last_attempt_id) == (
        "0",
        RolloutState.running,
        "0",
    )
    with pytest.raises(Conflict, match="attempt 0 of rollout r still runs"):
        await store.start_attempt("r", b"i" * 32)
    end = EndAttempt(outcome=Outcome.agent_failed, exit_code=3, reason="exit code 3", usage=Usage(1.0, 0.5, 7))
    ended = await store.end_attempt("r", "0", end)
    assert (ended.outcome, ended.exit_code, ended.usage) == (Outcome.agent_failed, 3, Usage(1.0, 0.5, 7))
    assert ended.ended_at is not None
    with pytest.raises(Conflict, match="has ended before"):
        await store.end_attempt("r", "0", end)
    with pytest.raises(NotFound, match="no attempt 9"):
        await store.end_attempt("r", "9", end)
    again, second = await store.start_attempt("r", b"i" * 32)
    assert (second.attempt_id, again.status.state, again.status.last_attempt_id) == ("1", RolloutState.running, "1")
    assert store.attempts("r") == [ended, second]
    assert store.attempt_of_token(b"h" * 32) == ended
    assert store.attempt_of_token(b"i" * 32) == second
    assert store.attempt_of_token(b"j" * 32) is None
    await store.change_rollout("r", StatusChange(state=RolloutState.succeeded))
    await store.end_attempt("r", "1", end)
    with pytest.raises(Conflict, match="has succeeded"):
        await store.start_attempt("r", b"k" * 32)


async def test_an_implicit_attempt_has_no_token_and_does_not_block_a_started_one(store: Store) -> None:
    await store.add_rollouts([rollout("r")])
    implicit = await store.ensure_attempt("r", "0")
    assert await store.ensure_attempt("r", "0") == implicit
    _, started = await store.start_attempt("r", b"h" * 32)
    assert started.attempt_id == "1"
    with pytest.raises(NotFound):
        await store.ensure_attempt("x", "0")


floats32 = st.floats(-100, 0, width=32)
jsons = st.dictionaries(st.text(max_size=3), st.none() | st.integers(-(2**53), 2**53) | st.text(max_size=5), max_size=3)


@given(
    fields=st.fixed_dictionaries(
        {
            "prompt_delta": st.lists(st.integers(0, 2**31 - 1), max_size=5),
            "sampled": st.lists(st.integers(0, 2**31 - 1), max_size=5),
            "logprobs": st.none() | st.lists(floats32, max_size=5),
            "versions": st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=3),
            "messages": st.lists(jsons, max_size=3),
            "tools": st.none() | st.lists(jsons, max_size=2),
            "reply": jsons,
            "error": st.none() | jsons,
            "parent": st.none() | st.integers(0, 5),
            "fork": st.none() | st.sampled_from(["new", "template", "tools"]),
            "status": st.sampled_from(["ok", "error", "abandoned"]),
            "first_token_at": st.none() | st.floats(0, 2e9),
        }
    )
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
async def test_a_call_comes_back_as_it_was_recorded(store: Store, fields: dict[str, Any]) -> None:
    await store.add_rollouts([rollout("r")])
    number = store.next_call_number("r", "0")
    recorded = call(number, **fields)
    await store.add_call(recorded)
    assert store.calls("r", "0")[-1] == recorded


async def test_calls_are_ordered_unique_and_belong_to_a_rollout(store: Store) -> None:
    await store.add_rollouts([rollout("r")])
    assert store.next_call_number("r", "0") == 0
    for number in (2, 0, 1):
        await store.add_call(call(number))
    assert [one.number for one in store.calls("r", "0")] == [0, 1, 2]
    assert store.next_call_number("r", "0") == 3
    with pytest.raises(Conflict, match="call 1 of attempt 0 of rollout r is recorded already"):
        await store.add_call(call(1))
    with pytest.raises(NotFound, match="no rollout x"):
        await store.add_call(call(0, rollout_id="x"))


async def test_events_and_attempts_with_records(store: Store) -> None:
    await store.add_rollouts([rollout("r")])
    await store.start_attempt("r", b"h" * 32)
    assert store.attempts_with_records("r") == []
    await store.add_call(call(0, attempt_id="b"))
    await store.add_event(event(1, "reward"))
    await store.add_event(event(2))
    assert store.attempts_with_records("r") == ["0", "b"]
    assert store.events("r", "0") == [event(1, "reward"), event(2)]
    assert store.events("r", "0", "reward") == [event(1, "reward")]
    with pytest.raises(NotFound):
        await store.add_event(msgspec.structs.replace(event(1), rollout_id="x"))


async def test_deleting_a_rollout_removes_all_that_belongs_to_it(store: Store) -> None:
    await store.add_rollouts([rollout("r"), rollout("s")])
    await store.start_attempt("r", b"h" * 32)
    await store.add_call(call(0))
    await store.add_event(event(1))
    await store.change_rollout("r", StatusChange(state=RolloutState.failed))
    await store.delete_rollout("r")
    await store.delete_rollout("r")
    assert store.rollout("r") is None
    assert (store.calls("r", "0"), store.events("r", "0"), store.attempts("r")) == ([], [], [])
    assert store.attempt_of_token(b"h" * 32) is None
    assert store.terminal(0, 10).total_terminal == 0
    assert store.rollouts() == [rollout("s")]


async def test_models_are_added_or_updated_by_name_and_endpoint(store: Store) -> None:
    a, b = ModelEndpoint("m", "http://a/v1"), ModelEndpoint("m", "http://b/v1", 3, "tokens")
    assert await store.put_models([a, b]) == [a, b]
    newer = ModelEndpoint("m", "http://a/v1", 7)
    await store.put_models([newer])
    assert store.models() == [newer, b]
    await store.clear_models()
    assert store.models() == []


async def test_writes_that_wait_together_share_transactions(store: Store) -> None:
    await store.add_rollouts([rollout("r")])
    commits = 0

    def count(_: object) -> None:
        nonlocal commits
        commits += 1

    sa.event.listen(store.engine, "commit", count)  # type: ignore[attr-defined]
    await asyncio.gather(*(store.add_call(call(number)) for number in range(300)))
    assert len(store.calls("r", "0")) == 300
    assert 1 <= commits <= 30


async def test_a_write_is_acknowledged_only_after_its_commit(store: Store) -> None:
    await store.add_rollouts([rollout("r")])
    committing, commit = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        committing.set()
        assert commit.wait(60)

    sa.event.listen(store.engine, "commit", hold)  # type: ignore[attr-defined]
    writing = asyncio.ensure_future(store.add_call(call(0)))
    assert await asyncio.to_thread(committing.wait, 60)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not writing.done()
    assert store.calls("r", "0") == []
    commit.set()
    await writing
    assert store.calls("r", "0") == [call(0)]


async def test_a_write_that_fails_fails_alone(store: Store) -> None:
    await store.add_rollouts([rollout("r")])
    numbers = [0, 1, 1, 2, 0, 3]
    results = await asyncio.gather(*(store.add_call(call(n)) for n in numbers), return_exceptions=True)
    assert [type(result) for result in results] == [type(None), type(None), Conflict, type(None), Conflict, type(None)]
    assert [one.number for one in store.calls("r", "0")] == [0, 1, 2, 3]


async def test_a_half_done_operation_leaves_nothing_behind(store: Store) -> None:
    """add_rollouts inserts the first row, then fails on the second: neither may stay."""
    broken = rollout("b")
    broken.status.version = "no number"  # type: ignore[assignment]
    broken.status.created_at = None  # type: ignore[assignment]
    results = await asyncio.gather(
        store.add_rollouts([rollout("a"), broken]), store.add_rollouts([rollout("c")]), return_exceptions=True
    )
    assert isinstance(results[0], StoreError)
    assert [one.rollout_id for one in store.rollouts()] == ["c"]


WRITER = """
import asyncio, sys
from longrein.records import Call, Rollout, Event
from longrein.store import Store

async def main():
    store = Store.open(sys.argv[1])
    await store.add_rollouts([Rollout(rollout_id="r", input={})])
    async def write(number):
        await store.add_call(Call(rollout_id="r", attempt_id="0", number=number, dialect="chat", mode="train", model="m",
                                  engine="policy", sampled=[number, 7], logprobs=[-0.5, -float(number)]))
        print(number, flush=True)
    number = 0
    while True:
        await asyncio.gather(*(write(number + i) for i in range(5)))
        number += 5
asyncio.run(main())
"""


def test_what_was_acknowledged_survives_sigkill(location: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, location], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(60)]
    process.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in process.stdout.read().split()]
    assert process.wait() == -signal.SIGKILL
    reader = Store.open(location, read_only=True)  # of a file the log is still beside it
    numbers = {one.number for one in reader.calls("r", "0")}
    assert set(acknowledged) <= numbers
    reader.close()
    store = Store.open(location)
    calls = {one.number: one for one in store.calls("r", "0")}
    assert numbers <= set(calls)  # a server may still have finished what had reached it
    assert all(one.sampled == [n, 7] and one.logprobs == [-0.5, -float(n)] for n, one in calls.items())
    store.close()


async def test_reading_creates_no_file_and_does_not_block_the_writer(tmp_path: Path) -> None:
    store = Store.open(url(tmp_path))
    await store.add_rollouts([rollout("r")])
    reader = Store.open(url(tmp_path), read_only=True)
    with reader.engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        connection.execute(sa.select(schema.rollouts)).all()  # holds a snapshot while the writer goes on
        await asyncio.wait_for(store.add_call(call(0)), 10)
        assert len(connection.execute(sa.select(schema.calls)).all()) == 0
        connection.exec_driver_sql("COMMIT")
    assert len(reader.calls("r", "0")) == 1
    with pytest.raises(StoreError, match="reading only"):
        await reader.add_call(call(1))
    reader.close()
    store.close()
    assert names(tmp_path) == ["store.sqlite"]
    reader = Store.open(url(tmp_path), read_only=True)
    assert len(reader.calls("r", "0")) == 1
    assert names(tmp_path) == ["store.sqlite"]
    reader.close()


async def test_a_copied_file_without_its_log_is_read_without_creating_one(tmp_path: Path) -> None:
    store = Store.open(url(tmp_path))
    await store.add_rollouts([rollout("r")])
    with store.engine.connect() as connection:
        dbapi = connection.connection.dbapi_connection
        assert isinstance(dbapi, sqlite3.Connection)
        connection.rollback()
        dbapi.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / "store.sqlite").write_bytes((tmp_path / "store.sqlite").read_bytes())
    reader = Store.open(url(folder), read_only=True)
    assert reader.rollouts() == [rollout("r")]
    reader.close()
    assert names(folder) == ["store.sqlite"]
    store.close()


def test_opening_what_is_not_there_or_not_a_record_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"store\.sqlite"):
        Store.open(url(tmp_path), read_only=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError, match="needs a file"):
        Store.open("sqlite://")
    with pytest.raises(StoreError, match="not a SQLAlchemy URL"):
        Store.open("runs/store")
    with pytest.raises(StoreError, match="cannot be opened"):
        Store.open(url(tmp_path / "missing"))
    (tmp_path / "store.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="cannot be opened"):
        Store.open(url(tmp_path))
    (tmp_path / "store.sqlite").unlink()
    with sqlite3.connect(tmp_path / "store.sqlite") as connection:
        connection.execute("CREATE TABLE something (x)")
    connection.close()
    for read_only in (False, True):
        with pytest.raises(StoreError, match="not a Longrein record"):
            Store.open(url(tmp_path), read_only=read_only)


async def test_an_older_schema_is_migrated_and_a_newer_one_refused(
    location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(location)
    await store.add_rollouts([rollout("r")])
    store.close()

    def add_column(connection: sa.Connection) -> None:
        connection.execute(sa.text("ALTER TABLE rollouts ADD COLUMN colour TEXT"))

    def fail(connection: sa.Connection) -> None:
        connection.execute(sa.text("CREATE TABLE half (x INTEGER)"))
        raise OSError("the disk is full")

    present = schema.MIGRATIONS
    monkeypatch.setattr(schema, "MIGRATIONS", [*present, add_column, fail])
    with pytest.raises(StoreError, match="bring it up to date"):
        Store.open(location, read_only=True)
    with pytest.raises(StoreError, match="disk is full"):
        Store.open(location)
    monkeypatch.setattr(schema, "MIGRATIONS", [*present, add_column])
    store = Store.open(location)
    assert store.rollouts() == [rollout("r")]
    with store.engine.connect() as connection:
        assert "colour" in {column["name"] for column in sa.inspect(connection).get_columns("rollouts")}
        assert "half" not in sa.inspect(connection).get_table_names()
    store.close()
    monkeypatch.setattr(schema, "MIGRATIONS", present)
    for read_only in (False, True):
        with pytest.raises(StoreError, match="schema version 3, this Longrein knows versions up to 2"):
            Store.open(location, read_only=read_only)


async def test_a_conversation_of_t_turns_takes_space_linear_in_t(tmp_path: Path) -> None:
    async def size(turns: int) -> int:
        folder = tmp_path / str(turns)
        folder.mkdir()
        store = Store.open(url(folder))
        await store.add_rollouts([rollout("r")])
        length = 0
        calls = []
        for turn in range(turns):
            calls.append(
                call(
                    turn,
                    prefix=turn - 1 if turn else None,
                    prefix_length=length,
                    prompt_delta=list(range(100)),
                    prompt_length=length + 100,
                    sampled=list(range(50)),
                    logprobs=[-1.0] * 50,
                    parent=turn - 1 if turn else None,
                    messages_keep=2 * turn,
                    messages=[{"role": "user", "content": "x" * 400}],
                    reply={"role": "assistant", "content": "y" * 200},
                )
            )
            length += 150
        await asyncio.gather(*(store.add_call(one) for one in calls))
        store.close()
        return (folder / "store.sqlite").stat().st_size

    empty, some, many = await size(0), await size(100), await size(400)
    assert (many - empty) < 4.4 * (some - empty)


async def test_writes_after_close_are_refused(tmp_path: Path) -> None:
    store = Store.open(url(tmp_path), fsync=True)
    await store.add_rollouts([rollout("r")])
    store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.add_rollouts([rollout("s")])


async def test_calls_of_one_answer_are_recorded_all_or_none(store: Store) -> None:
    await store.add_rollouts([rollout("r")])
    await store.add_call(call(1))
    with pytest.raises(Conflict, match="call 1 of attempt 0"):
        await store.add_calls([call(0), call(1), call(2)])
    assert [one.number for one in store.calls("r", "0")] == [1]
    await store.add_calls([call(2), call(3)])
    assert [one.number for one in store.calls("r", "0")] == [1, 2, 3]


async def test_all_rollouts_are_gone_through_in_pieces(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrein.store._PAGE", 3)
    given = await store.add_rollouts([rollout(f"r{number}") for number in range(7)])
    await store.delete_rollout("r3")
    assert list(store.each_rollout()) == [one for one in given if one.rollout_id != "r3"]


async def test_text_with_a_nul_is_kept_or_replaced(store: Store) -> None:
    """JSON keeps it everywhere; plain text columns of PostgreSQL cannot."""
    given = rollout("r")
    given.input = {"file": "a\0b"}
    await store.add_rollouts([given])
    assert store.rollout("r") == given
    await store.start_attempt("r", b"h" * 32)
    ended = await store.end_attempt("r", "0", EndAttempt(outcome=Outcome.agent_failed, reason="died: \0\0"))
    assert ended.reason in ("died: \0\0", "died: \ufffd\ufffd")
    assert store.attempts("r") == [ended]


#: The schema as version 1 made it.
VERSION_1 = Path(__file__).parent / "data" / "store-version-1.sql"


async def test_a_record_of_the_first_version_is_read_by_this_one(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "store.sqlite") as connection:
        connection.executescript(VERSION_1.read_text())
    connection.close()
    store = Store.open(url(tmp_path))
    assert store.models() == [ModelEndpoint("m", "http://a", 4, "vllm")]
    (one,) = store.rollouts()
    (recorded,) = store.calls("r", "0")
    assert (one.rollout_id, recorded.sampled, recorded.pruned) == ("r", [7, 8], None)
    assert (await store.prune(0)).rollouts == 1
    assert store.calls("r", "0")[0].sampled_count == 2
    store.close()
