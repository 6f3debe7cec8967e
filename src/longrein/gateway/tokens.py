"""Text to token ids and back: the model's tokenizer and chat template, without torch or transformers.

`load_text_model` reads a Hugging Face model folder. `TextModel.render` turns messages into the text that the model's
own chat template gives; `TextModel.encode` turns the part of it that is new into ids; `decode` and `Detokenizer`
turn sampled ids into text.

Control tokens (`<|im_end|>` and its like) enter only from the template. Where message content spells one, rendering
marks the place with a Unicode noncharacter, and encoding turns that stretch into ordinary tokens: a file that an agent
reads cannot end its own tool message.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import tokenizers

from longrein.config import ConfigError

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


@dataclass(repr=False)
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

    def __post_init__(self) -> None:
        added = self.tokenizer.get_added_tokens_decoder()
        self.control = {token.content: id for id, token in added.items() if token.special}
        self.control_ids = frozenset(self.control.values())
        spellings = sorted(self.control, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        # A token that strips the white space beside it would swallow the start of what is encoded behind it.
        clean = [(t.content, id) for id, t in added.items() if t.special and not t.rstrip and not t.lstrip]
        preferred = [pair for pair in clean if pair[1] in self.stop_ids]
        self._anchor = (preferred or clean or [None])[0]
        self._plain = tokenizers.Tokenizer.from_str(self.tokenizer.to_str())
        self._plain.encode_special_tokens = True

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
        if self.turn_system_into_user:
            messages = _system_as_user(messages)
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
        return _unmark(text, mark, self._control_pattern)

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
        except (TypeError, KeyError, AttributeError, ValueError) as error:
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
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        anchor, anchor_id = self._anchor
        ids = self.tokenizer.encode(anchor + text, add_special_tokens=False).ids
        assert ids[0] == anchor_id, "a control token encodes to its own id"
        return ids[1:]

    def _encode_plain(self, text: str) -> list[int]:
        assert self._plain is not None
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if self.exact and self.decode(ids) != text:
            raise ControlTextError(
                "message content spells a control token and this tokenizer cannot encode it as ordinary text; "
                "set gateway.control_text = 'special' or take it out of the content"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens kept, nothing cleaned up."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def control_ends(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """After each control token of `ids`: (number of ids, number of characters) up to there."""
        ends: list[tuple[int, int]] = []
        start = characters = 0
        for i, id in enumerate(ids):
            if id in self.control_ids:
                characters += len(self.decode(ids[start:i])) + len(self.decode([id]))
                start = i + 1
                ends.append((start, characters))
        return ends


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
        # Keep one token of context: some decoders treat the first token of a run differently.
        if len(self.ids) - self._start > 16:
            self._start = len(self.ids) - 1
            self._emitted = len(self.model.decode(self.ids[self._start :]))
        return piece

    def finish(self) -> str:
        """What is left, half characters included (as U+FFFD)."""
        text = self.model.decode(self.ids[self._start :])
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece


# Loading


def model_folder(path: str) -> Path:
    """The folder of a model given as a folder or a hub name. Raises `ConfigError` when there is none."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(
            f"model.path: {path}: no such folder; give a Hugging Face model folder or a hub name (owner/name)"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = [
        "tokenizer*",
        "*.jinja",
        "special_tokens_map.json",
        "config.json",
        "generation_config.json",
        "chat_template*",
    ]
    try:
        return Path(snapshot_download(path, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"model.path: {path}: neither a folder nor a hub model that can be fetched: {error}"
        ) from None


def load_text_model(
    path: str,
    *,
    name: str = "policy",
    chat_template: str = "",
    context: int = 0,
    control_text: Literal["text", "refuse", "special"] = "text",
    system_messages: Literal["auto", "template", "user"] = "auto",
) -> TextModel:
    """Read tokenizer, template and limits from a Hugging Face model folder.

    Raises `ConfigError` naming the file when something is missing, when the template has no generation prompt, or
    when it cannot be compiled.
    """
    folder = model_folder(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{folder}: no tokenizer.json; Longrein needs the model's fast tokenizer")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    settings = _read_json(folder / "tokenizer_config.json")
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json")
    variables = _special_variables(settings, _read_json(folder / "special_tokens_map.json"))
    sources = _template_sources(folder, settings, chat_template)
    environment = _environment()
    try:
        templates = {key: environment.from_string(source) for key, source in sources.items()}
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{chat_template or folder}: the chat template does not compile: line {error.lineno}: {error}"
        ) from None
    text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    limit = text_config.get("max_position_embeddings") if isinstance(text_config, dict) else None
    model = TextModel(
        name=name,
        tokenizer=tokenizer,
        templates=templates,
        variables=variables,
        stop_ids=_stop_ids(tokenizer, variables, generation, config),
        context=context or (limit if isinstance(limit, int) else None),
        control_text=control_text,
        source="\n".join(sources.values()),
    )
    _probe(model, folder, system_messages)
    return model


def _probe(model: TextModel, folder: Path, system_messages: str) -> None:
    """Find out what the template and the tokenizer do before the first request depends on it."""
    user = [{"role": "user", "content": "Hello"}]
    try:
        without = model.render(user, None, generation_prompt=False).text
        with_prompt = model.render(user, None).text
    except TemplateError as error:
        raise ConfigError(f"{folder}: the chat template refuses a single user message: {error}") from None
    if with_prompt == without or not with_prompt.startswith(without):
        raise ConfigError(
            f"{folder}: the chat template has no generation prompt: it gives the same text with and without "
            "add_generation_prompt, so the model would not know that it is its turn; set model.chat_template"
        )
    model.generation_prompt = with_prompt[len(without) :]
    if not model.stop_ids:
        raise ConfigError(
            f"{folder}: no end token: generation_config.json or tokenizer_config.json has to name an eos token"
        )
    if system_messages == "user":
        model.turn_system_into_user = True
    elif system_messages == "auto":
        try:
            model.render([{"role": "system", "content": "Be brief."}, *user], None)
        except TemplateError:
            model.turn_system_into_user = True
    sample = '  Två  (ö) \n\n\t{"a": 1}  naïve, 東京 🙂 don\'t '
    model.exact = model.decode(model.encode(Rendered(sample))) == sample
    call = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turn = [*user, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        model.render(turn, None)
    except TemplateError:
        call["id"] = "abcdef012"
        try:
            model.render(turn, None)
            model.short_call_ids = True
        except TemplateError:
            pass  # no tool calls at all: the template says so itself when a harness sends one


def _read_json(file: Path) -> Json:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _special_variables(settings: Json, special: Json) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
    found: dict[str, str] = {}
    for key in names:
        value = settings.get(key, special.get(key))
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[key] = value
    return found


def _stop_ids(tokenizer: tokenizers.Tokenizer, variables: Mapping[str, str], *configs: Json) -> frozenset[int]:
    ids: set[int] = set()
    eos = variables.get("eos_token")
    if eos is not None and (id := tokenizer.token_to_id(eos)) is not None:
        ids.add(id)
    for config in configs:
        value = config.get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value if isinstance(value, list) else [])
    return frozenset(ids)


def _template_sources(folder: Path, settings: Json, chat_template: str) -> dict[str, str]:
    if chat_template:
        try:
            return {"default": Path(chat_template).read_text(encoding="utf-8")}
        except OSError as error:
            raise ConfigError(f"model.chat_template: {chat_template}: cannot be read: {error}") from None
    if (folder / "chat_template.jinja").is_file():
        sources = {"default": (folder / "chat_template.jinja").read_text(encoding="utf-8")}
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[extra.stem] = extra.read_text(encoding="utf-8")
        return sources
    value = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        sources = {entry["name"]: entry["template"] for entry in value}
        if "default" in sources:
            return sources
    raise ConfigError(f"{folder}: no chat template; give one by model.chat_template (a Jinja file)")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part in some templates; its body is plain output here."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment


# Control spellings in content


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


def _system_as_user(messages: Sequence[Json]) -> list[Json]:
    """Merge system messages into the user turn that follows (or stand as one), for templates without a system role."""
    out: list[Json] = []
    pending: list[str] = []
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
