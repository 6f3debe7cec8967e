"""Giving weights to vLLM servers: fake servers that keep what they are told, over real HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from longrein.records import ModelEndpoint, PauseRequest
from longrein.trainer.collect import RunFailed
from longrein.trainer.student import Student
from longrein.trainer.vllm import VllmServers


@dataclass
class FakeVllm:
    """Notes each call of the control routes; answers those in `failing` with 500, or has no such routes at all."""

    journal: list[str]
    name: str
    failing: set[str] = field(default_factory=set)
    dev_mode: bool = True
    loaded: list[list[str]] = field(default_factory=list)
    """What was in the folder of each load."""
    version: str = "default"
    url: str = ""
    waits_for: asyncio.Event | None = None
    """What a pause with mode=wait waits for: the end of requests in hand."""

    async def answer(self, request: Request) -> Response:
        step = request.url.path
        self.journal.append(f"{self.name} {step}" + (f"?{request.url.query}" if request.url.query else ""))
        if not self.dev_mode:
            return JSONResponse({"detail": "Not Found"}, 404)
        if step in self.failing:
            return JSONResponse({"error": "out of memory"}, 500)
        if step == "/pause" and request.query_params["mode"] == "wait" and self.waits_for is not None:
            await self.waits_for.wait()
        if step == "/collective_rpc":
            body = await request.json()
            assert body["method"] == "reload_weights"
            self.loaded.append(os.listdir(body["kwargs"]["weights_path"]))
        if step == "/update_weight_version":
            self.version = (await request.json())["new_version"]
        return JSONResponse({})


@asynccontextmanager
async def fake_vllm(journal: list[str], name: str, **more: Any) -> AsyncIterator[FakeVllm]:
    fake = FakeVllm(journal, name, **more)
    app = Starlette(routes=[Route("/{rest:path}", fake.answer, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    serving = asyncio.ensure_future(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = True
        await serving


@dataclass
class FakeGateway:
    journal: list[str]
    known: list[ModelEndpoint] = field(default_factory=list)

    async def models(self) -> list[ModelEndpoint]:
        return self.known

    async def put_models(self, models: list[ModelEndpoint]) -> list[ModelEndpoint]:
        self.journal += [f"gateway {model.endpoint} is {model.version}" for model in models]
        for model in models:
            self.known = [k for k in self.known if (k.model, k.endpoint) != (model.model, model.endpoint)] + [model]
        return models

    async def clear_models(self) -> None:
        self.known = []

    async def pause(self, request: PauseRequest) -> None:
        self.journal.append("gateway closed")

    async def resume(self) -> None:
        self.journal.append("gateway open")


class FakePolicy:
    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("weights")


@asynccontextmanager
async def student_of(
    gateway: FakeGateway, folder: Path, *servers: FakeVllm, urls: list[str] | None = None, **more: Any
) -> AsyncIterator[Student]:
    policy = cast(Any, FakePolicy())
    named = [server.url for server in servers] if urls is None else urls
    engine = VllmServers(policy, named, folder / "weights", ThreadPoolExecutor(1), **more)
    student = Student(policy, cast(Any, None), engine, "policy")
    try:
        await student.start(cast(Any, gateway))
        await student.serve()
        yield student
    finally:
        await student.stop()


async def test_weights_are_loaded_while_the_gate_is_closed_and_registered_before_anything_is_sampled(
    tmp_path: Path,
) -> None:
    journal: list[str] = []
    gateway = FakeGateway(journal)
    async with fake_vllm(journal, "vllm") as server, student_of(gateway, tmp_path, server) as student:
        journal.clear()
        student.version = 4
        await student.publish()
        assert journal == [
            "gateway closed",
            "vllm /pause?mode=keep",
            "vllm /collective_rpc",
            "vllm /reset_prefix_cache?reset_running_requests=true",
            "vllm /update_weight_version",
            f"gateway {server.url} is 4",
            "vllm /resume",
            "gateway open",
        ]
        assert (server.version, server.loaded[-1]) == ("4", ["model.safetensors"])
        assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version-000004"]


async def test_drained_servers_finish_what_they_have_before_they_load(tmp_path: Path) -> None:
    journal: list[str] = []
    gateway = FakeGateway(journal)
    async with (
        fake_vllm(journal, "vllm") as server,
        student_of(gateway, tmp_path, server, in_flight="drain") as student,
    ):
        finished = asyncio.Event()
        server.waits_for = finished
        journal.clear()
        student.version = 1
        publishing = asyncio.ensure_future(student.publish())
        while len(journal) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert journal == ["gateway closed", "vllm /pause?mode=wait"]
        assert not publishing.done()
        finished.set()
        await publishing
        assert journal[2:4] == ["vllm /collective_rpc", "vllm /reset_prefix_cache?reset_running_requests=true"]
        assert journal[-1] == "gateway open"


async def test_registered_servers_get_the_weights_too_and_other_endpoints_of_the_model_are_forgotten(
    tmp_path: Path,
) -> None:
    journal: list[str] = []
    gateway = FakeGateway(journal)
    async with fake_vllm(journal, "a") as named, fake_vllm(journal, "b") as registered:
        gateway.known = [
            ModelEndpoint("policy", registered.url + "/v1", 9, "vllm"),
            ModelEndpoint("policy", "http://gone", 3, "tokens"),
            ModelEndpoint("other", "http://other", 1, "tokens"),
        ]
        async with student_of(gateway, tmp_path, named):
            assert {(m.model, m.endpoint, m.version) for m in gateway.known} == {
                ("policy", named.url, 0),
                ("policy", registered.url + "/v1", 0),
                ("other", "http://other", 1),
            }
            assert (named.version, registered.version) == ("0", "0")


async def test_a_server_that_cannot_load_stands_still_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal: list[str] = []
    gateway = FakeGateway(journal)
    async with (
        fake_vllm(journal, "good") as good,
        fake_vllm(journal, "bad") as bad,
        student_of(gateway, tmp_path, good, bad) as student,
    ):
        bad.failing = {"/collective_rpc"}
        student.version = 1
        journal.clear()
        with caplog.at_level(logging.WARNING):
            await student.publish()
        assert (good.version, bad.version) == ("1", "0")
        assert "good /resume" in journal
        assert "bad /resume" not in journal
        assert "did not take the weights of version 1: /collective_rpc answered 500" in caplog.text
        assert {m.version for m in gateway.known} == {1}  # by which the gateway leaves the bad one out
        bad.failing = set()
        student.version = 2
        await student.publish()
        assert (bad.version, journal.count("bad /resume")) == ("2", 1)


async def test_no_server_that_loads_ends_the_run_with_the_gate_open(tmp_path: Path) -> None:
    journal: list[str] = []
    gateway = FakeGateway(journal)
    async with fake_vllm(journal, "vllm", dev_mode=False) as server:
        with pytest.raises(RunFailed, match=r"/pause\?mode=keep answered 404.*VLLM_SERVER_DEV_MODE=1"):
            async with student_of(gateway, tmp_path, server):
                pass
        assert journal[-1] == "gateway open"
    with pytest.raises(RunFailed, match="no vLLM server is named"):
        async with student_of(gateway, tmp_path, urls=[]):
            pass


async def test_nothing_is_held_while_the_policy_learns(tmp_path: Path) -> None:
    journal: list[str] = []
    gateway = FakeGateway(journal)
    async with fake_vllm(journal, "vllm") as server, student_of(gateway, tmp_path, server) as student:
        journal.clear()
        assert await student.apart(lambda: 5) == 5
        assert journal == []
