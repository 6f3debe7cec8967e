"""Every operation of the gateway's HTTP API: who may ask for it, what it takes and what it gives.

`openapi.py` writes these as an OpenAPI document, and `python -m longrein.gateway.operations` prints the table of routes
and credentials of docs/security.md. Tests hold every route to an entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from longrein.gateway.dialects import chat, completions, messages, responses
from longrein.records import (
    Attempt,
    Call,
    EndAttempt,
    Event,
    GateState,
    ModelEndpoint,
    NewEvent,
    NewRollout,
    PauseRequest,
    PruneRequest,
    PruneResult,
    Rollout,
    RolloutChange,
    RolloutDetail,
    RolloutState,
    StartedAttempt,
    TerminalPage,
    WithdrawnPage,
)

Json = dict[str, Any]

#: Longest `wait` of a long poll, in seconds.
LONGEST_WAIT = 600.0
#: What an attempt's agents put before the model's own paths.
ATTEMPT_PREFIX = "/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}"


class Who(Enum):
    """Who may ask for an operation. The value is how the table says it of an attempt's token."""

    anyone = "yes, as anyone"
    run_key = "no"
    attempt = "its own attempt, in its rollout's mode, within its budget, until it ends"
    token = "as its own attempt, within its budget, until it ends"
    """The token says which attempt: the run key, which belongs to none, is refused."""
    reward = 'its own attempt\'s reward, until it ends, and only where reward.from = "agent"'


@dataclass(frozen=True)
class Parameter:
    """Of a query."""

    name: str
    schema: Json
    what: str


@dataclass(frozen=True)
class Operation:
    who: Who
    summary: str
    body: Any = None
    """Type of the request's record, or a dialect's module."""
    optional: bool = False
    """Whether the body may be left out."""
    answer: Any = None
    """Type of the answer, or its JSON schema; None: it has no body."""
    status: int = 200
    errors: tuple[int, ...] = ()
    """Statuses of errors besides those that follow from what the operation is."""
    query: tuple[Parameter, ...] = ()
    streams: bool = False
    """Whether the answer may be a stream of server-sent events."""


_OK: Json = {
    "type": "object",
    "required": ["status"],
    "properties": {"status": {"const": "ok"}},
    "additionalProperties": False,
}
_WAIT = Parameter(
    "wait",
    {"type": "number", "minimum": 0, "maximum": LONGEST_WAIT},
    "Seconds to wait for an answer that is not empty.",
)
_ATTEMPT = Parameter("attempt", {"type": "string"}, "The attempt; the rollout's last one where it is left out.")
_WHOLE: Json = {"type": "integer", "maximum": 2**31 - 1}

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/"): Operation(Who.anyone, "Whether a gateway answers here", answer=_OK),
    ("GET", "/healthz"): Operation(Who.anyone, "Whether a gateway answers here", answer=_OK),
    ("GET", "/api/hello"): Operation(Who.anyone, "Whether a gateway answers here", answer=_OK),
    ("GET", "/openapi.json"): Operation(Who.anyone, "This document", answer={"type": "object"}),
    ("GET", "/api/rollouts"): Operation(
        Who.run_key,
        "Rollouts, oldest first",
        answer=list[Rollout],
        query=(
            Parameter(
                "state_in",
                {"type": "array", "items": {"enum": [state.value for state in RolloutState]}},
                "Only rollouts in one of these states.",
            ),
            Parameter("limit", {**_WHOLE, "minimum": 1, "default": 500}, "How many at most."),
            _WAIT,
        ),
    ),
    ("POST", "/api/rollouts"): Operation(
        Who.run_key,
        "Add rollouts; one whose id is known is left as it is",
        body=list[NewRollout],
        answer=list[Rollout],
        status=201,
    ),
    ("GET", "/api/rollouts/terminal"): Operation(
        Who.run_key,
        "Finished rollouts in the order in which they finished",
        answer=TerminalPage,
        query=(
            Parameter("after", {**_WHOLE, "minimum": 0, "default": 0}, "The position behind which they finished."),
            Parameter("limit", {**_WHOLE, "minimum": 1, "default": 1000}, "How many at most."),
            _WAIT,
        ),
    ),
    ("GET", "/api/rollouts/withdrawn"): Operation(
        Who.run_key,
        "Rollouts that somebody finished or deleted while an attempt of them ran: their agents are to be stopped",
        answer=WithdrawnPage,
        query=(
            Parameter("instance", {"type": "string", "default": ""}, "The gateway's process that `after` counts for."),
            Parameter("after", {**_WHOLE, "minimum": 0, "default": 0}, "The position behind which they were."),
            _WAIT,
        ),
    ),
    ("GET", "/api/rollouts/{rollout_id}"): Operation(
        Who.run_key, "A rollout, and its attempts that have records", answer=RolloutDetail, errors=(404,)
    ),
    ("PATCH", "/api/rollouts/{rollout_id}"): Operation(
        Who.run_key, "Change a rollout's status", body=RolloutChange, answer=Rollout, errors=(404, 409)
    ),
    ("DELETE", "/api/rollouts/{rollout_id}"): Operation(
        Who.run_key, "Remove a rollout and all that is recorded of it", status=204
    ),
    ("GET", "/api/rollouts/{rollout_id}/attempts"): Operation(
        Who.run_key, "A rollout's attempts, oldest first", answer=list[Attempt], errors=(404,)
    ),
    ("POST", "/api/rollouts/{rollout_id}/attempts"): Operation(
        Who.run_key,
        "Start a rollout's next attempt; the answer holds its token",
        answer=StartedAttempt,
        status=201,
        errors=(404, 409),
    ),
    ("PATCH", "/api/rollouts/{rollout_id}/attempts/{attempt_id}"): Operation(
        Who.run_key, "End an attempt, and its token with it", body=EndAttempt, answer=Attempt, errors=(404, 409)
    ),
    ("GET", "/api/rollouts/{rollout_id}/calls"): Operation(
        Who.run_key, "An attempt's calls in order of number", answer=list[Call], errors=(404,), query=(_ATTEMPT,)
    ),
    ("GET", "/api/rollouts/{rollout_id}/events"): Operation(
        Who.run_key,
        "An attempt's events in order of time",
        answer=list[Event],
        errors=(404,),
        query=(
            _ATTEMPT,
            Parameter("event_type", {"type": "string"}, "Only events of this type."),
            Parameter("format", {"const": "triplet"}, "Model requests as token ids and log-probabilities."),
        ),
    ),
    ("POST", "/api/rollouts/{rollout_id}/attempt/{attempt_id}/events"): Operation(
        Who.reward, "Record an event of an attempt", body=NewEvent, answer=Event, errors=(404,)
    ),
    ("GET", "/api/models"): Operation(Who.run_key, "The registered endpoints", answer=list[ModelEndpoint]),
    ("POST", "/api/models"): Operation(
        Who.run_key,
        "Register endpoints, or new versions of known ones",
        body=list[ModelEndpoint],
        answer=list[ModelEndpoint],
        status=201,
        errors=(502,),
    ),
    ("DELETE", "/api/models"): Operation(Who.run_key, "Forget all endpoints", answer=_OK),
    ("POST", "/api/store/prune"): Operation(
        Who.run_key,
        "Remove tokens and messages of finished rollouts that were learned from",
        body=PruneRequest,
        answer=PruneResult,
    ),
    ("POST", "/proxy/pause"): Operation(
        Who.run_key,
        "Close the gate: model calls wait or are refused",
        body=PauseRequest,
        optional=True,
        answer=GateState,
    ),
    ("POST", "/proxy/resume"): Operation(Who.run_key, "Open the gate", answer=GateState),
    ("GET", "/proxy/state"): Operation(Who.run_key, "How the gate stands", answer=GateState),
}

