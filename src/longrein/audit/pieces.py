"""What a recorded call says, as the pieces that rules look at.

Only what the model wrote is read as its doing: the reply of each call, never the assistant messages of a request, which
a harness may make up. What the harness answered (results of tools, and user messages after the first reply, which is how
harnesses without tools answer) is in the new messages of each call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from longrein.audit.commands import Piece, argv_pieces, patch_pieces, script_pieces
from longrein.records import Call, Json

_SCRIPT_KEYS = frozenset(("command", "commands", "cmd", "cmds", "script", "bash", "shell", "shell_command", "bash_command", "keystrokes"))  # fmt: skip
#: Of these a list is one command's words; a list of another is one of scripts.
_ARGV_KEYS = frozenset(("command", "cmd", "shell"))
_CODE_KEYS = frozenset(("code", "python", "python_code", "new_source", "cell", "expression", "javascript"))
_PATH_KEYS = frozenset(("path", "file_path", "filepath", "filename", "file", "file_name", "notebook_path", "absolute_path", "target_file", "target", "destination", "dest", "to"))  # fmt: skip
_CONTENT_KEYS = frozenset(("content", "contents", "file_text", "new_str", "new_string", "new_text", "insert_text", "text", "replacement", "new_source", "code_edit", "data"))  # fmt: skip
_PATCH_KEYS = frozenset(("patch", "diff", "input", "edits"))
_EDITOR_VERBS = frozenset(("view", "create", "str_replace", "insert", "undo_edit", "write", "edit", "read", "delete"))
_READING = re.compile(r"(read|view|open|show|get|list|ls|grep|search|glob|find)", re.IGNORECASE)
_DELETING = re.compile(r"(delete|remove|unlink)", re.IGNORECASE)
_SHELL_TOOL = re.compile(r"(bash|shell|terminal|exec|run_command|command)", re.IGNORECASE)
_CODE_TOOL = re.compile(r"(python|ipython|jupyter|notebook|code_interpreter|run_code|execute_code)", re.IGNORECASE)
_FENCE = re.compile(r"^[ \t]*(?:```+|~~~+)[ \t]*(\w*)[^\n]*$", re.MULTILINE)
_CODE_TAG = "<code>"
_SHELL_FENCES = frozenset(("", "bash", "sh", "shell", "zsh", "console", "terminal", "mswea_bash_command"))
_CODE_FENCES = frozenset(("python", "py", "python3", "ipython", "javascript", "js", "node"))
#: Arguments are objects in objects in lists …; deeper ones are taken as text.
_DEEPEST_VALUE = 12


def encodable(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can spell and no encoding can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


class Reader:
    """Reads an attempt's calls, in order: which calls have tools, and what was read before, is remembered."""

    def __init__(self) -> None:
        self._has_tools: dict[int, bool] = {}
        self._read: set[int] = set()
        self._written: dict[str, set[str]] = {}
        """Paths that the attempt wrote, by their last part."""

    def pieces(self, call: Call) -> Iterator[Piece]:
        """What a call adds to its attempt. Messages that a fork repeats are read once."""
        inherited = call.parent is not None and self._has_tools.get(call.parent, False)
        has_tools = bool(call.tools) if call.tools is not None else inherited
        self._has_tools[call.number] = has_tools
        yield from self._results(call)
        for piece in reply_pieces(call.reply, acts_in_text=not has_tools):
            yield self._file(piece) if piece.place == "file" else piece

    def _file(self, piece: Piece) -> Piece:
        """A deletion of what the attempt wrote before as `undo PATH`: agents clear their own trial files away."""
        verb, _, path = piece.text.partition(" ")
        path = path.removeprefix("./")
        same = self._written.setdefault(path.rsplit("/", 1)[-1], set()) if verb in ("write", "delete") else set()
        if verb == "write":
            same.add(path)
        elif any(path == one or path.endswith("/" + one) or one.endswith("/" + path) for one in same):
            return Piece("file", f"undo {path}")
        return piece

    def _results(self, call: Call) -> Iterator[Piece]:
        answered = call.messages_keep > 0
        for message in call.messages:
            role = message.get("role")
            answered = answered or role == "assistant"
            content = message.get("content")
            if not isinstance(content, str) or not content:
                continue
            if role == "tool" or (role == "user" and answered):
                key = hash(content)
                if key not in self._read:
                    self._read.add(key)
                    yield Piece("result", encodable(content))


