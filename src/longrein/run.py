"""Starts and ends the processes of a run.

`longrein train FILE` is the trainer; what it is not given the address of, gateway and controller, it starts as children
over loopback and ends with itself. `longrein gateway` and `longrein controller` run the same two alone.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import msgspec

from longrein.client import Client
from longrein.config import Config, ConfigError, Lora, Store, Warmup, load, resolved_toml
from longrein.processes import Child, ChildFailed, Children
from longrein.records import Json, NewRollout

if TYPE_CHECKING:
    from longrein.trainer.loop import Data

T = TypeVar("T")

START_SECONDS = 120.0  # longest start of the gateway, which loads a tokenizer


# --- The run's folder ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A run's folder, ready to be used."""

    config: Config
    """The configuration with `run.dir` absolute and the run key set."""
    file: Path
    """The resolved run file, for the child processes."""
    resume: Path | None
    """Checkpoint to go on from."""


# What a run writes into its folder; --overwrite removes these and nothing else.
_OWN = ("config.toml", "gateway.json", "metrics.jsonl", "report.md", "curve.png")
_OWN_PATTERNS = ("eval-*.json", "store.sqlite*")
_OWN_FOLDERS = ("attempts", "checkpoints", "logs", "tensorboard", "wandb", "weights")


def prepare(config: Config, *, resume: bool = False, overwrite: bool = False) -> Prepared:
    """Make the run's folder with the resolved run file and the key in it.

    A folder of a run that was started before is refused unless it is to be resumed or overwritten. Raises `ConfigError`.
    """
    from longrein.trainer import checkpoint

    folder = config.run.path
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite: give one of them")
    _lock(folder)
    started = (folder / "metrics.jsonl").exists()
    if started and overwrite:
        _clear(folder, keep_record=bool(config.gateway.url))
    elif started and not resume:
        raise ConfigError(
            f"{folder} holds a run already: choose another name (--set run.name=NAME), go on with it (--resume) or start "
            "it anew (--overwrite)"
        )
    elif resume and not started:
        raise ConfigError(f"--resume: {folder} holds no run")
    config = with_key(_absolute(config))
    file = folder / "config.toml"
    file.write_text(resolved_toml(config), encoding="utf-8")
    return Prepared(config, file, checkpoint.latest(folder) if resume else None)


_LOCKS: list[IO[bytes]] = []  # held until this process ends


def _lock(folder: Path) -> None:
    """Keep a second trainer out of the run's folder for as long as this process lives."""
    import fcntl  # not on Windows, where no run is started

    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(f"{folder}: a run is going on there; choose another name (--set run.name=NAME)") from None
    _LOCKS.append(file)


def _absolute(config: Config) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(config.run.path.parent)})})


def _clear(folder: Path, *, keep_record: bool) -> None:
    own = {folder / name for name in _OWN} | {file for pattern in _OWN_PATTERNS for file in folder.glob(pattern)}
    for file in own:
        if not (keep_record and file.name.startswith(("store.sqlite", "gateway.json"))):
            file.unlink(missing_ok=True)
    for name in _OWN_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)


def with_key(config: Config) -> Config:
    """The configuration with its run key: `gateway.key`, the key file's, or one made for the run's folder.

    The key is always in a file that only its owner can read (`gateway.key_file`), by which other processes get it.
    """
    if config.gateway.key and config.gateway.key_file:
        raise ConfigError("gateway.key: give gateway.key or gateway.key_file, not both")
    key, file = config.gateway.key, Path(config.gateway.key_file or config.run.path / "key")
    if not key and file.exists():
        key = file.read_text(encoding="utf-8").strip()
        if not key:
            raise ConfigError(f"gateway.key_file: {file} is empty")
    elif not key and config.gateway.key_file:
        raise ConfigError(f"gateway.key_file: {file}: no such file")
    elif not key and config.gateway.url:
        raise ConfigError("gateway.key: the gateway at gateway.url has a run key; give gateway.key or gateway.key_file")
    if not config.gateway.key_file:
        file.parent.mkdir(parents=True, exist_ok=True)
        key = key or "lr-run-" + secrets.token_urlsafe(32)
        _write_private(file, key)
    return config.model_copy(update={"gateway": config.gateway.model_copy(update={"key": key, "key_file": str(file)})})


