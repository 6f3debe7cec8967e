"""Guided replies and log-probabilities through a gateway and an embedded engine, as each dialect's clients read them."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from gateway.serving import Served, serving
from longrein import config
from longrein.gateway import grammars
from longrein.trainer.torch.policy import load_policy
from longrein.trainer.torch.server import EngineServer
from random_model import make_random_model

ARGUMENTS = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 4}, "deep": {"type": "boolean"}},
    "required": ["word"],
    "additionalProperties": False,
}
ANSWER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"enum": ["yes", "no"]}},
    "required": ["n", "sure"],
    "additionalProperties": False,
}
NAMES = ["find", "count"]
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": ARGUMENTS}} for name in NAMES]
RESPONSES_TOOLS: Any = [{"type": "function", "name": name, "parameters": ARGUMENTS} for name in NAMES]
MESSAGES_TOOLS: Any = [{"name": name, "input_schema": ARGUMENTS} for name in NAMES]
ASKED: Any = [{"role": "user", "content": "say"}]


class Attempt:
    """A rollout's attempt, and its clients."""

    def __init__(self, served: Served, headers: dict[str, str], rollout: str) -> None:
        self.served, self.headers, self.rollout = served, headers, rollout
        self.url = f"{served.url}/proxy/rollout/{rollout}/attempt/0/mode/train"
        key = headers["authorization"].removeprefix("Bearer ")
        self.openai = openai.AsyncOpenAI(base_url=f"{self.url}/openai/v1", api_key=key, max_retries=0)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.served.anonymous.post(f"{self.url}/{path}", json=body, headers=self.headers)

    async def messages(self, **body: Any) -> httpx.Response:
        said = {"model": "policy", "messages": ASKED, "max_tokens": 1000, **body}
        return await self.post("anthropic/v1/messages", **said)

    async def last(self) -> dict[str, Any]:
        return (await self.served.calls(self.rollout))[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("guided") / "model")


@pytest.fixture
async def attempt(folder: Path, tmp_path: Path) -> AsyncIterator[Attempt]:
    policy = load_policy(config.Model(path=str(folder), device="cpu"), seed=0)
    server = EngineServer(policy, config.Engine.model_validate({"max_batch": 8, "threads": 1}))
    try:
        sections: dict[str, Any] = {
            "model": {"name": "policy", "path": str(folder)},
            "engine": {"max_reply_tokens": 1000},
        }
        async with serving(tmp_path, **sections) as served:
            registered = {"model": "policy", "endpoint": await server.start(), "protocol": "tokens"}
            assert (await served.http.post("/api/models", json=[registered])).status_code == 201
            yield Attempt(served, await served.start("r"), "r")
    finally:
        await server.stop()


def fit(arguments: str, schema: Any = ARGUMENTS) -> None:
    jsonschema.validate(json.loads(arguments), schema)


async def recorded(attempt: Attempt, said: str) -> None:
    """The last call's record: under what it was sampled, log-probabilities of its own."""
    call = await attempt.last()
    assert call["status"] == "ok"
    assert call["sampling"]["guide"] == said
    assert len(call["logprobs"]) == len(call["sampled"])
    assert min(call["logprobs"]) < 0.0 <= max(call["logprobs"]) + 1e-6


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
async def test_chat_calls(attempt: Attempt, choice: str, stream: bool) -> None:
    wanted: Any = "required" if choice == "required" else {"type": "function", "function": {"name": "count"}}
    asked: Any = {"model": "policy", "messages": ASKED, "tools": CHAT_TOOLS, "tool_choice": wanted}
    if stream:
        async with attempt.openai.chat.completions.stream(**asked, parallel_tool_calls=False) as events:
            answer: Any = await events.get_final_completion()
    else:
        answer = await attempt.openai.chat.completions.create(**asked, parallel_tool_calls=False)
    [choice_] = answer.choices
    assert choice_.finish_reason == "tool_calls"
    [call] = choice_.message.tool_calls
    assert call.function.name in (NAMES if choice == "required" else ["count"])
    fit(call.function.arguments)
    await recorded(attempt, f"tool_choice: {wanted!r}")


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_content_of_a_schema(attempt: Attempt, stream: bool) -> None:
    described: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER, "strict": True}}
    asked: Any = {"model": "policy", "messages": ASKED, "response_format": described}
    if stream:
        async with attempt.openai.chat.completions.stream(**asked) as events:
            answer: Any = await events.get_final_completion()
    else:
        answer = await attempt.openai.chat.completions.create(**asked)
    assert answer.choices[0].finish_reason == "stop"
    fit(answer.choices[0].message.content, ANSWER)
    await recorded(attempt, "response_format: 'json_schema'")


