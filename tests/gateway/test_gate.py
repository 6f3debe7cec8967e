from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.gateway.dialects import DialectError
from longrein.gateway.gate import Gate, Passage
from longrein.records import PauseRequest

from .serving import answer, path, register, serving, upstream


async def through(gate: Gate, attempt: str = "a") -> None:
    [passage] = gate.admit(attempt)
    async with passage:
        pass


async def settled() -> None:
    """Let every task that can go on go on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_open_gate_counts_what_is_in_flight() -> None:
    gate = Gate("hold", 5)
    assert gate.state().inflight == 0
    first, second = gate.admit("a", 2)
    async with first, second:
        assert gate.state().inflight == 2
        gate.pause(PauseRequest())
        assert gate.state().inflight == 2  # a pause does not end what is under way
    assert gate.state().inflight == 0


async def test_what_raises_inside_is_counted_out() -> None:
    gate = Gate("hold", 5)
    with pytest.raises(RuntimeError):
        async with gate.admit("a")[0]:
            raise RuntimeError
    assert gate.state().inflight == 0


async def test_a_held_call_goes_on_when_the_gate_opens() -> None:
    gate = Gate("hold", 60)
    gate.pause(PauseRequest(reason="update"))
    held = [asyncio.ensure_future(through(gate)) for _ in range(3)]
    await settled()
    assert not any(task.done() for task in held)
    assert (gate.state().inflight, gate.state().waiting) == (0, 3)
    gate.resume()
    await asyncio.gather(*held)
    assert (gate.state().inflight, gate.state().waiting) == (0, 0)


async def test_a_gate_that_closes_again_at_once_holds_on() -> None:
    gate = Gate("hold", 60)
    gate.pause(PauseRequest())
    held = asyncio.ensure_future(through(gate))
    await settled()
    gate.resume()
    gate.pause(PauseRequest())
    await settled()
    assert not held.done()
    gate.resume()
    await held


@pytest.mark.parametrize(("asked", "told"), [(0.0, "1"), (2.5, "3"), (7.0, "7"), (300.0, "30")])
async def test_a_call_held_too_long_is_refused_with_at_most_30_seconds(asked: float, told: str) -> None:
    gate = Gate("hold", 0.01)
    gate.pause(PauseRequest(retry_after_seconds=asked, reason="update"))
    gate.refuse()  # it may wait, so it is not refused
    with pytest.raises(DialectError, match="update") as refused:
        await through(gate)
    assert refused.value.status == 429
    assert refused.value.headers == {"Retry-After": told, "X-Agl-Paused": "true"}
    assert (gate.state().inflight, gate.state().waiting) == (0, 0)


async def test_the_time_of_a_hold_begins_with_each_pause() -> None:
    gate = Gate("hold", 3600, max_concurrent=1)
    [first] = gate.admit("a")
    [waiting] = gate.admit("b")
    assert waiting.held_since is None  # it waits for the first, however long that takes
    gate.pause(PauseRequest())
    began = waiting.held_since
    assert began is not None
    gate.resume()
    await settled()
    assert waiting.held_since is None
    while asyncio.get_running_loop().time() <= began:  # noqa: ASYNC110 (a clock)
        await asyncio.sleep(0.001)
    gate.pause(PauseRequest())
    assert waiting.held_since is not None
    assert waiting.held_since > began
    first.leave()
    waiting.leave()


async def test_refuse_refuses_at_once() -> None:
    gate = Gate("refuse", 60)
    gate.refuse()
    await through(gate)
    gate.pause(PauseRequest())
    with pytest.raises(DialectError) as refused:
        gate.refuse()
    assert refused.value.status == 429
    with pytest.raises(DialectError) as refused:
        await through(gate)
    assert refused.value.status == 429
    gate.resume()
    await through(gate)


async def test_a_gate_of_a_gateway_that_goes_down_lets_nothing_through() -> None:
    gate = Gate("hold", 60)
    gate.pause(PauseRequest())
    held = asyncio.ensure_future(through(gate))
    await settled()
    gate.close()
    for call in (held, through(gate)):
        with pytest.raises(DialectError) as refused:
            await call
        assert refused.value.status == 503
    with pytest.raises(DialectError):
        gate.refuse()


# --- Turns and the queue's end


async def test_so_many_are_let_through_at_once() -> None:
    gate = Gate("hold", 60, max_concurrent=2)
    passages = [gate.admit("a")[0] for _ in range(4)]
    assert [p.state for p in passages] == ["through", "through", "waiting", "waiting"]
    assert (gate.state().inflight, gate.state().waiting) == (2, 2)
    passages[1].leave()
    assert [p.state for p in passages] == ["through", "gone", "through", "waiting"]
    passages[1].leave()  # once is enough
    assert passages[3].state == "waiting"
    passages[3].leave()  # a client that went away while it waited
    assert (gate.state().inflight, gate.state().waiting) == (2, 0)
    gate.pause(PauseRequest())
    [held] = gate.admit("a")
    passages[0].leave()
    passages[2].leave()
    assert (gate.state().inflight, held.state) == (0, "waiting")
    gate.resume()
    await held.turn


async def test_attempts_take_turns() -> None:
    gate = Gate("hold", 60, max_concurrent=1)
    [running] = gate.admit("busy")
    busy = gate.admit("busy", 50)
    [small] = gate.admit("small")
    other = gate.admit("other", 2)
    order: list[Passage] = []
    for _ in range(6):
        running.leave()
        [running] = [p for p in (*busy, small, *other) if p.state == "through"]
        order.append(running)
    assert [p.attempt for p in order] == ["busy", "small", "other", "busy", "other", "busy"]
    assert [p for p in order if p.attempt == "busy"] == busy[:3]  # each attempt's own in their order


async def test_one_that_was_cancelled_while_it_waited_takes_no_turn() -> None:
    gate = Gate("hold", 60, max_concurrent=1)
    [running] = gate.admit("a")
    cancelled, next_one = asyncio.ensure_future(through(gate)), asyncio.ensure_future(through(gate))
    await settled()
    cancelled.cancel()
    running.leave()  # before the cancelled task has run
    await next_one
    assert (gate.state().inflight, gate.state().waiting) == (0, 0)


@pytest.mark.parametrize("paused", [True, False])
async def test_a_call_that_finds_too_many_waiting_is_refused(paused: bool) -> None:
    gate = Gate("hold", 60, max_waiting=3, max_concurrent=1)
    running = gate.admit("a")
    if paused:
        gate.pause(PauseRequest(retry_after_seconds=90, reason="update"))
    waiting = gate.admit("b", 2)
    gate.refuse(1)
    for calls in (2, 5):
        with pytest.raises(DialectError, match=r"2 calls wait.*gate\.max_waiting is 3") as refused:
            gate.refuse(calls)
        assert refused.value.status == 429
        assert refused.value.headers == {"Retry-After": "30" if paused else "5"}
    waiting += gate.admit("c")
    with pytest.raises(DialectError, match="3 calls wait"):
        gate.admit("d")
    waiting.pop().leave()
    waiting += gate.admit("d")
    for passage in (*running, *waiting):
        passage.leave()
    if paused:
        gate.resume()
        await settled()
    assert [p.state for p in gate.admit("e", 7)] == ["through"] + [
        "waiting"
    ] * 6  # nobody waits: a request is let wait whole


@given(st.data())
def test_nothing_is_lost_in_the_gate(data: st.DataObject) -> None:
    """Whatever happens in whatever order, the counts are true, the limits are kept and nobody waits without need."""

    async def play() -> None:
        most, room = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 4))
        gate = Gate("hold", 3600, max_waiting=room, max_concurrent=most)
        known: list[Passage] = []
        for _ in range(data.draw(st.integers(1, 30))):
            step = data.draw(st.sampled_from(["admit", "admit", "leave", "pause", "resume"]))
            if step == "admit":
                attempt, calls = data.draw(st.sampled_from("abc")), data.draw(st.integers(1, 3))
                waiting = gate.state().waiting
                try:
                    known += gate.admit(attempt, calls)
                except DialectError:
                    assert room
                    assert waiting
                    assert waiting + calls > room
            elif step == "leave" and known:
                data.draw(st.sampled_from(known)).leave()
            elif step == "pause":
                gate.pause(PauseRequest())
            elif step == "resume":
                gate.resume()
                await settled()
            state = gate.state()
            assert state.inflight == sum(p.state == "through" for p in known)
            assert state.waiting == sum(p.state == "waiting" for p in known)
            assert not most or state.inflight <= most
            if state.waiting and not state.paused:
                assert most
                assert state.inflight == most
            assert all(p.turn.done() == (p.state == "through") for p in known if p.state != "gone")
            by_attempt = [queue for queue in gate._waiting.values()]
            assert all(in_order(queue, known) for queue in by_attempt)
        for passage in known:
            passage.leave()
        assert (gate.state().inflight, gate.state().waiting, len(gate._waiting)) == (0, 0, 0)

    asyncio.run(play())


def in_order(queue: Sequence[Passage], known: Sequence[Passage]) -> bool:
    places = [known.index(passage) for passage in queue]
    return places == sorted(places)


# --- Over HTTP


async def test_calls_over_http_are_held_through_a_pause(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, upstream() as model:
        model.script = lambda body: answer("late")
        await served.add()
        await register(served, model)
        await served.http.post("/proxy/pause", json={"retry_after_seconds": 5})
        held = asyncio.ensure_future(served.http.post(path(), json={"messages": []}))
        await served.seen()
        assert (await served.http.get("/proxy/state")).json()["inflight"] == 0
        assert model.bodies == []
        await served.http.post("/proxy/resume")
        assert (await held).status_code == 200
        assert len(model.bodies) == len(await served.calls()) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_over_http_are_refused_in_a_pause_as_the_reference_does(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, gate={"on_pause": "refuse"}) as served, upstream() as model:
        await served.add()
        await register(served, model)
        await served.http.post("/proxy/pause", json={"retry_after_seconds": 9, "reason": "update"})
        refused = await served.http.post(path(), json={"messages": [], "stream": stream})
        assert refused.status_code == 429
        assert (refused.headers["retry-after"], refused.headers["x-agl-paused"]) == ("9", "true")
        assert "update" in refused.json()["error"]["message"]
        assert await served.calls() == []  # nothing was sampled: nothing is recorded
