"""An engine over HTTP that plays the script and breaks where it is told to.

It speaks the tokens protocol, so the gateway meets its failures as it meets those of any engine: a status 500, or a
connection that ends in the middle of a stream. It reads the conversation back out of the prompt's ids; a prompt that
ends inside a reply is continued there, as a model would.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from longrein.gateway.loading import load_text_model
from longrein.gateway.serve import listen
from longrein.gateway.tokens import TextModel

from .scripts import script, turns

Json = dict[str, Any]


@dataclass
class Fault:
    """What befalls one call of a rollout, once."""

    kind: str
    """failure: status 500. cut: the connection ends after half of the reply. stall: half of it, then silence. pause:
    nothing, but `struck` is called."""
    turn: int
    """The assistant turn at which it strikes, counted from 0."""
    struck: Callable[[], None] = lambda: None
    """Called, in a thread, when the fault strikes, before anything is answered."""
    stall_seconds: float = 0.0
    happened: threading.Event = field(default_factory=threading.Event)


@dataclass
class BreakableEngine:
    """Serves `model`'s script."""

    model: TextModel
    url: str
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    """By rollout."""
    requests: dict[str, int] = field(default_factory=dict)
    """Requests of each rollout so far."""

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        rollout = body["request_id"].split("/")[0]
        self.requests[rollout] = self.requests.get(rollout, 0) + 1
        messages, tools, begun = read_prompt(self.model, body["token_ids"])
        stop = min(self.model.stop_ids)
        ids = [*self.model.tokenizer.encode(script(messages, tools), add_special_tokens=False).ids, stop]
        assert ids[: len(begun)] == begun, "a reply is continued as it was begun"
        ids = ids[len(begun) :]
        fault = self._fault(rollout, messages, tools)
        if fault is not None:
            await asyncio.to_thread(fault.struck)
            if fault.kind == "failure":
                return JSONResponse({"error": "out of memory"}, 500)
        if not body["stream"]:
            if fault is not None and fault.kind == "cut":
                return StreamingResponse(_half(_chunk(ids)), media_type="application/json")
            return Response(_chunk(ids), media_type="application/json")
        return StreamingResponse(_events(ids, fault), media_type="text/event-stream")

    def _fault(self, rollout: str, messages: Sequence[Json], tools: Sequence[Json]) -> Fault | None:
        turn = turns(messages)
        if not turn and not tools:  # a title
            return None
        for fault in self.faults.get(rollout, ()):
            if fault.turn == turn and not fault.happened.is_set():
                fault.happened.set()
                return fault
        return None

    async def health(self, request: Request) -> Response:
        return Response(status_code=200)


def _chunk(ids: Sequence[int]) -> bytes:
    value = {"token_ids": ids, "logprobs": [0.0] * len(ids), "versions": [(0, len(ids))], "finish_reason": "stop"}
    return json.dumps(value).encode()


class _Broken(Exception):
    """Ends a connection before its answer is whole."""


async def _half(body: bytes) -> AsyncIterator[bytes]:
    yield body[: len(body) // 2]
    raise _Broken


async def _events(ids: Sequence[int], fault: Fault | None) -> AsyncIterator[bytes]:
    for at, id in enumerate(ids):
        if fault is not None and at == len(ids) // 2:
            if fault.kind == "cut":
                raise _Broken
            if fault.kind == "stall":
                await asyncio.sleep(fault.stall_seconds)
        finish = "stop" if at == len(ids) - 1 else None
        chunk = {"token_ids": [id], "logprobs": [0.0], "versions": [(0, 1)], "finish_reason": finish}
        yield b"data: " + json.dumps(chunk).encode() + b"\n\n"


def read_prompt(model: TextModel, ids: Sequence[int]) -> tuple[list[Json], list[Json], list[int]]:
    """(messages, tools, ids of a reply that is begun) of a ChatML prompt with Hermes tools."""
    start, end = (model.tokenizer.token_to_id(text) for text in ("<|im_start|>", "<|im_end|>"))
    messages: list[Json] = []
    tools: list[Json] = []
    at = 0
    while at < len(ids):
        if ids[at] != start:
            at += 1
            continue
        try:
            stop = ids.index(end, at)
        except ValueError:
            break
        role, _, content = model.decode(list(ids[at + 1 : stop])).partition("\n")
        _, found, listed = content.rpartition("Tools:\n")
        if role == "system" and not messages and found and listed.startswith("{"):
            tools = [json.loads(line) for line in listed.splitlines()]
        messages.append({"role": role, "content": content})
        at = stop
    opened = model.decode(list(ids[at:]))
    head = "<|im_start|>assistant\n"
    assert opened.startswith(head), f"the prompt ends with {opened[-80:]!r}: expected the assistant's turn"
    count = len(model.tokenizer.encode(head, add_special_tokens=False).ids)
    return messages, tools, list(ids[at + count :])


@contextmanager
def breakable_engine(folder: Path) -> Iterator[BreakableEngine]:
    """Serve an engine for the model in `folder` from a thread of its own."""
    listener = listen("127.0.0.1", 0)
    engine = BreakableEngine(load_text_model(str(folder)), f"http://127.0.0.1:{listener.getsockname()[1]}")
    routes = [
        Route("/inference/v1/generate", engine.generate, methods=["POST"]),
        Route("/health", engine.health),
    ]
    app = Starlette(routes=routes)
    settings = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = _Server(settings)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield engine
    finally:
        server.should_exit = True
        thread.join()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # not the main thread
