from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from longrein.gateway.dialects import DialectError
from longrein.gateway.gate import Gate
from longrein.records import PauseRequest

from .serving import answer, path, register, serving, upstream


async def through(gate: Gate) -> None:
    async with gate.enter():
        pass


async def settled() -> None:
    """Let every task that can go on go on."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_open_gate_counts_what_is_in_flight() -> None:
    gate = Gate("hold", 5)
    assert gate.state().inflight == 0
    async with gate.enter(), gate.enter():
        assert gate.state().inflight == 2
        gate.pause(PauseRequest())
        assert gate.state().inflight == 2  # a pause does not end what is under way
    assert gate.state().inflight == 0


async def test_what_raises_inside_is_counted_out() -> None:
    gate = Gate("hold", 5)
    with pytest.raises(RuntimeError):
        async with gate.enter():
            raise RuntimeError
    assert gate.state().inflight == 0


async def test_a_held_call_goes_on_when_the_gate_opens() -> None:
    gate = Gate("hold", 60)
    gate.pause(PauseRequest(reason="update"))
    held = [asyncio.ensure_future(through(gate)) for _ in range(3)]
    await settled()
    assert not any(task.done() for task in held)
    assert gate.state().inflight == 0
    gate.resume()
    await asyncio.gather(*held)


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
    await gate.refuse_if_closed()  # it may wait, so it is not refused
    with pytest.raises(DialectError, match="update") as refused:
        await through(gate)
    assert refused.value.status == 429
    assert refused.value.headers == {"Retry-After": told, "X-Agl-Paused": "true"}
    assert gate.state().inflight == 0


async def test_refuse_refuses_at_once() -> None:
    gate = Gate("refuse", 60)
    await gate.refuse_if_closed()
    await through(gate)
    gate.pause(PauseRequest())
    for call in (gate.refuse_if_closed(), through(gate)):
        with pytest.raises(DialectError) as refused:
            await call
        assert refused.value.status == 429
    gate.resume()
    await through(gate)


async def test_a_gate_of_a_gateway_that_goes_down_lets_nothing_through() -> None:
    gate = Gate("hold", 60)
    gate.pause(PauseRequest())
    held = asyncio.ensure_future(through(gate))
    await settled()
    gate.close()
    for call in (held, through(gate), gate.refuse_if_closed()):
        with pytest.raises(DialectError) as refused:
            await call
        assert refused.value.status == 503


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
