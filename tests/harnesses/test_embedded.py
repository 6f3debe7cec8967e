"""Harnesses in front of a model that says what it likes: calls are recorded and accounted for, whatever comes of them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.models import make_model_folder
from gateway.running import RunningGateway, running_gateway
from longrein.gateway.loading import load_text_model

from .conftest import CONTEXT, register
from .drivers import DRIVERS, Driver
from .runs import check_accounts, check_texts, execute, prepare

pytest.importorskip("torch")

REAL = Path.home() / ".cache" / "longrein" / "smollm2-135m"
#: mini-swe-agent asks again until its steps are used up; the Agents SDK takes any text for the answer.
STEPS = ["-c", "mini.yaml", "-c", "agent.step_limit=3"]
TALKERS = [
    replace(driver, command=lambda place, base=driver.command: [*base(place), *STEPS])
    if driver.name == "mini-swe-agent"
    else driver
    for driver in DRIVERS
    if driver.name in ("mini-swe-agent", "OpenAI Agents SDK, streamed")
]


def random_model(folder: Path) -> Path:
    """A Llama of random weights behind the tokenizer and template of the scripted one."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    make_model_folder(folder, context=CONTEXT)
    text = load_text_model(str(folder))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        described = LlamaConfig(
            vocab_size=text.tokenizer.get_vocab_size(),
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=CONTEXT,
            eos_token_id=min(text.stop_ids),
            pad_token_id=0,
        )
        AutoModelForCausalLM.from_config(described).save_pretrained(folder)
    return folder


@pytest.fixture(params=["random", "smollm2"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model folder with weights."""
    if request.param == "random":
        return random_model(tmp_path / "random")
    if os.environ.get("LONGREIN_TEST_HARNESSES") != "all":
        pytest.skip("the real model is run by make test-harnesses")
    if not REAL.is_dir():
        pytest.skip(f"no model in {REAL}: make demo fetches it")
    return REAL


ENGINE = """
import asyncio, sys
from longrein import config
from longrein.trainer.torch.policy import load_policy
from longrein.trainer.torch.server import EngineServer

async def main(path):
    policy = load_policy(config.Model(path=path, device="cpu"), seed=0)
    server = EngineServer(policy, config.Engine(threads=1))
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def gateway(model: Path, tmp_path: Path) -> Iterator[RunningGateway]:
    """A gateway in front of the embedded engine, which runs in a process of its own."""
    command = [sys.executable, "-c", ENGINE, str(model)]
    options = ["engine.kind=embedded", f"model.path={model}", "engine.max_reply_tokens=40"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        running_gateway(tmp_path / "gateway", options, context=CONTEXT) as gateway,
    ):
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, "the engine did not start"
        register(gateway, url)
        yield gateway
        process.communicate()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("driver", TALKERS, ids=repr)
def test_whatever_the_model_says(driver: Driver, model: Path, gateway: RunningGateway, tmp_path: Path) -> None:
    rollout, place = prepare(driver, gateway, tmp_path / "run", "plain")
    with suppress(AssertionError):  # most replies are nonsense, and the harness may say so
        execute(driver, place)
    calls = gateway.calls(rollout)
    ledger = check_accounts(calls)
    check_texts(calls, load_text_model(str(model)))
    answered = [call for call in calls if call.status == "ok"]
    assert answered
    assert ledger.trained == sum(len(call.sampled) for call in answered) > 0
    for call in answered:
        assert call.logprobs is not None
        assert len(call.logprobs) == len(call.sampled) <= 40
        assert all(math.isfinite(value) and value <= 0 for value in call.logprobs)
        assert sum(count for _, count in call.versions) == len(call.sampled)
