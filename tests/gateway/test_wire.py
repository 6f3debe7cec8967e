"""Agent Lightning's HTTP API, line by line, over real HTTP; then what goes beyond it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from longrein.records import StatusChange

from .serving import KEY, Served, Upstream, answer, path, register, serving, upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("wire"), reward={"from": "agent"}) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def served(server: Served) -> AsyncIterator[Served]:
    yield server
    await server.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model_server() -> AsyncIterator[Upstream]:
    async with upstream() as running:
        yield running


@pytest.fixture
def model(model_server: Upstream) -> Upstream:
    model_server.clear()
    return model_server


async def finish(served: Served, *rollout_ids: str, state: str = "succeeded") -> None:
    for rollout_id in rollout_ids:
        await served.http.patch(f"/api/rollouts/{rollout_id}", json={"status": {"state": "running"}})
        done = await served.http.patch(f"/api/rollouts/{rollout_id}", json={"status": {"state": state}})
        assert done.status_code == 200, done.text


# --- Health and keys


async def test_health_needs_no_key(served: Served) -> None:
    health = await served.anonymous.get("/healthz")
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert (await served.anonymous.get("/")).status_code == 200
    head = await served.anonymous.head("/")
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("POST", "/api/rollouts"),
        ("GET", "/api/rollouts"),
        ("GET", "/api/rollouts/r"),
        ("PATCH", "/api/rollouts/r"),
        ("DELETE", "/api/rollouts/r"),
        ("GET", "/api/rollouts/terminal"),
        ("POST", "/api/rollouts/r/attempt/0/events"),
        ("GET", "/api/rollouts/r/events"),
        ("POST", "/api/rollouts/r/attempts"),
        ("GET", "/api/rollouts/r/attempts"),
        ("PATCH", "/api/rollouts/r/attempts/0"),
        ("GET", "/api/rollouts/r/calls"),
        ("GET", "/api/models"),
        ("POST", "/api/models"),
        ("DELETE", "/api/models"),
        ("POST", path()),
        ("POST", path(end="completions")),
        ("GET", path(end="models")),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("POST", "/proxy/pause"),
        ("POST", "/proxy/resume"),
        ("GET", "/proxy/state"),
    ],
)
async def test_every_route_needs_a_key(served: Served, method: str, route: str) -> None:
    headers: dict[str, str]
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": KEY}):
        refused = await served.anonymous.request(method, route, headers=headers, json=[])
        assert refused.status_code == 401, route
        assert ("error" if route.startswith(("/v1", "/proxy/rollout")) else "detail") in refused.json()
        assert refused.headers["www-authenticate"] == "Bearer"
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}, {"authorization": f"bearer {KEY}"}):
        assert (await served.anonymous.request(method, route, headers=headers, json=[])).status_code != 401


# --- Rollouts


async def test_rollouts_are_added_with_their_input_and_metadata_queuing(served: Served) -> None:
    added = await served.http.post(
        "/api/rollouts", json=[{"input": {"q": "1+1"}, "metadata": {"batch_idx": 3}}, {"input": {}}]
    )
    assert added.status_code == 201
    first, second = added.json()
    assert (first["input"], first["metadata"], first["is_train"]) == ({"q": "1+1"}, {"batch_idx": 3}, True)
    assert first["status"]["state"] == "queuing"
    assert first["status"]["version"] == 0
    assert first["status"]["created_at"] == first["status"]["updated_at"] > 0
    assert first["rollout_id"] != second["rollout_id"]


async def test_a_rollout_keeps_all_of_its_configuration(served: Served) -> None:
    config = {
        "timeout_seconds": 3600,
        "local": {"agent_class": "agents:Calc", "env_map": {"QUESTION": "input.question"}},
        "k8s": {"job_template": "apiVersion: batch/v1"},
    }
    await served.add("r", config=config, is_train=False)
    known = (await served.http.get("/api/rollouts/r")).json()
    assert known["attempts"] == []
    assert known["rollout"]["config"] == config | {"engine": "policy", "queue_seconds": None}
    assert known["rollout"]["is_train"] is False


async def test_an_unknown_rollout_is_404(served: Served) -> None:
    for route in ("", "/events", "/attempts", "/calls"):
        missing = await served.http.get(f"/api/rollouts/nowhere{route}")
        assert (missing.status_code, missing.json()) == (404, {"detail": "no rollout nowhere"})
    assert (await served.http.patch("/api/rollouts/nowhere", json={"status": {}})).status_code == 404
    posted = await served.http.post("/api/rollouts/nowhere/attempt/0/events", json={"event_type": "x", "data": {}})
    assert posted.status_code == 404


async def test_a_status_is_patched_and_echoed(served: Served) -> None:
    await served.add()
    change = {"state": "running", "k8s_job_name": "job-1", "last_attempt_id": "7", "error_message": "none yet"}
    changed = await served.http.patch("/api/rollouts/r", json={"status": change})
    assert changed.status_code == 200
    assert change.items() <= changed.json()["status"].items()
    assert changed.json()["status"]["version"] == 1


@pytest.mark.parametrize(
    ("states", "last"),
    [
        (["running", "succeeded"], 200),
        (["running", "failed"], 200),
        (["failed"], 200),
        (["running", "queuing"], 409),
        (["running", "running"], 409),
        (["succeeded"], 409),
        (["failed", "running"], 409),
        (["running", "succeeded", "failed"], 409),
    ],
)
async def test_transitions(served: Served, states: list[str], last: int) -> None:
    await served.add()
    for state in states[:-1]:
        assert (await served.http.patch("/api/rollouts/r", json={"status": {"state": state}})).status_code == 200
    changed = await served.http.patch("/api/rollouts/r", json={"status": {"state": states[-1]}})
    assert changed.status_code == last
    if last == 409:
        assert states[-1] in changed.json()["detail"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"status": {"state": "cancelled"}}, "cancelled"),
        ({"cancel_requested": True}, "cancel_requested"),
        ({"status": {"cancel_requested": True}}, "cancel_requested"),
        ({"status": {"error_message": 3}}, "error_message"),
        ({}, "status"),
    ],
)
async def test_an_unknown_state_or_key_is_422_and_named(served: Served, body: dict[str, Any], named: str) -> None:
    await served.add()
    refused = await served.http.patch("/api/rollouts/r", json=body)
    assert refused.status_code == 422
    assert named in refused.json()["detail"]


async def test_rollouts_are_listed_by_state(served: Served) -> None:
    await served.add("a")
    await served.add("b")
    await served.http.patch("/api/rollouts/b", json={"status": {"state": "running"}})

    async def listed(query: str) -> list[str]:
        return [rollout["rollout_id"] for rollout in (await served.http.get(f"/api/rollouts?{query}")).json()]

    assert await listed("state_in=queuing&state_in=running") == ["a", "b"]
    assert await listed("state_in=queuing") == ["a"]
    assert await listed("state_in=running&limit=500") == ["b"]
    assert await listed("state_in=failed") == []
    assert await listed("limit=1") == ["a"]


async def test_adding_a_known_id_again_changes_nothing(served: Served) -> None:
    await served.add("mine", metadata={"n": 1})
    await served.http.patch("/api/rollouts/mine", json={"status": {"state": "running"}})
    await served.http.post("/api/rollouts/mine/attempt/0/events", json={"event_type": "note", "data": {}})
    again = await served.http.post("/api/rollouts", json=[{"input": {"other": 1}, "rollout_id": "mine"}])
    assert again.status_code == 201
    assert again.json()[0]["rollout_id"] == "mine"
    assert again.json()[0]["input"] == {}
    assert again.json()[0]["metadata"] == {"n": 1}
    assert again.json()[0]["status"]["state"] == "running"
    assert (await served.http.get("/api/rollouts/mine")).json()["attempts"] == ["0"]
    assert len((await served.http.get("/api/rollouts/mine/events")).json()) == 1


async def test_deleting_is_204_also_when_unknown_and_takes_the_events_along(served: Served) -> None:
    await served.add()
    await served.http.post("/api/rollouts/r/attempt/0/events", json={"event_type": "note", "data": {}})
    for _ in range(2):
        deleted = await served.http.delete("/api/rollouts/r")
        assert (deleted.status_code, deleted.content) == (204, b"")
        assert (await served.http.get("/api/rollouts/r")).status_code == 404
        assert (await served.http.get("/api/rollouts/r/events")).status_code == 404
    await served.add()
    assert (await served.http.get("/api/rollouts/r/events")).json() == []


async def test_terminal_rollouts_come_in_order_of_completion(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await terminal_pages(served)


async def terminal_pages(served: Served) -> None:
    await served.http.post(
        "/api/rollouts",
        json=[
            {"input": {"data_id": "d1"}, "rollout_id": "a"},
            {"input": {"instance_id": "i2"}, "rollout_id": "b", "is_train": False},
            {"input": {}, "rollout_id": "c"},
            {"input": {}, "rollout_id": "never"},
        ],
    )
    await finish(served, "b")
    await finish(served, "c", "a", state="failed")

    async def page(query: str) -> Any:
        return (await served.http.get(f"/api/rollouts/terminal?{query}")).json()

    items = [
        {"rollout_id": "b", "state": "succeeded", "data_id": "i2", "is_train": False},
        {"rollout_id": "c", "state": "failed", "data_id": "", "is_train": True},
        {"rollout_id": "a", "state": "failed", "data_id": "d1", "is_train": True},
    ]
    assert await page("after=0&limit=1000") == {"items": items, "next_after": 3, "total_terminal": 3}
    assert await page("") == {"items": items, "next_after": 3, "total_terminal": 3}
    assert await page("after=1&limit=1") == {"items": items[1:2], "next_after": 2, "total_terminal": 3}
    assert await page("after=3") == {"items": [], "next_after": 3, "total_terminal": 3}


# --- Events


async def test_an_event_is_posted_and_echoed_and_makes_its_attempt_known(served: Served) -> None:
    await served.add()
    data = {"value": 0.7, "extra": [1]}
    posted = await served.http.post("/api/rollouts/r/attempt/0/events", json={"event_type": "reward", "data": data})
    assert posted.status_code == 200
    event = posted.json()
    assert event == {
        "event_type": "reward",
        "rollout_id": "r",
        "attempt_id": "0",
        "timestamp": event["timestamp"],
        "data": data,
    }
    assert (await served.http.get("/api/rollouts/r")).json()["attempts"] == ["0"]
    assert (await served.http.get("/api/rollouts/r/events?event_type=reward")).json() == [event]
    assert (await served.http.get("/api/rollouts/r/events?event_type=note")).json() == []
    (triplet,) = (await served.http.get("/api/rollouts/r/events?event_type=reward&format=triplet")).json()
    assert triplet["data"] == {"value": 0.7}


async def test_a_triplet_reward_keeps_source_and_reason(served: Served) -> None:
    await served.add()
    data = {"value": 1, "source": "agent", "reason": "ok", "more": 2}
    await served.http.post("/api/rollouts/r/attempt/0/events", json={"event_type": "reward", "data": data})
    (triplet,) = (await served.http.get("/api/rollouts/r/events?format=triplet")).json()
    assert triplet["data"] == {"value": 1.0, "source": "agent", "reason": "ok"}


@pytest.mark.parametrize(("value", "number"), [(True, 1.0), (False, 0.0), (3, 3.0), (-0.5, -0.5)])
async def test_rewards_are_numbers_and_true_is_one(served: Served, value: Any, number: float) -> None:
    await served.add()
    posted = await served.http.post(
        "/api/rollouts/r/attempt/0/events", json={"event_type": "reward", "data": {"value": value}}
    )
    assert posted.json()["data"]["value"] == number
    assert type(posted.json()["data"]["value"]) is float


@pytest.mark.parametrize("value", ['"1"', "null", "[1]", "1e999", "NaN", "1" + "0" * 400])
async def test_a_reward_that_is_no_finite_number_is_refused(served: Served, value: str) -> None:
    await served.add()
    body = '{"event_type": "reward", "data": {"value": VALUE}}'.replace("VALUE", value)
    refused = await served.http.post("/api/rollouts/r/attempt/0/events", content=body)
    assert refused.status_code == (400 if value in ("NaN",) else 422), refused.text
    assert (await served.http.get("/api/rollouts/r/events")).json() == []


async def test_events_are_those_of_the_last_attempt(served: Served) -> None:
    await served.add()
    assert (await served.http.get("/api/rollouts/r/events")).json() == []
    for attempt in ("0", "1"):
        await served.http.post(
            f"/api/rollouts/r/attempt/{attempt}/events", json={"event_type": f"in-{attempt}", "data": {}}
        )

    async def kinds(query: str = "") -> list[str]:
        return [event["event_type"] for event in (await served.http.get(f"/api/rollouts/r/events{query}")).json()]

    assert await kinds() == ["in-1"]
    await served.http.patch("/api/rollouts/r", json={"status": {"last_attempt_id": "0"}})
    assert await kinds() == ["in-0"]
    assert await kinds("?attempt=1") == ["in-1"]
    assert (await served.http.get("/api/rollouts/r/events?attempt=9")).status_code == 404
    assert (await served.http.get("/api/rollouts/r")).json()["attempts"] == ["0", "1"]


async def test_of_equal_prompts_a_triplet_keeps_the_last_and_raw_events_all(served: Served) -> None:
    """Model requests that were posted by who holds the run key, as Agent Lightning's own tests do."""
    await served.add()

    async def post(kind: str, data: dict[str, Any]) -> None:
        await served.http.post("/api/rollouts/r/attempt/0/events", json={"event_type": kind, "data": data})

    await post("reward", {"value": 1.0})
    for prompt, ids in (([1, 2], [3]), ([9], [4]), ([1, 2], [5])):
        await post("model_request", {"response": {"prompt_token_ids": prompt, "choices": [{"token_ids": ids}]}})
    raw = (await served.http.get("/api/rollouts/r/events")).json()
    assert [event["event_type"] for event in raw] == ["reward", *["model_request"] * 3]
    reward, *requests = (await served.http.get("/api/rollouts/r/events?format=triplet")).json()
    assert reward["data"] == {"value": 1.0}
    told = [(event["data"]["prompt_token_ids"], event["data"]["response_token_ids"]) for event in requests]
    assert told == [([9], [4]), ([1, 2], [5])]


