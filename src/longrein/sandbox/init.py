"""The first process inside a sandbox: gives up what it can, starts the command, and ends the sandbox with it.

`python -I -S init.pyc OPTIONS COMMAND…`, as process 1 of a process namespace of its own; whatever is still there when it
ends, ends with it. It is on the way of every start: it and `privileges.py` beside it are compiled beforehand, and it imports
what is built in and little else, which is several times faster. OPTIONS is what `marshal` makes of a dict, in hex:

    user      [uid, gid] to become, when this is root; null when it is somebody else already
    limits    resource limits by name without RLIMIT_
    own       folders that the user is to own
    bridge    [port, unix socket]: connections to 127.0.0.1:port are carried to the socket
    alive     descriptor, of a pipe's reading end or of a process: the sandbox ends when the other end, or the process, has
    disk      {folder: most bytes}: the sandbox ends when a folder holds more
    status    descriptor of a file that dicts are written to, one a line: {"started": True} once the command runs,
              {"error": why} when it cannot, {"full": folder, "bytes": n}, {"exit": code} (negative for a signal)

Exit status: the command's, 128 + n for signal n; 127 when it cannot be executed, 125 when the sandbox
cannot be made what it is to be.

Nobody else in the sandbox can look into this process or stop it. SIGTERM is ignored here: whoever ends an attempt sends it to
every process of it.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import marshal
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import privileges  # noqa: E402  # type: ignore[import-not-found]

PIECE = 65536
MOST_BUFFERED = 1 << 20
CONNECT_SECONDS = 10.0
WATCH_SECONDS = 0.2
SMALLEST = 512  # bytes that an empty file counts
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)


class NoCommand(OSError):
    """The command cannot be executed."""


def main(options: dict[str, Any], command: list[str]) -> int:
    status = options.get("status")
    for descriptor in (status, options.get("alive")):
        if descriptor is not None:
            os.set_inheritable(descriptor, False)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    try:
        bridge = Bridge(*options["bridge"]) if options.get("bridge") else None
        wake = _child_signals()
        if options.get("user"):
            for folder in options.get("own", ()):
                os.chown(folder, *options["user"])
        if options.get("user"):
            privileges.become_user(*options["user"])
        else:
            privileges.give_up_capabilities()
        privileges.no_new_privileges()
        privileges.deny_system_calls()
        privileges.set_dumpable(False)
        child = _start(command, options.get("limits") or {})
    except OSError as error:
        _tell(status, {"error": str(error)})
        return 127 if isinstance(error, NoCommand) else 125
    _tell(status, {"started": True})
    code = _serve(child, wake, bridge, options.get("disk") or {}, status, options.get("alive"))
    _tell(status, {"exit": code})
    return code if code >= 0 else 128 - code


def _start(command: list[str], limits: dict[str, int]) -> int:
    """Start the command; its process id. Raises OSError when it cannot be executed."""
    failed, failing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            privileges.set_limits(limits)
            for number in (*IGNORED, signal.SIGCHLD, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.execvpe(command[0], command, os.environ)
        except (OSError, ImportError, ValueError) as error:
            os.write(failing, f"{command[0]} cannot be started: {error}".encode())
        finally:
            os._exit(127)
    os.close(failing)
    problem = b"".join(iter(lambda: os.read(failed, PIECE), b""))
    os.close(failed)
    if problem:
        os.waitpid(child, 0)
        raise NoCommand(problem.decode(errors="replace"))
    return child


def _serve(
    child: int, wake: int, bridge: Bridge | None, disk: dict[str, int], status: int | None, alive: int | None
) -> int:
    """Reap, carry and watch until the command has ended; its exit code, negative for a signal."""
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    if bridge is not None:
        bridge.poll = poll
        poll.register(bridge.listener, select.POLLIN)
    if alive is not None:
        poll.register(alive, select.POLLIN)
    look = time.monotonic() + WATCH_SECONDS if disk else None
    while True:
        wait = None if look is None else max(0.0, look - time.monotonic()) * 1000
        for descriptor, event in poll.poll(wait):
            if descriptor == wake:
                os.read(wake, PIECE)
                for pid, how in _reap():
                    if pid == child:
                        return os.waitstatus_to_exitcode(how)
            elif descriptor == alive:
                return -signal.SIGKILL
            elif bridge is not None:
                bridge.handle(descriptor, event)
        if look is not None and time.monotonic() >= look:
            began = time.monotonic()
            for folder, most in disk.items():
                used = used_bytes(folder)
                if used > most:
                    _tell(status, {"full": folder, "bytes": used})
                    os.kill(-1, signal.SIGKILL)  # all but this process
            look = time.monotonic() + max(WATCH_SECONDS, 10 * (time.monotonic() - began))


def used_bytes(folder: str) -> int:
    """Disk space of what is in a folder, and of what was deleted there and is still open, where that can be seen."""
    device = os.stat(folder).st_dev
    seen: set[int] = set()
    total = 0
    pending = [folder]
    while pending:
        for entry in _listed(pending.pop()):
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:  # gone meanwhile
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            if found.st_ino not in seen:
                seen.add(found.st_ino)
                total += max(found.st_blocks * 512, SMALLEST)
    for process in filter(str.isdigit, os.listdir("/proc")):
        for descriptor in _open_files(process):
            try:
                found = os.stat(descriptor)
            except OSError:
                continue
            if found.st_nlink == 0 and found.st_dev == device and found.st_ino not in seen:
                seen.add(found.st_ino)
                total += found.st_blocks * 512
    return total


def _listed(folder: str) -> list[os.DirEntry[str]]:
    try:
        try:
            return list(os.scandir(folder))
        except PermissionError:  # closed by its own owner, who is this process too
            os.chmod(folder, 0o700)
            return list(os.scandir(folder))
    except OSError:  # gone meanwhile
        return []


def _open_files(process: str) -> list[str]:
    try:
        return [f"/proc/{process}/fd/{descriptor}" for descriptor in os.listdir(f"/proc/{process}/fd")]
    except OSError:  # gone meanwhile, or not to be looked into
        return []


def _reap() -> list[tuple[int, int]]:
    ended = []
    while True:
        try:
            pid, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, how))


def _child_signals() -> int:
    """A descriptor that becomes readable when a child has ended."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return reading


