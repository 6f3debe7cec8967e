"""A unix socket on this machine that leads to a gateway elsewhere: all that a sandboxed agent reaches of the network."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

from longrein.unixsocket import listen_unix

PIECE = 65536


@contextlib.asynccontextmanager
async def relaying(file: Path, url: str) -> AsyncIterator[None]:
    """Carry connections to the socket `file` to the host and port of `url`, over TLS for https. Raises OSError."""
    target = urlsplit(url)
    secure = target.scheme == "https"
    port = target.port or (443 if secure else 80)
    context = ssl.create_default_context() if secure else None
    open_connections: set[asyncio.Task[None]] = set()

    async def carry(near_reader: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(target.hostname, port, ssl=context)
        except OSError:  # the gateway is away: the client sees a connection that was closed
            near_writer.close()
            return
        try:
            await asyncio.gather(_copy(near_reader, far_writer), _copy(far_reader, near_writer))
        finally:
            near_writer.close()
            far_writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(carry(reader, writer))
        open_connections.add(task)
        task.add_done_callback(open_connections.discard)

    server = await asyncio.start_unix_server(accept, sock=listen_unix(file))
    try:
        yield
    finally:
        server.close()
        for task in open_connections:
            task.cancel()
        await asyncio.gather(*open_connections, return_exceptions=True)
        with contextlib.suppress(OSError):
            os.unlink(file)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end, then say so; a connection that breaks on either side has ended."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
    with contextlib.suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()
        else:  # TLS has no half-closed connections
            writer.close()
