"""Replies of Mistral's models: `[THINK]…[/THINK]`, then text, then `[TOOL_CALLS]` and the calls.

The calls are a JSON list, or, since version 11 of the tokenizer, each a name, `[ARGS]` and an object. What is malformed
is given as text, as it was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from longrein.gateway.messages import ToolCall
from longrein.gateway.parsing import Delta, ParserOptions, _overlap, _read_call, read_json

THINK, THINK_END, CALLS, CALL_ID, ARGS = "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


@dataclass
class MistralParser:
    """Text and reasoning stream; calls are emitted at the end, when it is known that all of them are well formed."""

    options: ParserOptions
    _held: str = ""
    _state: str = "start"  # start, reasoning, content, calls

    def push(self, ids: Sequence[int], text: str) -> list[Delta]:
        self._held += text
        return list(self._read(final=False))

    def finish(self) -> list[Delta]:
        return list(self._read(final=True))

    def _read(self, final: bool) -> Iterator[Delta]:
        if self._state == "start":
            text = self._held.lstrip()
            if text.startswith(THINK):
                self._held, self._state = text[len(THINK) :], "reasoning"
            elif final or not THINK.startswith(text):
                self._state = "content"
        if self._state == "reasoning":
            reasoning, ended = self._until(THINK_END, final)
            if reasoning:
                yield Delta(reasoning=reasoning)
            if ended:
                self._held, self._state = self._held[len(THINK_END) :], "content"
        if self._state == "content":
            content, ended = self._until(CALLS, final) if self.options.tools else (self._held, False)
            self._held = self._held if self.options.tools else ""
            if content:
                yield Delta(content=content)
            if ended:
                self._state = "calls"
        if self._state == "calls" and final:
            calls = self._calls(self._held[len(CALLS) :])
            yield from [Delta(tool_call=call) for call in calls] if calls else [Delta(content=self._held)]
            self._held = ""

    def _until(self, marker: str, final: bool) -> tuple[str, bool]:
        """What stands before the marker and may be given on; whether the marker is there."""
        at = self._held.find(marker)
        ended = at >= 0
        if not ended:
            at = len(self._held) - (0 if final else _overlap(self._held, marker))
        text, self._held = self._held[:at], self._held[at:]
        return text, ended

    def _calls(self, text: str) -> list[ToolCall]:
        """Every call of the text; none when one of them is malformed."""
        try:
            bodies = _list(text) if text.lstrip().startswith("[") else [_named(part) for part in text.split(CALLS)]
        except ValueError:
            return []
        calls = [_read_call(body, self.options.call_id(i)) for i, body in enumerate(bodies)]
        return [call for call in calls if call is not None] if None not in calls else []


def _list(text: str) -> list[str]:
    """The text of each element of a JSON list. Raises ValueError when it is none."""
    read_json(text)
    decoder, bodies, at = json.JSONDecoder(), [], text.index("[") + 1
    while (found := text.find("{", at)) >= 0:
        if text[at:found].strip() not in ("", ","):
            raise ValueError("an element is no object")
        _, at = decoder.raw_decode(text, found)
        bodies.append(text[found:at])
    if text[at:].strip() != "]":
        raise ValueError("an element is no object")
    return bodies


def _named(part: str) -> str:
    """`name[CALL_ID]id[ARGS]{…}` as the JSON object of a call. Raises ValueError when it is none."""
    head, found, arguments = part.partition(ARGS)
    if not found:
        raise ValueError("no arguments")
    read_json(arguments)
    name, _, id = head.partition(CALL_ID)
    ids = f'"id": {json.dumps(id.strip())}, ' if id.strip() else ""
    return f'{{"name": {json.dumps(name.strip())}, {ids}"arguments": {arguments.strip()}}}'
