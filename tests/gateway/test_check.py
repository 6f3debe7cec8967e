"""`longrein check` on model folders made on the spot, through the real command."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from longrein.cli import main

from .family_models import FAMILIES, TEMPLATES, make_family_folder


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    environment = {**os.environ, "COLUMNS": "160", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "longrein.cli", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def checked(folder: Path, *arguments: str) -> tuple[int, dict[str, Any], dict[tuple[str, str], dict[str, str]]]:
    """(exit status, the report, its findings by area and subject)"""
    out = io.StringIO()
    with redirect_stdout(out):
        status = main(["check", str(folder), "--json", *arguments])
    report = json.loads(out.getvalue())
    return status, report, {(f["area"], f["subject"]): f for f in report["findings"]}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_family_can_be_trained(tmp_path: Path, family: str) -> None:
    status, report, findings = checked(make_family_folder(tmp_path / family, family))
    assert [f for f in report["findings"] if f["status"] == "bad"] == []
    assert (status, report["trainable"]) == (0, True)
    assert report["parser"] == FAMILIES[family].parser
    assert findings["parser", "a call"]["detail"] == "read back as it was written"
    # SentencePiece writes U+2581 for a space, and so gives a space for it; Qwen composes characters.
    exact = findings["tokenizer", "returns the text it was given"]
    kind = FAMILIES[family]
    assert exact["status"] == ("note" if kind.sentencepiece or kind.composes else "good")
    assert findings["tokenizer", "control tokens spelled in content"]["status"] == "good"


def test_what_qwen3_does_to_a_history(tmp_path: Path) -> None:
    _, report, findings = checked(make_family_folder(tmp_path, "qwen3"))
    assert findings["history", "tool results with reasoning"]["status"] == "good"
    assert findings["history", "chat with reasoning"]["detail"] == "3 of 3 prompts fork: template"
    assert findings["template", "reasoning before the last question"]["detail"] == "dropped: it"
    assert findings["template", "reasoning before a call"]["status"] == "good"
    assert report["history"] == "faithful"
    assert "a new question of the user costs a fork" in report["why"]


def test_what_hermes_does_to_a_history(tmp_path: Path) -> None:
    _, report, findings = checked(make_family_folder(tmp_path, "hermes"))
    loops = {subject: f["status"] for (area, subject), f in findings.items() if area == "history"}
    assert loops == {
        "chat": "good",
        "tool results": "good",
        "parallel results": "good",
        "odd arguments": "note",
        "white space around text": "good",
        "chat with reasoning": "good",
        "tool results with reasoning": "good",
    }
    assert findings["template", "odd arguments"]["detail"].startswith("re-serialised: ")
    assert findings["template", "white space around text"]["status"] == "good"
    assert report["history"] == "faithful"


def test_what_mistral_and_llama3_refuse_and_drop(tmp_path: Path) -> None:
    _, _, findings = checked(make_family_folder(tmp_path / "m", "mistral"))
    assert findings["template", "system message"]["detail"] == "written as part of the user's turn"
    assert "must alternate" in findings["template", "two questions in a row"]["detail"]
    assert findings["template", "text beside a call"]["detail"] == "dropped: the text"
    assert "trimmed" in findings["template", "white space around text"]["detail"]
    status, _, findings = checked(make_family_folder(tmp_path / "l", "llama3"))
    assert status == 0
    assert "single tool-calls" in findings["template", "parallel calls"]["detail"]
    assert findings["history", "parallel results"]["detail"].startswith("not tried: the template refuses it")


def test_a_template_that_forgets_reasoning_in_every_turn_is_advised_sampled(tmp_path: Path) -> None:
    _, report, findings = checked(make_family_folder(tmp_path, "deepseek", lambda text: text + "{#- <think> -#}"))
    assert findings["history", "tool results with reasoning"]["detail"] == "3 of 3 prompts fork: template"
    assert findings["history", "tool results"]["status"] == "good"
    assert report["history"] == "sampled"
    assert "forks each time" in report["why"]


def test_the_table_says_what_the_json_says(tmp_path: Path) -> None:
    done = run(str(make_family_folder(tmp_path, "qwen3.5")))
    assert done.returncode == 0, done.stderr
    assert "parser: qwen3.5" in done.stdout
    assert "gateway.history = faithful" in done.stdout
    assert done.stdout.rstrip().endswith("can be trained exactly")


def without_results(text: str) -> str:
    return text.replace("message.role == 'tool'", "message.role == 'nobody'")


def without_calls(text: str) -> str:
    return text.replace("message.tool_calls or []", "[]")


def without_end(text: str) -> str:
    return text.replace("<|im_end|>", "")


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (without_results, ("template", "call and result")),
        (without_calls, ("template", "call and result")),
        (without_calls, ("parser", "a call")),
        (without_end, ("tokenizer", "stop tokens")),
        (lambda text: text.replace('"arguments": ', '"given": '), ("parser", "a call")),
        (lambda text: text.replace("{%- for tool in tools %}", "{%- for tool in [] %}"), ("template", "tools")),
        (lambda text: "{{ broken", ("model", "tokenizer and template")),
        (lambda text: text.replace("add_generation_prompt", "false"), ("model", "tokenizer and template")),
    ],
)
def test_a_model_that_cannot_be_trained_exactly_is_status_1(tmp_path: Path, change: Any, finding: Any) -> None:
    status, report, findings = checked(make_family_folder(tmp_path, "hermes", change))
    assert status == 1
    assert not report["trainable"]
    assert findings[finding]["status"] == "bad"


def test_the_table_of_a_model_that_cannot_be_trained(tmp_path: Path) -> None:
    done = run(str(make_family_folder(tmp_path, "hermes", without_calls)))
    assert done.returncode == 1
    assert "dropped: the call" in done.stdout
    assert "cannot be trained exactly" in done.stdout


def test_missing_templates_and_stop_tokens_are_status_1(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path / "a", "hermes")
    (folder / "chat_template.jinja").unlink()
    status, _, findings = checked(folder)
    assert status == 1
    assert "no chat template" in findings["model", "tokenizer and template"]["detail"]
    status, _, _ = checked(folder, "--template", str(TEMPLATES / "qwen3.jinja"))
    assert status == 0
    (folder / "tokenizer_config.json").write_text("{}")
    status, _, findings = checked(folder, "--template", str(TEMPLATES / "qwen3.jinja"))
    assert status == 1
    assert "no end token" in findings["model", "tokenizer and template"]["detail"]


def test_a_tokenizer_that_normalises_is_a_note_and_one_that_loses_text_is_not(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, "hermes")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(folder / "tokenizer.json"))
    status, _, findings = checked(folder)
    assert status == 0
    assert findings["tokenizer", "returns the text it was given"]["status"] == "note"
    tokenizer.normalizer = normalizers.Replace("n", "nn")
    tokenizer.save(str(folder / "tokenizer.json"))
    status, _, findings = checked(folder)
    assert status == 1
    assert findings["tokenizer", "returns the text it was given"]["status"] == "bad"


def test_a_parser_of_another_family_does_not_read_the_calls(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, "mistral")
    status, _, findings = checked(folder, "--parser", "hermes")
    assert status == 1
    assert findings["parser", "a call"]["status"] == "bad"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{folder}/nowhere"], "no such folder"),
        (["{folder}", "--parser", "qwen33"], "'qwen33' is no parser"),
        (["{folder}", "--parser", "kimi-k2"], "does not fit the tokenizer"),
        (["{folder}", "--template", "{folder}/none.jinja"], "none.jinja: cannot be read"),
    ],
)
def test_wrong_usage_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    make_family_folder(tmp_path, "hermes")
    status = main(["check", *(argument.replace("{folder}", str(tmp_path)) for argument in arguments)])
    said = capsys.readouterr()
    assert status == 2
    assert words in said.err
    assert said.out == ""


def test_checking_loads_no_torch(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, "qwen3.5")
    code = (
        "import sys; from longrein.gateway.check import check; check(sys.argv[1]); "
        "sys.exit(int(bool({'torch', 'transformers'} & set(sys.modules))))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0
