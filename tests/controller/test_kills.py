"""A controller and a gateway that are killed again and again while agents work: nothing is lost and nothing done twice."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway.models import make_model_folder
from longrein.client import Client
from longrein.records import NewRollout, Outcome, RolloutState
from longrein.store import Store

from .fakes import controlling, make_config, until, write
from .processes import KEY, journals, kill, longrein, options_of, processes_in

KILLS = 20
ROLLOUTS = 80

GRADER = """
def grade(task, transcript, workspace, exit_status):
    said = [m["content"] for m in transcript if m["role"] == "assistant"]
    return float(exit_status == 0 and said == [(workspace / "answer.txt").read_text()])
"""

AGENT = """
import json, os, sys, time, urllib.request

def note(what):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps([what, *os.environ["LONGREIN_TASK"].split("/")[-3:-1], time.time()]) + "\\n")

note("start")
task = json.load(open(os.environ["LONGREIN_TASK"]))
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": str(task["number"])}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
with urllib.request.urlopen(request) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
time.sleep(task["seconds"])
while task["number"] < 2 and not os.path.exists(sys.argv[1] + ".go"):  # these two run all the time
    time.sleep(0.02)
open("answer.txt", "w").write(said)
note("end")
"""

SCRIPT = """
import asyncio, secrets

async def script(messages, tools):
    await asyncio.sleep(0.05)
    return f"reply {secrets.token_hex(8)}"
"""


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A gateway process with a scripted engine; its URL."""
    write(folder, "played.py", SCRIPT)
    model = {"name": "policy", "path": str(make_model_folder(folder / "model"))}
    options = options_of(folder, model=model, engine={"kind": "scripted", "script": "played:script"})
    note = folder / "runs/r/gateway.json"
    async with longrein("gateway", folder / "gateway.log", *options) as process:
        await until(lambda: note.exists() and json.loads(note.read_text())["pid"] == process.pid)
        yield json.loads(note.read_text())["url"], process


async def finished(client: Client, count: int) -> None:
    after = total = 0
    async with asyncio.timeout(200):
        while total < count:
            page = await client.terminal(after, wait=20)
            after, total = page.next_after, page.total_terminal


async def test_a_controller_that_is_killed_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    chance = random.Random(20)
    write(tmp_path, "agent.py", AGENT)
    write(tmp_path, "grader.py", GRADER)
    log, controller_log, run = tmp_path / "log.jsonl", tmp_path / "controller.log", tmp_path / "runs/r"
    agent: dict[str, Any] = {"command": ["python", "agent.py", str(log)], "preload": ["json", "urllib.request"]}
    agent |= {"max_concurrent": 6, "max_attempts": KILLS + 1, "grace_seconds": 0.5}
    tasks = [{"number": n, "seconds": chance.uniform(0.0, 1.5)} for n in range(ROLLOUTS)]

    def notes() -> list[list[Any]]:
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    kills = 0
    async with gateway(tmp_path) as (url, _), Client(url, KEY) as client:
        options = options_of(tmp_path, agent=agent, reward={"function": "grader:grade"}, gateway={"url": url})
        await client.add_rollouts([NewRollout(task, rollout_id=f"r{task['number']}") for task in tasks])
        while kills < KILLS:
            async with longrein("controller", controller_log, *options) as controller:
                # At one moment of its work or another; a few are killed while they start.
                enough = min(len(notes()) + chance.randrange(12), 2 * ROLLOUTS - 2) if chance.random() < 0.8 else 0
                await until(lambda: len(notes()) >= enough)  # noqa: B023
                await asyncio.sleep(chance.uniform(0.0, 0.3))
                await kill(controller)
                kills += 1
        async with longrein("controller", controller_log, *options):
            for name in ("r0", "r1"):  # by a new controller each time
                await until(lambda: f"of rollout {name} runs on, as" in controller_log.read_text())  # noqa: B023
            log.with_name("log.jsonl.go").touch()
            await finished(client, ROLLOUTS)
    assert processes_in(tmp_path) == []
    assert journals(run) == []

    store = Store.open(f"sqlite:///{run / 'store.sqlite'}", read_only=True)
    started, ended = ({tuple(note[1:3]) for note in notes() if note[0] == what} for what in ("start", "end"))
    assert Counter(note[0] for note in notes()) == {"start": len(started), "end": len(ended)}
    assert started == ended  # no agent was ended because its controller was
    assert Counter(rollout_id for rollout_id, _ in started) == {f"r{n}": 1 for n in range(ROLLOUTS)}
    rollouts = store.rollouts(limit=1000)
    assert {rollout.status.state for rollout in rollouts} == {RolloutState.succeeded}
    assert store.terminal(0, 1000).total_terminal == len(rollouts) == ROLLOUTS
    for rollout in rollouts:
        *lost, last = store.attempts(rollout.rollout_id)
        assert last.outcome is Outcome.succeeded
        assert {attempt.outcome for attempt in lost} <= {Outcome.infrastructure_failed}
        (reward,) = [e for a in (*lost, last) for e in store.events(rollout.rollout_id, a.attempt_id, "reward")]
        assert (reward.attempt_id, reward.data["value"]) == (last.attempt_id, 1.0)
        assert len(store.calls(rollout.rollout_id, last.attempt_id)) == 1
    store.close()


RETRYING = """
import os, sys
from openai import OpenAI

client = OpenAI(max_retries=12)
messages = []
for number in range(30):
    messages.append({"role": "user", "content": f"question {number}"})
    said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    messages.append({"role": "assistant", "content": said})
    with open(sys.argv[1], "a") as file:
        file.write(said + "\\n")
"""


async def test_a_retrying_harness_goes_on_over_a_gateway_that_is_killed(tmp_path: Path) -> None:
    write(tmp_path, "agent.py", RETRYING)
    write(tmp_path, "grader.py", "def grade(task, transcript, workspace, exit_status):\n    return len(transcript)\n")
    seen = tmp_path / "seen"

    def answers() -> list[str]:
        return seen.read_text().splitlines() if seen.exists() else []

    config = make_config(tmp_path, agent={"command": ["python", "agent.py", str(seen)]})
    urls = []
    async with gateway(tmp_path) as (url, first), Client(url, KEY) as client, controlling(config, client):
        urls.append(url)
        await client.add_rollouts([NewRollout({}, rollout_id="x")])
        await until(lambda: len(answers()) >= 3)
        await kill(first)
        async with gateway(tmp_path) as (url, second):
            urls.append(url)
            await until(lambda: len(answers()) >= 12)
            await kill(second)
        async with gateway(tmp_path) as (url, _):
            urls.append(url)
            await finished(client, 1)
            rollout = (await client.rollout("x")).rollout
            (attempt,) = await client.attempts("x")
            calls = await client.calls("x", "0")
            (reward,) = await client.events("x", "0", "reward")
    assert len(set(urls)) == 1
    assert (rollout.status.state, attempt.outcome) == (RolloutState.succeeded, Outcome.succeeded)
    assert reward.data["value"] == 60.0
    recorded = {call.reply.get("content"): call for call in calls if call.status == "ok"}
    assert len(answers()) == 30
    assert set(answers()) <= recorded.keys()
    call = recorded[answers()[-1]]
    while call.prefix is not None:  # one branch over all three processes: the ids of each call are those of the next
        call = next(earlier for earlier in calls if earlier.number == call.prefix)
    assert call.reply["content"] == answers()[0]
