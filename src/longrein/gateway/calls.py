"""One call, from request to committed answer.

    parse → render → find the parent → splice or fork → admit → sample → read the reply → commit → answer

A request that cannot be served is refused before any header leaves. A stream's headers leave at once after that, with
keep-alive comments while it waits. The call is committed before the byte that ends its answer leaves; a client that
goes away earlier leaves an abandoned call, whose tokens are counted and never trained.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from longrein.gateway.conversation import History, Plan, Recorded, plan_prompt, plan_text, recall
from longrein.gateway.dialects import (
    Answer,
    Choice,
    Dialect,
    DialectError,
    Opened,
    PromptTooLong,
    Request,
    Writer,
    chat,
    completions,
    responses,
)
from longrein.gateway.dialects import (
    messages as anthropic_messages,
)
from longrein.gateway.engines import Chunk, Engine, EngineError, Generate
from longrein.gateway.engines.scripted import ScriptedEngine
from longrein.gateway.engines.teacher import remote_teacher
from longrein.gateway.engines.tokens import TokensEngine
from longrein.gateway.grammars import guide_of
from longrein.gateway.loading import load_text_model
from longrein.gateway.logprobs import Token, tokens_of, tokens_within
from longrein.gateway.messages import Message
from longrein.gateway.parsing import (
    Delta,
    HermesParser,
    ParserOptions,
    PlainParser,
    StopStrings,
    make_parser,
    message_of,
)
from longrein.gateway.tokens import ControlTextError, Detokenizer, Rendered, TemplateError
from longrein.records import Call, Mode, Rollout, now

if TYPE_CHECKING:
    from longrein.gateway.serve import Gateway

Json = dict[str, Any]

log = logging.getLogger("longrein.gateway")

DIALECTS: dict[str, Dialect] = {
    module.name: module  # type: ignore[misc]
    for module in (chat, completions, responses, anthropic_messages)
}

#: Seconds without an event after which a stream gets a keep-alive comment.
KEEP_ALIVE_SECONDS = 10.0
#: Attempts whose history is kept in memory; others are read back from the store when they call again.
ATTEMPTS_IN_MEMORY = 4096


@dataclass
class Attempt:
    """What the gateway keeps in memory of an attempt that calls."""

    history: History
    clock: float
    """The attempt's start: what a template takes for now."""


@dataclass
class Running:
    """A call that is being sampled: everything its record and its answer need."""

    recorded: Recorded
    plan: Plan
    prompt_ids: list[int]
    index: int
    seed: int
    started_at: float
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    """What was sampled as the client sees it; filled when it asks for log-probabilities."""
    told: int = 0
    """Of `tokens`, those that stand in `deltas`."""
    text: str = ""
    finish_reason: str | None = None
    stopped: str | None = None
    """The stop string that ended it."""
    first_token_at: float | None = None
    committed: bool = False


@dataclass
class Job:
    """A request that was admitted: its calls (one for each of n), and where it came from."""

    dialect: Dialect
    request: Request
    rollout: Rollout
    attempt_id: str
    mode: Mode
    engine: Engine
    attempt: Attempt
    messages: Sequence[Message]
    running: list[Running]
    max_tokens: int
    temperature: float
    prompt_tail: str
    guide: str | None
    id: str
    created: int


