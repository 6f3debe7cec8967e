"""The expert of the warm-up: from what a model would be sent to the reply of somebody who knows the task."""

import json

from tasks import expression_of


def reply(messages: list[dict], tools: list[dict]) -> dict:
    """Call the first tool with the expression that solves the question; then answer with the tool's result.

    Returns an assistant message in OpenAI's chat form. A real run has a stronger model here (`warmup.teacher_url`).
    """
    last = messages[-1]
    if last["role"] == "tool":
        return {"role": "assistant", "content": last["content"]}
    function = tools[0]["function"]
    (argument,) = function["parameters"]["properties"]
    arguments = json.dumps({argument: expression_of(last["content"])})
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": function["name"], "arguments": arguments}}
        ],
    }