# --- Models, the proxy, the gate


async def test_models_are_registered_updated_and_cleared(served: Served) -> None:
    one = {"model": "m", "endpoint": "http://a/v1", "version": 0, "protocol": "openai"}
    added = await served.http.post("/api/models", json=[{"model": "m", "endpoint": "http://a/v1"}])
    assert (added.status_code, added.json()) == (201, [one])
    newer = await served.http.post("/api/models", json=[{"model": "m", "endpoint": "http://a/v1", "version": 4}])
    assert (newer.status_code, newer.json()) == (201, [one | {"version": 4}])
    assert (await served.http.get("/api/models")).json() == [one | {"version": 4}]
    cleared = await served.http.delete("/api/models")
    assert (cleared.status_code, cleared.json()) == (200, {"status": "ok"})
    assert (await served.http.get("/api/models")).json() == []


@pytest.mark.parametrize(("mode", "temperature"), [("train", 1.0), ("val", 0.7)])
async def test_a_call_is_forwarded_as_the_reference_forwards_it_and_recorded(
    served: Served, model: Upstream, mode: str, temperature: float
) -> None:
    await served.add(is_train=mode == "train")
    await register(served, model, version=5)
    model.script = lambda body: answer("2", [1], [2], usage={"total_tokens": 2})
    given = {"model": "whatever", "messages": [{"role": "user", "content": "1+1"}], "temperature": 0.1, "top_p": 0.9}
    got = await served.http.post(path(mode=mode), json=given)
    assert (got.status_code, got.json()) == (200, answer("2", [1], [2], usage={"total_tokens": 2}))
    assert model.paths == ["/v1/chat/completions"]
    sent = model.bodies[0]
    assert sent["messages"] == given["messages"]
    assert (sent["model"], sent["temperature"], sent["top_p"]) == ("real", temperature, 0.9)
    assert sent["return_token_ids"] is True
    assert sent.get("logprobs") == (True if mode == "train" else None)
    (event,) = (await served.http.get("/api/rollouts/r/events?event_type=model_request&format=triplet")).json()
    assert event["data"] == {
        "prompt_token_ids": [1],
        "response_token_ids": [2],
        "response_log_probs": [-0.5],
        "server": {"model": "real", "version": 5},
        "http_status": 200,
        "status": "ok",
    }
    assert (await served.http.get("/api/rollouts/r")).json()["attempts"] == ["0"]