class TokenCalls:
    """Answers model requests token by token, through the model's own tokenizer and template."""

    def __init__(self, gateway: Gateway):
        config = gateway.config
        self.gateway = gateway
        self.model = load_text_model(
            config.model.path,
            name=config.model.name,
            chat_template=config.model.chat_template,
            context=config.model.context,
            control_text=config.gateway.control_text,
            system_messages=config.model.system_messages,
        )
        self.parser = make_parser(config.model.parser, self.model, config.model.path)
        self.policy = self._policy_engine()
        self.teacher = self._teacher_engine()
        self.attempts: OrderedDict[tuple[str, str, float], Attempt] = OrderedDict()
        if not self.model.exact:
            log.warning(
                "the tokenizer of %s does not return the text it was given: prompts are faithful after its own normalisation",
                config.model.path,
            )
        if self.model.turn_system_into_user:
            log.info("system messages are merged into the user turn that follows: the template has no system role")

    def _policy_engine(self) -> Engine:
        from longrein.functions import load_function

        config = self.gateway.config
        if config.engine.kind == "scripted":
            script = load_function(config.engine.script, config.run.folder, "engine.script")
            return ScriptedEngine(script, self.model)

        def endpoints():
            return [m for m in self.gateway.store.models() if m.model == config.model.name and m.protocol != "openai"]

        return TokensEngine(self.gateway.http, endpoints)

    def _teacher_engine(self) -> Engine | None:
        from longrein.functions import load_function

        warmup, run = self.gateway.config.warmup, self.gateway.config.run
        if warmup.teacher:
            script = load_function(warmup.teacher, run.folder, "warmup.teacher")
            return ScriptedEngine(script, self.model, name="teacher", certain=False)
        if warmup.teacher_url:
            return remote_teacher(self.gateway.http, warmup, self.model)
        return None

    # The way of a request

    async def answer(self, http: HttpRequest, dialect: str, rollout: Rollout, attempt_id: str, mode: Mode) -> Response:
        """Answer one model request of an attempt."""
        try:
            job = self._admit(await _body(http), DIALECTS[dialect], rollout, attempt_id, mode)
            if job.request.stream:
                await self.gateway.gate.refuse_if_closed()
                return StreamingResponse(
                    self._stream(job),
                    media_type="text/event-stream",
                    headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
                )
            return await self._plain(http, job)
        except DialectError as error:
            body = DIALECTS[dialect].error_body(error)
            return Response(
                msgspec.json.encode(body), error.status, headers=error.headers, media_type="application/json"
            )

    async def count(self, http: HttpRequest, dialect: str, rollout: Rollout, attempt_id: str) -> int:
        """Tokens that a request's prompt would have; nothing is recorded. Raises `DialectError`."""
        request = DIALECTS[dialect].parse(await _body(http))
        _, plan, _ = self._prompt(request, self._attempt(rollout, attempt_id))
        return plan.length

    def _admit(self, body: Json, dialect: Dialect, rollout: Rollout, attempt_id: str, mode: Mode) -> Job:
        """Everything that can refuse a request; nothing here waits."""
        config = self.gateway.config
        request = dialect.parse(body)
        request = replace(request, model=request.model or config.model.name)
        if mode == "train":
            _refuse_other_policies(request)
        engine = self._engine(rollout)
        attempt = self._attempt(rollout, attempt_id)
        if request.previous is not None:
            before = _conversation_of(request.previous, dialect, rollout, attempt_id, attempt.history)
            request = responses.continued(request, before)
        messages, plan, tail = self._prompt(request, attempt)
        _refuse_what_is_lacking(request, engine)
        guide = guide_of(request, self.model, tail, self._without_guides(engine))
        max_tokens = self._room(request, plan.length)
        running: list[Running] = []
        for index in range(request.n):
            recorded = attempt.history.admit(plan, messages, request.tools)
            prefix = plan.prefix.branch()[: plan.prefix_length] if plan.prefix is not None else []
            seed = _seed(config.run.seed, rollout.rollout_id, attempt_id, recorded.number)
            running.append(Running(recorded, plan, [*prefix, *plan.new_ids], index, seed, now()))
        return Job(
            dialect=dialect,
            request=request,
            rollout=rollout,
            attempt_id=attempt_id,
            mode=mode,
            engine=engine,
            attempt=attempt,
            messages=messages,
            running=running,
            max_tokens=max_tokens,
            temperature=config.gateway.train_temperature if mode == "train" else config.gateway.val_temperature,
            prompt_tail=tail,
            guide=guide,
            id=dialect.id_prefix + _answer_id(rollout, attempt_id, running[0].recorded.number),
            created=int(now()),
        )

    def _engine(self, rollout: Rollout) -> Engine:
        if rollout.config.engine == "policy":
            return self.policy
        if self.teacher is None:
            raise DialectError(400, "this rollout asks for the teacher, but the run file names none (warmup.teacher)")
        return self.teacher

    def _without_guides(self, engine: Engine) -> str | None:
        """Why no reply can be guided here, in words for an error; None when it can."""
        if self.parser is not HermesParser:
            return (
                f"model.parser = {self.gateway.config.model.parser!r} reads another syntax than guides are written in"
            )
        return engine.lacks("guide")

    def _attempt(self, rollout: Rollout, attempt_id: str) -> Attempt:
        # A rollout that was deleted and posted again under its id is another one.
        key = (rollout.rollout_id, attempt_id, rollout.status.created_at)
        attempt = self.attempts.get(key)
        if attempt is None:
            started = [
                a.started_at for a in self.gateway.store.attempts(rollout.rollout_id) if a.attempt_id == attempt_id
            ]
            attempt = Attempt(History(), started[0] if started else now())
            recall(attempt.history, self.model, self.gateway.store.calls(rollout.rollout_id, attempt_id))
            self.attempts[key] = attempt
            while len(self.attempts) > ATTEMPTS_IN_MEMORY:
                self.attempts.popitem(last=False)
        self.attempts.move_to_end(key)
        return attempt

    def _prompt(self, request: Request, attempt: Attempt) -> tuple[Sequence[Message], Plan, str]:
        """(messages as recorded, how the prompt is put together, the end of its text)"""
        if request.prompt is not None:
            return (*plan_text(request.prompt, attempt.history, self.model), "")
        tools = list(request.tools)

        def render(messages: Sequence[Message], generation_prompt: bool) -> Rendered:
            return self.model.render(
                [m.for_template() for m in messages], tools, generation_prompt=generation_prompt, clock=attempt.clock
            )

        try:
            plan = plan_prompt(
                attempt.history, self.model, request.messages, tools, render, self.gateway.config.gateway.history
            )
        except TemplateError as error:
            raise DialectError(
                400, f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from None
        except ControlTextError as error:
            raise DialectError(400, f"messages: {error}", param="messages") from None
        return request.messages, plan, plan.new_text[-64:] or self.model.generation_prompt

    def _room(self, request: Request, prompt_length: int) -> int:
        """How many tokens the reply may have."""
        wanted = request.sampling.max_tokens or self.gateway.config.engine.max_reply_tokens
        if self.model.context is None:
            return wanted
        room = self.model.context - prompt_length
        if room < 1:
            param = "messages" if request.prompt is None else "prompt"
            raise PromptTooLong(prompt_length, self.model.context, param)
        return min(wanted, room)

    # Sampling

    async def _sample(self, job: Job, call: Running) -> AsyncIterator[Delta]:
        """Sample one call's reply and read it: yields what a client may see, as it comes."""
        request = job.request
        detokenizer = Detokenizer(self.model)
        stops = StopStrings(request.sampling.stop)
        options = ParserOptions(
            prompt_tail=job.prompt_tail,
            prompt_ids=call.prompt_ids,
            tools=request.tools if request.use_tools else (),
            call_id=lambda i: _call_id(job, call.recorded.number, i, self.model.short_call_ids),
        )
        parser = self.parser(options) if request.prompt is None else PlainParser()
        generate = Generate(
            request_id=f"{job.rollout.rollout_id}/{job.attempt_id}/{call.recorded.number}",
            rollout_id=job.rollout.rollout_id,
            token_ids=call.prompt_ids,
            max_tokens=job.max_tokens,
            temperature=job.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            stop_token_ids=sorted(self.model.stop_ids),
            seed=call.seed,
            stream=request.stream or bool(request.sampling.stop),
            guide=job.guide,
            top_logprobs=request.top_logprobs,
            messages=[m.for_template() for m in job.messages],
            tools=list(request.tools),
        )
        stream = job.engine.generate(generate)
        try:
            async for chunk in stream:
                _collect(call, chunk)
                for ids in self._pieces(job, call, chunk):
                    text = stops.push(detokenizer.push(_without_stop(ids, self.model.stop_ids)))
                    for delta in self._read(call, parser.push(ids, text)):
                        yield delta
                if stops.stopped is not None:
                    call.finish_reason, call.stopped = "stop", stops.stopped
                    break
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        text = stops.push(detokenizer.finish(), final=True)
        for delta in self._read(call, [*parser.push([], text), *parser.finish()]):
            yield delta

    def _pieces(self, job: Job, call: Running, chunk: Chunk) -> Iterator[Sequence[int]]:
        """The ids of a chunk as they are read: one by one where a client wants to know which piece each is part of."""
        if not job.request.logprobs or chunk.logprobs is None:
            yield chunk.token_ids
            return
        tokens = tokens_of(self.model, chunk.token_ids, chunk.logprobs, chunk.top_logprobs)
        for id, token in zip(chunk.token_ids, tokens, strict=True):
            call.tokens.append(token)
            yield [id]

    def _read(self, call: Running, deltas: Sequence[Delta]) -> Sequence[Delta]:
        untold = tuple(call.tokens[call.told :])
        if deltas and untold:
            deltas = [replace(deltas[0], tokens=untold), *deltas[1:]]
            call.told = len(call.tokens)
        call.deltas.extend(deltas)
        return deltas

    def _choice(self, job: Job, call: Running) -> Choice:
        message = message_of(call.deltas)
        finish = call.finish_reason or "stop"
        if message.tool_calls and finish == "stop":
            finish = "tool_calls"
        return Choice(
            call.index,
            message,
            message.content,
            finish,
            call.prompt_ids,
            call.sampled,
            call.logprobs,
            call.tokens,
            [token for delta in call.deltas if delta.content for token in tokens_within(delta.tokens, delta.content)],
            call.stopped,
        )

    async def _commit(
        self, job: Job, call: Running, status: str = "ok", error: Json | None = None, http_status: int = 200
    ) -> Choice:
        """Put the call into the store, and into the history that later calls continue."""
        choice = self._choice(job, call)
        recorded = call.recorded
        parent_tools = recorded.parent.tools if recorded.parent is not None else []
        await self.gateway.store.add_call(
            Call(
                rollout_id=job.rollout.rollout_id,
                attempt_id=job.attempt_id,
                number=recorded.number,
                dialect=job.dialect.name,  # type: ignore[arg-type]
                mode=job.mode,
                model=self.model.name,
                engine=job.engine.name,
                parent=recorded.parent.number if recorded.parent is not None else None,
                fork=call.plan.fork,
                prefix=recorded.prefix.number if recorded.prefix is not None else None,
                prefix_length=recorded.prefix_length,
                prompt_delta=recorded.prompt_ids,
                prompt_length=recorded.prompt_length,
                sampled=call.sampled,
                logprobs=call.logprobs,
                versions=call.versions,
                messages_keep=recorded.messages_keep,
                messages=[m.to_json() for m in recorded.messages],
                tools=None if list(parent_tools) == list(recorded.tools) else list(recorded.tools),
                reply=choice.message.to_json() if status == "ok" else {},
                sampling=_sampling_record(job, call),
                status=status,  # type: ignore[arg-type]
                finish_reason=choice.finish_reason if status == "ok" else None,
                http_status=http_status,
                error=error,
                started_at=call.started_at,
                first_token_at=call.first_token_at,
                finished_at=now(),
            )
        )
        call.committed = True
        job.attempt.history.add(recorded, self.model, call.sampled, choice.message if status == "ok" else None)
        return choice

    async def _fail(self, job: Job, status: str, error: Json | None, http_status: int) -> None:
        """Record the calls of a request that did not end well; those already committed stay."""
        for call in job.running:
            if not call.committed:
                await self._commit(job, call, status, error, http_status)

    def _answer(self, job: Job, choices: Sequence[Choice]) -> Answer:
        return Answer(job.id, job.created, job.request.model, choices, job.running[0].plan.prefix_length)

    # Answering

    async def _plain(self, http: HttpRequest, job: Job) -> Response:
        work = asyncio.ensure_future(self._run_whole(job))
        gone = asyncio.ensure_future(_disconnected(http))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await _cancel(work)
                await self._fail(job, "abandoned", {"message": "the client went away"}, 499)
                return Response(status_code=499)
            choices = work.result()
        except EngineError as error:
            await self._fail(job, "error", {"message": str(error)}, error.status)
            raise _of_engine(error, job) from None
        except asyncio.CancelledError:
            await _cancel(work)
            await asyncio.shield(self._fail(job, "abandoned", {"message": "the gateway is shutting down"}, 499))
            raise
        finally:
            gone.cancel()
        body = job.dialect.plain(job.request, self._answer(job, choices))
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def _run_whole(self, job: Job) -> list[Choice]:
        async def one(call: Running) -> Choice:
            async for _ in self._sample(job, call):
                pass
            return await self._commit(job, call)

        async with self.gateway.gate.enter():
            if len(job.running) == 1:
                return [await one(job.running[0])]
            results = await asyncio.gather(*(one(call) for call in job.running), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, Choice)]

    async def _stream(self, job: Job) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        plan = job.running[0].plan
        writer = job.dialect.writer(job.request, Opened(job.id, job.created, plan.length, plan.prefix_length))
        work = asyncio.ensure_future(self._run_streamed(job, writer, queue))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), KEEP_ALIVE_SECONDS)
                except TimeoutError:
                    yield writer.keep_alive()
                    continue
                if event is None:
                    break
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            await asyncio.shield(asyncio.ensure_future(self._abandon(job, work)))
            raise
        try:
            choices = work.result()
        except EngineError as error:
            await self._fail(job, "error", {"message": str(error)}, error.status)
            for event in writer.error(_of_engine(error, job)):
                yield event
            return
        except DialectError as error:
            await self._fail(job, "error", {"message": error.message}, error.status)
            for event in writer.error(error):
                yield event
            return
        for event in writer.closing(self._answer(job, choices)):
            yield event

    async def _abandon(self, job: Job, work: asyncio.Future[Any]) -> None:
        await _cancel(work)
        await self._fail(job, "abandoned", {"message": "the client went away"}, 499)

    async def _run_streamed(self, job: Job, writer: Writer, queue: asyncio.Queue[bytes | None]) -> list[Choice]:
        async def one(call: Running) -> Choice:
            for event in writer.opening(call.index):
                queue.put_nowait(event)
            async for delta in self._sample(job, call):
                for event in writer.delta(call.index, delta):
                    queue.put_nowait(event)
            return await self._commit(job, call)

        async with self.gateway.gate.enter():
            results = await asyncio.gather(*(one(call) for call in job.running), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, Choice)]


