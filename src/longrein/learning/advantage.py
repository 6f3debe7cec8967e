"""Advantages of rollouts, of their calls and of their tokens.

A group is all rollouts of one task in a step. Statistics are over *rollouts*: a rollout that was recorded as three rows
counts as much as one with a single row. All of it is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: From the rewards of one group's rollouts to their advantages, in the same order.
GroupMethod = Callable[[np.ndarray], np.ndarray]

#: Added to GRPO's standard deviation, so that nearly equal rewards are not divided by nothing.
EPSILON = 1e-6


@dataclass(frozen=True)
class Advantages:
    """Advantages by rollout id, and the groups from which nothing relative can be learned."""

    values: dict[str, float]
    zero_variance: tuple[str, ...]
    """Groups whose rewards are all equal, in order of first appearance."""


def group_advantages(rewards: Mapping[str, float], groups: Mapping[str, str], method: str | GroupMethod) -> Advantages:
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


def rollout_advantages(rewards: Sequence[float], method: str | GroupMethod) -> np.ndarray:
    """float64 [G]: the advantages of one group's rollouts, whose rewards are given in the same order.

    `method` is a name of `METHODS` or a function of one's own. Raises ValueError for a reward that is not finite, and
    for a function that gives anything but one finite advantage a rollout.
    """
    group = np.asarray(rewards, np.float64)
    odd = group[~np.isfinite(group)]
    if len(odd):
        raise ValueError(f"reward {odd[0]} is not a finite number")
    if isinstance(method, str):
        return METHODS[method](group)
    found = np.asarray(method(group.copy()), np.float64)
    if found.shape != group.shape or not np.isfinite(found).all():
        name = getattr(method, "__qualname__", repr(method))
        raise ValueError(f"{name} gave {found!r:.200} for {len(group)} rewards, expected as many finite advantages")
    return found


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


def centred(rewards: np.ndarray) -> np.ndarray:
    """[G] → [G]: r - mean(r); a group of one keeps its reward. The first half of REINFORCE++'s baseline form.

    REINFORCE++ (arXiv 2501.03262), the baseline variant; `whiten` over the whole update is its second half.
    """
    return _centred(rewards) if len(rewards) > 1 else rewards.copy()


def _centred(rewards: np.ndarray) -> np.ndarray:
    """Rewards less their mean; exactly 0 when all are equal, whatever the mean was rounded to."""
    return rewards - rewards.mean() if np.ptp(rewards) else np.zeros_like(rewards)


METHODS: dict[str, GroupMethod] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce++_baseline": centred,
}


def process_advantages(
    rewards: Sequence[Mapping[int, float]], calls: Sequence[Sequence[int]], method: str | GroupMethod, discount: float
) -> list[dict[int, float]]:
    """The advantage of each call from the process rewards of one group's rollouts.

    For each rollout, `rewards` maps a call's number to its process reward and `calls` are the numbers of its trained
    calls. The rewards of all steps of the group are normalised together by `method` and summed backwards: call c has
    Σ_{c' ≥ c} discount^(c' - c) r̃_{c'}, counted over the calls that are trained or rewarded, in the order of their
    numbers: what a call that is not trained was rewarded with is credited to the trained calls before it.

    DeepSeekMath (arXiv 2402.03300), section 4.1.3 (there discount = 1 and method grpo). With rloo a step's baseline is
    the mean over the *other* steps.
    """
    flat = [(index, number) for index, steps in enumerate(rewards) for number in sorted(steps)]
    if not flat:
        return [dict.fromkeys(numbers, 0.0) for numbers in calls]
    normalised = rollout_advantages([rewards[index][number] for index, number in flat], method)
    by_rollout: list[dict[int, float]] = [{} for _ in rewards]
    for (index, number), value in zip(flat, normalised.tolist(), strict=True):
        by_rollout[index][number] = value
    found = []
    for steps, numbers in zip(by_rollout, calls, strict=True):
        places = sorted({*numbers, *steps}, reverse=True)
        total = 0.0
        values: dict[int, float] = {}
        for number in places:
            total = steps.get(number, 0.0) + discount * total
            values[number] = total
        found.append({number: values[number] for number in numbers})
    return found


def returns(rewards: np.ndarray, discount: float) -> np.ndarray:
    """[T] → [T]: G_t = r_t + discount · G_{t+1}, over the trained tokens of one rollout in their order.

    What REINFORCE++ (arXiv 2501.03262) whitens over the update. Tokens that the policy did not sample are no steps.
    """
    found = np.zeros(len(rewards), np.float64)
    running = 0.0
    for step in range(len(rewards) - 1, -1, -1):
        running = float(rewards[step]) + discount * running
        found[step] = running
    return found


def gae(rewards: np.ndarray, values: np.ndarray, discount: float, decay: float) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantages [T] and the returns [T] that the value head learns, of one rollout's trained tokens.

    Schulman et al. 2016 (arXiv 1506.02438), eq. 16: A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} - V_t, with V = 0
    behind the last token; γ is `discount`, λ `decay`. The returns are A + V. Tokens that the policy did not sample are
    no steps: the next value is that of the next sampled token.
    """
    found = np.zeros(len(rewards), np.float64)
    values = np.asarray(values, np.float64)
    following, running = 0.0, 0.0
    for step in range(len(rewards) - 1, -1, -1):
        difference = float(rewards[step]) + discount * following - values[step]
        running = difference + discount * decay * running
        found[step] = running
        following = values[step]
    return found, found + values


def whiten(values: np.ndarray, votes: np.ndarray | None = None, count: int | None = None) -> np.ndarray:
    """[N] → [N]: (x - mean) / sqrt(var + 1e-8), var with the divisor of a sample (count - 1).

    `votes` weigh the values (None: equally) and `count` is how many independent ones they are (None: N): with votes of
    1/L_ρ for the tokens of a rollout and the number of rollouts as count, a rollout is one vote. REINFORCE++ (arXiv
    2501.03262) normalises over the whole batch instead of the group. Equal values, and a single one, become 0.
    """
    if len(values) == 0 or not np.ptp(values):
        return np.zeros(len(values), np.float64)
    shares = np.full(len(values), 1.0) if votes is None else np.asarray(votes, np.float64)
    shares = shares / shares.sum()
    count = len(values) if count is None else count
    centred_values = values - np.dot(shares, values)
    variance = np.dot(shares, centred_values**2) * (count / (count - 1) if count > 1 else 1.0)
    return centred_values / np.sqrt(variance + 1e-8)
