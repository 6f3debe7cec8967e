"""The rooms do not look upwards, and what stands between a harness and the model needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "longrein"

#: From the ground up. The three rooms of the third floor never import each other.
FLOORS = [
    {"records", "config", "functions", "textfile", "database", "schema", "processes", "writer"},
    {"store", "client", "trajectory", "learning", "sandbox", "tasks", "audit", "pruning"},
    {"gateway", "controller", "trainer", "report", "export", "storecheck"},
    {"run"},
    {"cli"},
]


def imports() -> list[tuple[str, str, str]]:
    """(file, room, imported room) of every import of Longrein by Longrein."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = (
                    [node.module] if node.module != "longrein" else [f"longrein.{alias.name}" for alias in node.names]
                )
            for name in names:
                if name.startswith("longrein."):
                    found.append((str(file.relative_to(SOURCE)), parts[0], name.split(".")[1]))
    return found


def floor_of(room: str) -> int:
    return next((i for i, rooms in enumerate(FLOORS) if room in rooms), -1)


def test_every_room_stands_on_a_floor() -> None:
    rooms = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {room for room in rooms - {"__init__"} if floor_of(room) < 0} == set()


def test_no_room_imports_one_above_it() -> None:
    upwards = [
        (file, room, other)
        for file, room, other in imports()
        if room != "__init__" and floor_of(other) > floor_of(room)
    ]
    assert upwards == []


def test_gateway_controller_and_trainer_never_import_each_other() -> None:
    rooms = {"gateway", "controller", "trainer"}
    assert [(file, other) for file, room, other in imports() if room in rooms and other in rooms - {room}] == []


def test_trajectory_and_learning_do_no_io() -> None:
    forbidden = {"asyncio", "httpx", "os", "pathlib", "socket", "sqlalchemy", "subprocess", "threading"}
    for room in ("trajectory", "learning"):
        for file in (SOURCE / room).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else [getattr(node, "module", None) or ""]
                )
                assert not {name.split(".")[0] for name in names} & forbidden, file


@pytest.mark.parametrize(
    "module", ["longrein.cli", "longrein.gateway.serve", "longrein.gateway.calls", "longrein.controller.reconcile"]
)
def test_no_torch_outside_the_trainer(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
