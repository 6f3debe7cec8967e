"""What a process gives up before it becomes somebody else's: files that it sees, its user, its capabilities, system calls.

Linux only, by system calls through ctypes. Standard library only: the launcher of agents loads this file by its path, and
so does the first process inside a sandbox.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 24, 22, 38
CAPABILITY_VERSION_3 = 0x20080522
EPERM, ENOSYS = 1, 38
O_PATH = getattr(os, "O_PATH", 0)

#: Per machine: the name of its system calls' table, and the numbers that the filter speaks of.
_CALLS = {
    "x86_64": (0xC000003E, {"clone": 56, "unshare": 272, "clone3": 435, "setns": 308}, True),
    "aarch64": (0xC00000B7, {"clone": 220, "unshare": 97, "clone3": 435, "setns": 268}, False),
}
#: Of no use to an agent, and where kernels were broken most often: (x86_64, aarch64).
_NEVER = {
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}

#: Where a sandbox's first process finds the file that it reports to; far from what libraries open.
STATUS_FD = 63
#: And one that becomes readable when whoever watches the attempt is gone.
WATCH_FD = 62

_loaded: list[Any] = []


def libc() -> Any:
    if not _loaded:
        _loaded.append(ctypes.CDLL(None, use_errno=True))
    return _loaded[0]


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# --- The user ---------------------------------------------------------------------------------------------------------


def become_user(uid: int, gid: int) -> None:
    """Be this user for good, in no further group and without any capability."""
    for capability in range(64):
        if libc().prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            if ctypes.get_errno() == EPERM:
                raise PermissionError(EPERM, "capabilities cannot be given up without CAP_SETPCAP")
            break  # the kernel knows no more of them
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    give_up_capabilities()


def give_up_capabilities() -> None:
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    _checked(libc().capset(header, bytes(24)), "capset")


def no_new_privileges() -> None:
    """Set-uid programs and file capabilities give nothing from now on."""
    _checked(libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def set_dumpable(value: bool) -> None:
    """Whether processes of the same user may look into this one. A change of user turns it off."""
    libc().prctl(PR_SET_DUMPABLE, int(value), 0, 0, 0)


def set_limits(limits: dict[str, int]) -> None:
    """Resource limits by their names without RLIMIT_, soft and hard, no higher than they are."""
    import resource  # not on Windows, where only constants of this module are used

    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))


# --- System calls -----------------------------------------------------------------------------------------------------


def deny_system_calls() -> None:
    """No user namespaces from now on (they give every capability inside), no other machine's calls, no exotic ones.

    Needs `no_new_privileges` before it. Raises OSError on a machine whose calls are not known here.
    """
    machine = os.uname().machine
    if machine not in _CALLS:
        raise OSError(f"system calls of {machine} are not known; the sandbox knows {', '.join(_CALLS)}")
    architecture, numbers, has_x32 = _CALLS[machine]
    program = _filter(architecture, numbers, [pair[0 if has_x32 else 1] for pair in _NEVER.values()], has_x32)
    code = ctypes.create_string_buffer(b"".join(program), 8 * len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    described = Program(len(program), ctypes.addressof(code))
    _checked(libc().prctl(PR_SET_SECCOMP, 2, ctypes.byref(described), 0, 0), "seccomp")


def _filter(architecture: int, numbers: dict[str, int], never: list[int], has_x32: bool) -> list[bytes]:
    """A seccomp program (classic BPF). Jumps are relative to the next instruction."""
    allow, refuse = 0x7FFF0000, 0x00050000

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def jump(code: int, value: int, true: int, false: int) -> bytes:
        return struct.pack("HBBI", code, true, false, value)

    def answer(value: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, value)

    equal, at_least, any_bit = 0x15, 0x35, 0x45
    # struct seccomp_data: nr at 0, arch at 4, the arguments' lower halves at 16, 24, … on little-endian machines.
    program = [load(4), jump(equal, architecture, 1, 0), answer(refuse | EPERM), load(0)]
    if has_x32:
        program += [jump(at_least, 0x40000000, 0, 1), answer(refuse | ENOSYS)]
    program += [jump(equal, numbers["clone3"], 0, 1), answer(refuse | ENOSYS)]  # libraries then use clone
    for number in [numbers["setns"], *never]:
        program += [jump(equal, number, 0, 1), answer(refuse | EPERM)]
    for number in (numbers["clone"], numbers["unshare"]):
        program += [
            jump(equal, number, 0, 4),
            load(16),
            jump(any_bit, CLONE_NEWUSER, 0, 1),
            answer(refuse | EPERM),
            answer(allow),
        ]
    return [*program, answer(allow)]


# --- Files ------------------------------------------------------------------------------------------------------------


def private_mounts(hide: list[str], show: list[tuple[str, str, bool]]) -> None:
    """In a mount namespace of this process's own: empty folders in place of `hide`, with only `show` in them.

    `show` is (what, where, writable), also for what is not below a hidden folder; the deeper path wins. Needs
    CAP_SYS_ADMIN, and leaves the rest of the machine alone.
    """
    _checked(libc().unshare(CLONE_NEWNS), "unshare")
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    held = {what: os.open(what, O_PATH | os.O_CLOEXEC) for what, _, _ in show}  # before anything hides them
    steps = [(path, None, False) for path in hide] + [(where, what, writable) for what, where, writable in show]
    hidden = []
    for where, what, writable in sorted(steps, key=lambda step: step[0].rstrip("/").split("/")):
        if what is None:
            if not os.path.isdir(where):
                continue  # it went with a folder above it
            _mount("longrein", where, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
            hidden.append(where)
            continue
        source = f"/proc/self/fd/{held[what]}"
        _make_place(where, os.path.isdir(source))
        _mount(source, where, None, MS_BIND | MS_REC)
        if not writable:
            kept = os.statvfs(where).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)  # may not be taken away everywhere
            _mount(None, where, None, MS_BIND | MS_REMOUNT | MS_RDONLY | kept)
    for where in hidden:
        _mount(None, where, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    for descriptor in held.values():
        os.close(descriptor)


def _make_place(where: str, is_folder: bool) -> None:
    if os.path.lexists(where):
        return
    before = os.umask(0o022)
    try:
        os.makedirs(where if is_folder else os.path.dirname(where), mode=0o755, exist_ok=True)
        if not is_folder:
            os.close(os.open(where, os.O_WRONLY | os.O_CREAT, 0o644))
    finally:
        os.umask(before)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [word.encode(sys.getfilesystemencoding()) if word is not None else None for word in (source, target, kind)]
    text = data.encode() if data is not None else None
    _checked(libc().mount(*words, ctypes.c_ulong(flags), text), f"mount {target}")


# --- All of it, for an agent that the launcher starts -----------------------------------------------------------------


def confine(plan: dict[str, Any]) -> None:
    """Carry out what the controller planned for this process, which is about to become an agent.

    `cgroups`: `cgroup.procs` files to be written to. `hide` and `show`: see `private_mounts`. `user`: [uid, gid].
    `status`: a file that stays open for a sandbox's first process as the descriptor `STATUS_FD`, beside `WATCH_FD`, which
    tells when this process's parent has ended. `ignore`: numbers of signals that the program is to ignore.
    """
    import signal

    for file in plan.get("cgroups", ()):
        with open(file, "w") as procs:
            procs.write(str(os.getpid()))
    if "status" in plan:
        parent = os.pidfd_open(os.getppid())
        os.dup2(os.open(plan["status"], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), STATUS_FD, inheritable=True)
        os.dup2(parent, WATCH_FD, inheritable=True)
    for number in plan.get("ignore", ()):
        signal.signal(number, signal.SIG_IGN)
    if plan.get("hide") or plan.get("show"):
        private_mounts(plan.get("hide", []), [tuple(entry) for entry in plan.get("show", [])])
    if "user" in plan:
        become_user(*plan["user"])
        no_new_privileges()
        set_dumpable(True)  # as any process of that user is; the change of user had turned it off
