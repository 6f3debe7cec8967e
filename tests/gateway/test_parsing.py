"""Sampled text is read as a stream, and the pieces say what the whole says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from longrein.config import ConfigError
from longrein.gateway.loading import load_text_model
from longrein.gateway.messages import Message
from longrein.gateway.parsing import Delta, HermesParser, ParserOptions, StopStrings, make_parser, message_of
from longrein.gateway.tokens import Detokenizer

from .models import make_model_folder

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def read(
    text: str, *, cuts: tuple[int, ...] = (), tools: list = TOOLS, tail: str = "", stream: bool = False
) -> tuple[Message, list[Delta]]:
    parser = HermesParser(ParserOptions(tail, (), tools, lambda i: f"id{i}", stream))
    deltas: list[Delta] = []
    start = 0
    for cut in (*sorted(cuts), len(text)):
        deltas += parser.push([], text[start:cut])
        start = max(start, cut)
    deltas += parser.finish()
    return message_of(deltas), deltas


def test_reasoning_content_and_calls() -> None:
    reply, _ = read('<think>why</think>Look.\n<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>')
    assert (reply.reasoning, reply.content) == ("why", "Look.")
    assert [(c.id, c.name, c.arguments) for c in reply.tool_calls] == [("id0", "f", '{"a":  1}')]


def test_arguments_are_the_text_the_model_wrote() -> None:
    written = '{"a" : [1,  {"arguments": 2}], "b":"\\u00e9"}'
    reply, _ = read(f'<tool_call>{{"arguments": {written}, "name": "f"}}</tool_call>')
    assert reply.tool_calls[0].arguments == written


def test_an_id_that_the_model_wrote_is_the_id() -> None:
    reply, _ = read('<tool_call>{"name": "f", "arguments": {}, "id": "mine"}</tool_call>')
    assert reply.tool_calls[0].id == "mine"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{not json}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        "a < b and <tool",
        "<tool_call></tool_call> more\n",
    ],
)
def test_what_is_malformed_stays_text_as_it_was_sampled(text: str) -> None:
    reply, _ = read(text)
    assert reply.content == text
    assert reply.tool_calls == ()


def test_without_tools_nothing_is_a_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    reply, _ = read(text, tools=[])
    assert reply.content == text


def test_reasoning_that_the_template_opened() -> None:
    reply, _ = read("because</think>\n\nSo.", tail="<|im_start|>assistant\n<think>\n")
    assert (reply.reasoning, reply.content) == ("because", "\n\nSo.")


PIECES = st.lists(
    st.one_of(
        st.text("ab <\n/", max_size=6),
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"x": 1}}', "<tool"]
        ),
    ),
    max_size=8,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=PIECES, cuts=st.lists(st.integers(0, 80), max_size=8), stream=st.booleans())
def test_any_cut_of_the_stream_gives_the_same_reply(text: str, cuts: list[int], stream: bool) -> None:
    whole, _ = read(text, stream=stream)
    pieces, _ = read(text, cuts=tuple(min(cut, len(text)) for cut in cuts), stream=stream)
    assert pieces == whole


ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(st.none() | st.integers() | st.text(max_size=8), lambda v: st.lists(v, max_size=2), max_leaves=4),
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(arguments=ARGUMENTS, ascii=st.booleans(), indent=st.sampled_from([None, 1]), more=st.booleans())
def test_arguments_stream_as_they_come_and_join_to_what_the_model_wrote(
    arguments: dict, ascii: bool, indent: int | None, more: bool
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii, indent=indent)
    text = f'Look.\n<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    text += '\n<tool_call>{"arguments": {"late": 1}, "name": "f"}</tool_call>' if more else ""
    reply, deltas = read(text, cuts=tuple(range(len(text))), stream=True)
    whole, _ = read(text)
    assert reply == whole
    assert reply.tool_calls[0].arguments == written
    assert max(len(delta.arguments) for delta in deltas) <= 1 + (len("</tool_call>") if "<" in written else 0)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b'),  # cut by the limit
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call>', "{a: 1}"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', '{"a": 1'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}, oops}</tool_call>', '{"a": 1}, oops}'),
    ],
)
def test_what_turns_out_malformed_in_a_stream_stands_as_it_was_sampled(text: str, arguments: str) -> None:
    reply, _ = read(text, stream=True)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("f", arguments)]
    assert reply.content == ""


@pytest.mark.parametrize(
    "text", ["<tool_call>{not json}</tool_call>", '<tool_call>{"name": "f", "arguments": 3}</tool_call>']
)
def test_a_call_that_is_malformed_before_its_arguments_is_text_in_a_stream_too(text: str) -> None:
    reply, _ = read(text, stream=True)
    assert (reply.content, reply.tool_calls) == (text, ())


def test_content_streams_before_the_reply_is_whole() -> None:
    parser = HermesParser(ParserOptions("", (), TOOLS, str))
    assert [d.content for d in parser.push([], "Hello the")] == ["Hello the"]
    assert parser.push([], " <tool_") == []  # it could begin a call


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abX", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    stops=st.lists(st.text("aX", min_size=1, max_size=3), max_size=3),
)
def test_stop_strings_cut_at_the_first_that_is_complete_whatever_the_pieces(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    matcher = StopStrings(stops)
    out, start = "", 0
    for cut in (*sorted(min(c, len(text)) for c in cuts), len(text)):
        out += matcher.push(text[start:cut])
        start = max(start, cut)
        assert not any(stop in out for stop in stops)
    out += matcher.push("", final=True)
    matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert out == (text[: min(matches)[1]] if matches else text)
    assert (matcher.stopped is not None) == bool(matches)


@settings(max_examples=100, deadline=None)
@given(text=st.text("aé東🙂 <|", max_size=20), size=st.integers(1, 3))
def test_detokenized_pieces_join_and_are_never_half_a_character(
    text: str, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = load_text_model(str(make_model_folder(tmp_path_factory.getbasetemp() / "detokenizer")))
    ids = [id for character in text for id in model.tokenizer.encode(character, add_special_tokens=False).ids]
    detokenizer = Detokenizer(model)
    pieces = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert all("�" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == text


MARKS = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>"]
ROLES = [
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|system|>",
    "[gMASK]",
    "<sop>",
    "<tool_response>",
    "</tool_response>",
    "/nothink",
]


def test_a_family_of_the_renderers_package(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = load_text_model(str(make_model_folder(tmp_path_factory.getbasetemp() / "renderers")))
    model.tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    model.tokenizer.add_special_tokens([AddedToken(role, special=True) for role in ROLES])
    text = "<think>why</think>Look.<tool_call>f\n<arg_key>path</arg_key>\n<arg_value>a b</arg_value>\n</tool_call>"
    parser = make_parser("glm-4.5", model, "folder")(ParserOptions("", (), TOOLS, lambda i: f"id{i}"))
    reply = message_of(
        [*parser.push(model.tokenizer.encode(text, add_special_tokens=False).ids, text), *parser.finish()]
    )
    assert (reply.reasoning, reply.content) == ("why", "Look.")
    assert [(c.id, c.name, json.loads(c.arguments)) for c in reply.tool_calls] == [("id0", "f", {"path": "a b"})]


def test_a_parser_that_does_not_exist_or_does_not_fit_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = load_text_model(str(make_model_folder(tmp_path_factory.getbasetemp() / "unfit")))
    with pytest.raises(ConfigError, match="qwen33"):
        make_parser("qwen33", model, "folder")
    with pytest.raises(ConfigError, match=r"does not fit.*<tool_call>"):
        make_parser("qwen3", model, "folder")
