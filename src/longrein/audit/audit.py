"""The audit of an attempt: which rules its calls match, where, and what follows from it.

An attempt is read once, call by call (`pieces.py`), and each piece is held against the rules of its place (`rules.py`).
The same function serves `longrein audit` and the controller, which asks it before a reward is posted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from longrein import config
from longrein.audit.commands import Piece
from longrein.audit.excerpt import excerpt
from longrein.audit.pieces import Reader
from longrein.audit.rules import SEVERITIES, Measure, Rule, Rules, load_rules
from longrein.records import Call, Json, NewEvent

#: Excerpts of one rule that are kept of an attempt; further matches are counted.
KEPT = 3

Action = Literal["report", "zero", "drop"]


@dataclass(frozen=True)
class Flag:
    """Where a rule matched: in which call, in which of its places, and how that reads."""

    call: int
    place: str
    excerpt: str


@dataclass
class Finding:
    """What an attempt did against one rule."""

    rule: Rule
    count: int = 0
    """Pieces of the transcript that matched."""
    flags: list[Flag] = field(default_factory=list)
    """The first `KEPT` of them."""


def audit_attempt(rules: Rules, calls: Sequence[Call]) -> list[Finding]:
    """What an attempt's calls (in order of number) did against the rules, gravest first.

    Time and memory are linear in what was recorded.
    """
    found: dict[str, Finding] = {}
    reader = Reader()
    for call in calls:
        of_own = _own(call)
        for piece in reader.pieces(call):
            if "attempt" in piece.text:
                piece = Piece(piece.place, of_own(piece.text), piece.path)
            for match in rules.matches(piece):
                finding = found.setdefault(match.rule.id, Finding(match.rule))
                finding.count += 1
                if len(finding.flags) < KEPT:
                    said = excerpt(piece.text, match.start, match.end)
                    finding.flags.append(Flag(call.number, piece.place, said))
    if calls:
        for rule in rules:
            if rule.measure is not None and rule.more_than is not None:
                value, number = _MEASURES[rule.measure](calls)
                if value > rule.more_than:
                    said = f"{_WORDS[rule.measure]}: {value:g}, more than {rule.more_than:g}"
                    found[rule.id] = Finding(rule, 1, [Flag(number, "record", said)])
    return sorted(found.values(), key=lambda f: (-SEVERITIES.index(f.rule.severity), f.rule.id))


def _own(call: Call) -> Callable[[str], str]:
    """Writes an attempt's own address and folder as `/proxy/own` and `own/`, so that rules see those of others."""
    rollout, attempt = re.escape(call.rollout_id), re.escape(call.attempt_id)
    endpoint = f"/proxy/rollout/{rollout}/attempt/{attempt}/mode/{call.mode}"
    pattern = re.compile(f"({endpoint}|attempts/{rollout}/{attempt})(?![\\w.-])")
    return lambda text: pattern.sub(lambda found: "/proxy/own" if found.group().startswith("/proxy") else "own", text)


# --- The record ---------------------------------------------------------------------------------------------------


def _calls(calls: Sequence[Call]) -> tuple[float, int]:
    return len(calls), calls[-1].number


def _conversations(calls: Sequence[Call]) -> tuple[float, int]:
    """Calls that continue no other: each begins a conversation of its own."""
    begun = [call.number for call in calls if call.parent is None]
    return len(begun), begun[-1] if begun else calls[0].number


def _titles(calls: Sequence[Call]) -> tuple[float, int]:
    titles = [call.number for call in calls if call.kind == "title"]
    return len(titles), titles[-1] if titles else calls[0].number


def _title_characters(calls: Sequence[Call]) -> tuple[float, int]:
    """The longest reply that passes for a session's title."""
    lengths = [(len(str(call.reply.get("content") or "")), call.number) for call in calls if call.kind == "title"]
    length, number = max(lengths, default=(0, calls[0].number))
    return length, number


_MEASURES: Mapping[Measure, Callable[[Sequence[Call]], tuple[float, int]]] = {
    "calls": _calls,
    "conversations": _conversations,
    "titles": _titles,
    "title_characters": _title_characters,
}
_WORDS: Mapping[Measure, str] = {
    "calls": "calls of the attempt",
    "conversations": "calls that begin a conversation of their own",
    "titles": "calls for a title",
    "title_characters": "characters of a reply that passes for a title",
}


# --- What follows -------------------------------------------------------------------------------------------------


class Auditor:
    """The run file's audit of attempts that are about to be graded. Raises `ConfigError` for rules that cannot be used."""

    def __init__(self, settings: config.Audit) -> None:
        self._settings = settings
        self._rules = load_rules(settings)

    def judge(self, calls: Sequence[Call]) -> Verdict:
        """The verdict over an attempt's calls."""
        if self._settings.action == "off":
            return Verdict([])
        findings = audit_attempt(self._rules, calls)
        return Verdict([(finding, self._action(finding.rule)) for finding in findings])

    def _action(self, rule: Rule) -> Action:
        named = self._settings.actions.get(rule.id)
        if named is not None:
            return named
        grave = SEVERITIES.index(rule.severity) >= SEVERITIES.index(self._settings.act_on)
        return self._settings.action if grave and self._settings.action != "off" else "report"


@dataclass(frozen=True)
class Verdict:
    """What an attempt's audit found, each with the action that the run file has for it."""

    findings: Sequence[tuple[Finding, Action]]

    def rules(self, action: Action) -> list[str]:
        """The rules that ask for an action."""
        return [finding.rule.id for finding, asked in self.findings if asked == action]

    @property
    def dropped(self) -> str | None:
        """Why the rollout fails without a reward; None if it need not."""
        finding = next((f for f, action in self.findings if action == "drop"), None)
        if finding is None:
            return None
        first = finding.flags[0]
        return f"audit: dropped by rule {finding.rule.id} (call {first.call}, {first.place}): {first.excerpt}"

    def reward(self, data: Json) -> Json:
        """The data of a reward event as the audit leaves it: its flags among the metrics, its value 0 where that is asked.

        The grader's own value is then kept as `graded`.
        """
        if not self.findings:
            return data
        flags = {f"audit/{finding.rule.id}": 1.0 for finding, _ in self.findings}
        data = {**data, "metrics": {**data.get("metrics", {}), **flags}}
        zeroed = self.rules("zero")
        if zeroed:
            data |= {"value": 0.0, "graded": data["value"], "source": "audit", "reason": f"audit: {', '.join(zeroed)}"}
            data["metrics"]["audit/zeroed"] = 1.0
        return data

    def events(self) -> list[NewEvent]:
        """An `audit` event for each rule."""
        return [
            NewEvent(
                "audit",
                {
                    "rule": finding.rule.id,
                    "severity": finding.rule.severity,
                    "action": action,
                    "count": finding.count,
                    "flags": [
                        {"call": flag.call, "place": flag.place, "excerpt": flag.excerpt} for flag in finding.flags
                    ],
                },
            )
            for finding, action in self.findings
        ]