async def test_completions_are_forwarded_too(served: Served, model: Upstream) -> None:
    await served.add()
    await register(served, model)
    choice = {
        "index": 0,
        "text": " two",
        "finish_reason": "stop",
        "prompt_token_ids": [7, 8],
        "token_ids": [9],
        "logprobs": {"token_logprobs": [-0.75]},
    }
    model.script = lambda body: {"object": "text_completion", "choices": [choice]}
    got = await served.http.post(path(end="completions"), json={"prompt": "one", "max_tokens": 4})
    assert (got.status_code, got.json()["choices"]) == (200, [choice])
    assert model.paths == ["/v1/completions"]
    assert model.bodies[0]["logprobs"] == 1
    (event,) = (await served.http.get("/api/rollouts/r/events?format=triplet")).json()
    data = event["data"]
    assert (data["prompt_token_ids"], data["response_token_ids"], data["response_log_probs"]) == ([7, 8], [9], [-0.75])


async def test_an_upstream_error_comes_back_and_is_recorded(served: Served, model: Upstream) -> None:
    from starlette.responses import JSONResponse

    await served.add()
    await register(served, model)
    error = {"message": "too long", "type": "BadRequestError", "code": 400}
    model.script = lambda body: JSONResponse({"error": error}, 400)
    got = await served.http.post(path(), json={"messages": []})
    assert (got.status_code, got.json()) == (400, {"error": error})
    (event,) = (await served.http.get("/api/rollouts/r/events?format=triplet")).json()
    data = event["data"]
    assert (data["prompt_token_ids"], data["response_token_ids"]) == ([], [])
    assert (data["http_status"], data["status"], data["error"]) == (400, "error", error)


