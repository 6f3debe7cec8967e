"""The gateway's routes: Agent Lightning's HTTP API, what goes beyond it in the same style, and the model's own paths."""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from longrein.gateway.access import Seat, hash_token, new_token
from longrein.gateway.bounds import BadJson, Bounds, Held, read_json
from longrein.gateway.delivery import disconnected
from longrein.gateway.dialects import DialectError, messages
from longrein.gateway.events import events_of
from longrein.gateway.openapi import document
from longrein.gateway.operations import ATTEMPT_PREFIX, LONGEST_WAIT
from longrein.records import (
    TERMINAL,
    EndAttempt,
    Event,
    ModelEndpoint,
    NewEvent,
    NewRollout,
    PauseRequest,
    PruneRequest,
    Rollout,
    RolloutChange,
    RolloutDetail,
    RolloutState,
    RolloutStatus,
    StartedAttempt,
    WithdrawnPage,
    now,
)
from longrein.store import Conflict, NotFound, StoreError

if TYPE_CHECKING:
    from longrein.gateway.serve import Changes, Gateway

T = TypeVar("T")

#: Ids become names of files and folders: no separators, nothing that climbs.
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+=~-]{0,199}")


def create_app(gateway: Gateway) -> Starlette:
    """The ASGI application that serves `gateway`."""
    routes = [
        Route("/", _alive),
        Route("/healthz", _alive),
        Route("/api/hello", _alive),  # what Claude Code asks first
        Route("/openapi.json", _document),
        Route("/api/rollouts", _list_rollouts, methods=["GET"]),
        Route("/api/rollouts", _add_rollouts, methods=["POST"]),
        Route("/api/rollouts/terminal", _terminal),
        Route("/api/rollouts/withdrawn", _withdrawn),
        Route("/api/rollouts/{rollout_id}", _get_rollout, methods=["GET"]),
        Route("/api/rollouts/{rollout_id}", _change_rollout, methods=["PATCH"]),
        Route("/api/rollouts/{rollout_id}", _delete_rollout, methods=["DELETE"]),
        Route("/api/rollouts/{rollout_id}/attempts", _list_attempts, methods=["GET"]),
        Route("/api/rollouts/{rollout_id}/attempts", _start_attempt, methods=["POST"]),
        Route("/api/rollouts/{rollout_id}/attempts/{attempt_id}", _end_attempt, methods=["PATCH"]),
        Route("/api/rollouts/{rollout_id}/calls", _calls),
        Route("/api/rollouts/{rollout_id}/events", _events),
        Route("/api/rollouts/{rollout_id}/attempt/{attempt_id}/events", _add_event, methods=["POST"]),
        Route("/api/models", _list_models, methods=["GET"]),
        Route("/api/models", _put_models, methods=["POST"]),
        Route("/api/models", _clear_models, methods=["DELETE"]),
        Route("/api/store/prune", _prune, methods=["POST"]),
        Route("/proxy/pause", _pause, methods=["POST"]),
        Route("/proxy/resume", _resume, methods=["POST"]),
        Route("/proxy/state", _gate_state),
        *_openai_routes(ATTEMPT_PREFIX + "/openai/v1", _seat_of_path),
        *_openai_routes("/v1", _seat_of_token),
        *_anthropic_routes(ATTEMPT_PREFIX + "/anthropic", _seat_of_path),
        *_anthropic_routes("", _seat_of_token),
    ]
    handlers: dict[Any, Any] = {
        HTTPException: _http_error,
        DialectError: _dialect_error,
        NotFound: lambda request, error: _error(request, 404, str(error)),
        Conflict: lambda request, error: _error(request, 409, str(error)),
        StoreError: lambda request, error: _error(request, 503, str(error)),
        Exception: lambda request, error: _error(
            request, 500, f"the gateway failed: {type(error).__name__}; its log says where"
        ),
    }
    options = gateway.config.gateway
    bounds = Middleware(Bounds, largest=options.max_body_bytes, seconds=options.body_seconds, refuse=_error)
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=[bounds])
    app.state.gateway = gateway
    return app


# --- Rollouts -------------------------------------------------------------------------------------------------------


async def _alive(request: Request) -> Response:
    return _answer({"status": "ok"})


async def _document(request: Request) -> Response:
    return _answer(document())


async def _add_rollouts(request: Request) -> Response:
    gateway = _administered(request)
    rollouts = [_rollout_of(new) for new in await _body(request, list[NewRollout])]
    added = await gateway.store.add_rollouts(rollouts)
    gateway.queue_clock.add(added)
    gateway.changes.tell()
    return _answer(added, 201)


