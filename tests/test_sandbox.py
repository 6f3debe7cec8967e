"""Untrusted code in the sandbox: what it can see and do, what is laid over its files, and that it ends."""

import os
import shutil
import socket
import sys
from pathlib import Path

import psutil
import pytest

from longrein.sandbox import Limits, SandboxError, copy_tree, lay_over, run
from longrein.sandbox import running as sandbox

try:
    sandbox._isolation()
    reason = ""
except SandboxError as error:
    reason = str(error)

isolated = pytest.mark.skipif(bool(reason), reason=reason)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "answer.py").write_text("VALUE = 41\n")
    return folder


def python(code: str) -> list[str]:
    return ["python", "-c", code]


@isolated
class TestRun:
    def test_a_command_runs_on_a_copy_with_the_overlay_on_top(self, work: Path, tmp_path: Path) -> None:
        overlay = tmp_path / "overlay"
        (overlay / "tests").mkdir(parents=True)
        (overlay / "tests/check.py").write_text(
            "from answer import VALUE; print(VALUE); open('trace', 'w'); exit(VALUE != 42)\n"
        )
        (work / "tests").mkdir()
        (work / "tests/check.py").write_text("exit(0)\n")
        done = run(["python", "-m", "tests.check"], work, overlay)
        assert (done.exit_code, done.stdout, done.timed_out) == (1, "41\n", False), done.stderr
        assert not (work / "trace").exists()
        assert (work / "tests/check.py").read_text() == "exit(0)\n"

    def test_there_is_no_network(self, work: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            done = run(python(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"), work)
        assert done.exit_code == 1
        assert "OSError" in done.stderr or "Error" in done.stderr.splitlines()[-1]
        interfaces = run(python("import socket; print([n for _, n in socket.if_nameindex()])"), work)
        assert interfaces.stdout == "['lo']\n"

    def test_nothing_of_the_host_shows(self, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "key").write_text("secret")
        monkeypatch.setenv("RUN_KEY", "secret")
        code = f"""
import os
print(sorted(os.environ))
print(os.path.exists({str(tmp_path / "key")!r}), os.path.exists("/etc/shadow"), os.listdir("/work"))
print(len([p for p in os.listdir("/proc") if p.isdigit()]) < 6)
for folder in ("/usr", "/"):
    try: open(folder + "/longrein-probe", "w"); print("written")
    except OSError as error: print(error.strerror)
print(open("/proc/self/status").read().split("CapEff:")[1].split()[0])
"""
        done = run(python(code), work, environment={"MINE": "1"})
        lines = done.stdout.splitlines()
        names = set(eval(lines[0])) - {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}
        assert names == {"PATH", "HOME", "LANG", "MINE"}, done.stderr
        assert lines[1] == "False False ['answer.py']"
        assert lines[2:] == ["True", "Read-only file system", "Read-only file system", "0000000000000000"]

    def test_a_timeout_ends_every_process(self, work: Path) -> None:
        mark = f"mark-{os.getpid()}-sandbox"
        code = f"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("started", flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
time.sleep(600)  # {mark}
"""
        done = run(python(code), work, timeout=1.5)
        assert done.timed_out
        assert (done.exit_code, done.stdout) == (137, "started\n")
        assert [p.pid for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or [])] == []

    def test_what_a_command_leaves_behind_ends_with_it(self, work: Path) -> None:
        mark = f"mark-{os.getpid()}-left"
        done = run(["sh", "-c", f"setsid python -c 'import time; time.sleep(600)' {mark} & exit 7"], work)
        assert done.exit_code == 7
        assert [p.pid for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or [])] == []

    def test_signals_output_and_limits(self, work: Path) -> None:
        assert run(["sh", "-c", "kill -SEGV $$"], work).exit_code == 139
        assert run(["sh", "-c", "yes | head -c 100000"], work, most_output=1000).stdout == "y\n" * 500
        big = run(python("open('big', 'wb').write(b'x' * 10_000_000)"), work, limits=Limits(file_bytes=1_000_000))
        assert big.exit_code != 0
        memory = run(python("b = bytearray(10**9)"), work, limits=Limits(memory_bytes=500 * 2**20))
        assert "MemoryError" in memory.stderr

    def test_bubblewrap_is_used_where_it_is_installed(self) -> None:
        if sandbox.bubblewrap.find_bubblewrap() is None:
            pytest.skip("bubblewrap is not installed")
        root = os.geteuid() == 0
        assert sandbox._isolation() is (sandbox._bubblewrap_as_root if root else sandbox._bubblewrap_as_user)

    def test_whoever_runs_inside_has_no_rights(self, work: Path) -> None:
        code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(int(status["CapPrm"], 16), int(status["CapInh"], 16), status["NoNewPrivs"])
print(libc.unshare(0x10000000), libc.ptrace(16, 1, 0, 0))
print(os.getuid())
"""
        done = run(python(code), work)
        assert done.stdout.splitlines()[:2] == ["0 0 1", "-1 -1"], done.stderr
        assert done.stdout.splitlines()[2] == ("65534" if os.geteuid() == 0 else str(os.getuid()))
        assert os.stat(work / "answer.py").st_uid == os.geteuid()

    def test_a_command_that_does_not_exist_is_said(self, work: Path) -> None:
        done = run(["no-such-program"], work)
        assert (done.exit_code, done.timed_out) == (127, False)
        assert "no-such-program cannot be started" in done.stderr


@pytest.mark.parametrize("way", ["_bubblewrap_as_user", "_unshare"])
def test_the_other_ways_of_isolation(work: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "_bubblewrap_as_user" and sandbox.bubblewrap.find_bubblewrap() is None:
        pytest.skip("bubblewrap is not installed")
    if way == "_unshare" and shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    wrap = getattr(sandbox, way)
    monkeypatch.setattr(sandbox, "_isolation", lambda: wrap)
    done = run(python("from answer import VALUE; import os; print(VALUE, os.getcwd())"), work)
    assert (done.exit_code, done.stdout) == (0, "41 /work\n"), done.stderr
    limited = run(python("open('big', 'wb').write(b'x' * 2_000_000)"), work, limits=Limits(file_bytes=1_000_000))
    assert limited.exit_code != 0


def test_without_isolation_nothing_runs(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox._isolation.cache_clear()
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    monkeypatch.setattr(sandbox.bubblewrap, "find_bubblewrap", lambda: None)
    with pytest.raises(SandboxError, match="Install bubblewrap"):
        run(["touch", "ran"], work)
    sandbox._isolation.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="Linux"):
        run(["touch", "ran"], work)
    sandbox._isolation.cache_clear()


def test_copies_keep_no_way_out(work: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (work / "sub").mkdir()
    (work / "run.sh").write_text("#!/bin/sh\n")
    (work / "run.sh").chmod(0o755)
    (work / "sub/inside").symlink_to("../answer.py")
    (work / "out").symlink_to("../secret")
    (work / "absolute").symlink_to(work / "answer.py")
    (work / "loop").symlink_to("loop")
    os.mkfifo(work / "pipe")
    copy_tree(work, tmp_path / "copy")
    names = sorted(str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*"))
    assert [n for n in names if n != "loop"] == ["answer.py", "run.sh", "sub", "sub/inside"]
    assert (tmp_path / "copy/sub/inside").read_text() == "VALUE = 41\n"
    assert os.access(tmp_path / "copy/run.sh", os.X_OK)


def test_copies_are_bounded(work: Path, tmp_path: Path) -> None:
    (work / "big").write_bytes(b"x" * 2000)
    with pytest.raises(SandboxError, match="MiB"):
        copy_tree(work, tmp_path / "a", most_bytes=1000)
    with pytest.raises(SandboxError, match="more than 1 files"):
        copy_tree(work, tmp_path / "b", most_files=1)


def test_an_overlay_is_not_written_through_links(work: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "conftest.py").write_text("old")
    overlay = tmp_path / "overlay"
    (overlay / "tests").mkdir(parents=True)
    (overlay / "tests/conftest.py").write_text("new")
    (overlay / "setup.cfg").write_text("new")
    (work / "tests").symlink_to(outside)
    (work / "setup.cfg").symlink_to(outside / "conftest.py")
    lay_over(overlay, work)
    assert (outside / "conftest.py").read_text() == "old"
    assert (work / "tests/conftest.py").read_text() == "new"
    assert (work / "setup.cfg").read_text() == "new"
