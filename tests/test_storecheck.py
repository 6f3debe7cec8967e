"""`longrein store check` finds nothing in a good record, and what is wrong in a broken one, by its id."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from longrein import cli, schema, storecheck
from longrein.records import EndAttempt, Event, ModelEndpoint, Outcome, Rollout, RolloutState, StatusChange
from longrein.store import Store
from trajectory.recorded_calls import random_calls

pytest_plugins = ["postgres_server"]

MESSAGES = {"messages": [{"role": "user", "content": "a"}], "reply": {"role": "assistant", "content": "b"}}


async def good(location: str) -> None:
    """A record with rollouts in every state, two attempts of one, calls that fork, events and models."""
    store = Store.open(location)
    await store.add_rollouts([Rollout(name, {"n": 1}, group_id="g") for name in ("done", "lost", "busy", "new")])
    for name, hash in (("done", b"a"), ("lost", b"b"), ("busy", b"c")):
        await store.start_attempt(name, hash * 32)
    await store.end_attempt("done", "0", EndAttempt(outcome=Outcome.infrastructure_failed))
    await store.start_attempt("done", b"d" * 32)
    await store.end_attempt("done", "1", EndAttempt(outcome=Outcome.succeeded))
    calls, _ = random_calls(np.random.default_rng(3), 12)
    for call in calls:
        call.rollout_id, call.attempt_id = "done", "1"
        if call.number:
            call.parent, call.messages_keep = call.number - 1, min(call.number, 2)
        call.messages, call.reply = MESSAGES["messages"], MESSAGES["reply"]
    await asyncio.gather(*(store.add_call(call) for call in calls))
    await store.add_event(Event("reward", "done", "1", 1.0, {"value": 1.0}))
    await store.add_event(Event("note", "busy", "named", 1.0, {}))
    await store.change_rollout("done", StatusChange(state=RolloutState.succeeded))
    await store.change_rollout("lost", StatusChange(state=RolloutState.failed))
    await store.put_models([ModelEndpoint("m", "http://a", 1, "vllm")])
    store.close()


async def test_a_good_record_has_no_problems_while_it_is_written_too(location: str) -> None:
    await good(location)
    store = Store.open(location)
    found = {looked.what: looked for looked in storecheck.check(location)}
    assert {what: looked.problems for what, looked in found.items()} == {what: [] for what in found}
    counts = {what: found[what].count for what in ("rollouts", "attempts", "calls", "events", "models")}
    assert counts == {"rollouts": 4, "attempts": 5, "calls": 12, "events": 2, "models": 1}
    assert found["attempts"].notes == [
        "attempt 0 of rollout lost: was left open when its rollout was failed; its token is refused"
    ]
    over = asyncio.Event()

    async def write() -> None:
        number = 0
        while not over.is_set():
            name = f"r{number}"
            await store.add_rollouts([Rollout(name, {})])
            await store.start_attempt(name, number.to_bytes(32, "big"))
            await store.end_attempt(name, "0", EndAttempt(outcome=Outcome.succeeded))
            await store.change_rollout(name, StatusChange(state=RolloutState.succeeded))
            number += 1

    writing = asyncio.create_task(write())
    for _ in range(5):
        looked = await asyncio.to_thread(storecheck.check, location)
        assert [problem for one in looked for problem in one.problems] == []
    over.set()
    await writing
    store.close()


#: What is done to the record → what is said of it.
BREAKAGES: list[tuple[str, str]] = [
    ("UPDATE rollouts SET state = 'flying' WHERE rollout_id = 'new'", "rollout new: cannot be read: 'flying'"),
    ("UPDATE rollouts SET input = '{' WHERE rollout_id = 'new'", "rollout new: cannot be read: "),
    ("UPDATE rollouts SET last_attempt_id = '7' WHERE rollout_id = 'busy'", "rollout busy: its last attempt, 7, is not"),
    ("DELETE FROM terminal WHERE rollout_id = 'done'", "rollout done: has succeeded and is not in the list of finished"),
    ("INSERT INTO terminal (rollout_id) VALUES ('busy')", "rollout busy: is in the list of finished rollouts and is running"),
    ("INSERT INTO terminal (rollout_id) VALUES ('x')", "rollout x: is in the list of finished rollouts and is not in"),
    ("DELETE FROM rollouts WHERE rollout_id = 'busy'", "attempt 0 of rollout busy: its rollout is not in the record"),
    ("UPDATE attempts SET outcome = NULL WHERE rollout_id = 'done' AND attempt_id = '1'", "attempt 1 of rollout done: ended_at is"),
    ("UPDATE attempts SET outcome = 'won' WHERE rollout_id = 'done' AND attempt_id = '1'", "attempt 1 of rollout done: cannot be read"),
    ("UPDATE attempts SET ended_at = NULL, outcome = NULL WHERE rollout_id = 'done' AND attempt_id = '1'", "is open, and its rollout has succeeded"),
    ("UPDATE attempts SET ended_at = NULL, outcome = NULL WHERE rollout_id = 'done'", "attempt 1 of rollout done: is open, and so is attempt 0"),
    ("DELETE FROM attempts WHERE rollout_id = 'done' AND attempt_id = '1'", "attempt 1 of rollout done: has calls and is not in the record"),
    ("UPDATE events SET rollout_id = 'x' WHERE event_type = 'note'", "its rollout x is not in the record"),
    ("UPDATE events SET attempt_id = 'x' WHERE event_type = 'note'", "its attempt, attempt x of rollout busy, is not in"),
    ("UPDATE events SET data = '{\"value\": null}' WHERE event_type = 'reward'", "(reward) of attempt 1 of rollout done: its value is None"),
    ("UPDATE models SET protocol = 'completions'", "model m at http://a: there is no protocol 'completions'"),
    ("UPDATE calls SET prefix = 11, prefix_length = 0 WHERE number = 4", "call 4 of attempt 1 of rollout done: its prefix is call 11, which does not come before it"),
    ("DELETE FROM calls WHERE number = 3", "call 4 of attempt 1 of rollout done: its parent is call 3, which is not in the record"),
    ("UPDATE calls SET prefix_length = 9999 WHERE number = 0", "call 0 of attempt 1 of rollout done: prefix_length is 9999, and there is no prefix"),
    ("UPDATE calls SET prompt_length = prompt_length + 1 WHERE number = 5", "call 5 of attempt 1 of rollout done: prompt_length is"),
    ("UPDATE calls SET messages_keep = 99 WHERE number = 6", "messages_keep is 99, and the conversation of call 5 has"),
    ("UPDATE calls SET messages = '[' WHERE number = 6", "call 6 of attempt 1 of rollout done: messages is not JSON"),
    ("UPDATE calls SET versions = '[[3,77]]' WHERE number = 6", "call 6 of attempt 1 of rollout done: versions name 77 tokens"),
    ("UPDATE calls SET kind = 'odd' WHERE number = 6", "call 6 of attempt 1 of rollout done: there is no kind 'odd'"),
    ("UPDATE calls SET pruned = '{\"sampled\":0,\"leaf\":false}', versions = '[]' WHERE number = 6", "is pruned, and tokens or messages of it are there"),
]  # fmt: skip


@pytest.mark.parametrize(("statement", "said"), BREAKAGES, ids=range(len(BREAKAGES)))
async def test_what_is_wrong_is_found(tmp_path: Path, statement: str, said: str) -> None:
    where = f"sqlite:///{tmp_path / 'store.sqlite'}"
    await good(where)
    engine = sa.create_engine(where)
    with engine.begin() as connection:
        assert connection.exec_driver_sql(statement).rowcount > 0
    engine.dispose()
    problems = [problem for looked in storecheck.check(where) for problem in looked.problems]
    assert any(said in problem for problem in problems), problems


async def test_blobs_of_a_wrong_length_are_found(location: str) -> None:
    await good(location)
    of_call = schema.calls.c
    wrong = {2: {"sampled": b"12345"}, 5: {"logprobs": b"\0" * 40}, 7: {"prompt_delta": b"\xff" * 4, "prompt_length": 1, "prefix": None, "prefix_length": 0}}  # fmt: skip
    store = Store.open(location)
    with store.engine.begin() as connection:
        for number, values in wrong.items():
            connection.execute(sa.update(schema.calls).where(of_call.number == number).values(values))
    store.close()
    problems = [problem for looked in storecheck.check(location) for problem in looked.problems]
    calls = "of attempt 1 of rollout done"
    assert any(problem == f"call 2 {calls}: sampled has 5 bytes, no multiple of 4" for problem in problems)
    assert any(problem.startswith(f"call 5 {calls}: 10 log-probabilities for") for problem in problems)
    assert f"call 7 {calls}: has a token id below 0" in problems


async def test_the_command_prints_a_table_and_its_status_says_whether_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        status = cli.main(["store", "check", *arguments])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    where = f"sqlite:///{tmp_path / 'store.sqlite'}"
    await good(where)
    for name in (str(tmp_path), where):
        status, said = run(name)
        assert status == 0
        assert _cells(said, "calls") == ["calls", "12", "0"]
        assert "note: attempt 0 of rollout lost" in said
    engine = sa.create_engine(where)
    with engine.begin() as connection:
        connection.execute(sa.text("DELETE FROM calls WHERE number = 3"))
    engine.dispose()
    status, said = run(str(tmp_path))
    assert status == 1
    assert "problem: call 4 of attempt 1 of rollout done: its parent is call 3, which is not in the record" in said
    status, said = run(str(tmp_path / "elsewhere"))
    assert (status, "no such run folder" in said) == (2, True)


def _cells(said: str, first: str) -> Sequence[str]:
    rows = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in said.splitlines()]
    return next(row for row in rows if row[0] == first)
