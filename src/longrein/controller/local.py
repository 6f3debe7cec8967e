"""Runs one attempt's agent as processes of this machine: its directory, environment, command, and how it ended."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from longrein import config
from longrein.controller.confinement import Confined, Confinement, confine, release
from longrein.controller.warmstart import (
    Exit,
    InfrastructureError,
    Launcher,
    Process,
    Program,
    StartError,
    preloaded_program,
    running_interpreter,
)
from longrein.controller.workspace import make_workspace
from longrein.records import Json, Outcome, Rollout, StartedAttempt, Usage
from longrein.textfile import tail

STOPPED = "the controller was stopped"

_INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH|SSL_CERT_(FILE|DIR)|PYTHON\w+"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"\{(task_file|attempt_dir|task(?:\.[^{}]+)?)\}")
_READ_AT_START = re.compile(r"PYTHON\w*|LD_\w+")
_PYTHON = re.compile(r"python[\d.]*")

# What `python -c` runs for an Agent Lightning agent: argv is a folder to import from and the class.
_AGENT_CLASS_RUNNER = """\
import asyncio, importlib, inspect, sys
folder, name = sys.argv[1:]
sys.path.insert(1, folder)
module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
running = getattr(importlib.import_module(module), attribute)().run()
async def finish():
    return await running
if inspect.isawaitable(running):
    asyncio.run(finish())
"""


@dataclass(frozen=True)
class Site:
    """What all attempts of a run share. `held` gives the seconds for which attempts' clocks stood still so far."""

    agent: config.Agent
    folder: Path
    """The run file's folder."""
    attempts: Path
    """Folder of the attempts' directories."""
    gateway_url: str
    launcher: Launcher
    held: Callable[[], float]
    confinement: Confinement = field(default_factory=Confinement)
    git: str = "hide"
    """How much of the Git data of agent.workspace is copied (`workspace.git`)."""


@dataclass(frozen=True)
class Ended:
    outcome: Outcome
    exit_code: int | None
    reason: str | None
    usage: Usage | None
    directory: Path
    final: bool = False
    """Whether no other attempt could do better (a command that does not exist, a controller that stops)."""


def require_local_processes() -> None:
    """Raise `ConfigError` where agents cannot run as local processes."""
    if sys.platform == "win32":
        raise config.ConfigError(
            "the local controller does not run on native Windows. Run Longrein in WSL2; `longrein gateway`, `report` "
            "and `export` work natively, with a controller elsewhere (agent.controller = 'external')"
        )


def base_environment() -> dict[str, str]:
    """What agents and graders inherit of this process's environment: paths, language and Python's own, no secret."""
    kept = {n: v for n, v in os.environ.items() if _INHERITED.fullmatch(n) and not _SECRET.search(n)}
    folder = str(Path(running_interpreter()).parent)  # as an activated venv has it
    path = kept.get("PATH", os.defpath)
    if folder not in path.split(os.pathsep):
        path = folder + os.pathsep + path
    return {**kept, "PATH": path}


def make_launcher(agent: config.Agent, log: Path) -> Launcher:
    """The launcher that a run's agents are started from.

    Preloaded modules are imported in the interpreter of `agent.command`; they see the variables of `agent.env` that
    are the same for every task. Raises `StartError` for a command or variable that does not go with `agent.preload`.
    """
    environment = base_environment()
    if not agent.preload:
        return Launcher(running_interpreter(), [], environment, log)
    for name in agent.env:
        if _READ_AT_START.fullmatch(name):
            raise StartError(
                f"agent.env: {name} takes effect when an interpreter starts, which agent.preload does before any "
                "attempt; set it where the controller is started, or leave agent.preload out"
            )
    environment |= {name: text for name, text in agent.env.items() if not _PLACEHOLDER.search(text)}
    python = running_interpreter()
    if agent.command:
        program = Path(agent.command[0]).name
        if not _PYTHON.fullmatch(program):
            raise StartError(
                f"agent.preload: {agent.command[0]!r} is not a Python interpreter; agent.command has to be "
                "[python, script.py, …] or [python, -m, module, …]. Change it or leave agent.preload out"
            )
        preloaded_program(agent.command)
        python = find_program(agent.command[0], environment["PATH"], [])
    return Launcher(python, agent.preload, environment, log)


def attempt_directory(attempts: Path, rollout_id: str, attempt_id: str) -> Path:
    """ATTEMPTS/ROLLOUT/ATTEMPT, with ids that are no file names (slashes, dots) written in per-cent form."""
    return attempts.joinpath(*(_file_name(part) for part in (rollout_id, attempt_id)))


def _file_name(identifier: str) -> str:
    return quote(identifier, safe=" ") if identifier.strip(".") else identifier.replace(".", "%2E")


