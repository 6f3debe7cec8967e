import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from longrein import config
from longrein.learning.loss import Objective
from longrein.trainer.torch.forward import Forward
from longrein.trainer.torch.learner import Learner, Sums
from longrein.trainer.torch.policy import Policy
from longrein.trajectory.batch import Row

VOCAB = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
WINDOW: dict[str, Any] = {"sliding_window": 6}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, **WINDOW, query_pre_attn_scalar=8),
    "mistral": lambda: MistralConfig(**SHAPE, **WINDOW),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **MOE),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2
    ),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_policy(kind="llama", dtype=torch.float32, described=None):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(described or CONFIGS[kind]())
        with torch.no_grad():
            for parameter in model.parameters():  # gains and biases too, or some gradients are equal by symmetry
                parameter.add_(0.05 * torch.randn_like(parameter))
    return Policy(model.to(dtype).eval(), torch.device("cpu"), 256, Path("unused"))


def make_learner(policy, *, algorithm=None, budget=4096, temperature=1.0, autocast="none", **trainer):
    trainer = config.Trainer(**{"learning_rate": 0.01, "tokens_per_micro_batch": budget, "grad_clip": 0.0, **trainer})
    return Learner(policy, algorithm or config.Algorithm(), trainer, autocast, temperature)


def make_rows(seed=0, groups=3, members=4, zero_group=False, prompt=(20, 30)):
    """Groups of rows that share a prompt; each row has two sampled stretches with context in between."""
    rng = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        shared = rng.integers(0, VOCAB, rng.integers(*prompt))
        for member in range(members):
            own = rng.integers(0, VOCAB, rng.integers(8, 16))
            tokens = np.concatenate([shared, own]).astype(np.int32)
            trained = np.zeros(len(tokens), bool)
            trained[len(shared) : len(shared) + 3] = True
            trained[-4:-1] = True
            count = int(trained.sum())
            advantage = 0.0 if zero_group and group == 0 else rng.normal()
            rows.append(
                Row(
                    f"{group}-{member}",
                    f"{group}",
                    tokens,
                    trained,
                    np.where(trained, rng.normal(-4, 0.5, len(tokens)), 0).astype(np.float32),
                    np.where(trained, 0, -1).astype(np.int32),
                    np.where(trained, advantage, 0).astype(np.float32),
                    np.where(trained, 1 / (groups * members * count), 0.0),
                )
            )
    return rows


def gradients(learner, rows, objective=None):
    """Loss and gradient of the learner, and the sums behind its metrics."""
    model = learner.policy.model
    model.zero_grad()
    sums = Sums()
    objective = objective or learner._objective
    learner._gradient(rows, objective, sums)
    flat = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return sums.metrics(objective)["loss"], flat, sums


def reference(policy, rows, objective, temperature=1.0):
    """The same by the book: one row at a time, all logits, autograd."""
    model = policy.model
    model.zero_grad()
    total = 0.0
    for row in rows:
        tokens = torch.from_numpy(row.tokens.astype(np.int64))[None]
        logits = model(tokens, use_cache=False).logits[0, :-1] / temperature
        logprobs = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        behaviour, advantages, weights = (
            torch.from_numpy(values[1:]).to(logits.dtype) for values in (row.logprobs, row.advantages, row.weights)
        )
        loss = (weights * objective.token_losses(logprobs, behaviour, advantages)).sum()
        loss.backward()
        total += float(loss.detach())
    flat = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return total, flat


