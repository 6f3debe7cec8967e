"""Controllers and gateways as processes of their own, to be killed; and what of an attempt's processes is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

KEY = "run-key"


@asynccontextmanager
async def longrein(command: str, log: Path, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`longrein COMMAND` with options of the run file; stopped in an orderly way at the end if it still runs."""
    settings = [part for option in (f"gateway.key={KEY}", *options) for part in ("--set", option)]
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "longrein.cli", command, *settings), stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60)


async def kill(process: asyncio.subprocess.Process) -> None:
    process.kill()
    await process.wait()


def options_of(folder: Path, **sections: dict[str, Any]) -> list[str]:
    """Options of a run `r` in `folder`, as `--set` takes them."""
    sections.setdefault("run", {})
    if os.geteuid() == 0 and "agent" in sections:  # these agents write into the test's own folder
        sections["agent"] = {"user": "root"} | sections["agent"]
    sections["run"] = {"dir": str(folder / "runs"), "name": "r", "folder": str(folder)} | sections["run"]
    return [
        f"{section}.{key}={json.dumps(value)}" for section, table in sections.items() for key, value in table.items()
    ]


def journals(run: Path) -> list[dict[str, Any]]:
    """What stands in the journals of a run, each as one dictionary."""
    found = []
    for file in sorted((run / "control").glob("*.jsonl")):
        said: dict[str, Any] = {}
        for line in file.read_text().splitlines():
            said |= json.loads(line)
        found.append(said)
    return found


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_in(folder: Path) -> list[str]:
    """Command lines of living processes whose command, directory or environment names a folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status", "cwd", "environ"]):
        if process.pid == os.getpid() or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        texts = [*(process.info["cmdline"] or []), process.info["cwd"] or ""]
        texts += [f"{name}={text}" for name, text in (process.info["environ"] or {}).items() if name != "PWD"]
        if any(str(folder) in text for text in texts):
            found.append(f"{process.pid} {' '.join(process.info['cmdline'] or [])}")
    return found
