import io

from recorded_calls import make_call
from rich.console import Console

from longrein.records import Rollout, RolloutConfig, RolloutState, RolloutStatus
from longrein.trajectory.kinds import TRAINED_KINDS
from longrein.trajectory.report import build_report, render_markdown, render_tables


def make_rollout(name, *, state=RolloutState.succeeded, last="0", group="g", error=None, **fields):
    fields = {"metadata": {"phase": "train", "step": 1}, **fields}
    status = RolloutStatus(state=state, last_attempt_id=last, error_message=error)
    return Rollout(rollout_id=name, input={}, status=status, group_id=group, **fields)


def a_run():
    """Two whole groups, one of them never learned from, one that lacks a rollout, and rollouts of every other kind."""
    first = make_call(0, [1, 2], [3, 4], finish_reason="stop")
    chain = [first, make_call(1, [1, 2, 3, 4, 5], [6], prefix=first, finish_reason="length")]
    forked = [
        make_call(0, [1, 2], [3, 4], fork="new", finish_reason="stop"),
        make_call(1, [1, 2, 7], [8], prefix=first, prefix_length=2, fork="template", finish_reason="stop"),
        make_call(2, [1, 2, 9], [8], status="abandoned"),
    ]
    rollouts = [
        make_rollout("chain"),
        make_rollout("forked", last="1"),
        make_rollout("whole", group="h"),
        make_rollout("lost", group="h", state=RolloutState.failed, error="engine at 127.0.0.1:8123 went away"),
        make_rollout("late", group="i", metadata={"phase": "train", "step": 2}),
        make_rollout("test", group="t", is_train=False, metadata={"phase": "after", "step": 1}),
        make_rollout("dev", group="d", is_train=False, metadata={"phase": "dev-0001", "step": 0}),
        make_rollout("alone", group="p", is_train=False, metadata={"phase": "preflight"}),
        make_rollout("shown", group="w", config=RolloutConfig(engine="teacher"), metadata={"phase": "warm-up"}),
        make_rollout("slow", group="t", is_train=False, metadata={"phase": "after"}, error="timeout after 31 s\ntrace"),
        make_rollout("slower", group="t", is_train=False, metadata={"phase": "after"}, error="timeout after 30 s"),
    ]
    one = [make_call(0, [1], [2])]
    calls = {
        ("chain", "0"): chain,
        ("forked", "0"): one,
        ("forked", "1"): forked,
        **{(name, "0"): one for name in ("whole", "lost", "late", "test", "dev", "alone", "shown")},
    }
    rewards = {rollout.rollout_id: 1.0 for rollout in rollouts if rollout.rollout_id != "lost"}
    metrics = [
        {"kind": "step", "step": 1, "time/collect": 5.0},
        {"kind": "phase", "phase": "collect", "seconds": 4.0},
        {"kind": "phase", "phase": "learn", "seconds": 2.0},
        {"kind": "phase", "phase": "collect", "seconds": 2.0},
    ]
    return rollouts, calls, rewards, metrics, TRAINED_KINDS, {"chain": 3, "forked": 3}


def test_every_sampled_token_is_accounted_for_with_its_reason():
    rollouts, calls, rewards, metrics, kinds, learned = a_run()
    report = build_report(rollouts, calls, rewards, metrics, kinds, learned)
    assert report.tokens.trained == 3 + 3
    assert report.tokens.untrained == {
        "earlier attempt": 1,
        "abandoned": 1,
        "group dropped": 1,
        "failed rollout": 1,
        "step not finished": 1,
        "evaluation": 1,
        "warm-up": 1,
        "preflight": 1,
        "teacher": 1,
    }
    assert report.tokens.sampled == sum(len(call.sampled) for some in calls.values() for call in some)


def test_groups_that_were_replaced_are_counted_as_such():
    rollouts, calls, rewards, metrics, kinds, _ = a_run()
    metrics = [*metrics, {"kind": "replaced", "step": 1, "groups": ["g"]}]
    report = build_report(rollouts, calls, rewards, metrics, kinds, learned={})
    assert report.tokens.trained == 0
    assert report.tokens.untrained["equal rewards"] == 3 + 4  # the abandoned call's too


