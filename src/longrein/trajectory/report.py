"""What became of a run's tokens, rollouts and time, from its records.

`build_report` is a pure function of records; `render_markdown` and `render_tables` show what it found.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table

from longrein.records import Call, CallKind, Rollout, RolloutState
from longrein.trajectory.batch import Ledger
from longrein.trajectory.kinds import MEANING, TRAINED_KINDS, Reason, untrained
from longrein.trajectory.tree import build_tree

#: Rollouts that are named where what was learned from them is not what the record has.
DIFFERING_SHOWN = 20


@dataclass
class Report:
    """A run in numbers. Shape and forks are those of the training rollouts; tokens and calls are of all."""

    tokens: Ledger = field(default_factory=Ledger)
    rollouts: int = 0
    pruned: int = 0
    """Rollouts of which only counts and rewards are left (`store.keep`)."""
    calls: int = 0
    shaped_rollouts: int = 0
    """Training rollouts with at least one answered call."""
    shaped_calls: int = 0
    samples: int = 0
    """Leaves of the training rollouts' trees: the rows that they are trained as."""
    one_chain: int = 0
    """Training rollouts that are a single leaf."""
    forks: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    length_limited: int = 0
    """Answered calls that a token limit cut."""
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind, message with its numbers left out) → rollouts."""
    differing: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Rollouts of which other tokens were learned from than the record has to train: how many were, and how many it has."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, in order of first appearance."""
    flags: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(audit rule, its severity, what followed) → attempts."""


def build_report(
    rollouts: Sequence[Rollout],
    calls_by_attempt: Mapping[tuple[str, str], Sequence[Call]],
    rewards: Mapping[str, float],
    metrics: Sequence[Mapping[str, Any]],
    kinds: Collection[CallKind] = TRAINED_KINDS,
    learned: Mapping[str, int] | None = None,
) -> Report:
    """What a run's records say.

    `calls_by_attempt` maps (rollout id, attempt id) to calls and is gone through once; `rewards` maps the id of a graded
    rollout to its reward; `metrics` are the lines of the run's metrics file. `kinds` are those that the run trains.
    `learned` maps the id of each rollout that was learned from to the tokens that were; without it (a record that was not
    made by a run) every graded group counts as learned from.
    """
    report = Report(rollouts=len(rollouts))
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    pruned: set[str] = set()
    reasons = _rollout_reasons(rollouts, rewards, learned, metrics)
    trained: Counter[str] = Counter()
    for (rollout_id, attempt_id), calls in calls_by_attempt.items():
        rollout = by_id[rollout_id]
        if any(call.pruned for call in calls):
            pruned.add(rollout_id)
        tokens = _count_tokens(report, rollout, attempt_id, calls, reasons[rollout_id], kinds)
        if calls:  # others may have been removed from the record since
            trained[rollout_id] += tokens
        if rollout.is_train and rollout.config.engine == "policy" and attempt_id == rollout.status.last_attempt_id:
            _count_shape(report, calls, kinds)
    for rollout in rollouts:
        if rollout.status.error_message:
            kind = "failed" if rollout.status.state is RolloutState.failed else "graded as it stood"
            report.failures[kind, _without_numbers(rollout.status.error_message)] += 1
    if learned is not None:
        report.differing = {
            name: (count, trained[name])
            for name, count in sorted(learned.items())
            if name in trained and count != trained[name]
        }
    report.pruned = len(pruned)
    report.seconds = _seconds_by_phase(metrics)
    return report


def _rollout_reasons(
    rollouts: Sequence[Rollout],
    rewards: Mapping[str, float],
    learned: Collection[str] | None,
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, Reason | None]:
    """Why a whole rollout is not trained, by its id; None where it is."""
    replaced = {group for line in metrics if line.get("kind") == "replaced" for group in line["groups"]}
    reasons: dict[str, Reason | None] = {}
    for rollout in rollouts:
        reasons[rollout.rollout_id] = _own_reason(rollout, rewards)
    incomplete = {
        rollout.group_id
        for rollout in rollouts
        if rollout.group_id is not None and reasons[rollout.rollout_id] in ("failed rollout", "no reward")
    }
    for rollout in rollouts:
        if reasons[rollout.rollout_id] is not None or (learned is not None and rollout.rollout_id in learned):
            continue
        if rollout.group_id in incomplete:
            reasons[rollout.rollout_id] = "group dropped"
        elif rollout.group_id in replaced:
            reasons[rollout.rollout_id] = "equal rewards"
        elif learned is not None:
            reasons[rollout.rollout_id] = "step not finished"
    return reasons


def _own_reason(rollout: Rollout, rewards: Mapping[str, float]) -> Reason | None:
    phase = str(rollout.metadata.get("phase", ""))
    if phase == "preflight":
        return "preflight"
    if rollout.config.engine == "teacher":
        return "teacher"
    if not rollout.is_train:
        return "warm-up" if phase.startswith("dev-") else "evaluation"
    if rollout.status.state is RolloutState.failed:
        return "failed rollout"
    if rollout.rollout_id not in rewards:
        return "no reward"
    return None


def _count_tokens(
    report: Report,
    rollout: Rollout,
    attempt_id: str,
    calls: Sequence[Call],
    reason: Reason | None,
    kinds: Collection[CallKind],
) -> int:
    """Count the tokens of an attempt's calls; how many were trained."""
    report.calls += len(calls)
    trained = 0
    if attempt_id != rollout.status.last_attempt_id:
        reason = "earlier attempt"
    for call in calls:
        if call.finish_reason is not None:
            report.answered += 1
            report.length_limited += call.finish_reason == "length"
        why = reason or untrained(call, kinds)
        if why is None:
            trained += call.sampled_count
        else:
            report.tokens.leave_out([call], why)
    report.tokens.trained += trained
    return trained