# Pieces


async def _body(http: HttpRequest) -> Json:
    data = await http.body()
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise DialectError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise DialectError(400, "the body has to be a JSON object")
    return body


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _cancel(work: asyncio.Future[Any]) -> None:
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


def _of_engine(error: EngineError, job: Job) -> DialectError:
    """What the client is told of an engine that failed, or that refused what the request asks for."""
    if error.status == 400 and job.request.form is not None:
        return DialectError(400, f"{job.request.form.said}: {error}", param=job.request.form.field)
    return DialectError(error.status, str(error), type="api_error", code="engine_error")


def _refuse_what_is_lacking(request: Request, engine: Engine) -> None:
    """Log-probabilities that the engine does not give are refused by name."""
    asked = {"logprobs": request.logprobs, "top_logprobs": request.top_logprobs > 0}
    for name in ("logprobs", "top_logprobs"):
        why = engine.lacks(name) if asked[name] else None
        if why is not None:
            raise DialectError(400, f"{name}: {why}", param=name, code="unsupported_parameter")


def _refuse_other_policies(request: Request) -> None:
    """Mode train: what would make the sampled distribution another than the policy's own is refused by name."""
    if request.sampling.top_p != 1.0:
        raise DialectError(
            400, "top_p: training samples from the policy's whole distribution; leave it out or send 1", param="top_p"
        )
    if request.sampling.top_k:
        raise DialectError(
            400, "top_k: training samples from the policy's whole distribution; leave it out", param="top_k"
        )


