"""The reward: 1 if the calculator was used and the final answer is right, else 0."""

import re
from pathlib import Path


def grade(task: dict, transcript: list[dict], workspace: Path, exit_status: int) -> dict:
    """Judge one run by what was said in it.

    task: as `tasks.py` made it. transcript: the run's chat messages (OpenAI's form), the last reply included.
    workspace, exit_status: not looked at; a run that broke off has no final answer.

    The final answer is a last assistant message that calls no tool and names exactly one number, the right one.
    """
    results = [message for message in transcript if message.get("role") == "tool"]
    worked = [message for message in results if _number(message.get("content")) is not None]
    last = transcript[-1] if transcript else {}
    final = last.get("role") == "assistant" and not last.get("tool_calls")
    right = final and _number(last.get("content")) == task["answer"]
    return {
        "reward": float(bool(worked) and right),
        "called_tool": float(bool(results)),
        "tool_worked": float(bool(worked)),
        "answered": float(final),
    }


def _number(content: object) -> float | None:
    """The only number in a text ("76", "76 apples.", "-3.5"); None without one or with several."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", content) if isinstance(content, str) else []
    return float(numbers[0]) if len(numbers) == 1 else None
