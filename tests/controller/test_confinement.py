"""Agents of a controller that is root: another user for each attempt, what is hidden from it, what it can do in its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from longrein.config import Config, ConfigError
from longrein.controller import confinement, hiding, local, users
from longrein.controller.confinement import Confinement, open_confinement
from longrein.controller.local import Ended, Site, run_agent
from longrein.controller.warmstart import Program, StartError
from longrein.records import Attempt, Outcome, Rollout, StartedAttempt
from longrein.sandbox.bubblewrap import find_bubblewrap
from longrein.unixsocket import listen_unix

from .fakes import make_config, until, write

URL = "http://127.0.0.1:9/"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run agents as another user")
with_bubblewrap = pytest.mark.skipif(find_bubblewrap() is None, reason="bubblewrap is not installed")


def configure(tmp_path: Path, git: str = "hide", **agent: Any) -> Config:
    """A run file for agents of their own users (or what `agent` says)."""
    return make_config(tmp_path, agent={"user": "auto", **agent}, workspace={"git": git})


async def run(config: Config, tmp_path: Path, name: str = "r", task: dict[str, Any] | None = None) -> Ended:
    """Run one agent as the controller would."""
    launcher = local.make_launcher(config.agent, config.run.path / "logs" / "launcher.log")
    try:
        async with open_confinement(config, URL) as made:
            site = Site(
                *(config.agent, tmp_path, config.run.path / "attempts", URL, launcher, lambda: 0.0),
                confinement=made,
                git=config.workspace.git,
            )
            started = StartedAttempt(Rollout(name, task or {}), Attempt(name, "0"), "lr-at-T")
            return await run_agent(site, started, asyncio.Event())
    finally:
        await launcher.close()


def printed(ended: Ended) -> str:
    return (ended.directory / "stdout.log").read_text()


LOOK = """
import getpass, json, os, pathlib, pwd, sys
private = json.loads(sys.argv[1])
def tried(path):
    try:
        return os.listdir(path) if os.path.isdir(path) else pathlib.Path(path).read_text()
    except OSError as error:
        return error.strerror
pathlib.Path("mine").write_text("x")
pathlib.Path(os.path.expanduser("~/.cache-of-mine")).write_text("x")
print(json.dumps({
    "user": [os.getuid(), os.geteuid(), os.getgid(), os.getgroups()], "name": [getpass.getuser(), pwd.getpwuid(os.getuid()).pw_name],
    "home": os.environ["HOME"], "task": json.load(open(os.environ["LONGREIN_TASK"])), "cwd": os.getcwd(),
    "private": {path: tried(path) for path in private}, "beside": tried(os.path.dirname(os.getcwd())),
    "status": [line for line in open("/proc/self/status") if line.startswith(("Cap", "NoNew"))],
}))
open("/dev/stderr", "a").write("said")
"""


@as_root
@pytest.mark.parametrize("preload", [[], ["json"]])
async def test_an_agent_is_a_user_of_its_own(tmp_path: Path, preload: list[str]) -> None:
    """The test's folder is closed to other users, as root's home is: what agents need of it is shown to them."""
    write(tmp_path, "look.py", LOOK)
    assert hiding.closed_on_the_way(str(tmp_path)) is not None
    command = ["python", "look.py", "{task.private}"]
    config = configure(tmp_path, command=command, preload=preload)
    path = config.run.path
    write(path, "store.sqlite", "secret")
    write(path, "key", "secret")
    write(path, "logs/gateway.log", "secret")
    write(path, "attempts/other/0/work/secret", "secret")
    private = [
        str(path / name) for name in ("", "store.sqlite", "key", "logs", "logs/gateway.log", "attempts/other/0/work")
    ]
    ended = await run(config, tmp_path, task={"private": [*private, "/etc/shadow", str(path / "attempts")]})
    assert ended.outcome is Outcome.succeeded, ended.reason
    seen = json.loads(printed(ended))
    uid = seen["user"][0]
    assert users.COUNT > uid - config.agent.first_uid >= 0
    assert seen["user"] == [uid, uid, uid, []]
    assert seen["name"] == ["agent", "agent"]
    assert seen["home"] == str(ended.directory / "home")
    assert seen["cwd"] == str(ended.directory / "work")
    assert "secret" not in json.dumps(seen["private"])
    assert seen["private"].pop("/etc/shadow") == "Permission denied"
    assert seen["private"].pop(str(path)) in (["attempts"], "Permission denied")
    assert seen["private"].pop(str(path / "attempts")) in (["r"], "Permission denied")
    assert set(seen["private"].values()) == {"No such file or directory"}
    assert all(line.split()[1] == "0000000000000000" for line in seen["status"][:-1])
    assert seen["status"][-1].split()[1] == "1"
    assert (ended.directory / "stderr.log").read_text() == "said"
    owner = (ended.directory / "work" / "mine").stat()
    assert (owner.st_uid, owner.st_gid) == (uid, uid)
    assert stat.S_IMODE(ended.directory.stat().st_mode) == 0o700  # closed once it has ended


@as_root
async def test_attempts_at_the_same_time_are_different_users(tmp_path: Path) -> None:
    """What one writes to everyone's folders the other cannot change, and neither can signal the other."""
    pool = users.Users(2_000_000_000)
    taken = [pool.take()[0] for _ in range(50)]
    assert len(set(taken)) == 50
    pool._next = taken[0] - pool.first
    pool.give_back(taken[1])
    assert pool.take()[0] == taken[1]  # the first one is taken, the second is free again
    pool.give_back(taken[0])
    sleeper = await asyncio.create_subprocess_exec("sleep", "600", user=taken[0])
    try:
        pool._next = taken[0] - pool.first
        assert pool.take()[0] != taken[0]  # somebody on this machine is that user
    finally:
        sleeper.kill()
        await sleeper.wait()


