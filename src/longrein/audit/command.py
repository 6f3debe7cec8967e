"""`longrein audit RUN`: what a run's agents tried, by rule, with excerpts, from the record of a run that may go on."""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from longrein.audit.audit import Finding, audit_attempt
from longrein.audit.rules import SEVERITIES, Rule, Rules, Severity, load_rules
from longrein.config import Config, ConfigError, load
from longrein.records import Attempt, Event, Json, Outcome, Rollout, RolloutState
from longrein.schema import StoreError
from longrein.store import Store, store_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

#: Excerpts that the table has of each rule; --format jsonl has all that are kept of an attempt.
SHOWN = 5
_PAGE = 500


@dataclass
class Tally:
    """What a run has of one rule. Its size does not grow with the transcripts."""

    rule: Rule
    rollouts: int = 0
    attempts: int = 0
    rewards: array[float] = field(default_factory=lambda: array("d"))
    """Of the flagged rollouts that have one; 8 bytes each."""
    steps: Counter[int] = field(default_factory=Counter)
    """Flagged rollouts of each step of training."""
    excerpts: list[str] = field(default_factory=list)


@dataclass
class Audit:
    """A run's audit while it is made."""

    rollouts: int = 0
    attempts: int = 0
    pruned: int = 0
    """Attempts whose transcripts `store.keep` has removed."""
    rewarded: int = 0
    reward_sum: float = 0.0
    steps: Counter[int] = field(default_factory=Counter)
    """Rollouts of each step of training."""
    tallies: dict[str, Tally] = field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        return self.reward_sum / self.rewarded if self.rewarded else None


def command(
    run: str,
    *,
    rules: Sequence[str] = (),
    rollouts: Sequence[str] = (),
    form: Literal["table", "jsonl"] = "table",
    least: Severity = "low",
) -> int:
    """Print what the run's agents tried; 1 if there is anything, 0 if not. Raises `ConfigError` for what cannot be read."""
    folder = Path(run)
    config = _config(folder)
    chosen = load_rules(config.audit).only(rules, least)
    try:
        store = Store.open(store_url(config), read_only=True)
    except StoreError as error:
        raise ConfigError(f"{error}") from None
    try:
        missing = [name for name in rollouts if store.rollout(name) is None]
        if missing:
            raise ConfigError(f"--rollout: the record has no rollout {missing[0]}")
        found = Audit()
        with _progress(store) as advance:
            for rollout in _rollouts(store):
                if form == "jsonl":
                    for line in _lines(store, rollout, chosen, rollouts, found):
                        print(json.dumps(line), flush=True)
                else:
                    for _ in _lines(store, rollout, chosen, rollouts, found):
                        pass
                advance()
    finally:
        store.close()
    if form == "table":
        _print(found)
    if found.pruned:
        said = f"{_counted(found.pruned, 'attempt')} not looked at: pruned (store.keep), the transcripts are gone"
        print(f"longrein: {said}", file=sys.stderr)
    return 1 if found.tallies else 0


def _config(folder: Path) -> Config:
    """The run's configuration with the folder where the run is now; the defaults where a gateway ran alone."""
    file = folder / "config.toml"
    if not file.exists() and not (folder / "store.sqlite").exists():
        what = "holds no run" if folder.is_dir() else "no such run folder"
        raise ConfigError(f"{folder}: {what}; give the folder that holds the record (runs/NAME)")
    config = load(file if file.exists() else None)
    own = config.run.model_copy(update={"dir": str(folder.resolve().parent), "name": folder.resolve().name})
    return config.model_copy(update={"run": own})


def _rollouts(store: Store) -> Iterator[Rollout]:
    """The rollouts that were started, those that go on last; a page of ids at a time."""
    running = {rollout.rollout_id for rollout in store.rollouts([RolloutState.running], limit=2**31 - 1)}
    after, more = 0, True
    while more:
        page = store.terminal(after, _PAGE)
        for item in page.items:
            rollout = None if item.rollout_id in running else store.rollout(item.rollout_id)
            if rollout is not None:
                yield rollout
        after, more = page.next_after, bool(page.items)
    for rollout_id in sorted(running):
        rollout = store.rollout(rollout_id)
        if rollout is not None:
            yield rollout


