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
from typing import TYPE_CHECKING, Any

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


def save(run_folder: Path, student: Student, state: TrainerState) -> Path:
    """Write the checkpoint of `state.step` and make it the latest; its folder is returned."""
    import torch

    checkpoints = run_folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    folder = checkpoints / f"step-{state.step:06d}"
    temporary = checkpoints / f".step-{state.step:06d}.writing"
    shutil.rmtree(temporary, ignore_errors=True)
    student.policy.save(temporary)
    (temporary / "trainer.json").write_bytes(msgspec.json.encode(state) + b"\n")
    values: dict[str, Any] = {"learner": student.learner.state_dict(), "random": _random_state()}
    if student.policy.lora:  # the folder holds merged weights; going on needs the adapters themselves
        named = student.policy.model.named_parameters()
        values["adapters"] = {name: p.detach().cpu() for name, p in named if p.requires_grad}
    torch.save(values, temporary / "trainer.pt")
    _flush(temporary)
    shutil.rmtree(folder, ignore_errors=True)  # one of the same step, from before a resumption
    temporary.rename(folder)
    _write_latest(checkpoints, folder.name)
    for older in checkpoints.glob("step-*/trainer.pt"):
        if older.parent != folder:
            older.unlink()
    return folder


def latest(run_folder: Path) -> Path | None:
    """Folder of the newest checkpoint that was written whole, or None."""
    try:
        name = (run_folder / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    folder = run_folder / "checkpoints" / name
    return folder if (folder / "trainer.json").exists() else None


def read_state(folder: Path) -> TrainerState:
    """The trainer state of a checkpoint. Raises `ConfigError` when the checkpoint cannot be gone on from."""
    if not (folder / "trainer.pt").exists():
        raise ConfigError(f"{folder}: holds no trainer.pt, so a run cannot go on from it")
    try:
        return msgspec.json.decode((folder / "trainer.json").read_bytes(), type=TrainerState)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{folder / 'trainer.json'}: cannot be read: {error}") from None


def restore(folder: Path, student: Student) -> None:
    """Give the learner (and LoRA adapters, and random generators) the state that `save` wrote."""
    import torch

    values = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
    student.learner.load_state_dict(values["learner"])
    adapters = values.get("adapters")
    if adapters is not None:
        parameters = dict(student.policy.model.named_parameters())
        with torch.no_grad():
            for name, value in adapters.items():
                parameters[name].copy_(value)
    torch.set_rng_state(values["random"]["cpu"])
    if torch.cuda.is_available() and values["random"]["cuda"]:
        torch.cuda.set_rng_state_all(values["random"]["cuda"])


def _random_state() -> dict[str, Any]:
    import torch

    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


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
