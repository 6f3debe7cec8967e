"""What a run came to: evaluations with intervals, the paired rise, the reward's curve.

Read from the files of a run's folder alone, so that it can be had of a run that is going on, was ended or is finished.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from longrein.trainer.evaluate import Evaluation, Interval, load_all, paired_rise
from longrein.trainer.progress import percent
from longrein.trainer.tracking import read_metrics


@dataclass(frozen=True)
class Summary:
    """A run as its files tell it."""

    name: str
    evaluations: list[Evaluation]
    rise: Interval | None
    """Paired difference from the evaluation before the first step to the last one; None without both."""
    steps: list[int]
    rewards: list[float]
    """Mean reward of each step's rollouts."""
    seconds: float
    """Time spent in all phases."""
    warnings: list[str]

    def evaluation(self, name: str) -> Evaluation | None:
        return next((e for e in self.evaluations if e.name == name), None)


def summarise(run_folder: Path, seed: int = 0) -> Summary:
    """Read a run's evaluations and metrics. A step that was done again after a resumption counts as done last."""
    evaluations = load_all(run_folder)
    curve: dict[int, float] = {}
    seconds = 0.0
    warnings: dict[str, str] = {}
    for line in read_metrics(run_folder):
        if line["kind"] == "step" and line.get("reward/mean") is not None:
            curve[int(line["step"])] = float(line["reward/mean"])
        elif line["kind"] == "phase":
            seconds += float(line["seconds"])
        elif line["kind"] == "warning":
            warnings[re.sub(r"\d+(\.\d+)?", "#", line["text"])] = line["text"]  # the last of a kind
    before = next((e for e in evaluations if e.name == "before"), None)
    last = max(evaluations, key=lambda e: (e.step, e.started_at), default=None)
    rise = paired_rise(before, last, seed) if before and last and last.step > before.step else None
    steps = sorted(curve)
    return Summary(
        run_folder.name, evaluations, rise, steps, [curve[s] for s in steps], seconds, list(warnings.values())
    )


Rows = tuple[str, list[str], list[list[str]]]
"""A table: its title, its column names and its rows."""


def evaluation_table(summary: Summary) -> Rows:
    """The evaluations and the paired rise, ready for `rich_table` or `markdown_table`."""
    evaluations = [
        [e.name, str(e.step), percent(e.mean), _span(e.interval), str(len(e.rewards)), f"{e.seconds:.0f} s"]
        for e in summary.evaluations
    ]
    if summary.rise is not None:
        rise = summary.rise
        evaluations.append(["rise (paired)", "", points(rise.mean), _points_span(rise), "", ""])
    title = f"Reward on held-out tasks (the whole run took {summary.seconds:.0f} s)"
    return (title, ["evaluation", "step", "reward", "95 % interval", "tasks", "time"], evaluations)


def comparison_table(summaries: list[Summary], seed: int = 0) -> Rows:
    """One row per run and the mean over runs with a 95 % interval (Student's t over runs) of before, after and rise."""
    rows = []
    columns: list[list[float]] = [[], [], []]
    for summary in summaries:
        before, after = summary.evaluation("before"), summary.evaluation("after")
        untuned = summary.evaluation("untuned")
        row = [summary.name, *(_shown(e.interval if e else None) for e in (untuned, before, after))]
        rise = summary.rise
        row.append(f"{points(rise.mean)} {_points_span(rise)}" if rise else "")
        rows.append([*row, f"{summary.seconds:.0f} s"])
        if before and after and rise:
            for column, value in zip(columns, (before.mean, after.mean, rise.mean), strict=True):
                column.append(value)
    if len(columns[0]) > 1:
        before, after, rise = (mean_over_runs(column) for column in columns)
        rows.append(
            [
                f"mean of {len(columns[0])} runs",
                "",
                _shown(before),
                _shown(after),
                f"{points(rise.mean)} {_points_span(rise)}",
                "",
            ]
        )
    return ("Reward on held-out tasks", ["run", "untuned", "before", "after", "rise (paired)", "time"], rows)


# Student's t, 97.5 % quantile by degrees of freedom 1..10; beyond, the normal quantile with the usual correction.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def mean_over_runs(values: list[float]) -> Interval:
    """Mean of two or more runs with its 95 % interval by Student's t."""
    freedom = len(values) - 1
    quantile = _T[freedom - 1] if freedom <= len(_T) else 1.96 * (1 + 1 / (4 * freedom) * (1.96**2 + 1))
    half = quantile * float(np.std(values, ddof=1)) / float(np.sqrt(len(values)))
    mean = float(np.mean(values))
    return Interval(mean, mean - half, mean + half)


def points(difference: float) -> str:
    """A difference of rewards as points of 100."""
    return f"{100 * difference:+.1f} points"


def _span(interval: Interval) -> str:
    if not 0 <= interval.mean <= 1:
        return f"[{interval.low:.3f}, {interval.high:.3f}]"
    return f"[{100 * interval.low:.1f} %, {100 * interval.high:.1f} %]"


def _points_span(interval: Interval) -> str:
    return f"[{100 * interval.low:+.0f}, {100 * interval.high:+.0f}]"


def _shown(interval: Interval | None) -> str:
    if interval is None:
        return ""
    if not 0 <= interval.mean <= 1:
        return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
    return f"{100 * interval.mean:.1f} % [{100 * interval.low:.0f}, {100 * interval.high:.0f}]"


def rich_table(rows: Rows) -> Table:
    title, columns, lines = rows
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for line in lines:
        table.add_row(*line)
    return table


def markdown_table(rows: Rows) -> str:
    title, columns, lines = rows
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([f"## {title}", "", *head, *body, ""])
