"""A PostgreSQL server of the tests' own, and the fixtures for it: a pytest plugin for the modules that name it.

It listens on a Unix socket in a folder of its own and is gone at the end. As root it runs as another user, since it
refuses to run as root.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROLE = "longrein"


def binaries() -> Path | None:
    """The folder of initdb and pg_ctl: the one in PATH, or the newest of Debian's."""
    found = shutil.which("initdb")
    if found is not None and (Path(found).parent / "pg_ctl").exists():
        return Path(found).parent
    installed = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(installed, key=lambda path: int(path.parent.name), default=None)


def unprivileged() -> dict[str, Any]:
    """Arguments of `subprocess` that run a command as a user without rights; none where the tests run as such a one."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise AssertionError("there is no user postgres or nobody to run as")


class PostgresServer:
    """A server in `folder`, not started yet."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._as = unprivileged()
        self._names = itertools.count()
        # Not in pytest's own folder, which other users cannot enter; a socket's path has to be short.
        self.folder = Path(tempfile.mkdtemp(prefix="longrein-pg-"))
        if self._as:
            os.chown(self.folder, self._as["user"], self._as["group"])
        self._run("initdb", "-D", "data", "-U", ROLE, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")

    def _run(self, program: str, *arguments: str) -> None:
        with (self.folder / "tools.log").open("ab") as log:
            subprocess.run(
                [self._programs / program, *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
                **self._as,
            )

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        # A process that is killed takes nothing with it that was written: fsync is for power losses, and slow.
        options = (
            f"-c listen_addresses='' -c unix_socket_directories='{self.folder}' -c fsync=off -c max_connections=60"
        )
        self._run("pg_ctl", "-D", "data", "-l", "server.log", "-w", "-t", "120", "-o", options, "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop it: `fast` ends its connections, `immediate` ends its processes as a crash would."""
        self._run("pg_ctl", "-D", "data", "-w", "-t", "120", "-m", mode, "stop")

    def url(self, schema: str = "public") -> str:
        return f"postgresql://{ROLE}@/postgres?host={self.folder}&options=-csearch_path%3D{schema}"

    def fresh(self) -> str:
        """The URL of a schema that was not there before."""
        name = f"s{next(self._names)}"
        self.execute(f"CREATE SCHEMA {name}")
        return self.url(name)

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(host=str(self.folder), user=ROLE, dbname="postgres", autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        if (self.folder / "data" / "postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)


def _start_server() -> PostgresServer:
    pytest.importorskip("psycopg", reason="PostgreSQL is tested where psycopg is installed (the extra `postgres`)")
    programs = binaries()
    if programs is None:
        pytest.skip("PostgreSQL is tested where a server is installed (initdb in PATH or in /usr/lib/postgresql)")
    server = PostgresServer(programs)
    try:
        server.start()
    except BaseException:
        server.close()
        raise
    return server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server for the whole session; tests leave it running."""
    server = _start_server()
    yield server
    server.close()


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server of one test, which may stop it."""
    server = _start_server()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a record can be that is not there yet, as a URL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.sqlite'}"
    return request.getfixturevalue("postgres").fresh()
