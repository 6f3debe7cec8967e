"""The loss of a sampled token, and what the importance ratios say about an update.

Every function works on flat tensors over sampled tokens, [T]; how tokens are weighed against each other is not its
concern: the loss of a batch is Σ w·ℓ with the weights that the batch brings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from longrein.learning.correction import truncated_importance


@dataclass(frozen=True)
class Objective:
    """Which loss a token has. Fields as in the run file's section [algorithm]."""

    loss: Literal["ppo_clip", "reinforce", "cross_entropy"]
    clip_low: float = 0.2
    clip_high: float = 0.28
    correction_cap: float | None = None
    """Largest truncated importance weight; None leaves tokens uncorrected."""

    @property
    def zero_without_advantage(self) -> bool:
        """Whether a token with advantage 0 contributes exactly nothing to loss and gradient."""
        return self.loss != "cross_entropy"

    def token_losses(self, logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """[T] losses from the current policy's log-probabilities, those sampled with, and the advantages.

        With a correction cap the tokens' policy is taken to have been an older one: the importance ratio to it is the
        truncated weight, and the clipped ratio is to the policy that the update starts from, which is 1 since each
        token takes part in one update. Clipping and correcting the same ratio would count it twice.
        """
        if self.loss == "cross_entropy":
            return -logprobs
        if self.correction_cap is not None:
            return truncated_importance(logprobs, behaviour, self.correction_cap) * reinforce(logprobs, advantages)
        if self.loss == "reinforce":
            return reinforce(logprobs, advantages)
        return ppo_clip(logprobs, behaviour, advantages, self.clip_low, self.clip_high)


def ppo_clip(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """[T] losses -min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A), ρ = exp(logprobs - behaviour).

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7, with separate bounds below and above ("clip-higher", DAPO, arXiv
    2503.14476, eq. 10).
    """
    ratio = (logprobs - behaviour).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def reinforce(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """[T] losses -A log π, whose gradient is the score-function estimator (Williams 1992)."""
    return -advantages * logprobs


@torch.no_grad()
def clipped(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] masks of the tokens whose `ppo_clip` gradient is cut off: below (A < 0) and above (A > 0)."""
    ratio = (logprobs - behaviour).exp()
    return (advantages < 0) & (ratio < 1 - clip_low), (advantages > 0) & (ratio > 1 + clip_high)


@torch.no_grad()
def kl_k1(logprobs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """[T] estimates of KL(behaviour ‖ current): log μ - log π, unbiased (Schulman 2020, "Approximating KL", k1)."""
    return behaviour - logprobs


@torch.no_grad()
def kl_k3(logprobs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """[T] estimates of KL(behaviour ‖ current): (ρ - 1) - log ρ, unbiased and never negative (ibid., k3)."""
    log_ratio = logprobs - behaviour
    return log_ratio.expm1() - log_ratio
