"""The mathematics of learning against verl's own functions of the same names, with context inside the responses.

`make test-verl` installs verl beside and runs these. verl works on padded rows [B, T] with a mask; Longrein on the trained
tokens alone, so what a mask of theirs leaves out is simply not there. Where the two mean different things by one name, a
test says what each means.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="verl is not installed here; make test-verl installs it beside and runs this")

import torch
from verl.trainer.ppo import core_algos as verl_algos  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo import rollout_corr_helper as verl_correction  # pyright: ignore[reportMissingImports]
from verl.workers.config import ActorConfig  # pyright: ignore[reportMissingImports]

from longrein.learning.advantage import dr_grpo, gae, group_advantages, grpo, returns, rloo, whiten
from longrein.learning.correction import at_level, coefficients
from longrein.learning.kl import kl_estimate
from longrein.learning.loss import Columns, Objective, value_loss
from longrein.learning.normalise import token_weights

ROWS, LENGTH = 7, 12
GROUPS = np.array(["a", "a", "b", "a", "b", "c", "b"])
SEEDS = range(4)


class Batch:
    """A random batch as verl has it, and the same as flat trained tokens."""

    def __init__(self, seed: int, spread: float = 0.5) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> torch.Tensor:
            return scale * torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)

        self.mask = (torch.rand(ROWS, LENGTH, generator=generator) < 0.6).double()
        self.mask[0] = 1  # no context inside
        self.mask[1, 3:] = 0  # padding alone
        self.mask[2] = torch.tensor([1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0])  # two tool answers inside
        self.trained = self.mask.bool()
        self.old = -1.0 - normal(1.0).abs()
        self.current = (self.old + normal(spread)).clamp(max=-1e-3)
        self.proximal = (self.old + normal(spread)).clamp(max=-1e-3)
        self.reference = (self.old + normal(spread)).clamp(max=-1e-3)
        self.advantages = normal(1.0)[:, :1].expand(-1, LENGTH) * self.mask
        self.rewards = normal(1.0)[:, 0].round(decimals=1)
        self.values = normal(1.0)

    @property
    def lengths(self) -> list[int]:
        return [int(n) for n in self.mask.sum(-1)]

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.trained]

    def by_sequence(self, values: torch.Tensor, level: Any) -> torch.Tensor:
        """[n]: `at_level` of each row's trained tokens."""
        rows = [at_level(row[own].numpy(), level) for row, own in zip(values, self.trained, strict=True)]
        return torch.from_numpy(np.concatenate(rows))

    def token_level(self) -> torch.Tensor:
        """The rewards where verl has them: at each row's last trained token."""
        found = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
        for row, own in enumerate(self.trained):
            found[row, own.nonzero()[-1]] = self.rewards[row]
        return found


def actor(**options: Any) -> Any:
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False, **options)


def close(ours: Any, theirs: Any) -> None:
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (ours, theirs))
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7), (ours, theirs)


NORMALISERS = {
    # ours: (theirs, the factor of their configuration)
    "token": ("token-mean", None),
    "sequence": ("seq-mean-token-mean", None),
    "rollout": ("seq-mean-token-mean", None),  # the same as long as no rollout has several rows
    "constant": ("seq-mean-token-sum-norm", 50),
}


def weights_of(batch: Batch, normaliser: Any) -> torch.Tensor:
    weights = token_weights(batch.lengths, range(ROWS), normaliser, 50)
    return torch.from_numpy(np.repeat(weights, batch.lengths))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_normalisers(seed: int, normaliser: str) -> None:
    batch = Batch(seed)
    mode, factor = NORMALISERS[normaliser]
    theirs = verl_algos.agg_loss(batch.values, batch.mask, mode, loss_scale_factor=factor)
    close((weights_of(batch, normaliser) * batch.flat(batch.values)).sum(), theirs)


def test_the_rollout_normaliser_is_not_verls_sequence_mean_once_a_rollout_has_several_rows() -> None:
    batch = Batch(0)
    owners = [0, 0, 0, 1, 1, 2, 2]
    weights = token_weights(batch.lengths, owners)
    ours = float((torch.from_numpy(np.repeat(weights, batch.lengths)) * batch.flat(batch.values)).sum())
    sums = (batch.values * batch.mask).sum(-1)
    groups = [[i for i, owner in enumerate(owners) if owner == rollout] for rollout in range(3)]
    equation_16 = sum(float(sums[own].sum()) / sum(batch.lengths[i] for i in own) for own in groups) / 3
    assert ours == pytest.approx(equation_16)
    assert ours != pytest.approx(float(verl_algos.agg_loss(batch.values, batch.mask, "seq-mean-token-mean")))


