"""A real gateway process over the scripted engine, and what tests say to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from longrein.records import Call

from .models import make_model_folder

KEY = "test-run-key"

#: The script answers with what the last message says, as JSON: {"say": text}, {"ids": [...]}, {"message": {...}}; a
#: list is indexed by the number of assistant turns so far. Anything else is answered with "Hello.".
SCRIPT = """
import asyncio, json, os, pathlib

PLAN = pathlib.Path(__file__).with_name("plan.json")

async def script(messages, tools):
    plan = None
    if PLAN.exists():
        plan = json.loads(PLAN.read_text())[sum(m["role"] == "assistant" for m in messages)]
    else:
        for m in reversed(messages):
            try:
                plan = json.loads(m["content"])
                break
            except ValueError:
                continue
    if not isinstance(plan, dict):
        return "Hello."
    if "raise" in plan:
        raise RuntimeError(plan["raise"])
    if "wait" in plan:
        while not os.path.exists(plan["wait"]):
            await asyncio.sleep(0.01)
    return plan.get("ids") or plan.get("message") or plan.get("say", "Hello.")

def teacher(messages, tools):
    return {"content": "", "tool_calls": [{"function": {"name": "bash", "arguments": json.dumps({"command": "ls"})}}]}
"""


@dataclass
class RunningGateway:
    url: str
    process: subprocess.Popen[bytes]
    folder: Path
    http: httpx.Client

    def rollout(self, task: dict[str, Any] | None = None, **more: Any) -> tuple[str, str]:
        """Create a rollout and start its attempt: (rollout id, attempt token)."""
        made = self.http.post("/api/rollouts", json=[{"input": task or {}, **more}])
        assert made.status_code == 201, made.text
        rollout = made.json()[0]["rollout_id"]
        started = self.http.post(f"/api/rollouts/{rollout}/attempts")
        assert started.status_code == 201, started.text
        return rollout, started.json()["token"]

    def base_url(self, rollout: str, mode: str = "train") -> str:
        return f"{self.url}/proxy/rollout/{rollout}/attempt/0/mode/{mode}/openai/v1"

    def chat(self, rollout: str, token: str, body: dict[str, Any], mode: str = "train") -> httpx.Response:
        return httpx.post(
            f"{self.base_url(rollout, mode)}/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {token}"},
            timeout=60,
        )

    def calls(self, rollout: str) -> list[Call]:
        answer = self.http.get(f"/api/rollouts/{rollout}/calls")
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=list[Call])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def running_gateway(
    folder: Path, options: Sequence[str] = (), *, template: str = "hermes", context: int = 100_000
) -> Iterator[RunningGateway]:
    """Start `longrein gateway` on a free port over a scripted engine; killed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model_folder(folder / "model", template, context=context)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "run.toml").write_text(
        f'[run]\nname = "test"\ndir = {json.dumps(str(folder))}\n[model]\npath = "./model"\n'
        f'[engine]\nkind = "scripted"\nscript = "script:script"\n[warmup]\nteacher = "script:teacher"\n[gateway]\nkey = "{KEY}"\n'
    )
    command = [sys.executable, "-m", "longrein.cli", "gateway", str(folder / "run.toml")]
    for option in options:
        command += ["--set", option]
    with open(folder / "gateway.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        url = wait_for_url(process, folder / "test" / "gateway.json", folder / "gateway.log")
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
            yield RunningGateway(url, process, folder, http)
    finally:
        process.kill()
        process.wait()


def wait_for_url(process: subprocess.Popen[bytes], file: Path, log: Path) -> str:
    """The URL that a gateway writes once it listens."""
    while process.poll() is None:
        try:
            url = json.loads(file.read_text())["url"]
            httpx.get(f"{url}/healthz", timeout=5).raise_for_status()
            return url
        except (OSError, ValueError, httpx.HTTPError):
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
    raise AssertionError(f"the gateway ended with {process.returncode}:\n{log.read_text()}")
