"""Graders in their own processes: values, failures, time limits, and what they cannot see."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.config import Reward
from longrein.controller.grading import Grade, GradeError, Graders, posted_grade, to_grade
from longrein.controller.local import base_environment
from longrein.records import Event

from .fakes import until, write


@asynccontextmanager
async def graders(folder: Path, code: str, *, seconds: float = 30.0, workers: int = 1) -> AsyncIterator[Graders]:
    write(folder, "grader.py", code)
    reward = Reward.model_validate({"function": "grader:grade", "timeout_seconds": seconds})
    async with Graders(reward, folder, base_environment(), folder / "grader.log", workers=workers) as pool:
        yield pool


async def grade(pool: Graders, task: dict, workspace: Path, exit_status: int | None = 0) -> Grade:
    return await pool.grade(task, [{"role": "user", "content": "q"}], workspace, exit_status, label="rollout x")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, Grade(1.0, {})),
        (True, Grade(1.0, {})),
        ({"reward": 0.25, "tests": 3, "fast": False}, Grade(0.25, {"tests": 3.0, "fast": 0.0})),
        ({"reward": 1, "calls": {0: 0.5, 3: True}}, Grade(1.0, {}, {0: 0.5, 3: 1.0})),
    ],
)
def test_values_that_are_grades(value: object, expected: Grade) -> None:
    assert to_grade(value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None"),
        ("1.0", "str '1.0'"),
        (float("nan"), "nan, expected a finite number"),
        (float("-inf"), "-inf"),
        ({"score": 1}, "without 'reward'; its keys are ['score']"),
        ({"reward": 1, "note": "good"}, "str 'good' for ['note']"),
        ({"reward": 1, "loss": float("inf")}, "inf for ['loss']"),
        ({"reward": 1, "calls": [0.5]}, "[0.5] for ['calls'], expected a dict from call numbers to rewards"),
        ({"reward": 1, "calls": {"first": 0.5}}, "for ['calls']"),
        ({"reward": 1, "calls": {2: "good"}}, "str 'good' for ['calls'][2]"),
        ([1.0], "list [1.0]"),
        (1j, "complex"),
    ],
)
def test_values_that_are_no_grades(value: object, message: str) -> None:
    with pytest.raises(GradeError) as caught:
        to_grade(value)
    assert message in str(caught.value)


@given(st.floats(allow_nan=False, allow_infinity=False), st.dictionaries(st.text(), st.floats(-9, 9)))
def test_finite_numbers_are_kept_exactly(reward: float, metrics: dict[str, float]) -> None:
    metrics = {name: value for name, value in metrics.items() if name not in ("reward", "calls")}
    assert to_grade({**metrics, "reward": reward}) == Grade(reward, metrics)


def test_the_last_posted_reward_counts() -> None:
    def posted(*values: object) -> list[Event]:
        return [Event("reward", "r", "0", 0.0, {"value": v} if v != "absent" else {}) for v in values]

    assert posted_grade(posted(0.0, "x", 2)) == Grade(2.0, {})
    for events, message in ((posted(), "no reward was posted"), (posted(1, "x"), "'x'"), (posted("absent"), "None")):
        with pytest.raises(GradeError, match=message):
            posted_grade(events)


async def test_a_grader_sees_the_attempt_and_is_reused(tmp_path: Path) -> None:
    work = tmp_path / "work"
    write(work, "answer.txt", "42")
    (work / "leak").symlink_to(tmp_path / "grader.py")
    code = """
import os
grades = 0
def grade(task, transcript, workspace, exit_status):
    global grades
    grades += 1
    print("graded", flush=True)
    os.write(1, b"not the answer\\n")
    right = (workspace / "answer.txt").read_text() == task["answer"]
    (workspace / "answer.txt").write_text("changed")
    return {"reward": right, "grades": grades, "exit": exit_status, "messages": len(transcript),
            "files": len(os.listdir(workspace)), "pid": os.getpid()}
"""
    async with graders(tmp_path, code) as pool:
        first = await grade(pool, {"answer": "42"}, work, 3)
        second = await grade(pool, {"answer": "43"}, work, -9)
    assert first.metrics == {"grades": 1, "exit": 3, "messages": 1, "files": 1, "pid": first.metrics["pid"]}
    assert (first.reward, second.reward) == (1.0, 0.0)
    assert second.metrics == {**first.metrics, "grades": 2, "exit": -9}
    assert (work / "answer.txt").read_text() == "42"
    assert "not the answer" in (tmp_path / "grader.log").read_text()


async def test_async_graders_numbers_of_libraries_and_missing_workspaces(tmp_path: Path) -> None:
    code = "import numpy\nasync def grade(task, transcript, workspace, exit_status):\n    return numpy.float32(0.5)\n"
    async with graders(tmp_path, code) as pool:
        assert await grade(pool, {}, tmp_path / "absent", None) == Grade(0.5, {})


async def test_rewards_of_single_calls_come_through_the_pipe(tmp_path: Path) -> None:
    code = "def grade(*_):\n    return {'reward': 1, 'calls': {0: 0.25, 12: -1}}\n"
    async with graders(tmp_path, code) as pool:
        assert await grade(pool, {}, tmp_path / "absent") == Grade(1.0, {}, {0: 0.25, 12: -1.0})


async def test_failures_name_function_cause_and_log(tmp_path: Path) -> None:
    code = """
