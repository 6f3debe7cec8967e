"""A gateway's client in memory, and what the controller's tests start agents with."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from longrein.client import ApiError, Client
from longrein.config import Config
from longrein.controller.reconcile import run_controller
from longrein.records import (
    TERMINAL,
    Attempt,
    Call,
    EndAttempt,
    Event,
    GateState,
    NewEvent,
    NewRollout,
    Rollout,
    RolloutState,
    RolloutStatus,
    StartedAttempt,
    StatusChange,
)


class FakeClient(Client):
    """Keeps rollouts in dictionaries and follows the gateway's rules. `broken` makes calls raise."""

    def __init__(self) -> None:
        self.url = "http://gateway.test"
        self.store: dict[str, Rollout] = {}
        self.tries: dict[str, list[Attempt]] = {}
        self.posted: dict[tuple[str, str], list[Event]] = {}
        self.recorded: dict[tuple[str, str], list[Call]] = {}
        self.broken: Callable[[str], Exception | None] = lambda method: None
        self.paused = False
        self.changed = asyncio.Condition()

    async def _enter(self, method: str) -> None:
        await asyncio.sleep(0)
        error = self.broken(method)
        if error is not None:
            raise error

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _rollout(self, rollout_id: str) -> Rollout:
        if rollout_id not in self.store:
            raise ApiError(404, f"no rollout {rollout_id}")
        return self.store[rollout_id]

    async def add_rollouts(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        made = [
            Rollout(new.rollout_id or f"r{len(self.store)}", new.input, new.is_train, new.config) for new in rollouts
        ]
        for number, rollout in enumerate(made):
            rollout.rollout_id = rollouts[number].rollout_id or f"r{len(self.store)}"
            rollout.status = RolloutStatus()
            self.store[rollout.rollout_id] = rollout
            self.tries[rollout.rollout_id] = []
        await self._notify()
        return made

    async def rollouts(self, states: Any = None, limit: int = 500, wait: float = 0.0) -> list[Rollout]:
        await self._enter("rollouts")

        def found() -> list[Rollout]:
            return [r for r in self.store.values() if not states or r.status.state in states][:limit]

        async with self.changed:
            try:
                await asyncio.wait_for(self.changed.wait_for(lambda: bool(found())), wait or 0.01)
            except TimeoutError:
                return []
            return found()

    async def change_rollout(self, rollout_id: str, change: StatusChange) -> Rollout:
        await self._enter("change_rollout")
        status = self._rollout(rollout_id).status
        if status.state in TERMINAL:
            raise ApiError(409, "terminal")
        status.state = change.state or status.state
        status.error_message = change.error_message or status.error_message
        await self._notify()
        return self.store[rollout_id]

    async def start_attempt(self, rollout_id: str) -> StartedAttempt:
        await self._enter("start_attempt")
        rollout, tries = self._rollout(rollout_id), self.tries[rollout_id]
        if rollout.status.state in TERMINAL or (tries and tries[-1].ended_at is None):
            raise ApiError(409, "terminal or running")
        attempt = Attempt(rollout_id, str(len(tries)), started_at=time.time())
        tries.append(attempt)
        rollout.status.state = RolloutState.running
        await self._notify()
        return StartedAttempt(rollout, attempt, f"lr-at-{rollout_id}-{attempt.attempt_id}")

    async def end_attempt(self, rollout_id: str, attempt_id: str, end: EndAttempt) -> Attempt:
        await self._enter("end_attempt")
        record = self.tries[rollout_id][int(attempt_id)]
        if record.ended_at is not None:
            raise ApiError(409, "ended")
        record.ended_at = time.time()
        record.outcome, record.exit_code, record.reason, record.usage = (
            end.outcome,
            end.exit_code,
            end.reason,
            end.usage,
        )
        await self._notify()
        return record

    async def attempts(self, rollout_id: str) -> list[Attempt]:
        await self._enter("attempts")
        return self.tries[rollout_id]

    async def calls(self, rollout_id: str, attempt_id: str | None = None) -> list[Call]:
        await self._enter("calls")
        return self.recorded.get((rollout_id, attempt_id or "0"), [])

    async def events(
        self, rollout_id: str, attempt_id: str | None = None, event_type: str | None = None
    ) -> list[Event]:
        await self._enter("events")
        return [e for e in self.posted.get((rollout_id, attempt_id or "0"), []) if event_type in (None, e.event_type)]

    async def add_event(self, rollout_id: str, attempt_id: str, event: NewEvent) -> Event:
        await self._enter("add_event")
        made = Event(event.event_type, rollout_id, attempt_id, time.time(), event.data)
        self.posted.setdefault((rollout_id, attempt_id), []).append(made)
        return made

    async def health(self) -> bool:
        return self.broken("health") is None

    async def gate(self) -> GateState:
        await self._enter("gate")
        return GateState(self.paused, 5.0, None, 0)

    async def until(self, true: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait until something about the store is true."""
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(true), seconds)

    async def until_finished(self, seconds: float = 30.0) -> None:
        await self.until(lambda: all(r.status.state in TERMINAL for r in self.store.values()), seconds)


def make_config(tmp_path: Path, **sections: dict[str, Any]) -> Config:
    run = {"dir": str(tmp_path / "runs"), "name": "r", "folder": str(tmp_path)}
    # These agents write into the test's own folder; tests of whom agents run as say otherwise.
    user = {"user": "root"} if os.geteuid() == 0 else {}
    agent = {"command": ["true"], "max_concurrent": 4, "grace_seconds": 0.5, **user, **sections.pop("agent", {})}
    reward = {"function": "grader:grade", **sections.pop("reward", {})}
    return Config.model_validate({"run": run, "agent": agent, "reward": reward, **sections})


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@asynccontextmanager
async def controlling(config: Config, client: Client, **options: Any) -> AsyncIterator[asyncio.Event]:
    """A running controller; stopped, with its errors raised, on exit."""
    stop = asyncio.Event()
    task = asyncio.create_task(run_controller(config, client, stop, **options))
    try:
        yield stop
    finally:
        stop.set()
        await asyncio.wait_for(task, 40)


async def until(true: Callable[[], bool]) -> None:
    """Wait for what only the file system or process table tells."""
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
