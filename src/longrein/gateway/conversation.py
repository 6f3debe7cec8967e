"""Which recorded branch a request continues, and how its prompt is put together.

An attempt's `History` keeps its calls as a tree and answers two
questions about a new request: which call's conversation it continues (messages), and which recorded ids its text
repeats (splice). Messages name the parent and the cause of a fork; ids always come from the text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longrein.gateway.messages import Message, same
from longrein.gateway.tokens import ControlTextError, Rendered, TemplateError, TextModel, ids_of
from longrein.records import Call, CallKind, ForkCause

Json = dict[str, Any]


@dataclass
class Recorded:
    """One call of the attempt in memory: its texts, its ids and its messages, each as a delta to an earlier call."""

    number: int
    prefix: Recorded | None
    prefix_characters: int
    prefix_length: int
    prompt_text: str
    prompt_ids: list[int]
    parent: Recorded | None
    messages_keep: int
    messages: tuple[Message, ...]
    """The parent's conversation up to `messages_keep`, then these."""
    tools: Sequence[Json]
    kind: CallKind = "main"
    ordinary: tuple[int, ...] = ()
    """Offsets in the call's own text where ordinary tokens spell a control token."""
    sampled_text: str = ""
    sampled_ids: list[int] = field(default_factory=list)
    stop_characters: int = 0
    """Length of the stop token's text at the end of `sampled_text`; 0 when the reply was cut."""
    reply: Message | None = None

    @property
    def end(self) -> int:
        """Characters of the branch: the prompt's text and what was sampled."""
        return self.prefix_characters + len(self.prompt_text) + len(self.sampled_text)

    @property
    def prompt_length(self) -> int:
        return self.prefix_length + len(self.prompt_ids)

    @property
    def branch_length(self) -> int:
        """Ids of the branch: the prompt and what was sampled."""
        return self.prompt_length + len(self.sampled_ids)

    @property
    def conversation_length(self) -> int:
        return self.messages_keep + len(self.messages) + (1 if self.reply is not None else 0)

    def continued(self, messages: Sequence[Message]) -> bool:
        """Whether the request goes on from this call's conversation, reply included."""
        length = self.conversation_length
        return self.reply is not None and length <= len(messages) and all(map(same, self.conversation(), messages))

    def conversation(self) -> list[Message]:
        """All messages of the call, its reply included."""
        parts: list[Sequence[Message]] = []
        call, needed = self, self.conversation_length
        while needed > 0:
            own = call.messages if call.reply is None else (*call.messages, call.reply)
            parts.append(own[: max(0, needed - call.messages_keep)])
            needed = min(needed, call.messages_keep)
            if call.parent is None:
                break
            call = call.parent
        return [message for part in reversed(parts) for message in part]

    def branch(self) -> list[int]:
        """All ids of the call's branch: its prompt, then what was sampled."""
        parts: list[list[int]] = []
        call, needed = self, self.branch_length
        while needed > 0:
            parts.append((call.prompt_ids + call.sampled_ids)[: max(0, needed - call.prefix_length)])
            needed = min(needed, call.prefix_length)
            if call.prefix is None:
                break
            call = call.prefix
        ids: list[int] = []
        for part in reversed(parts):
            ids += part
        return ids


@dataclass(frozen=True)
class Plan:
    """How a request's prompt is put together: `prefix_length` ids of `prefix`'s branch, then `new_ids`."""

    prefix: Recorded | None
    prefix_length: int
    prefix_characters: int
    new_ids: list[int]
    new_text: str
    parent: Recorded | None
    messages_keep: int
    fork: ForkCause | None
    new_marks: tuple[int, ...] = ()
    """Offsets in `new_text` where content spells a control token."""

    @property
    def length(self) -> int:
        return self.prefix_length + len(self.new_ids)


Render = Callable[[Sequence[Message], bool], Rendered]
"""(messages, generation prompt wanted) → text, with the request's tools and the attempt's clock."""