@as_root
async def test_root_is_accepted_only_by_name(tmp_path: Path) -> None:
    config = configure(tmp_path, command=["sh", "-c", "id -u; echo $HOME"], user="root")
    ended = await run(config, tmp_path)
    assert printed(ended).split() == ["0", os.environ["HOME"]]
    for name, words in (("no-such-user", "there is no user"),):
        with pytest.raises(ConfigError, match=words):
            users.find_users(configure(tmp_path, user=name).agent)
    fixed = users.find_users(configure(tmp_path, user="nobody").agent)
    assert fixed is not None
    assert fixed.take() == fixed.take()


async def test_only_root_can_run_agents_as_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    for user in ("root", "nobody"):
        with pytest.raises(ConfigError, match="only root can run agents as"):
            users.find_users(configure(tmp_path, user=user).agent)
    assert users.find_users(configure(tmp_path).agent) is None


@as_root
async def test_without_mounts_it_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hiding, "may_mount", lambda: False)
    with pytest.raises(StartError, match=r"closed to\s+them.*agent\.user = 'root'"):
        async with open_confinement(configure(tmp_path), URL):
            pass


@as_root
async def test_without_mounts_modes_close_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hiding, "may_mount", lambda: False)
    monkeypatch.setattr(hiding, "closed_on_the_way", lambda path: None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chmod(folder, 0o711)
        show = 'id -u; cat "$0"/store.sqlite "$0"/logs/x; ls "$0" "$0"/attempts/other/0; cat $LONGREIN_TASK; touch mine'
        config = configure(folder, command=["sh", "-c", show, str(folder / "runs/r")])
        for file in ("store.sqlite", "logs/x", "attempts/other/0/secret"):
            write(config.run.path, file, "secret")
        os.chmod(config.run.path / "attempts/other/0", 0o700)  # as it is left when the attempt ends
        ended = await run(config, folder)
        assert "secret" not in printed(ended)
        assert printed(ended).splitlines()[1:] == ["{}"], ended.reason
        assert int(printed(ended).splitlines()[0]) >= 2_000_000_000


@as_root
async def test_a_program_behind_a_closed_folder_has_to_be_exposed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    tool = write(closed, "tool/bin/tool", "#!/bin/sh\necho from the tool\n")
    tool.chmod(0o755)
    (tmp_path / "project").mkdir()
    closed.chmod(0o700)
    config = configure(tmp_path, command=[str(tool)])
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(tmp_path / "project")})})
    ended = await run(config, tmp_path / "project")
    assert ended.final
    assert "add the folder that it is installed in to agent.expose" in (ended.reason or "")
    agent = config.agent.model_copy(update={"expose": [str(closed / "tool")]})
    ended = await run(config.model_copy(update={"agent": agent}), tmp_path / "project")
    assert printed(ended) == "from the tool\n", ended.reason


