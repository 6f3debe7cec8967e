"""The loss of a sampled token, and what the importance ratios say about an update.

Every function works on flat tensors over sampled tokens, [T]; how tokens are weighed against each other is not its
concern: the loss of a batch is Σ w·ℓ with the weights that the batch brings (`normalise`). r is the importance ratio of
the current policy to an anchor: the policy sampled from, or the one that the step began with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from longrein.learning.correction import Correction, Level, coefficients, kept
from longrein.learning.kl import Estimator, kl_estimate

#: A loss of one's own: (logprobs, anchor, advantages, objective) → [T] losses; the gradient is that to logprobs.
TokenLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Objective"], torch.Tensor]


@dataclass(frozen=True)
class Columns:
    """What some objectives need of a token beside its log-probabilities and advantage; [T] each, without gradient."""

    proximal: torch.Tensor | None = None
    """Log-probabilities under the policy that the step began with; without them the anchor is the one sampled from."""
    reference: torch.Tensor | None = None
    """Log-probabilities under the reference policy."""
    sequence_log_ratio: torch.Tensor | None = None
    """Mean of log r over the token's sequence, under the policy before this update (gspo)."""
    correction_log_ratio: torch.Tensor | None = None
    """Log-ratio that the correction looks at, where it is not the token's own."""
    rejection_log_ratio: torch.Tensor | None = None
    """Log-ratio that the rejection looks at, where it is not the token's own."""


NO_COLUMNS = Columns()


