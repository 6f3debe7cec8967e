"""The examples' chat template never rewrites: a reply comes back as the very text that the model wrote."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.models import make_model_folder
from longrein.gateway.loading import load_text_model
from longrein.gateway.messages import Message
from longrein.gateway.parsing import HermesParser, ParserOptions, message_of
from longrein.gateway.tokens import TextModel

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["calculator", "tiny"]

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
calls = st.builds(
    lambda name, arguments: (
        f'<tool_call>{{"name": {json.dumps(name, ensure_ascii=False)}, '
        f'"arguments": {json.dumps(arguments, ensure_ascii=False)}}}</tool_call>'
    ),
    words.filter(bool),
    st.dictionaries(words, values, max_size=3),
)
# Text without the white space that a parser may take for the template's own, then any number of calls on lines.
texts = words.map(str.strip)
replies = st.builds(
    lambda text, made: "\n".join([text, *made] if text or not made else made), texts, st.lists(calls, max_size=3)
)
parameters = st.dictionaries(words, st.fixed_dictionaries({"type": st.sampled_from(["string", "number"])}), max_size=3)
tools = st.builds(
    lambda name, description, properties: {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": {"properties": properties}},
    },
    words,
    words,
    parameters,
)


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    return load_text_model(str(folder), chat_template=str(EXAMPLES / request.param / "chat_template.jinja"))


def parse(reply: str, tools: list[dict]) -> Message:
    parser = HermesParser(ParserOptions("", (), tools, lambda i: f"call_{i}"))
    return message_of([*parser.push((), reply), *parser.finish()])


@settings(max_examples=60, deadline=None)
@given(
    system=words,
    offered=st.lists(tools, min_size=1, max_size=3),
    turns=st.lists(st.tuples(words, replies, words), min_size=1, max_size=4),
)
def test_every_prompt_begins_with_all_that_was_exchanged(
    model: TextModel, system: str, offered: list[dict], turns: list[tuple[str, str, str]]
) -> None:
    messages: list[dict] = [{"role": "system", "content": system}] if system else []
    exchanged = ""
    for question, reply, result in turns:
        messages.append({"role": "user", "content": question})
        for said in (reply, "done"):
            prompt = model.render(messages, offered).text
            assert prompt.startswith(exchanged)
            exchanged = prompt + said + "<|im_end|>"
            message = parse(said, offered)
            messages.append(message.for_template())
            messages += [{"role": "tool", "tool_call_id": c.id, "content": result} for c in message.tool_calls]
    assert model.render(messages, offered, generation_prompt=False).text.startswith(exchanged)


def test_tools_are_listed_as_the_calls_that_use_them(model: TextModel) -> None:
    schema = {"properties": {"a": {"type": "string"}, "b": {"anyOf": []}}, "required": ["a"], "type": "object"}
    tool = {"type": "function", "function": {"name": "f", "description": "Does it", "parameters": schema}}
    bare = {"type": "function", "function": {"name": "g"}}
    question = {"role": "user", "content": "Go"}
    ask = "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
    listed = 'Does it: <tool_call>{"name": "f", "arguments": {"a": string, "b": any}}</tool_call>'
    also = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    system = {"role": "system", "content": "Be brief."}
    assert model.render([question], None).text == ask
    assert model.render([system, question], None).text == f"<|im_start|>system\nBe brief.<|im_end|>\n{ask}"
    both = model.render([system, question], [tool, bare]).text
    assert both == f"<|im_start|>system\nBe brief.\n{listed}\n{also}<|im_end|>\n{ask}"
    assert model.render([question], [tool]).text == f"<|im_start|>system\n{listed}<|im_end|>\n{ask}"


def test_arguments_that_are_not_json_stand_as_text(model: TextModel) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert model.render(messages, None, generation_prompt=False).text.endswith(
        '<|im_start|>assistant\n<tool_call>{"name": "f", "arguments": {"a": }</tool_call><|im_end|>\n'
    )
