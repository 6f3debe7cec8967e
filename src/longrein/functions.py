"""`module:function` names of a run file, turned into functions."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longrein.config import ConfigError

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_function_name(text: str) -> bool:
    """Whether `text` has the form `module:function`."""
    return _NAME.fullmatch(text) is not None


def load_function(name: str, folder: str | Path, option: str) -> Callable[..., Any]:
    """Import the function `name` (`module:function`), looking in `folder` (`run.folder`) first.

    `option` is the run file's key that named it, for the error. Raises `ConfigError` when the name is malformed, the
    module cannot be imported or has no such function.
    """
    if not is_function_name(name):
        raise ConfigError(f"{option}: {name!r} is not of the form module:function")
    module_name, _, attribute = name.partition(":")
    entry = str(Path(folder or ".").resolve())
    if entry not in sys.path:
        sys.path.insert(0, entry)
        importlib.invalidate_caches()
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(f"{option}: no module {error.name!r} in {entry} or among the installed ones") from None
        raise ConfigError(f"{option}: importing {module_name} failed: {error}") from error
    except Exception as error:
        raise ConfigError(f"{option}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        raise ConfigError(f"{option}: module {module_name} has no function {attribute!r}")
    return value