@dataclass
class History:
    """The committed calls of one attempt. A call in flight is no part of it: nothing may rest on ids that a crash
    could still lose."""

    calls: list[Recorded] = field(default_factory=list)
    admitted: int = 0
    """Numbers given out so far."""

    # Which call a request continues

    def parent_of(self, messages: Sequence[Message]) -> Recorded | None:
        """The deepest call whose conversation, reply included, is a prefix of `messages`.

        Where none reaches the last assistant turn but that turn's tool-call ids are known, the call that minted them is
        the parent: the harness rewrote its text.
        """
        matched: dict[int, int] = {}
        best: Recorded | None = None
        minted: dict[str, Recorded] = {}
        for call in self.calls:
            matched[call.number] = self._matched(call, messages, matched)
            if call.reply is None:
                continue
            minted.update((c.id, call) for c in call.reply.tool_calls)
            whole = matched[call.number] == call.conversation_length
            if whole and (best is None or call.conversation_length >= best.conversation_length):
                best = call
        for i in range(len(messages) - 1, -1, -1):
            ids = [c.id for c in messages[i].tool_calls]
            named = minted.get(ids[0]) if ids else None
            if named is not None:
                if best is None or i >= best.conversation_length:
                    return named
                break
        return best

    def _matched(self, call: Recorded, messages: Sequence[Message], matched: dict[int, int]) -> int:
        """Number of leading messages of `call`'s conversation that equal those of the request."""
        if call.parent is not None and matched[call.parent.number] < call.messages_keep:
            return matched[call.parent.number]
        count = call.messages_keep
        own = call.messages if call.reply is None else (*call.messages, call.reply)
        for message in own:
            if count >= len(messages) or not same(message, messages[count]):
                break
            count += 1
        return count

    # Which recorded ids its text repeats

    def shared_text(self, rendered: Rendered) -> dict[int, int]:
        """For each call, by number: how many characters the text shares with its branch.

        A control token and the same characters spelled by ordinary tokens are not shared.
        """
        text = rendered.text
        shared: dict[int, int] = {}
        for call in self.calls:
            start = call.prefix_characters
            if call.prefix is not None and shared[call.prefix.number] < start:
                shared[call.number] = shared[call.prefix.number]
                continue
            count = _common(text, start, call.prompt_text)
            if count == len(call.prompt_text):
                count += _common(text, start + count, call.sampled_text)
            if rendered.marks or call.ordinary:
                count = _spelled_alike(call, count, rendered.marks)
            shared[call.number] = start + count
        return shared

    def continues(self, call: Recorded, shared: int) -> bool:
        """Whether text that shares `shared` characters with `call`'s branch repeats all of it (but its stop token)."""
        return shared >= call.end - call.stop_characters

    def splice(
        self, model: TextModel, rendered: Rendered, parent: Recorded | None = None
    ) -> tuple[Recorded | None, int, int, list[int]]:
        """(call, ids kept of its branch, characters kept, ids of the rest) for a new prompt.

        A whole branch is kept when the text begins with it: the parent's where there is a choice. Otherwise the branch
        that shares the longest text is cut behind the last control token at or before the first character that differs:
        there, encoding the rest alone equals encoding it in place.
        """
        lengths = self.shared_text(rendered)
        repeated = [c for c in self.calls if self.continues(c, lengths[c.number])]
        parent_repeated = parent is not None and self.continues(parent, lengths[parent.number])
        base = parent if parent_repeated else _latest_longest(repeated, lengths)
        # A call that goes on from `base` may share more than it: a sibling of this request.
        longer = [
            c
            for c in self.calls
            if base is None or (lengths[c.number] > lengths[base.number] and _repeats(c, c.branch_length, base))
        ]
        call = _latest_longest(longer, lengths)
        keep, characters = 0, 0
        if call is not None:
            call, keep, characters = _cut(model, call, lengths[call.number])
        if base is not None:
            shared, whole, kept = lengths[base.number], base.end, base.branch_length
            if shared < whole:  # the template does not repeat the stop token
                kept, whole = kept - 1, whole - base.stop_characters
            if call is None or characters < whole:
                call, keep, characters = base, kept, whole
        if keep == 0:
            call, characters = None, 0
        return call, keep, characters, model.encode(rendered, characters)

    # Adding a call

    def admit(
        self, plan: Plan, messages: Sequence[Message], tools: Sequence[Json], kind: CallKind = "main"
    ) -> Recorded:
        """Number the call. It takes part once it is committed (`add`)."""
        self.admitted += 1
        return Recorded(
            number=self.admitted - 1,
            prefix=plan.prefix,
            prefix_characters=plan.prefix_characters,
            prefix_length=plan.prefix_length,
            prompt_text=plan.new_text,
            prompt_ids=plan.new_ids,
            parent=plan.parent,
            messages_keep=plan.messages_keep,
            messages=tuple(messages[plan.messages_keep :]),
            tools=tools,
            kind=kind,
            ordinary=plan.new_marks,
        )

    def add(self, call: Recorded, model: TextModel, sampled_ids: list[int], reply: Message | None) -> None:
        """The call has been committed with these ids; from now on requests may continue it."""
        call.sampled_ids = sampled_ids
        call.sampled_text = model.decode(sampled_ids)
        in_reply = model.ordinary_spellings(sampled_ids, call.sampled_text)
        call.ordinary = (*call.ordinary, *(len(call.prompt_text) + at for at in in_reply))
        if sampled_ids and sampled_ids[-1] in model.stop_ids:
            call.stop_characters = len(model.decode(sampled_ids[-1:]))
        call.reply = reply
        self.calls.append(call)
        self.admitted = max(self.admitted, call.number + 1)


