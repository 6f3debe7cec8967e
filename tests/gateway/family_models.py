"""Model folders of the families that exist, made on the spot: their control tokens, a template of each, no weights.

The templates stand in tests/data/templates. Tokenizers are byte-level, but for Mistral's, which is SentencePiece-like:
spaces as U+2581, bytes where a character is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEMPLATES = Path(__file__).parent.parent / "data" / "templates"

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
DEEPSEEK_MARKS = tuple(
    f"<｜{name}｜>"
    for name in (
        "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end",
        "tool▁call▁begin", "tool▁call▁end", "tool▁sep", "tool▁outputs▁begin", "tool▁outputs▁end",
        "tool▁output▁begin", "tool▁output▁end",
    )
)  # fmt: skip
LLAMA3 = tuple(
    f"<|{name}|>"
    for name in (
        "begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag",
    )
)  # fmt: skip
MISTRAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    control: tuple[str, ...]
    eos: str
    parser: str
    """What model.parser = auto has to find."""
    bos: str = ""
    marks: tuple[str, ...] = ()
    """Added tokens that are not marked special."""
    sentencepiece: bool = False
    composes: bool = False
    """The tokenizer composes characters (NFC), as Qwen's does."""


FAMILIES = {
    "hermes": Family(CHATML, "<|im_end|>", "hermes"),
    "qwen3": Family(CHATML, "<|im_end|>", "hermes", marks=MARKS, composes=True),
    "qwen3.5": Family((*CHATML, *VISION), "<|im_end|>", "qwen3.5", marks=MARKS, composes=True),
    "deepseek": Family(DEEPSEEK, DEEPSEEK[1], "deepseek-v3", bos=DEEPSEEK[0], marks=(*DEEPSEEK_MARKS, *MARKS[:2])),
    "llama3": Family(LLAMA3, "<|eot_id|>", "llama-3", bos="<|begin_of_text|>"),
    "mistral": Family(MISTRAL, "</s>", "mistral", bos="<s>", sentencepiece=True),
}

_CORPUS = [
    "The quick brown fox having a look at the file. I will write the file now. having hav ing heaving",
    '{"name": "bash", "arguments": {"command": "echo hi > out.txt; cat out.txt"}, "parameters": {"a": [1, 2]}}',
    "system user assistant tool function parameter\n\n  \n naïve café 東京 1 2 3 45 678 9 <b> | _ . ' \t",
] * 20


@cache
def tokenizer_text(family: str) -> str:
    """A tokenizer with merges, so that text can be cut into tokens in more than one way, as JSON."""
    kind = FAMILIES[family]
    tokenizer = _sentencepiece(kind.control) if kind.sentencepiece else _byte_level(kind.control)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in kind.control])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in kind.marks])
    if kind.composes:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer.to_str()


def _byte_level(control: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(control),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _sentencepiece(control: tuple[str, ...]) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(control), show_progress=False)
    trained.train_from_iterator([line for text in _CORPUS for line in text.split(" ")], trainer)
    learned = json.loads(trained.to_str())["model"]
    vocab = dict(learned["vocab"])
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in learned["merges"]]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def make_family_folder(folder: Path, family: str, change: Callable[[str], str] = lambda text: text) -> Path:
    """Write a folder that the gateway can load. `change` may alter the template."""
    folder.mkdir(parents=True, exist_ok=True)
    kind = FAMILIES[family]
    (folder / "tokenizer.json").write_text(tokenizer_text(family), encoding="utf-8")
    settings = {"eos_token": kind.eos, **({"bos_token": kind.bos} if kind.bos else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 100_000}))
    template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(change(template), encoding="utf-8")
    return folder
