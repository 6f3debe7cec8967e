"""The process that starts agents, and the one that watches each of them. Run as a file; standard library only.

The controller starts one *launcher* (`main`) and sends it, for every attempt, one end of a socket pair. For each the
launcher forks a *supervisor* that reads the request from its socket, forks the agent, and stays until every process of
the attempt is gone:

    controller ─ launcher (imports agent.preload once)
                   └ supervisor of an attempt (subreaper: orphans of the agent come to it) ─ agent ─ whatever it starts

A supervisor talks to the controller alone. So the death of the launcher ends no running agent, and the death of the
controller, which closes the sockets, ends all of them. Being the subreaper, the supervisor also finds processes that
left the agent's process group and session by a double fork.

Messages are lines of JSON. Request: `{"program": [kind, target, arguments], "environment", "directory", "stdout",
"stderr", "limits"}`, perhaps `"confine"` (see ../sandbox/privileges.py), kind `exec` (any command) or, in an interpreter with
preloaded modules, `script`, `module` or `code` (what `python FILE`, `python -m MODULE` and `python -c CODE` run). Answers: `{"pid"}` once the agent runs, or
`{"error"}`; then `{"exit_code", "wall_seconds", "cpu_seconds", "max_rss_bytes"}` when all is gone. The controller may
send `{"end": grace_seconds}`: SIGTERM to all processes of the attempt, SIGKILL to what is left after the grace.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import io
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import threading
import time
import types


def load_privileges() -> types.ModuleType:
    """The file beside the sandbox's own, without Longrein, which an agent's interpreter may not have."""
    file = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "sandbox", "privileges.py")
    loader = importlib.machinery.SourceFileLoader("longrein_privileges", file)
    module = types.ModuleType(loader.name)
    loader.exec_module(module)
    return module


privileges = load_privileges()

PR_SET_CHILD_SUBREAPER = 36
UNKILLABLE_SECONDS = 10.0


def main(control_fd: int, modules: list[str]) -> dict | None:
    """Serve start requests until the controller closes the control socket. Returns only in an agent: its request."""
    control = socket.socket(fileno=control_fd)
    os.set_inheritable(control_fd, False)
    become_subreaper()
    if modules:
        sockets = open_sockets()
        problem = preload(modules) or unfit_to_fork(sockets)
        if problem:
            send(control, {"error": problem})
            sys.exit(1)
    flush_output()
    gc.collect()
    gc.freeze()
    wake = child_signals()
    send(control, {"ready": True, "pid": os.getpid()})
    supervisors: set[int] = set()
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            reap_supervisors(supervisors)
        if control not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        if (pid := os.fork()) == 0:
            control.close()
            return supervise(socket.socket(fileno=descriptors[0]), wake)
        supervisors.add(pid)
        os.close(descriptors[0])
    while supervisors:  # each ends by itself: its own socket is closed too, or its attempt goes on
        select.select([wake], [], [])
        os.read(wake, 4096)
        reap_supervisors(supervisors)
    os._exit(0)


def reap_supervisors(supervisors: set[int]) -> None:
    ended = [pid for pid, _ in reap()]
    supervisors.difference_update(ended)
    if ended:  # a supervisor that was killed leaves its agents to the launcher
        for pid in descendants(os.getpid(), but_not=supervisors):
            kill(pid, signal.SIGKILL)


def preload(modules: list[str]) -> str | None:
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:
            return f"agent.preload: importing {module} failed: {type(error).__name__}: {error}"
    return None


def unfit_to_fork(sockets_before: set[int]) -> str | None:
    """Why this process cannot be forked after its imports, or None.

    Threads of libraries that end them at a fork by themselves (OpenBLAS) are harmless: a trial fork tells.
    """
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    if not threads:
        threads = native_threads()
    if threads:
        return (
            f"agent.preload: importing the modules left threads running ({', '.join(threads)}), which a fork would "
            "lose; leave the module that starts them out of agent.preload"
        )
    if open_sockets() - sockets_before:
        return (
            "agent.preload: importing the modules left a socket open, which all agents would share; leave the module "
            "that opens it out of agent.preload"
        )
    return None


def native_threads() -> list[str]:
    try:
        ids = os.listdir("/proc/self/task")
    except OSError:
        return []
    return [f"native thread {i}" for i in ids if int(i) != os.getpid()]


def open_sockets() -> set[int]:
    found = set()
    for fd in range(3, 1024):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                found.add(fd)
        except OSError:
            continue
    return found


def supervise(channel: socket.socket, wake: int) -> dict | None:
    """Start one agent and stay until nothing of it is left. Returns only in a preloaded agent: its request."""
    line = b""
    while not line.endswith(b"\n"):
        piece = channel.recv(65536)
        if not piece:
            os._exit(0)
        line += piece
    request = json.loads(line)
    become_subreaper()
    os.close(wake)
    wake = child_signals()
    failed, failing = os.pipe()
    started = time.monotonic()
    agent = os.fork()
    if agent == 0:
        try:
            channel.close()
            os.close(wake)
            reset_signals()
            enter(request)
            if request["program"][0] == "exec":
                execute(request)
            os.close(failed)
            os.close(failing)
            return request
        except BaseException as error:
            os.write(failing, f"{type(error).__name__}: {error}".encode())
            os._exit(127)
    os.close(failing)
    problem = b"".join(iter(lambda: os.read(failed, 4096), b""))
    os.close(failed)
    if problem:
        os.waitpid(agent, 0)
        send(channel, {"error": problem.decode(errors="replace")})
        os._exit(0)
    send(channel, {"pid": agent})
    status = watch(channel, agent, wake)
    ended = time.monotonic()
    end_all(wake)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = {
        "exit_code": os.waitstatus_to_exitcode(status),
        "wall_seconds": ended - started,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "max_rss_bytes": used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }
    send(channel, report)
    os._exit(0)


def watch(channel: socket.socket, agent: int, wake: int) -> int:
    """Wait until the agent's main process has ended; its wait status."""
    kill_at: float | None = None
    listening = True
    while True:
        wait = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        ready, _, _ = select.select([channel, wake] if listening else [wake], [], [], wait)
        if wake in ready:
            os.read(wake, 4096)
            for pid, status in reap():
                if pid == agent:
                    return status
        if listening and channel in ready:
            try:
                message = channel.recv(4096)
            except OSError:
                message = b""
            if message:
                signal_all(signal.SIGTERM)
                kill_at = time.monotonic() + json.loads(message.splitlines()[0])["end"]
            else:  # the controller is gone
                listening = False
                kill_at = time.monotonic()
        if kill_at is not None and time.monotonic() >= kill_at:
            signal_all(signal.SIGKILL)
            kill_at = time.monotonic() + 0.05


