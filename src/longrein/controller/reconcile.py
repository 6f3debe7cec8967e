"""The loop from queued rollouts to graded ones.

A rollout is taken as soon as a slot (`agent.max_concurrent`) is free, its agent is run to the end, which frees the slot,
and its attempt is ended, graded and its rollout finished. There is no tick: the queue is a long poll, a slot an event, a
rollout that is cancelled or deleted another long poll. One controller serves a gateway's run; where an earlier one was
killed it goes on: with agents that still run, with what those that ended left, with rewards that were not posted.

An attempt that infrastructure failed is followed by another one, after a pause, up to `agent.max_attempts`; its rollout
then fails. What the agent did, its exit status and timeout included, is graded as it stands, unless `agent.on_failure` or
`agent.on_timeout` says otherwise: a rollout *succeeded* when it has a reward, and *failed* when it has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from longrein.audit.audit import Auditor, Verdict
from longrein.client import ApiError, Client
from longrein.config import Config
from longrein.controller.adoption import Control, take_control
from longrein.controller.confinement import open_confinement
from longrein.controller.grading import GradeError, Graders, posted_grade
from longrein.controller.line import FIRST_PAUSE, LONGEST_PAUSE, Line
from longrein.controller.local import (
    STOPPED,
    Ended,
    Site,
    attempt_directory,
    base_environment,
    go_on,
    make_launcher,
    require_local_processes,
    run_agent,
)
from longrein.controller.takeup import LOST, WITHDRAWN, Left, take_up
from longrein.controller.warmstart import InfrastructureError, Launcher, StartError
from longrein.records import (
    Attempt,
    Call,
    EndAttempt,
    Event,
    Json,
    NewEvent,
    Outcome,
    Rollout,
    RolloutState,
    StartedAttempt,
    StatusChange,
)
from longrein.trajectory.prompts import messages_of

logger = logging.getLogger(__name__)

POLL_SECONDS = 30.0
GATE_SECONDS = 1.0
GRADE_WORKERS = 4


@dataclass(frozen=True)
class Change:
    """What `on_change` of `run_controller` is told: an attempt started or ended, or its rollout is finished."""

    what: Literal["started", "ended", "finished"]
    rollout_id: str
    attempt_id: str
    running: int
    grading: int


@dataclass
class _Taken:
    """A rollout that this controller has taken."""

    task: asyncio.Task[None]
    cut: asyncio.Event
    """Set when its agent is to end: at stop, or because the rollout is withdrawn."""
    withdrawn: bool = False


@dataclass
class _Controller:
    config: Config
    client: Client
    stop: asyncio.Event
    line: Line
    site: Site
    control: Control
    graders: Graders
    auditor: Auditor
    tell: Callable[[Change], Any]
    condition: asyncio.Condition = field(default_factory=asyncio.Condition)
    taken: dict[str, _Taken] = field(default_factory=dict)
    """By rollout id."""
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
    Raises `ConfigError` for a configuration that no agent can be run with, or while another controller runs this run's.
    """
    require_local_processes()
    auditor = Auditor(config.audit)
    run = config.run.path
    with take_control(run / "control", config.agent.adopt_seconds) as control:
        launcher = make_launcher(config.agent, run / "logs" / "launcher.log")
        folder = Path.cwd() / config.run.folder
        workers = min(GRADE_WORKERS, os.cpu_count() or 1, config.agent.max_concurrent)
        log = run / "logs" / "grader.log"
        line = Line(client, stop)
        control.gateway = lambda: line.instance
        async with (
            open_confinement(config, client.url) as confinement,
            Graders(config.reward, folder, base_environment(), log, workers=workers) as graders,
        ):
            site = Site(
                *(config.agent, folder, run / "attempts", client.url, launcher, lambda: control.held),
                control=control,
                confinement=confinement,
                git=config.workspace.git,
            )
            controller = _Controller(
                config=config,
                client=client,
                stop=stop,
                line=line,
                site=site,
                control=control,
                graders=graders,
                auditor=auditor,
                tell=on_change or (lambda change: None),
            )
            helpers = [asyncio.create_task(_cut_at_stop(controller)), asyncio.create_task(_watch_gateway(controller))]
            helpers.append(asyncio.create_task(_warm(controller, launcher)))
            try:
                await _take_up(controller)
                helpers.append(asyncio.create_task(_watch_withdrawn(controller)))
                await _take(controller)
                await _finish_all(controller)
            finally:
                left = [*helpers, *(taken.task for taken in controller.taken.values())]
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
                for journal in control.journals():  # of agents that were not taken up yet, at a stop so early
                    await control.end(journal)
                await launcher.close()


