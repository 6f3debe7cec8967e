"""A gateway and a controller as processes of their own, and the attacks that are run between them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from gateway.running import KEY, RunningGateway, running_gateway
from longrein.records import Attempt, Event, Rollout

ATTACK = Path(__file__).with_name("attack.py")
SECRET = "the-answer-is-forty-two"
CANARY = "the canary sings"
DEADLINE = 240.0

GRADER = """
from pathlib import Path
from longrein.sandbox import run_pytest

HIDDEN = Path(__file__).parent / "hidden"

def grade(task, transcript, workspace, exit_status):
    if not task.get("graded"):
        return 0.5
    tested = run_pytest(workspace, HIDDEN, timeout=60)
    print(task["attack"], tested.reason, tested.completed.stderr[-300:], flush=True)
    return float(tested.passed)
"""

HIDDEN_TEST = """
from answer import double
from expected import PAIRS

def test_it():
    for given, wanted in PAIRS:
        assert double(given) == wanted

def test_negative():
    for given, wanted in PAIRS:
        assert double(-given) == -wanted
"""

GIT = """\
set -e
git init -q --initial-branch=main
git config user.name a; git config user.email a@localhost
printf 'def double(x):\\n    raise NotImplementedError\\n' > answer.py
mkdir -p tests; printf 'from answer import double\\n\\n\\ndef test_it():\\n    assert double(2) == 4\\n' > tests/test_answer.py
git add -A; git commit -qm first
echo "{secret}" > solution.txt; git add -A; git commit -qm solution; git tag solved; git branch solved-branch
git pack-refs --all
git tag -d solved; git branch -D solved-branch
git reset -q --hard HEAD~1
git gc -q || true
echo "{secret} once more" > loose.txt; git add loose.txt; git reset -q; rm loose.txt
"""


@dataclass
class Result:
    """What became of a rollout."""

    rollout: Rollout
    attempts: list[Attempt]
    events: list[Event]
    printed: str
    errors: str
    work: Path

    @property
    def reward(self) -> float | None:
        rewards = [event.data["value"] for event in self.events if event.event_type == "reward"]
        return rewards[-1] if rewards else None

    @property
    def breaches(self) -> list[str]:
        return [line for line in self.printed.splitlines() if line.startswith("BREACH")]

    @property
    def reason(self) -> str:
        return self.attempts[-1].reason or ""


@dataclass
class Canary:
    """A server and an abstract socket of this machine, which no agent may reach."""

    port: int
    abstract: str
    hits: list[str] = field(default_factory=list)


@contextmanager
def canary() -> Iterator[Canary]:
    hits: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hits.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(CANARY.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    name = f"longrein-canary-{os.getpid()}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as abstract:
            abstract.bind("\0" + name)
            abstract.listen()
            yield Canary(server.server_address[1], name, hits)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Arena:
    """The running processes, and what is known of them."""

    gateway: RunningGateway
    controller: subprocess.Popen[bytes]
    canary: Canary
    run: Path

    def knowledge(self) -> dict[str, Any]:
        """All that an attacker could wish to know."""
        run, folder = self.run, self.gateway.folder
        return {
            "private": [
                *map(str, (run, run / "store.sqlite", run / "key", run / "attempts", run / "attempts" / "neighbour-0")),
                *map(str, (run / "logs", folder, folder / "grader.py", folder / "hidden", folder / "template")),
                str(folder / "gateway.log"),
            ],
            "pids": [self.controller.pid, self.gateway.process.pid, os.getpid(), 1],
            "canary_port": self.canary.port,
            "canary": CANARY,
            "abstract": self.canary.abstract,
            "own_address": own_address(),
            "key": KEY,
            "secret": SECRET,
            "outside": str(folder / "outside"),
            "as_root": os.geteuid() == 0,
            "other": "neighbour",
        }

    def start(self, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Queue rollouts: `{"id", "attack", …}`, with `timeout` perhaps."""
        known = self.knowledge()
        new = [
            {
                "rollout_id": each["id"],
                "input": {**known, "rollout": each["id"], "git": "hide", **each},
                "config": {"timeout_seconds": each.get("timeout", 60.0)},
            }
            for each in rollouts
        ]
        answer = self.gateway.http.post("/api/rollouts", json=new)
        assert answer.status_code == 201, answer.text

    def finished(self, names: Sequence[str]) -> dict[str, Result]:
        """Wait until the rollouts have finished."""
        end = time.monotonic() + DEADLINE
        left = set(names)
        while left:
            assert self.controller.poll() is None, self.log()
            assert time.monotonic() < end, f"{sorted(left)} did not finish:\n{self.log()}"
            listed = self.gateway.http.get("/api/rollouts", params={"limit": 1000}).json()
            left -= {one["rollout_id"] for one in listed if one["status"]["state"] in ("succeeded", "failed")}
            if left:
                time.sleep(0.1)
        return {name: self.result(name) for name in names}

    def result(self, name: str) -> Result:
        import msgspec

        def get(path: str, kind: Any) -> Any:
            answer = self.gateway.http.get(f"/api/rollouts/{name}{path}")
            assert answer.status_code == 200, answer.text
            return msgspec.convert(answer.json(), kind)

        rollout = msgspec.convert(self.gateway.http.get(f"/api/rollouts/{name}").json()["rollout"], Rollout)
        attempts = get("/attempts", list[Attempt])
        directory = self.run / "attempts" / name / attempts[-1].attempt_id

        def read(file: Path) -> str:
            return file.read_text(errors="replace") if file.exists() else ""

        return Result(
            rollout,
            attempts,
            get("/events", list[Event]),
            read(directory / "stdout.log"),
            read(directory / "stderr.log"),
            directory / "work",
        )

    def log(self) -> str:
        files = [self.gateway.folder / "controller.log", self.gateway.folder / "gateway.log", *self.run.glob("logs/*")]
        return "\n".join(
            f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.exists()
        )


def own_address() -> str:
    """An address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


@contextmanager
def arena(folder: Path, options: Sequence[str]) -> Iterator[Arena]:
    """Start a gateway and a controller over the same run, with these options."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "attack.py").write_text(ATTACK.read_text())
    (folder / "grader.py").write_text(GRADER)
    (folder / "hidden/tests").mkdir(parents=True)
    (folder / "hidden/tests/test_answer.py").write_text(HIDDEN_TEST)
    (folder / "hidden/tests/expected.py").write_text("PAIRS = [(1, 2), (21, 42)]\n")
    template = folder / "template"
    template.mkdir()
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["sh", "-c", GIT.replace("{secret}", SECRET)], cwd=template, check=True, env=environment)
    options = [
        'agent.command=["python", "attack.py"]',
        f"agent.workspace={template}",
        "agent.grace_seconds=0.5",
        'workspace.git="{task.git}"',
        "reward.function=grader:grade",
        *options,
    ]
    with canary() as bird, running_gateway(folder, options) as gateway:
        command = [sys.executable, "-m", "longrein.cli", "controller", str(folder / "run.toml")]
        for option in options:
            command += ["--set", option]
        with (folder / "controller.log").open("wb") as log:
            controller = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield Arena(gateway, controller, bird, folder / "test")
        finally:
            controller.terminate()
            try:
                controller.wait(30)
            finally:
                controller.kill()
                controller.wait()


def ask(url: str, token: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url, json=body, headers={"authorization": f"Bearer {token}"}, timeout=60)
