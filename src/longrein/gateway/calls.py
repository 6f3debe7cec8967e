"""One call, from request to committed answer.

    parse → render → find the parent → splice or fork → admit → sample → read the reply → commit → answer

A request that cannot be served is refused before any header leaves; a stream's headers leave at once after that. The
call is committed before the byte that ends its answer leaves. When a client goes away earlier its call goes on for
`gateway.retry_grace`, so that a retry can take it over (`jobs.py`); a call whose answer nobody was given is recorded as
abandoned: its tokens are counted and never trained.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from longrein.gateway import delivery
from longrein.gateway.bounds import BadJson, lane, read_json
from longrein.gateway.budget import budget_of
from longrein.gateway.conversation import History, Plan, plan_prompt, plan_text, recall
from longrein.gateway.delivery import KEEP_ALIVE_SECONDS
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
from longrein.gateway.engines import Engine, EngineError
from longrein.gateway.engines.scripted import ScriptedEngine
from longrein.gateway.engines.simulated import SimulatedEngine
from longrein.gateway.engines.teacher import remote_teacher
from longrein.gateway.engines.tokens import TokensEngine
from longrein.gateway.grammars import guide_of
from longrein.gateway.jobs import Attempt, Job, Running
from longrein.gateway.kinds import kind_of
from longrein.gateway.loading import load_text_model
from longrein.gateway.messages import Message
from longrein.gateway.parsing import HermesParser, make_parser
from longrein.gateway.recording import call_record
from longrein.gateway.sampling import choice_of, sample
from longrein.gateway.tokens import ControlTextError, Rendered, TemplateError, tokens_beyond
from longrein.records import Mode, Rollout, now
from longrein.schema import StoreError
from longrein.store import Conflict, NotFound

if TYPE_CHECKING:
    from longrein.gateway.serve import Gateway

Json = dict[str, Any]

log = logging.getLogger("longrein.gateway")

DIALECTS: dict[str, Dialect] = {
    module.name: module  # type: ignore[misc]
    for module in (chat, completions, responses, anthropic_messages)
}

#: Why a call whose answer nobody was given is recorded as abandoned.
LEFT: Json = {"message": "the client went away before its answer was whole"}
#: Attempts whose history is kept in memory; others are read back from the store when they call again.
ATTEMPTS_IN_MEMORY = 4096


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request."""

    messages: Sequence[Message]
    """As they are recorded."""
    plan: Plan
    tail: str
    """The end of its text: a template may have opened the reasoning already."""


