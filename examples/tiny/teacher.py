"""The expert of the warm-up: knows the sheets, but not which one is up to date, and so tries any of them."""

import json
import random

from tasks import SHEETS


def reply(messages: list[dict], tools: list[dict]) -> dict:
    """Call the tool for the item of the question with some sheet; then answer with what it gave."""
    last = messages[-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": last["content"]}
    arguments = {"sheet": random.choice(SHEETS), "row": last["content"].split()[-1]}
    function = {"name": tools[0]["function"]["name"], "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }
