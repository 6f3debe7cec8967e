"""Small model folders made on the spot: a byte-level tokenizer and chat templates of the families that exist."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|header|>",
    "<|/header|>",
    "<|eot|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
]
STOPS = {"hermes": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot|>", "deepseek": "<|end|>"}

# ChatML with Hermes tool calls: append-only.
HERMES = """
{%- if tools %}{{ '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}{{ 'Tools:' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}{% if not loop.first %}{{ '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'tool' %}{{ '<|im_start|>tool\\n' + message.content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}{% if not loop.first or message.content %}{{ '\\n' }}{% endif %}{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# As Hermes, but thinking of turns before the last user message is dropped, as Qwen 3 does.
QWEN3 = """
{%- set ns = namespace(last=0) %}{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}{{ message.content.lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}{% if not loop.first or message.content %}{{ '\\n' }}{% endif %}{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- if loop.first and tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# Content is stripped, tool results have a role of their own, as Llama 3 does.
LLAMA3 = """
{{- '<|begin|>' }}{% for message in messages %}{{ '<|header|>' + ('ipython' if message.role == 'tool' else message.role) + '<|/header|>\\n\\n' }}
{%- if message.tool_calls %}{{ (message.content | trim) + '<tool_call>{"name": "' + message.tool_calls[0].function.name + '", "arguments": ' + (message.tool_calls[0].function.arguments | tojson) + '}</tool_call>' }}{% else %}{{ message.content | trim }}{% endif %}{{ '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\\n\\n' }}{% endif %}
"""

# No line break after a turn, thinking always dropped, system text first and bare, as DeepSeek does.
DEEPSEEK = """
{%- for message in messages %}{% if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'assistant' %}{{ '<|assistant|>' + message.content }}{% for call in message.tool_calls or [] %}{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}</tool_call>' }}{% endfor %}{{ '<|end|>' }}
{%- else %}{{ '<|user|>' + message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

TEMPLATES = {"hermes": HERMES, "qwen3": QWEN3, "llama3": LLAMA3, "deepseek": DEEPSEEK}

_CORPUS = [
    "The quick brown fox having a look at the file. I will write the file now. having hav ing heaving",
    '{"name": "bash", "arguments": {"command": "echo hi > out.txt; cat out.txt"}} <tool_call> </tool_call> <think> </think>',
    "system user assistant tool\n\n  \n naïve café 東京 1 2 3 45 678 9",
] * 20


@cache
def tokenizer_text() -> str:
    """A byte-level BPE tokenizer with merges, so that text can be cut into tokens in more than one way."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    return tokenizer.to_str()


def make_model_folder(folder: Path, template: str = "hermes", *, context: int = 100_000) -> Path:
    """Write a folder that the gateway can load: tokenizer, template and limits, no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_text(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": STOPS[template]}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": context}))
    (folder / "chat_template.jinja").write_text(TEMPLATES[template].strip("\n"), encoding="utf-8")
    return folder
