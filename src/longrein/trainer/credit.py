"""From the rewards of a step's rollouts to the advantage of every trained token.

Statistics of a group come from all of its graded rollouts, before anything is divided over updates or dropped; what is
normalised over a step gives each rollout one vote, however long it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from longrein.config import ADVANTAGES, Algorithm
from longrein.functions import load_function
from longrein.learning import advantage as methods
from longrein.learning.shaping import overlong_penalty
from longrein.trajectory.batch import FinishedRollout, Row


@dataclass(frozen=True)
class Credit:
    """How a run's advantages are made. `method` is the group's, for the algorithms that have one."""

    options: Algorithm
    method: methods.GroupMethod | None

    @classmethod
    def of(cls, options: Algorithm, folder: str) -> Credit:
        """Raises `ConfigError` when `algorithm.advantage` names a function that cannot be imported from `folder`."""
        if options.advantage not in ADVANTAGES:
            return cls(options, load_function(options.advantage, folder, "algorithm.advantage"))
        return cls(options, methods.METHODS.get(options.advantage))

    def assign(self, rollouts: Sequence[FinishedRollout], rows: Sequence[Row]) -> dict[str, float]:
        """Write the advantages into `rows`, the rows of all updates of a step, and return what is worth knowing.

        `rollouts` are all of the step's. With `gae`, each row's `values` are read and its `returns` written.
        """
        graded = {rollout.rollout_id: rollout for rollout in rollouts if rollout.reward is not None}
        tokens = {rollout_id: _Tokens(own) for rollout_id, own in _by_rollout(rows).items()}
        rewards, metrics = self._rewards(graded)
        penalties = self._divergence(tokens)
        if penalties:
            metrics["reward/kl"] = -float(np.mean([penalty.sum() for penalty in penalties.values()]))
        if self.method is None:
            self._by_token(graded, rewards, penalties, tokens)
        else:
            for rollout_id, penalty in penalties.items():
                rewards[rollout_id] -= float(penalty.sum())
            self._by_group(graded, rewards, tokens)
        for own in tokens.values():
            own.write()
        return metrics

    def _rewards(self, graded: Mapping[str, FinishedRollout]) -> tuple[dict[str, float], dict[str, float]]:
        options = self.options
        rewards = {rollout_id: float(rollout.reward or 0.0) for rollout_id, rollout in graded.items()}
        if not options.overlong_tokens:
            return rewards, {}
        shaping = {
            rollout_id: overlong_penalty(
                max((len(call.sampled) for call in rollout.calls), default=0),
                options.overlong_tokens,
                options.overlong_buffer,
                options.overlong_penalty,
            )
            for rollout_id, rollout in graded.items()
        }
        metrics = {"reward/overlong": float(np.mean(list(shaping.values())))} if shaping else {}
        return {rollout_id: reward + shaping[rollout_id] for rollout_id, reward in rewards.items()}, metrics

    def _divergence(self, tokens: Mapping[str, _Tokens]) -> dict[str, np.ndarray]:
        """What each trained token's divergence from the reference costs its rollout."""
        options = self.options
        if not options.kl_coefficient or options.kl_in != "reward":
            return {}
        import torch

        from longrein.learning.kl import kl_estimate

        found = {}
        for rollout_id, own in tokens.items():
            sampled, reference = (torch.from_numpy(own.column(name)) for name in ("logprobs", "reference"))
            found[rollout_id] = options.kl_coefficient * kl_estimate(sampled, reference, options.kl_estimator).numpy()
        return found

    def _by_group(
        self,
        graded: Mapping[str, FinishedRollout],
        rewards: Mapping[str, float],
        tokens: Mapping[str, _Tokens],
    ) -> None:
        options, method = self.options, self.method
        assert method is not None
        groups = {rollout_id: rollout.group_id for rollout_id, rollout in graded.items()}
        outcome = methods.group_advantages(rewards, groups, method).values
        for rollout_id, own in tokens.items():
            own.advantages[:] = outcome[rollout_id]
        if options.process_weight and any(rollout.call_rewards for rollout in graded.values()):
            for group in dict.fromkeys(groups.values()):
                members = [rollout_id for rollout_id in graded if groups[rollout_id] == group]
                calls = [np.unique(tokens[m].calls).tolist() if m in tokens else [] for m in members]
                steps = methods.process_advantages(
                    [graded[m].call_rewards for m in members], calls, method, options.process_discount
                )
                for member, by_call in zip(members, steps, strict=True):
                    if member in tokens:
                        own = tokens[member]
                        own.advantages += options.process_weight * np.array([by_call[c] for c in own.calls.tolist()])
        if options.advantage == "reinforce++_baseline":
            _whiten(tokens)

    def _by_token(
        self,
        graded: Mapping[str, FinishedRollout],
        rewards: Mapping[str, float],
        penalties: Mapping[str, np.ndarray],
        tokens: Mapping[str, _Tokens],
    ) -> None:
        options = self.options
        for rollout_id, own in tokens.items():
            steps = np.zeros(len(own.calls), np.float64)
            if rollout_id in penalties:
                steps -= penalties[rollout_id]
            for number, reward in graded[rollout_id].call_rewards.items():
                # At the call's last token, or where the last trained call before it ended.
                steps[max(0, int(np.searchsorted(own.calls, number, "right")) - 1)] += options.process_weight * reward
            steps[-1] += rewards[rollout_id]
            if options.advantage == "gae":
                values = own.column("values")
                own.advantages[:], returns = methods.gae(steps, values, options.discount, options.gae_lambda)
                own.write_column("returns", returns)
            else:
                own.advantages[:] = methods.returns(steps, options.discount)
        _whiten(tokens)


