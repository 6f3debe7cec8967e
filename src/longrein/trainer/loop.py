"""The training loop, top to bottom: collect groups of rollouts, learn from them, publish the new policy, again.

Before it: one attempt alone, evaluations and the warm-up. After it: evaluation and the last checkpoint. Everything the
loop knows of agents, graders and calls comes from the gateway over HTTP.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from longrein.client import ApiError, Client
from longrein.config import LOSSES, Config, ConfigError
from longrein.functions import load_function
from longrein.records import Json, PruneRequest, RolloutState, StatusChange
from longrein.tasks import TaskOrder, load_tasks
from longrein.trainer import checkpoint
from longrein.trainer.collect import Collector, Done, Group, Groups, RunFailed, attempts_of
from longrein.trainer.credit import Credit, staleness
from longrein.trainer.evaluate import evaluate, load_all
from longrein.trainer.journal import PREFIX, Journal, Learned, id_prefix_of, lessons
from longrein.trainer.preflight import preflight
from longrein.trainer.student import Student
from longrein.trainer.tracking import Tracker, read_metrics
from longrein.trainer.warmup import warm_up
from longrein.trainer.watch import LENGTH_SHARE, Watch, group_metrics, length_share
from longrein.trajectory.batch import FinishedRollout, Ledger, make_batch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from longrein.learning.loss import TokenLoss
    from longrein.trainer.torch.policy import Policy

REFRESH_SECONDS = 1.0  # between two looks at how many rollouts run, for the display


@dataclass(frozen=True)
class Data:
    """The tasks of a run."""

    train: list[Json]
    held_out: list[Json]
    dev: list[Json]


def load_data(config: Config) -> Data:
    """Read all tasks that a run needs. Raises `ConfigError` for what is missing or broken."""

    def read(name: str, needed: bool) -> list[Json]:
        source = getattr(config.task, name)
        if not source and not needed:
            return []
        return load_tasks(source, folder=config.run.folder, seed=config.run.seed, option=f"task.{name}")

    evaluates = config.eval.untuned or config.eval.before or config.eval.after or config.eval.every > 0
    train = read("train", needed=True)
    held_out = read("held_out", needed=evaluates)
    return Data(
        train=train,
        held_out=held_out[: config.eval.tasks] if config.eval.tasks else held_out,
        dev=read("dev", needed=config.warmup.steps > 0),
    )


async def make_student(config: Config, resume: Path | None) -> Student:
    """Load the policy (from a checkpoint when resuming), its learner and its engine, in the thread that will compute."""

    from longrein.trainer.torch.memory import keep_freed_memory

    def load() -> Student:
        return _load_student(config, resume, computer)

    keep_freed_memory()
    computer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="longrein-compute")
    return await asyncio.get_running_loop().run_in_executor(computer, load)


def _load_student(config: Config, resume: Path | None, computer: ThreadPoolExecutor) -> Student:
    import torch
    import transformers

    from longrein.trainer.torch.learner import Learner
    from longrein.trainer.torch.policy import PolicyError, load_policy
    from longrein.trainer.torch.server import EngineServer
    from longrein.trainer.vllm import VllmServers

    transformers.utils.logging.disable_progress_bar()
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    torch.manual_seed(config.run.seed)
    options = config.model
    if resume is not None and not options.lora.rank:
        options = options.model_copy(update={"path": str(resume)})
    try:
        policy = load_policy(options, config.run.seed)
    except PolicyError as error:
        raise ConfigError(str(error)) from error
    try:
        learner = Learner(
            policy,
            config.algorithm,
            config.trainer,
            config.model.autocast,
            config.gateway.train_temperature,
            loss=own_loss(config),
            reference=_load_reference(config),
        )
    except PolicyError as error:
        raise ConfigError(str(error)) from error
    if config.engine.kind == "vllm":
        engine = VllmServers(
            policy, config.engine.urls, config.run.path / "weights", computer, in_flight=config.gate.in_flight
        )
    else:
        engine = EngineServer(
            policy,
            config.engine,
            sample_dtype=config.model.sample_dtype,
            recompute=config.gate.kv_after_update == "recompute",
            computer=computer,
        )
    student = Student(policy, learner, engine, config.model.name)
    if resume is not None:
        student.restore(resume)
        student.version = checkpoint.read_state(resume).version
    return student


def own_loss(config: Config) -> TokenLoss | None:
    """The function that `algorithm.loss` names, or None. Raises `ConfigError` when it cannot be imported."""
    loss = config.algorithm.loss
    return load_function(loss, config.run.folder, "algorithm.loss") if loss not in LOSSES else None


def _load_reference(config: Config) -> Policy | None:
    """The policy that the divergence is measured from; None if there is none, or LoRA's base model is it."""
    from longrein.trainer.torch.policy import load_policy

    options = config.algorithm
    if not options.kl_coefficient or (config.model.lora.rank and not options.kl_reference):
        return None
    path = options.kl_reference or config.model.path
    changes = {"path": path, "lora": config.model.lora.model_copy(update={"rank": 0})}
    return load_policy(config.model.model_copy(update=changes), config.run.seed)


