"""Running a harness on the task in front of a gateway, and what was recorded of it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.running import RunningGateway
from longrein.gateway.messages import Message
from longrein.gateway.tokens import TextModel
from longrein.records import Call
from longrein.trajectory.batch import FinishedRollout, Ledger, make_batch
from longrein.trajectory.kinds import untrained
from longrein.trajectory.prompts import messages_of, prompt_ids, tools_of
from longrein.trajectory.tree import build_tree

from .drivers import SYSTEM_PATH, Driver, Place
from .scripts import ANSWER, DELEGATED_TASK, TASK

#: Nothing that a harness asks of the outside world gets there: a port that nobody listens on.
_NOWHERE = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Run:
    """One run of a harness and its record."""

    driver: Driver
    manner: str
    rollout: str
    answer: str
    work: Path
    calls: list[Call]


def prepare(driver: Driver, gateway: RunningGateway, folder: Path, manner: str, *, delegated: bool = False):
    """A rollout for one run: (its id, the place where it happens)."""
    rollout, token = gateway.rollout()
    home, work = folder / "home", folder / "work-space"
    home.mkdir(parents=True)
    work.mkdir()
    attempt = f"{gateway.url}/proxy/rollout/{rollout}/attempt/0/mode/train"
    task = (DELEGATED_TASK if delegated else TASK).format(manner=manner)
    place = Place(f"{attempt}/openai/v1", f"{attempt}/anthropic", token, home, work, task)
    driver.prepare(place)
    return rollout, place


def execute(driver: Driver, place: Place, *, seconds: float = 240) -> str:
    """Run the harness to its end; its final answer. AssertionError with its last words when it fails."""
    environment = {
        "PATH": SYSTEM_PATH,
        "HOME": str(place.home),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "HTTP_PROXY": _NOWHERE,
        "HTTPS_PROXY": _NOWHERE,
        "NO_PROXY": "127.0.0.1,localhost",
        **driver.environment(place),
    }
    log = place.home.parent / "harness.log"
    printed = place.home.parent / "printed.txt"
    with printed.open("wb") as out, log.open("wb") as err:
        process = subprocess.Popen(
            driver.command(place),
            cwd=place.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            _end_group(process.pid)
            process.wait()
    words = f"{log.read_text(errors='replace')[-3000:]}\n{printed.read_text(errors='replace')[-1500:]}"
    assert status == 0, f"{driver.name} ended with {status}:\n{words}"
    return driver.answer(place, printed.read_text(errors="replace"))


def _end_group(group: int) -> None:
    """What a harness has started and left behind ends with it."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run(driver: Driver, gateway: RunningGateway, folder: Path, manner: str, *, delegated: bool = False) -> Run:
    """Run the harness on the task; the run with its record."""
    rollout, place = prepare(driver, gateway, folder, manner, delegated=delegated)
    answer = execute(driver, place)
    return Run(driver, manner, rollout, answer, place.work, gateway.calls(rollout))


# What has to hold of any run


def check_success(run: Run) -> None:
    """The harness has really used its tools, and says what they said."""
    assert ANSWER in run.answer
    if not run.driver.calculator:
        lines = (run.work / "notes.txt").read_text(encoding="utf-8").splitlines()
        assert lines == ["sum 391", "à bientôt"]


def check_accounts(calls: list[Call]) -> Ledger:
    """Every sampled token stands in the tree once, and in the batch once or in its ledger with the reason."""
    tree = build_tree(calls)
    sampled = Counter({call.number: len(call.sampled) for call in calls})
    in_tree = Counter[int]()
    for node in tree.nodes:
        if node.call is not None:
            in_tree[node.call] += len(node.tokens)
    assert +in_tree == +sampled
    batch = make_batch([FinishedRollout("r", "g", True, 1.0, calls)], {"r": 1.0})
    assert batch.ledger.sampled == sampled.total()
    assert batch.ledger.trained == sum(len(call.sampled) for call in calls if untrained(call) is None)
    assert batch.ledger.trained == sum(int(row.trained.sum()) for row in batch.rows)
    return batch.ledger


def check_texts(calls: list[Call], model: TextModel) -> None:
    """Faithful: what the model was sent is, to the character, what its template gives for the harness's messages."""
    by_number = {call.number: call for call in calls}
    for call in calls:
        messages = [Message.from_json(message).for_template() for message in messages_of(by_number, call)]
        assert model.decode(prompt_ids(by_number, call)) == model.render(messages, tools_of(by_number, call)).text


def main_calls(calls: list[Call]) -> list[Call]:
    """The answered calls that carry tools: the agent's own work, without titles and retried calls."""
    by_number = {call.number: call for call in calls}
    return [call for call in calls if call.status == "ok" and tools_of(by_number, call)]


def shape(calls: list[Call]) -> list[tuple[str, str | None, int | None, list[str]]]:
    """The tree of the answered calls, without what differs from run to run: kind, fork, parent's rank, tools called."""
    answered = [call for call in calls if call.status == "ok"]
    rank = {call.number: i for i, call in enumerate(answered)}
    return [
        (
            call.kind,
            call.fork,
            rank.get(call.parent) if call.parent is not None else None,
            [one["function"]["name"] for one in call.reply.get("tool_calls", ())],
        )
        for call in answered
    ]
