"""The embedded learner: one optimizer update from weighted rows.

`Learner.update` computes Σ w·ℓ over all trained tokens of the rows it is given and makes one AdamW step. How the rows
are cut into micro-batches is a matter of memory alone: weights are fixed before, nothing is divided again, and the
gradient is the same to floating-point accuracy. Logits exist only where a trained token is predicted, a chunk at a
time: the gradient of a chunk's logits is formed and carried back to the hidden states before the next chunk's logits
are made.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longrein import config
from longrein.learning.loss import Objective, clipped, kl_k1, kl_k3
from longrein.trainer.torch.forward import Forward
from longrein.trainer.torch.policy import Policy
from longrein.trajectory.batch import Row
from longrein.trajectory.packing import pack

log = logging.getLogger(__name__)

#: Logits that exist at once (tokens times vocabulary).
LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**28}


class Learner:
    """Updates a policy's weights. Not thread-safe; nothing may sample from the weights while it computes.

    `autocast` is the run file's `model.autocast`; `temperature` is the one that the trained calls were sampled at, at
    which log-probabilities are computed.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: config.Algorithm,
        trainer: config.Trainer,
        autocast: str = "auto",
        temperature: float = 1.0,
    ) -> None:
        self.policy = policy
        self.updates = 0
        self._trainer = trainer
        self._temperature = temperature
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self._autocast = autocast_dtype(autocast, policy)
        self._objective = Objective(
            algorithm.loss,
            algorithm.clip_low,
            algorithm.clip_high,
            algorithm.correction_cap if algorithm.correction == "tis" else None,
        )
        self._forward = Forward(policy.model, policy.device)
        self._optimizer = self._adamw()
        self._supervised: torch.optim.AdamW | None = None

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """One optimizer update of the run's policy loss over `rows`, all of which belong to it.

        Rows whose advantages are all 0 add nothing to the gradient and are not computed; metrics of the policy
        (`entropy`, `ratio/…`, `kl/…`, `clip/…`, `logprob_gap`) are over the computed tokens and absent when there are
        none. No step is made without a gradient or with one that is not finite.
        """
        self._supervised = None  # a warm-up's moments belong to another loss
        scale = min(1.0, (self.updates + 1) / max(1, self._trainer.lr_warmup_steps))
        metrics = self._step(rows, self._objective, self._optimizer, self._trainer.learning_rate * scale)
        self.updates += 1
        return metrics

    def supervised(self, rows: Sequence[Row], learning_rate: float) -> dict[str, float]:
        """One optimizer update of the cross-entropy of the trained tokens, weighed as ever.

        It has an optimizer of its own, which the first policy update ends.
        """
        if self._supervised is None:
            self._supervised = self._adamw()
        return self._step(rows, Objective("cross_entropy"), self._supervised, learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """The optimizers' states and the count of updates; the weights are the policy's to save."""
        return {
            "updates": self.updates,
            "optimizer": self._optimizer.state_dict(),
            "supervised": self._supervised.state_dict() if self._supervised is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.updates = int(state["updates"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._supervised = None
        if state["supervised"] is not None:
            self._supervised = self._adamw()
            self._supervised.load_state_dict(state["supervised"])

    def _adamw(self) -> torch.optim.AdamW:
        # Gains and biases are not decayed, as is usual.
        decay = self._trainer.weight_decay
        groups = [
            {"params": [p for p in self._parameters if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in self._parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], betas=self._trainer.betas, fused=True)

    def _step(
        self, rows: Sequence[Row], objective: Objective, optimizer: torch.optim.AdamW, learning_rate: float
    ) -> dict[str, float]:
        began = time.perf_counter()
        trained = [row for row in rows if row.trained.any()]
        computed = [row for row in trained if row.advantages.any() or not objective.zero_without_advantage]
        sums = Sums()
        norm = 0.0
        if computed:
            optimizer.zero_grad(set_to_none=True)
            self._gradient(computed, objective, sums)
            # A limit of infinity clips nothing.
            limit = self._trainer.grad_clip or float("inf")
            norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
            if np.isfinite(norm):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
            else:
                log.warning("the gradient's norm is %s: this update is left out", norm)
            optimizer.zero_grad(set_to_none=True)
        tokens = sum(int(row.trained.sum()) for row in trained)
        return {
            **sums.metrics(objective),
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "learner/rows": len(rows),
            "learner/row_tokens": sum(len(row.tokens) for row in rows),
            "learner/trained_tokens": tokens,
            "learner/zero_advantage_tokens": tokens - sums.count,
            "learner/computed_tokens": sums.computed_tokens,
            "learner/micro_batches": sums.micro_batches,
            "learner/seconds": time.perf_counter() - began,
        }

    def _gradient(self, rows: Sequence[Row], objective: Objective, sums: Sums) -> None:
        """Add the gradient of Σ w·ℓ over `rows` to the parameters' and what is worth knowing to `sums`."""
        contexts, members = _distinct(rows)
        wanted = [np.concatenate([np.flatnonzero(row.trained) - 1 for row in same]) for same in members]
        lengths = [len(ids) for ids in contexts]
        budget = self._trainer.tokens_per_micro_batch
        packed = pack(contexts, budget)
        if any(bundle.trunk for batch in packed for bundle in batch.bundles) and not self._forward.shares_prefixes:
            packed = pack(contexts, budget, min_trunk=None)
        with self._casting():  # one context for all micro-batches: weights are cast once
            for micro_batch in packed:
                states, which = self._forward.states(micro_batch, contexts, wanted)
                targets = Targets.of([row for index in micro_batch.rows for row in members[index]], which, states)
                gradients = [
                    self._predict(part, targets.part(start, start + len(part)), objective, sums)
                    for start, part in self._chunks(states.detach())
                ]
                with self._uncast():
                    states.backward(torch.cat(gradients))
                sums.micro_batches += 1
                sums.computed_tokens += micro_batch.computed_tokens(lengths)

    def _chunks(self, states: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        at_once = max(1, LOGITS_AT_ONCE[self.policy.device.type] // self.policy.vocab_size)
        for start in range(0, len(states), at_once):
            yield start, states[start : start + at_once]

    def _predict(self, states: torch.Tensor, targets: Targets, objective: Objective, sums: Sums) -> torch.Tensor:
        """The gradient of a chunk's loss to its states, [s, H]; that to the head's parameters is added to theirs."""
        states.requires_grad_()
        logits = self._forward.logits(states)
        with torch.no_grad(), self._uncast():
            # Written out rather than left to autograd, which would keep several copies of [s, V].
            scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self._temperature
            scores -= scores.amax(-1, keepdim=True)
            chosen = scores[targets.which, targets.labels]
            probabilities = scores.exp()
            total = probabilities.sum(-1)
            entropy = total.log() - torch.linalg.vecdot(probabilities, scores) / total
            logprobs = chosen - total.log()[targets.which]
        with torch.enable_grad():
            leaf = logprobs.detach().requires_grad_()
            losses = objective.token_losses(leaf, targets.behaviour, targets.advantages)
            (slope,) = torch.autograd.grad((targets.weights * losses).sum(), leaf)
        with torch.no_grad(), self._uncast():
            # d log p(label) / d logits = (onehot(label) - p) / temperature
            slope = slope / self._temperature
            of_state = torch.zeros_like(total).index_add_(0, targets.which, slope)
            gradient = probabilities.mul_((-of_state / total)[:, None])
            gradient.index_put_((targets.which, targets.labels), slope, accumulate=True)
            logits.backward(gradient.to(logits.dtype))
        sums.add(objective, targets, logprobs, losses.detach(), entropy[targets.which])
        assert states.grad is not None
        return states.grad

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.policy.device.type, dtype=self._autocast)

    @contextlib.contextmanager
    def _uncast(self) -> Iterator[None]:
        with torch.autocast(self.policy.device.type, enabled=False):
            yield


@dataclass(frozen=True)
class Targets:
    """The trained tokens that a stretch of states predicts, [n] each, in order of their states."""

    which: torch.Tensor
    """int64: index of the token's state."""
    labels: torch.Tensor
    """int64 token ids."""
    behaviour: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Row], which: np.ndarray, states: torch.Tensor) -> Targets:
        """The trained tokens of `rows`, one row after the other, whose states are `which`."""
        order = np.argsort(which, kind="stable")
        wide = torch.promote_types(states.dtype, torch.float32)

        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            values = np.concatenate([getattr(row, name)[row.trained] for row in rows])[order]
            return torch.from_numpy(values).to(states.device, dtype)

        return cls(
            torch.from_numpy(which[order]).to(states.device),
            column("tokens", torch.int64),
            *(column(name, wide) for name in ("logprobs", "advantages", "weights")),
        )

    def part(self, start: int, stop: int) -> Targets:
        """Those of the states start … stop - 1."""
        first, last = torch.searchsorted(self.which, self.which.new_tensor([start, stop])).tolist()
        here = slice(first, last)
        columns = (self.labels, self.behaviour, self.advantages, self.weights)
        return Targets(self.which[here] - start, *(column[here] for column in columns))


def _distinct(rows: Sequence[Row]) -> tuple[list[np.ndarray], list[list[Row]]]:
    """The distinct contexts up to each row's last trained token, and the rows that have each.

    Rollouts of a task often come out equal to the token, and then one pass serves them all. The last trained token
    itself, and what follows it, predicts nothing.
    """
    members: dict[bytes, list[Row]] = {}
    contexts: list[np.ndarray] = []
    for row in rows:
        context = row.tokens[: np.flatnonzero(row.trained)[-1]]
        same = members.setdefault(context.tobytes(), [])
        if not same:
            contexts.append(context)
        same.append(row)
    return contexts, list(members.values())


class Sums:
    """What an update's metrics are made of, summed over its micro-batches; w is a token's weight."""

    def __init__(self) -> None:
        self.count = 0
        self.micro_batches = 0
        self.computed_tokens = 0
        self._loss = 0.0
        self._weight = 0.0
        self._weighted: dict[str, float] = {}
        self._plain: dict[str, float] = {}
        self._ratio_max = 0.0

    def add(
        self,
        objective: Objective,
        targets: Targets,
        logprobs: torch.Tensor,
        losses: torch.Tensor,
        entropy: torch.Tensor,
    ) -> None:
        """Count one chunk's tokens, [n] each."""
        behaviour, advantages, weights = targets.behaviour, targets.advantages, targets.weights
        self.count += len(losses)
        self._loss += float((weights * losses).sum())
        self._weight += float(weights.sum())
        weighted = {"entropy": entropy, "logprob": logprobs}
        if objective.loss != "cross_entropy":
            ratio = (logprobs - behaviour).exp()
            low, high = clipped(logprobs, behaviour, advantages, objective.clip_low, objective.clip_high)
            weighted |= {
                "kl/k1": kl_k1(logprobs, behaviour),
                "kl/k3": kl_k3(logprobs, behaviour),
                "ratio/mean": ratio,
            }
            plain = {"clip/low": low, "clip/high": high, "logprob_gap": (logprobs - behaviour).abs()}
            for name, values in plain.items():
                self._plain[name] = self._plain.get(name, 0.0) + float(values.sum())
            self._ratio_max = max(self._ratio_max, float(ratio.max()))
        for name, values in weighted.items():
            self._weighted[name] = self._weighted.get(name, 0.0) + float((weights * values).sum())

    def metrics(self, objective: Objective) -> dict[str, float]:
        """`loss` is Σ w·ℓ over all trained tokens; the rest are means over the computed ones.

        `clip/…` and `logprob_gap` (mean |current - behaviour|) are over tokens, the others weighed by w.
        """
        found = {"loss": self._loss}
        if self.count:
            found |= {name: value / self._weight for name, value in self._weighted.items()}
            found |= {name: value / self.count for name, value in self._plain.items()}
            if objective.loss != "cross_entropy":
                found["ratio/max"] = self._ratio_max
        return found


def autocast_dtype(option: str, policy: Policy) -> torch.dtype | None:
    """The type that matrix products are computed in, or None for the weights' own.

    `auto` is bfloat16 for float32 weights where the device has instructions for it, except for models so small that
    casting costs more than it saves.
    """
    parameter = next(policy.model.parameters())
    if option == "none" or parameter.dtype != torch.float32:
        return None
    if option == "bfloat16":
        return torch.bfloat16
    large = sum(p.numel() for p in policy.model.parameters()) >= 20_000_000
    if policy.device.type == "cuda":
        fast = torch.cuda.get_device_capability(policy.device) >= (8, 0)
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast and large else None
