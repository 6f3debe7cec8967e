"""Gateway, controller and trainer are killed at random moments, again and again, and the books balance.

A run of three real processes, with real agents that talk over several turns and ask again when the line breaks. The
policy is a script: what is tested is what becomes of calls, rollouts and groups, not what is learned. At the end every
answer that an agent has read whole is in the record, every sampled token was learned from exactly once or is reported
with a reason, and nothing is left running.

`LONGREIN_TEST_KILLS` says how many are made, `LONGREIN_TEST_SEED` which (`make test-kills`).
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from longrein.records import Call
from longrein.report import _token_report
from longrein.store import Store
from longrein.trainer import checkpoint
from longrein.trainer.journal import Past
from longrein.trajectory.kinds import untrained
from test_processes import metrics_of, processes_of
from tiny_run import make_model

KILLS = int(os.environ.get("LONGREIN_TEST_KILLS", "10"))
SEED = int(os.environ.get("LONGREIN_TEST_SEED", "4"))
DEADLINE = 120.0  # seconds in which something has to happen
GROUP_SIZE, GROUPS = 3, 2
STEPS = 3 + KILLS // 3

AGENT = '''\
"""Talks for some turns. Whenever the line breaks it asks again; what it has read whole it writes down."""
import http.client, json, os, sys, time, urllib.error, urllib.request

base = os.environ["OPENAI_BASE_URL"]
_, _, rollout, _, attempt, *_ = base.partition("/proxy")[2].split("/")
task = json.load(open(os.environ["LONGREIN_TASK"]))
journal = os.open(f"{task['journal']}/{rollout}.{attempt}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def ask(messages, stream):
    body = {"model": "policy", "max_tokens": 12, "messages": messages, "stream": stream}
    end, tries = time.monotonic() + 100, 0
    while time.monotonic() < end:
        headers = {
            "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "content-type": "application/json",
            "x-stainless-retry-count": str(tries),
        }
        request = urllib.request.Request(base + "/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = read(answer) if stream else json.load(answer)["choices"][0]["message"]["content"]
            if text is not None:
                return text
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                sys.exit(f"{error.code}: {error.read()!r}")
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            pass
        tries += 1
        time.sleep(0.05)
    sys.exit("no answer")


def read(answer):
    """The text of a stream; None if it broke off."""
    text = ""
    for line in answer:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return text
        if data.startswith("{"):
            choices = json.loads(data)["choices"]
            text += (choices[0]["delta"].get("content") or "") if choices else ""
    return None


messages = [{"role": "user", "content": task["ask"]}]
for turn in range(task["turns"]):
    text = ask(messages, stream=turn % 2 == 1)
    os.write(journal, (json.dumps({"turn": turn, "text": text}) + "\\n").encode())
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then"}]
open("said.txt", "w").write(text)
'''

FUNCTIONS = '''\
import asyncio, random, string


async def reply(messages, tools):
    """Some letters, after a while."""
    await asyncio.sleep(random.uniform(0.0, 0.15))
    return "".join(random.choices(string.ascii_lowercase, k=random.randint(1, 8)))


def grade(task, transcript, workspace, exit_status):
    said = workspace / "said.txt"
    return float(len(said.read_text()) % 2) if said.exists() else 0.0
'''


def write_run(folder: Path, port: int) -> Path:
    make_model(folder / "model")
    (folder / "agent.py").write_text(AGENT)
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "journal").mkdir()
    tasks = [
        {"ask": f"say {'abcdefghijk'[n]}", "turns": 2 + n % 2, "journal": str(folder / "journal")} for n in range(11)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    file = folder / "run.toml"
    file.write_text(
        f"""\
