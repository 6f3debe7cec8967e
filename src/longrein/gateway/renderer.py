"""Families of the `renderers` package: its parsers, over our tokenizer, as parsers of replies that stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from longrein.config import ConfigError
from longrein.gateway.families import begins_calls, opener
from longrein.gateway.messages import ToolCall
from longrein.gateway.parsing import THINK, THINK_END, Delta, ParserOptions, ReplyParser
from longrein.gateway.tokens import TextModel

Json = dict[str, Any]

#: Tokens between two readings of the reply so far, and characters at its end that may still turn out to be a mark.
TOKENS_BETWEEN_READINGS, HELD_CHARACTERS = 8, 32


def renderer_parser(name: str, model: TextModel, model_path: str) -> Callable[[ParserOptions], ReplyParser]:
    """The parser of a family. Raises `ConfigError` when there is none of that name or it does not fit the tokenizer."""
    from renderers import config_from_name, create_renderer
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    if name not in RENDERER_REGISTRY:
        known = ", ".join(sorted(RENDERER_REGISTRY))
        raise ConfigError(f"model.parser: {name!r} is no parser; known are auto, hermes, mistral, none, {known}")
    try:
        config: Any = config_from_name(name)
        renderer = create_renderer(RendererTokenizer(model, model_path), config)
    except Exception as error:
        raise ConfigError(
            f"model.parser: the {name} parser does not fit the tokenizer of {model_path}: {error}"
        ) from None
    return lambda options: RendererParser(renderer, options, model, opener(name), begins_calls(name))


@dataclass
class RendererParser:
    """Reads a reply of one family.

    The package's parsers read whole replies. In a stream the reply so far is read again every few tokens, and what can
    no longer change is given on: reasoning once it is closed, text up to the mark that begins calls. Calls come at the
    end, when it is known that all of them are well formed.
    """

    renderer: Any
    options: ParserOptions
    model: TextModel
    opener: str
    """What opens a section of calls that its parser may leave out; empty: nothing is lost."""
    mark: str
    """What calls begin with; empty where nothing tells a call from text before it is whole."""
    _ids: list[int] = field(default_factory=list)
    _text: str = ""
    _read: int = 0
    """Ids that have been read."""
    _reasoning: str = ""
    _content: str = ""
    """Given on already."""

    def push(self, ids: Sequence[int], text: str) -> list[Delta]:
        self._ids.extend(ids)
        self._text += text
        if not self.options.stream or not self.mark or len(self._ids) - self._read < TOKENS_BETWEEN_READINGS:
            return []
        if self.mark in self._text or not self._thought():
            return []
        self._read = len(self._ids)
        parsed = self._parse()
        return [] if parsed.tool_calls else self._more(parsed, HELD_CHARACTERS)

    def _thought(self) -> bool:
        """Whether reasoning is over, or there is none: until then a parser may take it for text."""
        begun = self.options.prompt_tail.rstrip().endswith(THINK) or self._text.lstrip()[: len(THINK)] in (THINK, "")
        return THINK_END in self._text or not begun

    def _parse(self) -> Any:
        return self.renderer.parse_response(
            self._ids, tools=list(self.options.tools) or None, prompt_ids=list(self.options.prompt_ids)
        )

    def _more(self, parsed: Any, hold: int) -> list[Delta]:
        """What the reply has beyond what was given on, but for the last `hold` characters of its text."""
        reasoning, content = parsed.reasoning_content or "", parsed.content or ""
        content = content[: max(0, len(content) - hold)]
        out: list[Delta] = []
        if reasoning.startswith(self._reasoning) and len(reasoning) > len(self._reasoning):
            out.append(Delta(reasoning=reasoning[len(self._reasoning) :]))
            self._reasoning = reasoning
        if content.startswith(self._content) and len(content) > len(self._content):
            out.append(Delta(content=content[len(self._content) :]))
            self._content = content
        return out

    def _raw_rest(self) -> str:
        """The text as it was sampled, behind what was given on."""
        at = self._text.find(self._reasoning) + len(self._reasoning) if self._reasoning else 0
        return self._text[self._text.find(self._content, at) + len(self._content) if self._content else at :]

    def finish(self) -> list[Delta]:
        parsed = self._parse()
        attempts = list(parsed.tool_calls or [])
        calls = [self._call(i, attempt) for i, attempt in enumerate(attempts)]
        kept = f"{parsed.reasoning_content} {parsed.content}"
        lost = not attempts and self.opener in self._text and self.opener not in kept
        if None in calls or (attempts and not self.options.tools) or lost:
            rest = self._raw_rest()
            return [Delta(content=rest)] if rest else []
        out = self._more(parsed, 0)
        out.extend(Delta(tool_call=call) for call in calls)
        behind = self._behind(attempts[-1].token_span) if attempts else ""
        return [*out, Delta(content=behind)] if behind.strip() else out

    def _behind(self, span: tuple[int, int] | None) -> str:
        """Text behind the last call, which is content again; the marks that close calls are not."""
        if span is None:
            return ""
        added = self.model.tokenizer.get_added_tokens_decoder()
        return self.model.decode([id for id in self._ids[span[1] :] if id not in added])

    def _call(self, index: int, attempt: Any) -> ToolCall | None:
        """None when the attempt is malformed."""
        # invalid_json beside an object says that a value was read as text: that is still a call.
        if not attempt.name or attempt.status not in ("ok", "invalid_json") or not isinstance(attempt.arguments, dict):
            return None
        try:
            arguments = json.dumps(attempt.arguments, ensure_ascii=False, allow_nan=False)
            arguments.encode()
        except ValueError:
            return None
        written = _written(attempt.raw, attempt.arguments)
        return ToolCall(attempt.id or self.options.call_id(index), attempt.name, written or arguments)


def _written(raw: str, arguments: Json) -> str | None:
    """The arguments as the model wrote them, where the family writes them as JSON: bare, or inside the call's object."""
    at = -1
    for _ in range(2):
        at = raw.find("{", at + 1)
        if at < 0:
            return None
        try:
            value, end = json.JSONDecoder().raw_decode(raw, at)
        except ValueError:
            return None
        if value == arguments:
            return raw[at:end]
    return None


@dataclass(frozen=True)
class RendererTokenizer:
    """What the `renderers` package asks of a tokenizer, answered by ours."""

    model: TextModel
    name_or_path: str

    @property
    def eos_token_id(self) -> int:
        return min(self.model.stop_ids)

    @property
    def unk_token_id(self) -> int | None:
        unknown = self.model.variables.get("unk_token")
        return self.model.tokenizer.token_to_id(unknown) if unknown else None

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return self.model.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [ids] if isinstance(ids, int) else list(ids)
        if skip_special_tokens:
            return self.model.tokenizer.decode(ids, skip_special_tokens=True)
        return self.model.decode(ids)

    def convert_tokens_to_ids(self, token: str | Sequence[str]) -> Any:
        if isinstance(token, str):
            id = self.model.tokenizer.token_to_id(token)
            return id if id is not None else self.unk_token_id
        return [self.convert_tokens_to_ids(t) for t in token]

    def get_vocab(self) -> dict[str, int]:
        return self.model.tokenizer.get_vocab()

    def __len__(self) -> int:
        return self.model.tokenizer.get_vocab_size()
