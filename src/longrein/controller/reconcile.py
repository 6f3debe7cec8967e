"""The loop from queued rollouts to graded ones.

A rollout is taken as soon as a slot (`agent.max_concurrent`) is free, its agent is run to the end, which frees the slot,
and its attempt is ended, graded and its rollout finished. There is no tick: the queue is a long poll, a slot an event.
One controller serves a gateway; what an earlier one left unfinished it takes up when it starts.

An attempt that infrastructure failed is followed by another one, after a pause, up to `agent.max_attempts`; its rollout
then fails. What the agent did, its exit status and timeout included, is graded as it stands: a rollout *succeeded* when it
has a reward, and *failed* when it has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from longrein.client import ApiError, Client
from longrein.config import Config
from longrein.controller.grading import GradeError, Graders, posted_grade
from longrein.controller.local import (
    STOPPED,
    Ended,
    Site,
    base_environment,
    make_launcher,
    require_local_processes,
    run_agent,
)
from longrein.controller.warmstart import InfrastructureError, Launcher, StartError
from longrein.records import (
    Call,
    EndAttempt,
    Json,
    NewEvent,
    Outcome,
    RolloutState,
    StartedAttempt,
    StatusChange,
)
from longrein.trajectory.prompts import messages_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 30.0
GATE_SECONDS = 1.0
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 15.0
GRADE_WORKERS = 4

REQUESTS = 4  # asked of the gateway at once; more make each of them dearer (a pool of connections to search)
STOP_SECONDS = 5.0  # longest wait for the gateway once the controller is to stop


@dataclass(frozen=True)
class Change:
    """What `on_change` of `run_controller` is told: an attempt started or ended, or its rollout is finished."""

    what: Literal["started", "ended", "finished"]
    rollout_id: str
    attempt_id: str
    running: int
    grading: int


@dataclass
class _Controller:
    config: Config
    client: Client
    stop: asyncio.Event
    site: Site
    graders: Graders
    tell: Callable[[Change], Any]
    requests: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(REQUESTS))
    condition: asyncio.Condition = field(default_factory=asyncio.Condition)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """The rollouts taken, by id."""
    waiting: int = 0
    """Rollouts taken whose (next) attempt has no slot yet."""
    starting: set[str] = field(default_factory=set)
    """Rollouts taken that the queue still lists."""
    given_up: int = 0
    """Rollouts that the queue may list though they cannot be started."""
    running: int = 0
    grading: int = 0
    """Attempts whose agent has ended and whose rollout has not."""
    version: int = 0
    held: float = 0.0
    """Seconds for which the gateway was paused or away while agents ran."""
    away_at: float = float("-inf")
    """When the gateway was last found away (monotonic)."""
    said_agents_grade: bool = False

    def room(self) -> int:
        """Free slots. Grading takes none, unless grades pile up: then agents wait for them."""
        most = self.config.agent.max_concurrent
        return most - self.running - max(0, self.grading - most)

    async def changed(self, **counts: int) -> None:
        async with self.condition:
            for name, change in counts.items():
                setattr(self, name, getattr(self, name) + change)
            self.version += 1
            self.condition.notify_all()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until `true()` or stop."""
        async with self.condition:
            await self.condition.wait_for(lambda: true() or self.stop.is_set())