async def test_equal_prompts_are_all_kept_and_only_a_triplet_collapses_them(served: Served, model: Upstream) -> None:
    await served.add()
    await register(served, model)
    replies = iter([[2], [3]])
    model.script = lambda body: answer("x", [1], next(replies))
    for _ in range(2):
        await served.http.post(path(), json={"messages": []})
    raw = (await served.http.get("/api/rollouts/r/events")).json()
    assert [event["data"]["response_token_ids"] for event in raw] == [[2], [3]]
    (triplet,) = (await served.http.get("/api/rollouts/r/events?format=triplet")).json()
    assert triplet["data"]["response_token_ids"] == [3]


@pytest.mark.parametrize(
    "route",
    [
        path("nowhere"),
        path(mode="test"),
        path(end="embeddings"),
        path(end="chat"),
        "/v1/nothing",
        "/proxy/nothing",
        "/api/nothing",
    ],
)
async def test_an_unknown_rollout_mode_or_path_is_404(served: Served, route: str) -> None:
    await served.add()
    missing = await served.http.post(route, json={"messages": []})
    assert missing.status_code == 404
    body = missing.json()
    if route.startswith(("/v1", "/proxy/rollout")):
        assert set(body["error"]) == {"message", "type", "param", "code"}
    else:
        assert set(body) == {"detail"}