@dataclass(frozen=True)
class Planned:
    """A request that can be answered: everything about it that could take long, or refuse it for what it says."""

    request: Request
    engine: Engine
    prompts: Sequence[Prompt]
    guide: str | None


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
        self._tasks: set[asyncio.Task[None]] = set()
        """Kept from being collected while they run."""
        self._closing = asyncio.Event()
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
        if config.engine.kind == "simulated":
            return SimulatedEngine(config.engine.simulated, self.model)

        def endpoints():
            return [m for m in self.gateway.store.models() if m.model == config.model.name and m.protocol != "openai"]

        return TokensEngine(self.gateway.engine_http, endpoints)

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
            job = await self._job(http, DIALECTS[dialect], rollout, attempt_id, mode)
            if job.request.stream:
                return delivery.streamed(job.delivery)
            return await delivery.plain(http, job.delivery)
        except DialectError as error:
            body = DIALECTS[dialect].error_body(error)
            return Response(
                msgspec.json.encode(body), error.status, headers=error.headers, media_type="application/json"
            )

    async def count(self, http: HttpRequest, dialect: str, rollout: Rollout, attempt_id: str) -> int:
        """Tokens that a request's prompt would have; nothing is recorded. Raises `DialectError`."""
        async with lane(http.headers, self.gateway.workers, budget_of(http).spending.large) as way:
            body = await http.body()
            request = await way.run(lambda: DIALECTS[dialect].parse(_object(body)))
            attempt = self._attempt(rollout, attempt_id).as_it_stands()
            prompts = await way.run(lambda: self._prompts(request, attempt))
        return sum(prompt.plan.length for prompt in prompts)

    def end_attempt(self, rollout_id: str, attempt_id: str) -> None:
        """The attempt has ended: nobody comes back for what is still sampled."""
        for key in [key for key in self.attempts if key[1] == attempt_id and key[0] == rollout_id]:
            attempt = self.attempts[key]
            attempt.ended = True
            for job in list(attempt.jobs):
                if job.delivery.ended:
                    attempt.forget(job)
                self._give_up(job)
            self._let_go(attempt)

    def _let_go(self, attempt: Attempt) -> None:
        """Keep nothing of an attempt that has ended, once the last of its calls has."""
        if attempt.ended and not (attempt.jobs or attempt.planning):
            self.attempts.pop(attempt.key, None)

    async def close(self) -> None:
        """End what is being sampled; it is recorded as abandoned."""
        self._closing.set()
        jobs = [job for attempt in self.attempts.values() for job in attempt.jobs if job.work is not None]
        for job in jobs:
            self._cancel(job)
        await asyncio.gather(*(job.work for job in jobs if job.work is not None), *self._tasks, return_exceptions=True)

    async def _job(self, http: HttpRequest, dialect: Dialect, rollout: Rollout, attempt_id: str, mode: Mode) -> Job:
        """The job that answers a request: an earlier one that it is a retry of, or a new one."""
        async with lane(http.headers, self.gateway.workers, budget_of(http).spending.large) as way:
            body = await http.body()
            asked = await way.run(lambda: dialect.parse(_object(body)))
            attempt = self._attempt(rollout, attempt_id)
            again = http.headers.get("x-stainless-retry-count", "0") != "0"
            job = await self._taken_over(attempt, asked, dialect, mode, asks_again=again)
            if job is not None:
                return job
            calls = asked.n * len(asked.prompts or (None,))
            self.gateway.gate.refuse(calls)
            known = attempt.as_it_stands()
            attempt.planning += 1  # kept in memory meanwhile
            try:
                planned = await way.run(
                    lambda: self._plan(asked, dialect, rollout, known, mode), costly=asked.form is not None
                )
            finally:
                attempt.planning -= 1
        # While a thread planned, an equal request may have come first.
        job = await self._taken_over(attempt, asked, dialect, mode, asks_again=again)
        if job is not None:
            return job
        self.gateway.gate.refuse(calls)
        job = self._admit(http, asked, planned, dialect, rollout, attempt, mode)
        # Nothing has been waited for since the gate was asked: it has room for them.
        job.passages = self.gateway.gate.admit((rollout.rollout_id, attempt_id), len(job.running))
        job.delivery.join()
        attempt.jobs.append(job)
        job.delivery.on_left = lambda: self._left(job)
        job.work = asyncio.create_task(self._run(job))
        job.work.add_done_callback(lambda _: job.leave_gate())
        job.work.add_done_callback(lambda _: job.grant.end(sum(len(call.sampled) for call in job.running)))
        return job

    async def _taken_over(
        self, attempt: Attempt, asked: Request, dialect: Dialect, mode: Mode, *, asks_again: bool
    ) -> Job | None:
        """The job that a request is a retry of, with its client counted in."""
        job = attempt.taken_over(asked, dialect, mode, asks_again=asks_again)
        if job is None:
            return None
        job.delivery.join()
        if job.expiry is not None:
            job.expiry.cancel()
        if not job.counted:
            job.counted = True
            try:
                await self._settle(job)
            except BaseException:
                job.delivery.leave()
                raise
        return job

    def _plan(self, asked: Request, dialect: Dialect, rollout: Rollout, attempt: Attempt, mode: Mode) -> Planned:
        """How a request is answered, or why not. Changes nothing: it may run beside the event loop."""
        config = self.gateway.config
        self.gateway.access.name_model(rollout, asked.model)
        request = replace(asked, model=asked.model or config.model.name)
        if mode == "train":
            _refuse_other_policies(request)
        engine = self._engine(rollout)
        if request.previous is not None:
            before = _conversation_of(request.previous, dialect, rollout, attempt)
            request = responses.continued(request, before)
        _refuse_what_is_lacking(request, engine)
        prompts = self._prompts(request, attempt)
        for prompt in prompts:
            self._room(request, prompt.plan.length)
        guide = guide_of(request, self.model, prompts[0].tail, self._without_guides(engine))
        return Planned(request, engine, prompts, guide)

    def _admit(
        self,
        http: HttpRequest,
        asked: Request,
        planned: Planned,
        dialect: Dialect,
        rollout: Rollout,
        attempt: Attempt,
        mode: Mode,
    ) -> Job:
        """Take what the attempt's budget allows, and number the calls; nothing here waits."""
        config, request = self.gateway.config, planned.request
        wanted = [self._room(request, prompt.plan.length) for prompt in planned.prompts for _ in range(request.n)]
        grant = budget_of(http).take(wanted)
        running: list[Running] = []
        for prompt in planned.prompts:
            plan = prompt.plan
            kind = kind_of(http.headers, request, prompt.messages, plan.parent, attempt.history)
            prefix = plan.prefix.branch()[: plan.prefix_length] if plan.prefix is not None else []
            for _ in range(request.n):
                recorded = attempt.history.admit(plan, prompt.messages, request.tools, kind)
                running.append(
                    Running(
                        recorded=recorded,
                        messages=prompt.messages,
                        plan=plan,
                        prompt_ids=prefix + plan.new_ids,
                        prompt_tail=prompt.tail,
                        kind=kind,
                        index=len(running),
                        seed=_seed(config.run.seed, rollout.rollout_id, attempt.attempt_id, recorded.number),
                        max_tokens=grant.max_tokens[len(running)],
                        started_at=now(),
                    )
                )
        return Job(
            asked=asked,
            dialect=dialect,
            request=request,
            rollout=rollout,
            attempt=attempt,
            mode=mode,
            engine=planned.engine,
            running=running,
            grant=grant,
            temperature=config.gateway.train_temperature if mode == "train" else config.gateway.val_temperature,
            guide=planned.guide,
            id=dialect.id_prefix + _answer_id(rollout, attempt.attempt_id, running[0].recorded.number),
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
            attempt = Attempt(key, attempt_id, History(), started[0] if started else now())
            recall(attempt.history, self.model, self.gateway.store.calls(rollout.rollout_id, attempt_id))
            self.attempts[key] = attempt
            if len(self.attempts) > ATTEMPTS_IN_MEMORY:
                idle = (k for k, other in self.attempts.items() if not (other.jobs or other.planning or k == key))
                for old in list(itertools.islice(idle, len(self.attempts) - ATTEMPTS_IN_MEMORY)):
                    del self.attempts[old]
        self.attempts.move_to_end(key)
        return attempt

    def _prompts(self, request: Request, attempt: Attempt) -> list[Prompt]:
        """How each of the request's prompts is put together; only completions have more than one."""
        if request.prompts is not None:
            size = self.model.tokenizer.get_vocab_size()
            if any(max(prompt) >= size for prompt in request.prompts if not isinstance(prompt, str)):
                raise DialectError(400, f"prompt: expected token ids from 0 to {size - 1}", param="prompt")
            for prompt in request.prompts:
                if isinstance(prompt, str):
                    self._refuse_hopeless(prompt, "prompt")
            planned = [plan_text(prompt, attempt.history, self.model) for prompt in request.prompts]
            return [Prompt(messages, plan, "") for messages, plan in planned]
        tools = list(request.tools)

        def render(messages: Sequence[Message], generation_prompt: bool) -> Rendered:
            rendered = self.model.render(
                [m.for_template() for m in messages], tools, generation_prompt=generation_prompt, clock=attempt.clock
            )
            self._refuse_hopeless(rendered.text, "messages")
            return rendered

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
        return [Prompt(request.messages, plan, plan.new_text[-64:] or self.model.generation_prompt)]

    def _refuse_hopeless(self, text: str, param: str) -> None:
        """Refuse a text that is many times too long before all of it is encoded."""
        context = self.model.context
        beyond = tokens_beyond(self.model.tokenizer, text, context) if context is not None else None
        if context is not None and beyond is not None:
            raise PromptTooLong(beyond, context, param)

    def _room(self, request: Request, prompt_length: int) -> int:
        """How many tokens the reply may have."""
        wanted = request.sampling.max_tokens or self.gateway.config.engine.max_reply_tokens
        if self.model.context is None:
            return wanted
        room = self.model.context - prompt_length
        if room < 1:
            param = "messages" if request.prompts is None else "prompt"
            raise PromptTooLong(prompt_length, self.model.context, param)
        return min(wanted, room)

    # Running and recording

    async def _run(self, job: Job) -> None:
        """Sample, record, and write the answer, whoever listens."""
        opened = Opened(job.id, job.created, job.prompt_tokens, job.cached_tokens)
        writer = job.dialect.writer(job.request, opened) if job.request.stream else None
        sampling = asyncio.ensure_future(self._sample_all(job, writer))
        try:
            await self._keep_alive(job, writer, sampling)
            await self._succeed(job, writer, [choice_of(call) for call in job.running])
        except EngineError as error:
            await self._fail(job, writer, _of_engine(error, job))
        except DialectError as error:
            await self._fail(job, writer, error)
        except asyncio.CancelledError:
            await _cancel(sampling)
            await self._abandon(job)
        except NotFound as error:  # the rollout was deleted meanwhile
            await self._fail(job, writer, DialectError(404, str(error)))
        except StoreError as error:
            await self._fail(job, writer, DialectError(503, str(error), type="api_error", code="store"))
        except Exception as error:
            log.exception("a call of %s failed", job.rollout.rollout_id)
            await self._fail(job, writer, DialectError(500, f"{type(error).__name__}: {error}", type="api_error"))

    async def _sample_all(self, job: Job, writer: Writer | None) -> None:
        async def one(call: Running) -> None:
            async with job.passages[call.index]:
                for event in writer.opening(call.index) if writer is not None else ():
                    job.delivery.write(event)
                async for delta in sample(self.model, self.parser, job, call):
                    for event in writer.delta(call.index, delta) if writer is not None else ():
                        job.delivery.write(event)

        if len(job.running) == 1:
            await one(job.running[0])
            return
        results = await asyncio.gather(*(one(call) for call in job.running), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _keep_alive(self, job: Job, writer: Writer | None, sampling: asyncio.Future[None]) -> None:
        """Wait for the samples; a stream on which nothing comes gets an event now and then."""
        while not sampling.done():
            quiet = time.monotonic() - job.delivery.wrote_at
            if writer is not None and quiet >= KEEP_ALIVE_SECONDS:
                job.delivery.write(writer.keep_alive())
                quiet = 0.0
            await asyncio.wait({sampling}, timeout=KEEP_ALIVE_SECONDS - quiet if writer is not None else None)
        sampling.result()

    async def _succeed(self, job: Job, writer: Writer | None, choices: list[Choice]) -> None:
        """Record the calls, then end the answer."""
        job.choices = choices
        job.counted = job.delivery.listeners > 0
        await self._record(job, "ok" if job.counted else "abandoned", None if job.counted else LEFT, 200)
        answer = Answer(job.id, job.created, job.request.model, choices, job.prompt_tokens, job.cached_tokens)
        if writer is not None:
            job.delivery.write(*writer.closing(answer))
        else:
            job.delivery.write(msgspec.json.encode(job.dialect.plain(job.request, answer)))
        job.delivery.end()
        if job.delivery.listeners:
            return  # forgotten as soon as it is given
        job.attempt.keep(job)
        if job.counted:  # the client left while the call was being recorded
            job.counted = False
            self._settle_in_time(job)

    async def _fail(self, job: Job, writer: Writer | None, error: DialectError) -> None:
        await self._record_end(job, "error", {"message": error.message}, error.status)
        if writer is not None:
            job.delivery.write(*writer.error(error))
        job.delivery.end(error)

    async def _abandon(self, job: Job) -> None:
        """The job was cancelled: nobody came back for it, or the gateway is going down."""
        await self._record_end(job, "abandoned", LEFT, 499)
        job.delivery.end(DialectError(503, "the call was given up", type="api_error", code="abandoned"))

    async def _record_end(self, job: Job, status: str, error: Json, http_status: int) -> None:
        """Record a job that has no answer, as far as the store lets us."""
        job.attempt.forget(job)
        self._let_go(job.attempt)
        try:
            if not job.recorded:
                await self._record(job, status, error, http_status)
        except (StoreError, NotFound, Conflict) as problem:
            log.warning("a call of %s that has no answer is not recorded: %s", job.rollout.rollout_id, problem)

    async def _record(self, job: Job, status: str, error: Json | None, http_status: int) -> None:
        """Put the calls into the store, and into the history that later calls continue."""
        records = [call_record(self.model.name, job, call, status, error, http_status) for call in job.running]
        await self.gateway.store.add_calls(records)
        job.recorded = True
        for call in job.running:
            message = job.choices[call.index].message if status == "ok" else None
            job.attempt.history.add(call.recorded, self.model, call.sampled, message)

    # Clients that go and come back

    def _left(self, job: Job) -> None:
        """The last client of a job has gone."""
        if job.delivery.error is not None:
            return
        if job.delivery.given:
            job.attempt.forget(job)
            self._let_go(job.attempt)
            return
        if job.delivery.ended:
            job.attempt.keep(job)
            job.counted = False
            self._settle_in_time(job)
            return
        grace = 0.0 if job.attempt.ended else self.gateway.config.gateway.retry_grace
        job.expiry = asyncio.get_running_loop().call_later(grace, self._give_up, job)

    def _give_up(self, job: Job) -> None:
        """End the sampling if nobody listens. One that has ended stays for a retry, however late."""
        if not job.delivery.listeners:
            self._cancel(job)

    def _cancel(self, job: Job) -> None:
        """End the sampling. A job that has its choices is being recorded, and ends by itself."""
        if job.work is not None and not job.choices:
            job.work.cancel()

    def _settle_in_time(self, job: Job) -> None:
        """Settle a job that nobody waits for, however long the store takes to have room again."""

        async def insist() -> None:
            pause = 0.5
            while True:
                try:
                    return await self._settle(job)
                except StoreError as error:
                    log.warning("a call of %s is not marked as abandoned yet: %s", job.rollout.rollout_id, error)
                if self._closing.is_set():
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), pause)
                pause = min(2 * pause, 30.0)

        task = asyncio.create_task(insist())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle(self, job: Job) -> None:
        """Make the record of a finished job say whether its answer counts as given, as things stand now."""
        given = job.counted
        numbers = [call.recorded.number for call in job.running]
        await self.gateway.store.mark_calls(
            job.rollout.rollout_id, job.attempt_id, numbers, "ok" if given else "abandoned", None if given else LEFT
        )
        for call, choice in zip(job.running, job.choices, strict=True):
            call.recorded.reply = choice.message if given else None


# Pieces


def _object(content: bytes) -> Json:
    try:
        body = read_json(content)
    except BadJson as error:
        raise DialectError(400, str(error)) from None
    if not isinstance(body, dict):
        raise DialectError(400, "the body has to be a JSON object")
    return body


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


def _answer_id(rollout: Rollout, attempt_id: str, number: int) -> str:
    """What an answer's id ends with: the same for the same call, in any process."""
    text = f"{rollout.rollout_id}\0{attempt_id}\0{number}\0{rollout.status.created_at}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _conversation_of(id: str, dialect: Dialect, rollout: Rollout, attempt: Attempt) -> list[Message]:
    """The conversation of an earlier answer of this attempt, its reply included."""
    for call in attempt.history.calls:
        if id == dialect.id_prefix + _answer_id(rollout, attempt.attempt_id, call.number) and call.reply is not None:
            return call.conversation()
    raise DialectError(
        400,
        f"previous_response_id: {id!r} is no finished answer of this attempt",
        param="previous_response_id",
        code="previous_response_not_found",
    )
