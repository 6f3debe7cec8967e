"""An attempt's working directory: a copy of the run file's workspace, with as much of its Git data as the run file says."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from longrein.controller.warmstart import StartError

MODES = ("hide", "squash", "keep")

_NO_CONFIGURATION = {
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}
_IDENTITY = ("-c", "user.name=workspace", "-c", "user.email=workspace@localhost")


def make_workspace(source: str, work: Path, git: str) -> None:
    """Make the folder `work`: a copy of `source`, or empty without one.

    `git`: "keep" copies all Git data with its history; "hide" leaves out whatever is named .git, at any depth; "squash"
    does so too and makes one fresh commit of all files that are not ignored. Raises `StartError`.
    """
    if git not in MODES:
        raise StartError(f"workspace.git: {git!r} is none of {', '.join(MODES)}")
    if not source:
        work.mkdir()
        return
    if not Path(source).is_dir():
        raise StartError(f"agent.workspace: {source} is not a folder")
    ignore = None if git == "keep" else shutil.ignore_patterns(".git")
    shutil.copytree(source, work, symlinks=True, ignore=ignore)
    if git == "squash":
        _commit(work)


def _commit(work: Path) -> None:
    program = shutil.which("git")
    if program is None:
        raise StartError("workspace.git = 'squash' needs git; install it, or choose hide or keep")
    for arguments in (
        ("init", "--quiet", "--template=", "--initial-branch=main"),
        ("add", "--all"),
        (*_IDENTITY, "commit", "--quiet", "--allow-empty", "--no-verify", "--no-gpg-sign", "--message", "Workspace"),
    ):
        done = subprocess.run(
            [program, *arguments],
            cwd=work,
            env={"PATH": os.environ.get("PATH", os.defpath), **_NO_CONFIGURATION},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise StartError(f"workspace.git = 'squash': git {arguments[0]} failed in {work}: {done.stderr.strip()}")
