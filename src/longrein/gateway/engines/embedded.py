"""The protocol `tokens`, which the embedded engine speaks: ids in; ids, log-probabilities and versions out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import httpx

from longrein.gateway.engines import Chunk, Generate
from longrein.gateway.engines.wire import chunks, posted, read_as, refuse_failure
from longrein.records import Json


@dataclass
class EmbeddedServer:
    """An embedded engine at `url`."""

    http: httpx.AsyncClient
    url: str
    context: int | None = None

    async def check(self, version: int) -> None:
        answer = await self.http.get(f"{self.url}/health")
        await refuse_failure(answer, self.url)

    async def sample(self, request: Generate, version: Callable[[], int]) -> AsyncGenerator[Chunk, None]:
        async with posted(self.http, f"{self.url}/inference/v1/generate", _body(request)) as response:
            await refuse_failure(response, self.url, request)
            if request.stream:
                async for chunk in chunks(response, self.url, self._chunk):
                    yield chunk
            else:
                yield self._chunk(await response.aread())

    def _chunk(self, data: bytes) -> Chunk:
        return read_as(Chunk, data, self.url)


def _body(request: Generate) -> Json:
    sampling: Json = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop_token_ids": request.stop_token_ids,
        "seed": request.seed,
    }
    if request.guide is not None:
        sampling["guide"] = request.guide
    if request.top_logprobs:
        sampling["top_logprobs"] = request.top_logprobs
    return {
        "request_id": request.request_id,
        "token_ids": request.token_ids,
        "stream": request.stream,
        "sampling_params": sampling,
    }