def _count_shape(report: Report, calls: Sequence[Call], kinds: Collection[CallKind]) -> None:
    ended = [call for call in calls if call.sampled_count and untrained(call, kinds) is None]
    if not ended:
        return
    if any(call.pruned for call in calls):
        leaves = sum(call.pruned is not None and call.pruned.leaf for call in ended)
    else:
        leaves = len(build_tree(calls).leaves([call.number for call in ended]))
    report.shaped_rollouts += 1
    report.shaped_calls += len(calls)
    report.samples += leaves
    report.one_chain += leaves == 1
    # An attempt's first call begins a conversation: that is no fork.
    first = min(call.number for call in calls)
    report.forks.update(call.fork for call in calls if call.fork is not None and call.number != first)


def _seconds_by_phase(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """From lines {"kind": "phase", "phase", "seconds"}, or from the steps' `time/PHASE` where there are none."""
    seconds: dict[str, float] = {}
    for line in metrics:
        if line.get("kind") == "phase":
            seconds[line["phase"]] = seconds.get(line["phase"], 0.0) + float(line["seconds"])
    if seconds:
        return seconds
    for line in metrics:
        for key, value in line.items():
            if key.startswith("time/") and value is not None:
                phase = key.removeprefix("time/")
                seconds[phase] = seconds.get(phase, 0.0) + float(value)
    return seconds


def _without_numbers(message: str) -> str:
    line = message.strip().splitlines()[0] if message.strip() else "no message"
    line = re.sub(r"\b(?=\w*\d)[0-9a-f]{6,}\b", "…", line)
    return re.sub(r"\d+(\.\d+)?", "#", line)[:160]


@dataclass(frozen=True)
class _Table:
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def _tables(report: Report) -> list[_Table]:
    tokens, sampled = report.tokens, report.tokens.sampled
    token_rows = [
        ("sampled", f"{sampled:,}", "", ""),
        ("trained", f"{tokens.trained:,}", _share(tokens.trained, sampled), ""),
    ]
    for reason, count in sorted(tokens.untrained.items(), key=lambda pair: -pair[1]):
        token_rows.append((f"not trained: {reason}", f"{count:,}", _share(count, sampled), MEANING[reason]))
    shape_rows = [
        ("rollouts", f"{report.rollouts:,}"),
        *([("of these pruned to counts and rewards", f"{report.pruned:,}")] if report.pruned else []),
        ("calls", f"{report.calls:,}"),
        ("calls that hit the length limit", _share(report.length_limited, report.answered)),
    ]
    if report.shaped_rollouts:
        shape_rows += [
            ("calls per training rollout", f"{report.shaped_calls / report.shaped_rollouts:.2f}"),
            ("samples (leaves) per training rollout", f"{report.samples / report.shaped_rollouts:.2f}"),
            ("training rollouts that stay one chain", _share(report.one_chain, report.shaped_rollouts)),
        ]
    forks = [(cause, f"{count:,}", _share(count, report.shaped_calls)) for cause, count in report.forks.most_common()]
    failures = [(kind, text, f"{count:,}") for (kind, text), count in report.failures.most_common()]
    flags = [(*names, f"{count:,}") for names, count in report.flags.most_common()]
    differing = [(name, f"{count:,}", f"{known:,}") for name, (count, known) in report.differing.items()][
        :DIFFERING_SHOWN
    ]
    total = sum(report.seconds.values())
    times = [
        (phase, f"{seconds:.1f} s", _share(seconds, total))
        for phase, seconds in sorted(report.seconds.items(), key=lambda pair: -pair[1])
    ]
    tables = [
        _Table("Tokens", ("tokens", "count", "share", "why"), token_rows),
        _Table("Learned from otherwise than recorded", ("rollout", "tokens learned", "tokens recorded"), differing),
        _Table("Rollouts and calls", ("", "value"), shape_rows),
        _Table("Forks by cause", ("cause", "calls", "share of calls"), forks),
        _Table("Failures by kind", ("rollout", "message", "rollouts"), failures),
        _Table("Audit: flags by rule", ("rule", "severity", "action", "attempts"), flags),
        _Table("Time by phase", ("phase", "time", "share"), times),
    ]
    return [table for table in tables if table.rows]


def render_markdown(report: Report) -> str:
    """The report as Markdown tables; tables without rows are left out."""
    parts = []
    for table in _tables(report):
        parts += [f"## {table.title}", "", _line(table.columns), "|" + "---|" * len(table.columns)]
        parts += [*(_line(row) for row in table.rows), ""]
    return "\n".join(parts)


def render_tables(report: Report) -> Group:
    """The report as rich tables for a terminal."""
    shown = []
    for table in _tables(report):
        one = Table(title=table.title, title_justify="left")
        for name in table.columns:
            words = name in (
                "tokens",
                "",
                "cause",
                "phase",
                "why",
                "message",
                "rule",
                "severity",
                "action",
            ) or table.title.startswith("Failures")
            one.add_column(name, justify="left" if words and name != "rollouts" else "right")
        for row in table.rows:
            one.add_row(*(cell.replace("[", "\\[") for cell in row))
        shown.append(one)
    return Group(*shown)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
