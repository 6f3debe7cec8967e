"""The form that a request fixes its reply to, and the grammar that makes a model keep it (guided decoding).

A dialect reads `tool_choice`, response formats and the number of calls that are allowed into a `Form`. `hermes_guide`
writes a form as a Lark grammar in llguidance's form, over the whole reply: reasoning where there is any, then content
or calls in the syntax that `HermesParser` reads. An engine samples only tokens that the grammar lets follow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longrein.gateway.parsing import CALL, CALL_END, THINK, THINK_END

Json = dict[str, Any]

#: White space between the parts of a JSON value: none, a blank, or a line break with what indents the next line.
#: Without a bound a model that likes blanks never finishes.
WHITESPACE = r"( |\n[ \t]{0,40})"


@dataclass(frozen=True)
class Schema:
    """A JSON schema, and where in the request it stands."""

    value: Json
    strict: bool
    """Whether every keyword counts; otherwise those that llguidance does not know are left out."""
    field: str

    def guided(self) -> Json:
        """The schema with the options that llguidance takes it by."""
        return {**self.value, "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": not self.strict}}


@dataclass(frozen=True)
class Tool:
    """A tool that may be called, under the name that the template and the model know."""

    name: str
    arguments: Schema


@dataclass(frozen=True)
class ToolChoice:
    """What a request says of calling: as the model likes, not at all, at least once, or one tool by its name."""

    kind: Literal["auto", "none", "required", "named"]
    said: str = ""
    """The field and its value, as an error names them."""
    name: str = ""
    """The tool's name when it is named."""


@dataclass(frozen=True)
class Form:
    """What a reply has to be: `least` to `most` calls of `tools`, or else content of a schema."""

    field: str
    """The field of the request that asks for it."""
    said: str
    """The field and its value, as errors and the record name them."""
    least: int = 0
    most: int | None = 0
    """None: any number."""
    tools: tuple[Tool, ...] = ()
    content: Schema | None = None
    """None: any text where no call is asked for."""

    def schemas(self) -> Sequence[Schema]:
        """All schemas that the guide holds."""
        return [*(tool.arguments for tool in self.tools), *([self.content] if self.content is not None else [])]


def arguments_schema(parameters: Json | None, strict: bool, field: str) -> Schema:
    """The schema of a tool's arguments: an object, empty when the tool names no parameters."""
    if parameters is None:
        return Schema({"type": "object", "properties": {}, "additionalProperties": False}, strict, field)
    return Schema({"type": "object"} | parameters, strict, field)


def form_of(choice: ToolChoice, single: str, tools: Sequence[Tool], content: tuple[str, Schema] | None) -> Form | None:
    """The form that a request asks for; None when the model is free.

    `single` is the field that allows one call at most, as an error names it, or empty; `content` is the response
    format, as an error names it, and its schema.
    """
    tools = tuple(tools)
    if choice.kind == "named":
        named = tuple(tool for tool in tools if tool.name == choice.name)
        return Form("tool_choice", choice.said, least=1, most=1, tools=named)
    if choice.kind == "required":
        return Form("tool_choice", choice.said, least=1, most=1 if single else None, tools=tools)
    callable = tools if choice.kind == "auto" else ()
    most = (1 if single else None) if callable else 0
    if content is not None:
        said, schema = content
        return Form(said.partition(":")[0], said, most=most, tools=callable, content=schema)
    if single and callable:
        return Form(single.partition(":")[0], single, most=most, tools=callable)
    return None


Thinking = Literal["none", "may", "opened"]
"""Whether a reply has reasoning: never, as the model likes, or always since the prompt's end has begun it."""


def thinking_of(prompt_tail: str, template: str) -> Thinking:
    """What the end of the prompt's text and the source of the template say of reasoning in the reply."""
    tail = prompt_tail.rstrip()
    if tail.endswith(THINK):
        return "opened"
    return "may" if THINK in template and not tail.endswith(THINK_END) else "none"


def hermes_guide(form: Form, thinking: Thinking, tokens: Collection[str]) -> str:
    """The grammar of all replies of a form, in the syntax that `HermesParser` reads.

    `tokens` are the added tokens of the tokenizer: a marker that is one of them is sampled as that token, any other as
    the text that it is.
    """
    return _Grammar(form, thinking, frozenset(tokens)).text()


@dataclass
class _Grammar:
    form: Form
    thinking: Thinking
    tokens: frozenset[str]

    def text(self) -> str:
        rules = ["%llguidance {}", f"start: {self._reasoning()} reply".replace("  ", " ")]
        rules += self._thought()
        rules += self._reply()
        return "\n".join(rules) + "\n"

    def _reasoning(self) -> str:
        return {"none": "", "may": "(thought GAP?)?", "opened": "thought GAP?"}[self.thinking]

    def _thought(self) -> list[str]:
        if self.thinking == "none":
            return []
        begun = self._marker(THINK) + " " if self.thinking == "may" else ""
        ended = "ANY " + self._marker(THINK_END) if THINK_END in self.tokens else "until_thought"
        rules = [f"thought: {begun}{ended}", r"GAP: /\n{1,2}/"]
        return [*rules, "ANY: /(?s:.*)/" if THINK_END in self.tokens else _until("until_thought", THINK_END)]

    def _reply(self) -> list[str]:
        form, ways, rules = self.form, [], []
        if form.content is not None:
            ways.append("content")
            rules.append(f"content: %json {_json(form.content.guided())}")
        if form.tools and form.most != 0:
            ways.append("calls")
            rules += self._calls()
        if form.least == 0 and form.content is None:
            return [*self._text_then_call(), *rules]
        return [f"reply: {' | '.join(ways)}", *rules]

    def _calls(self) -> list[str]:
        more = "" if self.form.most == 1 else r' ("\n" call)*'
        if self.form.least == 0 and self.form.content is None:
            rules = []
        else:
            rules = [f"calls: call{more}", f"call: {self._marker(CALL)} body"]
        bodies = " | ".join(f"tool_{i}" for i in range(len(self.form.tools)))
        rules.append(f'body: "\\n"? ({bodies}) "\\n"? {self._marker(CALL_END)}')
        for i, tool in enumerate(self.form.tools):
            begun = _literal(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
            rules.append(f'tool_{i}: {begun} %json {_json(tool.arguments.guided())} "}}"')
        return rules

    def _text_then_call(self) -> list[str]:
        """Any text, with a call behind it or not."""
        # Text that begins with a thought is a thought: the parser reads it so.
        thought = f" & ~/{_escaped(THINK)}(?s:.*)/" if self.thinking == "may" and THINK not in self.tokens else ""
        text = f"TEXT: /(?s:.*)/{thought}"
        if CALL in self.tokens:
            return [f"reply: TEXT ({self._marker(CALL)} body)?", text]
        # Lazy: the first marker is a call's, and no text goes on over it.
        until = [f"UNTIL_CALL: /(?s:.*){_escaped(CALL)}/{thought}", "until_call[lazy]: UNTIL_CALL"]
        return ["reply: TEXT | until_call body", text, *until]

    def _marker(self, text: str) -> str:
        return text if text in self.tokens else _literal(text)


def _until(name: str, end: str) -> str:
    """A rule for any text up to the first `end`, and that."""
    return f"{name}[lazy]: /(?s:.*){_escaped(end)}/"


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _literal(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
