"""What `longrein report` and `longrein compare` print, write to `report.md` and draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longrein.config import ConfigError


def write_report(run_folder: str | Path) -> None:
    """Print a run's tables, and write them to its `report.md` and its learning curve to `curve.png`.

    The record is opened read-only, so that a run that is going on can be looked at. Raises `ConfigError` when the folder
    is not a run's.
    """
    from rich.console import Console

    from longrein.trainer.picture import draw_curve
    from longrein.trainer.summary import markdown_table, rich_table, summarise, summary_tables

    folder = _run_folder(run_folder)
    found = summarise(folder)
    tables = summary_tables(found)
    console = Console()
    for table in tables:
        if table[2]:
            console.print(rich_table(table))
    for warning in found.warnings:
        console.print(f"warning: {warning}", highlight=False, markup=False)
    draw_curve([found], folder / "curve.png")
    parts = [f"# {found.name}", "", "![learning curve](curve.png)", ""]
    parts += [markdown_table(table) for table in tables if table[2]]
    if found.warnings:
        parts += ["## Warnings", "", *(f"- {warning}" for warning in found.warnings), ""]
    (folder / "report.md").write_text("\n".join(parts), encoding="utf-8")
    console.print(f"{folder / 'report.md'}, {folder / 'curve.png'}", highlight=False, soft_wrap=True)


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
