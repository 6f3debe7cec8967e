"""What a harness is told while its calls cannot be recorded, and that all goes on when they can again: no restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from longrein import storecheck
from longrein.records import Call
from longrein.store import Store

from .running import RunningGateway, running_gateway
from .serving import answer, chunk, path, register, serving, upstream
from .test_retries import harness

if TYPE_CHECKING:
    from postgres_server import PostgresServer

pytest_plugins = ["postgres_server"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB; where root may not mount one, the test is skipped."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "longrein-test", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"a full disk is tested where a small one can be mounted: {error}")
    if done.returncode:
        pytest.skip(f"a full disk is tested where a small one can be mounted: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with (disk / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


ASK = [{"role": "user", "content": json.dumps({"say": "Fine. " * 20})}]
#: Path, body, and what in a stream says that the answer is whole.
REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("openai/v1/chat/completions", {"messages": ASK}, '"finish_reason":"stop"'),
    "responses": ("openai/v1/responses", {"input": ASK}, "response.completed"),
    "messages": ("anthropic/v1/messages", {"messages": ASK, "max_tokens": 4000}, "message_stop"),
}


def ask(gateway: RunningGateway, rollout: str, token: str, dialect: str, *, stream: bool) -> httpx.Response:
    end, body, _ = REQUESTS[dialect]
    return httpx.post(
        f"{gateway.url}/proxy/rollout/{rollout}/attempt/0/mode/train/{end}",
        json=body | {"stream": stream},
        headers={"authorization": f"Bearer {token}"},
        timeout=60,
    )


def whole(answer: httpx.Response, dialect: str, *, stream: bool) -> bool:
    """Whether an answer says that it is whole; if it is not, that it fails in its dialect's shape is asserted."""
    if not stream and answer.status_code == 200:
        return True
    if stream:
        assert answer.status_code == 200  # the headers of a stream have left before anything was sampled
        if REQUESTS[dialect][2] in answer.text:
            return True
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        error = events[-1]
        assert [event["type"] for event in events if dialect == "messages"][-1:] in ([], ["error"])
        message = error["response"]["error"]["message"] if dialect == "responses" else error["error"]["message"]
    else:
        assert answer.status_code == 503
        error = answer.json()
        assert (error.get("type") == "error") == (dialect == "messages")
        message = error["error"]["message"]
    assert "the record cannot be written" in message
    return False


def test_a_full_disk_costs_the_calls_that_come_meanwhile_and_nothing_else(tmp_path: Path, small_disk: Path) -> None:
    where = f"sqlite:///{small_disk / 'store.sqlite'}"
    with running_gateway(tmp_path, [f"store.url={where}"]) as gateway:
        rollout, token = gateway.rollout()
        told: list[tuple[str, bool]] = []

        def round_of_calls() -> None:
            for dialect in REQUESTS:
                for stream in (False, True):
                    answer = ask(gateway, rollout, token, dialect, stream=stream)
                    told.append((dialect, whole(answer, dialect, stream=stream)))

        round_of_calls()
        assert all(is_whole for _, is_whole in told)
        fill(small_disk)
        for _ in range(50):  # the log may have some room that it had before
            round_of_calls()
            fill(small_disk)
            if not any(is_whole for _, is_whole in told[-6:]):
                break
        assert [is_whole for _, is_whole in told[-6:]] == [False] * 6
        refused = gateway.http.post(
            f"/api/rollouts/{rollout}/attempt/0/events",
            json={"event_type": "reward", "data": {"value": 1, "x": "y" * 99_999}},
        )
        assert refused.status_code == 503
        assert refused.json()["detail"] == (
            f"{where}: the record cannot be written: database or disk is full; make room where it lies, then writing goes "
            "on by itself"
        )
        assert gateway.http.get("/healthz").status_code == 200
        (small_disk / "filler").unlink()
        round_of_calls()
        assert all(is_whole for _, is_whole in told[-6:])
        calls = gateway.calls(rollout)
        assert recorded(calls) == {name: sum(fine for dialect, fine in told if dialect == name) for name in REQUESTS}
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait() == 0
    assert [problem for looked in storecheck.check(where) for problem in looked.problems] == []
    store = Store.open(where, read_only=True)
    assert store.calls(rollout, "0") == calls
    store.close()


def recorded(calls: list[Call]) -> dict[str, int]:
    """By dialect, the calls that the record says were answered."""
    return {name: sum(call.dialect == name and call.status == "ok" for call in calls) for name in REQUESTS}