def end_all(wake: int) -> None:
    """Kill what the agent left behind, again and again until there is nothing: a process may fork before it dies."""
    give_up = time.monotonic() + UNKILLABLE_SECONDS
    while time.monotonic() < give_up:
        reap()
        if not signal_all(signal.SIGKILL):
            return
        if select.select([wake], [], [], 0.02)[0]:
            os.read(wake, 4096)


def signal_all(number: int) -> int:
    """Signal every process of this supervisor's attempt; how many there were."""
    pids = descendants(os.getpid())
    for pid in pids:
        kill(pid, number)
        if number == signal.SIGTERM:
            kill(pid, signal.SIGCONT)
    return len(pids)


def descendants(root: int, but_not: set[int] | frozenset[int] = frozenset()) -> list[int]:
    """Processes below `root`, parents first, without `but_not` and what is below those."""
    found: list[int] = []
    pending = [root]
    while pending:
        parent = pending.pop(0)
        children = [pid for pid in children_of(parent) if pid not in but_not]
        found += children
        pending += children
    return found


def children_of(pid: int) -> list[int]:
    if sys.platform != "linux":
        import psutil

        try:
            return [child.pid for child in psutil.Process(pid).children()]
        except psutil.Error:
            return []
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass  # it ended meanwhile; its children come to this process
    return found


def reap() -> list[tuple[int, int]]:
    ended = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def kill(pid: int, number: int) -> None:
    # Gone, or another user's: the kernel refuses what this process may not do.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def become_subreaper() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def child_signals() -> int:
    """A descriptor that becomes readable when a child has ended."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, True)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if before >= 0:  # the launcher's, inherited
        os.close(before)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return reading


def reset_signals() -> None:
    """Signals as a fresh interpreter has them, the wake-up pipe closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    writing = signal.set_wakeup_fd(-1)
    os.close(writing)


