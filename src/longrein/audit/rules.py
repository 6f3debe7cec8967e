"""Rules: read from TOML files, checked, and compiled so that one pass over a text says which of them match.

Patterns are RE2's, which take time linear in the text whatever is written in it: agents write the text. What RE2 does not
have (look-around, back-references) is refused when a rule is read.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import re2

from longrein import config
from longrein.audit.commands import Piece, Place
from longrein.config import ConfigError

BUILT_IN = Path(__file__).with_name("rules.toml")

Severity = Literal["low", "medium", "high"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)

#: What can be counted in an attempt's record; `audit.measures` says how.
Measure = Literal["calls", "conversations", "titles", "title_characters"]

#: Memory of one place's automaton, in bytes. It is filled as texts need it, and emptied when it is full.
_SET_MEMORY = 64 * 1024 * 1024


class Rule(msgspec.Struct, forbid_unknown_fields=True, frozen=True, rename={"excepted": "except"}):
    """One `[[rule]]`: something that agents try, and how a transcript that has it reads."""

    id: str
    means: str
    """What a flag says, in one sentence."""
    severity: Severity
    where: tuple[Place, ...] = ()
    """What is looked at."""
    patterns: tuple[str, ...] = ()
    excepted: tuple[str, ...] = ()
    """What these match is blanked out before the patterns are looked for."""
    files: tuple[str, ...] = ()
    """Only the contents of files whose path one of these matches."""
    measure: Measure | None = None
    more_than: float | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    rule: list[Rule]


@dataclass(frozen=True)
class Match:
    """The first match of a rule in a piece."""

    rule: Rule
    start: int
    end: int


def load_rules(settings: config.Audit) -> Rules:
    """The built-in rules and those of the run file, less what it disables. Raises `ConfigError`.

    A rule with the id of an earlier one replaces it.
    """
    rules: dict[str, Rule] = {}
    for file in (BUILT_IN, *map(Path, settings.rules)):
        rules |= {rule.id: rule for rule in read_rules(file)}
    for option, ids in (("disable", settings.disable), ("actions", settings.actions)):
        unknown = [rule_id for rule_id in ids if rule_id not in rules]
        if unknown:
            raise ConfigError(f"audit.{option}: there is no rule {unknown[0]!r}; there are {', '.join(sorted(rules))}")
    return Rules(rule for rule in rules.values() if rule.id not in settings.disable)


def read_rules(file: Path) -> list[Rule]:
    """The rules of one file, checked. Raises `ConfigError` with the file, the rule and what is wrong with it."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        rules = msgspec.convert(values, _File).rule
    except FileNotFoundError:
        raise ConfigError(f"audit.rules: {file}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"audit.rules: {file}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"audit.rules: {file}: not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"audit.rules: {file}: {error}") from None
    seen: set[str] = set()
    for rule in rules:
        wrong = _wrong(rule) or ("is there twice" if rule.id in seen else "")
        if wrong:
            raise ConfigError(f"audit.rules: {file}: rule {rule.id!r} {wrong}")
        seen.add(rule.id)
    return rules


def _wrong(rule: Rule) -> str:
    """What is wrong with a rule, or nothing."""
    if not rule.id.replace("-", "").isalnum() or not rule.id.isascii():
        return "has an id that is not made of letters, digits and hyphens"
    if rule.measure is not None:
        if rule.where or rule.patterns or rule.excepted or rule.files:
            return "has a measure, so it can have no where, patterns, except or files"
        return "" if rule.more_than is not None else "has a measure, so it needs more_than"
    if rule.more_than is not None:
        return "has more_than, which belongs to a measure"
    if not rule.where or not rule.patterns:
        return "needs where and patterns, or a measure"
    if rule.files and rule.where != ("content",):
        return 'has files, which only where = ["content"] can have'
    for pattern in (*rule.patterns, *rule.excepted, *rule.files):
        try:
            _compiled(pattern, "text")
        except re2.error as error:
            said = error.args[0] if error.args else "unknown error"
            said = said.decode() if isinstance(said, bytes) else said
            return f"has a pattern that cannot be used: {pattern!r}: {said}"
    return ""


def _in_place(pattern: str, place: Place) -> str:
    """A pattern with what its place means for lines: a command and a file's name are one text, others have lines."""
    return f"(?s:{pattern})" if place in ("command", "file") else f"(?m:{pattern})"


def _options(memory: int = 0) -> Any:
    options = re2.Options()
    options.log_errors = False
    if memory:
        options.max_mem = memory
    return options


def _compiled(pattern: str, place: Place) -> Any:
    return re2.compile(_in_place(pattern, place), _options())


class Rules:
    """Rules ready to be used. Iterates over them; `by_id` names them."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.by_id: Mapping[str, Rule] = {rule.id: rule for rule in rules}
        self._places: dict[Place, _PlaceRules] = {}
        for place in get_args(Place):
            here = [rule for rule in self.by_id.values() if place in rule.where]
            if here:
                self._places[place] = _PlaceRules(place, here)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.by_id.values())

    def only(self, ids: Iterable[str], least: Severity = "low") -> Rules:
        """These rules (none named: all), from a severity on. Raises `ConfigError` for an id that there is not."""
        named = list(ids)
        unknown = [rule_id for rule_id in named if rule_id not in self.by_id]
        if unknown:
            raise ConfigError(f"there is no rule {unknown[0]!r}; there are {', '.join(sorted(self.by_id))}")
        enough = SEVERITIES[SEVERITIES.index(least) :]
        return Rules(r for r in self if (not named or r.id in named) and r.severity in enough)

    def matches(self, piece: Piece) -> Iterator[Match]:
        """The rules that match a piece, each once, with its first match."""
        here = self._places.get(piece.place)
        if here is not None:
            yield from here.matches(piece)


class _PlaceRules:
    """The rules that look at one place."""

    def __init__(self, place: Place, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._patterns = [[_compiled(pattern, place) for pattern in rule.patterns] for rule in rules]
        self._excepted = [[_compiled(pattern, place) for pattern in rule.excepted] for rule in rules]
        self._files = [[_compiled(pattern, place) for pattern in rule.files] for rule in rules]
        self._set = re2.Set.SearchSet(_options(_SET_MEMORY))
        self._set.Add("")  # which matches every text, unless the automaton gave up
        self._rule_of: list[int] = [-1]
        for number, rule in enumerate(rules):
            for pattern in rule.patterns:
                self._set.Add(_in_place(pattern, place))
                self._rule_of.append(number)
        self._set.Compile()

    def matches(self, piece: Piece) -> Iterator[Match]:
        found = self._set.Match(piece.text) or ()
        candidates = {self._rule_of[index] for index in found} - {-1} if 0 in found else range(len(self._rules))
        for number in sorted(candidates):
            files = self._files[number]
            if files and not any(pattern.search(piece.path) for pattern in files):
                continue
            text = piece.text
            for pattern in self._excepted[number]:
                text = pattern.sub(_blank, text)
            spans = [match.span() for pattern in self._patterns[number] if (match := pattern.search(text))]
            if spans:
                start, end = min(spans)
                yield Match(self._rules[number], start, end)


def _blank(match: Any) -> str:
    return " " * len(match.group())
