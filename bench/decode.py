"""Sampling speed of the embedded engine against plain transformers, on the same prompts in the same run.

    python bench/decode.py [MODEL_FOLDER] [--batches 1 8 32 64 --prompt 150 --new 24]

A tiny random model is used when no folder is named, and shows little but overheads. Plain transformers is `generate`
with a dynamic and with a static cache. Prompts differ in a batch, but for the last line, where eight at a time are
equal, as a group's are. Everything is measured in turns, several times, and the best counts: other processes disturb
less. Ratios to the better of the two caches are what carries over to other machines.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LogitsProcessor, LogitsProcessorList

from longrein import config
from longrein.trainer.torch.policy import load_policy, sampling_model
from longrein.trainer.torch.sampler import Sample, Sampler, Sampling


@dataclass
class Speed:
    """Tokens per second."""

    prompts: float = 0.0
    decode: float = 0.0

    def better(self, other: Speed) -> Speed:
        return Speed(max(self.prompts, other.prompts), max(self.decode, other.decode))


def engine(model: Any, prompts: list[np.ndarray], new: int) -> Speed:
    sampler = Sampler(model, max_batch=len(prompts), cache_tokens=0)
    samples = [Sample(prompt, Sampling(new + 1, seed=seed)) for seed, prompt in enumerate(prompts)]
    for one in samples:
        sampler.add(one)
    began = time.perf_counter()
    # Decoding is measured once all prompts are computed; the steps before give the first of them a few tokens more.
    with torch.inference_mode():
        for one in samples:
            sampler.engine.join(one)
        sampler.running, sampler.waiting = samples, []
        while any(one.unfilled for one in samples):
            sampler.engine.prefill([one for one in samples if one.unfilled])
    sampler.step()
    filled = time.perf_counter()
    while sampler.running:
        sampler.step()
    ended = time.perf_counter()
    return Speed(sum(map(len, prompts)) / (filled - began), new * len(prompts) / (ended - filled))


class _Clock(LogitsProcessor):
    """Notes when `generate` has the logits of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.times.append(time.perf_counter())
        return scores


def plain(model: Any, prompts: list[np.ndarray], new: int, cache: str) -> Speed:
    ids = torch.from_numpy(np.stack(prompts).astype(np.int64)).to(model.device)
    clock = _Clock()
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new + 1,
            min_new_tokens=new + 1,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            cache_implementation=cache,
            logits_processor=LogitsProcessorList([clock]),
        )
    ended = time.perf_counter()
    # From the first step's logits to the end: `new` passes and the choice of `new` + 1 tokens.
    return Speed(ids.numel() / (clock.times[0] - began), new * len(prompts) / (ended - clock.times[0]))


def tiny_model() -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 512}
    described = LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024)
    return AutoModelForCausalLM.from_config(described).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompt", type=int, default=150, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=24, help="tokens sampled of each")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", default="same", choices=["same", "float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.model:
        policy = load_policy(config.Model.model_validate({"path": str(options.model.expanduser())}), seed=0)
        model: Any = sampling_model(policy, options.dtype)
    else:
        model = tiny_model()
    model.generation_config.eos_token_id = None
    vocabulary = model.get_input_embeddings().weight.shape[0]
    rng = np.random.default_rng(0)
    table = Table(
        title=f"{options.model or 'a tiny random model'}, {next(model.parameters()).dtype}, prompts of {options.prompt} "
        f"tokens, {options.new} new; {torch.get_num_threads()} threads; tokens/s"
    )
    for column in ("batch", "decode", "dynamic", "static", "ratio", "prompts", "dynamic", "static", "ratio"):
        table.add_column(column, justify="right")
    for batch, share in [*((size, 1) for size in options.batches), (max(options.batches), 8)]:
        tasks = [rng.integers(3, vocabulary, options.prompt).astype(np.int32) for _ in range(-(-batch // share))]
        prompts = [tasks[i // share] for i in range(batch)]
        ours, dynamic, static = Speed(), Speed(), Speed()
        for _ in range(options.repeats):
            ours = ours.better(engine(model, prompts, options.new))
            dynamic = dynamic.better(plain(model, prompts, options.new, "dynamic"))
            static = static.better(plain(model, prompts, options.new, "static"))
        cells = [f"{batch}" if share == 1 else f"{batch // share} x {share}"]
        for one, first, second in (
            (ours.decode, dynamic.decode, static.decode),
            (ours.prompts, dynamic.prompts, static.prompts),
        ):
            cells += [f"{one:.0f}", f"{first:.0f}", f"{second:.0f}", f"{one / max(first, second):.2f}"]
        table.add_row(*cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
