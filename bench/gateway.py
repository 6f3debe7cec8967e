"""Calls per second and CPU per call: the gateway over a scripted engine, against direct calls to an endpoint.

    python bench/gateway.py [--agents 32] [--turns 10] [--words 120]

Agents hold growing conversations. The direct endpoint parses the request and writes the same reply as JSON: it neither
renders, nor tokenizes, nor records. The gateway does all three, and commits every call before it answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from gateway.models import make_model_folder

KEY = "bench"
REPLY = "I looked at the file and it says what we thought it would say."

SCRIPT = f"def script(messages, tools):\n    return {REPLY!r}\n"

DIRECT = f"""
import json, socket, uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
import msgspec

async def chat(request):
    body = msgspec.json.decode(await request.body())
    message = {{"role": "assistant", "content": {REPLY!r}}}
    answer = {{"id": "x", "object": "chat.completion", "created": 0, "model": body["model"],
              "choices": [{{"index": 0, "message": message, "finish_reason": "stop"}}], "usage": {{}}}}
    return Response(msgspec.json.encode(answer), media_type="application/json")

listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
print(f"http://127.0.0.1:{{listener.getsockname()[1]}}", flush=True)
app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False)).run(sockets=[listener])
"""


@dataclass
class Measured:
    calls: int
    seconds: float
    cpu_seconds: float
    resident_bytes: int
    latencies: list[float]


async def converse(http: httpx.AsyncClient, url: str, key: str, turns: int, words: int, seed: int) -> list[float]:
    """One agent: a conversation that grows by a user message and a reply a turn; the latency of each call."""
    rng = random.Random(seed)
    messages = [{"role": "system", "content": "You are a careful engineer. " * 20}]
    latencies = []
    for _ in range(turns):
        messages.append(
            {"role": "user", "content": " ".join(rng.choices(["file", "look", "cat", "echo", "out"], k=words))}
        )
        start = time.perf_counter()
        answer = await http.post(
            f"{url}/chat/completions",
            json={"model": "policy", "messages": messages},
            headers={"authorization": f"Bearer {key}"},
        )
        answer.raise_for_status()
        latencies.append(time.perf_counter() - start)
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    return latencies


async def measure(process: psutil.Process, targets: list[tuple[str, str]], turns: int, words: int) -> Measured:
    """Run one agent a target (base URL, key) at once, and read the server's CPU time before and after."""
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        before, start = process.cpu_times(), time.perf_counter()
        results = await asyncio.gather(
            *(converse(http, url, key, turns, words, i) for i, (url, key) in enumerate(targets))
        )
        seconds, after = time.perf_counter() - start, process.cpu_times()
    latencies = sorted(latency for result in results for latency in result)
    cpu = after.user + after.system - before.user - before.system
    return Measured(len(latencies), seconds, cpu, process.memory_info().rss, latencies)


def bench_direct(agents: int, turns: int, words: int) -> Measured:
    process = subprocess.Popen([sys.executable, "-c", DIRECT], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip() + "/v1"
        return asyncio.run(measure(psutil.Process(process.pid), [(url, "none")] * agents, turns, words))
    finally:
        process.kill()
        process.wait()


def bench_gateway(folder: Path, agents: int, turns: int, words: int) -> Measured:
    make_model_folder(folder / "model", context=1_000_000)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "run.toml").write_text(
        f'[run]\nname = "bench"\ndir = {json.dumps(str(folder))}\n[model]\npath = "./model"\n'
        f'[engine]\nkind = "scripted"\nscript = "script:script"\n[gateway]\nkey = "{KEY}"\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "longrein.cli", "gateway", str(folder / "run.toml")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}) as http:
            rollouts = http.post("/api/rollouts", json=[{"input": {}} for _ in range(agents)]).json()
            targets = []
            for rollout in rollouts:
                id = rollout["rollout_id"]
                token = http.post(f"/api/rollouts/{id}/attempts").json()["token"]
                targets.append((f"{url}/proxy/rollout/{id}/attempt/0/mode/train/openai/v1", token))
        return asyncio.run(measure(psutil.Process(process.pid), targets, turns, words))
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--agents", type=int, default=32, help="conversations at once")
    parser.add_argument("--turns", type=int, default=10, help="calls of a conversation")
    parser.add_argument("--words", type=int, default=120, help="words of each user message")
    options = parser.parse_args()
    direct = bench_direct(options.agents, options.turns, options.words)
    with tempfile.TemporaryDirectory() as folder:
        gateway = bench_gateway(Path(folder), options.agents, options.turns, options.words)
        size = sum(file.stat().st_size for file in (Path(folder) / "bench").glob("store.sqlite*"))
    table = Table(title=f"{options.agents} agents at once, {options.turns} growing turns each")
    for column in ("", "calls/s", "CPU ms/call", "p50 ms", "p99 ms", "memory MB"):
        table.add_column(column, justify="right")
    for name, m in (("direct", direct), ("gateway", gateway)):
        p50, p99 = (m.latencies[int(len(m.latencies) * q)] * 1000 for q in (0.5, 0.99))
        table.add_row(
            name,
            f"{m.calls / m.seconds:.0f}",
            f"{m.cpu_seconds / m.calls * 1000:.2f}",
            f"{p50:.1f}",
            f"{p99:.1f}",
            f"{m.resident_bytes / 1e6:.0f}",
        )
    rate = (gateway.calls / gateway.seconds) / (direct.calls / direct.seconds)
    console = Console()
    console.print(table)
    console.print(f"gateway / direct: {rate:.2f} of the rate; store {size / gateway.calls / 1000:.1f} kB a call")


if __name__ == "__main__":
    main()
