"""Text to token ids and back: the model's tokenizer and chat template, without torch or transformers.

`TextModel.render` turns messages into the text that the model's own chat template gives; `TextModel.encode` turns the
part of it that is new into ids; `decode` and `Detokenizer` turn sampled ids into text. `loading.py` reads one from a
model folder.

Control tokens (`<|im_end|>` and its like) enter only from the template. Where message content spells one, rendering
marks the place with a Unicode noncharacter, and encoding turns that stretch into ordinary tokens: a file that an agent
reads cannot end its own tool message.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jinja2
import tokenizers

Json = dict[str, Any]

# Noncharacters never stand for text (Unicode 16, section 23.7); one that the request does not hold becomes the mark.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class TemplateError(Exception):
    """The chat template refused the messages; the text is the template's own."""


class ControlTextError(Exception):
    """Message content spells a control token and gateway.control_text is refuse."""


@dataclass(frozen=True)
class Rendered:
    """What the template gave. `text` is clean; `marks` are the offsets in `text` of content's control spellings."""

    text: str
    marks: tuple[tuple[int, int], ...] = ()


@dataclass
class TextModel:
    """A model's tokenizer, chat template and limits."""

    name: str
    tokenizer: tokenizers.Tokenizer
    templates: Mapping[str, jinja2.Template]
    variables: Mapping[str, str]
    """bos_token, eos_token, … as the template reads them."""
    stop_ids: frozenset[int]
    context: int | None
    control_text: Literal["text", "refuse", "special"] = "text"
    turn_system_into_user: bool = False
    turn_later_system_into_user: bool = False
    """The template takes a system message first and nowhere else."""
    text_arguments: bool = False
    """The template writes tool-call arguments as the text they came in and refuses objects."""
    generation_prompt: str = ""
    short_call_ids: bool = False
    """The template accepts only tool-call ids of nine letters and digits."""
    exact: bool = True
    """The tokenizer returns the text it was given; False weakens `faithful` to after its own normalisation."""
    source: str = ""
    """The template's own source, for choosing a parser."""
    control: dict[str, int] = field(default_factory=dict)
    control_ids: frozenset[int] = frozenset()
    _control_pattern: re.Pattern[str] | None = None
    _plain: tokenizers.Tokenizer | None = None
    _anchor: tuple[str, int] | None = None
    _stripping: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        added = self.tokenizer.get_added_tokens_decoder()
        # One character cannot be broken in two; no model writes a control token as one.
        self.control = {t.content: id for id, t in added.items() if len(t.content) > 1 and _is_control(t)}
        self.control_ids = frozenset(self.control.values())
        # White space beside such a token belongs to it in place and would not behind a cut.
        self._stripping = frozenset(id for id, t in added.items() if t.rstrip or t.lstrip)
        self._control_pattern = re.compile(_any_of(list(self.control))) if self.control else None
        # A token that strips the white space beside it would swallow the start of what is encoded behind it.
        clean = [
            (t.content, id)
            for id, t in added.items()
            if t.special and not t.rstrip and not t.lstrip and self.tokenizer.decode([id], False) == t.content
        ]
        preferred = [pair for pair in clean if pair[1] in self.stop_ids]
        self._anchor = (preferred or clean or [None])[0]

    def __repr__(self) -> str:
        return f"TextModel({self.name!r})"

    # Rendering

    def render(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] | None,
        *,
        generation_prompt: bool = True,
        clock: float | None = None,
    ) -> Rendered:
        """The template's text for `messages`. `clock` (seconds since the epoch) is what it takes for now.

        Raises `TemplateError` with the template's words, `ControlTextError` when content may not spell control tokens.
        """
        if self.turn_system_into_user or self.turn_later_system_into_user:
            messages = _system_as_user(messages, keep_first=not self.turn_system_into_user)
        if self.text_arguments:
            messages = [_with_text_arguments(message) for message in messages]
        mark = None
        if self.control_text != "special" and self._control_pattern is not None:
            mark = self._mark_for((messages, tools))
        if mark is not None:
            if self.control_text == "refuse":
                raise ControlTextError(
                    "message content spells a control token of the model (gateway.control_text = refuse)"
                )
            pattern = self._control_pattern
            assert pattern is not None
            messages = _map_strings(messages, lambda s: _guard(s, pattern, mark))
            tools = _map_strings(tools, lambda s: _guard(s, pattern, mark)) if tools else tools
        text = self._template(messages, tools, generation_prompt, clock)
        if mark is None:
            return Rendered(text)
        # A template may write JSON in ASCII.
        return _unmark(text.replace(f"\\u{ord(mark):04x}", mark), mark, self._control_pattern)

    def _template(
        self, messages: Sequence[Json], tools: Sequence[Json] | None, generation_prompt: bool, clock: float | None
    ) -> str:
        template = self.templates.get("tool_use" if tools else "default") or self.templates["default"]
        moment = time.localtime(clock)
        try:
            return template.render(
                messages=messages,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=generation_prompt,
                strftime_now=lambda form: time.strftime(form, moment),
                **self.variables,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(str(error) or type(error).__name__) from None
        except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from None

    def _mark_for(self, values: Any) -> str | None:
        """A mark that no string holds, or None when no string spells a control token."""
        pattern = self._control_pattern
        assert pattern is not None
        strings = list(_strings(values))
        if not any(pattern.search(s) for s in strings):
            return None
        for mark in _NONCHARACTERS:
            if not any(mark in s for s in strings):
                return mark
        raise ControlTextError("message content holds control tokens and every noncharacter U+FDD0 to U+FDEF")

    # Encoding and decoding

    def encode(self, rendered: Rendered, start: int = 0) -> list[int]:
        """Ids of `rendered.text[start:]`, encoded behind a control token so that no start-of-text rule applies."""
        text = rendered.text[start:]
        if not text:
            return []
        marks = [(a - start, b - start) for a, b in rendered.marks if a >= start]
        if not marks:
            return self._encode_behind_anchor(text)
        ids: list[int] = []
        for piece, control_id in self._pieces(text, marks):
            if control_id is not None:
                ids.append(control_id)
            elif any(a < piece[1] and b > piece[0] for a, b in marks):
                ids.extend(self._encode_plain(text[piece[0] : piece[1]]))
            else:
                ids.extend(self._encode_behind_anchor(text[piece[0] : piece[1]]))
        return ids

    def _pieces(self, text: str, marks: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], int | None]]:
        """Cut at the template's own control tokens; the spellings at `marks` are not control tokens."""
        assert self._control_pattern is not None
        spelled = {a for a, _ in marks}
        at = position = 0
        while found := self._control_pattern.search(text, position):
            if found.start() in spelled:
                position = found.start() + 1
                continue
            if found.start() > at:
                yield (at, found.start()), None
            yield (found.start(), found.end()), self.control[found.group()]
            at = position = found.end()
        if at < len(text):
            yield (at, len(text)), None

    def _encode_behind_anchor(self, text: str) -> list[int]:
        if self._anchor is None:
            return ids_of(self.tokenizer, text)
        anchor, anchor_id = self._anchor
        ids = ids_of(self.tokenizer, anchor + text)
        assert ids[0] == anchor_id, "a control token encodes to its own id"
        return ids[1:]

    def _encode_plain(self, text: str) -> list[int]:
        if self._plain is None:  # a second tokenizer takes memory; most runs never need it
            plain = tokenizers.Tokenizer.from_str(self.tokenizer.to_str())
            spelled = [tokenizers.AddedToken(text, special=True, normalized=False) for text in self.control]
            plain.add_special_tokens(spelled)
            plain.encode_special_tokens = True
            self._plain = plain  # whole: other threads encode too
        ids = ids_of(self._plain, text)
        if (self.exact and self.decode(ids) != text) or not self.control_ids.isdisjoint(ids):
            raise ControlTextError(
                "message content spells a control token and this tokenizer cannot encode it as ordinary text; "
                "set gateway.control_text = 'special' or take it out of the content"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens kept, nothing cleaned up.

        Decoded behind a control token, as they were encoded: SentencePiece-style decoders drop a space at the start.
        """
        if self._anchor is None:
            return self.tokenizer.decode(list(ids), skip_special_tokens=False)
        anchor, anchor_id = self._anchor
        return self.tokenizer.decode([anchor_id, *ids], skip_special_tokens=False)[len(anchor) :]

    def ordinary_spellings(self, ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Offsets in `text`, to which `ids` decode, of control tokens that ordinary tokens spell."""
        if self._control_pattern is None:
            return ()
        spelled = [(found.start(), found.end()) for found in self._control_pattern.finditer(text)]
        if len(spelled) == sum(id in self.control_ids for id in ids):
            return ()
        real: set[int] = set()
        start = characters = 0
        for i, id in enumerate(ids):
            if id in self.control_ids:
                characters += len(self.decode(ids[start : i + 1]))
                real.add(characters)
                start = i + 1
        return tuple(start for start, end in spelled if end not in real)

    def control_ends(self, ids: Sequence[int], text: str, ordinary: Collection[int]) -> list[tuple[int, int]]:
        """Behind each control token of `ids`: (number of ids, number of characters of `text`) up to there.

        `text` is what was encoded; at the offsets `ordinary` it spells a control token that is none. The tokenizer may
        have normalised it: control tokens stand in both in the same order.
        """
        if self._control_pattern is None:
            return []
        places = [m.end() for m in self._control_pattern.finditer(text) if m.start() not in ordinary]
        counts = [i + 1 for i, id in enumerate(ids) if id in self.control_ids]
        if len(places) != len(counts):
            return []
        pairs = zip(counts, places, strict=True)
        return [(count, place) for count, place in pairs if ids[count - 1] not in self._stripping]


@dataclass
class Detokenizer:
    """Incremental `decode`: never emits half a character, and the pieces join to the text of all ids."""

    model: TextModel
    ids: list[int] = field(default_factory=list)
    _start: int = 0  # ids before it are fully emitted and no longer looked at
    _emitted: int = 0  # characters of decode(ids[_start:]) already emitted

    def push(self, ids: Sequence[int]) -> str:
        self.ids.extend(ids)
        text = self.model.decode(self.ids[self._start :])
        if text.endswith("�"):
            return ""  # perhaps half a character: the next token tells
        piece = text[self._emitted :]
        self._emitted = len(text)
        # Keep one token of context, one that begins no half character: a decoder would give up on what follows it.
        if len(self.ids) - self._start > 16 and "�" not in (last := self.model.decode(self.ids[-1:])):
            self._start = len(self.ids) - 1
            self._emitted = len(last)
        return piece

    def finish(self) -> str:
        """What is left, half characters included (as U+FFFD)."""
        text = self.model.decode(self.ids[self._start :])
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece


#: Characters from which a text is encoded without Python's lock, so that other threads go on.
_LONG = 64 * 1024


def ids_of(tokenizer: tokenizers.Tokenizer, text: str, *, special: bool = False) -> list[int]:
    """The ids of a text, with what a tokenizer adds at its ends (`special`) or without.

    A single `encode` keeps the lock, one of a batch does not.
    """
    if len(text) < _LONG:
        return tokenizer.encode(text, add_special_tokens=special).ids
    return tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids


def tokens_beyond(tokenizer: tokenizers.Tokenizer, text: str, context: int) -> int | None:
    """How many tokens the first part of a text has, where that shows that it cannot fit into `context`; None otherwise.

    Only texts of far more characters than any that fit are looked at, piece by piece and no further than it takes: a
    piece encoded alone may differ from its place in the whole, but never by the factor two that is asked for.
    """
    if len(text) <= _CHARACTERS_A_TOKEN * context:
        return None
    tokens = 0
    for start in range(0, len(text), _LONG):
        tokens += len(ids_of(tokenizer, text[start : start + _LONG]))
        if tokens > 2 * context:
            return tokens
    return None


#: No text that an agent writes has so many on average.
_CHARACTERS_A_TOKEN = 16


# Control spellings in content


def _is_control(token: tokenizers.AddedToken) -> bool:
    """Special tokens, and those between bars: DeepSeek's `<｜User｜>` is not marked special and is one all the same."""
    return token.special or re.fullmatch(r"<([|｜]).+\1>", token.content, re.DOTALL) is not None


def _any_of(words: Sequence[str]) -> str:
    """A pattern of any of `words`, the longest that fits. Some models have a thousand: it is a tree, so that a
    character that begins none costs one look."""
    rests: dict[str, list[str]] = {}
    for word in words:
        if word:
            rests.setdefault(word[0], []).append(word[1:])
    branches = "|".join(re.escape(first) + _any_of(rest) for first, rest in rests.items())
    if "" in words:
        return f"(?:{branches})?" if branches else ""
    return f"(?:{branches})" if len(rests) > 1 else branches


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str):
                yield key
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key) if isinstance(key, str) else key: _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def _guard(text: str, pattern: re.Pattern[str], mark: str) -> str:
    """Break every spelling in two; repeated until none is left, for spellings that overlap."""
    while pattern.search(text):
        text = pattern.sub(lambda found: found.group()[0] + mark + found.group()[1:], text)
    return text


