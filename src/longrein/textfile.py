"""The end of a log, for error messages."""

from __future__ import annotations

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
