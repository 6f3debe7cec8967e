"""Cutting rows into micro-batches that compute a shared prefix once.

Rows of one group begin with the same prompt, rows of one rollout with the same history: often most of their tokens. A
*bundle* is rows that share a prefix, its *trunk*; the trunk is computed once and every row only adds its own *branch*.
A micro-batch holds bundles side by side: trunks padded to the longest trunk, branches to the longest branch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longrein.trajectory.tree import common_prefix


@dataclass(frozen=True)
class Bundle:
    """Rows (by index) whose first `trunk` tokens are equal; a trunk of 0 is plain rows."""

    trunk: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Bundles that one forward and backward pass computes. Either all of them have a trunk or none has."""

    bundles: tuple[Bundle, ...]

    @property
    def rows(self) -> list[int]:
        return [row for bundle in self.bundles for row in bundle.rows]

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of the pass, padding included, for rows of these lengths."""
        trunk = max(bundle.trunk for bundle in self.bundles)
        branch = max(lengths[row] - bundle.trunk for bundle in self.bundles for row in bundle.rows)
        return len(self.bundles) * trunk + len(self.rows) * branch


def pack(tokens: Sequence[np.ndarray], budget: int, min_trunk: int | None = 16) -> list[MicroBatch]:
    """Micro-batches that hold every row once, each of at most `budget` tokens, padding included.

    Prefixes of fewer than `min_trunk` tokens are not worth a pass of their own; None shares nothing, and so does a
    batch that sharing would not make smaller. A row that is longer than the budget by itself is a micro-batch of its
    own; a bundle that is too large for one micro-batch is cut, and its trunk computed in each piece.
    """
    lengths = [len(row) for row in tokens]
    plain = _fill([Bundle(0, (row,)) for row in range(len(tokens))], lengths, budget)
    if min_trunk is None:
        return plain
    bundles = shared_prefixes(tokens, min_trunk)
    shared = _fill([bundle for bundle in bundles if not bundle.trunk], lengths, budget)
    shared += _fill([bundle for bundle in bundles if bundle.trunk], lengths, budget)

    def computed(packed: Sequence[MicroBatch]) -> int:
        return sum(micro_batch.computed_tokens(lengths) for micro_batch in packed)

    return shared if computed(shared) < computed(plain) else plain


def shared_prefixes(tokens: Sequence[np.ndarray], min_trunk: int = 1) -> list[Bundle]:
    """Divide rows into bundles so that the most tokens are saved: (rows - 1) · trunk, summed over the bundles.

    Sorted rows that share a prefix are neighbours, so the bundles are intervals of the sorted order, and the best
    choice within an interval is either one bundle with its shortest common prefix or the best of its parts on both
    sides of that shortest place. At least one token of each row stays out of the trunk, which has `min_trunk` or more.
    """
    order = sorted(range(len(tokens)), key=lambda row: tokens[row].astype(">i4").tobytes())
    common = [common_prefix(tokens[a], tokens[b]) for a, b in itertools.pairwise(order)]
    common = [length if length >= min_trunk else 0 for length in common]
    bundles = []
    for start, stop, trunk in _best_intervals(common, len(order)):
        rows = order[start:stop]
        trunk = min(trunk, *(len(tokens[row]) - 1 for row in rows)) if len(rows) > 1 else 0
        if trunk >= min_trunk:
            bundles.append(Bundle(trunk, tuple(sorted(rows, key=lambda row: (-len(tokens[row]), row)))))
        else:
            bundles.extend(Bundle(0, (row,)) for row in rows)
    return bundles


@dataclass(slots=True)
class _Interval:
    start: int
    stop: int
    common: int
    saved: int
    chosen: list[tuple[int, int, int]]


def _best_intervals(common: Sequence[int], count: int) -> list[tuple[int, int, int]]:
    """(start, stop, trunk) of the best division of `count` sorted rows; `common[i]` is shared by rows i and i + 1.

    One pass over the rows with a stack of open intervals, as the lcp-interval tree of a suffix array is built.
    """
    if not count:
        return []
    open_: list[_Interval] = [_Interval(0, 0, -1, 0, [])]
    for row in range(count):
        length = common[row] if row + 1 < count else -1
        closed = _Interval(row, row + 1, len(common) + 1, 0, [(row, row + 1, 0)])
        while open_ and open_[-1].common > length:
            above = open_.pop()
            _adopt(above, closed)
            closed = _close(above)
        if length == -1:
            _adopt(open_[0], closed)
            break
        if open_[-1].common < length:
            open_.append(_Interval(closed.start, closed.start, length, 0, []))
        _adopt(open_[-1], closed)
    return open_[0].chosen


def _adopt(parent: _Interval, part: _Interval) -> None:
    parent.stop = part.stop
    parent.saved += part.saved
    parent.chosen += part.chosen


def _close(interval: _Interval) -> _Interval:
    together = (interval.stop - interval.start - 1) * interval.common
    if together > interval.saved:
        interval.saved = together
        interval.chosen = [(interval.start, interval.stop, interval.common)]
    return interval


def _fill(bundles: Sequence[Bundle], lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """Fill micro-batches in the order of branch length, then trunk length, so that little is padding."""

    def longest_branch(bundle: Bundle) -> int:
        return lengths[bundle.rows[0]] - bundle.trunk

    packed: list[MicroBatch] = []
    current: list[Bundle] = []
    trunk = branch = rows = 0
    for bundle in sorted(bundles, key=lambda bundle: (-longest_branch(bundle), -bundle.trunk, bundle.rows)):
        taken: list[int] = []
        for row in bundle.rows:
            own = lengths[row] - bundle.trunk
            wider = (len(current) + 1) * max(trunk, bundle.trunk) + (rows + 1) * max(branch, own)
            if rows and wider > budget:
                if taken:
                    current.append(Bundle(bundle.trunk, tuple(taken)))
                packed.append(MicroBatch(tuple(current)))
                current, taken, trunk, branch, rows = [], [], 0, 0, 0
            taken.append(row)
            trunk, branch, rows = max(trunk, bundle.trunk), max(branch, own), rows + 1
        current.append(Bundle(bundle.trunk, tuple(taken)))
    if current:
        packed.append(MicroBatch(tuple(current)))
    return packed
