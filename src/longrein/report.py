"""What `longrein report` and `longrein compare` print, write to `report.md` and draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from longrein.config import ConfigError
from longrein.records import Call

if TYPE_CHECKING:
    from longrein.store import Store
    from longrein.trajectory.report import Report


def write_report(run_folder: str | Path) -> None:
    """Print a run's tables, and write them to its `report.md` and its learning curve to `curve.png`.

    The record is opened read-only, so that a run that is going on can be looked at. Raises `ConfigError` when the folder
    is not a run's, `StoreError` when its record cannot be read.
    """
    from rich.console import Console

    from longrein.trainer.picture import draw_curve
    from longrein.trainer.summary import evaluation_table, markdown_table, rich_table, summarise
    from longrein.trajectory.report import render_markdown, render_tables

    folder = _run_folder(run_folder)
    found, tokens = summarise(folder), _token_report(folder)
    evaluations = evaluation_table(found)
    console = Console()
    if found.evaluations:
        console.print(rich_table(evaluations))
    console.print(render_tables(tokens))
    for warning in found.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)
    draw_curve([found], folder / "curve.png")
    parts = [f"# {found.name}", "", "![learning curve](curve.png)", ""]
    parts += [markdown_table(evaluations)] if found.evaluations else []
    parts += [render_markdown(tokens)]
    if found.warnings:
        parts += ["## Warnings", "", *(f"- {warning}" for warning in found.warnings), ""]
    (folder / "report.md").write_text("\n".join(parts), encoding="utf-8")
    console.print(f"{folder / 'report.md'}, {folder / 'curve.png'}", highlight=False, soft_wrap=True)


def _token_report(folder: Path) -> Report:
    """What the run's record and metrics say."""
    from longrein.store import Store, locate_run
    from longrein.trainer.collect import grade_of
    from longrein.trainer.tracking import read_metrics
    from longrein.trajectory.report import build_report

    url, config = locate_run(folder)
    store = Store.open(url, read_only=True)
    try:
        rollouts = store.rollouts(limit=2**31 - 1)
        rewards: dict[str, float] = {}
        attempts: list[tuple[str, str]] = []
        flags: Counter[tuple[str, str, str]] = Counter()
        for rollout in rollouts:
            tried = store.attempts(rollout.rollout_id)
            attempts += [(rollout.rollout_id, attempt.attempt_id) for attempt in tried]
            for attempt in tried:
                said = [e.data for e in store.events(rollout.rollout_id, attempt.attempt_id, "audit")]
                flags.update({(str(d.get("rule")), str(d.get("severity")), str(d.get("action"))) for d in said})
            if tried:
                events = store.events(rollout.rollout_id, tried[-1].attempt_id, "reward")
                reward, _, _ = grade_of(rollout, tried[-1], events)
                if reward is not None:
                    rewards[rollout.rollout_id] = reward
        report = build_report(
            rollouts, _Calls(store, attempts), rewards, read_metrics(folder), config.algorithm.train_kinds
        )
        report.flags = flags
        return report
    finally:
        store.close()


class _Calls(Mapping[tuple[str, str], Sequence[Call]]):
    """The calls of attempts, read one attempt at a time: a run's may not fit into memory."""

    def __init__(self, store: Store, attempts: Sequence[tuple[str, str]]) -> None:
        self._store = store
        self._attempts = attempts

    def __getitem__(self, key: tuple[str, str]) -> Sequence[Call]:
        return self._store.calls(*key)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._attempts)

    def __len__(self) -> int:
        return len(self._attempts)


def write_comparison(run_folders: Sequence[str | Path], picture: str | Path) -> None:
    """Print several runs in one table, with their mean rise, and draw them together."""
    from rich.console import Console

    from longrein.trainer.picture import draw_curve
    from longrein.trainer.summary import comparison_table, rich_table, summarise

    summaries = [summarise(_run_folder(folder)) for folder in run_folders]
    console = Console()
    console.print(rich_table(comparison_table(summaries)))
    draw_curve(summaries, Path(picture))
    console.print(str(picture), highlight=False)


def _run_folder(folder: str | Path) -> Path:
    folder = Path(folder)
    if not (folder / "metrics.jsonl").exists():
        what = "holds no run" if folder.is_dir() else "no such run folder"
        raise ConfigError(f"{folder}: {what}; give the folder that `longrein train` wrote (runs/NAME)")
    return folder
