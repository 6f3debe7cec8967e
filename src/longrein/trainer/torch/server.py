"""The embedded engine: token ids in; ids, log-probabilities and versions out, over HTTP.

It is served by the process that owns the weights, inside that process's event loop; all computing happens in one other
thread, the learner's too (`compute`): threads that compute each bring a pool of OpenMP workers, and more workers than
cores no longer wait actively for each other, which costs a third of a decode step. Between two steps the thread takes
new requests and cancellations, hands on what was sampled, and freezes when it is told to: weights are updated while it
stands still, and running sequences go on with the new weights, over their old keys and values or over new ones.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
import uvicorn
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from longrein import config
from longrein.trainer.torch.guide import Guide, GuideError, Guides
from longrein.trainer.torch.policy import Policy, refresh, sampling_model
from longrein.trainer.torch.sampler import Sample, Sampler, Sampling
from longrein.trainer.torch.threads import Threads

if TYPE_CHECKING:
    from longrein.client import Client

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Longest time that sampled tokens of a stream wait to be sent together.
FLUSH_SECONDS = 0.05
#: Below it, scores divided by it overflow float32.
LOWEST_TEMPERATURE = 1e-3
MOST_TOP_LOGPROBS = 100


class SamplingParams(Struct, forbid_unknown_fields=True):
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: list[int] = []
    seed: int = 0
    top_logprobs: int = 0
    """How many of the most probable tokens are told beside each sampled one."""
    guide: str | None = None
    """A Lark grammar in llguidance's form over the whole reply without its stop token."""


class GenerateRequest(Struct, forbid_unknown_fields=True):
    """The body of POST /inference/v1/generate."""

    request_id: str
    token_ids: list[int]
    sampling_params: SamplingParams
    stream: bool = False


class AbortRequest(Struct, forbid_unknown_fields=True):
    request_id: str


@dataclass
class Waiter:
    """A request that is being answered: the loop's side of a `Sample`."""

    sample: Sample
    stream: bool
    news: asyncio.Event = field(default_factory=asyncio.Event)
    sent: int = 0
    flushed_at: float = 0.0
    failure: str | None = None


class BadRequest(Exception):
    """A request that cannot be sampled; the message names the field."""


