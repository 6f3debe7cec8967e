"""The run file: what is refused and with which words, overrides, and the printed forms."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein.config import Config, ConfigError, Model, Run, Section, defaults_text, load, resolved_toml


def write(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("modle.path=4", "model"),
        ("model.pth=x", "model.path"),
        ("trainer.stepz=4", "trainer.steps"),
        ("algoritm.group_size=3", "algorithm"),
        ("trainer.group_size=3", "algorithm.group_size"),
        ("model.lora.rnk=3", "model.lora.rank"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_name(override: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown option; did you mean {suggestion}\?$"):
        load(None, [override])


def test_a_key_like_no_other_points_to_the_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: qqqq: unknown option; `longrein config --defaults` lists every"):
        load(write(tmp_path, "[qqqq]\na = 1\n"))


def test_every_problem_has_a_line_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, "[trainer]\nsteps = -1\nstepz = 2\n[engine]\nkind = 'vlm'\n"))
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all("run.toml: " in line for line in lines)
    assert any("trainer.steps: " in line for line in lines)
    assert any("engine.kind: " in line and "'embedded'" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run\n", "not valid TOML"),
        ("[gateway]\nhost = '0.0.0.0'\n", "gateway.host: .*set gateway.key"),
        ("[engine]\nkind = 'openai'\n", "engine.url"),
        ("[engine]\nkind = 'vllm'\n", "model.path: engine.kind = 'vllm' needs the model's folder"),
        ("[engine]\nurls = ['http://a']\n", "engine.urls: are servers of kind vllm or sglang"),
        ("[model]\npath = 'm'\n[engine]\nkind = 'vllm'\nurls = ['a:1']\n", "engine.urls: 'a:1' is no http://"),
        ("[model]\npath = 'm'\n[engine]\nkind = 'sglang'\nurl = 'http://a'\n", "engine.url: is of kind openai"),
        ("[engine]\nkind = 'simulated'\n", "model.path: engine.kind = 'simulated' needs a folder"),
        ("[engine]\nkind = 'scripted'\nscript = 'a:b'\nsimulated.reply_tokens = 2\n", "engine.simulated: is for"),
        ("[gate]\nin_flight = 'drain'\n", "gate.in_flight: only vLLM servers can be drained"),
        (
            "[model]\npath = 'm'\n[engine]\nkind = 'vllm'\n[gate]\nkv_after_update = 'keep'\n",
            "gate.kv_after_update: vLLM",
        ),
        ("[warmup]\nsteps = 3\n", "warmup.teacher"),
        ("[agent]\ncommand = ['a']\nagent_class = 'b:C'\n", "not both"),
        ("[algorithm]\nloss = 'gpso'\n", "algorithm.loss: 'gpso' is none of ppo_clip, .*, and no module:function"),
        ("[algorithm]\nadvantage = 'grp'\n", "algorithm.advantage: 'grp' is none of grpo, "),
        ("[algorithm]\ndiscount = 0.9\n", r"algorithm.discount: 0.9 needs advantage = 'reinforce\+\+' or 'gae'"),
        ("[algorithm]\nkl_in = 'reward'\n", "algorithm.kl_in: 'reward' needs kl_coefficient above 0"),
        ("[algorithm]\nnormaliser = 'constant'\n", "algorithm.normaliser_tokens: .* needs a length"),
        ("[algorithm]\noverlong_tokens = 9\n", "algorithm.overlong_tokens: 9 needs overlong_buffer"),
        ("[algorithm]\noverlong_tokens = 9\noverlong_buffer = 10\n", "overlong_buffer: 10 is more than"),
        ("[algorithm]\ndual_clip = 1.0\n", "dual_clip: 1 would cut off every loss"),
        ("[algorithm]\ncorrection = 'icepop'\ncorrection_floor = 3.0\n", "correction_floor: 3 is not below"),
        ("[algorithm]\nloss = 'cispo'\ncorrection = 'tis'\n", "would count it twice; set proximal = 'computed'"),
        ("[algorithm]\nloss = 'reinforce'\nproximal = 'computed'\n", "algorithm.proximal: .* has no ratio"),
        ("[algorithm]\nadvantage = 'gae'\ndynamic_sampling = 3\n", "dynamic_sampling: 3 needs an advantage relative"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(write(tmp_path, text))


def test_a_missing_run_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such run file"):
        load(tmp_path / "none.toml")


def test_overrides_take_toml_values_or_bare_words() -> None:
    config = load(
        None,
        ["model.name=student", "trainer.betas=[0.8, 0.9]", "model.lora.rank=8", "eval.before=false", "run.name=a=b"],
    )
    assert config.model.name == "student"
    assert config.trainer.betas == (0.8, 0.9)
    assert config.model.lora.rank == 8
    assert config.eval.before is False
    assert config.run.name == "a=b"


@pytest.mark.parametrize("override", ["model", "model=3", "=3", "model.name.x=1"])
def test_an_override_of_another_form_is_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        load(None, ["model.name=a", override])


def test_relative_files_are_meant_from_the_run_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "weights").mkdir()
    file = write(tmp_path / "a", "[model]\npath = 'weights'\n[task]\ntrain = 'made:train'\nheld_out = 'held.jsonl'\n")
    monkeypatch.chdir(tmp_path / "b")
    config = load(file, ["task.dev=dev.jsonl"])
    assert config.run.folder == str(tmp_path / "a")
    assert config.model.path == str(tmp_path / "a" / "weights")
    assert config.task.train == "made:train"
    assert config.task.held_out == str(tmp_path / "a" / "held.jsonl")
    assert config.task.dev == str(tmp_path / "b" / "dev.jsonl")


def test_a_resolved_file_read_from_elsewhere_means_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    config = load(write(tmp_path / "a", "[task]\ntrain = 'made:train'\n[agent]\nworkspace = 'w'\n"))
    assert load(write(tmp_path, resolved_toml(config))) == config


names = st.text(st.characters(codec="utf-8"), max_size=20)


@given(name=names, env=st.dictionaries(names, names, max_size=3), rank=st.integers(0, 9), rate=st.floats(1e-9, 1.0))
def test_the_resolved_file_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, env: dict[str, str], rank: int, rate: float
) -> None:
    base = Config.model_validate(
        {
            "run": {"folder": "/x"},
            "model": {"name": name, "lora": {"rank": rank}},
            "agent": {"env": env},
            "trainer": {"learning_rate": rate},
        }
    )
    file = tmp_path_factory.mktemp("resolved") / "config.toml"
    file.write_text(resolved_toml(base), encoding="utf-8")
    assert load(file) == base


def test_the_resolved_file_never_holds_the_run_key() -> None:
    assert "secret-key" not in resolved_toml(load(None, ["gateway.key=secret-key"]))


def test_defaults_list_every_option_with_its_default_and_one_line_of_meaning(tmp_path: Path) -> None:
    text = defaults_text()
    assert load(write(tmp_path, text), [f"run.folder={tmp_path}"]) == load(None, [f"run.folder={tmp_path}"])
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            assert len(line.split("  # ", 1)[1]) > 10, line
    printed = tomllib.loads(text)
    for section, info in Config.model_fields.items():
        model = info.annotation
        assert isinstance(model, type)
        assert issubclass(model, Section)
        assert set(printed[section]) == {field.alias or name for name, field in model.model_fields.items()}


def test_the_runs_folder_is_absolute() -> None:
    assert Run(dir="runs", name="x").path == Path.cwd() / "runs" / "x"
    assert Model().path == ""
