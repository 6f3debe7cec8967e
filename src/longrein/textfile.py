"""Files of lines: the end of a log, for error messages; records that are appended to."""

from __future__ import annotations

from io import BufferedWriter
from pathlib import Path


def tail(file: Path, lines: int, most_bytes: int = 8192) -> str:
    """The last lines of a file (of its last `most_bytes` bytes), or an empty string if there is none."""
    try:
        with file.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - most_bytes))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-lines:])


def open_lines(file: Path) -> BufferedWriter:
    """Open a file of lines to append to; a last line that was cut off while being written is ended first."""
    stream = file.open("ab")
    if stream.tell() and not file.read_bytes().endswith(b"\n"):
        stream.write(b"\n")
        stream.flush()
    return stream
