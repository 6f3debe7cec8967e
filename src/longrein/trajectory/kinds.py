"""Which of a rollout's calls are trained, and the reason why each other one is not."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

from longrein.records import Call, CallKind

#: Why sampled tokens are not in the loss, in the order in which reasons are looked for.
Reason = Literal[
    "preflight",
    "evaluation",
    "warm-up",
    "teacher",
    "failed rollout",
    "earlier attempt",
    "no reward",
    "group dropped",
    "equal rewards",
    "step not finished",
    "call error",
    "abandoned",
    "side call",
    "no log-probabilities",
]

#: What each reason means, for reports.
MEANING: dict[Reason, str] = {
    "preflight": "sampled by the one attempt that is run alone first",
    "evaluation": "sampled in an evaluation, never trained on",
    "warm-up": "sampled while the warm-up checked its progress",
    "teacher": "the teacher's, learned from supervised",
    "failed rollout": "the infrastructure failed; such a rollout has no reward",
    "earlier attempt": "an attempt that failed and was tried again",
    "no reward": "the rollout was never graded",
    "group dropped": "another rollout of the group was missing",
    "equal rewards": "all rollouts of the group had the same reward, and another group took its place",
    "step not finished": "collected for a step that the run did not live to learn from",
    "call error": "the call ended with an error, so no harness was given its answer",
    "abandoned": "the client went away before the answer was whole",
    "side call": "a call of a kind that is not trained (algorithm.train_kinds)",
    "no log-probabilities": "the engine did not say how probable its tokens were",
}


#: Kinds of calls that are trained where the run file does not say otherwise.
TRAINED_KINDS: Collection[CallKind] = ("main", "sub-agent", "compaction")


def untrained(call: Call, kinds: Collection[CallKind] = TRAINED_KINDS) -> Reason | None:
    """Why a call's sampled tokens are not trained with a policy gradient; None when they are."""
    reason = unsupervised(call, kinds)
    if reason is not None:
        return reason
    if call.logprobs is None:
        return "no log-probabilities"
    if len(call.logprobs) != len(call.sampled) or not all(map(math.isfinite, call.logprobs)):
        return "no log-probabilities"
    return None


def unsupervised(call: Call, kinds: Collection[CallKind] = TRAINED_KINDS) -> Reason | None:
    """Why a call's sampled tokens are not learned from as a demonstration; None when they are."""
    if call.status == "error":
        return "call error"
    if call.status == "abandoned":
        return "abandoned"
    if call.kind not in kinds:
        return "side call"
    return None