def plan_prompt(
    history: History, model: TextModel, messages: Sequence[Message], tools: Sequence[Json], render: Render, mode: str
) -> Plan:
    """Render, find the parent, splice or fork: `mode` is gateway.history (faithful, sampled or rendered)."""
    rendered = render(messages, True)
    parent = history.parent_of(messages)
    keep_messages = _literal_prefix(parent, messages)
    if mode == "rendered":
        ids = model.encode(rendered)
        branch = parent.branch() if parent is not None else []
        fork = None if ids[: len(branch)] == branch else "retokenized"
        if parent is None and history.calls:
            fork = _cause_without_parent(history, messages, tools)
        return Plan(None, 0, 0, ids, rendered.text, parent, keep_messages, fork, _marks(rendered, 0))
    if mode == "sampled" and parent is not None and list(parent.tools) == list(tools) and parent.continued(messages):
        plan = _keep_sampled(model, messages, parent, keep_messages, rendered, render)
        if plan is not None:
            return plan
    call, keep, characters, ids = history.splice(model, rendered, parent)
    fork = _cause(history, model, messages, tools, parent, call, keep, render)
    text, marks = rendered.text[characters:], _marks(rendered, characters)
    return Plan(call, keep, characters, ids, text, parent, keep_messages, fork, marks)


def plan_text(prompt: str | Sequence[int], history: History, model: TextModel) -> tuple[Sequence[Message], Plan]:
    """The completions dialect: a prompt that begins with a recorded branch continues it, any other is new.

    Returns the messages as they are recorded and the plan.
    """
    text = prompt if isinstance(prompt, str) else model.decode(prompt)
    if isinstance(prompt, str):
        shared = history.shared_text(Rendered(text))
        parents = [c for c in history.calls if c.sampled_ids and history.continues(c, shared[c.number])]
    else:
        ids = list(prompt)
        parents = [c for c in history.calls if c.sampled_ids and ids[: len(branch := c.branch())] == branch]
    parent = max(parents, key=lambda c: c.branch_length, default=None)
    if parent is None:
        ids = ids_of(model.tokenizer, text, special=True) if isinstance(prompt, str) else list(prompt)
        plan = Plan(None, 0, 0, ids, text, None, 0, "new" if history.calls else None)
        return [Message("prompt", text)], plan
    kept = parent.branch_length
    characters = parent.end
    if isinstance(prompt, str):
        if not text.startswith(parent.sampled_text, characters - len(parent.sampled_text)):
            kept, characters = kept - 1, characters - parent.stop_characters
        new_ids = model.encode(Rendered(text), characters)
    else:
        new_ids = list(prompt)[kept:]
    messages = [*parent.conversation(), Message("prompt", text[characters:])]
    return messages, Plan(parent, kept, characters, new_ids, text[characters:], parent, len(messages) - 1, None)


