"""Whom agents run as when the controller is root: ids that nobody else uses at the same time."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from longrein import config
from longrein.controller.warmstart import InfrastructureError

COUNT = 60_000


@dataclass
class Users:
    """Gives each attempt a user id (and the group of the same number). `fixed` is (uid, gid) of one user for all."""

    first: int
    fixed: tuple[int, int] | None = None
    _taken: set[int] = field(default_factory=set)
    # Somewhere else than another controller of this machine begins.
    _next: int = field(default_factory=lambda: random.SystemRandom().randrange(COUNT))

    def take(self) -> tuple[int, int]:
        """A (uid, gid) that no attempt of this controller and no process of this machine has.

        Raises `InfrastructureError` when there is none.
        """
        if self.fixed is not None:
            return self.fixed
        for _ in range(COUNT):
            uid = self.first + self._next
            self._next = (self._next + 1) % COUNT
            if uid not in self._taken and not _has_processes(uid):
                self._taken.add(uid)
                return uid, uid
        raise InfrastructureError(f"agent.first_uid: all {COUNT} ids from {self.first} on are in use")

    def keep(self, uid: int) -> None:
        """Give this one to nobody else: an attempt of an earlier controller has it."""
        self._taken.add(uid)

    def give_back(self, uid: int) -> None:
        self._taken.discard(uid)


def _has_processes(uid: int) -> bool:
    try:
        os.getpriority(os.PRIO_USER, uid)
    except OSError:
        return False
    return True


def find_users(agent: config.Agent) -> Users | None:
    """Whom agents are to run as; None: as this process. Raises `ConfigError` for a user that cannot be had."""
    if os.geteuid() != 0:
        if agent.user not in ("auto", _name_of(os.geteuid())):
            raise config.ConfigError(
                f"agent.user: only root can run agents as {agent.user!r}; leave it out, or start the controller as root"
            )
        return None
    if agent.user == "root":
        return None
    import pwd  # not on Windows, where only this part of the module is missing

    if agent.user != "auto":
        try:
            entry = pwd.getpwnam(agent.user)
        except KeyError:
            raise config.ConfigError(f"agent.user: there is no user {agent.user!r} on this machine") from None
        if entry.pw_uid == 0:
            raise config.ConfigError(f"agent.user: {agent.user!r} is root by another name; say 'root' to accept it")
        return Users(entry.pw_uid, (entry.pw_uid, entry.pw_gid))
    for file in (Path("/proc/self/uid_map"), Path("/proc/self/gid_map")):
        if not _mapped(file, agent.first_uid):
            raise config.ConfigError(
                f"agent.first_uid: {COUNT} ids from {agent.first_uid} on do not exist in this container ({file} says which "
                "do); choose a first one that does, or name one user by agent.user"
            )
    return Users(agent.first_uid)


def _name_of(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _mapped(file: Path, first: int) -> bool:
    try:
        ranges = [tuple(map(int, line.split())) for line in file.read_text().splitlines()]
    except OSError:
        return True
    return any(inside <= first and first + COUNT <= inside + length for inside, _, length in ranges)
