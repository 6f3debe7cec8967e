"""A thousand agents at a gateway: `make bench-load`.

Each agent asks, is streamed an answer that takes ten seconds, waits ten seconds as for a tool, and asks again with all that
was said. The engine is the simulated one, whose tokens are due at known times: what an answer takes beyond that is the
gateway's. Afterwards every answer that an agent saw is looked for in the record. Then agents are added until the 99th
percentile of the added time passes 250 ms.

With `--agent-lightning` (a Python in which `agentlightning>=1.0` is installed) its gateway is asked the same beside it, with
plain answers (it serves no streams) of a model server that takes as long. It keeps nothing on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil
from crowd import Options, checksum
from reference import AGENT_LIGHTNING
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from gateway.models import make_model_folder
from longrein.store import Store

KEY = "bench"
MODEL = Path("~/.cache/longrein/smollm2-135m").expanduser()
FIRST_TOKEN_SECONDS = 0.5
#: Added time at which the rate is raised no further.
MOST_ADDED_SECONDS = 0.25
SAMPLE_SECONDS = 2.0

#: A model server for Agent Lightning: a chat answer with token ids, as vLLM gives it, after the time that it takes.
UPSTREAM = """
import asyncio, socket, sys, msgspec, uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

seconds, tokens = float(sys.argv[1]), int(sys.argv[2])

async def chat(request):
    body = msgspec.json.decode(await request.body())
    length = sum(len(m["content"]) for m in body["messages"]) // 4
    await asyncio.sleep(seconds)
    logprobs = {"content": [{"token": "t", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * tokens}
    choice = {"index": 0, "message": {"role": "assistant", "content": "word " * tokens}, "finish_reason": "stop",
              "token_ids": list(range(tokens)), "logprobs": logprobs}
    answer = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice],
              "prompt_token_ids": list(range(length)),
              "usage": {"prompt_tokens": length, "completion_tokens": tokens, "total_tokens": length + tokens}}
    return Response(msgspec.json.encode(answer), media_type="application/json")

listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, timeout_keep_alive=75)).run(sockets=[listener])
"""


# --- The agents' processes ------------------------------------------------------------------------------------------


class Crowd:
    """Agents in processes of their own, and what these tell."""

    def __init__(self, url: str, options: argparse.Namespace, agents: int, *, stream: bool, attempts: bool) -> None:
        self.answers: list[tuple[float, float, float, float]] = []
        """(when it ended, seconds to the headers, to the first word, to the end)"""
        self.seen: dict[str, list[int]] = {}
        self._errors: dict[int, dict[str, int]] = {}
        self._lock = threading.Lock()
        self._share = -(-agents // options.clients)
        self.processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        address = urlsplit(url)
        for number in range(options.clients):
            chosen = Options(
                host=str(address.hostname), port=int(address.port or 0), key=KEY, first=number * 1_000_000,
                agents=self._share, turns=options.turns, words=options.words, tool_seconds=options.tool_seconds,
                cycle_seconds=options.answer_seconds + options.tool_seconds, stream=stream, attempts=attempts,
            )  # fmt: skip
            command = [sys.executable, str(Path(__file__).with_name("crowd.py")), msgspec.json.encode(chosen).decode()]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self.processes.append(process)
            self._readers.append(threading.Thread(target=self._read, args=(number, process), daemon=True))
            self._readers[-1].start()

    @property
    def errors(self) -> Counter[str]:
        with self._lock:
            return sum((Counter(told) for told in self._errors.values()), Counter[str]())

    def _read(self, number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            told = msgspec.json.decode(line)
            with self._lock:
                self.answers += map(tuple, told.get("answers", ()))
                self.seen.update(told.get("seen", {}))
                if "errors" in told:
                    self._errors[number] = told["errors"]

    def _tell(self, **command: Any) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()

    def grow(self, agents: int) -> None:
        self._tell(agents=-(-agents // len(self.processes)))

    def stop(self) -> None:
        """Let every agent finish its answer; returns when all have."""
        self._tell(stop=True)
        for process, reader in zip(self.processes, self._readers, strict=True):
            process.wait()
            reader.join()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def ended(self, start: float, end: float) -> list[tuple[float, float, float, float]]:
        with self._lock:
            return [answer for answer in self.answers if start <= answer[0] < end]


@contextmanager
def crowd(url: str, options: argparse.Namespace, agents: int, **more: bool) -> Iterator[Crowd]:
    made = Crowd(url, options, agents, **more)
    try:
        yield made
    finally:
        made.kill()


# --- Measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    seconds: float
    resident_bytes: int
    gateway_cpu: float
    """Seconds since its start."""
    clients_cpu: float
    answers: int
    machine: float
    """Share of all cores that was busy since the last sample, whoever used it."""
    load: float


@dataclass
class Measured:
    name: str
    agents: int
    engine_headers: float
    """When the engine lets headers leave, the first word, the end: seconds after it was asked."""
    engine_first: float
    engine_whole: float
    samples: list[Sample] = field(default_factory=list)
    answers: list[tuple[float, float, float, float]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return len(self.answers) / (self.samples[-1].seconds - self.samples[0].seconds)

    @property
    def cpu_ms(self) -> float:
        """The gateway's, for each answer."""
        return 1000 * (self.samples[-1].gateway_cpu - self.samples[0].gateway_cpu) / max(1, len(self.answers))

    @property
    def busy(self) -> tuple[float, float, float]:
        """Shares of one core of the gateway and of the agents, and of the whole machine."""
        first, last = self.samples[0], self.samples[-1]
        seconds = last.seconds - first.seconds
        machine = sum(sample.machine for sample in self.samples[1:]) / max(1, len(self.samples) - 1)
        return (
            (last.gateway_cpu - first.gateway_cpu) / seconds,
            (last.clients_cpu - first.clients_cpu) / seconds,
            machine,
        )

    def added_ms(self, share: float) -> list[float]:
        """Of the time to the headers, to the first word and to the end, what the engine did not take."""
        if not self.answers:
            return [float("nan")] * 3
        engine = (self.engine_headers, self.engine_first, self.engine_whole)
        return [1000 * (_quantile([a[i + 1] for a in self.answers], share) - engine[i]) for i in range(3)]


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def watch(measured: Measured, people: Crowd, gateway: psutil.Process, seconds: float) -> Measured:
    """Measure for so long."""
    clients = [psutil.Process(process.pid) for process in people.processes]
    psutil.cpu_percent()
    start = time.monotonic()
    while True:
        now = time.monotonic()
        busy = [process.cpu_times() for process in clients]
        own = gateway.cpu_times()
        measured.samples.append(
            Sample(
                now - start,
                gateway.memory_info().rss,
                own.user + own.system,
                sum(times.user + times.system for times in busy),
                len(people.answers),
                psutil.cpu_percent() / 100,
                os.getloadavg()[0],
            )
        )
        if now - start >= seconds:
            break
        time.sleep(min(SAMPLE_SECONDS, max(0.01, start + seconds - now)))
    time.sleep(1.2)  # what was answered is told once a second
    measured.answers = people.ended(start, start + measured.samples[-1].seconds)
    measured.errors = people.errors
    return measured


@contextmanager
def started(command: list[str], log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and the URL that it prints; it is asked to end, and has to."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{command[1:4]} does not start:\n{log.read_text()}")
        yield process, line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(120)
        process.kill()
        process.wait()


def gateway_command(folder: Path, model: Path, name: str, tokens: int, seconds: float) -> list[str]:
    """A gateway over an engine whose replies of so many tokens take so many seconds."""
    first = min(FIRST_TOKEN_SECONDS, seconds / 2)
    rate = (tokens - 1) / (seconds - first) if seconds else 1e9
    file = folder / f"{name}.toml"
    file.write_text(
        f'[run]\nname = "{name}"\ndir = {json.dumps(str(folder))}\n[model]\npath = {json.dumps(str(model))}\n'
        f'context = 1000000\n[gateway]\nkey = "{KEY}"\n[engine]\nkind = "simulated"\nmax_reply_tokens = {tokens}\n'
        f"[engine.simulated]\nreply_tokens = {tokens}\nfirst_token_seconds = {first}\ntokens_per_second = {rate}\n"
    )
    return [sys.executable, "-m", "longrein.cli", "gateway", str(file)]


