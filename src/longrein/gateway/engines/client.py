"""The HTTP client that asks engines: httpx's interface over aiohttp's connections, which cost less CPU than its own."""

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
    timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
    return httpx.AsyncClient(timeout=timeout, transport=_Transport(client=_session))


class _Transport(AiohttpTransport):
    """Names failures as httpx does. The package gives out every broken connection as one that timed out, and an endpoint
    that refuses connections is gone, where one that is slow is not."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except httpx.ConnectTimeout as error:
            cause = error.__cause__
            if isinstance(cause, aiohttp.ServerTimeoutError):
                raise
            kind = httpx.ConnectError if isinstance(cause, aiohttp.ClientConnectorError) else httpx.ReadError
            raise kind(str(error), request=request) from cause


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
