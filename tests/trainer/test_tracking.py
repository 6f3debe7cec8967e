"""Metrics files, displays, warnings, and the summary and picture made from them."""

from __future__ import annotations

import builtins
import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longrein.config import Config, ConfigError, load
from longrein.trainer import summary
from longrein.trainer.evaluate import Evaluation, save
from longrein.trainer.picture import draw_curve, running_mean
from longrein.trainer.progress import Lines, LiveDisplay, Silent, sparkline
from longrein.trainer.tracking import Tracker, read_metrics
from longrein.trainer.watch import Watch


def config_in(folder: Path, *overrides: str) -> Config:
    config = load(None, [f"run.dir={folder}", "run.name=r", *overrides])
    config.run.path.mkdir(parents=True, exist_ok=True)
    return config


def evaluation(name: str, step: int, rewards: dict[str, list[float]], at: float = 0.0) -> Evaluation:
    mean = sum(map(sum, rewards.values())) / len(rewards)
    return Evaluation(name, step, step, mean, mean - 0.1, mean + 0.1, rewards, 0, at, 2.0)


def test_metrics_are_lines_of_json_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    tracker = Tracker(config, Silent())
    tracker.begin(0)
    tracker.step(1, {"reward/mean": 0.5, "grad_norm": math.nan})
    with tracker.phase("learn"):
        pass
    tracker.close()
    begin, step, phase = read_metrics(config.run.path)
    assert (begin["kind"], begin["step"]) == ("begin", 0)
    assert (step["reward/mean"], step["grad_norm"]) == (0.5, None)
    assert (phase["kind"], phase["phase"], phase["step"]) == ("phase", "learn", 1)
    assert phase["seconds"] >= 0


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "begin", "step": 0}\n{"kind": "st')
    assert [line["kind"] for line in read_metrics(tmp_path)] == ["begin"]


def test_lines_are_written_at_once_and_kept_by_a_second_start(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    first = Tracker(config, Silent())
    first.begin(0)
    second = Tracker(config, Silent())
    second.begin(3)
    assert [line["step"] for line in read_metrics(config.run.path)] == [0, 3]
    first.close()
    second.close()


@pytest.mark.parametrize(("extra", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, module: str) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == module:
            raise ImportError(name)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=rf"tracking\.{extra}: .* pip install 'longrein\[{extra}\]'"):
        Tracker(config_in(tmp_path, f"tracking.{extra}=true"), Silent())


def shown(display: Any, output: io.StringIO) -> str:
    display.start()
    display.phase("collect", "step 1")
    display.finished(1.0, 20)
    display.rollouts(3, 2, 1)
    display.step(1, {"reward/mean": 0.25, "loss": 0.125, "time/collect": 3.0})
    display.warmup(2, {"loss": 1.5, "dev/reward": 0.3})
    display.evaluation(evaluation("before", 0, {"0": [0.5], "1": [0.0]}))
    display.note("a note")
    display.warn("look out")
    text = display._draw() if isinstance(display, LiveDisplay) else None
    display.stop()
    if text is not None:
        Console(file=output, width=120).print(text)
    return output.getvalue()


def test_lines_say_everything_that_ends() -> None:
    output = io.StringIO()
    text = shown(Lines(Console(file=output, width=120), 10), output)
    assert "step 1/10: reward 25.0 %, loss 0.1250, collect 3.0 s" in text
    assert "warm-up step 2: loss 1.500, dev reward 30.0 %" in text
    assert "held-out reward before: 25.0 % [15.0 %, 35.0 %] on 2 tasks, 2 s" in text
    assert "a note" in text
    assert "warning: look out" in text


def test_the_live_display_draws_where_the_run_stands() -> None:
    output = io.StringIO()
    text = shown(LiveDisplay(Console(file=output, width=120, force_terminal=True), "name", 10), output)
    for part in (
        "longrein: name",
        "1 of 10",
        "collect (step 1)",
        "2 running, 3 queued, 1 done",
        "reward 100.0 % over 1",
    ):
        assert part in text
    assert "look out" in text


def test_a_sparkline_has_its_extremes() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([-3.0, 5.0]) == "▁█"


def test_a_reward_stuck_at_zero_and_groups_without_variance_are_warned_about_once_in_a_while() -> None:
    watch = Watch()
    zero = {"reward/mean": 0.0, "reward/max": 0.0, "groups/zero_variance": 1.0}
    said = [watch.check(step, zero) for step in range(1, 15)]
    assert "all rewards were equal" in said[0][0]
    assert said[1] == []
    assert "was 0" in said[2][0]
    assert all(not warnings for warnings in said[3:12])
    assert "was 0" in said[12][0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"calls/length_limit": 0.06}, "6 % of calls hit the length limit"),
        ({"grad_norm": math.inf}, "norm is not finite"),
        ({"groups/zero_variance": 1.0, "reward/mean": 1.0, "reward/max": 1.0}, "all rewards were equal"),
    ],
)
def test_what_looks_wrong_is_said(values: dict[str, float], said: str) -> None:
    (warning,) = Watch().check(1, values)
    assert said in warning


