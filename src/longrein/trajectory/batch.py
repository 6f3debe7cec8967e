"""From finished rollouts to what the learner is given: weighted rows, and a ledger of every sampled token.

A row is one context that the model ended in (a leaf of the rollout's tree). Rows of a rollout overlap; each sampled
token is trained in exactly one of them, the first that holds it. A token's weight is w = 1 / (R · L_ρ), with R the
rollouts of the update that have a trainable token (zero advantage included) and L_ρ that rollout's trainable tokens:
Eq. 16 of arXiv 2608.17528, `L = (1/R) Σ_ρ [ Σ_j Σ_t ℓ_{ρ,j,t} / Σ_j L_{ρ,j} ]`. It is fixed here, before the batch is
cut into micro-batches, and never divided again, so a batch's weights sum to 1. Other normalisers are in
`learning.normalise`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from longrein.learning.normalise import Normaliser, token_weights
from longrein.records import Call, CallKind, Outcome
from longrein.trajectory.kinds import TRAINED_KINDS, Reason, unsupervised, untrained
from longrein.trajectory.tree import Node, build_tree


@dataclass(frozen=True)
class Row:
    """One leaf context of a rollout, T tokens long."""

    rollout_id: str
    group_id: str
    tokens: np.ndarray
    """int32 [T]"""
    trained: np.ndarray
    """bool [T]: sampled, and in the loss in this row."""
    logprobs: np.ndarray
    """float32 [T]: natural-log probability under the distribution sampled from; 0 where not trained."""
    versions: np.ndarray
    """int32 [T]: policy version that sampled the token; -1 where not trained or not known."""
    advantages: np.ndarray
    """float32 [T]: 0 where not trained."""
    weights: np.ndarray
    """float64 [T]: 1 / (R · L_ρ) where trained, else 0."""
    calls: np.ndarray | None = None
    """int32 [T]: number of the call that sampled the token; -1 where not trained."""
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    """Further numbers of the tokens, [T] each, by name: what an algorithm asked the learner to compute (`proximal`,
    `reference`, `values`) or to learn (`returns`)."""


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that reached its end, with the calls of the attempt that counts."""

    rollout_id: str
    group_id: str
    is_train: bool
    reward: float | None
    """None: never graded."""
    calls: Sequence[Call]
    outcome: Outcome | None = None
    """How the attempt ended; None when it is not known."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers of the grader."""
    call_rewards: dict[int, float] = field(default_factory=dict)
    """Process rewards of the grader, by the call's number."""


@dataclass
class Ledger:
    """Where sampled tokens went. `sampled` is always `trained` plus the sum of `untrained`."""

    trained: int = 0
    untrained: dict[Reason, int] = field(default_factory=dict)

    @property
    def sampled(self) -> int:
        return self.trained + sum(self.untrained.values())

    def leave_out(self, calls: Iterable[Call], reason: Reason) -> None:
        """Count all tokens of `calls` as not trained."""
        tokens = sum(call.sampled_count for call in calls)
        if tokens:
            self.untrained[reason] = self.untrained.get(reason, 0) + tokens

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(self.trained + other.trained, dict(Counter(self.untrained) + Counter(other.untrained)))

    def metrics(self) -> dict[str, float]:
        """`tokens/sampled`, `tokens/trained` and `tokens/untrained/REASON`."""
        by_reason = {f"tokens/untrained/{reason}": float(count) for reason, count in self.untrained.items()}
        return {"tokens/sampled": float(self.sampled), "tokens/trained": float(self.trained), **by_reason}


@dataclass(frozen=True)
class Batch:
    """The rows of one optimizer update and the ledger of the rollouts they were made from."""

    rows: list[Row]
    ledger: Ledger


def make_batch(
    rollouts: Sequence[FinishedRollout],
    advantages: Mapping[str, float],
    kinds: Collection[CallKind] = TRAINED_KINDS,
    normaliser: Normaliser = "rollout",
    constant: int = 0,
) -> Batch:
    """The rows of one policy-gradient update, of the calls of these kinds.

    `advantages` maps a rollout's id to its advantage; a rollout that is not in it belongs to a dropped group. The rows
    stand in the order of the rollouts, a rollout's in the order of the calls that they end with.
    """
    ledger = Ledger()
    chosen: list[tuple[FinishedRollout, float, list[Call]]] = []
    for rollout in rollouts:
        reason = left_out(rollout)
        if reason is None and rollout.rollout_id not in advantages:
            reason = "group dropped"
        if reason is not None:
            ledger.leave_out(rollout.calls, reason)
            continue
        calls = _choose(rollout.calls, lambda call: untrained(call, kinds), ledger)
        if calls:
            chosen.append((rollout, advantages[rollout.rollout_id], calls))
    return _weighted(chosen, ledger, normaliser, constant)


