from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longrein.learning.correction import at_level, coefficients, kept, masked, truncated
from longrein.learning.kl import Estimator, kl_estimate
from longrein.learning.loss import Columns, Objective
from longrein.learning.shaping import overlong_penalty

log_ratios = st.lists(st.floats(-3, 3), min_size=1, max_size=12)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@given(log_ratios, st.floats(0.1, 5))
def test_tis_cuts_and_mis_zeroes_above_the_cap(values, cap):
    ratios = np.exp(values)
    assert truncated(tensor(*values), cap).tolist() == pytest.approx(np.minimum(ratios, cap).tolist())
    assert coefficients(tensor(*values), "mis", cap, 0.5).tolist() == pytest.approx(
        np.where(ratios <= cap, ratios, 0).tolist(), abs=1e-12
    )


def test_icepop_zeroes_on_both_sides_and_a_rejection_keeps_or_not():
    log_ratio = torch.log(tensor(0.4, 0.6, 1.0, 1.9, 2.1))
    assert coefficients(log_ratio, "icepop", 2.0, 0.5).tolist() == pytest.approx([0, 0.6, 1.0, 1.9, 0])
    assert masked(log_ratio, 0.5, 2.0).tolist() == pytest.approx([0, 0.6, 1.0, 1.9, 0])
    assert kept(log_ratio, 0.5, 2.0).tolist() == [False, True, True, True, False]


@given(log_ratios)
def test_levels_are_the_tokens_ratio_the_product_and_its_geometric_mean(values):
    ratios = np.array(values)
    assert at_level(ratios, "token").tolist() == values
    assert np.exp(at_level(ratios, "sequence")) == pytest.approx(np.prod(np.exp(ratios)))
    assert np.exp(at_level(ratios, "geometric")) == pytest.approx(np.prod(np.exp(ratios)) ** (1 / len(values)))


@pytest.mark.parametrize("correction", ["tis", "mis", "icepop"])
def test_a_correction_changes_a_terms_coefficient_and_no_other_terms(correction):
    behaviour, advantages = tensor(-1.0, -1.0, -4.0), tensor(1.0, -2.0, 3.0)
    logprobs = tensor(-1.0, -1.2, -1.0).requires_grad_()
    plain = Objective("reinforce").token_losses(logprobs, behaviour, advantages)
    objective = Objective("reinforce", correction=correction, correction_cap=2.0, correction_floor=0.5)
    losses = objective.token_losses(logprobs, behaviour, advantages)
    expected = [1.0, math.exp(-0.2), 2.0 if correction == "tis" else 0.0]
    assert losses.tolist() == pytest.approx([c * float(p) for c, p in zip(expected, plain, strict=True)])
    losses.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-c * float(a) for c, a in zip(expected, advantages, strict=True)])


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce", "cispo", "dppo_tv"])
def test_what_is_rejected_is_exactly_nothing_even_where_its_ratio_has_no_bound(loss):
    objective = Objective(loss, rejection="token", rejection_low=0.5, rejection_high=2.0)
    logprobs = tensor(-1.0, -0.5).requires_grad_()
    behaviour, advantages = tensor(-1.1, -2000.0), tensor(-1.0, -1.0)
    losses = objective.token_losses(logprobs, behaviour, advantages)
    losses.sum().backward()
    assert logprobs.grad is not None
    assert float(losses[1].detach()) == float(logprobs.grad[1]) == 0.0
    alone = Objective(loss).token_losses(logprobs[:1], behaviour[:1], advantages[:1])
    assert float(losses[0].detach()) == float(alone.detach())


@given(st.floats(-3, -0.1), st.floats(-3, -0.1), st.floats(-3, -0.1), st.floats(-2, 2))
def test_decoupled_ppo_is_its_formula(current, proximal, behaviour, advantage):
    objective = Objective("ppo_clip", correction_cap=2.0)
    columns = Columns(proximal=tensor(proximal))
    loss = objective.token_losses(tensor(current), tensor(behaviour), tensor(advantage), columns)
    ratio = math.exp(current - proximal)
    clipped = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    assert float(loss) == pytest.approx(-min(math.exp(proximal - behaviour), 2.0) * clipped)


@given(st.floats(-3, -0.1), st.floats(-3, -0.1))
def test_divergence_estimates_and_their_gradients(logprob, reference):
    slopes: dict[Estimator, tuple[float, float]] = {
        "k1": (logprob - reference, 1.0),
        "k2": (0.5 * (logprob - reference) ** 2, logprob - reference),
        "k3": (math.expm1(reference - logprob) - (reference - logprob), 1 - math.exp(reference - logprob)),
    }
    for estimator, (value, slope) in slopes.items():
        leaf = tensor(logprob).requires_grad_()
        found = kl_estimate(leaf, tensor(reference), estimator)
        found.sum().backward()
        assert leaf.grad is not None
        assert float(found.detach()) == pytest.approx(value, abs=1e-12)
        assert float(leaf.grad) == pytest.approx(slope, abs=1e-12)


def test_the_expected_gradient_of_k2_is_the_divergences_and_that_of_k1_nothing():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    logprobs = scores.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), scores, retain_graph=True)
    expected = {}
    estimators: tuple[Estimator, ...] = ("k1", "k2", "k3")
    for estimator in estimators:
        mean = (logprobs.exp().detach() * kl_estimate(logprobs, reference, estimator)).sum()
        (expected[estimator],) = torch.autograd.grad(mean, scores, retain_graph=True)
    (other,) = torch.autograd.grad((reference.exp() * (reference - logprobs)).sum(), scores)
    assert torch.allclose(expected["k2"], exact)
    assert torch.allclose(expected["k3"], other)
    assert torch.allclose(expected["k1"], torch.zeros(6, dtype=torch.float64), atol=1e-12)


def test_the_divergence_in_the_loss_is_added_to_rejected_tokens_too():
    objective = Objective("reinforce", rejection="token", kl_coefficient=0.1, kl_estimator="k2")
    losses = objective.token_losses(
        tensor(-1.0, -1.0), tensor(-1.0, -9.0), tensor(2.0, 2.0), Columns(reference=tensor(-2.0, -3.0))
    )
    assert losses.tolist() == pytest.approx([2.0 + 0.05, 0.2])
    assert not objective.zero_without_advantage
    with pytest.raises(ValueError, match="needs the reference's log-probabilities"):
        objective.token_losses(tensor(-1.0), tensor(-1.0), tensor(2.0))


def test_overlong_replies_lose_linearly_over_the_buffer():
    found = [overlong_penalty(length, 100, 20, 0.5) for length in (0, 80, 85, 90, 100, 130)]
    assert found == pytest.approx([0, 0, -0.125, -0.25, -0.5, -0.5])
