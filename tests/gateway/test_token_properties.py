"""The three histories over random conversations, replies and echoes, with the templates of six families."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longrein.gateway.conversation import Plan, recall
from longrein.gateway.loading import load_text_model
from longrein.gateway.messages import Message
from longrein.gateway.parsing import ParserOptions, make_parser, message_of
from longrein.gateway.tokens import Detokenizer, Rendered, TemplateError, TextModel

from .family_models import FAMILIES, make_family_folder
from .playing import ECHOES, TOOLS, Attempt, Said, as_text, composed, echo, sampled_ids, without_last_stop


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_folder(tmp_path_factory.mktemp("families") / family, family)


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    return load_text_model(str(folder))


# Strategies

TEXT = st.text(st.sampled_from("ab hHaving\n\t{}\"'<>[]|/é東🙂.\u0301"), max_size=20)
CONTROLS = sorted({token for kind in FAMILIES.values() for token in (*kind.control, *kind.marks)})
SPOKEN = st.one_of(
    TEXT,
    st.builds(lambda a, token, b: a + token + b, TEXT, st.sampled_from(CONTROLS), TEXT),
    st.builds(lambda token, size, b: token[:size] + b, st.sampled_from(CONTROLS), st.integers(1, 30), TEXT),
    TEXT.map(lambda text: text + "\ufdd0"),
)
VALUES = st.one_of(
    TEXT.map(json.dumps),
    TEXT.map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.sampled_from(
        ["1", "-0", "1.0", "1e3", "12345678901234567890123", "1E400", "true", "null", "[]", '[1,  {"x": {}}]',
         '"a\\/b"', '"\\u00e9\\ud83d\\ude42"', '{"arguments": {"name": 1}}', '"</tool_call>"']
    ),
)  # fmt: skip


@st.composite
def argument_texts(draw: st.DrawFn) -> str:
    """A JSON object as a model might write it: white space anywhere, keys twice."""
    entries = draw(st.lists(st.tuples(st.sampled_from(["command", "n", "a", "b"]), VALUES), max_size=3))
    space = draw(st.sampled_from(["", " ", "  ", "\n "]))
    return "{" + space + ("," + space).join(f'"{key}":{space}{value}' for key, value in entries) + "}"


SAYINGS = st.builds(
    Said,
    text=TEXT,
    reasoning=st.one_of(st.none(), TEXT),
    calls=st.lists(argument_texts(), max_size=2).map(tuple),
    stopped=st.sampled_from([True, True, True, False]),
    cut=st.floats(0, 1),
)


@dataclass(frozen=True)
class Turn:
    said: Said
    sibling: Said | None
    """The same request is sent again and gets this; the harness goes on from the first answer."""
    seed: int
    echo: str
    answers: tuple[str, str]
    reverse: bool
    late_system: bool
    edit: str | None
    """The harness puts this in place of an earlier result or question."""


TURNS = st.lists(
    st.builds(
        Turn,
        said=SAYINGS,
        sibling=st.one_of(st.none(), st.none(), st.none(), SAYINGS),
        seed=st.integers(0, 9),
        echo=st.sampled_from(ECHOES),
        answers=st.tuples(SPOKEN, SPOKEN),
        reverse=st.booleans(),
        late_system=st.sampled_from([False, False, False, True]),
        edit=st.one_of(st.none(), st.none(), st.none(), st.none(), SPOKEN),
    ),
    min_size=1,
    max_size=5,
)
SETTINGS = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def next_messages(messages: list[Message], reply: Message, turn: Turn) -> list[Message]:
    answers = [
        Message("tool", said, tool_call_id=call.id)
        for call, said in zip(reply.tool_calls, turn.answers * 2, strict=False)
    ]
    if turn.reverse:
        answers.reverse()
    answers = answers or [Message("user", turn.answers[0])]
    if turn.late_system:
        answers.append(Message("system", "Hurry."))
    messages = [*messages, echo(reply, turn.echo), *answers]
    if turn.edit is not None:
        at = max(i for i, m in enumerate(messages[:-1]) if m.role in ("user", "tool"))
        messages[at] = replace(messages[at], content=turn.edit)
    return messages


def play(
    attempt: Attempt, first: str, turns: list[Turn], after: Callable[[Plan, list[Message]], None]
) -> list[Message]:
    """Plays the turns; `after` judges each call. Ends early where the template refuses what comes next."""
    if FAMILIES[attempt.family].sentencepiece:
        # To SentencePiece U+2581 is a space: the one character that it does not give back.
        first = first.replace("▁", "_")
        turns = [_spelled_in_ascii(turn) for turn in turns]
    messages = [Message("system", "Be brief."), Message("user", first)]
    for turn in turns:
        try:
            attempt.render(messages, True)
        except TemplateError:
            break
        saying = turn.said
        text = as_text(attempt.family, saying)
        reply = attempt.call(messages, text, seed=turn.seed, stopped=saying.stopped)
        after(attempt.plans[-1], messages)
        if turn.sibling is not None:
            text = as_text(attempt.family, turn.sibling)
            attempt.call(messages, text, seed=turn.seed + 1, stopped=turn.sibling.stopped)
            after(attempt.plans[-1], messages)
        messages = next_messages(messages, reply, turn)
    return messages


def _spelled_in_ascii(turn: Turn) -> Turn:
    one, two = (answer.replace("▁", "_") for answer in turn.answers)
    return replace(turn, answers=(one, two), edit=turn.edit.replace("▁", "_") if turn.edit else turn.edit)


def spelled(model: TextModel, text: str) -> int:
    """How many control tokens stand in a text that spells none in its content."""
    return sum(id in model.control_ids for id in model.tokenizer.encode(text, add_special_tokens=False).ids)


# The properties


@SETTINGS
@given(first=SPOKEN, turns=TURNS)
def test_faithful_prompts_are_the_templates_text_and_repeat_recorded_ids(
    model: TextModel, family: str, folder: Path, first: str, turns: list[Turn]
) -> None:
    attempt = Attempt(model, family, folder)

    def judge(plan: Plan, messages: list[Message]) -> None:
        prompt, rendered = attempt.prompt(plan), attempt.render(messages, True)
        assert composed(model.decode(prompt)) == composed(rendered.text)
        if not FAMILIES[family].composes:
            assert model.decode(prompt) == rendered.text
        # Judged by the text alone: where the parent's branch is repeated, its ids are, and it is no fork.
        earlier = attempt.recorded[:-1]
        repeated = [
            must
            for recorded in earlier
            if not recorded.ordinary
            and rendered.text.startswith(model.decode(must := without_last_stop(model, recorded.branch())))
        ]
        if repeated and not rendered.marks:
            longest = max(map(len, (model.decode(must) for must in repeated)))
            assert any(prompt[: len(must)] == must for must in repeated if len(model.decode(must)) == longest)
        if plan.parent is not None:
            must = without_last_stop(model, plan.parent.branch())
            whole = prompt[: len(must)] == must
            assert whole or plan.fork is not None
            if must in repeated and not rendered.marks:
                assert whole
                assert plan.fork is None

    play(attempt, first, turns, judge)


@SETTINGS
@given(first=SPOKEN, turns=TURNS, mode=st.sampled_from(["faithful", "sampled", "rendered"]))
def test_no_control_token_enters_from_content(
    model: TextModel, family: str, folder: Path, first: str, turns: list[Turn], mode: str
) -> None:
    attempt = Attempt(model, family, folder, mode)

    def judge(plan: Plan, messages: list[Message]) -> None:
        # A reply that was read as text may itself hold control tokens: the model's own, in the branch it sampled.
        if any(token in m.content for m in messages if m.role == "assistant" for token in model.control):
            return
        harmless = [m if m.role == "assistant" else replace(m, content="x" if m.content else "") for m in messages]
        wanted = spelled(model, attempt.render(harmless, True).text)
        if mode == "sampled" and plan.parent is not None and plan.fork is None:
            return  # a turn that the template would leave out may stand in it
        assert sum(id in model.control_ids for id in attempt.prompt(plan)) == wanted

    play(attempt, first, turns, judge)


@SETTINGS
@given(first=SPOKEN, turns=TURNS)
def test_sampled_prompts_hold_every_recognised_turn_as_it_was_sampled(
    model: TextModel, family: str, folder: Path, first: str, turns: list[Turn]
) -> None:
    attempt = Attempt(model, family, folder, "sampled")

    def judge(plan: Plan, messages: list[Message]) -> None:
        prompt = attempt.prompt(plan)
        parent = plan.parent
        if parent is None or not parent.continued(messages):
            return
        branch = parent.branch()
        assert prompt[: len(branch)] == branch
        assert plan.fork is None
        # What is new follows as the template writes it.
        text = composed(attempt.render(messages, True).text)
        new = composed(model.decode(prompt[len(branch) :]))
        assert text.endswith(new)

    play(attempt, first, turns, judge)


@SETTINGS
@given(first=SPOKEN, turns=TURNS)
def test_rendered_prompts_encode_all_of_the_text(
    model: TextModel, family: str, folder: Path, first: str, turns: list[Turn]
) -> None:
    attempt = Attempt(model, family, folder, "rendered")

    def judge(plan: Plan, messages: list[Message]) -> None:
        assert plan.prefix is None
        assert plan.new_ids == model.encode(attempt.render(messages, True))
        assert composed(model.decode(plan.new_ids)) == composed(attempt.render(messages, True).text)

    play(attempt, first, turns, judge)


@SETTINGS
@given(first=SPOKEN, turns=TURNS, mode=st.sampled_from(["faithful", "sampled", "rendered"]))
def test_a_history_read_back_from_the_store_plans_the_same(
    model: TextModel, family: str, folder: Path, first: str, turns: list[Turn], mode: str
) -> None:
    attempt = Attempt(model, family, folder, mode)
    messages = play(attempt, first, turns, lambda plan, messages: None)
    again = Attempt(model, family, folder, mode)
    recall(again.history, model, attempt.calls)
    assert [c.branch() for c in again.history.calls] == [c.branch() for c in attempt.history.calls]
    assert [c.conversation() for c in again.history.calls] == [c.conversation() for c in attempt.history.calls]
    if any(model.decode(c.prompt_ids) != c.prompt_text for c in attempt.recorded):
        assert FAMILIES[family].composes  # only the ids are stored: such a text is read back as they decode
        return
    try:
        live = attempt.plan(messages)
    except TemplateError:
        return
    back = again.plan(messages)
    for name in ("prefix_length", "prefix_characters", "new_ids", "new_text", "messages_keep", "fork"):
        assert getattr(back, name) == getattr(live, name), name
    for name in ("prefix", "parent"):
        mine, theirs = getattr(live, name), getattr(back, name)
        assert (mine and mine.number) == (theirs and theirs.number)


@SETTINGS
@given(said=SAYINGS, seed=st.integers(0, 9), size=st.integers(1, 4))
def test_replies_are_never_lost_whatever_the_pieces(
    model: TextModel, family: str, folder: Path, said: Said, seed: int, size: int
) -> None:
    text = as_text(family, said)
    ids = sampled_ids(model, text, seed, said.stopped)
    text = model.decode(without_last_stop(model, ids))
    make = make_parser("auto", model, str(folder))
    prompt = model.encode(Rendered(model.render([{"role": "user", "content": "go"}], TOOLS).text))
    tail = model.decode(prompt)[-64:]
    replies: list[Message] = []
    for pieces in ([ids], [ids[i : i + size] for i in range(0, len(ids), size)]):
        parser = make(ParserOptions(tail, prompt, TOOLS, lambda i: f"{i:09d}"))
        detokenizer, deltas = Detokenizer(model), []
        for piece in pieces:
            deltas += parser.push(piece, detokenizer.push(without_last_stop(model, piece)))
        deltas += [*parser.push([], detokenizer.finish()), *parser.finish()]
        replies.append(message_of(deltas))
    assert replies[0] == replies[1]
    # Every letter of the text stands in the reply; marks, keys of calls and white space may be the family's.
    reply = replies[0]
    if not reply.tool_calls:
        left = "".join(reply.reasoning.split()) + "".join(reply.content.split())
        bare = "".join(text.split())
        for mark in ("<think>", "</think>"):
            bare, left = bare.replace(mark, ""), left.replace(mark, "")
        assert left == bare
    elif family != "qwen3.5":
        assert all(call.arguments in text for call in reply.tool_calls)


SCENES = {
    "chat": lambda n: Said(f"step {n} is done", None, (), True, 1),
    "chat with reasoning": lambda n: Said(f"step {n} is done", f"because of {n}", (), True, 1),
    "tools": lambda n: Said("", None, (json.dumps({"command": f"cat {n}.txt"}),), True, 1),
    "tools with reasoning": lambda n: Said("", f"because {n}", (json.dumps({"command": f"cat {n}.txt"}),), True, 1),
    "odd arguments": lambda n: Said("", None, (f'{{"command":   "caf\\u00e9 {n}"}}',), True, 1),
}


@pytest.mark.parametrize("mode", ["faithful", "sampled"])
@pytest.mark.parametrize("scene", sorted(SCENES))
def test_tokens_encoded_and_stored_grow_with_the_turns(
    model: TextModel, family: str, folder: Path, scene: str, mode: str
) -> None:
    def new_ids(turns: int) -> int:
        attempt = Attempt(model, family, folder, mode)
        messages = [Message("system", "s " * 50), Message("user", "go")]
        for turn in range(turns):
            reply = attempt.call(messages, as_text(family, SCENES[scene](turn)), seed=turn)
            answers = [Message("tool", f"result {turn}", tool_call_id=c.id) for c in reply.tool_calls]
            messages = [*messages, reply, *(answers or [Message("user", f"and {turn}?")])]
        return sum(len(call.prompt_delta) for call in attempt.calls)

    small, large = new_ids(10), new_ids(40)
    assert large < 4 * small * 1.15  # all of the history each time would be 16 times
