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
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from longrein import config
from longrein.learning.correction import at_level
from longrein.learning.kl import kl_estimate
from longrein.learning.loss import NO_COLUMNS, Columns, Objective, TokenLoss, kl_k1, kl_k3
from longrein.trainer.torch.forward import Forward
from longrein.trainer.torch.policy import Policy, PolicyError
from longrein.trainer.torch.value import ValueHead
from longrein.trajectory.batch import Row
from longrein.trajectory.packing import MicroBatch, pack

log = logging.getLogger(__name__)

#: Logits that exist at once (tokens times vocabulary).
LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**28}


class Learner:
    """Updates a policy's weights. Not thread-safe; nothing may sample from the weights while it computes.

    `autocast` is the run file's `model.autocast`; `temperature` is the one that the trained calls were sampled at, at
    which log-probabilities are computed. `loss` is the function that `algorithm.loss` names, if it names one, and
    `reference` the policy that `algorithm.kl_coefficient` holds to, needed unless it is the base model of LoRA adapters.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: config.Algorithm,
        trainer: config.Trainer,
        autocast: str = "auto",
        temperature: float = 1.0,
        *,
        loss: TokenLoss | None = None,
        reference: Policy | None = None,
    ) -> None:
        self.policy = policy
        self.updates = 0
        self._trainer = trainer
        self._temperature = temperature
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self._autocast = autocast_dtype(autocast, policy)
        self._objective = objective_of(algorithm, loss)
        self._forward = Forward(policy.model, policy.device)
        self._computes_proximal = algorithm.proximal == "computed"
        self._refers = algorithm.kl_coefficient > 0
        if self._refers and reference is None and not policy.lora:
            raise PolicyError("algorithm.kl_coefficient: a reference policy is needed to learn all weights")
        self._reference = Forward(reference.model, reference.device) if reference is not None else None
        self._value = ValueHead(policy, algorithm.value_learning_rate) if algorithm.advantage == "gae" else None
        if self._value is not None and not self._forward.gives_hidden_states:
            raise PolicyError(
                f"algorithm.advantage: 'gae' needs hidden states, and {type(policy.model).__name__} does more to its "
                "logits than one matrix product; use another advantage"
            )
        self._optimizer = self._adamw()
        self._supervised: torch.optim.AdamW | None = None

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """One optimizer update of the run's policy loss over `rows`, all of which belong to it.

        Rows whose advantages are all 0 add nothing to the gradient and are not computed; metrics of the policy
        (`entropy`, `ratio/…`, `kl/…`, `clip/…`, `logprob_gap`) are over the computed tokens and absent when there are
        none. No step is made without a gradient or with one that is not finite.
        """
        self._supervised = None  # a warm-up's moments belong to another loss
        self._look_at_sequences(rows)
        scale = min(1.0, (self.updates + 1) / max(1, self._trainer.lr_warmup_steps))
        metrics = self._step(rows, self._objective, self._optimizer, self._trainer.learning_rate * scale)
        self.updates += 1
        return metrics

    def prepare(self, rows: Sequence[Row]) -> None:
        """Compute what the algorithm needs of all of a step's rows before it is learned from, into their `columns`.

        `proximal`: log-probabilities under the present policy. `reference`: those under the reference policy. `values`:
        the value head's. float32 [T] each, 0 where not trained.
        """
        trained = [row for row in rows if row.trained.any()]
        if self._computes_proximal or self._value is not None:
            logprobs, values = self._score(trained, self._forward)
            for row, own_logprobs, own_values in zip(trained, logprobs, values, strict=True):
                if self._computes_proximal:
                    _write(row, "proximal", own_logprobs)
                if self._value is not None:
                    _write(row, "values", own_values)
        if self._refers:
            with self._as_reference() as forward:
                for row, own_logprobs in zip(trained, self._score(trained, forward)[0], strict=True):
                    _write(row, "reference", own_logprobs)

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[Forward]:
        if self._reference is not None:
            yield self._reference
        else:
            model: Any = self.policy.model
            _ = self._forward.shares_prefixes  # tried out with gradients, which nothing has while adapters are off
            with model.disable_adapter():
                yield self._forward

    def _look_at_sequences(self, rows: Sequence[Row]) -> None:
        """Write the log-ratios of whole sequences that the objective looks at into the rows' columns."""
        objective = self._objective
        if not objective.looks_at_sequences:
            return
        rows = self._with_gradient(rows, objective)
        current: Sequence[np.ndarray]
        if objective.loss == "gspo" or not self._computes_proximal:
            current = self._score(rows, self._forward)[0]
        else:
            current = [row.columns["proximal"][row.trained] for row in rows]
        for row, present in zip(rows, current, strict=True):
            behaviour = row.logprobs[row.trained]
            proximal = row.columns["proximal"][row.trained] if self._computes_proximal else None
            if objective.loss == "gspo":
                anchor = behaviour if proximal is None else proximal
                _write(row, "sequence_log_ratio", at_level(present - anchor, "geometric"))
            log_ratio = (present if proximal is None else proximal) - behaviour
            if objective.correction_cap is not None:
                _write(row, "correction_log_ratio", at_level(log_ratio, objective.correction_level))
            if objective.rejection != "none":
                _write(row, "rejection_log_ratio", at_level(log_ratio, objective.rejection))

    def _score(self, rows: Sequence[Row], forward: Forward) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Log-probabilities and values (0 without a value head) of each row's trained tokens, float32 [L_s] each."""
        if not rows:
            return [], []
        contexts, members = _distinct(rows)
        wanted = [np.concatenate([np.flatnonzero(row.trained) - 1 for row in same]) for same in members]
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        with torch.no_grad(), self._casting():
            for micro_batch in self._packed(contexts, forward):
                states, which = forward.states(micro_batch, contexts, wanted)
                own = [row for index in micro_batch.rows for row in members[index]]
                labels = torch.from_numpy(np.concatenate([row.tokens[row.trained] for row in own]).astype(np.int64))
                labels, places = labels.to(states.device), torch.from_numpy(which).to(states.device)
                logprobs = torch.zeros(len(which), dtype=torch.float64)
                values = torch.zeros(len(which), dtype=torch.float64)
                for start, part in self._chunks(states):
                    here = (places >= start) & (places < start + len(part))
                    logits = forward.logits(part)
                    with self._uncast():
                        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self._temperature
                        at = places[here] - start
                        chosen = scores[at, labels[here]] - scores.logsumexp(-1)[at]
                        logprobs[here.cpu()] = chosen.to("cpu", torch.float64)
                        if self._value is not None and forward is self._forward:
                            values[here.cpu()] = self._value(part)[at].to("cpu", torch.float64)
                ends = np.cumsum([int(row.trained.sum()) for row in own])[:-1]
                parts = zip(
                    own, *(np.split(x.numpy().astype(np.float32), ends) for x in (logprobs, values)), strict=True
                )
                found |= {id(row): (own_logprobs, own_values) for row, own_logprobs, own_values in parts}
        return [found[id(row)][0] for row in rows], [found[id(row)][1] for row in rows]

    @staticmethod
    def _with_gradient(rows: Sequence[Row], objective: Objective) -> list[Row]:
        """The rows that add something to the gradient."""
        trained = [row for row in rows if row.trained.any()]
        return [row for row in trained if row.advantages.any() or not objective.zero_without_advantage]

    def supervised(self, rows: Sequence[Row], learning_rate: float) -> dict[str, float]:
        """One optimizer update of the cross-entropy of the trained tokens, weighed as ever.

        It has an optimizer of its own, which the first policy update ends.
        """
        if self._supervised is None:
            self._supervised = self._adamw()
        return self._step(rows, Objective("cross_entropy"), self._supervised, learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """The optimizers' states and the count of updates; the weights are the policy's to save."""
        state: dict[str, Any] = {
            "updates": self.updates,
            "optimizer": self._optimizer.state_dict(),
            "supervised": self._supervised.state_dict() if self._supervised is not None else None,
        }
        if self._value is not None:
            state["value"] = {"head": self._value.state_dict(), "optimizer": self._value.optimizer.state_dict()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        if (self._value is not None) != ("value" in state):
            raise PolicyError(
                "algorithm.advantage: only a run with 'gae' has a value head, and the checkpoint "
                + ("has none" if self._value is not None else "has one")
                + "; go on with the advantage that the run began with"
            )
        if self._value is not None:
            self._value.load_state_dict(state["value"]["head"])
            self._value.optimizer.load_state_dict(state["value"]["optimizer"])
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
        computed = self._with_gradient(rows, objective)
        sums = Sums()
        norm = 0.0
        if computed:
            optimizer.zero_grad(set_to_none=True)
            if self._value is not None:
                self._value.optimizer.zero_grad(set_to_none=True)
            self._gradient(computed, objective, sums)
            # A limit of infinity clips nothing.
            limit = self._trainer.grad_clip or float("inf")
            norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
            if np.isfinite(norm):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
                if self._value is not None:
                    self._value.optimizer.step()
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
        with self._casting():  # one context for all micro-batches: weights are cast once
            for micro_batch in self._packed(contexts, self._forward):
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

    def _packed(self, contexts: Sequence[np.ndarray], forward: Forward) -> list[MicroBatch]:
        budget = self._trainer.tokens_per_micro_batch
        packed = pack(contexts, budget)
        if any(bundle.trunk for batch in packed for bundle in batch.bundles) and not forward.shares_prefixes:
            packed = pack(contexts, budget, min_trunk=None)
        return packed

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
            losses = objective.token_losses(leaf, targets.behaviour, targets.advantages, targets.columns)
            (slope,) = torch.autograd.grad((targets.weights * losses).sum(), leaf)
        with torch.no_grad(), self._uncast():
            # d log p(label) / d logits = (onehot(label) - p) / temperature
            slope = slope / self._temperature
            of_state = torch.zeros_like(total).index_add_(0, targets.which, slope)
            if objective.entropy_coefficient:
                # d H / d logits = -p (log p + H) / temperature
                bonus = objective.entropy_coefficient / self._temperature
                of_entropy = torch.zeros_like(total).index_add_(0, targets.which, bonus * targets.weights)
                scores += (entropy - total.log())[:, None]
                scores *= of_entropy[:, None]
                scores -= of_state[:, None]
                gradient = probabilities.div_(total[:, None]).mul_(scores)
                losses = losses - objective.entropy_coefficient * entropy[targets.which]
            else:
                gradient = probabilities.mul_((-of_state / total)[:, None])
            gradient.index_put_((targets.which, targets.labels), slope, accumulate=True)
            logits.backward(gradient.to(logits.dtype))
        sums.add(objective, targets, logprobs, losses.detach(), entropy[targets.which])
        assert states.grad is not None
        if objective.value_coefficient is not None:
            assert self._value is not None
            assert targets.values is not None
            assert targets.returns is not None
            with self._uncast():
                of_values, value_loss = self._value.learn(
                    states, targets.which, targets.returns, targets.values, targets.weights, objective.value_clip
                )
            sums.value_loss += value_loss
            states.grad.add_(of_values, alpha=objective.value_coefficient)
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
    columns: Columns = NO_COLUMNS
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[Row], which: np.ndarray, states: torch.Tensor) -> Targets:
        """The trained tokens of `rows`, one row after the other, whose states are `which`."""
        order = np.argsort(which, kind="stable")
        wide = torch.promote_types(states.dtype, torch.float32)

        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            values = np.concatenate([getattr(row, name)[row.trained] for row in rows])[order]
            return torch.from_numpy(values).to(states.device, dtype)

        def further(name: str) -> torch.Tensor | None:
            if not all(name in row.columns for row in rows):
                return None
            values = np.concatenate([row.columns[name][row.trained] for row in rows])[order]
            return torch.from_numpy(values).to(states.device, wide)

        return cls(
            torch.from_numpy(which[order]).to(states.device),
            column("tokens", torch.int64),
            column("logprobs", wide),
            column("advantages", wide),
            column("weights", wide),
            Columns(**{one.name: further(one.name) for one in fields(Columns)}),
            further("values"),
            further("returns"),
        )

    def part(self, start: int, stop: int) -> Targets:
        """Those of the states start … stop - 1."""
        first, last = torch.searchsorted(self.which, self.which.new_tensor([start, stop])).tolist()
        here = slice(first, last)

        def cut(column: torch.Tensor | None) -> torch.Tensor | None:
            return None if column is None else column[here]

        return Targets(
            self.which[here] - start,
            self.labels[here],
            self.behaviour[here],
            self.advantages[here],
            self.weights[here],
            Columns(**{one.name: cut(getattr(self.columns, one.name)) for one in fields(Columns)}),
            cut(self.values),
            cut(self.returns),
        )


def _write(row: Row, name: str, values: np.ndarray) -> None:
    """Give the row's trained tokens the values of a column."""
    column = np.zeros(len(row.tokens), np.float32)
    column[row.trained] = values
    row.columns[name] = column


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
        self.value_loss = 0.0
        self._loss = 0.0
        self._weight = 0.0
        self._weighted: dict[str, float] = {}
        self._plain: dict[str, float] = {}
        self._ratio_max = 0.0
        self._ratio_min = float("inf")

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
            low, high = objective.clipped(logprobs, behaviour, advantages, targets.columns)
            weighted |= {
                "kl/k1": kl_k1(logprobs, behaviour),
                "kl/k3": kl_k3(logprobs, behaviour),
                "ratio/mean": ratio,
                "ratio/square": ratio.square(),
            }
            if targets.columns.reference is not None:
                weighted["kl/reference"] = kl_estimate(logprobs, targets.columns.reference, objective.kl_estimator)
            plain = {"clip/low": low, "clip/high": high, "logprob_gap": (logprobs - behaviour).abs()}
            coefficient = objective.coefficient(logprobs, behaviour, targets.columns)
            if coefficient is not None:
                plain |= {"correction/mean": coefficient, "correction/zero": coefficient == 0}
            keep = objective.kept(logprobs, behaviour, targets.columns)
            if keep is not None:
                plain["rejected"] = ~keep
            if objective.dual_clip:
                plain["clip/dual"] = (advantages < 0) & (ratio > objective.dual_clip)
            for name, values in plain.items():
                self._plain[name] = self._plain.get(name, 0.0) + float(values.sum())
            self._ratio_max = max(self._ratio_max, float(ratio.max()))
            self._ratio_min = min(self._ratio_min, float(ratio.min()))
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
                found |= {"ratio/max": self._ratio_max, "ratio/min": self._ratio_min}
                found["ratio/std"] = max(0.0, found.pop("ratio/square") - found["ratio/mean"] ** 2) ** 0.5
            if objective.value_coefficient is not None:
                found["value/loss"] = self.value_loss
        return found


def objective_of(algorithm: config.Algorithm, loss: TokenLoss | None = None) -> Objective:
    """The objective that a run file's section [algorithm] describes; `loss` is the function that it names."""
    if (loss is None) != (algorithm.loss in config.LOSSES):
        raise ValueError(f"algorithm.loss: {algorithm.loss!r} and the function given do not belong together")
    return Objective(
        algorithm.loss,
        algorithm.clip_low,
        algorithm.clip_high,
        correction_cap=algorithm.correction_cap if algorithm.correction != "none" else None,
        correction=algorithm.correction if algorithm.correction != "none" else "tis",
        correction_level=algorithm.correction_level,
        correction_floor=algorithm.correction_floor,
        rejection=algorithm.rejection,
        rejection_low=algorithm.rejection_low,
        rejection_high=algorithm.rejection_high,
        dual_clip=algorithm.dual_clip,
        ratio_cap=algorithm.ratio_cap,
        kl_coefficient=algorithm.kl_coefficient if algorithm.kl_in == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        entropy_coefficient=algorithm.entropy_coefficient,
        value_coefficient=algorithm.value_coefficient if algorithm.advantage == "gae" else None,
        value_clip=algorithm.value_clip,
        function=loss,
    )


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
