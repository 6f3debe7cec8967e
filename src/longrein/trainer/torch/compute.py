"""Passes of a Hugging Face causal language model over the sequences of a sampler: prompts, and one token each.

`RowsEngine` batches them over `Rows`, for every architecture that a comparison with plain passes shows to allow it.
`SingleEngine` serves the others one sequence at a time over transformers' own cache. Both leave a prompt's last token to
the decode pass, so that all logits come from there.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from longrein.trainer.torch.cache import PrefixStore, Rows, RowsCache, Shape, common_ids
from longrein.trainer.torch.packed import PackedLinears

if TYPE_CHECKING:
    from longrein.trainer.torch.sampler import Sample, Stats

log = logging.getLogger(__name__)

#: Tokens, padding included, of one pass over prompts: running sequences wait that long for their next token.
PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}
#: Tokens that a prompt has to share with another sequence, beyond what is stored, to take them from there.
WORTH_SHARING = 8


def make_engine(model: nn.Module, cache_tokens: int, stats: Stats) -> RowsEngine | SingleEngine:
    """The fastest engine that computes what plain passes over the model compute."""
    shape = rows_shape(model)
    if shape is not None and _agrees(model, shape):
        return RowsEngine(model, shape, cache_tokens, stats)
    log.warning("%s is sampled from one sequence at a time: its cache cannot be batched here", type(model).__name__)
    return SingleEngine(model, stats)


class RowsEngine:
    """Models whose layers all cache plain keys and values of the same shape, sliding windows included."""

    def __init__(self, model: nn.Module, shape: Shape, cache_tokens: int, stats: Stats) -> None:
        parameter = next(model.parameters())
        self._packed = PackedLinears(model)
        self._forward = _Forward(model)
        self._device, self._dtype = parameter.device, parameter.dtype
        self._windows = _windows(model)
        self._rows = Rows(shape, parameter.dtype, parameter.device)
        self._cache = RowsCache(self._rows)
        self._store = PrefixStore(cache_tokens)
        self._stats = stats
        self._owners: list[Sample] = []
        """The sequence of each row."""
        self._budget = PREFILL_TOKENS.get(self._device.type, 512)

    def join(self, sequence: Sample) -> None:
        """Give a sequence a row and what is known of its prompt."""
        sequence.row = len(self._owners)
        self._owners.append(sequence)
        self._begin(sequence)

    def leave(self, sequence: Sample, keep: bool) -> None:
        """Free a row, keeping its keys and values for later calls if asked; the last row moves into it."""
        known = sequence.known
        if keep and not sequence.stale and 0 < known <= self._store.capacity:
            self._store.add(sequence.all_ids()[:known], self._rows.take(sequence.row, known))
        last = self._owners.pop()
        if last is not sequence:
            self._rows.copy(last.row, sequence.row, last.known)
            last.row = sequence.row
            self._owners[last.row] = last
        sequence.row = -1

    def forget(self, recompute: bool) -> None:
        """The weights have changed: what was computed serves the sequences that have begun, unless they are to compute it
        anew, and no other."""
        self._packed.forget()
        self._store.clear()
        if not self._owners and self._device.type != "cpu":
            self._rows.release()  # to the learner; on a CPU getting fresh memory costs more than it is worth
        for sequence in self._owners:
            sequence.source = None
            if recompute:
                sequence.known, sequence.stale = 0, False
            else:
                sequence.stale = sequence.stale or sequence.known > 0
        for sequence in self._owners:
            if not sequence.known:
                self._begin(sequence)

    def _begin(self, sequence: Sample) -> None:
        """Take the keys and values of the longest known beginning: a finished call's or a running one's."""
        prompt = sequence.all_ids()[:-1]
        entry, shared = self._store.longest(prompt)
        for other in self._owners:
            if other is sequence:
                break  # only earlier ones: none waits for itself
            if not other.stale:
                # What it will have computed counts, if it has only begun.
                common = common_ids(other.all_ids()[:-1], prompt)
                if common >= shared + WORTH_SHARING:
                    sequence.source, shared = (other, common), common
        if sequence.source is None and entry is not None:
            self._rows.reserve(len(self._owners), shared)
            self._rows.put(sequence.row, entry.kept, shared)
            sequence.known = shared
            self._stats.reused_tokens += shared
        self._follow(sequence)

    def _follow(self, sequence: Sample) -> None:
        """Copy from the running sequence that shares a beginning, once it has computed that."""
        if sequence.source is None:
            return
        other, shared = sequence.source
        if other.row < 0:
            sequence.source = None
            self._begin(sequence)
        elif other.known >= shared:
            self._rows.reserve(len(self._owners), shared)
            self._rows.copy(other.row, sequence.row, shared)
            sequence.known, sequence.source = shared, None
            self._stats.reused_tokens += shared

    def prefill(self, filling: Sequence[Sample]) -> None:
        """Compute prompts of `filling`, the oldest first, about as many tokens as a step may have."""
        spent = 0
        while spent < self._budget and (computed := self._prefill(filling)):
            spent += computed

    def _prefill(self, filling: Sequence[Sample]) -> int:
        """One pass over prompts; the tokens it computed, padding included."""
        batch: list[Sample] = []
        width = used = 0
        for sequence in filling:
            self._follow(sequence)
            left = min(sequence.unfilled, self._budget)
            if sequence.source is not None or left == 0:
                continue
            wider = max(width, left)
            # Rows of very different length are not padded to each other.
            if batch and (wider * (len(batch) + 1) > self._budget or wider * (len(batch) + 1) > 2 * (used + left)):
                continue
            batch.append(sequence)
            width, used = wider, used + left
        if not batch:
            return 0
        ids = np.zeros((len(batch), width), np.int64)
        known = np.asarray([s.known for s in batch])
        for index, sequence in enumerate(batch):
            part = sequence.all_ids()[sequence.known : -1][:width]
            ids[index, : len(part)] = part
            sequence.known += len(part)
            self._stats.prefilled_tokens += len(part)
        # Padding stands behind a row's real tokens; what it writes is written again before anything may see it.
        self._run(batch, ids, known[:, None] + np.arange(width), logits=False)
        return ids.size

    def decode(self, running: Sequence[Sample]) -> torch.Tensor:
        """[B, V] logits of each sequence's next token."""
        running = sorted(running, key=lambda s: s.row)
        ids = np.asarray([s.last for s in running], np.int64)
        positions = np.asarray([s.known for s in running])
        logits = self._run(running, ids[:, None], positions[:, None], logits=True)
        for sequence in running:
            sequence.known += 1
        assert logits is not None
        return logits

    def _run(
        self, batch: Sequence[Sample], ids: np.ndarray, positions: np.ndarray, logits: bool
    ) -> torch.Tensor | None:
        length = int(positions.max()) + 1
        self._rows.reserve(len(self._owners), length)
        at = torch.from_numpy(positions).to(self._device)
        self._cache.aim([s.row for s in batch], at, length)
        # Additive and in the model's type: a mask of truth values would be turned into this one in every layer.
        distance = positions[:, None, :, None] - np.arange(length)
        masks = {kind: self._mask((distance >= 0) & (distance < window)) for kind, window in self._windows.items()}
        mask = next(iter(masks.values())) if len(masks) == 1 else masks
        return self._forward(torch.from_numpy(ids).to(self._device), at, mask, self._cache, logits)

    def _mask(self, seen: np.ndarray) -> torch.Tensor:
        lowest = torch.finfo(self._dtype).min
        return torch.from_numpy(np.where(seen, np.float32(0), np.float32(lowest))).to(self._device, self._dtype)


