"""Invariants 2 and 3 over random conversations: text is the harness's, tokens are the model's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longrein.gateway.conversation import History, Plan, Recorded, plan_prompt, recall
from longrein.gateway.loading import load_text_model
from longrein.gateway.messages import Message, ToolCall, same
from longrein.gateway.parsing import HermesParser, ParserOptions, message_of
from longrein.gateway.tokens import Rendered, TextModel
from longrein.records import Call

from .models import CONTROL, TEMPLATES, make_model_folder

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(str(make_model_folder(tmp_path_factory.mktemp("model") / request.param, request.param)))


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return load_text_model(str(make_model_folder(tmp_path_factory.mktemp("model"), "hermes")))


class Attempt:
    """Plays calls through the history as the gateway does, with given sampled ids."""

    def __init__(self, model: TextModel, mode: str = "faithful", tools: Sequence[dict] = ()):
        self.model, self.mode, self.tools, self.history = model, mode, tools, History()
        self.plans: list[Plan] = []
        self.recorded: list[Recorded] = []

    def render(self, messages: Sequence[Message], generation_prompt: bool) -> Rendered:
        return self.model.render([m.for_template() for m in messages], self.tools, generation_prompt=generation_prompt)

    def call(self, messages: list[Message], sampled: list[int]) -> Message:
        plan = plan_prompt(self.history, self.model, messages, self.tools, self.render, self.mode)
        recorded = self.history.admit(plan, messages, self.tools)
        stopped = bool(sampled) and sampled[-1] in self.model.stop_ids
        text = self.model.decode(sampled[:-1] if stopped else sampled)
        parser = HermesParser(ParserOptions("", (), self.tools, lambda i: f"call_{recorded.number}_{i}"))
        reply = message_of([*parser.push([], text), *parser.finish()])
        self.history.add(recorded, self.model, sampled, reply)
        self.plans.append(plan)
        self.recorded.append(recorded)
        return reply

    def prompt(self, index: int) -> list[int]:
        plan = self.plans[index]
        prefix = plan.prefix.branch()[: plan.prefix_length] if plan.prefix else []
        return [*prefix, *plan.new_ids]


def ids_of(model: TextModel, text: str, stop: bool = True) -> list[int]:
    """Ids that a model might sample for `text`: one per character, which is not how the tokenizer would cut it."""
    ids = [id for character in text for id in model.tokenizer.encode(character, add_special_tokens=False).ids]
    return [*ids, min(model.stop_ids)] if stop else ids


TEXT = st.text(st.sampled_from("ab hHaving\n\t{}\"'<>é東🙂.|_"), max_size=24)
SPOKEN = st.one_of(TEXT, TEXT.map(lambda t: f"{t}{CONTROL[2]}{t}"), st.sampled_from(CONTROL))
ARGUMENTS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.one_of(TEXT, st.integers(), st.none(), st.booleans()), max_size=3
)


@st.composite
def replies(draw: st.DrawFn) -> str:
    text = draw(TEXT)
    if draw(st.booleans()):
        text = f"<think>{draw(TEXT)}</think>{text}"
    for _ in range(draw(st.integers(0, 2))):
        arguments = json.dumps(
            draw(ARGUMENTS), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1]))
        )
        text += f'\n<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'
    return text


def echo(reply: Message, how: str) -> Message:
    """The reply as different harnesses send it back."""
    calls = reply.tool_calls
    if how in ("reserialised", "all"):
        calls = tuple(ToolCall(c.id, c.name, json.dumps(json.loads(c.arguments), separators=(",", ":"))) for c in calls)
    reasoning = "" if how in ("no reasoning", "all") else reply.reasoning
    content = reply.content.strip() if how in ("stripped", "all") else reply.content
    return Message("assistant", content, reasoning, calls)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=SPOKEN,
    turns=st.lists(
        st.tuples(
            replies(),
            st.booleans(),
            SPOKEN,
            st.sampled_from(["exact", "reserialised", "no reasoning", "stripped", "all"]),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_prompts_decode_to_the_templates_text_and_repeat_recorded_ids(
    model: TextModel, first: str, turns: list
) -> None:
    attempt = Attempt(model, tools=TOOLS)
    messages = [Message("system", "Be brief."), Message("user", first)]
    for reply_text, stopped, spoken, how in turns:
        reply = attempt.call(messages, ids_of(model, reply_text, stopped))
        prompt = attempt.prompt(-1)
        # Invariant 2: the prompt decodes to exactly the template's text.
        assert model.decode(prompt) == attempt.render(messages, True).text
        # Control tokens come only from the template: content's spellings are ordinary tokens.
        plan = attempt.plans[-1]
        if plan.prefix is None:
            clean = [
                m if not m.content else Message(m.role, "x", m.reasoning, m.tool_calls, m.tool_call_id)
                for m in messages
            ]
            template_only = model.encode(attempt.render(clean, True))
            count = sum(id in model.control_ids for id in prompt)
            assert count == sum(id in model.control_ids for id in template_only)
        # Invariant 3, judged by the text alone and not by what the plan calls a fork: a prompt that begins with all of
        # a recorded branch (its last stop token may be left out) begins with that branch's ids, and is no fork of it.
        for recorded in attempt.recorded[:-1]:
            branch = recorded.branch()
            must = branch[:-1] if branch and branch[-1] in model.stop_ids else branch
            if model.decode(prompt).startswith(model.decode(must)):
                assert prompt[: len(must)] == must
                assert plan.parent is not recorded or plan.fork is None
        answers = [Message("tool", spoken, tool_call_id=c.id) for c in reply.tool_calls] or [Message("user", spoken)]
        messages = [*messages, echo(reply, how), *answers]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(replies(), st.booleans(), TEXT), min_size=2, max_size=5))
def test_history_sampled_keeps_every_recognised_turn_as_it_was_sampled(model: TextModel, turns: list) -> None:
    attempt = Attempt(model, "sampled", TOOLS)
    messages = [Message("user", "go")]
    for reply_text, stopped, spoken in turns:
        reply = attempt.call(messages, ids_of(model, reply_text, stopped))
        plan = attempt.plans[-1]
        if plan.parent is not None:
            branch = plan.parent.branch()
            assert attempt.prompt(-1)[: len(branch)] == branch
            assert plan.fork is None
        answers = [Message("tool", spoken, tool_call_id=c.id) for c in reply.tool_calls] or [Message("user", spoken)]
        messages = [*messages, echo(reply, "no reasoning"), *answers]


def test_growth_is_linear_in_turns_with_every_template(model: TextModel) -> None:
    def new_tokens(turns: int) -> int:
        attempt = Attempt(model, tools=TOOLS)
        messages = [Message("system", "s " * 50), Message("user", "go")]
        for turn in range(turns):
            reply = attempt.call(messages, ids_of(model, f"<think>step {turn}</think>I look at file {turn}."))
            messages = [*messages, reply, Message("user", f"result {turn}")]
        return sum(len(plan.new_ids) for plan in attempt.plans)

    small, large = new_tokens(20), new_tokens(80)
    assert large < 4 * small * 1.1


def test_a_fork_is_cut_behind_the_last_control_token_and_shares_what_comes_before(hermes: TextModel) -> None:
    attempt = Attempt(hermes)
    messages = [Message("system", "Be brief."), Message("user", "write the file")]
    reply = attempt.call(messages, ids_of(hermes, "having written"))
    changed = Message("assistant", "having changed")
    attempt.call([*messages, changed, Message("user", "and now?")], ids_of(hermes, "done"))
    plan = attempt.plans[-1]
    assert reply.content == "having written"
    assert plan.fork == "rewrite"
    prompt = attempt.prompt(-1)
    last = prompt[: plan.prefix_length][-1]
    assert last in hermes.control_ids
    assert plan.prefix_length > 10
    # The rest alone encodes as in place.
    assert prompt == attempt.prompt(0)[: plan.prefix_length] + hermes.encode(
        attempt.render([*messages, changed, Message("user", "and now?")], True), plan.prefix_characters
    )


@pytest.mark.parametrize("stopped", [True, False])
def test_a_continued_reply_is_sent_as_it_was_sampled(hermes: TextModel, stopped: bool) -> None:
    """One token a character, which encoding anew would not give; cut by max_tokens there is no stop token to cut at."""
    attempt = Attempt(hermes)
    messages = [Message("user", "write the file")]
    sampled = ids_of(hermes, "having the file", stopped)
    assert hermes.encode(Rendered("having the file")) != ids_of(hermes, "having the file", False)
    reply = attempt.call(messages, sampled)
    attempt.call([*messages, reply, Message("user", "and now?")], ids_of(hermes, "done"))
    branch = attempt.recorded[0].branch()
    assert attempt.prompt(-1)[: len(branch)] == branch
    assert attempt.plans[-1].fork is None


@pytest.mark.parametrize(
    ("sampled", "change", "cause"),
    [
        ('<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call>', "exact", "template"),
        ("<think>hm</think>I look.", "no reasoning", "reasoning"),
        ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', "exact", None),
        ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', "reserialised", None),
        ("I look.", "exact", None),
    ],
)
def test_causes_of_forks(hermes: TextModel, sampled: str, change: str, cause: str | None) -> None:
    attempt = Attempt(hermes, tools=TOOLS)
    messages = [Message("user", "go")]
    reply = attempt.call(messages, ids_of(hermes, sampled))
    answer = (
        Message("tool", "a.txt", tool_call_id=reply.tool_calls[0].id) if reply.tool_calls else Message("user", "and?")
    )
    attempt.call([*messages, echo(reply, change), answer], ids_of(hermes, "done"))
    assert attempt.plans[-1].fork == cause
    assert attempt.plans[-1].parent is attempt.recorded[0]


def test_changed_tools_new_conversations_and_siblings(hermes: TextModel) -> None:
    attempt = Attempt(hermes, tools=TOOLS)
    messages = [Message("user", "go")]
    first = attempt.call(messages, ids_of(hermes, "one"))
    attempt.call(messages, ids_of(hermes, "two"))
    assert attempt.plans[-1].fork is None  # a sibling of the first
    assert attempt.prompt(1) == attempt.prompt(0)
    attempt.call([Message("user", "name this conversation")], ids_of(hermes, "title"))
    assert attempt.plans[-1].fork == "new"
    attempt.tools = []
    attempt.call([*messages, first, Message("user", "sum up")], ids_of(hermes, "three"))
    assert attempt.plans[-1].fork == "tools"
    assert attempt.plans[-1].parent is attempt.recorded[0]


def test_a_rewritten_reply_is_found_by_its_tool_call_id(hermes: TextModel) -> None:
    attempt = Attempt(hermes, tools=TOOLS)
    messages = [Message("user", "go")]
    reply = attempt.call(messages, ids_of(hermes, 'Look.<tool_call>{"name": "bash", "arguments": {}}</tool_call>'))
    rewritten = Message("assistant", "Entirely other words.", tool_calls=reply.tool_calls)
    answer = Message("tool", "ok", tool_call_id=reply.tool_calls[0].id)
    attempt.call([*messages, rewritten, answer], ids_of(hermes, "done"))
    assert attempt.plans[-1].parent is attempt.recorded[0]
    assert attempt.plans[-1].fork == "rewrite"


def test_rendered_history_repeats_no_ids(hermes: TextModel) -> None:
    attempt = Attempt(hermes, "rendered")
    messages = [Message("user", "go")]
    reply = attempt.call(messages, ids_of(hermes, "having a file"))
    attempt.call([*messages, reply, Message("user", "and?")], ids_of(hermes, "done"))
    assert attempt.plans[-1].fork == "retokenized"
    assert attempt.prompt(-1) == hermes.encode(attempt.render([*messages, reply, Message("user", "and?")], True))


def test_same_forgives_what_harnesses_do_and_nothing_else() -> None:
    call = ToolCall("c1", "bash", '{"a":  1, "b": "é"}')
    reply = Message("assistant", "  Text\n", "  because ", (call,))
    assert same(reply, Message("assistant", "Text", "", (ToolCall("c1", "bash", '{"b": "\\u00e9", "a": 1}'),)))
    assert same(reply, Message("assistant", "", "because", (call,)))
    assert not same(reply, Message("assistant", "Other", "", (call,)))
    assert not same(reply, Message("assistant", "Text", "", (ToolCall("c2", "bash", call.arguments),)))
    assert not same(reply, Message("assistant", "Text", "", (ToolCall("c1", "bash", '{"a": 2}'),)))
    assert not same(Message("tool", "x", tool_call_id="1"), Message("tool", "x", tool_call_id="2"))


def test_an_attempt_goes_on_after_the_history_is_read_back(hermes: TextModel) -> None:
    attempt = Attempt(hermes, tools=TOOLS)
    messages = [Message("user", "go")]
    calls: list[Call] = []
    for text in ("having one", "<think>x</think>two", "three"):
        reply = attempt.call(messages, ids_of(hermes, text))
        plan, recorded = attempt.plans[-1], attempt.recorded[-1]
        calls.append(
            Call(
                rollout_id="r", attempt_id="0", number=recorded.number, dialect="chat", mode="train", model="m", engine="policy",
                parent=plan.parent.number if plan.parent else None, fork=plan.fork,
                prefix=plan.prefix.number if plan.prefix else None, prefix_length=plan.prefix_length,
                prompt_delta=plan.new_ids, prompt_length=plan.length, sampled=recorded.sampled_ids,
                messages_keep=plan.messages_keep, messages=[m.to_json() for m in recorded.messages],
                tools=list(TOOLS) if plan.parent is None else None, reply=reply.to_json(),
            )
        )  # fmt: skip
        messages = [*messages, echo(reply, "no reasoning"), Message("user", "and?")]
    again = Attempt(hermes, tools=TOOLS)
    recall(again.history, hermes, calls)
    assert [c.branch() for c in again.history.calls] == [c.branch() for c in attempt.history.calls]
    assert [c.conversation() for c in again.history.calls] == [c.conversation() for c in attempt.history.calls]
    attempt.call(messages, ids_of(hermes, "end"))
    again.call(messages, ids_of(hermes, "end"))
    assert again.prompt(-1) == attempt.prompt(-1)
    assert again.plans[-1].parent is not None
    assert again.plans[-1].parent.number == attempt.recorded[-2].number


def test_a_template_without_a_generation_prompt_is_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(Exception, match="no generation prompt"):
        load_text_model(str(folder))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no such folder"):
        load_text_model(str(tmp_path / "nowhere"))