def _write_private(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.fchmod(descriptor, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text + "\n")


def gateway_url(config: Config) -> str:
    """Address of the gateway: `gateway.url`, or that of the run's own as it wrote it down. Raises `ConfigError`."""
    if config.gateway.url:
        return config.gateway.url
    note = _gateway_note(config)
    if not note:
        raise ConfigError(
            f"gateway.url: no gateway is named and none of this run is running (there is no "
            f"{config.run.path / 'gateway.json'}); start `longrein gateway` first or set gateway.url"
        )
    return note["url"]


def _gateway_note(config: Config) -> Json:
    """What the run's gateway wrote about itself: `{"url", "pid"}`; empty when none runs."""
    try:
        return msgspec.json.decode((config.run.path / "gateway.json").read_bytes(), type=dict)
    except FileNotFoundError:
        return {}


# --- Commands -----------------------------------------------------------------------------------------------------


def gateway(config: Config) -> None:
    """Serve the gateway until SIGINT or SIGTERM."""
    from longrein.gateway.serve import serve

    with asyncio.Runner(loop_factory=_fast_loop) as runner:
        runner.run(serve(with_key(_absolute(config))))


def _fast_loop() -> asyncio.AbstractEventLoop:
    """libuv's event loop, where there is one: it costs less CPU than asyncio's own."""
    try:
        import uvloop
    except ImportError:  # native Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def controller(config: Config) -> None:
    """Run the controller until SIGINT or SIGTERM."""
    from longrein.controller.local import require_local_processes

    require_local_processes()  # before signal handlers, which native Windows lacks as well
    config = with_key(_absolute(config))
    url = gateway_url(config)

    async def control() -> None:
        from longrein.controller.reconcile import run_controller

        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with Client(url, config.gateway.key) as client:
            await run_controller(config, client, stop)

    asyncio.run(control())


def train(config: Config, *, resume: bool = False, overwrite: bool = False) -> None:
    """A whole run. Raises `ConfigError`, `RunFailed`, `ChildFailed`, `ApiError` or `Interrupted`, each with a message."""
    from longrein.audit.rules import load_rules
    from longrein.report import write_report
    from longrein.trainer.loop import load_data, refuse_untrainable

    refuse_untrainable(config)
    load_rules(config.audit)
    data = load_data(config)
    prepared = prepare(config, resume=resume, overwrite=overwrite)
    try:
        run_interruptibly(_train(prepared, data))
    except Interrupted as error:
        raise Interrupted(
            error.number, f"{error}; `longrein train … --resume` goes on from the last checkpoint"
        ) from None
    write_report(prepared.config.run.path)


async def _train(prepared: Prepared, data: Data) -> None:
    from longrein.trainer.loop import fail_leftovers, make_student, train
    from longrein.trainer.progress import make_display
    from longrein.trainer.tracking import Tracker

    config = prepared.config
    display = make_display(config.tracking.progress, config.run.name, config.trainer.steps)
    tracker = Tracker(config, display)
    display.start()
    try:
        async with Children(_stop_seconds(config)) as children:
            with tracker.phase("set up", "loading the model, starting the gateway"):
                loading = asyncio.create_task(make_student(config, prepared.resume))
                url = await start_gateway(children, prepared)
                student = await children.guard(loading)
            async with Client(url, config.gateway.key) as client:
                if not config.gateway.url:
                    await fail_leftovers(client)
                if config.agent.controller == "start":
                    await start_child_of(children, "controller", prepared, url)
                work = train(config, data, student=student, client=client, tracker=tracker, resume=prepared.resume)
                await children.guard(work)
    finally:
        display.stop()
        tracker.close()


async def start_gateway(children: Children, prepared: Prepared) -> str:
    """Start a gateway unless the configuration names one; its address, once it answers."""
    config = prepared.config
    pid = None
    if not config.gateway.url:
        pid = (await start_child_of(children, "gateway", prepared, "")).process.pid

    async def answers() -> str:
        while pid is not None and _gateway_note(config).get("pid") != pid:  # noqa: ASYNC110 (a file)
            await asyncio.sleep(0.02)
        url = gateway_url(config)
        async with Client(url, config.gateway.key) as client:
            while not await client.health():  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.05)
            await client.gate()  # the key is the right one
        return url

    try:
        return await asyncio.wait_for(children.guard(answers()), START_SECONDS)
    except TimeoutError:
        where = config.gateway.url or f"the log is {config.run.path / 'logs' / 'gateway.log'}"
        raise ChildFailed(f"the gateway did not answer within {START_SECONDS:.0f} s ({where})") from None


async def start_child_of(children: Children, name: str, prepared: Prepared, url: str) -> Child:
    """Start the run's gateway or controller; `url` is the gateway's address for a controller."""
    overrides = ("--set", f"gateway.url={url}") if url else ()
    return await children.start(
        name, [str(prepared.file), *overrides], prepared.config.run.path / "logs" / f"{name}.log"
    )


def _stop_seconds(config: Config) -> float:
    """Time a child has to end: the controller gives agents their grace first."""
    return config.agent.grace_seconds + 15.0


# Whoever serves a checkpoint asks it as one attempt that never ends.
_NO_BUDGET = {"max_calls": 0, "max_tokens": 0, "max_concurrent_calls": 0}


