"""Continuous batching over a Hugging Face causal language model.

Requests join and leave between decode steps. A step gives every running sequence one token; before it, the prompts of
new requests are computed, sharing what is already known: the keys and values of finished calls, and of each other. A
prompt's last token is left to the decode step, so that all sampling happens in one place.

A call's randomness is its own: one uniform number per token from a counter-based generator with the call's seed, turned
into a token by the inverse of the cumulative distribution. What a call samples does not depend on what runs beside it
(up to the floating-point noise of batched matrix products).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from longrein.trainer.torch.cache import PrefixStore, Rows, RowsCache, Shape, sources

#: Tokens, padding included, of one pass over prompts.
PREFILL_TOKENS = 2048
#: Tokens that a prompt has to share with another one to wait for it.
WORTH_WAITING = 8


@dataclass(frozen=True)
class Sampling:
    max_tokens: int
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 takes all."""
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0


@dataclass(eq=False)
class Sample:
    """A request and what has been sampled of it so far."""

    ids: np.ndarray
    """int32 [n] the prompt."""
    sampling: Sampling
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    known: int = 0
    """Tokens whose keys and values are computed."""
    aborted: bool = False
    state: Any = None
    """What `Engine` keeps for it (generic models)."""
    _random: np.random.Generator | None = None

    @property
    def length(self) -> int:
        return len(self.ids) + len(self.sampled)

    @property
    def last(self) -> int:
        """The token that the next step computes."""
        return self.sampled[-1] if self.sampled else int(self.ids[-1])

    def uniform(self) -> float:
        """The next number in [0, 1) of the call's own stream."""
        if self._random is None:
            self._random = np.random.Generator(np.random.Philox(key=self.sampling.seed))
        return self._random.random()

    def all_ids(self) -> np.ndarray:
        return np.concatenate([self.ids, np.asarray(self.sampled, np.int32)])


