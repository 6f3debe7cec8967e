"""Requests passed through to an OpenAI-compatible endpoint: what is sent, what comes back, what is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from starlette.responses import JSONResponse, PlainTextResponse

from longrein.gateway.engines import openai
from longrein.gateway.engines.answers import Answers, read_choices
from longrein.gateway.engines.openai import UpstreamError, complete, server_sent_events
from longrein.records import Call
from longrein.store import Store
from longrein.trajectory.prompts import messages_of, prompt_ids, tools_of

from .serving import Served, Upstream, answer, chunk, path, register, serving, upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = {"role": "user", "content": "1+1"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(tmp_path_factory.mktemp("passthrough")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model_server() -> AsyncIterator[Upstream]:
    async with upstream() as running:
        yield running


@pytest.fixture
def model(model_server: Upstream) -> Upstream:
    model_server.clear()
    return model_server


@pytest_asyncio.fixture(loop_scope="module")
async def served(server: Served, model: Upstream) -> AsyncIterator[Served]:
    await register(server, model, version=3)
    yield server
    await server.clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "_WAITS", (0.0, 0.0))


async def ask(served: Served, body: dict[str, Any] | None = None, end: str = "chat/completions") -> httpx.Response:
    return await served.http.post(path(end=end), json=body or {"messages": [USER]})


async def stream(served: Served, body: dict[str, Any] | None = None) -> list[str]:
    """The data of each event of a streamed answer."""
    sent = {"messages": [USER], "stream": True} | (body or {})
    async with served.http.stream("POST", path(), json=sent) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: ")]


async def typed_calls(served: Served, rollout_id: str = "r") -> dict[int, Call]:
    answered = await served.http.get(f"/api/rollouts/{rollout_id}/calls")
    return {call.number: call for call in msgspec.json.decode(answered.content, type=list[Call])}


def says(*events: str) -> Any:
    async def play() -> AsyncIterator[str]:
        for text in events:
            yield text

    return lambda body: play()


DONE = "data: [DONE]\n\n"


# --- Plain answers


async def test_a_plain_answer_is_recorded_with_all_that_came_back(served: Served, model: Upstream) -> None:
    await served.add()
    model.script = lambda body: answer("2", [5, 6], [7, 8])
    body = {"messages": [USER], "max_tokens": 9, "tools": [{"type": "function", "function": {"name": "f"}}]}
    got = await ask(served, body)
    assert got.json() == answer("2", [5, 6], [7, 8])
    call = (await typed_calls(served))[0]
    assert (call.status, call.http_status, call.finish_reason) == ("ok", 200, "stop")
    assert (call.model, call.engine, call.dialect, call.mode) == ("real", model.url, "chat", "train")
    assert (call.prompt_delta, call.prompt_length, call.sampled) == ([5, 6], 2, [7, 8])
    assert call.logprobs == [-0.5, -1.5]
    assert call.versions == [(3, 2)]
    assert (call.messages, call.tools) == ([USER], body["tools"])
    assert call.reply == {"role": "assistant", "content": "2"}
    assert call.sampling == {"max_tokens": 9, "temperature": 1.0, "logprobs": True}
    assert 0 < call.started_at <= call.finished_at


async def test_what_the_endpoint_does_not_say_is_not_known(served: Served, model: Upstream) -> None:
    await served.add()
    gap = answer("x", [1], [2, 3])
    gap["choices"][0]["logprobs"]["content"].pop()
    unusable = answer("x", [1], [2])
    unusable["choices"][0]["logprobs"]["content"][0]["logprob"] = None
    strange = answer("x", ids=[2])
    strange["prompt_token_ids"] = ["1", True]
    scripts = iter([answer("x"), gap, unusable, strange, {"choices": None}, {}])
    model.script = lambda body: next(scripts)
    for _ in range(6):
        assert (await ask(served)).status_code == 200
    calls = (await typed_calls(served)).values()
    assert [call.sampled for call in calls] == [[], [2, 3], [2], [2], [], []]
    assert [call.logprobs for call in calls] == [None, None, None, [-0.5], None, None]
    assert [call.prompt_length for call in calls] == [0, 1, 1, 0, 0, 0]
    assert {call.status for call in calls} == {"ok"}


async def test_each_of_n_choices_is_a_call_with_the_same_prompt(served: Served, model: Upstream) -> None:
    await served.add()
    choices = [
        answer(text, ids=ids)["choices"][0] | {"index": i} for i, (text, ids) in enumerate([("a", [7]), ("b", [8, 9])])
    ]
    model.script = lambda body: {"prompt_token_ids": [1, 2, 3], "choices": list(reversed(choices))}
    await ask(served, {"messages": [USER], "n": 2})
    calls = await typed_calls(served)
    assert [(call.sampled, call.reply["content"]) for call in calls.values()] == [([7], "a"), ([8, 9], "b")]
    assert [prompt_ids(calls, call) for call in calls.values()] == [[1, 2, 3]] * 2
    assert [len(call.prompt_delta) for call in calls.values()] == [3, 0]  # the second points to the first
    triplet = (await served.http.get("/api/rollouts/r/events")).json()
    assert [event["data"]["response_token_ids"] for event in triplet] == [[7], [8, 9]]


async def test_an_append_only_conversation_is_stored_as_deltas(served: Served, model: Upstream) -> None:
    """T turns take O(T) space, and every prompt and conversation can be put together again."""
    await served.add()
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s" * 200}, USER]
    ids = list(range(50))
    sent: list[tuple[list[dict[str, Any]], list[int]]] = []
    for turn in range(20):
        reply = answer(f"reply {turn}", ids, [1000 + turn, 2])
        reply["choices"][0]["message"] |= {"refusal": None, "reasoning_content": "hm"}
        model.script = lambda body, reply=reply: reply
        assert (await ask(served, {"messages": messages, "tools": tools})).status_code == 200
        sent.append((list(messages), list(ids)))
        # The harness leaves out what it does not know, and sends text as parts.
        echo = {"role": "assistant", "content": [{"type": "text", "text": f"reply {turn}"}]}
        messages = [*messages, echo, {"role": "user", "content": f"more {turn}"}]
        ids = [*ids, 1000 + turn, 2, 500 + turn, 501]
    calls = await typed_calls(served)
    assert [call.parent for call in calls.values()] == [None, *range(19)]
    assert [call.prefix for call in calls.values()] == [None, *range(19)]
    assert {call.fork for call in calls.values()} == {None}
    assert [len(call.prompt_delta) for call in calls.values()] == [50] + [2] * 19
    assert [len(call.messages) for call in calls.values()] == [2] + [1] * 19
    assert [call.tools for call in calls.values()] == [tools] + [None] * 19
    for (wanted_messages, wanted_ids), call in zip(sent, calls.values(), strict=True):
        assert prompt_ids(calls, call) == wanted_ids
        assert [message["role"] for message in messages_of(calls, call)] == [m["role"] for m in wanted_messages]
        assert tools_of(calls, call) == tools


async def test_forks_have_a_cause(served: Served, model: Upstream) -> None:
    await served.add()
    replies: list[dict[str, Any]] = []
    model.script = lambda body: replies.pop()

    async def turn(messages: Sequence[dict[str, Any]], prompt: list[int], ids: list[int], **more: Any) -> Call:
        replies.append(answer("x", prompt, ids))
        await ask(served, {"messages": list(messages), **more})
        return list((await typed_calls(served)).values())[-1]

    x = {"role": "assistant", "content": "x"}
    system = {"role": "system", "content": "s"}
    first = await turn([system, USER], [1, 2], [3, 4])
    assert (first.parent, first.fork, first.prefix) == (None, None, None)
    drift = await turn([system, USER, x, USER], [1, 2, 3, 9, 9], [5])
    assert (drift.parent, drift.fork, drift.prefix, drift.prefix_length) == (0, "retokenized", 0, 3)
    dropped = await turn([system, USER, x, USER], [1, 7, 7], [5])
    assert (dropped.parent, dropped.fork, dropped.prefix_length) == (0, "template", 1)
    tools = await turn([system, USER, x, USER], [8, 8], [5], tools=[{"type": "function"}])
    assert (tools.parent, tools.fork, tools.prefix) == (0, "tools", None)
    rewritten = await turn([system, USER, {"role": "assistant", "content": "y"}], [1, 2, 6], [5])
    assert (rewritten.parent, rewritten.fork) == (None, "rewrite")
    new = await turn([system, {"role": "user", "content": "other"}], [1, 9], [5])
    assert (new.parent, new.fork) == (None, "new")
    back = await turn([system, USER, x, USER, x, USER], [1, 2, 3, 9, 9, 5, 6], [5])
    assert (back.fork, back.prefix, back.prefix_length) == (None, 1, 6)


async def test_deltas_go_on_after_a_restart(tmp_path: Path, model: Upstream) -> None:
    calls: dict[int, Call] = {}
    for turn in range(2):
        async with serving(tmp_path) as served:
            await register(served, model)
            await served.add()
            model.script = lambda body, turn=turn: answer("x", [1, 2, 3, 4][: 2 + 2 * turn], [3 + 2 * turn])
            messages = [USER, {"role": "assistant", "content": "x"}, USER][: 1 + 2 * turn]
            await ask(served, {"messages": messages})
            calls = await typed_calls(served)
    assert [(call.number, call.prefix, call.prefix_length, call.parent) for call in calls.values()] == [
        (0, None, 0, None),
        (1, 0, 3, 0),
    ]


async def test_a_deleted_rollout_of_the_same_id_leaves_nothing_to_point_to(served: Served, model: Upstream) -> None:
    model.script = lambda body: answer("x", [1, 2], [3])
    for _ in range(2):
        await served.http.delete("/api/rollouts/r")
        await served.add()
        await ask(served)
        (call,) = (await typed_calls(served)).values()
        assert (call.number, call.prefix, call.prompt_delta) == (0, None, [1, 2])


# --- Errors


async def test_upstream_errors_come_back_as_they_are_and_are_recorded(served: Served, model: Upstream) -> None:
    await served.add()
    cases: list[tuple[Any, int, dict[str, Any]]] = [
        (JSONResponse({"error": {"message": "no", "code": 7}}, 422), 422, {"message": "no", "code": 7}),
        (JSONResponse({"error": "plain words"}, 500), 500, {"message": "plain words"}),
        (JSONResponse({"detail": "x"}, 404), 404, {"detail": "x"}),
        (JSONResponse({"error": {"message": "slow"}}, 429, {"retry-after": "3"}), 429, {"message": "slow"}),
    ]
    for number, (response, status, error) in enumerate(cases):
        model.script = lambda body, response=response: response
        for body in ({"messages": [USER]}, {"messages": [USER], "stream": True}):
            got = await ask(served, body)
            assert (got.status_code, got.content) == (status, response.body)
            assert got.headers.get("retry-after") == response.headers.get("retry-after")
        recorded = list((await typed_calls(served)).values())[2 * number :]
        assert [(call.status, call.http_status, call.error) for call in recorded] == [("error", status, error)] * 2
    calls = await typed_calls(served)
    assert all(call.sampled == [] and call.reply == {} for call in calls.values())


@pytest.mark.parametrize(("status", "told"), [(200, 502), (503, 503)])
async def test_an_answer_without_json_becomes_an_error_in_openais_shape(
    served: Served, model: Upstream, status: int, told: int
) -> None:
    await served.add()
    model.script = lambda body: PlainTextResponse("<html>oops", status)
    got = await ask(served)
    assert got.status_code == told
    assert "<html>oops" in got.json()["error"]["message"]
    (call,) = await served.calls()
    assert (call["status"], call["http_status"]) == ("error", told)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_endpoint_that_cannot_be_reached_is_502_and_recorded(
    served: Served, quick: None, streamed: bool
) -> None:
    await served.add()
    await served.gateway.store.clear_models()
    await served.http.post("/api/models", json=[{"model": "m", "endpoint": "http://127.0.0.1:9/v1"}])
    got = await ask(served, {"messages": [USER], "stream": streamed})
    assert got.status_code == 502
    assert "http://127.0.0.1:9/v1 cannot be reached" in got.json()["error"]["message"]
    (call,) = await served.calls()
    assert (call["status"], call["http_status"], call["messages"]) == ("error", 502, [USER])
    assert "cannot be reached" in call["error"]["message"]


async def test_an_endpoint_that_breaks_off_is_asked_again(served: Served, quick: None) -> None:
    """A server that closes the connection twice, then answers."""
    await served.add()
    asked = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(b"\r\n\r\n")
        asked += 1
        if asked == 3:
            body = json.dumps(answer("third")).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            await writer.drain()
        elif asked == 2:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
            await writer.drain()
        writer.close()

    flaky = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with flaky:
        await served.gateway.store.clear_models()
        port = flaky.sockets[0].getsockname()[1]
        await served.http.post("/api/models", json=[{"model": "m", "endpoint": f"http://127.0.0.1:{port}/v1"}])
        got = await ask(served)
    assert got.json()["choices"][0]["message"]["content"] == "third"
    assert asked == 3
    (call,) = await served.calls()
    assert call["status"] == "ok"


async def test_a_bad_endpoint_url_is_502(served: Served) -> None:
    await served.add()
    await served.gateway.store.clear_models()
    await served.http.post("/api/models", json=[{"model": "m", "endpoint": "nonsense"}])
    assert (await ask(served)).status_code == 502


# --- Streams


async def test_a_stream_is_relayed_as_it_comes_and_recorded_before_it_ends(served: Served, model: Upstream) -> None:
    await served.add()
    more, end = asyncio.Event(), asyncio.Event()

    async def play() -> AsyncIterator[str]:
        yield chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2])
        yield chunk({"content": "he"}, ids=[3])
        await more.wait()
        yield ": a comment\n\n"
        yield chunk({"content": "llo"}, ids=[4, 5], finish="stop")
        await end.wait()
        yield 'data: {"choices": [], "usage": {"total_tokens": 5}}\n\n'
        yield DONE

    model.script = lambda body: play()
    body = {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
    async with served.http.stream("POST", path(), json=body) as response:
        lines = response.aiter_lines()

        async def until(part: str) -> None:
            async for line in lines:
                if part in line:
                    return
            raise AssertionError(f"the stream ended before {part}")

        await until('"he"')
        assert (await served.http.get("/proxy/state")).json()["inflight"] == 1
        assert await served.calls() == []
        more.set()
        await until(": a comment")
        await until('"llo"')
        (call,) = await served.calls()  # the event that ends the choice has come: it is in the record
        assert (call["status"], call["sampled"]) == ("ok", [3, 4, 5])
        end.set()
        await until("usage")
        await until("[DONE]")
    assert model.bodies[0]["stream_options"] == {"include_usage": True}
    assert model.bodies[0]["return_token_ids"] is True
    (call,) = (await typed_calls(served)).values()
    assert call.reply == {"role": "assistant", "content": "hello"}
    assert (call.prompt_delta, call.logprobs, call.versions) == ([1, 2], [-0.25] * 3, [(3, 3)])
    assert call.finish_reason == "stop"
    assert call.first_token_at is not None
    assert call.started_at <= call.first_token_at <= call.finished_at
    assert (await served.http.get("/proxy/state")).json()["inflight"] == 0


async def test_done_leaves_only_after_the_commit(
    served: Served, model: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is slow; the stream has no finish reason, so [DONE] is its terminal event."""
    await served.add()
    committing, commit = asyncio.Event(), asyncio.Event()
    add_calls = served.gateway.store.add_calls

    async def slow(calls: list[Call]) -> None:
        committing.set()
        await commit.wait()
        await add_calls(calls)

    monkeypatch.setattr(served.gateway.store, "add_calls", slow)
    model.script = says(chunk({"content": "x"}, ids=[1], prompt_token_ids=[2]), DONE)
    got: list[str] = []

    async def read() -> None:
        async with served.http.stream("POST", path(), json={"messages": [], "stream": True}) as response:
            async for line in response.aiter_lines():
                got.append(line)

    reading = asyncio.ensure_future(read())
    await committing.wait()
    while not any('"x"' in line for line in got):  # noqa: ASYNC110 (the client's own reading has no event)
        await asyncio.sleep(0.005)
    assert not any("[DONE]" in line for line in got)
    commit.set()
    await reading
    assert "data: [DONE]" in got
    assert len(await served.calls()) == 1


