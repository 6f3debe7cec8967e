"""Any bytes as an engine's answer, cut anywhere: what the protocol says, or the protocol's own error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from longrein.gateway.engines import Chunk, EngineError, Generate, sglang, vllm, wire
from longrein.gateway.engines.answers import Answers, read_choices
from longrein.gateway.engines.embedded import EmbeddedServer
from longrein.gateway.engines.openai import data_of, server_sent_events
from longrein.gateway.engines.wire import Broken, chunks

from .engines.test_wire import Pieces
from .fuzzing import fuzzed

URL = "http://fake"


def request(**more: Any) -> Generate:
    asked: dict[str, Any] = {
        "request_id": "r/0/0", "rollout_id": "r", "token_ids": [1, 2], "max_tokens": 9, "temperature": 1.0, "top_p": 1.0,
        "top_k": 0, "stop_token_ids": [0], "seed": 1, "stream": True,
    }  # fmt: skip
    return Generate(**asked | more)


CLIENT = httpx.AsyncClient()

#: A fresh reader of one reply, for each protocol.
READERS: dict[str, Callable[[Generate], Callable[[bytes], Chunk]]] = {
    "tokens": lambda asked: EmbeddedServer(CLIENT, URL)._chunk,
    "vllm": lambda asked: vllm.Reader(URL, asked, lambda: 3).chunk,
    "sglang": lambda asked: sglang.Reader(URL, asked, lambda: 3).chunk,
}

NAMES = st.sampled_from(
    "choices token_ids logprobs content token_logprobs top_logprobs finish_reason text weight_versions version start end "
    "logprob token token_id error code message meta_info completion_tokens output_token_logprobs output_top_logprobs "
    "weight_version versions type status_code abort stop length index delta tool_calls function name arguments id "
    "prompt_token_ids reasoning_content role".split()
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(0, 9)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["stop", "length", "abort", "token_id:7", "token_id:x", "²", "7", "[DONE]"])
    | NAMES
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=6), max_leaves=25
)
PLACES = st.fixed_dictionaries({}, optional={"logprob": SCALARS, "token": SCALARS, "token_id": SCALARS})
EVENTS = (
    st.fixed_dictionaries(
        {
            "choices": st.lists(
                st.fixed_dictionaries(
                    {},
                    optional={
                        "token_ids": st.lists(st.integers(0, 9), max_size=3),
                        "logprobs": st.fixed_dictionaries(
                            {}, optional={"content": st.lists(PLACES), "token_logprobs": st.lists(SCALARS)}
                        ),
                        "finish_reason": SCALARS,
                        "delta": VALUES,
                        "message": VALUES,
                        "index": SCALARS,
                    },
                ),
                max_size=2,
            )
        }
    )
    | st.fixed_dictionaries({"meta_info": VALUES})
    | VALUES
)
TEXTS = EVENTS.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Events, comments, noise and ends of lines, in any order."""
    out = b""
    for _ in range(draw(st.integers(0, 6))):
        field = draw(st.sampled_from([b"data: ", b"data:", b"event: ", b": ", b"", b"data"]))
        out += field + draw(TEXTS) + draw(st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n", b"\r\n", b"", b"\r"]))
    return out + draw(st.sampled_from([b"", b"data: [DONE]\n\n"]))


@pytest.mark.parametrize("protocol", ["tokens", "vllm", "sglang"])
def test_any_stream_is_chunks_or_the_protocols_error(protocol: str) -> None:
    @fuzzed
    @given(streams(), st.lists(st.integers(0, 10**6), max_size=6), st.integers(0, 2), st.sampled_from([0.0, 1.0]))
    @example(b'data: {"choices": [{"token_ids": [1], "logprobs": {"content": [{"token": "x"}]}}]}\n\n', [], 1, 1.0)
    def check(said: bytes, cuts: list[int], top: int, temperature: float) -> None:
        reader = READERS[protocol](request(top_logprobs=top, temperature=temperature))

        async def read() -> None:
            async for chunk in chunks(httpx.Response(200, stream=Pieces(said, cuts)), URL, reader):
                assert all(isinstance(id, int) for id in chunk.token_ids)
                assert chunk.finish_reason in (None, "stop", "length", "abort") or protocol == "tokens"

        with suppress(Broken, EngineError):
            asyncio.run(read())

    check()


@fuzzed
@given(streams(), st.lists(st.integers(0, 10**6), max_size=6))
def test_events_handed_on_are_the_same_however_they_are_cut(said: bytes, cuts: list[int]) -> None:
    whole, cut = asyncio.run(handed_on(said, [])), asyncio.run(handed_on(said, cuts))
    assert whole == cut
    assert said.startswith(b"".join(whole))
    answers = Answers()
    for block in whole:
        data_of(block)
        answers.chunk(block)


async def handed_on(said: bytes, cuts: Sequence[int]) -> list[bytes]:
    async def pieces() -> AsyncIterator[bytes]:
        async for piece in Pieces(said, list(cuts)):
            yield piece

    return [block async for block in server_sent_events(pieces())]


@fuzzed
@given(st.lists(EVENTS, max_size=4), st.integers(1, 3))
def test_any_answer_of_an_endpoint_can_be_recorded(values: list[Any], count: int) -> None:
    """Nothing here raises: what is of no known form is not known."""
    answers = Answers()
    for value in values:
        value = wire.msgspec.json.decode(
            json.dumps(value).replace("NaN", "null").replace("-Infinity", "0").replace("Infinity", "0")
        )
        answers.chunk(value)
        if isinstance(value, dict):
            read_choices(value)
    answers.begun()
    answers.finished(count)
    for choice in answers.choices:
        logprobs = choice.known_logprobs()
        assert logprobs is None or len(logprobs) == len(choice.ids)
        json.dumps(choice.reply())


@pytest.mark.parametrize("reader", ["wire", "openai"])
async def test_an_event_without_end_is_broken_off(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given_out = 0

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            nonlocal given_out
            while True:
                given_out += 1
                yield b"x" * 1000

    monkeypatch.setattr(wire, "LONGEST_EVENT", 10_000)
    monkeypatch.setattr("longrein.gateway.engines.openai.LONGEST_EVENT", 10_000)
    response = httpx.Response(200, stream=Endless())
    events = wire.events(response) if reader == "wire" else server_sent_events(response.aiter_bytes())
    with pytest.raises(Broken if reader == "wire" else httpx.RemoteProtocolError, match="more than 10000 bytes"):
        _ = [one async for one in events]
    assert given_out < 20