def _keep_sampled(
    model: TextModel, messages: Sequence[Message], parent: Recorded, keep: int, rendered: Rendered, render: Render
) -> Plan | None:
    """`history = sampled`: the parent's ids as they are, then the template's text for what is new."""
    length = parent.conversation_length
    if length == len(messages):
        return None
    split = _split_after(messages, length, rendered, render)
    if split is None:
        return None
    ending, after, start = split
    # What closes the turn: after the stop token's text if it was sampled, else from the stop token on.
    closing = _closing(model, ending, parent.stop_characters > 0)
    ids = [*_encode(model, closing), *model.encode(after, start)]
    text = closing + after.text[start:]
    marks = tuple(len(closing) + at for at in _marks(after, start))
    return Plan(parent, parent.branch_length, parent.end, ids, text, parent, keep, None, marks)


def _marks(rendered: Rendered, start: int) -> tuple[int, ...]:
    return tuple(at - start for at, _ in rendered.marks if at >= start)


def _split_after(
    messages: Sequence[Message], length: int, rendered: Rendered, render: Render
) -> tuple[str, Rendered, int] | None:
    """Where the text of the first `length` messages, of which the last is the assistant's, ends in a rendering of all.

    (how that turn ends, a rendering with a stand-in for what the turn says, where what is new starts in it). The place
    is found by rendering the stand-in with and without what is new; templates that write no text beside calls show it
    in a call's arguments. None: the template's text for earlier turns depends on later ones too much to tell.
    """
    stand_in = next(word for n in itertools.count() if (word := f"standin{n}") not in rendered.text)
    echoed = messages[length - 1]
    turns = [replace(echoed, content=stand_in, reasoning="")]
    if echoed.tool_calls:
        arguments = json.dumps({stand_in: stand_in})
        last = replace(echoed.tool_calls[-1], arguments=arguments)
        turns.append(replace(echoed, reasoning="", tool_calls=(*echoed.tool_calls[:-1], last)))
    for turn in turns:
        try:
            before = render([*messages[: length - 1], turn], False).text
            after = render([*messages[: length - 1], turn, *messages[length:]], True)
        except (TemplateError, ControlTextError):
            continue
        at = after.text.rfind(stand_in)
        if at < 0 or stand_in not in before:
            continue
        ending = before[before.rfind(stand_in) :]
        if after.text.startswith(ending, at):
            return ending, after, at + len(ending)
    return None


def _closing(model: TextModel, ending: str, stopped: bool) -> str:
    """The text of the template from the last stop token of `ending` on, without it when it was sampled itself."""
    at, size = -1, 0
    for id in model.stop_ids:
        spelled = model.decode([id])
        found = ending.rfind(spelled)
        if found > at:
            at, size = found, len(spelled)
    if at < 0:
        return ""
    return ending[at + size :] if stopped else ending[at:]


def _encode(model: TextModel, text: str) -> list[int]:
    return model.encode(Rendered(text))


