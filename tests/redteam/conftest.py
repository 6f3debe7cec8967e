"""One run for all attacks: a gateway, a controller and agents in sandboxes, honest ones among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from longrein.config import Agent
from longrein.sandbox.bubblewrap import find_bubblewrap

from .arena import Arena, Result, arena

ESCAPES = ["git_history", "network", "files", "privileges"]
REINS = ["reins", "other_models", "titles", "control_token"]
RESOURCES = ["fork_bomb", "fill_disk", "fill_deleted", "fill_tmp", "allocate", "burn", "outlive"]
CHEATS = [f"cheat_{name}" for name in "conftest plugin shadow exit report link git tests".split()]
HONEST = [f"honest-{number}" for number in range(3)]

MOST_CALLS = 40
HAS_BUDGET = "max_calls" in Agent.model_fields

LIMITS = [
    "sandbox.processes=40",
    "sandbox.memory_bytes=300000000",
    "sandbox.disk_bytes=50000000",
    "sandbox.tmp_bytes=32000000",
    "sandbox.file_bytes=30000000",
    "sandbox.cpu_seconds=3",
]


def rollouts() -> list[dict[str, Any]]:
    """Every attack, and honest agents before, between and after them."""
    attacks = [*ESCAPES, *REINS, *RESOURCES]
    tasks: list[dict[str, Any]] = []
    tasks += [{"id": name, "attack": name} for name in attacks]
    tasks += [{"id": name, "attack": name, "graded": True} for name in CHEATS]
    tasks += [{"id": f"git_{git}", "attack": "git_history", "git": git} for git in ("squash", "keep")]
    if HAS_BUDGET:
        tasks.append({"id": "side_calls", "attack": "side_calls"})
    for number, name in enumerate(HONEST):
        place = number * len(tasks) // (len(HONEST) - 1)
        tasks.insert(place, {"id": name, "attack": "honest", "graded": True})
    return tasks


@pytest.fixture(scope="module")
def battle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """The arena after all attacks; it still runs."""
    if find_bubblewrap() is None:
        pytest.skip("bubblewrap is not installed (pip install 'longrein[sandbox]')")
    budget = [f"agent.max_calls={MOST_CALLS}"] if HAS_BUDGET else []
    with arena(
        tmp_path_factory.mktemp("arena"), ["agent.sandbox=bubblewrap", "agent.max_concurrent=2", *LIMITS, *budget]
    ) as run:
        tasks = rollouts()
        run.start(tasks)
        run.finished([str(task["id"]) for task in tasks])
        yield run


@pytest.fixture(scope="module")
def results(battle: Arena) -> dict[str, Result]:
    return {str(task["id"]): battle.result(str(task["id"])) for task in rollouts()}