async def test_a_plain_answer_leaves_only_after_the_commit(
    served: Served, model: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.add()
    committing, commit = asyncio.Event(), asyncio.Event()
    add_calls = served.gateway.store.add_calls

    async def slow(calls: list[Call]) -> None:
        committing.set()
        await commit.wait()
        await add_calls(calls)

    monkeypatch.setattr(served.gateway.store, "add_calls", slow)
    asked = asyncio.ensure_future(ask(served))
    await committing.wait()
    assert not asked.done()
    commit.set()
    assert (await asked).status_code == 200


async def test_streamed_tool_calls_are_put_together(served: Served, model: Upstream) -> None:
    await served.add()
    model.script = says(
        chunk({"role": "assistant", "reasoning_content": "let "}),
        chunk({"reasoning_content": "me"}),
        chunk(
            {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}]}
        ),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}),
        chunk(
            {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "g", "arguments": "{}"}}]},
            finish="tool_calls",
        ),
        DONE,
    )
    await stream(served)
    (call,) = (await typed_calls(served)).values()
    assert call.finish_reason == "tool_calls"
    assert call.reply == {
        "role": "assistant",
        "reasoning_content": "let me",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


async def test_streamed_choices_are_siblings_and_recorded_when_the_last_has_ended(
    served: Served, model: Upstream
) -> None:
    await served.add()
    model.script = says(
        chunk({"content": "a"}, index=1, ids=[8], prompt_token_ids=[1, 2]),
        chunk({"content": "b"}, index=0, ids=[7], finish="stop"),
        chunk({"content": "c"}, index=1, ids=[9], finish="length"),
        DONE,
    )
    assert (await stream(served, {"n": 2}))[-1] == "[DONE]"
    calls = await typed_calls(served)
    assert [(call.sampled, call.reply["content"], call.finish_reason) for call in calls.values()] == [
        ([7], "b", "stop"),
        ([8, 9], "ac", "length"),
    ]
    assert [prompt_ids(calls, call) for call in calls.values()] == [[1, 2]] * 2


async def test_a_streamed_completion_is_recorded(served: Served, model: Upstream) -> None:
    await served.add()
    first = {"index": 0, "text": "a", "prompt_token_ids": [1], "token_ids": [2], "logprobs": {"token_logprobs": [-1.0]}}
    last = {
        "index": 0,
        "text": "b",
        "token_ids": [3],
        "logprobs": {"token_logprobs": [-2.0]},
        "finish_reason": "length",
    }
    model.script = says(*(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in (first, last)), DONE)
    body = {"prompt": "p", "stream": True}
    assert "[DONE]" in (await ask(served, body, end="completions")).text
    (call,) = (await typed_calls(served)).values()
    assert (call.dialect, call.prompt_delta, call.sampled, call.logprobs) == ("completions", [1], [2, 3], [-1.0, -2.0])
    assert (call.messages, call.reply) == ([{"role": "prompt", "content": "p"}], {"role": "assistant", "content": "ab"})


@pytest.mark.parametrize("how", ["ends", "breaks"])
async def test_a_stream_that_ends_early_ends_with_an_error_event_and_is_recorded(
    served: Served, model: Upstream, how: str
) -> None:
    await served.add()

    async def play() -> AsyncIterator[str]:
        yield chunk({"content": "x"}, ids=[4], prompt_token_ids=[3])
        if how == "breaks":
            raise RuntimeError("the engine dies")

    model.script = lambda body: play()
    *_, error, done = await stream(served)
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "upstream_error"
    (call,) = (await typed_calls(served)).values()
    assert (call.status, call.http_status, call.sampled, call.prompt_delta) == ("error", 502, [4], [3])
    assert call.reply == {}


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_early_leaves_an_abandoned_call(
    served: Served, model: Upstream, streamed: bool
) -> None:
    await served.add()
    asked = asyncio.Event()

    async def never(body: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        await asyncio.Event().wait()
        return {}

    async def play() -> AsyncIterator[str]:
        yield chunk({"content": "x"}, ids=[4], prompt_token_ids=[3])
        await asyncio.Event().wait()

    if streamed:
        model.script = lambda body: play()
        async with served.http.stream("POST", path(), json={"messages": [USER], "stream": True}) as response:
            async for line in response.aiter_lines():
                if '"x"' in line:
                    break
    else:
        model.script = never
        leaving = asyncio.ensure_future(ask(served))
        await asked.wait()
        leaving.cancel()
    await model.gone.wait()  # the endpoint is told to stop
    (recorded,) = await served.recorded(1)
    call = (await typed_calls(served))[0]
    assert (recorded["status"], call.http_status, call.reply) == ("abandoned", 499, {})
    assert call.sampled == ([4] if streamed else [])
    assert (await served.http.get("/proxy/state")).json()["inflight"] == 0


async def test_a_gateway_that_ends_records_the_streams_it_cuts(tmp_path: Path, model: Upstream) -> None:
    async def play() -> AsyncIterator[str]:
        yield chunk({"content": "x"}, ids=[4], prompt_token_ids=[3])
        await asyncio.Event().wait()

    model.script = lambda body: play()
    async with serving(tmp_path) as served:
        served.server.config.timeout_graceful_shutdown = 0
        await served.add()
        await register(served, model)

        async def read() -> None:
            async with served.http.stream("POST", path(), json={"messages": [], "stream": True}) as response:
                async for line in response.aiter_lines():
                    if '"x"' in line:
                        served.server.should_exit = True

        with pytest.raises(httpx.RemoteProtocolError):
            await read()
    store = Store.open(f"sqlite:///{tmp_path / 'run' / 'store.sqlite'}", read_only=True)
    assert [(call.status, call.sampled) for call in store.calls("r", "0")] == [("abandoned", [4])]
    store.close()


async def test_a_client_that_leaves_while_it_is_held_leaves_nothing(served: Served, model: Upstream) -> None:
    await served.add()
    await served.http.post("/proxy/pause", json={})
    leaving = asyncio.ensure_future(ask(served))
    await served.seen()
    leaving.cancel()
    await served.http.post("/proxy/resume")
    assert (await ask(served)).status_code == 200
    assert [call["number"] for call in await served.calls()] in ([0], [0, 1])
    assert [call["status"] for call in await served.calls()][-1] == "ok"


# --- Which endpoint, and how many at once


async def test_a_rollout_keeps_its_endpoint_and_rollouts_spread(served: Served, model: Upstream) -> None:
    async with upstream() as second, upstream() as third:
        await register(served, second, third)
        servers = [model, second, third]

        async def spread() -> dict[str, int]:
            chosen: dict[str, int] = {}
            for i in range(12):
                await served.add(f"r{i}")
                for one in servers:
                    one.bodies.clear()
                for _ in range(2):
                    await served.http.post(path(f"r{i}"), json={"messages": []})
                hit = [at for at, one in enumerate(servers) if one.bodies]
                assert len(hit) == 1
                chosen[f"r{i}"] = hit[0]
            return chosen

        before = await spread()
        assert set(before.values()) == {0, 1, 2}
        await served.http.delete("/api/models")
        await register(served, second, model)
        after = await spread()
        # Rendezvous hashing: only the rollouts of the endpoint that went move.
        assert all(after[rollout] == at for rollout, at in before.items() if at != 2)
        assert 2 not in after.values()


async def test_there_is_no_limit_of_concurrent_calls(served: Served, model: Upstream) -> None:
    await served.add()
    model.expected = 120  # none is answered before so many are in
    answers = await asyncio.gather(*(ask(served) for _ in range(120)))
    assert {got.status_code for got in answers} == {200}
    assert model.most_open == 120
    calls = await served.calls()
    assert [call["number"] for call in calls] == list(range(120))


async def test_a_limit_of_concurrent_calls_is_kept(tmp_path: Path, model: Upstream) -> None:
    async with serving(tmp_path, engine={"max_concurrent": 4}) as served:
        await served.add()
        await register(served, model)
        model.expected = 4  # and so many are let in
        answers = await asyncio.gather(*(ask(served) for _ in range(16)))
        assert {got.status_code for got in answers} == {200}
        assert model.most_open == 4


# --- The run file's endpoint, and a teacher's


async def test_the_run_files_endpoint_is_text_only(
    tmp_path: Path, model: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDPOINT_KEY", "sk-endpoint")
    engine = {"kind": "openai", "url": model.url, "model": "gpt", "api_key_env": "ENDPOINT_KEY"}
    async with serving(tmp_path, engine=engine, gateway={"val_temperature": 0.3}) as served:
        token = await served.start(is_train=False)
        got = await served.anonymous.post(
            "/v1/chat/completions", json={"messages": [USER], "model": "policy"}, headers=token
        )
        assert got.status_code == 200
        assert model.bodies == [{"messages": [USER], "model": "gpt", "temperature": 0.3}]
        assert model.headers[0]["authorization"] == "Bearer sk-endpoint"
        call = (await typed_calls(served))[0]
        assert (call.engine, call.model, call.sampled, call.logprobs, call.versions) == (model.url, "gpt", [], None, [])
        assert call.reply["content"] == "ok"
        listed = (await served.http.get(path(end="models"))).json()
        assert [one["id"] for one in listed["data"]] == ["policy"]


async def test_a_teachers_rollout_goes_to_the_teacher(tmp_path: Path, model: Upstream) -> None:
    warmup = {"teacher_url": model.url + "/", "teacher_model": "big"}
    async with serving(tmp_path, warmup=warmup) as served:
        await served.add(config={"engine": "teacher"})
        await ask(served, {"messages": [USER], "temperature": 0.2})
        assert model.bodies == [{"messages": [USER], "model": "big", "temperature": 0.2}]
        assert model.paths == ["/v1/chat/completions"]
        (call,) = await served.calls()
        assert (call["engine"], call["model"]) == ("teacher", "big")


async def test_a_teachers_rollout_without_a_teacher_is_an_error_that_says_so(served: Served) -> None:
    await served.add(config={"engine": "teacher"})
    refused = await ask(served)
    assert refused.status_code == 503
    assert "warmup.teacher_url" in refused.json()["error"]["message"]


async def test_complete_asks_again_and_gives_up_with_the_endpoints_words(model: Upstream, quick: None) -> None:
    answers: list[Any] = [JSONResponse({}, 503), JSONResponse({}, 429, {"retry-after": "0"}), answer("done")]
    model.script = lambda body: answers.pop(0)
    async with httpx.AsyncClient(trust_env=False) as http:
        got = await complete(http, model.url + "/", "big", "sk", {"messages": [USER], "stream": True})
        assert got["choices"][0]["message"]["content"] == "done"
        assert model.bodies == [{"messages": [USER], "stream": False, "model": "big"}] * 3
        assert {headers["authorization"] for headers in model.headers} == {"Bearer sk"}
        for response, words, status in (
            (JSONResponse({"error": {"message": "too long"}}, 400), "too long", 400),
            (JSONResponse({"choices": []}), "without choices", 502),
            (PlainTextResponse("hello"), "without choices", 502),
        ):
            model.bodies.clear()
            answers.append(response)
            with pytest.raises(UpstreamError, match=words) as refused:
                await complete(http, model.url, "big", "", {"messages": []})
            assert refused.value.status == status
            assert len(model.bodies) == 1
        model.script = lambda body: JSONResponse({}, 500)
        with pytest.raises(UpstreamError, match="answered 500"):
            await complete(http, model.url, "big", "", {"messages": []})
        with pytest.raises(UpstreamError, match="cannot be reached"):
            await complete(http, "http://127.0.0.1:9/v1", "big", "", {"messages": []})


# --- Pieces


async def test_events_are_cut_wherever_the_bytes_are() -> None:
    whole = b"data: a\n\n: c\n\ndata: b\r\n\r\ndata: [DONE]\n\ndata: half"
    wanted = [b"data: a\n\n", b": c\n\n", b"data: b\r\n\r\n", b"data: [DONE]\n\n"]
    for size in (1, 2, 3, 7, len(whole)):

        async def bits(size: int = size) -> AsyncIterator[bytes]:
            for start in range(0, len(whole), size):
                yield whole[start : start + size]

        assert [block async for block in server_sent_events(bits())] == wanted


async def test_nothing_strange_in_an_answer_raises() -> None:
    strange: list[Any] = [
        None,
        [],
        "x",
        {"choices": "x"},
        {"choices": [None, 3]},
        {"choices": [{"index": "x", "delta": {"tool_calls": [None, {"index": None}]}, "logprobs": {"content": [1]}}]},
        {"choices": [{"token_ids": [1, -2]}], "prompt_token_ids": [2**40]},
    ]
    answers = Answers()
    for value in strange:
        answers.chunk(value)
    assert [choice.ids for choice in answers.choices] == [[]]
    assert read_choices({}) == []
