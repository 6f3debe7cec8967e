"""Word problems of one or two operations: seeded training tasks, 64 dev tasks and 200 held-out tasks.

A problem belongs to one split for ever: its text is hashed, and the hash says which. So no seed can train on a problem
that another run is judged by. A task is `{"question": ..., "answer": ...}`; only the grader looks at the answer.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Iterator

NAMES = ["Ann", "Ben", "Eva", "Ivan", "Lena", "Max", "Nora", "Omar", "Rosa", "Sam"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "keys", "nuts", "pens", "shells", "stamps"]

#: The text of a problem and the expression that solves it. a, b and c are drawn from 2 to 99, k from 2 to 9, until the
#: answer is a whole number that is not negative.
SHAPES = [
    ("{name} has {a} {things} and finds {b} more. How many {things} now?", "{a}+{b}"),
    ("{name} has {a} {things} and loses {b}. How many are left?", "{a}-{b}"),
    ("{name} has {a} {things}, finds {b}, then loses {c}. How many now?", "{a}+{b}-{c}"),
    ("{name} has {a} {things}. A friend brings {b} and another {c}. How many in all?", "{a}+{b}+{c}"),
    ("{name} has {k} boxes of {a} {things}. How many {things}?", "{k}*{a}"),
    ("{name} has {k} boxes of {a} {things} and {b} more. How many in all?", "{k}*{a}+{b}"),
    ("{name} buys {k} boxes of {a} {things} and loses {b}. How many are left?", "{k}*{a}-{b}"),
    ("{name} shares {a} {things} among {k} friends. How many for each?", "{a}/{k}"),
]


def train(seed: int) -> Iterator[dict]:
    """4000 training tasks, others for every seed."""
    return itertools.islice(_tasks("train", f"train {seed}"), 4000)


def dev(seed: int) -> Iterator[dict]:
    """64 tasks for the warm-up's success check, the same ones for every seed."""
    return itertools.islice(_tasks("dev", "dev"), 64)


def held_out(seed: int) -> Iterator[dict]:
    """200 tasks for the evaluation, the same ones for every seed."""
    return itertools.islice(_tasks("held_out", "held out"), 200)


def split_of(question: str) -> str:
    """The split of a problem: 1 in 8 is held out, 1 in 16 is for the dev checks, the rest is trained on."""
    bucket = hashlib.sha256(question.encode()).digest()[0] % 16
    return "held_out" if bucket < 2 else "dev" if bucket == 2 else "train"


def expression_of(question: str) -> str:
    """The expression that solves a problem, read off its text as an expert would.

    Raises ValueError for a text that is none of the `SHAPES`.
    """
    for pattern, expression in _PATTERNS:
        match = pattern.fullmatch(question)
        if match:
            return expression.format(**match.groupdict())
    raise ValueError(f"none of this example's problems: {question!r}")


def _tasks(split: str, seed: str) -> Iterator[dict]:
    rng = random.Random(seed)
    seen = set()
    while True:
        text, expression = rng.choice(SHAPES)
        numbers = {letter: rng.randint(2, 9 if letter == "k" else 99) for letter in "abck"}
        answer = eval(expression.format(**numbers))  # an expression of ours, with numbers of ours
        question = text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), **numbers)
        if answer < 0 or answer != int(answer) or question in seen or split_of(question) != split:
            continue
        seen.add(question)
        yield {"question": question, "answer": int(answer)}


def _pattern(text: str) -> re.Pattern[str]:
    """The text of a shape as a pattern with one named group per number."""
    pieces = re.split(r"\{(\w+)\}", text)
    words = {"name": r"\w+", "things": r"\w+"}
    return re.compile(
        "".join(
            (words.get(piece) or rf"(?P<{piece}>\d+)") if odd else re.escape(piece)
            for piece, odd in zip(pieces, itertools.cycle([False, True]), strict=False)
        )
    )


_PATTERNS = [(_pattern(text), expression) for text, expression in SHAPES]