@dataclass
class Stats:
    """Counts since the engine started."""

    decoded_tokens: int = 0
    decode_steps: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens whose keys and values were taken from an earlier call or another request."""


class Sampler:
    """Steps over the running sequences. Used from one thread at a time."""

    def __init__(self, model: nn.Module, *, max_batch: int, cache_tokens: int) -> None:
        self.model = model
        self.max_batch = max_batch
        self.cache_tokens = cache_tokens
        self.version = 0
        self.stats = Stats()
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        shape = rows_shape(model)
        self.engine: RowsEngine | SingleEngine = (
            RowsEngine(model, shape, PrefixStore(cache_tokens), self.stats)
            if shape is not None
            else SingleEngine(model, self.stats)
        )

    def renewed(self) -> Sampler:
        """A sampler of the same model and version with nothing running, after a step that failed."""
        fresh = Sampler(self.model, max_batch=self.max_batch, cache_tokens=self.cache_tokens)
        fresh.version = self.version
        return fresh

    def add(self, sequence: Sample) -> None:
        """Queue a request; it joins at the next step."""
        self.waiting.append(sequence)

    def changed(self, version: int) -> None:
        """The weights are those of `version` now. Running sequences go on over their old keys and values."""
        self.version = version
        self.engine.forget()

    @torch.inference_mode()
    def step(self) -> list[Sample]:
        """Let new requests join, sample one token of each running sequence; those that got one or were aborted."""
        gone = [s for s in (*self.waiting, *self.running) if s.aborted]
        for sequence in gone:
            sequence.finish_reason = "abort"
            self._drop(sequence, keep=False)
        room = self.max_batch - len(self.running)
        if room > 0 and self.waiting:
            joining, self.waiting = self.waiting[:room], self.waiting[room:]
            self.engine.join(joining)
            self.running.extend(joining)
        if not self.running:
            return gone
        logits = self.engine.decode(self.running)
        tokens, logprobs = sample(logits, [s.sampling for s in self.running], [s.uniform() for s in self.running])
        stepped = list(self.running)
        for sequence, token, logprob in zip(stepped, tokens, logprobs, strict=True):
            sequence.sampled.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.version)
            if token in sequence.sampling.stop_token_ids:
                sequence.finish_reason = "stop"
            elif len(sequence.sampled) >= sequence.sampling.max_tokens:
                sequence.finish_reason = "length"
        self.stats.decoded_tokens += len(stepped)
        self.stats.decode_steps += 1
        for sequence in stepped:
            if sequence.finish_reason is not None:
                self._drop(sequence, keep=True)
        return [*gone, *stepped]

    def _drop(self, sequence: Sample, keep: bool) -> None:
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        row = self.running.index(sequence)
        self.engine.leave(row, sequence, keep, self.running[-1].known)
        # The last sequence moves into the row that became free.
        self.running[row] = self.running[-1]
        self.running.pop()


class RowsEngine:
    """Models whose layers all cache plain keys and values of the same shape."""

    def __init__(self, model: nn.Module, shape: Shape, store: PrefixStore, stats: Stats) -> None:
        parameter = next(model.parameters())
        self._forward = _Forward(model)
        self._device = parameter.device
        self._rows = Rows(shape, parameter.dtype, parameter.device)
        self._cache = RowsCache(self._rows)
        self._store = store
        self._stats = stats

    def forget(self) -> None:
        self._store.clear()

    def join(self, joining: Sequence[Sample]) -> None:
        """Compute the prompts of new sequences, all but their last tokens; they become the last rows."""
        first = self._rows.count
        self._rows.reserve(first + len(joining), max(s.length for s in joining) + PREFILL_TOKENS // 16)
        prompts = [s.ids[:-1] for s in joining]
        stored = [self._store.longest(prompt) for prompt in prompts]
        copies = sources(prompts, [shared for _, shared in stored], WORTH_WAITING)
        self._rows.count = first + len(joining)
        todo = set(range(len(joining)))
        done: set[int] = set()
        while todo:
            ready = [i for i in todo if copies[i][0] < 0 or copies[i][0] in done]
            for i in ready:
                source, shared = copies[i]
                if source >= 0:
                    self._rows.copy(first + source, first + i, shared)
                    joining[i].known = shared
                elif stored[i][0] is not None:
                    entry, shared = stored[i]
                    assert entry is not None
                    self._rows.put(first + i, entry.kept, shared)
                    joining[i].known = shared
                self._stats.reused_tokens += joining[i].known
            self._prefill([(first + i, prompts[i], joining[i]) for i in sorted(ready)])
            done.update(ready)
            todo.difference_update(ready)

    def _prefill(self, work: list[tuple[int, np.ndarray, Sample]]) -> None:
        work = [item for item in work if len(item[1]) > item[2].known]
        while work:
            # Neighbouring rows in one pass, while the padding stays small.
            batch = [work.pop(0)]
            longest = min(PREFILL_TOKENS, len(batch[0][1]) - batch[0][2].known)
            used = longest
            while work and work[0][0] == batch[-1][0] + 1:
                new = min(PREFILL_TOKENS, len(work[0][1]) - work[0][2].known)
                width = max(longest, new)
                if width * (len(batch) + 1) > max(PREFILL_TOKENS, 1) or width * (len(batch) + 1) > 2 * (used + new):
                    break
                batch.append(work.pop(0))
                longest, used = width, used + new
            self._pass(batch, longest)
            work = [item for item in batch if len(item[1]) > item[2].known] + work

    def _pass(self, batch: list[tuple[int, np.ndarray, Sample]], width: int) -> None:
        """Compute up to `width` further prompt tokens of rows that stand side by side."""
        first = batch[0][0]
        ids = np.zeros((len(batch), width), np.int64)
        known = np.asarray([item[2].known for item in batch])
        for i, (_, prompt, sequence) in enumerate(batch):
            part = prompt[sequence.known : sequence.known + width]
            ids[i, : len(part)] = part
            sequence.known += len(part)
            self._stats.prefilled_tokens += len(part)
        # Padding stands behind a row's real tokens; what it writes is written again before anything may see it.
        positions = known[:, None] + np.arange(width)
        length = int(known.max()) + width
        self._rows.reserve(self._rows.count, length)
        seen = np.arange(length) <= positions[..., None]
        self._run(first, ids, positions, seen, length, logits=False)

    def decode(self, running: Sequence[Sample]) -> torch.Tensor:
        """[B, V] logits of each sequence's next token."""
        positions = np.asarray([s.known for s in running])
        length = int(positions.max()) + 1
        self._rows.reserve(self._rows.count, length)
        ids = np.asarray([s.last for s in running], np.int64)
        seen = np.arange(length) <= positions[:, None, None]
        logits = self._run(0, ids[:, None], positions[:, None], seen, length, logits=True)
        for sequence in running:
            sequence.known += 1
        assert logits is not None
        return logits

    def _run(
        self, first: int, ids: np.ndarray, positions: np.ndarray, seen: np.ndarray, length: int, logits: bool
    ) -> torch.Tensor | None:
        at = torch.from_numpy(positions).to(self._device)
        self._cache.aim(first, at, length)
        mask = torch.from_numpy(seen[:, None]).to(self._device)
        return self._forward(torch.from_numpy(ids).to(self._device), at, mask, self._cache, logits)

    def leave(self, row: int, sequence: Sample, keep: bool, last_known: int) -> None:
        """Free a row; the last row, of which `last_known` tokens are computed, moves into it."""
        if keep and sequence.known:
            self._store.add(sequence.all_ids()[: sequence.known], self._rows.take(row, sequence.known))
        last = self._rows.count - 1
        if row != last:
            self._rows.copy(last, row, last_known)
        self._rows.count = last


