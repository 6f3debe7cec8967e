"""What an attempt may use: calls, sampled tokens, calls at once; in memory, over HTTP, and over a restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein import config
from longrein.config import Config
from longrein.gateway.budget import Budget, Grant, Spending
from longrein.gateway.dialects import DialectError

from .models import make_model_folder
from .running import SCRIPT
from .serving import Served, configured, path, register, serving, upstream

CHAT = "/v1/chat/completions"


def say(what: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A chat request that the script answers with `what`."""
    return {"messages": [{"role": "user", "content": json.dumps(what)}], **more}


@asynccontextmanager
async def playing(folder: Path, agent: dict[str, Any], **sections: Any) -> AsyncIterator[Served]:
    """A gateway that plays what is asked, with these limits of its attempts."""
    name = f"budget_{folder.name}".replace("-", "_")
    (folder / f"{name}.py").write_text(SCRIPT)
    model = make_model_folder(folder / "model")
    sections = {
        "run": {"dir": str(folder), "folder": str(folder)},
        "model": {"name": "policy", "path": str(model)},
        "engine": {"kind": "scripted", "script": f"{name}:script"},
        "agent": agent,
    } | sections
    async with serving(folder, **sections) as served:
        yield served


async def settled(served: Served, running: int = 0) -> None:
    """Return once so many calls are in flight."""
    spent = served.gateway.budgets._spending
    while sum(one.running for one in spent.values()) != running:  # noqa: ASYNC110 (nothing tells of it)
        await asyncio.sleep(0.005)


def refused(answer: httpx.Response, status: int = 403) -> bool:
    if answer.status_code != status:
        return False
    assert answer.json()["error"]["type"] == ("permission_error" if status == 403 else "rate_limit_error")
    return True


# --- The arithmetic


