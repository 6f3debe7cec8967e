"""The HTTP client that asks engines: httpx's interface over aiohttp's connections, which cost a call half the CPU."""

from __future__ import annotations

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

#: Seconds that an idle connection is kept: less than the five after which uvicorn, and so vLLM, closes it.
KEEP_ALIVE_SECONDS = 3.0
#: Seconds that connecting may take; an answer takes what it takes.
CONNECT_SECONDS = 10.0


def engine_client() -> httpx.AsyncClient:
    """A client without a limit of connections. Engines are asked directly, never through a proxy."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS), transport=AiohttpTransport(client=_session)
    )


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
