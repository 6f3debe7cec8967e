"""Continuous batching over a Hugging Face causal language model.

Requests join and leave between steps. A step computes a bounded part of the prompts that are new, sharing what is known
already (the keys and values of finished calls, and of each other), and gives every sequence whose prompt is computed
one token.

A call's randomness is its own: one uniform number per token from a counter-based generator with the call's seed, turned
into a token by the inverse of the cumulative distribution. What a call samples does not depend on what runs beside it
(up to the floating-point noise of batched matrix products).

A guided call is sampled from the policy's distribution over the tokens that its guide allows: the others are left out
before anything else, and what is recorded is the log-probability under the renormalised rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from longrein.trainer.torch.compute import make_engine
from longrein.trainer.torch.guide import Guide, unpacked

#: Prompt tokens that are few for a pass of their own, running sequences that are many to let wait for one, and steps
#: after which even few tokens are computed.
FEW_TOKENS, MANY_RUNNING, PATIENCE = 256, 16, 4


Likely = list[tuple[int, float]]
"""The most probable tokens and their log-probabilities, most probable first."""


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
    top_logprobs: int = 0
    """How many of the most probable tokens are told beside each sampled one."""


@dataclass(eq=False)
class Sample:
    """A request and what has been sampled of it so far."""

    ids: np.ndarray
    """int32 [n] the prompt."""
    sampling: Sampling
    guide: Guide | None = None
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Likely] = field(default_factory=list)
    """One for each sampled token, where they were asked for."""
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    aborted: bool = False
    failure: str | None = None
    """Why this sample alone cannot go on."""
    known: int = 0
    """Tokens whose keys and values are computed."""
    row: int = -1
    """Where they stand; -1 while the sequence is not computed."""
    source: tuple[Sample, int] | None = None
    """A running sequence that the first tokens are taken from once it has computed them, and how many."""
    stale: bool = False
    """Some keys and values are those of earlier weights."""
    _random: np.random.Generator | None = None

    @property
    def unfilled(self) -> int:
        """Tokens to compute before the next one can be sampled: of the prompt, or of all after new weights came."""
        return len(self.ids) + len(self.sampled) - 1 - self.known

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

    def __init__(self, model: nn.Module, *, max_batch: int, cache_tokens: int, stats: Stats | None = None) -> None:
        self.model = model
        self.max_batch = max_batch
        self.cache_tokens = cache_tokens
        self.version = 0
        self.stats = stats or Stats()
        self._waited = 0
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.engine = make_engine(model, cache_tokens, self.stats)

    def renewed(self) -> Sampler:
        """A sampler of the same model and version with nothing running, after a step that failed."""
        fresh = Sampler(self.model, max_batch=self.max_batch, cache_tokens=self.cache_tokens, stats=self.stats)
        fresh.version = self.version
        return fresh

    def add(self, sequence: Sample) -> None:
        """Queue a request; it joins at the next step."""
        self.waiting.append(sequence)

    @torch.inference_mode()
    def changed(self, version: int, *, recompute: bool = False) -> None:
        """The weights are those of `version` now.

        Running sequences go on over their old keys and values, or compute those of all their tokens anew (`recompute`).
        """
        self.version = version
        self.engine.forget(recompute)

    @torch.inference_mode()
    def step(self) -> list[Sample]:
        """Let new requests join, compute a part of their prompts, sample one token of each sequence that is ready.

        Returns those that got a token or were aborted.
        """
        gone = [s for s in (*self.waiting, *self.running) if s.aborted]
        for sequence in gone:
            sequence.finish_reason = "abort"
            self._drop(sequence, keep=False)
        while self.waiting and len(self.running) < self.max_batch:
            sequence = self.waiting.pop(0)
            self.engine.join(sequence)
            self.running.append(sequence)
        filling = [s for s in self.running if s.unfilled]
        if filling and self._worth_a_pass(filling):
            self.engine.prefill(filling)
        ready = sorted((s for s in self.running if not s.unfilled), key=lambda s: s.row)
        if ready:
            self._decode(ready)
        return [*gone, *ready]

    def _worth_a_pass(self, filling: Sequence[Sample]) -> bool:
        """Whether to compute prompts in this step: a few tokens wait some steps for others, if many would wait for them.

        A pass over a handful of tokens reads all weights and costs what a pass over a hundred does.
        """
        self._waited += 1
        few = sum(s.unfilled for s in filling) < FEW_TOKENS and len(self.running) - len(filling) >= MANY_RUNNING
        if few and self._waited < PATIENCE:
            return False
        self._waited = 0
        return True

    def _decode(self, ready: list[Sample]) -> None:
        logits = self.engine.decode(ready)
        # While a GPU computes the logits.
        allowed = {row: bits for row, s in enumerate(ready) if s.guide and (bits := s.guide.allowed()) is not None}
        tokens, logprobs, likely = sample(logits, [s.sampling for s in ready], [s.uniform() for s in ready], allowed)
        for sequence, token, logprob, top in zip(ready, tokens, logprobs, likely, strict=True):
            if sequence.guide is not None and sequence.guide.failure is not None:
                sequence.finish_reason, sequence.failure = "abort", sequence.guide.failure
                continue
            sequence.sampled.append(token)
            sequence.logprobs.append(logprob)
            if sequence.sampling.top_logprobs:
                sequence.top_logprobs.append(top)
            sequence.versions.append(self.version)
            if token in sequence.sampling.stop_token_ids:
                sequence.finish_reason = "stop"
            elif len(sequence.sampled) >= sequence.sampling.max_tokens:
                sequence.finish_reason = "length"
            elif sequence.guide is not None:
                sequence.guide.take(token)
        self.stats.decoded_tokens += len(ready)
        self.stats.decode_steps += 1
        for sequence in ready:
            if sequence.finish_reason is not None:
                self._drop(sequence, keep=True)

    def _drop(self, sequence: Sample, keep: bool) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            self.engine.leave(sequence, keep)
        else:
            self.waiting.remove(sequence)


# From logits to tokens


def sample(
    logits: torch.Tensor,
    options: Sequence[Sampling],
    uniforms: Sequence[float],
    allowed: Mapping[int, np.ndarray] | None = None,
) -> tuple[list[int], list[float], list[Likely]]:
    """One token for each row of `logits` [B, V], its natural-log probability under the distribution sampled from, and
    that distribution's most probable tokens for rows that ask for them.

    `uniforms` [B] are numbers in [0, 1): the token is the first whose cumulative probability exceeds its row's number.
    `allowed` holds, for rows that may not take every token, the bits of those that they may (`Guide.allowed`).
    At temperature 0 the most probable token is certain: its log-probability is 0.
    """
    device = logits.device
    scores = logits.float()
    if any(o.temperature not in (0, 1) for o in options):
        heat = torch.tensor([o.temperature or 1.0 for o in options], dtype=torch.float32, device=device)
        scores = scores / heat[:, None]
    cut = [row for row, o in enumerate(options) if o.temperature and (o.top_k or o.top_p < 1)]
    if cut or allowed:
        scores = scores.clone()
    if allowed:
        bits = torch.from_numpy(np.stack(list(allowed.values()))).to(device)
        scores[list(allowed)] = scores[list(allowed)].masked_fill(~unpacked(bits, scores.shape[1]), float("-inf"))
    if cut:
        scores[cut] = _truncated(scores[cut], [options[row].top_k for row in cut], [options[row].top_p for row in cut])
    highest = scores.amax(-1, keepdim=True)
    weights = (scores - highest).exp_()
    tokens, total = _inverse(weights, torch.tensor(uniforms, dtype=torch.float64, device=device))
    if not bool(total.isfinite().all()):
        raise FloatingPointError("the model's logits are not finite numbers: its weights have diverged")
    rest = total.log().float()[:, None]
    logprobs = (scores.gather(1, tokens[:, None]) - highest - rest)[:, 0]
    likely = _most_probable(scores, highest, rest, options)
    if any(o.temperature == 0 for o in options):
        greedy = torch.tensor([o.temperature == 0 for o in options], device=device)
        tokens = torch.where(greedy, scores.argmax(-1), tokens)
        logprobs = logprobs.masked_fill(greedy, 0.0)
    sampled = tokens.tolist()
    for row, option in enumerate(options):
        if option.top_logprobs and option.temperature == 0:
            likely[row] = [(sampled[row], 0.0)]
    return sampled, logprobs.tolist(), likely


def _most_probable(
    scores: torch.Tensor, highest: torch.Tensor, rest: torch.Tensor, options: Sequence[Sampling]
) -> list[Likely]:
    """For each row of `scores` [B, V] the most probable tokens, as many as it asks for and can be sampled.

    `highest` and `rest` [B, 1] are what a score loses to become a log-probability.
    """
    likely: list[Likely] = [[] for _ in options]
    asking = [row for row, o in enumerate(options) if o.top_logprobs]
    if not asking:
        return likely
    width = min(max(options[row].top_logprobs for row in asking), scores.shape[1])
    values, ids = scores[asking].topk(width)
    values = values - highest[asking] - rest[asking]
    for row, row_ids, row_values in zip(asking, ids.tolist(), values.tolist(), strict=True):
        pairs = zip(row_ids, row_values, strict=True)
        likely[row] = [(id, p) for id, p in pairs if p > float("-inf")][: options[row].top_logprobs]
    return likely


def _inverse(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of the cumulative distribution of `weights` [B, V] (float32, not normalised), and their sums [B].

    In two levels, so that a vocabulary's sum is not accumulated in float32: blocks of 128, then within the block. Only
    blocks are summed in float32: all weights in float64 would be twice the logits' memory.
    """
    count, vocabulary = weights.shape
    blocks = nn.functional.pad(weights, (0, -vocabulary % 128)).reshape(count, -1, 128)
    sums = blocks.sum(-1).double().cumsum(-1)
    total = sums[:, -1]
    target = uniforms * total
    block = torch.searchsorted(sums, target[:, None], right=True).clamp_(max=sums.shape[1] - 1)[:, 0]
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = blocks[torch.arange(count, device=weights.device), block].double().cumsum(-1)
    place = torch.searchsorted(inside, (target - before)[:, None], right=True)[:, 0]
    # Rounding may point behind the block's last token that has any weight.
    last = (inside < inside[:, -1:]).sum(-1)
    return block * 128 + torch.minimum(place, last), total


def _truncated(scores: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """`scores` [B, V] with what top_k, and then top_p of what is left, leave out at minus infinity."""
    vocabulary = scores.shape[1]
    most = torch.tensor([k or vocabulary for k in top_k], device=scores.device)[:, None]
    share = torch.tensor(top_p, dtype=torch.float32, device=scores.device)[:, None]
    whole = scores.logsumexp(-1, keepdim=True)
    for width in (min(1024, vocabulary), vocabulary):  # nearly always the most probable 1024 decide it
        ordered, order = scores.topk(width)
        inside = torch.arange(width, device=scores.device) < most
        ordered = ordered.masked_fill(~inside, float("-inf"))
        total = torch.where(most <= width, ordered.logsumexp(-1, keepdim=True), whole)
        probabilities = (ordered - total).exp()
        # A token stays while the probability of those before it is below top_p: the first always does.
        summed = probabilities.cumsum(-1)
        keep = inside & ((summed - probabilities < share) | (share >= 1))
        if bool(((most <= width) | (summed[:, -1:] >= share)).all()):
            break
    return torch.full_like(scores, float("-inf")).scatter_(1, order, ordered.masked_fill(~keep, float("-inf")))
