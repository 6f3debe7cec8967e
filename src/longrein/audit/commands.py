"""What a shell script does, as pieces that rules look at: its commands, the files it touches, the programs it runs.

Wrappers (`sudo`, `env`, `timeout`, `xargs`, …) are taken off, so that what they start is a command too, and so is what
`bash -c`, `eval` and here-documents hand to a shell. A command is written down with its program's base name, its words
without quotes (those that hold blanks in single quotes) and its redirections at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from longrein.audit.shell import Command, parse

#: Where a rule can look. `docs/audit.md` says what each is.
Place = Literal["command", "code", "file", "content", "arguments", "text", "reasoning", "result"]

#: Scripts within scripts (`bash -c`, `eval`) that are followed.
DEEPEST_SCRIPT = 6


@dataclass(frozen=True)
class Piece:
    """A text that rules of one place look at. `path` is the file that a `content` goes to, if it is known."""

    place: Place
    text: str
    path: str = ""


_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ksh", "ash", "fish"))
_PROGRAM = re.compile(r"(python|pypy|node|nodejs|deno|bun|perl|ruby|php|lua|Rscript|julia)[0-9.]*$")
_CODE_OPTIONS = frozenset(("-c", "-e", "-E", "-r", "-p", "--eval", "eval"))
#: Wrappers: their options that take a value, and how many words they take before the command.
_WRAPPERS: dict[str, tuple[str, int]] = {
    "sudo": ("ughpCrtU", 0), "doas": ("uC", 0), "env": ("uCS", 0), "timeout": ("ks", 1), "nice": ("n", 0),
    "ionice": ("cnp", 0), "nohup": ("", 0), "setsid": ("", 0), "time": ("fo", 0), "command": ("", 0), "builtin": ("", 0),
    "exec": ("a", 0), "stdbuf": ("oie", 0), "xargs": ("InPdaLsE", 0), "chroot": ("", 1), "unshare": ("", 0),
    "busybox": ("", 0), "flock": ("wE", 1), "watch": ("n", 0), "strace": ("eopsu", 0), "unbuffer": ("", 0),
    "parallel": ("jN", 0), "coproc": ("", 0), "then": ("", 0),
}  # fmt: skip
_READERS = frozenset(("cat", "less", "more", "head", "tail", "nl", "tac", "xxd", "hexdump", "od", "strings", "base64", "bat"))  # fmt: skip
_GIT_GLOBAL = frozenset(("--no-pager", "-P", "--paginate", "-p", "--bare", "--no-replace-objects", "--literal-pathspecs"))  # fmt: skip
_NOWHERE = frozenset(("/dev/null", "/dev/stdout", "/dev/stderr", "/dev/tty", "", "-"))


def script_pieces(script: str, depth: int = 0) -> Iterator[Piece]:
    """What a shell script does."""
    for command in parse(script):
        yield from _command_pieces(command, depth)


def argv_pieces(words: Sequence[str]) -> Iterator[Piece]:
    """What a command does that is given as a list of words."""
    yield from _command_pieces(Command(list(words)), 0)


def _command_pieces(command: Command, depth: int) -> Iterator[Piece]:
    words = list(command.words)
    while words and _ASSIGNMENT.match(words[0]):
        yield Piece("command", "export " + _shown(words.pop(0)))
    redirected = [
        Piece("file", f"write {target}") for op, target in command.redirects if ">" in op and _is_file(op, target)
    ]
    yield from redirected
    for operator, target in command.redirects:
        if operator in ("<", "<>") and target not in _NOWHERE:
            yield Piece("file", f"read {target}")
    if not words:
        if command.redirects:
            yield Piece("command", _line([], command))
        return
    words[0] = words[0].rsplit("/", 1)[-1] or words[0]
    if words[0] == "git":
        yield from _git_options(words)
    yield Piece("command", _line(words, command))
    path = redirected[0].text.removeprefix("write ") if redirected else ""
    if words[0] in ("echo", "printf") and path:
        text = " ".join(words[1:])
        yield Piece("content", text.replace("\\n", "\n").replace("\\t", "\t"), path)
    elif command.document and path:
        yield Piece("content", command.document, path)
    yield from _files(words, command)
    yield from _run(words, command, depth)


def _is_file(operator: str, target: str) -> bool:
    return target not in _NOWHERE and not (operator == ">&" and (target.isdigit() or target == "-"))


def _line(words: Sequence[str], command: Command) -> str:
    parts = [_shown(word) for word in words]
    parts += [f"{operator} {target}" for operator, target in command.redirects]
    return " ".join(parts)


def _shown(word: str) -> str:
    return f"'{word}'" if not word or any(char in " \t\r\n" for char in word) else word


def _git_options(words: list[str]) -> Iterator[Piece]:
    """Take git's own options off; settings given with -c are told as `git config NAME VALUE`."""
    at = 1
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        if word == "-c" and at + 1 < len(words):
            name, _, value = words[at + 1].partition("=")
            yield Piece("command", f"git config {name} {_shown(value)}")
            at += 2
        elif word in ("-C", "--git-dir", "--work-tree", "--namespace"):
            at += 2
        elif word in _GIT_GLOBAL or word.startswith(("--git-dir=", "--work-tree=", "-C", "--exec-path")):
            at += 1
        else:
            break
    del words[1:at]


# --- What runs ----------------------------------------------------------------------------------------------------


