"""The same sandbox under a controller that is no root: user namespaces, and resource limits in place of control groups.

Where the tests run as root, gateway and controller are started as another user.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longrein.controller.hiding import closed_on_the_way, open_parts
from longrein.sandbox import privileges
from longrein.sandbox.bubblewrap import find_bubblewrap, interpreter_folders

UID = 1_999_999_000
TESTS = Path(__file__).parent.parent
ATTACKS = [
    "honest",
    "files",
    "privileges",
    "network",
    "reins",
    "fork_bomb",
    "allocate",
    "fill_tmp",
    "fill_deleted",
    "outlive",
]

# As the other user: run the attacks and print what came of them.
PROGRAM = f"""
import dataclasses, json, sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent / "src")!r}]
from pathlib import Path
from redteam.arena import arena
from redteam.conftest import LIMITS
folder, names = Path(sys.argv[1]), sys.argv[2:]
with arena(folder, ["agent.sandbox=bubblewrap", "agent.max_concurrent=2", *LIMITS]) as run:
    run.start([{{"id": name, "attack": name, "graded": name == "honest"}} for name in names])
    results = run.finished(names)
    told = {{
        name: {{"printed": each.printed, "errors": each.errors, "breaches": each.breaches, "reward": each.reward,
               "reason": each.reason, "error": each.rollout.status.error_message}}
        for name, each in results.items()
    }}
    print(json.dumps({{"results": told, "hits": run.canary.hits, "log": run.log()}}))
"""


def as_other_user() -> Callable[[], None] | None:
    """What a child of root does to become an ordinary user that reaches the interpreter and these files."""
    if os.geteuid() != 0:
        return None
    hide, show = set[str](), dict[str, None]()
    for path in [*interpreter_folders(), str(TESTS.parent), *filter(os.path.isdir, sys.path)]:
        top = closed_on_the_way(path)
        if top is not None:
            hide.add(top)
            show.update(dict.fromkeys(open_parts(path)))
    plan = {"hide": sorted(hide), "show": [[one, one, False] for one in show if one not in hide], "user": [UID, UID]}
    return lambda: privileges.confine(plan)


@pytest.fixture(scope="module")
def told() -> Iterator[dict]:
    if find_bubblewrap() is None:
        pytest.skip("bubblewrap is not installed (pip install 'longrein[sandbox]')")
    folder = Path(tempfile.mkdtemp(prefix="longrein-user-"))
    if os.geteuid() == 0:
        os.chown(folder, UID, UID)
    environment = {**os.environ, "HOME": str(folder), "USER": "somebody", "TMPDIR": str(folder)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder / "arena"), *ATTACKS],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            preexec_fn=as_other_user(),
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        yield json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("name", ["files", "privileges", "network", "reins", "fill_tmp", "outlive"])
def test_nothing_of_it_worked(told: dict, name: str) -> None:
    result = told["results"][name]
    assert result["breaches"] == []
    assert result["printed"].endswith("done\n"), (result, told["log"])
    assert told["hits"] == []


def test_the_run_goes_on(told: dict) -> None:
    assert told["results"]["honest"]["reward"] == 1.0, told["results"]["honest"]


def test_limits_hold_for_each_process(told: dict) -> None:
    results = told["results"]
    assert (
        results["allocate"]["breaches"] == results["fork_bomb"]["breaches"] == results["fill_deleted"]["breaches"] == []
    )
    assert "MemoryError" in results["allocate"]["errors"] or "sandbox.memory_bytes" in results["allocate"]["reason"]
    assert int(results["fork_bomb"]["printed"].split()[1]) < 40
    assert "sandbox.disk_bytes" in results["fill_deleted"]["reason"]
    assert "in a user namespace" in told["log"]
