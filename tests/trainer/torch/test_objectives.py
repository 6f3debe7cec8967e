"""Every objective as the learner computes it, against autograd over whole logits, one row at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_learner import gradients, make_learner, make_policy, make_rows, relative

from longrein import config
from longrein.learning.kl import kl_estimate
from longrein.learning.loss import Columns, Objective
from longrein.trainer.torch.learner import Learner
from longrein.trainer.torch.policy import Policy, PolicyError

TEMPERATURE = 1.3
ALGORITHMS = {
    "dual_clip": {"dual_clip": 1.05, "clip_low": 0.01},
    "cispo": {"loss": "cispo", "clip_high": 0.05},
    "dppo_tv": {"loss": "dppo_tv", "clip_low": 0.001, "clip_high": 0.001},
    "gspo": {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.02},
    "tis of sequences": {"correction": "tis", "correction_level": "sequence", "correction_cap": 1.1},
    "icepop": {"loss": "reinforce", "correction": "icepop", "correction_floor": 0.9, "correction_cap": 1.2},
    "geometric mask": {"rejection": "geometric", "rejection_low": 0.99, "rejection_high": 1.5},
    "decoupled": {"proximal": "computed", "correction": "mis", "correction_level": "sequence", "correction_cap": 9.0},
    "decoupled gspo": {"proximal": "computed", "loss": "gspo", "rejection": "sequence", "rejection_low": 0.2,
                       "rejection_high": 9.0},
    "entropy": {"entropy_coefficient": 0.3},
    "kl": {"kl_coefficient": 0.2, "kl_estimator": "k2", "entropy_coefficient": 0.1},
}  # fmt: skip


def nearby_rows(policy: Policy, **options):
    """Rows whose recorded log-probabilities are a little off what the policy gives now."""
    rows = make_rows(**options)
    rng = np.random.default_rng(0)
    for row in rows:
        with torch.no_grad():
            now = logprobs_of(policy.model, row)[0]
        row.logprobs[1:] = np.where(row.trained[1:], now.numpy() + rng.normal(0, 0.1, len(now)), 0)
    return rows


def logprobs_of(model: torch.nn.Module, row):
    """[T - 1] log-probabilities of a row's tokens from the second on, and the entropies of what they came from."""
    tokens = torch.from_numpy(row.tokens.astype(np.int64))[None]
    logits = model(tokens, use_cache=False).logits[0, :-1].double() / TEMPERATURE
    every = logits.log_softmax(-1)
    return every.gather(1, tokens[0, 1:, None])[:, 0], -(every.exp() * every).sum(-1)


def by_the_book(policy: Policy, rows, objective: Objective, proximal=None, reference=None):
    """Loss and gradient; `proximal` and `reference` are models."""
    model = policy.model
    model.zero_grad()
    total = 0.0
    for row in rows:
        own = torch.from_numpy(row.trained[1:])
        logprobs, entropy = (values[own] for values in logprobs_of(model, row))
        behaviour, advantages, weights = (
            torch.from_numpy(values[1:]).double()[own] for values in (row.logprobs, row.advantages, row.weights)
        )
        with torch.no_grad():
            anchors = [logprobs_of(m, row)[0][own] if m is not None else None for m in (proximal, reference)]
        log_ratio = (logprobs.detach() if anchors[0] is None else anchors[0]) - behaviour
        moved = logprobs.detach() - (behaviour if anchors[0] is None else anchors[0])

        def at(values: torch.Tensor, level: str) -> torch.Tensor:
            whole = {"token": values, "sequence": values.sum().expand_as(values)}
            return whole.get(level, values.mean().expand_as(values))

        columns = Columns(
            proximal=anchors[0],
            reference=anchors[1],
            sequence_log_ratio=at(moved, "geometric"),
            correction_log_ratio=at(log_ratio, objective.correction_level),
            rejection_log_ratio=at(log_ratio, objective.rejection),
        )
        losses = objective.token_losses(logprobs, behaviour, advantages, columns)
        loss = (weights * (losses - objective.entropy_coefficient * entropy)).sum()
        loss.backward()
        total += float(loss.detach())
    flat = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return total, flat


def other_policy() -> Policy:
    policy = make_policy(dtype=torch.float64)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in policy.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return policy


