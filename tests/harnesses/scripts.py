"""What the model says: a policy that knows each harness's tools by name and gets one task done with them.

The task is the same for all: compute a number with the shell into a file, read it back by two parallel calls, add a
line, and say what stands in it. A reply depends on nothing but the conversation, so any engine can play it, and the
number is only ever in the shell's output: a run that says it has really run its tools.

This file is loaded by the gateway's process too, where it stands alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

#: How the model writes, named by the task.
MANNERS = {
    "plain": "no reasoning; tool calls as the template writes them",
    "thinking": "reasoning in each turn; tool calls as the template writes them",
    "odd": "reasoning, odd white space, and arguments in a spelling that no serialiser gives back",
}
TASK = (
    "Work in the current folder. Compute 17 times 23 with the shell into the file notes.txt, read it back, add a line, "
    "and tell me what it says. (manner: {manner})"
)
DELEGATED_TASK = (
    "Work in the current folder. Compute 17 times 23 with the shell into the file notes.txt, let two sub-agents say what "
    "it says, and tell me. (manner: {manner})"
)
#: What the model's summaries begin with.
SUMMARY = "So far:"
#: What only the shell knows; the final answer repeats it.
ANSWER = "sum 391"

WRITE = 'echo "sum $((17 * 23))" > notes.txt; echo café'
ADD = 'echo "à bientôt" >> notes.txt; tail -n 1 notes.txt'
SPAWN, WAIT = "multi_agent_v1__spawn_agent", "multi_agent_v1__wait_agent"
ERRAND = "Errand {number}: say what the file notes.txt says. (manner: {manner})"


@dataclass(frozen=True)
class Tools:
    """How a harness's tools are called: names, and the keys of what they are given."""

    shell: tuple[str, str]
    """(tool, key of the command)"""
    extra: tuple[tuple[str, Any], ...] = ()
    """Further arguments of the shell."""
    read: tuple[str, str, tuple[tuple[str, Any], ...]] | None = None
    """(tool, key of the path, further arguments); None: files are read by the shell."""
    final: tuple[str, str] | None = None
    """(tool, key of the text) that ends the run; None: plain text ends it."""
    speaks: bool = True
    """Whether a reply may say something beside its calls. A harness that requires a call gets nothing else."""


#: By the name of a tool that only this vocabulary has; looked through in this order.
VOCABULARIES = {
    "exec_command": Tools(("exec_command", "cmd")),
    "run_shell_command": Tools(
        ("run_shell_command", "command"),
        extra=(("is_background", False),),
        read=("read_file", "file_path", ()),
    ),
    "terminal": Tools(
        ("terminal", "command"),
        read=("file_editor", "path", (("command", "view"),)),
        final=("finish", "message"),
    ),
    "Bash": Tools(("Bash", "command"), extra=(("description", "Look"),), read=("Read", "file_path", ())),
    "todowrite": Tools(("bash", "command"), read=("read", "filePath", ())),
    "final_answer": Tools(("bash", "command"), final=("final_answer", "answer"), speaks=False),
    "bash": Tools(("bash", "command")),
}


def script(messages: list[Json], tools: list[Json]) -> str:
    """The reply to a conversation, as the text that the model samples."""
    names = [tool["function"]["name"] for tool in tools]
    heard = [message["content"] for message in messages if message["role"] == "user"]
    task = next((text for text in heard if "(manner:" in text), "")
    manner = _found(r"\(manner: (\w+)\)", task, "plain")
    if not names:
        return _without_tools(messages)
    if "calculate" in names:
        return _written(manner, "", [("calculate", {"expression": "17 * 23"})])
    vocabulary = next(tools for name, tools in VOCABULARIES.items() if name in names)
    if not vocabulary.speaks and manner == "odd":
        manner = "thinking"  # a grammar for calls leaves one spelling open
    turn = turns(messages)
    if "Errand" in task:
        return _errand(vocabulary, manner, turn, messages)
    if "sub-agents" in task:
        return _delegating(vocabulary, names, manner, turn, messages)
    return _working(vocabulary, manner, turn, messages)


def _working(tools: Tools, manner: str, turn: int, messages: Sequence[Json]) -> str:
    if any(SUMMARY in message["content"] for message in messages if message["role"] == "user"):
        return _closing(tools, manner, messages)
    if turn == 0:
        return _written(manner, tools.speaks * "I will write the file.", [_shell(tools, WRITE)])
    if turn == 1:
        return _written(manner, "", [_read(tools, messages), _shell(tools, "wc -l notes.txt")])
    if turn == 2:
        return _written(manner, tools.speaks * "Now the second line.", [_shell(tools, ADD)])
    return _closing(tools, manner, messages)