class _Tokens:
    """The trained tokens of a rollout, in the order of their calls, and where in its rows they stand."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        positions = np.concatenate([np.flatnonzero(row.trained) for row in rows])
        calls = np.concatenate([_calls(row)[row.trained] for row in rows])
        self._order = np.lexsort((positions, calls))
        """Places of the tokens among those of all rows, one row after the other."""
        self.calls = calls[self._order]
        self.advantages = np.zeros(len(calls), np.float64)

    def column(self, name: str) -> np.ndarray:
        """float64 [T]: a column of the rows (`logprobs`, or one of `Row.columns`)."""
        values = [(row.logprobs if name == "logprobs" else row.columns[name])[row.trained] for row in self._rows]
        return np.concatenate(values)[self._order].astype(np.float64)

    def write_column(self, name: str, numbers: np.ndarray) -> None:
        """Put numbers into a column of the rows."""
        for row, own in zip(self._rows, self._by_row(numbers), strict=True):
            row.columns[name] = np.zeros(len(row.tokens), np.float32)
            row.columns[name][row.trained] = own

    def write(self) -> None:
        """Put the advantages into the rows."""
        for row, own in zip(self._rows, self._by_row(self.advantages), strict=True):
            row.advantages[row.trained] = own

    def _by_row(self, numbers: np.ndarray) -> list[np.ndarray]:
        flat = np.empty_like(numbers)
        flat[self._order] = numbers
        return np.split(flat, np.cumsum([int(row.trained.sum()) for row in self._rows])[:-1])


def _calls(row: Row) -> np.ndarray:
    assert row.calls is not None, "rows of a batch know their calls"
    return row.calls


def _by_rollout(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.trained.any():
            found.setdefault(row.rollout_id, []).append(row)
    return found


def _whiten(tokens: Mapping[str, _Tokens]) -> None:
    """Normalise the advantages of a step, each rollout one vote."""
    if not tokens:
        return
    every = list(tokens.values())
    lengths = [len(own.advantages) for own in every]
    votes = np.concatenate([np.full(length, 1.0 / length) for length in lengths])
    whitened = methods.whiten(np.concatenate([own.advantages for own in every]), votes, len(every))
    for own, part in zip(every, np.split(whitened, np.cumsum(lengths)[:-1]), strict=True):
        own.advantages[:] = part


def staleness(rows: Sequence[Row], version: int) -> dict[str, float]:
    """How many updates the policy was ahead of the one that sampled: mean and largest, over tokens of known version."""
    sampled = np.concatenate([row.versions[row.trained & (row.versions >= 0)] for row in rows] or [np.zeros(0, int)])
    if not len(sampled):
        return {}
    behind = version - sampled.astype(np.int64)
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}
