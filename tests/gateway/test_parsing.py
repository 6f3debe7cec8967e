"""Sampled text is read as a stream, and the pieces say what the whole says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from longrein.config import ConfigError
from longrein.gateway.loading import load_text_model
from longrein.gateway.messages import Message
from longrein.gateway.mistral import MistralParser
from longrein.gateway.parsing import (
    Delta,
    HermesParser,
    ParserOptions,
    StopStrings,
    make_parser,
    message_of,
    parser_name,
)
from longrein.gateway.tokens import Detokenizer, Rendered

from .family_models import FAMILIES, make_family_folder
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
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
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


def test_a_stream_is_never_cut_inside_a_character(tmp_path: Path) -> None:
    """SentencePiece gives up on a run of bytes that begins inside a character."""
    model = load_text_model(str(make_family_folder(tmp_path, "mistral")))
    for length in range(40):
        text = "<" * length + "🙂H"
        ids = [id for character in text for id in model.encode(Rendered(character))]
        detokenizer = Detokenizer(model)
        assert "".join(detokenizer.push([id]) for id in ids) + detokenizer.finish() == text


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


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_family_is_found_by_what_the_template_writes(tmp_path: Path, family: str) -> None:
    model = load_text_model(str(make_family_folder(tmp_path, family)))
    assert parser_name(model, str(tmp_path)) == FAMILIES[family].parser


def test_what_is_not_recognised_or_does_not_fit_is_said_and_read_as_hermes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
    plain += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    folder = make_family_folder(tmp_path / "plain", "hermes", lambda text: plain)
    assert parser_name(load_text_model(str(folder)), str(folder)) == "hermes"
    assert "writes no known form of tool call" in caplog.text
    caplog.clear()
    folder = make_family_folder(tmp_path / "coder", "hermes", lambda text: text + "{#- <function= -#}")
    assert parser_name(load_text_model(str(folder)), str(folder)) == "hermes"
    assert "the qwen3.5 parser does not fit the tokenizer" in caplog.text


def read_family(tmp_path: Path, family: str, text: str, tools: list = TOOLS) -> Message:
    model = load_text_model(str(make_family_folder(tmp_path, family)))
    parser = make_parser("auto", model, str(tmp_path))(ParserOptions("", (), tools, lambda i: f"id{i}"))
    return message_of([*parser.push(model.encode(Rendered(text)), text), *parser.finish()])


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a":  1}}]', [("id0", "f", '{"a":  1}')]),
        (
            "mistral",
            ' Look.[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
            [("abcdefghi", "f", "{}"), ("id1", "g", "{}")],
        ),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
            [("id0", "f", '{"a": "]"}'), ("abcdefghi", "g", "{}")],
        ),
        ("llama3", '{"name": "f", "parameters": {"a":1}}', [("id0", "f", '{"a":1}')]),
        (
            "deepseek",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a":1, "b": {}}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [("id0", "f", '{"a":1, "b": {}}')],
        ),
        (
            "qwen3.5",
            "hm\n</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\nx {} y\n</parameter>\n</function>\n</tool_call>",
            [("id0", "f", '{"a": "x {} y"}')],
        ),
    ],
)
def test_calls_of_the_families(tmp_path: Path, family: str, text: str, calls: list) -> None:
    reply = read_family(tmp_path, family, text)
    assert [(c.id, c.name, c.arguments) for c in reply.tool_calls] == calls
    assert "TOOL_CALLS" not in reply.content


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}] and more'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 3]'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}} {"name": "f", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]f{}"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[TOOL_CALLS]"),
        ("llama3", '{"name": "f", "parameters": {"a": }}'),
        ("llama3", '{"name": "f", "parameters": [1]}'),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{not json}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ("deepseek", "Look.<｜tool▁calls▁begin｜><｜tool▁c"),
        ("qwen3.5", "<tool_call>\n<function=f>\n<parameter=a>\nx"),
    ],
)
def test_malformed_calls_of_the_families_stay_text(tmp_path: Path, family: str, text: str) -> None:
    reply = read_family(tmp_path, family, text)
    assert reply.tool_calls == ()
    assert reply.content == text


STREAMED = [
    (
        "deepseek",
        "I will look at the file that you named first, and then say what stands in it.",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a":1}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "qwen3.5",
        "hm, a file\n</think>\n\nI will look at the file that you named first, and then say what stands in it.",
        "\n<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>",
    ),
]


@pytest.mark.parametrize(("family", "text", "call"), STREAMED)
@pytest.mark.parametrize("ending", ["", "call", "broken"])
def test_text_of_the_families_streams_and_joins_to_the_whole(
    tmp_path: Path, family: str, text: str, call: str, ending: str
) -> None:
    model = load_text_model(str(make_family_folder(tmp_path, family)))
    tail = "<think>\n" if "</think>" in text else ""
    text += {"": "", "call": call, "broken": call[: len(call) // 2]}[ending]
    ids = model.encode(Rendered(text))

    def reply(stream: bool) -> tuple[Message, list[int]]:
        options = ParserOptions(tail, (), TOOLS, lambda i: f"id{i}", stream)
        parser, detokenizer = make_parser("auto", model, str(tmp_path))(options), Detokenizer(model)
        deltas, early = [], []
        for at, id in enumerate(ids):
            pieces = parser.push([id], detokenizer.push([id]))
            deltas += pieces
            early += [at] * len(pieces)
        return message_of([*deltas, *parser.push([], detokenizer.finish()), *parser.finish()]), early

    (whole, _), (streamed, early) = reply(False), reply(True)
    assert early
    assert early[0] < len(ids) - 8
    if ending == "broken":  # as it was sampled, whatever has been given on before
        assert streamed.tool_calls == whole.tool_calls == ()
        assert streamed.content.endswith(call[: len(call) // 2].lstrip("\n"))
        assert whole.content.endswith(streamed.content)
    else:
        assert streamed == whole
        assert len(streamed.tool_calls) == (ending == "call")


def test_mistral_calls_are_text_without_tools(tmp_path: Path) -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'
    assert read_family(tmp_path, "mistral", text, tools=[]).content == text


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            [
                "[THINK]",
                "[/THINK]",
                "[TOOL_CALLS]",
                "[ARGS]",
                "f",
                " ",
                "[",
                "]",
                '[{"name": "f", "arguments": {}}]',
                "{}",
            ]
        ),
        max_size=8,
    ).map("".join),
    cuts=st.lists(st.integers(0, 80), max_size=6),
)
def test_any_cut_of_a_mistral_reply_gives_the_same(text: str, cuts: list[int]) -> None:
    def pieces(*cuts: int) -> Message:
        parser = MistralParser(ParserOptions("", (), TOOLS, lambda i: f"id{i}"))
        deltas: list[Delta] = []
        start = 0
        for cut in (*sorted(min(cut, len(text)) for cut in cuts), len(text)):
            deltas += parser.push([], text[start:cut])
            start = max(start, cut)
        return message_of([*deltas, *parser.finish()])

    whole = pieces()
    assert pieces(*cuts) == whole
    if not whole.tool_calls and "[THINK]" not in text:
        assert whole.content == text


LETTERS = st.lists(
    st.one_of(
        st.text("ab \n", max_size=4),
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"x":  1}}', "<tool_"]
        ),
    ),
    max_size=10,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=LETTERS)
def test_nothing_but_marks_and_white_space_is_lost(text: str) -> None:
    """Reasoning, content and calls, put together in the order of the text, are the text."""
    reply, deltas = read(text)
    at = 0
    for delta in deltas:
        piece = delta.tool_call.arguments if delta.tool_call else delta.reasoning or delta.content
        found = text.index(piece, at)
        between = text[at:found]
        for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', "}"):
            between = between.replace(mark, "", 1)
        assert not between.strip(), (reply, between)
        at = found + len(piece)
    rest = (
        text[at:]
        .replace("</think>", "", 1)
        .replace("<think>", "", 1)
        .replace("}", "", 1)
        .replace("</tool_call>", "", 1)
    )
    assert not rest.strip()
