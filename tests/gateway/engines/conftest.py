from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        yield client


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries again at once."""
    monkeypatch.setattr("longrein.gateway.engines.tokens.FIRST_PAUSE", 0.0)
    monkeypatch.setattr("longrein.gateway.engines.health.RETURN_EVERY", 0.01)
