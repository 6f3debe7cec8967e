"""What is added to a rollout's reward before advantages are taken."""

from __future__ import annotations


def overlong_penalty(longest: int, limit: int, buffer: int, penalty: float = 1.0) -> float:
    """What a reply that comes near its limit loses, from 0 to -`penalty`; all lengths in tokens.

    Soft overlong punishment of DAPO (arXiv 2503.14476), Eq. 13: 0 up to `limit - buffer`, then falling linearly, and
    -`penalty` from `limit` on. `longest` is the rollout's longest reply: each has a limit of its own.
    """
    return -penalty * min(1.0, max(0.0, (longest - (limit - buffer)) / buffer))
