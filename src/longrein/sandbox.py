"""Runs code that is not trusted: on a copy of its files, without network, credentials, or the rest of the file system.

A grader uses `run` for whatever must execute an agent's code:

    from longrein.sandbox import run
    done = run(["python3", "-m", "pytest", "-q", "tests"], workspace, overlay=HIDDEN_TESTS)
    return float(done.exit_code == 0)

Isolation is bubblewrap's when it is installed, otherwise that of the same Linux namespaces through `unshare` (both want
util-linux' other programs too). Without either `run` raises: it never runs anything unprotected.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MOST_BYTES = 64 * 1024 * 1024
MOST_FILES = 20_000

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SETTINGS = ("/etc/ssl", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")


class SandboxError(Exception):
    """Code cannot be run in isolation here, or its files are more than fit. Says what to do."""


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


def run(
    command: Sequence[str],
    directory: Path,
    overlay: Path | None = None,
    *,
    timeout: float = 60.0,
    limits: Limits = Limits(),
    environment: Mapping[str, str] | None = None,
    most_output: int = 1024 * 1024,
) -> Completed:
    """Run `command` on a fresh copy of `directory`, with the files of `overlay` laid over it, and end all it started.

    The copy is the working directory (/work inside) and is thrown away afterwards. Inside there are /usr and its like
    and the running interpreter's folders, all read-only; an empty /tmp and home; no network, no other process, and of
    the environment only PATH, HOME, LANG and `environment`. Output is cut at `most_output` bytes per stream.

    Raises `SandboxError` when isolation is impossible or the files exceed the bounds of `copy_tree`.
    """
    wrap = _isolation()
    with tempfile.TemporaryDirectory(prefix="longrein-sandbox-") as name:
        folder = Path(name)
        work, root = folder / "work", folder / "root"
        root.mkdir()
        copy_tree(Path(directory), work)
        if overlay is not None:
            lay_over(Path(overlay), work)
        inside = {"PATH": _path(), "HOME": "/home/agent", "LANG": "C.UTF-8", **(environment or {})}
        with (folder / "stdout").open("w+b") as stdout, (folder / "stderr").open("w+b") as stderr:
            process = subprocess.Popen(
                [*_bounds(limits), *wrap(work, root), *command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=inside,
                cwd="/",
                start_new_session=True,
            )
            timed_out = False
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:  # the outer process' death ends the process namespace, and so everything inside
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            code = process.returncode if process.returncode >= 0 else 128 - process.returncode
            return Completed(code, _output(stdout, most_output), _output(stderr, most_output), timed_out)


def copy_tree(source: Path, target: Path, *, most_bytes: int = MOST_BYTES, most_files: int = MOST_FILES) -> None:
    """Copy a folder that somebody else wrote: regular files and folders, and those links that stay inside it.

    Links that lead out, sockets, pipes and devices are left out. `target` must not exist. Raises `SandboxError` when
    there is more than `most_bytes` or `most_files`.
    """
    source = source.resolve()
    target.mkdir(parents=True)
    left_bytes, left_files = most_bytes, most_files
    pending = [(source, target)]
    while pending:
        folder, copy = pending.pop()
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            status = entry.stat(follow_symlinks=False)
            left_files -= 1
            left_bytes -= status.st_size if stat.S_ISREG(status.st_mode) else 0
            if left_files < 0 or left_bytes < 0:
                raise SandboxError(
                    f"{source} holds more than {most_files} files or {most_bytes // 2**20} MiB, which is the most that is "
                    "copied for a grader; have the agent keep large files (environments, caches) outside"
                )
            if stat.S_ISDIR(status.st_mode):
                (copy / entry.name).mkdir()
                pending.append((Path(entry.path), copy / entry.name))
            elif stat.S_ISREG(status.st_mode):
                shutil.copyfile(entry.path, copy / entry.name, follow_symlinks=False)
                os.chmod(copy / entry.name, (status.st_mode & 0o777) | 0o600)
            elif stat.S_ISLNK(status.st_mode) and _stays_inside(Path(entry.path), source):
                os.symlink(os.readlink(entry.path), copy / entry.name)


def _stays_inside(link: Path, source: Path) -> bool:
    text = os.readlink(link)
    if os.path.isabs(text):  # would lead from the copy into the original
        return False
    try:
        return link.resolve().is_relative_to(source)
    except (OSError, RuntimeError):
        return False


def lay_over(overlay: Path, work: Path) -> None:
    """Put the overlay's files over a copied folder; what stands in their way there (links above all) is removed."""
    for folder, folders, files in os.walk(overlay):
        below = Path(folder).relative_to(overlay)
        for name in folders:
            place = work / below / name
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                place.unlink()
            place.mkdir(exist_ok=True)
        for name in files:
            place = work / below / name
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            elif place.is_symlink() or place.exists():
                place.unlink()
            shutil.copy(Path(folder) / name, place)


