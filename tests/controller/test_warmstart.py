"""Preloaded starts: programs run as a fresh interpreter would run them, and what must not be preloaded."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from longrein.controller.local import base_environment
from longrein.controller.warmstart import InfrastructureError, Launcher, Process, Program, StartError, preloaded_program

from .fakes import until, write


def make(folder: Path, *modules: str) -> Launcher:
    return Launcher(sys.executable, modules, base_environment(), folder / "launcher.log")


@pytest_asyncio.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[Launcher]:
    warm = make(tmp_path, "json", "random", "tempfile")
    yield warm
    await warm.close()


async def spawn(
    launcher: Launcher, folder: Path, program: Program, environment: dict[str, str] | None = None
) -> Process:
    return await launcher.spawn(
        program,
        environment={**base_environment(), **(environment or {})},
        directory=folder,
        stdout=folder / "stdout.log",
        stderr=folder / "stderr.log",
    )


async def run(launcher: Launcher, folder: Path, program: Program, **environment: str) -> tuple[int, str, str]:
    for name in ("stdout.log", "stderr.log"):
        (folder / name).unlink(missing_ok=True)
    process = await spawn(launcher, folder, program, environment)
    exit = await process.wait()
    process.close()
    return exit.code, (folder / "stdout.log").read_text(), (folder / "stderr.log").read_text()


SCRIPTS = {
    "identity": """
import __main__, json, os, pickle, sys, threading
class Thing: pass
print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), __main__.Thing is Thing, __spec__, __doc__)
print(pickle.loads(pickle.dumps(Thing())).__class__ is Thing, sorted(globals())[:12])
print(sys.stdin.read() == "", os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid())
print(sorted(os.listdir("/proc/self/fd"))[:3], threading.current_thread() is threading.main_thread())
print(sys.flags, sys.executable, sys.stdout.encoding, sys.stdout.line_buffering, sys.stderr.line_buffering)
""",
    "exit0": "print('x')",
    "exit3": "import sys; print('said'); sys.exit(3)",
    "exit-text": "import sys; sys.exit('some words')",
    "exit-none": "raise SystemExit",
    "uncaught": "def f():\n    1/0\nf()\n",
    "syntax": "def f(:\n",
    "chained": "try:\n    1/0\nexcept Exception as e:\n    raise KeyError('k') from e\n",
    "hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\n1/0\n",
    "interrupt": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n",
    "atexit": "import atexit, threading, time\natexit.register(print, 'at exit')\nthreading.Thread(target=lambda: (time.sleep(.05), print('thread'))).start()\nprint('main')",
    "future": "x: undefined_name = 1\n",
    "os-exit": "import os\nprint('lost')\nos._exit(9)\n",
    "killed": "import os\nos.kill(os.getpid(), 9)\n",
    "big-code": "import sys; sys.exit(300)",
    "finalizers": """
import atexit, sys, threading, time, wave, weakref
class Loud:
    def __init__(self, name): self.name = name
    def __del__(self): print("gone", self.name, sys is None)
