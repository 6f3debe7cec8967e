"""The table of every dialect's fields, made from the code that reads them: `python -m longrein.gateway.dialects.matrix`."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

from longrein.gateway.dialects import chat, completions, messages, responses

INTRODUCTION = """\
# Fields of the dialects

What a request may say, by dialect. This page is generated from the code:
`python -m longrein.gateway.dialects.matrix > docs/dialects.md`.

* **honoured**: does what its API says. `temperature` is checked and then decided by the run file, for every request of a
  mode alike (`gateway.train_temperature`, `gateway.val_temperature`); in training `top_p` and `top_k` are refused where
  they would cut the policy's distribution. What fixes the form of a reply (`tool_choice` that asks for a call, response
  formats, one call at most) is honoured by [guided decoding](guided.md), and refused where the engine has none.
* **ignored**: changes nothing about what is sampled.
* **only as it is**: accepted with these values, which ask for nothing; any other is refused.
* Every field that is not listed is refused, with an error that names it.

Images, audio and files are refused: the models served here read text.
"""


def table() -> str:
    """The page, as Markdown."""
    parts = [INTRODUCTION]
    for title, module in (
        ("Chat Completions (`/chat/completions`)", chat),
        ("Completions (`/completions`)", completions),
        ("Responses (`/responses`)", responses),
        ("Anthropic Messages (`/v1/messages`)", messages),
    ):
        parts.append(f"\n## {title}\n\n| field | |\n|---|---|\n" + "\n".join(_rows(module)) + "\n")
    return "".join(parts)


def _rows(module: ModuleType) -> list[str]:
    neutral: dict[str, tuple[Any, ...]] = module.NEUTRAL
    said = {name: "honoured" for name in module.HONOURED}
    said |= {name: "ignored" for name in module.IGNORED}
    said |= {name: f"only as it is: {_values(values)}" for name, values in neutral.items()}
    return [f"| `{name}` | {said[name]} |" for name in sorted(said)]


def _values(values: tuple[Any, ...]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values) or "`null`"


if __name__ == "__main__":
    print(table(), end="")
