"""The sampler against plain transformers: greedy tokens, log-probabilities, and independence of the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longrein import config
from longrein.trainer.torch.cache import PrefixStore
from longrein.trainer.torch.compute import RowsEngine, SingleEngine, make_engine
from longrein.trainer.torch.policy import Policy, load_policy
from longrein.trainer.torch.sampler import MANY_RUNNING, PATIENCE, Sample, Sampler, Sampling, Stats, sample


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
    tokens, logprobs, _ = sample(logits, [Sampling(1, temperature=0.5, top_k=3)] * 4000, uniforms)
    expected = (logits[0, :3] / 0.5).softmax(-1)
    shares = np.bincount(tokens, minlength=5) / 4000
    assert shares[:3] == pytest.approx(expected.numpy(), abs=1e-3)
    assert shares[3:].sum() == 0
    assert logprobs[0] == pytest.approx(float(expected[tokens[0]].log()), abs=1e-5)
    kept, _, _ = sample(logits, [Sampling(1, top_p=0.6)] * 4000, uniforms)
    assert set(kept) == {0}


def greedy(policy: Policy, prompt: np.ndarray, count: int) -> list[int]:
    """What plain passes without any cache give."""
    ids = torch.from_numpy(prompt[None].astype(np.int64))
    with torch.inference_mode():
        for _ in range(count):
            logits = policy.model(input_ids=ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mistral_sliding"])
def test_architectures_that_are_batched(model_folder: Any, kind: str) -> None:
    assert isinstance(make_engine(load(model_folder, kind).model, 0, Stats()), RowsEngine)


def test_a_model_that_rows_do_not_fit_is_served_one_by_one(model_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(model_folder, "llama")
    monkeypatch.setattr("longrein.trainer.torch.compute._agrees", lambda model, shape: False)
    sampler = Sampler(policy.model, max_batch=3, cache_tokens=100)
    assert isinstance(sampler.engine, SingleEngine)
    asked = [Sample(prompt, Sampling(7, temperature=0.0)) for prompt in prompts()]
    for one in asked:
        sampler.add(one)
    run(sampler)
    assert [one.sampled for one in asked] == [greedy(policy, one.ids, 7) for one in asked]
    assert sampler.engine._caches == {}


def test_a_model_that_computes_otherwise_over_rows_is_found_out(model_folder: Any) -> None:
    policy = load(model_folder, "llama")
    rotary: Any = policy.model.model.rotary_emb  # type: ignore[union-attr]
    plain = rotary.forward

    def shuffled(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return plain(x, position_ids * (2 if len(x) > 1 else 1))  # other positions in a batch than alone

    rotary.forward = shuffled
    assert isinstance(make_engine(policy.model, 0, Stats()), SingleEngine)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_joining_leaving_sharing_and_aborting_change_no_token(model_folder: Any, data: st.DataObject) -> None:
    policy = load(model_folder, "llama")
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    sampler = Sampler(
        policy.model, max_batch=data.draw(st.integers(1, 5)), cache_tokens=data.draw(st.sampled_from([0, 60, 4096]))
    )
    sampler.engine._budget = data.draw(st.sampled_from([3, 16, 512]))
    known = [rng.integers(3, 97, rng.integers(1, 30)).astype(np.int32) for _ in range(3)]
    asked: list[Sample] = []
    for action in data.draw(
        st.lists(st.sampled_from(["new", "again", "continue", "step", "step", "abort"]), max_size=24)
    ):
        if action == "step":
            sampler.step()
        elif action == "abort":
            if asked:
                asked[int(rng.integers(len(asked)))].aborted = True
        else:
            base = known[int(rng.integers(len(known)))]
            finished = [one for one in asked if one.finish_reason == "length"]
            if action == "continue" and finished:
                base = finished[-1].all_ids()
            fresh = rng.integers(3, 97, 0 if action == "again" else rng.integers(1, 12)).astype(np.int32)
            asked.append(
                Sample(np.concatenate([base, fresh])[:120], Sampling(int(rng.integers(1, 9)), temperature=0.0))
            )
            sampler.add(asked[-1])
    run(sampler)
    for one in asked:
        assert one.finish_reason in ("length", "abort")
        assert one.sampled == greedy(policy, one.ids, len(one.sampled))
        if one.finish_reason == "length":
            assert len(one.sampled) == one.sampling.max_tokens


def test_a_group_that_arrives_one_by_one_computes_its_prompt_once(model_folder: Any) -> None:
    sampler = Sampler(load(model_folder, "llama").model, max_batch=8, cache_tokens=0)
    prompt = np.arange(3, 60, dtype=np.int32)
    for seed in range(8):
        sampler.add(Sample(prompt, Sampling(20, seed=seed)))
        sampler.step()
    assert sampler.stats.prefilled_tokens == len(prompt) - 1
    assert sampler.stats.reused_tokens == 7 * (len(prompt) - 1)


def test_a_long_prompt_does_not_stop_those_that_run(model_folder: Any) -> None:
    sampler = Sampler(load(model_folder, "llama").model, max_batch=4, cache_tokens=0)
    sampler.engine._budget = 16
    running = Sample(prompts()[0], Sampling(50))
    sampler.add(running)
    while not running.sampled:
        sampler.step()
    long = Sample(np.arange(90, dtype=np.int32), Sampling(2, temperature=0.0))
    sampler.add(long)
    steps = 0
    while not long.sampled:
        before = len(running.sampled)
        sampler.step()
        steps += 1
        assert len(running.sampled) == before + 1
    assert steps == 6


def test_what_was_computed_with_earlier_weights_is_not_given_to_new_requests(model_folder: Any) -> None:
    policy = load(model_folder, "llama")
    sampler = Sampler(policy.model, max_batch=4, cache_tokens=4096)
    prompt = np.arange(3, 40, dtype=np.int32)
    old = Sample(prompt, Sampling(4, temperature=0.0))
    sampler.add(old)
    sampler.step()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.3)
    sampler.changed(1)
    during = Sample(prompt, Sampling(3, temperature=0.0))
    sampler.add(during)
    run(sampler)
    after = Sample(old.all_ids(), Sampling(3, temperature=0.0))
    sampler.add(after)
    run(sampler)
    assert during.sampled == greedy(policy, during.ids, 3)
    assert after.sampled == greedy(policy, after.ids, 3)
    assert old.versions == [0, 1, 1, 1]


@settings(max_examples=40, deadline=None)
@given(
    scores=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12),
    temperature=st.floats(0.2, 2.0),
    top_k=st.integers(0, 6),
    top_p=st.floats(0.05, 1.0),
)
def test_top_k_and_top_p(scores: list[float], temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.tensor(scores) + torch.arange(len(scores)) * 1e-3  # no ties
    expected = (logits / temperature).double().softmax(-1)
    order = expected.argsort(descending=True)
    kept = expected[order][: top_k or len(scores)]
    kept = kept / kept.sum()
    before = kept.cumsum(0) - kept
    if ((before - top_p).abs() < 1e-5).any():
        return  # rounding decides
    kept = kept[before < top_p]
    kept = kept / kept.sum()
    many = 500
    uniforms = [(i + 0.5) / many for i in range(many)]
    options = Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, logprobs, _ = sample(logits.repeat(many, 1), [options] * many, uniforms)
    found = dict(zip(tokens, logprobs, strict=True))
    assert set(found) <= set(order[: len(kept)].tolist())
    for token, share in zip(order.tolist(), kept.tolist(), strict=False):
        assert tokens.count(token) / many == pytest.approx(share, abs=2.1 / many)
        if token in found:
            assert found[token] == pytest.approx(np.log(share), abs=1e-4)


def test_rows_of_different_options_in_one_batch_and_a_real_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 50000, generator=generator)
    options = [
        Sampling(1),
        Sampling(1, temperature=0.0),
        Sampling(1, top_k=1),
        Sampling(1, top_p=0.9, temperature=0.7),
        Sampling(1, top_k=5, top_p=0.999),
    ]
    uniforms = [0.0, 0.99, 0.5, 0.999999, 1 - 2**-53]
    tokens, logprobs, _ = sample(logits, options, uniforms)
    together = [sample(logits[i : i + 1], options[i : i + 1], uniforms[i : i + 1]) for i in range(5)]
    assert tokens == [one[0][0] for one in together]
    assert logprobs == pytest.approx([one[1][0] for one in together], abs=1e-6)
    best = logits.argmax(-1).tolist()
    assert tokens[0] == 0  # the smallest number takes the first token that has any probability
    assert (tokens[1], tokens[2], logprobs[1]) == (best[1], best[2], 0.0)
    assert logprobs[2] == pytest.approx(0.0, abs=1e-6)
    assert logprobs[0] == pytest.approx(float(logits[0].log_softmax(-1)[0]), abs=1e-5)
    assert tokens[4] in logits[4].topk(5).indices.tolist()


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(FloatingPointError, match="diverged"):
        sample(torch.tensor([[1.0, float("nan")]]), [Sampling(1)], [0.5])


def test_the_store_keeps_what_was_used_lately() -> None:
    store = PrefixStore(10)

    def add(*ids: int) -> None:
        store.add(np.array(ids, np.int32), torch.zeros(1, 2, 1, len(ids), 1))

    add(1, 2, 3)
    add(1, 2, 3, 4)  # extends the first, which goes
    assert store.tokens == 4
    add(5, 6, 7)
    entry, shared = store.longest(np.array([1, 2, 3, 9], np.int32))
    assert entry is not None
    assert shared == 3
    add(8, 8, 8, 8)  # too many: the one that was used least lately is 5, 6, 7
    assert store.longest(np.array([5, 6], np.int32)) == (None, 0)
    assert store.longest(np.array([1, 2, 3, 4, 5], np.int32))[1] == 4
    assert store.tokens == 8
    store.clear()
    assert store.longest(np.array([1], np.int32)) == (None, 0)


def test_a_few_prompt_tokens_wait_a_few_steps_for_others_where_many_run(model_folder: Any) -> None:
    policy = load(model_folder, "llama")
    sampler = Sampler(policy.model, max_batch=64, cache_tokens=0)
    rng = np.random.default_rng(0)
    many = [Sample(rng.integers(3, 97, 12).astype(np.int32), Sampling(40)) for _ in range(MANY_RUNNING)]
    for one in many:
        sampler.add(one)
    sampler.step()
    assert all(one.sampled for one in many)  # nobody waits where nothing runs
    late = Sample(rng.integers(3, 97, 12).astype(np.int32), Sampling(4))
    sampler.add(late)
    waited = 0
    while not late.sampled:
        sampler.step()
        waited += 1
    assert 1 < waited <= PATIENCE + 1
    run(sampler)
    assert all(one.finish_reason == "length" for one in (*many, late))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral_sliding", "one by one"])
@pytest.mark.parametrize("recompute", [True, False])
def test_running_sequences_go_on_with_new_weights_over_new_keys_and_values_or_old_ones(
    model_folder: Any, kind: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "one by one":
        monkeypatch.setattr("longrein.trainer.torch.compute.rows_shape", lambda model: None)
    policy = load(model_folder, "llama" if kind == "one by one" else kind)
    sampler = Sampler(policy.model, max_batch=16, cache_tokens=4096)
    assert isinstance(sampler.engine, SingleEngine if kind == "one by one" else RowsEngine)
    asked = [Sample(prompt, Sampling(14, seed=i)) for i, prompt in enumerate(prompts())]
    for one in asked[:6]:
        sampler.add(one)
    while min(len(one.sampled) for one in asked[:6]) < 4:
        sampler.step()
    for one in asked[6:]:
        sampler.add(one)
    sampler.step()  # these two have only begun
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.2)
    before = [len(one.sampled) for one in asked]
    sampler.changed(1, recompute=recompute)
    run(sampler)
    gaps = []
    for one, old in zip(asked, before, strict=True):
        assert one.versions == [0] * old + [1] * (14 - old)
        ids = torch.from_numpy(one.all_ids()[None].astype(np.int64))
        with torch.inference_mode():
            logits = policy.model(ids).logits[0, len(one.ids) - 1 : -1].float()
        fresh = logits.log_softmax(-1).gather(1, torch.tensor(one.sampled)[:, None])[old:, 0]
        gaps.append(float((fresh - torch.tensor(one.logprobs[old:])).abs().max()))
    assert (max(gaps) < 1e-3) == recompute
    later = Sample(np.concatenate([asked[0].all_ids(), [5, 6]]).astype(np.int32), Sampling(1))
    reused = sampler.stats.reused_tokens
    sampler.add(later)
    run(sampler)
    # What was computed anew serves later calls; what was not serves none.
    assert (sampler.stats.reused_tokens - reused >= len(asked[0].ids)) == (recompute and kind != "one by one")