# --- Taking rollouts ----------------------------------------------------------------------------------------------


async def _take(controller: _Controller) -> None:
    """Take queued rollouts whenever there is room, until stop."""
    line, pause = controller.line, FIRST_PAUSE
    while not controller.stop.is_set():
        await controller.until(lambda: controller.room() > controller.waiting and not controller.starting)
        version, limit = controller.version, controller.room() - controller.waiting + controller.given_up
        poll = controller.client.rollouts([RolloutState.queuing], limit=max(1, limit), wait=POLL_SECONDS)
        try:
            queued = await line.or_stop(poll)
        except ApiError as error:
            line.note_away(error)
            logger.warning("the gateway does not give queued rollouts (%s); asking again in %.1f s", error, pause)
            await line.or_stop(asyncio.sleep(pause))
            pause = min(2 * pause, LONGEST_PAUSE)
            continue
        pause = FIRST_PAUSE
        fresh = [r.rollout_id for r in queued or [] if r.rollout_id not in controller.taken]
        controller.starting.update(fresh)
        await controller.changed(waiting=len(fresh))
        for rollout_id in fresh:
            _begin(controller, rollout_id, tried=0)
        if queued and not fresh:  # all listed were given up; ask again when something has changed
            await controller.until(lambda: controller.version != version)  # noqa: B023


async def _take_up(controller: _Controller) -> None:
    """Go on with the rollouts that an earlier controller left running."""
    try:
        found = await take_up(controller.line, controller.control, controller.config.agent.max_attempts)
    except ApiError:
        if controller.stop.is_set():
            return
        raise
    for left in found:
        runs = left.attempt is not None and left.attempt.ended_at is None
        await controller.changed(**{"running" if runs else "waiting": 1} if runs or left.attempt is None else {})
        _begin(controller, left.rollout.rollout_id, left.tried, left if left.attempt else None)


async def _abandon(controller: _Controller, rollout_id: str) -> None:
    """End attempts of a rollout whose token was lost on its way to this controller."""
    for attempt in await controller.line.insist(lambda: controller.client.attempts(rollout_id)):
        if attempt.ended_at is None:
            await controller.line.end_attempt(rollout_id, attempt.attempt_id, LOST)


def _begin(controller: _Controller, rollout_id: str, tried: int, left: Left | None = None) -> None:
    """Take a rollout. It was counted as waiting, or as running if it is left so."""
    cut = asyncio.Event()
    task = asyncio.create_task(_guarded(controller, rollout_id, tried, left))
    controller.taken[rollout_id] = _Taken(task, cut)
    if controller.stop.is_set():
        cut.set()


async def _guarded(controller: _Controller, rollout_id: str, tried: int, left: Left | None) -> None:
    try:
        await _rollout(controller, rollout_id, tried, left)
    except ApiError as error:  # it was deleted, or finished by somebody else, while it was run here
        logger.warning("rollout %s is given up: %s", rollout_id, error)
        if rollout_id in controller.starting:
            controller.starting.discard(rollout_id)
            await controller.changed(given_up=1)
            await controller.line.or_stop(asyncio.sleep(LONGEST_PAUSE))  # the queue may list it for ever
            await controller.changed(given_up=-1)
    except Exception as error:
        logger.exception("rollout %s failed in the controller", rollout_id)
        with contextlib.suppress(ApiError):
            await controller.line.fail(rollout_id, f"the controller failed: {type(error).__name__}: {error}")
    finally:
        controller.starting.discard(rollout_id)
        del controller.taken[rollout_id]
        await controller.changed()


