"""The tasks of a run: read from a JSON-lines file or made by a function, and visited in a seeded order."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from longrein.config import ConfigError
from longrein.functions import is_function_name, load_function
from longrein.records import Json


def load_tasks(source: str, *, folder: str, seed: int, option: str) -> list[Json]:
    """The tasks that `source` names: a JSON-lines file, or `module:function`, which is called with the seed.

    A task is one JSON object. `folder` is `run.folder`; `option` is the run file's key, for errors. Raises `ConfigError`
    that names the file and line, or the function and task, of the first one that is no JSON object.
    """
    if not source:
        raise ConfigError(f"{option}: no tasks are named; give a JSON-lines file or module:function")
    file = Path(source).expanduser()
    if not file.is_absolute():
        file = Path(folder or ".") / file
    if is_function_name(source) and not file.exists():
        return _from_function(source, folder, seed, option)
    return _from_file(file, option)


def _from_file(file: Path, option: str) -> list[Json]:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{option}: {file}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{option}: {file}: cannot be read: {error.strerror or error}") from None
    tasks: list[Json] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            task = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{option}: {file}:{number}: not valid JSON: {error}") from None
        if not isinstance(task, dict):
            raise ConfigError(f"{option}: {file}:{number}: a task is a JSON object, this is {_kind(task)}")
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{option}: {file}: holds no tasks")
    return tasks


def _from_function(name: str, folder: str, seed: int, option: str) -> list[Json]:
    function = load_function(name, folder, option)
    try:
        made = list(function(seed))
    except Exception as error:
        raise ConfigError(f"{option}: {name}({seed}) raised {type(error).__name__}: {error}") from error
    tasks: list[Json] = []
    for number, task in enumerate(made):
        if not isinstance(task, dict):
            raise ConfigError(f"{option}: {name}({seed}): task {number} is {_kind(task)}, not a dict")
        try:
            tasks.append(msgspec.json.decode(msgspec.json.encode(task)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{option}: {name}({seed}): task {number} has no JSON form: {error}") from None
    if not tasks:
        raise ConfigError(f"{option}: {name}({seed}) made no tasks")
    return tasks


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


class TaskOrder:
    """The order in which `count` tasks are visited: all of them once per epoch, shuffled anew from the seed.

    A task that came to nothing can be put back once; it is then visited before the order goes on. `state_dict` holds the
    position, so that a resumed run goes on with the task that is next.
    """

    def __init__(self, count: int, *, seed: int | str, shuffle: bool) -> None:
        self._count = count
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._returned: deque[int] = deque()
        self._order: tuple[int, list[int]] = (-1, [])

    def next(self) -> int:
        """Index of the next task."""
        if self._returned:
            return self._returned.popleft()
        epoch, place = divmod(self._position, self._count)
        self._position += 1
        if epoch != self._order[0]:
            indices = list(range(self._count))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(indices)
            self._order = (epoch, indices)
        return self._order[1][place]

    def put_back(self, index: int) -> None:
        """Visit task `index` again before the order goes on."""
        self._returned.append(index)

    def state_dict(self) -> Json:
        return {"position": self._position, "returned": list(self._returned)}

    def load_state_dict(self, state: Json) -> None:
        self._position = int(state["position"])
        self._returned = deque(int(index) for index in state["returned"])