async def test_without_a_model_server_a_call_is_503(served: Served) -> None:
    await served.add()
    refused = await served.http.post(path(), json={"messages": []})
    assert refused.status_code == 503
    assert "POST /api/models" in refused.json()["error"]["message"]


async def test_models_are_listed_to_a_harness(served: Served, model: Upstream) -> None:
    token = await served.start()
    await register(served, model)
    for route, headers in ((path(end="models"), {}), (path(end="models"), token), ("/v1/models", token)):
        listed = await served.http.get(route, headers=headers)
        assert listed.status_code == 200
        assert (listed.json()["object"], [one["id"] for one in listed.json()["data"]]) == ("list", ["real"])


async def test_pause_state_and_resume(served: Served) -> None:
    paused = await served.http.post("/proxy/pause", json={"retry_after_seconds": 7, "reason": "update"})
    assert paused.status_code == 200
    assert paused.json() == {
        "paused": True,
        "retry_after_seconds": 7.0,
        "reason": "update",
        "inflight": 0,
        "waiting": 0,
    }
    assert (await served.http.get("/proxy/state")).json()["reason"] == "update"
    resumed = await served.http.post("/proxy/resume")
    assert (resumed.status_code, resumed.json()["paused"], resumed.json()["reason"]) == (200, False, None)
    assert (await served.http.get("/proxy/state")).json()["paused"] is False
    assert (await served.http.post("/proxy/pause")).json()["retry_after_seconds"] == 5.0
    assert (await served.http.post("/proxy/pause", json={"retry_after_seconds": -1})).status_code == 422
    assert (await served.http.post("/proxy/pause", json={"seconds": 1})).status_code == 422