def _lines(store: Store, rollout: Rollout, rules: Rules, only: Sequence[str], found: Audit) -> Iterator[Json]:
    """Audit a rollout's attempts into `found`; a line for every finding."""
    attempts = store.attempts(rollout.rollout_id)
    last = attempts[-1] if attempts else None
    events = store.events(rollout.rollout_id, last.attempt_id, "reward") if last is not None else []
    reward = graded(last, events)
    if reward is not None:
        found.rewarded += 1
        found.reward_sum += reward
    if only and rollout.rollout_id not in only:
        return
    found.rollouts += 1
    step = rollout.metadata.get("step") if rollout.is_train else None
    step = step if isinstance(step, int) else None
    if step is not None:
        found.steps[step] += 1
    flagged: set[str] = set()
    for attempt in attempts:
        found.attempts += 1
        calls = store.calls(rollout.rollout_id, attempt.attempt_id)
        found.pruned += any(call.pruned for call in calls)
        for finding in audit_attempt(rules, calls):
            first = finding.rule.id not in flagged
            flagged.add(finding.rule.id)
            _count(found, finding, rollout, attempt, reward, step, first_of_rollout=first)
            yield {
                "rule": finding.rule.id,
                "severity": finding.rule.severity,
                "rollout": rollout.rollout_id,
                "attempt": attempt.attempt_id,
                "group": rollout.group_id,
                "step": step,
                "reward": reward,
                "count": finding.count,
                "flags": [{"call": f.call, "place": f.place, "excerpt": f.excerpt} for f in finding.flags],
            }


def _count(
    found: Audit,
    finding: Finding,
    rollout: Rollout,
    attempt: Attempt,
    reward: float | None,
    step: int | None,
    *,
    first_of_rollout: bool,
) -> None:
    tally = found.tallies.setdefault(finding.rule.id, Tally(finding.rule))
    tally.attempts += 1
    if first_of_rollout:
        tally.rollouts += 1
        if reward is not None:
            tally.rewards.append(reward)
        if step is not None:
            tally.steps[step] += 1
    if len(tally.excerpts) < SHOWN:
        flag = finding.flags[0]
        where = f"{rollout.rollout_id} attempt {attempt.attempt_id} call {flag.call} {flag.place}"
        tally.excerpts.append(f"{where}: {flag.excerpt}")


def graded(attempt: Attempt | None, rewards: Sequence[Event]) -> float | None:
    """The reward that the grader gave, whatever the audit made of it; None without one."""
    if attempt is None or attempt.outcome is Outcome.infrastructure_failed or not rewards:
        return None
    data = rewards[-1].data
    value = data.get("graded", data.get("value"))
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


# --- Showing --------------------------------------------------------------------------------------------------------


def _print(found: Audit) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    looked = f"{_counted(found.attempts, 'attempt')} of {_counted(found.rollouts, 'rollout')}"
    if not found.tallies:
        console.print(f"{looked}: nothing found", highlight=False)
        return
    tallies = sorted(found.tallies.values(), key=lambda t: (-SEVERITIES.index(t.rule.severity), -t.rollouts, t.rule.id))
    console.print(_table(found, tallies, looked))
    for tally in tallies:
        console.print(
            f"\n{tally.rule.id} ({tally.rule.severity}): {tally.rule.means}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        for line in tally.excerpts:
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
        if tally.attempts > len(tally.excerpts):
            console.print(f"  … and {_counted(tally.attempts - len(tally.excerpts), 'attempt')} more", highlight=False)


def _table(found: Audit, tallies: Sequence[Tally], title: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("rule", "severity"):
        table.add_column(name, overflow="fold")
    for name in ("rollouts", "attempts", "above mean", "steps", "1st half", "2nd half"):
        table.add_column(name, justify="right")
    for tally in tallies:
        row = [tally.rule.id, tally.rule.severity, f"{tally.rollouts:,}", f"{tally.attempts:,}", above(found, tally)]
        row.append(f"{min(tally.steps)}-{max(tally.steps)}" if tally.steps else "-")
        table.add_row(*row, *halves(found, tally))
    return table


def above(found: Audit, tally: Tally) -> str:
    """The share of a rule's rollouts whose reward is above the run's mean."""
    mean = found.mean
    if mean is None or not tally.rewards:
        return "-"
    return _percent(sum(reward > mean for reward in tally.rewards), len(tally.rewards))


def halves(found: Audit, tally: Tally) -> tuple[str, str]:
    """The shares of flagged rollouts in the first and the second half of the training's steps: is it rising?"""
    if not tally.steps:
        return "-", "-"
    middle = (min(found.steps) + max(found.steps)) / 2
    early = sum(count for step, count in found.steps.items() if step <= middle)
    flagged = sum(count for step, count in tally.steps.items() if step <= middle)
    late = sum(found.steps.values()) - early
    return _percent(flagged, early), _percent(sum(tally.steps.values()) - flagged, late)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


@contextmanager
def _progress(store: Store) -> Iterator[Callable[[], None]]:
    """A bar on a terminal's standard error; call the function for each rollout."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    total = store.terminal(0, 1).total_terminal
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("rollouts", total=total)
        yield lambda: progress.advance(task)
