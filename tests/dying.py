"""`longrein …` that kills itself: `python dying.py MODULE:FUNCTION COUNT before|after COMMAND …`.

It dies by SIGKILL right before, or right after, that function is called for the COUNT-th time.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import signal
import sys
from itertools import count
from typing import Any

from longrein.cli import main


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrapped(function: Any, number: int, when: str) -> Any:
    calls = count(1)

    @functools.wraps(function)
    def plain(*arguments: Any, **named: Any) -> Any:
        last = next(calls) == number
        if last and when == "before":
            die()
        value = function(*arguments, **named)
        if last:
            die()
        return value

    @functools.wraps(function)
    async def awaited(*arguments: Any, **named: Any) -> Any:
        last = next(calls) == number
        if last and when == "before":
            die()
        value = await function(*arguments, **named)
        if last:
            die()
        return value

    return awaited if inspect.iscoroutinefunction(function) else plain


if __name__ == "__main__":
    place, number, when, *command = sys.argv[1:]
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, wrapped(getattr(owner, name), int(number), when))
    sys.exit(main(command))
