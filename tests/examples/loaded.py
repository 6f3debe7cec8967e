"""An example's modules, imported as a run file names them: from the example's own folder."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(monkeypatch: pytest.MonkeyPatch, example: str, module: str) -> ModuleType:
    """Import a module of an example. What the examples have in common by name is imported anew, then forgotten."""
    for name in ("tasks", "grader", "teacher", "model", "agent"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(EXAMPLES / example)
    return importlib.import_module(module)
