"""The learning curve of one run, or of several, as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longrein.trainer.summary import Summary

SMOOTHING = 5  # steps of the running mean


def draw_curve(summaries: Sequence[Summary], file: Path) -> None:
    """Draw reward against step: each step's rollouts, their running mean, and held-out evaluations with 95 % bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    single = len(summaries) == 1
    for number, summary in enumerate(summaries):
        colour = f"C{number % 10}"
        label = "" if single else f"{summary.name}: "
        axes.plot(summary.steps, summary.rewards, ".", color=colour, alpha=0.35, markersize=4)
        axes.plot(summary.steps, running_mean(summary.rewards), color=colour, label=f"{label}training rollouts")
        held = [e for e in summary.evaluations if e.name != "untuned"]
        if held:
            means = [e.mean for e in held]
            bars = [[e.mean - e.low for e in held], [e.high - e.mean for e in held]]
            style = {"color": "black" if single else colour, "marker": "o", "linestyle": "--", "capsize": 3}
            axes.errorbar([e.step for e in held], means, yerr=bars, label=f"{label}held out, 95 %", **style)
        untuned = summary.evaluation("untuned")
        if untuned is not None:
            axes.axhline(untuned.mean, color="grey" if single else colour, linestyle=":", label=f"{label}untuned")
    rewards = [r for s in summaries for r in [*s.rewards, *(e.mean for e in s.evaluations)]]
    if rewards and min(rewards) >= 0 and max(rewards) <= 1:
        axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.grid(alpha=0.3)
    axes.set_title(summaries[0].name if single else "runs")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", fontsize="small")
    figure.savefig(file)


def running_mean(values: Sequence[float]) -> list[float]:
    """Mean of each value and the up to `SMOOTHING` - 1 before it."""
    return [sum(part) / len(part) for part in (values[max(0, n + 1 - SMOOTHING) : n + 1] for n in range(len(values)))]