async def train(
    config: Config, data: Data, *, student: Student, client: Client, tracker: Tracker, resume: Path | None = None
) -> None:
    """A whole run, from its first attempt to its last evaluation; with `resume`, from that checkpoint on.

    What a run that was broken off had asked for behind its checkpoint is asked for again, and taken from the record as
    far as it is there: steps are done again from the same rollouts with the same random state, and the rest as if nothing
    had happened. Raises `RunFailed` when it cannot go on.
    """
    prefix = id_prefix(config)
    state = checkpoint.read_state(resume) if resume else None
    journal = Journal(config.run.path, state.step if state else None)
    tracker.begin(state.step if state else None)
    await student.start(client)
    try:
        if state is not None:
            await withdraw_warm_up(client, prefix)
        async with _collecting(client, tracker, journal, student) as collector:
            run = _Run.of(config, data, student, client, collector, tracker, journal, prefix)
            if state is not None:
                run.go_on(state)
            if config.trainer.preflight and (state is None or state.step < config.trainer.steps):
                with tracker.phase("preflight", "one attempt alone"):
                    await preflight(collector, data.train[0], config.run.path, prefix)
            if state is None:
                if config.eval.untuned:
                    await run.evaluate("untuned", 0)
                if config.warmup.steps:
                    await warm_up(
                        config,
                        student=student,
                        collector=collector,
                        tracker=tracker,
                        tasks=data.train,
                        dev_tasks=data.dev,
                        journal=journal,
                        prefix=prefix,
                    )
                if config.trainer.checkpoint_every:
                    await run.save(0)
            if config.eval.before and run.step == 0:
                await run.evaluate("before", 0)
            await run.steps()
            if config.eval.after:
                await run.evaluate("after", run.step)
            await run.save(run.step)
            await run.prune(run.step)
    except RunFailed:
        journal.gave_up()
        raise
    finally:
        await student.stop()
        journal.close()


