"""Numbers of a step, and what looks wrong in them: limits that are too short, rewards that teach nothing, collapse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from longrein.records import Call, Json
from longrein.trainer.collect import Group

LENGTH_SHARE = 0.05  # share of calls cut by a token limit above which the limit is held to be too short
STUCK_STEPS = 3
ENTROPY_SHARE = 0.05  # of the first step's entropy
LEFT_OUT_SHARE = 0.5  # of the tokens, by a correction or rejection
REPEAT_STEPS = 10  # a warning is said again after so many steps


def group_metrics(groups: Sequence[Group], kind: str = "") -> dict[str, float]:
    """What a step's rollouts came to: rewards, their spread within groups, calls, the graders' further numbers.

    `kind` is the field of a task that says its kind (`task.kind`): `reward/kind/…` are the mean rewards of each.
    """
    rollouts = [done.finished for group in groups for done in group.done]
    rewards = np.array([reward for group in groups for reward in group.rewards], np.float64)
    spreads = [float(np.std(group.rewards)) for group in groups]
    calls = [call for rollout in rollouts for call in rollout.calls]
    values = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/max": float(rewards.max()),
        "groups/zero_variance": sum(spread < 1e-9 for spread in spreads) / len(spreads),
        "groups/std": float(np.mean(spreads)),
        "calls/per_rollout": len(calls) / len(rollouts),
        "calls/length_limit": length_share(calls),
        "calls/error": sum(call.status == "error" for call in calls) / max(1, len(calls)),
        "rollouts/agent_failed": sum(r.outcome is not None and r.outcome.value == "agent_failed" for r in rollouts)
        / len(rollouts),
    }
    further: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            further.setdefault(name, []).append(value)
    for name in [name for name in further if name.startswith("audit/")]:  # shares: who has no flag does not name it
        values[name] = sum(further.pop(name)) / len(rollouts)
    kinds: dict[str, list[float]] = {}
    for group in groups:
        for done in group.done:
            if kind and done.finished.reward is not None:
                kinds.setdefault(str(done.rollout.input.get(kind, "none")), []).append(done.finished.reward)
    values |= {f"reward/kind/{name}": float(np.mean(found)) for name, found in kinds.items()}
    return values | {f"grader/{name}": float(np.mean(numbers)) for name, numbers in further.items()}


def length_share(calls: Sequence[Call]) -> float:
    """Share of the answered calls that a token limit cut."""
    answered = [call for call in calls if call.finish_reason is not None]
    return sum(call.finish_reason == "length" for call in answered) / max(1, len(answered))


class Watch:
    """Looks at each step's numbers and says, once in a while, what looks wrong."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}
        self._zero_steps = 0
        self._first_entropy: float | None = None

    def state_dict(self) -> Json:
        return {"said": dict(self._said), "zero_steps": self._zero_steps, "first_entropy": self._first_entropy}

    def load_state_dict(self, state: Json) -> None:
        """Go on from what `state_dict` gave."""
        self._said, self._zero_steps = dict(state["said"]), state["zero_steps"]
        self._first_entropy = state["first_entropy"]

    def check(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Warnings about step `step`, each at most once in `REPEAT_STEPS` steps."""
        found = self._found(values)
        fresh = [name for name in found if step >= self._said.get(name, -REPEAT_STEPS) + REPEAT_STEPS]
        self._said.update({name: step for name in fresh})
        return [found[name] for name in fresh]

    def _found(self, values: Mapping[str, float]) -> dict[str, str]:
        found: dict[str, str] = {}
        share = values.get("calls/length_limit", 0.0)
        if share > LENGTH_SHARE:
            found["length"] = (
                f"{100 * share:.0f} % of calls hit the length limit: a limit shorter than the longest needed reply gives "
                "reward 0 for ever; raise the harness's max_tokens or engine.max_reply_tokens"
            )
        self._zero_steps = (
            self._zero_steps + 1 if values.get("reward/max", 1.0) == 0 == values.get("reward/mean") else 0
        )
        if self._zero_steps >= STUCK_STEPS:
            found["stuck"] = (
                f"every reward of the last {self._zero_steps} steps was 0, so there is nothing to learn from: look at a "
                "transcript (longrein report), use easier tasks, a stronger model or a warm-up"
            )
        elif values.get("groups/zero_variance") == 1.0:
            found["variance"] = (
                "in every group all rewards were equal, so this step has no gradient: use tasks of another difficulty, "
                "a larger algorithm.group_size or more groups a step"
            )
        entropy = values.get("entropy")
        if entropy is not None and math.isfinite(entropy):
            if self._first_entropy is None:
                self._first_entropy = entropy
            elif entropy < ENTROPY_SHARE * self._first_entropy:
                found["entropy"] = (
                    f"entropy fell from {self._first_entropy:.3f} to {entropy:.4f} per token: the policy is nearly "
                    "deterministic and explores no more; lower trainer.learning_rate"
                )
        for name, what in (("rejected", "rejection"), ("correction/zero", "correction")):
            if values.get(name, 0.0) > LEFT_OUT_SHARE:
                found[name] = (
                    f"the {what} leaves out {100 * values[name]:.0f} % of the tokens: sampler and learner are far apart "
                    "(logprob_gap, ratio/…), or the bounds are too narrow for ratios of whole sequences"
                )
        norm = values.get("grad_norm")
        if norm is not None and not math.isfinite(norm):
            found["norm"] = (
                "the gradient's norm is not finite; lower trainer.learning_rate or use model.dtype = 'float32'"
            )
        return found
