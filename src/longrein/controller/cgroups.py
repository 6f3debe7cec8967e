"""Linux control groups: limits of all of an attempt's processes together, where this process may make them.

Version 2 is used where its controllers are at hand, version 1 where they are mounted, and in a mixed system both: limits
by version 1, `cgroup.kill` by version 2. What can be had is found out by trying.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
MEMBERSHIP = Path("/proc/self/cgroup")
PREFIX = "longrein-"
EMPTY_SECONDS = 5.0


@dataclass(frozen=True)
class Cgroups:
    """Folders that groups are made in. None of them where there are no control groups to be had."""

    memory: Path | None = None
    processes: Path | None = None
    kill: Path | None = None
    version: int = 0
    """Of what sets the limits."""

    @property
    def limits(self) -> str:
        """What is limited by groups, in words."""
        names = [name for name, folder in (("memory", self.memory), ("processes", self.processes)) if folder]
        return f"{' and '.join(names)} by control groups (version {self.version})" if names else ""


@dataclass(frozen=True)
class Group:
    """The groups of one attempt."""

    folders: tuple[Path, ...]

    @property
    def procs(self) -> list[str]:
        """Files that a process writes its id to, to belong to the groups with all that it starts."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def out_of_memory(self) -> bool:
        """Whether the kernel killed a process for the memory limit."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    for line in (folder / name).read_text().splitlines():
                        word, _, count = line.partition(" ")
                        if word == "oom_kill" and count.strip() != "0":
                            return True
        return False

    def remove(self) -> None:
        """Kill what is still in the groups and remove them. Waits for the kernel to let go of what was killed."""
        give_up = time.monotonic() + EMPTY_SECONDS
        left = [*self.folders]
        while left:
            for folder in [*left]:
                try:
                    folder.rmdir()
                    left.remove(folder)
                except FileNotFoundError:
                    left.remove(folder)
                except OSError:
                    kill_all(folder)
            if left:
                if time.monotonic() > give_up:
                    return  # swept by the next controller
                time.sleep(0.005)


def kill_all(folder: Path) -> None:
    """SIGKILL to every process in a group."""
    try:
        (folder / "cgroup.kill").write_text("1")
    except OSError:
        with contextlib.suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(pid), signal.SIGKILL)


def make_group(cgroups: Cgroups, name: str, memory_bytes: int, processes: int) -> Group:
    """Groups for one attempt with its limits (0: none). Raises OSError."""
    folders: list[Path] = []
    try:
        for parent in dict.fromkeys((cgroups.memory, cgroups.processes, cgroups.kill)):
            if parent is not None:
                folder = parent / f"{PREFIX}{os.getpid()}-{name}"
                folder.mkdir(exist_ok=True)
                folders.append(folder)
                _limit(folder, memory_bytes, processes)
    except OSError:
        Group(tuple(folders)).remove()
        raise
    return Group(tuple(folders))


def _limit(folder: Path, memory_bytes: int, processes: int) -> None:
    wanted = [
        ("memory.max", memory_bytes, memory_bytes),
        ("memory.swap.max", memory_bytes, 0),
        ("memory.oom.group", memory_bytes, 1),
        ("memory.limit_in_bytes", memory_bytes, memory_bytes),
        ("memory.memsw.limit_in_bytes", memory_bytes, memory_bytes),
        ("pids.max", processes, processes),
    ]
    for name, limit, value in wanted:
        if limit and (folder / name).exists():
            try:
                (folder / name).write_text(str(value))
            except OSError:
                if name in ("memory.max", "memory.limit_in_bytes", "pids.max"):
                    raise


def find_cgroups() -> Cgroups:
    """Where groups with limits can be made, tried out; an empty `Cgroups` where nowhere."""
    places = _places()
    unified = places.get("")
    if unified is not None and _works(unified, "memory.max", enable=("memory", "pids")):
        return Cgroups(unified, unified if _works(unified, "pids.max") else None, unified, 2)
    memory, processes = places.get("memory"), places.get("pids")
    return Cgroups(
        memory if memory is not None and _works(memory, "memory.limit_in_bytes") else None,
        processes if processes is not None and _works(processes, "pids.max") else None,
        unified if unified is not None and _works(unified, "cgroup.kill") else None,
        1,
    )


def _works(parent: Path, file: str, enable: tuple[str, ...] = ()) -> bool:
    """Whether a group made in `parent` has this file, and processes can be put into it."""
    for controller in enable:
        with contextlib.suppress(OSError):  # already, or with processes of its own: then the file is missing below
            (parent / "cgroup.subtree_control").write_text(f"+{controller}")
    probe = parent / f"{PREFIX}{os.getpid()}-probe"
    try:
        probe.mkdir(exist_ok=True)
    except OSError:
        return False
    try:
        return os.access(probe / file, os.W_OK) and os.access(probe / "cgroup.procs", os.W_OK)
    finally:
        with contextlib.suppress(OSError):
            probe.rmdir()


def _places() -> dict[str, Path]:
    """This process's own groups, as folders: by controller of version 1, and version 2 under the empty name."""
    try:
        members = [line.split(":", 2) for line in MEMBERSHIP.read_text().splitlines()]
        mounts = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:
        return {}
    places: dict[str, Path] = {}
    for fields in mounts:
        separator = fields.index("-")
        kind, root, point, options = fields[separator + 1], fields[3], fields[4], fields[separator + 3].split(",")
        if kind not in ("cgroup", "cgroup2"):
            continue
        for _, controllers, path in members:
            names = [""] if kind == "cgroup2" and not controllers else controllers.split(",")
            for name in names:
                if (kind == "cgroup2") == (name == "") and (name == "" or name in options):
                    own = Path(point) / path.lstrip("/").removeprefix(root.lstrip("/")).lstrip("/")
                    places[name] = own if own.is_dir() else Path(point)
    return places


def sweep(cgroups: Cgroups) -> None:
    """Remove the empty groups of controllers that are gone."""
    for parent in dict.fromkeys((cgroups.memory, cgroups.processes, cgroups.kill)):
        if parent is None:
            continue
        with contextlib.suppress(OSError):
            for folder in parent.glob(f"{PREFIX}*-*"):
                pid = folder.name.removeprefix(PREFIX).split("-")[0]
                if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                    with contextlib.suppress(OSError):
                        folder.rmdir()