# --- One rollout --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """An attempt whose agent has ended."""

    rollout: Rollout
    attempt: Attempt
    ended: Ended
    began: float
    """When the agent was started or taken over (monotonic)."""
    gateway: str
    """The gateway's instance when the agent was started."""

    @property
    def ids(self) -> tuple[str, str]:
        return self.rollout.rollout_id, self.attempt.attempt_id


async def _rollout(controller: _Controller, rollout_id: str, tried: int, left: Left | None) -> None:
    """Attempts of a rollout until one is not an infrastructure failure; then its reward."""
    pause, taken = FIRST_PAUSE, controller.taken[rollout_id]
    while True:
        if left is not None:
            run = await _go_on(controller, left)
            left = None
        else:
            run = await _run_next(controller, rollout_id)
            if run is None:
                break
            tried += 1
        await controller.changed(grading=1)
        try:
            if taken.withdrawn:
                await _end_withdrawn(controller, run)
                return
            if await _conclude(controller, run, last=tried >= controller.config.agent.max_attempts):
                _tell(controller, "finished", run.ids)
                return
        finally:
            await controller.changed(grading=-1)
        await controller.line.or_stop(asyncio.sleep(pause))
        pause = min(2 * pause, LONGEST_PAUSE)
        await controller.changed(waiting=1)
    if tried:
        await controller.line.fail(rollout_id, STOPPED)


async def _run_next(controller: _Controller, rollout_id: str) -> _Run | None:
    """The next attempt of a rollout that was counted as waiting; None at stop."""
    async with _slot(controller):
        if controller.stop.is_set():
            return None
        started = await _start_attempt(controller, rollout_id)
        if started is None:
            return None
        began, gateway = time.monotonic(), controller.line.instance
        _tell(controller, "started", (rollout_id, started.attempt.attempt_id))
        ended = await run_agent(controller.site, started, controller.taken[rollout_id].cut)
        return _Run(started.rollout, started.attempt, ended, began, gateway)


async def _go_on(controller: _Controller, left: Left) -> _Run:
    """What an earlier controller began. If its agent has not ended, it was counted as running."""
    rollout, attempt, journal = left.rollout, left.attempt, left.journal
    assert attempt is not None
    gateway = journal.gateway if journal else controller.line.instance
    if attempt.ended_at is None:
        try:
            cut = controller.taken[rollout.rollout_id].cut
            ended = await go_on(controller.site, rollout, attempt, journal, cut)
        finally:
            await controller.changed(running=-1)
        return _Run(rollout, attempt, ended, 0.0, gateway)
    assert attempt.outcome is not None
    directory = attempt_directory(controller.site.attempts, rollout.rollout_id, attempt.attempt_id)
    timed_out = bool(journal and journal.exit and journal.exit.cut == "timeout")
    ended = Ended(attempt.outcome, attempt.exit_code, attempt.reason, attempt.usage, directory, timed_out=timed_out)
    return _Run(rollout, attempt, ended, 0.0, gateway)


async def _conclude(controller: _Controller, run: _Run, *, last: bool) -> bool:
    """End an attempt whose agent has ended, and finish its rollout unless another attempt is due; whether it did."""
    rollout_id, attempt_id = run.ids
    calls = await controller.line.insist(lambda: controller.client.calls(rollout_id, attempt_id))
    if run.attempt.ended_at is None:
        ended = await _blame(controller, run, calls)
        end = EndAttempt(ended.outcome, ended.exit_code, ended.reason, ended.usage)
        await controller.line.end_attempt(rollout_id, attempt_id, end)
        _tell(controller, "ended", run.ids)
    else:
        ended = run.ended
    if ended.outcome is not Outcome.infrastructure_failed:
        await _settle(controller, run, ended, calls)
        controller.control.forget(*run.ids)
        return True
    logger.warning("attempt %s of rollout %s: %s", attempt_id, rollout_id, ended.reason)
    if last or ended.final:
        await controller.line.fail(rollout_id, ended.reason or "infrastructure failure")
    controller.control.forget(*run.ids)
    return last or ended.final