def test_on_postgresql_calls_survive_a_restart_of_the_server_and_the_death_of_the_gateway(
    tmp_path: Path, own_postgres: PostgresServer
) -> None:
    where = own_postgres.fresh()
    with running_gateway(tmp_path, [f"store.url={where}"]) as gateway:
        rollout, token = gateway.rollout()
        assert ask(gateway, rollout, token, "chat", stream=False).status_code == 200
        own_postgres.stop("immediate")
        answer = ask(gateway, rollout, token, "messages", stream=False)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"].endswith("start the server, or correct the name")
        own_postgres.start()
        assert whole(ask(gateway, rollout, token, "messages", stream=True), "messages", stream=True)
        assert recorded(gateway.calls(rollout)) == {"chat": 1, "responses": 0, "messages": 1}
        os.kill(gateway.process.pid, signal.SIGKILL)
        gateway.process.wait()
        (tmp_path / "test" / "gateway.json").unlink()
    with running_gateway(tmp_path, [f"store.url={where}"]) as gateway:
        assert ask(gateway, rollout, token, "chat", stream=False).status_code == 200
        assert recorded(gateway.calls(rollout)) == {"chat": 2, "responses": 0, "messages": 1}


# --- In the gateway's own process -------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_room(store: Store) -> Iterator[asyncio.Event]:
    """No transaction begins in the block; the event is set when one was to begin."""
    tried, loop = asyncio.Event(), asyncio.get_running_loop()

    def no_room(connection: sa.Connection) -> None:
        loop.call_soon_threadsafe(tried.set)
        raise OperationalError("BEGIN", {}, sqlite3.OperationalError("database or disk is full"))

    sa.event.listen(store.engine, "begin", no_room)  # type: ignore[attr-defined]
    try:
        yield tried
    finally:
        sa.event.remove(store.engine, "begin", no_room)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_passed_on_does_not_end_before_it_is_recorded(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path) as served, upstream() as model:
        await register(served, model)
        await served.start()

        async def events() -> AsyncIterator[str]:
            yield chunk({"content": "x"}, ids=[1], prompt_token_ids=[2])
            yield chunk({}, finish="stop")
            yield "data: [DONE]\n\n"

        def script(body: dict[str, Any]) -> Any:
            return events() if stream else answer("x", [2], [1])

        model.script = script
        body = {"messages": [{"role": "user", "content": "q"}], "stream": stream}
        with without_room(served.gateway.store):
            got = await served.http.post(path(), json=body)
        assert got.status_code == (200 if stream else 503)
        assert "database or disk is full; make room" in got.text
        assert '"stop"' not in got.text
        assert await served.calls() == []
        got = await served.http.post(path(), json=body)
        assert got.status_code == 200
        assert ('"stop"' in got.text, "disk is full" in got.text) == (True, False)
        assert [call["status"] for call in await served.calls()] == ["ok"]


async def test_the_choices_of_one_answer_are_recorded_all_or_none(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, upstream() as model:
        await register(served, model)
        await served.add()
        choices = [answer(text, ids=[number])["choices"][0] | {"index": number} for number, text in enumerate("ab")]
        model.script = lambda body: {"prompt_token_ids": [1, 2, 3], "choices": choices}
        taken = Call(
            rollout_id="r", attempt_id="0", number=1, dialect="chat", mode="train", model="m", engine="policy"
        )  # fmt: skip
        add_calls = served.gateway.store.add_calls

        async def too_late(calls: list[Call]) -> None:
            await add_calls([taken])  # somebody has recorded the second of them: it cannot be recorded any more
            await add_calls(calls)

        served.gateway.store.add_calls = too_late  # type: ignore[method-assign,assignment]
        got = await served.http.post(path(), json={"messages": [{"role": "user", "content": "q"}], "n": 2})
        assert got.status_code == 409
        assert [call["number"] for call in await served.calls()] == [1]


async def test_that_an_answer_was_not_given_is_recorded_when_there_is_room_again(tmp_path: Path) -> None:
    async with harness(tmp_path) as client:
        store = client.served.gateway.store
        asking = client.ask("chat", stream=True)
        await client.engine.begun.acquire()
        recording, recorded = asyncio.Event(), store.add_calls

        async def slow(calls: list[Call]) -> None:
            await recorded(calls)
            recording.set()
            await leaves.wait()

        leaves = asyncio.Event()
        store.add_calls = slow  # type: ignore[method-assign,assignment]
        client.engine.go_on.set()
        await recording.wait()
        asking.cancel()  # the client goes while its call is being recorded as answered
        await asyncio.gather(asking, return_exceptions=True)
        job = next(job for attempt in client.served.gateway.calls.attempts.values() for job in attempt.jobs)  # type: ignore[attr-defined]
        while job.delivery.listeners:  # noqa: ASYNC110 (the server's own seeing has no event)
            await asyncio.sleep(0.005)
        with without_room(store) as tried:
            leaves.set()
            await tried.wait()
        [call] = await client.served.calls()
        assert call["status"] == "ok"  # so says the record as long as it cannot be changed
        while (await client.served.calls())[0]["status"] != "abandoned":  # noqa: ASYNC110 (over HTTP there is no event)
            await asyncio.sleep(0.02)