def _bounds(limits: Limits) -> list[str]:
    """The command prefix that sets the limits, and kills the sandbox with the process that started it."""
    import resource  # not on Windows, where only this part of the module is missing

    options = []
    for name, kind, value in (
        ("cpu", resource.RLIMIT_CPU, limits.cpu_seconds),
        ("fsize", resource.RLIMIT_FSIZE, limits.file_bytes),
        ("nofile", resource.RLIMIT_NOFILE, limits.open_files),
        ("as", resource.RLIMIT_AS, limits.memory_bytes),
        ("core", resource.RLIMIT_CORE, 0),
    ):
        if value is not None:
            hard = resource.getrlimit(kind)[1]
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            options.append(f"--{name}={most}:{most}")
    return ["setpriv", "--pdeathsig", "KILL", "prlimit", *options, "--"]


def _output(stream: IO[bytes], most: int) -> str:
    stream.seek(0)
    return stream.read(most).decode("utf-8", "replace")


def _path() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])


def _read_only() -> list[str]:
    """Host folders and files that are visible inside, none within another."""
    seen: list[str] = []
    for path in (*_SYSTEM, *_SETTINGS, *sorted({sys.prefix, sys.base_prefix, str(Path(sys.base_prefix).resolve())})):
        if os.path.lexists(path) and not any(path.startswith(shown + "/") for shown in seen):
            seen.append(path)
    return seen


@functools.cache
def _isolation() -> Callable[[Path, Path], list[str]]:
    """The function that gives the command prefix for (work, root). Probed once by running `true`."""
    if not sys.platform.startswith("linux"):
        raise SandboxError("longrein.sandbox needs Linux namespaces; run the grader on Linux (WSL2 is)")
    said = []
    for name, wrap in (("bwrap", _bubblewrap), ("unshare", _unshare)):
        if shutil.which(name) is None:
            said.append(f"{name} is not installed")
            continue
        with tempfile.TemporaryDirectory(prefix="longrein-sandbox-") as folder:
            work, root = Path(folder) / "work", Path(folder) / "root"
            work.mkdir()
            root.mkdir()
            probe = subprocess.run(
                [*_bounds(Limits()), *wrap(work, root), "true"],
                capture_output=True,
                text=True,
                cwd="/",
                env={"PATH": _path()},
                check=False,
            )
        if probe.returncode == 0:
            return wrap
        said.append(f"{name} failed: {probe.stderr.strip() or f'exit code {probe.returncode}'}")
    raise SandboxError(
        f"code cannot be isolated on this machine ({'; '.join(said)}). Install bubblewrap, and allow unprivileged user "
        "namespaces if the kernel forbids them"
    )


def _bubblewrap(work: Path, root: Path) -> list[str]:
    binds = [
        a
        for p in _read_only()
        for a in (["--symlink", os.readlink(p), p] if os.path.islink(p) else ["--ro-bind", p, p])
    ]
    return [
        shutil.which("bwrap") or "bwrap",
        *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox"),
        *("--tmpfs", "/tmp", "--dir", "/home/agent"),
        *binds,
        *("--proc", "/proc", "--dev", "/dev", "--bind", str(work), "/work", "--remount-ro", "/", "--chdir", "/work"),
        "--",
    ]


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


def _unshare(work: Path, root: Path) -> list[str]:
    return [
        shutil.which("unshare") or "unshare",
        *("--user", "--map-root-user", "--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child"),
        *("sh", "-c", _ENTER_ROOT, "sh", str(root), str(work), *_read_only(), "--"),
    ]