loud, ring = Loud("global"), Loud("ring")
ring.me = ring
weakref.finalize(loud, print, "finalized")
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
left_open = open("left-open", "w")
left_open.write("kept")
atexit.register(lambda: print("at exit", open("left-open").read() == ""))
""",
    "unclosed": "import sys\nsys.stdout.write('no newline')",
}


def fresh(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**base_environment(), **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # Tests in a shell's background inherit an ignored SIGINT, which agents do not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_script_runs_as_in_a_fresh_interpreter(tmp_path: Path, launcher: Launcher, name: str) -> None:
    script = str(write(tmp_path, "scripts/agent.py", SCRIPTS[name]))
    warm = await run(launcher, tmp_path, Program("script", script, ["one", "two words"]), MINE="1")
    if name == "finalizers":
        assert (tmp_path / "left-open").read_text() == "kept"
    assert warm == fresh(tmp_path, script, "one", "two words", MINE="1")


async def test_modules_and_missing_files_run_as_in_a_fresh_interpreter(tmp_path: Path, launcher: Launcher) -> None:
    write(tmp_path, "package/__init__.py", "")
    code = "import sys; from . import other; print(__name__, __package__, sys.argv, sys.path[0], other.N)"
    write(tmp_path, "package/__main__.py", code)
    write(tmp_path, "package/other.py", "N = 1\nif __name__ == '__main__': 1/0\n")
    for arguments in (["-m", "package", "a"], ["-m", "package.other"], ["-m", "absent_module_x"], ["absent.py"]):
        warm = await run(launcher, tmp_path, preloaded_program([sys.executable, *arguments]))
        assert warm == fresh(tmp_path, *arguments)


async def test_the_environment_is_exactly_the_given_one(tmp_path: Path, launcher: Launcher) -> None:
    script = write(
        tmp_path,
        "a.py",
        "import json, os, tempfile, time; print(json.dumps([dict(os.environ), tempfile.gettempdir(), time.tzname[0]]))",
    )
    folder = tmp_path / "tmp"
    folder.mkdir()
    process = await launcher.spawn(
        Program("script", str(script), []),
        environment={"A": "1", "TMPDIR": str(folder), "TZ": "XYZ-3"},
        directory=tmp_path,
        stdout=tmp_path / "stdout.log",
        stderr=tmp_path / "stderr.log",
    )
    assert (await process.wait()).code == 0
    process.close()
    assert json.loads((tmp_path / "stdout.log").read_text()) == [
        {"A": "1", "TMPDIR": str(folder), "TZ": "XYZ-3"},
        str(folder),
        "XYZ",
    ]


async def test_every_start_has_random_numbers_of_its_own(tmp_path: Path) -> None:
    launcher = make(tmp_path, "random", "uuid", "ssl", "numpy")  # whose BLAS has threads, which end at a fork
    code = "import random, uuid, ssl, numpy, os; print(random.random(), uuid.uuid4(), uuid.uuid1(), ssl.RAND_bytes(8).hex(), numpy.random.rand(), numpy.random.default_rng().random())"
    script = write(tmp_path, "a.py", code)
    seen = [(await run(launcher, tmp_path, Program("script", str(script), [])))[1].split() for _ in range(3)]
    await launcher.close()
    assert len(seen[0]) == 6
    assert all(len(set(column)) == 3 for column in zip(*seen, strict=True))


async def test_modules_are_imported_once_and_not_shared(tmp_path: Path, launcher: Launcher) -> None:
    code = "import os, json; json.mark = getattr(json, 'mark', 0) + 1; print(json.mark, os.getppid())"
    script = write(tmp_path, "a.py", code)
    first = (await run(launcher, tmp_path, Program("script", str(script), [])))[1].split()
    second = (await run(launcher, tmp_path, Program("script", str(script), [])))[1].split()
    assert first[0] == second[0] == "1"
    assert first[1] != second[1]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), name='poller', daemon=True).start()",
            "poller",
        ),
        ("import socket\ns = socket.socket()", "socket"),
        ("1/0", "importing unfit failed: ZeroDivisionError"),
        ("import sys; sys.exit(0)", "importing unfit failed: SystemExit"),
    ],
)
async def test_modules_that_cannot_be_preloaded(tmp_path: Path, code: str, message: str) -> None:
    write(tmp_path, "unfit.py", code)
    environment = {**base_environment(), "PYTHONPATH": str(tmp_path)}
    launcher = Launcher(sys.executable, ["unfit"], environment, tmp_path / "launcher.log")
    for _ in range(2):
        with pytest.raises(StartError, match=r"^agent\.preload: ") as caught:
            await launcher.start()
        assert message in str(caught.value)
    await launcher.close()


async def test_agents_outlive_their_launcher_and_the_next_start_has_a_new_one(
    tmp_path: Path, launcher: Launcher
) -> None:
    go = tmp_path / "go"
    script = write(
        tmp_path, "a.py", f"import os, time, sys\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nsys.exit(5)"
    )
    process = await spawn(launcher, tmp_path, Program("script", str(script), []))
    os.kill(psutil.Process(process.pid).parent().ppid(), signal.SIGKILL)  # type: ignore[union-attr]
    go.touch()
    assert (await process.wait()).code == 5
    process.close()
    await until(lambda: launcher._process is not None and launcher._process.returncode is not None)
    assert (await run(launcher, tmp_path, Program("script", str(script), [])))[0] == 5


async def test_a_controller_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from pathlib import Path
from longrein.controller.warmstart import Launcher, Program
async def main():
    folder = Path({str(tmp_path)!r})
    launcher = Launcher(sys.executable, [], {{}}, folder / "log")
    command = ["/bin/sh", "-c", "trap '' TERM; setsid sleep 601 & sleep 602"]
    process = await launcher.spawn(Program("exec", "/bin/sh", command), environment={{"PATH": "/usr/bin:/bin"}},
                                   directory=folder, stdout=folder / "out", stderr=folder / "err")
    print(process.pid, flush=True)
    await process.wait()
asyncio.run(main())
"""
    controller = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert controller.stdout is not None
    agent = psutil.Process(int(await controller.stdout.readline()))
    await until(lambda: len(agent.children(recursive=True)) == 2)
    supervisor = agent.parent()
    assert supervisor is not None
    family = [agent, *agent.children(recursive=True), supervisor, supervisor.parent()]
    controller.kill()
    await controller.wait()
    await until(
        lambda: not any(p is not None and p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)
    )


async def test_a_lost_supervisor_is_an_infrastructure_failure_and_its_agent_is_ended(
    tmp_path: Path, launcher: Launcher
) -> None:
    script = write(tmp_path, "a.py", "import time; time.sleep(600)")
    process = await spawn(launcher, tmp_path, Program("script", str(script), []))
    agent = psutil.Process(process.pid)
    os.kill(agent.ppid(), signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="supervisor"):
        await process.wait()
    process.close()
    await until(lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE)


async def test_usage_counts_all_processes(tmp_path: Path, launcher: Launcher) -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n    b = bytearray(80_000_000)\nt = time.process_time()\nwhile time.process_time() - t < 0.2: pass\n"
        "if b'' != (globals().get('b') or b''): os._exit(0)\nos.wait()"
    )
    script = write(tmp_path, "a.py", code)
    process = await spawn(launcher, tmp_path, Program("script", str(script), []))
    usage = (await process.wait()).usage
    process.close()
    assert 0.4 <= usage.cpu_seconds < 5
    assert usage.wall_seconds >= 0.2
    assert usage.max_rss_bytes > 80_000_000


@pytest.mark.parametrize("command", [["python"], ["python", "-c", "x"], ["python", "-u", "a.py"], ["python", "-m"]])
def test_other_commands_are_refused(command: list[str]) -> None:
    with pytest.raises(StartError, match=r"\[python, script.py, …\] or \[python, -m, module, …\]"):
        preloaded_program(command)
