"""What the gateway costs: CPU and latency per call, memory, and the time to read a finished rollout back.

    python bench/gateway.py [--agents 32] [--cases 10x1000,10x8000,40x32000] [--agent-lightning PYTHON]

Agents hold conversations that grow to the given number of tokens in the given number of turns, against one scripted
model server, directly and through the gateway. The server answers at once: what is measured is the gateway. With
`--agent-lightning` (a Python in which `agentlightning>=1.0` is installed) its gateway is measured in the same run; it
passes requests through, without rendering, tokenizing or writing to disk. Longrein's does all three.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from reference import AGENT_LIGHTNING
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from gateway.models import make_model_folder

KEY = "bench"
MODEL = Path("~/.cache/longrein/smollm2-135m").expanduser()
REPLY = "I looked at the file and it says what we thought it would say."
WORDS = "the file look cat echo out of a line that says how many things were found in every folder".split()

#: A model server for both: chat answers with token ids as vLLM gives them, and token ids in, token ids out.
UPSTREAM = f"""
import socket, sys, msgspec, uvicorn
from tokenizers import Tokenizer
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

tokenizer = Tokenizer.from_file(sys.argv[1])
ids = [*tokenizer.encode({REPLY!r}, add_special_tokens=False).ids, tokenizer.token_to_id("<|im_end|>")]

async def chat(request):
    body = msgspec.json.decode(await request.body())
    length = sum(len(m["content"]) for m in body["messages"]) // 4
    message = {{"role": "assistant", "content": {REPLY!r}}}
    logprobs = {{"content": [{{"token": "t", "logprob": -0.5, "bytes": None, "top_logprobs": []}} for _ in ids]}}
    choice = {{"index": 0, "message": message, "finish_reason": "stop", "token_ids": ids, "logprobs": logprobs}}
    answer = {{"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice],
              "prompt_token_ids": list(range(100, 100 + length)),
              "usage": {{"prompt_tokens": length, "completion_tokens": len(ids), "total_tokens": length + len(ids)}}}}
    return Response(msgspec.json.encode(answer), media_type="application/json")

async def generate(request):
    await request.body()
    chunk = {{"token_ids": ids, "logprobs": [-0.5] * len(ids), "versions": [[0, len(ids)]], "finish_reason": "stop"}}
    return Response(msgspec.json.encode(chunk), media_type="application/json")

async def health(request):
    return Response(b"{{}}", media_type="application/json")

listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
print(f"http://127.0.0.1:{{listener.getsockname()[1]}}", flush=True)
routes = [Route("/v1/chat/completions", chat, methods=["POST"]),
          Route("/inference/v1/generate", generate, methods=["POST"]), Route("/health", health)]
uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error", access_log=False)).run(sockets=[listener])
"""


@dataclass
class Measured:
    calls: int
    seconds: float
    cpu_seconds: float
    resident_bytes: int
    latencies: list[float]
    read_back_seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.calls / self.seconds


async def converse(http: httpx.AsyncClient, url: str, key: str, turns: int, tokens: int, seed: int) -> list[float]:
    """One agent: a conversation that grows by a user message and a reply a turn; the latency of each call."""
    rng = random.Random(seed)
    messages = [{"role": "system", "content": "You are a careful engineer."}]
    latencies = []
    for _ in range(turns):
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=max(1, tokens // turns - 25)))})
        body = json.dumps({"model": "policy", "messages": messages})
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        start = time.perf_counter()
        answer = await http.post(f"{url}/chat/completions", content=body, headers=headers)
        answer.raise_for_status()
        latencies.append(time.perf_counter() - start)
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    return latencies


async def measure(process: psutil.Process, targets: list[tuple[str, str]], turns: int, tokens: int) -> Measured:
    """Run one agent a target (base URL, key) at once, and read the server's CPU time before and after."""
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None), trust_env=False) as http:
        before, start = process.cpu_times(), time.perf_counter()
        results = await asyncio.gather(
            *(converse(http, url, key, turns, tokens, i) for i, (url, key) in enumerate(targets))
        )
        seconds, after = time.perf_counter() - start, process.cpu_times()
    latencies = sorted(latency for result in results for latency in result)
    cpu = after.user + after.system - before.user - before.system
    return Measured(len(latencies), seconds, cpu, process.memory_info().rss, latencies)


@contextmanager
def started(command: list[str]) -> Iterator[tuple[psutil.Process, str]]:
    """A server and the URL that it prints."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield psutil.Process(process.pid), process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.wait()


def client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, trust_env=False)


def rollouts_of(http: httpx.Client, upstream: dict[str, str], agents: int) -> list[str]:
    http.post("/api/models", json=[{"model": "policy", **upstream}]).raise_for_status()
    made = http.post("/api/rollouts", json=[{"input": {}} for _ in range(agents)])
    made.raise_for_status()
    return [rollout["rollout_id"] for rollout in made.json()]


def read_back(http: httpx.Client, path: str) -> float:
    """Seconds to read one finished rollout, the best of five."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        http.get(path).raise_for_status()
        best = min(best, time.perf_counter() - start)
    return best