async def run_agent(site: Site, started: StartedAttempt, stop: asyncio.Event) -> Ended:
    """Run an attempt's agent to its end; every process of it is gone afterwards.

    It ends early on its timeout (an agent failure) or on `stop` (an infrastructure failure). What goes wrong before or
    around the agent is returned as an infrastructure failure too, never raised.
    """
    rollout, attempt = started.rollout, started.attempt
    directory = attempt_directory(site.attempts, rollout.rollout_id, attempt.attempt_id)
    timeout = rollout.config.timeout_seconds or site.agent.timeout_seconds
    process: Process | None = None
    confined = Confined(directory, directory, site.confinement)
    words = None
    try:
        await asyncio.to_thread(_prepare_directory, site, directory, rollout.input)
        confined = await asyncio.to_thread(confine, site.confinement, directory)
        environment = _environment(site, started, confined)
        program, files = _program(site, rollout, confined, environment)
        program = confined.wrap(program, files)
        process = await site.launcher.spawn(
            program,
            environment=environment,
            directory=confined.working_directory,
            stdout=directory / "stdout.log",
            stderr=directory / "stderr.log",
            confine=confined.plan,
        )
        exit, cut = await _finish(process, timeout, site.held, site.agent.grace_seconds, stop)
        if cut != "stop":
            code, words = confined.outcome(exit.code)
            exit = Exit(code, exit.usage)
    except StartError as error:
        return Ended(Outcome.infrastructure_failed, None, str(error), None, directory, final=True)
    except (InfrastructureError, OSError) as error:
        return Ended(Outcome.infrastructure_failed, None, str(error) or repr(error), None, directory)
    finally:
        if process is not None:
            process.close()
        await asyncio.shield(asyncio.to_thread(release, confined))
    if cut == "stop":
        return Ended(Outcome.infrastructure_failed, exit.code, STOPPED, exit.usage, directory, final=True)
    if cut is None and exit.code == 0:
        return Ended(Outcome.succeeded, 0, None, exit.usage, directory)
    what = f"timeout after {timeout:g} s" if cut else _exit_in_words(exit.code)
    what = f"{what} ({words})" if words else what
    said = tail(directory / "stderr.log", 20, 2048).replace(started.token, "(token)")
    reason = f"{what}; its stderr ends:\n{said}" if said else f"{what}; it wrote nothing to stderr"
    return Ended(Outcome.agent_failed, exit.code, reason, exit.usage, directory)


