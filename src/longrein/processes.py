"""Child processes of a run: started with a log file, waited for, watched, and ended with their parent.

A child leads a session of its own, so that Ctrl-C reaches only the parent, and holds the reading end of a pipe whose
writing end only the parent has: when the parent is gone, however it went, the child reads the pipe's end and stops.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from longrein.textfile import tail

T = TypeVar("T")

ORPHAN_SECONDS = 20.0  # time an orphaned child has to stop in an orderly way


class ChildFailed(Exception):
    """A child process ended by itself. The message names it and shows the end of its log."""


@dataclass
class Child:
    """A running `longrein NAME …`."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    pipe: int
    """Writing end of the pipe that tells the child that its parent lives."""

    async def failed(self) -> ChildFailed:
        """Wait until the process ends; an error that tells how."""
        status = await self.process.wait()
        how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
        text = tail(self.log, 20)
        shown = f"--- end of {self.log}\n{text}\n---" if text else f"({self.log} is empty)"
        return ChildFailed(f"the {self.name} process {how}\n{shown}")

    async def stop(self, seconds: float) -> None:
        """Ask the process to end, and kill it when it has not after `seconds`."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), seconds)
            except (TimeoutError, asyncio.CancelledError):
                self.process.kill()
                await self.process.wait()
        os.close(self.pipe)


class Children:
    """The child processes of one parent. As an async context manager it ends them, the last started first."""

    def __init__(self, stop_seconds: float) -> None:
        self._stop_seconds = stop_seconds
        self._children: list[Child] = []

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(self, *error: object) -> None:
        for child in reversed(self._children):
            await child.stop(self._stop_seconds)

    async def start(self, name: str, arguments: Sequence[str], log: Path) -> Child:
        """Start `longrein NAME ARGUMENTS…` with its output in `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "longrein.cli", name, *arguments, "--parent-pipe", str(reading)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(reading,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        child = Child(name, process, log, writing)
        self._children.append(child)
        return child

    async def guard(self, work: Awaitable[T]) -> T:
        """Wait for `work`. When a child ends before, `work` is cancelled and `ChildFailed` raised."""
        working = asyncio.ensure_future(work)
        watching = [asyncio.ensure_future(child.failed()) for child in self._children]
        try:
            await asyncio.wait([working, *watching], return_when=asyncio.FIRST_COMPLETED)
            failed = next((watch.result() for watch in watching if watch.done()), None)
            if failed is not None:
                raise failed
            return working.result()
        finally:
            for task in (working, *watching):
                task.cancel()
            await asyncio.gather(working, *watching, return_exceptions=True)


def stop_with_parent(pipe: int) -> None:
    """In a child: end this process in an orderly way (SIGTERM) when the parent is gone, and hard if that takes too long."""

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    os.set_inheritable(pipe, False)
    threading.Thread(target=watch, name="parent", daemon=True).start()
