"""How an update's tokens are weighed against each other: Σ w·ℓ over all trained tokens is the loss.

R is the number of rollouts of the update with a trainable token, zero advantage included; L_ρ the trainable sampled tokens
of rollout ρ, before any correction mask or clipping; a *sequence* is the trained tokens of one row (one context that the
model ended in). Weights are fixed before a batch is cut into micro-batches and nothing is divided again. All of it is
float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Normaliser = Literal["rollout", "token", "sequence", "constant"]


def token_weights(
    lengths: Sequence[int], rollouts: Sequence[int], normaliser: Normaliser = "rollout", constant: int = 0
) -> np.ndarray:
    """float64 [S]: the weight of each trained token of the S rows of an update.

    `lengths` are the rows' trained tokens and `rollouts` a number for the rollout that each row belongs to. A row
    without a trained token has weight 0 and does not count; a rollout of such rows alone counts in no R.

    rollout: 1 / (R · L_ρ), every rollout is one vote: arXiv 2608.17528, Eq. 16.
    token: 1 / Σ_ρ L_ρ, every token is: DAPO (arXiv 2503.14476), Eq. 12.
    sequence: 1 / (S · L_s), every sequence is: GRPO (arXiv 2402.03300), Eq. 3, over all sequences of the update.
    constant: 1 / (R · `constant`), so that a rollout weighs as much as it is long: Dr. GRPO (arXiv 2503.20783). The weights do not sum to 1.

    Raises ValueError for `constant` without a length of at least 1.
    """
    counts = np.asarray(lengths, np.int64)
    owners = np.asarray(rollouts, np.int64)
    trained = counts > 0
    weights = np.zeros(len(counts), np.float64)
    if not trained.any():
        return weights
    votes = len(np.unique(owners[trained]))
    if normaliser == "rollout":
        _, place = np.unique(owners, return_inverse=True)
        weights[trained] = 1.0 / (votes * np.bincount(place, counts)[place][trained])
    elif normaliser == "token":
        weights[trained] = 1.0 / counts.sum()
    elif normaliser == "sequence":
        weights[trained] = 1.0 / (trained.sum() * counts[trained])
    else:
        if constant < 1:
            raise ValueError(f"the constant normaliser needs a length of at least 1 token, not {constant}")
        weights[trained] = 1.0 / (votes * constant)
    return weights
