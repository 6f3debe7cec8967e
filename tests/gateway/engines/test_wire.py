"""What the protocols share: events however their bytes arrive, chunks put together, versions as run lengths."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.gateway.engines import Chunk
from longrein.gateway.engines.wire import Broken, chunks, events, joined, read_as, version_runs


class Pieces(httpx.AsyncByteStream):
    def __init__(self, content: bytes, cuts: list[int]):
        ends = sorted({cut % (len(content) + 1) for cut in cuts} | {len(content)})
        self._pieces = [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


texts = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1).map(str.strip)


@given(
    st.lists(texts.filter(lambda text: text != "[DONE]" and bool(text))), st.lists(st.integers(0, 10**6)), st.booleans()
)
def test_events_are_the_same_however_their_bytes_are_cut(data: list[str], cuts: list[int], crlf: bool) -> None:
    end = "\r\n" if crlf else "\n"
    said = "".join(f"data: {text}{end}{end}: comment{end}" for text in [*data, "[DONE]", "behind the end"])

    async def read() -> list[bytes]:
        response = httpx.Response(200, stream=Pieces(said.encode(), cuts))
        return [one async for found in events(response) for one in found]

    assert asyncio.run(read()) == [text.encode() for text in data]


async def test_chunks_end_with_their_finish_reason() -> None:
    def answer(*said: bytes) -> httpx.Response:
        return httpx.Response(200, stream=Pieces(b"".join(b"data: " + one + b"\n\n" for one in said), []))

    def read(data: bytes) -> Chunk:
        return read_as(Chunk, data, "http://fake")

    first, last = b'{"token_ids": [1], "versions": [[0, 1]]}', b'{"token_ids": [2], "finish_reason": "stop"}'
    found = [chunk async for chunk in chunks(answer(first, last), "http://fake", read)]
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in found] == [([1, 2], "stop")]
    with pytest.raises(Broken, match="before the reply was finished"):
        _ = [chunk async for chunk in chunks(answer(first, first), "http://fake", read)]


known = st.lists(st.tuples(st.integers(0, 99), st.floats(-9, 0)), max_size=4)


@given(st.lists(st.tuples(known, st.booleans()), min_size=1, max_size=5))
def test_joined_chunks_say_what_they_said_one_by_one(parts: list[tuple[list[tuple[int, float]], bool]]) -> None:
    made = [
        Chunk([id for id, _ in pairs], [p for _, p in pairs] if certain else None, [(0, len(pairs))] if pairs else [])
        for pairs, certain in parts
    ]
    whole = joined(made)
    assert whole.token_ids == [id for pairs, _ in parts for id, _ in pairs]
    assert whole.versions == [run for chunk in made for run in chunk.versions]
    if whole.token_ids:
        all_known = all(certain for pairs, certain in parts if pairs)
        assert whole.logprobs == ([p for pairs, _ in parts for _, p in pairs] if all_known else None)


spans_of = st.lists(st.tuples(st.sampled_from(["0", "7", "8", "default"]), st.integers(1, 5)), max_size=4)


@given(spans_of, st.integers(0, 12), st.integers(0, 12))
def test_versions_are_those_of_the_spans_at_their_places(
    lengths: list[tuple[str, int]], start: int, count: int
) -> None:
    spans, at = [], 0
    for version, length in lengths:
        spans.append((version, at, at + length))
        at += length
    told = [5 if version == "default" else int(version) for version, length in lengths for _ in range(length)]
    told += [told[-1] if told else 5] * 30  # tokens behind the last span are of its version
    runs = version_runs(spans, start, count, registered=5)
    assert [version for version, length in runs for _ in range(length)] == told[start : start + count]
