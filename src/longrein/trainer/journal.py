"""Which rollouts were learned from in which update, written down as it happens: `learned.jsonl`.

A run that is killed loses the updates since its last checkpoint, and learns them again when it is resumed. The journal
is only ever appended to; a resumption is a line of its own, which undoes the updates behind its checkpoint. So it can be
said at any time, and checked against the record, what the weights have learned from, each token once. It also keeps
which failed rollouts the run has acted on (their groups were dropped), so that the same is done when a step is done
again; one that failed while nobody waited for it is asked for again instead.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from longrein.config import ConfigError
from longrein.textfile import open_lines

if TYPE_CHECKING:
    from longrein.trajectory.batch import Row

JOURNAL = "learned.jsonl"
PREFIX = "rollout-prefix"  # file that keeps what the run's rollout ids begin with

Phase = Literal["warm-up", "train"]


class Lesson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rollout gave to an update."""

    rollout_id: str
    attempt_id: str
    tokens: int
    """Trained tokens."""


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="begin"):
    """A start of the trainer."""

    step: int
    """The checkpoint's; -1 for a start before the warm-up."""


class Learned(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="learned"):
    """One update, or a part of a step without any advantage, which needs none."""

    phase: Phase
    step: int
    part: int
    """Counts the updates of a step, from 0."""
    version: int
    """Of the weights afterwards."""
    rollouts: list[Lesson]

    @property
    def place(self) -> tuple[Phase, int, int]:
        return self.phase, self.step, self.part


class Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="failed"):
    """A rollout without a reward was waited for, and seen."""

    rollout_id: str


class GaveUp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="gave-up"):
    """The run ended because it could not go on: what failed since the last update is tried again."""


Entry = Begun | Learned | Failed | GaveUp


class Past:
    """What a journal says."""

    def __init__(self) -> None:
        self.learned: dict[tuple[Phase, int, int], Learned] = {}
        """The updates that the weights come from, by their place in the run."""
        self.undone: dict[tuple[Phase, int, int], Learned] = {}
        """Updates that were lost and have not been made again."""
        self._settled: set[str] = set()
        self._unsettled: set[str] = set()

    @classmethod
    def read(cls, run_folder: Path) -> Past | None:
        """The journal of a run; None where there is none. A line that was cut off while being written is left out.

        Raises `ConfigError` for a line that another program wrote.
        """
        file = run_folder / JOURNAL
        if not file.exists():
            return None
        past, read = cls(), msgspec.json.Decoder(Entry).decode
        for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
            try:
                past.take(read(line))
            except msgspec.ValidationError as error:
                raise ConfigError(f"{file}:{number}: is no line of this Longrein's journal: {error}") from None
            except msgspec.DecodeError:
                continue
        return past

    def take(self, entry: Entry) -> None:
        """Take in one more line."""
        if isinstance(entry, Begun):
            for place in list(self.learned):
                if entry.step < (0 if place[0] == "warm-up" else place[1]):
                    self.undone[place] = self.learned.pop(place)
        elif isinstance(entry, Learned):
            self.learned[entry.place] = entry
            self.undone.pop(entry.place, None)
            self._settled |= self._unsettled
            self._unsettled = set()
        elif isinstance(entry, Failed):
            self._unsettled.add(entry.rollout_id)
        else:
            self._unsettled = set()

    def failed(self, rollout_id: str) -> bool:
        """Whether the run has acted on this rollout's failure."""
        return rollout_id in self._settled or rollout_id in self._unsettled

    def lessons(self, phase: Phase = "train") -> dict[str, list[Lesson]]:
        """What was learned from each rollout, by its id: one lesson each, or something went wrong."""
        found: dict[str, list[Lesson]] = {}
        for entry in self.learned.values():
            if entry.phase == phase:
                for lesson in entry.rollouts:
                    found.setdefault(lesson.rollout_id, []).append(lesson)
        return found


class Journal:
    """The journal of a run that goes on. `step` is the checkpoint's that it goes on from; None: from the beginning."""

    def __init__(self, run_folder: Path, step: int | None) -> None:
        self._past = Past.read(run_folder) or Past()
        self._file = open_lines(run_folder / JOURNAL)
        self._write(Begun(-1 if step is None else step))

    def learned(self, entry: Learned) -> bool:
        """Write down an update. False if it was made before, was undone, and was made of something else then."""
        before = self._past.undone.get(entry.place)
        self._write(entry)
        return before is None or (before.version, before.rollouts) == (entry.version, entry.rollouts)

    def failed(self, rollout_id: str) -> None:
        """Write down that a failed rollout was seen."""
        if not self._past.failed(rollout_id):
            self._write(Failed(rollout_id))

    def has_failed(self, rollout_id: str) -> bool:
        """Whether its failure was seen, and acted on, by this run."""
        return self._past.failed(rollout_id)

    def gave_up(self) -> None:
        """Write down that the run cannot go on."""
        self._write(GaveUp())

    def flush(self) -> None:
        """Bring what was written to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: Entry) -> None:
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()
        self._past.take(entry)


def id_prefix_of(run_folder: Path) -> str:
    """What the ids of a run's rollouts begin with, as it was written down; empty where it was not."""
    file = run_folder / PREFIX
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def lessons(attempts: Mapping[str, str], rows: Sequence[Row]) -> list[Lesson]:
    """What each rollout (with the attempt that counts, by its id) gave to the rows of one update."""
    tokens = dict.fromkeys(attempts, 0)
    for row in rows:
        tokens[row.rollout_id] += int(row.trained.sum())
    return [Lesson(rollout_id, attempts[rollout_id], count) for rollout_id, count in tokens.items()]
