"""Weights for tokens that another policy sampled than the one that learns from them."""

from __future__ import annotations

import torch


def truncated_importance(logprobs: torch.Tensor, behaviour: torch.Tensor, cap: float) -> torch.Tensor:
    """[T] weights min(π(a|s) / μ(a|s), cap), without gradient; π is the current policy, μ the one sampled from.

    Token-level truncated importance sampling: Ionides, "Truncated Importance Sampling" (2008), used per token
    as in "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (Yao et al. 2025).
    Multiplied with ∇ log π it is the policy gradient's importance correction, bounded in variance.
    """
    return (logprobs - behaviour).detach().exp().clamp(max=cap)
