"""The reward: 1 if the final answer is the number that was asked for and the tool was used, else 0."""

from pathlib import Path


def grade(task: dict, transcript: list[dict], workspace: Path, exit_status: int) -> dict:
    """Judge one run by its chat messages; the last one is the final answer."""
    used = any(message.get("role") == "tool" for message in transcript)
    last = transcript[-1] if transcript else {}
    final = last.get("role") == "assistant" and not last.get("tool_calls")
    right = final and str(last.get("content")).strip() == str(task["answer"])
    return {"reward": float(used and right), "called_tool": float(used), "answered": float(final)}
