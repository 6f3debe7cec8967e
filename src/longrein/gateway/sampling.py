"""Sampling one call's reply: token ids from the engine → text, reasoning and tool calls, as they come."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

from longrein.gateway.dialects import Choice
from longrein.gateway.engines import Chunk, Generate
from longrein.gateway.jobs import Job, Running
from longrein.gateway.logprobs import tokens_of, tokens_within
from longrein.gateway.parsing import Delta, ParserOptions, PlainParser, ReplyParser, StopStrings, message_of
from longrein.gateway.tokens import Detokenizer, TextModel
from longrein.records import now


async def sample(
    model: TextModel, make: Callable[[ParserOptions], ReplyParser], job: Job, call: Running
) -> AsyncIterator[Delta]:
    """Sample one call's reply and read it, by a parser of its own: yields what a client may see, as it comes."""
    request = job.request
    detokenizer = Detokenizer(model)
    stops = StopStrings(request.sampling.stop)
    options = ParserOptions(
        prompt_tail=call.prompt_tail,
        prompt_ids=call.prompt_ids,
        tools=request.tools if request.use_tools else (),
        call_id=lambda i: _call_id(job, call.recorded.number, i, model.short_call_ids),
        stream=request.stream,
    )
    parser = make(options) if request.prompts is None else PlainParser()
    generate = Generate(
        request_id=f"{job.rollout.rollout_id}/{job.attempt_id}/{call.recorded.number}",
        rollout_id=job.rollout.rollout_id,
        token_ids=call.prompt_ids,
        max_tokens=call.max_tokens,
        temperature=job.temperature,
        top_p=request.sampling.top_p,
        top_k=request.sampling.top_k,
        stop_token_ids=sorted(model.stop_ids),
        seed=call.seed,
        stream=request.stream or bool(request.sampling.stop),
        guide=job.guide,
        top_logprobs=request.top_logprobs,
        messages=[m.for_template() for m in call.messages],
        tools=list(request.tools),
    )
    stream = job.engine.generate(generate)
    try:
        async for chunk in stream:
            _collect(call, chunk)
            for ids in _pieces(model, job, call, chunk):
                text = stops.push(detokenizer.push(_without_stop(ids, model.stop_ids)))
                for delta in _read(call, parser.push(ids, text)):
                    yield delta
            if stops.stopped is not None:
                call.finish_reason, call.stopped = "stop", stops.stopped
                break
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
    text = stops.push(detokenizer.finish(), final=True)
    for delta in _read(call, [*parser.push([], text), *parser.finish()]):
        yield delta


def _pieces(model: TextModel, job: Job, call: Running, chunk: Chunk) -> Iterator[Sequence[int]]:
    """The ids of a chunk as they are read: one by one where a client wants to know which piece each is part of."""
    if not job.request.logprobs or chunk.logprobs is None:
        yield chunk.token_ids
        return
    tokens = tokens_of(model, chunk.token_ids, chunk.logprobs, chunk.top_logprobs)
    for id, token in zip(chunk.token_ids, tokens, strict=True):
        call.tokens.append(token)
        yield [id]


def _read(call: Running, deltas: Sequence[Delta]) -> Sequence[Delta]:
    untold = tuple(call.tokens[call.told :])
    if deltas and untold:
        deltas = [replace(deltas[0], tokens=untold), *deltas[1:]]
        call.told = len(call.tokens)
    call.deltas.extend(deltas)
    return deltas


def choice_of(call: Running) -> Choice:
    """The answer that a finished call gives."""
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
        [token for d in call.deltas if d.content and d.tokens for token in tokens_within(d.tokens, d.content)],
        call.stopped,
    )


def _call_id(job: Job, number: int, index: int, short: bool) -> str:
    """A tool-call id that no other call has, in the form the template accepts."""
    digest = hashlib.sha256(f"{job.rollout.rollout_id}\0{job.attempt_id}\0{number}\0{index}".encode()).hexdigest()
    return digest[:9] if short else f"call_{digest[:24]}"


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
