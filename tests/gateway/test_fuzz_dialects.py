"""Any JSON object as a request of any dialect: a request, or a `DialectError`; and any answer as a well-formed stream.

The objects are of the dialect's own fields with values of every kind, and recorded requests of real harnesses with parts
of them replaced.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from longrein.gateway.bounds import read_json
from longrein.gateway.dialects import (
    Answer,
    Choice,
    DialectError,
    Opened,
    Request,
    chat,
    completions,
    messages,
    responses,
)
from longrein.gateway.guides import hermes_guide
from longrein.gateway.messages import ToolCall
from longrein.gateway.parsing import Delta, message_of

from .fuzzing import fuzzed

Json = dict[str, Any]

DIALECTS: list[ModuleType] = [chat, completions, responses, messages]
TRAFFIC = Path(__file__).parent.parent / "data" / "traffic"

#: Words that parsers look for, so that arbitrary values come past their first checks.
WORDS = st.sampled_from(
    "type role content text tools tool_calls tool_call_id function name arguments id call_id user assistant system tool "
    "developer message input output item reasoning summary encrypted_content longrein: longrein:YQ namespace custom "
    "function_call function_call_output custom_tool_call tool_use tool_result tool_use_id tool_reference tool_name thinking "
    "input_schema defer_loading json_schema schema strict format required any auto none input_text output_text refusal "
    "disable_parallel_tool_use include_usage web_search_call parameters description".split()
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-2, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | WORDS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=5),
    max_leaves=25,
)


def fields_of(dialect: ModuleType) -> st.SearchStrategy[Json]:
    names = sorted({*dialect.HONOURED, *dialect.IGNORED, *dialect.NEUTRAL})
    return st.dictionaries(st.sampled_from(names) | st.text(max_size=4), VALUES, max_size=6)


@cache
def recorded(dialect: ModuleType) -> list[Json]:
    """Requests of real harnesses in this dialect, the long ones cut."""
    wanted = {chat: "messages", responses: "input", messages: "system", completions: "prompt"}[dialect]
    found = []
    for file in sorted(TRAFFIC.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            body = json.loads(line)["body"]
            if wanted in body and (dialect is not chat or "system" not in body):
                body = {
                    **body,
                    **{k: body[k][:4] for k in ("messages", "input", "tools") if isinstance(body.get(k), list)},
                }
                found.append(body)
    return found


@st.composite
def mutated(draw: st.DrawFn, dialect: ModuleType) -> Json:
    """A recorded request with a few of its parts replaced, removed or added."""
    body = json.loads(json.dumps(draw(st.sampled_from(recorded(dialect)))))
    for _ in range(draw(st.integers(1, 4))):
        place: Any = body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            if draw(st.integers(0, 3)) == 0:
                del place[key]
            else:
                place[key] = draw(VALUES)
            if isinstance(place, dict) and draw(st.booleans()):
                place[draw(WORDS)] = draw(VALUES)
            break
    return body


def bodies(dialect: ModuleType) -> st.SearchStrategy[Json]:
    made = fields_of(dialect)
    if dialect is completions:  # no recorded harness speaks it
        prompts = st.text(min_size=1, max_size=5) | st.lists(st.text(max_size=3) | st.integers(-1, 9), max_size=3)
        return made | st.builds(lambda body, prompt: body | {"prompt": prompt}, made, prompts)
    return made | mutated(dialect)


def read(dialect: ModuleType, body: Json) -> tuple[Request | None, DialectError | None]:
    """The request, or the one error that a parser may raise."""
    try:
        return dialect.parse(body), None
    except DialectError as error:
        return None, error


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_any_object_is_a_request_or_an_error(dialect: ModuleType) -> None:
    requests = 0

    @fuzzed
    @given(bodies(dialect))
    def check(body: Json) -> None:
        nonlocal requests
        body = read_json(json.dumps(body).encode())
        request, error = read(dialect, body)
        if request is None:
            assert error is not None
            assert 400 <= error.status < 500
            assert error.message
            json.dumps(dialect.error_body(error))
            return
        requests += 1
        for message in request.messages:
            json.dumps([message.to_json(), message.for_template()])
        if request.form is not None:
            hermes_guide(request.form, "may", ["<think>"])
            json.dumps([schema.guided() for schema in request.form.schemas()])

    check()
    assert requests > 0, "no request came through: the fuzzer tests nothing behind the first check"


@pytest.mark.parametrize("dialect", [chat, responses, messages], ids=lambda one: one.name)
def test_recorded_requests_are_requests(dialect: ModuleType) -> None:
    assert len(recorded(dialect)) >= 3
    for body in recorded(dialect):
        _, error = read(dialect, body)  # some are cut behind the assistant's turn
        assert error is None or "does not continue a reply" in error.message


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (responses, {"input": [{"type": "reasoning", "encrypted_content": "longrein:@@@"}]}),
        (responses, {"input": [{"type": "reasoning", "encrypted_content": "longrein:/w=="}]}),
        (responses, {"input": [{"type": ["message"]}]}),
        (responses, {"input": [{"role": ["user"]}]}),
        (responses, {"input": [{"type": "function_call", "call_id": "a", "name": "b", "namespace": ["c"]}]}),
        (responses, {"input": "x", "tools": [{"type": "namespace", "name": "a", "tools": 3}]}),
    ],
)
def test_what_once_was_a_failure_inside_is_an_error(dialect: ModuleType, body: Json) -> None:
    with pytest.raises(DialectError):
        dialect.parse(body)


# --- Answers

TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


@st.composite
def replies(draw: st.DrawFn) -> list[Delta]:
    """The pieces of a reply as parsers give them: reasoning, content, calls that come whole or bit by bit."""
    deltas = [Delta(reasoning=text) for text in draw(st.lists(TEXT, max_size=3))]
    for n in range(draw(st.integers(0, 3))):
        deltas += [Delta(content=text) for text in draw(st.lists(TEXT, max_size=3))]
        arguments = draw(st.sampled_from(['{"a": 1}', "{}", '{"input": "x"}']) | TEXT)
        if draw(st.booleans()):
            deltas.append(Delta(tool_call=ToolCall(f"call_{n}", draw(st.sampled_from(["f", "g"]) | TEXT), arguments)))
        elif draw(st.booleans()):
            deltas.append(Delta(tool_call=ToolCall(f"call_{n}", "f", "")))
            deltas += [Delta(arguments=piece) for piece in arguments]
    return deltas


def asked(dialect: ModuleType) -> Request:
    hello: Json = {"messages": [{"role": "user", "content": "hi"}]}
    body: dict[str, Json] = {
        "chat": hello
        | {"stream_options": {"include_usage": True}, "tools": [{"type": "function", "function": {"name": "f"}}]},
        "completions": {"prompt": "hi"},
        "responses": {"input": "hi", "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]},
        "messages": hello | {"max_tokens": 9, "tools": [{"name": "f", "input_schema": {}}]},
    }
    return dialect.parse(body[dialect.name])


def events_of(stream: bytes) -> list[tuple[str, Any]]:
    """(name, data) of each event, read as the standard says: lines end at \\n, an event at an empty line."""
    found: list[tuple[str, Any]] = []
    assert stream.endswith(b"\n\n")
    for block in stream[:-2].split(b"\n\n"):
        name, data = "", []
        for line in block.split(b"\n"):
            field, _, value = line.partition(b":")
            assert field in (b"event", b"data", b"")
            if field == b"event":
                name = value.strip().decode()
            elif field == b"data":
                data.append(value.removeprefix(b" "))
        text = b"\n".join(data)
        if text:
            found.append((name, "[DONE]" if text == b"[DONE]" else json.loads(text)))
    return found


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_any_reply_is_a_well_formed_stream_that_says_what_the_plain_answer_says(dialect: ModuleType) -> None:
    @fuzzed
    @given(replies(), st.booleans(), st.sampled_from(["stop", "length"]), st.integers(0, 3))
    @example([], False, "stop", 0)
    def check(deltas: list[Delta], failed: bool, finish: str, quiet: int) -> None:
        request = asked(dialect)
        message = message_of(deltas)
        reason = "tool_calls" if message.tool_calls and finish == "stop" else finish
        choice = Choice(0, message, message.content, reason, [1], [2, 3], None)
        answer = Answer("id-1", 1, "m", [choice], 1, 0)
        writer = dialect.writer(request, Opened("id-1", 1, 1, 0))
        stream = b"".join(writer.keep_alive() for _ in range(quiet)) + b"".join(writer.opening(0))
        for delta in deltas:
            stream += b"".join(writer.delta(0, delta)) + writer.keep_alive()
        if failed:
            stream += b"".join(writer.error(DialectError(502, "it broke", type="api_error")))
        else:
            stream += b"".join(writer.closing(answer))
        events = events_of(stream)
        assert all(name in ("", data["type"]) for name, data in events if isinstance(data, dict) and "type" in data)
        plain = json.loads(json.dumps(dialect.plain(request, answer)))
        if failed:
            assert "it broke" in json.dumps(events[-1][1])
        else:
            _SAME[dialect.name](events, plain)

    check()


def _chat(events: list[tuple[str, Any]], plain: Json) -> None:
    assert events[-1][1] == "[DONE]"
    told: Json = {"content": "", "reasoning_content": ""}
    calls: dict[int, Json] = {}
    for _, data in events[:-1]:
        for choice in data["choices"]:
            for name in told:
                told[name] += choice["delta"].get(name) or ""
            for call in choice["delta"].get("tool_calls") or []:
                known = calls.setdefault(call["index"], {"arguments": ""})
                known |= {"id": call["id"], "name": call["function"]["name"]} if "id" in call else {}
                known["arguments"] += call["function"]["arguments"]
    message = plain["choices"][0]["message"]
    assert told == {"content": message["content"] or "", "reasoning_content": message.get("reasoning_content", "")}
    wanted = [{"id": c["id"], **c["function"]} for c in message.get("tool_calls", [])]
    assert [calls[at] for at in sorted(calls)] == wanted


def _completions(events: list[tuple[str, Any]], plain: Json) -> None:
    text = "".join(choice["text"] for _, data in events[:-1] for choice in data["choices"])
    assert (events[-1][1], text) == ("[DONE]", plain["choices"][0]["text"])


def _responses(events: list[tuple[str, Any]], plain: Json) -> None:
    numbers = [data["sequence_number"] for _, data in events]
    assert numbers == list(range(len(events)))
    assert events[0][0] == "response.created"
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    last = events[-1][1]["response"]
    assert events[-1][0] in ("response.completed", "response.incomplete")
    assert last["output"] == done
    said = [item for item in done if item["type"] != "message" or item["content"][0]["text"]]
    shown = [item for item in plain["output"] if item["type"] != "message" or item["content"][0]["text"]]
    assert sorted(item["type"] for item in said if item["type"] != "message") == sorted(
        item["type"] for item in shown if item["type"] != "message"
    )
    assert "".join(i["content"][0]["text"] for i in said if i["type"] == "message") == "".join(
        i["content"][0]["text"] for i in shown if i["type"] == "message"
    )


def _messages(events: list[tuple[str, Any]], plain: Json) -> None:
    open_block, blocks = None, []
    for name, data in events:
        assert name == data["type"]
        if name == "content_block_start":
            assert open_block is None
            assert data["index"] == len(blocks)
            open_block = data["index"]
            blocks.append({**data["content_block"], "pieces": ""})
        elif name == "content_block_delta":
            assert data["index"] == open_block
            for field in ("text", "thinking", "partial_json"):
                blocks[-1]["pieces"] += data["delta"].get(field, "")
        elif name == "content_block_stop":
            assert data["index"] == open_block
            open_block = None
    assert open_block is None
    assert events[-1][0] == "message_stop"
    text = "".join(block["pieces"] for block in blocks if block["type"] == "text")
    assert text == "".join(block["text"] for block in plain["content"] if block["type"] == "text")
    names = [block["name"] for block in blocks if block["type"] == "tool_use"]
    assert names == [block["name"] for block in plain["content"] if block["type"] == "tool_use"]


_SAME: dict[str, Callable[[list[tuple[str, Any]], Json], None]] = {
    "chat": _chat,
    "completions": _completions,
    "responses": _responses,
    "messages": _messages,
}