@dataclass(frozen=True)
class Objective:
    """Which loss a token has. Fields as in the run file's section [algorithm]."""

    loss: str
    """ppo_clip, reinforce, gspo, cispo, dppo_tv, cross_entropy, or the name of `function`."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    correction_cap: float | None = None
    """Largest importance ratio of the correction; None leaves tokens uncorrected."""
    correction: Correction = "tis"
    correction_level: Level = "token"
    correction_floor: float = 0.0
    rejection: Literal["none", "token", "sequence", "geometric"] = "none"
    rejection_low: float = 0.5
    rejection_high: float = 2.0
    dual_clip: float = 0.0
    ratio_cap: float = 20.0
    kl_coefficient: float = 0.0
    """Weight of the divergence from the reference in the loss."""
    kl_estimator: Estimator = "k3"
    entropy_coefficient: float = 0.0
    value_coefficient: float | None = None
    """Share of the value loss's gradient that reaches the model; None: there is no value head."""
    value_clip: float = 0.0
    function: TokenLoss | None = field(default=None, compare=False)

    @property
    def zero_without_advantage(self) -> bool:
        """Whether a token with advantage 0 contributes exactly nothing to loss and gradient."""
        return (
            self.loss != "cross_entropy"
            and self.function is None
            and not self.kl_coefficient
            and not self.entropy_coefficient
            and self.value_coefficient is None
        )

    @property
    def looks_at_sequences(self) -> bool:
        """Whether a token's loss depends on the present log-probabilities of its whole sequence."""
        corrects = self.correction_cap is not None and self.correction_level != "token"
        return self.loss == "gspo" or corrects or self.rejection in ("sequence", "geometric")

    def token_losses(
        self,
        logprobs: torch.Tensor,
        behaviour: torch.Tensor,
        advantages: torch.Tensor,
        columns: Columns = NO_COLUMNS,
    ) -> torch.Tensor:
        """[T] losses from the current policy's log-probabilities, those sampled with, and the advantages.

        With a correction and no proximal log-probabilities the tokens' policy is taken to have been an older one: the
        importance ratio to it is the correction's coefficient, and the clipped ratio is to the policy that the update
        starts from, which is 1 since each token takes part in one update. Clipping and correcting the same ratio would
        count it twice. With proximal log-probabilities the two ratios are of different policies, and both are there:
        the decoupled objective of Hilton et al. 2021 (arXiv 2110.00641). What is corrected or rejected is the policy's term;
        the divergence from the reference is added to every token.
        """
        if self.loss == "cross_entropy":
            return -logprobs
        keep = self.kept(logprobs, behaviour, columns)
        anchor = behaviour if columns.proximal is None else columns.proximal
        own = logprobs
        if keep is not None:  # what is left out may have a ratio without bounds, whose gradient times 0 is no number
            own, anchor = torch.where(keep, logprobs, logprobs.detach()), torch.where(keep, anchor, logprobs.detach())
        if self.correction_cap is not None and columns.proximal is None:
            losses = reinforce(own, advantages)
        else:
            losses = self._policy_losses(own, anchor, advantages, columns)
        coefficient = self.coefficient(logprobs, behaviour, columns)
        if coefficient is not None:
            losses = coefficient * losses
        if keep is not None:
            losses = torch.where(keep, losses, torch.zeros_like(losses))
        if self.kl_coefficient:
            if columns.reference is None:
                raise ValueError("a divergence from the reference needs the reference's log-probabilities")
            losses = losses + self.kl_coefficient * kl_estimate(logprobs, columns.reference, self.kl_estimator)
        return losses

    def _policy_losses(
        self, logprobs: torch.Tensor, anchor: torch.Tensor, advantages: torch.Tensor, columns: Columns
    ) -> torch.Tensor:
        if self.function is not None:
            return self.function(logprobs, anchor, advantages, self)
        if self.loss == "reinforce":
            return reinforce(logprobs, advantages)
        if self.loss == "gspo":
            if columns.sequence_log_ratio is None:
                raise ValueError("gspo needs the log-ratios of whole sequences")
            return gspo(logprobs, columns.sequence_log_ratio, advantages, self.clip_low, self.clip_high)
        if self.loss == "cispo":
            return cispo(logprobs, anchor, advantages, self.clip_low, self.clip_high)
        if self.loss == "dppo_tv":
            return dppo_tv(logprobs, anchor, advantages, self.clip_low, self.clip_high, self.ratio_cap)
        if self.loss != "ppo_clip":
            raise ValueError(f"unknown loss {self.loss!r}")
        return ppo_clip(logprobs, anchor, advantages, self.clip_low, self.clip_high, self.dual_clip)

    @torch.no_grad()
    def coefficient(
        self, logprobs: torch.Tensor, behaviour: torch.Tensor, columns: Columns = NO_COLUMNS
    ) -> torch.Tensor | None:
        """[T] coefficients of the correction; None without one."""
        if self.correction_cap is None:
            return None
        log_ratio = columns.correction_log_ratio
        if log_ratio is None:
            if self.correction_level != "token":
                raise ValueError("this correction needs the log-ratios of whole sequences")
            log_ratio = (logprobs if columns.proximal is None else columns.proximal) - behaviour
        return coefficients(log_ratio, self.correction, self.correction_cap, self.correction_floor)

    @torch.no_grad()
    def kept(
        self, logprobs: torch.Tensor, behaviour: torch.Tensor, columns: Columns = NO_COLUMNS
    ) -> torch.Tensor | None:
        """bool [T]: what the rejection leaves in; None without one."""
        if self.rejection == "none":
            return None
        log_ratio = columns.rejection_log_ratio
        if log_ratio is None:
            if self.rejection != "token":
                raise ValueError("this rejection needs the log-ratios of whole sequences")
            log_ratio = (logprobs if columns.proximal is None else columns.proximal) - behaviour
        return kept(log_ratio, self.rejection_low, self.rejection_high)

    @torch.no_grad()
    def clipped(
        self,
        logprobs: torch.Tensor,
        behaviour: torch.Tensor,
        advantages: torch.Tensor,
        columns: Columns = NO_COLUMNS,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] masks of the tokens whose ratio lies beyond the loss's lower and upper bound on the side that is cut.

        For ppo_clip and gspo their gradient is cut off, dppo_tv masks them, cispo holds their coefficient at the bound
        (whatever the advantage). For the losses without bounds it is where ppo_clip's would be.
        """
        anchor = behaviour if columns.proximal is None else columns.proximal
        if self.loss == "gspo" and columns.sequence_log_ratio is not None:
            return clipped(anchor + columns.sequence_log_ratio, anchor, advantages, self.clip_low, self.clip_high)
        if self.loss == "dppo_tv":
            moved = logprobs.exp() - anchor.exp()
            return (advantages <= 0) & (moved < -self.clip_low), (advantages > 0) & (moved > self.clip_high)
        if self.loss == "cispo":
            ratio = (logprobs - anchor).exp()
            return ratio < 1 - self.clip_low, ratio > 1 + self.clip_high
        return clipped(logprobs, anchor, advantages, self.clip_low, self.clip_high)


def ppo_clip(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> torch.Tensor:
    """[T] losses -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprobs - behaviour).

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7, with separate bounds below and above ("clip-higher", DAPO, arXiv
    2503.14476, eq. 10). `dual_clip` c > 1 bounds the loss of a token with A < 0 by -c A, however improbable it was where
    it was sampled: dual-clip PPO, Ye et al. 2020 (arXiv 1912.09729); 0 leaves it without a bound.
    """
    ratio = (logprobs - behaviour).exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses) if dual_clip else losses


def reinforce(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """[T] losses -A log π, whose gradient is the score-function estimator (Williams 1992)."""
    return -advantages * logprobs


def gspo(
    logprobs: torch.Tensor,
    sequence_log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """[T] losses -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) with the ratio of the token's whole sequence.

    Group Sequence Policy Optimization (arXiv 2507.18071), eq. 5, in the form per token of eq. 13 and 14:
    s = sg[s_i] · π / sg[π], s_i the geometric mean of the sequence's ratios (eq. 7), whose mean over the sequence has
    the value and gradient of eq. 5. `sequence_log_ratio` is log s_i. The paper's bounds are about 3e-4 and 4e-4.
    """
    ratio = (logprobs - logprobs.detach() + sequence_log_ratio).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def cispo(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """[T] losses -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log π: no token's gradient is cut off.

    MiniMax-M1 (arXiv 2506.13585), eq. 4 and 5. The paper sets no lower bound: clip_low of 1 or more.
    """
    ratio = (logprobs.detach() - behaviour).exp()
    return -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs


def dppo_tv(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> torch.Tensor:
    """[T] losses -M sg[min(r, ratio_cap)] A log π, M leaving out what has moved too far in probability.

    DPPO with the binary total-variation divergence, "Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv
    2602.04879): M is 0 where A > 0 and π - μ > clip_high, and where A ≤ 0 and π - μ < -clip_low. The bounds are
    differences of probabilities, not of ratios; the cap on the ratio is that of its section 5.4.
    """
    current, old = logprobs.detach(), behaviour
    moved = current.exp() - old.exp()
    valid = torch.where(advantages > 0, moved <= clip_high, moved >= -clip_low)
    coefficient = torch.where(valid, (current - old).exp().clamp(max=ratio_cap), torch.zeros_like(current))
    return -coefficient * advantages * logprobs


def value_loss(
    values: torch.Tensor, returns: torch.Tensor, sampled_values: torch.Tensor, value_clip: float
) -> torch.Tensor:
    """[T] losses ½ max((V - G)², (clip(V, V_old ± value_clip) - G)²); a `value_clip` of 0 clips nothing.

    The value loss of Schulman et al. 2017 (arXiv 1707.06347), eq. 9, with the clipping of its published code.
    """
    losses = (values - returns).square()
    if value_clip:
        near = torch.maximum(torch.minimum(values, sampled_values + value_clip), sampled_values - value_clip)
        losses = torch.maximum(losses, (near - returns).square())
    return 0.5 * losses


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
    return kl_estimate(behaviour, logprobs, "k1")


@torch.no_grad()
def kl_k3(logprobs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """[T] estimates of KL(behaviour ‖ current): (ρ - 1) - log ρ, unbiased and never negative (ibid., k3)."""
    return kl_estimate(behaviour, logprobs, "k3")
