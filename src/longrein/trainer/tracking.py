"""Where a run's numbers go: `metrics.jsonl` always, TensorBoard and Weights & Biases on request, the screen by a display.

A line of `metrics.jsonl` has a `kind`: `step`, `warmup`, `evaluation`, `phase` (seconds spent in one phase), `warning`,
`note`, `replaced` (groups of equal rewards that a step did not learn from) and `begin` (a start or a resumption). A step
stands there once: when a run goes on from a checkpoint, the steps behind it, which are done again, become lines of kind
`undone`. Numbers that are not finite are written as null.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from longrein.config import Config, ConfigError
from longrein.records import Json, now
from longrein.textfile import open_lines
from longrein.trainer.evaluate import Evaluation
from longrein.trainer.progress import Display

METRICS = "metrics.jsonl"


class Tracker:
    """Records a run's numbers and tells the display. Raises `ConfigError` when an extra that is asked for is missing."""

    def __init__(self, config: Config, display: Display) -> None:
        self.display = display
        self._step = 0
        self._run = config.run.path
        self._sinks = [
            *([_tensorboard(config)] if config.tracking.tensorboard else []),
            *([_wandb(config)] if config.tracking.wandb else []),
        ]
        self._file = open_lines(self._run / METRICS)

    def begin(self, step: int | None) -> None:
        """Say that the run begins (None), or goes on behind the checkpoint of `step`."""
        self._undo(step)
        self._write("begin", {"step": step or 0})

    def _undo(self, step: int | None) -> None:
        """Mark what is done again: the steps behind `step`, without one the warm-up's too."""
        lines = read_metrics(self._run)
        marked = [{**line, "kind": "undone", "was": line["kind"]} if _is_behind(line, step) else line for line in lines]
        if marked == lines and self._file.tell() == sum(len(_encoded(line)) for line in lines):
            return
        part = (self._run / METRICS).with_suffix(".part")
        part.write_bytes(b"".join(map(_encoded, marked)))
        part.replace(self._run / METRICS)
        self._file.close()
        self._file = open_lines(self._run / METRICS)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Record a step of reinforcement learning."""
        self._step = step
        self._write("step", {"step": step, **values})
        self._send(values, step)
        self.display.step(step, values)

    def warmup(self, step: int, values: Mapping[str, float]) -> None:
        """Record a step of the warm-up."""
        self._write("warmup", {"step": step, **values})
        self.display.warmup(step, values)

    def evaluation(self, found: Evaluation) -> None:
        """Record an evaluation (its rewards are in `eval-NAME.json`)."""
        self._write(
            "evaluation",
            {"name": found.name, "step": found.step, "mean": found.mean, "low": found.low, "high": found.high},
        )
        self._send({"held_out/reward": found.mean}, found.step)
        self.display.evaluation(found)

    def replaced(self, step: int, groups: Sequence[str]) -> None:
        """Record the groups of equal rewards that a step replaced by others."""
        self._write("replaced", {"step": step, "groups": list(groups)})

    def note(self, text: str) -> None:
        """Say something that is worth knowing."""
        self._write("note", {"step": self._step, "text": text})
        self.display.note(text)

    def warn(self, text: str) -> None:
        """Say that something is probably wrong."""
        self._write("warning", {"step": self._step, "text": text})
        self.display.warn(text)

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Time a phase of the run and show it. Phases do not nest."""
        began = time.monotonic()
        self.display.phase(name, detail)
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._write("phase", {"step": self._step, "phase": name, "seconds": seconds})
            self.display.phase_ended(name, seconds)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._file.close()

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        line = {"kind": kind, "time": now(), **{key: _finite(value) for key, value in values.items()}}
        self._file.write(_encoded(line))
        self._file.flush()

    def _send(self, values: Mapping[str, float], step: int) -> None:
        for sink in self._sinks:
            sink.log(values, step)


def _encoded(line: Json) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _is_behind(line: Json, step: int | None) -> bool:
    """Whether a line is of a step that is done again when a run goes on from the checkpoint of `step`."""
    if line["kind"] == "step":
        return line["step"] > (step or 0)
    return line["kind"] == "warmup" and step is None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _TensorBoard:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _tensorboard(config: Config) -> _TensorBoard:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "tracking.tensorboard: the tensorboard package is missing; pip install 'longrein[tensorboard]'"
        ) from None
    return _TensorBoard(SummaryWriter(str(config.run.path / "tensorboard")))


def _wandb(config: Config) -> _Wandb:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("tracking.wandb: the wandb package is missing; pip install 'longrein[wandb]'") from None
    values = config.model_dump(mode="json", by_alias=True)
    values["gateway"]["key"] = ""
    return _Wandb(wandb.init(project=config.tracking.project, name=config.run.name, config=values, dir=config.run.path))


def read_metrics(run_folder: Path) -> list[Json]:
    """The lines of a run's `metrics.jsonl`; a last line that was cut off while being written is left out."""
    file = run_folder / METRICS
    if not file.exists():
        return []
    lines: list[Json] = []
    for line in file.read_bytes().splitlines():
        try:
            lines.append(msgspec.json.decode(line, type=dict))
        except msgspec.DecodeError:
            continue
    return lines