@pytest.mark.parametrize("budget", [4096, 150])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_are_the_objectives(name: str, budget: int):
    policy, other = make_policy(dtype=torch.float64), other_policy()
    rows = nearby_rows(policy, seed=21)
    algorithm = config.Algorithm.model_validate(ALGORITHMS[name])
    trainer = config.Trainer(tokens_per_micro_batch=budget, grad_clip=0.0)
    reference = other if algorithm.kl_coefficient else None
    learner = Learner(policy, algorithm, trainer, "none", TEMPERATURE, reference=reference)
    proximal = other_policy().model if algorithm.proximal == "computed" else None
    if proximal is not None:  # the step began with other weights than this update does
        own = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
        policy.model.load_state_dict(dict(proximal.named_parameters()), strict=False)
        learner.prepare(rows)
        policy.model.load_state_dict(own, strict=False)  # tied weights have one name
    elif algorithm.prepares:
        learner.prepare(rows)
    learner._look_at_sequences(rows)
    loss, flat, sums = gradients(learner, rows)
    expected_loss, expected = by_the_book(policy, rows, learner._objective, proximal, reference and reference.model)
    # What is recorded, and what is computed beforehand, is float32.
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative(flat, expected) < 1e-5
    plain = by_the_book(policy, rows, Objective("ppo_clip"), None, None)[1]
    assert relative(flat, plain) > 1e-3  # the option does something on these rows
    metrics = sums.metrics(learner._objective)
    assert metrics["ratio/min"] <= metrics["ratio/mean"] <= metrics["ratio/max"]


def test_a_correction_zeroes_terms_and_leaves_the_others_weights():
    """Masked tokens: what is left has the loss and gradient that it has alone, with the weights of the whole batch."""
    policy = make_policy(dtype=torch.float64)
    rows = nearby_rows(policy, seed=22)
    far = rows[0]
    far.logprobs[far.trained] -= 3.0
    algorithm = config.Algorithm(rejection="sequence", rejection_low=0.3, rejection_high=5.0)
    learner = make_learner(policy, algorithm=algorithm, temperature=TEMPERATURE)
    learner._look_at_sequences(rows)
    loss, flat, sums = gradients(learner, rows)
    alone_loss, alone = by_the_book(policy, rows[1:], Objective("ppo_clip"))
    assert loss == pytest.approx(alone_loss, rel=1e-5)
    assert relative(flat, alone) < 1e-5
    tokens = sum(int(row.trained.sum()) for row in rows)
    assert sums.metrics(learner._objective)["rejected"] == pytest.approx(far.trained.sum() / tokens)


def test_what_is_prepared_are_the_models_numbers():
    policy, reference = make_policy(dtype=torch.float64), other_policy()
    rows = make_rows(seed=23)
    algorithm = config.Algorithm(advantage="gae", proximal="computed", kl_coefficient=0.1)
    learner = Learner(
        policy, algorithm, config.Trainer(tokens_per_micro_batch=150), "none", TEMPERATURE, reference=reference
    )
    assert learner._value is not None
    with torch.no_grad():
        learner._value.linear.weight.normal_(generator=torch.Generator().manual_seed(0))
    learner.prepare(rows)
    for row in rows:
        own = row.trained[1:]
        with torch.no_grad():
            expected = [logprobs_of(one.model, row)[0].numpy()[own] for one in (policy, reference)]
            ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
            states = policy.model.get_decoder()(input_ids=ids).last_hidden_state[0, :-1]  # type: ignore[operator]
            values = learner._value(states).numpy()[own]
        for name, numbers in zip(("proximal", "reference", "values"), (*expected, values), strict=True):
            assert row.columns[name][row.trained] == pytest.approx(numbers, rel=1e-5, abs=1e-5), name
            assert not row.columns[name][~row.trained].any()


def test_the_value_head_learns_its_returns_and_the_model_its_share():
    policy = make_policy(dtype=torch.float64)
    rows = nearby_rows(policy, seed=24, groups=1)
    algorithm = config.Algorithm(advantage="gae", value_coefficient=0.25, value_clip=0.2, value_learning_rate=0.01)
    learner = make_learner(policy, algorithm=algorithm, temperature=TEMPERATURE, learning_rate=1e-6)
    assert learner._value is not None
    with torch.no_grad():
        learner._value.linear.weight.normal_(generator=torch.Generator().manual_seed(0))
    learner.prepare(rows)
    rng = np.random.default_rng(0)
    for row in rows:
        row.columns["returns"] = np.where(row.trained, rng.normal(size=len(row.tokens)), 0).astype(np.float32)
        row.columns["values"] += np.where(row.trained, rng.normal(0, 0.3, len(row.tokens)), 0).astype(np.float32)
    _, flat, sums = gradients(learner, rows)
    _, expected = by_the_book(policy, rows, Objective("ppo_clip"))
    of_head = learner._value.linear.weight.grad
    assert of_head is not None
    found_head = of_head.clone()
    learner._value.zero_grad()
    value_total = 0.0
    for row in rows:
        own = torch.from_numpy(row.trained[1:])
        ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
        states = policy.model.get_decoder()(input_ids=ids).last_hidden_state[0, :-1]  # type: ignore[operator]
        values = learner._value(states)[own]
        gains, before, weights = (
            torch.from_numpy(v[1:]).double()[own] for v in (row.columns["returns"], row.columns["values"], row.weights)
        )
        near = torch.maximum(torch.minimum(values, before + 0.2), before - 0.2)
        loss = (weights * 0.5 * torch.maximum((values - gains) ** 2, (near - gains) ** 2)).sum()
        loss.backward()
        value_total += float(loss.detach())
    of_values = torch.cat(
        [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in policy.model.parameters()]
    )
    assert sums.metrics(learner._objective)["value/loss"] == pytest.approx(value_total, rel=1e-6)
    assert relative(found_head, learner._value.linear.weight.grad) < 1e-6
    assert relative(flat, expected + 0.25 * of_values) < 1e-5
    assert relative(flat, expected) > 1e-3
    policy.model.zero_grad()
    before = learner._value.linear.weight.detach().clone()
    losses = [learner.update(rows)["value/loss"] for _ in range(3)]
    assert losses[-1] < losses[0]
    assert not torch.equal(before, learner._value.linear.weight)
    again = make_learner(make_policy(dtype=torch.float64), algorithm=algorithm, temperature=TEMPERATURE)
    again.load_state_dict(learner.state_dict())
    assert again._value is not None
    assert torch.equal(again._value.linear.weight, learner._value.linear.weight)
    with pytest.raises(PolicyError, match="the checkpoint has one; go on with the advantage"):
        make_learner(make_policy(dtype=torch.float64)).load_state_dict(learner.state_dict())


