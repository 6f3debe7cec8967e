"""Which recorded branch a request continues, and how its prompt is put together.

An attempt's `History` keeps its calls as a tree and answers two
questions about a new request: which call's conversation it continues (messages), and which recorded ids its text
repeats (splice). Messages name the parent and the cause of a fork; ids always come from the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from longrein.gateway.messages import Message, same
from longrein.gateway.tokens import Rendered, TextModel
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
    sampled_text: str = ""
    sampled_ids: list[int] = field(default_factory=list)
    stop_characters: int = 0
    """Length of the stop token's text at the end of `sampled_text`; 0 when the reply was cut."""
    reply: Message | None = None

    @property
    def own_characters(self) -> int:
        return len(self.prompt_text) + len(self.sampled_text)

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

    def recognised(self, messages: Sequence[Message]) -> bool:
        """Whether the call's reply stands where it should in a longer conversation."""
        length = self.conversation_length
        return self.reply is not None and length <= len(messages) and same(self.reply, messages[length - 1])

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
            parts.append([*call.prompt_ids, *call.sampled_ids][: max(0, needed - call.prefix_length)])
            needed = min(needed, call.prefix_length)
            if call.prefix is None:
                break
            call = call.prefix
        return [id for part in reversed(parts) for id in part]


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

    def shared_text(self, text: str) -> dict[int, int]:
        """For each call, by number: how many characters `text` shares with its branch."""
        shared: dict[int, int] = {}
        for call in self.calls:
            start = call.prefix_characters
            if call.prefix is not None and shared[call.prefix.number] < start:
                shared[call.number] = shared[call.prefix.number]
                continue
            count = _common(text, start, call.prompt_text)
            if count == len(call.prompt_text):
                count += _common(text, start + count, call.sampled_text)
            shared[call.number] = start + count
        return shared

    def continues(self, call: Recorded, shared: int) -> bool:
        """Whether text that shares `shared` characters with `call`'s branch repeats all of it (but its stop token)."""
        return shared >= call.prefix_characters + call.own_characters - call.stop_characters

    def splice(self, model: TextModel, rendered: Rendered) -> tuple[Recorded | None, int, int, list[int]]:
        """(call, ids kept of its branch, characters kept, ids of the rest) for a new prompt.

        The whole branch is kept when the text begins with it. Otherwise it is cut behind the last control token at or
        before the first character that differs: there, encoding the rest alone equals encoding it in place.
        """
        lengths = self.shared_text(rendered.text)
        call = max(reversed(self.calls), key=lambda c: lengths[c.number], default=None)  # the latest of equals
        if call is None:
            return None, 0, 0, model.encode(rendered)
        shared = lengths[call.number]
        whole = call.prefix_characters + call.own_characters
        if self.continues(call, shared):
            keep = call.branch_length
            if shared < whole:  # the template does not repeat the stop token
                keep, whole = keep - 1, whole - call.stop_characters
            return call, keep, whole, model.encode(rendered, whole)
        while True:
            keep, characters = _safe_cut(model, call, shared)
            if keep > call.prefix_length or call.prefix is None:
                break
            shared = min(shared, call.prefix_characters)
            call = call.prefix
        if keep == 0:
            return None, 0, 0, model.encode(rendered)
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
        )

    def add(self, call: Recorded, model: TextModel, sampled_ids: list[int], reply: Message | None) -> None:
        """The call has been committed with these ids; from now on requests may continue it."""
        call.sampled_ids = sampled_ids
        call.sampled_text = model.decode(sampled_ids)
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
        return Plan(None, 0, 0, ids, rendered.text, parent, keep_messages, fork)
    if mode == "sampled" and parent is not None and list(parent.tools) == list(tools) and parent.recognised(messages):
        plan = _keep_sampled(model, messages, parent, keep_messages, rendered, render)
        if plan is not None:
            return plan
    call, keep, characters, ids = history.splice(model, rendered)
    fork = _cause(history, model, messages, tools, parent, call, keep, render)
    return Plan(call, keep, characters, ids, rendered.text[characters:], parent, keep_messages, fork)


