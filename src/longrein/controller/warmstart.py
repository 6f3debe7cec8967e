"""The controller's side of starting agents: one launcher process, and a handle on every agent it started.

`supervisor.py` is the other side and says who watches whom. With `agent.preload` the launcher imports the named modules
once and agents are forks of it that run the unmodified script, so that a start costs no import; without, it is a small
process that any command is started from. Either way an agent ends with all of its processes gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longrein.config import ConfigError
from longrein.records import Usage

SUPERVISOR = Path(__file__).with_name("supervisor.py")
PRELOAD_SECONDS = 300.0
LIMITS = {"CORE": 0}


class StartError(ConfigError):
    """An agent that can be started in no attempt: a command, field or module that is wrong. Says what to do."""


class InfrastructureError(Exception):
    """An attempt that was lost without its agent's doing; another one may succeed."""


@dataclass(frozen=True)
class Program:
    """What an agent runs. `exec`: `target` is an executable file, `arguments` its whole argv. `script`, `module` and
    `code`: what `python FILE`, `python -m MODULE` and `python -c CODE` run in a preloaded interpreter, and the arguments
    that follow."""

    kind: Literal["exec", "script", "module", "code"]
    target: str
    arguments: list[str]


def preloaded_program(command: Sequence[str]) -> Program:
    """The program of a command that a preloaded interpreter can run: [python, script.py, …] or [python, -m, module, …].

    Raises `StartError` for every other form.
    """
    if len(command) >= 2 and not command[1].startswith("-"):
        return Program("script", command[1], list(command[2:]))
    if len(command) >= 3 and command[1] == "-m":
        return Program("module", command[2], list(command[3:]))
    raise StartError(
        f"agent.preload: the command {list(command)} cannot run in a preloaded interpreter; it has to be "
        "[python, script.py, …] or [python, -m, module, …]. Change agent.command or leave agent.preload out"
    )


@dataclass(frozen=True)
class Exit:
    """How an agent ended. `code` is negative for a signal. Usage is that of all its processes."""

    code: int
    usage: Usage


class Process:
    """A started agent."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer

    async def wait(self) -> Exit:
        """Wait until every process of the agent is gone. Raises `InfrastructureError` when its supervisor died."""
        report = await _message(self._reader)
        return Exit(report["exit_code"], Usage(report["wall_seconds"], report["cpu_seconds"], report["max_rss_bytes"]))

    def end(self, grace_seconds: float) -> None:
        """Ask all processes of the agent to end, and kill those that are left after the grace; `wait` for it."""
        self._writer.write(json.dumps({"end": grace_seconds}).encode() + b"\n")

    def close(self) -> None:
        """Let go of the agent; kills what still runs of it."""
        self._writer.close()


class Launcher:
    """The process that agents are started from; started at the first need, and again if it was lost.

    `python` is the interpreter it runs in, `modules` what it imports beforehand, `environment` what those imports see,
    `log` the file that its own output goes to.
    """

    def __init__(self, python: str, modules: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.python = python
        self.modules = tuple(modules)
        self._environment = dict(environment)
        self._log = log
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._unfit: StartError | None = None

    async def start(self) -> None:
        """Start the launcher unless it runs. Raises `StartError` for modules that cannot be preloaded."""
        async with self._lock:
            if self._unfit is not None:
                raise self._unfit
            if self._process is not None and self._process.returncode is None:
                return
            self._forget()
            ours, theirs = socket.socketpair()
            with theirs:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                with self._log.open("ab") as log:
                    self._process = await asyncio.create_subprocess_exec(
                        self.python,
                        *(() if self.modules else ("-I",)),
                        str(SUPERVISOR),
                        str(theirs.fileno()),
                        *self.modules,
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=self._environment,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
            ours.setblocking(False)
            self._control = ours
            try:
                async with asyncio.timeout(PRELOAD_SECONDS):
                    answer = await _first_line(ours)
            except TimeoutError:
                self._kill()
                self._unfit = StartError(f"agent.preload: importing {', '.join(self.modules)} took over 5 minutes")
                raise self._unfit from None
            if "error" in answer:
                self._unfit = StartError(answer["error"])
                raise self._unfit
            if "ready" not in answer:
                raise InfrastructureError(f"the launcher did not start; its log is {self._log}")

    async def spawn(
        self,
        program: Program,
        *,
        environment: Mapping[str, str],
        directory: Path,
        stdout: Path,
        stderr: Path,
        confine: Mapping[str, Any] | None = None,
    ) -> Process:
        """Start a program in its own session, with exactly this environment, confined by a plan (`Confined.plan`).

        Raises `InfrastructureError` when it could not be started, `StartError` for modules that cannot be preloaded.
        """
        await self.start()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                await self._hand_over(theirs)
        except OSError as error:
            ours.close()
            self._kill()
            raise InfrastructureError(f"the launcher is gone ({error}); its log is {self._log}") from None
        reader, writer = await asyncio.open_connection(sock=ours)
        request = {
            "program": [program.kind, program.target, program.arguments],
            "environment": dict(environment),
            "directory": str(directory),
            "stdout": str(stdout),
            "stderr": str(stderr),
            "limits": LIMITS,
            **({"confine": dict(confine)} if confine else {}),
        }
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            answer = await _message(reader)
        except BaseException:
            writer.close()
            raise
        if "error" in answer:
            writer.close()
            raise InfrastructureError(f"starting {program.target} failed: {answer['error']}")
        return Process(answer["pid"], reader, writer)

    async def close(self) -> None:
        """End the launcher, once the agents that it started have ended."""
        self._forget()
        if self._process is not None:
            try:
                async with asyncio.timeout(5.0):
                    await self._process.wait()
            except TimeoutError:
                self._kill()
                await self._process.wait()

    async def _hand_over(self, channel: socket.socket) -> None:
        assert self._control is not None
        while True:
            try:
                socket.send_fds(self._control, [b"s"], [channel.fileno()])
                return
            except BlockingIOError:  # the launcher is behind by a socket buffer of starts
                await asyncio.sleep(0.005)

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def _kill(self) -> None:
        self._forget()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


async def _first_line(channel: socket.socket) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    line = b""
    while not line.endswith(b"\n"):
        piece = await loop.sock_recv(channel, 65536)
        if not piece:
            return {}
        line += piece
    return json.loads(line)


async def _message(reader: asyncio.StreamReader) -> dict[str, Any]:
    try:
        line = await reader.readline()
    except ConnectionError:
        line = b""
    if not line:
        raise InfrastructureError("the agent's supervisor was killed")
    return json.loads(line)


def running_interpreter() -> str:
    """What `python` in a command means: the interpreter that Longrein itself runs in, with its packages."""
    return sys.executable
