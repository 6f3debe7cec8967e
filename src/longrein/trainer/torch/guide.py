"""Guided decoding: which tokens a grammar lets follow, by llguidance.

A guide is a Lark grammar in llguidance's form over the whole reply, without the token that ends it. A `Guide` follows one
sample: `allowed` says what may come next, as bits, and `take` what came. Where the grammar lets the reply end, the
sample's stop tokens are allowed, and when nothing else can follow they alone are.

llguidance is an extra: `pip install 'longrein[guided]'`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Grammars that are kept compiled: the calls of a run repeat few.
KEPT_GRAMMARS = 64


class GuideError(Exception):
    """A guide that cannot be followed here; the message says why."""


@dataclass(eq=False)
class Guide:
    """Follows one sample through a grammar."""

    matcher: LLMatcher
    stops: np.ndarray
    """int32 [W] bits of the tokens that end the sample; W = ceil(vocabulary / 32)."""
    failure: str | None = None
    """Why the grammar cannot be followed any further, once that has happened."""

    def allowed(self) -> np.ndarray | None:
        """int32 [W]: bit i % 32 of word i // 32 says whether token i may come next. None after a failure."""
        if self.failure is None and not self.matcher.is_stopped():
            # llguidance's own mask has a word more where the vocabulary is a multiple of 32.
            bits = np.frombuffer(self.matcher.compute_bitmask(), np.int32)[: len(self.stops)]
            # The grammar's own end is that of the sample, by whichever of its stop tokens.
            bits = bits & ~self.stops
            if self.matcher.is_accepting():
                bits |= self.stops
        else:
            bits = self.stops
        if self.failure is None and self.matcher.is_error():
            self.failure = f"llguidance gave the guide up: {self.matcher.get_error()}"
        if self.failure is None and not bits.any():
            self.failure = "no token of the vocabulary can follow in the guide"
        return bits if self.failure is None else None

    def take(self, token: int) -> None:
        """The token that was sampled; one that ends the sample need not be told."""
        if not self.matcher.consume_token(token):
            self.failure = f"llguidance gave the guide up: {self.matcher.get_error()}"


@dataclass
class Guides:
    """Makes the guides of one model; compiled grammars are kept. Used from any thread."""

    folder: Path
    """Holds the model's tokenizer.json."""
    vocab_size: int
    """Of the model's output; the tokenizer's own may be smaller."""
    _tokenizers: dict[int, LLTokenizer] = field(default_factory=dict)
    _compiled: OrderedDict[tuple[str, int], LLMatcher] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, grammar: str, stop_token_ids: frozenset[int]) -> Guide:
        """A guide for a new sample that these tokens end. Raises `GuideError`."""
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            raise GuideError(
                "guided decoding needs llguidance, which is not installed here (pip install 'longrein[guided]')"
            ) from None
        if not stop_token_ids:
            raise GuideError("a guided sample needs stop_token_ids: they end it when the grammar does")
        end = min(stop_token_ids)
        with self._lock:
            if end not in self._tokenizers:
                try:
                    text = (self.folder / "tokenizer.json").read_text(encoding="utf-8")
                    self._tokenizers[end] = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=end)
                except Exception as error:
                    raise GuideError(f"llguidance cannot use the tokenizer of {self.folder}: {error}") from None
            compiled = self._compiled.pop((grammar, end), None)
            if compiled is None:
                compiled = LLMatcher(self._tokenizers[end], grammar, log_level=0)
                if compiled.is_error():
                    raise GuideError(compiled.get_error())
            self._compiled[grammar, end] = compiled
            while len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
            return Guide(compiled.deep_copy(), self._bits(stop_token_ids))

    def _bits(self, ids: frozenset[int]) -> np.ndarray:
        flags = np.zeros(-(-self.vocab_size // 32) * 32, np.uint8)
        flags[[id for id in ids if 0 <= id < self.vocab_size]] = 1
        return np.packbits(flags, bitorder="little").view(np.int32)


def unpacked(bits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """bool [B, V] of the bits [B, W] (int32) that `Guide.allowed` gives."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocabulary]
