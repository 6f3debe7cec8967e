"""Coefficients for tokens that another policy sampled than the one that learns from them.

A coefficient multiplies a token's loss and carries no gradient. It scales or zeroes that one term; the weights with which
the tokens of an update are summed stay what they are, so that leaving tokens out never makes others count more.

The ratio ρ = π / μ is that of the learning policy to the one sampled from, at one of three levels: of the *token*; of
its *sequence* (the product over the trained tokens of its row); *geometric*, the sequence's product to the power of one
over its length. Everything works on log-ratios in natural logarithm.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

Correction = Literal["tis", "mis", "icepop"]
Level = Literal["token", "sequence", "geometric"]


def truncated_importance(logprobs: torch.Tensor, behaviour: torch.Tensor, cap: float) -> torch.Tensor:
    """[T] weights min(π(a|s) / μ(a|s), cap), without gradient; π is the current policy, μ the one sampled from.

    Token-level truncated importance sampling: Ionides, "Truncated Importance Sampling" (2008), used per token
    as in "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al. 2025).
    Multiplied with ∇ log π it is the policy gradient's importance correction, bounded in variance.
    """
    return truncated(logprobs - behaviour, cap)


def truncated(log_ratio: torch.Tensor, cap: float) -> torch.Tensor:
    """[T] coefficients min(ρ, cap): truncated importance sampling (TIS) of ratios of whatever level."""
    return log_ratio.detach().exp().clamp(max=cap)


def masked(log_ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """[T] coefficients ρ where low ≤ ρ ≤ high, else 0.

    With low = 0 this is masked importance sampling (MIS; Liu et al. 2025, "When Speed Kills Stability: Demystifying RL
    Collapse from the Training-Inference Mismatch"); with both bounds, per token, it is IcePop (Ling team 2025, "Every
    Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model", arXiv 2510.18855).
    """
    ratio = log_ratio.detach().exp()
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


def kept(log_ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """bool [T]: low ≤ ρ ≤ high, a pure mask. With geometric ratios: Geo-RS, "When Speed Kills Stability" (ibid.)."""
    ratio = log_ratio.detach().exp()
    return (ratio >= low) & (ratio <= high)


def coefficients(log_ratio: torch.Tensor, correction: Correction, cap: float, floor: float) -> torch.Tensor:
    """[T] coefficients of a correction by its name; `floor` is icepop's lower bound."""
    if correction == "tis":
        return truncated(log_ratio, cap)
    return masked(log_ratio, floor if correction == "icepop" else 0.0, cap)


def at_level(log_ratio: np.ndarray, level: Level) -> np.ndarray:
    """[L] → [L]: the log-ratios of one sequence's tokens at a level, summed in float64."""
    if level == "token":
        return log_ratio
    total = float(np.sum(log_ratio, dtype=np.float64))
    if level == "geometric" and len(log_ratio):
        total /= len(log_ratio)
    return np.full(len(log_ratio), total, np.float64)
