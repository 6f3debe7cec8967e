"""Which family of parsers a model's chat template belongs to: what the template writes, the model has learned to write."""

from __future__ import annotations

#: What a template writes around a tool call → parsers that read it, the first that fits the tokenizer. The order
#: matters: Qwen 3.5 and GLM put other things into Hermes' marks.
_SIGNS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("<｜tool▁calls▁begin｜>",), ("deepseek-v3",)),
    (("<|tool_calls_section_begin|>",), ("kimi-k2",)),
    (("<minimax:tool_call>",), ("minimax-m2",)),
    (("<|channel|>", "<|constrain|>"), ("gpt-oss",)),
    (("<tool_call>", "<arg_key>"), ("glm-5", "glm-4.5")),
    (("<tool_call>", "<function="), ("qwen3.5", "prime-qwen3", "nemotron-3")),
    (("[TOOL_CALLS]",), ("mistral",)),
    (("<tool_call>",), ("hermes",)),
    (("<|start_header_id|>", '"parameters": '), ("llama-3",)),
)


def recognise(template: str) -> tuple[str, ...]:
    """Names of parsers for what the template's source writes, the likeliest first; none when it writes no known call."""
    for signs, parsers in _SIGNS:
        if all(sign in template for sign in signs):
            return parsers
    return ()


#: What opens a section of calls, by parser, where `renderers` leaves out a section in which it finds no call.
_OPENERS = {
    "deepseek-v3": "<｜tool▁calls▁begin｜>",
    "deepseek-r1": "<｜tool▁calls▁begin｜>",
    "kimi-k2": "<|tool_calls_section_begin|>",
    "kimi-k2.5": "<|tool_calls_section_begin|>",
    "minimax-m2": "<minimax:tool_call>",
}


def opener(parser: str) -> str:
    """The mark that opens a section of calls, for the parsers that may lose one; empty for others."""
    return _OPENERS.get(parser, "")


#: What calls begin with, by parser, where text before them can be told from them.
_MARKS = {
    **_OPENERS,
    "glm-4.5": "<tool_call>",
    "glm-5": "<tool_call>",
    "qwen3.5": "<tool_call>",
    "prime-qwen3": "<tool_call>",
    "nemotron-3": "<tool_call>",
}


def begins_calls(parser: str) -> str:
    """The mark that every call of the family stands behind; empty where there is none (a bare JSON object, say)."""
    return _MARKS.get(parser, "")