def relative(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("budget", [4096, 150, 1])
def test_loss_and_gradient_are_those_of_plain_rows_however_they_are_cut(kind, budget):
    policy, rows = make_policy(kind), make_rows()
    learner = make_learner(policy, budget=budget)
    loss, flat, sums = gradients(learner, rows)
    expected_loss, expected = reference(policy, rows, learner._objective)
    # The loss is a sum of terms of both signs, each of the size of a float32's 1: its rounding is theirs, not its own.
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7)
    assert relative(flat, expected) < 1e-5
    assert sums.micro_batches == {4096: 1, 150: sums.micro_batches, 1: len(rows)}[budget]
    if budget == 4096:
        assert learner._forward.shares_prefixes
        assert sums.computed_tokens < 0.6 * sum(len(row.tokens) for row in rows)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_in_float64_they_are_equal_to_rounding(kind, monkeypatch):
    monkeypatch.setattr("longrein.trainer.torch.learner.LOGITS_AT_ONCE", {"cpu": 7 * VOCAB})
    policy, rows = make_policy(kind, torch.float64), make_rows(seed=1)
    results = {}
    for budget in (4096, 150):
        learner = make_learner(policy, budget=budget, temperature=0.7)
        results[budget] = gradients(learner, rows)
        expected_loss, expected = reference(policy, rows, learner._objective, 0.7)
        assert results[budget][0] == pytest.approx(expected_loss, rel=1e-7)
        # Norms and rotations are computed in float32 by these models; that is what is left.
        assert relative(results[budget][1], expected) < 1e-6
    assert relative(results[4096][1], results[150][1]) < 1e-6


@pytest.mark.parametrize(
    "algorithm",
    [
        config.Algorithm(loss="ppo_clip", clip_low=0.1, clip_high=0.1),
        config.Algorithm(loss="reinforce"),
        config.Algorithm(loss="ppo_clip", correction="tis", correction_cap=1.5),
    ],
)
def test_every_loss_has_the_gradient_of_its_formula(algorithm):
    policy, rows = make_policy(), make_rows(seed=2)
    learner = make_learner(policy, algorithm=algorithm)
    loss, flat, _ = gradients(learner, rows)
    expected_loss, expected = reference(policy, rows, learner._objective)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative(flat, expected) < 1e-5


def test_a_model_that_caps_its_logits_is_computed_whole():
    described = Gemma2Config(
        **SHAPE, **WINDOW, query_pre_attn_scalar=8, final_logit_softcapping=3.0, attn_logit_softcapping=None
    )
    policy, rows = make_policy(described=described), make_rows(seed=3)
    learner = make_learner(policy)
    assert learner._forward._head is None
    loss, flat, _ = gradients(learner, rows)
    expected_loss, expected = reference(policy, rows, learner._objective)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative(flat, expected) < 1e-5


def test_a_model_without_keys_and_values_is_trained_as_rows_and_the_log_says_so(caplog):
    described = MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8)
    policy, rows = make_policy(described=described), make_rows(seed=3)
    with caplog.at_level(logging.INFO):
        loss, flat, sums = gradients(make_learner(policy), rows)
    assert "prefixes are not shared" in caplog.text
    assert sums.computed_tokens >= sum(len(row.tokens) - 2 for row in rows)
    expected_loss, expected = reference(policy, rows, Objective("ppo_clip"))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative(flat, expected) < 1e-5


def test_sharing_that_changes_the_result_is_found_out(caplog):
    policy = make_policy()
    forward = Forward(policy.model, policy.device)
    whole = forward._run

    # A cache whose gradient is lost, as an architecture that detaches it would have.
    def detached(ids, positions=None, seen=None, cache=None):
        states = whole(ids, positions, seen, cache)
        for layer in cache.layers if cache is not None else ():
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return states

    forward._run = detached
    with caplog.at_level(logging.INFO):
        assert not forward.shares_prefixes
    assert "has other gradients" in caplog.text


def test_a_trunk_may_hold_trained_tokens_of_any_of_its_rows():
    # A rollout that forked late: two rows share a history in which the first row's tokens are trained.
    first, second = make_rows(seed=4, groups=1, members=2)
    tokens = np.concatenate([first.tokens, second.tokens[-6:]])
    pad = len(tokens) - len(first.tokens)
    other = Row(
        "0-0",
        "0",
        np.concatenate([tokens[: len(first.tokens) - 1], tokens[-pad:], [3]]).astype(np.int32),
        np.concatenate([np.zeros(len(first.tokens) - 1, bool), np.ones(pad + 1, bool)]),
        np.concatenate([np.zeros(len(first.tokens) - 1), np.full(pad + 1, -4)]).astype(np.float32),
        np.zeros(len(tokens), np.int32),
        np.concatenate([np.zeros(len(first.tokens) - 1), np.full(pad + 1, 0.7)]).astype(np.float32),
        np.concatenate([np.zeros(len(first.tokens) - 1), np.full(pad + 1, 0.03)]),
    )
    policy = make_policy()
    learner = make_learner(policy)
    loss, flat, sums = gradients(learner, [first, other])
    expected_loss, expected = reference(policy, [first, other], learner._objective)
    assert sums.computed_tokens < len(first.tokens) + len(other.tokens) - 20
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative(flat, expected) < 1e-5


