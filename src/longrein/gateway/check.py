"""`longrein check`: whether a model can be trained exactly, found by putting conversations through its own template.

Nothing here loads weights. What is found comes as `Finding`s: good, to be known, or a reason why the model cannot be
trained exactly; and as the advised `gateway.history`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from longrein.config import ConfigError
from longrein.gateway.conversation import History, plan_prompt
from longrein.gateway.loading import load_text_model, model_folder
from longrein.gateway.messages import Message, ToolCall, same
from longrein.gateway.parsing import ParserOptions, ReplyParser, make_parser, message_of, parser_name
from longrein.gateway.tokens import ControlTextError, Rendered, TemplateError, TextModel

Json = dict[str, Any]
Area = Literal["model", "tokenizer", "template", "parser", "history"]
Status = Literal["good", "note", "bad"]
MakeParser = Callable[[ParserOptions], ReplyParser]


@dataclass(frozen=True)
class Finding:
    area: Area
    subject: str
    status: Status
    """bad: the model cannot be trained exactly, or not by an agent that does this."""
    detail: str


@dataclass
class Report:
    """What `check` found. `history` is the advised gateway.history, with the reason in `why`."""

    model: str
    parser: str = ""
    findings: list[Finding] = field(default_factory=list)
    history: str = ""
    why: str = ""

    @property
    def trainable(self) -> bool:
        return not any(finding.status == "bad" for finding in self.findings)

    def to_json(self) -> Json:
        return {**asdict(self), "trainable": self.trainable}


def check(path: str, *, chat_template: str = "", parser: str = "auto") -> Report:
    """Put the battery through a model's tokenizer, template and parser.

    Raises `ConfigError` when there is no such model, template file or parser: that is no finding about a model.
    """
    model_folder(path)
    report = Report(path)
    try:
        model = load_text_model(path, chat_template=chat_template)
    except ConfigError as error:
        if str(error).startswith("model."):  # what was asked for is wrong, not what was found
            raise
        report.findings.append(Finding("model", "tokenizer and template", "bad", str(error)))
        return report
    report.parser = parser_name(model, path) if parser == "auto" else parser
    make = make_parser(report.parser, model, path)
    report.findings += [*_tokenizer(model), *_control_text(model), *_template(model)]
    report.findings += _parser(model, make)
    loops = list(_loops(model, make))
    report.findings += [finding for finding, _ in loops]
    report.history, report.why = _advice(model, {finding.subject: forks for finding, forks in loops})
    return report


# The battery

TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "lines": {"type": "integer"},
                    "options": {"type": "object"},
                },
                "required": ["path"],
            },
        },
    }
]
PLAIN_ARGUMENTS = '{"path": "list.txt", "lines": 20}'
ODD_ARGUMENTS = '{"path":  "caf\\u00e9 \\"x\\" <b>\\n", "options": {"z": [], "a": null}, "lines": 1e2}'
ASK = Message("user", "What is in notes.txt?")
SYSTEM = Message("system", "Answer in one line.")
THOUGHT = "The file has to be read first."
UNICODE = "naïve café 東京 🙂 e\u0301 \u00a0\u200b"
SPACED = "  indented\n\n\tby hand  \n"


def _call(model: TextModel, number: int, arguments: str = PLAIN_ARGUMENTS) -> ToolCall:
    digits = f"{number:09d}" if model.short_call_ids else f"call_{number:024d}"
    return ToolCall(digits, "read_file", arguments)


def _result(call: ToolCall, text: str = "milk and bread") -> Message:
    return Message("tool", text, tool_call_id=call.id, name=call.name)


def _render(model: TextModel, messages: Sequence[Message], tools: Sequence[Json] = (), prompt: bool = True) -> Rendered:
    return model.render([m.for_template() for m in messages], list(tools), generation_prompt=prompt, clock=0.0)


# Tokenizer


def _tokenizer(model: TextModel) -> Iterator[Finding]:
    texts = [ASK.content, UNICODE, SPACED, PLAIN_ARGUMENTS, ODD_ARGUMENTS, "a \u2581 b"]
    texts.append(_render(model, [ASK, Message("assistant", "Milk."), ASK]).text)
    back = [model.decode(model.encode(Rendered(text))) for text in texts]
    again = [model.decode(model.encode(Rendered(text))) for text in back]
    lost = next((f"{a!r} comes back as {b!r}" for a, b in zip(texts, back, strict=True) if a != b), "")
    if back == texts:
        yield Finding("tokenizer", "returns the text it was given", "good", "prompts are exact")
    elif again == back:
        yield Finding("tokenizer", "returns the text it was given", "note", f"after its own normalisation only: {lost}")
    else:
        yield Finding("tokenizer", "returns the text it was given", "bad", f"not even what it returned itself: {lost}")
    stops = [model.decode([id]) for id in sorted(model.stop_ids)]
    closed = _render(model, [ASK, Message("assistant", "Milk.")], prompt=False).text
    behind = closed[closed.rfind("Milk.") :]
    if any(stop in behind for stop in stops):
        yield Finding("tokenizer", "stop tokens", "good", " ".join(stops))
    else:
        detail = f"the template ends an answer with {behind[5:]!r}, which no stop token ({' '.join(stops)}) begins"
        yield Finding("tokenizer", "stop tokens", "bad", detail + "; name it as an eos token in generation_config.json")


def _control_text(model: TextModel) -> Iterator[Finding]:
    subject = "control tokens spelled in content"
    spellings = sorted(model.control)
    if not spellings:
        yield Finding("tokenizer", subject, "note", "the tokenizer has no control tokens: nothing marks a turn's end")
        return
    count = sum(id in model.control_ids for id in model.encode(_render(model, [ASK])))
    for spelling in spellings:
        try:
            rendered = _render(model, [replace(ASK, content=f"a {spelling} b")])
            ids = model.encode(rendered)
        except (ControlTextError, TemplateError) as error:
            yield Finding("tokenizer", subject, "note", f"{spelling}: {error}")
            return
        if sum(id in model.control_ids for id in ids) != count or (model.exact and model.decode(ids) != rendered.text):
            yield Finding("tokenizer", subject, "bad", f"{spelling} in a message becomes a control token")
            return
    yield Finding("tokenizer", subject, "good", f"become ordinary tokens ({len(spellings)} tried)")


# Template


@dataclass(frozen=True)
class _Case:
    """A conversation, and what of it should stand in the text: {what it is called: its text}."""

    subject: str
    messages: list[Message]
    shows: dict[str, str]
    tools: bool = False
    needed: bool = False


def _cases(model: TextModel) -> list[_Case]:
    one, two, odd = _call(model, 1), _call(model, 2, '{"path": "b.txt"}'), _call(model, 3, ODD_ARGUMENTS)
    done = Message("assistant", "Milk and bread.")
    thinks = Message("assistant", "Milk and bread.", THOUGHT)
    calls = Message("assistant", tool_calls=(one,))
    used = [ASK, calls, _result(one)]
    both = [ASK, Message("assistant", tool_calls=(one, two))]
    in_order = [_result(one, "first"), _result(two, "second")]
    call = {"the call": "list.txt"}
    results = {"the results": "second"}
    more = Message("user", "And b.txt?")
    spaced = [replace(ASK, content=SPACED), replace(done, content=SPACED), replace(more, content=UNICODE)]
    return [
        _Case("one question", [ASK], {"it": ASK.content}, needed=True),
        _Case("question, answer, question", [ASK, done, more], {"the answer": done.content}, needed=True),
        _Case("system message", [SYSTEM, ASK], {"it": SYSTEM.content}),
        _Case("system message later", [SYSTEM, ASK, done, Message("system", "Hurry."), more], {"it": "Hurry."}),
        _Case("system message after a result", [SYSTEM, *used, Message("system", "Hurry.")], {"it": "Hurry."}, True),
        _Case("two questions in a row", [ASK, more], {"the second": more.content}),
        _Case("tools", [SYSTEM, ASK], {"their names": "read_file", "their parameters": '"lines"'}, True, needed=True),
        _Case("call and result", used, {**call, "the result": "milk and bread"}, True, needed=True),
        _Case("parallel calls", [*both, *in_order], {"the second call": "b.txt", **results}, True),
        _Case("results in another order", [*both, *reversed(in_order)], {"the second call": "b.txt", **results}, True),
        _Case("text beside a call", [ASK, replace(calls, content="I look."), *used[2:]], {"the text": "I look."}, True),
        _Case("empty result", [*used[:2], _result(one, "")], call, True),
        _Case("empty answer", [ASK, replace(done, content=""), more], {"what follows": more.content}),
        _Case("reasoning", [ASK, thinks], {"it": THOUGHT}),
        _Case("reasoning before a call", [ASK, replace(calls, reasoning=THOUGHT), *used[2:]], {"it": THOUGHT}, True),
        _Case("reasoning before the last question", [ASK, thinks, more], {"it": THOUGHT}),
        _Case("unicode", spaced, {"it": UNICODE.strip()}),
        _Case("white space around text", spaced, {"that of questions": SPACED, "that of answers": SPACED}),
        _Case("odd arguments", [ASK, Message("assistant", tool_calls=(odd,)), _result(odd)], {"they": ODD_ARGUMENTS}, True),
    ]  # fmt: skip


def _template(model: TextModel) -> Iterator[Finding]:
    for case in _cases(model):
        try:
            text = _render(model, case.messages, TOOLS if case.tools else ()).text
        except TemplateError as error:
            yield Finding("template", case.subject, "bad" if case.needed else "note", f"refused: {error}")
            continue
        missing = [what for what, words in case.shows.items() if words not in text]
        if case.subject == "white space around text":
            written = text.count(SPACED)
            missing = ["everywhere"] if not written else ["somewhere"] if written == 1 else []
        if not missing:
            yield Finding("template", case.subject, "good", _adapted(model, case.subject) or "written")
        elif case.subject == "odd arguments":
            yield Finding("template", case.subject, "note", "re-serialised: " + _arguments_in(text))
        elif case.subject == "white space around text":
            yield Finding("template", case.subject, "note", f"trimmed {missing[0]}")
        else:
            status = "bad" if case.needed else "note"
            yield Finding("template", case.subject, status, f"dropped: {', '.join(missing)}")


def _adapted(model: TextModel, subject: str) -> str:
    if subject == "system message" and model.turn_system_into_user:
        return "written as part of the user's turn"
    later = subject in ("system message later", "system message after a result")
    if later and (model.turn_system_into_user or model.turn_later_system_into_user):
        return "written as the user's, with the turn that follows"
    return ""


def _arguments_in(text: str) -> str:
    """The stretch of the text where the odd arguments stand, for a person to see what became of them."""
    at = text.rfind("caf")
    return repr(text[max(0, at - 12) : at + 44]) if at >= 0 else "they are not written at all"


# Parser


def _thinks(model: TextModel) -> bool:
    return "reasoning_content" in model.source or "<think>" in model.source or "[THINK]" in model.source


def _written(model: TextModel, messages: Sequence[Message], turn: Message, tools: Sequence[Json]) -> str | None:
    """What the model would sample for `turn`: what its template writes behind the prompt, up to the stop token.

    Reasoning that the template leaves out of a conversation is put where the family's models write it. None: the
    template closes the turn with no stop token.
    """
    asked = _render(model, messages, tools).text
    told = _render(model, [*messages, turn], tools, prompt=False).text
    shared = next((i for i, (a, b) in enumerate(zip(asked, told, strict=False)) if a != b), min(len(asked), len(told)))
    tail = told[shared:]
    opened = asked.rstrip().endswith("<think>")
    if turn.reasoning and turn.reasoning not in tail:
        tail = ("" if opened else "<think>\n") + f"{turn.reasoning}\n</think>\n\n{tail}"
    elif opened and shared < len(asked):
        tail = "\n</think>\n\n" + tail
    ends = [at for id in model.stop_ids if (at := tail.find(model.decode([id]))) >= 0]
    return tail[: min(ends)] if ends else None


def _read(model: TextModel, make: MakeParser, prompt: str, text: str, call_id: Callable[[int], str]) -> Message:
    ids = model.encode(Rendered(text))
    parser = make(ParserOptions(prompt[-64:], model.encode(Rendered(prompt)), TOOLS, call_id))
    return message_of([*parser.push(ids, text), *parser.finish()])


def _parser(model: TextModel, make: MakeParser) -> Iterator[Finding]:
    one, two, odd = _call(model, 1), _call(model, 2, '{"path": "b.txt"}'), _call(model, 3, ODD_ARGUMENTS)
    turns = {
        "text": Message("assistant", "Milk and bread."),
        "a call": Message("assistant", tool_calls=(one,)),
        "parallel calls": Message("assistant", tool_calls=(one, two)),
        "text and a call": Message("assistant", "I look.", tool_calls=(one,)),
        "odd arguments": Message("assistant", tool_calls=(odd,)),
    }
    if _thinks(model):
        turns["reasoning and text"] = Message("assistant", "Milk and bread.", THOUGHT)
        turns["reasoning and a call"] = Message("assistant", "", THOUGHT, (one,))
    for subject, turn in turns.items():
        needed = subject in ("text", "a call")
        try:
            text = _written(model, [ASK], turn, TOOLS)
            prompt = _render(model, [ASK], TOOLS).text
        except TemplateError as error:
            yield Finding("parser", subject, "bad" if needed else "note", f"the template refuses it: {error}")
            continue
        if text is None:
            yield Finding("parser", subject, "bad", "the template closes it with no stop token")
            continue
        minted = [c.id for c in turn.tool_calls]
        reply = _read(model, make, prompt, text, lambda i, ids=minted: ids[i] if i < len(ids) else f"x{i}")
        yield _comparison(model, subject, needed, turn, reply)


def _comparison(model: TextModel, subject: str, needed: bool, turn: Message, reply: Message) -> Finding:
    if len(reply.tool_calls) != len(turn.tool_calls):
        status = "bad" if needed else "note"
        detail = f"{len(reply.tool_calls)} of {len(turn.tool_calls)} calls are read back"
        return Finding("parser", subject, status, detail + (f"; as text: {reply.content!r}" if reply.content else ""))
    # A template that leaves text out beside calls leaves nothing to read back.
    if not same(replace(turn, reasoning=""), replace(reply, reasoning="")):
        return Finding("parser", subject, "bad" if needed else "note", f"read back otherwise: {reply.to_json()}")
    if turn.reasoning.strip() != reply.reasoning.strip():
        return Finding("parser", subject, "note", f"the reasoning is read back as {reply.reasoning!r}")
    if turn.content and not reply.content:
        return Finding("parser", subject, "note", "the template writes no text beside calls")
    return Finding("parser", subject, "good", "read back as it was written")


# History


def _loops(model: TextModel, make: MakeParser) -> Iterator[tuple[Finding, list[str | None]]]:
    """Conversations of several turns, each reply written as the model would: where a prompt does not repeat its past."""
    thought = THOUGHT if _thinks(model) else ""
    kinds: dict[str, tuple[Callable[[int], Message], bool]] = {
        "chat": (lambda n: Message("assistant", f"Answer {n}."), False),
        "tool results": (lambda n: Message("assistant", tool_calls=(_call(model, n),)), True),
        "parallel results": (lambda n: Message("assistant", tool_calls=(_call(model, n), _call(model, n + 50))), True),
        "odd arguments": (lambda n: Message("assistant", tool_calls=(_call(model, n, ODD_ARGUMENTS),)), True),
        "white space around text": (lambda n: Message("assistant", f"  Answer {n}.\n"), False),
    }
    if thought:
        kinds["chat with reasoning"] = (lambda n: Message("assistant", f"Answer {n}.", thought), False)
        kinds["tool results with reasoning"] = (lambda n: Message("assistant", "", thought, (_call(model, n),)), True)
    for subject, (turn, tools) in kinds.items():
        try:
            forks = _play(model, make, turn, TOOLS if tools else [])
        except TemplateError as error:
            yield Finding("history", subject, "note", f"not tried: the template refuses it: {error}"), []
            continue
        if not any(forks):
            yield Finding("history", subject, "good", "every prompt begins with the tokens of the one before"), forks
        else:
            causes = ", ".join(sorted({cause for cause in forks if cause}))
            count = sum(cause is not None for cause in forks)
            yield Finding("history", subject, "note", f"{count} of {len(forks)} prompts fork: {causes}"), forks


def _play(model: TextModel, make: MakeParser, turn: Callable[[int], Message], tools: list[Json]) -> list[str | None]:
    """Causes of forks of the second and later of four calls, for a harness that echoes what it was given."""
    history = History()
    messages = [SYSTEM, ASK]
    forks: list[str | None] = []

    def render(list_: Sequence[Message], prompt: bool) -> Rendered:
        return _render(model, list_, tools, prompt)

    for number in range(1, 5):
        plan = plan_prompt(history, model, messages, tools, render, "faithful")
        forks.append(plan.fork)
        recorded = history.admit(plan, messages, tools)
        wanted = turn(number)
        text = _written(model, messages, wanted, tools)
        if text is None:
            raise TemplateError("an assistant's turn ends with no stop token")
        # The model has its own way to write the same value.
        text = text.replace(json.dumps(json.loads(ODD_ARGUMENTS), ensure_ascii=False), ODD_ARGUMENTS)
        ids = [*model.encode(Rendered(text)), min(model.stop_ids)]
        minted = [call.id for call in wanted.tool_calls]
        prompt = render(messages, True).text
        reply = _read(model, make, prompt, text, lambda i, ids=minted: ids[i] if i < len(ids) else f"x{i}")
        history.add(recorded, model, ids, reply)
        answers = [_result(call) for call in reply.tool_calls] or [Message("user", f"Question {number}?")]
        messages = [*messages, reply, *answers]
    return forks[1:]


def _advice(model: TextModel, loops: dict[str, list[str | None]]) -> tuple[str, str]:
    """(gateway.history, why)"""
    in_loop = [cause for subject in ("tool results", "tool results with reasoning") for cause in loops.get(subject, [])]
    in_chat = [cause for subject in ("chat", "chat with reasoning") for cause in loops.get(subject, [])]
    if any(in_loop):
        return (
            "sampled",
            "the template rewrites earlier turns in a loop of tool calls, so that faithful forks each time",
        )
    if any(in_chat):
        return (
            "faithful",
            "a loop of tool calls stays one chain; a new question of the user costs a fork of what it drops",
        )
    if not model.exact:
        return "faithful", "prompts repeat their past, after the tokenizer's own normalisation"
    return "faithful", "prompts repeat their past: an attempt stays one chain, and its text is the harness's"


# The command


def print_report(report: Report) -> None:
    """The findings as a table, and the advice."""
    from rich.console import Console
    from rich.table import Table

    words = {"good": "[green]yes[/]", "note": "[yellow]note[/]", "bad": "[red]NO[/]"}
    table = Table(title=f"{report.model}  (parser: {report.parser or 'none'})", title_justify="left")
    for heading in ("", "what", "", "found"):
        table.add_column(heading, overflow="fold")
    area = ""
    for finding in report.findings:
        shown = finding.area if finding.area != area else ""
        area = finding.area
        table.add_row(shown, finding.subject, words[finding.status], _plain(finding.detail))
    console = Console()
    console.print(table)
    if report.history:
        console.print(f"gateway.history = {report.history}: {report.why}", markup=False)
    console.print(
        "can be trained exactly" if report.trainable else "cannot be trained exactly: see NO above", markup=False
    )


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def command(path: str, *, chat_template: str, parser: str, as_json: bool) -> int:
    """Check a model and print what was found; the exit status: 1 when it cannot be trained exactly."""
    report = check(path, chat_template=chat_template, parser=parser)
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False, indent=2))
    else:
        print_report(report)
    return 0 if report.trainable else 1
