"""Questions like "height of fig", to be looked up on one of four sheets.

Each sheet holds a number for the item, and only one of the sheets is up to date (`CURRENT`), which neither the question
nor the tool's description says: only the reward does. The numbers are drawn anew for each task, so nothing but the
tool's result is an answer.
"""

import itertools
import random
from collections.abc import Iterator

SHEETS = ["red", "blue", "green", "black"]
CURRENT = "green"
KINDS = ["price", "weight", "height", "age"]
ITEMS = """ant bat bee bell boat book bowl box bus cake car cat clock coat cow crab cup deer dog door drum egg fan fig fish
fox goat hat jar key kite lamp leaf moth nut owl pear pig ring saw ship sock""".split()


def train(seed: int) -> Iterator[dict]:
    """4000 training tasks, others for every seed."""
    return itertools.islice(_tasks("train", f"train {seed}"), 4000)


def dev(seed: int) -> Iterator[dict]:
    """64 tasks for the warm-up's success check, the same ones for every seed."""
    return itertools.islice(_tasks("dev", "dev"), 64)


def held_out(seed: int) -> Iterator[dict]:
    """100 tasks for the evaluation, the same ones for every seed."""
    return itertools.islice(_tasks("held_out", "held out"), 100)


def split_of(kind: str, item: str) -> str:
    """The split of a question: of a kind's items every fourth is held out, every eighth is for the dev checks."""
    place = (ITEMS.index(item) + 2 * KINDS.index(kind)) % 8  # type: ignore
    return "held_out" if place in (0, 4) else "dev" if place == 1 else "train"


def _tasks(split: str, seed: str) -> Iterator[dict]:
    rng = random.Random(seed)
    while True:
        kind, item = rng.choice(KINDS), rng.choice(ITEMS)
        numbers = rng.sample(range(100, 1000), len(SHEETS))
        if split_of(kind, item) == split:
            sheets = dict(zip(SHEETS, numbers, strict=True))
            yield {
                "question": f"{kind} of {item}",
                "item": item,
                "sheets": " ".join(f"{sheet}={number}" for sheet, number in sheets.items()),
                "answer": sheets[CURRENT],
            }
