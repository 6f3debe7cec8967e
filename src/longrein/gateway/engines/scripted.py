"""A Python function as the engine: from messages and tools to the reply.

It plays given token sequences in tests, and it is the teacher of a warm-up: what an expert would answer, encoded by the
student's own template. A function returns the ids themselves, text, or an assistant message
(`{"content": …, "tool_calls": […]}`) that the template turns into the text the model would have had to write.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from longrein.gateway.engines import Chunk, EngineError, Feature, Generate
from longrein.gateway.grammars import NOT_INSTALLED, GuideChecker, installed
from longrein.gateway.messages import Message, ToolCall
from longrein.gateway.tokens import TextModel

Json = dict[str, Any]
Reply = list[int] | str | Json
Script = Callable[[list[Json], list[Json]], Reply | Awaitable[Reply]]


@dataclass
class ScriptedEngine:
    """Plays what `script(messages, tools)` returns.

    A script that is the policy is certain of what it says: its log-probabilities are 0, and no other token is possible.
    A teacher's are not those of the policy, so it has none (`certain = False`), and its tokens are only learned
    supervised. A reply that leaves the request's guide is the script's mistake, and an error that says where.
    """

    script: Script
    model: TextModel
    name: str = "policy"
    certain: bool = True
    _checker: GuideChecker = field(init=False)

    def __post_init__(self) -> None:
        self._checker = GuideChecker(self.model)

    def lacks(self, feature: Feature) -> str | None:
        """A guide needs llguidance to check replies by; log-probabilities need a script that is the policy."""
        if feature == "guide":
            return None if installed() else f"engine {self.name!r} checks its replies by it, and {NOT_INSTALLED}"
        return None if self.certain else f"the tokens of engine {self.name!r} have no log-probabilities of the policy"

    async def generate(self, request: Generate) -> AsyncIterator[Chunk]:
        try:
            reply = self.script(request.messages, request.tools)
            if inspect.isawaitable(reply):
                reply = await reply
        except EngineError:
            raise
        except Exception as error:  # the function is the run file's own: say what it did
            raise EngineError(f"the script of engine {self.name!r} raised {type(error).__name__}: {error}") from error
        ids = self._ids(reply, request)
        finish = "stop" if ids and ids[-1] in request.stop_token_ids else "length"
        if len(ids) > request.max_tokens:
            ids, finish = ids[: request.max_tokens], "length"
        if request.guide is not None:
            self._check(request.guide, ids, finish)
        step = 1 if request.stream else max(1, len(ids))
        for start in range(0, max(1, len(ids)), step):
            part = ids[start : start + step]
            yield Chunk(
                part,
                [0.0] * len(part) if self.certain else None,
                [(0, len(part))] if part else [],
                finish if start + step >= len(ids) else None,
                [[(id, 0.0)] for id in part] if request.top_logprobs and self.certain else None,
            )

    def _check(self, guide: str, ids: list[int], finish: str) -> None:
        said = ids[:-1] if finish == "stop" else ids
        departure = self._checker.departure(guide, said, whole=finish == "stop")
        if departure is not None:
            raise EngineError(f"the reply of engine {self.name!r} does not follow the request's guide: {departure}")

    def _ids(self, reply: Any, request: Generate) -> list[int]:
        if isinstance(reply, list) and all(isinstance(id, int) for id in reply):
            return reply
        if isinstance(reply, str):
            stop = min(self.model.stop_ids)
            return [*self.model.tokenizer.encode(reply, add_special_tokens=False).ids, stop]
        if isinstance(reply, dict):
            return reply_ids(self.model, request.messages, request.tools, reply)
        raise EngineError(
            f"the script of engine {self.name!r} returned {type(reply).__name__}: expected ids, text or a message"
        )


def reply_ids(model: TextModel, messages: Sequence[Json], tools: Sequence[Json], reply: Json) -> list[int]:
    """The ids that the model would have had to sample for the template to show `reply` as its turn.

    Raises `EngineError` when the template rewrites the conversation as soon as the reply stands in it.
    """
    before = model.render(messages, tools)
    after = model.render([*messages, _message(reply).for_template()], tools, generation_prompt=False)
    if not after.text.startswith(before.text):
        raise EngineError(
            "the chat template does not write a reply behind its own generation prompt; it cannot be taught by example"
        )
    ids = model.encode(after, len(before.text))
    for i, id in enumerate(ids):
        if id in model.stop_ids:
            return ids[: i + 1]
    return [*ids, min(model.stop_ids)]


def _message(reply: Json) -> Message:
    calls = []
    for i, call in enumerate(reply.get("tool_calls") or ()):
        function = call.get("function", call)
        calls.append(ToolCall(call.get("id") or f"call_{i}", function["name"], function["arguments"]))
    return Message("assistant", reply.get("content") or "", reply.get("reasoning_content") or "", tuple(calls))
