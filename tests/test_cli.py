"""The commands as a person meets them: exit status, one-line errors, a quick start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from longrein import cli


def status_and_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        status = cli.main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    return status, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "none.toml"], "longrein: none.toml: no such run file"),
        (["config", "--set", "modle.path=4"], "longrein: modle: unknown option; did you mean model?"),
        (
            ["config", "--set", "trainer.steps=-1"],
            "longrein: trainer.steps: Input should be greater than or equal to 0",
        ),
        (["gateway", "--set", "engine.kind=openai"], "longrein: engine.url"),
        (["report", "nowhere"], "longrein: nowhere: no such run folder"),
        (["compare", "nowhere"], "longrein: nowhere: no such run folder"),
        (["trian"], "invalid choice: 'trian'"),
    ],
)
def test_wrong_configuration_is_one_line_and_status_two(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, error = status_and_error(arguments, capsys)
    assert status == 2
    assert said in error
    assert "Traceback" not in error


def write_run_file(folder: Path, more: str = "") -> Path:
    file = folder / "run.toml"
    (folder / "tasks.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    file.write_text(
        f"[run]\ndir = '{folder}/runs'\n[model]\npath = '{folder}/model'\n[agent]\ncommand = ['true']\n"
        f"[task]\ntrain = 'tasks.jsonl'\nheld_out = 'tasks.jsonl'\n[reward]\nfunction = 'grader:grade'\n{more}"
    )
    return file


def test_train_refuses_a_run_that_was_started_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "metrics.jsonl").write_text("")
    status, error = status_and_error(["train", str(file)], capsys)
    assert status == 2
    assert "holds a run already" in error
    for choice in ("--set run.name=NAME", "--resume", "--overwrite"):
        assert choice in error


def test_train_refuses_to_resume_what_was_never_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, error = status_and_error(["train", str(write_run_file(tmp_path)), "--resume"], capsys)
    assert (status, "holds no run" in error) == (2, True)


def test_train_names_a_broken_task_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_run_file(tmp_path)
    (tmp_path / "tasks.jsonl").write_text('{"a": 1}\n{"a": \n')
    status, error = status_and_error(["train", str(file)], capsys)
    assert status == 2
    assert f"task.train: {tmp_path}/tasks.jsonl:2: not valid JSON" in error
    assert not (tmp_path / "runs").exists()


def test_config_prints_what_it_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_run_file(tmp_path)
    assert cli.main(["config", str(file), "--set", "trainer.steps=7"]) == 0
    printed = capsys.readouterr().out
    assert "steps = 7" in printed
    resolved = tmp_path / "elsewhere" / "resolved.toml"
    resolved.parent.mkdir()
    resolved.write_text(printed)
    assert cli.main(["config", str(resolved)]) == 0
    assert capsys.readouterr().out == printed


def test_config_defaults_lists_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--defaults"]) == 0
    printed = capsys.readouterr().out
    assert "group_size = 8  # Rollouts of one task whose rewards are compared." in printed


def test_a_command_starts_without_what_it_does_not_need() -> None:
    program = (
        "import sys; from longrein import cli; cli.main(['config']); "
        "print([m for m in ('torch', 'transformers', 'matplotlib', 'rich', 'httpx') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
