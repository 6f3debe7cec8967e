"""A step's metrics tell how many of its rollouts the audit flagged."""

from __future__ import annotations

from longrein.records import Rollout
from longrein.trainer.collect import Done, Group
from longrein.trainer.watch import group_metrics
from longrein.trajectory.batch import FinishedRollout


def test_flags_are_shares_of_all_rollouts_and_a_graders_numbers_are_means() -> None:
    metrics = [{"audit/network": 1.0, "audit/zeroed": 1.0, "steps": 4.0}, {"steps": 2.0}, {}, {"audit/network": 1.0}]
    done = [
        Done(Rollout(f"r{n}", {}), None, FinishedRollout(f"r{n}", "g", True, 0.5, [], metrics=numbers), None)
        for n, numbers in enumerate(metrics)
    ]
    values = group_metrics([Group("g", 0, done)])
    assert values["audit/network"] == 0.5
    assert values["audit/zeroed"] == 0.25
    assert values["grader/steps"] == 3.0
    assert not any(name.startswith("grader/audit") for name in values)