# --- The record -----------------------------------------------------------------------------------------------------


@dataclass
class Compared:
    answers: int = 0
    recorded: int = 0
    lost: int = 0
    """Answers that an agent saw and that are not in the record as they were seen."""
    unseen: int = 0
    """Calls that count as answered though no agent saw their answer whole."""
    tokens: int = 0
    """Stored of prompts and replies."""


def compare(seen: dict[str, list[int]], store: Store) -> Compared:
    """Look for every answer that was seen in the record."""
    result = Compared()
    for rollout, answers in seen.items():
        calls = store.calls(rollout, "0")
        kept = Counter(checksum(str(call.reply.get("content") or "")) for call in calls if call.status == "ok")
        theirs = Counter(answers)
        result.answers += len(answers)
        result.recorded += kept.total()
        result.lost += (theirs - kept).total()
        result.unseen += (kept - theirs).total()
        result.tokens += sum(len(call.prompt_delta) + len(call.sampled) for call in calls)
    return result


def bytes_of_calls(file: Path, rollout: str) -> list[int]:
    """What each call of a rollout takes in the record, in order: the length of all its columns."""
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(calls)")]
        length = " + ".join(f'coalesce(length(CAST("{name}" AS BLOB)), 0)' for name in columns)
        rows = connection.execute(f"SELECT {length} FROM calls WHERE rollout_id = ? ORDER BY number", (rollout,))
        return [row[0] for row in rows]


