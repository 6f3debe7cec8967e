"""What each harness needs and how it is installed: `python -m tests.harnesses.install [--cheap] [NAME …]`.

Every harness gets a virtual environment or an npm prefix of its own under `.harnesses/` (or `LONGREIN_HARNESSES`), so
that none of them decides about another's packages. What is installed in the wanted version is left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(os.environ.get("LONGREIN_HARNESSES") or Path(__file__).parents[2] / ".harnesses")


@dataclass(frozen=True)
class Install:
    """One harness as its registry has it. The first package is the harness, and its version the harness's."""

    packages: tuple[str, ...]
    """`name==version` for PyPI, `name@version` for npm."""
    npm: bool = False
    python: str = "3.11"
    """Oldest Python that it takes."""
    node: str = ""
    """Name of the install whose Node runs it; npm packages with a program of their own need none."""
    programs: tuple[str, ...] = ()
    """What has to be on the machine and is in no registry of Python or npm."""
    cheap: bool = False
    """Small and quick enough to be run with every change."""

    @property
    def version(self) -> str:
        return self.packages[0].rpartition("@" if self.npm else "==")[2]


INSTALLS = {
    "mini-swe-agent": Install(("mini-swe-agent==2.4.6", "litellm==1.110.2", "openai==3.57.0"), cheap=True),
    "openai-agents": Install(("openai-agents==0.24.0", "openai==3.57.0"), cheap=True),
    "langgraph": Install(("langgraph==1.2.24", "langchain==1.5.2", "langchain-openai==1.7.4"), cheap=True),
    "claude-code": Install(("@anthropic-ai/claude-code@2.1.332",), npm=True, cheap=True),
    "codex": Install(("@openai/codex@0.171.0",), npm=True, cheap=True),
    "openhands": Install(("openhands-sdk==1.58.2", "openhands-tools==1.58.2"), python="3.12", programs=("tmux",)),
    "autogen": Install(
        ("autogen-agentchat==0.7.5", "autogen-ext[openai,mcp]==0.7.5", "openai==3.57.0", "mcp-server-calculator==0.2.1")
    ),
    "node": Install(("node@22.23.3",), npm=True),
    "qwen-code": Install(("@qwen-code/qwen-code@0.24.4",), npm=True, node="node"),
    "opencode": Install(("opencode-ai@1.18.33",), npm=True),
    "pydantic-ai": Install(("pydantic-ai-slim[openai]==2.68.0",)),
    "smolagents": Install(("smolagents[openai]==1.26.0",)),
}


def folder(name: str) -> Path:
    """Where a harness is installed."""
    return ROOT / name


def binaries(name: str) -> Path:
    """The folder of its programs."""
    return folder(name) / ("node_modules/.bin" if INSTALLS[name].npm else "bin")


def missing(name: str) -> str:
    """Why a harness cannot be run here; empty when it can."""
    install = INSTALLS[name]
    for program in install.programs:
        if shutil.which(program) is None:
            return f"{name} needs {program}, which is not on this machine"
    if install.node and (why := missing(install.node)):
        return why
    if _stamp(name) != list(install.packages):
        return f"{name} {install.version} is not installed: make test-harnesses"
    return ""


def install(name: str) -> float:
    """Install a harness where it is missing; the seconds that took. Raises RuntimeError with the installer's words."""
    wanted = INSTALLS[name]
    if _stamp(name) == list(wanted.packages):
        return 0.0
    begun = time.monotonic()
    shutil.rmtree(folder(name), ignore_errors=True)
    folder(name).mkdir(parents=True)
    if wanted.npm:
        (folder(name) / "package.json").write_text('{"private": true}')
        # Packages that run on a Node of their own are refused by the engines field alone.
        command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "--engine-strict=false"]
        _run([*command, *wanted.packages], folder(name))
    else:
        _run([_python(wanted.python), "-m", "venv", str(folder(name))], ROOT)
        pip = [str(folder(name) / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        _run([*pip, *wanted.packages], ROOT)
    (folder(name) / "installed.json").write_text(json.dumps(wanted.packages))
    return time.monotonic() - begun


def _stamp(name: str) -> list[str]:
    try:
        return json.loads((folder(name) / "installed.json").read_text())
    except (OSError, ValueError):
        return []


def _python(oldest: str) -> str:
    """A Python of at least version `oldest`."""
    wanted = tuple(map(int, oldest.split(".")))
    if sys.version_info[:2] >= wanted:
        return sys.executable
    places = [*os.environ.get("PATH", "").split(os.pathsep), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]
    for minor in range(wanted[1], wanted[1] + 4):
        for place in places:
            found = Path(place) / f"python3.{minor}"
            if found.is_file() and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
                return str(found)
    raise RuntimeError(f"no Python of at least {oldest} is on this machine")


def _run(command: Sequence[str], where: Path) -> None:
    where.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is not on this machine") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} … failed ({done.returncode}):\n{done.stderr[-2000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Install the harnesses that the tests drive.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(INSTALLS)}; all of them by default")
    parser.add_argument("--cheap", action="store_true", help="those that run with every change")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in INSTALLS]
    if unknown:
        parser.error(f"{unknown[0]} is no harness; there are {', '.join(INSTALLS)}")
    names = options.names or [name for name, one in INSTALLS.items() if one.cheap or not options.cheap]
    failed = 0
    for name in names:
        try:
            seconds = install(name)
        except RuntimeError as error:
            failed += 1
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        print(f"{name} {INSTALLS[name].version}: {f'{seconds:.0f} s' if seconds else 'is there'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
