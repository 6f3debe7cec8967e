"""Who may do what.

There are two credentials. The *run key* belongs to the trainer, the controller and the operator. An *attempt token*
belongs to the agent of one attempt: it may ask the model as that attempt, in the mode of its rollout, and post that
attempt's own events, until the attempt ends. Nothing in a path, header or body widens that.

Both come as `Authorization: Bearer …` or `x-api-key: …`. Tokens are known here by their SHA-256 only.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from starlette.exceptions import HTTPException

from longrein.records import TERMINAL, Attempt, Mode, Rollout
from longrein.store import Store


def new_token() -> str:
    """A fresh attempt token (256 random bits)."""
    return "lr-at-" + secrets.token_urlsafe(32)


def hash_token(token: str) -> bytes:
    """What the store keeps of a token."""
    return hashlib.sha256(token.encode()).digest()


@dataclass(frozen=True)
class Caller:
    """Whose credential a request carries: an attempt's, or (None) the run key's."""

    attempt: Attempt | None


@dataclass(frozen=True)
class Seat:
    """Where a model request belongs."""

    rollout: Rollout
    attempt_id: str
    mode: Mode
    recorded: bool
    """Whether the store knows the attempt; Agent Lightning's agents name theirs without starting it."""


class Access:
    """Every method takes a request's headers and raises HTTPException when they do not allow what was asked."""

    def __init__(self, key: str, store: Store, rewards_from: Literal["function", "agent"]):
        self._key_hash = hash_token(key)
        self._store = store
        self._rewards_from = rewards_from

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """401 without a credential that is known."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offered = [bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip()]
        for credential in filter(None, offered):
            hashed = hash_token(credential)
            if hmac.compare_digest(hashed, self._key_hash):
                return Caller(None)
            attempt = self._store.attempt_of_token(hashed)
            if attempt is not None:
                return Caller(attempt)
        what = "this key is not known" if any(offered) else "a key is needed"
        raise HTTPException(
            401,
            f"{what}: send Authorization: Bearer KEY or x-api-key: KEY",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def administer(self, headers: Mapping[str, str]) -> None:
        """What only the run key may do."""
        if self.caller(headers).attempt is not None:
            raise HTTPException(403, "an attempt's token may not do this; it needs the run key")

    def post_event(self, headers: Mapping[str, str], rollout_id: str, attempt_id: str, event_type: str) -> None:
        """The run key posts any event; a token those of its own attempt while it runs.

        A token posts rewards only where the run file says that agents do (`reward.from = "agent"`), and never a
        `model_request`: what was sampled is recorded here and nowhere else.
        """
        own = self.caller(headers).attempt
        if own is None:
            return
        _same_attempt(own, rollout_id, attempt_id)
        if event_type == "model_request":
            raise HTTPException(
                403, "an attempt's token may not post model_request events: the gateway records the calls itself"
            )
        if event_type == "reward" and self._rewards_from != "agent":
            raise HTTPException(
                403, 'an attempt\'s token may post rewards only if reward.from = "agent" in the run file'
            )
        _still_runs(own)

    def call_model(self, headers: Mapping[str, str], rollout_id: str, attempt_id: str, mode: str) -> Seat:
        """A model request on the path that names rollout, attempt and mode."""
        own = self.caller(headers).attempt
        if own is not None:
            _same_attempt(own, rollout_id, attempt_id)
        rollout = self._store.rollout(rollout_id)
        if rollout is None:
            raise HTTPException(404, f"no rollout {rollout_id}")
        if own is not None and mode != _mode_of(rollout):
            raise HTTPException(403, f"rollout {rollout_id} runs in mode {_mode_of(rollout)}, not {mode}")
        attempt = own or self._store.attempt(rollout_id, attempt_id)
        return _seat(rollout, attempt_id, attempt, cast(Mode, mode))

    def call_own_model(self, headers: Mapping[str, str]) -> Seat:
        """A model request at plain /v1, where the token alone says whose it is."""
        own = self.caller(headers).attempt
        if own is None:
            raise HTTPException(
                403,
                "the run key may not call /v1 directly, since a call belongs to an attempt: use an attempt's token, or "
                "/proxy/rollout/ROLLOUT/attempt/ATTEMPT/mode/MODE/openai/v1",
            )
        rollout = self._store.rollout(own.rollout_id)
        if rollout is None:
            raise HTTPException(404, f"no rollout {own.rollout_id}")
        return _seat(rollout, own.attempt_id, own, _mode_of(rollout))


def _mode_of(rollout: Rollout) -> Mode:
    return "train" if rollout.is_train else "val"


def _same_attempt(own: Attempt, rollout_id: str, attempt_id: str) -> None:
    if (own.rollout_id, own.attempt_id) != (rollout_id, attempt_id):
        raise HTTPException(403, "this token belongs to another attempt")


def _still_runs(attempt: Attempt) -> None:
    if attempt.ended_at is not None:
        raise HTTPException(409, f"attempt {attempt.attempt_id} of rollout {attempt.rollout_id} has ended")


def _seat(rollout: Rollout, attempt_id: str, attempt: Attempt | None, mode: Mode) -> Seat:
    if attempt is not None:
        _still_runs(attempt)
    if rollout.status.state in TERMINAL:
        raise HTTPException(409, f"rollout {rollout.rollout_id} has {rollout.status.state.value}")
    return Seat(rollout, attempt_id, mode, recorded=attempt is not None)