class EngineServer:
    """Serves a policy. Everything but computing happens in the event loop that called `start`.

    `computer` is the one thread in which this process computes; best the one that loaded the policy. `stop` ends it. With
    `recompute`, sequences that were frozen while weights changed compute their keys and values anew.
    """

    protocol: Literal["tokens"] = "tokens"

    def __init__(
        self,
        policy: Policy,
        engine: config.Engine,
        *,
        sample_dtype: str = "same",
        recompute: bool = False,
        computer: ThreadPoolExecutor | None = None,
    ) -> None:
        self.policy = policy
        self._computer = computer or ThreadPoolExecutor(max_workers=1, thread_name_prefix="longrein-compute")
        self._model = sampling_model(policy, sample_dtype)
        self._recompute = recompute
        self._sampler = Sampler(self._model, max_batch=engine.max_batch, cache_tokens=engine.cache_tokens)
        self._guides = Guides(policy.folder, policy.vocab_size)
        # A number that the run file names is kept.
        adapts = engine.threads == 0 and policy.device.type == "cpu"
        self._threads = Threads(torch.get_num_threads()) if adapts else None
        self._waiters: dict[str, Waiter] = {}
        self._inbox: list[Sample] = []
        self._by_sample: dict[int, Waiter] = {}
        self._lock = threading.Lock()
        self._holds = 0
        self._stepping = False
        self._stopping = False
        self._busy_seconds = 0.0
        self.url = ""
        """Where it listens, once started."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._stands: asyncio.Event | None = None

    # For the trainer

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen and compute; the address."""
        self._loop = asyncio.get_running_loop()
        self._stands = asyncio.Event()
        # Named as TCP, asyncio sends small answers at once (TCP_NODELAY); create_server does not name the protocol.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        app = Starlette(
            routes=[
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/abort", self._abort, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/info", self._info, methods=["GET"]),
            ]
        )
        self._server = _QuietServer(
            uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self.url = f"http://{host}:{listener.getsockname()[1]}"
        return self.url

    async def stop(self) -> None:
        """End all requests and the computing thread."""
        with self._lock:
            self._stopping = True
        for waiter in list(self._waiters.values()):
            waiter.failure = "the engine is stopping"
            waiter.news.set()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        await asyncio.to_thread(self._computer.shutdown)

    async def hold(self) -> None:
        """Freeze at the next token boundary; returns when nothing is sampled any more."""
        assert self._stands is not None, "start comes first"
        with self._lock:
            self._holds += 1
        while True:
            with self._lock:
                if not self._stepping:
                    return
                self._stands.clear()
            await self._stands.wait()

    def release(self) -> None:
        """Go on, once every hold is released."""
        with self._lock:
            if self._holds == 0:
                raise RuntimeError("release without hold")
            self._holds -= 1
            self._go()

    async def compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work(*arguments)` in the computing thread. The engine has to be held."""
        if not self._holds:
            raise RuntimeError("compute needs hold first: weights may not change under a running step")

        def alone() -> T:
            if self._threads is not None:
                self._threads.restore()
            return work(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._computer, alone)

    async def refresh(self, version: int) -> None:
        """Take the learner's weights as policy version `version`. The engine has to be held."""
        await self.compute(refresh, self._model, self.policy)
        self._sampler.changed(version, recompute=self._recompute)

    @asynccontextmanager
    async def exchanging(self, version: int, client: Client, name: str) -> AsyncIterator[list[str]]:
        """Take the learner's weights as policy version `version`; the address. The engine has to be held."""
        await self.refresh(version)
        yield [self.url]

    def stats(self) -> dict[str, float]:
        """Counts since the start: tokens decoded, computed and reused of prompts, seconds busy, requests in flight."""
        stats = self._sampler.stats
        return {
            "decoded_tokens": stats.decoded_tokens,
            "decode_steps": stats.decode_steps,
            "prefilled_tokens": stats.prefilled_tokens,
            "reused_tokens": stats.reused_tokens,
            "busy_seconds": self._busy_seconds,
            "requests": len(self._waiters),
        }

    # The computing thread

    def _go(self) -> None:
        """Step in the computing thread if there is anything to do. Called with the lock held."""
        if not self._stepping and not self._stopping and not self._holds and self._has_work():
            self._stepping = True
            self._computer.submit(self._steps)

    def _steps(self) -> None:
        """Step until nothing is left to do or somebody holds."""
        while True:
            with self._lock:
                if self._stopping or self._holds or not self._has_work():
                    self._stepping = False
                    assert self._loop is not None
                    assert self._stands is not None
                    self._loop.call_soon_threadsafe(self._stands.set)
                    return
                arrived, self._inbox = self._inbox, []
            for sample in arrived:
                self._sampler.add(sample)
            if self._threads is not None:
                self._threads.adapt()
            began = time.perf_counter()
            try:
                stepped = self._sampler.step()
            except Exception as error:  # a step that fails may not hang those who wait
                log.exception("a step of the engine failed")
                stepped = [*self._sampler.waiting, *self._sampler.running]
                self._sampler = self._sampler.renewed()
                self._tell(stepped, f"{type(error).__name__}: {error}")
                continue
            self._busy_seconds += time.perf_counter() - began
            self._tell(stepped, None)

    def _has_work(self) -> bool:
        return bool(self._inbox or self._sampler.waiting or self._sampler.running)

    def _tell(self, stepped: list[Sample], failure: str | None) -> None:
        """Wake those who want to know: streams now and then, all others at their end."""
        now = time.monotonic()
        awake: list[Waiter] = []
        for sample in stepped:
            waiter = self._by_sample.get(id(sample))
            if waiter is None:
                continue
            waiter.failure = failure or sample.failure
            ended = sample.finish_reason is not None or failure is not None
            if ended or (waiter.stream and now - waiter.flushed_at >= FLUSH_SECONDS):
                waiter.flushed_at = now
                awake.append(waiter)
        if awake:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_wake, awake)

    # The routes

    async def _generate(self, request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=GenerateRequest)
            sample = self._sample(asked, await self._guide(asked.sampling_params))
        except msgspec.ValidationError as error:
            return _error(400, str(error))
        except msgspec.DecodeError as error:
            return _error(400, f"not valid JSON: {error}")
        except BadRequest as error:
            return _error(400, str(error))
        waiter = Waiter(sample, asked.stream)
        self._waiters[asked.request_id] = waiter
        self._by_sample[id(sample)] = waiter
        with self._lock:
            self._inbox.append(sample)
            self._go()
        if asked.stream:
            return StreamingResponse(self._stream(asked.request_id, waiter), media_type="text/event-stream")
        return await self._whole(request, asked.request_id, waiter)

    async def _guide(self, options: SamplingParams) -> Guide | None:
        if options.guide is None:
            return None
        try:
            # Compiling takes milliseconds, or a second for the largest schemas.
            return await asyncio.to_thread(self._guides.begin, options.guide, frozenset(options.stop_token_ids))
        except GuideError as error:
            raise BadRequest(f"guide: {error}") from None

    def _sample(self, asked: GenerateRequest, guide: Guide | None) -> Sample:
        options, count = asked.sampling_params, len(asked.token_ids)
        if asked.request_id in self._waiters:
            raise BadRequest(f"request_id: {asked.request_id} is being answered already")
        if not count:
            raise BadRequest("token_ids: the prompt is empty")
        if not all(0 <= id < self.policy.vocab_size for id in asked.token_ids):
            raise BadRequest(f"token_ids: expected ids from 0 to {self.policy.vocab_size - 1}")
        if options.max_tokens < 1 or count + options.max_tokens > self.policy.context:
            raise BadRequest(
                f"max_tokens: {count} prompt tokens and {options.max_tokens} more do not fit into the context of "
                f"{self.policy.context} tokens"
            )
        if options.temperature and not LOWEST_TEMPERATURE <= options.temperature < float("inf"):
            raise BadRequest(f"temperature: expected 0 (the most probable token) or at least {LOWEST_TEMPERATURE}")
        if not 0 < options.top_p <= 1:
            raise BadRequest("top_p: expected more than 0 and at most 1")
        if options.top_k < 0:
            raise BadRequest("top_k: expected 0 (all tokens) or more")
        if options.seed < 0:
            raise BadRequest("seed: expected 0 or more")
        if not 0 <= options.top_logprobs <= MOST_TOP_LOGPROBS:
            raise BadRequest(f"top_logprobs: expected 0 to {MOST_TOP_LOGPROBS}")
        return Sample(
            np.asarray(asked.token_ids, np.int32),
            Sampling(
                options.max_tokens,
                options.temperature,
                options.top_p,
                options.top_k,
                frozenset(options.stop_token_ids),
                options.seed,
                options.top_logprobs,
            ),
            guide,
        )

    async def _whole(self, request: Request, request_id: str, waiter: Waiter) -> Response:
        gone = asyncio.ensure_future(_disconnected(request))
        news = asyncio.ensure_future(waiter.news.wait())
        try:
            await asyncio.wait({gone, news}, return_when=asyncio.FIRST_COMPLETED)
            if waiter.failure is not None:
                return _error(500, waiter.failure)
            if not news.done():
                return Response(status_code=499)
            return _json(_news(waiter))
        finally:
            gone.cancel()
            news.cancel()
            self._forget(request_id, waiter)

    async def _stream(self, request_id: str, waiter: Waiter) -> AsyncIterator[bytes]:
        try:
            while True:
                await waiter.news.wait()
                waiter.news.clear()
                if waiter.failure is not None:
                    yield b"data: " + msgspec.json.encode({"error": {"message": waiter.failure}}) + b"\n\n"
                    return
                ended = waiter.sample.finish_reason is not None
                yield b"data: " + msgspec.json.encode(_news(waiter)) + b"\n\n"
                if ended:
                    yield b"data: [DONE]\n\n"
                    return
        finally:
            self._forget(request_id, waiter)

    def _forget(self, request_id: str, waiter: Waiter) -> None:
        """The answer has left or its client has: what still runs for it ends at the next step."""
        self._waiters.pop(request_id, None)
        self._by_sample.pop(id(waiter.sample), None)
        if waiter.sample.finish_reason is None:
            waiter.sample.aborted = True

    async def _abort(self, request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=AbortRequest)
        except msgspec.DecodeError as error:
            return _error(400, str(error))
        waiter = self._waiters.get(asked.request_id)
        if waiter is None:
            return _error(404, f"request_id: {asked.request_id} is not being answered")
        waiter.sample.aborted = True
        return _json({"status": "ok"})

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def _info(self, request: Request) -> Response:
        return _json(
            {
                "model": str(self.policy.folder),
                "version": self._sampler.version,
                "context": self.policy.context,
                "vocab_size": self.policy.vocab_size,
            }
        )


class _QuietServer(uvicorn.Server):
    """uvicorn without signal handlers: the process that owns the weights has its own."""

    def install_signal_handlers(self) -> None:
        pass

    def capture_signals(self) -> Any:
        import contextlib

        return contextlib.nullcontext()


def _wake(waiters: list[Waiter]) -> None:
    for waiter in waiters:
        waiter.news.set()


def _news(waiter: Waiter) -> dict[str, Any]:
    """What has been sampled since the last time."""
    sample, start = waiter.sample, waiter.sent
    finish, end = sample.finish_reason, len(sample.versions)  # versions are appended last
    waiter.sent = end
    versions: list[list[int]] = []
    for version in sample.versions[start:end]:
        if versions and versions[-1][0] == version:
            versions[-1][1] += 1
        else:
            versions.append([version, 1])
    return {
        "token_ids": sample.sampled[start:end],
        "logprobs": sample.logprobs[start:end],
        "versions": versions,
        "finish_reason": finish,
        "top_logprobs": sample.top_logprobs[start:end] if sample.sampling.top_logprobs else None,
    }


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(status: int, message: str) -> Response:
    return _json({"error": {"message": message}}, status)
