"""The typed client against a real gateway, and against connections that fail."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from gateway.serving import KEY, serving
from longrein.client import ApiError, Client
from longrein.gateway.serve import Gateway
from longrein.records import (
    Call,
    EndAttempt,
    ModelEndpoint,
    NewEvent,
    NewRollout,
    Outcome,
    PauseRequest,
    RolloutState,
    StatusChange,
    Usage,
)


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Gateway, str]]:
    async with serving(tmp_path) as running:
        yield running.gateway, running.url


@pytest_asyncio.fixture
async def client(served: tuple[Gateway, str]) -> AsyncIterator[Client]:
    async with Client(served[1] + "/", KEY) as opened:
        yield opened


async def test_the_life_of_a_rollout(client: Client, served: tuple[Gateway, str]) -> None:
    gateway, _ = served
    assert await client.health()
    (rollout,) = await client.add_rollouts([NewRollout(input={"data_id": "d"}, group_id="g", metadata={"n": 1})])
    assert (rollout.input, rollout.group_id, rollout.metadata) == ({"data_id": "d"}, "g", {"n": 1})
    name = rollout.rollout_id
    assert await client.rollouts([RolloutState.queuing]) == [rollout]
    assert await client.rollouts([RolloutState.failed, RolloutState.succeeded]) == []
    started = await client.start_attempt(name)
    assert (started.attempt.attempt_id, started.rollout.status.state) == ("0", RolloutState.running)
    call = Call(
        rollout_id=name, attempt_id="0", number=0, dialect="chat", mode="train", model="m", engine="policy", sampled=[1]
    )
    await gateway.store.add_call(call)
    assert await client.calls(name) == await client.calls(name, "0") == [call]
    event = await client.add_event(name, "0", NewEvent("reward", {"value": 0.5}))
    assert await client.events(name, event_type="reward") == [event]
    assert [one.event_type for one in await client.events(name, "0")] == ["model_request", "reward"]
    end = EndAttempt(outcome=Outcome.agent_failed, exit_code=2, reason="exit code 2", usage=Usage(wall_seconds=1.0))
    ended = await client.end_attempt(name, "0", end)
    assert (ended.outcome, ended.exit_code, ended.usage) == (Outcome.agent_failed, 2, Usage(wall_seconds=1.0))
    assert await client.attempts(name) == [ended]
    done = await client.change_rollout(name, StatusChange(state=RolloutState.succeeded))
    assert done.status.state is RolloutState.succeeded
    detail = await client.rollout(name)
    assert (detail.rollout, detail.attempts) == (done, ["0"])
    page = await client.terminal(0)
    assert [item.data_id for item in page.items] == ["d"]
    assert (await client.terminal(page.next_after)).items == []
    await client.delete_rollout(name)
    await client.delete_rollout(name)
    assert await client.rollouts() == []


async def test_models_and_the_gate(client: Client) -> None:
    model = ModelEndpoint("m", "http://127.0.0.1:9", 4, "tokens")
    assert await client.put_models([model]) == await client.models() == [model]
    await client.clear_models()
    assert await client.models() == []
    paused = await client.pause(PauseRequest(retry_after_seconds=2.0, reason="update"))
    assert (paused.paused, paused.reason) == (True, "update")
    assert await client.gate() == paused
    assert (await client.resume()).paused is False


async def test_long_polls_wait_for_a_change(client: Client) -> None:
    listed = asyncio.ensure_future(client.rollouts([RolloutState.queuing], wait=50.0))
    finished = asyncio.ensure_future(client.terminal(0, wait=50.0))
    (rollout,) = await client.add_rollouts([NewRollout(input={})])
    assert await listed == [rollout]
    await client.change_rollout(rollout.rollout_id, StatusChange(state=RolloutState.failed))
    assert [item.rollout_id for item in (await finished).items] == [rollout.rollout_id]
    assert (await client.terminal(99, wait=0.01)).items == []


async def test_refusals_are_errors_with_status_and_words(client: Client, served: tuple[Gateway, str]) -> None:
    with pytest.raises(ApiError, match="no rollout nowhere") as refused:
        await client.rollout("nowhere")
    assert refused.value.status == 404
    (rollout,) = await client.add_rollouts([NewRollout(input={})])
    await client.start_attempt(rollout.rollout_id)
    with pytest.raises(ApiError, match="still runs") as refused:
        await client.start_attempt(rollout.rollout_id)
    assert refused.value.status == 409
    with pytest.raises(ApiError, match="no way from running to running") as refused:
        await client.change_rollout(rollout.rollout_id, StatusChange(state=RolloutState.running))
    assert refused.value.status == 409
    async with Client(served[1], "wrong") as stranger:
        with pytest.raises(ApiError, match="not known") as refused:
            await stranger.rollouts()
        assert refused.value.status == 401


@asynccontextmanager
async def losing(url: str, lose: Callable[[bytes, int], str]) -> AsyncIterator[str]:
    """A proxy that loses requests or answers: `lose(request, count)` says `request`, `answer` or nothing."""
    host, port = url.removeprefix("http://").split(":")
    count = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        request = head + await reader.readexactly(length)
        count += 1
        what = lose(request, count)
        if what != "request":
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
            up_writer.write(request.replace(b"onnection: keep-alive", b"onnection: close"))
            answer = await up_reader.read()
            up_writer.close()
            if what != "answer":
                writer.write(answer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_lost_answer_is_asked_for_again_and_nothing_happens_twice(served: tuple[Gateway, str]) -> None:
    gateway, url = served
    seen: set[bytes] = set()

    def first_answer(request: bytes, count: int) -> str:
        """Loses the answer to each request once."""
        new = request not in seen
        seen.add(request)
        return "answer" if new else ""

    async with losing(url, first_answer) as lossy, Client(lossy, KEY) as client:
        (rollout,) = await client.add_rollouts([NewRollout(input={})])
        assert [one.rollout_id for one in gateway.store.rollouts()] == [rollout.rollout_id]
        name = rollout.rollout_id
        running = await client.change_rollout(name, StatusChange(state=RolloutState.running))
        assert (running.status.state, running.status.version) == (RolloutState.running, 1)
        await gateway.store.ensure_attempt(name, "0")
        ended = await client.end_attempt(name, "0", EndAttempt(outcome=Outcome.succeeded))
        assert ended.outcome is Outcome.succeeded
        assert await client.attempts(name) == [ended]

        # These may not be sent twice: they may have arrived.
        for ask in (lambda: client.start_attempt(name), lambda: client.add_event(name, "0", NewEvent("note"))):
            with pytest.raises(ApiError, match="cannot be reached") as lost:
                await ask()
            assert lost.value.status == 0
        assert len(gateway.store.events(name, "0")) == 1
        assert len(gateway.store.attempts(name)) == 2


async def test_a_real_conflict_stays_one_after_a_lost_answer(served: tuple[Gateway, str]) -> None:
    gateway, url = served
    async with (
        losing(url, lambda request, count: "request" if count == 1 else "") as lossy,
        Client(lossy, KEY) as client,
    ):
        (rollout,) = await client.add_rollouts([NewRollout(input={})])
        assert len(gateway.store.rollouts()) == 1
    async with (
        losing(url, lambda request, count: "request" if count == 1 else "") as lossy,
        Client(lossy, KEY) as client,
    ):
        with pytest.raises(ApiError, match="no way from queuing to succeeded"):
            await client.change_rollout(rollout.rollout_id, StatusChange(state=RolloutState.succeeded))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


async def test_a_gateway_that_is_not_there_is_an_error_that_names_it() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    asks: list[Callable[[Client], Awaitable[object]]] = [
        lambda client: client.rollouts(),
        lambda client: client.start_attempt("r"),
    ]
    async with Client(url, KEY, retry_seconds=0.1) as client:
        assert await client.health() is False
        for ask in asks:
            with pytest.raises(ApiError, match=f"the gateway at {url} cannot be reached") as refused:
                await ask(client)
            assert refused.value.status == 0


async def test_a_gateway_that_comes_up_later_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    tried: list[httpx.Request] = []
    several = asyncio.Event()

    async def try_(request: httpx.Request) -> None:
        tried.append(request)
        if len(tried) >= 4:
            several.set()

    async with Client(f"http://127.0.0.1:{port}", KEY) as client:
        client._http.event_hooks["request"].append(try_)
        starting = asyncio.ensure_future(client.start_attempt("r"))  # not to be sent twice, but it has not been sent
        listing = asyncio.ensure_future(client.rollouts())
        await several.wait()
        async with serving(tmp_path, gateway={"port": port}):
            assert await listing == []
            with pytest.raises(ApiError, match="no rollout r"):
                await starting


async def test_an_answer_that_is_no_error_of_ours_is_shown_as_it_is() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 5\r\nconnection: close\r\n\r\nproxy")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server, Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", KEY) as client:
        assert await client.health() is False
        with pytest.raises(ApiError, match="proxy") as refused:
            await client.models()
        assert (refused.value.status, refused.value.message) == (502, "proxy")