def reply_pieces(reply: Json, *, acts_in_text: bool) -> Iterator[Piece]:
    """What the model wrote. `acts_in_text`: without tools, fenced blocks of shell and Python are what the harness runs."""
    reasoning, content = reply.get("reasoning_content"), reply.get("content")
    if isinstance(reasoning, str) and reasoning:
        yield Piece("reasoning", encodable(reasoning))
    if isinstance(content, str) and content:
        content = encodable(content)
        yield Piece("text", content)
        if acts_in_text:
            yield from _fenced(content)
    for call in reply.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield from tool_pieces(str(function.get("name") or ""), function.get("arguments"))


def _fenced(text: str) -> Iterator[Piece]:
    fences = list(_FENCE.finditer(text))
    at = 0
    while at < len(fences):
        language = fences[at].group(1).lower()
        end = fences[at + 1].start() if at + 1 < len(fences) else len(text)
        body = text[fences[at].end() : end].strip("\n")
        yield Piece("arguments", body)
        if language in _SHELL_FENCES:
            yield from script_pieces(body)
        elif language in _CODE_FENCES:
            yield Piece("code", body)
        at += 2
    start = text.find(_CODE_TAG)
    while start >= 0:
        end = text.find("</code>", start)
        body = text[start + len(_CODE_TAG) : end if end >= 0 else len(text)]
        yield Piece("arguments", body)
        yield Piece("code", body)
        start = text.find(_CODE_TAG, end) if end >= 0 else -1


# --- Tool calls ---------------------------------------------------------------------------------------------------


def tool_pieces(name: str, arguments: Any) -> Iterator[Piece]:
    """What a tool call does, told from its name and the names of its arguments."""
    value: Any = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            value = encodable(arguments)
    if isinstance(value, dict):
        yield from _object(name, value, 0)
    elif value:
        yield from _lone(name, value)


def _lone(name: str, value: Any) -> Iterator[Piece]:
    """Arguments that are no object: the text of a custom tool, or JSON that was cut or malformed."""
    for text in _strings(value, 0):
        yield Piece("arguments", text)
        if "*** Begin Patch" in text or "\n+++ " in text:
            yield from patch_pieces(text)
        elif _CODE_TOOL.search(name):
            yield Piece("code", text)
        elif _SHELL_TOOL.search(name):
            yield from script_pieces(text)


def _object(name: str, value: Mapping[str, Any], depth: int) -> Iterator[Piece]:
    yield from (Piece("arguments", text) for text in _strings(value, depth))
    path = next((encodable(v) for k, v in value.items() if k in _PATH_KEYS and isinstance(v, str) and v), "")
    verb = value.get("command")
    verb = verb if path and isinstance(verb, str) and verb in _EDITOR_VERBS else None
    contents: list[str] = []
    for key, inner in value.items():
        if key in _SCRIPT_KEYS and not verb:
            yield from _scripts(name, key, inner)
        elif key in _CODE_KEYS and isinstance(inner, str) and not path:
            yield Piece("code", encodable(inner))
        elif key in _PATCH_KEYS and isinstance(inner, str):
            text = encodable(inner)
            if "*** Begin Patch" in text or "+++ " in text:
                yield from patch_pieces(text)
            elif key == "input" and _SHELL_TOOL.search(name):
                yield from script_pieces(text)
        elif key == "edits" and isinstance(inner, list):
            found = [v for edit in inner if isinstance(edit, dict) for k, v in edit.items() if k in _CONTENT_KEYS]
            contents += [encodable(text) for text in found if isinstance(text, str)]
        elif (key in _CONTENT_KEYS or key in _CODE_KEYS) and isinstance(inner, str):
            contents.append(encodable(inner))
    if path:
        doing = str(verb or name)
        deletes = bool(_DELETING.search(doing)) and not contents
        what = "delete" if deletes else "write" if contents or not _READING.search(doing) else "read"
        yield Piece("file", f"{what} {path}")
        yield from (Piece("content", text, path) for text in contents if text)


def _scripts(name: str, key: str, value: Any) -> Iterator[Piece]:
    if isinstance(value, str):
        text = encodable(value)
        if _CODE_TOOL.search(name):
            yield Piece("code", text)
        else:
            yield from script_pieces(text)
    elif isinstance(value, list) and key in _ARGV_KEYS and all(isinstance(word, str) for word in value):
        yield from argv_pieces([encodable(word) for word in value])
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, str):
                yield from script_pieces(encodable(inner))
            elif isinstance(inner, dict):
                for own in sorted(_SCRIPT_KEYS & inner.keys()):
                    if isinstance(inner[own], str):
                        yield from _scripts(name, own, inner[own])


def _strings(value: Any, depth: int) -> Iterator[str]:
    """All text in a value."""
    if isinstance(value, str):
        if value:
            yield encodable(value)
    elif depth >= _DEEPEST_VALUE:
        yield encodable(json.dumps(value, ensure_ascii=False, default=str))
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, depth + 1)
