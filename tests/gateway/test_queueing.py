"""The queue's clock, and the list of rollouts that were taken from their agents."""

import asyncio
from pathlib import Path

import pytest

from longrein.gateway import withdrawals
from longrein.gateway.withdrawals import Withdrawals

from .serving import Served, serving


async def terminal(served: Served, count: int) -> dict[str, str]:
    """The states of finished rollouts, once there are `count`."""
    while True:
        answer = await served.http.get("/api/rollouts/terminal", params={"wait": "20", "after": str(count - 1)})
        if answer.json()["total_terminal"] >= count:
            items = (await served.http.get("/api/rollouts/terminal")).json()["items"]
            return {item["rollout_id"]: item["state"] for item in items}


async def state(served: Served, rollout_id: str) -> str:
    return (await served.http.get(f"/api/rollouts/{rollout_id}")).json()["rollout"]["status"]["state"]


async def test_who_waits_too_long_fails_and_who_was_started_does_not(tmp_path: Path) -> None:
    async with serving(tmp_path, agent={"queue_seconds": 0.5}) as served:
        await served.start("started")
        await served.add("waits")
        await served.add("patient", config={"queue_seconds": 0})
        await served.add("hurried", config={"queue_seconds": 0.01})
        assert await terminal(served, 2) == {"waits": "failed", "hurried": "failed"}
        status = (await served.http.get("/api/rollouts/waits")).json()["rollout"]["status"]
        assert status["error_message"].startswith("waited 0.5 s in the queue and was not started (agent.queue_seconds")
        assert [await state(served, name) for name in ("started", "patient")] == ["running", "queuing"]
        refused = await served.http.post("/api/rollouts", json=[{"input": {}, "config": {"queue_seconds": -1}}])
        assert (refused.status_code, "queue_seconds" in refused.text) == (422, True)


async def test_a_pause_is_no_waiting_and_a_restart_begins_anew(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.http.post("/proxy/pause")
        clock = served.gateway.gate.open_seconds()
        await served.add("r", config={"queue_seconds": 0.05})
        await served.add("later", config={"queue_seconds": 600})
        await asyncio.sleep(0.2)  # four times its time, in which nothing may happen
        assert served.gateway.gate.open_seconds() == clock
        assert await state(served, "r") == "queuing"
        await served.http.post("/proxy/pause")  # again, which makes it no longer
        await served.http.post("/proxy/resume")
        assert await terminal(served, 1) == {"r": "failed"}
        await served.add("left", config={"queue_seconds": 0.5})
    async with serving(tmp_path) as served:
        assert await terminal(served, 2) == {"r": "failed", "left": "failed"}
        assert await state(served, "later") == "queuing"


async def page(served: Served, **query: str) -> dict:
    answer = await served.http.get("/api/rollouts/withdrawn", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_who_runs_agents_is_told_of_those_to_end_and_of_no_others(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        first = await page(served, wait="20")  # an instance that is not known is answered at once
        assert (first["items"], first["next_after"], first["complete"]) == ([], 0, False)
        asked = {"instance": first["instance"], "after": "0", "wait": "20"}
        waiting = asyncio.ensure_future(page(served, **asked))
        failed = {"status": {"state": "failed"}}
        await served.add("queued")
        await served.http.patch("/api/rollouts/queued", json=failed)
        await served.start("ended")
        await served.http.patch("/api/rollouts/ended/attempts/0", json={"outcome": "succeeded"})
        await served.http.patch("/api/rollouts/ended", json={"status": {"state": "succeeded"}})
        await served.start("noted")
        await served.http.patch("/api/rollouts/noted", json={"status": {"error_message": "so far"}})
        await served.http.delete("/api/rollouts/ended")
        assert not waiting.done()
        await served.start("cancelled")
        await served.http.patch("/api/rollouts/cancelled", json=failed)
        told = await waiting
        assert (told["items"], told["next_after"], told["complete"]) == (["cancelled"], 1, True)
        await served.http.delete("/api/rollouts/noted")
        assert (await page(served, **asked))["items"] == ["cancelled", "noted"]
        assert (await page(served, **asked | {"after": "1"}))["items"] == ["noted"]
        assert (await served.anonymous.get("/api/rollouts/withdrawn")).status_code == 401
        assert (await served.http.get("/api/rollouts/withdrawn", params={"after": "-1"})).status_code == 422


def test_a_position_too_old_is_not_taken_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(withdrawals, "REMEMBERED", 3)
    some = Withdrawals()
    for number in range(5):
        some.add(str(number))
    assert some.page(some.instance, 1).complete is False
    assert some.page(some.instance, 2).items == ["2", "3", "4"]
    assert some.page(some.instance, 5).items == []
    assert some.page(some.instance, 6).complete is False
    assert some.page("another", 5).complete is False