@dataclass(kw_only=True)
class _Run:
    """What every part of a run needs."""

    config: Config
    data: Data
    student: Student
    collector: Collector
    tracker: Tracker
    journal: Journal
    order: TaskOrder
    groups: Groups
    prefix: str
    watch: Watch
    step: int = 0
    """The last one that is done."""
    seconds: float = 0.0
    """Time spent on steps so far."""
    credit: Credit
    saved: int = -1
    client: Client

    @classmethod
    def of(
        cls,
        config: Config,
        data: Data,
        student: Student,
        client: Client,
        collector: Collector,
        tracker: Tracker,
        journal: Journal,
        prefix: str,
    ) -> _Run:
        """A run at its beginning."""
        order = TaskOrder(len(data.train), seed=config.run.seed, shuffle=config.task.shuffle)
        groups = Groups(
            collector,
            data.train,
            order,
            size=config.algorithm.group_size,
            max_failed=config.trainer.max_failed_groups,
            run_folder=config.run.path,
            prefix=prefix,
            resample=config.algorithm.dynamic_sampling,
        )
        return cls(
            config=config,
            data=data,
            student=student,
            client=client,
            collector=collector,
            tracker=tracker,
            journal=journal,
            order=order,
            groups=groups,
            prefix=prefix,
            watch=Watch(),
            credit=Credit.of(config.algorithm, config.run.folder),
        )

    def go_on(self, state: checkpoint.TrainerState) -> None:
        """Go on from a checkpoint."""
        if state.order:
            self.order.load_state_dict(state.order)
        if state.groups:
            self.groups.load_state_dict(state.groups)
        if state.watch:
            self.watch.load_state_dict(state.watch)
        self.step = self.saved = state.step
        self.seconds = state.seconds

    async def steps(self) -> None:
        """Learn until `trainer.steps` or `trainer.max_seconds`."""
        config, tracker = self.config, self.tracker
        await self._evaluate_between(self.step)
        for step in range(self.step + 1, config.trainer.steps + 1):
            if 0 < config.trainer.max_seconds <= self.seconds:
                tracker.note(f"trainer.max_seconds = {config.trainer.max_seconds:g} reached after {step - 1} steps")
                return
            began = time.monotonic()
            values = await self._step(step, self.groups)
            self.seconds += time.monotonic() - began
            self.step = step
            tracker.step(step, values)
            for warning in self.watch.check(step, values):
                tracker.warn(warning)
            if config.trainer.checkpoint_every and step % config.trainer.checkpoint_every == 0:
                await self.save(step)
            await self.prune(step)
            await self._evaluate_between(step)

    async def _evaluate_between(self, step: int) -> None:
        """The evaluation that belongs between two steps, if one does."""
        every = self.config.eval.every
        if every and 0 < step < self.config.trainer.steps and step % every == 0:
            await self.evaluate(f"step-{step}", step)

    async def _step(self, step: int, groups: Groups) -> dict[str, float]:
        options, tracker, student = self.config.algorithm, self.tracker, self.student
        times = [time.monotonic()]
        with tracker.phase("collect", ""):
            whole = await groups.collect(options.groups_per_step, step)
        if groups.equal:
            tracker.replaced(step, [group.group_id for group in groups.equal])
        times.append(time.monotonic())
        with tracker.phase("learn", ""):
            updates, ledger, credited = await self._learn(whole, step)
        for group in groups.equal:
            for done in group.done:
                ledger.leave_out(done.finished.calls, "equal rewards")
        times.append(time.monotonic())
        with tracker.phase("publish", ""):
            if updates:
                await student.publish()
        times.append(time.monotonic())
        collected, learned, published = (later - sooner for sooner, later in pairwise(times))
        return {
            **group_metrics([*whole, *groups.equal], self.config.task.kind),
            **credited,
            **_mean_of(updates),
            **ledger.metrics(),
            "updates": len(updates),
            "version": student.version,
            "groups/dropped": groups.dropped,
            "groups/replaced": len(groups.equal),
            "tokens/per_second": ledger.sampled / max(collected, 1e-9),
            "time/collect": collected,
            "time/learn": learned,
            "time/publish": published,
        }

    async def _learn(
        self, groups: Sequence[Group], step: int
    ) -> tuple[list[dict[str, float]], Ledger, dict[str, float]]:
        """The updates of one step. Advantages come from whole groups, before anything is divided or dropped."""
        options = self.config.algorithm
        attempts = attempts_of([done for group in groups for done in group.done])
        rollouts = [done.finished for group in groups for done in group.done]
        graded = {r.rollout_id: 0.0 for r in rollouts if r.reward is not None}
        parts = divide(rollouts, options.updates_per_batch, f"{self.config.run.seed}/{step}")
        batches = [
            make_batch(part, graded, options.train_kinds, options.normaliser, options.normaliser_tokens)
            for part in parts
        ]
        rows = [row for batch in batches for row in batch.rows]
        if options.prepares:
            await self.student.prepare(rows)
        credited = {**self.credit.assign(rollouts, rows), **staleness(rows, self.student.version)}
        updates, ledger = [], Ledger()
        for number, (part, batch) in enumerate(zip(parts, batches, strict=True)):
            ledger += batch.ledger
            # Without an advantage there is mostly no gradient; an optimizer step would only move by old momentum and decay.
            if any(row.advantages.any() for row in batch.rows) or (options.learns_without_advantage and batch.rows):
                updates.append(await self.student.update(batch.rows))
            given = lessons({one.rollout_id: attempts[one.rollout_id] for one in part}, batch.rows)
            if not self.journal.learned(Learned("train", step, number, self.student.version, given)):
                self.tracker.warn(
                    f"step {step} was learned from other rollouts or tokens before this run was broken off: versions that "
                    "the record gives for tokens sampled since then are those of other weights"
                )
        return updates, ledger, credited

    async def evaluate(self, name: str, step: int) -> None:
        """Evaluate on the held-out tasks, unless this evaluation was made before (by the run that is resumed)."""
        config, tracker = self.config, self.tracker
        made = next((e for e in load_all(config.run.path) if (e.name, e.step) == (name, step)), None)
        if made is not None:
            told = {
                (line["name"], line["step"]) for line in read_metrics(config.run.path) if line["kind"] == "evaluation"
            }
            if (name, step) not in told:
                tracker.evaluation(made)
            return
        limit = config.eval.untuned_tasks if name == "untuned" else 0
        with tracker.phase("evaluate", name):
            found, done = await evaluate(
                self.collector,
                self.data.held_out[: limit or None],
                name=name,
                step=step,
                version=self.student.version,
                seed=config.run.seed,
                run_folder=config.run.path,
                rollouts_per_task=config.eval.rollouts_per_task,
                prefix=self.prefix,
            )
        tracker.evaluation(found)
        share = length_share([call for one in done for call in one.finished.calls])
        if share > LENGTH_SHARE:
            tracker.warn(f"{100 * share:.0f} % of the evaluation's calls hit the length limit")

    async def save(self, step: int) -> None:
        """Write the checkpoint of `step`, once."""
        if step == self.saved:
            return
        state = checkpoint.TrainerState(
            step=step,
            version=self.student.version,
            order=self.order.state_dict(),
            seconds=self.seconds,
            groups=self.groups.state_dict(),
            watch=self.watch.state_dict(),
        )
        self.journal.flush()
        with self.tracker.phase("checkpoint", ""):
            folder = await self.student.apart(checkpoint.save, self.config.run.path, self.student, state)
        self.tracker.note(f"checkpoint: {folder}")
        self.saved = step

    async def prune(self, step: int) -> None:
        """Let the store remove what `store.keep` does not keep; never what going on from the checkpoint could need."""
        keep = self.config.store.keep
        through = min(self.saved, step - (keep if isinstance(keep, int) else 0))
        if keep == "all" or through < 0:
            return
        try:
            await self.client.prune(PruneRequest(through, self.prefix))
        except ApiError as error:
            self.tracker.warn(f"the store is not pruned now: {error}")