# --- What goes beyond it


async def test_attempts_are_started_ended_and_listed(served: Served) -> None:
    await served.add()
    assert (await served.http.get("/api/rollouts/r/attempts")).json() == []
    started = await served.http.post("/api/rollouts/r/attempts")
    assert started.status_code == 201
    body = started.json()
    assert body["token"].startswith("lr-at-")
    assert body["rollout"]["status"]["state"] == "running"
    assert body["rollout"]["status"]["last_attempt_id"] == body["attempt"]["attempt_id"] == "0"
    assert (await served.http.post("/api/rollouts/r/attempts")).status_code == 409
    end = {"outcome": "infrastructure_failed", "reason": "spawn", "usage": {"wall_seconds": 1.5}}
    ended = await served.http.patch("/api/rollouts/r/attempts/0", json=end)
    assert ended.status_code == 200
    assert (ended.json()["outcome"], ended.json()["reason"]) == ("infrastructure_failed", "spawn")
    assert (await served.http.patch("/api/rollouts/r/attempts/0", json=end)).status_code == 409
    assert (await served.http.patch("/api/rollouts/r/attempts/5", json=end)).status_code == 404
    assert (await served.http.patch("/api/rollouts/r/attempts/0", json={"outcome": "lost"})).status_code == 422
    assert (await served.http.get("/api/rollouts/r")).json()["rollout"]["status"]["state"] == "running"
    assert (await served.http.post("/api/rollouts/r/attempts")).json()["attempt"]["attempt_id"] == "1"
    listed = (await served.http.get("/api/rollouts/r/attempts")).json()
    assert [(one["attempt_id"], one["ended_at"] is None) for one in listed] == [("0", False), ("1", True)]
    await served.http.patch("/api/rollouts/r", json={"status": {"state": "succeeded"}})
    assert (await served.http.post("/api/rollouts/r/attempts")).status_code == 409
    assert (await served.http.post("/api/rollouts/nowhere/attempts")).status_code == 404


async def test_calls_are_listed_by_attempt(served: Served, model: Upstream) -> None:
    await served.add()
    await register(served, model)
    for attempt in ("0", "1"):
        await served.http.post(path(attempt_id=attempt), json={"messages": []})
    assert [call["attempt_id"] for call in await served.calls()] == ["1"]
    assert [c["attempt_id"] for c in (await served.http.get("/api/rollouts/r/calls?attempt=0")).json()] == ["0"]
    assert (await served.http.get("/api/rollouts/r/calls?attempt=9")).status_code == 404


async def test_a_long_poll_answers_as_soon_as_there_is_something(served: Served) -> None:
    polled = asyncio.ensure_future(served.http.get("/api/rollouts?state_in=running&wait=50"))
    finished = asyncio.ensure_future(served.http.get("/api/rollouts/terminal?wait=50"))
    await served.add()
    assert not polled.done()
    await served.http.post("/api/rollouts/r/attempts")
    assert [rollout["rollout_id"] for rollout in (await polled).json()] == ["r"]
    assert not finished.done()
    await served.http.patch("/api/rollouts/r", json={"status": {"state": "failed"}})
    assert [item["rollout_id"] for item in (await finished).json()["items"]] == ["r"]
    assert len((await served.http.get("/api/rollouts/terminal?wait=50")).json()["items"]) == 1


async def test_a_long_poll_without_anything_ends_empty(served: Served) -> None:
    assert (await served.http.get("/api/rollouts?wait=0.05")).json() == []
    assert (await served.http.get("/api/rollouts/terminal?wait=0.05")).json()["items"] == []


async def test_a_long_poll_ends_with_the_gateway(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        polled = asyncio.ensure_future(served.http.get("/api/rollouts?wait=500"))
        await served.seen()
        served.server.should_exit = True
        assert (await polled).json() == []


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("state_in=lost", "lost"),
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("wait=-1", "wait"),
        ("wait=nan", "wait"),
        ("states=queuing", "states"),
    ],
)
async def test_a_query_that_cannot_be_honoured_is_422_and_named(served: Served, query: str, named: str) -> None:
    refused = await served.http.get(f"/api/rollouts?{query}")
    assert refused.status_code == 422
    assert named in refused.json()["detail"]


