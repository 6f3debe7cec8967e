"""Keys and values of many sequences at once: rows of one preallocated tensor, and the prefixes of finished calls.

`Rows` holds the sequences that are being computed, kept compact in rows 0 … n - 1, so that a decode step works on views
and gathers nothing. `PrefixStore` keeps the keys and values of finished calls, so that the next turn of a conversation,
or the next rollout of a group, computes only what is new.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin


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
        self.count = 0
        self._data = self._allocate(8, 128)

    def _allocate(self, rows: int, length: int) -> torch.Tensor:
        shape = (self.shape.layers, 2, rows, self.shape.heads, length, self.shape.width)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` sequences of `length` tokens; both at least double when they grow."""
        have_rows, have_length = self._data.shape[2], self._data.shape[4]
        if rows <= have_rows and length <= have_length:
            return
        rows = have_rows if rows <= have_rows else max(rows, 2 * have_rows)
        length = have_length if length <= have_length else max(-(-length // 64) * 64, have_length * 3 // 2)
        old, self._data = self._data, self._allocate(rows, length)
        self._data[:, :, : self.count, :, :have_length] = old[:, :, : self.count]

    def layer(self, index: int, first: int, last: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [last - first, heads, length, width] of a layer, as views."""
        pair = self._data[index, :, first:last, :, :length]
        return pair[0], pair[1]

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
    """What a transformers model sees of `Rows` in one pass: writes new tokens at each row's own place."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None
        self._window = (0, 0, 0)
        super().__init__(layers=[_Layer(self, index) for index in range(rows.shape.layers)])  # type: ignore[list-item]

    def aim(self, first: int, positions: torch.Tensor, length: int) -> None:
        """The next pass computes rows from `first` on: its tokens stand at `positions` [B, S] and see `length` keys."""
        count, new = positions.shape
        rows = torch.arange(count, device=positions.device)[:, None].expand(count, new)
        self._places = (rows, positions)
        self._window = (first, first + count, length)

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, heads, S, width] of a layer and give what attention sees of it."""
        assert self._places is not None
        rows, positions = self._places
        all_keys, all_values = self._rows.layer(index, *self._window)
        all_keys[rows, :, positions] = keys.transpose(1, 2)
        all_values[rows, :, positions] = values.transpose(1, 2)
        return all_keys, all_values


class _Layer(CacheLayerMixin):
    def __init__(self, cache: RowsCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Rows are allocated already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.write(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache._window[2], 0

    def get_seq_length(self) -> int:
        return self._cache._window[2]

    def get_max_length(self) -> int:
        return -1


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
        if len(ids) > self.capacity or len(ids) == 0:
            return
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


def sources(prompts: Sequence[np.ndarray], cached: Sequence[int], least: int) -> list[tuple[int, int]]:
    """For prompts that wait together: (index of the prompt to copy from, tokens to copy), or (-1, 0).

    `cached[i]` tokens of prompt i are in the store; another prompt is worth waiting for when it shares `least` tokens
    more. Identical prompts all copy from the same one.
    """
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].tolist())
    found = [(-1, 0)] * len(prompts)
    for before, here in pairwise(order):
        shared = common_ids(prompts[before], prompts[here])
        source, reach = found[before]
        if source >= 0 and reach >= shared:
            before = source  # what is shared with the neighbour is shared with its own source
        if shared >= cached[here] + least:
            found[here] = (before, shared)
    return found