_MODEL_LIST: Json = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {
        "object": {"const": "list"},
        "data": {
            "type": "array",
            "items": {"type": "object", "required": ["id", "object"], "properties": {"id": {"type": "string"}}},
        },
    },
}
_COUNT: Json = {"type": "object", "required": ["input_tokens"], "properties": {"input_tokens": {"type": "integer"}}}


def _object(*required: str) -> Json:
    return {"type": "object", "required": list(required)}


def _model_operations(prefix: str, anthropic: str, who: Who) -> dict[tuple[str, str], Operation]:
    errors = (404, 429, 502, *((409,) if who is Who.attempt else ()))

    def ask(summary: str, dialect: Any, answer: Json) -> Operation:
        return Operation(who, summary, body=dialect, answer=answer, errors=errors, streams=True)

    return {
        ("POST", f"{prefix}/chat/completions"): ask("OpenAI Chat Completions", chat, _object("id", "choices")),
        ("POST", f"{prefix}/completions"): ask("OpenAI Completions", completions, _object("id", "choices")),
        ("POST", f"{prefix}/responses"): ask("OpenAI Responses", responses, _object("id", "output")),
        ("GET", f"{prefix}/models"): Operation(
            who, "The models that may be asked", answer=_MODEL_LIST, errors=tuple(e for e in errors if e in (404, 409))
        ),
        ("POST", f"{anthropic}/v1/messages"): ask("Anthropic Messages", messages, _object("id", "content")),
        ("POST", f"{anthropic}/v1/messages/count_tokens"): replace(
            ask("Tokens of a prompt; nothing is sampled", messages, _COUNT), streams=False
        ),
    }


OPERATIONS |= _model_operations(ATTEMPT_PREFIX + "/openai/v1", ATTEMPT_PREFIX + "/anthropic", Who.attempt)
OPERATIONS |= _model_operations("/v1", "", Who.token)
OPERATIONS |= {
    ("HEAD", f"{ATTEMPT_PREFIX}/anthropic{end}"): Operation(Who.anyone, "What clients ask before their first message")
    for end in ("", "/", "/api/hello")
}


def operation(method: str, path: str) -> Operation:
    """The operation of a route. Raises `LookupError` for one that nobody has decided on."""
    # GET routes answer HEAD as well.
    found = OPERATIONS.get((method, path)) or (OPERATIONS.get(("GET", path)) if method == "HEAD" else None)
    if found is None:
        raise LookupError(f"{method} {path} has no entry in longrein.gateway.operations: who may ask for it?")
    return found


# --- The table of docs/security.md ----------------------------------------------------------------------------------

_RUN_KEY: Mapping[Who, str] = {
    Who.anyone: "yes, as anyone",
    Who.run_key: "yes",
    Who.attempt: "yes, for any attempt and mode",
    Who.token: "no: a call belongs to an attempt",
    Who.reward: "yes, of any type and attempt",
}


def table() -> str:
    """Routes by credential, as Markdown."""
    rows = ["| operation | without a key | attempt token | run key |", "|---|---|---|---|"]
    for (method, path), one in OPERATIONS.items():
        without = "yes" if one.who is Who.anyone else "401"
        shown = path.replace(ATTEMPT_PREFIX, "…")
        rows.append(f"| `{method} {shown}` | {without} | {_answered(one.who.value)} | {_answered(_RUN_KEY[one.who])} |")
    return "\n".join(rows) + "\n"


def _answered(words: str) -> str:
    return f"403{words.removeprefix('no')}" if words.startswith("no") else words


if __name__ == "__main__":
    print(table(), end="")