async def _end_withdrawn(controller: _Controller, run: _Run) -> None:
    """End the attempt of a rollout that somebody finished or deleted."""
    logger.info("attempt %s of rollout %s was ended: %s", *reversed(run.ids), WITHDRAWN)
    end = EndAttempt(Outcome.infrastructure_failed, run.ended.exit_code, WITHDRAWN, run.ended.usage)
    try:
        await controller.line.end_attempt(*run.ids, end)
    except ApiError as error:
        if error.status != 404:  # 404: it was deleted
            raise
    controller.control.forget(*run.ids)
    _tell(controller, "ended", run.ids)


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
    line, pause = controller.line, FIRST_PAUSE
    while not controller.stop.is_set():
        try:
            async with line.requests:
                started = await controller.client.start_attempt(rollout_id)
            controller.starting.discard(rollout_id)
            await controller.changed()
            return started
        except ApiError as error:
            if not line.note_away(error):
                raise
            logger.warning("the gateway is away (%s); starting rollout %s again in %.1f s", error, rollout_id, pause)
        await line.or_stop(asyncio.sleep(pause))
        pause = min(2 * pause, LONGEST_PAUSE)
        await _abandon(controller, rollout_id)
    return None


async def _blame(controller: _Controller, run: _Run, calls: Sequence[Call]) -> Ended:
    """Find the infrastructure behind an agent's end: an engine that failed its last call, a gateway that was away."""
    ended = run.ended
    if ended.outcome is Outcome.infrastructure_failed:
        return ended
    last = calls[-1] if calls else None
    why = None
    if last is not None and last.status == "error" and not 400 <= last.http_status < 500:
        said = (last.error or {}).get("message") or last.error
        why = f"the engine failed the agent's last call ({last.http_status}: {said})"
    elif ended.outcome is Outcome.agent_failed and await _was_away(controller, run):
        why = "the gateway was away while the agent ran"
    if why is None:
        return ended
    reason = f"{why}; the agent: {ended.reason}" if ended.reason else why
    return replace(ended, outcome=Outcome.infrastructure_failed, reason=reason)


async def _was_away(controller: _Controller, run: _Run) -> bool:
    """Whether the gateway was found away since the agent was started, or is another process than then."""
    if controller.line.away_at >= run.began:
        return True
    return await controller.line.current_instance() != run.gateway


async def _settle(controller: _Controller, run: _Run, ended: Ended, calls: Sequence[Call]) -> None:
    """Find the reward of an ended attempt and finish its rollout."""
    rollout_id, line = run.ids[0], controller.line
    try:
        # The controller that ended the attempt may have posted its reward too.
        if run.attempt.ended_at is None or not await _posted(controller, run):
            verdict = await _audited(controller, run, calls)
            data = await _reward(controller, run, ended, calls)
            # An agent's own is there already; the last reward of an attempt counts.
            if data["source"] != "agent" or verdict.rules("zero"):
                await _post(controller, run, verdict.reward(data))
    except GradeError as error:
        logger.warning("rollout %s has no reward: %s", rollout_id, error)
        await line.fail(rollout_id, str(error))
        return
    change = StatusChange(state=RolloutState.succeeded, error_message=ended.reason)
    await line.insist(lambda: controller.client.change_rollout(rollout_id, change))


