"""How the client that asks engines names what went wrong."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from longrein.gateway.engines import client
from longrein.gateway.engines.client import engine_client


async def test_a_refused_connection_is_no_timeout() -> None:
    with socket.socket() as bound:  # bound and not listening: nobody else gets the port
        bound.bind(("127.0.0.1", 0))
        async with engine_client() as http:
            with pytest.raises(httpx.ConnectError):
                await http.get(f"http://127.0.0.1:{bound.getsockname()[1]}/health")


async def test_a_server_that_hangs_up_is_a_broken_connection() -> None:
    def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server, engine_client() as http:
        with pytest.raises(httpx.ReadError):
            await http.get(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/health")


async def test_a_server_that_does_not_accept_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.1)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:  # the queue of connections that nobody accepts
            one.setblocking(False)
            one.connect_ex(address)
        try:
            async with engine_client() as http:
                with pytest.raises(httpx.ConnectTimeout):
                    await http.get(f"http://127.0.0.1:{address[1]}/health")
        finally:
            for one in waiting:
                one.close()
