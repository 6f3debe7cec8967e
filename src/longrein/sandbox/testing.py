"""Grading by hidden tests: pytest on a copy of an agent's files, with the tests and their configuration laid over it.

What the agent left behind for pytest does not count: its conftest.py files, pytest.ini and the like, plugins, compiled
modules, and files that would be imported in place of a hidden one are taken out of the copy first; pytest itself is
imported before anything of the agent's can be, from where the agent's files come last; and a run that did not end with a
whole report, whatever its exit status, is a failure.

What remains: a test that imports the agent's code shares its process with it. Code that is written against pytest's
inside can make an assertion pass there. Where that matters, have the tests start the agent's code as a process of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from longrein.sandbox.copying import SandboxError
from longrein.sandbox.running import Completed, Limits, run

_ORDER, _INI = ".longrein-order", ".longrein-pytest.ini"
_CONFIGURATION = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
_FOR_PYTEST = {"conftest.py", "pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "tox.ini"}

# Runs inside. The order (nonce, paths, arguments) is read and removed before anything of the agent's is imported; the
# report goes to what was standard output, which tests and the agent's code then find to be standard error.
_RUNNER = """\
import json, os, sys
with open("/work/.longrein-order") as file:
    order = json.load(file)
os.unlink("/work/.longrein-order")
report = os.dup(1)
os.dup2(2, 1)
import pytest
outcomes = {}
class Recorder:
    def pytest_collectreport(self, report):
        if report.failed:
            outcomes[report.nodeid or "collection"] = "error"
    def pytest_runtest_logreport(self, report):
        if report.failed:
            outcomes[report.nodeid] = "failed" if report.when == "call" else "error"
        elif report.when == "call" or report.skipped:
            outcomes.setdefault(report.nodeid, report.outcome)
def main(nonce, write=os.write, leave=os._exit, dump=json.dumps):
    status = int(pytest.main(order["arguments"], plugins=[Recorder()]))
    text = (nonce + dump({"status": status, "outcomes": outcomes}) + "\\n").encode()
    while text:
        text = text[write(report, text):]
    leave(status)
