from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForMaskedLM

from longrein import config
from longrein.trainer.torch.policy import Policy, PolicyError, load_policy, merged_weights, refresh, sampling_model

LORA = config.Lora(rank=4, alpha=8.0)


def _options(folder: Path, **changes: Any) -> config.Model:
    return config.Model(path=str(folder), device="cpu", **changes)


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([[5, 6, 7, 8]])).logits


def _disturb(policy: Policy) -> None:
    """Change every trained weight, so that a copy that is not brought up to date differs."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)


def test_loads_a_folder(policy: Policy, model_folder: Any) -> None:
    assert policy.context == 256
    assert policy.vocab_size == 97
    assert policy.folder == model_folder("llama")
    assert all(p.dtype == torch.float32 and p.requires_grad for p in policy.model.parameters())


def test_missing_folder_names_the_path_and_what_to_put_there(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"nowhere is not a folder.*config\.json.*safetensors"):
        load_policy(_options(tmp_path / "nowhere"), 0)
    with pytest.raises(PolicyError, match=r"model\.path is empty"):
        load_policy(config.Model(), 0)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"has no config\.json"):
        load_policy(_options(tmp_path), 0)


def test_not_a_causal_language_model(tmp_path: Path) -> None:
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 9,
    }
    BertForMaskedLM(BertConfig(**shape)).save_pretrained(tmp_path)  # type: ignore
    with pytest.raises(PolicyError, match="BertForMaskedLM, which is not a causal language model"):
        load_policy(_options(tmp_path), 0)


def test_missing_weights_are_not_made_up(tmp_path: Path, make_model: Any) -> None:
    from safetensors.torch import load_file, save_file

    make_model("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PolicyError, match=r"lack 1 tensors, for example model\.layers\.1\.mlp\.up_proj\.weight"):
        load_policy(_options(tmp_path), 0)


def test_dropout_is_refused(tmp_path: Path, make_model: Any) -> None:
    make_model("llama", tmp_path, attention_dropout=0.1)
    with pytest.raises(PolicyError, match=r"attention_dropout = 0\.1"):
        load_policy(_options(tmp_path), 0)


def test_context(model_folder: Any) -> None:
    assert load_policy(_options(model_folder(), context=64), 0).context == 64
    with pytest.raises(PolicyError, match=r"model\.context: 512 is beyond the model's own maximum of 256"):
        load_policy(_options(model_folder(), context=512), 0)


def test_saved_checkpoint_is_a_whole_model_folder(policy: Policy, model_folder: Any, tmp_path: Path) -> None:
    _disturb(policy)
    policy.chat_template = tmp_path / "own.jinja"
    policy.chat_template.write_text("{{ messages }}")
    folder = tmp_path / "checkpoint"
    policy.save(folder)
    torch.testing.assert_close(
        _logits(AutoModelForCausalLM.from_pretrained(folder)), _logits(policy.model), rtol=0, atol=0
    )
    assert AutoTokenizer.from_pretrained(folder)("w5 w6")["input_ids"] == [5, 6]
    for name in ("tokenizer.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (model_folder() / name).read_bytes()
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_lora_checkpoint_has_merged_weights_and_the_adapter(kind: str, model_folder: Any, tmp_path: Path) -> None:
    policy = load_policy(_options(model_folder(kind), lora=LORA), seed=3)
    base = _logits(policy.model)
    _disturb(policy)
    tuned = _logits(policy.model)
    assert (tuned - base).abs().max() > 1e-2
    policy.save(tmp_path)
    torch.testing.assert_close(_logits(AutoModelForCausalLM.from_pretrained(tmp_path)), tuned, rtol=1e-4, atol=1e-5)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
    torch.testing.assert_close(_logits(policy.model), tuned)  # saving left the adapters as they were


def test_lora_starts_from_the_seed(model_folder: Any) -> None:
    def adapters(seed: int) -> list[torch.Tensor]:
        policy = load_policy(_options(model_folder(), lora=LORA), seed)
        return [p for name, p in policy.model.named_parameters() if "lora_A" in name]

    first, same, other = adapters(1), adapters(1), adapters(2)
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_only_adapters_are_trained(model_folder: Any) -> None:
    policy = load_policy(_options(model_folder(), lora=LORA), 0)
    assert {name.split(".")[-3] for name, p in policy.model.named_parameters() if p.requires_grad} == {
        "lora_A",
        "lora_B",
    }
    with pytest.raises(PolicyError, match=r"model\.lora\.targets"):
        load_policy(_options(model_folder(), lora=config.Lora(rank=4, targets=["nothing_like_it"])), 0)


def test_sampler_uses_the_learners_own_module(policy: Policy) -> None:
    assert sampling_model(policy, "same") is policy.model
    assert sampling_model(policy, "float32") is policy.model
    refresh(policy.model, policy)


def test_lower_precision_copy_follows_the_learner(policy: Policy) -> None:
    copy = sampling_model(policy, "bfloat16")
    assert {p.dtype for p in copy.parameters()} == {torch.bfloat16}
    assert all(b.dtype == torch.float32 for b in copy.buffers())  # rotary frequencies keep their precision
    _disturb(policy)
    refresh(copy, policy)
    for name, weight in merged_weights(policy):
        assert torch.equal(copy.get_parameter(name), weight.to(torch.bfloat16)), name


@pytest.mark.parametrize("dtype", ["same", "bfloat16"])
def test_lora_copy_is_merged_and_follows_the_learner(dtype: str, model_folder: Any) -> None:
    policy = load_policy(_options(model_folder("qwen3"), lora=LORA), 0)
    copy = sampling_model(policy, dtype)
    before = _logits(copy)
    _disturb(policy)
    refresh(copy, policy)
    after = _logits(copy)
    assert (after - before).abs().max() > 1e-2
    tolerance = 1e-5 if dtype == "same" else 0.2
    torch.testing.assert_close(after.float(), _logits(policy.model), rtol=0, atol=tolerance)