def id_prefix(config: Config) -> str:
    """What a run's rollout ids begin with, so that no two are equal in one record; the same at every start of a run.

    Nothing in a record of the run's own, so that a seed gives the same run again.
    """
    file = config.run.path / PREFIX
    if file.exists():
        return id_prefix_of(config.run.path)
    own = not (config.gateway.url or config.store.url)
    prefix = "" if own else f"{re.sub(r'[^A-Za-z0-9_]+', '-', config.run.name)}-{secrets.token_hex(3)}-"
    part = file.with_suffix(".part")
    part.write_text(prefix + "\n", encoding="utf-8")
    part.replace(file)
    return prefix


def divide(rollouts: Sequence[FinishedRollout], parts: int, seed: str) -> list[list[FinishedRollout]]:
    """Divide rollouts over `parts` updates, as evenly as they go, at random from the seed; a rollout is never split."""
    if parts == 1:
        return [list(rollouts)]
    shuffled = list(rollouts)
    random.Random(seed).shuffle(shuffled)
    return [part for part in (shuffled[number::parts] for number in range(parts)) if part]


def _mean_of(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    names = {name for update in updates for name in update}
    return {
        name: sum(u[name] for u in updates if name in u) / sum(name in u for u in updates) for name in sorted(names)
    }


@asynccontextmanager
async def _collecting(client: Client, tracker: Tracker, journal: Journal, student: Student) -> AsyncIterator[Collector]:
    """A collector whose finished rollouts and counts the display shows."""

    finished = 0

    def seen(done: Done) -> None:
        nonlocal finished
        finished += 1
        tokens = sum(len(call.sampled) for call in done.finished.calls)
        tracker.display.finished(done.finished.reward, tokens)

    async with Collector(client, seen, journal=journal, needed=student.serve) as collector:

        async def look() -> None:
            while True:
                running = len(await client.rollouts([RolloutState.running], limit=1000)) if collector.open else 0
                tracker.display.rollouts(max(0, collector.open - running), running, finished)
                await asyncio.sleep(REFRESH_SECONDS)

        looking = asyncio.create_task(look()) if tracker.display.live else None
        try:
            yield collector
        finally:
            if looking is not None:
                looking.cancel()


async def withdraw_warm_up(client: Client, prefix: str) -> None:
    """Take out of the queue what a run that was broken off wanted for its warm-up: it goes on behind it."""
    for rollout in await client.rollouts([RolloutState.queuing], limit=100_000):
        phase = str(rollout.metadata.get("phase", ""))
        if rollout.rollout_id.startswith(prefix) and (phase == "warm-up" or phase.startswith("dev-")):
            change = StatusChange(state=RolloutState.failed, error_message="not needed any more")
            try:
                await client.change_rollout(rollout.rollout_id, change)
            except ApiError as error:
                if error.status not in (404, 409):  # it has ended meanwhile
                    raise


def refuse_untrainable(config: Config) -> None:
    """Raise `ConfigError` for a configuration that cannot train."""
    if config.engine.kind == "sglang":
        raise ConfigError("engine.kind: this trainer gives its weights to vLLM servers only; train needs 'vllm'")
    if config.engine.kind not in ("embedded", "vllm"):
        raise ConfigError(
            f"engine.kind: {config.engine.kind!r} gives no tokens that this learner could train; train needs 'embedded' "
            "or 'vllm'"
        )
    if not config.model.path:
        raise ConfigError("model.path: train needs a model folder or hub name")
    if not (config.agent.command or config.agent.agent_class) and config.agent.controller == "start":
        raise ConfigError("agent.command: train needs an agent: give agent.command or agent.agent_class")