def serve(checkpoint: str, port: int = 0) -> None:
    """Serve a checkpoint as an OpenAI-compatible endpoint until SIGINT or SIGTERM."""
    folder = Path(checkpoint)
    origin = folder.resolve().parent.parent / "config.toml"
    config = load(origin) if folder.is_dir() and origin.exists() else load(None)
    with tempfile.TemporaryDirectory(prefix="longrein-serve-") as scratch:
        sections = {
            "run": config.run.model_copy(update={"dir": scratch, "name": "serve"}),
            "model": config.model.model_copy(
                update={"path": str(folder.resolve()) if folder.is_dir() else checkpoint, "lora": Lora()}
            ),
            "engine": config.engine.model_copy(update={"kind": "embedded", "urls": []}),
            "agent": config.agent.model_copy(update=_NO_BUDGET),
            "gate": config.gate.model_copy(update={"in_flight": "freeze"}),
            "gateway": config.gateway.model_copy(update={"url": "", "port": port, "key_file": ""}),
            "store": Store(),
            "warmup": Warmup(),
        }
        prepared = prepare(config.model_copy(update=sections))
        run_interruptibly(_serve(prepared))


async def _serve(prepared: Prepared) -> None:
    from longrein.trainer.loop import make_student

    config = prepared.config
    async with Children(_stop_seconds(config)) as children:
        loading = asyncio.create_task(make_student(config, None))
        url = await start_gateway(children, prepared)
        student = await children.guard(loading)
        async with Client(url, config.gateway.key) as client:
            await student.start(client)
            try:
                await client.add_rollouts([NewRollout(input={}, is_train=False, rollout_id="serve")])
                started = await client.start_attempt("serve")
                print(_how_to_ask(config, url, started.token), flush=True)
                await children.guard(asyncio.Event().wait())
            finally:
                await student.stop()


def _how_to_ask(config: Config, url: str, token: str) -> str:
    return (
        f"serving {config.model.path} as {config.model.name!r} at temperature {config.gateway.val_temperature:g}\n"
        f"  OPENAI_BASE_URL={url}/v1\n"
        f"  OPENAI_API_KEY={token}\n"
        f"for example\n"
        f"  curl {url}/v1/chat/completions -H 'Authorization: Bearer {token}' -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{config.model.name}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'\n'
        "Ctrl-C ends it"
    )


def prune_store(folder: str, keep: str | None, *, vacuum: bool = False) -> None:
    """Prune the record of a run that is not going on, as `keep` or its run file's `store.keep` says, and say what went.

    What a resumption from the latest checkpoint could need stays. Raises `ConfigError`, or `StoreError` when a gateway
    has the record open.
    """
    from longrein.store import Store as OpenStore
    from longrein.store import locate_run
    from longrein.trainer import checkpoint
    from longrein.trainer.tracking import read_metrics

    url, config = locate_run(folder)
    if config.store.url or "://" in folder:
        raise ConfigError(
            f"{folder}: only a record in the run's own folder is pruned by hand; one that runs may share is pruned by their "
            "trainers (store.keep)"
        )
    policy = config.store.keep if keep is None else keep
    if policy == "all":
        raise ConfigError("--keep: the run file keeps all (store.keep); say --keep rewards or --keep N (steps)")
    if policy != "rewards" and not (str(policy).isdigit() and int(policy) > 0):
        raise ConfigError(f"--keep {policy}: expected rewards, or a number of steps of at least 1")
    path = config.run.path
    latest = checkpoint.latest(path)
    if latest is None:
        raise ConfigError(f"{path}: has no checkpoint, so nothing is past one; everything stays")
    saved = checkpoint.read_state(latest).step
    steps = [line["step"] for line in read_metrics(path) if line["kind"] == "step"]
    last = steps[-1] if steps else saved
    through = min(saved, last - (0 if policy == "rewards" else int(policy)))
    store = OpenStore.open(url, fsync=config.store.fsync)
    try:
        done = asyncio.run(store.prune(through, kinds=config.algorithm.train_kinds))
        if vacuum:
            store.vacuum()
    finally:
        store.close()
    print(
        f"{done.rollouts:,} rollouts pruned (through step {through}): {done.calls:,} calls, {done.tokens:,} sampled tokens"
    )


# --- Signals ------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """A signal asked the run to end; everything it had started has ended."""

    def __init__(self, number: int, text: str = "") -> None:
        super().__init__(text or f"ended by {signal.Signals(number).name}")
        self.number = number


def run_interruptibly(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; SIGINT and SIGTERM cancel it and, once it has cleaned up, raise `Interrupted`.

    A second signal acts at once, without the clean-up; child processes then end with their parent.
    """
    received: list[int] = []

    async def main() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def cancel(number: int) -> None:
            received.append(number)
            for each in _SIGNALS:
                loop.remove_signal_handler(each)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            task.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, cancel, number)
        try:
            return await task
        except asyncio.CancelledError:
            if received:
                raise Interrupted(received[0]) from None
            raise

    return asyncio.run(main())


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