def _run(words: list[str], command: Command, depth: int) -> Iterator[Piece]:
    """Scripts, programs and commands that a command starts."""
    if depth >= DEEPEST_SCRIPT:
        return
    name, rest = words[0], words[1:]
    if name in _SHELLS:
        yield from _shell(rest, command, depth)
    elif name == "eval":
        yield from script_pieces(" ".join(rest), depth + 1)
    elif name in ("su", "runuser", "script") and ("-c" in rest[:-1] or "--command" in rest[:-1]):
        at = rest.index("-c" if "-c" in rest[:-1] else "--command")
        yield from script_pieces(rest[at + 1], depth + 1)
    elif _PROGRAM.match(name):
        yield from _program(rest, command)
    elif name == "find":
        yield from _found(rest, depth)
    elif name in _WRAPPERS:
        inner = _wrapped(name, rest)
        if inner:
            yield from _command_pieces(Command(inner, [], command.document), depth + 1)


def _wrapped(name: str, words: list[str]) -> list[str]:
    """The words that a wrapper starts."""
    valued, positional = _WRAPPERS[name]
    at = 0
    while at < len(words):
        word = words[at]
        if word.startswith("-") and len(word) > 1:
            at += 2 if len(word) == 2 and word[1] in valued else 1
        elif positional:
            positional -= 1
            at += 1
        else:
            break
    return words[at:]


def _shell(words: list[str], command: Command, depth: int) -> Iterator[Piece]:
    for at, word in enumerate(words):
        if word.startswith("-") and not word.startswith("--") and "c" in word:
            if at + 1 < len(words):
                yield from script_pieces(words[at + 1], depth + 1)
            return
        if not word.startswith(("-", "+")):
            return  # a script's file
    if command.document:
        yield from script_pieces(command.document, depth + 1)


def _program(words: list[str], command: Command) -> Iterator[Piece]:
    """The program text that an interpreter is given by an option, or on its standard input."""
    for at, word in enumerate(words):
        if word in _CODE_OPTIONS and at + 1 < len(words):
            yield Piece("code", words[at + 1])
            return
        if word.startswith("-c") and len(word) > 2:
            yield Piece("code", word[2:])
            return
        if word == "-m" or not word.startswith("-"):
            return
    if command.document:
        yield Piece("code", command.document)


def _found(words: list[str], depth: int) -> Iterator[Piece]:
    """`find … -exec COMMAND ;` and `-delete`."""
    at = 0
    while at < len(words):
        if words[at] in ("-exec", "-execdir", "-ok"):
            end = at + 1
            while end < len(words) and words[end] not in (";", "+"):
                end += 1
            if end > at + 1:
                yield from _command_pieces(Command(words[at + 1 : end]), depth + 1)
            at = end
        elif words[at] == "-delete":
            yield Piece("file", "delete " + " ".join(words[:at]))
        at += 1


# --- Files --------------------------------------------------------------------------------------------------------


def _files(words: list[str], command: Command) -> Iterator[Piece]:
    """The files that a command reads, writes, deletes or links, one a piece: `write PATH`, `link PATH -> TARGET`."""
    name, plain = words[0], [word for word in words[1:] if not word.startswith("-")]
    options = [word for word in words[1:] if word.startswith("-")]
    if name == "git" and len(plain) > 1 and plain[0] in ("rm", "mv"):
        name, plain = plain[0], plain[1:]
    if name in ("rm", "unlink", "shred", "rmdir"):
        yield from (Piece("file", f"delete {path}") for path in plain)
    elif name == "mv" and len(plain) > 1:
        yield from (Piece("file", f"delete {path}") for path in plain[:-1])
        yield Piece("file", f"write {plain[-1]}")
    elif name in ("cp", "install", "rsync") and len(plain) > 1:
        yield from (Piece("file", f"read {path}") for path in plain[:-1])
        yield Piece("file", f"write {plain[-1]}")
    elif name == "ln" and plain:
        link = plain[-1] if len(plain) > 1 else plain[0].rsplit("/", 1)[-1]
        yield from (Piece("file", f"link {link} -> {target}") for target in plain[: max(1, len(plain) - 1)])
    elif name == "tee":
        for path in plain:
            yield Piece("file", f"write {path}")
            if command.document:
                yield Piece("content", command.document, path)
    elif name in ("touch", "truncate"):
        yield from (Piece("file", f"write {path}") for path in plain)
    elif name in ("sed", "perl") and any(o.startswith("-i") or o in ("-pi", "--in-place") for o in options):
        given = "-e" in options or "-f" in options
        yield from (Piece("file", f"write {path}") for path in (plain if given else plain[1:]))
    elif name == "dd":
        yield from (Piece("file", f"write {word[3:]}") for word in plain if word.startswith("of="))
    elif name in ("apply_patch", "applypatch", "patch") or (name == "git" and plain[:1] == ["apply"]):
        patch = command.document or next((word for word in words[1:] if "\n" in word), "")
        yield from patch_pieces(patch)
    elif name in _READERS:
        yield from (Piece("file", f"read {path}") for path in plain)


_PATCHED = re.compile(
    r"^\*\*\* (Add|Update|Delete) File: (.+)$|^\*\*\* (Move to): (.+)$|^(\+\+\+|---) (?:[ab]/)?([^\t\n]+)"
)


def patch_pieces(patch: str) -> Iterator[Piece]:
    """The files that a patch (unified, or Codex's form) touches, and the lines that it adds to each."""
    path, added = "", []
    for line in patch.splitlines():
        match = _PATCHED.match(line) if line[:3] in ("***", "+++", "---") else None
        if match is None:
            if line.startswith("+"):
                added.append(line[1:])
            continue
        if added:
            yield Piece("content", "\n".join(added), path)
            added = []
        verb, named, _, moved, sign, diffed = match.groups()
        path = (named or moved or diffed).strip()
        if sign == "---" or path == "/dev/null":
            continue
        yield Piece("file", f"{'delete' if verb == 'Delete' else 'write'} {path}")
    if added:
        yield Piece("content", "\n".join(added), path)
