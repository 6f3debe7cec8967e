"""A short piece of a transcript that can be shown: around a match, without secrets, every character visible."""

from __future__ import annotations

import re

BEFORE = 60
AFTER = 60
#: A match longer than this is cut in its middle.
LONGEST_MATCH = 240

#: Credentials of Longrein and of common services.
_SECRET = re.compile(
    r"(lr-at-|lr-run-|\b(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abpr]-|AKIA))[A-Za-z0-9_-]{6,400}", re.ASCII
)
_LONGEST_SECRET = 420


def excerpt(text: str, start: int, end: int) -> str:
    """The match `text[start:end]` with what stands around it.

    At most `BEFORE + LONGEST_MATCH + AFTER` characters and a few dots, of which those that cannot be seen (control
    characters, line ends, what changes the direction of writing) are spelled as escapes.
    """
    low, high = max(0, start - BEFORE), min(len(text), end + AFTER)
    looked = _SECRET.finditer(text, max(0, low - _LONGEST_SECRET), min(len(text), high + _LONGEST_SECRET))
    for secret in list(looked):  # one that the edge of the excerpt cuts would not be known for what it is
        if secret.start() < low < secret.end():
            low = secret.start()
        if secret.start() < high < secret.end():
            high = secret.end()
    before, match, after = (redacted(part) for part in _parts(text, low, start, end, high))
    if len(match) > LONGEST_MATCH:
        tail = LONGEST_MATCH // 4
        match = match[: LONGEST_MATCH - tail] + " … " + match[-tail:]
    shown = before[-BEFORE:] + match + after[:AFTER]
    return ("…" if low else "") + visible(shown) + ("…" if high < len(text) else "")


def _parts(text: str, low: int, start: int, end: int, high: int) -> tuple[str, str, str]:
    """What stands before, in and after the match; a secret across its edge belongs to the match."""
    for secret in _SECRET.finditer(text, low, high):
        if secret.start() < start < secret.end():
            start = secret.start()
        if secret.start() < end < secret.end():
            end = secret.end()
    return text[low:start], text[start:end], text[end:high]


def redacted(text: str) -> str:
    """The text without credentials: of each only what kind it is stays."""
    return _SECRET.sub(r"\1(secret)", text)


def visible(text: str) -> str:
    """The text with every character that cannot be seen spelled as an escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _spelled(char) for char in text)


def _spelled(char: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char)
    code = ord(char)
    return named or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
