"""How fast agents are started: `make bench-load`.

A real gateway and a real controller run agents that do nothing. First 150 of them where 200 may run at once, beside what
starting 150 processes costs in itself; then a queue of 10,000, of which some are run: the time from the end of an agent to
the start of the one that takes its place, by the agents' own clocks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from load import started
from rich.console import Console

KEY = "bench"
#: Writes its start and its end, as seconds since the epoch, into one file; a line is written whole.
TIMED = 'echo "s $EPOCHREALTIME" >> "$TIMES"; sleep 0.2; echo "e $EPOCHREALTIME" >> "$TIMES"'
GRADER = "def grade(task, transcript, workspace, exit_status):\n    return 1.0\n"


def bare(count: int) -> float:
    """Seconds to start so many processes that do nothing and to see them end, all at once."""

    async def one() -> None:
        process = await asyncio.create_subprocess_exec("true", stdin=subprocess.DEVNULL)
        await process.wait()

    async def every() -> None:
        await asyncio.gather(*(one() for _ in range(count)))

    start = time.perf_counter()
    asyncio.run(every())
    return time.perf_counter() - start


def run_file(folder: Path, command: Sequence[str], slots: int, environment: dict[str, str]) -> Path:
    (folder / "nothing.py").write_text(GRADER)
    file = folder / "run.toml"
    variables = "".join(f"{name} = {json.dumps(value)}\n" for name, value in environment.items())
    file.write_text(
        f'[run]\nname = "dispatch"\ndir = {json.dumps(str(folder))}\n[gateway]\nkey = "{KEY}"\n'
        f'[reward]\nfunction = "nothing:grade"\n[agent]\ncommand = {json.dumps(list(command))}\n'
        f"max_concurrent = {slots}\n[agent.env]\n{variables}"
    )
    return file


def queued(http: httpx.Client, count: int) -> None:
    for begin in range(0, count, 1000):
        rollouts = [{"input": {}} for _ in range(begin, min(count, begin + 1000))]
        http.post("/api/rollouts", json=rollouts, timeout=120).raise_for_status()


def finished(http: httpx.Client) -> int:
    return http.get("/api/rollouts/terminal", params={"limit": 1}).json()["total_terminal"]


def run(folder: Path, file: Path, rollouts: int, until: int) -> float:
    """Queue rollouts, start a controller, and return the seconds from then until so many have a reward."""
    gateway = [sys.executable, "-m", "longrein.cli", "gateway", str(file)]
    control = [sys.executable, "-m", "longrein.cli", "controller", str(file)]
    key = {"authorization": f"Bearer {KEY}"}
    with (
        started(gateway, folder / "gateway.log") as (_, url),
        httpx.Client(base_url=url, headers=key, trust_env=False, timeout=60) as http,
        (folder / "controller.log").open("w") as log,
    ):
        # The first rollout shows that the controller is there: its own start is not measured.
        queued(http, 1)
        process = subprocess.Popen(control, stdout=log, stderr=log)
        try:
            while finished(http) < 1:
                time.sleep(0.05)
                if process.poll() is not None:
                    raise SystemExit(f"the controller ended:\n{(folder / 'controller.log').read_text()}")
            start = time.perf_counter()
            queued(http, rollouts)
            while finished(http) < 1 + until:
                time.sleep(0.02)
            return time.perf_counter() - start
        finally:
            process.terminate()
            process.wait(60)


def latencies(file: Path, slots: int) -> list[float]:
    """Seconds from each end of an agent to the start of the one that took its slot."""
    lines = [line.split() for line in file.read_text().splitlines()]
    starts = sorted(float(when) for what, when in lines if what == "s")
    ends = sorted(float(when) for what, when in lines if what == "e")
    # The first lines are the rollout that showed that the controller is there.
    return sorted(begin - end for begin, end in zip(starts[1 + slots :], ends[1:], strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", type=int, default=150, help="that do nothing, where --slots may run at once")
    parser.add_argument("--slots", type=int, default=200)
    parser.add_argument("--queue", type=int, default=10_000, help="rollouts that wait")
    parser.add_argument("--dispatched", type=int, default=1000, help="of them that are run")
    parser.add_argument("--queue-slots", type=int, default=8)
    options = parser.parse_args()
    if shutil.which("bash") is None:
        raise SystemExit("the agents of this measurement are bash scripts, and there is no bash")
    console = Console()
    console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        alone = min(bare(options.agents) for _ in range(3))
        whole = run(folder, run_file(folder, ["true"], options.slots, {}), options.agents, options.agents)
        console.print(
            f"{options.agents} agents that do nothing, {options.slots} slots: {whole:.2f} s until all are graded; "
            f"{alone:.2f} s to start so many processes and see them end: {whole / alone:.1f} times that"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        times = folder / "times"
        file = run_file(folder, ["bash", "-c", TIMED], options.queue_slots, {"TIMES": str(times)})
        run(folder, file, options.queue, options.dispatched)
        found = latencies(times, options.queue_slots)
        p50, p99 = (1000 * found[int(len(found) * share)] for share in (0.5, 0.99))
        console.print(
            f"{options.queue:,} queued, {options.queue_slots} slots, {len(found)} agents: from the end of one to the start "
            f"of the next {p50:.0f} ms (p50), {p99:.0f} ms (p99)"
        )


if __name__ == "__main__":
    main()