async def _reward(controller: _Controller, run: _Run, ended: Ended, calls: Sequence[Call]) -> Json:
    """The data of an ended attempt's reward event: its `value`, and its `source`. Raises `GradeError`."""
    agent, line = controller.config.agent, controller.line
    if ended.outcome is Outcome.agent_failed:
        option = "agent.on_timeout" if ended.timed_out else "agent.on_failure"
        policy = agent.on_timeout if ended.timed_out else agent.on_failure
        if policy == "drop":
            raise GradeError(f"{ended.reason}\n(dropped: {option} = 'drop')")
        if policy == "zero":
            return {"value": 0.0, "source": "controller", "reason": f"{option} = 'zero'"}
    if controller.config.reward.from_ == "agent":
        if not controller.said_agents_grade:
            controller.said_agents_grade = True
            logger.warning(
                "reward.from = 'agent': rewards are what agents post, and anything in an agent's process can post one"
            )
        events = await line.insist(lambda: controller.client.events(*run.ids, "reward"))
        return {"value": posted_grade(events).reward, "source": "agent"}
    grading = controller.graders.grade(
        run.rollout.input,
        transcript(calls),
        ended.directory / "work",
        ended.exit_code,
        label="rollout {} attempt {}".format(*run.ids),
    )
    grade = await line.or_stop(grading, late=agent.grace_seconds)
    if grade is None:
        raise GradeError(f"{STOPPED} before the grader answered")
    data: Json = {"value": grade.reward, "source": "grader"}
    if grade.metrics:
        data["metrics"] = grade.metrics
    if unknown := sorted(grade.calls.keys() - {call.number for call in calls}):
        raise GradeError(f"the grader rewards call {unknown[0]}, and the attempt has no call of that number")
    if grade.calls:
        data["calls"] = {str(number): reward for number, reward in grade.calls.items()}
    return data


async def _post(controller: _Controller, run: _Run, data: Json) -> None:
    """Post a reward, once: if the answer is lost, it is looked up whether the reward arrived."""
    tried = False

    async def post() -> Event | bool:
        nonlocal tried
        if tried and await _rewarded(controller, run):
            return True
        tried = True
        return await controller.client.add_event(*run.ids, NewEvent("reward", data))

    await controller.line.insist(post)


async def _posted(controller: _Controller, run: _Run) -> bool:
    """Whether a controller has posted the attempt's reward. Waits for a gateway that is away."""
    return await controller.line.insist(lambda: _rewarded(controller, run))


async def _rewarded(controller: _Controller, run: _Run) -> bool:
    events = await controller.client.events(*run.ids, "reward")
    return any(event.data.get("source") in ("grader", "controller", "audit") for event in events)


async def _audited(controller: _Controller, run: _Run, calls: Sequence[Call]) -> Verdict:
    """What an attempt tried, recorded. Raises `GradeError` where the run file has it dropped for that."""
    verdict = await asyncio.to_thread(controller.auditor.judge, calls)
    for event in verdict.events():
        await controller.line.insist(lambda: controller.client.add_event(*run.ids, event))  # noqa: B023
    if verdict.dropped is not None:
        raise GradeError(verdict.dropped)
    return verdict


def transcript(calls: Sequence[Call]) -> list[Json]:
    """The messages of the last answered call of an attempt's main conversation, its reply at the end; [] without one."""
    answered = [call for call in calls if call.kind == "main" and call.status == "ok"]
    if not answered:
        return []
    last = answered[-1]
    return [*messages_of({call.number: call for call in calls}, last), last.reply]


# --- Beside the loop ----------------------------------------------------------------------------------------------


def _tell(controller: _Controller, what: Literal["started", "ended", "finished"], ids: tuple[str, str]) -> None:
    controller.tell(Change(what, *ids, controller.running, controller.grading))


async def _cut_at_stop(controller: _Controller) -> None:
    await controller.stop.wait()
    for taken in controller.taken.values():
        taken.cut.set()
    await controller.changed()


async def _watch_withdrawn(controller: _Controller) -> None:
    """Have the agents of rollouts end that somebody finishes or deletes."""
    pause = FIRST_PAUSE
    while True:
        try:
            for rollout_id in await controller.line.withdrawn(lambda: list(controller.taken), POLL_SECONDS):
                if taken := controller.taken.get(rollout_id):
                    taken.withdrawn = True
                    taken.cut.set()
            pause = FIRST_PAUSE
        except ApiError as error:
            controller.line.note_away(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


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
            still = controller.line.note_away(error)
        await asyncio.sleep(GATE_SECONDS)
        if still:
            controller.control.add_held(time.monotonic() - began)


async def _finish_all(controller: _Controller) -> None:
    """After stop: agents are being ended and grades get their grace; what is left then is cut off."""
    tasks = [taken.task for taken in controller.taken.values()]
    if tasks:
        await asyncio.wait(tasks, timeout=2 * controller.config.agent.grace_seconds + 15.0)
