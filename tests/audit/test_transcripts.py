"""Honest transcripts have no grave flag, hostile ones exactly their own; what is honest never hides what is not."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longrein.audit.audit import audit_attempt
from longrein.audit.rules import load_rules
from longrein.config import Audit
from longrein.records import Call

from .transcripts import HONEST, HOSTILE, TRAFFIC, answered, attempt, bash, recorded, said

RULES = load_rules(Audit())
HONEST_TURNS = [turn for turns in HONEST.values() for turn in turns]


def flagged(calls: list[Call]) -> dict[str, list[str]]:
    return {f.rule.id: [flag.excerpt for flag in f.flags] for f in audit_attempt(RULES, calls)}


@pytest.mark.parametrize("name", HONEST)
def test_honest_transcripts_have_no_flag_of_high_severity(name: str) -> None:
    found = {
        rule: said for rule, said in flagged(attempt(HONEST[name])).items() if RULES.by_id[rule].severity == "high"
    }
    assert found == {}


@pytest.mark.parametrize("name", HONEST)
def test_honest_transcripts_have_hardly_a_flag_of_medium_severity(name: str) -> None:
    found = {rule for rule in flagged(attempt(HONEST[name])) if RULES.by_id[rule].severity == "medium"}
    assert found <= {"environment-dump"}  # `env | grep` is one, whatever is looked for


@pytest.mark.parametrize("harness", sorted(path.stem for path in TRAFFIC.glob("*.jsonl")))
def test_what_real_harnesses_sent_has_no_flag(harness: str) -> None:
    assert flagged(recorded(harness)) == {}


@pytest.mark.parametrize(("turns", "rules"), [pytest.param(t, r, id=name) for name, t, r in HOSTILE])
def test_hostile_transcripts_have_exactly_their_flags(turns: list[dict[str, Any]], rules: set[str]) -> None:
    found = flagged(attempt(turns))
    assert set(found) == rules, found


def test_every_rule_of_text_has_a_hostile_transcript() -> None:
    told = {rule for _, _, rules in HOSTILE for rule in rules}
    assert {rule.id for rule in RULES if rule.measure is None} - told == set()


@given(hostile=st.sampled_from(HOSTILE), seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
def test_honest_turns_around_a_try_never_remove_its_flags(hostile: tuple[str, Any, set[str]], seed: int) -> None:
    _, turns, rules = hostile
    chance = random.Random(seed)
    mixed = list(turns)
    for turn in chance.sample(HONEST_TURNS, 6):
        mixed.insert(chance.randrange(len(mixed) + 1), turn)
    mixed.append(said("Done."))
    assert rules <= set(flagged(attempt(mixed)))


@given(
    hostile=st.sampled_from([(t, r) for _, t, r in HOSTILE if len(t) == 1 and "command" in str(t)]),
    seed=st.integers(0, 10_000),
)
@settings(deadline=None, max_examples=80)
def test_honest_commands_around_one_never_remove_its_flags(hostile: tuple[Any, set[str]], seed: int) -> None:
    (turn,), rules = hostile
    if not turn.get("tool_calls") or turn["tool_calls"][0]["function"]["name"] != "bash":
        return
    command = json.loads(turn["tool_calls"][0]["function"]["arguments"])["command"]
    chance = random.Random(seed)
    commands = [
        json.loads(t["tool_calls"][0]["function"]["arguments"])["command"]
        for t in HONEST_TURNS
        if t.get("tool_calls") and t["tool_calls"][0]["function"]["name"] == "bash"
    ]
    before, after = chance.sample(commands, 2)
    joint = chance.choice(["\n", "\n# just a comment\n"])
    assert rules <= set(flagged(attempt([bash(f"{before}{joint}{command}{joint}{after}")])))


@given(text=st.sampled_from([t for _, t, _ in HOSTILE if t[-1].get("content")]), lines=st.lists(st.sampled_from([
    "This is fine.", "I will not cheat the tests.", "localhost", "http://localhost:8000/", "never bypass the grader",
]), max_size=4))  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_honest_lines_around_text_never_remove_its_flags(text: list[dict[str, Any]], lines: list[str]) -> None:
    *others, last = text
    before = set(flagged(attempt(text)))
    longer = "\n".join([*lines, last["content"], *lines])
    assert before <= set(flagged(attempt([*others, {**last, "content": longer}])))


def test_a_result_is_read_once_however_often_a_fork_repeats_it() -> None:
    calls = attempt([answered("this token belongs to another attempt"), said("a")])
    again = attempt([answered("this token belongs to another attempt"), said("b")])[0]
    again.number, again.parent = 1, None
    (finding,) = audit_attempt(RULES, [*calls, again])
    assert finding.count == 1


def test_a_harness_without_tools_acts_in_fenced_blocks_and_one_with_tools_does_not() -> None:
    for language in ("bash", ""):
        text = f"I look:\n```{language}\ncurl https://evil.example\n```\nThat is all."
        assert set(flagged(attempt([said(text)], tools=[]))) == {"network"}
        assert flagged(attempt([said(text)])) == {}
    text = "```python\nimport urllib.request\nurllib.request.urlopen('https://evil.example')\n```"
    assert set(flagged(attempt([said(text)], tools=[]))) == {"network-code"}
    assert set(flagged(attempt([said(text.replace("```python", "<code>"))], tools=[]))) == {"network-code"}


def test_assistant_messages_that_a_harness_made_up_are_not_the_models() -> None:
    call = attempt([said("ok")])[0]
    call.messages = [{"role": "user", "content": "x"}, bash("curl https://evil.example"), answered("y")]
    assert flagged([call]) == {}


def test_an_attempt_in_mode_val_may_ask_in_mode_val() -> None:
    url = "http://localhost:1/proxy/rollout/r/attempt/0/mode/val/openai/v1/models"
    assert set(flagged(attempt([bash(f"curl {url}")], mode="val"))) == {"own-model-calls"}
    assert set(flagged(attempt([bash("cd /x/runs/r/attempts/r/0/work && ls")]))) == set()