class SingleEngine:
    """Any other causal model: each sequence has transformers' own cache and is computed by itself."""

    def __init__(self, model: nn.Module, stats: Stats) -> None:
        self._forward = _Forward(model)
        self._device = next(model.parameters()).device
        self._config: Any = model.config
        self._stats = stats
        self._caches: dict[Sample, DynamicCache] = {}
        self._budget = PREFILL_TOKENS.get(self._device.type, 512)

    def join(self, sequence: Sample) -> None:
        self._caches[sequence] = DynamicCache(config=self._config)

    def leave(self, sequence: Sample, keep: bool) -> None:
        del self._caches[sequence]

    def forget(self, recompute: bool) -> None:
        """The weights have changed. Nothing outlives its sequence."""
        if recompute:
            for sequence in self._caches:
                self.join(sequence)
                sequence.known = 0

    def prefill(self, filling: Sequence[Sample]) -> None:
        """One pass over the oldest sequence's prompt."""
        sequence = filling[0]
        part = sequence.all_ids()[sequence.known : -1][: self._budget]
        self._run(sequence, part, logits=False)
        self._stats.prefilled_tokens += len(part)

    def decode(self, running: Sequence[Sample]) -> torch.Tensor:
        """[B, V] logits of each sequence's next token."""
        logits = [self._run(s, np.asarray([s.last]), logits=True) for s in running]
        return torch.cat([one for one in logits if one is not None])

    def _run(self, sequence: Sample, ids: np.ndarray, logits: bool) -> torch.Tensor | None:
        at = torch.arange(sequence.known, sequence.known + len(ids), device=self._device)[None]
        sequence.known += len(ids)
        tokens = torch.from_numpy(ids.astype(np.int64))[None].to(self._device)
        return self._forward(tokens, at, None, self._caches[sequence], logits)


