import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longrein.learning.correction import truncated_importance
from longrein.learning.loss import Columns, Objective, clipped, kl_k1, kl_k3, ppo_clip, value_loss
from longrein.records import Call
from longrein.trajectory.batch import FinishedRollout, make_batch

PPO = Objective("ppo_clip", clip_low=0.2, clip_high=0.28)
log_probability = st.floats(-10, 0)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def gradient(objective, logprob, behaviour, advantage):
    logprobs = tensor(logprob).requires_grad_()
    objective.token_losses(logprobs, tensor(behaviour), tensor(advantage)).sum().backward()
    assert logprobs.grad is not None
    return float(logprobs.grad)


@given(log_probability, log_probability, st.floats(-5, 5))
def test_ppo_clip_is_equation_7(logprob, behaviour, advantage):
    ratio = np.exp(logprob - behaviour)
    expected = -min(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    assert float(ppo_clip(tensor(logprob), tensor(behaviour), tensor(advantage), 0.2, 0.28)) == pytest.approx(expected)


@given(log_probability, st.floats(-5, 5))
def test_on_policy_every_policy_loss_has_the_gradient_of_reinforce(logprob, advantage):
    for objective in (PPO, Objective("reinforce"), Objective("ppo_clip", correction_cap=2.0)):
        assert gradient(objective, logprob, logprob, advantage) == pytest.approx(-advantage)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "low", "high"),
    [
        (-0.3, -1.0, True, False),
        (-0.3, 1.0, False, False),
        (0.3, 1.0, False, True),
        (0.3, -1.0, False, False),
        (0.2, 1.0, False, False),
    ],
)
def test_the_clipped_masks_mark_where_the_gradient_is_cut_off(log_ratio, advantage, low, high):
    below, above = clipped(tensor(log_ratio - 1), tensor(-1.0), tensor(advantage), 0.2, 0.28)
    assert (bool(below), bool(above)) == (low, high)
    assert (gradient(PPO, log_ratio - 1, -1.0, advantage) == 0) == (low or high)


@pytest.mark.parametrize("objective", [PPO, Objective("reinforce"), Objective("reinforce", correction_cap=1.0)])
def test_no_advantage_no_gradient(objective):
    assert objective.zero_without_advantage
    assert gradient(objective, -1.0, -3.0, 0.0) == 0


def test_the_correction_is_capped_and_carries_no_gradient():
    weights = truncated_importance(tensor(-1.0, -1.0).requires_grad_(), tensor(-1.5, -4.0), cap=2.0)
    assert weights.tolist() == pytest.approx([np.exp(0.5), 2.0])
    assert not weights.requires_grad
    assert gradient(Objective("reinforce", correction_cap=2.0), -1.0, -4.0, 3.0) == pytest.approx(-6.0)


def test_cross_entropy_ignores_the_advantage():
    objective = Objective("cross_entropy")
    assert not objective.zero_without_advantage
    assert objective.token_losses(tensor(-2.0), tensor(0.0), tensor(0.0)).tolist() == [2.0]