def plan_text(prompt: str | Sequence[int], history: History, model: TextModel) -> tuple[Sequence[Message], Plan]:
    """The completions dialect: a prompt that begins with a recorded branch continues it, any other is new.

    Returns the messages as they are recorded and the plan.
    """
    text = prompt if isinstance(prompt, str) else model.decode(prompt)
    if isinstance(prompt, str):
        shared = history.shared_text(text)
        parents = [c for c in history.calls if c.sampled_ids and history.continues(c, shared[c.number])]
    else:
        ids = list(prompt)
        parents = [c for c in history.calls if c.sampled_ids and ids[: len(branch := c.branch())] == branch]
    parent = max(parents, key=lambda c: c.branch_length, default=None)
    if parent is None:
        ids = model.tokenizer.encode(text).ids if isinstance(prompt, str) else list(prompt)
        plan = Plan(None, 0, 0, ids, text, None, 0, "new" if history.calls else None)
        return [Message("prompt", text)], plan
    kept = parent.branch_length
    characters = parent.prefix_characters + parent.own_characters
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
    # The template's text for what is new is what follows the last turn that is recorded. Its place is found by a
    # stand-in for that turn's text, rendered with and without the new messages.
    stand_in = "\U000f1ace"
    echoed = messages[length - 1]
    turn = Message("assistant", content=stand_in, tool_calls=echoed.tool_calls)
    before = render([*messages[: length - 1], turn], False).text
    after = render([*messages[: length - 1], turn, *messages[length:]], True)
    ending = before[before.find(stand_in) :]
    at = after.text.find(stand_in)
    if stand_in not in before or at < 0 or not after.text.startswith(ending, at):
        return None
    start = at + len(ending)
    # What closes the turn: after the stop token's text if it was sampled, else from the stop token on.
    closing = _closing(model, ending, parent.stop_characters > 0)
    ids = [*_encode(model, closing), *model.encode(after, start)]
    text = closing + after.text[start:]
    characters = parent.prefix_characters + parent.own_characters
    return Plan(parent, parent.branch_length, characters, ids, text, parent, keep, None)


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
    if call is parent and keep >= parent.branch_length - (1 if parent.stop_characters else 0):
        return None
    if list(parent.tools) != list(tools):
        return "tools"
    length = parent.conversation_length
    if parent.reply is None or not parent.recognised(messages):
        return "rewrite"
    # Would the text have gone on if the harness had echoed the reply as it was given? Restore one thing at a time.
    echoed = messages[length - 1]
    restored_reasoning = _replace(messages, length - 1, echoed, reasoning=parent.reply.reasoning)
    restored_arguments = _replace(messages, length - 1, echoed, tool_calls=parent.reply.tool_calls)
    restored_all = [*messages[: length - 1], parent.reply, *messages[length:]]

    def goes_on(candidate: Sequence[Message]) -> bool:
        shared = history.shared_text(render(candidate, True).text)
        return history.continues(parent, shared[parent.number])

    if echoed.reasoning != parent.reply.reasoning and goes_on(restored_reasoning):
        return "reasoning"
    if echoed.tool_calls != parent.reply.tool_calls and goes_on(restored_arguments):
        return "arguments"
    if goes_on(restored_all):
        return "reasoning" if echoed.reasoning != parent.reply.reasoning else "rewrite"
    return "template"


def _cause_without_parent(history: History, messages: Sequence[Message], tools: Sequence[Json]) -> ForkCause | None:
    """A request that continues no call: a sibling of an earlier one, a new conversation, or a rewritten one."""
    if any(_equal_request(call, messages, tools) for call in history.calls):
        return None
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


def _replace(messages: Sequence[Message], index: int, echoed: Message, **changes: Any) -> list[Message]:
    changed = Message(
        role=echoed.role,
        content=echoed.content,
        reasoning=changes.get("reasoning", echoed.reasoning),
        tool_calls=changes.get("tool_calls", echoed.tool_calls),
        name=echoed.name,
    )
    return [*messages[:index], changed, *messages[index + 1 :]]


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


def _safe_cut(model: TextModel, call: Recorded, shared: int) -> tuple[int, int]:
    """The last place in `call`'s own part, behind a control token and within `shared` characters: (ids, characters)."""
    best = (call.prefix_length, call.prefix_characters)
    pieces = (
        (call.prompt_ids, call.prefix_length, call.prefix_characters),
        (call.sampled_ids, call.prompt_length, call.prefix_characters + len(call.prompt_text)),
    )
    for ids, first_id, first_character in pieces:
        for count, characters in model.control_ends(ids):
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
