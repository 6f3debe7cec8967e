"""A whole run that takes seconds: a random model of a few thousand weights, an agent of ten lines, a grader of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnop"
CONTROL = ["<pad>", "<start>", "<end>"]

TEMPLATE = (
    "{% for m in messages %}<start>{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant:{% endif %}"
)

AGENT = '''\
"""Asks the model for a word and prints it."""
import json, os, sys, urllib.request

task = json.load(open(os.environ["LONGREIN_TASK"]))
body = {"model": "policy", "max_tokens": 4, "messages": [{"role": "user", "content": task["ask"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps(body).encode(),
    headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
)
with urllib.request.urlopen(request) as answer:
    word = json.load(answer)["choices"][0]["message"]["content"]
open("answer.txt", "w").write(word or "")
'''

GRADER = '''\
"""How many of the word's four letters are up to h: a random model writes a quarter of such."""


def grade(task, transcript, workspace, exit_status):
    word = (workspace / "answer.txt").read_text()
    return {"reward": sum(letter in "abcdefgh" for letter in word[:4]) / 4, "letters": len(word)}


def teach(messages, tools):
    return {"role": "assistant", "content": "abc"}
'''


def make_model(folder: Path) -> Path:
    """A random Llama with a letter-per-token tokenizer and a chat template."""
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder.mkdir(parents=True)
    characters = CONTROL + sorted(set(LETTERS + "qrstuvwxyz: "))
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(c, special=True, normalized=False) for c in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<start>",
        "eos_token": "<end>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        described = LlamaConfig(vocab_size=len(characters), max_position_embeddings=256, **shape, **ids)
        AutoModelForCausalLM.from_config(described).save_pretrained(folder)
    return folder


def write_run(folder: Path, more: str = "") -> Path:
    """Write the run file, agent, grader, tasks and model of a small run into `folder`; the run file."""
    make_model(folder / "model")
    (folder / "agent.py").write_text(AGENT)
    (folder / "tiny_grader.py").write_text(GRADER)
    tasks = [{"ask": f"say {a}{b}"} for a in LETTERS[:5] for b in LETTERS[:5]]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    file = folder / "run.toml"
    file.write_text(
        f"""\
[run]
dir = "{folder}/runs"
name = "tiny"
[model]
path = "model"
device = "cpu"
[engine]
threads = 1
[agent]
command = ["python", "agent.py"]
max_concurrent = 2
timeout_seconds = 60
[task]
train = "tasks.jsonl"
dev = "tasks.jsonl"
held_out = "tasks.jsonl"
[reward]
function = "tiny_grader:grade"
[algorithm]
group_size = 4
groups_per_step = 2
[trainer]
steps = 2
learning_rate = 1e-2
[eval]
tasks = 4
[tracking]
progress = "lines"
{more}"""
    )
    return file