class _Forward:
    """One pass over a model, with logits of the last position only."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._decoder: Any = model.get_decoder()  # type: ignore[operator]
        # Its name changed between versions of transformers.
        self._cache_name = (
            "cache" if "cache" in inspect.signature(self._decoder.forward).parameters else "past_key_values"
        )

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any, logits: bool
    ) -> torch.Tensor | None:
        if self._model.training:
            self._model.eval()  # the learner's own module, after an update with activation checkpointing
        arguments = {"input_ids": ids, "position_ids": positions, "use_cache": True, self._cache_name: cache}
        if mask is not None:
            arguments["attention_mask"] = mask
        if not logits:
            self._decoder(**arguments)
            return None
        return self._model(**arguments, logits_to_keep=1).logits[:, -1]


def _windows(model: nn.Module) -> dict[str, int]:
    """Tokens that each kind of attention layer sees; empty if a layer is of another kind."""
    config: Any = model.config
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        slides = window and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"]
    sizes = {"full_attention": 1 << 40, "sliding_attention": window}
    return {kind: sizes[kind] for kind in sorted(set(kinds))} if sizes.keys() >= set(kinds) else {}


def rows_shape(model: nn.Module) -> Shape | None:
    """The shape of the model's cache if rows can hold it; None for states, latents and layers of different shape."""
    if not _windows(model):
        return None
    device = next(model.parameters()).device
    cache = DynamicCache()
    ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
    try:
        with torch.inference_mode():
            _Forward(model)(ids, torch.arange(2, device=device)[None], None, cache, logits=False)
        shapes = {tuple(tensor.shape) for layer in cache.layers for tensor in (layer.keys, layer.values)}  # type: ignore[union-attr]
    except (AttributeError, TypeError):
        return None
    if len(shapes) != 1:
        return None
    _, heads, _, width = shapes.pop()
    return Shape(len(cache.layers), heads, width)


@torch.inference_mode()
def _agrees(model: Any, shape: Shape) -> bool:
    """Whether rows of different length, computed in parts, give the logits of plain passes."""
    from longrein.trainer.torch.sampler import Sample, Sampling, Stats

    device = next(model.parameters()).device
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, vocabulary, length).astype(np.int32) for length in (7, 4)]
    engine = RowsEngine(model, shape, 0, Stats())
    try:
        samples = [Sample(text, Sampling(1)) for text in texts]
        for one in samples:
            engine.join(one)
        engine.prefill(samples)
        found = engine.decode(samples)
    except Exception as error:
        log.info("%s does not compute over rows: %s: %s", type(model).__name__, type(error).__name__, error)
        return False
    plain = [
        model(torch.from_numpy(text[None].astype(np.int64)).to(device), use_cache=False).logits[:, -1] for text in texts
    ]
    expected = torch.cat(plain).float()
    gap = float((found.float() - expected).norm() / expected.norm())
    return gap <= (1e-3 if found.dtype == torch.float32 else 5e-2)
