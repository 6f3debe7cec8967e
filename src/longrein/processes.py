"""Child processes of a run: started with a log file, waited for, watched, started again, and ended with their parent.

A child leads a session of its own, so that Ctrl-C reaches only the parent, and holds the reading end of a pipe whose
writing end only the parent has: when the parent is gone, however it went, the child reads the pipe's end and stops.

A child that ends by itself is started again after a pause, as often as it may. One that ends soon after it was started,
other than by a signal, or that says by its exit status that its configuration is wrong, would do so again: it is an
error at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from longrein.textfile import tail

T = TypeVar("T")

log = logging.getLogger(__name__)

ORPHAN_SECONDS = 20.0  # time an orphaned child has to stop in an orderly way
SETTLED_SECONDS = 10.0  # a child that ended later than this had started
RESTART_WINDOW = 600.0  # seconds in which restarts are counted
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
WRONG_CONFIGURATION = 2  # exit status


class ChildFailed(Exception):
    """A child process ended by itself. The message names it and shows the end of its log."""


@dataclass(eq=False)
class Child:
    """A running `longrein NAME …`."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    pipe: int
    """Writing end of the pipe that tells the child that its parent lives."""
    again: list[str]
    """The arguments that it is started with again."""
    started_at: float
    restarts: list[float] = field(default_factory=list)
    """When it was started again, within the window."""

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
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1


class Children:
    """The child processes of one parent. As an async context manager it ends them, the last started first.

    Each is started again up to `max_restarts` times within `RESTART_WINDOW` seconds; `say` is told of it.
    """

    def __init__(
        self, stop_seconds: float, *, max_restarts: int = 0, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._stop_seconds = stop_seconds
        self._max_restarts = max_restarts
        self._say = say
        self._children: list[Child] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._closing = asyncio.Event()
        self._failed: asyncio.Future[ChildFailed] | None = None

    async def __aenter__(self) -> Children:
        self._failed = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._closing.set()
        for child in reversed(self._children):
            await child.stop(self._stop_seconds)
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def start(self, name: str, arguments: Sequence[str], log: Path) -> Child:
        """Start `longrein NAME ARGUMENTS…` with its output in `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        process, pipe = await _spawn(name, arguments, log)
        child = Child(name, process, log, pipe, list(arguments), time.monotonic())
        self._children.append(child)
        self._keepers.append(asyncio.create_task(self._keep(child)))
        return child

    async def guard(self, work: Awaitable[T]) -> T:
        """Wait for `work`. When a child ends for good before, `work` is cancelled and `ChildFailed` raised."""
        assert self._failed is not None, "used as a context manager"
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait([working, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise self._failed.result()
            return working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _keep(self, child: Child) -> None:
        """Start a child again whenever it ends, until it may not."""
        while True:
            failure = await child.failed()
            if self._closing.is_set():
                return
            pause = self._pause(child)
            if pause is None:
                self._end(failure)
                return
            how = str(failure).splitlines()[0]
            self._say(f"{how}; it is started again ({len(child.restarts)} of {self._max_restarts}; {child.log})")
            log.warning("%s; starting it again in %.1f s", failure, pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause)
            if self._closing.is_set():
                return
            await child.stop(0.0)
            try:
                child.process, child.pipe = await _spawn(child.name, child.again, child.log)
            except OSError as error:
                self._end(ChildFailed(f"the {child.name} process could not be started again: {error}"))
                return
            child.started_at = time.monotonic()
            if self._closing.is_set():
                await child.stop(self._stop_seconds)

    def _end(self, failure: ChildFailed) -> None:
        assert self._failed is not None, "used as a context manager"
        if not self._failed.done():
            self._failed.set_result(failure)

    def _pause(self, child: Child) -> float | None:
        """Seconds until an ended child is started again; None: it is not."""
        status, now = child.process.returncode, time.monotonic()
        assert status is not None
        ended_at_once = status >= 0 and now - child.started_at < SETTLED_SECONDS
        child.restarts = [at for at in child.restarts if now - at < RESTART_WINDOW]
        if status == WRONG_CONFIGURATION or ended_at_once or len(child.restarts) >= self._max_restarts:
            return None
        child.restarts.append(now)
        return min(FIRST_PAUSE * 2.0 ** (len(child.restarts) - 1), LONGEST_PAUSE)


async def _spawn(name: str, arguments: Sequence[str], log: Path) -> tuple[asyncio.subprocess.Process, int]:
    """Start `longrein NAME ARGUMENTS…`; the process, and the end of the pipe that it watches its parent by."""
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
    return process, writing


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
