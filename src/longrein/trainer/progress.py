"""What a person sees while a run goes on: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from longrein.trainer.evaluate import Evaluation


class Display(Protocol):
    """Told of everything that happens; shows what it likes. `live`: wants to know how many rollouts run."""

    live: bool

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def phase(self, name: str, detail: str) -> None: ...
    def phase_ended(self, name: str, seconds: float) -> None: ...
    def rollouts(self, queued: int, running: int, done: int) -> None: ...
    def finished(self, reward: float | None, tokens: int) -> None: ...
    def step(self, step: int, values: Mapping[str, float]) -> None: ...
    def warmup(self, step: int, values: Mapping[str, float]) -> None: ...
    def evaluation(self, found: Evaluation) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


def make_display(kind: Literal["auto", "live", "lines", "none"], name: str, steps: int) -> Display:
    """The display that `tracking.progress` asks for; `auto` is live on a terminal and lines elsewhere."""
    if kind == "none":
        return Silent()
    console = Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
    if kind == "live" or (kind == "auto" and console.is_terminal):
        return LiveDisplay(console, name, steps)
    return Lines(console, steps)


def percent(value: float) -> str:
    """A reward between 0 and 1 as points of 100 when it is one, else as a plain number."""
    return f"{100 * value:.1f} %" if 0 <= value <= 1 else f"{value:.3f}"


def evaluation_line(found: Evaluation) -> str:
    text = f"held-out reward {found.name}: {percent(found.mean)} [{percent(found.low)}, {percent(found.high)}]"
    text += f" on {len(found.rewards)} tasks, {found.seconds:.0f} s"
    return text + (f" ({found.failed} rollouts failed and do not count)" if found.failed else "")


def step_line(values: Mapping[str, float]) -> str:
    parts = [f"reward {percent(values['reward/mean'])}"] if "reward/mean" in values else []
    if "loss" in values:
        parts.append(f"loss {values['loss']:.4f}")
    if "grad_norm" in values:
        parts.append(f"grad {values['grad_norm']:.3g}")
    if "entropy" in values:
        parts.append(f"entropy {values['entropy']:.3f}")
    for key, label in (("time/collect", "collect"), ("time/learn", "learn")):
        if key in values:
            parts.append(f"{label} {values[key]:.1f} s")
    if values.get("tokens/per_second"):
        parts.append(f"{values['tokens/per_second']:.0f} tokens/s")
    return ", ".join(parts)


class Silent:
    """Shows nothing but warnings, on standard error."""

    live = False

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def phase(self, name: str, detail: str) -> None: ...
    def phase_ended(self, name: str, seconds: float) -> None: ...
    def rollouts(self, queued: int, running: int, done: int) -> None: ...
    def finished(self, reward: float | None, tokens: int) -> None: ...
    def step(self, step: int, values: Mapping[str, float]) -> None: ...
    def warmup(self, step: int, values: Mapping[str, float]) -> None: ...
    def evaluation(self, found: Evaluation) -> None: ...
    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)


class Lines(Silent):
    """One line for everything that ends."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps

    def _say(self, text: str) -> None:
        self._console.print(Text(f"{time.strftime('%H:%M:%S')} {text}"))

    def phase(self, name: str, detail: str) -> None:
        if detail and not name.startswith("warm-up"):  # whose steps have lines of their own
            self._say(f"{name}: {detail}")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._say(f"step {step}/{self._steps}: {step_line(values)}")

    def warmup(self, step: int, values: Mapping[str, float]) -> None:
        self._say(f"warm-up step {step}: {warmup_line(values)}")

    def evaluation(self, found: Evaluation) -> None:
        self._say(evaluation_line(found))

    def note(self, text: str) -> None:
        self._say(text)

    def warn(self, text: str) -> None:
        self._say(f"warning: {text}")


def warmup_line(values: Mapping[str, float]) -> str:
    parts = [f"loss {values['loss']:.3f}"] if "loss" in values else []
    if "demonstrations" in values:
        parts.append(f"{values['demonstrations']:.0f} demonstrations")
    if "dev/reward" in values:
        parts.append(f"dev reward {percent(values['dev/reward'])}")
    return ", ".join(parts)


@dataclass
class _Phase:
    name: str = ""
    detail: str = ""
    began: float = field(default_factory=time.monotonic)
    rewards: list[float] = field(default_factory=list)
    done: int = 0
    tokens: int = 0


class LiveDisplay(Silent):
    """A panel that is redrawn in place: step, phase, rollouts, reward so far, times, evaluations."""

    live = True

    def __init__(self, console: Console, name: str, steps: int) -> None:
        self._console = console
        self._name = name
        self._steps = steps
        self._began = time.monotonic()
        self._phase = _Phase()
        self._counts = (0, 0, 0)
        self._step = 0
        self._last = ""
        self._rewards: list[float] = []
        self._times: dict[str, float] = {}
        self._evaluations: list[Evaluation] = []
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, transient=True)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def phase(self, name: str, detail: str) -> None:
        self._phase = _Phase(name, detail)

    def phase_ended(self, name: str, seconds: float) -> None:
        self._times[name] = self._times.get(name, 0.0) + seconds

    def rollouts(self, queued: int, running: int, done: int) -> None:
        self._counts = (queued, running, done)

    def finished(self, reward: float | None, tokens: int) -> None:
        self._phase.done += 1
        self._phase.tokens += tokens
        if reward is not None:
            self._phase.rewards.append(reward)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        self._last = step_line(values)
        if "reward/mean" in values:
            self._rewards.append(values["reward/mean"])

    def warmup(self, step: int, values: Mapping[str, float]) -> None:
        self._last = f"warm-up step {step}: {warmup_line(values)}"

    def evaluation(self, found: Evaluation) -> None:
        self._evaluations.append(found)
        self._console.print(Text(evaluation_line(found)))

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def warn(self, text: str) -> None:
        self._console.print(Text(f"warning: {text}", style="yellow"))

    def _draw(self) -> RenderableType:
        phase, now = self._phase, time.monotonic()
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        table.add_row("step", f"{self._step} of {self._steps}, {_clock(now - self._began)} so far")
        detail = f" ({phase.detail})" if phase.detail else ""
        table.add_row("phase", f"{phase.name}{detail}, {_clock(now - phase.began)}")
        queued, running, done = self._counts
        table.add_row("rollouts", f"{running} running, {queued} queued, {done} done")
        if phase.rewards:
            rate = phase.tokens / max(now - phase.began, 1e-6)
            mean = sum(phase.rewards) / len(phase.rewards)
            table.add_row("this phase", f"reward {percent(mean)} over {len(phase.rewards)}, {rate:.0f} tokens/s")
        if self._last:
            table.add_row("last step", self._last)
        if self._rewards:
            table.add_row("reward", f"{sparkline(self._rewards[-60:])} {percent(self._rewards[-1])}")
        if self._evaluations:
            table.add_row("held out", " → ".join(f"{e.name} {percent(e.mean)}" for e in self._evaluations))
        if self._times:
            table.add_row("time", ", ".join(f"{name} {_clock(s)}" for name, s in self._times.items()))
        return Panel(Group(table), title=f"longrein: {self._name}", title_align="left")


def sparkline(values: list[float]) -> str:
    """A small picture of a row of numbers, scaled to 0..1 when they lie there."""
    low, high = min(*values, 0.0), max(*values, 1.0)
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (value - low) / (high - low)))] for value in values)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"
