"""Who may do what.

There are two credentials. The *run key* belongs to the trainer, the controller and the operator. An *attempt token*
belongs to the agent of one attempt: it may ask the model as that attempt, in the mode of its rollout, within the
attempt's budget (`budget.py`), and, where the run file lets agents say their reward (`reward.from = "agent"`), post
rewards of that attempt; all of it until the attempt ends. Nothing in a path, header or body widens that.

Both are random and come as `Authorization: Bearer …` or `x-api-key: …`. They are known here by their SHA-256 only, are
compared in constant time, and stand in no log and no answer but the one that hands a token out.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from starlette.exceptions import HTTPException

from longrein.config import Config
from longrein.records import TERMINAL, Attempt, Mode, Rollout
from longrein.store import Store

#: Rewards that an attempt's token may post (the last one counts), and the size of one as JSON: a record is no disk.
MOST_REWARDS, LARGEST_REWARD = 100, 64 * 1024


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
    own: bool
    """Whether the attempt's token asks, which its budget binds, and not the run key."""


class Access:
    """Every method takes a request's headers and raises HTTPException when they do not allow what was asked."""

    def __init__(self, key: str, store: Store, config: Config):
        self._key_hash = hash_token(key)
        self._store = store
        self._rewards_from = config.reward.from_
        warmup = config.warmup
        teachers = {"teacher", warmup.teacher_model} if warmup.teacher or warmup.teacher_url else set()
        self._teachers = teachers - {"", config.model.name}
        """Names that only a rollout of the teacher may ask for."""

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

    def post_events(self, headers: Mapping[str, str], rollout_id: str, attempt_id: str) -> Caller:
        """Whether any event may be posted there: with the run key, or a token where agents say their reward.

        The run key posts events of ended attempts too: Agent Lightning's graders post their reward afterwards.
        """
        caller = self.caller(headers)
        if caller.attempt is None:
            return caller
        if self._rewards_from != "agent":
            raise HTTPException(
                403, 'an attempt\'s token may post rewards only if reward.from = "agent" in the run file'
            )
        _same_attempt(caller.attempt, rollout_id, attempt_id)
        _refuse_ended(caller.attempt)
        return caller

    def post_event(self, caller: Caller, event_type: str, size: int) -> None:
        """Whether this event, of `size` bytes, may be posted; a token posts rewards and nothing else."""
        own = caller.attempt
        if own is None:
            return
        if event_type != "reward":
            raise HTTPException(
                403,
                f"an attempt's token may post events of type reward only, not {event_type!r}: the gateway records the "
                "calls itself",
            )
        if size > LARGEST_REWARD:
            raise HTTPException(413, f"a reward of an attempt's token has at most {LARGEST_REWARD} bytes")
        if self._store.event_count(own.rollout_id, own.attempt_id) >= MOST_REWARDS:
            raise HTTPException(403, f"this attempt has posted {MOST_REWARDS} events; a token may post no more")

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
        return self._seat(rollout, attempt_id, own, cast(Mode, mode))

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
        return self._seat(rollout, own.attempt_id, own, _mode_of(rollout))

    def name_model(self, rollout: Rollout, name: object) -> None:
        """The model that a request names in its body. Any name means the model of the rollout's role, as harnesses have
        their own; the teacher's is refused where the rollout is not the teacher's."""
        if rollout.config.engine != "teacher" and isinstance(name, str) and name in self._teachers:
            raise HTTPException(403, f"model: {name!r} is the teacher, which this rollout may not ask")

    def _seat(self, rollout: Rollout, attempt_id: str, own: Attempt | None, mode: Mode) -> Seat:
        if own is not None:
            _refuse_ended(own)
        attempt = own or self._store.attempt(rollout.rollout_id, attempt_id)
        ended = f"rollout {rollout.rollout_id} has {rollout.status.state.value}"
        if attempt is not None and attempt.ended_at is not None:
            raise HTTPException(409, _has_ended(attempt))
        if rollout.status.state in TERMINAL:
            raise HTTPException(409 if own is None else 403, ended)
        return Seat(rollout, attempt_id, mode, recorded=attempt is not None, own=own is not None)


def _mode_of(rollout: Rollout) -> Mode:
    return "train" if rollout.is_train else "val"


def _same_attempt(own: Attempt, rollout_id: str, attempt_id: str) -> None:
    if (own.rollout_id, own.attempt_id) != (rollout_id, attempt_id):
        raise HTTPException(403, "this token belongs to another attempt")


def _refuse_ended(own: Attempt) -> None:
    """403, not 409: clients ask again after a 409, and this never changes."""
    if own.ended_at is not None:
        raise HTTPException(403, f"{_has_ended(own)}, and its token with it")


def _has_ended(attempt: Attempt) -> str:
    return f"attempt {attempt.attempt_id} of rollout {attempt.rollout_id} has ended"