def test_kl_estimates_average_to_the_divergence_of_the_sampled_from_policy():
    generator = torch.Generator().manual_seed(0)
    behaviour, current = (torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    expected = float((behaviour.exp() * (behaviour - current)).sum())
    for estimate in (kl_k1, kl_k3):
        assert float((behaviour.exp() * estimate(current, behaviour)).sum()) == pytest.approx(expected)
    assert bool((kl_k3(current, behaviour) >= 0).all())


def test_the_loss_of_a_batch_is_equation_16():
    """A = {50, 100}, B = {30, 30, 30}, C = {40} tokens: (1/3) (ΣA/150 + ΣB/90 + ΣC/40)."""
    rng = np.random.default_rng(0)
    lengths = {"A": [50, 100], "B": [30, 30, 30], "C": [40]}
    rollouts = []
    for name, samples in lengths.items():
        calls = [
            Call(
                rollout_id=name, attempt_id="0", number=i, dialect="chat", mode="train", model="m", engine="policy",
                prompt_delta=[i + 1], prompt_length=1, sampled=[9] * n, logprobs=rng.normal(-2, 0.1, n).tolist(),
            )
            for i, n in enumerate(samples)
        ]  # fmt: skip
        rollouts.append(FinishedRollout(name, "g", True, 1.0, calls))
    batch = make_batch(rollouts, {"A": 1.0, "B": -0.5, "C": 2.0})
    total, sums = 0.0, dict.fromkeys(lengths, 0.0)
    for row in batch.rows:
        behaviour = torch.from_numpy(row.logprobs[row.trained]).double()
        current = behaviour + torch.from_numpy(rng.normal(0, 0.3, len(behaviour)))
        losses = PPO.token_losses(current, behaviour, torch.from_numpy(row.advantages[row.trained]).double())
        total += float((torch.from_numpy(row.weights[row.trained]) * losses).sum())
        sums[row.rollout_id] += float(losses.sum())
    assert total == pytest.approx((sums["A"] / 150 + sums["B"] / 90 + sums["C"] / 40) / 3)
    tokens = sum(map(sum, lengths.values()))
    assert tokens == 280
    assert total != pytest.approx(sum(sums.values()) / tokens)


@given(log_probability, log_probability, st.floats(-5, 5))
def test_dual_clip_bounds_the_loss_of_what_became_probable_and_was_bad(logprob, behaviour, advantage):
    plain = float(ppo_clip(tensor(logprob), tensor(behaviour), tensor(advantage), 0.2, 0.28))
    found = float(ppo_clip(tensor(logprob), tensor(behaviour), tensor(advantage), 0.2, 0.28, dual_clip=3.0))
    assert found == pytest.approx(min(plain, -3.0 * advantage) if advantage < 0 else plain)


@given(log_probability, log_probability, st.floats(-5, 5))
def test_cispo_and_dppo_tv_are_their_formulas(logprob, behaviour, advantage):
    ratio, moved = np.exp(logprob - behaviour), np.exp(logprob) - np.exp(behaviour)
    cispo = Objective("cispo", clip_low=0.4, clip_high=0.2)
    assert gradient(cispo, logprob, behaviour, advantage) == pytest.approx(-np.clip(ratio, 0.6, 1.2) * advantage)
    valid = moved <= 0.1 if advantage > 0 else moved >= -0.05
    dppo = Objective("dppo_tv", clip_low=0.05, clip_high=0.1, ratio_cap=5.0)
    assert gradient(dppo, logprob, behaviour, advantage) == pytest.approx(-float(valid) * min(ratio, 5.0) * advantage)


@given(st.lists(st.tuples(log_probability, log_probability), min_size=1, max_size=6), st.floats(-5, 5))
def test_gspo_over_a_sequence_has_value_and_gradient_of_its_geometric_ratio(tokens, advantage):
    """Eq. 5 of the paper for one sequence, against the mean over its tokens of what is computed here."""
    current, behaviour = (tensor(*column) for column in zip(*tokens, strict=True))
    leaf = current.clone().requires_grad_()
    ratio = (leaf - behaviour).mean().exp()
    expected = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    (slope,) = torch.autograd.grad(expected, leaf)
    ours = current.clone().requires_grad_()
    columns = Columns(sequence_log_ratio=(current - behaviour).mean().expand(len(tokens)))
    objective = Objective("gspo", clip_low=0.2, clip_high=0.28)
    loss = objective.token_losses(ours, behaviour, torch.full_like(current, advantage), columns).mean()
    (found,) = torch.autograd.grad(loss, ours)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()))
    assert found.tolist() == pytest.approx(slope.tolist(), abs=1e-9)


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-5, 5))
def test_the_value_loss_is_the_worse_of_the_plain_and_the_clipped(value, gain, before):
    near = np.clip(value, before - 0.5, before + 0.5)
    expected = 0.5 * max((value - gain) ** 2, (near - gain) ** 2)
    assert float(value_loss(tensor(value), tensor(gain), tensor(before), 0.5)) == pytest.approx(expected)
    assert float(value_loss(tensor(value), tensor(gain), tensor(before), 0.0)) == pytest.approx(
        0.5 * (value - gain) ** 2
    )


def test_a_loss_of_ones_own_is_given_the_anchor_and_the_objective():
    def own(logprobs, anchor, advantages, objective):
        return -(logprobs - anchor) * advantages * objective.clip_low

    objective = Objective("mine:loss", clip_low=0.5, function=own)
    assert not objective.zero_without_advantage
    assert objective.token_losses(tensor(-1.0), tensor(-3.0), tensor(2.0)).tolist() == [-2.0]
    with_proximal = objective.token_losses(tensor(-1.0), tensor(-3.0), tensor(2.0), Columns(proximal=tensor(-2.0)))
    assert with_proximal.tolist() == [-1.0]


@pytest.mark.parametrize("objective", [Objective("gspo"), Objective("ppo_clip", rejection="geometric")])
def test_what_looks_at_sequences_says_when_they_are_missing(objective):
    assert objective.looks_at_sequences
    with pytest.raises(ValueError, match="log-ratios of whole sequences"):
        objective.token_losses(tensor(-1.0), tensor(-1.0), tensor(1.0))