LOSSES = {
    "ppo_clip": ("vanilla", {"clip_low": 0.2, "clip_high": 0.28}, {"clip_ratio_c": 1e9}),
    "dual_clip": ("vanilla", {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5}, {"clip_ratio_c": 1.5}),
    "gspo": ("gspo", {"clip_low": 0.05, "clip_high": 0.1}, {}),
    "cispo": ("cispo", {"clip_low": 0.3, "clip_high": 0.2}, {}),
    "dppo_tv": ("dppo_tv", {"clip_low": 0.05, "clip_high": 0.08, "ratio_cap": 1.4}, {"clip_ratio_c": 1.4}),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("normaliser", NORMALISERS)
@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses_and_their_gradients(name: str, normaliser: str, seed: int) -> None:
    batch = Batch(seed)
    verls_name, options, theirs_only = LOSSES[name]
    config = actor(
        clip_ratio=0.2, clip_ratio_low=options["clip_low"], clip_ratio_high=options["clip_high"], **theirs_only
    )
    mode, factor = NORMALISERS[normaliser]
    config.global_batch_info["loss_scale_factor"] = factor
    theirs = batch.current.clone().requires_grad_()
    loss, metrics = verl_algos.get_policy_loss_fn(verls_name)(
        old_log_prob=batch.old, log_prob=theirs, advantages=batch.advantages, response_mask=batch.mask,
        loss_agg_mode=mode, config=config, rollout_is_weights=None,
    )  # fmt: skip
    loss.backward()
    objective = Objective("ppo_clip" if name == "dual_clip" else name, **options)
    ours = batch.flat(batch.current).clone().requires_grad_()
    columns = Columns(sequence_log_ratio=batch.by_sequence(batch.current - batch.old, "geometric"))
    own = (batch.flat(batch.old), batch.flat(batch.advantages))
    total = (weights_of(batch, normaliser) * objective.token_losses(ours, *own, columns)).sum()
    total.backward()
    close(total, loss)
    assert theirs.grad is not None
    close(ours.grad, batch.flat(theirs.grad))
    assert float(theirs.grad.abs().sum()) > 0
    if name != "dual_clip":  # what the bounds cut
        low, high = objective.clipped(batch.flat(batch.current), *own, columns)
        close((low | high).double().mean(), metrics["actor/pg_clipfrac"])


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce(seed: int) -> None:
    batch = Batch(seed)
    theirs, _ = verl_algos.compute_policy_loss_reinforce(
        batch.old, batch.current, batch.advantages, batch.mask, "token-mean", actor()
    )
    own = [batch.flat(values) for values in (batch.current, batch.old, batch.advantages)]
    losses = Objective("reinforce").token_losses(own[0], own[1], own[2])
    close((weights_of(batch, "token") * losses).sum(), theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("correction", "threshold"), [("tis", 1.3), ("icepop", "0.7_1.4"), ("mis", "1e-300_1.4")], ids=str
)
def test_importance_weights(seed: int, level: Any, correction: Any, threshold: Any) -> None:
    batch = Batch(seed, spread=0.4 if level == "token" else 0.1)
    log_ratio = batch.proximal - batch.old
    theirs, _ = verl_correction.compute_rollout_correction_weights(log_ratio, batch.mask, level, threshold)
    floor, cap = (0.0, threshold) if correction == "tis" else map(float, threshold.split("_"))
    close(coefficients(batch.by_sequence(log_ratio, level), correction, cap, floor), batch.flat(theirs))
    assert float(theirs.max()) > 0
    if level == "token":
        assert 2 < len(set(batch.flat(theirs).tolist())) < int(batch.mask.sum())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("rejection", "verls_name"), [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]
)
def test_rejection_masks(seed: int, rejection: Any, verls_name: str) -> None:
    """verl's k1 is the negative log-ratio: its bounds are those of 1/ρ, ours of ρ."""
    batch = Batch(seed, spread=0.3)
    log_ratio = batch.proximal - batch.old
    low, high = 0.85, 1.1
    theirs, _ = verl_correction.compute_rollout_rejection_mask(
        log_ratio, batch.mask, verls_name, f"{1 / high}_{1 / low}"
    )
    objective = Objective("ppo_clip", rejection=rejection, rejection_low=low, rejection_high=high)
    columns = Columns(proximal=batch.flat(batch.proximal), rejection_log_ratio=batch.by_sequence(log_ratio, rejection))
    kept = objective.kept(batch.flat(batch.current), batch.flat(batch.old), columns)
    assert kept is not None
    close(kept.double(), batch.flat(theirs))
    if rejection == "token":
        assert 0 < int(kept.sum()) < len(kept)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_decoupled_ppo(seed: int, level: Any) -> None:
    """verl's loss with recomputed old log-probabilities and importance weights to the policy sampled from."""
    batch = Batch(seed, spread=0.3)
    log_ratio = batch.proximal - batch.old
    weights, _ = verl_correction.compute_rollout_correction_weights(log_ratio, batch.mask, level, 1.5)
    theirs = batch.current.clone().requires_grad_()
    loss, _ = verl_algos.get_policy_loss_fn("vanilla")(
        old_log_prob=batch.proximal, log_prob=theirs, advantages=batch.advantages, response_mask=batch.mask,
        loss_agg_mode="token-mean", config=actor(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1e9),
        rollout_is_weights=weights,
    )  # fmt: skip
    loss.backward()
    objective = Objective("ppo_clip", correction="tis", correction_level=level, correction_cap=1.5)
    columns = Columns(proximal=batch.flat(batch.proximal), correction_log_ratio=batch.by_sequence(log_ratio, level))
    ours = batch.flat(batch.current).clone().requires_grad_()
    losses = objective.token_losses(ours, batch.flat(batch.old), batch.flat(batch.advantages), columns)
    total = (weights_of(batch, "token") * losses).sum()
    total.backward()
    close(total, loss)
    assert theirs.grad is not None
    close(ours.grad, batch.flat(theirs.grad))