def test_a_collapse_of_entropy_is_said_and_a_healthy_step_is_not() -> None:
    watch = Watch()
    healthy = {"reward/mean": 0.5, "reward/max": 1.0, "groups/zero_variance": 0.2, "calls/length_limit": 0.05}
    assert watch.check(1, healthy | {"entropy": 1.0, "grad_norm": 2.0}) == []
    assert watch.check(2, healthy | {"entropy": 0.1}) == []
    (warning,) = watch.check(3, healthy | {"entropy": 0.01})
    assert "entropy fell from 1.000 to 0.0100" in warning


def made_run(folder: Path, name: str, after: float) -> Path:
    config = load(None, [f"run.dir={folder}", f"run.name={name}"])
    config.run.path.mkdir(parents=True)
    tracker = Tracker(config, Silent())
    for step, reward in ((1, 0.1), (2, 0.2), (2, 0.4)):  # step 2 was done again after a resumption
        tracker.step(step, {"reward/mean": reward})
    with tracker.phase("collect"):
        pass
    tracker.warn("careful")
    tracker.close()
    tasks = range(10)
    save(evaluation("untuned", 0, {str(n): [0.0] for n in tasks}, 0.0), config.run.path)
    save(evaluation("before", 0, {str(n): [float(n < 2)] for n in tasks}, 1.0), config.run.path)
    save(evaluation("after", 2, {str(n): [float(n < 10 * after)] for n in tasks}, 2.0), config.run.path)
    return config.run.path


def test_a_summary_tells_the_rise_the_curve_and_the_times(tmp_path: Path) -> None:
    found = summary.summarise(made_run(tmp_path, "a", 0.7))
    assert (found.steps, found.rewards) == ([1, 2], [0.1, 0.4])
    assert found.rise is not None
    assert found.rise.mean == pytest.approx(0.5)
    assert found.warnings == ["careful"]
    evaluations = summary.evaluation_table(found)
    assert [row[0] for row in evaluations[2]] == ["untuned", "before", "after", "rise (paired)"]
    assert evaluations[2][-1][2] == "+50.0 points"
    assert "| rise (paired) |  | +50.0 points |" in summary.markdown_table(evaluations)


def test_runs_are_compared_with_their_mean_rise_and_its_interval(tmp_path: Path) -> None:
    found = [summary.summarise(made_run(tmp_path, name, after)) for name, after in (("a", 0.7), ("b", 0.8), ("c", 0.9))]
    _, columns, rows = summary.comparison_table(found)
    assert rows[-1][0] == "mean of 3 runs"
    rise = dict(zip(columns, rows[-1], strict=True))["rise (paired)"]
    assert rise == "+60.0 points [+35, +85]"  # 0.6 ± 4.303 * 0.1 / sqrt(3)
    assert summary.comparison_table(found[:1])[2][-1][0] == "a"


def test_pictures_are_written_also_of_a_run_that_has_only_begun(tmp_path: Path) -> None:
    runs = [summary.summarise(made_run(tmp_path, name, 0.9)) for name in "ab"]
    (tmp_path / "empty").mkdir()
    for number, some in enumerate(([runs[0]], runs, [summary.summarise(tmp_path / "empty")])):
        file = tmp_path / f"{number}.png"
        draw_curve(some, file)
        assert file.read_bytes().startswith(b"\x89PNG")


def test_a_running_mean_looks_back_only() -> None:
    assert running_mean([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]) == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0]
