"""Building a gateway from a configuration, and serving it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import Response

from longrein.config import Config, ConfigError
from longrein.gateway.access import Access
from longrein.gateway.app import create_app
from longrein.gateway.engines.client import engine_client
from longrein.gateway.gate import Gate
from longrein.records import Mode, ModelEndpoint, Rollout
from longrein.store import Store, store_url
from longrein.unixsocket import listen_unix

if TYPE_CHECKING:
    from longrein.gateway.engines.tokens import TokensEngine
    from longrein.gateway.tokens import TextModel

log = logging.getLogger("longrein.gateway")

#: Seconds that requests in flight get to end after SIGTERM; then they are cancelled, and recorded as abandoned.
SHUTDOWN_SECONDS = 5

#: Idle connections to engines that are kept. For each request the pool's work grows with the idle ones times all.
KEPT_CONNECTIONS = 16


class Calls(Protocol):
    """What answers model requests: token by token, or by an endpoint's answers."""

    async def answer(self, http: Request, dialect: str, rollout: Rollout, attempt_id: str, mode: Mode) -> Response: ...
    async def count(self, http: Request, dialect: str, rollout: Rollout, attempt_id: str) -> int: ...
    def end_attempt(self, rollout_id: str, attempt_id: str) -> None: ...
    async def close(self) -> None: ...


