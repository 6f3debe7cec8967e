"""Checkpoints: the model in Hugging Face format and, beside it, what the trainer needs to go on.

`checkpoints/step-000123/` is a model folder that transformers loads and `longrein serve` serves, with `trainer.json` (step,
version, task order) and `trainer.pt` (optimizer, random generators) in it. It is written beside its place, flushed to
the disk and renamed, and `checkpoints/latest` names the newest; a crash leaves the one before. Only the newest keeps
`trainer.pt`, which is twice the size of the model.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from longrein.config import ConfigError
from longrein.records import Json

if TYPE_CHECKING:
    from longrein.trainer.student import Student


class TrainerState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a run stands after a step."""

    step: int
    version: int
    order: Json
    """State of the task order."""
    seconds: float
    """Time spent on steps so far (`trainer.max_seconds` counts it)."""
    groups: Json = {}
    """State of the groups: second tries, failures in a row."""
    watch: Json = {}
    """State of the warnings."""


def save(run_folder: Path, student: Student, state: TrainerState) -> Path:
    """Write the checkpoint of `state.step` and make it the latest; its folder is returned."""
    checkpoints = run_folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    folder = checkpoints / f"step-{state.step:06d}"
    for left in checkpoints.glob(".*.writing"):  # by a crash
        shutil.rmtree(left, ignore_errors=True)
        left.unlink(missing_ok=True)
    temporary = checkpoints / f".{folder.name}.writing"
    student.save(temporary)
    (temporary / "trainer.json").write_bytes(msgspec.json.encode(state) + b"\n")
    _flush(temporary)
    if folder.exists():  # of the same step, renamed before a crash and not yet the latest
        aside = checkpoints / f".{folder.name}.undone.writing"
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    temporary.rename(folder)
    _write_latest(checkpoints, folder.name)
    for older in checkpoints.glob("step-*/trainer.pt"):
        if older.parent != folder:
            older.unlink()
    return folder


def latest(run_folder: Path) -> Path | None:
    """Folder of the newest checkpoint; None before the first. Raises `ConfigError` when it is gone."""
    file = run_folder / "checkpoints" / "latest"
    try:
        name = file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    folder = run_folder / "checkpoints" / name
    if not (folder / "trainer.json").exists():
        raise ConfigError(
            f"{file}: names {name}, which is no whole checkpoint any more; put the folder back, or start the run anew "
            "(--overwrite)"
        )
    return folder


def read_state(folder: Path) -> TrainerState:
    """The trainer state of a checkpoint. Raises `ConfigError` when the checkpoint cannot be gone on from."""
    if not (folder / "trainer.pt").exists():
        raise ConfigError(f"{folder}: holds no trainer.pt, so a run cannot go on from it")
    try:
        return msgspec.json.decode((folder / "trainer.json").read_bytes(), type=TrainerState)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{folder / 'trainer.json'}: cannot be read: {error}") from None


def _flush(folder: Path) -> None:
    for file in [*folder.rglob("*"), folder]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_latest(checkpoints: Path, name: str) -> None:
    temporary = checkpoints / ".latest.writing"
    temporary.write_text(name + "\n", encoding="utf-8")
    _flush(temporary)
    temporary.rename(checkpoints / "latest")
    descriptor = os.open(checkpoints, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
