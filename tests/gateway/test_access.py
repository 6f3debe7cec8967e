"""Who may do what: an attempt's token is good for its own attempt, and for nothing else."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.routing import Route

from longrein import cli
from longrein.config import Config
from longrein.gateway.access import LARGEST_REWARD, MOST_REWARDS, Access, hash_token, new_token
from longrein.gateway.app import create_app
from longrein.gateway.loading import load_text_model
from longrein.gateway.operations import OPERATIONS, Who, operation, table
from longrein.gateway.tokens import TemplateError

from .models import TEMPLATES, make_model_folder
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


# --- Every route, every credential


def routes_of(served: Served) -> set[tuple[str, str]]:
    app = create_app(served.gateway)
    return {(method, route.path) for route in app.routes if isinstance(route, Route) for method in route.methods or ()}


async def test_somebody_has_decided_on_every_route(served: Served) -> None:
    routes = routes_of(served)
    for method, route in routes:
        operation(method, route)  # raises for one that has no entry
    assert set(OPERATIONS) - routes == set()


async def test_a_route_without_a_decision_is_found() -> None:
    with pytest.raises(LookupError, match="who may ask for it"):
        operation("POST", "/api/reins")


#: Bodies with which an operation does what it says, so that a refusal is the credential's doing.
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/api/rollouts"): [{"input": {}}],
    ("PATCH", "/api/rollouts/{rollout_id}"): {"status": {"state": "succeeded"}},
    ("PATCH", "/api/rollouts/{rollout_id}/attempts/{attempt_id}"): {"outcome": "succeeded"},
    ("POST", "/api/models"): [{"model": "m", "endpoint": "http://127.0.0.1:9/v1"}],
    ("POST", "/api/store/prune"): {"through_step": 0},
    ("POST", "/proxy/pause"): {},
    ("POST", "/api/rollouts/{rollout_id}/attempt/{attempt_id}/events"): {"event_type": "reward", "data": {"value": 1}},
}
ALLOWED: dict[Who, set[str]] = {
    Who.anyone: {"none", "wrong", "run key", "own token", "another's token", "ended token"},
    Who.run_key: {"run key"},
    Who.attempt: {"run key", "own token"},
    Who.token: {"own token", "another's token"},  # each as its own attempt
    Who.reward: {"run key"},
}


CREDENTIALS = ("none", "wrong", "ended token", "another's token", "own token", "run key")


@pytest.mark.parametrize(("method", "route"), list(OPERATIONS))
async def test_each_credential_may_do_what_the_table_says(
    served: Served, model: Upstream, method: str, route: str
) -> None:
    """At rollout r's attempt 0, which runs; the ended token is that of its own, ended attempt."""
    allowed = ALLOWED[operation(method, route).who]
    body = BODIES.get((method, route), {"messages": []} if method == "POST" else None)

    async def ask(credential: str, headers: dict[str, dict[str, str]]) -> httpx.Response:
        rollout = "done" if credential == "ended token" else "r"
        filled = route.format(rollout_id=rollout, attempt_id="0", mode="train")
        return await served.anonymous.request(method, filled, json=body, headers=headers[credential])

    headers = await credentials(served)
    before = await state_of(served)
    for credential in (one for one in CREDENTIALS if one not in allowed):
        refused = await ask(credential, headers)
        assert refused.status_code == (401 if credential in ("none", "wrong") else 403), (credential, refused.text)
        shown = "error" if route.startswith(("/v1", "/proxy/rollout")) else "detail"
        assert set(refused.json()) == ({"type", "error"} if "/v1/messages" in route else {shown})
    assert await state_of(served) == before
    assert model.bodies == []
    for credential in (one for one in CREDENTIALS if one in allowed):
        got = await ask(credential, headers)
        assert got.status_code not in (401, 403), (credential, got.text)
        await served.clear()
        await register(served, model)
        headers = await credentials(served)


async def credentials(served: Served) -> dict[str, dict[str, str]]:
    """Rollouts r, other and done, each with its attempt 0, of which the last has ended; headers by credential."""
    own, another, ended = [await served.start(name) for name in ("r", "other", "done")]
    await served.http.patch("/api/rollouts/done/attempts/0", json={"outcome": "succeeded"})
    await served.http.patch("/api/rollouts/done", json={"status": {"state": "succeeded"}})
    given = ({}, {"authorization": "Bearer wrong"}, ended, another, own, {"authorization": f"Bearer {KEY}"})
    return dict(zip(CREDENTIALS, given, strict=True))