@as_root
async def test_what_an_agent_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        open('pid', 'w').write(str(os.getpid()))\n        time.sleep(600)\n    os._exit(0)\nwhile not os.path.exists('pid') or not open('pid').read():\n    time.sleep(0.01)\n"
    ended = await run(configure(tmp_path, command=["python", "-c", code]), tmp_path)
    assert ended.outcome is Outcome.succeeded, ended.reason
    assert not psutil.pid_exists(int((ended.directory / "work/pid").read_text()))


# --- The way to the gateway -----------------------------------------------------------------------------------------------

ASK_TWICE = """
import pathlib, time, urllib.request, os
url = os.environ["OPENAI_BASE_URL"]
def ask(data):
    with urllib.request.urlopen(urllib.request.Request(url, data)) as answer:
        return answer.read()
print(ask(b"one").decode(), flush=True)
pathlib.Path("asked").touch()
while not os.path.exists("again"):
    time.sleep(0.01)
for _ in range(2):
    print(ask(b"two").decode())
big = ask(b"x" * 20_000_000)
print(len(big), set(big) == {120})
"""


@asynccontextmanager
async def answering(listener: socket.socket, name: str) -> AsyncIterator[None]:
    """A server that answers what it was sent behind its name; large bodies as they are."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        body = body if length > 1000 else name.encode() + b" " + body
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    if listener.family == socket.AF_UNIX:
        server = await asyncio.start_unix_server(answer, sock=listener)
    else:
        server = await asyncio.start_server(answer, sock=listener)
    try:
        yield
    finally:
        server.close()


@with_bubblewrap
async def test_a_gateway_that_is_started_again_is_found_again(tmp_path: Path) -> None:
    config = configure(tmp_path, command=["python", "-c", ASK_TWICE], sandbox="bubblewrap")
    file = config.run.path / ("long" * 20) / "gateway" / "gateway.sock"  # no address of a socket has room for it
    write(config.run.path, "gateway.json", json.dumps({"url": URL, "socket": str(file)}))
    work = config.run.path / "attempts/r/0/work"
    async with answering(listen_unix(file), "first"):
        running = asyncio.create_task(run(config, tmp_path))
        await until((work / "asked").exists)
    async with answering(listen_unix(file), "second"):
        (work / "again").touch()
        ended = await running
    assert printed(ended).splitlines() == ["first one", "second two", "second two", "20000000 True"], ended.reason


@with_bubblewrap
async def test_a_gateway_on_another_machine_is_reached_through_the_controller(tmp_path: Path) -> None:
    config = configure(
        tmp_path, command=["sh", "-c", f"touch again; exec python -c '{ASK_TWICE}'"], sandbox="bubblewrap"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with answering(listener, "far"):
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/with/a/path"
            launcher = local.make_launcher(config.agent, tmp_path / "launcher.log")
            async with open_confinement(config, url) as made:
                site = Site(
                    config.agent, tmp_path, config.run.path / "attempts", url, launcher, lambda: 0.0, confinement=made
                )
                started = StartedAttempt(Rollout("r", {}), Attempt("r", "0"), "lr-at-T")
                ended = await run_agent(site, started, asyncio.Event())
            await launcher.close()
    assert printed(ended).splitlines() == ["far one", "far two", "far two", "20000000 True"], ended.reason
    assert not (config.run.path / "relay" / "gateway.sock").exists()


# --- In a sandbox ---------------------------------------------------------------------------------------------------


@with_bubblewrap
async def test_a_sandboxed_agent_is_ended_in_an_orderly_way(tmp_path: Path) -> None:
    """SIGTERM reaches the agent, which has its grace; its words and status come out."""
    code = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *a: (print('asked to end', flush=True), sys.exit(5)))\nopen('ready', 'w')\ntime.sleep(600)"
    config = configure(
        tmp_path, command=["python", "-c", code], sandbox="bubblewrap", timeout_seconds=3.0, grace_seconds=30
    )
    ended = await run(config, tmp_path)
    assert (ended.outcome, ended.exit_code) == (Outcome.agent_failed, 5), ended.reason
    assert printed(ended) == "asked to end\n"
    assert (ended.reason or "").startswith("timeout after 3 s")


@with_bubblewrap
async def test_a_sandboxed_agent_that_does_not_end_is_killed(tmp_path: Path) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
    agent = {"command": ["python", "-c", code], "sandbox": "bubblewrap", "timeout_seconds": 1.5, "grace_seconds": 0.2}
    ended = await run(configure(tmp_path, **agent), tmp_path)
    assert ended.outcome is Outcome.agent_failed
    left = [p for p in psutil.process_iter(["cmdline"]) if str(ended.directory) in " ".join(p.info["cmdline"] or [])]
    assert left == []


@with_bubblewrap
async def test_how_sandboxed_programs_end_and_what_is_no_program(tmp_path: Path) -> None:
    async def end(*command: str) -> Ended:
        return await run(configure(tmp_path, command=[*command], sandbox="bubblewrap"), tmp_path)

    assert (await end("sh", "-c", "exit 3")).exit_code == 3
    assert (await end("sh", "-c", "kill -SEGV $$")).exit_code == -11
    assert (await end("sh", "-c", "exit 139")).exit_code == 139
    write(tmp_path, "tool", "no program").chmod(0o755)
    ended = await end("./tool")
    assert (ended.outcome, ended.final) == (Outcome.infrastructure_failed, False)
    assert "tool cannot be started: [Errno 8] Exec format error" in (ended.reason or "")


@with_bubblewrap
async def test_the_place_of_a_sandboxed_agent(tmp_path: Path) -> None:
    """The directory has one name in every attempt, so that prompts that name it are equal in a group."""
    write(tmp_path, "template/file", "of the workspace")
    write(tmp_path, "agents_here.py", "import os\nclass Agent:\n    def run(self): print('class', os.getcwd())\n")
    shown = 'pwd; echo $HOME $LONGREIN_TASK $OPENAI_BASE_URL "$0"; cat file; echo more > file; ls -a $HOME /etc'
    agent = {"command": ["sh", "-c", shown, "{attempt_dir}"], "workspace": str(tmp_path / "template")}
    ended = await run(configure(tmp_path, **agent, sandbox="bubblewrap"), tmp_path)
    lines = printed(ended).splitlines()
    assert lines[0] == "/attempt/work", ended.reason
    base = "http://127.0.0.1:47470/proxy/rollout/r/attempt/0/mode/train/openai/v1"
    assert lines[1] == f"/attempt/home /attempt/task.json {base} /attempt"
    assert lines[2].startswith("of the workspace")
    assert "shadow" not in lines
    assert (ended.directory / "work/file").read_text() == "more\n"
    config = configure(tmp_path, command=[], agent_class="agents_here:Agent", sandbox="bubblewrap")
    assert printed(await run(config, tmp_path)) == "class /attempt/work\n"


@with_bubblewrap
async def test_what_does_not_go_with_a_sandbox(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"agent\.preload.*agent\.sandbox"):
        configure(tmp_path, sandbox="bubblewrap", preload=["json"])
    with pytest.raises(ValueError, match=r"agent\.user: agents in a sandbox are never root"):
        configure(tmp_path, sandbox="bubblewrap", user="root")
    with pytest.raises(ValueError, match=r"workspace\.git: 'some'"):
        configure(tmp_path, git="some")
    for expose, words in (("/no/such", "there is no"), (str(tmp_path), "the run's own files")):
        with pytest.raises(ConfigError, match=rf"agent\.expose: .*{words}"):
            async with open_confinement(configure(tmp_path, sandbox="bubblewrap", expose=[expose]), URL):
                pass
    tool = write(tmp_path / "elsewhere", "tool", "#!/bin/sh\necho tool\n")
    tool.chmod(0o755)
    config = configure(tmp_path, command=[str(tool)], sandbox="bubblewrap")
    config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(tmp_path / "project")})})
    ended = await run(config, tmp_path / "project")
    assert ended.final
    assert "is not visible where agents run" in (ended.reason or "")


async def test_without_bubblewrap_a_sandbox_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement.bubblewrap, "find_bubblewrap", lambda: None)
    with pytest.raises(ConfigError, match=r"agent\.sandbox: bubblewrap is not installed; install"):
        async with open_confinement(configure(tmp_path, sandbox="bubblewrap"), URL):
            pass
    monkeypatch.setattr(confinement.bubblewrap, "find_bubblewrap", lambda: "/bin/false")
    with pytest.raises(ConfigError, match=r"does not run"):
        async with open_confinement(configure(tmp_path, sandbox="bubblewrap"), URL):
            pass


@with_bubblewrap
async def test_a_sandbox_that_cannot_be_made_is_no_failure_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path, sandbox="bubblewrap")
    wrap = confinement.Confined.wrap
    hurt = lambda self, program, files=(): _hurt(wrap(self, program, files))  # noqa: E731
    async with open_confinement(config, URL) as made:
        monkeypatch.setattr(confinement.Confined, "wrap", hurt)
        launcher = local.make_launcher(config.agent, tmp_path / "launcher.log")
        site = Site(config.agent, tmp_path, config.run.path / "attempts", URL, launcher, lambda: 0.0, confinement=made)
        started = StartedAttempt(Rollout("r", {}), Attempt("r", "0"), "lr-at-T")
        try:
            ended = await run_agent(site, started, asyncio.Event())
        finally:
            await launcher.close()
    assert (ended.outcome, ended.final) == (Outcome.infrastructure_failed, False)
    assert "the sandbox could not be set up" in (ended.reason or "")


def _hurt(program: Program) -> Program:
    return Program(
        program.kind, program.target, [program.arguments[0], "--ro-bind", "/no/such", "/x", *program.arguments[1:]]
    )


@with_bubblewrap
async def test_a_killed_controller_leaves_nothing(tmp_path: Path) -> None:
    controller = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from controller.test_confinement import configure, run
code = "import os, signal, time\\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\\nos.fork()\\nopen('ready', 'w')\\ntime.sleep(600)  # {tmp_path}/runs/r/attempts/r/0"
folder = Path({str(tmp_path)!r})
asyncio.run(run(configure(folder, command=["python", "-c", code], sandbox="bubblewrap"), folder))
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", controller)
    directory = tmp_path / "runs/r/attempts/r/0"
    await until((directory / "work/ready").exists)

    def left() -> list[tuple[int, str]]:
        """Outermost first."""
        found = []
        for each in psutil.process_iter(["cmdline"]):
            with suppress(psutil.Error):
                line = " ".join(each.info["cmdline"] or [])
                if str(directory) in line and each.pid != process.pid:
                    found.append((each.pid, line))
        return found

    # Whoever could end the attempt is killed at once: the controller, its launcher and the attempt's supervisor.
    above = psutil.Process(next(pid for pid, _ in left())).parents()
    above = [each for each in above if psutil.Process(process.pid) in (each, *each.parents())]
    assert len(above) >= 3
    for each in above:
        each.suspend()
    for each in above:
        each.kill()
    await process.wait()
    await until(lambda: left() == [])


@with_bubblewrap
async def test_a_later_controller_knows_what_an_attempt_is_confined_by(tmp_path: Path) -> None:
    directory = tmp_path / "runs/r/attempts/r/0"
    async with open_confinement(configure(tmp_path, sandbox="bubblewrap"), URL) as made:
        (directory / "work").mkdir(parents=True)
        (directory / "task.json").touch()
        first = confinement.confine(made, directory)
    async with open_confinement(configure(tmp_path, sandbox="bubblewrap"), URL) as later:
        again = confinement.recover(later, directory)
        assert (again.user, again.group, again.plan) == (first.user, first.group, first.plan)
        if later.users is not None and first.user is not None:
            later.users._next = first.user[0] - later.users.first
            assert later.users.take() != first.user
        confinement.release(again)
        assert not any(folder.exists() for folder in again.group.folders)
        assert confinement.recover(later, tmp_path / "none").plan is not None


def test_nothing_is_confined_by_default(tmp_path: Path) -> None:
    made = confinement.confine(Confinement(), tmp_path)
    assert (made.plan, made.home, made.inside) == (None, None, tmp_path)
    program = Program("exec", "/bin/true", ["true"])
    assert made.wrap(program) is program
