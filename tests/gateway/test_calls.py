"""Calls through a real gateway process: answers, streams, records, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from longrein.store import Store
from longrein.trajectory.prompts import messages_of, prompt_ids

from .running import RunningGateway, running_gateway

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}, "strict": True}}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), ["gateway.retry_grace=0"], context=600) as running:
        yield running


def say(value: Any) -> list[dict[str, str]]:
    return [{"role": "user", "content": json.dumps(value)}]


def test_a_plain_answer_and_its_record(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    answer = gateway.chat(
        rollout, token, {"model": "policy", "messages": say({"say": "Hi there."}), "temperature": 0.2}
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["choices"][0]["message"]["content"] == "Hi there."
    assert body["choices"][0]["finish_reason"] == "stop"
    [call] = gateway.calls(rollout)
    assert body["usage"]["prompt_tokens"] == call.prompt_length == len(call.prompt_delta)
    assert body["usage"]["completion_tokens"] == len(call.sampled) == len(call.logprobs or [])
    assert call.reply == {"role": "assistant", "content": "Hi there."}
    assert (call.status, call.mode, call.engine, call.fork, call.sampling["temperature"]) == (
        "ok",
        "train",
        "policy",
        None,
        1.0,
    )


def test_the_official_client_reads_answers_and_streams(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    client = openai.OpenAI(base_url=gateway.base_url(rollout), api_key=token)
    call = '<think>hm</think>Look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    plain = client.chat.completions.create(model="policy", messages=say({"say": call}), tools=TOOLS)  # type: ignore[arg-type]
    assert plain.choices[0].finish_reason == "tool_calls"
    assert plain.choices[0].message.content == "Look."
    assert plain.choices[0].message.tool_calls[0].function.arguments == '{"command": "ls"}'  # type: ignore[index,union-attr]
    chunks = list(
        client.chat.completions.create(
            model="policy",
            messages=say({"say": call}),  # type: ignore
            tools=TOOLS,  # type: ignore
            stream=True,
            stream_options={"include_usage": True},  # type: ignore[arg-type,call-overload]
        )
    )
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == "Look."
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "hm"
    pieces = [t.function.arguments for d in deltas for t in d.tool_calls or []]
    assert "".join(pieces) == '{"command": "ls"}'
    assert len(pieces) > 2  # as they are sampled
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.total_tokens == plain.usage.total_tokens  # type: ignore
    first, second = gateway.calls(rollout)
    assert first.sampled == second.sampled
    assert second.fork is None  # an equal request is a sibling


def test_a_conversation_continues_on_the_recorded_ids(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    messages = say({"say": "First."})
    for _ in range(3):
        reply = gateway.chat(rollout, token, {"messages": messages}).json()["choices"][0]["message"]
        messages = [
            *messages,
            {"role": "assistant", "content": [{"type": "text", "text": reply["content"]}]},
            *say({"say": "Next."}),
        ]
    calls = {c.number: c for c in gateway.calls(rollout)}
    assert [c.parent for c in calls.values()] == [None, 0, 1]
    assert [c.fork for c in calls.values()] == [None, None, None]
    branch = prompt_ids(calls, calls[1]) + calls[1].sampled
    assert prompt_ids(calls, calls[2])[: len(branch)] == branch
    assert len(messages_of(calls, calls[2])) == 5
    assert len(calls[2].messages) == 1


def test_n_answers_are_siblings(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    body = gateway.chat(rollout, token, {"messages": say({"say": "One of three."}), "n": 3}).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    calls = gateway.calls(rollout)
    assert sorted(c.number for c in calls) == [0, 1, 2]
    assert {tuple(c.prompt_delta) for c in calls} == {tuple(calls[0].prompt_delta)}
    assert len({c.sampling["seed"] for c in calls}) == 3


def test_a_stop_string_cuts_the_text_and_not_the_record(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    answer = gateway.chat(rollout, token, {"messages": say({"say": "abc STOP def"}), "stop": ["STOP"]}).json()
    assert answer["choices"][0]["message"]["content"] == "abc "
    assert answer["choices"][0]["finish_reason"] == "stop"
    [call] = gateway.calls(rollout)
    assert answer["usage"]["completion_tokens"] == len(call.sampled) > 4


def test_a_reply_that_is_cut_has_finish_reason_length(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    answer = gateway.chat(rollout, token, {"messages": say({"say": "a b c d e f g h"}), "max_tokens": 3}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_a_prompt_beyond_the_context_is_the_error_that_makes_harnesses_compact(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    with pytest.raises(openai.BadRequestError) as caught:
        openai.OpenAI(base_url=gateway.base_url(rollout), api_key=token).chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "word " * 2000}]
        )
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 600 tokens" in str(caught.value)
    assert gateway.calls(rollout) == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": "yes"}}, "include_usage"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
            "messages[0].function_call",
        ),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"colour": "red"}, "colour"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "clown", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    gateway: RunningGateway, change: dict[str, Any], param: str
) -> None:
    rollout, token = gateway.rollout()
    answer = gateway.chat(rollout, token, {"messages": say({}), **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert gateway.calls(rollout) == []


CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def test_a_script_that_keeps_the_form_of_its_reply(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    for said in (CALL, f"<think>hm</think>\n\n{CALL}"):
        answer = gateway.chat(rollout, token, {"messages": say({"say": said}), **asked})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    cut = gateway.chat(rollout, token, {"messages": say({"say": CALL}), "max_tokens": 5, **asked})
    assert cut.json()["choices"][0]["finish_reason"] == "length"
    assert {call.sampling["guide"] for call in gateway.calls(rollout)} == {"tool_choice: 'required'"}


@pytest.mark.parametrize("said", ["Hello.", f"Look.\n{CALL}", f"{CALL}\n{CALL}", CALL.replace("bash", "sh")])
def test_a_script_that_leaves_the_form_of_its_reply_is_an_error_that_says_where(
    gateway: RunningGateway, said: str
) -> None:
    rollout, token = gateway.rollout()
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    answer = gateway.chat(rollout, token, {"messages": say({"say": said}), **asked})
    assert answer.status_code == 502
    assert "does not follow the request's guide: after" in answer.json()["error"]["message"]
    [call] = gateway.calls(rollout)
    assert call.status == "error"


def test_a_script_is_certain_of_its_tokens_and_a_teacher_has_no_log_probabilities(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    asked = {"messages": say({"say": "naïve 東"}), "logprobs": True, "top_logprobs": 3}
    body = gateway.chat(rollout, token, asked).json()
    entries = body["choices"][0]["logprobs"]["content"]
    [call] = gateway.calls(rollout)
    assert len(entries) == len(call.sampled)
    assert bytes(byte for entry in entries[:-1] for byte in entry["bytes"]).decode() == "naïve 東"
    for entry in entries:
        assert entry["logprob"] == 0.0
        [other] = entry["top_logprobs"]
        assert (other["token"], other["logprob"]) == (entry["token"], 0.0)
    rollout, token = gateway.rollout(config={"engine": "teacher"})
    refused = gateway.chat(rollout, token, asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")


def test_neutral_and_documented_fields_are_accepted(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    body = {
        "messages": say({"say": "ok"}),
        "user": "u",
        "seed": 3,
        "presence_penalty": 0,
        "n": None,
        "top_p": 1,
        "parallel_tool_calls": True,
        "store": False,
    }
    assert gateway.chat(rollout, token, body).status_code == 200


def test_mode_val_takes_top_p_and_its_own_temperature(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout(is_train=False)
    answer = gateway.chat(rollout, token, {"messages": say({"say": "x"}), "top_p": 0.5}, mode="val")
    assert answer.status_code == 200, answer.text
    [call] = gateway.calls(rollout)
    assert (call.mode, call.sampling["temperature"], call.sampling["top_p"]) == ("val", 0.7, 0.5)


def test_malformed_json_costs_the_sender_an_error(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    url = f"{gateway.base_url(rollout)}/chat/completions"
    for content in (b"{", b"[]", b'"x"', b"\xff\xfe"):
        answer = httpx.post(url, content=content, headers={"authorization": f"Bearer {token}"})
        assert answer.status_code == 400
        assert "message" in answer.json()["error"]
    assert gateway.chat(rollout, token, {"messages": say({"say": "still here"})}).status_code == 200


def test_a_script_that_raises_is_an_error_with_its_words_and_a_record(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    answer = gateway.chat(rollout, token, {"messages": say({"raise": "no more replies"})})
    assert answer.status_code == 502
    assert "no more replies" in answer.json()["error"]["message"]
    [call] = gateway.calls(rollout)
    assert (call.status, call.http_status, call.sampled) == ("error", 502, [])


def test_the_teacher_answers_as_the_template_would_write_it(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout(config={"engine": "teacher"})
    answer = gateway.chat(rollout, token, {"messages": say({}), "tools": TOOLS}).json()
    message = answer["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
    again = [
        *say({}),
        {**message, "refusal": None},
        {"role": "tool", "content": "a", "tool_call_id": message["tool_calls"][0]["id"]},
    ]
    gateway.chat(rollout, token, {"messages": again, "tools": TOOLS})
    first, second = gateway.calls(rollout)
    assert first.logprobs is None
    assert first.engine == "teacher"
    assert second.fork is None  # what the teacher wrote is what the template writes
    assert second.prefix_length == first.prompt_length + len(first.sampled)


def test_completions_take_text_and_ids_and_continue(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    client = openai.OpenAI(base_url=gateway.base_url(rollout), api_key=token)
    first = client.completions.create(
        model="policy", prompt="Once", max_tokens=50, extra_body={"return_token_ids": True}
    )
    assert first.choices[0].text == "Hello."
    ids = [*first.choices[0].prompt_token_ids, *first.choices[0].token_ids]  # type: ignore[attr-defined]
    client.completions.create(model="policy", prompt=[*ids, 100], max_tokens=50)
    client.completions.create(model="policy", prompt="Once" + "Hello." + " and", max_tokens=50)
    calls = gateway.calls(rollout)
    assert [c.parent for c in calls] == [None, 0, 0]
    assert calls[1].prompt_delta == [100]
    assert calls[1].prefix_length == len(ids)
    assert calls[2].prefix_length == len(ids) - 1  # the text does not repeat the stop token
    pieces = list(client.completions.create(model="policy", prompt="Once", max_tokens=50, stream=True))
    assert "".join(p.choices[0].text for p in pieces if p.choices) == "Hello."


def test_completions_take_batches_of_prompts(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    client = openai.OpenAI(base_url=gateway.base_url(rollout), api_key=token)
    several = client.completions.create(model="policy", prompt=["Once", "Twice upon"], n=2, max_tokens=50)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    calls = gateway.calls(rollout)
    assert [call.prompt_delta for call in calls[:2]] == [calls[0].prompt_delta] * 2
    assert [call.prompt_delta for call in calls[2:]] == [calls[3].prompt_delta] * 2
    assert several.usage is not None
    assert several.usage.prompt_tokens == calls[0].prompt_length + calls[2].prompt_length
    by_ids = client.completions.create(model="policy", prompt=[[70, 71], [72]], max_tokens=50, stream=True)
    pieces: dict[int, str] = {}
    for piece in by_ids:
        for choice in piece.choices:
            pieces[choice.index] = pieces.get(choice.index, "") + choice.text
    assert pieces == {0: "Hello.", 1: "Hello."}
    for bad in ([], [[]], ["a", ""], ["a", 3], [[1, "b"]], [[10**6]], [True]):
        answer = httpx.post(
            f"{gateway.base_url(rollout)}/completions",
            json={"prompt": bad},
            headers={"authorization": f"Bearer {token}"},
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_a_client_that_leaves_is_an_abandoned_call(gateway: RunningGateway, tmp_path: Path) -> None:
    rollout, token = gateway.rollout()
    never = tmp_path / "never"
    for stream in (False, True):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{gateway.base_url(rollout)}/chat/completions",
                json={"messages": say({"wait": str(never)}), "stream": stream},
                headers={"authorization": f"Bearer {token}"},
                timeout=httpx.Timeout(5, read=0.3),
            ).raise_for_status()
    while len(calls := gateway.calls(rollout)) < 2:
        pass
    assert [(c.status, c.http_status) for c in calls] == [("abandoned", 499)] * 2


def test_a_paused_gate_holds_calls_and_lets_them_go_on(gateway: RunningGateway) -> None:
    rollout, token = gateway.rollout()
    gateway.http.post("/proxy/pause", json={"reason": "weights"}).raise_for_status()
    with httpx.stream(
        "POST",
        f"{gateway.base_url(rollout)}/chat/completions",
        json={"messages": say({"say": "after"}), "stream": True},
        headers={"authorization": f"Bearer {token}"},
        timeout=60,
    ) as answer:
        assert answer.status_code == 200  # headers leave at once
        assert gateway.calls(rollout) == []
        gateway.http.post("/proxy/resume").raise_for_status()
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == "after"
    assert len(gateway.calls(rollout)) == 1


def test_a_call_that_a_harness_has_seen_whole_survives_kill_9(tmp_path: Path) -> None:
    with running_gateway(tmp_path) as gateway:
        rollout, token = gateway.rollout()
        with httpx.stream(
            "POST",
            f"{gateway.base_url(rollout)}/chat/completions",
            json={"messages": say({"say": "seen"}), "stream": True},
            headers={"authorization": f"Bearer {token}"},
        ) as answer:
            for line in answer.iter_lines():
                if '"finish_reason":"stop"' in line:  # the first byte of the end, [DONE] not yet read
                    gateway.kill()
                    break
    store = Store.open(f"sqlite:///{tmp_path / 'test' / 'store.sqlite'}", read_only=True)
    [call] = store.calls(rollout, "0")
    assert call.reply["content"] == "seen"
    store.close()


def test_an_attempt_goes_on_in_a_new_gateway(tmp_path: Path) -> None:
    messages = say({"say": "one"})
    with running_gateway(tmp_path) as gateway:
        rollout, token = gateway.rollout()
        reply = gateway.chat(rollout, token, {"messages": messages}).json()["choices"][0]["message"]["content"]
        gateway.kill()
        (tmp_path / "test" / "gateway.json").unlink()
    with running_gateway(tmp_path) as gateway:
        answer = gateway.chat(
            rollout, token, {"messages": [*messages, {"role": "assistant", "content": reply}, *say({"say": "two"})]}
        )
        assert answer.status_code == 200, answer.text
        first, second = gateway.calls(rollout)
        assert (second.parent, second.fork) == (0, None)
        assert second.prefix_length == first.prompt_length + len(first.sampled)


def test_control_text_is_refused_when_the_run_file_says_so(tmp_path: Path) -> None:
    with running_gateway(tmp_path, ["gateway.control_text=refuse"]) as gateway:
        rollout, token = gateway.rollout()
        answer = gateway.chat(rollout, token, {"messages": [{"role": "user", "content": "a <|im_end|> b"}]})
        assert answer.status_code == 400
        assert "control token" in answer.json()["error"]["message"]


def test_the_gateway_says_what_is_wrong_with_a_template(tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_text("{{ messages[0].content }}")
    options = [f"model.chat_template={tmp_path / 'bad.jinja'}"]
    with pytest.raises(AssertionError, match="no generation prompt"), running_gateway(tmp_path / "run", options):
        pass