def test_the_shape_of_rollouts_and_the_causes_of_forks():
    report = build_report(*a_run())
    # chain is one leaf, forked two, whole, lost and late one each.
    assert (report.shaped_rollouts, report.samples, report.one_chain) == (5, 6, 4)
    assert report.shaped_calls == 2 + 3 + 3
    assert report.forks == {"template": 1}
    assert (report.answered, report.length_limited) == (4, 1)


def test_failures_are_grouped_by_their_message_without_its_numbers():
    report = build_report(*a_run())
    assert report.failures == {
        ("failed", "engine at #.#:# went away"): 1,
        ("graded as it stood", "timeout after # s"): 2,
    }


def test_time_comes_from_phases_or_else_from_steps():
    rollouts, calls, rewards, metrics, *_ = a_run()
    assert build_report(rollouts, calls, rewards, metrics).seconds == {"collect": 6.0, "learn": 2.0}
    assert build_report(rollouts, calls, rewards, metrics[:1]).seconds == {"collect": 5.0}


def test_what_was_not_learned_from_is_not_trained_and_the_journal_is_compared_with_the_record():
    rollouts = [make_rollout(f"r{n}", group=f"g{n}") for n in range(4)]
    calls = {(f"r{n}", "0"): [make_call(0, [1], [2] * (n + 1))] for n in range(4)}
    rewards = {r.rollout_id: 1.0 for r in rollouts}
    report = build_report(rollouts, calls, rewards, [], learned={"r0": 1, "r2": 3})
    assert report.tokens.trained == 1 + 3
    assert report.tokens.untrained == {"step not finished": 2 + 4}
    assert report.differing == {}
    twice = build_report(rollouts, calls, rewards, [], learned={"r0": 2, "r2": 3})
    assert twice.differing == {"r0": (2, 1)}
    assert "Learned from otherwise than recorded" in render_markdown(twice)


def test_a_rollout_that_was_made_up_for_does_not_drop_its_group():
    """One of three failed with the end of a run and was asked for again."""
    rollouts = [make_rollout("a"), make_rollout("b", state=RolloutState.failed), make_rollout("b-again1")]
    calls = {(r.rollout_id, "0"): [make_call(0, [1], [2])] for r in rollouts}
    report = build_report(rollouts, calls, {"a": 1.0, "b-again1": 0.0}, [], learned={"a": 1, "b-again1": 1})
    assert (report.tokens.trained, report.tokens.untrained) == (2, {"failed rollout": 1})


def test_without_a_journal_a_graded_group_counts_as_trained():
    rollouts, calls, rewards, *_ = a_run()
    assert build_report(rollouts, calls, rewards, []).tokens.trained == 7


def test_a_rollout_that_was_never_graded_drops_its_group():
    rollouts, calls, rewards, metrics, *_ = a_run()
    del rewards["forked"]
    report = build_report(rollouts, calls, rewards, metrics, learned={})
    assert report.tokens.trained == 0
    assert report.tokens.untrained["no reward"] == 4
    assert report.tokens.untrained["group dropped"] == 1 + 3


def test_both_renderings_show_the_numbers():
    report = build_report(*a_run())
    markdown = render_markdown(report)
    assert "| trained | 6 | 40.0 % |" in markdown
    assert "| not trained: abandoned | 1 | 6.7 % | the client went away before the answer was whole |" in markdown
    assert "| template | 1 | 12.5 % |" in markdown
    assert "| calls that hit the length limit | 25.0 % |" in markdown
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render_tables(report))
    shown = console.export_text()
    for text in ("not trained: abandoned", "timeout after # s", "training rollouts that stay one chain", "75.0 %"):
        assert text in shown


def test_an_empty_run_has_a_report():
    report = build_report([], {}, {}, [])
    assert report.tokens.sampled == 0
    assert "| sampled | 0 |" in render_markdown(report)
