"""Make a tiny language model on the spot: a Llama of half a million parameters that can write one tool's call.

    python model.py [FOLDER]        prints the folder; ${XDG_CACHE_HOME:-~/.cache}/longrein/tiny if none is named

The tokenizer is trained and the model pretrained on made-up conversations rendered by `chat_template.jinja`: a question
about an item, a call with *any word* as the sheet, a number, the number repeated. So the model learns the form of a
call and to copy words and digits; which sheets there are, and which one is up to date, is left to learn.
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tasks import ITEMS, KINDS, SHEETS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

FOLDER = Path(__file__).parent
STEPS, PEAK = 160, 5e-3  # of the pretraining: optimizer steps of 32 conversations, largest learning rate
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = [*ITEMS, *SHEETS]
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"properties": {"sheet": {"type": "string"}, "row": {"type": "string"}}},
    },
}


def make(folder: Path, seed: int = 0) -> Path:
    """Train tokenizer and model and write them to `folder`, which transformers loads. Returns the folder."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(["".join(conversation(rng)) for _ in range(1000)])
    model = pretrained(tokenizer, rng)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=CONTROL[1], eos_token=CONTROL[2], pad_token=CONTROL[0]
    )
    wrapped.chat_template = (FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
    wrapped.save_pretrained(folder)
    return folder


def conversation(rng: random.Random) -> list[str]:
    """A made-up conversation as text: prompt, call, the tool's turn, answer."""
    item, number = rng.choice(WORDS), str(rng.randint(100, 999))
    arguments = {"sheet": rng.choice(WORDS), "row": item}
    messages = [
        {"role": "user", "content": f"{rng.choice(KINDS)} of {item}"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "read", "arguments": arguments}}]},
        {"role": "tool", "content": number},
        {"role": "assistant", "content": number},
    ]
    texts = [_render(messages[:count], count % 2 == 1) for count in range(1, len(messages) + 1)]
    return [text.removeprefix(before) for before, text in zip(["", *texts], texts, strict=False)]


def _render(messages: list[dict], generation_prompt: bool) -> str:
    text = TEMPLATE.render(messages=messages, tools=[TOOL], add_generation_prompt=generation_prompt)
    # What a reply ends with is its control token; the line break after it belongs to what comes next.
    return text if generation_prompt else text.removesuffix("\n")


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE in which every word of the task is one token and every digit, space and run of signs stands alone."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(r"\d|\s|[a-zA-Z_]+|[^\w\s]+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1024,
            special_tokens=CONTROL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def pretrained(tokenizer: Tokenizer, rng: random.Random) -> LlamaForCausalLM:
    """The model after supervised steps on fresh conversations, its loss taken on what the assistant writes."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,  # tied embeddings of this width learn to copy much sooner than with 0.02
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(1.0, (step + 1) / 10, 4 * (STEPS - step) / STEPS)
        rows = [example(tokenizer, conversation(rng)) for _ in range(32)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in rows])[:, 1:]
        states = model.model(input_ids=ids).last_hidden_state[:, :-1]
        learned = labels >= 0  # logits only where a reply is predicted
        loss = torch.nn.functional.cross_entropy(model.lm_head(states[learned]), labels[learned])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def example(tokenizer: Tokenizer, texts: list[str]) -> tuple[list[int], list[int]]:
    """Ids of a conversation and its labels: -100 but for the assistant's two replies."""
    ids, labels = [], []
    for place, text in enumerate(texts):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        labels += piece if place % 2 == 1 else [-100] * len(piece)
    return ids, labels


ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
ENVIRONMENT.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # as transformers has it
TEMPLATE = ENVIRONMENT.from_string((FOLDER / "chat_template.jinja").read_text(encoding="utf-8"))

if __name__ == "__main__":
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    print(make(Path(sys.argv[1]) if len(sys.argv) > 1 else cache / "longrein" / "tiny"))