async def state_of(served: Served) -> Any:
    """All that the record holds, and the gate."""
    store = served.gateway.store
    rollouts = store.rollouts()
    ids = [one.rollout_id for one in rollouts]
    attempts = [store.attempts(id) for id in ids]
    calls = [store.calls(id, one.attempt_id) for id, some in zip(ids, attempts, strict=True) for one in some]
    events = [store.events(id, one.attempt_id) for id, some in zip(ids, attempts, strict=True) for one in some]
    return rollouts, attempts, calls, events, store.models(), served.gateway.gate.state()


async def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    assert table() in page, "python -m longrein.gateway.operations prints the table of docs/security.md"


async def test_the_teachers_name_is_refused_but_in_its_own_rollouts(tmp_path: Path, model: Upstream) -> None:
    warmup = {"teacher_url": model.url, "teacher_model": "expert"}
    async with serving(tmp_path, engine={"kind": "openai", "url": model.url}, warmup=warmup) as served:
        student = await served.start()
        teaching = await served.start("t", config={"engine": "teacher"})
        for name in ("expert", "teacher"):
            refused = await served.anonymous.post("/v1/chat/completions", json=asks(name), headers=student)
            assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert model.bodies == []
        for name in ("policy", "gpt-5", ""):  # harnesses have names of their own: they mean the policy
            got = await served.anonymous.post("/v1/chat/completions", json=asks(name), headers=student)
            assert (got.status_code, model.bodies[-1]["model"]) == (200, "policy")
        got = await served.anonymous.post("/v1/chat/completions", json=asks("expert"), headers=teaching)
        assert (got.status_code, model.bodies[-1]["model"]) == (200, "expert")
        assert [call["engine"] for call in await served.calls()] == [model.url] * 3


def asks(name: str) -> dict[str, Any]:
    return {"model": name, "messages": [{"role": "user", "content": "hi"}]}


# --- Events


async def test_a_token_posts_no_event_where_a_function_grades(served: Served) -> None:
    token = await served.start()
    for kind in ("reward", "note", "model_request"):
        body = {"event_type": kind, "data": {"value": 1.0}}
        assert (await served.anonymous.post(EVENTS, json=body, headers=token)).status_code == 403
    await served.http.patch("/api/rollouts/r/attempts/0", json={"outcome": "succeeded"})
    # Agent Lightning's graders post their reward once the agent has ended.
    assert (await served.http.post(EVENTS, json={"event_type": "reward", "data": {"value": 1}})).status_code == 200
    assert [event["event_type"] for event in (await served.http.get("/api/rollouts/r/events")).json()] == ["reward"]


EVENTS = "/api/rollouts/r/attempt/0/events"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trusting(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("trusting"), reward={"from": "agent"}) as running:
        yield running


async def test_agents_may_post_their_reward_where_the_run_file_says_so(trusting: Served) -> None:
    token = await trusting.start()
    await trusting.start("other")

    async def post(kind: str = "reward", route: str = EVENTS, value: Any = 0.5) -> int:
        body = {"event_type": kind, "data": {"value": value}}
        return (await trusting.anonymous.post(route, json=body, headers=token)).status_code

    assert await post() == 200
    for kind in ("note", "model_request", "Reward", ""):
        assert await post(kind) == 403
    for rollout, attempt in (("other", "0"), ("r", "1"), ("nowhere", "0")):
        assert await post(route=f"/api/rollouts/{rollout}/attempt/{attempt}/events") == 403
    assert await post(value="1" * LARGEST_REWARD) == 413
    await trusting.http.patch("/api/rollouts/r/attempts/0", json={"outcome": "succeeded"})
    assert await post() == 403
    assert len((await trusting.http.get("/api/rollouts/r/events")).json()) == 1
    await trusting.clear()


async def test_rewards_of_a_token_are_no_disk_to_fill(trusting: Served) -> None:
    token = await trusting.start()
    body = {"event_type": "reward", "data": {"value": 0.5}}
    got = [
        (await trusting.anonymous.post(EVENTS, json=body, headers=token)).status_code for _ in range(MOST_REWARDS + 1)
    ]
    assert got == [200] * MOST_REWARDS + [403]
    assert (await trusting.http.post(EVENTS, json=body)).status_code == 200
    await trusting.clear()