def bench_direct(upstream: str, process: psutil.Process, agents: int, turns: int, tokens: int) -> Measured:
    return asyncio.run(measure(process, [(upstream + "/v1", "none")] * agents, turns, tokens))


def bench_longrein(folder: Path, model: Path, upstream: str, agents: int, turns: int, tokens: int) -> Measured:
    file = folder / "run.toml"
    file.write_text(
        f'[run]\nname = "bench"\ndir = {json.dumps(str(folder))}\n[model]\npath = {json.dumps(str(model))}\n'
        f'context = 1000000\n[gateway]\nkey = "{KEY}"\n'
    )
    with started([sys.executable, "-m", "longrein.cli", "gateway", str(file)]) as (process, url), client(url) as http:
        targets = []
        ids = rollouts_of(http, {"endpoint": upstream, "protocol": "tokens"}, agents)
        for id in ids:
            token = http.post(f"/api/rollouts/{id}/attempts").json()["token"]
            targets.append((f"{url}/proxy/rollout/{id}/attempt/0/mode/train/openai/v1", token))
        measured = asyncio.run(measure(process, targets, turns, tokens))
        measured.read_back_seconds = read_back(http, f"/api/rollouts/{ids[0]}/calls")
    return measured


def bench_agent_lightning(python: str, upstream: str, agents: int, turns: int, tokens: int) -> Measured:
    with started([python, "-c", AGENT_LIGHTNING]) as (process, url), client(url) as http:
        ids = rollouts_of(http, {"endpoint": upstream + "/v1"}, agents)
        targets = [(f"{url}/proxy/rollout/{id}/attempt/0/mode/train/openai/v1", KEY) for id in ids]
        measured = asyncio.run(measure(process, targets, turns, tokens))
        events = f"/api/rollouts/{ids[0]}/events?event_type=model_request&format=triplet"
        measured.read_back_seconds = read_back(http, events)
    return measured


def table_of(title: str, results: dict[str, Measured]) -> Table:
    table = Table(title=title)
    for column in ("", "calls/s", "of direct", "CPU ms/call", "p50 ms", "p99 ms", "memory MB", "read back ms"):
        table.add_column(column, justify="right")
    direct = results["direct"]
    for name, m in results.items():
        p50, p99 = (m.latencies[int(len(m.latencies) * q)] * 1000 for q in (0.5, 0.99))
        row = [name, f"{m.rate:.0f}", f"{m.rate / direct.rate:.2f}", f"{m.cpu_seconds / m.calls * 1000:.2f}"]
        row += [f"{p50:.1f}", f"{p99:.1f}", f"{m.resident_bytes / 1e6:.0f}"]
        table.add_row(*row, f"{m.read_back_seconds * 1000:.1f}" if m.read_back_seconds else "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--agents", type=int, default=32, help="conversations at once")
    parser.add_argument("--cases", default="10x1000,10x8000,40x32000", help="TURNSxTOKENS of a conversation, by commas")
    parser.add_argument("--agent-lightning", default="", metavar="PYTHON", help="interpreter with agentlightning>=1.0")
    options = parser.parse_args()
    cases = [tuple(map(int, case.split("x"))) for case in options.cases.split(",")]
    console = Console()
    with tempfile.TemporaryDirectory() as temporary:
        model = MODEL if (MODEL / "tokenizer.json").exists() else make_model_folder(Path(temporary) / "model")
        console.print(f"tokenizer and template: {model.name}; load {os.getloadavg()[0]:.1f}")
        with started([sys.executable, "-c", UPSTREAM, str(model / "tokenizer.json")]) as (process, upstream):
            for number, (turns, tokens) in enumerate(cases):
                folder = Path(temporary) / str(number)
                folder.mkdir()
                sizes = (options.agents, turns, tokens)
                results = {"direct": bench_direct(upstream, process, *sizes)}
                results["Longrein"] = bench_longrein(folder, model, upstream, *sizes)
                if options.agent_lightning:
                    results["Agent Lightning"] = bench_agent_lightning(options.agent_lightning, upstream, *sizes)
                title = f"{options.agents} agents at once, {turns} turns, about {tokens:,} tokens at the end"
                console.print(table_of(title, results))
                size = sum(file.stat().st_size for file in (folder / "bench").glob("store.sqlite*"))
                console.print(f"on disk: {size / results['Longrein'].calls / 1000:.1f} kB a call")


if __name__ == "__main__":
    main()
