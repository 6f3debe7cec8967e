"""The gateway as a process: what it writes down, how it ends, what it refuses, what it never imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from longrein.config import Config, ConfigError
from longrein.gateway.serve import listen, open_gateway
from longrein.store import Store

from .engines.fake_server import fake_server
from .models import make_model_folder
from .serving import KEY, configured, path, serving


@contextmanager
def gateway_process(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`longrein gateway` with no run file; killed at the end if it still runs."""
    command = [sys.executable, "-m", "longrein.cli", "gateway"]
    for option in (f"run.dir={folder}", f"gateway.key={KEY}", *options):
        command += ["--set", option]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield line.split()[-1] if line else "", process
    finally:
        process.kill()
        process.communicate()


def post(url: str, route: str, body: object) -> httpx.Response:
    return httpx.post(url + route, json=body, headers={"x-api-key": KEY}, trust_env=False, timeout=60)


def test_it_says_where_it_is_serves_and_ends_cleanly(tmp_path: Path) -> None:
    note = tmp_path / "run" / "gateway.json"
    with gateway_process(tmp_path) as (url, process):
        assert json.loads(note.read_text()) == {"url": url, "pid": process.pid}
        assert url.startswith("http://127.0.0.1:")
        assert post(url, "/api/rollouts", [{"input": {}, "rollout_id": "r"}]).status_code == 201
        with gateway_process(tmp_path) as (_, second):
            assert second.wait() != 0
            assert second.stderr is not None
            assert "serves already" in second.stderr.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert not note.exists()
    assert sorted(path.name for path in note.parent.iterdir()) == ["key", "store.sqlite"]
    store = Store.open(f"sqlite:///{tmp_path / 'run' / 'store.sqlite'}", read_only=True)
    assert [rollout.rollout_id for rollout in store.rollouts()] == ["r"]
    store.close()


def test_what_was_answered_survives_sigkill_and_the_next_gateway_has_it(tmp_path: Path) -> None:
    with gateway_process(tmp_path) as (url, process):
        post(url, "/api/rollouts", [{"input": {}, "rollout_id": "r"}])
        token = post(url, "/api/rollouts/r/attempts", None).json()["token"]
        post(url, "/api/rollouts/r/attempt/0/events", {"event_type": "reward", "data": {"value": 1}})
        process.kill()
        process.wait()
    with gateway_process(tmp_path) as (again, _):  # the note of the dead one does not stop it
        assert again == url  # where agents and their controller go on asking
        headers = {"authorization": f"Bearer {KEY}"}
        detail = httpx.get(f"{url}/api/rollouts/r", headers=headers, trust_env=False).json()
        assert (detail["rollout"]["status"]["state"], detail["attempts"]) == ("running", ["0"])
        models = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {token}"}, trust_env=False)
        assert models.status_code == 200  # the attempt's token is good as before


def test_a_port_that_was_taken_meanwhile_or_is_named_is_not_the_dead_ones(tmp_path: Path) -> None:
    with gateway_process(tmp_path) as (url, process):
        process.kill()
        process.wait()
    port = int(url.rpartition(":")[2])
    taken = listen("127.0.0.1", port)
    with gateway_process(tmp_path) as (other, _):
        assert other.startswith("http://127.0.0.1:")
        assert other != url
    taken.close()
    (tmp_path / "run" / "gateway.json").write_text(json.dumps({"url": url, "pid": 1}))
    free = listen("127.0.0.1", 0)
    named = free.getsockname()[1]
    free.close()
    with gateway_process(tmp_path, f"gateway.port={named}") as (third, _):
        assert third == f"http://127.0.0.1:{named}"
    (tmp_path / "run" / "gateway.json").write_text("{")
    with gateway_process(tmp_path) as (fourth, _):
        assert fourth.startswith("http://127.0.0.1:")


def test_the_gateway_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, longrein.gateway.serve, longrein.gateway.calls, longrein.client; "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['numpy']"


async def test_a_key_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run key"):
        open_gateway(Config.model_validate({"run": {"dir": str(tmp_path)}}))
    missing = {"gateway": {"key_file": str(tmp_path / "none")}}
    with pytest.raises(ConfigError, match=r"gateway\.key_file: cannot be read"):
        open_gateway(Config.model_validate({"run": {"dir": str(tmp_path)}} | missing))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        open_gateway(Config.model_validate({"gateway": {"key_file": str(tmp_path / "empty")}}))
    assert os.listdir(tmp_path) == ["empty"]


async def test_the_run_files_servers_are_the_models_endpoints_and_keep_their_versions(tmp_path: Path) -> None:
    model = {"name": "policy", "path": str(make_model_folder(tmp_path / "model"))}
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2/v1"]
    async with serving(tmp_path, model=model, engine={"kind": "vllm", "urls": urls[:1]}) as served:
        others = [
            {"model": "policy", "endpoint": "http://old", "protocol": "tokens"},
            {"model": "m", "endpoint": "http://m"},
        ]
        trained = {"model": "policy", "endpoint": urls[0], "version": 6, "protocol": "vllm"}
        assert (await served.http.post("/api/models", json=[*others, trained])).status_code == 201
    engine = {"kind": "vllm", "urls": urls, "max_concurrent": 3}
    async with serving(tmp_path, model=model, engine=engine) as served:
        models = (await served.http.get("/api/models")).json()
        assert [(m["model"], m["endpoint"], m["version"], m["protocol"]) for m in models] == [
            ("m", "http://m", 0, "openai"),
            ("policy", urls[0], 6, "vllm"),
            ("policy", urls[1], 0, "vllm"),
        ]
        assert served.gateway.model_names() == ["policy"]
        unknown = {"model": "policy", "endpoint": "http://a", "protocol": "completions"}
        assert (await served.http.post("/api/models", json=[unknown])).status_code == 422


async def test_a_prompt_is_measured_by_what_the_servers_take(tmp_path: Path) -> None:
    def server(length: int):  # type: ignore[no-untyped-def]
        card = {"id": "served", "max_model_len": length, "parent": None}
        return fake_server({"/health": lambda body: {}, "/v1/models": lambda body: {"data": [card]}})

    model = {"name": "policy", "path": str(make_model_folder(tmp_path / "model")), "context": 100}
    async with server(60) as first, server(40) as second:
        engine = {"kind": "vllm", "urls": [first.url]}
        async with serving(tmp_path, model=model, engine=engine) as served:
            await served.http.get("/api/models")  # the gateway has started
            assert served.gateway.model is not None
            assert served.gateway.model.context == 60
            late = {"model": "policy", "endpoint": second.url, "protocol": "vllm"}
            assert (await served.http.post("/api/models", json=[late])).status_code == 201
            assert served.gateway.model.context == 40
            headers = await served.start()
            body = {"messages": [{"role": "user", "content": "a long question " * 8}]}
            answer = await served.anonymous.post(path(), json=body, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_a_store_elsewhere_leaves_no_run_folder(tmp_path: Path) -> None:
    gateway = open_gateway(configured(tmp_path, store={"url": f"sqlite:///{tmp_path / 'other.sqlite'}"}))
    await gateway.close()
    assert os.listdir(tmp_path) == ["other.sqlite"]


def test_an_address_that_is_taken_is_an_error_that_names_it() -> None:
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"gateway\.port: cannot listen on 127\.0\.0\.1:{port}"):
        listen("127.0.0.1", port)
    taken.close()