@pytest.mark.parametrize("seed", SEEDS)
def test_correction_without_a_proximal_policy_is_verls_bypass_mode_with_reinforce(seed: int) -> None:
    batch = Batch(seed)
    config = actor()
    object.__setattr__(
        config, "policy_loss", {"rollout_correction": {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 1.5}}
    )  # fmt: skip
    theirs = batch.current.clone().requires_grad_()
    loss, _ = verl_algos.get_policy_loss_fn("bypass_mode")(
        old_log_prob=batch.old, log_prob=theirs, advantages=batch.advantages, response_mask=batch.mask,
        loss_agg_mode="token-mean", config=config, rollout_is_weights=None,
    )  # fmt: skip
    loss.backward()
    ours = batch.flat(batch.current).clone().requires_grad_()
    objective = Objective("ppo_clip", correction_cap=1.5)
    losses = objective.token_losses(ours, batch.flat(batch.old), batch.flat(batch.advantages))
    total = (weights_of(batch, "token") * losses).sum()
    total.backward()
    close(total, loss)
    assert theirs.grad is not None
    close(ours.grad, batch.flat(theirs.grad))


def test_what_is_rejected_keeps_the_others_weights_here_and_raises_them_in_verl() -> None:
    """verl divides by the tokens that its rejection leaves; ours are weighed before anything is rejected."""
    batch = Batch(1)
    log_ratio = batch.current - batch.old
    mask, _ = verl_correction.compute_rollout_rejection_mask(log_ratio, batch.mask, "token_k1", "0.8_1.25")
    theirs = verl_algos.agg_loss(batch.values, mask, "token-mean")
    ours = (weights_of(batch, "token") * batch.flat(batch.values * mask)).sum()
    close(ours * batch.mask.sum() / mask.sum(), theirs)
    assert float(mask.sum()) < float(batch.mask.sum())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergences_and_their_gradients(seed: int, estimator: Any) -> None:
    batch = Batch(seed)
    theirs = batch.current.clone().requires_grad_()
    values = verl_algos.kl_penalty(theirs, batch.reference, estimator)
    (values * batch.mask).sum().backward()
    ours = batch.flat(batch.current).clone().requires_grad_()
    found = kl_estimate(ours, batch.flat(batch.reference), estimator)
    found.sum().backward()
    close(found, batch.flat(values))
    assert theirs.grad is not None
    close(ours.grad, batch.flat(theirs.grad))


