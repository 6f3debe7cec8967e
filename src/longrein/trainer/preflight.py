"""One attempt alone before a run begins: the agent starts, a call arrives, the grader answers."""

from __future__ import annotations

from pathlib import Path

from longrein.records import Json, NewRollout, Outcome, RolloutConfig
from longrein.trainer.collect import Collector, Done, RunFailed, log_excerpt


async def preflight(collector: Collector, task: Json, run_folder: Path, prefix: str = "") -> Done:
    """Run one attempt on `task` and return it; one that an earlier start of the run made, if nothing was wrong with it.

    Raises `RunFailed` that says which of the three did not happen.
    """
    rollout = NewRollout(
        input=task,
        is_train=False,
        config=RolloutConfig(),
        metadata={"phase": "preflight"},
        rollout_id=f"{prefix}preflight",
        group_id=f"{prefix}preflight",
    )
    (future,) = await collector.queue([rollout], keep=lambda done: problem_of(done) is None)
    done = await future
    problem = problem_of(done)
    if problem is not None:
        excerpt = log_excerpt(run_folder, done.rollout.rollout_id, done.attempt.attempt_id if done.attempt else None)
        raise RunFailed(f"the first attempt, run alone before the others, failed: {problem}\n{excerpt}".rstrip())
    return done


def problem_of(done: Done) -> str | None:
    """What went wrong with a first attempt, or None."""
    attempt, calls = done.attempt, done.finished.calls
    if attempt is None:
        return f"the agent did not start: {done.failure}"
    if attempt.outcome is Outcome.infrastructure_failed and not calls:
        return f"the agent did not start or could not go on: {done.failure}"
    if not calls:
        how = attempt.reason or f"exit code {attempt.exit_code}"
        return (
            f"the agent ended ({how}) without a call to the model. It has to use OPENAI_BASE_URL and OPENAI_API_KEY "
            "(or ANTHROPIC_BASE_URL and ANTHROPIC_AUTH_TOKEN) of its environment"
        )
    if all(call.status == "error" for call in calls):
        error = calls[-1].error or {}
        return f"every call to the model was refused: {calls[-1].http_status} {error.get('message', error)}"
    if done.failure is not None:
        return f"the agent ran and made {len(calls)} calls, but there is no reward: {done.failure}"
    return None
