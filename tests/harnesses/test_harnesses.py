"""Real harnesses in front of a real gateway: they get their work done, and the tree of what they did is exact.

The harnesses are installed by `make test-harnesses`, which runs all of this; the tests of those that are not installed
are skipped. Without LONGREIN_TEST_HARNESSES=all only the cheap ones are run, in fewer manners.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from gateway.running import RunningGateway
from longrein.gateway.tokens import TextModel

from .conftest import Breakable, Gateways, Runs
from .drivers import DRIVERS, Driver
from .engine import BreakableEngine, Fault
from .histories import replanned
from .install import missing
from .runs import (
    Run,
    check_accounts,
    check_success,
    check_texts,
    execute,
    main_calls,
    prepare,
    run,
    shape,
)
from .scripts import ANSWER
from .table import Figures

ALL = os.environ.get("LONGREIN_TEST_HARNESSES") == "all"
CHOSEN = [driver for driver in DRIVERS if ALL or driver.cheap]
MANNERS = ("plain", "thinking", "odd") if ALL else ("thinking",)
HOLD_SECONDS = 90
#: Longer than any harness waits in silence: they leave after 120 to 300 seconds.
STALL_SECONDS = 330
#: Harnesses that time a silent stream out.
PATIENT = [
    driver
    for driver in CHOSEN
    if driver.streams and driver.install in ("claude-code", "codex", "qwen-code", "opencode")
]
#: Harnesses that are held at the same time: that many start on a small machine without keeping each other waiting.
AT_ONCE = 11

pytestmark = pytest.mark.timeout(900)

each = pytest.mark.parametrize("driver", CHOSEN, ids=repr)


@each
@pytest.mark.parametrize("manner", MANNERS)
def test_a_harness_does_its_task_and_its_tree_is_exact(
    driver: Driver, manner: str, runs: Runs, text_model: TextModel, measured: Figures
) -> None:
    done = runs(driver, manner, "faithful")
    check_success(done)
    ledger = check_accounts(done.calls)
    check_texts(done.calls, text_model)
    assert {call.dialect for call in done.calls} == {driver.dialect}
    assert {call.status for call in done.calls} == {"ok"}
    chain = [call for call in done.calls if call.kind != "title"] if driver.calculator else main_calls(done.calls)
    assert [call.fork for call in chain[1:]] == list(driver.forks[manner])
    before = [None if driver.flattens else call.number for call in chain[:-1]]
    assert [call.parent for call in chain] == [None, *before]
    assert [call.kind for call in done.calls].count("title") == driver.title
    titles = sum(len(call.sampled) for call in done.calls if call.kind == "title")
    assert ledger.trained == ledger.sampled - titles
    again = replanned(done.calls, text_model, "faithful")
    assert shape(again) == shape(done.calls)
    assert check_accounts(again).sampled == ledger.sampled
    measured.add(done, text_model)


@pytest.mark.parametrize("driver", [driver for driver in CHOSEN if not driver.twin], ids=repr)
@pytest.mark.parametrize("history", ["sampled", "rendered"])
@pytest.mark.skipif(not ALL, reason="gateways of other histories are tried by make test-harnesses")
def test_other_histories_lose_nothing(driver: Driver, history: str, runs: Runs, text_model: TextModel) -> None:
    """Run for real; and the planning of another run's requests, which the figures rest on, comes to the same."""
    done, faithful = runs(driver, "thinking", history), runs(driver, "thinking", "faithful")
    check_success(done)
    check_accounts(done.calls)
    assert shape(done.calls) == shape(replanned(faithful.calls, text_model, history))


@each
def test_a_broken_engine_is_not_noticed(
    driver: Driver,
    runs: Runs,
    breakable: RunningGateway,
    engine: BreakableEngine,
    tmp_path: Path,
    measured: Figures,
) -> None:
    first = 0 if driver.calculator else 1
    faults = [Fault("failure", first), Fault("cut", first + 1)]
    done = befallen(driver, faults, breakable, engine, tmp_path)
    check_unchanged(done, runs(driver, "thinking", "faithful"))
    measured.survived[driver] |= {"failure", "cut"}


def befallen(
    driver: Driver,
    faults: list[Fault],
    gateway: RunningGateway,
    engine: BreakableEngine,
    folder: Path,
    *,
    seconds: float = 240,
) -> Run:
    """A run that the faults befall."""
    rollout, place = prepare(driver, gateway, folder, "thinking")
    engine.faults[rollout] = faults
    answer = execute(driver, place, seconds=seconds)
    assert all(fault.happened.is_set() for fault in faults)
    return Run(driver, "thinking", rollout, answer, place.work, gateway.calls(rollout))


def check_unchanged(done: Run, reference: Run) -> None:
    """The answer and the tree of the answered calls are those of a run without the fault."""
    check_success(done)
    if done.driver.flattens:  # a retry is its call's equal, and then no fork
        assert [one[3] for one in shape(done.calls)] == [one[3] for one in shape(reference.calls)]
    else:
        assert shape(done.calls) == shape(reference.calls)
    ledger = check_accounts(done.calls)
    assert set(ledger.untrained) <= {"abandoned", "call error", "side call"}


@dataclass
class Hold:
    """A run that was held in the middle, and when."""

    paused_at: float = 0.0
    resumed_at: float = 0.0
    run: Run | None = None
    failure: BaseException | None = None

    def done(self) -> Run:
        """The run. Raises what made it fail."""
        if self.failure is not None:
            raise self.failure
        assert self.run is not None
        return self.run