def advantages_of(batch: Batch, method: Any) -> list[float]:
    """Of the rows in their order."""
    names = [str(row) for row in range(ROWS)]
    rewards = dict(zip(names, batch.rewards.tolist(), strict=True))
    values = group_advantages(rewards, dict(zip(names, GROUPS.tolist(), strict=True)), method).values
    return [values[name] for name in names]


@pytest.mark.parametrize("seed", SEEDS)
def test_group_advantages(seed: int) -> None:
    batch = Batch(seed)
    cases = [
        (grpo, verl_algos.compute_grpo_outcome_advantage, {}),
        (dr_grpo, verl_algos.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
        (rloo, verl_algos.compute_rloo_outcome_advantage, {}),
    ]
    for method, theirs_of, options in cases:
        theirs, _ = theirs_of(batch.token_level(), batch.mask, GROUPS, **options)
        ours = torch.tensor(advantages_of(batch, method), dtype=torch.float64)
        several = torch.from_numpy(GROUPS != "c")
        close((ours[:, None] * batch.mask)[several], theirs[several])
        # A group of one: nothing to compare with. verl gives it its reward as advantage; grpo and dr_grpo here give 0.
        alone, reward = float(theirs[5][batch.trained[5]][0]), float(batch.rewards[5])
        assert alone == pytest.approx(reward, abs=1e-5)
        assert float(ours[5]) == (reward if method is rloo else 0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_plus_plus_with_a_baseline(seed: int) -> None:
    """verl normalises over tokens, so that long rollouts count more; with votes of tokens ours is the same."""
    batch = Batch(seed)
    theirs, _ = verl_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        batch.token_level(), batch.mask, GROUPS
    )
    centred = advantages_of(batch, "reinforce++_baseline")
    close(whiten(np.repeat(centred, batch.lengths)), batch.flat(theirs))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_reinforce_plus_plus(seed: int, discount: float) -> None:
    """With per-token rewards too, as a divergence in the reward gives them; tool answers inside are no steps."""
    batch = Batch(seed)
    rewards = (batch.token_level() - 0.1 * (batch.old - batch.reference)) * batch.mask

    class Gamma:
        gamma = discount

    advantages, theirs = verl_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, batch.mask, Gamma())
    ours = np.concatenate(
        [returns(row[own].numpy(), discount) for row, own in zip(rewards, batch.trained, strict=True)]
    )
    close(ours, batch.flat(theirs))
    close(whiten(ours), batch.flat(advantages))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("discount", "decay"), [(1.0, 1.0), (0.98, 0.9), (1.0, 0.0)])
def test_generalised_advantages(seed: int, discount: float, decay: float) -> None:
    batch = Batch(seed)
    rewards = batch.token_level()
    advantages, theirs = verl_algos.compute_gae_advantage_return(
        rewards,
        batch.values,
        batch.mask,
        torch.tensor(discount, dtype=torch.float64),
        torch.tensor(decay, dtype=torch.float64),
    )
    found = [
        gae(reward[own].numpy(), value[own].numpy(), discount, decay)
        for reward, value, own in zip(rewards, batch.values, batch.trained, strict=True)
    ]
    close(np.concatenate([own for _, own in found]), batch.flat(theirs))
    close(whiten(np.concatenate([own for own, _ in found])), batch.flat(advantages))


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(seed: int) -> None:
    batch = Batch(seed)
    predicted, returned = batch.reference, batch.proximal
    theirs, _ = verl_algos.compute_value_loss(predicted, returned, batch.values, batch.mask, 0.3, "token-mean")
    losses = value_loss(batch.flat(predicted), batch.flat(returned), batch.flat(batch.values), 0.3)
    close((weights_of(batch, "token") * losses).sum(), theirs)


def test_with_one_vote_a_rollout_whitening_is_verls_only_where_rollouts_are_equally_long() -> None:
    values, lengths = np.array([1.0, -0.5, 2.0]), [4, 4, 4]
    votes = np.repeat(1 / np.array(lengths), lengths)
    tokens = whiten(np.repeat(values, lengths))
    rollouts = whiten(np.repeat(values, lengths), votes, 3)
    # The same but for the divisor of the variance: 12 - 1 tokens there, 3 - 1 rollouts here.
    close(rollouts * math.sqrt((3 / 2) / (12 / 11)), tokens)
    assert not np.allclose(whiten(np.repeat(values, [1, 1, 10])), whiten(np.repeat(values, [1, 1, 10]), None, 3))
