"""Sampled tokens as clients see them that ask for log-probabilities: text, bytes, and the most probable instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longrein.gateway.tokens import TextModel


@dataclass(frozen=True)
class Likely:
    """A token that could have been sampled."""

    text: str
    bytes: tuple[int, ...] | None
    """UTF-8; a part of a character where the token is one. None where the tokenizer does not say."""
    logprob: float


@dataclass(frozen=True)
class Token(Likely):
    """A sampled token. Log-probabilities are those of the distribution that it was sampled from."""

    top: tuple[Likely, ...] = ()
    """The most probable tokens in its place, most probable first; as many as were asked for and could be sampled."""


def tokens_of(
    model: TextModel,
    ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[Sequence[tuple[int, float]]] | None,
) -> list[Token]:
    """What clients see of `ids`."""
    tops = top if top is not None else [()] * len(ids)
    return [
        Token(*_shown(model, id), logprob, tuple(Likely(*_shown(model, other), p) for other, p in likely))
        for id, logprob, likely in zip(ids, logprobs, tops, strict=True)
    ]


def _shown(model: TextModel, id: int) -> tuple[str, tuple[int, ...] | None]:
    text = model.decode([id])
    if "�" not in text:
        return text, tuple(text.encode())
    return text, _part_of_a_character(model.tokenizer.id_to_token(id) or "")


def _part_of_a_character(spelled: str) -> tuple[int, ...] | None:
    """The bytes of a token by its spelling in the vocabulary: byte fallback's or byte-level BPE's."""
    if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
        return (int(spelled[3:5], 16),)
    if spelled and all(character in _BYTE_LEVEL for character in spelled):
        return tuple(_BYTE_LEVEL[character] for character in spelled)
    return None


def _byte_level() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level()


def tokens_within(tokens: Sequence[Token], text: str) -> Sequence[Token]:
    """Those of `tokens` that `text` is made of, without what stands before and behind it; all where it is not found."""
    start = "".join(token.text for token in tokens).find(text)
    if start < 0:
        return tokens
    inside, at = [], 0
    for token in tokens:
        if at + len(token.text) > start and at < start + len(text):
            inside.append(token)
        at += len(token.text)
    return inside
