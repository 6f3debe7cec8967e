"""What the store keeps of a call."""

from __future__ import annotations

from longrein.gateway.jobs import Job, Running
from longrein.records import Call, Json, now


def call_record(model: str, job: Job, call: Running, status: str, error: Json | None, http_status: int) -> Call:
    """One call of a job as the store keeps it; a job that has its choices is finished."""
    choice = job.choices[call.index] if job.choices else None
    recorded = call.recorded
    parent_tools = recorded.parent.tools if recorded.parent is not None else []
    return Call(
        rollout_id=job.rollout.rollout_id,
        attempt_id=job.attempt_id,
        number=recorded.number,
        dialect=job.dialect.name,  # type: ignore[arg-type]
        mode=job.mode,
        model=model,
        engine=job.engine.name,
        kind=call.kind,
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
        reply=choice.message.to_json() if choice is not None else {},
        sampling=_sampling_record(job, call),
        status=status,  # type: ignore[arg-type]
        finish_reason=choice.finish_reason if choice is not None else None,
        http_status=http_status,
        error=error,
        started_at=call.started_at,
        first_token_at=call.first_token_at,
        finished_at=now(),
    )


def _sampling_record(job: Job, call: Running) -> Json:
    record: Json = {"temperature": job.temperature, "max_tokens": call.max_tokens, "seed": call.seed}
    if job.request.sampling.stop:
        record["stop"] = list(job.request.sampling.stop)
    if job.request.sampling.top_p != 1.0:
        record["top_p"] = job.request.sampling.top_p
    if job.request.sampling.top_k:
        record["top_k"] = job.request.sampling.top_k
    if job.request.form is not None:
        record["guide"] = job.request.form.said
    return record
