"""Packed weights against plain linear layers, and when they are made anew."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from longrein import config
from longrein.trainer.torch import packed
from longrein.trainer.torch.packed import PackedLinears
from longrein.trainer.torch.policy import load_policy
from longrein.trainer.torch.sampler import Sample, Sampler, Sampling

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this build of torch has no oneDNN",
)


def layer(bias: bool = False) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512, bias=bias))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
def test_sampling_over_packed_weights_gives_what_plain_layers_give(rows: int, bias: bool) -> None:
    model = layer(bias)
    expected = model(x := torch.randn(rows, 256)).detach()
    PackedLinears(model)
    with torch.inference_mode():
        found = model(x.clone())
    assert torch.allclose(found, expected, atol=1e-5)
    assert model[0].forward._packed is not None


def test_the_learner_computes_with_the_weights_themselves() -> None:
    model, plain = layer(), layer()
    packs = PackedLinears(model)
    x = torch.randn(8, 256)
    with torch.inference_mode():
        model(x.clone())
    with torch.no_grad():
        for one in (model, plain):
            one[0].weight.mul_(2)
    model(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
    packs.forget()
    with torch.inference_mode():
        assert torch.allclose(model(x.clone()), plain(x), atol=1e-5)


def test_a_copy_has_weights_of_its_own() -> None:
    model = layer()
    PackedLinears(model)
    x = torch.randn(8, 256)
    with torch.inference_mode():
        model(x.clone())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()
    with torch.inference_mode():
        assert not other(x.clone()).any()
        assert model(x.clone()).any()


def test_the_sampler_packs_anew_for_each_version(model_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "LEAST_WEIGHTS", 0)
    policy = load_policy(config.Model(path=str(model_folder("llama"))), 0)
    plain = copy.deepcopy(policy.model)
    sampler = Sampler(policy.model, max_batch=4, cache_tokens=0)
    prompt = np.arange(3, 12, dtype=np.int32)
    for version in (1, 2):
        with torch.no_grad():
            for mine, theirs in zip(policy.model.parameters(), plain.parameters(), strict=True):
                mine.mul_(1.3)
                theirs.mul_(1.3)
        sampler.changed(version)
        asked = Sample(prompt, Sampling(8, temperature=0.0))
        sampler.add(asked)
        while sampler.running or sampler.waiting:
            sampler.step()
        ids = torch.from_numpy(prompt[None].astype(np.int64))
        model: Any = plain
        whole = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert asked.sampled == whole[0, len(prompt) :].tolist()
