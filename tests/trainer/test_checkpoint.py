"""Checkpoints of a real, tiny model: going on is the same as not having stopped, and a crash leaves the one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from longrein import config
from longrein.config import ConfigError
from longrein.trainer import checkpoint
from longrein.trainer.checkpoint import TrainerState
from longrein.trainer.student import Student
from longrein.trainer.torch.learner import Learner
from longrein.trainer.torch.policy import load_policy
from longrein.trajectory.batch import Row

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=40, max_position_embeddings=64, **shape)).save_pretrained(
        folder
    )
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder)
    return folder


def student_of(folder: Path, rank: int = 0) -> Student:
    policy = load_policy(config.Model(path=str(folder), device="cpu", lora=config.Lora(rank=rank)), seed=0)
    learner = Learner(policy, config.Algorithm(), config.Trainer(learning_rate=1e-2), "none")
    return Student(policy, learner, cast(Any, None), "policy")


def rows(seed: int) -> list[Row]:
    generator = np.random.default_rng(seed)
    made = []
    for number in range(4):
        trained = np.arange(12) >= 6
        made.append(
            Row(
                rollout_id=f"r{number}",
                group_id="g",
                tokens=generator.integers(0, 40, 12).astype(np.int32),
                trained=trained,
                logprobs=np.where(trained, -3.7, 0).astype(np.float32),
                versions=np.where(trained, 0, -1).astype(np.int32),
                advantages=np.where(trained, 1.0 if number % 2 else -1.0, 0).astype(np.float32),
                weights=np.where(trained, 1 / 24, 0.0),
            )
        )
    return made


def weights(student: Student) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in student.policy.model.named_parameters()}


STATE = TrainerState(step=3, version=7, order={"position": 5, "returned": []}, seconds=12.5)


@pytest.mark.parametrize("rank", [0, 4])
def test_going_on_from_a_checkpoint_is_the_same_as_not_having_stopped(model: Path, tmp_path: Path, rank: int) -> None:
    student = student_of(model, rank)
    student.learner.update(rows(1))
    folder = checkpoint.save(tmp_path, student, STATE)
    drawn = torch.rand(3)
    student.learner.update(rows(2))

    assert checkpoint.latest(tmp_path) == folder
    assert checkpoint.read_state(folder) == STATE
    resumed = student_of(model if rank else folder, rank)
    resumed.restore(folder)
    assert torch.equal(torch.rand(3), drawn)
    resumed.learner.update(rows(2))
    there, here = weights(student), weights(resumed)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in there)


def test_a_checkpoint_is_a_model_that_transformers_loads(model: Path, tmp_path: Path) -> None:
    student = student_of(model, rank=4)
    student.learner.update(rows(1))
    folder = checkpoint.save(tmp_path, student, STATE)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, student.policy.model(ids).logits, atol=1e-5)
    assert (folder / "tokenizer.json").exists()


def test_a_crash_while_writing_leaves_the_checkpoint_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = student_of(model)
    first = checkpoint.save(tmp_path, student, STATE)

    def crash(*arguments: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", crash)
        with pytest.raises(OSError, match="no space"):
            checkpoint.save(tmp_path, student, TrainerState(4, 8, {}, 0.0))
    assert checkpoint.latest(tmp_path) == first
    assert checkpoint.read_state(first) == STATE
    second = checkpoint.save(tmp_path, student, TrainerState(4, 8, {}, 0.0))
    assert checkpoint.latest(tmp_path) == second
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-000003", "step-000004"]


def test_only_the_newest_checkpoint_can_be_gone_on_from(model: Path, tmp_path: Path) -> None:
    student = student_of(model)
    first = checkpoint.save(tmp_path, student, STATE)
    second = checkpoint.save(tmp_path, student, TrainerState(4, 8, {}, 0.0))
    assert checkpoint.read_state(second).version == 8
    with pytest.raises(ConfigError, match=r"holds no trainer\.pt"):
        checkpoint.read_state(first)


def test_a_latest_checkpoint_that_is_gone_is_said(model: Path, tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path, student_of(model), STATE)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"latest: names step-000003, which is no whole checkpoint any more"):
        checkpoint.latest(tmp_path)


def test_a_checkpoint_that_was_renamed_but_not_yet_the_latest_is_written_anew(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = student_of(model)
    first = checkpoint.save(tmp_path, student, STATE)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_latest", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            checkpoint.save(tmp_path, student, TrainerState(4, 8, {}, 0.0))
    assert checkpoint.latest(tmp_path) == first
    assert checkpoint.read_state(first) == STATE
    second = checkpoint.save(tmp_path, student, TrainerState(4, 9, {}, 0.0))
    assert checkpoint.latest(tmp_path) == second
    assert checkpoint.read_state(second).version == 9
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-000003", "step-000004"]


def test_there_is_no_latest_checkpoint_before_the_first(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
