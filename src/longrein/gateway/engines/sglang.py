"""The protocol of SGLang's own route: `/generate` with `input_ids`, streamed, with `return_logprob`.

SGLang tells log-probabilities at the sampling temperature, with the grammar's mask but before top_p and top_k; those
are refused unless they leave the distribution alone. Which tokens are new follows from `completion_tokens`: a server
repeats all it has sampled in each event, or with --incremental-streaming-output sends what is new.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
from msgspec import Struct

from longrein.gateway.engines import Chunk, EngineError, Generate
from longrein.gateway.engines.wire import (
    Broken,
    base_model,
    chunks,
    failure,
    fitted,
    posted,
    read_as,
    refuse_failure,
    version_of,
    version_runs,
)
from longrein.records import Json


class Span(Struct):
    """Tokens `start` to `end` of the reply were sampled with the weights `version`."""

    version: str
    start: int
    end: int


class Meta(Struct):
    completion_tokens: int = 0
    finish_reason: Json | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    output_top_logprobs: list[list[tuple[float, int, Any]] | None] | None = None
    weight_version: str | None = None
    weight_versions: list[Span] | None = None


class Event(Struct):
    meta_info: Meta | None = None
    error: Json | None = None


@dataclass
class SglangServer:
    """An SGLang server at `url`."""

    http: httpx.AsyncClient
    url: str
    context: int | None = None

    async def check(self, version: int) -> None:
        await refuse_failure(await self.http.get(f"{self.url}/health"), self.url)
        if self.context is None:
            self.context = (await base_model(self.http, self.url)).max_model_len

    async def sample(self, request: Generate, version: Callable[[], int]) -> AsyncGenerator[Chunk, None]:
        if request.temperature and (request.top_p < 1 or request.top_k):
            raise EngineError(
                f"the SGLang at {self.url} gives log-probabilities before top_p and top_k are applied, so they are not "
                "those of the distribution that was sampled from: leave top_p and top_k out",
                400,
            )
        if self.context is None:
            self.context = (await base_model(self.http, self.url)).max_model_len
        request = fitted(request, self.context, self.url)
        reader = Reader(self.url, request, version)
        async with posted(self.http, f"{self.url}/generate", _body(request)) as response:
            await refuse_failure(response, self.url, request)
            async for chunk in chunks(response, self.url, reader.chunk):
                yield chunk


@dataclass
class Reader:
    """Reads the events of one reply."""

    url: str
    request: Generate
    version: Callable[[], int]
    done: int = 0
    """Tokens read."""

    def chunk(self, data: bytes) -> Chunk:
        event = read_as(Event, data, self.url)
        if event.error is not None or event.meta_info is None:
            words = f"the engine at {self.url} failed: {event.error or data[:200]!r}"
            code = (event.error or {}).get("code")
            raise failure(words, code if isinstance(code, int) else 500)
        meta = event.meta_info
        new = meta.completion_tokens - self.done
        if new < 0 or len(meta.output_token_logprobs) < new:
            raise EngineError(f"the engine at {self.url} gave fewer log-probabilities than tokens")
        tokens = meta.output_token_logprobs[len(meta.output_token_logprobs) - new :]
        ids = [id for _, id, _ in tokens]
        spans = [(span.version, span.start, span.end) for span in meta.weight_versions or ()]
        runs = version_runs(spans, self.done, new, version_of(meta.weight_version, self.version()))
        self.done = meta.completion_tokens
        return Chunk(ids, self._logprobs(tokens), runs, _finish(meta.finish_reason, self.url), self._top(meta, new))

    def _logprobs(self, tokens: list[tuple[float | None, int, Any]]) -> list[float] | None:
        if self.request.temperature == 0:
            return [0.0] * len(tokens)
        return [p for p, _, _ in tokens if p is not None] if all(p is not None for p, _, _ in tokens) else None

    def _top(self, meta: Meta, new: int) -> list[list[tuple[int, float]]] | None:
        if not self.request.top_logprobs:
            return None
        given = meta.output_top_logprobs or []
        if len(given) < new:
            raise EngineError(f"the engine at {self.url} gave no log-probabilities of other tokens (top_logprobs_num)")
        return [[(id, p) for p, id, _ in place or ()] for place in given[len(given) - new :]]


def _finish(reason: Json | None, url: str) -> str | None:
    """stop, length or None; SGLang ends a request that it gives up as aborted, with a status where it failed."""
    if reason is None:
        return None
    kind = reason.get("type")
    if kind in ("stop", "length"):
        return kind
    status = reason.get("status_code")
    if kind == "abort" and isinstance(status, int) and 400 <= status < 500:
        raise EngineError(f"the engine at {url} refused the request: {reason.get('message')}", status)
    if kind == "abort":
        return "abort"
    raise Broken(f"the engine at {url} ended the reply for a reason that is not known: {reason}")


def _body(request: Generate) -> Json:
    sampling: Json = {
        "max_new_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or -1,
        # A model's generation_config.json would otherwise set these.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": request.stop_token_ids,
        "sampling_seed": request.seed,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if request.guide is not None:
        sampling["ebnf"] = request.guide
    return {
        "rid": request.request_id,
        "input_ids": request.token_ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": request.top_logprobs,
        "return_text_in_logprobs": False,
        "stream": True,
    }
