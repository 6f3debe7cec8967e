"""Copies of folders that somebody else wrote, and files laid over them."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

MOST_BYTES = 64 * 1024 * 1024
MOST_FILES = 20_000


class SandboxError(Exception):
    """Code cannot be run in isolation here, or its files are more than fit. Says what to do."""


def copy_tree(source: Path, target: Path, *, most_bytes: int = MOST_BYTES, most_files: int = MOST_FILES) -> None:
    """Copy a folder that somebody else wrote: regular files and folders, and those links that stay inside it.

    Links that lead out, sockets, pipes and devices are left out. `target` must not exist. Raises `SandboxError` when
    there is more than `most_bytes` or `most_files`.
    """
    source = source.resolve()
    target.mkdir(parents=True)
    left_bytes, left_files = most_bytes, most_files
    pending = [(source, target)]
    while pending:
        folder, copy = pending.pop()
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            status = entry.stat(follow_symlinks=False)
            left_files -= 1
            left_bytes -= status.st_size if stat.S_ISREG(status.st_mode) else 0
            if left_files < 0 or left_bytes < 0:
                raise SandboxError(
                    f"{source} holds more than {most_files} files or {most_bytes // 2**20} MiB, which is the most that is "
                    "copied for a grader; have the agent keep large files (environments, caches) outside"
                )
            if stat.S_ISDIR(status.st_mode):
                (copy / entry.name).mkdir()
                pending.append((Path(entry.path), copy / entry.name))
            elif stat.S_ISREG(status.st_mode):
                shutil.copyfile(entry.path, copy / entry.name, follow_symlinks=False)
                os.chmod(copy / entry.name, (status.st_mode & 0o777) | 0o600)
            elif stat.S_ISLNK(status.st_mode) and _stays_inside(Path(entry.path), source):
                os.symlink(os.readlink(entry.path), copy / entry.name)


def _stays_inside(link: Path, source: Path) -> bool:
    text = os.readlink(link)
    if os.path.isabs(text):  # would lead from the copy into the original
        return False
    try:
        return link.resolve().is_relative_to(source)
    except (OSError, RuntimeError):
        return False


def lay_over(overlay: Path, work: Path) -> None:
    """Put the overlay's files over a copied folder; what stands in their way there (links above all) is removed."""
    for folder, folders, files in os.walk(overlay):
        below = Path(folder).relative_to(overlay)
        for name in folders:
            place = work / below / name
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                place.unlink()
            place.mkdir(exist_ok=True)
        for name in files:
            place = work / below / name
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            elif place.is_symlink() or place.exists():
                place.unlink()
            shutil.copy(Path(folder) / name, place)