async def run_controller(
    config: Config, client: Client, stop: asyncio.Event, on_change: Callable[[Change], Any] | None = None
) -> None:
    """Run and grade the gateway's queued rollouts until `stop` is set; no process is left behind.

    Rollouts whose attempt the stop cuts short fail (their attempt as an infrastructure failure); queued ones stay queued.
    Raises `ConfigError` for a configuration that no agent can be run with.
    """
    require_local_processes()
    run = config.run.path
    launcher = make_launcher(config.agent, run / "logs" / "launcher.log")
    folder = Path.cwd() / config.run.folder
    workers = min(GRADE_WORKERS, os.cpu_count() or 1, config.agent.max_concurrent)
    log = run / "logs" / "grader.log"
    async with Graders(config.reward, folder, base_environment(), log, workers=workers) as graders:
        controller = _Controller(
            config=config,
            client=client,
            stop=stop,
            site=Site(config.agent, folder, run / "attempts", client.url, launcher, lambda: controller.held),
            graders=graders,
            tell=on_change or (lambda change: None),
        )
        helpers = [asyncio.create_task(_wake_at_stop(controller)), asyncio.create_task(_watch_gateway(controller))]
        helpers.append(asyncio.create_task(_warm(controller, launcher)))
        try:
            await _take_up(controller)
            await _take(controller)
            await _finish_all(controller)
        finally:
            left = [*helpers, *controller.tasks.values()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await launcher.close()


# --- Taking rollouts ----------------------------------------------------------------------------------------------


async def _take(controller: _Controller) -> None:
    """Take queued rollouts whenever there is room, until stop."""
    pause = FIRST_PAUSE
    while not controller.stop.is_set():
        await controller.until(lambda: controller.room() > controller.waiting and not controller.starting)
        version, limit = controller.version, controller.room() - controller.waiting + controller.given_up
        poll = controller.client.rollouts([RolloutState.queuing], limit=max(1, limit), wait=POLL_SECONDS)
        try:
            queued = await _or_stop(controller, poll)
        except ApiError as error:
            _note_away(controller, error)
            logger.warning("the gateway does not give queued rollouts (%s); asking again in %.1f s", error, pause)
            await _or_stop(controller, asyncio.sleep(pause))
            pause = min(2 * pause, LONGEST_PAUSE)
            continue
        pause = FIRST_PAUSE
        fresh = [r.rollout_id for r in queued or [] if r.rollout_id not in controller.tasks]
        for rollout_id in fresh:
            controller.starting.add(rollout_id)
            await _begin(controller, rollout_id, tried=0)
        if queued and not fresh:  # all listed were given up; ask again when something has changed
            await controller.until(lambda: controller.version != version)  # noqa: B023


async def _take_up(controller: _Controller) -> None:
    """Go on with rollouts that an earlier controller left running: their open attempts were lost with it."""
    try:
        running = await _insist(controller, lambda: controller.client.rollouts([RolloutState.running], limit=1000))
    except ApiError:
        if controller.stop.is_set():
            return
        raise
    for rollout in running:
        tried = await _abandon(controller, rollout.rollout_id)
        if tried >= controller.config.agent.max_attempts:
            await _fail(controller, rollout.rollout_id, "its controller ended before it did")
        elif tried:  # without an attempt it is somebody else's, who runs its agent without a controller
            logger.info("rollout %s was left running; it gets another attempt", rollout.rollout_id)
            await _begin(controller, rollout.rollout_id, tried=tried)


async def _abandon(controller: _Controller, rollout_id: str) -> int:
    """End attempts of a rollout that nobody runs; how many attempts it had."""
    attempts = await _insist(controller, lambda: controller.client.attempts(rollout_id))
    for attempt in attempts:
        if attempt.ended_at is None:
            end = EndAttempt(Outcome.infrastructure_failed, reason="its controller is gone")
            await _end_attempt(controller, rollout_id, attempt.attempt_id, end)
    return len(attempts)


async def _begin(controller: _Controller, rollout_id: str, tried: int) -> None:
    await controller.changed(waiting=1)
    controller.tasks[rollout_id] = asyncio.create_task(_guarded(controller, rollout_id, tried))


async def _guarded(controller: _Controller, rollout_id: str, tried: int) -> None:
    try:
        await _rollout(controller, rollout_id, tried)
    except ApiError as error:  # it was deleted, or finished by somebody else, while it was run here
        logger.warning("rollout %s is given up: %s", rollout_id, error)
        controller.starting.discard(rollout_id)
        await controller.changed(given_up=1)
        await _or_stop(controller, asyncio.sleep(LONGEST_PAUSE))  # the queue may list it for ever
        await controller.changed(given_up=-1)
    except Exception as error:
        logger.exception("rollout %s failed in the controller", rollout_id)
        with contextlib.suppress(ApiError):
            await _fail(controller, rollout_id, f"the controller failed: {type(error).__name__}: {error}")
    finally:
        controller.starting.discard(rollout_id)
        del controller.tasks[rollout_id]
        await controller.changed()


# --- One rollout --------------------------------------------------------------------------------------------------


async def _rollout(controller: _Controller, rollout_id: str, tried: int) -> None:
    """Attempts of a rollout until one is not an infrastructure failure; then its reward."""
    pause = FIRST_PAUSE
    while True:
        async with _slot(controller):
            if controller.stop.is_set():
                break
            started = await _start_attempt(controller, rollout_id)
            if started is None:
                break
            tried += 1
            began = time.monotonic()
            _tell(controller, "started", started)
            ended = await run_agent(controller.site, started, controller.stop)
        await controller.changed(grading=1)
        try:
            if await _conclude(controller, started, ended, began, last=tried >= controller.config.agent.max_attempts):
                _tell(controller, "finished", started)
                return
        finally:
            await controller.changed(grading=-1)
        await _or_stop(controller, asyncio.sleep(pause))
        pause = min(2 * pause, LONGEST_PAUSE)
        await controller.changed(waiting=1)
    if tried:
        await _fail(controller, rollout_id, STOPPED)


async def _conclude(
    controller: _Controller, started: StartedAttempt, ended: Ended, began: float, *, last: bool
) -> bool:
    """End an attempt whose agent has ended, and finish its rollout unless another attempt is due; whether it did."""
    rollout_id, attempt_id = started.rollout.rollout_id, started.attempt.attempt_id
    calls = await _insist(controller, lambda: controller.client.calls(rollout_id, attempt_id))
    ended = _blame(controller, ended, calls, began)
    end = EndAttempt(ended.outcome, ended.exit_code, ended.reason, ended.usage)
    await _end_attempt(controller, rollout_id, attempt_id, end)
    _tell(controller, "ended", started)
    if ended.outcome is not Outcome.infrastructure_failed:
        await _settle(controller, started, ended, calls)
        return True
    logger.warning("attempt %s of rollout %s: %s", attempt_id, rollout_id, ended.reason)
    if last or ended.final:
        await _fail(controller, rollout_id, ended.reason or "infrastructure failure")
        return True
    return False


@contextlib.asynccontextmanager
async def _slot(controller: _Controller) -> AsyncIterator[None]:
    """A slot, once there is one. Entered without one at stop. The caller was counted as waiting."""
    async with controller.condition:
        await controller.condition.wait_for(lambda: controller.room() > 0 or controller.stop.is_set())
        controller.waiting -= 1
        controller.running += 1
    try:
        yield
    finally:
        await controller.changed(running=-1)


async def _start_attempt(controller: _Controller, rollout_id: str) -> StartedAttempt | None:
    """A new attempt; None at stop. An attempt whose token was lost with the answer is ended and another started."""
    pause = FIRST_PAUSE
    while not controller.stop.is_set():
        try:
            async with controller.requests:
                started = await controller.client.start_attempt(rollout_id)
            controller.starting.discard(rollout_id)
            await controller.changed()
            return started
        except ApiError as error:
            if not _note_away(controller, error):
                raise
            logger.warning("the gateway is away (%s); starting rollout %s again in %.1f s", error, rollout_id, pause)
        await _or_stop(controller, asyncio.sleep(pause))
        pause = min(2 * pause, LONGEST_PAUSE)
        await _abandon(controller, rollout_id)
    return None


def _blame(controller: _Controller, ended: Ended, calls: Sequence[Call], began: float) -> Ended:
    """Find the infrastructure behind an agent's end: an engine that failed its last call, a gateway that was away."""
    if ended.outcome is Outcome.infrastructure_failed:
        return ended
    last = calls[-1] if calls else None
    why = None
    if last is not None and last.status == "error" and not 400 <= last.http_status < 500:
        said = (last.error or {}).get("message") or last.error
        why = f"the engine failed the agent's last call ({last.http_status}: {said})"
    elif ended.outcome is Outcome.agent_failed and controller.away_at >= began:
        why = "the gateway was away while the agent ran"
    if why is None:
        return ended
    reason = f"{why}; the agent: {ended.reason}" if ended.reason else why
    return replace(ended, outcome=Outcome.infrastructure_failed, reason=reason)


async def _settle(controller: _Controller, started: StartedAttempt, ended: Ended, calls: Sequence[Call]) -> None:
    """Find the reward of an ended attempt and finish its rollout."""
    rollout_id, attempt_id = started.rollout.rollout_id, started.attempt.attempt_id
    try:
        if controller.config.reward.from_ == "agent":
            if not controller.said_agents_grade:
                controller.said_agents_grade = True
                logger.warning(
                    "reward.from = 'agent': rewards are what agents post, and anything in an agent's process can post one"
                )
            events = await _insist(controller, lambda: controller.client.events(rollout_id, attempt_id, "reward"))
            posted_grade(events)
        else:
            grading = controller.graders.grade(
                started.rollout.input,
                transcript(calls),
                ended.directory / "work",
                ended.exit_code,
                label=f"rollout {rollout_id} attempt {attempt_id}",
            )
            grade = await _or_stop(controller, grading, late=controller.config.agent.grace_seconds)
            if grade is None:
                raise GradeError(f"{STOPPED} before the grader answered")
            data: Json = {"value": grade.reward, "source": "grader"}
            if grade.metrics:
                data["metrics"] = grade.metrics
            if unknown := sorted(grade.calls.keys() - {call.number for call in calls}):
                raise GradeError(f"the grader rewards call {unknown[0]}, and the attempt has no call of that number")
            if grade.calls:
                data["calls"] = {str(number): reward for number, reward in grade.calls.items()}
            await _insist(
                controller, lambda: controller.client.add_event(rollout_id, attempt_id, NewEvent("reward", data))
            )
    except GradeError as error:
        logger.warning("rollout %s has no reward: %s", rollout_id, error)
        await _fail(controller, rollout_id, str(error))
        return
    change = StatusChange(state=RolloutState.succeeded, error_message=ended.reason)
    await _insist(controller, lambda: controller.client.change_rollout(rollout_id, change))


def transcript(calls: Sequence[Call]) -> list[Json]:
    """The messages of the last answered call of an attempt's main conversation, its reply at the end; [] without one."""
    answered = [call for call in calls if call.kind == "main" and call.status == "ok"]
    if not answered:
        return []
    last = answered[-1]
    return [*messages_of({call.number: call for call in calls}, last), last.reply]


async def _end_attempt(controller: _Controller, rollout_id: str, attempt_id: str, end: EndAttempt) -> None:
    try:
        await _insist(controller, lambda: controller.client.end_attempt(rollout_id, attempt_id, end))
    except ApiError as error:
        if error.status != 409:  # 409: ended already, by a request whose answer was lost
            raise


async def _fail(controller: _Controller, rollout_id: str, why: str) -> None:
    change = StatusChange(state=RolloutState.failed, error_message=why)
    await _insist(controller, lambda: controller.client.change_rollout(rollout_id, change))


# --- Waiting ------------------------------------------------------------------------------------------------------


async def _insist(controller: _Controller, ask: Callable[[], Awaitable[T]]) -> T:
    """Ask the gateway until it answers. Once the controller is to stop, a gateway that is away is an error."""
    pause = FIRST_PAUSE
    while True:
        try:
            async with controller.requests:
                answer = await _or_stop(controller, ask(), late=STOP_SECONDS)
            if answer is None:  # which no request answers
                raise ApiError(0, f"{STOPPED} before the gateway answered")
            return answer
        except ApiError as error:
            if not _note_away(controller, error) or controller.stop.is_set():
                raise
            logger.warning("the gateway is away (%s); asking again in %.1f s", error, pause)
        await _or_stop(controller, asyncio.sleep(pause))
        pause = min(2 * pause, LONGEST_PAUSE)


def _note_away(controller: _Controller, error: ApiError) -> bool:
    """Whether an error says that the gateway cannot be reached or is broken; remembers when."""
    away = error.status == 0 or error.status >= 500
    if away:
        controller.away_at = time.monotonic()
    return away


async def _or_stop(controller: _Controller, work: Awaitable[T], late: float = 0.0) -> T | None:
    """The result of `work`, or None if the controller is to stop and `late` seconds later there is none; cancels it."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.create_task(controller.stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and late:
            await asyncio.wait({task}, timeout=late)
        return task.result() if task.done() else None
    finally:
        stopping.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _tell(controller: _Controller, what: Literal["started", "ended", "finished"], started: StartedAttempt) -> None:
    ids = started.rollout.rollout_id, started.attempt.attempt_id
    controller.tell(Change(what, *ids, controller.running, controller.grading))


async def _wake_at_stop(controller: _Controller) -> None:
    await controller.stop.wait()
    await controller.changed()


async def _warm(controller: _Controller, launcher: Launcher) -> None:
    """Have the launcher and a grader ready; what is wrong with them every attempt says by itself."""
    with contextlib.suppress(StartError, InfrastructureError, OSError):
        await launcher.start()
    if controller.config.reward.from_ == "function":
        with contextlib.suppress(GradeError, OSError):
            await controller.graders.warm()


async def _watch_gateway(controller: _Controller) -> None:
    """While agents run, add up the time in which the gateway was paused or away: attempts' clocks stand still then."""
    while True:
        await controller.until(lambda: controller.running > 0)
        began = time.monotonic()
        try:
            if not await controller.client.health():  # which does not wait for the gateway to come back
                raise ApiError(0, "no answer")
            still = (await controller.client.gate()).paused
        except ApiError as error:
            still = _note_away(controller, error)
        await asyncio.sleep(GATE_SECONDS)
        if still:
            controller.held += time.monotonic() - began


async def _finish_all(controller: _Controller) -> None:
    """After stop: agents are being ended and grades get their grace; what is left then is cut off."""
    if controller.tasks:
        await asyncio.wait(controller.tasks.values(), timeout=2 * controller.config.agent.grace_seconds + 15.0)
