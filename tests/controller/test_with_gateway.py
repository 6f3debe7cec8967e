"""The controller against a real gateway: agents call the model over HTTP, graders see what was said."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from gateway.models import make_model_folder
from gateway.serving import KEY, Served, serving
from longrein.client import Client
from longrein.records import LocalConfig, NewRollout, Outcome, RolloutConfig, RolloutState

from .fakes import controlling, make_config, write

AGENT = """
import json, os, urllib.error, urllib.request

def ask(url, body, key=os.environ["OPENAI_API_KEY"]):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"authorization": "Bearer " + key, "content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

task = json.load(open(os.environ["LONGREIN_TASK"]))
messages = [{"role": "user", "content": task["question"]}]
for _ in range(2):
    answer = ask(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "policy", "messages": messages})
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]
try:
    ask(os.environ["OPENAI_BASE_URL"].split("/proxy")[0] + "/api/rollouts", None)
    print("has the reins")
except urllib.error.HTTPError as error:
    print("refused", error.code)
"""

GRADER = """
def grade(task, transcript, workspace, exit_status):
    said = [m["content"] for m in transcript if m["role"] == "assistant"]
    return {"reward": float(said == ["reply 0", "reply 1"]), "messages": len(transcript)}
"""

SCRIPT = 'def script(messages, tools):\n    return f\'reply {sum(m["role"] == "assistant" for m in messages)}\'\n'


@pytest_asyncio.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Served]:
    write(tmp_path, "played.py", SCRIPT)
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(tmp_path), "folder": str(tmp_path)},
        "model": {"name": "policy", "path": str(make_model_folder(tmp_path / "model"))},
        "engine": {"kind": "scripted", "script": "played:script"},
    }
    async with serving(tmp_path, **sections) as served:
        yield served


async def finished(client: Client, count: int) -> None:
    after = total = 0
    while total < count:
        page = await client.terminal(after, wait=20)
        after, total = page.next_after, page.total_terminal


async def test_agents_talk_to_the_model_and_are_graded(tmp_path: Path, gateway: Served) -> None:
    write(tmp_path, "agent.py", AGENT)
    write(tmp_path, "grader.py", GRADER)
    config = make_config(tmp_path, agent={"command": ["python", "agent.py"], "preload": ["json", "urllib.request"]})
    async with Client(gateway.url, KEY) as client, controlling(config, client):
        new = [NewRollout({"question": f"q{n}"}, is_train=n > 0, rollout_id=f"r{n}") for n in range(3)]
        await client.add_rollouts(new)
        await finished(client, 3)
        for n in range(3):
            detail = await client.rollout(f"r{n}")
            assert detail.rollout.status.state is RolloutState.succeeded, detail.rollout.status.error_message
            (attempt,) = await client.attempts(f"r{n}")
            assert attempt.outcome is Outcome.succeeded
            (reward,) = await client.events(f"r{n}", "0", "reward")
            assert reward.data == {"value": 1.0, "source": "grader", "metrics": {"messages": 4.0}}
            calls = await client.calls(f"r{n}", "0")
            assert [c.mode for c in calls] == ["train" if n else "val"] * 2
            said = tmp_path / f"runs/r/attempts/r{n}/0/stdout.log"
            assert said.read_text() in ("refused 401\n", "refused 403\n")


CLASSES = """
import json, os, urllib.request
class Agent:
    def run(self):
        body = json.dumps({"event_type": "reward", "data": {"value": float(os.environ["WORTH"])}}).encode()
        headers = {"x-api-key": os.environ["AGL_KEY"], "content-type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(os.environ["AGL_EVENT_URL"], body, headers)).read()
"""


async def test_agent_lightning_agents_post_their_reward(tmp_path: Path) -> None:
    write(tmp_path, "classes.py", CLASSES)
    config = make_config(tmp_path, agent={"command": []}, reward={"from": "agent", "function": ""})
    local = RolloutConfig(local=LocalConfig("classes.Agent", {"WORTH": "input.worth"}))
    async with (
        serving(tmp_path, reward={"from": "agent"}) as served,
        Client(served.url, KEY) as client,
        controlling(config, client),
    ):
        await client.add_rollouts([NewRollout({"worth": 0.25}, config=local, rollout_id="r")])
        await finished(client, 1)
        status = (await client.rollout("r")).rollout.status
        assert status.state is RolloutState.succeeded, status.error_message
        assert [e.data["value"] for e in await client.events("r", "0", "reward")] == [0.25]
