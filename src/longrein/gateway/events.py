"""An attempt's events: those that were posted, and a `model_request` for each call.

Calls are recorded once, as calls; here they are told in Agent Lightning's shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longrein.gateway.engines.answers import read_choices, token_ids
from longrein.records import Call, Event, Json
from longrein.store import Store
from longrein.trajectory.prompts import prompt_ids


def events_of(store: Store, rollout_id: str, attempt_id: str, event_type: str | None, *, triplet: bool) -> list[Event]:
    """The attempt's events in order of time, only those of `event_type` if it is given.

    `triplet` keeps of each model request and reward what a trainer needs, and of several model requests with equal
    prompt ids only the last.
    """
    events = store.events(rollout_id, attempt_id, event_type)
    if event_type in (None, "model_request"):
        calls = {call.number: call for call in store.calls(rollout_id, attempt_id)}
        events.extend(_model_request(calls, call) for call in calls.values())
        events.sort(key=lambda event: event.timestamp)
    return _triplets(events) if triplet else events


def _model_request(calls: Mapping[int, Call], call: Call) -> Event:
    version = call.versions[-1][0] if call.versions else 0
    data: Json = {
        "model": call.model,
        "server": {"model": call.model, "version": version},
        "number": call.number,
        "dialect": call.dialect,
        "mode": call.mode,
        "prompt_token_ids": prompt_ids(calls, call) if call.pruned is None else [],
        "response_token_ids": call.sampled,
        "response_log_probs": call.logprobs,
        "http_status": call.http_status,
        "status": call.status,
        "finish_reason": call.finish_reason,
        "latency_ms": (call.finished_at - call.started_at) * 1000,
    }
    if call.error is not None:
        data["error"] = call.error
    if call.pruned is not None:
        data["pruned"] = True
    return Event("model_request", call.rollout_id, call.attempt_id, call.finished_at, data)


def _triplets(events: Sequence[Event]) -> list[Event]:
    told: list[Event] = []
    last: dict[tuple[int, ...], int] = {}
    for event in events:
        if event.event_type == "model_request":
            event.data = _request_triplet(event.data)
            last[tuple(event.data["prompt_token_ids"])] = len(told)
        elif event.event_type == "reward":
            event.data = {name: event.data[name] for name in ("value", "source", "reason") if name in event.data}
        told.append(event)
    kept = set(last.values())
    return [event for at, event in enumerate(told) if event.event_type != "model_request" or at in kept]


def _request_triplet(data: Json) -> Json:
    server: Any = data.get("server")
    server = server if isinstance(server, dict) else {}
    told: Json = {
        "prompt_token_ids": token_ids(data.get("prompt_token_ids")),
        "response_token_ids": token_ids(data.get("response_token_ids")),
        "response_log_probs": data.get("response_log_probs"),
        "server": {"model": server.get("model"), "version": server.get("version")},
    }
    response = data.get("response")
    if isinstance(response, dict):  # posted as an event by somebody who has the engine's answer
        choices = read_choices(response)
        if choices:
            told["prompt_token_ids"] = choices[0].prompt_ids or []
            told["response_token_ids"] = choices[0].ids
            told["response_log_probs"] = choices[0].known_logprobs()
        if "error" in response:
            told["error"] = response["error"]
    if "error" in data:
        told["error"] = data["error"]
    for name in ("http_status", "status"):
        if name in data:
            told[name] = data[name]
    if told.get("status") == "abandoned":
        told["status"] = "error"  # the word that Agent Lightning's readers know
    return told