sys.path += order["path"]
main(order.pop("nonce"))
"""


@dataclass(frozen=True)
class Tested:
    """What hidden tests said."""

    passed: bool
    """Whether every hidden test file was run, every test in them passed, and the report is whole."""
    outcomes: dict[str, str]
    """By test (pytest's node id): passed, failed, error or skipped. Empty without a whole report."""
    reason: str
    """Why it is not passed; empty when it is."""
    completed: Completed


def run_pytest(
    directory: Path,
    hidden: Path,
    *,
    arguments: Sequence[str] = (),
    path: Sequence[str] = (".", "src"),
    skips_pass: bool = False,
    timeout: float = 60.0,
    limits: Limits | None = None,
    environment: Mapping[str, str] | None = None,
) -> Tested:
    """Run the tests of the folder `hidden` on a copy of `directory`, over which that folder is laid.

    `hidden` mirrors the agent's folder: hidden/tests/test_a.py takes the place of tests/test_a.py. Its own conftest.py
    files, and a pytest.ini, pyproject.toml, tox.ini or setup.cfg at its top, are used. `path` are folders of the agent
    that its modules are imported from, behind everything that is installed. `arguments` are further ones for pytest,
    which has to be installed beside Longrein; plugins are loaded by naming them (`-p NAME`), never by themselves. A test
    that was skipped has not passed unless `skips_pass`.

    Raises `SandboxError` as `run` does, and for a `hidden` without a test file.
    """
    hidden = Path(hidden)
    files = sorted(file.relative_to(hidden).as_posix() for file in hidden.rglob("*.py") if _is_test(file.name))
    if not files:
        raise SandboxError(f"{hidden} holds no test file (test_*.py or *_test.py)")
    nonce = secrets.token_hex(16)
    order = {
        "nonce": nonce,
        "path": [*_folders_of(hidden), *(os.path.normpath(f"/work/{folder}") for folder in path)],
        "arguments": [
            *("-c", _configuration(hidden), "--rootdir=/work", "--confcutdir=/work", "--import-mode=append"),
            *("-p", "no:cacheprovider", "-q", *arguments, *files),
        ],
    }

    def prepare(work: Path) -> None:
        neutralise(work, hidden)
        _write(work / _ORDER, json.dumps(order))
        _write(work / _INI, "[pytest]\n")

    completed = run(
        ["python", "-I", "-B", "-c", _RUNNER],
        directory,
        hidden,
        timeout=timeout,
        limits=limits or Limits(),
        environment={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **(environment or {})},
        prepare=prepare,
    )
    return _judged(completed, nonce, files, skips_pass)


def _judged(completed: Completed, nonce: str, files: Sequence[str], skips_pass: bool) -> Tested:
    report = _report(completed.stdout, nonce)
    if completed.timed_out:
        return Tested(False, {}, "the tests took too long", completed)
    if report is None:
        return Tested(False, {}, f"there is no whole report (exit status {completed.exit_code})", completed)
    outcomes: dict[str, str] = report["outcomes"]
    good = {"passed", "skipped"} if skips_pass else {"passed"}
    bad = [f"{name}: {outcome}" for name, outcome in outcomes.items() if outcome not in good]
    missing = [file for file in files if not any(name.split("::")[0] == file for name in outcomes)]
    if bad or missing or report["status"] != 0 or completed.exit_code != 0:
        why = bad or [f"{file}: no test was run" for file in missing] or [f"pytest ended with {report['status']}"]
        return Tested(False, outcomes, "; ".join(why[:5]), completed)
    return Tested(True, outcomes, "", completed)


def _report(text: str, nonce: str) -> dict | None:
    """The one line that begins with the nonce; None unless it is the last one and of the right form."""
    lines = text.splitlines()
    if not lines or not lines[-1].startswith(nonce):
        return None
    try:
        report = json.loads(lines[-1][len(nonce) :])
    except ValueError:
        return None
    whole = isinstance(report, dict) and isinstance(report.get("outcomes"), dict) and "status" in report
    return report if whole else None


def neutralise(work: Path, hidden: Path) -> None:
    """Take out of a copy what would configure pytest, or be imported in place of a file of `hidden`."""
    for folder, folders, files in os.walk(work):
        if "__pycache__" in folders:
            _remove(Path(folder) / "__pycache__")
            folders.remove("__pycache__")
        for name in files:
            if name in _FOR_PYTEST or name.endswith(".pyc"):
                _remove(Path(folder) / name)
    for file in sorted(hidden.rglob("*")):
        inside = file.relative_to(hidden)
        place = work / inside.parent
        if not place.is_dir() or not place.resolve().is_relative_to(work.resolve()):
            continue
        if file.is_dir():
            _remove_rivals(place, file.name, keep=file.name)
            if not (file / "__init__.py").exists():
                _remove_rivals(work / inside, "__init__", keep="")
        elif file.suffix == ".py":
            _remove_rivals(place, file.stem, keep=file.name)


def _remove_rivals(folder: Path, stem: str, keep: str) -> None:
    """Remove what Python could import as `stem` from a folder, except the name that is `keep`."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for rival in list(folder.iterdir()):
        if rival.name.split(".")[0] == stem and rival.name != keep:
            _remove(rival)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(file: Path, text: str) -> None:
    _remove(file)  # never through a link
    file.write_text(text, encoding="utf-8")


def _is_test(name: str) -> bool:
    return (name.startswith("test_") or name.endswith("_test.py")) and name.endswith(".py")


def _folders_of(hidden: Path) -> list[str]:
    """The folders of hidden Python files below the top, as they stand inside: their modules come before the agent's."""
    folders = sorted({file.parent.relative_to(hidden).as_posix() for file in hidden.rglob("*.py")} - {"."})
    return [f"/work/{folder}" for folder in folders]


def _configuration(hidden: Path) -> str:
    named = next((name for name in _CONFIGURATION if (hidden / name).is_file()), _INI)
    return f"/work/{named}"
