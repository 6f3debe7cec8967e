"""The grammar of a form allows what the parser reads as that form, and nothing else."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from longrein.gateway.dialects import DialectError, chat, messages, responses
from longrein.gateway.engines import scripted
from longrein.gateway.grammars import GuideChecker, guide_of
from longrein.gateway.guides import Form, Schema, Thinking, Tool, arguments_schema, hermes_guide, thinking_of
from longrein.gateway.loading import load_text_model
from longrein.gateway.parsing import CALL, CALL_END, THINK, THINK_END, HermesParser, ParserOptions, message_of
from longrein.gateway.tokens import TextModel

from .models import make_model_folder
from .serving import path, serving

MARKERS = [THINK, THINK_END, CALL, CALL_END]
TOOLS = (
    Tool("bash", arguments_schema({"properties": {"command": {"type": "string"}}, "required": ["command"]}, True, "a")),
    Tool("now", arguments_schema(None, False, "b")),
)
CONTENT = Schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}, True, "c")
BASH = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls </tool_call>"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
FORMS = {
    "required": Form("tool_choice", "", 1, None, TOOLS),
    "one": Form("tool_choice", "", 1, 1, TOOLS),
    "at most one": Form("parallel_tool_calls", "", 0, 1, TOOLS),
    "content": Form("response_format", "", content=CONTENT),
    "content or calls": Form("response_format", "", 0, None, TOOLS, CONTENT),
}
#: A reply, and the forms that it has.
REPLIES = {
    BASH: {"required", "one", "at most one", "content or calls"},
    NOW: {"required", "one", "at most one", "content or calls"},
    BASH.replace("\n", ""): {"required", "one", "at most one", "content or calls"},
    f"{BASH}\n{NOW}": {"required", "content or calls"},
    '{"n": 3}': {"content", "content or calls", "at most one"},
    '{"n":\n  3}': {"content", "content or calls", "at most one"},
    '{"n":  3}': {"at most one"},
    '{"n": "3"}': {"at most one"},
    "Well, naïve 東京.": {"at most one"},
    "": {"at most one"},
    f"Look.\n{NOW}": {"at most one"},
    f"{NOW} and": set(),
    NOW.replace("now", "then"): set(),
    NOW.replace("{}", '{"x": 1}'): set(),
    NOW[:-1]: set(),
    BASH.replace("ls", "\n"): set(),
}


@cache
def model(special: bool, marked: bool) -> TextModel:
    """A tokenizer with the markers as added tokens (special or not), or as plain text."""
    with TemporaryDirectory() as folder:
        loaded = load_text_model(str(make_model_folder(Path(folder) / "model")))
    if marked:
        add = loaded.tokenizer.add_special_tokens if special else loaded.tokenizer.add_tokens
        add([AddedToken(text, special=special, normalized=False) for text in MARKERS])
    return loaded


KINDS = {"text": (False, False), "added": (False, True), "special": (True, True)}


def follows(kind: str, form: Form, thinking: Thinking, reply: str) -> bool:
    its = model(*KINDS[kind])
    tokens = [token.content for token in its.tokenizer.get_added_tokens_decoder().values()]
    guide = hermes_guide(form, thinking, tokens)
    ids = its.tokenizer.encode(reply, add_special_tokens=False).ids
    assert its.decode(ids) == reply
    departure = GuideChecker(its).departure(guide, ids, whole=True)
    assert departure is None or "cannot follow the guide" not in departure, departure
    return departure is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("thinking", ["none", "may", "opened"])
@pytest.mark.parametrize("name", FORMS)
def test_a_guide_allows_its_form_and_no_other(kind: str, thinking: Thinking, name: str) -> None:
    # Markers that are tokens stand where the grammar has them, and nowhere inside of text.
    inside = "<tool_call> " if kind == "text" else ""
    spoken = {text: forms for text, forms in REPLIES.items() if kind == "text" or "ls </tool_call>" not in text}
    for reply, forms in spoken.items():
        thoughts = {"none": [""], "may": ["", f"{THINK}a {inside}b{THINK_END}\n\n"], "opened": [f"a{THINK_END}"]}
        for thought in thoughts[thinking]:
            assert follows(kind, FORMS[name], thinking, thought + reply) == (name in forms), (thought, reply)
    if thinking == "opened":
        assert not follows(kind, FORMS[name], thinking, BASH.replace("</tool_call>", "")[:20])
    if thinking == "none" and name != "at most one":
        assert not follows(kind, FORMS[name], thinking, f"{THINK}a{THINK_END}{BASH}")


@given(
    reply=st.lists(st.sampled_from([*"ab{}\n ", THINK, THINK_END, CALL, CALL_END, NOW, '{"n": 3}']), max_size=6),
    name=st.sampled_from(sorted(FORMS)),
    kind=st.sampled_from(sorted(KINDS)),
    opened=st.booleans(),
)
def test_what_a_guide_allows_is_read_as_its_form(reply: list[str], name: str, kind: str, opened: bool) -> None:
    text, form = "".join(reply), FORMS[name]
    if not follows(kind, form, "opened" if opened else "may", text):
        return
    parser = HermesParser(ParserOptions(THINK if opened else "", (), [{"type": "function"}] * len(form.tools), str))
    read = message_of([*parser.push([], text), *parser.finish()])
    assert form.least <= len(read.tool_calls) <= (100 if form.most is None else form.most)
    assert all(call.name in [tool.name for tool in form.tools] for call in read.tool_calls)
    if form.content is not None and not read.tool_calls:
        assert isinstance(json.loads(read.content)["n"], int)
    if form.least:
        assert not read.content.strip()


def test_reasoning_is_where_the_template_has_it() -> None:
    assert thinking_of("<|im_start|>assistant\n<think>\n", "…") == "opened"
    assert thinking_of("<|im_start|>assistant\n", "… <think> …") == "may"
    assert thinking_of("<|im_start|>assistant\n<think>\n\n</think>\n\n", "… <think> …") == "none"
    assert thinking_of("<|im_start|>assistant\n", "…") == "none"


# What the dialects ask for

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}


def form_of_chat(**body: Any) -> Form | None:
    tools = [{"type": "function", "function": {**FUNCTION, "name": name}} for name in ("f", "g")]
    return chat.parse({"messages": [{"role": "user", "content": "x"}], "tools": tools, **body}).form


def form_of_responses(**body: Any) -> Form | None:
    tools: list[Any] = [{"type": "function", **FUNCTION}, {"type": "custom", "name": "g"}]
    return responses.parse({"input": "x", "tools": tools, **body}).form


def form_of_messages(**body: Any) -> Form | None:
    tools = [{"name": name, "input_schema": FUNCTION["parameters"]} for name in ("f", "g")]
    said = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "max_tokens": 9}
    return messages.parse({**said, **body}).form


SCHEMA = {"type": "object"}


def test_each_dialect_asks_in_its_own_words() -> None:
    described = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    flat = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    asked = {
        "required": (
            form_of_chat(tool_choice="required"),
            form_of_responses(tool_choice="required"),
            form_of_messages(tool_choice={"type": "any"}),
        ),
        "named": (
            form_of_chat(tool_choice={"type": "function", "function": {"name": "g"}}),
            form_of_responses(tool_choice={"type": "custom", "name": "g"}),
            form_of_messages(tool_choice={"type": "tool", "name": "g"}),
        ),
        "exactly one": (
            form_of_chat(tool_choice="required", parallel_tool_calls=False),
            form_of_responses(tool_choice="required", parallel_tool_calls=False),
            form_of_messages(tool_choice={"type": "any", "disable_parallel_tool_use": True}),
        ),
        "at most one": (
            form_of_chat(parallel_tool_calls=False),
            form_of_responses(parallel_tool_calls=False),
            form_of_messages(tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
        ),
        "content or calls": (
            form_of_chat(response_format=described),
            form_of_responses(text={"format": flat}),
            form_of_messages(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}),
        ),
    }
    expected = {
        "required": (1, None, ["f", "g"], False),
        "named": (1, 1, ["g"], False),
        "exactly one": (1, 1, ["f", "g"], False),
        "at most one": (0, 1, ["f", "g"], False),
        "content or calls": (0, None, ["f", "g"], True),
    }
    for name, forms in asked.items():
        for form in forms:
            assert form is not None
            found = (form.least, form.most, [tool.name for tool in form.tools], form.content is not None)
            assert found == expected[name], form


def test_a_model_that_is_free_has_no_form() -> None:
    for form in (
        form_of_chat(),
        form_of_chat(tool_choice="none", parallel_tool_calls=False),
        form_of_chat(parallel_tool_calls=True, response_format={"type": "text"}, tool_choice="auto"),
        form_of_chat(tools=[], parallel_tool_calls=False),
        form_of_responses(text={"format": {"type": "text"}, "verbosity": "low"}),
        form_of_messages(tool_choice={"type": "none"}),
    ):
        assert form is None


def test_without_tools_a_format_is_all_there_is() -> None:
    form = form_of_chat(tool_choice="none", response_format={"type": "json_object"})
    assert form is not None
    assert (form.most, form.tools, form.field) == (0, (), "response_format")


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (form_of_chat, {"tool_choice": "sometimes"}, "tool_choice"),
        (form_of_chat, {"tool_choice": "required", "tools": []}, "tool_choice"),
        (form_of_chat, {"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        (form_of_chat, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (form_of_chat, {"response_format": {"type": "regex"}}, "response_format"),
        (form_of_chat, {"response_format": "json"}, "response_format"),
        (form_of_chat, {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (form_of_chat, {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (form_of_responses, {"tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        (form_of_responses, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (form_of_responses, {"text": {"tone": "low"}}, "text.tone"),
        (form_of_messages, {"tool_choice": {"type": "tool", "name": "h"}}, "tool_choice"),
        (form_of_messages, {"tool_choice": {"type": "tool", "name": ["g"]}}, "tool_choice"),
        (form_of_messages, {"tool_choice": {"type": "all"}}, "tool_choice"),
        (form_of_messages, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
)
def test_what_no_guide_can_say_is_refused_by_name(parse: Any, body: Any, param: str) -> None:
    with pytest.raises(DialectError) as caught:
        parse(**body)
    assert (caught.value.status, caught.value.param) == (400, param)


def asking(strict: bool, parameters: Any) -> Any:
    function = {"name": "f", "parameters": parameters, "strict": strict}
    tools = [{"type": "function", "function": function}]
    return chat.parse({"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"})


def test_a_schema_that_cannot_be_followed_is_named_unless_nobody_insists() -> None:
    its = model(False, False)
    odd = {"type": "object", "properties": {"x": {"type": "string", "format": "made-up"}}}
    with pytest.raises(DialectError, match="made-up") as caught:
        guide_of(asking(True, odd), its, "", None)
    assert caught.value.param == "tools[0].function.parameters"
    assert guide_of(asking(False, odd), its, "", None)
    with pytest.raises(DialectError, match=r"tools\[0\].function.parameters: llguidance cannot follow this schema"):
        guide_of(asking(False, {"properties": {"x": {"$ref": "#/nowhere"}}}), its, "", None)


def test_a_place_without_guided_decoding_names_the_field() -> None:
    with pytest.raises(DialectError, match="tool_choice: 'required' needs guided decoding: there is none") as caught:
        guide_of(asking(False, {}), model(False, False), "", "there is none")
    assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_parameter")


REFUSED: Any = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("parser", "installed", "words"),
    [("none", True, "model.parser = 'none'"), ("hermes", False, "llguidance is not installed")],
)
async def test_a_gateway_that_cannot_guide_refuses_before_anything_is_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parser: str, installed: bool, words: str
) -> None:
    monkeypatch.setattr(scripted, "installed", lambda: installed)
    (tmp_path / "unplayed.py").write_text("def script(messages, tools):\n    return '{}'\n")
    sections: dict[str, dict[str, Any]] = {
        "run": {"dir": str(tmp_path), "folder": str(tmp_path)},
        "model": {"name": "policy", "path": str(make_model_folder(tmp_path / "model")), "parser": parser},
        "engine": {"kind": "scripted", "script": "unplayed:script"},
    }
    async with serving(tmp_path, **sections) as served:
        headers = await served.start()
        answer = await served.anonymous.post(path(), json=REFUSED, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
        assert words in answer.json()["error"]["message"]
        assert await served.calls() == []
