"""Listening on a unix socket whose path may be longer than the 107 bytes that an address has room for."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def listen_unix(file: Path) -> socket.socket:
    """A listening socket at `file`, in place of one that a dead process left; anyone who reaches its folder may connect.

    The folder is made. Linux only, where a folder's descriptor has a short path. Raises OSError.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            file.unlink()
        listener.bind(f"/proc/self/fd/{folder}/{file.name}")
        file.chmod(0o666)
        listener.listen(2048)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(folder)
    return listener
