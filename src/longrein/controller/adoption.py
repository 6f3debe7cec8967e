"""What outlives a controller, and how the next one finds it: the run's `control` folder.

The folder holds the lock that keeps a second controller out, the seconds for which attempts' clocks have stood still, and
for every attempt that runs a journal and a socket, which its supervisor makes (`supervisor.py` says what is in them). No
agent is told of it, and only the controller's user can look into it.

A new controller reads the journals: it connects to a supervisor that still watches and goes on where the other one was,
or reads how the agent ended meanwhile. What is left of an attempt whose supervisor is gone it kills: the agent's process
by its number and start time, its descendants, and whatever names the attempt's task file in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from longrein.config import ConfigError
from longrein.controller.warmstart import LAUNCHER_MARK, Exit, InfrastructureError, Process, exit_of, hear
from longrein.records import Attempt, Json

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 20.0  # a supervisor that lives answers at once; one that was stopped or is starved does not
UNKILLABLE_SECONDS = 10.0


@dataclass(frozen=True)
class Journal:
    """What is known of an attempt's processes. A process is its number and start time."""

    rollout_id: str
    attempt_id: str
    started_at: float
    """When the attempt was started, as the gateway recorded it: a run that was thrown away had the same ids."""
    began: float
    """When the supervisor began, in seconds since the epoch."""
    held: float
    """`Control.held` when the attempt began."""
    gateway: str
    """The gateway's instance when the attempt began."""
    task_file: str
    boot: str
    supervisor: tuple[int, int | None]
    agent: tuple[int, int | None] | None
    exit: Exit | None
    """How the agent ended; None while it runs, or if its supervisor did not live to tell."""

    @property
    def of(self) -> tuple[str, str]:
        return self.rollout_id, self.attempt_id


