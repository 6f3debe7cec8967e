"""The run key and attempt tokens stand in no file but the key's own, in no log however loud, and in no error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from gateway.models import make_model_folder
from gateway.running import SCRIPT

#: Runs a command of Longrein with every logger as loud as it goes.
LOUD = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
for name in ("sqlalchemy", "httpx", "httpcore", "uvicorn", "asyncio", "aiohttp", "longrein"):
    logging.getLogger(name).setLevel(logging.DEBUG)
from longrein import run
from longrein.config import load
getattr(run, sys.argv[1])(load(sys.argv[2]))
"""

AGENT = """
import json, os, sys, urllib.error, urllib.request

token = os.environ["OPENAI_API_KEY"]
with open(sys.argv[1], "a") as seen:
    seen.write(token + "\\n")

def ask(url, body):
    headers = {"authorization": "Bearer " + token, "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return error.read().decode()

hello = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", hello)
ask(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", hello | {"max_tokens": 5})
print(ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": 3}))
print(ask(os.environ["OPENAI_BASE_URL"].replace("/train/", "/val/") + "/chat/completions", hello))
print(ask(os.environ["AGL_EVENT_URL"], {"event_type": "note", "data": {}}))
ask(os.environ["AGL_EVENT_URL"], {"event_type": "reward", "data": {"value": 1}})
sys.exit(int(json.load(open(os.environ["LONGREIN_TASK"]))["exit"]))
"""


def test_keys_and_tokens_are_written_nowhere(tmp_path: Path) -> None:
    run, seen = tmp_path / "runs" / "loud", tmp_path / "seen"
    make_model_folder(tmp_path / "model")
    (tmp_path / "loud_script.py").write_text(SCRIPT)
    (tmp_path / "agent.py").write_text(AGENT)
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\nname = "loud"\ndir = {json.dumps(str(tmp_path / "runs"))}\n[model]\npath = "./model"\n[agent]\n'
        f'command = ["python", "agent.py", {json.dumps(str(seen))}]\n'
        # It writes outside of its directory.
        f'user = "{"root" if os.geteuid() == 0 else "auto"}"\n[reward]\nfrom = "agent"\n'
        '[engine]\nkind = "scripted"\nscript = "loud_script:script"\n'
    )
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> subprocess.Popen[bytes]:
        with open(tmp_path / f"{name}.output", "wb") as output:
            command = [sys.executable, "-c", LOUD, name, str(file)]
            environment = {**os.environ, "PYTHONASYNCIODEBUG": "1"}
            process = subprocess.Popen(command, stdout=output, stderr=output, cwd=tmp_path, env=environment)
        processes.append(process)
        return process

    try:
        gateway = start("gateway")
        while not (run / "gateway.json").is_file():
            assert gateway.poll() is None, (tmp_path / "gateway.output").read_text()
            time.sleep(0.05)
        key = (run / "key").read_text().strip()
        url = json.loads((run / "gateway.json").read_text())["url"]
        assert (run / "key").stat().st_mode & 0o077 == 0
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60) as http:
            new = [{"input": {"exit": number}, "rollout_id": f"r{number}"} for number in (0, 1)]
            assert http.post("/api/rollouts", json=new).status_code == 201
            controller = start("controller")
            after = 0
            for _ in new:
                page = http.get("/api/rollouts/terminal", params={"after": after, "limit": 1, "wait": 50}).json()
                assert page["items"], (tmp_path / "controller.output").read_text()
                after = page["next_after"]
            tokens = seen.read_text().split()
            said = [answer.text for answer in errors(http, url, key, tokens)]
            assert len(http.get("/api/rollouts/r0/calls").json()) == 2
        for process in (controller, gateway):
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert len(tokens) == 2
    assert len(said) > 10
    written = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path != run / "key"}
    outputs = {
        tmp_path / f"{name}.output": (tmp_path / f"{name}.output").read_bytes() for name in ("gateway", "controller")
    }
    assert b"DEBUG" in outputs[tmp_path / "gateway.output"]
    assert any(path.name == "stdout.log" and b"permission_error" in content for path, content in written.items())
    assert any(path.name.startswith("store.sqlite") for path in written)
    for secret in (key, *tokens):
        assert [path for path, content in (written | outputs).items() if secret.encode() in content] == []
        assert [text for text in said if secret in text] == []


def errors(http: httpx.Client, url: str, key: str, tokens: list[str]) -> list[httpx.Response]:
    """What the gateway says to keys that may not do what they ask, and to requests that are wrong."""
    answers = []
    for credential in (
        {"authorization": f"Bearer {tokens[0]}"},
        {"x-api-key": tokens[1]},
        {"authorization": f"Basic {key}"},
    ):
        for route in ("/api/rollouts", "/v1/chat/completions", "/v1/messages", "/proxy/pause", "/api/models"):
            answers.append(httpx.post(url + route, json={}, headers=credential))
    for route in ("/api/rollouts", "/v1/chat/completions", f"/api/rollouts/r0/attempt/{'x' * 300}/events"):
        answers.append(http.post(route, content=b"{"))
    assert all(answer.status_code >= 400 for answer in answers)
    return answers