def test_with_adapters_the_base_model_is_the_reference():
    from peft import LoraConfig, get_peft_model

    base, rows = make_policy(dtype=torch.float64), make_rows(seed=25)
    plain = make_policy(dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = get_peft_model(base.model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))  # type: ignore[arg-type]
    policy = Policy(adapted.double().eval(), base.device, 256, Path("unused"), lora=True)
    learner = make_learner(policy, algorithm=config.Algorithm(kl_coefficient=0.1), temperature=TEMPERATURE)
    learner.prepare(rows)
    present = np.zeros(0)
    for row in rows:
        with torch.no_grad():
            expected = logprobs_of(plain.model, row)[0].numpy()[row.trained[1:]]
            present = logprobs_of(policy.model, row)[0].numpy()[row.trained[1:]]
        assert row.columns["reference"][row.trained] == pytest.approx(expected, rel=1e-4)
        assert present != pytest.approx(expected, rel=1e-2)
    assert learner.update(rows)["kl/reference"] > 0
    with torch.no_grad():  # the adapters are on again, and were trained
        assert logprobs_of(policy.model, rows[-1])[0].numpy()[rows[-1].trained[1:]] != pytest.approx(present, rel=1e-6)


def test_without_adapters_a_reference_has_to_be_given():
    with pytest.raises(PolicyError, match="a reference policy is needed"):
        make_learner(make_policy(), algorithm=config.Algorithm(kl_coefficient=0.1))


def test_rows_without_advantage_are_held_to_the_reference_all_the_same():
    policy, reference = make_policy(dtype=torch.float64), other_policy()
    rows = make_rows(seed=26, zero_group=True)
    algorithm = config.Algorithm(kl_coefficient=0.5, kl_estimator="k2")
    trainer = config.Trainer(learning_rate=1e-4, grad_clip=0.0)
    learner = Learner(policy, algorithm, trainer, "none", TEMPERATURE, reference=reference)
    learner.prepare(rows)
    metrics = learner.update(rows)
    assert metrics["learner/zero_advantage_tokens"] == 0
    still = [row for row in rows if row.group_id == "0"]

    def divergence() -> float:
        with torch.no_grad():
            now = torch.cat([logprobs_of(policy.model, row)[0][torch.from_numpy(row.trained[1:])] for row in still])
        given = torch.from_numpy(np.concatenate([row.columns["reference"][row.trained] for row in still])).double()
        return float(kl_estimate(now, given, "k2").mean())

    before = divergence()
    for _ in range(3):
        learner.update(still)
    assert divergence() < before


def test_a_value_head_needs_hidden_states():
    from test_learner import SHAPE, WINDOW
    from transformers import Gemma2Config

    described = Gemma2Config(**SHAPE, **WINDOW, query_pre_attn_scalar=8, final_logit_softcapping=3.0)
    with pytest.raises(PolicyError, match="'gae' needs hidden states"):
        make_learner(make_policy(described=described), algorithm=config.Algorithm(advantage="gae"))


def test_a_supervised_step_has_none_of_the_policys_terms():
    policy, rows = make_policy(), make_rows(seed=27)
    learner = make_learner(policy, algorithm=config.Algorithm(entropy_coefficient=0.5, advantage="gae"))
    assert "value/loss" not in learner.supervised(rows, 1e-3)
    plain = make_learner(make_policy())
    plain.supervised(rows, 1e-3)
    assert learner.supervised(rows, 1e-3)["loss"] == pytest.approx(plain.supervised(rows, 1e-3)["loss"], rel=1e-5)
