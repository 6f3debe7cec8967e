"""What of the file system agents of another user than the controller's may not see, and what they have to reach.

A run's folder is hidden from them, and so is a folder that is closed to others on the way to what they need, such as root's
home: in a mount namespace of the agent's own it is empty but for that.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path

from longrein import config
from longrein.controller.warmstart import StartError
from longrein.sandbox import bubblewrap

_CAP_SYS_ADMIN = 21


def close_run_folder(run: Path) -> None:
    """Leave nothing of a run's folder to other users but the attempts' directories, which are closed one by one."""
    for folder in (run, run / "attempts"):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o711)
    for entry in os.scandir(run):
        if entry.name not in ("attempts", "gateway", "relay") and not entry.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                os.chmod(entry.path, stat.S_IMODE(entry.stat().st_mode) & 0o700)


def hidden_from_agents(options: config.Config) -> tuple[tuple[str, ...], tuple[tuple[str, str, bool], ...]]:
    """What is hidden from agents of another user, and what of it is shown. Nothing where mounts cannot be made.

    Raises `ConfigError` when agents would then not reach what they need.
    """
    folder = str(Path.cwd() / options.run.folder)
    path = [entry for entry in os.environ.get("PATH", "").split(os.pathsep) if os.path.isabs(entry)]
    program = options.agent.command[0] if options.agent.command else ""
    needed = [folder, *bubblewrap.interpreter_folders(), *path, *sys.path, *_environment_of(program)]
    needed += [one for given in options.agent.expose for one in (given, os.path.realpath(given))]
    needed = [os.path.abspath(one) for one in dict.fromkeys(needed) if one and os.path.exists(one)]
    needed = [one for one in needed if one not in ("/", os.getcwd()) or one == folder]
    closed = {one: top for one in needed if (top := closed_on_the_way(one)) is not None}
    run = str(options.run.path)
    if not may_mount():
        must = [*bubblewrap.interpreter_folders(), run]
        if blocked := [one for one in must if closed_on_the_way(one) is not None]:
            raise StartError(
                f"agent.user: other users than root cannot reach {blocked[0]}, because {closed_on_the_way(blocked[0])} is closed to "
                "them, and this container does not allow mounts (CAP_SYS_ADMIN) that would show it to them. Install "
                "Longrein and keep its runs where others may read, run it as an ordinary user, or accept agents that are "
                "root by agent.user = 'root'"
            )
        return (), ()
    hide, show = {run}, dict[str, None]()
    if (top := closed_on_the_way(run)) is not None:
        hide.add(top)
    for one, top in closed.items():
        hide.add(top)
        for shown in open_parts(one):
            show[shown] = None
    shown = [one for one in show if one not in hide and not bubblewrap.is_within(one, [run])]
    return tuple(sorted(hide)), tuple((one, one, False) for one in shown)


def _environment_of(program: str) -> list[str]:
    """The folders of a virtual environment that a command's Python is of."""
    environment = Path(program).parent.parent
    settings = environment / "pyvenv.cfg"
    if not os.path.isabs(program) or not settings.is_file():
        return []
    found = [str(environment)]
    for line in settings.read_text(errors="replace").splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "home":
            found += [str(Path(value.strip()).parent), str(Path(value.strip()).resolve().parent)]
    return found


def closed_on_the_way(path: str) -> str | None:
    """The uppermost folder on the way to `path`, itself included, that others may not pass."""
    for folder in (*reversed(Path(path).parents), Path(path)):
        with contextlib.suppress(OSError):
            mode = folder.stat().st_mode
            if stat.S_ISDIR(mode) and not mode & stat.S_IXOTH:
                return str(folder)
    return None


def open_parts(path: str) -> list[str]:
    """`path`, or what is in it when the folder itself is closed."""
    mode = os.stat(path).st_mode
    if not stat.S_ISDIR(mode) or mode & stat.S_IXOTH:
        return [path]
    return [entry.path for entry in os.scandir(path) if not entry.is_symlink()]


def may_mount() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines() if sys.platform.startswith("linux") else ():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_SYS_ADMIN & 1)
    return False