@pytest.fixture(scope="module")
def held(
    request: pytest.FixtureRequest,
    over_engine: Breakable,
    engine: BreakableEngine,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[Driver, Hold]:
    """Every harness's run that is held. All at once, since each of them mostly waits."""

    def hold(driver: Driver, gateway: RunningGateway) -> Hold:
        held = Hold()

        def pause() -> None:
            gateway.http.post("/proxy/pause", json={}).raise_for_status()
            held.paused_at = time.time()
            threading.Timer(HOLD_SECONDS, resume).start()

        def resume() -> None:
            held.resumed_at = time.time()
            gateway.http.post("/proxy/resume").raise_for_status()

        fault = Fault("pause", 0 if driver.calculator else 1, pause)
        try:
            held.run = befallen(driver, [fault], gateway, engine, tmp_path_factory.mktemp("held"))
        except BaseException as error:
            held.failure = error
        return held

    return _together(hold, _asked(request), over_engine)


@pytest.fixture(scope="module")
def stalled(
    request: pytest.FixtureRequest,
    over_engine: Breakable,
    engine: BreakableEngine,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[Driver, Hold]:
    """Runs in which nothing comes from the engine for minutes, in the middle of a reply."""

    def stall(driver: Driver, gateway: RunningGateway) -> Hold:
        held = Hold()
        fault = Fault("stall", 1, stall_seconds=STALL_SECONDS)
        try:
            held.run = befallen(
                driver, [fault], gateway, engine, tmp_path_factory.mktemp("stalled"), seconds=2 * STALL_SECONDS
            )
        except BaseException as error:
            held.failure = error
        return held

    return _together(stall, _asked(request), over_engine)


def _asked(request: pytest.FixtureRequest) -> list[Driver]:
    """The drivers whose tests of this session want the fixture."""
    wanting = [item for item in request.session.items if request.fixturename in getattr(item, "fixturenames", ())]
    return [cast(Driver, item.callspec.params["driver"]) for item in wanting if isinstance(item, pytest.Function)]


def _together(
    run_one: Callable[[Driver, RunningGateway], Hold], drivers: Sequence[Driver], start: Breakable
) -> dict[Driver, Hold]:
    chosen = [driver for driver in drivers if not missing(driver.install)]
    gateways = [start() for _ in chosen]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(chosen, pool.map(run_one, chosen, gateways), strict=True))


@each
def test_a_hold_is_not_noticed(driver: Driver, held: dict[Driver, Hold], runs: Runs, measured: Figures) -> None:
    hold, done = held[driver], held[driver].done()
    waited = [
        call
        for call in done.calls
        if call.started_at > hold.paused_at and (call.first_token_at or 0.0) >= hold.resumed_at
    ]
    assert waited
    assert hold.resumed_at - hold.paused_at >= HOLD_SECONDS
    check_unchanged(done, runs(driver, "thinking", "faithful"))
    measured.survived[driver].add("hold")


@pytest.mark.skipif(not ALL, reason="long stalls are waited out by make test-harnesses")
@pytest.mark.parametrize("driver", PATIENT, ids=repr)
def test_a_stall_of_minutes_is_not_noticed(
    driver: Driver, stalled: dict[Driver, Hold], runs: Runs, measured: Figures
) -> None:
    """Clients leave a stream that is silent for two to five minutes; keep-alives that they count as life hold them."""
    done = stalled[driver].done()
    assert [call.status for call in done.calls if call.status != "ok"] == []
    check_unchanged(done, runs(driver, "thinking", "faithful"))
    measured.survived[driver].add("stall")


@pytest.mark.parametrize(
    "driver",
    [driver for driver in CHOSEN if driver.name in ("Claude Code", "Codex CLI", "opencode", "qwen-code")],
    ids=repr,
)
def test_sub_agents_are_branches_of_their_own(
    driver: Driver, scripted: Gateways, tmp_path: Path, text_model: TextModel
) -> None:
    done = run(driver, scripted("faithful"), tmp_path, "thinking", delegated=True)
    assert "sum 391" in done.answer
    check_accounts(done.calls)
    check_texts(done.calls, text_model)
    subs = [call for call in done.calls if call.kind == "sub-agent"]
    assert len([call for call in subs if call.parent is None]) == 2
    assert len(subs) == 4
    roots = {call.number for call in subs if call.parent is None}
    assert {call.parent for call in subs if call.parent is not None} == roots
    main = [call for call in done.calls if call.kind == "main"]
    assert [call.parent for call in main] == [None, *(call.number for call in main[:-1])]


@pytest.mark.parametrize("driver", [driver for driver in CHOSEN if driver.name == "Codex CLI"], ids=repr)
def test_a_compaction_is_a_call_of_its_kind_and_what_follows_says_why_it_forks(
    driver: Driver, scripted: Gateways, runs: Runs, tmp_path: Path, text_model: TextModel
) -> None:
    """Codex replaces the history by a summary when the usage that it is told passes its limit."""
    longest = runs(driver, "thinking", "faithful").calls[1]
    limit = longest.prompt_length + len(longest.sampled) - 1
    settings = ["-c", f"model_context_window={2 * limit}", "-c", f"model_auto_compact_token_limit={limit}"]
    small = replace(driver, command=lambda place: [*driver.command(place)[:-1], *settings, place.task])
    done = run(small, scripted("faithful"), tmp_path, "thinking")
    assert ANSWER in done.answer
    check_accounts(done.calls)
    check_texts(done.calls, text_model)
    assert [call.kind for call in done.calls] == ["main", "main", "compaction", "main"]
    assert done.calls[-1].fork == "compaction"
