"""A random language model of a few thousand weights over a byte-level tokenizer, as gateway and engine load it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from gateway.models import make_model_folder


def make_random_model(folder: Path, template: str = "deepseek", context: int = 2048) -> Path:
    """Write it; the vocabulary of the model is the tokenizer's, rounded up to a multiple of 32 as it often is."""
    make_model_folder(folder, template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    described = LlamaConfig(
        vocab_size=-(-tokenizer.get_vocab_size() // 32) * 32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(described).save_pretrained(folder)
    return folder
