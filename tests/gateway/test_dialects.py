"""Responses and Messages through a real gateway: recorded harness traffic, the official client's parser, errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from longrein.gateway.dialects import DialectError, Opened, chat, messages, responses
from longrein.gateway.dialects.matrix import table
from longrein.records import Call
from longrein.trajectory.prompts import messages_of, prompt_ids

from .running import RunningGateway, running_gateway

TRAFFIC = Path(__file__).parent.parent / "data" / "traffic"
OPENED = Opened("resp_1", 0, 3, 0)
REPLY = '<think>hm</think>Look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
FUNCTION = {"type": "function", "name": "bash", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("dialects"), context=800) as running:
        yield running


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("replayed")) as running:
        yield running


def attempt_url(gateway: RunningGateway, rollout: str) -> str:
    return f"{gateway.url}/proxy/rollout/{rollout}/attempt/0/mode/train"


def ask(gateway: RunningGateway, rollout: str, token: str, body: Any, path: str) -> httpx.Response:
    """POST to a path below the attempt's own."""
    headers = {"authorization": f"Bearer {token}"}
    return httpx.post(f"{attempt_url(gateway, rollout)}/{path}", json=body, headers=headers, timeout=60)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; each has its type as its name."""
    events = []
    for block in answer.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if line)
        if lines:
            events.append(json.loads(lines["data"]))
            assert lines["event"] == events[-1]["type"]
    return events


# Recorded traffic


def as_sampled(reply: list[dict[str, Any]], canonical: bool) -> str:
    """What a model would have had to write for a recorded reply, of either dialect."""
    text = ""
    for i, item in enumerate(reply):
        match item["type"]:
            case "thinking":
                text += f"<think>{item['thinking']}</think>"
            case "reasoning":
                text += f"<think>{''.join(part['text'] for part in item['summary'])}</think>"
            case "text":
                text += item["text"]
            case "message":
                text += "".join(part["text"] for part in item["content"])
            case _:
                arguments = item["arguments"] if "arguments" in item else json.dumps(item["input"], ensure_ascii=False)
                if canonical:
                    arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
                before = reply[i - 1]["type"] if i else ""
                text += "\n" if before not in ("", "thinking", "reasoning") else ""
                text += f'<tool_call>\n{{"name": "{item["name"]}", "arguments": {arguments}}}\n</tool_call>'
    return text


def output_of_responses(answer: httpx.Response, streamed: bool) -> list[dict[str, Any]]:
    if not streamed:
        return answer.json()["output"]
    events = events_of(answer)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == done
    return done


def output_of_messages(answer: httpx.Response) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    partial = ""
    for event in events_of(answer):
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                partial = ""
            case "content_block_delta":
                delta = event["delta"]
                match delta["type"]:
                    case "thinking_delta":
                        blocks[-1]["thinking"] += delta["thinking"]
                    case "text_delta":
                        blocks[-1]["text"] += delta["text"]
                    case "signature_delta":
                        blocks[-1]["signature"] += delta["signature"]
                    case "input_json_delta":
                        partial += delta["partial_json"]
            case "content_block_stop":
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads(partial)
    return blocks


def essence(items: list[dict[str, Any]]) -> list[Any]:
    """What a harness makes use of: kinds, texts, names and arguments."""
    out: list[Any] = []
    for item in items:
        match item["type"]:
            case "thinking":
                out.append(("reasoning", item["thinking"].strip()))
            case "reasoning":
                out.append(("reasoning", "".join(part["text"] for part in item["summary"]).strip()))
            case "text":
                out.append(("text", item["text"].strip()))
            case "message":
                out.append(("text", "".join(part["text"] for part in item["content"]).strip()))
            case _:
                arguments = item["input"] if "input" in item else json.loads(item["arguments"])
                out.append(("call", item["name"], arguments))
    return out


def replay(gateway: RunningGateway, harness: str, canonical: bool) -> list[Call]:
    lines = [json.loads(line) for line in (TRAFFIC / f"{harness}.jsonl").read_text(encoding="utf-8").splitlines()]
    plan = [{"say": as_sampled(line["reply"], canonical)} for line in lines]
    (gateway.folder / "plan.json").write_text(json.dumps(plan))
    rollout, token = gateway.rollout()
    ids: dict[str, str] = {}
    for line in lines:
        text = json.dumps(line["body"])
        if canonical:
            text = text.replace('{\\"cmd\\":  ', '{\\"cmd\\": ').replace('{\\"command\\":  ', '{\\"command\\": ')
            text = text.replace("caf\\\\u00e9", "caf\\u00e9")
        for theirs, ours in ids.items():
            text = text.replace(theirs, ours)
        body = json.loads(text)
        anthropic = "messages" in body
        answer = ask(gateway, rollout, token, body, "anthropic/v1/messages" if anthropic else "openai/v1/responses")
        assert answer.status_code == 200, answer.text
        items = output_of_messages(answer) if anthropic else output_of_responses(answer, bool(body.get("stream")))
        assert essence(items) == essence(json.loads(json.dumps(line["reply"])))
        key = "id" if anthropic else "call_id"
        for theirs, ours in zip(line["reply"], items, strict=True):
            if key in theirs and theirs["type"] not in ("message", "reasoning"):
                ids[theirs[key]] = ours[key]
    (gateway.folder / "plan.json").unlink()
    return gateway.calls(rollout)


@pytest.mark.parametrize(
    ("harness", "canonical", "forks"),
    [
        ("claude", True, [None, None, None]),
        ("codex", True, [None, None, None]),
        ("codex", False, [None, "template", "template"]),
        ("oai-agents-responses", True, [None, None, None]),
        ("oai-agents-responses-stream", True, [None, None, None]),
        ("langgraph-responses", True, [None, None, None]),
    ],
)
def test_recorded_harnesses_stay_one_chain(
    replayed: RunningGateway, harness: str, canonical: bool, forks: list[str | None]
) -> None:
    calls = replay(replayed, harness, canonical)
    assert [call.fork for call in calls] == forks
    assert [call.parent for call in calls] == [None, *range(len(calls) - 1)]
    by_number = {call.number: call for call in calls}
    for call in calls[1:]:
        before = by_number[call.number - 1]
        whole = prompt_ids(by_number, before) + before.sampled
        assert (prompt_ids(by_number, call)[: len(whole)] == whole) == (call.fork is None)


def test_a_billing_line_and_cache_marks_are_no_part_of_the_prompt(replayed: RunningGateway) -> None:
    calls = replay(replayed, "claude", True)
    texts = json.dumps([message for call in calls for message in call.messages])
    assert "x-anthropic-billing-header" not in texts
    assert "cache_control" not in texts


# Messages


def claude(text: Any, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 200, "messages": [{"role": "user", "content": text}], **more}


TOOL = {"name": "bash", "input_schema": {"type": "object"}}


def test_a_message_with_all_kinds_of_blocks(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    body = claude(json.dumps({"say": REPLY}), system=[{"type": "text", "text": "Be brief."}], tools=[TOOL])
    answer = ask(gateway, rollout, token, body, "anthropic/v1/messages")
    message = answer.json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][2]["input"] == {"command": "ls"}
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    [call] = gateway.calls(rollout)
    assert message["usage"]["input_tokens"] == call.prompt_length
    assert message["usage"]["output_tokens"] == len(call.sampled)
    counted = ask(gateway, rollout, token, body, "anthropic/v1/messages/count_tokens")
    assert counted.json() == {"input_tokens": call.prompt_length}
    assert len(gateway.calls(rollout)) == 1  # counting leaves no call


def test_parallel_results_stand_in_the_order_of_their_calls(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "%s"}}\n</tool_call>'
    body = claude(json.dumps({"say": call % "a" + "\n" + call % "b"}), tools=[TOOL])
    first = ask(gateway, rollout, token, body, "anthropic/v1/messages").json()
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block["id"],
            "content": [{"type": "text", "text": block["input"]["command"]}],
        }
        for block in first["content"]
    ]
    body["messages"] += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [*reversed(results), {"type": "text", "text": "go on"}]},
    ]
    assert ask(gateway, rollout, token, body, "anthropic/v1/messages").status_code == 200
    calls = gateway.calls(rollout)
    said = messages_of({call.number: call for call in calls}, calls[1])
    assert [(m["role"], m["content"]) for m in said[-3:]] == [("tool", "a"), ("tool", "b"), ("user", "go on")]
    assert calls[1].fork is None


def test_deferred_tools_appear_where_a_result_refers_to_them(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    late = {"name": "deploy", "description": "Ship it", "input_schema": {"type": "object"}, "defer_loading": True}
    call = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    find = {"name": "find", "input_schema": {"type": "object"}}
    body = claude(json.dumps({"say": call}), tools=[find])
    first = ask(gateway, rollout, token, body, "anthropic/v1/messages").json()
    reference = [{"type": "tool_reference", "tool_name": "deploy"}]
    result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "content": reference}
    body["messages"] += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = ask(gateway, rollout, token, {**body, "tools": [late, find]}, "anthropic/v1/messages")
    assert second.status_code == 200, second.text
    [_, after] = gateway.calls(rollout)
    assert after.fork is None  # the tools in the system prompt have not changed
    assert "Ship it" in after.messages[-1]["content"]


def test_stop_sequences_and_the_limit(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    body = claude(json.dumps({"say": "one two three"}), stop_sequences=[" two"])
    stopped = ask(gateway, rollout, token, body, "anthropic/v1/messages").json()
    assert stopped["content"] == [{"type": "text", "text": "one"}]
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " two")
    cut = ask(
        gateway, rollout, token, claude(json.dumps({"say": "one two three"}), max_tokens=2), "anthropic/v1/messages"
    )
    assert cut.json()["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("change", "status", "kind", "words"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"made_up": 1}, 400, "invalid_request_error", "made_up"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, 400, "invalid_request_error", "output_config.format"),
        (
            {"messages": [{"role": "user", "content": "word " * 2000}]},
            400,
            "invalid_request_error",
            "prompt is too long: ",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "'image' content",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            400,
            "invalid_request_error",
            "begun for it",
        ),
    ],
)
def test_errors_have_anthropics_shape(
    gateway: RunningGateway, change: dict[str, Any], status: int, kind: str, words: str
) -> None:
    rollout, token = gateway.rollout()
    answer = ask(gateway, rollout, token, {**claude("hello"), **change}, "anthropic/v1/messages")
    assert answer.status_code == status
    error = answer.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == kind
    assert words in error["error"]["message"]


def test_a_wrong_key_and_the_paths_that_clients_try_first(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    wrong = ask(gateway, rollout, "nobody", claude("hello"), "anthropic/v1/messages")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
    for path in ("/", "/api/hello"):
        assert httpx.head(gateway.url + path).status_code == 200
        assert httpx.head(f"{attempt_url(gateway, rollout)}/anthropic{path}").status_code == 200
    own = httpx.post(f"{gateway.url}/v1/messages?beta=true", json=claude("hello"), headers={"x-api-key": token})
    assert own.json()["content"] == [{"type": "text", "text": "Hello."}]


# Responses


def client_of(gateway: RunningGateway, rollout: str, token: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.base_url(rollout), api_key=token, max_retries=0)


def test_the_official_client_reads_responses_and_their_streams(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    client = client_of(gateway, rollout, token)
    asked: Any = {"model": "policy", "input": json.dumps({"say": REPLY}), "tools": [FUNCTION]}
    plain = client.responses.create(**asked)
    assert [item.type for item in plain.output] == ["reasoning", "message", "function_call"]
    assert plain.output_text == "Look."
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Look."
    call = final.output[2]
    assert call.type == "function_call"
    assert call.arguments == '{"command": "ls"}'
    first, second = gateway.calls(rollout)
    assert plain.usage is not None
    assert (plain.usage.input_tokens, plain.usage.output_tokens) == (first.prompt_length, len(first.sampled))
    assert plain.id != final.id
    assert second.prompt_length == first.prompt_length


def test_a_response_continues_an_earlier_one_by_its_id(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    client = client_of(gateway, rollout, token)
    first = client.responses.create(model="policy", input="hello", instructions="Be brief.")
    second = client.responses.create(
        model="policy", input="and now?", instructions="Be brief.", previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    calls = gateway.calls(rollout)
    assert (calls[1].parent, calls[1].fork) == (0, None)
    said = messages_of({call.number: call for call in calls}, calls[1])
    assert [m["role"] for m in said] == ["system", "user", "assistant", "user"]
    with pytest.raises(openai.BadRequestError, match="no finished answer of this attempt"):
        client.responses.create(model="policy", input="x", previous_response_id="resp_other")


def test_namespaces_and_custom_tools_come_back_as_the_client_knows_them(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    said = call % ("team__spawn", '{"task": "x"}') + "\n" + call % ("patch", '{"input": "*** Begin"}')
    tools = [
        {"type": "namespace", "name": "team", "tools": [{"type": "function", "name": "spawn", "parameters": {}}]},
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
        {"type": "web_search"},
    ]
    body = {"input": json.dumps({"say": said}), "tools": tools}
    spawn, patch = ask(gateway, rollout, token, body, "openai/v1/responses").json()["output"]
    assert (spawn["type"], spawn["namespace"], spawn["name"]) == ("function_call", "team", "spawn")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** Begin")
    echoed = [
        {"role": "user", "content": body["input"]},
        spawn,
        patch,
        {"type": "function_call_output", "call_id": spawn["call_id"], "output": "ok"},
        {
            "type": "custom_tool_call_output",
            "call_id": patch["call_id"],
            "output": [{"type": "input_text", "text": "done"}],
        },
    ]
    answer = ask(gateway, rollout, token, {"input": echoed, "tools": tools}, "openai/v1/responses")
    assert answer.status_code == 200, answer.text
    assert gateway.calls(rollout)[1].fork is None


def test_encoded_reasoning_comes_back_whole(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    asked = json.dumps({"say": "<think>two\n\nthoughts </think>Well."})
    body: dict[str, Any] = {"input": asked, "store": False, "include": ["reasoning.encrypted_content"]}
    reasoning, message = ask(gateway, rollout, token, body, "openai/v1/responses").json()["output"]
    bare = {
        "type": "reasoning",
        "id": reasoning["id"],
        "summary": [],
        "encrypted_content": reasoning["encrypted_content"],
    }
    body["input"] = [{"role": "user", "content": asked}, bare, message, {"role": "user", "content": "again"}]
    assert ask(gateway, rollout, token, body, "openai/v1/responses").status_code == 200
    assert gateway.calls(rollout)[1].fork is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type: 'item_reference'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "'input_image' content",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}, "verbosity": "low"}}, "text.format"),
        ({"made_up": True}, "made_up"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 30}, "top_logprobs"),
        ({"input": "word " * 2000}, "maximum context length"),
    ],
)
def test_what_responses_cannot_honour_is_refused_by_name(
    gateway: RunningGateway, change: dict[str, Any], words: str
) -> None:
    rollout, token = gateway.rollout()
    answer = ask(gateway, rollout, token, {"input": "hello", **change}, "openai/v1/responses")
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_stream_that_waits_begins_with_what_its_clients_want_first() -> None:
    """Keep-alives and failures before the first token: `created` comes first, and once."""
    for first in ("keep_alive", "error"):
        writer = responses.writer(responses.parse({"input": "hello", "text": {"verbosity": "low"}}), OPENED)
        sent = [writer.keep_alive()] if first == "keep_alive" else writer.error(DialectError(502, "it broke"))
        sent += writer.opening(0)
        kinds = re.findall(rb"^event: response\.(\S+)$", b"".join(sent), re.MULTILINE)
        assert kinds == [b"created", b"in_progress", *([b"failed"] if first == "error" else [])]
    ping = messages.writer(messages.parse(claude("hello")), OPENED).keep_alive()
    assert ping == b'event: ping\ndata: {"type":"ping"}\n\n'
    empty = chat.writer(chat.parse({"messages": [{"role": "user", "content": "hello"}]}), OPENED).keep_alive()
    (choice,) = json.loads(empty.removeprefix(b"data: "))["choices"]
    assert (choice["delta"], choice["finish_reason"]) == ({}, None)


# The documented fields


def test_the_table_of_fields_is_the_codes() -> None:
    page = Path(__file__).parents[2] / "docs" / "dialects.md"
    assert page.read_text(encoding="utf-8") == table()