def make_demonstrations(rollouts: Sequence[FinishedRollout], kinds: Collection[CallKind] = TRAINED_KINDS) -> Batch:
    """The rows of one supervised step, with the same weights and advantage 1.

    Calls need no log-probabilities here (a row's are 0 where they are not known).
    """
    ledger = Ledger()
    chosen: list[tuple[FinishedRollout, float, list[Call]]] = []
    for rollout in rollouts:
        reason = left_out(rollout)
        if reason is not None:
            ledger.leave_out(rollout.calls, reason)
            continue
        calls = _choose(rollout.calls, lambda call: unsupervised(call, kinds), ledger)
        if calls:
            chosen.append((rollout, 1.0, calls))
    return _weighted(chosen, ledger)


def left_out(rollout: FinishedRollout) -> Reason | None:
    """Why a whole rollout is not learned from; None when it is."""
    if not rollout.is_train:
        return "evaluation"
    if rollout.outcome is Outcome.infrastructure_failed:
        return "failed rollout"
    if rollout.reward is None:
        return "no reward"
    return None


def _choose(calls: Sequence[Call], excluded: Callable[[Call], Reason | None], ledger: Ledger) -> list[Call]:
    """The calls with sampled tokens that are learned from; the ledger counts both kinds."""
    chosen = []
    for call in calls:
        reason = excluded(call)
        if reason is not None:
            ledger.leave_out([call], reason)
        elif call.sampled:
            chosen.append(call)
            ledger.trained += len(call.sampled)
    return chosen


def _weighted(
    chosen: Sequence[tuple[FinishedRollout, float, list[Call]]],
    ledger: Ledger,
    normaliser: Normaliser = "rollout",
    constant: int = 0,
) -> Batch:
    rows: list[Row] = []
    owners: list[int] = []
    for number, (rollout, advantage, calls) in enumerate(chosen):
        try:
            rows.extend(_rows(rollout, advantage, calls))
        except ValueError as error:
            raise ValueError(f"rollout {rollout.rollout_id}: {error}") from error
        owners += [number] * (len(rows) - len(owners))
    weights = token_weights([int(row.trained.sum()) for row in rows], owners, normaliser, constant)
    for row, weight in zip(rows, weights, strict=True):
        row.weights[row.trained] = weight
    return Batch(rows, ledger)


def _rows(rollout: FinishedRollout, advantage: float, calls: Sequence[Call]) -> list[Row]:
    tree = build_tree(rollout.calls)
    samples = {call.number: _sample(call) for call in calls}
    claimed: set[int] = set()
    rows = []
    for leaf in tree.leaves(samples):
        row = _empty_row(rollout, tree.tokens(leaf.path))
        for index in leaf.path:
            node = tree.nodes[index]
            if node.call in samples and index not in claimed:
                claimed.add(index)
                _fill(row, node, *samples[node.call])
        row.advantages[row.trained] = advantage
        rows.append(row)
    return rows


def _empty_row(rollout: FinishedRollout, tokens: np.ndarray) -> Row:
    length = len(tokens)
    return Row(
        rollout.rollout_id,
        rollout.group_id,
        tokens,
        np.zeros(length, bool),
        np.zeros(length, np.float32),
        np.full(length, -1, np.int32),
        np.zeros(length, np.float32),
        np.zeros(length, np.float64),
        np.full(length, -1, np.int32),
    )


def _fill(row: Row, node: Node, logprobs: np.ndarray, versions: np.ndarray) -> None:
    here, there = slice(node.start, node.end), slice(node.offset, node.offset + len(node.tokens))
    row.trained[here] = True
    row.logprobs[here] = logprobs[there]
    row.versions[here] = versions[there]
    assert row.calls is not None
    row.calls[here] = -1 if node.call is None else node.call


def _sample(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities (float32) and versions (int32) of a call's sampled tokens; 0 and -1 where not known."""
    if not call.prompt_length:
        raise ValueError(f"call {call.number} has an empty prompt: its first token has no context to learn it in")
    logprobs = np.zeros(len(call.sampled), np.float32)
    if call.logprobs is not None:
        logprobs[:] = call.logprobs
    return logprobs, token_versions(call) if call.versions else np.full(len(call.sampled), -1, np.int32)


def token_versions(call: Call) -> np.ndarray:
    """int32: the policy version of each sampled token, from the call's run lengths."""
    versions = np.repeat(
        np.asarray([version for version, _ in call.versions], np.int32), [count for _, count in call.versions]
    )
    if len(versions) != len(call.sampled):
        raise ValueError(
            f"call {call.number}: versions name {len(versions)} tokens and {len(call.sampled)} were sampled"
        )
    return versions