@given(
    calls=st.integers(0, 30),
    tokens=st.integers(0, 200),
    at_once=st.integers(0, 8),
    asked=st.lists(
        st.tuples(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(0, 100), st.integers(0, 3))
    ),
)
def test_no_order_of_requests_uses_more_than_the_budget(
    calls: int, tokens: int, at_once: int, asked: list[tuple[list[int], int, int]]
) -> None:
    """Each request samples some share of what it was granted, and ends after some later ones have begun."""
    agent = config.Agent(max_calls=calls, max_tokens=tokens, max_concurrent_calls=at_once)
    spending = Spending(0, 0)
    budget, open_grants = Budget(spending, agent, bound=True), list[tuple[Grant, int]]()
    granted = used = 0
    for wanted, share, ending in asked:
        refusal, grant = None, None
        try:
            grant = budget.take(wanted)
        except DialectError as error:
            refusal = error.status
        assert refusal in (None, 403, 429)
        if refusal == 403:  # for good: nothing in flight could change it
            assert (
                (calls and granted + len(wanted) > calls)
                or (at_once and len(wanted) > at_once)
                or (tokens and spending.tokens + len(wanted) > tokens)
            )
        if grant is not None:
            assert len(grant.max_tokens) == len(wanted)
            assert all(1 <= most <= one for most, one in zip(grant.max_tokens, wanted, strict=True))
            granted += len(wanted)
            open_grants.append((grant, sum(grant.max_tokens) * share // 100))
        assert not calls or granted <= calls
        assert not at_once or sum(len(grant.max_tokens) for grant, _ in open_grants) <= at_once
        assert not tokens or used + sum(sum(grant.max_tokens) for grant, _ in open_grants) <= tokens
        for _ in range(min(ending, len(open_grants))):
            grant, sampled = open_grants.pop(0)
            grant.end(sampled)
            grant.end(10**6)  # only the first end counts
            used += sampled
    for grant, sampled in open_grants:
        grant.end(sampled)
        used += sampled
    assert (spending.calls, spending.tokens, spending.running, spending.reserved) == (granted, used, 0, 0)


def test_the_run_key_is_counted_and_never_refused() -> None:
    spending = Spending(5, 50)
    agent = config.Agent(max_calls=5, max_tokens=50, max_concurrent_calls=1)
    key, token = Budget(spending, agent, bound=False), Budget(spending, agent, bound=True)
    grant = key.take([100, 100])
    assert list(grant.max_tokens) == [100, 100]
    assert (spending.calls, spending.running) == (7, 2)
    with pytest.raises(DialectError, match=r"used 7 of agent\.max_calls = 5 calls"):
        token.take([1])


# --- Over HTTP


async def test_calls_are_refused_once_they_are_used_up_and_after_a_restart_too(tmp_path: Path) -> None:
    async with playing(tmp_path, {"max_calls": 3}) as served:
        token = await served.start()
        assert (await served.anonymous.post(CHAT, json=say({"say": "a"}, n=2), headers=token)).status_code == 200
        assert (await served.anonymous.post(CHAT, json={"messages": []}, headers=token)).status_code == 400
        over = await served.anonymous.post(CHAT, json=say({"say": "b"}, n=2), headers=token)
        assert refused(over)
        assert "used 2 of agent.max_calls = 3 calls" in over.json()["error"]["message"]
        # An answer that failed is a call as well.
        failed = await served.anonymous.post(CHAT, json=say({"raise": "no"}), headers=token)
        assert failed.status_code == 502
        assert refused(await served.anonymous.post(CHAT, json=say({"say": "c"}), headers=token))
        anthropic = await served.anonymous.post(
            "/v1/messages", json={"max_tokens": 5, "messages": [{"role": "user", "content": "d"}]}, headers=token
        )
        assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (403, "permission_error")
        # Another attempt has a budget of its own, and so has none the run key.
        assert (await served.http.post(path(), json=say({"say": "e"}))).status_code == 200
        other = await served.start("other")
        assert (await served.anonymous.post(CHAT, json=say({"say": "f"}), headers=other)).status_code == 200
        assert len(await served.calls()) == 4
    async with playing(tmp_path, {"max_calls": 3}) as served:
        assert refused(await served.anonymous.post(CHAT, json=say({"say": "g"}), headers=token))
        assert (await served.anonymous.post(CHAT, json=say({"say": "h"}), headers=other)).status_code == 200
        assert [len(await served.calls(rollout)) for rollout in ("r", "other")] == [4, 2]


async def test_tokens_end_a_reply_as_its_length_and_are_refused_at_zero(tmp_path: Path) -> None:
    long = "word " * 50
    async with playing(tmp_path, {"max_tokens": 20}) as served:
        token = await served.start()
        first = await served.anonymous.post(CHAT, json=say({"say": long}, max_tokens=8), headers=token)
        assert first.json()["usage"]["completion_tokens"] == 8
        second = (await served.anonymous.post(CHAT, json=say({"say": long}, stream=False), headers=token)).json()
        assert (second["usage"]["completion_tokens"], second["choices"][0]["finish_reason"]) == (12, "length")
        over = await served.anonymous.post(CHAT, json=say({"say": long}), headers=token)
        assert refused(over)
        assert "20 of agent.max_tokens = 20 sampled tokens" in over.json()["error"]["message"]
        assert [call["sampling"]["max_tokens"] for call in await served.calls()] == [8, 12]
        # The prompts of these calls alone are longer than the budget: they do not count.
        assert sum(call["prompt_length"] for call in await served.calls()) > 20
    async with playing(tmp_path, {"max_tokens": 25}) as served:
        again = (await served.anonymous.post(CHAT, json=say({"say": long}, n=2), headers=token)).json()
        assert again["usage"]["completion_tokens"] == 4  # five are left, two for each
        last = await served.anonymous.post(CHAT, json=say({"say": long}), headers=token)
        assert last.json()["usage"]["completion_tokens"] == 1
        assert refused(await served.anonymous.post(CHAT, json=say({"say": long}), headers=token))


async def test_calls_in_flight_hold_what_they_may_use(tmp_path: Path) -> None:
    go = tmp_path / "go"
    waiting = say({"wait": str(go), "say": "done"}, max_tokens=100)
    async with playing(tmp_path, {"max_tokens": 150}) as served:
        token = await served.start()
        first = asyncio.ensure_future(served.anonymous.post(CHAT, json=waiting, headers=token))
        await settled(served, 1)
        second = asyncio.ensure_future(served.anonymous.post(CHAT, json=waiting, headers=token))
        await settled(served, 2)
        third = await served.anonymous.post(CHAT, json=waiting, headers=token)
        assert refused(third, 429)  # not for good: those in flight may leave some
        assert third.headers["retry-after"] == "1"
        go.touch()
        assert [(await one).status_code for one in (first, second)] == [200, 200]
        assert [call["sampling"]["max_tokens"] for call in await served.calls()] == [100, 50]
        await settled(served)
        assert (await served.anonymous.post(CHAT, json=waiting, headers=token)).status_code == 200


async def test_calls_at_once_are_bounded_streams_and_those_whose_client_left_too(tmp_path: Path) -> None:
    go = tmp_path / "go"
    waiting = say({"wait": str(go), "say": "done"})
    async with playing(tmp_path, {"max_concurrent_calls": 2}) as served:
        token = await served.start()
        assert refused(await served.anonymous.post(CHAT, json=waiting | {"n": 3}, headers=token))
        first = asyncio.ensure_future(served.anonymous.post(CHAT, json=waiting, headers=token))
        await settled(served, 1)
        async with served.anonymous.stream("POST", CHAT, json=waiting | {"stream": True}, headers=token):
            await settled(served, 2)
            assert refused(await served.anonymous.post(CHAT, json=waiting, headers=token), 429)
        # Its client has gone, and it is still sampled for a retry: two are in flight.
        while (count := sum(one.in_hand for one in served.gateway.budgets._spending.values())) != 1:
            assert count == 2
            await asyncio.sleep(0.005)
        assert refused(await served.anonymous.post(CHAT, json=waiting | {"user": "x"}, headers=token), 429)
        go.touch()
        assert (await first).status_code == 200
        await settled(served)
        assert (await served.anonymous.post(CHAT, json=waiting, headers=token)).status_code == 200


async def test_connections_of_an_attempt_are_bounded_before_their_bodies_are_read(tmp_path: Path) -> None:
    async with playing(tmp_path, {"max_concurrent_calls": 2}) as served:
        token, other = await served.start(), await served.start("other")
        host, port = served.url.removeprefix("http://").split(":")
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: {token['authorization']}\r\ncontent-length: 99\r\n\r\n"
        )
        for _, writer in slow:
            writer.write(head.encode())
        while sum(one.in_hand for one in served.gateway.budgets._spending.values()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert refused(await served.anonymous.post(CHAT, json=say({"say": "a"}), headers=token), 429)
        assert (await served.anonymous.post(CHAT, json=say({"say": "a"}), headers=other)).status_code == 200
        for _, writer in slow:
            writer.close()
        while any(one.in_hand for one in served.gateway.budgets._spending.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert (await served.anonymous.post(CHAT, json=say({"say": "a"}), headers=token)).status_code == 200


async def test_a_retry_that_takes_a_call_over_is_no_further_call(tmp_path: Path) -> None:
    go = tmp_path / "go"
    waiting = say({"wait": str(go), "say": "done"})
    async with playing(tmp_path, {"max_calls": 1}) as served:
        token = await served.start()
        first = asyncio.ensure_future(served.anonymous.post(CHAT, json=waiting, headers=token))
        await settled(served, 1)
        again = asyncio.ensure_future(
            served.anonymous.post(CHAT, json=waiting, headers={**token, "x-stainless-retry-count": "1"})
        )
        (attempt,) = served.gateway.calls.attempts.values()  # type: ignore[attr-defined]
        while attempt.jobs[0].delivery.listeners < 2:  # noqa: ASYNC110 (over HTTP there is no event)
            await asyncio.sleep(0.005)
        go.touch()
        assert [(await one).status_code for one in (first, again)] == [200, 200]
        assert len(await served.calls()) == 1


async def test_calls_that_are_passed_on_have_a_budget_too(tmp_path: Path) -> None:
    async with upstream() as model, serving(tmp_path, agent={"max_calls": 3, "max_concurrent_calls": 2}) as served:
        await register(served, model)
        token = await served.start()
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await served.anonymous.post(CHAT, json=body | {"n": 2}, headers=token)).status_code == 200
        many = {"prompt": ["a", "b", "c"]}
        assert refused(await served.anonymous.post("/v1/completions", json=many, headers=token))
        assert len(model.bodies) == 1
        assert (await served.anonymous.post(CHAT, json=body, headers=token)).status_code == 200
        assert refused(await served.anonymous.post(CHAT, json=body, headers=token))


def test_tokens_are_not_promised_where_they_are_not_counted(tmp_path: Path) -> None:
    for sections in ({}, {"engine": {"kind": "openai", "url": "http://a/v1"}, "model": {"path": "m"}}):
        with pytest.raises(ValueError, match=r"agent\.max_tokens: tokens are counted where"):
            configured(tmp_path, agent={"max_tokens": 5}, **sections)
    assert Config().agent.max_calls == 2000