def _seed(run_seed: int, rollout_id: str, attempt_id: str, number: int) -> int:
    """The call's own seed (63 bits): the same run samples the same tokens, whatever else runs beside it."""
    text = f"{run_seed}\0{rollout_id}\0{attempt_id}\0{number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _call_id(job: Job, number: int, index: int, short: bool) -> str:
    """A tool-call id that no other call has, in the form the template accepts."""
    digest = hashlib.sha256(f"{job.rollout.rollout_id}\0{job.attempt_id}\0{number}\0{index}".encode()).hexdigest()
    return digest[:9] if short else f"call_{digest[:24]}"


def _answer_id(rollout: Rollout, attempt_id: str, number: int) -> str:
    """What an answer's id ends with: the same for the same call, in any process."""
    text = f"{rollout.rollout_id}\0{attempt_id}\0{number}\0{rollout.status.created_at}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _collect(call: Running, chunk: Chunk) -> None:
    if chunk.token_ids:
        call.first_token_at = call.first_token_at or now()
        call.sampled.extend(chunk.token_ids)
        if chunk.logprobs is None or call.logprobs is None:
            call.logprobs = None
        else:
            call.logprobs.extend(chunk.logprobs)
        for version, count in chunk.versions:
            if call.versions and call.versions[-1][0] == version:
                call.versions[-1] = (version, call.versions[-1][1] + count)
            else:
                call.versions.append((version, count))
    if chunk.finish_reason is not None:
        call.finish_reason = chunk.finish_reason


def _without_stop(ids: Sequence[int], stop_ids: frozenset[int]) -> Sequence[int]:
    return ids[:-1] if ids and ids[-1] in stop_ids else ids


def _sampling_record(job: Job, call: Running) -> Json:
    record: Json = {"temperature": job.temperature, "max_tokens": job.max_tokens, "seed": call.seed}
    if job.request.sampling.stop:
        record["stop"] = list(job.request.sampling.stop)
    if job.request.sampling.top_p != 1.0:
        record["top_p"] = job.request.sampling.top_p
    if job.request.sampling.top_k:
        record["top_k"] = job.request.sampling.top_k
    if job.request.form is not None:
        record["guide"] = job.request.form.said
    return record


def _conversation_of(id: str, dialect: Dialect, rollout: Rollout, attempt_id: str, history: History) -> list[Message]:
    """The conversation of an earlier answer of this attempt, its reply included."""
    for call in history.calls:
        if id == dialect.id_prefix + _answer_id(rollout, attempt_id, call.number) and call.reply is not None:
            return call.conversation()
    raise DialectError(
        400,
        f"previous_response_id: {id!r} is no finished answer of this attempt",
        param="previous_response_id",
        code="previous_response_not_found",
    )