@dataclass
class Control:
    """The control folder of a run, held by this process. Made by `take_control`."""

    folder: Path
    adopt_seconds: float
    held: float = 0.0
    """Seconds for which the gateway was paused or away while agents ran, over all controllers of the run."""
    gateway: Callable[[], str] = str
    """Gives the gateway's instance."""
    _known: str = field(default="", init=False)

    def request(self, attempt: Attempt, task_file: Path) -> Json:
        """The part of a supervisor's request that has it write a journal and wait for the next controller."""
        note = {
            "rollout_id": attempt.rollout_id,
            "attempt_id": attempt.attempt_id,
            "started_at": attempt.started_at,
            "held": self.held,
            "gateway": self.gateway(),
            "task_file": str(task_file),
        }
        return {
            "folder": str(self.folder),
            "name": _name(attempt.rollout_id, attempt.attempt_id),
            "controller": self._known,
            "seconds": self.adopt_seconds,
            "note": note,
        }

    def add_held(self, seconds: float) -> None:
        self.held += seconds
        part = self.folder / "held.part"
        part.write_text(repr(self.held))
        part.replace(self.folder / "held")

    def journals(self) -> list[Journal]:
        """The journals of all attempts that were not forgotten."""
        found = [_read(file) for file in sorted(self.folder.glob("*.jsonl"))]
        return [journal for journal in found if journal is not None]

    def journal(self, rollout_id: str, attempt_id: str) -> Journal | None:
        return _read(self.folder / f"{_name(rollout_id, attempt_id)}.jsonl")

    def forget(self, rollout_id: str, attempt_id: str) -> None:
        """Remove an attempt's journal, once nothing of the attempt is left to be done."""
        for ending in ("sock", "jsonl"):
            (self.folder / f"{_name(rollout_id, attempt_id)}.{ending}").unlink(missing_ok=True)

    async def adopt(self, journal: Journal) -> Process | Exit:
        """Take over a running agent, or how it ended. Raises `InfrastructureError` when its supervisor is lost."""
        if journal.exit is not None:
            return journal.exit
        if _lives(journal, journal.supervisor):
            with contextlib.suppress(OSError, InfrastructureError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await self._connect(journal)
        journal = self.journal(*journal.of) or journal
        if journal.exit is not None:
            return journal.exit
        raise InfrastructureError("the agent's supervisor was lost while there was no controller")

    async def _connect(self, journal: Journal) -> Process:
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            # The path of a socket may have some hundred characters only.
            short = f"/proc/self/fd/{folder}" if sys.platform == "linux" else self.folder
            name = f"{short}/{_name(*journal.of)}.sock"
            reader, writer = await asyncio.open_unix_connection(name)
        finally:
            os.close(folder)
        try:
            answer = await hear(reader)
        except BaseException:
            writer.close()
            raise
        return Process(answer["pid"], reader, writer, watched_seconds=answer["watched_seconds"])

    async def end(self, journal: Journal) -> None:
        """End an attempt that nobody goes on with: every process of it is gone afterwards."""
        if journal.exit is not None:
            return
        with contextlib.suppress(OSError, InfrastructureError, TimeoutError):
            if _lives(journal, journal.supervisor):
                async with asyncio.timeout(ANSWER_SECONDS):
                    process = await self._connect(journal)
                    try:
                        process.end(0.0, "stop")
                        await process.wait()
                    finally:
                        process.close()
        await self.end_left(journal)

    async def end_left(self, journal: Journal) -> None:
        """Kill what is left of an attempt whose supervisor is lost, the supervisor itself included."""
        _kill(journal, journal.supervisor)
        give_up = time.monotonic() + UNKILLABLE_SECONDS
        while left := await asyncio.to_thread(_kill_left, journal):
            if time.monotonic() > give_up:
                logger.warning("attempt %s of rollout %s: %d processes cannot be ended", *reversed(journal.of), left)
                return
            await asyncio.sleep(0.02)


@contextmanager
def take_control(folder: Path, adopt_seconds: float) -> Iterator[Control]:
    """Hold a run's control folder. Raises `ConfigError` while another controller holds it."""
    import fcntl  # not on Windows, where no controller runs

    from longrein.controller.supervisor import identity

    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    file = os.open(folder / "controller", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.pread(file, 100, 0).decode(errors="replace").partition(" ")[0]
            raise ConfigError(
                f"run.name: a controller of the run {folder.parent} works already (process {pid or 'unknown'}); end it, "
                "or choose another run.name"
            ) from None
        control = Control(folder, adopt_seconds)
        control._known = "{} {}\n".format(*identity(os.getpid()))
        os.ftruncate(file, 0)
        os.pwrite(file, control._known.encode(), 0)  # before any journal is read: see supervisor.begin_journal
        with contextlib.suppress(OSError, ValueError):
            control.held = float((folder / "held").read_text())
        yield control
    finally:
        os.close(file)


def _name(rollout_id: str, attempt_id: str) -> str:
    """The journal's file name: ids may be longer than a name, and hold what a name may not."""
    return hashlib.sha256(f"{rollout_id}\0{attempt_id}".encode()).hexdigest()[:24]


def _read(file: Path) -> Journal | None:
    """A journal; None if it is not there, or its supervisor was killed before its first line was whole."""
    try:
        *lines, _ = file.read_bytes().split(b"\n")
    except OSError:
        return None
    said: dict[str, Any] = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # cut short by a full disk, with the next line behind it
            said |= json.loads(line)
    if "supervisor" not in said:
        return None
    agent, ended = said.pop("agent", None), said.pop("exit", None)
    return Journal(
        **{**said, "supervisor": tuple(said["supervisor"])},
        agent=tuple(agent) if agent else None,
        exit=exit_of(ended) if ended else None,
    )


# --- Processes ----------------------------------------------------------------------------------------------------


def _lives(journal: Journal, process: tuple[int, int | None]) -> bool:
    from longrein.controller.supervisor import boot, start_time  # needs the module resource, which Windows lacks

    pid, start = process
    return start is not None and journal.boot == boot() and start_time(pid) == start


def _kill(journal: Journal, process: tuple[int, int | None]) -> bool:
    """Kill a process, if it is that one and not another one of the same number; whether it was there."""
    if not _lives(journal, process):
        return False
    pid = process[0]
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not hasattr(os, "pidfd_open"):
            os.kill(pid, signal.SIGKILL)
            return True
        held = os.pidfd_open(pid)  # stands for the process that has the number now, and for no later one
        try:
            if _lives(journal, process):
                signal.pidfd_send_signal(held, signal.SIGKILL)
        finally:
            os.close(held)
    return True


def _kill_left(journal: Journal) -> int:
    """Kill the processes of an attempt; how many there were."""
    from longrein.controller.supervisor import boot, descendants, start_time

    if journal.boot != boot():
        return 0
    since = journal.supervisor[1] or 0
    heads = [
        pid
        for pid in psutil.pids()
        if pid != os.getpid() and ((start := start_time(pid)) or -1) >= since and _belongs(journal, pid, start)
    ]
    found = {pid for head in heads for pid in (head, *descendants(head))}
    return sum(_kill(journal, (pid, start_time(pid))) for pid in found)


def _belongs(journal: Journal, pid: int, start: int | None) -> bool:
    """Whether a process is the agent, was given its environment, or is a fork of the launcher in the agent's session."""
    if (pid, start) == journal.agent:
        return True
    try:
        environment = psutil.Process(pid).environ()
        if environment.get("LONGREIN_TASK") == journal.task_file:
            return True
        return journal.agent is not None and LAUNCHER_MARK in environment and os.getsid(pid) == journal.agent[0]
    except (psutil.Error, OSError):
        return False
