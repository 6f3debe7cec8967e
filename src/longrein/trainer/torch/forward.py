"""Hidden states of a micro-batch's rows, a shared prefix computed once.

Rows that share a trunk are computed as one pass over the trunk that fills a key-value cache, in grad mode, and one pass
over the branches, which attend to the cached keys and values of their trunk; gradients flow back through them. The
result equals that of plain rows to floating-point accuracy. Which architectures can do this is found out by comparing
the two on a few random rows, not from a list of names.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from longrein.trajectory.packing import Bundle, MicroBatch

log = logging.getLogger(__name__)


class Forward:
    """Computes a causal language model over micro-batches, without logits that nobody asked for."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        plain: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self._model = plain
        self._decoder: Any = plain.get_decoder()
        self._head: Any = plain.get_output_embeddings()
        self._vocabulary = int(plain.get_input_embeddings().weight.shape[0])
        if not self._logits_are_the_heads():
            log.info(
                "%s does more to its logits than one matrix product: they are computed whole", type(plain).__name__
            )
            self._head = None
        # Its name changed between versions of transformers.
        taken = inspect.signature((self._decoder if self._head is not None else plain).forward).parameters
        self._cache_name = "cache" if "cache" in taken else "past_key_values"
        self._shares: bool | None = None

    @property
    def gives_hidden_states(self) -> bool:
        """Whether states are the hidden ones below the output embedding, and not logits already."""
        return self._head is not None

    @property
    def shares_prefixes(self) -> bool:
        """Whether a trunk and its branches give what plain rows give; tried out at the first question."""
        if self._shares is None:
            self._shares = self._sharing_agrees()
        return self._shares

    def states(
        self, micro_batch: MicroBatch, tokens: Sequence[np.ndarray], wanted: Sequence[np.ndarray]
    ) -> tuple[torch.Tensor, np.ndarray]:
        """The states from which `logits` predicts the tokens after the positions `wanted[row]`.

        `tokens` and `wanted` are indexed by row. Returns states [s, H] and, for each wanted position (in the order of
        `micro_batch.rows`), the index of its state, int64 [n]: positions that rows share have one state.
        """
        bundles = micro_batch.bundles
        if bundles[0].trunk:
            return self._branched(bundles, tokens, wanted)
        rows = micro_batch.rows
        ids = _right_padded([tokens[row] for row in rows])
        # Padding is at the end, where no real token attends to it: the mask is the plain causal one.
        states = self._run(ids)
        place = [index * ids.shape[1] + wanted[row] for index, row in enumerate(rows)]
        return self._gather(states.flatten(0, 1), place)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[n, V] logits of states."""
        return states if self._head is None else self._head(states)

    def _branched(
        self, bundles: Sequence[Bundle], tokens: Sequence[np.ndarray], wanted: Sequence[np.ndarray]
    ) -> tuple[torch.Tensor, np.ndarray]:
        trunks = np.asarray([bundle.trunk for bundle in bundles])
        longest = int(trunks.max())
        # Trunks are padded on the left, so that a branch follows its trunk without a gap: models with sliding windows
        # count positions in the cache.
        padding = longest - trunks
        ids = np.zeros((len(bundles), longest), np.int64)
        for index, bundle in enumerate(bundles):
            ids[index, padding[index] :] = tokens[bundle.rows[0]][: bundle.trunk]
        seen = np.arange(longest) >= padding[:, None]
        cache = DynamicCache()
        trunk_states = self._run(ids, np.maximum(np.arange(longest) - padding[:, None], 0), seen, cache)

        owner = np.repeat(np.arange(len(bundles)), [len(bundle.rows) for bundle in bundles])
        _repeat(cache, self._tensor(owner), [len(bundle.rows) for bundle in bundles])
        rows = [row for bundle in bundles for row in bundle.rows]
        branches = _right_padded([tokens[row][trunks[owner[index]] :] for index, row in enumerate(rows)])
        width = branches.shape[1]
        branch_states = self._run(
            branches,
            trunks[owner][:, None] + np.arange(width),
            np.concatenate([seen[owner], np.ones((len(rows), width), bool)], 1),
            cache,
        )
        place = []
        for index, row in enumerate(rows):
            bundle, position = owner[index], wanted[row]
            in_trunk = bundle * longest + padding[bundle] + position
            in_branch = len(bundles) * longest + index * width + position - trunks[bundle]
            place.append(np.where(position < trunks[bundle], in_trunk, in_branch))
        return self._gather(torch.cat([trunk_states.flatten(0, 1), branch_states.flatten(0, 1)]), place)

    def _gather(self, states: torch.Tensor, places: Sequence[np.ndarray]) -> tuple[torch.Tensor, np.ndarray]:
        found, which = np.unique(np.concatenate(places), return_inverse=True)
        return states[self._tensor(found)], which

    def _run(
        self,
        ids: np.ndarray,
        positions: np.ndarray | None = None,
        seen: np.ndarray | None = None,
        cache: DynamicCache | None = None,
    ) -> torch.Tensor:
        """[B, T, H] states of `ids`; `seen` says which of all cached and new positions hold tokens."""
        arguments: dict[str, Any] = {"input_ids": self._tensor(ids), "use_cache": cache is not None}
        if cache is not None:
            arguments[self._cache_name] = cache
        if positions is not None:
            arguments["position_ids"] = self._tensor(positions)
        if seen is not None and not seen.all():
            arguments["attention_mask"] = self._tensor(seen)
        if self._head is None:
            return self._model(**arguments).logits
        return self._decoder(**arguments).last_hidden_state

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    @torch.no_grad()
    def _logits_are_the_heads(self) -> bool:
        if self._head is None or self._decoder is self._model:
            return False
        ids = torch.arange(4, device=self.device).remainder(self._vocabulary)[None]
        whole = self._model(input_ids=ids, use_cache=False).logits
        ours = self._head(self._decoder(input_ids=ids, use_cache=False).last_hidden_state)
        # Equal to the bit: a cap or scale on small logits changes little more than that.
        return torch.equal(ours.to(whole.dtype), whole)

    def _sharing_agrees(self) -> bool:
        """Compare log-probabilities and one gradient of branched and plain rows on random tokens."""
        rng = np.random.default_rng(0)
        trunks = [rng.integers(0, self._vocabulary, length) for length in (5, 3)]
        lengths = (2, 4, 3, 1)
        tokens = [np.concatenate([trunks[i // 2], rng.integers(0, self._vocabulary, n)]) for i, n in enumerate(lengths)]
        branched = MicroBatch((Bundle(5, (0, 1)), Bundle(3, (2, 3))))
        plain = MicroBatch(tuple(Bundle(0, (row,)) for row in range(4)))
        wanted = [np.arange(len(row)) for row in tokens]
        labels = self._tensor(np.concatenate([np.roll(row, -1) for row in tokens]))
        parameter = next(p for p in self._model.parameters() if p.requires_grad)
        found = []
        with torch.enable_grad(), torch.autocast(self.device.type, enabled=False):
            for micro_batch in (plain, branched):
                try:
                    states, which = self.states(micro_batch, tokens, wanted)
                    logprobs = self.logits(states).log_softmax(-1)[self._tensor(which), labels]
                    found += [logprobs.detach(), *torch.autograd.grad(logprobs.mean(), parameter)]
                except Exception as error:
                    if micro_batch is plain:
                        raise
                    log.info("prefixes are not shared: %s cannot (%s)", type(self._model).__name__, error)
                    return False
        tolerance = 3e-2 if parameter.dtype in (torch.bfloat16, torch.float16) else 1e-4
        for name, one, other in zip(("log-probabilities", "gradients"), found[:2], found[2:], strict=True):
            gap = float((one - other).float().norm() / one.float().norm().clamp(min=1e-12))
            if not gap <= tolerance:
                log.info(
                    "prefixes are not shared: %s has other %s with them (relative difference %.1e)",
                    type(self._model).__name__,
                    name,
                    gap,
                )
                return False
        return True


def _right_padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def _repeat(cache: DynamicCache, owner: torch.Tensor, counts: Sequence[int]) -> None:
    """Give every branch its trunk's keys and values: [G, …] → [B, …], differentiably."""
    for layer in cast(Any, cache.layers):
        if len(set(counts)) == 1:
            layer.keys, layer.values = (
                kept[:, None].expand(-1, counts[0], *kept.shape[1:]).flatten(0, 1)
                for kept in (layer.keys, layer.values)
            )
        else:
            layer.keys, layer.values = layer.keys[owner], layer.values[owner]
