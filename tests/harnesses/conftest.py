"""Gateways that the harnesses are run in front of, the runs that several tests look at, and the table at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.models import make_model_folder
from gateway.running import RunningGateway, running_gateway
from longrein.gateway.loading import load_text_model
from longrein.gateway.tokens import TextModel

from . import scripts
from .drivers import Driver
from .engine import BreakableEngine, breakable_engine
from .install import missing
from .runs import Run, run
from .table import Figures

#: Room for the prompts of the big harnesses, in tokens of a small vocabulary.
CONTEXT = 400_000

figures = Figures()


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    driver = request.node.callspec.params.get("driver") if hasattr(request.node, "callspec") else None
    if isinstance(driver, Driver) and (why := missing(driver.install)):
        pytest.skip(why)


@pytest.fixture(scope="session")
def measured() -> Figures:
    """What is printed at the end."""
    return figures


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """The model that every gateway here has."""
    return load_text_model(str(make_model_folder(tmp_path_factory.mktemp("model"), context=CONTEXT)))


Gateways = Callable[[str], RunningGateway]


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    """The gateway of a history over the scripted engine."""
    with ExitStack() as stack:
        started: dict[str, RunningGateway] = {}

        def gateway(history: str) -> RunningGateway:
            if history not in started:
                folder = tmp_path_factory.mktemp(f"gateway-{history}")
                (folder / "harness_script.py").write_text(Path(scripts.__file__).read_text())
                options = [f"gateway.history={history}", "engine.script=harness_script:script"]
                started[history] = stack.enter_context(running_gateway(folder, options, context=CONTEXT))
            return started[history]

        yield gateway


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BreakableEngine]:
    """The engine that breaks where it is told to."""
    with breakable_engine(make_model_folder(tmp_path_factory.mktemp("engine"), context=CONTEXT)) as engine:
        yield engine


Breakable = Callable[[], RunningGateway]


@pytest.fixture(scope="session")
def over_engine(tmp_path_factory: pytest.TempPathFactory, engine: BreakableEngine) -> Iterator[Breakable]:
    """Starts a gateway in front of the engine that breaks."""
    with ExitStack() as stack:

        def start() -> RunningGateway:
            folder = tmp_path_factory.mktemp("gateway")
            gateway = stack.enter_context(running_gateway(folder, ["engine.kind=embedded"], context=CONTEXT))
            register(gateway, engine.url)
            return gateway

        yield start


@pytest.fixture(scope="session")
def breakable(over_engine: Breakable) -> RunningGateway:
    """One such gateway for all tests of a broken engine."""
    return over_engine()


def register(gateway: RunningGateway, url: str) -> None:
    """Let an engine answer for the model."""
    answer = gateway.http.post("/api/models", json=[{"model": "policy", "endpoint": url, "protocol": "tokens"}])
    assert answer.status_code == 201, answer.text


Runs = Callable[[Driver, str, str], Run]


@pytest.fixture(scope="session")
def runs(scripted: Gateways, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """(driver, manner, history) → the run over the scripted engine, made once."""
    made: dict[tuple[Driver, str, str], Run] = {}

    def get(driver: Driver, manner: str, history: str = "faithful") -> Run:
        key = (driver, manner, history)
        if key not in made:
            made[key] = run(driver, scripted(history), tmp_path_factory.mktemp("run"), manner)
        return made[key]

    return get


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if figures.empty:
        return
    page = figures.page()
    terminalreporter.write_sep("=", "harnesses")
    terminalreporter.write_line(page)
    if file := os.environ.get("LONGREIN_HARNESS_PAGE"):
        Path(file).write_text(page, encoding="utf-8")