def _rollout_of(new: NewRollout) -> Rollout:
    time = now()
    return Rollout(
        rollout_id=_checked_id("rollout_id", new.rollout_id) if new.rollout_id is not None else uuid.uuid4().hex,
        input=new.input,
        is_train=new.is_train,
        config=new.config,
        metadata=new.metadata,
        status=RolloutStatus(created_at=time, updated_at=time),
        group_id=new.group_id,
    )


async def _list_rollouts(request: Request) -> Response:
    gateway = _administered(request)
    query = _query(request, {"state_in", "limit", "wait"})
    names = request.query_params.getlist("state_in")
    unknown = [name for name in names if name not in RolloutState.__members__]
    if unknown:
        raise HTTPException(
            422, f"state_in: {unknown[0]!r} is no state; there are {', '.join(RolloutState.__members__)}"
        )
    states = [RolloutState(name) for name in names] or None
    limit, wait = _whole(query, "limit", 500, least=1), _seconds(query)
    return _answer(await _poll(request, wait, lambda: gateway.store.rollouts(states, limit), len))


async def _terminal(request: Request) -> Response:
    gateway = _administered(request)
    query = _query(request, {"after", "limit", "wait"})
    after, limit, wait = _whole(query, "after", 0, least=0), _whole(query, "limit", 1000, least=1), _seconds(query)
    return _answer(
        await _poll(request, wait, lambda: gateway.store.terminal(after, limit), lambda page: len(page.items))
    )


async def _withdrawn(request: Request) -> Response:
    gateway = _administered(request)
    query = _query(request, {"instance", "after", "wait"})
    instance, after, wait = query.get("instance", ""), _whole(query, "after", 0, least=0), _seconds(query)

    def read() -> WithdrawnPage:
        return gateway.withdrawals.page(instance, after)

    return _answer(
        await _poll(request, wait, read, lambda page: len(page.items) + (not page.complete), gateway.withdrawn)
    )


async def _get_rollout(request: Request) -> Response:
    gateway = _administered(request)
    rollout = _known_rollout(request)
    return _answer(RolloutDetail(rollout, gateway.store.attempts_with_records(rollout.rollout_id)))


async def _change_rollout(request: Request) -> Response:
    gateway = _administered(request)
    change = await _body(request, RolloutChange)
    rollout_id = request.path_params["rollout_id"]
    changed = await gateway.store.change_rollout(rollout_id, change.status)
    if change.status.state in TERMINAL and any(a.ended_at is None for a in gateway.store.attempts(rollout_id)):
        gateway.withdraw(rollout_id)
    gateway.changes.tell()
    return _answer(changed)


async def _delete_rollout(request: Request) -> Response:
    gateway = _administered(request)
    rollout_id = request.path_params["rollout_id"]
    runs = any(attempt.ended_at is None for attempt in gateway.store.attempts(rollout_id))
    await gateway.store.delete_rollout(rollout_id)
    if runs:
        gateway.withdraw(rollout_id)
    gateway.changes.tell()
    return Response(status_code=204)


# --- Attempts, calls, events ----------------------------------------------------------------------------------------


async def _start_attempt(request: Request) -> Response:
    gateway = _administered(request)
    token = new_token()
    rollout, attempt = await gateway.store.start_attempt(request.path_params["rollout_id"], hash_token(token))
    gateway.changes.tell()
    return _answer(StartedAttempt(rollout, attempt, token), 201)


async def _end_attempt(request: Request) -> Response:
    gateway = _administered(request)
    end = await _body(request, EndAttempt)
    path = request.path_params
    ended = await gateway.store.end_attempt(path["rollout_id"], path["attempt_id"], end)
    gateway.calls.end_attempt(path["rollout_id"], path["attempt_id"])
    gateway.budgets.forget(path["rollout_id"], path["attempt_id"])
    return _answer(ended)


async def _list_attempts(request: Request) -> Response:
    gateway = _administered(request)
    return _answer(gateway.store.attempts(_known_rollout(request).rollout_id))


async def _calls(request: Request) -> Response:
    gateway = _administered(request)
    attempt_id = _asked_attempt(request, _query(request, {"attempt"}))
    return _answer(gateway.store.calls(request.path_params["rollout_id"], attempt_id))


async def _events(request: Request) -> Response:
    gateway = _administered(request)
    query = _query(request, {"attempt", "event_type", "format"})
    if query.get("format", "triplet") != "triplet":
        raise HTTPException(422, f"format: {query['format']!r} is not known; leave it out or ask for triplet")
    attempt_id = _asked_attempt(request, query)
    events = events_of(
        gateway.store,
        request.path_params["rollout_id"],
        attempt_id,
        query.get("event_type"),
        triplet="format" in query,
    )
    return _answer(events)