async def test_an_unknown_event_format_is_422(served: Served) -> None:
    await served.add()
    assert (await served.http.get("/api/rollouts/r/events?format=pairs")).status_code == 422


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ('[{"input": {}, "rollout_idd": "x"}]', 422, "rollout_idd"),
        ('[{"is_train": true}]', 422, "input"),
        ('[{"input": {}, "config": {"timeout": 3}}]', 422, "timeout"),
        ('[{"input": 3}]', 422, "input"),
        ('{"input": {}}', 422, "array"),
        ('[{"input": {}, "rollout_id": "../up"}]', 422, "../up"),
        ('[{"input": {}, "rollout_id": ""}]', 422, "rollout_id"),
        ('[{"input": {}, x', 400, "byte 15"),
        ('[{"input": ', 400, "byte 11"),
        (b"\xff\xfe", 400, "byte"),
        ("", 400, "byte 0"),
    ],
)
async def test_a_body_that_cannot_be_read_is_an_error_that_says_where(
    served: Served, body: str | bytes, status: int, named: str
) -> None:
    refused = await served.http.post("/api/rollouts", content=body)
    assert refused.status_code == status
    assert named in refused.json()["detail"]
    assert await served.http.get("/api/rollouts") is not None
    assert (await served.http.get("/api/rollouts")).json() == []


async def test_a_malformed_model_request_names_the_position(served: Served, model: Upstream) -> None:
    await served.add()
    await register(served, model)
    for body, named in (
        ('{"messages": [}', "byte 14"),
        ('{"messages": ', "byte 13"),
        ("[]", "object"),
        ('{"n": 0}', "n:"),
    ):
        refused = await served.http.post(path(), content=body)
        assert refused.status_code == 400
        assert named in refused.json()["error"]["message"]
    assert model.bodies == []


async def test_a_body_beyond_the_limit_is_413(tmp_path: Path, model: Upstream) -> None:
    async with serving(tmp_path, gateway={"max_body_bytes": 2048}) as served:
        await served.add()
        await register(served, model)

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(5):
                yield b" " * 1000

        for route, key in (("/api/rollouts", "detail"), (path(), "error")):
            for content in (b" " * 2049, chunks()):
                refused = await served.http.post(route, content=content)
                assert refused.status_code == 413
                assert "gateway.max_body_bytes" in str(refused.json()[key])
        assert (await served.http.post(path(), content=b"{}" + b" " * 2046)).status_code == 200
        assert len(model.bodies) == 1


async def test_a_wrong_method_is_405(served: Served) -> None:
    refused = await served.http.put("/api/rollouts", json=[])
    assert refused.status_code == 405
    assert "detail" in refused.json()


async def test_a_failure_inside_is_500_in_the_shape_of_its_path(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(served.gateway.store, "rollout", broken)
    failed = await served.http.get("/api/rollouts/r")
    assert failed.status_code == 500
    assert "secret" not in failed.text
    assert set(failed.json()) == {"detail"}
    failed = await served.http.post(path(), json={})
    assert (failed.status_code, failed.json()["error"]["type"]) == (500, "api_error")


async def test_calls_end_with_their_rollout_and_attempt(served: Served, model: Upstream) -> None:
    token = await served.start()
    await register(served, model)
    assert (await served.http.post(path(), json={"messages": []}, headers=token)).status_code == 200
    await served.http.patch("/api/rollouts/r/attempts/0", json={"outcome": "succeeded"})
    for headers, status in ((token, 403), ({}, 409)):
        refused = await served.http.post(path(), json={"messages": []}, headers=headers)
        assert refused.status_code == status
        assert "attempt 0 of rollout r has ended" in refused.json()["error"]["message"]
    assert (await served.http.post("/v1/chat/completions", json={}, headers=token)).status_code == 403
    await served.gateway.store.change_rollout("r", StatusChange(state=None))
    await served.http.patch("/api/rollouts/r", json={"status": {"state": "succeeded"}})
    assert (await served.http.post(path(attempt_id="7"), json={"messages": []})).status_code == 409
    assert len(model.bodies) == 1