def _unmark(text: str, mark: str, pattern: re.Pattern[str] | None) -> Rendered:
    """Take the marks out and say where a spelling of content now stands."""
    assert pattern is not None
    pieces = text.split(mark)
    clean = "".join(pieces)
    # Positions in the clean text where a mark stood: a spelling that spans one of them is content's.
    broken: list[int] = []
    at = 0
    for piece in pieces[:-1]:
        at += len(piece)
        broken.append(at)
    spans: list[tuple[int, int]] = []
    position = 0
    for cut in broken:
        # The longest spelling that covers the cut starts one character before it, by construction.
        found = pattern.match(clean, cut - 1)
        if found and found.start() >= position:
            spans.append((found.start(), found.end()))
            position = found.start() + 1
    return Rendered(clean, tuple(spans))


def _with_text_arguments(message: Json) -> Json:
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed: list[Json] = []
    for call in calls:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            text = getattr(arguments, "text", None)
            text = text if text is not None else json.dumps(arguments, ensure_ascii=False)
            call = {**call, "function": {**call["function"], "arguments": text}}
        changed.append(call)
    return {**message, "tool_calls": changed}


def _system_as_user(messages: Sequence[Json], keep_first: bool) -> list[Json]:
    """Merge system messages into the user turn that follows (or stand as one), for templates without a system role.

    `keep_first`: system messages at the beginning stay, as one; for templates that take them nowhere else.
    """
    out: list[Json] = []
    pending: list[str] = []
    if keep_first:
        first = list(itertools.takewhile(lambda m: m.get("role") in ("system", "developer"), messages))
        if len(first) == 1:
            out.append(first[0])
        elif first:
            out.append({**first[0], "content": "\n\n".join(str(m.get("content") or "") for m in first)})
        messages = messages[len(first) :]
    for message in messages:
        if message.get("role") in ("system", "developer"):
            pending.append(str(message.get("content") or ""))
            continue
        if pending and message.get("role") == "user":
            message = {**message, "content": "\n\n".join([*pending, str(message.get("content") or "")])}
            pending = []
        elif pending:
            out.append({"role": "user", "content": "\n\n".join(pending)})
            pending = []
        out.append(message)
    if pending:
        out.append({"role": "user", "content": "\n\n".join(pending)})
    return out
