"""Computes rewards: a warm worker process calls the run file's reward function, out of every agent's reach.

A worker inherits no credential, gets each attempt's data and returns its value by two pipes that nothing it starts
inherits, and works in no agent's directory: the function is given a bounded copy. A grade that takes too long costs the
worker its life, not the controller its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from longrein import config
from longrein.functions import load_function
from longrein.records import Event, Json
from longrein.sandbox import SandboxError, copy_tree

IMPORT_SECONDS = 120.0


class GradeError(Exception):
    """There is no reward. Says why and where to look."""


@dataclass(frozen=True)
class Grade:
    """A reward and the grader's further numbers."""

    reward: float
    metrics: dict[str, float]
    calls: dict[int, float] = field(default_factory=dict)
    """Rewards of single calls, by their number."""


def to_grade(value: Any) -> Grade:
    """The grade that a reward function's value stands for: a number, or a dict of numbers with `reward`.

    `calls` in such a dict is one of rewards of single calls, by the call's number, counted from 0. A bool is 0 or 1.
    Raises `GradeError` for anything else, NaN and infinity included.
    """
    if isinstance(value, dict):
        if "reward" not in value:
            raise GradeError(f"returned a dict without 'reward'; its keys are {sorted(map(str, value))}")
        calls = _call_rewards(value["calls"]) if "calls" in value else {}
        numbers = {str(name): _number(number, f"[{name!r}]") for name, number in value.items() if name != "calls"}
        return Grade(numbers.pop("reward"), numbers, calls)
    return Grade(_number(value, ""), {})


def _call_rewards(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in value):
        raise GradeError(f"returned {value!r:.80} for ['calls'], expected a dict from call numbers to rewards")
    return {number: _number(reward, f"['calls'][{number}]") for number, reward in value.items()}


