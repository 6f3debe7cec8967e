"""What the runs of the harnesses came to, as a page of Markdown tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from longrein.trajectory.batch import Ledger
from longrein.trajectory.tree import build_tree

from .drivers import DRIVERS, Driver
from .runs import Run, check_accounts
from .scripts import MANNERS

#: Agent Lightning's own figures on its coding task (arXiv 2608.17528): merged with the previous call where ids allow it.
REFERENCE = "36 % of its rollouts stay one sample; 2.41 samples a rollout"

HEAD = """\
# Harnesses

Real harnesses, installed from their registries and run against the gateway: `make test-harnesses` makes this page. The
model is a script that plays one task (write a file by the shell, read it back by two parallel calls, add a line, say what
it says) through the model's own tokenizer and an append-only ChatML template with Hermes tool calls; everything else is
real: programs, tools, files, HTTP, tokens. The same task is played in three manners of writing:

{manners}

Forks are those of all three. A fault is survived when the harness ends with the same answer and the same tree of answered
calls as without it: *failure* is a status 500 from the engine, *cut* a connection that the engine breaks in the middle of
a reply, *hold* 90 seconds in which the gate lets no call through.
"""

SHAPES = """
## One chain or many

Of the three runs of each harness: how many stay one chain (one sample holds all their sampled tokens), and samples
(leaves of the tree) a rollout. `faithful` shows the model what the template makes of the harness's messages, `sampled`
keeps the model's own tokens for every turn that is recognised, `rendered` encodes everything anew, as a system without
recorded ids does. In all three every sampled token that a harness was given is trained, once. {reference} (its own
harnesses and tasks, so an orientation and no comparison).
"""


@dataclass
class Figures:
    """Collects runs while the tests go."""

    runs: dict[tuple[Driver, str], list[Run]] = field(default_factory=lambda: defaultdict(list))
    """(driver, history) → one run a manner."""
    survived: dict[Driver, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def empty(self) -> bool:
        return not self.runs

    def add(self, history: str, run: Run) -> None:
        """Take in a run that went well."""
        if run not in self.runs[run.driver, history]:
            self.runs[run.driver, history].append(run)

    def page(self) -> str:
        """The page."""
        manners = "\n".join(f"* `{name}`: {words}." for name, words in MANNERS.items())
        drivers = [driver for driver in DRIVERS if (driver, "faithful") in self.runs]
        columns = ["harness", "version", "dialect", "calls", "branches", "forks by cause", "trained", "survives"]
        rows = [self._row(driver) for driver in drivers]
        page = HEAD.format(manners=manners) + "\n" + _table(columns, rows)
        histories = [h for h in ("faithful", "sampled", "rendered") if any(key[1] == h for key in self.runs)]
        columns = ["harness", "dialect"]
        for history in histories:
            columns += [f"one chain, {history}", f"samples, {history}"]
        compared = [driver for driver in drivers if all((driver, history) in self.runs for history in histories)]
        shapes = [[driver.name, driver.dialect, *self._shapes(driver, histories)] for driver in compared]
        shapes.append(["**all**", "", *self._all(compared, histories)])
        return page + SHAPES.format(reference="Agent Lightning reports: " + REFERENCE) + "\n" + _table(columns, shapes)

    def _row(self, driver: Driver) -> list[str]:
        runs = self.runs[driver, "faithful"]
        calls = [len(run.calls) for run in runs]
        forks = Counter(call.fork for run in runs for call in run.calls if call.fork is not None and call.number)
        ledger = sum((check_accounts(run.calls) for run in runs), Ledger())
        return [
            driver.name,
            driver.version,
            driver.dialect,
            _span(calls),
            _span([leaves(run) for run in runs]),
            ", ".join(f"{cause} {count}" for cause, count in sorted(forks.items())) or "none",
            f"{100 * ledger.trained / ledger.sampled:.0f} %",
            ", ".join(one for one in ("failure", "cut", "hold") if one in self.survived[driver]) or "-",
        ]

    def _shapes(self, driver: Driver, histories: Sequence[str]) -> list[str]:
        return [cell for history in histories for cell in _shape(self.runs.get((driver, history), []))]

    def _all(self, drivers: Sequence[Driver], histories: Sequence[str]) -> list[str]:
        cells: list[str] = []
        for history in histories:
            runs = [run for driver in drivers for run in self.runs[driver, history]]
            chains = [leaves(run) == 1 for run in runs]
            samples = [leaves(run) for run in runs]
            cells += [f"{100 * sum(chains) / len(chains):.0f} %", f"{sum(samples) / len(samples):.2f}"]
        return cells


def leaves(run: Run) -> int:
    """Samples that a run's main conversation and its side calls are trained as."""
    answered = [call.number for call in run.calls if call.status == "ok" and call.sampled]
    return len(build_tree(run.calls).leaves(answered))


def _shape(runs: Sequence[Run]) -> list[str]:
    if not runs:
        return ["-", "-"]
    samples = [leaves(run) for run in runs]
    return [f"{sum(count == 1 for count in samples)} of {len(runs)}", f"{sum(samples) / len(samples):.2f}"]


def _span(counts: Sequence[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
