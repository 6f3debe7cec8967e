"""Advantages of rollouts within their groups.

A group is all rollouts of one task in a step. Statistics are over *rollouts*: a rollout that was recorded as three rows
counts as much as one with a single row. All of it is float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Method = Literal["grpo", "dr_grpo", "rloo", "reinforce"]

#: Added to GRPO's standard deviation, so that nearly equal rewards are not divided by nothing.
EPSILON = 1e-6


@dataclass(frozen=True)
class Advantages:
    """Advantages by rollout id, and the groups from which nothing relative can be learned."""

    values: dict[str, float]
    zero_variance: tuple[str, ...]
    """Groups whose rewards are all equal, in order of first appearance."""


def group_advantages(rewards: Mapping[str, float], groups: Mapping[str, str], method: Method) -> Advantages:
    """The advantage of every rollout in `rewards` among the rollouts of its group.

    `groups` maps a rollout's id to its group's. Raises ValueError for a reward that is not finite.
    """
    members: dict[str, list[str]] = {}
    for rollout_id in rewards:
        members.setdefault(groups[rollout_id], []).append(rollout_id)
    values: dict[str, float] = {}
    zero_variance = []
    for group_id, rollout_ids in members.items():
        group = [rewards[rollout_id] for rollout_id in rollout_ids]
        if len(set(group)) == 1:
            zero_variance.append(group_id)
        values.update(zip(rollout_ids, rollout_advantages(group, method).tolist(), strict=True))
    return Advantages(values, tuple(zero_variance))


def rollout_advantages(rewards: Sequence[float], method: Method) -> np.ndarray:
    """float64 [G]: the advantages of one group's rollouts, whose rewards are given in the same order.

    Raises ValueError for a reward that is not finite.
    """
    group = np.asarray(rewards, np.float64)
    odd = group[~np.isfinite(group)]
    if len(odd):
        raise ValueError(f"reward {odd[0]} is not a finite number")
    return _METHODS[method](group)


def grpo(rewards: np.ndarray) -> np.ndarray:
    """[G] → [G]: (r - mean(r)) / (std(r) + 1e-6), std being the sample standard deviation (divisor G - 1).

    DeepSeekMath (arXiv 2402.03300), section 4.1.2: the normalised reward of outcome supervision. The paper leaves the
    divisor open; G - 1 is what the implementations in use take. A group of one has advantage 0.
    """
    if len(rewards) < 2:
        return np.zeros_like(rewards)
    return _centred(rewards) / (rewards.std(ddof=1) + EPSILON)


def dr_grpo(rewards: np.ndarray) -> np.ndarray:
    """[G] → [G]: r - mean(r), without the division that favours tasks with little variance.

    The advantage of Dr. GRPO, "Understanding R1-Zero-Like Training" (arXiv 2503.20783). That paper also drops the
    division by a reply's length; how tokens are weighed is the batch's matter here, not the advantage's.
    """
    return _centred(rewards)


def rloo(rewards: np.ndarray) -> np.ndarray:
    """[G] → [G]: r_i less the mean of the *other* rewards, an unbiased baseline.

    REINFORCE leave-one-out, "Back to Basics" (arXiv 2402.14740). A group of one has no others: its baseline
    is 0.
    """
    count = len(rewards)
    if count < 2:
        return rewards.copy()
    return _centred(rewards) * (count / (count - 1))


def reinforce(rewards: np.ndarray) -> np.ndarray:
    """[G] → [G]: the rewards themselves, no baseline (Williams 1992)."""
    return rewards.copy()


def _centred(rewards: np.ndarray) -> np.ndarray:
    """Rewards less their mean; exactly 0 when all are equal, whatever the mean was rounded to."""
    return rewards - rewards.mean() if np.ptp(rewards) else np.zeros_like(rewards)


_METHODS = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce": reinforce}