def enter(request: dict) -> None:
    """Session, log files, limits, user and directory of the agent."""
    os.setsid()
    for fd, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(name, flags, 0o644)
        os.dup2(opened, fd, inheritable=True)
        os.close(opened)
    for name, value in request["limits"].items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (soft, soft))
    if request.get("confine"):
        privileges.confine(request["confine"])
    os.chdir(request["directory"])


def execute(request: dict) -> None:
    _, target, arguments = request["program"]
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them; an exec would hand that on
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execve(target, arguments, request["environment"])


def become(request: dict) -> None:
    """Run an agent's Python program in this forked interpreter as a fresh one would run it as `__main__`."""
    kind, target, arguments = request["program"]
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    refresh_randomness()
    preloaded = set(sys.modules)
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    sys.modules["__main__"] = module
    safe_path = getattr(sys.flags, "safe_path", False)
    if kind == "module":
        sys.argv = ["-m", *arguments]
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        import runpy

        def work() -> None:
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what `python -m` itself calls

    else:
        if kind == "script":
            sys.argv = [target, *arguments]
            entry = os.path.dirname(os.path.realpath(target))
            module.__file__ = os.path.abspath(target)
            module.__dict__["__cached__"] = None
            module.__loader__ = importlib.machinery.SourceFileLoader("__main__", module.__file__)
        else:
            sys.argv = ["-c", *arguments]
            entry = ""
        if not safe_path:
            sys.path.insert(0, entry)

        def work() -> None:
            exec(compiled(kind, target), sys.modules["__main__"].__dict__)

    try:
        work()
        status = 0
    except SystemExit as error:
        status = exit_status(error)
    except BaseException as error:
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        show(error)
    del module  # so that nothing but the program itself holds its objects
    leave(status, preloaded)


def exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stdout.flush()
    print(error.code, file=sys.stderr)
    return 1


def show(error: BaseException) -> None:
    """Report an uncaught exception as the interpreter does, without this file's own frames."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException:
        sys.__excepthook__(type(error), error, trace)


def leave(status: int, preloaded: set[str]) -> None:
    """End as an interpreter ends: threads, exit functions, the program's own objects, output, in this order.

    Only the preloaded modules are not taken apart, which would copy and free all their memory in every agent (100 ms for
    the OpenAI Agents SDK) and do nothing that anybody sees.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flushed = flush_output()
    for name in ("last_type", "last_value", "last_traceback"):
        setattr(sys, name, None)
    for name in set(sys.modules) - preloaded | {"__main__"}:
        del sys.modules[name]
    # What was there at the fork is frozen: both calls see the program's own objects only.
    for thing in gc.get_objects():
        if issubclass(type(thing), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(OSError, ValueError):
                thing.flush()  # a cycle's parts are finalized in any order, the file below before its text
    gc.collect()
    flushed = flush_output() and flushed
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if flushed else 120)


def compiled(kind: str, target: str) -> types.CodeType:
    if kind == "code":
        return compile(target, "<string>", "exec", dont_inherit=True)
    try:
        with io.open_code(os.path.abspath(target)) as file:
            source = file.read()
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file {os.path.abspath(target)!r}: {why}", file=sys.stderr)
        sys.exit(2)
    return compile(source, target, "exec", dont_inherit=True)


def refresh_randomness() -> None:
    """Give this fork random states of its own. `random` reseeds itself at a fork; OpenSSL and uuid4 use the system's."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
    if "ssl" in sys.modules:
        sys.modules["ssl"].RAND_add(os.urandom(32), 32.0)
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "tempfile" in sys.modules:  # it remembers the TMPDIR it first saw
        sys.modules["tempfile"].__dict__["tempdir"] = None


def flush_output() -> bool:
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except (OSError, ValueError):
        return False
    return True


def send(channel: socket.socket, message: dict) -> None:
    with contextlib.suppress(OSError):  # the controller is gone, which the reader's loop sees too
        channel.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    del sys.path[0]  # this file's folder, which a script would not have
    _request = main(int(sys.argv[1]), sys.argv[2:])
    if _request is not None:
        become(_request)
