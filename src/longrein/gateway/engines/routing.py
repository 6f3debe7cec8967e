"""Which endpoint a call goes to: rendezvous hashing, so that the calls of a rollout find their prefix cached."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from longrein.records import ModelEndpoint


def choose_endpoint(endpoints: Sequence[ModelEndpoint], key: str) -> ModelEndpoint:
    """The endpoint with the highest hash of (endpoint, key).

    An endpoint that is added takes only its own share of the keys, and one that is removed gives up only its own.
    `endpoints` may not be empty; their order does not matter.
    """
    return max(endpoints, key=lambda e: hashlib.sha256(f"{e.endpoint}\0{key}".encode()).digest())
