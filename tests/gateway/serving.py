"""A gateway served in the test's own event loop over real HTTP, and a fake model server shaped like vLLM's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from longrein.config import Config
from longrein.gateway.serve import Gateway, GatewayServer, listen, open_gateway

KEY = "run-key"
ANY = httpx.Limits(max_connections=None, max_keepalive_connections=8)


@dataclass
class Served:
    """A running gateway, and a client that carries the run key."""

    gateway: Gateway
    url: str
    http: httpx.AsyncClient
    anonymous: httpx.AsyncClient
    """Carries no key."""
    server: uvicorn.Server

    async def add(self, rollout_id: str = "r", **fields: Any) -> str:
        """Add a rollout; its id."""
        answer = await self.http.post("/api/rollouts", json=[{"input": {}, "rollout_id": rollout_id, **fields}])
        assert answer.status_code == 201, answer.text
        return answer.json()[0]["rollout_id"]

    async def start(self, rollout_id: str = "r", **fields: Any) -> dict[str, str]:
        """Add a rollout and start its attempt 0; the headers that carry the attempt's token."""
        await self.add(rollout_id, **fields)
        answer = await self.http.post(f"/api/rollouts/{rollout_id}/attempts")
        assert answer.status_code == 201, answer.text
        return {"authorization": f"Bearer {answer.json()['token']}"}

    async def calls(self, rollout_id: str = "r") -> list[dict[str, Any]]:
        answer = await self.http.get(f"/api/rollouts/{rollout_id}/calls")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def recorded(self, count: int, rollout_id: str = "r") -> list[dict[str, Any]]:
        """The attempt's calls once there are `count` of them."""
        while len(calls := await self.calls(rollout_id)) < count:  # noqa: ASYNC110 (over HTTP there is no event)
            await asyncio.sleep(0.01)
        return calls

    async def seen(self) -> None:
        """Return once the gateway has a request in hand."""
        while not self.server.server_state.tasks:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.01)

    async def clear(self) -> None:
        """Remove all rollouts and models and open the gate, for the next test."""
        for rollout in self.gateway.store.rollouts(limit=10_000):
            await self.gateway.store.delete_rollout(rollout.rollout_id)
        await self.gateway.store.clear_models()
        self.gateway.gate.resume()


def path(rollout_id: str = "r", attempt_id: str = "0", mode: str = "train", end: str = "chat/completions") -> str:
    return f"/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}/openai/v1/{end}"


def configured(folder: Path, **sections: dict[str, Any]) -> Config:
    sections["gateway"] = {"key": KEY} | sections.get("gateway", {})
    return Config.model_validate({"run": {"dir": str(folder)}, "model": {"name": "policy"}} | sections)


@asynccontextmanager
async def serving(folder: Path, **sections: dict[str, Any]) -> AsyncIterator[Served]:
    """Serve a gateway whose run folder is in `folder`."""
    config = configured(folder, **sections)
    gateway = open_gateway(config)
    listener = listen("127.0.0.1", config.gateway.port)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = GatewayServer(gateway, url, None)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        key = {"authorization": f"Bearer {KEY}"}
        async with (
            httpx.AsyncClient(base_url=url, headers=key, timeout=60, trust_env=False, verify=False, limits=ANY) as http,
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as anonymous,
        ):
            yield Served(gateway, url, http, anonymous, server)
    finally:
        server.should_exit = True
        await task
        await gateway.close()


@dataclass
class Upstream:
    """A model server. `script` answers a request's body; what was asked is kept."""

    url: str
    script: Callable[[dict[str, Any]], Any] = lambda body: answer("ok")
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    all_in: asyncio.Event = field(default_factory=asyncio.Event)
    expected: int = 0
    """A request waits until so many are in."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client leaves before its answer is whole."""

    def clear(self) -> None:
        """As it was when it started, for the next test."""
        fresh = Upstream(self.url)
        for name in ("script", "bodies", "paths", "headers", "most_open", "all_in", "expected", "gone"):
            setattr(self, name, getattr(fresh, name))


def answer(text: str, prompt: list[int] | None = None, ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """A whole chat answer as vLLM gives it for return_token_ids and logprobs."""
    choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    if ids is not None:
        choice["token_ids"] = ids
        choice["logprobs"] = {"content": [{"token": "t", "logprob": -0.5 - i} for i in range(len(ids))]}
    body: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]}
    if prompt is not None:
        body["prompt_token_ids"] = prompt
    return body | more


def chunk(
    delta: dict[str, Any], *, index: int = 0, ids: list[int] | None = None, finish: str | None = None, **more: Any
) -> str:
    """One event of a streamed chat answer."""
    choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish}
    if ids is not None:
        choice |= {"token_ids": ids, "logprobs": {"content": [{"logprob": -0.25} for _ in ids]}}
    return "data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice]} | more) + "\n\n"


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    """Serve a fake model server. A script's answer is a dict (JSON), a Response, or an async iterator of SSE text."""
    listener = listen("127.0.0.1", 0)
    served = Upstream(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")

    async def handle(request: Request) -> Response:
        body = json.loads(await request.body())
        served.bodies.append(body)
        served.paths.append(request.url.path)
        served.headers.append(dict(request.headers))
        served.open += 1
        served.most_open = max(served.most_open, served.open)
        try:
            if served.expected:
                if served.open >= served.expected:
                    served.all_in.set()
                await served.all_in.wait()
            result = served.script(body)
            if asyncio.iscoroutine(result):
                left = asyncio.ensure_future(request.receive())
                work = asyncio.ensure_future(result)
                await asyncio.wait({left, work}, return_when=asyncio.FIRST_COMPLETED)
                left.cancel()
                if not work.done():
                    work.cancel()
                    served.gone.set()
                    return Response(status_code=499)
                result = work.result()
        finally:
            served.open -= 1
        if isinstance(result, dict):
            return JSONResponse(result)
        return (
            result
            if isinstance(result, Response)
            else StreamingResponse(_watched(result), media_type="text/event-stream")
        )

    async def _watched(events: AsyncIterator[str]) -> AsyncIterator[str]:
        try:
            async for text in events:
                yield text
        except (asyncio.CancelledError, GeneratorExit):
            served.gone.set()
            raise

    app = Starlette(routes=[Route("/v1/{rest:path}", handle, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield served
    finally:
        server.should_exit = True
        await task


async def register(served: Served, *models: Upstream, **more: Any) -> None:
    """Register model servers under the name `real`."""
    body = [{"model": "real", "endpoint": model.url, **more} for model in models]
    assert (await served.http.post("/api/models", json=body)).status_code == 201
