"""Keys and values of many sequences at once: rows of one preallocated tensor, and the prefixes of finished calls.

`Rows` holds the sequences that are being computed, kept compact in rows 0 … n - 1, so that a decode step works on views
and gathers nothing. `PrefixStore` keeps the keys and values of finished calls, so that the next turn of a conversation,
or the next rollout of a group, computes only what is new.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Shape:
    """Of a model's cache: every layer alike."""

    layers: int
    heads: int
    width: int
    """Of a head's keys and of its values."""


class Rows:
    """[layers, 2, rows, heads, length, width] keys (0) and values (1); grows as needed."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._data = self._allocate(0, 0)

    def _allocate(self, rows: int, length: int) -> torch.Tensor:
        # Zeros, because masked positions are multiplied by 0 and what memory held before may be no number.
        shape = (self.shape.layers, 2, rows, self.shape.heads, length, self.shape.width)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` sequences of `length` tokens; what grows, grows by half of itself at least."""
        have_rows, have_length = self._data.shape[2], self._data.shape[4]
        if rows <= have_rows and length <= have_length:
            return
        if rows > have_rows:
            rows = max(rows, 8, 2 * have_rows)
        if length > have_length:
            length = -(-max(length, 128, have_length * 3 // 2) // 64) * 64
        old, self._data = self._data, self._allocate(max(rows, have_rows), max(length, have_length))
        self._data[:, :, :have_rows, :, :have_length] = old

    def release(self) -> None:
        """Give all memory back."""
        self._data = self._allocate(0, 0)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, heads, length, width] of a layer, as views."""
        return self._data[index, 0], self._data[index, 1]

    def take(self, row: int, length: int) -> torch.Tensor:
        """A copy of a row's first `length` keys and values: [layers, 2, heads, length, width]."""
        return self._data[:, :, row, :, :length].clone()

    def put(self, row: int, kept: torch.Tensor, length: int) -> None:
        """Begin a row with the first `length` tokens of what `take` gave."""
        self._data[:, :, row, :, :length] = kept[..., :length, :]

    def copy(self, source: int, target: int, length: int) -> None:
        """Begin row `target` with row `source`'s first `length` tokens."""
        self._data[:, :, target, :, :length] = self._data[:, :, source, :, :length]


class RowsCache(Cache):
    """What a transformers model sees of `Rows` in one pass: new tokens are written at each row's own place."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(layers=[])
        self._rows = rows
        self._count: int | None = None
        self._length = 0
        self._row = self._position = torch.empty(0)

    def aim(self, rows: list[int], positions: torch.Tensor, length: int) -> None:
        """The next pass computes these rows: their tokens stand at `positions` [B, S] and see `length` keys."""
        # Rows 0 … n - 1 are seen as a view; any others are gathered, which a pass over prompts can afford.
        self._count = len(rows) if rows == list(range(len(rows))) else None
        self._row = torch.tensor(rows, device=positions.device)
        self._position, self._length = positions, length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, heads, S, width] of a layer; what attention sees: [B, heads, length, width]."""
        keys, values = self._rows.layer(layer_idx)
        row = self._row[:, None]
        keys[row, :, self._position] = key_states.transpose(1, 2)
        values[row, :, self._position] = value_states.transpose(1, 2)
        keys, values = keys[:, :, : self._length], values[:, :, : self._length]
        if self._count is None:
            return keys.index_select(0, self._row), values.index_select(0, self._row)
        return keys[: self._count], values[: self._count]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self._length, 0


@dataclass
class Prefix:
    """A finished call's ids and its keys and values [layers, 2, heads, len(ids), width]."""

    ids: np.ndarray
    kept: torch.Tensor


class PrefixStore:
    """Prefixes of at most `capacity` tokens together; the one that was used least lately goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = 0
        self._entries: OrderedDict[int, Prefix] = OrderedDict()
        self._next = 0

    def longest(self, ids: np.ndarray) -> tuple[Prefix | None, int]:
        """The entry that shares most leading ids with `ids`, and how many."""
        best, shared = -1, 0
        for key, entry in self._entries.items():
            if shared and (len(entry.ids) <= shared or len(ids) <= shared or entry.ids[shared] != ids[shared]):
                continue
            common = common_ids(entry.ids, ids)
            if common > shared:
                best, shared = key, common
        if best < 0:
            return None, 0
        self._entries.move_to_end(best)
        return self._entries[best], shared

    def add(self, ids: np.ndarray, kept: torch.Tensor) -> None:
        """Keep a call's keys and values; an entry that it extends is no longer needed."""
        for key in [
            k for k, e in self._entries.items() if len(e.ids) <= len(ids) and common_ids(e.ids, ids) == len(e.ids)
        ]:
            self.tokens -= len(self._entries.pop(key).ids)
        self._entries[self._next] = Prefix(ids, kept)
        self._next += 1
        self.tokens += len(ids)
        while self.tokens > self.capacity:
            _, gone = self._entries.popitem(last=False)
            self.tokens -= len(gone.ids)

    def clear(self) -> None:
        """Forget all: the weights they were computed with are gone."""
        self._entries.clear()
        self.tokens = 0


def common_ids(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading ids two arrays share."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
