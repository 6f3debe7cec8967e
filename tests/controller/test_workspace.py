"""Working directories, and how much of a repository's past is in them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from longrein.controller.warmstart import StartError
from longrein.controller.workspace import make_workspace

from .fakes import write

SECRET = "the answer"

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    words = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", *arguments]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose history, reflog and packs hold what its files do not, with a submodule's .git file."""
    folder = tmp_path / "repository"
    write(folder, "src/main.py", "print()\n").chmod(0o755)
    write(folder, ".gitignore", "built\n")
    write(folder, "built/out", "x")
    (folder / "link").symlink_to("src/main.py")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    write(folder, "solution", SECRET)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", SECRET)
    git(folder, "reset", "-q", "--hard", "HEAD~1")
    write(folder, "part/.git", "gitdir: ../.git/modules/part\n")
    return folder


def all_of(folder: Path) -> str:
    return git(folder, "log", "--all", "-p") + git(folder, "reflog", "--all") + git(folder, "fsck", "--lost-found")


@needs_git
def test_hide_leaves_no_git_data(repository: Path, tmp_path: Path) -> None:
    make_workspace(str(repository), tmp_path / "work", "hide")
    names = {str(path.relative_to(tmp_path / "work")) for path in (tmp_path / "work").rglob("*")}
    assert names == {"src", "src/main.py", ".gitignore", "built", "built/out", "link", "part"}
    assert os.access(tmp_path / "work/src/main.py", os.X_OK)
    assert (tmp_path / "work/link").is_symlink()


@needs_git
def test_squash_is_one_commit_that_git_can_work_with(repository: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    make_workspace(str(repository), work, "squash")
    assert git(work, "rev-list", "--all", "--count") == "1\n"
    assert git(work, "status", "--short") == ""
    assert git(work, "count-objects", "-v").splitlines()[0] == "count: 6"  # three files, two folders, a commit
    assert SECRET not in all_of(work)
    assert "dangling" not in all_of(work)
    assert not (work / ".git/hooks").exists()
    (work / "src/main.py").write_text("changed\n")
    assert git(work, "diff", "--stat").startswith(" src/main.py | 2 +-")


@needs_git
def test_keep_keeps_all(repository: Path, tmp_path: Path) -> None:
    make_workspace(str(repository), tmp_path / "work", "keep")
    assert SECRET in git(tmp_path / "work", "reflog", "--all")


def test_what_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match=r"workspace\.git: 'all' is none of hide, squash, keep"):
        make_workspace("", tmp_path / "work", "all")
    with pytest.raises(StartError, match=r"agent\.workspace: /no/such is not a folder"):
        make_workspace("/no/such", tmp_path / "work", "hide")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (tmp_path / "source").mkdir()
    with pytest.raises(StartError, match=r"squash' needs git"):
        make_workspace(str(tmp_path / "source"), tmp_path / "work", "squash")
    make_workspace("", tmp_path / "empty", "hide")
    assert list((tmp_path / "empty").iterdir()) == []
