"""The protocol of vLLM: token ids in and out, over the route that a server has.

`/inference/v1/generate` (vLLM's --enable-scale-out) tells which weights each token was sampled with; a server without
it (403, 404) is asked at `/v1/completions` with `return_token_ids`. Replies are always streamed, so that nothing is
lost when a server breaks off; closing the connection aborts the request. Whatever the model's generation_config.json
would add to the sampling is sent as what leaves the distribution alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
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

log = logging.getLogger("longrein.gateway")

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"

#: What vLLM writes where it has no log-probability.
_NO_LOGPROB = -9999.0


class Place(Struct):
    """A token at a place of the reply. vLLM names it by `token_id`, older ones by a `token` of the form token_id:5."""

    logprob: float = _NO_LOGPROB
    token: str = ""
    token_id: int | None = None
    top_logprobs: list[Place] = []

    def id(self) -> int:
        return self.token_id if self.token_id is not None else _id_of(self.token)


class Logprobs(Struct):
    content: list[Place] | None = None
    """Of the generate route."""
    token_logprobs: list[float | None] | None = None
    """Of the completions route, like `top_logprobs`: by name of the token."""
    top_logprobs: list[dict[str, float] | None] | None = None


class Span(Struct):
    """Tokens `start` to `end` of the reply were sampled with the weights `version`."""

    version: str | int
    start: int
    end: int


class Choice(Struct):
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    text: str = ""
    weight_versions: list[Span] | None = None


class Event(Struct):
    choices: list[Choice] = []
    error: Any = None


@dataclass
class VllmServer:
    """A vLLM server at `url`, and what has been found out about it."""

    http: httpx.AsyncClient
    url: str
    context: int | None = None
    model: str = ""
    """The name that it serves the model under."""
    route: str = GENERATE
    processed: bool | None = None
    """Whether its log-probabilities are those of the distribution sampled from; None: not tried."""

    async def check(self, version: int) -> None:
        await refuse_failure(await self.http.get(f"{self.url}/health"), self.url)
        if not self.model:
            await self._meet()
        if version:
            await self._refuse_stale(version)

    async def _meet(self) -> None:
        card = await base_model(self.http, self.url)
        self.model, self.context = card.id, card.max_model_len

    async def _refuse_stale(self, version: int) -> None:
        """A server that was started again has its first weights. Which they are only tells VLLM_SERVER_DEV_MODE=1."""
        answer = await self.http.get(f"{self.url}/weight_info")
        if not answer.is_success:
            return
        told = read_as(dict, answer.content, self.url).get("weight_version")
        if version_of(told, -1) < version:
            raise Broken(f"the vLLM at {self.url} has the weights {told!r}, not those of version {version}")

    async def sample(self, request: Generate, version: Callable[[], int]) -> AsyncGenerator[Chunk, None]:
        if not self.model:
            await self._meet()
        if reshapes(request):
            await self._refuse_raw(request)
        request = fitted(request, self.context, self.url)
        if self.route == GENERATE:
            async with posted(self.http, self.url + GENERATE, generate_body(request)) as response:
                if response.status_code not in (403, 404, 405):
                    await refuse_failure(response, self.url, request)
                    async for chunk in chunks(response, self.url, Reader(self.url, request, version).chunk):
                        yield chunk
                    return
            self.route = COMPLETIONS
        async with posted(self.http, self.url + COMPLETIONS, completions_body(request, self.model)) as response:
            await refuse_failure(response, self.url, request)
            async for chunk in chunks(response, self.url, Reader(self.url, request, version).chunk):
                yield chunk

    async def _refuse_raw(self, request: Generate) -> None:
        if self.processed is None:
            self.processed = await self._gives_processed()
        if not self.processed:
            why = "a guide" if request.guide is not None else "top_p or top_k"
            if request.temperature != 1:
                why = f"temperature {request.temperature:g}"
            raise EngineError(
                f"the vLLM at {self.url} gives log-probabilities from before {why} is applied, so they are not those of "
                "the distribution that was sampled from: start it with --logprobs-mode processed_logprobs",
                400,
            )

    async def _gives_processed(self) -> bool:
        """Whether a token that is the only one allowed is certain: of two tokens at most one can be so in itself."""
        for token in (0, 1):
            body: Json = {
                **completions_body(_PROBE, self.model),
                **{"stream": False, "allowed_token_ids": [token]},
            }
            answer = await self.http.post(self.url + COMPLETIONS, json=body)
            await refuse_failure(answer, self.url)
            chunk = Reader(self.url, _PROBE, lambda: 0).chunk(answer.content)
            if not chunk.logprobs or abs(chunk.logprobs[0]) > 1e-3:
                return False
        return True


_PROBE = Generate(
    request_id="probe",
    rollout_id="probe",
    token_ids=[0],
    max_tokens=1,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    stop_token_ids=[],
    seed=0,
    stream=False,
)


def reshapes(request: Generate) -> bool:
    """Whether a request samples from another distribution than the model's own. Greedy sampling is certain anyway."""
    return request.temperature not in (0, 1) or (
        request.temperature != 0 and (request.guide is not None or request.top_p < 1 or bool(request.top_k))
    )


