"""The gateway's HTTP API as typed functions, for the controller, the trainer and the operator."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from types import NoneType, TracebackType
from typing import Any, TypeVar

import httpx
import msgspec

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
    StatusChange,
    TerminalPage,
    WithdrawnPage,
)

T = TypeVar("T")

#: Seconds that an answer may take beyond what a long poll waits.
ANSWER_SECONDS = 60.0


class ApiError(Exception):
    """The gateway refused, or could not be reached (`status` 0)."""

    def __init__(self, status: int, message: str):
        super().__init__(f"{status}: {message}" if status else message)
        self.status = status
        self.message = message


class Client:
    """A gateway at `url`, asked with the run key `key`. Use it as an async context manager.

    A request that may be sent twice is sent again, with growing pauses, while the connection fails, for
    `retry_seconds`; one that may not, only while it cannot have arrived. So is one that the gateway cannot record now
    (503). Every method raises ApiError.
    """

    def __init__(self, url: str, key: str, *, retry_seconds: float = 30.0):
        self.url = url.rstrip("/")
        self._retry_seconds = retry_seconds
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
            mounts={"all://127.0.0.1": None, "all://localhost": None, "all://[::1]": None},
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of the connections."""
        await self._http.aclose()

    # Rollouts

    async def add_rollouts(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        """Add rollouts; one without an id gets one here, so that a repeated request adds nothing twice."""
        named = [msgspec.structs.replace(new, rollout_id=new.rollout_id or uuid.uuid4().hex) for new in rollouts]
        return await self._ask("POST", "/api/rollouts", list[Rollout], body=named)

    async def rollouts(
        self, states: Sequence[RolloutState] | None = None, limit: int = 500, wait: float = 0.0
    ) -> list[Rollout]:
        """Rollouts in one of `states`, oldest first. With `wait`, an empty list is answered only after so many seconds."""
        query = [("state_in", state.value) for state in states or ()] + [("limit", str(limit))]
        return await self._ask("GET", "/api/rollouts", list[Rollout], query=query, wait=wait)

    async def rollout(self, rollout_id: str) -> RolloutDetail:
        return await self._ask("GET", f"/api/rollouts/{rollout_id}", RolloutDetail)

    async def delete_rollout(self, rollout_id: str) -> None:
        """Remove a rollout and all that was recorded of it; nothing when it is unknown."""
        await self._ask("DELETE", f"/api/rollouts/{rollout_id}")

    async def change_rollout(self, rollout_id: str, change: StatusChange) -> Rollout:
        """Change a rollout's status; 409 for a transition that does not exist."""
        request = self._build("PATCH", f"/api/rollouts/{rollout_id}", RolloutChange(change))
        answer, repeated = await self._send(request, again=True)
        if answer.status_code == 409 and repeated and change.state is not None:
            rollout = (await self.rollout(rollout_id)).rollout
            if rollout.status.state is change.state:  # the first request had arrived, only its answer was lost
                return rollout
        return _read(answer, Rollout)

    async def terminal(self, after: int, limit: int = 1000, wait: float = 0.0) -> TerminalPage:
        """Rollouts that finished behind position `after`. With `wait`, an empty page comes only after so many seconds."""
        query = [("after", str(after)), ("limit", str(limit))]
        return await self._ask("GET", "/api/rollouts/terminal", TerminalPage, query=query, wait=wait)

    async def withdrawn(self, instance: str, after: int, wait: float = 0.0) -> WithdrawnPage:
        """Rollouts that were taken from their agents behind position `after` of the gateway's process `instance`."""
        query = [("instance", instance), ("after", str(after))]
        return await self._ask("GET", "/api/rollouts/withdrawn", WithdrawnPage, query=query, wait=wait)

    # Attempts, calls, events

    async def start_attempt(self, rollout_id: str) -> StartedAttempt:
        """Start the rollout's next attempt; 409 when it has finished or an attempt still runs."""
        return await self._ask("POST", f"/api/rollouts/{rollout_id}/attempts", StartedAttempt, again=False)

    async def end_attempt(self, rollout_id: str, attempt_id: str, end: EndAttempt) -> Attempt:
        """End an attempt; 409 when it has ended before."""
        request = self._build("PATCH", f"/api/rollouts/{rollout_id}/attempts/{attempt_id}", end)
        answer, repeated = await self._send(request, again=True)
        if answer.status_code == 409 and repeated:
            for attempt in await self.attempts(rollout_id):
                if attempt.attempt_id == attempt_id and attempt.outcome is end.outcome:
                    return attempt
        return _read(answer, Attempt)

    async def attempts(self, rollout_id: str) -> list[Attempt]:
        return await self._ask("GET", f"/api/rollouts/{rollout_id}/attempts", list[Attempt])

    async def calls(self, rollout_id: str, attempt_id: str | None = None) -> list[Call]:
        """The calls of an attempt (None: of the last one) in order of number."""
        query = [("attempt", attempt_id)] if attempt_id is not None else []
        return await self._ask("GET", f"/api/rollouts/{rollout_id}/calls", list[Call], query=query)

    async def events(
        self, rollout_id: str, attempt_id: str | None = None, event_type: str | None = None
    ) -> list[Event]:
        """The events of an attempt (None: of the last one) in order of time."""
        asked = {"attempt": attempt_id, "event_type": event_type}
        query = [(name, value) for name, value in asked.items() if value is not None]
        return await self._ask("GET", f"/api/rollouts/{rollout_id}/events", list[Event], query=query)

    async def add_event(self, rollout_id: str, attempt_id: str, event: NewEvent) -> Event:
        path = f"/api/rollouts/{rollout_id}/attempt/{attempt_id}/events"
        return await self._ask("POST", path, Event, body=event, again=False)

    # Models and the gate

    async def models(self) -> list[ModelEndpoint]:
        return await self._ask("GET", "/api/models", list[ModelEndpoint])

    async def put_models(self, models: Sequence[ModelEndpoint]) -> list[ModelEndpoint]:
        """Register endpoints; one known by model and endpoint takes the new version."""
        return await self._ask("POST", "/api/models", list[ModelEndpoint], body=list(models))

    async def clear_models(self) -> None:
        await self._ask("DELETE", "/api/models")

    async def prune(self, request: PruneRequest) -> PruneResult:
        """Remove the tokens and messages of finished rollouts that nobody needs any more."""
        return await self._ask("POST", "/api/store/prune", PruneResult, body=request)

    async def pause(self, request: PauseRequest) -> GateState:
        """Close the gate: further calls are held or refused."""
        return await self._ask("POST", "/proxy/pause", GateState, body=request)

    async def resume(self) -> GateState:
        return await self._ask("POST", "/proxy/resume", GateState)

    async def gate(self) -> GateState:
        return await self._ask("GET", "/proxy/state", GateState)

    async def health(self) -> bool:
        """Whether a gateway answers at the URL now."""
        try:
            return (await self._http.get("/healthz")).is_success
        except httpx.TransportError:
            return False

    # Sending

    async def _ask(
        self,
        method: str,
        path: str,
        kind: type[T] = NoneType,
        *,
        body: Any = None,
        query: Sequence[tuple[str, str]] = (),
        wait: float = 0.0,
        again: bool = True,
    ) -> T:
        if wait:
            query = [*query, ("wait", str(wait))]
        answer, _ = await self._send(self._build(method, path, body, query, wait), again=again)
        return _read(answer, kind)

    def _build(
        self, method: str, path: str, body: Any = None, query: Sequence[tuple[str, str]] = (), wait: float = 0.0
    ) -> httpx.Request:
        return self._http.build_request(
            method,
            path,
            params=list(query),
            content=None if body is None else msgspec.json.encode(body),
            headers={"content-type": "application/json"},
            timeout=httpx.Timeout(ANSWER_SECONDS + wait, connect=10.0, pool=None),
        )

    async def _send(self, request: httpx.Request, *, again: bool) -> tuple[httpx.Response, bool]:
        """The answer, and whether an earlier try of the same request may have arrived too."""
        loop = asyncio.get_running_loop()
        end, pause, repeated = loop.time() + self._retry_seconds, 0.05, False
        while True:
            try:
                answer = await self._http.send(request)
                if answer.status_code != 503 or loop.time() + pause > end:
                    return answer, repeated
                repeated = True  # a record without room, or whose database is away: most likely nothing was written
            except httpx.TransportError as error:
                arrived = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
                if (arrived and not again) or loop.time() + pause > end:
                    words = str(error) or type(error).__name__
                    raise ApiError(0, f"the gateway at {self.url} cannot be reached: {words}") from error
                repeated = repeated or arrived
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)


def _read(answer: httpx.Response, kind: type[T]) -> T:
    if not answer.is_success:
        raise ApiError(answer.status_code, _words(answer))
    return msgspec.json.decode(b"null" if kind is NoneType else answer.content, type=kind)


def _words(answer: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(answer.content, type=dict)["detail"])
    except (msgspec.DecodeError, KeyError):
        return answer.text[:500] or answer.reason_phrase
