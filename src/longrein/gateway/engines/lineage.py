"""Where a passed-through call stands among the earlier ones of its attempt.

The endpoint rendered and encoded the prompt; here its ids and messages are only compared with what is recorded, so
that a call stores what is new in it. Each comparison follows the record's own deltas: it costs the calls of the
attempt plus the ids that agree, and nothing whole is kept in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np

from longrein.gateway.conversation import Message, same
from longrein.records import Call, ForkCause, Json, Rollout
from longrein.store import Store
from longrein.trajectory.prompts import tools_of

#: Attempts kept in memory; others are read back from the store when they call again.
ATTEMPTS_IN_MEMORY = 4096


class Lineage:
    """The recorded calls of one attempt."""

    def __init__(self, calls: Sequence[Call]):
        self._next_number = calls[-1].number + 1 if calls else 0
        self._calls: dict[int, Call] = {}
        self._own: dict[int, np.ndarray] = {}
        for call in calls:
            self.add(call)

    def take_numbers(self, count: int) -> list[int]:
        """The next `count` call numbers of the attempt."""
        first = self._next_number
        self._next_number += count
        return list(range(first, first + count))

    def add(self, call: Call) -> None:
        """Take in a call that is in the store; later ones may point to it."""
        self._calls[call.number] = call
        self._own[call.number] = np.asarray([*call.prompt_delta, *call.sampled], dtype=np.int32)

    def place(self, call: Call, prompt: Sequence[int] | None, messages: list[Json], tools: list[Json]) -> None:
        """Fill in `call`'s pointers and deltas. `prompt` is None where the endpoint gave no ids."""
        ids = np.asarray(prompt or [], dtype=np.int32)
        shared, shared_messages = self._shared_ids(ids), self._shared_messages(messages)
        parent = self._parent(shared_messages, shared)
        call.parent = None if parent is None else parent.number
        call.messages_keep = 0 if parent is None else _conversation_length(parent)
        call.messages = messages[call.messages_keep :]
        tools_before = [] if parent is None else tools_of(self._calls, parent)
        call.tools = None if tools == tools_before else tools
        if prompt is None:
            return
        source = max(shared, key=lambda number: (shared[number], number), default=None)
        if source is not None and shared[source] > 0:
            call.prefix, call.prefix_length = source, shared[source]
        call.prompt_delta = ids[call.prefix_length :].tolist()
        call.prompt_length = len(ids)
        call.fork = self._cause(parent, shared, shared_messages, messages, tools_differ=call.tools is not None)

    def _shared_ids(self, ids: np.ndarray) -> dict[int, int]:
        """How many of `ids` begin each call's branch."""
        shared: dict[int, int] = {}
        for number, call in sorted(self._calls.items()):
            start = call.prefix_length
            if call.prefix is not None and shared[call.prefix] < start:
                shared[number] = shared[call.prefix]
                continue
            own = self._own[number][: max(0, len(ids) - start)]
            differ = np.nonzero(own != ids[start : start + len(own)])[0]
            shared[number] = start + (int(differ[0]) if len(differ) else len(own))
        return shared

    def _shared_messages(self, messages: Sequence[Json]) -> dict[int, int]:
        """How many of `messages` begin each call's conversation, its reply included."""
        shared: dict[int, int] = {}
        for number, call in sorted(self._calls.items()):
            start = call.messages_keep
            if call.parent is not None and shared[call.parent] < start:
                shared[number] = shared[call.parent]
                continue
            count = 0
            for mine, theirs in zip([*call.messages, call.reply], messages[start:], strict=False):
                if not _same(mine, theirs):
                    break
                count += 1
            shared[number] = start + count
        return shared

    def _parent(self, shared_messages: dict[int, int], shared: dict[int, int]) -> Call | None:
        """The deepest answered call whose whole conversation the request repeats; of several, the one whose ids it does."""
        whole = [
            call
            for number, call in self._calls.items()
            if call.status == "ok" and shared_messages[number] == _conversation_length(call)
        ]
        return max(whole, key=lambda call: (_conversation_length(call), shared[call.number], call.number), default=None)

    def _cause(
        self,
        parent: Call | None,
        shared: dict[int, int],
        shared_messages: dict[int, int],
        messages: Sequence[Json],
        *,
        tools_differ: bool,
    ) -> ForkCause | None:
        if parent is None:
            if not self._calls:
                return None
            most = max(shared_messages.values())
            # A system message alone says nothing: every conversation of a harness may begin with the same one.
            leading = next(
                (at for at, message in enumerate(messages) if message.get("role") != "system"), len(messages)
            )
            return "rewrite" if most > leading else "new"
        if not parent.prompt_length or shared[parent.number] == parent.prompt_length + len(parent.sampled):
            return None
        if tools_differ:
            return "tools"
        # The endpoint encodes all text anew: ids that differ where the model wrote came out of that.
        return "template" if shared[parent.number] < parent.prompt_length else "retokenized"


class Lineages:
    """The lineages of the attempts that call."""

    def __init__(self, store: Store):
        self._store = store
        self._recent: OrderedDict[tuple[str, str, float], Lineage] = OrderedDict()
        # One that a call in flight holds is found here however many attempts have called since.
        self._alive: WeakValueDictionary[tuple[str, str, float], Lineage] = WeakValueDictionary()

    def of(self, rollout: Rollout, attempt_id: str) -> Lineage:
        # The time tells a rollout from a deleted one of the same id.
        key = (rollout.rollout_id, attempt_id, rollout.status.created_at)
        lineage = self._alive.get(key)
        if lineage is None:
            calls = self._store.calls(rollout.rollout_id, attempt_id)
            lineage = self._alive[key] = Lineage(calls)
        self._recent[key] = lineage
        self._recent.move_to_end(key)
        while len(self._recent) > ATTEMPTS_IN_MEMORY:
            self._recent.popitem(last=False)
        return lineage


def _conversation_length(call: Call) -> int:
    return call.messages_keep + len(call.messages) + 1


def _same(a: Json, b: Json) -> bool:
    """Whether two messages of OpenAI's form are the same turn, whatever a harness trims or leaves out of an echo."""
    a, b = _plain(a), _plain(b)
    if a == b:
        return True
    try:
        return same(Message.from_json(a), Message.from_json(b))
    except (KeyError, TypeError, AttributeError):  # of no form that is known: only equal ones are the same
        return False


def _plain(message: Json) -> Json:
    """Absent, null and empty are the same, and so are text and a list of text parts."""
    plain = {name: value for name, value in message.items() if value not in (None, "", [])}
    parts = plain.get("content")
    if isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        plain["content"] = "".join(str(part.get("text", "")) for part in parts)
    return plain