def _tell(status: int | None, message: dict[str, Any]) -> None:
    if "error" in message:
        print(f"longrein sandbox: {message['error']}", file=sys.stderr, flush=True)
    if status is not None:
        os.write(status, repr(message).encode() + b"\n")


class Bridge:
    """Carries connections to a port of this sandbox's own loopback to a unix socket. It is driven by one poll object."""

    def __init__(self, port: int, target: str) -> None:
        self.target = target
        self.poll: Any = None
        self.listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.listener.bind(("127.0.0.1", port))
        self.listener.listen(1024)
        self.listener.setblocking(False)
        self._ends: dict[int, End] = {}

    def handle(self, descriptor: int, event: int) -> None:
        if descriptor == self.listener.fileno():
            self._accept()
        elif descriptor in self._ends:
            end = self._ends[descriptor]
            try:
                if event & select.POLLOUT:
                    end.flush()
                if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    end.carry()
            except OSError:
                self._drop(end)
                return
            if end.done and end.other.done:
                self._drop(end)
                return
            for one in (end, end.other):
                self._watch(one)

    def _accept(self) -> None:
        try:
            near = socket.socket(fileno=self.listener._accept()[0])  # type: ignore[attr-defined]
        except BlockingIOError:  # gone again
            return
        except OSError:  # too many open files: it waits in the queue
            time.sleep(0.05)
            return
        far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        far.settimeout(CONNECT_SECONDS)
        try:
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            far.connect(self.target)
        except OSError:  # the gateway is away: the client sees a connection that was closed
            near.close()
            far.close()
            return
        ends = End(near), End(far)
        ends[0].other, ends[1].other = ends[1], ends[0]
        for end in ends:
            end.socket.setblocking(False)
            self._ends[end.socket.fileno()] = end
            self.poll.register(end.socket, select.POLLIN)
            end.events = select.POLLIN

    def _watch(self, end: End) -> None:
        events = (select.POLLOUT if end.buffer else 0) | (
            0 if end.read_all or len(end.other.buffer) >= MOST_BUFFERED else select.POLLIN
        )
        if events == end.events:
            return
        if end.events and not events:  # without events a hang-up would still be reported, again and again
            self.poll.unregister(end.socket)
        elif events and not end.events:
            self.poll.register(end.socket, events)
        else:
            self.poll.modify(end.socket, events)
        end.events = events

    def _drop(self, end: End) -> None:
        for one in (end, end.other):
            if one.events:
                self.poll.unregister(one.socket)
            del self._ends[one.socket.fileno()]
            one.socket.close()


class End:
    """One end of a carried connection: what is read here is written to `other`."""

    other: End

    def __init__(self, one: socket.socket) -> None:
        self.socket = one
        self.buffer = b""
        """Still to be written here."""
        self.read_all = False
        self.shut = False
        self.events = 0

    @property
    def done(self) -> bool:
        """Whether nothing more comes from here and all of it has been written to the other end."""
        return self.read_all and not self.other.buffer

    def carry(self) -> None:
        try:
            piece = self.socket.recv(PIECE)
        except BlockingIOError:
            return
        if piece:
            self.other.buffer += piece
        else:
            self.read_all = True
        self.other.flush()

    def flush(self) -> None:
        while self.buffer:
            try:
                sent = self.socket.send(self.buffer)
            except BlockingIOError:
                return
            self.buffer = self.buffer[sent:]
        if self.other.read_all and not self.shut:
            self.shut = True
            self.socket.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    os._exit(main(marshal.loads(bytes.fromhex(sys.argv[1])), sys.argv[2:]))