import os, sys
def grade(task, *_):
    if task["do"] == "raise": raise ValueError("bad\\nanswer")
    if task["do"] == "exit": sys.exit(3)
    if task["do"] == "die": os._exit(3)
    if task["do"] == "nan": return float("nan")
    return 1
"""
    expected = {
        "raise": "reward.function grader:grade raised answer for rollout x",
        "exit": "reward.function grader:grade raised SystemExit: 3 for rollout x",
        "die": "reward.function grader:grade ended its process while grading rollout x",
        "nan": "reward.function grader:grade returned nan, expected a finite number for rollout x",
    }
    async with graders(tmp_path, code) as pool:
        for do, message in expected.items():
            with pytest.raises(GradeError) as caught:
                await grade(pool, {"do": do}, tmp_path)
            assert str(caught.value) == f"{message}; its log is {tmp_path / 'grader.log'}" or do == "raise"
            assert "grader.log" in str(caught.value)
            assert await grade(pool, {"do": "well"}, tmp_path) == Grade(1.0, {})
    assert "ValueError: bad" in (tmp_path / "grader.log").read_text()


async def test_a_grader_that_hangs_is_killed_with_its_children_and_replaced(tmp_path: Path) -> None:
    code = f"""
import os, subprocess, sys, time
def grade(task, *_):
    if task["hang"]:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
        time.sleep(600)
    return 1
"""
    async with graders(tmp_path, code, seconds=1.5) as pool:
        with pytest.raises(GradeError, match=r"took over 1.5 s for rollout x \(reward.timeout_seconds\)"):
            await grade(pool, {"hang": True}, tmp_path)
        for pid in (tmp_path / "pids").read_text().split():
            await until(lambda pid=pid: not _runs(int(pid)))
        assert await grade(pool, {"hang": False}, tmp_path) == Grade(1.0, {})


async def test_grades_run_side_by_side_up_to_the_pools_size(tmp_path: Path) -> None:
    code = """
import os, time
def grade(task, *_):
    open(os.path.join(task["folder"], task["name"]), "w").close()
    until = time.monotonic() + 20
    while len(os.listdir(task["folder"])) < 2 and time.monotonic() < until: time.sleep(0.01)
    return len(os.listdir(task["folder"]))
"""
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    async with graders(tmp_path, code, workers=2) as pool:
        both = await asyncio.gather(
            *(grade(pool, {"folder": str(meeting), "name": name}, tmp_path / "absent") for name in "ab")
        )
    assert [g.reward for g in both] == [2.0, 2.0]


async def test_no_credential_and_no_pipe_reaches_what_a_grader_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LONGREIN_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "PYTHON_TOKEN"):
        monkeypatch.setenv(name, "secret")
    code = """
import json, os, subprocess, sys
def grade(task, *_):
    code = "import os, json; print(json.dumps([f for f in os.listdir('/proc/self/fd')]))"
    spawned = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, close_fds=False).stdout
    r, w = os.pipe()
    if os.fork() == 0:
        links = [os.readlink(f"/proc/self/fd/{f}") for f in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{f}")]
        os.write(w, str(sum(l.startswith("pipe:") for l in links) - 2).encode())
        os._exit(0)
    os.wait()
    return {"reward": 0, "secrets": sum(v == "secret" for v in os.environ.values()),
            "spawned": len(json.loads(spawned)), "forked": int(os.read(r, 9))}
"""
    async with graders(tmp_path, code) as pool:
        metrics = (await grade(pool, {}, tmp_path / "absent")).metrics
    # A spawned child has its three standard streams and the listing's own descriptor; a forked one no pipe but its own.
    assert metrics == {"secrets": 0, "spawned": 4, "forked": 0}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("", "reward.function is empty"),
        ("absent_module_x:grade", "no module 'absent_module_x'"),
        ("grader:other", "module grader has no function 'other'"),
        ("broken:grade", "importing broken failed: ZeroDivisionError"),
    ],
)
async def test_a_function_that_cannot_be_loaded(tmp_path: Path, function: str, message: str) -> None:
    write(tmp_path, "grader.py", "def grade(*_): return 1\n")
    write(tmp_path, "broken.py", "1/0\n")
    reward = Reward.model_validate({"function": function})
    async with Graders(reward, tmp_path, base_environment(), tmp_path / "log", workers=1) as pool:
        with pytest.raises(GradeError) as caught:
            await pool.warm()
        assert message in str(caught.value)
        with pytest.raises(GradeError):
            await grade(pool, {}, tmp_path / "absent")


async def test_too_large_a_workspace_is_no_grade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longrein.sandbox.copy_tree.__kwdefaults__", {"most_bytes": 10, "most_files": 10})
    write(tmp_path / "work", "big", "x" * 100)
    async with graders(tmp_path, "def grade(*_): return 1\n") as pool:
        with pytest.raises(GradeError, match="the most that is copied"):
            await grade(pool, {}, tmp_path / "work")


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