@pytest.mark.parametrize("what", ["call", "reward"])
async def test_a_body_that_ends_after_its_attempt_comes_too_late(
    served: Served, trusting: Served, model: Upstream, what: str
) -> None:
    """Authorised while the attempt ran, read when it had ended."""
    at = served if what == "call" else trusting
    token = (await at.start())["authorization"]
    body = json.dumps({"messages": []} if what == "call" else {"event_type": "reward", "data": {"value": 1}}).encode()
    route = path() if what == "call" else EVENTS
    host, port = at.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {route} HTTP/1.1\r\nhost: x\r\nauthorization: {token}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[:5])
    await at.seen()
    await at.http.patch("/api/rollouts/r/attempts/0", json={"outcome": "succeeded"})
    writer.write(body[5:])
    assert b" 403 " in await reader.readline()
    writer.close()
    assert model.bodies == []
    assert (await at.http.get("/api/rollouts/r/events")).json() == []
    await at.clear()


async def test_a_new_attempt_has_a_new_token(served: Served) -> None:
    first = await served.start()
    await served.http.patch("/api/rollouts/r/attempts/0", json={"outcome": "infrastructure_failed"})
    second = {"authorization": f"Bearer {(await served.http.post('/api/rollouts/r/attempts')).json()['token']}"}
    assert first != second
    assert (await served.anonymous.post(path(), json={}, headers=first)).status_code == 403
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
    access = Access(KEY, served.gateway.store, served.gateway.config)
    assert access.caller({"authorization": f"Bearer {KEY}"}).attempt is None
    assert access.caller({"authorization": "Bearer wrong", "x-api-key": KEY}).attempt is None
    assert compared == [(32, 32)] * 3  # digests: of one length, whatever was sent


async def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(token.startswith("lr-at-") and len(token) >= 6 + 43 for token in tokens)


# --- Where it listens, and what is evaluated


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", ""])
async def test_the_command_listens_on_loopback_only_unless_it_is_given_a_key(
    tmp_path: Path, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--set", f"run.dir={tmp_path}", "--set", f"gateway.host={json.dumps(host)}"]
    assert await asyncio.to_thread(cli.main, ["gateway", *options]) == 2
    assert "can be reached from other machines; set gateway.key or gateway.key_file" in capsys.readouterr().err
    assert Config().gateway.host == "127.0.0.1"


HOSTILE = "{{ 7 * 7 }}{% for x in range(9) %}{{ x }}{% endfor %}{{ ''.__class__.__mro__ }}"


async def test_nothing_that_a_client_sends_is_evaluated(tmp_path: Path) -> None:
    model = load_text_model(
        str(make_model_folder(tmp_path)),
        name="m",
        chat_template="",
        context=0,
        control_text="text",
        system_messages="auto",
    )
    tool = {"type": "function", "function": {"name": HOSTILE, "description": HOSTILE, "parameters": {HOSTILE: HOSTILE}}}
    call = {"id": HOSTILE, "type": "function", "function": {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}}
    conversation = [
        {"role": "system", "content": HOSTILE},
        {"role": "user", "content": HOSTILE},
        {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE, "tool_calls": [call]},
        {"role": "tool", "content": HOSTILE, "tool_call_id": HOSTILE},
    ]
    text = model.render(conversation, [tool]).text
    assert text.count(HOSTILE) == 12
    assert "49" not in text


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ strftime_now.__globals__.keys() }}",
        "{% for a in range(999999999) %}{% endfor %}",
        "{{ lipsum.__globals__.os.system('true') }}",
    ],
)
async def test_a_chat_template_holds_no_reins_either(tmp_path: Path, template: str) -> None:
    """It comes with a model from somewhere: it is rendered in Jinja's immutable sandbox."""
    folder = make_model_folder(tmp_path)
    whole = TEMPLATES["hermes"].strip("\n") + "{% if messages[0].content == 'now' %}" + template + "{% endif %}"
    (folder / "chat_template.jinja").write_text(whole)
    model = load_text_model(
        str(folder), name="m", chat_template="", context=0, control_text="text", system_messages="auto"
    )
    with pytest.raises(TemplateError):
        model.render([{"role": "user", "content": "now"}], None)