async def _finish(
    process: Process, timeout: float, held: Callable[[], float], grace: float, stop: asyncio.Event
) -> tuple[Exit, str | None]:
    """Wait for an agent; its exit and what cut it short (`timeout`, `stop`) if anything did."""
    waiting = asyncio.ensure_future(process.wait())
    stopping = asyncio.ensure_future(stop.wait())
    began, held_before = time.monotonic(), held()
    try:
        while True:
            left = timeout + (held() - held_before) - (time.monotonic() - began)
            if left <= 0:
                process.end(grace)
                return await waiting, "timeout"
            await asyncio.wait({waiting, stopping}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result(), None
            if stopping.done():
                process.end(grace)
                return await waiting, "stop"
    finally:
        waiting.cancel()
        stopping.cancel()


def _prepare_directory(site: Site, directory: Path, task: Json) -> None:
    if directory.exists():  # of a run whose record was thrown away
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    make_workspace(site.agent.workspace, directory / "work", fill(site.git, task, directory, "workspace.git"))
    (directory / "task.json").write_bytes(msgspec.json.encode(task))


def _environment(site: Site, started: StartedAttempt, confined: Confined) -> dict[str, str]:
    rollout, attempt = started.rollout, started.attempt
    directory = confined.inside
    gateway = confined.gateway_url(site.gateway_url)
    ids = (quote(rollout.rollout_id, safe=""), quote(attempt.attempt_id, safe=""))
    models = f"{gateway}/proxy/rollout/{ids[0]}/attempt/{ids[1]}/mode/{'train' if rollout.is_train else 'val'}"
    ours = {
        "OPENAI_BASE_URL": f"{models}/openai/v1",
        "OPENAI_API_BASE": f"{models}/openai/v1",
        "OPENAI_API_KEY": started.token,
        "ANTHROPIC_BASE_URL": f"{models}/anthropic",
        "ANTHROPIC_AUTH_TOKEN": started.token,
        "AGL_OPENAI_BASE_URL": f"{models}/openai/v1",
        "AGL_KEY": started.token,
        "AGL_EVENT_URL": f"{gateway}/api/rollouts/{ids[0]}/attempt/{ids[1]}/events",
        "LONGREIN_TASK": str(directory / "task.json"),
    }
    theirs = {name: fill(text, rollout.input, directory, f"agent.env: {name}") for name, text in site.agent.env.items()}
    for name, path in (rollout.config.local.env_map if rollout.config.local else {}).items():
        theirs[name] = _mapped(name, path, rollout.input)
    if taken := sorted(theirs.keys() & ours.keys()):
        raise StartError(f"agent.env: {', '.join(taken)} is set by Longrein for every attempt; leave it out")
    return {**base_environment(), **_own_home(confined), **theirs, **ours}


def _own_home(confined: Confined) -> dict[str, str]:
    """What tells an agent of its home and user, where they are not the controller's."""
    if confined.home is None:
        return {}
    own = {"HOME": str(confined.home), "USER": "agent", "LOGNAME": "agent", "SHELL": "/bin/sh"}
    return own | ({"TMPDIR": "/tmp"} if confined.confinement.bwrap else {})


def _mapped(name: str, path: str, task: Json) -> str:
    prefix, _, field = path.partition(".")
    if prefix != "input" or not field:
        raise StartError(f"config.local.env_map: {name} = {path!r} is not of the form input.path.to.field")
    return _as_text(_field(task, field, f"config.local.env_map: {name}"))


def fill(text: str, task: Json, directory: Path, option: str) -> str:
    """Replace `{task.FIELD.path}`, `{task}`, `{task_file}` and `{attempt_dir}`; other braces stay as they are.

    A string field is put in as it is, any other as JSON. Raises `StartError` naming `option` for an unknown field.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name == "task_file":
            return str(directory / "task.json")
        if name == "attempt_dir":
            return str(directory)
        return _as_text(_field(task, name.removeprefix("task").removeprefix("."), option))

    return _PLACEHOLDER.sub(value, text)


def _field(task: Json, path: str, option: str) -> Any:
    value: Any = task
    for part in path.split(".") if path else []:
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            fields = ", ".join(sorted(map(str, task))) or "none"
            raise StartError(f"{option}: the task has no field {path!r}; its fields are: {fields}")
    return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _program(
    site: Site, rollout: Rollout, confined: Confined, environment: Mapping[str, str]
) -> tuple[Program, list[str]]:
    """What to run, and the files of the run file's folder that it is made of."""
    agent, warm = site.agent, site.launcher.modules
    agent_class = (rollout.config.local.agent_class if rollout.config.local else None) or agent.agent_class
    if agent_class:
        arguments = [str(site.folder), agent_class]
        if warm:
            return Program("code", _AGENT_CLASS_RUNNER, arguments), []
        python = running_interpreter()
        program = Program("exec", python, [python, "-c", _AGENT_CLASS_RUNNER, *arguments])
        return program, _module_files(site.folder, agent_class)
    if not agent.command:
        raise StartError("there is no agent to run; set agent.command or agent.agent_class")
    command = [fill(word, rollout.input, confined.inside, "agent.command") for word in agent.command]
    folders = [confined.directory / "work", site.folder]
    files = []
    is_python = bool(_PYTHON.fullmatch(Path(command[0]).name))
    if is_python and len(command) > 1 and not command[1].startswith("-"):
        command[1] = _existing(command[1], folders) or command[1]
        files = _of_folder(site.folder, [command[1]])
    if warm:
        return preloaded_program(command), []
    target = find_program(command[0], environment["PATH"], folders)
    files += _of_folder(site.folder, [target])
    return Program("exec", target, [target if is_python else command[0], *command[1:]]), files


def _of_folder(folder: Path, names: list[str]) -> list[str]:
    """Those of `names` that are files below the run file's folder."""
    return [name for name in names if Path(name).is_relative_to(folder) and Path(name).is_file()]


def _module_files(folder: Path, agent_class: str) -> list[str]:
    """The file or folder of the run file's folder that a class's module is in; [] for an installed one."""
    top = agent_class.replace(":", ".").split(".")[0]
    return [str(path) for path in (folder / f"{top}.py", folder / top) if path.exists()][:1]


def _existing(name: str, folders: list[Path]) -> str | None:
    """A relative file name as it stands if it is in the first folder, absolute if it is in a later one."""
    if os.path.isabs(name) or not folders or (folders[0] / name).exists():
        return name
    return next((str(folder / name) for folder in folders[1:] if (folder / name).exists()), None)


def find_program(name: str, path: str, folders: list[Path]) -> str:
    """The executable file that a command's first word means.

    `python` and `python3` are the interpreter that Longrein runs in; a name with a slash is looked up in the attempt's
    working directory, then the run file's folder; any other in PATH. Raises `StartError` when there is none.
    """
    if name in ("python", "python3"):
        return running_interpreter()
    if "/" in name:
        found = _existing(name, folders)
        if found is not None:
            found = found if os.path.isabs(found) else str(folders[0] / found) if folders else os.path.abspath(found)
        where = " or ".join(map(str, folders)) if folders and not os.path.isabs(name) else "the file system"
        if found is None or not os.path.isfile(found):
            raise StartError(f"agent.command: there is no {name!r} in {where}; correct agent.command")
        if not os.access(found, os.X_OK):
            raise StartError(f"agent.command: {found} is not executable; run `chmod +x {found}`")
        return found
    found = shutil.which(name, path=path)
    if found is None:
        raise StartError(
            f"agent.command: no program {name!r} in PATH ({path}); install it, or give its full path in agent.command"
        )
    return found


def _exit_in_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"ended by signal {-code}"
