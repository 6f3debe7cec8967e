"""Too large, too deep, too slow, too much: an error for its sender, and nobody else waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from longrein.gateway import bounds, grammars
from longrein.gateway.bounds import MOST_DEPTH, BadJson, read_json
from longrein.gateway.calls import TokenCalls
from longrein.gateway.loading import load_text_model
from longrein.gateway.tokens import ids_of, tokens_beyond

from .models import make_model_folder
from .running import SCRIPT
from .serving import Served, path, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("bounds")
    (folder / "bounded_script.py").write_text(SCRIPT)
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder), "folder": str(folder)},
        "model": {"name": "policy", "path": str(make_model_folder(folder / "model", context=1_000_000))},
        "engine": {"kind": "scripted", "script": "bounded_script:script"},
    }
    async with serving(folder, **sections) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def served(server: Served) -> AsyncIterator[Served]:
    yield server
    await server.clear()


# --- JSON

DEEP = [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"[" * 101 + b"]" * 101]


@pytest.mark.parametrize("deep", DEEP)
@pytest.mark.parametrize(
    ("route", "field"),
    [
        (CHAT, "messages"),
        ("/v1/completions", "prompt"),
        ("/v1/responses", "input"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "tools"),
        ("/proxy/pause", "reason"),
    ],
)
async def test_depth_is_bounded(served: Served, route: str, field: str, deep: bytes) -> None:
    token = await served.start()
    headers = {} if route == "/proxy/pause" else token
    body = b'{"%s": %s}' % (field.encode(), deep)
    refused = await served.http.post(route, content=body, headers=headers)
    assert refused.status_code == (422 if route == "/proxy/pause" else 400), refused.text
    assert f"nested deeper than {MOST_DEPTH} levels" in refused.text


async def test_objects_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_CONTAINERS", 4)
    assert read_json(b"[{}, {}, [1, 2, 3, 4, 5, 6]]")
    with pytest.raises(BadJson, match="more than 4 objects and lists"):
        read_json(b"[{}, {}, [], []]")


async def test_an_event_with_a_number_that_no_record_holds_is_refused(served: Served) -> None:
    await served.add()
    body = b'{"event_type": "note", "data": {"n": 1' + b"0" * 30 + b"}}"
    refused = await served.http.post("/api/rollouts/r/attempt/0/events", content=body)
    assert (refused.status_code, "64 bits" in refused.text) == (422, True)


# --- What a request asks for


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        (CHAT, HELLO | {"n": 129}, "n"),
        (CHAT, HELLO | {"n": 10**12}, "n"),
        (CHAT, HELLO | {"stop": ["x"] * 33}, "stop"),
        (CHAT, HELLO | {"stop": "x" * 257}, "stop"),
        ("/v1/completions", {"prompt": ["a"] * 1025}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 100, "n": 11}, "n"),
        ("/v1/messages", HELLO | {"max_tokens": 1, "stop_sequences": ["x" * 257]}, "stop_sequences"),
    ],
)
async def test_replies_and_stop_strings_are_bounded(served: Served, route: str, body: Any, field: str) -> None:
    token = await served.start()
    refused = await served.anonymous.post(route, json=body, headers=token)
    assert refused.status_code == 400
    assert f"{field}: expected at most" in refused.json()["error"]["message"]
    assert await served.calls() == []


# --- Heads and bodies


async def test_urls_and_headers_are_bounded(served: Served) -> None:
    get = served.anonymous.get
    assert (await get("/healthz?" + "a" * 8000)).status_code == 200
    assert (await get("/healthz?" + "a" * 9000)).status_code == 414
    assert (await get("/" + "a" * 9000)).status_code == 414
    assert (await get("/healthz", headers={f"x-{n}": "1" for n in range(100)})).status_code == 200
    assert (await get("/healthz", headers={f"x-{n}": "1" for n in range(140)})).status_code == 431
    assert (await get("/healthz", headers={"x-long": "a" * 60_000})).status_code == 200
    assert (await get("/healthz", headers={"x-long": "a" * 66_000})).status_code == 431
    for end in ("a%00b", "a%1fb", "a%0ab"):
        assert (await served.http.get(f"/api/rollouts/{end}")).status_code == 400
    refused = await served.anonymous.post(path("r%00"), json=HELLO)
    assert (refused.status_code, "error" in refused.json()) == (400, True)
    for number in ("9" * 5000, "1" * 11):
        assert (await served.http.get(f"/api/rollouts?limit={number}")).status_code == 422


async def connected(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = served.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_head_without_end_is_cut_off(served: Served) -> None:
    reader, writer = await connected(served)
    writer.write(b"GET /healthz HTTP/1.1\r\nx-endless: ")
    with suppress(ConnectionError):
        for _ in range(64):  # 4 MB: a client that is cut off cannot write on
            writer.write(b"a" * 65536)
            await writer.drain()
    with suppress(ConnectionError):  # what the gateway said is lost with the connection that it closed
        assert b" 431 " in await reader.readline()
    writer.close()
    assert (await served.anonymous.get("/healthz")).status_code == 200


@pytest.mark.parametrize("beginning", [b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\n"])
async def test_a_head_that_does_not_come_is_given_up(
    served: Served, monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    monkeypatch.setattr(bounds, "HEAD_SECONDS", 0.2)
    reader, writer = await connected(served)
    writer.write(beginning)
    said = await reader.read()  # ends when the gateway closes the connection
    assert said.startswith(b"HTTP/1.1 408 ") == bool(beginning)
    writer.close()


async def test_the_next_request_of_a_connection_has_its_own_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "HEAD_SECONDS", 0.2)
    reader, writer = await connected(served)
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b" 200 " in await reader.readline()
    writer.write(b"GET /healthz HTTP/1.1\r\n")
    assert b" 408 " in await reader.read()
    writer.close()


async def test_a_body_that_does_not_come_is_given_up(tmp_path: Path) -> None:
    async with serving(tmp_path, gateway={"body_seconds": 0.3}) as served:
        token = (await served.start())["authorization"]
        reader, writer = await connected(served)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: {token}\r\ncontent-length: 100\r\n\r\n"
        writer.write(head.encode() + b'{"messages"')
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"gateway.body_seconds = 0.3" in said
        writer.close()


# --- Large requests, and who waits for them


class Blocked:
    """A step of the work that begins, and goes on when it is told to."""

    def __init__(self, inner: Callable[..., Any], when: Callable[..., bool]):
        self._inner, self._when = inner, when
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._when(*args):
            self.begun.set()
            # On the event loop this would wait for what the loop itself is to do.
            assert self.go.wait(60), "nothing else was served meanwhile"
        return self._inner(*args, **kwargs)

    async def has_begun(self) -> None:
        while not self.begun.is_set():  # noqa: ASYNC110 (a thread's event)
            await asyncio.sleep(0.005)


def large(mark: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": mark + "word " * 60_000}]}


async def test_a_large_request_keeps_nobody_else_waiting(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = served.gateway.calls
    assert isinstance(calls, TokenCalls)
    blocked = Blocked(calls.model.render, lambda messages, *_: messages[0]["content"].startswith("slow"))
    monkeypatch.setattr(calls.model, "render", blocked)
    hostile, other = await served.start(), await served.start("other")
    first = asyncio.ensure_future(served.anonymous.post(CHAT, json=large("slow"), headers=hostile))
    await blocked.has_begun()
    assert (await served.anonymous.get("/healthz")).status_code == 200
    assert (await served.anonymous.post(CHAT, json=HELLO, headers=other)).status_code == 200
    # A large one of another attempt has the other thread; its own attempt's next large one waits, a small one does not.
    assert (await served.anonymous.post(CHAT, json=large("quick"), headers=other)).status_code == 200
    own = asyncio.ensure_future(served.anonymous.post(CHAT, json=large("next"), headers=hostile))
    assert (await served.anonymous.post(CHAT, json=HELLO, headers=hostile)).status_code == 200
    assert not first.done()
    assert not own.done()
    blocked.go.set()
    assert [(await one).status_code for one in (first, own)] == [200, 200]
    assert [call["number"] for call in await served.calls()] == [0, 1, 2]


async def test_a_schema_is_checked_beside_the_event_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    if not grammars.installed():
        pytest.skip(f"llguidance: {grammars.NOT_INSTALLED}")
    blocked = Blocked(grammars._fault, lambda schema: "slow" in schema)
    monkeypatch.setattr(grammars, "_fault", blocked)
    token, other = await served.start(), await served.start("other")
    schema = {"type": "object", "properties": {"slow": {"type": "string"}}}
    asked = HELLO | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    first = asyncio.ensure_future(served.anonymous.post(CHAT, json=asked, headers=token))
    await blocked.has_begun()
    assert (await served.anonymous.get("/healthz")).status_code == 200
    assert (await served.anonymous.post(CHAT, json=HELLO, headers=other)).status_code == 200
    assert not first.done()
    blocked.go.set()
    await first


async def test_a_long_text_is_encoded_without_pythons_lock(tmp_path: Path) -> None:
    model = load_text_model(
        str(make_model_folder(tmp_path)),
        name="m",
        chat_template="",
        context=0,
        control_text="text",
        system_messages="auto",
    )
    text, turns = "word and other " * 60_000, 0
    done: list[list[int]] = []
    thread = threading.Thread(target=lambda: done.append(ids_of(model.tokenizer, text)))
    thread.start()
    while thread.is_alive():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns >= 5, "the thread kept the lock all the time"
    assert done == [model.tokenizer.encode(text, add_special_tokens=False).ids]
    assert tokens_beyond(model.tokenizer, text, len(done[0]) // 2) is None  # it may be too long, but not hopelessly
    beyond = tokens_beyond(model.tokenizer, text, 100)
    assert beyond is not None
    assert 200 < beyond < len(done[0]) // 4  # and no more of it was encoded than it took


async def test_a_text_that_cannot_fit_is_refused_before_all_of_it_is_encoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = served.gateway.calls
    assert isinstance(calls, TokenCalls)
    monkeypatch.setattr(calls.model, "context", 1000)
    monkeypatch.setattr(calls.model, "encode", None)  # the whole is not encoded
    token = await served.start()
    long = "word " * 200_000
    for route, body in (
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
        ("/v1/completions", {"prompt": long}),
    ):
        refused = await served.anonymous.post(route, json=body, headers=token)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
