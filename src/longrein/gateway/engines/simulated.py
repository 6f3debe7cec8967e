"""An engine that computes nothing: random words at a steady rate, for load tests of what stands around an engine.

Everything about a call follows from its seed (`engine.simulated` in the run file): how long the reply is, when its first
token comes, and the words. Tokens are due at fixed times from the moment that the engine is asked; what keeps the gateway
busy makes them late and changes no later one's time, so that whoever knows the options can tell the gateway's own delay.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from longrein.config import Simulated
from longrein.gateway.engines import Chunk, Feature, Generate
from longrein.gateway.tokens import TextModel

#: Words that a reply is made of, and ids of the vocabulary that are looked at to find them.
WORDS, LOOKED_AT = 256, 8192
#: Timers may fire this much early.
TICK_SECONDS = 0.001


@dataclass
class SimulatedEngine:
    """Each token is one of `WORDS` words of the model's vocabulary, all equally probable; the last is a stop token.

    The recorded log-probabilities are those of this distribution, so they are no policy's: nothing of it can be trained.
    """

    options: Simulated
    model: TextModel
    name: str = "policy"
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    words: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.words = self.words or words_of(self.model)

    def lacks(self, feature: Feature) -> str | None:
        """Guides, and tokens other than the sampled ones."""
        if feature == "guide":
            return "a simulated engine follows no guide"
        return "a simulated engine knows no other tokens" if feature == "top_logprobs" else None

    async def generate(self, request: Generate) -> AsyncIterator[Chunk]:
        asked, options = self.clock(), self.options
        ids, first = self.reply(request.seed)
        finish = "stop" if len(ids) <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        certain = -math.log(len(self.words))
        given = 0 if request.stream else len(ids) - 1
        while True:
            # Token i is due at asked + first + i / rate.
            wait = asked + first + given / options.tokens_per_second - self.clock()
            if wait > TICK_SECONDS:
                await self.sleep(wait)
            late = self.clock() + TICK_SECONDS - asked - first
            due = min(len(ids), max(given, math.floor(late * options.tokens_per_second)) + 1)
            start, given = (given if request.stream else 0), due
            part = ids[start:due]
            logprobs = [0.0 if id in self.model.stop_ids else certain for id in part]
            ended = given == len(ids)
            yield Chunk(part, logprobs, [(0, len(part))], finish if ended else None)
            if ended:
                return

    def reply(self, seed: int) -> tuple[list[int], float]:
        """(ids with the stop token at the end, seconds to the first of them) of a call with this seed."""
        chance, options = random.Random(seed), self.options
        first = options.first_token_seconds * chance.lognormvariate(0.0, options.first_token_spread)
        length = max(1, round(options.reply_tokens * chance.lognormvariate(0.0, options.reply_spread)))
        return [*chance.choices(self.words, k=length - 1), min(self.model.stop_ids)], first


def words_of(model: TextModel) -> list[int]:
    """Ids that decode to ASCII letters behind a space; any but control tokens where a vocabulary has none of these."""
    size = model.tokenizer.get_vocab_size()
    plain = [id for id in range(min(size, LOOKED_AT)) if id not in model.control_ids]
    texts = model.tokenizer.decode_batch([[id] for id in plain], skip_special_tokens=False)
    words = [
        id
        for id, text in zip(plain, texts, strict=True)
        if text.startswith(" ") and text[1:].isascii() and text[1:].isalpha()
    ]
    return (words or plain)[:WORDS]