def test_rollouts_that_came_out_equal_are_computed_once():
    first, second, third = make_rows(seed=16, groups=1, members=3)
    again = replace(
        first, rollout_id="again", advantages=-2 * first.advantages, logprobs=first.logprobs + 0.1 * first.trained
    )
    other_end = replace(first, rollout_id="end", tokens=first.tokens.copy())
    other_end.tokens[-2] = (other_end.tokens[-2] + 1) % VOCAB  # the last trained token
    rows = [second, first, again, third, other_end]
    policy = make_policy()
    learner = make_learner(policy)
    loss, flat, sums = gradients(learner, rows)
    assert sums.computed_tokens == gradients(learner, [first, second, third])[2].computed_tokens
    assert sums.count == sum(int(row.trained.sum()) for row in rows)
    expected_loss, expected = reference(policy, rows, learner._objective)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative(flat, expected) < 1e-5


def test_rows_without_advantage_are_not_computed_and_keep_their_weight():
    policy, rows = make_policy(), make_rows(seed=5, zero_group=True)
    learner = make_learner(policy)
    expected_loss, expected = reference(policy, rows, learner._objective)
    computed = [row for row in rows if row.group_id != "0"]
    loss, flat, _ = gradients(learner, computed)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative(flat, expected) < 1e-5
    metrics = learner.update(rows)
    assert metrics["loss"] == pytest.approx(expected_loss, rel=1e-5)
    assert metrics["learner/trained_tokens"] == sum(int(row.trained.sum()) for row in rows)
    assert metrics["learner/zero_advantage_tokens"] == sum(int(r.trained.sum()) for r in rows if r.group_id == "0")
    assert metrics["learner/computed_tokens"] < sum(len(row.tokens) for row in computed)


def test_an_update_without_any_advantage_changes_nothing_and_reports_no_policy_metrics():
    policy = make_policy()
    learner = make_learner(policy, weight_decay=0.1)
    learner.update(make_rows(seed=6))
    before = [p.detach().clone() for p in policy.model.parameters()]
    metrics = learner.update(make_rows(seed=7, groups=1, zero_group=True))
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
    assert metrics["loss"] == metrics["grad_norm"] == 0.0
    assert "entropy" not in metrics
    assert learner.updates == 2