def generate_body(request: Generate) -> Json:
    """The body for the generate route."""
    sampling = {**_sampling(request), "logprobs": request.top_logprobs, "detokenize": False}
    return {
        "request_id": request.request_id,
        "token_ids": request.token_ids,
        "sampling_params": sampling,
        "stream": True,
    }


def completions_body(request: Generate, model: str) -> Json:
    """The body for the completions route."""
    return {
        **_sampling(request),
        "request_id": request.request_id,
        "model": model,
        "prompt": request.token_ids,
        "logprobs": request.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": True,
    }


def _sampling(request: Generate) -> Json:
    sampling: Json = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": request.stop_token_ids,
        "seed": request.seed,
        "skip_special_tokens": False,
    }
    if request.guide is not None:
        sampling["structured_outputs"] = {"grammar": request.guide}
    return sampling


@dataclass
class Reader:
    """Reads the events of one reply, of either route."""

    url: str
    request: Generate
    version: Callable[[], int]
    given: list[int] = field(default_factory=list)
    """The versions of the tokens read so far."""

    def chunk(self, data: bytes) -> Chunk:
        event = read_as(Event, data, self.url)
        if event.error is not None:
            raise self._failure(event.error)
        if not event.choices:
            return Chunk()
        choice = event.choices[0]
        ids = choice.token_ids or []
        if choice.text and not ids:
            raise EngineError(
                f"the vLLM at {self.url} gives text without token ids: it is too old for return_token_ids"
            )
        finish = _finish(choice.finish_reason, self.url)
        return Chunk(ids, self._logprobs(choice, ids), self._versions(choice, ids), finish, self._top(choice, ids))

    def _failure(self, error: Any) -> Broken | EngineError:
        code = error.get("code") if isinstance(error, dict) else None
        words = f"the vLLM at {self.url} failed: {error.get('message') if isinstance(error, dict) else error}"
        if self.request.guide is not None:
            words += " (guides need its --structured-outputs-config.backend guidance)"
            if code == 400:
                return EngineError(words, 400)
        return failure(words, code if isinstance(code, int) else 500)

    def _versions(self, choice: Choice, ids: list[int]) -> list[tuple[int, int]]:
        """vLLM tells the versions with the last tokens; until then they are what the endpoint is registered with.

        A new version is registered while the server stands still, so that the two agree.
        """
        registered, done = self.version(), len(self.given)
        spans = [(str(span.version), span.start, span.end) for span in choice.weight_versions or ()]
        runs = version_runs(spans, done, len(ids), registered) if ids else []
        self.given += [version for version, count in runs for _ in range(count)]
        told = version_runs(spans, 0, done, registered) if spans and done else []
        if told and [version for version, count in told for _ in range(count)] != self.given[:done]:
            log.warning(
                "%s: the vLLM at %s says that its tokens are of the versions %s; they are recorded otherwise",
                *(self.request.request_id, self.url, told),
            )
        return runs

    def _logprobs(self, choice: Choice, ids: list[int]) -> list[float] | None:
        given = choice.logprobs or Logprobs()
        if given.content is not None:
            values: list[float | None] = [place.logprob for place in given.content]
        else:
            values = given.token_logprobs or []
        if len(values) != len(ids):
            raise EngineError(f"the vLLM at {self.url} gave {len(values)} log-probabilities of {len(ids)} tokens")
        if not ids:
            return None
        if self.request.temperature == 0:
            return [0.0] * len(ids)
        known = [value for value in values if value is not None and value > _NO_LOGPROB]
        return known if len(known) == len(ids) else None

    def _top(self, choice: Choice, ids: list[int]) -> list[list[tuple[int, float]]] | None:
        count = self.request.top_logprobs
        if not count or not ids:
            return None
        given = choice.logprobs or Logprobs()
        if given.content is not None:
            places = [[(place.id(), place.logprob) for place in at.top_logprobs] for at in given.content]
        else:
            places = [[(_id_of(name), p) for name, p in (at or {}).items()] for at in given.top_logprobs or []]
        # vLLM puts the sampled token among them even where it is not one of the most probable.
        return [sorted(at, key=lambda pair: -pair[1])[:count] for at in places]


def _finish(reason: str | None, url: str) -> str | None:
    if reason in (None, "stop", "length", "abort"):
        return reason
    raise Broken(f"the vLLM at {url} ended the reply by {reason!r}")


def _id_of(name: str) -> int:
    digits = name.removeprefix("token_id:")
    if not re.fullmatch("[0-9]{1,10}", digits):
        raise EngineError(f"the vLLM names a token by {name!r}: it is too old for return_tokens_as_token_ids")
    return int(digits)