def _cause(
    history: History,
    model: TextModel,
    messages: Sequence[Message],
    tools: Sequence[Json],
    parent: Recorded | None,
    call: Recorded | None,
    keep: int,
    render: Render,
) -> ForkCause | None:
    """Why the prompt does not begin with all of the parent's branch; None when it does, or when there is none."""
    if not history.calls:
        return None
    if parent is None:
        return _cause_without_parent(history, messages, tools)
    if call is not None and _repeats(call, keep, parent):
        return None
    if not parent.continued(messages):
        return "compaction" if _compacted(history, messages) else "rewrite"
    if list(parent.tools) != list(tools):
        return "tools"
    # Would the text have gone on if the harness had echoed what it was given? First its arguments alone, then all.
    given = parent.conversation()
    echoed, rest = messages[: len(given)], messages[len(given) :]

    def goes_on(candidate: Sequence[Message]) -> bool:
        try:
            shared = history.shared_text(render([*candidate, *rest], True))
        except (TemplateError, ControlTextError):
            return False
        return history.continues(parent, shared[parent.number])

    restored = [replace(theirs, tool_calls=mine.tool_calls) for mine, theirs in zip(given, echoed, strict=True)]
    if restored != list(echoed) and goes_on(restored):
        return "arguments"
    if goes_on(given):
        dropped = any(mine.reasoning != theirs.reasoning for mine, theirs in zip(given, echoed, strict=True))
        return "reasoning" if dropped else "rewrite"
    return "template"


def _cause_without_parent(history: History, messages: Sequence[Message], tools: Sequence[Json]) -> ForkCause | None:
    """A request that continues no call: a sibling of an earlier one, a new conversation, or a rewritten one."""
    if any(_equal_request(call, messages, tools) for call in history.calls):
        return None
    if _compacted(history, messages):
        return "compaction"
    first = _first_user(messages)
    if first is not None and any(_first_user(call.conversation()) == first for call in history.calls):
        return "rewrite"
    return "new"


def _equal_request(call: Recorded, messages: Sequence[Message], tools: Sequence[Json]) -> bool:
    conversation = call.conversation()
    asked = conversation[:-1] if call.reply is not None else conversation
    return list(call.tools) == list(tools) and len(asked) == len(messages) and all(map(same, asked, messages))


def _first_user(messages: Sequence[Message]) -> str | None:
    return next((m.content.strip() for m in messages if m.role == "user"), None)


#: Shorter replies ("yes", "done") stand in a later message by chance.
_SHORTEST_SUMMARY = 24


def _compacted(history: History, messages: Sequence[Message]) -> bool:
    """Whether a new conversation carries an earlier call's reply in place of the history: a summary.

    Harnesses put it into a user or system message, whole or without its tags, so that its longest line has to do. The
    call that wrote it was asked for it: it is tagged as a compaction, or a user's message goes on from an earlier
    conversation, or it was given no tools; and it calls none.
    """
    told = [m.content for m in messages if m.role in ("system", "developer", "user")]
    for call in reversed(history.calls):
        if call.reply is None or call.reply.tool_calls:
            continue
        asked = call.messages[-1] if call.messages else None
        side = asked is not None and asked.role == "user" and (call.parent is not None or not call.tools)
        if call.kind != "compaction" and not side:
            continue
        summary = call.reply.content.strip()
        if call.kind == "compaction" and summary and any(m.content.strip() == summary for m in messages):
            return True
        line = max((line.strip() for line in summary.splitlines()), key=len, default="")
        if len(line) >= _SHORTEST_SUMMARY and any(line in text for text in told):
            return True
    return False


def _latest_longest(calls: Sequence[Recorded], lengths: dict[int, int]) -> Recorded | None:
    return max(reversed(calls), key=lambda call: lengths[call.number], default=None)


def _repeats(call: Recorded, length: int, other: Recorded) -> bool:
    """Whether the first `length` ids of `call`'s branch begin with all of `other`'s (but its stop token)."""
    node: Recorded | None = call
    while node is not None:
        if node is other:
            return length >= other.branch_length - (1 if other.stop_characters else 0)
        length = min(length, node.prefix_length)
        node = node.prefix
    return False


def _spelled_alike(call: Recorded, count: int, marks: Sequence[tuple[int, int]]) -> int:
    """`count` shared characters of the call's own text, less from where a control token stands on one side only.

    What the model sampled stays what it was, whatever an echo of it spells.
    """
    start, sampled = call.prefix_characters, len(call.prompt_text)
    theirs = {a - start for a, _ in marks if start <= a < start + count}
    own = set(call.ordinary)
    return min((at for at in own ^ theirs if at < count and not (at in theirs and at >= sampled)), default=count)


