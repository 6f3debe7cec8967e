"""What a call is for: the agent's own work, a sub-agent's, a title, or a summary that replaces history.

Structure comes first. What a client says in headers can make a call a sub-agent's, which is trained like the main one;
no header can make a call one of a kind that is left out of training. Measured of the harnesses as of late 2026: Claude
Code, Codex and opencode name their sub-agents in headers; qwen-code's differ by their system prompt only; titles and
summaries have no header at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from longrein.gateway.conversation import History, Recorded
from longrein.gateway.dialects import Request
from longrein.gateway.messages import Message
from longrein.records import CallKind

#: Headers that a harness sends with a sub-agent's calls only. (`x-openai-subagent` has reviews and compactions too.)
_SUB_AGENT_HEADERS = ("x-claude-code-agent-id", "x-parent-session-id", "x-codex-parent-thread-id")

#: What asks for a summary that the history is to be replaced by: the newest user turn, or a system prompt of its own.
_SUMMARY = re.compile(
    r"context checkpoint compaction|respond with text only"
    r"|\bsummar(y|i[sz]\w*)\b[^.\n]{0,80}\b(conversation|session|history|chat|context)\b"
    r"|\b(context|conversation|history) summari[sz]|\bcompact(ing)? the (conversation|history)\b",
    re.IGNORECASE,
)
#: One of these stands in all of that; looking for it first is much faster.
_SUMMARY_WORDS = ("summar", "compact", "text only")
#: What asks for a title of the session.
_TITLE = re.compile(
    r"\b(generate|generator|write|create|produce|come up with|output|give)\b[^.\n]{0,120}\btitles?\b|\btitle generator\b",
    re.IGNORECASE,
)
#: A request for a title quotes little of the conversation; an agent's own prompt that mentions titles is long.
_TITLE_CHARACTERS = 20_000


def kind_of(
    headers: Mapping[str, str],
    request: Request,
    messages: Sequence[Message],
    parent: Recorded | None,
    history: History,
) -> CallKind:
    """The kind of a request that continues `parent`, or begins a conversation of its own.

    `messages` are the conversation's, its history included.
    """
    if _asks_for_summary(request, messages):
        return "compaction"
    if parent is not None and parent.kind != "compaction":
        return parent.kind
    if parent is None and _asks_for_title(request, messages):
        return "title"
    if any(headers.get(name) for name in _SUB_AGENT_HEADERS):
        return "sub-agent"
    if parent is None and request.tools and _another_agent(messages, history):
        return "sub-agent"
    return "main"


def _asks_for_summary(request: Request, messages: Sequence[Message]) -> bool:
    """The newest turn asks for a summary, or a prompt of its own does and there are no tools to work with."""
    if not messages or messages[-1].role != "user":
        return False
    if any(m.role == "assistant" for m in messages) and _speaks_of_summary(messages[-1].content):
        return True
    return not request.tools and _speaks_of_summary(_system(messages))


def _speaks_of_summary(text: str) -> bool:
    beginning = text[:4000]
    lowered = beginning.lower()
    return any(word in lowered for word in _SUMMARY_WORDS) and _SUMMARY.search(beginning) is not None


def _asks_for_title(request: Request, messages: Sequence[Message]) -> bool:
    """No tools, nothing said yet, and a prompt that asks for a title."""
    if request.tools or any(m.role == "assistant" for m in messages):
        return False
    text = "\n".join(m.content for m in messages)
    return len(text) <= _TITLE_CHARACTERS and bool(_TITLE.search(text))


def _another_agent(messages: Sequence[Message], history: History) -> bool:
    """Whether the system prompt is another than that of the attempt's first agent, which works with tools too."""
    first = next((c for c in history.calls if c.kind == "main" and c.parent is None and c.tools), None)
    return first is not None and bool(first.messages) and _system(first.messages) != _system(messages)


def _system(messages: Sequence[Message]) -> str:
    """The system text at the beginning."""
    texts: list[str] = []
    for message in messages:
        if message.role != "system":
            break
        texts.append(message.content)
    return "\n".join(texts)
