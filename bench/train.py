"""Training speed of the embedded learner against plain transformers, on the same rows in the same run.

    python bench/train.py [MODEL_FOLDER] [--groups 2 --members 8 --prompt 100 --own 60 --sampled 35]

The model is the demo's (`python examples/calculator/model.py` makes it) when none is named.

Plain transformers pads the rows, computes all logits and leaves the softmax to autograd, in micro-batches of the same
token budget. Both make one AdamW step per update. Ratios are what carries over to other machines.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from longrein import config
from longrein.trainer.torch.learner import Learner, autocast_dtype
from longrein.trainer.torch.policy import Policy, load_policy
from longrein.trajectory.batch import Row
from longrein.trajectory.packing import pack


def make_rows(options: argparse.Namespace, vocabulary: int) -> list[Row]:
    """Groups of rows that share a prompt; each row samples two stretches with a tool's answer in between."""
    rng = np.random.default_rng(0)
    rows = []
    for group in range(options.groups):
        prompt = rng.integers(0, vocabulary, options.prompt + rng.integers(-4, 5))
        for member in range(options.members):
            length = options.own + int(rng.integers(-8, 9))
            tokens = np.concatenate([prompt, rng.integers(0, vocabulary, length)]).astype(np.int32)
            first = int(0.8 * options.sampled)
            trained = np.zeros(len(tokens), bool)
            trained[len(prompt) : len(prompt) + first] = True
            trained[len(tokens) - (options.sampled - first) :] = True
            weight = 1 / (options.groups * options.members * int(trained.sum()))
            rows.append(
                Row(
                    f"{group}-{member}",
                    str(group),
                    tokens,
                    trained,
                    np.where(trained, -11, 0).astype(np.float32),
                    np.where(trained, 0, -1).astype(np.int32),
                    np.where(trained, rng.normal(), 0).astype(np.float32),
                    np.where(trained, weight, 0.0),
                )
            )
    return rows


def plain_update(
    policy: Policy, optimizer: torch.optim.Optimizer, rows: Sequence[Row], budget: int, cast: torch.dtype | None
) -> None:
    """What one would write with transformers alone."""
    model: Any = policy.model
    optimizer.zero_grad()
    for micro_batch in pack([row.tokens for row in rows], budget, min_trunk=None):
        chosen = [rows[index] for index in micro_batch.rows]
        width = max(len(row.tokens) for row in chosen)

        def padded(name: str, rows: Sequence[Row] = chosen, width: int = width) -> torch.Tensor:
            columns = [np.pad(getattr(row, name), (0, width - len(row.tokens))) for row in rows]
            return torch.from_numpy(np.stack(columns)).to(policy.device)

        ids = padded("tokens").long()
        mask = (torch.arange(width) < torch.tensor([len(row.tokens) for row in chosen])[:, None]).long()
        with torch.autocast(policy.device.type, dtype=cast or torch.bfloat16, enabled=cast is not None):
            logits = model(input_ids=ids, attention_mask=mask.to(policy.device), use_cache=False).logits
        logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ratio = (logprobs - padded("logprobs")[:, 1:]).exp()
        advantages, weights = padded("advantages")[:, 1:], padded("weights")[:, 1:].float()
        losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
        (weights * losses).sum().backward()
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    optimizer.step()


def best_of(repeats: int, update: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path("~/.cache/longrein/smollm2-135m"))
    for name, default in (("groups", 2), ("members", 8), ("prompt", 100), ("own", 60), ("sampled", 35)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget", type=int, default=4096, help="tokens per micro-batch")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--autocast", default="auto", choices=["auto", "none", "bfloat16"])
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    policy = load_policy(config.Model.model_validate({"path": str(options.model.expanduser())}), seed=0)
    rows = make_rows(options, policy.vocab_size)
    tokens = sum(len(row.tokens) for row in rows)
    cast = autocast_dtype(options.autocast, policy)
    trainer = config.Trainer.model_validate({"tokens_per_micro_batch": options.budget, "learning_rate": 1e-9})
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-9)

    def run_learner(share: bool) -> Callable[[], Any]:
        one = Learner(policy, config.Algorithm.model_validate({}), trainer, options.autocast)
        one._forward._shares = share and one._forward.shares_prefixes
        return lambda: one.update(rows)

    kinds = {
        "transformers, padded rows, all logits": lambda: plain_update(policy, optimizer, rows, options.budget, cast),
        "learner, plain rows": run_learner(share=False),
        "learner, shared prefixes": run_learner(share=True),
    }
    table = Table(
        title=f"{len(rows)} rows, {tokens} tokens, {sum(int(row.trained.sum()) for row in rows)} trained; "
        f"{torch.get_num_threads()} threads, {cast or 'float32'}"
    )
    for column in ("", "seconds", "row tokens/s", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    baseline = 0.0
    for name, update in kinds.items():
        seconds = best_of(options.repeats, update)
        baseline = baseline or seconds
        table.add_row(name, f"{seconds:.2f}", f"{tokens / seconds:.0f}", f"{baseline / seconds:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