def _literal_prefix(parent: Recorded | None, messages: Sequence[Message]) -> int:
    """How many leading messages are exactly the parent's: those need not be stored again."""
    if parent is None:
        return 0
    count = 0
    for mine, theirs in zip(messages, parent.conversation(), strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _common(text: str, start: int, other: str) -> int:
    """Number of characters that `text[start:]` and `other` share at their beginning."""
    if text.startswith(other, start):
        return len(other)
    low, high = 0, min(len(other), max(0, len(text) - start))
    while low < high:  # invariant: other[:low] is shared
        middle = (low + high + 1) // 2
        if text.startswith(other[low:middle], start + low):
            low = middle
        else:
            high = middle - 1
    return low


def _cut(model: TextModel, call: Recorded, shared: int) -> tuple[Recorded | None, int, int]:
    """Where to cut a branch that shares `shared` characters: (the call that holds the place, ids, characters)."""
    while True:
        keep, characters = _safe_cut(model, call, shared)
        if keep > call.prefix_length or call.prefix is None:
            return call, keep, characters
        shared = min(shared, call.prefix_characters)
        call = call.prefix


def _safe_cut(model: TextModel, call: Recorded, shared: int) -> tuple[int, int]:
    """The last place in `call`'s own part, behind a control token and within `shared` characters: (ids, characters)."""
    best = (call.prefix_length, call.prefix_characters)
    size = len(call.prompt_text)
    in_reply = [at - size for at in call.ordinary if at >= size]
    pieces = (
        (call.prompt_ids, call.prompt_text, call.ordinary, call.prefix_length, call.prefix_characters),
        (call.sampled_ids, call.sampled_text, in_reply, call.prompt_length, call.prefix_characters + size),
    )
    for ids, text, ordinary, first_id, first_character in pieces:
        for count, characters in model.control_ends(ids, text, ordinary):
            if first_character + characters <= shared:
                best = (first_id + count, first_character + characters)
    return best


def recall(history: History, model: TextModel, calls: Sequence[Call]) -> None:
    """Fill an empty history from the store: the attempt goes on after the gateway has been started again."""
    by_number: dict[int, Recorded] = {}
    for call in calls:
        prefix = by_number.get(call.prefix) if call.prefix is not None else None
        parent = by_number.get(call.parent) if call.parent is not None else None
        tools = call.tools if call.tools is not None else (parent.tools if parent is not None else [])
        recorded = Recorded(
            number=call.number,
            prefix=prefix,
            prefix_characters=_characters(model, prefix, call.prefix_length),
            prefix_length=call.prefix_length,
            prompt_text=model.decode(call.prompt_delta),
            prompt_ids=list(call.prompt_delta),
            parent=parent,
            messages_keep=call.messages_keep,
            messages=tuple(Message.from_json(m) for m in call.messages),
            tools=tools,
            kind=call.kind,
        )
        recorded.ordinary = model.ordinary_spellings(recorded.prompt_ids, recorded.prompt_text)
        reply = Message.from_json(call.reply) if call.status == "ok" and call.reply else None
        history.add(recorded, model, list(call.sampled), reply)
        by_number[call.number] = recorded


def _characters(model: TextModel, call: Recorded | None, length: int) -> int:
    """Characters of the first `length` ids of a call's branch. A cut lies behind a control token or at an end."""
    while call is not None and length <= call.prefix_length and call.prefix is not None:
        call = call.prefix
    if call is None:
        return 0
    ids = [*call.prompt_ids, *call.sampled_ids][: length - call.prefix_length]
    in_prompt = ids[: len(call.prompt_ids)]
    text = call.prompt_text if len(in_prompt) == len(call.prompt_ids) else model.decode(in_prompt)
    return call.prefix_characters + len(text) + len(model.decode(ids[len(call.prompt_ids) :]))
