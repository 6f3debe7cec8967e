"""Tiny random models in Hugging Face format, one per architecture that the engine is tried with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from longrein import config
from longrein.trainer.torch.policy import Policy, load_policy

torch.set_num_threads(1)

VOCAB = 97

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS = {
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SHAPE, tie_word_embeddings=False),
    "gemma3": lambda: Gemma3TextConfig(
        **_SHAPE, sliding_window=6, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "mistral_sliding": lambda: MistralConfig(**_SHAPE, sliding_window=6),
}


def make_model(kind: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of `kind` with a word-per-token tokenizer into `folder`."""
    described = CONFIGS[kind]()
    for name, value in changes.items():
        setattr(described, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(described)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a kind to the folder of its random model, made once."""
    made: dict[str, Path] = {}

    def folder(kind: str = "llama") -> Path:
        if kind not in made:
            made[kind] = make_model(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


@pytest.fixture(name="make_model")
def make_model_fixture() -> Any:
    """`make_model` for tests that change a model's config."""
    return make_model


@pytest.fixture
def policy(model_folder: Any) -> Policy:
    """A fresh tiny Llama policy."""
    return load_policy(config.Model(path=str(model_folder("llama")), device="cpu"), seed=0)