def test_metrics_are_those_of_the_distribution():
    policy, rows = make_policy(), make_rows(seed=8, groups=1, members=2)
    metrics = make_learner(policy, temperature=1.3).update(rows)
    policy = make_policy()
    entropy = gap = kl = 0.0
    ratios = []
    for row in rows:
        with torch.no_grad():
            logits = policy.model(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0, :-1] / 1.3
        at = np.flatnonzero(row.trained) - 1
        logprobs = logits.log_softmax(-1)[at]
        chosen = logprobs.gather(1, torch.from_numpy(row.tokens[row.trained].astype(np.int64))[:, None])[:, 0]
        difference = chosen - torch.from_numpy(row.logprobs[row.trained])
        entropy += float(-(logprobs.exp() * logprobs).sum(-1).mean()) / len(rows)
        kl += float(-difference.mean()) / len(rows)
        gap += float(difference.abs().mean()) / len(rows)
        ratios += difference.exp().tolist()
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert metrics["kl/k1"] == pytest.approx(kl, rel=1e-5)
    assert metrics["logprob_gap"] == pytest.approx(gap, rel=1e-5)
    assert metrics["ratio/mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert metrics["ratio/max"] == pytest.approx(max(ratios), rel=1e-5)
    assert 0 < metrics["clip/low"] + metrics["clip/high"] < 1


def test_an_update_is_one_adamw_step_with_warmed_up_rate_and_clipped_gradient():
    rows = make_rows(seed=9)
    policy = make_policy()
    learner = make_learner(policy, lr_warmup_steps=4, grad_clip=1e-3, weight_decay=0.1)
    model = make_policy().model
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    by_hand = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    for update in range(3):
        metrics = learner.update(rows)
        assert metrics["learning_rate"] == pytest.approx(0.01 * (update + 1) / 4)
        for row in rows:
            tokens = torch.from_numpy(row.tokens.astype(np.int64))[None]
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            columns = (torch.from_numpy(v[1:]).float() for v in (row.logprobs, row.advantages, row.weights))
            behaviour, advantages, weights = columns
            (weights * learner._objective.token_losses(logprobs, behaviour, advantages)).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        for group in by_hand.param_groups:
            group["lr"] = metrics["learning_rate"]
        by_hand.step()
        by_hand.zero_grad()
    for ours, theirs in zip(policy.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=2e-4)
        assert ours.grad is None


def test_updates_raise_what_had_a_positive_advantage():
    policy, rows = make_policy(), make_rows(seed=10, groups=1)
    learner = make_learner(policy, algorithm=config.Algorithm(loss="reinforce"), learning_rate=1e-3)
    losses = [learner.update(rows)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0]


def test_supervised_steps_lower_the_cross_entropy_with_an_optimizer_of_their_own():
    policy, rows = make_policy(), make_rows(seed=11)
    learner = make_learner(policy)
    expected, _ = reference(policy, rows, Objective("cross_entropy"))
    losses = [learner.supervised(rows, 3e-3) for _ in range(6)]
    assert losses[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert losses[0]["logprob"] == pytest.approx(-expected, rel=1e-5)
    assert losses[-1]["loss"] < 0.7 * losses[0]["loss"]
    assert losses[0]["learning_rate"] == 3e-3
    assert "kl/k1" not in losses[0]
    assert learner.updates == 0
    assert not learner.state_dict()["optimizer"]["state"]
    learner.update(rows)
    assert learner.state_dict()["supervised"] is None


def test_a_gradient_that_is_not_finite_makes_no_step(caplog):
    policy, rows = make_policy(), make_rows(seed=12, groups=1)
    rows[0].logprobs[rows[0].trained] = -np.inf
    before = [p.detach().clone() for p in policy.model.parameters()]
    rows[0].advantages[rows[0].trained] = -1.0
    metrics = make_learner(policy).update(rows)
    assert not np.isfinite(metrics["grad_norm"])
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters(), strict=True))
    assert "this update is left out" in caplog.text


def test_a_learner_goes_on_from_its_state_to_the_bit(tmp_path):
    rows = make_rows(seed=13)
    one = make_policy()
    learner = make_learner(one)
    for _ in range(2):
        learner.update(rows)
    torch.save(learner.state_dict(), tmp_path / "state")
    other = make_policy()
    other.model.load_state_dict(one.model.state_dict())
    resumed = make_learner(other)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert resumed.updates == 2
    learner.update(rows)
    resumed.update(rows)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


def test_autocast_stays_close_to_full_precision_and_keeps_the_weights_type():
    rows = make_rows(seed=14)
    policy = make_policy()
    _, expected, _ = gradients(make_learner(policy), rows)
    _, flat, sums = gradients(make_learner(policy, autocast="bfloat16", budget=150), rows)
    assert 1e-5 < relative(flat, expected) < 0.1
    assert sums.micro_batches > 1
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert make_learner(policy, autocast="auto")._autocast is None  # far too small to gain from it


def test_adapters_alone_are_trained_and_share_prefixes_too():
    from peft import LoraConfig, get_peft_model

    policy, rows = make_policy(), make_rows(seed=15)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(policy.model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    policy = Policy(model.eval(), policy.device, 256, Path("unused"), lora=True)
    learner = make_learner(policy)
    loss, flat, sums = gradients(learner, rows)
    expected_loss, expected = reference(policy, rows, learner._objective)
    assert learner._forward.shares_prefixes
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert relative(flat, expected) < 1e-5
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    learner.update(rows)
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    assert sums.computed_tokens < 0.6 * sum(len(row.tokens) for row in rows)