[run]
dir = "{folder}/runs"
name = "kills"
[model]
path = "model"
[engine]
kind = "scripted"
script = "functions:reply"
[gateway]
port = {port}
[agent]
command = ["python", "agent.py"]
user = "{"root" if os.geteuid() == 0 else "auto"}"
max_concurrent = 4
max_attempts = 100
grace_seconds = 1
[task]
train = "tasks.jsonl"
held_out = "tasks.jsonl"
[reward]
function = "functions:grade"
[algorithm]
group_size = {GROUP_SIZE}
groups_per_step = {GROUPS}
updates_per_batch = 2
[trainer]
steps = {STEPS}
checkpoint_every = 2
[eval]
tasks = 2
"""
    )
    return file


class Cast:
    """The three processes of a run, each of which is started again when it was killed."""

    def __init__(self, file: Path, port: int) -> None:
        self.run = file.parent / "runs" / "kills"
        url = ["--set", f"gateway.url=http://127.0.0.1:{port}"]
        longrein = [sys.executable, "-m", "longrein.cli"]
        self._commands = {
            "gateway": [*longrein, "gateway", str(file)],
            "controller": [*longrein, "controller", str(file), *url],
            "trainer": [sys.executable, str(Path(__file__).parent / "scripted_trainer.py"), str(file), *url],
        }
        self._logs = file.parent / "logs"
        self._logs.mkdir()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.killed: Counter[str] = Counter()

    def start(self, name: str) -> None:
        with (self._logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(self._commands[name], stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()
        self.killed[name] += 1

    @property
    def finished(self) -> bool:
        return self.processes["trainer"].poll() == 0

    def until(self, true: Callable[[], bool], seconds: float = DEADLINE) -> None:
        """Wait until `true()`. Nothing ends by itself but a trainer that is done."""
        end = time.monotonic() + seconds
        while not true():
            for name, process in self.processes.items():
                assert process.poll() is None or (name == "trainer" and self.finished), self.log(name)
            assert time.monotonic() < end, "\n".join(self.log(name) for name in self.processes)
            time.sleep(0.01)

    def log(self, name: str) -> str:
        return f"--- {name}\n" + (self._logs / f"{name}.log").read_text()[-6000:]

    def end(self) -> None:
        for name in ("controller", "gateway"):
            self.processes[name].send_signal(signal.SIGTERM)
            assert self.processes[name].wait(timeout=DEADLINE) == 0, self.log(name)


def read_lines(folder: Path) -> dict[tuple[str, str], list[str]]:
    """The texts that agents have read whole, by rollout and attempt."""
    found = {}
    for file in folder.iterdir():
        rollout, _, attempt = file.name.rpartition(".")
        found[rollout, attempt] = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    return found


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.timeout(300 + 30 * KILLS)
def test_the_books_balance_whoever_is_killed_and_when(tmp_path: Path) -> None:
    port = free_port()
    file = write_run(tmp_path, port)
    cast, dice = Cast(file, port), random.Random(SEED)
    names = ["gateway", "controller", "trainer"]

    def read() -> int:
        return sum(len(lines) for lines in read_lines(tmp_path / "journal").values())

    try:
        for name in names:
            cast.start(name)
            if name == "gateway":  # it makes the key that the others read
                cast.until((cast.run / "gateway.json").exists)
        for number in range(KILLS):
            goal = read() + dice.randint(0, 8)
            cast.until(lambda: read() >= goal or cast.finished)  # noqa: B023
            time.sleep(dice.uniform(0.0, 0.3))  # anywhere between two answers
            assert not cast.finished, f"the run was over after {number} kills"
            victim = names[number] if number < 3 else dice.choice(names)
            cast.kill(victim)
            cast.start(victim)
        cast.until(lambda: cast.finished, seconds=DEADLINE + 20 * STEPS)
        cast.end()
    finally:
        for process in cast.processes.values():
            process.kill()
            process.wait()
    assert sum(cast.killed.values()) == KILLS
    check_the_books(cast.run, read_lines(tmp_path / "journal"))
    assert processes_of(tmp_path) == []


def check_the_books(run: Path, read: dict[tuple[str, str], list[str]]) -> None:
    store = Store.open(f"sqlite:///{run / 'store.sqlite'}", read_only=True)
    rollouts = store.rollouts(limit=10**6)
    calls = {
        (rollout.rollout_id, attempt.attempt_id): store.calls(rollout.rollout_id, attempt.attempt_id)
        for rollout in rollouts
        for attempt in store.attempts(rollout.rollout_id)
    }
    groups = {rollout.rollout_id: rollout.group_id for rollout in rollouts}
    store.close()

    # What an agent has read whole is in the record, as it read it.
    assert sum(map(len, read.values())) > 0
    for seat, texts in read.items():
        known = Counter(str(call.reply.get("content") or "") for call in calls[seat] if call.status == "ok")
        assert not Counter(texts) - known, seat

    # Every step was made, and is told, once.
    assert [line["step"] for line in metrics_of(run) if line["kind"] == "step"] == list(range(1, STEPS + 1))

    # Every rollout was learned from once, in one group, as the record has it; and the weights say the same.
    past = Past.read(run)
    assert past is not None
    assert past.undone == {}
    lessons = past.lessons()
    assert all(len(found) == 1 for found in lessons.values())
    members = Counter(groups[name] for name in lessons)
    assert set(members.values()) == {GROUP_SIZE}
    assert len(members) == STEPS * GROUPS
    for name, (lesson,) in lessons.items():
        assert lesson.tokens == sum(map(trainable, calls[name, lesson.attempt_id])) > 0, name
    folder = checkpoint.latest(run)
    assert folder is not None
    version, learned = json.loads((folder / "trainer.pt").read_text())
    seen = Counter(name for update in learned for name in update)
    assert max(seen.values()) == 1
    assert len(learned) == version
    tokens = {name: count for update in learned for name, count in update.items()}
    assert tokens.items() <= {name: lesson.tokens for name, (lesson,) in lessons.items()}.items()

    # Sampled = trained + reported.
    report = _token_report(run)
    assert report.differing == {}
    assert "step not finished" not in report.tokens.untrained  # what was finished was kept
    assert not [line["text"] for line in metrics_of(run) if "learned from other rollouts" in str(line.get("text"))]
    assert report.tokens.trained == sum(lesson.tokens for (lesson,) in lessons.values())
    sampled = sum(len(call.sampled) for some in calls.values() for call in some)
    assert sampled == report.tokens.trained + sum(report.tokens.untrained.values())


def trainable(call: Call) -> int:
    return len(call.sampled) if untrained(call) is None else 0
