"""One command on a fresh copy of a folder, isolated, and ended with all that it started."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from longrein.sandbox import bubblewrap
from longrein.sandbox.copying import SandboxError, copy_tree, lay_over

#: Whom graded code runs as when this process is root; it sees no other process of that user.
NOBODY = (65534, 65534)
END_SECONDS = 5.0


@dataclass(frozen=True)
class Completed:
    """What a sandboxed command did. `exit_code` is 128 + n for signal n, as a shell gives it."""

    exit_code: int
    stdout: str
    stderr: str
    timed_out: bool


@dataclass(frozen=True)
class Limits:
    """Of each process in the sandbox. Memory is address space, which Node.js and PyTorch need much of: None sets none."""

    cpu_seconds: int = 300
    file_bytes: int = 256 * 1024 * 1024
    open_files: int = 1024
    memory_bytes: int | None = None

    def by_name(self) -> dict[str, int]:
        """As resource limits without their RLIMIT_."""
        named = {"CPU": self.cpu_seconds, "FSIZE": self.file_bytes, "NOFILE": self.open_files, "CORE": 0}
        return named | ({} if self.memory_bytes is None else {"AS": self.memory_bytes})


#: From the copied folder, an empty one for a root, the limits, and the descriptor of a pipe whose other end is closed when
#: the sandbox is to end: the words that a command is put behind.
Wrap = Callable[[Path, Path, Limits, int], list[str]]


def run(
    command: Sequence[str],
    directory: Path,
    overlay: Path | None = None,
    *,
    timeout: float = 60.0,
    limits: Limits = Limits(),
    environment: Mapping[str, str] | None = None,
    most_output: int = 1024 * 1024,
    prepare: Callable[[Path], None] | None = None,
) -> Completed:
    """Run `command` on a fresh copy of `directory`, with the files of `overlay` laid over it, and end all it started.

    The copy is the working directory (/work inside) and is thrown away afterwards; `prepare` may change it before the
    overlay is laid on. Inside there are /usr and its like and the running interpreter's folders, all read-only; an empty
    /tmp and home; no network, no other process, and of the environment only PATH, HOME, LANG and `environment`. Output is
    cut at `most_output` bytes per stream.

    Raises `SandboxError` when isolation is impossible or the files exceed the bounds of `copy_tree`.
    """
    wrap = _isolation()
    with tempfile.TemporaryDirectory(prefix="longrein-sandbox-") as name:
        folder = Path(name)
        work, root = folder / "work", folder / "root"
        root.mkdir()
        copy_tree(Path(directory), work)
        if prepare is not None:
            prepare(work)
        if overlay is not None:
            lay_over(Path(overlay), work)
        if wrap is _bubblewrap_as_root:
            _give(work, *NOBODY)
        inside = {"PATH": _path(), "HOME": "/home/agent", "LANG": "C.UTF-8", **(environment or {})}
        with (folder / "stdout").open("w+b") as stdout, (folder / "stderr").open("w+b") as stderr:
            alive, holding = os.pipe()
            try:
                process = subprocess.Popen(
                    [*wrap(work, root, limits, alive), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=inside,
                    cwd="/",
                    start_new_session=True,
                    pass_fds=[alive],
                )
            except BaseException:
                os.close(holding)
                raise
            finally:
                os.close(alive)
            timed_out = False
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                os.close(holding)  # the first process inside ends, and the process namespace with it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS if wrap is not _unshare else 0)
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            code = process.returncode if process.returncode >= 0 else 128 - process.returncode
            return Completed(code, _output(stdout, most_output), _output(stderr, most_output), timed_out)


def _give(work: Path, uid: int, gid: int) -> None:
    os.chown(work, uid, gid)
    for folder, folders, files in os.walk(work):
        for name in (*folders, *files):
            os.chown(os.path.join(folder, name), uid, gid, follow_symlinks=False)


def _output(stream: IO[bytes], most: int) -> str:
    stream.seek(0)
    return stream.read(most).decode("utf-8", "replace")


def _path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])


@functools.cache
def _isolation() -> Wrap:
    """The way of isolation that works here, found by running `true` in each."""
    if not sys.platform.startswith("linux"):
        raise SandboxError("longrein.sandbox needs Linux namespaces; run the grader on Linux (WSL2 is)")
    ways: list[tuple[str, str | None, Wrap]] = [
        ("bwrap", bubblewrap.find_bubblewrap(), _bubblewrap_as_user),
        ("unshare", shutil.which("unshare"), _unshare),
    ]
    if os.geteuid() == 0:
        ways.insert(0, ("bwrap as root", ways[0][1], _bubblewrap_as_root))
    said = []
    for name, program, wrap in ways:
        if program is None:
            said.append(f"{name} is not installed")
            continue
        with tempfile.TemporaryDirectory(prefix="longrein-sandbox-") as folder:
            work, root = Path(folder) / "work", Path(folder) / "root"
            work.mkdir()
            root.mkdir()
            alive, holding = os.pipe()
            probe = subprocess.run(
                [*wrap(work, root, Limits(), alive), "true"],
                capture_output=True,
                text=True,
                cwd="/",
                env={"PATH": _path()},
                check=False,
                pass_fds=[alive],
            )
            os.close(alive)
            os.close(holding)
        if probe.returncode == 0:
            return wrap
        said.append(f"{name} failed: {probe.stderr.strip() or f'exit code {probe.returncode}'}")
    raise SandboxError(
        f"code cannot be isolated on this machine ({'; '.join(said)}). Install bubblewrap (your distribution's, or pip "
        "install 'longrein[sandbox]'), and allow unprivileged user namespaces if the kernel forbids them"
    )


def _bubblewrap_as_root(work: Path, root: Path, limits: Limits, alive: int) -> list[str]:
    """Mounts by root, then another user without capabilities. User namespaces are not needed."""
    return [
        *_bubblewrap(work),
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *(word for name in ("SETUID", "SETGID", "SETPCAP", "CHOWN") for word in ("--cap-add", f"CAP_{name}")),
        "--",
        *bubblewrap.init_command({"user": NOBODY, "own": ["/home/agent"], "limits": limits.by_name(), "alive": alive}),
    ]


def _bubblewrap_as_user(work: Path, root: Path, limits: Limits, alive: int) -> list[str]:
    return [
        *_bubblewrap(work),
        "--unshare-all",
        *("--cap-drop", "ALL"),
        "--",
        *bubblewrap.init_command({"limits": limits.by_name(), "alive": alive}),
    ]


def _bubblewrap(work: Path) -> list[str]:
    return [
        bubblewrap.find_bubblewrap() or "bwrap",
        *("--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox"),
        *("--perms", "1777", "--tmpfs", "/tmp", "--tmpfs", "/home/agent"),
        *bubblewrap.binds(bubblewrap.read_only()),
        *bubblewrap.init_binds(),
        *("--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm"),
        *("--bind", str(work), "/work", "--remount-ro", "/", "--chdir", "/work"),
    ]


def _bounds(limits: Limits) -> list[str]:
    """The command prefix that sets the limits, and kills the sandbox with the process that started it."""
    import resource  # not on Windows, where only this part of the module is missing

    options = []
    for name, value in limits.by_name().items():
        hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        options.append(f"--{name.lower()}={most}:{most}")
    return ["setpriv", "--pdeathsig", "KILL", "prlimit", *options, "--"]


# Builds a root of its own from read-only binds, enters it and drops all capabilities. $1 root, $2 work, $3… binds up
# to "--", then the command, which is no namespace's first process: signals work in it as elsewhere.
_ENTER_ROOT = """\
set -e
root=$1 work=$2
shift 2
mount --make-rprivate /
mount -t tmpfs -o mode=755 sandbox "$root"
mkdir -p "$root/tmp" "$root/home" "$root/proc" "$root/dev" "$root/work"
mount -t tmpfs -o size=1g tmp "$root/tmp"
mount -t tmpfs -o size=1g home "$root/home"
mkdir "$root/home/agent"
while [ "$1" != -- ]; do
    if [ -L "$1" ]; then
        mkdir -p "$root${1%/*}"
        cp -P "$1" "$root$1"
    else
        if [ -d "$1" ]; then mkdir -p "$root$1"; else mkdir -p "$root${1%/*}"; : > "$root$1"; fi
        mount --bind "$1" "$root$1"
        mount -o remount,bind,ro "$root$1"
    fi
    shift
done
shift
for device in null zero full random urandom; do
    : > "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mount --bind "$work" "$root/work"
mount -t proc proc "$root/proc"
mount -o remount,ro "$root"
cd "$root"
PATH=$PATH:/usr/sbin:/sbin pivot_root . .
umount -l .
cd /work
set +e
setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
exit $?
"""


def _unshare(work: Path, root: Path, limits: Limits, alive: int) -> list[str]:
    return [
        *_bounds(limits),
        shutil.which("unshare") or "unshare",
        *("--user", "--map-root-user", "--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child"),
        *("sh", "-c", _ENTER_ROOT, "sh", str(root), str(work), *bubblewrap.read_only(), "--"),
    ]