async def test_any_number_of_calls_and_siblings(attempt: Attempt) -> None:
    answer = await attempt.openai.chat.completions.create(
        model="policy", messages=ASKED, tools=CHAT_TOOLS, tool_choice="required", n=4
    )
    for choice in answer.choices:
        assert choice.message.tool_calls
        for call in choice.message.tool_calls:
            assert call.type == "function"
            fit(call.function.arguments)
    assert len({str(choice.message.tool_calls) for choice in answer.choices}) > 1


async def test_content_or_calls(attempt: Attempt) -> None:
    described: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    answer = await attempt.openai.chat.completions.create(
        model="policy", messages=ASKED, tools=CHAT_TOOLS, response_format=described, n=6, parallel_tool_calls=False
    )
    for choice in answer.choices:
        calls = choice.message.tool_calls or []
        assert len(calls) + bool(choice.message.content) == 1
        for call in calls:
            assert call.type == "function"
            fit(call.function.arguments)
        if choice.message.content:
            fit(choice.message.content, ANSWER)


@pytest.mark.parametrize("choice", ["required", "named", "schema"])
@pytest.mark.parametrize("stream", [False, True])
async def test_responses(attempt: Attempt, choice: str, stream: bool) -> None:
    asked: Any = {"model": "policy", "input": "say", "tools": RESPONSES_TOOLS}
    if choice == "schema":
        asked = {"model": "policy", "input": "say"}
        asked["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER, "strict": True}}
        said = "text.format: 'json_schema'"
    else:
        asked["tool_choice"] = "required" if choice == "required" else {"type": "function", "name": "count"}
        said = f"tool_choice: {asked['tool_choice']!r}"
    if stream:
        async with attempt.openai.responses.stream(**asked) as events:
            answer: Any = await events.get_final_response()
    else:
        answer = await attempt.openai.responses.create(**asked)
    assert answer.status == "completed"
    if choice == "schema":
        fit(answer.output_text, ANSWER)
        assert answer.text.format.type == "json_schema"
    else:
        assert {item.type for item in answer.output} == {"function_call"}
        assert choice == "required" or [item.name for item in answer.output] == ["count"]
        for item in answer.output:
            fit(item.arguments)
    await recorded(attempt, said)


@pytest.mark.parametrize("choice", ["any", "tool", "schema"])
@pytest.mark.parametrize("stream", [False, True])
async def test_messages(attempt: Attempt, choice: str, stream: bool) -> None:
    asked: dict[str, Any] = {"tools": MESSAGES_TOOLS, "stream": stream}
    if choice == "schema":
        asked = {"output_config": {"format": {"type": "json_schema", "schema": ANSWER}}, "stream": stream}
    else:
        asked["tool_choice"] = {"type": choice, **({"name": "find"} if choice == "tool" else {})}
    answer = await attempt.messages(**asked)
    assert answer.status_code == 200, answer.text
    blocks = answer.json()["content"] if not stream else blocks_of(answer.text)
    if choice == "schema":
        [block] = blocks
        fit(block["text"], ANSWER)
    else:
        assert {block["type"] for block in blocks} == {"tool_use"}
        assert choice == "any" or [block["name"] for block in blocks] == ["find"]
        for block in blocks:
            jsonschema.validate(block["input"], ARGUMENTS)


def blocks_of(text: str) -> list[dict[str, Any]]:
    """The content blocks that a stream of the Messages dialect builds up."""
    blocks: list[dict[str, Any]] = []
    pieces = ""
    for line in text.splitlines():
        if not line.startswith("data: "):
            continue
        event = json.loads(line[6:])
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            pieces = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "text_delta":
                blocks[-1]["text"] += delta["text"]
            else:
                pieces += delta["partial_json"]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(pieces)
    return blocks


async def test_a_guide_that_the_engine_refuses_is_the_clients_error(attempt: Attempt, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(grammars, "installed", lambda: False)
    body = {"messages": ASKED, "response_format": {"type": "json_object"}}
    answer = await attempt.post("openai/v1/chat/completions", **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "response_format"
    assert "needs llguidance, which is not installed" in error["message"]
    streamed = await attempt.post("openai/v1/chat/completions", **body, stream=True)
    assert "needs llguidance, which is not installed" in streamed.text
    assert (await attempt.last())["status"] == "error"


# Log-probabilities


async def test_chat_logprobs_plain_and_streamed(attempt: Attempt) -> None:
    asked: Any = {"model": "policy", "messages": ASKED, "logprobs": True, "top_logprobs": 3, "max_tokens": 30}
    plain = await attempt.openai.chat.completions.create(**asked)
    assert plain.choices[0].logprobs is not None
    entries = plain.choices[0].logprobs.content or []
    call = await attempt.last()
    assert [entry.logprob for entry in entries] == pytest.approx(call["logprobs"], abs=1e-5)
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert [one.logprob for one in entry.top_logprobs] == sorted(
            (o.logprob for o in entry.top_logprobs), reverse=True
        )
        if entry.logprob > entry.top_logprobs[-1].logprob:
            assert entry.token in [one.token for one in entry.top_logprobs]
    heard = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert heard.decode(errors="replace").startswith(plain.choices[0].message.content or "-")
    chunks = [chunk async for chunk in await attempt.openai.chat.completions.create(**asked, stream=True)]
    streamed = [e for chunk in chunks for c in chunk.choices if c.logprobs for e in c.logprobs.content or []]
    call = await attempt.last()
    assert [entry.logprob for entry in streamed] == pytest.approx(call["logprobs"], abs=1e-5)
    said = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert all(piece.logprobs is not None for piece in said)


async def test_completions_logprobs_plain_and_streamed(attempt: Attempt) -> None:
    asked: Any = {"model": "policy", "prompt": "say", "logprobs": 2, "max_tokens": 20}
    plain = await attempt.openai.completions.create(**asked)
    found: Any = plain.choices[0].logprobs
    call = await attempt.last()
    assert found.token_logprobs == pytest.approx(call["logprobs"], abs=1e-5)
    assert found.text_offset[0] == 0
    assert [len(token) for token in found.tokens[:-1]] == [
        b - a for a, b in zip(found.text_offset, found.text_offset[1:], strict=False)
    ]
    for token, p, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) <= 3
        assert top[token] == p
    chunks = [chunk async for chunk in await attempt.openai.completions.create(**asked, stream=True)]
    pieces: list[Any] = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    call = await attempt.last()
    assert [p for piece in pieces for p in piece.token_logprobs] == pytest.approx(call["logprobs"], abs=1e-5)
    offsets = [offset for piece in pieces for offset in piece.text_offset]
    assert offsets == sorted(offsets)
    none = await attempt.openai.completions.create(model="policy", prompt="say", logprobs=0, max_tokens=2)
    assert none.choices[0].logprobs is not None
    assert none.choices[0].logprobs.top_logprobs is None


async def test_responses_logprobs_plain_and_streamed(attempt: Attempt) -> None:
    described = {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER}}
    asked: Any = {
        "model": "policy",
        "input": "say",
        "text": described,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    plain = await attempt.openai.responses.create(**asked)
    assert plain.top_logprobs == 2
    [part] = plain.output[0].content  # type: ignore[union-attr]
    assert "".join(entry.token for entry in part.logprobs) == part.text == plain.output_text  # type: ignore[union-attr]
    call = await attempt.last()
    assert [e.logprob for e in part.logprobs] == pytest.approx(call["logprobs"][:-1], abs=1e-5)  # type: ignore[union-attr]
    async with attempt.openai.responses.stream(**asked) as events:
        kinds = [event async for event in events]
        final = await events.get_final_response()
    deltas = [entry for event in kinds if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert "".join(entry.token for entry in deltas) == final.output_text
    assert final.output[0].content[0].logprobs is not None  # type: ignore[union-attr]
    assert len(final.output[0].content[0].logprobs) == len(deltas)  # type: ignore[union-attr]
    assert all(1 <= len(entry.top_logprobs or []) <= 2 for entry in deltas)