def _number(value: Any, where: str) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        what = f"{type(value).__name__} {value!r:.80}" if value is not None else "None"
        raise GradeError(f"returned {what}{' for ' + where if where else ''}, expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise GradeError(f"returned {number}{' for ' + where if where else ''}, expected a finite number")
    return number


def posted_grade(events: Sequence[Event]) -> Grade:
    """The reward that an agent posted itself: the last of the attempt's reward events. Raises `GradeError`."""
    if not events:
        raise GradeError("no reward was posted: reward.from = 'agent' expects a reward event from the agent")
    data = events[-1].data
    try:
        return Grade(_number(data.get("value"), "value"), {})
    except GradeError as error:
        raise GradeError(f"the agent's last reward event {str(error).removeprefix('returned ')}") from None


class Graders:
    """A pool of workers that call `reward.function`. Use it as an async context manager.

    `folder` is where the function's module is looked for first, `environment` all that the workers inherit, `log` the
    file that they write to.
    """

    def __init__(
        self, reward: config.Reward, folder: Path, environment: Mapping[str, str], log: Path, *, workers: int
    ) -> None:
        self._reward = reward
        self._folder = folder
        self._environment = dict(environment)
        self._log = log
        self._free: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()  # the warmest first
        for _ in range(workers):
            self._free.put_nowait(None)  # not started yet

    async def __aenter__(self) -> Graders:
        return self

    async def __aexit__(self, *error: object) -> None:
        while not self._free.empty():
            worker = self._free.get_nowait()
            if worker is not None:
                await worker.kill()

    async def warm(self) -> None:
        """Start one worker ahead of the first grade. Raises `GradeError` when the function cannot be loaded."""
        worker = await self._free.get()
        try:
            worker = worker or await self._start()
        finally:
            self._free.put_nowait(worker)

    async def grade(
        self, task: Json, transcript: list[Json], workspace: Path, exit_status: int | None, *, label: str
    ) -> Grade:
        """Call the function with a copy of `workspace`. `label` names the attempt in the log.

        Raises `GradeError` when it raises, takes too long, dies, or returns no finite number.
        """
        folder = Path(tempfile.mkdtemp(prefix="longrein-grade-"))
        try:
            await asyncio.to_thread(_copy, workspace, folder / "workspace")
            arguments = [task, transcript, str(folder / "workspace"), exit_status]
            answer = await self._ask({"label": label, "arguments": arguments})
        except SandboxError as error:
            raise GradeError(str(error)) from None
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if "error" in answer:
            raise self._error(answer["error"])
        return Grade(answer["reward"], answer["metrics"], {int(n): r for n, r in answer["calls"].items()})

    async def _ask(self, request: Json) -> Json:
        worker = await self._free.get()
        whole = False
        try:
            worker = worker or await self._start()
            async with asyncio.timeout(self._reward.timeout_seconds):
                answer = await worker.ask(request)
            whole = True
            return answer
        except TimeoutError:
            limit = f"{self._reward.timeout_seconds:g} s"
            raise self._error(f"took over {limit} for {request['label']} (reward.timeout_seconds)") from None
        except EOFError:
            raise self._error(f"ended its process while grading {request['label']}") from None
        finally:
            if worker is not None and not whole:
                await asyncio.shield(worker.kill())
                worker = None
            self._free.put_nowait(worker)

    def _error(self, what: str) -> GradeError:
        return GradeError(f"reward.function {self._reward.function} {what}; its log is {self._log}")

    async def _start(self) -> _Worker:
        if not self._reward.function:
            raise GradeError(
                "reward.function is empty; name the function that grades (module:function), or set reward.from = 'agent'"
            )
        worker = await _Worker.start(self._reward.function, self._folder, self._environment, self._log)
        try:
            async with asyncio.timeout(IMPORT_SECONDS):
                answer = await worker.hear()
        except (TimeoutError, EOFError) as error:
            answer = {
                "error": f"could not be loaded: its process {'hung' if isinstance(error, TimeoutError) else 'ended'}"
            }
        except BaseException:
            await asyncio.shield(worker.kill())
            raise
        if "error" in answer:
            await worker.kill()
            raise self._error(answer["error"])
        return worker


def _copy(workspace: Path, copy: Path) -> None:
    if not workspace.is_dir():
        copy.mkdir()
        return
    try:
        copy_tree(workspace, copy)
    except OSError as error:
        raise SandboxError(f"the agent's working directory cannot be copied for the grader: {error}") from None


class _Worker:
    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, transport: asyncio.WriteTransport
    ) -> None:
        self._process = process
        self._reader = reader
        self._transport = transport

    @classmethod
    async def start(cls, function: str, folder: Path, environment: Mapping[str, str], log: Path) -> _Worker:
        log.parent.mkdir(parents=True, exist_ok=True)
        hears, tell = os.pipe()
        hear, tells = os.pipe()
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-c", "from longrein.controller.grading import work; work()"),
                    *(str(hears), str(tells), function, str(folder)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    cwd=folder,
                    pass_fds=[hears, tells],
                    start_new_session=True,
                )
        except BaseException:
            os.close(tell)
            os.close(hear)
            raise
        finally:
            os.close(hears)
            os.close(tells)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=2**24)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(hear, "rb", 0))
        transport, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(tell, "wb", 0))
        return cls(process, reader, transport)

    async def ask(self, request: Json) -> Json:
        self._transport.write(json.dumps(request).encode() + b"\n")
        return await self.hear()

    async def hear(self) -> Json:
        line = await self._reader.readline()
        if not line.endswith(b"\n"):  # the process is gone, its pipe with it
            raise EOFError
        return json.loads(line)

    async def kill(self) -> None:
        """End the worker and what it started."""
        self._transport.close()
        if self._process.returncode is None:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        child.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


def work() -> None:
    """The worker process: load the function, then grade whatever comes until the pipe closes."""
    hears, tells, function_name, folder = sys.argv[1:]
    pipes = int(hears), int(tells)
    for fd in pipes:
        os.set_inheritable(fd, False)
    os.register_at_fork(after_in_child=lambda: [_close(fd) for fd in pipes])
    requests, answers = os.fdopen(pipes[0], "rb", closefd=False), os.fdopen(pipes[1], "wb", closefd=False)
    try:
        function = load_function(function_name, folder, "reward.function")
    except BaseException as error:
        traceback.print_exc()
        _answer(answers, {"error": f"could not be loaded: {_last_line(error)}"})
        sys.exit(1)
    _answer(answers, {"ready": True})
    for line in requests:
        request = json.loads(line)
        _answer(answers, _graded(function, request))


def _graded(function: Callable[..., Any], request: Json) -> Json:
    task, transcript, workspace, exit_status = request["arguments"]
    try:
        value = function(task, transcript, Path(workspace), exit_status)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        grade = to_grade(value)
    except GradeError as error:
        print(f"{request['label']}: {error}", file=sys.stderr)
        return {"error": f"{error} for {request['label']}"}
    except BaseException as error:  # SystemExit too: the function decides about rewards, not about its process
        print(f"{request['label']}:", file=sys.stderr)
        traceback.print_exc()
        return {"error": f"raised {_last_line(error)} for {request['label']}"}
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return {"reward": grade.reward, "metrics": grade.metrics, "calls": grade.calls}


def _last_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def _answer(answers: IO[bytes], message: Json) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)
