"""Estimates of a divergence from log-probabilities of sampled tokens (Schulman 2020, "Approximating KL Divergence").

All of them estimate KL(π ‖ π_ref) from tokens that π sampled. With r = π_ref / π:

k1 = -log r: unbiased, of large variance, and either sign. Its gradient has expectation 0, so that in the loss it is
noise; in the reward it is the right thing.
k2 = ½ (log r)²: biased, but its gradient is that of the divergence: the right thing in the loss.
k3 = (r - 1) - log r: unbiased and never negative; its gradient is that of the *other* divergence, KL(π_ref ‖ π). GRPO
(arXiv 2402.03300), Eq. 4, puts it in the loss.
"""

from __future__ import annotations

from typing import Literal

import torch

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """[T] estimates of KL(π ‖ π_ref), with the gradient of their formula; `logprobs` are π's, `reference` π_ref's."""
    log_ratio = reference - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return log_ratio.expm1() - log_ratio