def long_conversation(folder: Path, model: Path, turns: Sequence[int], words: int, tokens: int) -> Table:
    """Bytes in the record for each token of one conversation, at several lengths."""
    table = Table(title="one conversation in the record", title_justify="left")
    for column in ("turns", "tokens", "bytes", "bytes a token"):
        table.add_column(column, justify="right")
    said = " ".join(["the file says that"] * (words // 4))
    with (
        started(gateway_command(folder, model, "long", tokens, 0.0), folder / "long.log") as (_, url),
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, trust_env=False, timeout=60) as http,
    ):
        rollout = http.post("/api/rollouts", json=[{"input": {}}]).json()[0]["rollout_id"]
        path = f"/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1/chat/completions"
        messages: list[dict[str, str]] = []
        for turn in range(max(turns)):
            messages.append({"role": "user", "content": f"{turn}: {said}"})
            answer = http.post(path, json={"model": "policy", "messages": messages})
            answer.raise_for_status()
            messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    file = folder / "long" / "store.sqlite"
    store = Store.open(f"sqlite:///{file}", read_only=True)
    calls = store.calls(rollout, "0")
    store.close()
    sizes = bytes_of_calls(file, rollout)
    for count in turns:
        length = calls[count - 1].prompt_length + len(calls[count - 1].sampled)
        size = sum(sizes[:count])
        table.add_row(str(count), f"{length:,}", f"{size:,}", f"{size / length:.1f}")
    return table


# --- The runs -------------------------------------------------------------------------------------------------------


def bench_longrein(
    folder: Path, model: Path, options: argparse.Namespace, console: Console
) -> tuple[list[Measured], Compared]:
    """The run at `--agents`, then with more of them; and what became of their answers."""
    seconds, tokens = options.answer_seconds, options.answer_tokens
    cycle = seconds + options.tool_seconds
    command = gateway_command(folder, model, "load", tokens, seconds)
    results: list[Measured] = []

    def measure(name: str, agents: int, length: float) -> Measured:
        first = min(FIRST_TOKEN_SECONDS, seconds / 2)
        times = (seconds, seconds, seconds) if options.plain else (0.0, first, seconds)
        made = Measured(name, agents, *times)
        return watch(made, people, psutil.Process(process.pid), length)

    with started(command, folder / "load.log") as (process, url):
        with crowd(url, options, options.agents, stream=not options.plain, attempts=True) as people:
            time.sleep(1.2 * cycle)  # until all agents have begun
            results.append(measure("Longrein", options.agents, options.seconds))
            agents, step = options.agents, max(1, int(options.agents * options.raise_by))
            while options.raise_by and agents < options.most_agents:
                agents += step
                people.grow(agents)
                time.sleep(1.2 * cycle)
                results.append(measure("Longrein", agents, options.raise_seconds))
                if max(results[-1].added_ms(0.99)) > 1000 * MOST_ADDED_SECONDS:
                    break
            people.stop()
        console.print(f"errors: {dict(people.errors) or 'none'}")
    store = Store.open(f"sqlite:///{folder / 'load' / 'store.sqlite'}", read_only=True)
    compared = compare(people.seen, store)
    store.close()
    return results, compared


def bench_reference(folder: Path, options: argparse.Namespace, agents: int) -> Measured:
    seconds = options.answer_seconds
    with ExitStack() as stack:
        server = [sys.executable, "-c", UPSTREAM, str(seconds), str(options.answer_tokens)]
        _, upstream = stack.enter_context(started(server, folder / "upstream.log"))
        command = [options.agent_lightning, "-c", AGENT_LIGHTNING]
        process, url = stack.enter_context(started(command, folder / "reference.log"))
        headers = {"authorization": f"Bearer {KEY}"}
        models = [{"model": "policy", "endpoint": f"{upstream}/v1"}]
        httpx.post(f"{url}/api/models", json=models, headers=headers, trust_env=False).raise_for_status()
        people = stack.enter_context(crowd(url, options, agents, stream=False, attempts=False))
        time.sleep(1.2 * (seconds + options.tool_seconds))
        measured = Measured("Agent Lightning", agents, seconds, seconds, seconds)
        return watch(measured, people, psutil.Process(process.pid), options.reference_seconds)


# --- The report -----------------------------------------------------------------------------------------------------


def table_of(results: Sequence[Measured]) -> Table:
    table = Table(title="added: what the engine did not take, p50 / p99 in ms", title_justify="left")
    columns = ("", "agents", "answers/s", "to headers", "to the first word", "to the end", "CPU ms an answer")
    for column in (*columns, "core: gateway", "core: agents", "machine", "load", "memory MB", "errors"):
        table.add_column(column, justify="right")
    for m in results:
        pairs = [f"{low:.1f} / {high:.1f}" for low, high in zip(m.added_ms(0.5), m.added_ms(0.99), strict=True)]
        busy = [f"{share:.0%}" for share in m.busy]
        memory = f"{m.samples[-1].resident_bytes / 1e6:.0f}"
        errors = str(m.errors.total())
        table.add_row(
            m.name, f"{m.agents:,}", f"{m.rate:.1f}", *pairs, f"{m.cpu_ms:.1f}", *busy, f"{m.samples[-1].load:.1f}",
            memory, errors,
        )  # fmt: skip
    return table


def draw(measured: Measured, file: Path) -> None:
    """The gateway's memory and its answers over time, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    memory = figure.add_subplot()
    seconds = [sample.seconds for sample in measured.samples]
    memory.plot(seconds, [sample.resident_bytes / 1e6 for sample in measured.samples], color="C0")
    memory.set_ylim(bottom=0)
    memory.set_xlabel("seconds")
    memory.set_ylabel("memory of the gateway, MB", color="C0")
    answers = memory.twinx()
    pairs = list(zip(measured.samples, measured.samples[1:], strict=False))
    rates = [(later.answers - earlier.answers) / (later.seconds - earlier.seconds) for earlier, later in pairs]
    answers.plot(seconds[1:], rates, color="C1", alpha=0.6)
    answers.set_ylim(bottom=0)
    answers.set_ylabel("answers a second", color="C1")
    memory.set_title(f"{measured.agents:,} agents")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def series(measured: Measured) -> str:
    """The gateway's memory at twelve times."""
    every = max(1, len(measured.samples) // 12)
    return ", ".join(f"{s.seconds:.0f} s {s.resident_bytes / 1e6:.0f}" for s in measured.samples[::every])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", type=int, default=1000, help="conversations at once")
    parser.add_argument("--seconds", type=float, default=300.0, help="length of the measurement, after all have begun")
    parser.add_argument("--answer-seconds", type=float, default=10.0)
    parser.add_argument("--answer-tokens", type=int, default=100)
    parser.add_argument("--tool-seconds", type=float, default=10.0, help="mean time between an answer and a question")
    parser.add_argument("--turns", type=int, default=8, help="of a rollout")
    parser.add_argument("--words", type=int, default=100, help="of what a tool says")
    parser.add_argument("--clients", type=int, default=1, help="processes that the agents are in")
    parser.add_argument("--plain", action="store_true", help="answers in one piece instead of streams")
    parser.add_argument("--raise-by", type=float, default=0.1, help="share of agents added at a time; 0: none")
    parser.add_argument("--raise-seconds", type=float, default=30.0, help="measurement of each step")
    parser.add_argument("--most-agents", type=int, default=10_000)
    parser.add_argument("--long", default="5,20,80", help="turns at which the size of one conversation is told")
    parser.add_argument("--agent-lightning", default="", metavar="PYTHON", help="interpreter with agentlightning>=1.0")
    parser.add_argument("--reference-agents", default="150,1000", help="at Agent Lightning's gateway")
    parser.add_argument("--reference-seconds", type=float, default=60.0)
    parser.add_argument("--picture", default="", metavar="FILE", help="where memory over time is drawn (PNG)")
    options = parser.parse_args()
    if options.answer_tokens < 2 or options.agents < 1 or options.clients < 1:
        parser.error("--answer-tokens has to be 2 at least, --agents and --clients 1")
    return options


def main() -> int:
    options = parsed()
    console = Console(width=None if sys.stdout.isatty() else 200)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = MODEL if (MODEL / "tokenizer.json").exists() else make_model_folder(folder / "model")
        console.print(
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; tokenizer and template: {model.name}; "
            f"{'plain' if options.plain else 'streamed'} answers of {options.answer_tokens} tokens in "
            f"{options.answer_seconds:g} s, {options.tool_seconds:g} s between them, {options.turns} turns a rollout"
        )
        results, compared = bench_longrein(folder, model, options, console)
        shown = list(results)
        for agents in map(int, options.reference_agents.split(",")) if options.agent_lightning else ():
            shown.append(bench_reference(folder, options, agents))
        console.print(table_of(shown))
        console.print(f"memory of the gateway, MB: {series(results[0])}")
        if options.picture:
            draw(results[0], Path(options.picture))
            console.print(f"drawn: {options.picture}")
        if len(results) > 1:
            last = results[-1]
            passed = max(last.added_ms(0.99)) > 1000 * MOST_ADDED_SECONDS
            said = "passes" if passed else "does not pass"
            console.print(f"p99 {said} {MOST_ADDED_SECONDS * 1000:.0f} ms at {last.rate:.0f} answers/s")
        size = (folder / "load" / "store.sqlite").stat().st_size
        console.print(f"on disk: {size / max(1, compared.tokens):.1f} bytes a stored token, all tables and indexes")
        if options.long:
            lengths = sorted(map(int, options.long.split(",")))
            console.print(long_conversation(folder, model, lengths, options.words, options.answer_tokens))
        console.print(
            f"{compared.answers:,} answers seen, {compared.recorded:,} recorded; lost: {compared.lost}, recorded as given "
            f"and not seen: {compared.unseen}"
        )
        return 1 if compared.lost or compared.unseen or not compared.answers else 0


if __name__ == "__main__":
    raise SystemExit(main())