def _asked_attempt(request: Request, query: dict[str, str]) -> str:
    """The attempt that the query names, or the rollout's last one."""
    rollout = _known_rollout(request)
    store = _gateway(request).store
    asked = query.get("attempt")
    if asked is not None:
        if store.attempt(rollout.rollout_id, asked) is None:
            raise HTTPException(404, f"no attempt {asked} of rollout {rollout.rollout_id}")
        return asked
    if rollout.status.last_attempt_id is not None:
        return rollout.status.last_attempt_id
    attempts = store.attempts(rollout.rollout_id)
    return attempts[-1].attempt_id if attempts else "0"


async def _add_event(request: Request) -> Response:
    gateway, path = _gateway(request), request.path_params
    rollout_id, attempt_id = path["rollout_id"], path["attempt_id"]
    caller = gateway.access.post_events(request.headers, rollout_id, attempt_id)
    _checked_id("attempt", attempt_id)
    new = await _body(request, NewEvent)
    gateway.access.post_event(caller, new.event_type, len(await request.body()))
    if new.event_type == "reward":
        new.data["value"] = _reward(new.data.get("value"))
    event = Event(new.event_type, rollout_id, attempt_id, now(), new.data)
    try:
        await gateway.store.add_event(event, while_running=caller.attempt is not None)
    except Conflict as error:
        raise HTTPException(403, f"{error}, and its token with it") from None
    return _answer(event)


def _reward(value: Any) -> float:
    """A reward's value as a finite float; true is 1 and false is 0."""
    if isinstance(value, (bool, int, float)):
        with suppress(OverflowError):
            number = float(value)
            if math.isfinite(number):
                return number
    raise HTTPException(422, f"data.value: a reward has to be a finite number, true or false, got {value!r}")


# --- Models and the gate --------------------------------------------------------------------------------------------


async def _list_models(request: Request) -> Response:
    return _answer(_administered(request).store.models())


async def _put_models(request: Request) -> Response:
    gateway = _administered(request)
    return _answer(await gateway.put_models(await _body(request, list[ModelEndpoint])), 201)


async def _clear_models(request: Request) -> Response:
    await _administered(request).store.clear_models()
    return _answer({"status": "ok"})


async def _prune(request: Request) -> Response:
    gateway = _administered(request)
    asked = await _body(request, PruneRequest)
    kinds = gateway.config.algorithm.train_kinds
    return _answer(await gateway.store.prune(asked.through_step, asked.prefix, kinds))


async def _pause(request: Request) -> Response:
    gateway = _administered(request)
    pause = await _body(request, PauseRequest, empty=b"{}")
    if not 0 <= pause.retry_after_seconds < math.inf:
        raise HTTPException(422, f"retry_after_seconds: expected 0 or more, got {pause.retry_after_seconds}")
    return _answer(gateway.gate.pause(pause))


async def _resume(request: Request) -> Response:
    return _answer(_administered(request).gate.resume())


async def _gate_state(request: Request) -> Response:
    return _answer(_administered(request).gate.state())


# --- The model ------------------------------------------------------------------------------------------------------


SeatOf = Callable[[Request], Seat]


def _asks(dialect: str, seat_of: SeatOf) -> Callable[[Request], Awaitable[Response]]:
    async def ask(request: Request, seat: Seat) -> Response:
        gateway = _gateway(request)
        if not seat.recorded:
            await gateway.store.ensure_attempt(seat.rollout.rollout_id, seat.attempt_id)
        return await gateway.answer(request, dialect, seat.rollout, seat.attempt_id, seat.mode)

    return _within_budget(seat_of, ask)


