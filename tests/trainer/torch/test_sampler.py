"""The sampler against plain transformers: greedy tokens, log-probabilities, and independence of the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longrein import config
from longrein.trainer.torch.policy import Policy, load_policy
from longrein.trainer.torch.sampler import Sample, Sampler, Sampling, sample


def load(model_folder: Any, kind: str) -> Policy:
    folder: Path = model_folder(kind)
    return load_policy(config.Model(path=str(folder)), 0)


def prompts() -> list[np.ndarray]:
    """Prompts that share a beginning, two of them equal or one a beginning of the other."""
    rng = np.random.default_rng(0)
    base = rng.integers(3, 97, 9).astype(np.int32)
    made = [np.concatenate([base, rng.integers(3, 97, rng.integers(1, 20))]).astype(np.int32) for _ in range(6)]
    return [*made, made[0], made[1][:12]]


def run(sampler: Sampler) -> None:
    while sampler.running or sampler.waiting:
        sampler.step()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mistral_sliding"])
def test_greedy_tokens_are_those_of_generate(model_folder: Any, kind: str) -> None:
    policy = load(model_folder, kind)
    sampler = Sampler(policy.model, max_batch=16, cache_tokens=4096)
    asked = [Sample(prompt, Sampling(12, temperature=0.0)) for prompt in prompts()]
    for one in asked[:3]:
        sampler.add(one)
    sampler.step()
    for one in asked[3:]:  # the rest joins later
        sampler.add(one)
    run(sampler)
    for one in asked:
        ids = torch.from_numpy(one.ids[None].astype(np.int64))
        model: Any = policy.model
        whole = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert one.sampled == whole[0, len(one.ids) :].tolist()
        assert one.logprobs == [0.0] * 12


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_logprobs_are_those_of_a_plain_pass(model_folder: Any, kind: str) -> None:
    policy = load(model_folder, kind)
    sampler = Sampler(policy.model, max_batch=4, cache_tokens=4096)
    asked = [Sample(prompt, Sampling(12, temperature=0.7, seed=i)) for i, prompt in enumerate(prompts())]
    for one in asked:
        sampler.add(one)
    run(sampler)
    for one in asked:
        with torch.no_grad():
            logits = policy.model(torch.from_numpy(one.all_ids()[None].astype(np.int64))).logits[0].float() / 0.7
        logprobs = logits.log_softmax(-1)
        expected = [float(logprobs[len(one.ids) - 1 + i, token]) for i, token in enumerate(one.sampled)]
        assert one.logprobs == pytest.approx(expected, abs=1e-5)


def test_a_call_samples_the_same_tokens_whatever_runs_beside_it(model_folder: Any) -> None:
    policy = load(model_folder, "llama")
    alone = Sample(prompts()[0], Sampling(12, seed=5))
    sampler = Sampler(policy.model, max_batch=1, cache_tokens=0)
    sampler.add(alone)
    run(sampler)
    crowded = Sample(prompts()[0], Sampling(12, seed=5))
    sampler = Sampler(policy.model, max_batch=8, cache_tokens=4096)
    for one in [*(Sample(prompt, Sampling(9, seed=i)) for i, prompt in enumerate(prompts()[1:6])), crowded]:
        sampler.add(one)
    run(sampler)
    assert crowded.sampled == alone.sampled


def test_the_next_turn_computes_only_what_is_new_and_new_weights_forget(model_folder: Any) -> None:
    policy = load(model_folder, "llama")
    sampler = Sampler(policy.model, max_batch=4, cache_tokens=4096)
    first = Sample(prompts()[0], Sampling(6, seed=1))
    sampler.add(first)
    run(sampler)
    before = sampler.stats.prefilled_tokens
    sampler.add(Sample(np.concatenate([first.all_ids(), [7, 8, 9]]).astype(np.int32), Sampling(3, seed=2)))
    run(sampler)
    assert sampler.stats.prefilled_tokens - before == 3  # the last sampled token and two of the new ones
    sampler.changed(4)
    before = sampler.stats.prefilled_tokens
    again = Sample(first.ids, Sampling(2, seed=1))
    sampler.add(again)
    run(sampler)
    assert sampler.stats.prefilled_tokens - before == len(first.ids) - 1
    assert again.versions == [4, 4]


def test_an_aborted_sequence_ends_at_the_next_step(model_folder: Any) -> None:
    sampler = Sampler(load(model_folder, "llama").model, max_batch=4, cache_tokens=64)
    one, other = (Sample(prompt, Sampling(50)) for prompt in prompts()[:2])
    sampler.add(one)
    sampler.add(other)
    sampler.step()
    one.aborted = True
    assert one in sampler.step()
    assert (one.finish_reason, len(one.sampled), len(other.sampled)) == ("abort", 1, 2)


def test_tokens_follow_the_distribution_they_are_reported_under() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0]]).repeat(4000, 1)
    uniforms = np.linspace(0, 1, 4000, endpoint=False).tolist()
    tokens, logprobs = sample(logits, [Sampling(1, temperature=0.5, top_k=3)] * 4000, uniforms)
    expected = (logits[0, :3] / 0.5).softmax(-1)
    shares = np.bincount(tokens, minlength=5) / 4000
    assert shares[:3] == pytest.approx(expected.numpy(), abs=1e-3)
    assert shares[3:].sum() == 0
    assert logprobs[0] == pytest.approx(float(expected[tokens[0]].log()), abs=1e-5)
    kept, _ = sample(logits, [Sampling(1, top_p=0.6)] * 4000, uniforms)
    assert set(kept) == {0}
