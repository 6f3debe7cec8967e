"""What confinement costs: the time of one start, beside a plain process.

    python bench/sandbox.py [--starts 30]

Each way is started one after the other, in turns, so that whatever else the machine does falls on all of them: a plain
process, agents of a controller without a sandbox (as root: as another user, with mounts of their own), agents in
bubblewrap, and `longrein.sandbox.run`. The command is `true`; what is measured is everything from the attempt's directory to
the last process gone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from longrein import sandbox
from longrein.config import Config
from longrein.controller.confinement import open_confinement
from longrein.controller.local import Site, make_launcher, run_agent
from longrein.records import Attempt, Rollout, StartedAttempt
from longrein.sandbox.bubblewrap import find_bubblewrap

URL = "http://127.0.0.1:9"

Start = Callable[[], Awaitable[None]]


async def agents(stack: AsyncExitStack, folder: Path, **agent: str) -> Start:
    """Starts agents as a controller does that has these options."""
    config = Config.model_validate(
        {"run": {"dir": str(folder), "name": "-".join(agent.values())}, "agent": {"command": ["true"], **agent}}
    )
    run = config.run.path
    launcher = make_launcher(config.agent, run / "launcher.log")
    confinement = await stack.enter_async_context(open_confinement(config, URL))
    stack.push_async_callback(launcher.close)
    site = Site(config.agent, folder, run / "attempts", URL, launcher, lambda: 0.0, confinement=confinement)
    count = 0

    async def start() -> None:
        nonlocal count
        count += 1
        started = StartedAttempt(Rollout(f"r{count}", {}), Attempt(f"r{count}", "0"), "lr-at-none")
        ended = await run_agent(site, started, asyncio.Event())
        if ended.exit_code != 0:
            sys.exit(f"an agent did not run: {ended.reason}")

    return start


async def measure(starts: int) -> dict[str, list[float]]:
    """Milliseconds of each start, by way."""
    folder = Path(tempfile.mkdtemp(prefix="longrein-bench-"))
    (folder / "empty").mkdir()

    async def plain() -> None:
        process = await asyncio.create_subprocess_exec("true")
        await process.wait()

    async def grader() -> None:
        await asyncio.to_thread(sandbox.run, ["true"], folder / "empty")

    try:
        async with AsyncExitStack() as stack:
            ways: dict[str, Start] = {"a plain process": plain}
            if os.geteuid() == 0:
                ways["agent, as root (agent.user = root)"] = await agents(stack, folder, user="root")
                ways["agent, as a user of its own"] = await agents(stack, folder)
            else:
                ways["agent, without a sandbox"] = await agents(stack, folder)
            if find_bubblewrap():
                ways["agent, in bubblewrap"] = await agents(stack, folder, sandbox="bubblewrap")
            ways["sandbox.run, for a grader"] = grader
            for start in ways.values():
                await start()
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(starts):
                for name, start in ways.items():
                    began = time.perf_counter()
                    await start()
                    times[name].append(1000 * (time.perf_counter() - began))
            return times
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=30)
    parser.add_argument("--json", action="store_true", help="print the medians in milliseconds as JSON")
    options = parser.parse_args()
    times = asyncio.run(measure(options.starts))
    medians = {name: statistics.median(each) for name, each in times.items()}
    if options.json:
        print(json.dumps(medians))
        return
    plain = medians["a plain process"]
    bwrap = find_bubblewrap()
    version = (
        subprocess.run([bwrap, "--version"], capture_output=True, text=True, check=False).stdout if bwrap else "none"
    )
    table = Table(title=f"One start of `true`, median of {options.starts} ({version.strip()}, {os.cpu_count()} cores)")
    for column in ("", "ms", "fastest", "times plain", "more than plain"):
        table.add_column(column, justify="right" if column else "left")
    for name, each in times.items():
        median = medians[name]
        table.add_row(name, f"{median:.1f}", f"{min(each):.1f}", f"{median / plain:.1f}", f"{median - plain:.1f} ms")
    Console().print(table)


if __name__ == "__main__":
    main()