class SingleEngine:
    """Any other causal model: each sequence has transformers' own cache and is computed by itself."""

    def __init__(self, model: nn.Module, stats: Stats) -> None:
        self._forward = _Forward(model)
        self._device = next(model.parameters()).device
        self._config = getattr(model, "config", None)
        self._stats = stats

    def forget(self) -> None:
        """Nothing outlives its sequence."""

    def join(self, joining: Sequence[Sample]) -> None:
        for sequence in joining:
            sequence.state = DynamicCache(config=self._config)  # type: ignore[arg-type]
            if len(sequence.ids) > 1:
                self._run(sequence, sequence.ids[:-1], logits=False)
                self._stats.prefilled_tokens += len(sequence.ids) - 1

    def decode(self, running: Sequence[Sample]) -> torch.Tensor:
        """[B, V] logits of each sequence's next token."""
        logits = [self._run(s, np.asarray([s.last]), logits=True) for s in running]
        return torch.cat([one for one in logits if one is not None])

    def _run(self, sequence: Sample, ids: np.ndarray, logits: bool) -> torch.Tensor | None:
        at = torch.arange(sequence.known, sequence.known + len(ids), device=self._device)[None]
        sequence.known += len(ids)
        tokens = torch.from_numpy(ids.astype(np.int64))[None].to(self._device)
        return self._forward(tokens, at, None, sequence.state, logits)

    def leave(self, row: int, sequence: Sample, keep: bool, last_known: int) -> None:
        sequence.state = None


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
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, cache: Any, logits: bool
    ) -> torch.Tensor | None:
        arguments = {"input_ids": ids, "position_ids": positions, "use_cache": True, self._cache_name: cache}
        if mask is not None:
            arguments["attention_mask"] = mask
        if not logits:
            self._decoder(**arguments)
            return None
        return self._model(**arguments, logits_to_keep=1).logits[:, -1]


def rows_shape(model: nn.Module) -> Shape | None:
    """The shape of the model's cache if plain rows can hold it; None for sliding windows, states and the like."""
    config: Any = model.config
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (getattr(config, "sliding_window", None) and not hasattr(config, "layer_types")):
        return None
    cache = DynamicCache()
    parameter = next(model.parameters())
    ids = torch.zeros((1, 2), dtype=torch.int64, device=parameter.device)
    try:
        with torch.inference_mode():
            _Forward(model)(ids, torch.arange(2, device=parameter.device)[None], None, cache, logits=False)
        shapes = {tuple(tensor.shape) for layer in cache.layers for tensor in (layer.keys, layer.values)}  # type: ignore[union-attr]
    except (AttributeError, TypeError):
        return None
    if len(shapes) != 1:
        return None
    (_, heads, _, width) = shapes.pop()
    return Shape(len(cache.layers), heads, width)


# From logits to tokens


def sample(
    logits: torch.Tensor, options: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token for each row of `logits` [B, V], and its natural-log probability under the distribution sampled from.

    `uniforms` [B] are numbers in [0, 1): the token is the first whose cumulative probability exceeds its row's number.
    At temperature 0 the most probable token is certain: its log-probability is 0.
    """
    device = logits.device
    greedy = torch.tensor([o.temperature == 0 for o in options], device=device)
    heat = torch.tensor([o.temperature or 1.0 for o in options], dtype=torch.float32, device=device)
    scores = logits.float() / heat[:, None]
    for row, option in enumerate(options):
        if option.temperature and (option.top_k or option.top_p < 1.0):
            scores[row] = _truncated(scores[row], option.top_k, option.top_p)
    scores = scores - scores.amax(-1, keepdim=True)
    probabilities = scores.exp()
    chosen, total = _inverse(probabilities, torch.tensor(uniforms, dtype=torch.float64, device=device))
    tokens = torch.where(greedy, logits.argmax(-1), chosen)
    logprobs = scores.gather(1, tokens[:, None])[:, 0] - total.log().float()
    logprobs = torch.where(greedy, torch.zeros_like(logprobs), logprobs)
    return tokens.tolist(), logprobs.tolist()


def _inverse(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of the cumulative distribution of `weights` [B, V] (float32, not normalised), and their sums [B].

    In two levels, so that a vocabulary's sum is not accumulated in float32: blocks of 128, then within the block.
    """
    count, vocabulary = weights.shape
    blocks = nn.functional.pad(weights, (0, -vocabulary % 128)).view(count, -1, 128)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = sums[:, -1]
    target = uniforms * total
    block = torch.searchsorted(sums, target[:, None], right=True).clamp_(max=sums.shape[1] - 1)[:, 0]
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = blocks[torch.arange(count, device=weights.device), block].double().cumsum(-1)
    place = torch.searchsorted(inside, (target - before)[:, None], right=True)[:, 0]
    # Rounding may point behind the block's last token that has any weight.
    last = (inside < inside[:, -1:]).sum(-1)
    return block * 128 + torch.minimum(place, last), total


def _truncated(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """`scores` [V] with what top_k and then top_p leave out at minus infinity. Ties at the border stay in."""
    if top_k and top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], float("-inf"))
    if top_p < 1.0:
        ordered, order = scores.sort(descending=True)
        probabilities = ordered.softmax(-1)
        # A token stays while the probability before it is below top_p: at least one does.
        out = probabilities.cumsum(-1) - probabilities >= max(top_p, 1e-9)
        scores = scores.masked_fill(torch.zeros_like(out).scatter(0, order, out), float("-inf"))
    return scores
