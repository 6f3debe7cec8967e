"""Calls as the gateway would record them, for tests: plain builders and random forests of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longrein.records import Call


def make_call(
    number: int,
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    prefix: Call | None = None,
    prefix_length: int | None = None,
    **fields: object,
) -> Call:
    """A call whose whole prompt is `prompt`, recorded as a delta to `prefix` (its first `prefix_length` tokens)."""
    length = (
        0
        if prefix is None
        else (prefix.prompt_length + len(prefix.sampled) if prefix_length is None else prefix_length)
    )
    values: dict[str, object] = {
        "rollout_id": "r",
        "attempt_id": "0",
        "dialect": "chat",
        "mode": "train",
        "model": "policy",
        "engine": "policy",
        "logprobs": [-(number + 1) - index / 1000 for index in range(len(sampled))],
        "versions": [(number, len(sampled))] if sampled else [],
        **fields,
    }
    return Call(
        number=number,
        prefix=None if prefix is None else prefix.number,
        prefix_length=length,
        prompt_delta=list(prompt[length:]),
        prompt_length=len(prompt),
        sampled=list(sampled),
        **values,  # type: ignore[arg-type]
    )


def random_calls(rng: np.random.Generator, count: int, vocabulary: int = 3) -> tuple[list[Call], dict[int, list[int]]]:
    """`count` calls that continue, fork from, repeat or ignore earlier ones, and each one's whole prompt.

    A small vocabulary makes undeclared shared prefixes common. Some pointers are declared, some are left out, some name
    less than what is shared.
    """
    calls: list[Call] = []
    branches: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    for number in range(count):
        new = rng.integers(0, vocabulary, rng.integers(1, 5)).tolist()
        prefix, length, prompt = None, 0, new
        if calls and rng.random() < 0.85:
            prefix = calls[rng.integers(len(calls))]
            branch = branches[prefix.number]
            kind = rng.integers(4)
            whole = prefix.prompt_length if kind == 0 else len(branch) - int(kind == 1)
            length = int(rng.integers(0, len(branch) + 1)) if kind == 2 else whole
            keep_going = rng.random() < 0.2 and length > 0
            prompt = branch[:length] + ([] if keep_going else new)
            if rng.random() < 0.2:
                prefix, length = None, 0
            elif rng.random() < 0.2:
                length = int(rng.integers(0, length + 1))
        sampled = rng.integers(0, vocabulary, rng.integers(0, 5)).tolist()
        status = rng.choice(["ok", "ok", "ok", "ok", "abandoned", "error"])
        logprobs = None if rng.random() < 0.1 else rng.normal(-2, 1, len(sampled)).tolist()
        call = make_call(
            number,
            prompt,
            sampled,
            prefix=prefix,
            prefix_length=length,
            status=str(status),
            kind=str(rng.choice(["main", "main", "title"])),
            logprobs=logprobs,
        )
        calls.append(call)
        prompts[number] = prompt
        branches[number] = prompt + sampled
    return calls, prompts
