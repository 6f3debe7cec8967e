"""Who may do what: an attempt's token is good for its own attempt, and for nothing else."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from longrein.gateway.access import Access, hash_token, new_token

from .serving import KEY, Served, Upstream, path, register, serving, upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("access")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(server: Served) -> AsyncIterator[Upstream]:
    async with upstream() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def served(server: Served, model: Upstream) -> AsyncIterator[Served]:
    model.clear()
    await register(server, model)
    yield server
    await server.clear()


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_a_token_may_ask_the_model_as_its_attempt(served: Served, header: str) -> None:
    bearer = (await served.start())["authorization"]
    headers = {header: bearer if header == "authorization" else bearer.removeprefix("Bearer ")}
    for route in (path(), path(end="completions"), "/v1/chat/completions", "/v1/completions"):
        assert (await served.anonymous.post(route, json={"messages": []}, headers=headers)).status_code == 200, route
    for route in (path(end="models"), "/v1/models"):
        assert (await served.anonymous.get(route, headers=headers)).status_code == 200
    calls = await served.calls()
    assert [(call["rollout_id"], call["attempt_id"], call["mode"], call["number"]) for call in calls] == [
        ("r", "0", "train", number) for number in range(4)
    ]


@pytest.mark.parametrize(("is_train", "mode", "temperature"), [(True, "train", 1.0), (False, "val", 0.7)])
async def test_plain_v1_uses_the_rollouts_own_mode(
    served: Served, model: Upstream, is_train: bool, mode: str, temperature: float
) -> None:
    token = await served.start(is_train=is_train)
    body = {"messages": [], "temperature": 0.0, "mode": "val", "is_train": False}
    assert (await served.anonymous.post("/v1/chat/completions", json=body, headers=token)).status_code == 200
    assert (await served.calls())[0]["mode"] == mode
    assert model.bodies[0]["temperature"] == temperature
    other = "val" if is_train else "train"
    refused = await served.anonymous.post(path(mode=other), json={"messages": []}, headers=token)
    assert refused.status_code == 403
    assert f"runs in mode {mode}" in refused.json()["error"]["message"]


async def test_a_token_is_good_for_no_other_rollout_or_attempt(served: Served, model: Upstream) -> None:
    token = await served.start()
    other = await served.start("other")
    for route in (path("other"), path(attempt_id="1"), path("nowhere"), path("other", end="models")):
        method = "GET" if route.endswith("models") else "POST"
        refused = await served.anonymous.request(method, route, json={"messages": []}, headers=token)
        assert refused.status_code == 403, route
        assert refused.json()["error"]["type"] == "permission_error"
    for rollout, attempt in (("other", "0"), ("r", "1"), ("nowhere", "0")):
        event = {"event_type": "note", "data": {}}
        route = f"/api/rollouts/{rollout}/attempt/{attempt}/events"
        assert (await served.anonymous.post(route, json=event, headers=token)).status_code == 403
    assert model.bodies == []
    assert (await served.http.get("/api/rollouts/r/attempts")).json()[0]["attempt_id"] == "0"
    assert (await served.anonymous.post(path("other"), json={"messages": []}, headers=other)).status_code == 200


@pytest.mark.parametrize(
    ("method", "route", "body"),
    [
        ("POST", "/api/rollouts", [{"input": {}}]),
        ("GET", "/api/rollouts", None),
        ("GET", "/api/rollouts/r", None),
        ("PATCH", "/api/rollouts/r", {"status": {"state": "succeeded"}}),
        ("DELETE", "/api/rollouts/r", None),
        ("GET", "/api/rollouts/terminal", None),
        ("GET", "/api/rollouts/r/events", None),
        ("GET", "/api/rollouts/r/calls", None),
        ("GET", "/api/rollouts/r/attempts", None),
        ("POST", "/api/rollouts/r/attempts", None),
        ("PATCH", "/api/rollouts/r/attempts/0", {"outcome": "succeeded"}),
        ("GET", "/api/models", None),
        ("POST", "/api/models", [{"model": "m", "endpoint": "http://evil/v1"}]),
        ("DELETE", "/api/models", None),
        ("POST", "/proxy/pause", {}),
        ("POST", "/proxy/resume", None),
        ("GET", "/proxy/state", None),
    ],
)
async def test_a_token_holds_no_reins(served: Served, method: str, route: str, body: Any) -> None:
    token = await served.start()
    before = (await served.http.get("/api/rollouts/r")).json(), (await served.http.get("/api/models")).json()
    refused = await served.anonymous.request(method, route, json=body, headers=token)
    assert refused.status_code == 403
    assert "run key" in refused.json()["detail"]
    after = (await served.http.get("/api/rollouts/r")).json(), (await served.http.get("/api/models")).json()
    assert after == before


async def test_a_token_posts_its_own_events_until_its_attempt_ends_but_no_rewards_or_calls(served: Served) -> None:
    token = await served.start()
    route = "/api/rollouts/r/attempt/0/events"

    async def post(kind: str, headers: dict[str, str]) -> int:
        body = {"event_type": kind, "data": {"value": 1.0}}
        return (await served.anonymous.post(route, json=body, headers=headers)).status_code

    assert await post("note", token) == 200
    assert await post("reward", token) == 403  # reward.from = function: the grader says it
    assert await post("model_request", token) == 403
    await served.http.patch("/api/rollouts/r/attempts/0", json={"outcome": "succeeded"})
    assert await post("note", token) == 409
    assert await post("reward", {"x-api-key": KEY}) == 200
    events = (await served.http.get("/api/rollouts/r/events")).json()
    assert [event["event_type"] for event in events] == ["note", "reward"]


async def test_agents_may_post_rewards_where_the_run_file_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, reward={"from": "agent"}) as served:
        token = await served.start()
        body = {"event_type": "reward", "data": {"value": 0.5}}
        route = "/api/rollouts/r/attempt/0/events"
        assert (await served.anonymous.post(route, json=body, headers=token)).status_code == 200
        await served.http.patch("/api/rollouts/r/attempts/0", json={"outcome": "succeeded"})
        assert (await served.anonymous.post(route, json=body, headers=token)).status_code == 409
        assert len((await served.http.get("/api/rollouts/r/events")).json()) == 1


async def test_a_new_attempt_has_a_new_token(served: Served) -> None:
    first = await served.start()
    await served.http.patch("/api/rollouts/r/attempts/0", json={"outcome": "infrastructure_failed"})
    second = {"authorization": f"Bearer {(await served.http.post('/api/rollouts/r/attempts')).json()['token']}"}
    assert first != second
    assert (await served.anonymous.post(path(), json={}, headers=first)).status_code == 409
    assert (await served.anonymous.post(path(attempt_id="1"), json={}, headers=first)).status_code == 403
    assert (await served.anonymous.post(path(attempt_id="1"), json={}, headers=second)).status_code == 200


async def test_a_token_of_a_deleted_rollout_is_unknown(served: Served) -> None:
    token = await served.start()
    await served.http.delete("/api/rollouts/r")
    assert (await served.anonymous.post("/v1/chat/completions", json={}, headers=token)).status_code == 401


async def test_the_run_key_at_plain_v1_is_refused_with_an_explanation(served: Served) -> None:
    for route in ("/v1/chat/completions", "/v1/completions"):
        refused = await served.http.post(route, json={})
        assert refused.status_code == 403
        assert "/proxy/rollout/" in refused.json()["error"]["message"]
    assert (await served.http.get("/v1/models")).status_code == 403


async def test_the_run_key_calls_for_any_attempt_and_mode(served: Served) -> None:
    await served.add()
    for mode in ("train", "val"):
        assert (await served.http.post(path(mode=mode, attempt_id="own"), json={})).status_code == 200
    attempts = (await served.http.get("/api/rollouts/r/attempts")).json()
    assert [attempt["attempt_id"] for attempt in attempts] == ["own"]
    assert (await served.http.get("/api/rollouts/r")).json()["rollout"]["status"]["state"] == "queuing"
    assert (await served.http.post(path(attempt_id="..%2Fup"), json={})).status_code in (404, 422)
    assert (await served.http.post(path(attempt_id="-x"), json={})).status_code == 422


async def test_the_store_holds_no_token(served: Served) -> None:
    token = (await served.start())["authorization"].removeprefix("Bearer ")
    file = served.gateway.store.engine.url.database
    assert file is not None
    connection = sqlite3.connect(file)
    dump = "\n".join(connection.iterdump())
    connection.close()
    assert token not in dump
    assert hash_token(token).hex().upper() in dump.upper()


async def test_keys_are_compared_in_constant_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr("longrein.gateway.access.hmac.compare_digest", compare)
    access = Access(KEY, served.gateway.store, "function")
    assert access.caller({"authorization": f"Bearer {KEY}"}).attempt is None
    assert access.caller({"authorization": "Bearer wrong", "x-api-key": KEY}).attempt is None
    assert compared == [(32, 32)] * 3  # digests: of one length, whatever was sent


async def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(token.startswith("lr-at-") and len(token) >= 6 + 43 for token in tokens)
