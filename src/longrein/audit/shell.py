"""Shell text as the commands that it runs: words without their quotes, redirections, here-documents.

`parse` reads what agents write, which is not always what a shell would take: unbalanced quotes and parentheses end with
the text. Commands inside substitutions, subshells, functions and loops are found as well. Nothing is expanded or run.
The time is linear in the text: each character is read once, plus once per level of back-quotes around it (at most
`DEEPEST`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: Substitutions within substitutions that are followed; what is deeper is taken as a word.
DEEPEST = 12

_PLAIN = re.compile(r"""[^ \t\r\n;&|<>()'"\\$`]+""")
_DOUBLE = re.compile(r'[^"\\$`]+')
_DELIMITER = re.compile(r"[^ \t\r\n;&|<>()]+")
_REDIRECT = re.compile(r"<<<|<<-?|<&|<>|<|&>>|&>|>>|>&|>\||>")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|u[0-9a-fA-F]{1,4}|U[0-9a-fA-F]{1,8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "v": "\v"}
#: Words that begin or end a compound command and are no command themselves.
_RESERVED = frozenset(("if", "then", "else", "elif", "fi", "do", "done", "while", "until", "!", "{", "}", "esac"))


@dataclass
class Command:
    """One simple command: its words (quotes removed), its redirections, the text of its here-document or here-string."""

    words: list[str] = field(default_factory=list)
    redirects: list[tuple[str, str]] = field(default_factory=list)
    """(operator, target), such as (">>", "out.txt")."""
    document: str = ""


def parse(script: str) -> list[Command]:
    """The simple commands of a script, in the order in which they begin (those of a substitution before its own)."""
    reader = _Reader(script, [], 0)
    reader.commands_until("")
    return reader.found


class _Reader:
    def __init__(self, text: str, found: list[Command], depth: int) -> None:
        self.text = text
        self.at = 0
        self.found = found
        self.depth = depth
        self.documents: list[tuple[Command, str, bool, bool]] = []
        """Here-documents whose lines come after this one: command, delimiter, tabs are stripped, delimiter was quoted."""

    def commands_until(self, end: str) -> None:
        """Read commands up to `end` (")" or nothing), which is passed."""
        command = Command()
        text, size = self.text, len(self.text)
        while self.at < size:
            char = text[self.at]
            if char in " \t\r":
                self.at += 1
            elif text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "\n":
                self.at += 1
                command = self._ended(command)
                self._read_documents()
            elif char == "#":
                line_end = text.find("\n", self.at)
                self.at = size if line_end < 0 else line_end
            elif char in "<>" or text.startswith("&>", self.at):
                self._redirect(command)
            elif char in ";&|":
                self.at += 1
                command = self._ended(command)
            elif char == "(":
                command = self._parenthesis(command)
            elif char == ")":
                self.at += 1
                command = self._ended(command)
                if end:
                    return
            else:
                start = self.at
                word = self._word()
                if word.isdigit() and self.at < size and text[self.at] in "<>" and text[start] == word[:1]:
                    continue  # the number of the descriptor that is redirected
                command.words.append(word)
        self._ended(command)
        self._read_documents()

    def _ended(self, command: Command) -> Command:
        words = command.words
        first = 0
        while first < len(words) and words[first] in _RESERVED:
            first += 1
        del words[:first]
        if words or command.redirects:
            self.found.append(command)
        return Command()

    def _parenthesis(self, command: Command) -> Command:
        """A subshell, a function's name or an array's values."""
        self.at += 1
        if command.words and command.words[-1].endswith("="):
            self._skip_words()
            return command
        if self.text.startswith(")", self.at) and len(command.words) == 1:
            self.at += 1
            command.words.clear()
            return command
        if self.depth >= DEEPEST:
            return command
        self.depth += 1
        self.commands_until(")")
        self.depth -= 1
        return command

    def _skip_words(self) -> None:
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in " \t\r\n;&|<>(":
                self.at += 1
            else:
                self._word()
        self.at += 1

    def _redirect(self, command: Command) -> None:
        match = _REDIRECT.match(self.text, self.at)
        if match is None:  # "&>" begins like a background sign
            self.at += 1
            return
        operator = match.group()
        self.at = match.end()
        if operator in ("<", ">") and self.text.startswith("(", self.at):
            self.at += 1
            command.words.append(operator + "(…)")
            if self.depth < DEEPEST:
                self.depth += 1
                self.commands_until(")")
                self.depth -= 1
            return
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        if operator in ("<<", "<<-"):
            found = _DELIMITER.match(self.text, self.at)
            raw = found.group() if found else ""
            self.at += len(raw)
            delimiter = re.sub(r"['\"\\]", "", raw)
            self.documents.append((command, delimiter, operator == "<<-", delimiter != raw))
            return
        target = self._word() if self.at < len(self.text) and self.text[self.at] not in "\n;&|<>()" else ""
        if operator == "<<<":
            command.document += target + "\n"
        else:
            command.redirects.append((operator, target))

    def _read_documents(self) -> None:
        waiting, self.documents = self.documents, []
        for command, delimiter, strip, quoted in waiting:
            lines: list[str] = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = end + 1
                if strip:
                    line = line.lstrip("\t")
                if line.rstrip("\r") == delimiter:
                    break
                lines.append(line)
            body = "\n".join(lines)
            command.document += body
            if not quoted and ("$(" in body or "`" in body) and self.depth < DEEPEST:
                inner = _Reader(body, self.found, self.depth + 1)
                while inner.at < len(body):
                    inner._double_quoted()
        self.at = min(self.at, len(self.text))

    # --- Words

    def _word(self) -> str:
        """The word that begins here, its quotes removed; substitutions in it are read as commands and stay as text."""
        parts: list[str] = []
        text, size = self.text, len(self.text)
        while self.at < size:
            char = text[self.at]
            if char in " \t\r\n;&|<>()":
                break
            if char == "'":
                end = text.find("'", self.at + 1)
                end = size if end < 0 else end
                parts.append(text[self.at + 1 : end])
                self.at = min(end + 1, size)
            elif char == '"':
                self.at += 1
                parts.append(self._double_quoted())
            elif char == "\\":
                escaped = text[self.at + 1 : self.at + 2]
                parts.append("" if escaped == "\n" else escaped)
                self.at = min(self.at + 2, size)
            elif char == "$":
                parts.append(self._dollar(quoted=False))
            elif char == "`":
                parts.append(self._back_quoted())
            else:
                match = _PLAIN.match(text, self.at)
                assert match is not None
                parts.append(match.group())
                self.at = match.end()
        return "".join(parts)

    def _double_quoted(self) -> str:
        """Up to the closing double quote, which is passed."""
        parts: list[str] = []
        text, size = self.text, len(self.text)
        while self.at < size:
            char = text[self.at]
            if char == '"':
                self.at += 1
                break
            if char == "\\":
                escaped = text[self.at + 1 : self.at + 2]
                parts.append("" if escaped == "\n" else escaped if escaped in '$`"\\' else "\\" + escaped)
                self.at = min(self.at + 2, size)
            elif char == "$":
                parts.append(self._dollar(quoted=True))
            elif char == "`":
                parts.append(self._back_quoted())
            else:
                match = _DOUBLE.match(text, self.at)
                assert match is not None
                parts.append(match.group())
                self.at = match.end()
        return "".join(parts)

    def _dollar(self, *, quoted: bool) -> str:
        start = self.at
        self.at += 1
        if self.text.startswith("((", self.at):  # arithmetic: no commands
            end = self.text.find("))", self.at)
            self.at = len(self.text) if end < 0 else end + 2
        elif self.text.startswith("(", self.at) and self.depth < DEEPEST:
            self.at += 1
            self.depth += 1
            self.commands_until(")")
            self.depth -= 1
        elif not quoted and self.text.startswith("'", self.at):
            return self._ansi_quoted()
        elif not quoted and self.text.startswith('"', self.at):
            self.at += 1
            return self._double_quoted()
        return self.text[start : self.at]

    def _ansi_quoted(self) -> str:
        """`$'…'`, its escapes read."""
        self.at += 1
        start = self.at
        while self.at < len(self.text) and self.text[self.at] != "'":
            self.at += 2 if self.text[self.at] == "\\" else 1
        body = self.text[start : self.at]
        self.at = min(self.at + 1, len(self.text))
        return _ESCAPE.sub(_unescaped, body)

    def _back_quoted(self) -> str:
        start = self.at
        self.at += 1
        begin = self.at
        while self.at < len(self.text) and self.text[self.at] != "`":
            self.at += 2 if self.text[self.at] == "\\" else 1
        body = self.text[begin : self.at]
        self.at = min(self.at + 1, len(self.text))
        if self.depth < DEEPEST:
            inner = _Reader(re.sub(r"\\([`$\\])", r"\1", body), self.found, self.depth + 1)
            inner.commands_until("")
        return self.text[start : self.at]


def _unescaped(match: re.Match[str]) -> str:
    what = match.group(1)
    if what[0] in "xuU" and len(what) > 1:
        code = int(what[1:], 16)
        return chr(code) if code < 0x110000 else "\ufffd"
    if what[0] in "01234567":
        return chr(int(what, 8))
    return _ESCAPED.get(what, what)