class Changes:
    """Wakes the long polls when a rollout changes. Used from one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self.ended = False
        """Whether nothing shall be waited for any more."""

    def next(self) -> asyncio.Event:
        """Is set at the next change."""
        return self._next

    def tell(self) -> None:
        """Something has changed."""
        changed, self._next = self._next, asyncio.Event()
        changed.set()

    def end(self) -> None:
        """Let all who wait go."""
        self.ended = True
        self.tell()


@dataclass
class Gateway:
    """What the routes share. Made by `open_gateway`."""

    config: Config
    store: Store
    gate: Gate
    access: Access
    http: httpx.AsyncClient
    """For endpoints that take text; without a limit of connections or of the time an answer takes."""
    engine_http: httpx.AsyncClient = field(default_factory=engine_client)
    """For engines that take token ids."""
    changes: Changes = field(default_factory=Changes)
    calls: Calls = field(init=False)
    engine: TokensEngine | None = None
    """What samples at the registered endpoints; None where nothing does."""
    model: TextModel | None = None
    """What prompts are rendered and measured by, where they are."""

    async def answer(self, http: Request, dialect: str, rollout: Rollout, attempt_id: str, mode: Mode) -> Response:
        """Answer one model request of an attempt."""
        return await self.calls.answer(http, dialect, rollout, attempt_id, mode)

    async def count(self, http: Request, rollout: Rollout, attempt_id: str) -> int:
        """Prompt tokens of an Anthropic request. Raises DialectError where there is no tokenizer to count with."""
        return await self.calls.count(http, "messages", rollout, attempt_id)

    def model_names(self) -> list[str]:
        """The models that a harness may ask for."""
        config = self.config
        if _by_tokens(config) or config.engine.kind == "openai":
            return [config.model.name]
        return list(dict.fromkeys(model.model for model in self.store.models()))

    async def put_models(self, models: list[ModelEndpoint]) -> list[ModelEndpoint]:
        """Register endpoints, or the versions of known ones."""
        put = await self.store.put_models(models)
        if self.engine is not None and self.model is not None:
            self.engine.refresh()
            context = await self.engine.context()
            if context is not None and (self.model.context is None or context < self.model.context):
                log.info("prompts and replies have %d tokens together: an engine takes no more", context)
                self.model.context = context
        return put

    async def register(self) -> None:
        """Make `engine.urls` the endpoints of the model; one that was known keeps its version."""
        engine, name = self.config.engine, self.config.model.name
        if not engine.urls:
            return
        known = self.store.models()
        versions = {model.endpoint: model.version for model in known if model.model == name}
        named = [ModelEndpoint(name, url, versions.get(url, 0), engine.kind) for url in engine.urls]  # type: ignore[arg-type]
        await self.store.clear_models()
        await self.put_models([*(model for model in known if model.model != name), *named])

    async def close(self) -> None:
        """Record what is still sampled as abandoned; let go of the connections and the store."""
        await self.calls.close()
        await self.http.aclose()
        await self.engine_http.aclose()
        self.store.close()


def open_gateway(config: Config) -> Gateway:
    """Build a gateway; its store is made where it is missing. Call it inside the event loop that will serve it.

    Raises ConfigError without a run key, StoreError when the store cannot be opened, and what a model folder or a
    scripted engine that cannot be used raises.
    """
    key = _run_key(config)
    if not config.store.url:
        config.run.path.mkdir(parents=True, exist_ok=True)
    store = Store.open(store_url(config), fsync=config.store.fsync)
    try:
        gateway = Gateway(
            config=config,
            store=store,
            gate=Gate(config.gate.on_pause, config.gate.hold_seconds),
            access=Access(key, store, config.reward.from_),
            http=httpx.AsyncClient(
                timeout=httpx.Timeout(None, connect=10.0),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS),
                # A proxy for the outside world is none for engines on this machine.
                mounts={"all://127.0.0.1": None, "all://localhost": None, "all://[::1]": None},
            ),
        )
        if _by_tokens(config):
            from longrein.gateway.calls import TokenCalls
            from longrein.gateway.engines.tokens import TokensEngine

            gateway.calls = calls = TokenCalls(gateway)
            if isinstance(calls.policy, TokensEngine):
                gateway.engine, gateway.model = calls.policy, calls.model
                gateway.engine.limit(config.engine.max_concurrent)
        else:
            from longrein.gateway.engines.openai import Passthrough

            gateway.calls = Passthrough(gateway)
    except BaseException:
        store.close()
        raise
    return gateway


def _by_tokens(config: Config) -> bool:
    """Whether prompts are rendered and encoded here; an endpoint of kind openai takes text only."""
    return config.engine.kind in ("scripted", "vllm", "sglang") or (
        config.engine.kind == "embedded" and bool(config.model.path)
    )


def _run_key(config: Config) -> str:
    if config.gateway.key:
        return config.gateway.key
    if not config.gateway.key_file:
        raise ConfigError("gateway.key: the gateway needs a run key; set gateway.key or gateway.key_file")
    try:
        key = Path(config.gateway.key_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"gateway.key_file: cannot be read: {error}") from None
    if not key:
        raise ConfigError(f"gateway.key_file: {config.gateway.key_file} is empty")
    return key


async def serve(config: Config) -> None:
    """Serve until SIGINT or SIGTERM.

    Once requests are taken, the URL is printed and `gateway.json` (`{"url", "pid"}`, and `"socket"` where agents are in a
    sandbox) stands in the run's folder, if there is one; it is removed at the end. Raises what `open_gateway` raises, and
    ConfigError when the address is taken or a gateway of the same run is serving already.
    """
    note = config.run.path / "gateway.json"
    _refuse_second(note)
    listener = listen(config.gateway.host, config.gateway.port)
    host = f"[{config.gateway.host}]" if ":" in config.gateway.host else config.gateway.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    gateway = open_gateway(config)
    server = GatewayServer(gateway, url, note if note.parent.is_dir() else None)
    if config.agent.sandbox == "bubblewrap" and note.parent.is_dir() and sys.platform.startswith("linux"):
        server.socket = note.parent / "gateway" / "gateway.sock"
    try:
        with _signals_end(server):
            await server.serve(sockets=[listener])
    finally:
        await gateway.close()
        if note.is_file() and msgspec.json.decode(note.read_bytes())["pid"] == os.getpid():
            note.unlink()


class GatewayServer(uvicorn.Server):
    """uvicorn, which says when it takes requests and lets go of those that only wait when it is to end."""

    def __init__(self, gateway: Gateway, url: str, note: Path | None):
        super().__init__(
            uvicorn.Config(
                create_app(gateway),
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
                timeout_keep_alive=75,
                server_header=False,
            )
        )
        self._gateway, self._url, self._note = gateway, url, note
        self.socket: Path | None = None
        """A unix socket to listen on besides, for agents whose sandbox has no other way out."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `serve` handles them: uvicorn's own handlers raise the signal again, before anything is closed

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._gateway.register()
        await super().startup(sockets)
        if self.socket is not None:
            await self._listen_on(self.socket)
        if self._note is not None:
            part = self._note.with_suffix(".part")
            note = {"url": self._url, "pid": os.getpid()} | ({"socket": str(self.socket)} if self.socket else {})
            part.write_bytes(msgspec.json.encode(note))
            part.replace(self._note)
        print(f"longrein gateway: {self._url}", flush=True)

    async def _listen_on(self, file: Path) -> None:
        make: Any = self.config.http_protocol_class

        def protocol() -> asyncio.Protocol:  # as uvicorn makes them for its own sockets
            return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        listener = listen_unix(file)
        file.parent.chmod(0o755)
        self.servers.append(await asyncio.get_running_loop().create_unix_server(protocol, sock=listener))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.changes.end()
        self._gateway.gate.close()
        await super().shutdown(sockets)
        # uvicorn does not wait for the requests that it has cancelled; their calls are still to be recorded.
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=SHUTDOWN_SECONDS)


@contextmanager
def _signals_end(server: uvicorn.Server) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    handled: list[int] = []
    with suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread: somebody else handles them
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.handle_exit, number, None)
            handled.append(number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises ConfigError when the address cannot be had."""
    # The protocol is named because asyncio turns Nagle's algorithm off only on sockets that say TCP; with it on,
    # every answer of more than one write waits 40 ms for the client's delayed acknowledgement.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"gateway.port: cannot listen on {host}:{port}: {error}") from None
    return listener


def _refuse_second(note: Path) -> None:
    """Two gateways of one run would both write its record."""
    if not note.is_file():
        return
    with suppress(httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, KeyError, TypeError):
        known = msgspec.json.decode(note.read_bytes())
        httpx.get(f"{known['url']}/healthz", timeout=2.0, trust_env=False)
        raise ConfigError(
            f"run.name: a gateway of this run serves already at {known['url']} (process {known['pid']}); end it, or "
            "choose another run.name"
        )