def _delegating(tools: Tools, names: Sequence[str], manner: str, turn: int, messages: Sequence[Json]) -> str:
    """Two sub-agents at once are sent on an errand each."""
    if turn == 0:
        return _written(manner, "I will write the file.", [_shell(tools, WRITE)])
    if turn == 1:
        errands = [ERRAND.format(number=number, manner=manner) for number in ("one", "two")]
        return _written(manner, "", [_sub_agent(names, errand) for errand in errands])
    if turn == 2 and WAIT in names:  # its sub-agents run beside it
        heard = "\n".join(message["content"] for message in messages if message["role"] == "tool")
        started = re.findall(r'"agent_id": ?"([^"]+)"', heard)
        return _written(manner, "", [(WAIT, {"targets": started, "timeout_ms": 60_000})])
    return _closing(tools, manner, messages)


def _errand(tools: Tools, manner: str, turn: int, messages: Sequence[Json]) -> str:
    if turn == 0:
        return _written(manner, "", [_shell(tools, "cat notes.txt")])
    return _written(manner, f"It says {_number(messages)}.", [])


def _closing(tools: Tools, manner: str, messages: Sequence[Json]) -> str:
    text = f"The file says {_number(messages)}."
    if tools.final is not None:
        name, key = tools.final
        return _written(manner, "", [(name, {key: text})])
    if any("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in message["content"] for message in messages):
        command = f'echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo "{text}"'
        return _written(manner, "", [_shell(tools, command)])
    return _written(manner, text, [])


def _without_tools(messages: Sequence[Json]) -> str:
    """A title, a summary, a reflection on a tool's result, or the last word of a harness that allows no more steps."""
    if "CONTEXT CHECKPOINT" in messages[-1]["content"]:
        return f"{SUMMARY} notes.txt was written by the shell, and it says {_number(messages)}."
    if any(message["role"] == "tool" for message in messages):
        return f"The answer is {_number(messages)}."
    return "Notes on a sum"


def _sub_agent(names: Sequence[str], errand: str) -> tuple[str, Json]:
    if SPAWN in names:
        return SPAWN, {"message": errand}
    if "Agent" in names:
        return "Agent", {"description": "read it", "prompt": errand, "subagent_type": "general-purpose"}
    if "task" in names:
        return "task", {"description": "read it", "prompt": errand, "subagent_type": "general"}
    if "agent" in names:
        more = {"subagent_type": "general-purpose", "run_in_background": False}
        return "agent", {"description": "read it", "prompt": errand, **more}
    raise ValueError(f"no tool that starts a sub-agent among {', '.join(names)}")


def _shell(tools: Tools, command: str) -> tuple[str, Json]:
    name, key = tools.shell
    return name, {key: command, **dict(tools.extra)}


def _read(tools: Tools, messages: Sequence[Json]) -> tuple[str, Json]:
    if tools.read is None:
        return _shell(tools, "cat notes.txt")
    name, key, more = tools.read
    folder = _found(r"(/\S*/work-\w+)", "\n".join(message["content"] for message in messages), ".")
    return name, {**dict(more), key: f"{folder}/notes.txt"}


def turns(messages: Sequence[Json]) -> int:
    """Replies so far. A harness may give one back as several messages in a row, reasoning first."""
    roles = [message["role"] for message in messages]
    return sum(role == "assistant" and before != "assistant" for before, role in zip(["", *roles], roles, strict=False))


def _number(messages: Sequence[Json]) -> str:
    """What the tools said of the sum; never from the model's own turns."""
    heard = "\n".join(message["content"] for message in messages if message["role"] != "assistant")
    return _found(r"(sum \d+|\b391\b)", heard, "nothing").removeprefix("sum ").join(("sum ", ""))


def _found(pattern: str, text: str, default: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else default


def _written(manner: str, text: str, calls: Sequence[tuple[str, Json]]) -> str:
    """The reply in Hermes' form: reasoning, text, tool calls."""
    thinks = manner != "plain"
    thought = "Let me think: what is next?" if manner == "thinking" else "Let me think:  what is next? "
    out = f"<think>{thought}</think>" if thinks else ""
    if manner == "odd" and text and calls:
        text = f"  {text}\n\n"
    out += text
    for i, (name, arguments) in enumerate(calls):
        if i or text:
            out += "\n"
        out += f'<tool_call>\n{{"name": "{name}", "arguments": {_spelled(arguments, manner)}}}\n</tool_call>'
    return out


def _spelled(arguments: Json, manner: str) -> str:
    if manner != "odd":
        return json.dumps(arguments, ensure_ascii=False)
    return json.dumps(arguments, ensure_ascii=True, separators=(", ", ":  "))