def _within_budget(
    seat_of: SeatOf, work: Callable[[Request, Seat], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """A model request: authorised, with its budget beside it, and counted from here to the last byte of its answer."""

    async def answer(request: Request) -> Response:
        seat = seat_of(request)
        budget = _gateway(request).budgets.of(seat.rollout, seat.attempt_id, bound=seat.own)
        request.state.budget = budget
        leave = budget.enter()
        try:
            return Held(await work(request, seat), leave)
        except BaseException:
            leave()
            raise

    return answer


def _openai_routes(prefix: str, seat_of: SeatOf) -> list[Route]:
    async def models(request: Request) -> Response:
        seat_of(request)
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": "longrein"}
            for name in _gateway(request).model_names()
        ]
        return _answer({"object": "list", "data": listed})

    return [
        Route(f"{prefix}/chat/completions", _asks("chat", seat_of), methods=["POST"]),
        Route(f"{prefix}/completions", _asks("completions", seat_of), methods=["POST"]),
        Route(f"{prefix}/responses", _asks("responses", seat_of), methods=["POST"]),
        Route(f"{prefix}/models", models),
    ]


def _anthropic_routes(prefix: str, seat_of: SeatOf) -> list[Route]:
    async def count(request: Request, seat: Seat) -> Response:
        return _answer({"input_tokens": await _gateway(request).count(request, seat.rollout, seat.attempt_id)})

    async def alive(request: Request) -> Response:
        return Response(status_code=200)

    routes = [
        Route(f"{prefix}/v1/messages", _asks("messages", seat_of), methods=["POST"]),
        Route(f"{prefix}/v1/messages/count_tokens", _within_budget(seat_of, count), methods=["POST"]),
    ]
    if prefix:  # what clients ask before their first message
        routes += [Route(f"{prefix}{path}", alive, methods=["HEAD"]) for path in ("", "/", "/api/hello")]
    return routes


def _seat_of_path(request: Request) -> Seat:
    path = request.path_params
    if path["mode"] not in ("train", "val"):
        raise HTTPException(404, f"no mode {path['mode']}; there are train and val")
    attempt_id = _checked_id("attempt", path["attempt_id"])
    return _gateway(request).access.call_model(request.headers, path["rollout_id"], attempt_id, path["mode"])


def _seat_of_token(request: Request) -> Seat:
    return _gateway(request).access.call_own_model(request.headers)


# --- Reading requests -----------------------------------------------------------------------------------------------


def _gateway(request: Request) -> Gateway:
    return request.app.state.gateway


def _administered(request: Request) -> Gateway:
    """The gateway, if the request carries the run key."""
    gateway = _gateway(request)
    gateway.access.administer(request.headers)
    return gateway


def _known_rollout(request: Request) -> Rollout:
    rollout_id = request.path_params["rollout_id"]
    rollout = _gateway(request).store.rollout(rollout_id)
    if rollout is None:
        raise HTTPException(404, f"no rollout {rollout_id}")
    return rollout


def _checked_id(name: str, value: str) -> str:
    if _ID.fullmatch(value) is None:
        raise HTTPException(
            422,
            f"{name}: {value!r} cannot be an id; expected up to 200 letters, digits or _.:@+=~- with no . or - first",
        )
    return value


async def _body(request: Request, kind: type[T], *, empty: bytes = b"") -> T:
    """The request's JSON body as `kind`: 400 when it is not JSON, 422 when it is not of that form."""
    try:
        return msgspec.convert(read_json(await request.body() or empty), kind)
    except msgspec.ValidationError as error:
        raise HTTPException(422, str(error)) from None
    except BadJson as error:
        raise HTTPException(422 if error.valid else 400, str(error)) from None


def _query(request: Request, known: Collection[str]) -> dict[str, str]:
    query = dict(request.query_params)
    for name in query:
        if name not in known:
            raise HTTPException(422, f"{name}: unknown query parameter; this path knows {', '.join(sorted(known))}")
    return query


def _whole(query: dict[str, str], name: str, default: int, *, least: int) -> int:
    text = query.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 10 or not least <= int(text) < 2**31:
        raise HTTPException(422, f"{name}: expected a whole number of at least {least}, got {text!r}")
    return int(text)


def _seconds(query: dict[str, str]) -> float:
    text = query.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= LONGEST_WAIT:
        raise HTTPException(422, f"wait: expected seconds from 0 to {LONGEST_WAIT:.0f}, got {text!r}")
    return seconds


async def _poll(
    request: Request, wait: float, read: Callable[[], T], full: Callable[[T], int], changes: Changes | None = None
) -> T:
    """What `read` gives as soon as it is `full`; what it gives after `wait` seconds, or when nobody waits any more."""
    changes = changes or _gateway(request).changes
    end = asyncio.get_running_loop().time() + wait
    gone = asyncio.ensure_future(disconnected(request.receive)) if wait else None
    try:
        while True:
            change = changes.next()  # before reading: a change in between is not missed
            value = read()
            left = end - asyncio.get_running_loop().time()
            if gone is None or full(value) or left <= 0 or gone.done() or changes.ended:
                return value
            waiting = asyncio.ensure_future(change.wait())
            await asyncio.wait({waiting, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
    finally:
        if gone is not None:
            gone.cancel()


# --- Answering ------------------------------------------------------------------------------------------------------

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def _answer(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(request: Request, status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error in the shape of its path: the dialect's for the model's, `{"detail": …}` for all others."""
    path = request.url.path
    if _speaks_anthropic(path):
        body: Any = {"type": "error", "error": {"type": messages.error_type(status), "message": message}}
    elif path.startswith(("/v1/", "/proxy/rollout/")):
        kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        body = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    else:
        body = {"detail": message}
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _speaks_anthropic(path: str) -> bool:
    return path.endswith(("/v1/messages", "/v1/messages/count_tokens"))


async def _http_error(request: Request, error: HTTPException) -> Response:
    return _error(request, error.status_code, error.detail, dict(error.headers or {}))


async def _dialect_error(request: Request, error: DialectError) -> Response:
    body = messages.error_body(error) if _speaks_anthropic(request.url.path) else error.body()
    return Response(msgspec.json.encode(body), error.status, error.headers, media_type="application/json")
