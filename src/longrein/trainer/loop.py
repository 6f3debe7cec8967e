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

from longrein.client import Client
from longrein.config import LOSSES, Config, ConfigError
from longrein.functions import load_function
from longrein.records import Json, RolloutState, StatusChange
from longrein.tasks import TaskOrder, load_tasks
from longrein.trainer import checkpoint
from longrein.trainer.collect import Collector, Done, Group, Groups
from longrein.trainer.credit import Credit, staleness
from longrein.trainer.evaluate import evaluate, load_all
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
        engine = VllmServers(policy, config.engine.urls, config.run.path / "weights", computer)
    else:
        engine = EngineServer(policy, config.engine, sample_dtype=config.model.sample_dtype, computer=computer)
    student = Student(policy, learner, engine, config.model.name)
    if resume is not None:
        checkpoint.restore(resume, student)
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
    """A whole run, from its first attempt to its last evaluation. Raises `RunFailed` when it cannot go on."""
    start = sum(line["kind"] == "begin" for line in read_metrics(config.run.path))
    prefix = id_prefix(config, start)
    state = checkpoint.read_state(resume) if resume else checkpoint.TrainerState(0, 0, {}, 0.0)
    order = TaskOrder(len(data.train), seed=config.run.seed, shuffle=config.task.shuffle)
    if state.order:
        order.load_state_dict(state.order)
    tracker.begin(state.step)

    await student.start(client)
    try:
        async with _collecting(client, tracker) as collector:
            run = _Run(
                config=config,
                data=data,
                student=student,
                collector=collector,
                tracker=tracker,
                order=order,
                start=start,
                prefix=prefix,
                seconds=state.seconds,
                resumed=resume is not None,
                credit=Credit.of(config.algorithm, config.run.folder),
            )
            if config.trainer.preflight and (resume is None or state.step < config.trainer.steps):
                with tracker.phase("preflight", "one attempt alone"):
                    await preflight(collector, data.train[0], config.run.path, prefix)
            if resume is None:
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
                        prefix=prefix,
                    )
                if config.trainer.checkpoint_every:
                    await run.save(0)
            if config.eval.before and state.step == 0:
                await run.evaluate("before", 0)
            step = await run.steps(state.step)
            if config.eval.after:
                await run.evaluate("after", step)
            await run.save(step)
    finally:
        await student.stop()


@dataclass(kw_only=True)
class _Run:
    """What every part of a run needs."""

    config: Config
    data: Data
    student: Student
    collector: Collector
    tracker: Tracker
    order: TaskOrder
    start: int
    """How often the run was started before."""
    prefix: str
    seconds: float
    """Time spent on steps so far."""
    resumed: bool
    credit: Credit
    saved: int = -1

    async def steps(self, done: int) -> int:
        """Learn until `trainer.steps` or `trainer.max_seconds`; the number of the last step is returned."""
        config, tracker = self.config, self.tracker
        groups = Groups(
            self.collector,
            self.data.train,
            self.order,
            size=config.algorithm.group_size,
            max_failed=config.trainer.max_failed_groups,
            run_folder=config.run.path,
            prefix=self.prefix,
            start=self.start,
            resample=config.algorithm.dynamic_sampling,
        )
        watch = Watch()
        for step in range(done + 1, config.trainer.steps + 1):
            if 0 < config.trainer.max_seconds <= self.seconds:
                tracker.note(f"trainer.max_seconds = {config.trainer.max_seconds:g} reached after {step - 1} steps")
                return step - 1
            began = time.monotonic()
            values = await self._step(step, groups)
            self.seconds += time.monotonic() - began
            tracker.step(step, values)
            for warning in watch.check(step, values):
                tracker.warn(warning)
            if config.trainer.checkpoint_every and step % config.trainer.checkpoint_every == 0:
                await self.save(step)
            if config.eval.every and step % config.eval.every == 0 and step < config.trainer.steps:
                await self.evaluate(f"step-{step}", step)
        return config.trainer.steps

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
        rollouts = [done.finished for group in groups for done in group.done]
        graded = {r.rollout_id: 0.0 for r in rollouts if r.reward is not None}
        batches = [
            make_batch(part, graded, options.train_kinds, options.normaliser, options.normaliser_tokens)
            for part in divide(rollouts, options.updates_per_batch, f"{self.config.run.seed}/{step}")
        ]
        rows = [row for batch in batches for row in batch.rows]
        if options.prepares:
            await self.student.prepare(rows)
        credited = {**self.credit.assign(rollouts, rows), **staleness(rows, self.student.version)}
        updates, ledger = [], Ledger()
        for batch in batches:
            ledger += batch.ledger
            # Without an advantage there is mostly no gradient; an optimizer step would only move by old momentum and decay.
            if any(row.advantages.any() for row in batch.rows) or (options.learns_without_advantage and batch.rows):
                updates.append(await self.student.update(batch.rows))
        return updates, ledger, credited

    async def evaluate(self, name: str, step: int) -> None:
        """Evaluate on the held-out tasks, unless this evaluation was already made (by the run that is resumed)."""
        config, tracker = self.config, self.tracker
        if self.resumed and any(e.name == name and e.step == step for e in load_all(config.run.path)):
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
        state = checkpoint.TrainerState(step, self.student.version, self.order.state_dict(), self.seconds)
        with self.tracker.phase("checkpoint", ""):
            folder = await self.student.apart(checkpoint.save, self.config.run.path, self.student, state)
        self.tracker.note(f"checkpoint: {folder}")
        self.saved = step


def id_prefix(config: Config, start: int) -> str:
    """What a run's rollout ids begin with, so that no two are equal in one record.

    Nothing in a record of the run's own at its first start, so that a seed gives the same run again.
    """
    own = not (config.gateway.url or config.store.url)
    run = "" if own else f"{re.sub(r'[^A-Za-z0-9_]+', '-', config.run.name)}-{secrets.token_hex(3)}-"
    return run + (f"again{start}-" if start else "")


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
async def _collecting(client: Client, tracker: Tracker) -> AsyncIterator[Collector]:
    """A collector whose finished rollouts and counts the display shows."""

    finished = 0

    def seen(done: Done) -> None:
        nonlocal finished
        finished += 1
        tokens = sum(len(call.sampled) for call in done.finished.calls)
        tracker.display.finished(done.finished.reward, tokens)

    async with Collector(client, seen) as collector:

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


async def fail_leftovers(client: Client) -> int:
    """Fail the rollouts that an ended trainer left queued or running, so that nobody runs them; how many there were."""
    left = await client.rollouts([RolloutState.queuing, RolloutState.running], limit=100_000)
    change = StatusChange(state=RolloutState.failed, error_message="the run was started again")
    for rollout in left:
        await client.change_rollout(rollout.rollout_id, change)
    return len(left)


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
