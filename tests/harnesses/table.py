"""What the runs of the harnesses came to, as a page of Markdown tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from longrein.gateway.tokens import TextModel
from longrein.records import Call
from longrein.trajectory.batch import Ledger
from longrein.trajectory.kinds import untrained
from longrein.trajectory.tree import build_tree

from .drivers import DRIVERS, Driver
from .histories import replanned
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
a reply, *hold* 90 seconds in which the gate lets no call through, *stall* 330 seconds without a token in the middle of a
reply (tried with those that time a silent stream out).
"""

SHAPES = f"""
## One chain or many

Of the three runs of each harness: how many stay one chain (one sample holds all the tokens that are trained), samples
(leaves of the tree) a rollout, and the share of its sampled tokens that is trained. `faithful` shows the model what the
template makes of the harness's messages, `sampled` keeps the model's own tokens for every turn that is recognised,
`rendered` encodes everything anew, as a system without recorded ids does (the script samples what the tokenizer gives,
so re-tokenizing changes nothing here; a real model's samples differ). What is not trained is the title that opencode asks
for. Agent Lightning reports of its own harnesses and tasks, so as an orientation and no comparison: {REFERENCE}.
"""


HISTORIES = ("faithful", "sampled", "rendered")


@dataclass
class Figures:
    """Collects runs while the tests go."""

    runs: dict[Driver, list[Run]] = field(default_factory=lambda: defaultdict(list))
    """One run a manner."""
    calls: dict[tuple[Driver, str], list[list[Call]]] = field(default_factory=lambda: defaultdict(list))
    """(driver, history) → the calls of each of its runs."""
    survived: dict[Driver, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def empty(self) -> bool:
        return not self.runs

    def add(self, run: Run, model: TextModel) -> None:
        """Take in a run that went well."""
        self.runs[run.driver].append(run)
        for history in HISTORIES:
            self.calls[run.driver, history].append(replanned(run.calls, model, history))

    def page(self) -> str:
        """The page."""
        manners = "\n".join(f"* `{name}`: {words}." for name, words in MANNERS.items())
        drivers = [driver for driver in DRIVERS if driver in self.runs]
        columns = ["harness", "version", "dialect", "calls", "branches", "forks by cause", "trained", "survives"]
        page = HEAD.format(manners=manners) + "\n" + _table(columns, [self._row(driver) for driver in drivers])
        columns = ["harness", "dialect"]
        for history in HISTORIES:
            columns += [f"one chain, {history}", f"samples, {history}", f"trained, {history}"]
        compared = [driver for driver in drivers if not driver.twin]
        shapes = [[driver.name, driver.dialect, *self._shapes([driver])] for driver in compared]
        shapes.append(["**all**", "", *self._shapes(compared)])
        return page + SHAPES + "\n" + _table(columns, shapes)

    def _row(self, driver: Driver) -> list[str]:
        runs = self.runs[driver]
        forks = Counter(call.fork for run in runs for call in run.calls if call.fork is not None and call.number)
        ledger = sum((check_accounts(run.calls) for run in runs), Ledger())
        return [
            driver.name,
            driver.version,
            driver.dialect,
            _span([len(run.calls) for run in runs]),
            _span([leaves(run.calls) for run in runs]),
            ", ".join(f"{cause} {count}" for cause, count in sorted(forks.items())) or "none",
            _share(ledger.trained, ledger.sampled),
            ", ".join(one for one in ("failure", "cut", "hold", "stall") if one in self.survived[driver]) or "-",
        ]

    def _shapes(self, drivers: Sequence[Driver]) -> list[str]:
        cells: list[str] = []
        for history in HISTORIES:
            runs = [calls for driver in drivers for calls in self.calls[driver, history]]
            samples = [leaves(calls) for calls in runs]
            ledger = sum((check_accounts(calls) for calls in runs), Ledger())
            cells += [
                _share(sum(count == 1 for count in samples), len(samples)),
                f"{sum(samples) / len(samples):.2f}",
                _share(ledger.trained, ledger.sampled),
            ]
        return cells


def leaves(calls: Sequence[Call]) -> int:
    """Samples that a rollout is trained as: the leaves of its tree, of the calls that are trained."""
    trained = [call.number for call in calls if call.sampled and untrained(call) is None]
    return len(build_tree(calls).leaves(trained))


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def _span(counts: Sequence[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
