"""A Python that has imported an engine already: processes started through it are forks, so that none imports it again.

An engine of two ranks imports its framework five times, 8 CPU seconds each. `Warm` runs one process that imports it
once and forks on request; `Warm.python` is a small executable that takes Python's own arguments, hands them over with
its environment, folder and open files, and stands in for the fork: it passes on signals, and ends as it ends, and the fork
ends when it is killed. What reads its environment while it is imported sees that of the `Warm` process. Not for tests of what
a dead process leaves behind: a fork is no child of the process that asked for it.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing.spawn
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .calm import calm_nixl

#: names the executable to the processes of a program that was started warm
VARIABLE = "RDT_TESTBED_WARM_PYTHON"
_LENGTH = struct.Struct("!I")
_MOST_FDS = 250
_ASKING_S = 30.0
_VALUED = ("-W", "-X")
#: modules that do without Ray where it cannot be imported: each fork imports them again
_TAKE_RAY = ("vllm.v1.executor.ray_utils",)

# runs without `site` and before anything else, so it takes 20 ms
_STAND_IN = """#!{python} -IS
import array, json, os, signal, socket, struct, sys
if any("resource_tracker" in argument for argument in sys.argv):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])  # small, and known by its command line
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.connect({path!r})
fds = []
for name in os.listdir("/proc/self/fd"):
    try:
        if os.get_inheritable(int(name)):
            fds.append(int(name))
    except OSError:
        pass
asked = {{"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "fds": fds, "nice": os.nice(0)}}
asked = json.dumps(asked).encode()
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
connection.sendmsg([struct.pack("!I", len(asked))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
connection.sendall(asked)
for fd in fds:
    if fd > 2:
        os.close(fd)
answers = connection.makefile()
pid = int(answers.readline() or 0)
if not pid:
    sys.exit("the process to fork from refused, or is gone")
def forward(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, forward)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
status = int(answers.readline() or 9)
number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
if number:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
os._exit(os.WEXITSTATUS(status))
"""


def python() -> str:
    """What a program starts another one with, forked as it was itself."""
    return os.environ.get(VARIABLE, sys.executable)


class Warm:
    """One process that has imported what its forks need. A context manager.

    Args:
        modules: imported, in this order. None of them may start a thread.
        environment: in which they are imported, added to this process's.

    Attributes:
        python: the executable.
    """

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        path = str(Path(self._folder.name) / "socket")
        self.python = str(Path(self._folder.name) / "python")
        Path(self.python).write_text(_STAND_IN.format(python=sys.executable, path=path))
        Path(self.python).chmod(0o700)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rdt_testbed.warm", path, self.python, *modules],
            env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.close()
            raise AssertionError(f"importing {', '.join(modules)} failed")

    @property
    def variables(self) -> dict[str, str]:
        """For the environment of a program that is to start its own processes, and its Ray workers, warm as well."""
        return {
            VARIABLE: self.python,
            "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"py_executable": self.python}}),
        }

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process and every fork."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


class _Forker:
    """The process: forks for each connection, and tells it how the fork ended. Single-threaded."""

    def __init__(self, path: str, python: str) -> None:
        self.python = python
        self.children: dict[int, socket.socket] = {}
        self.silent: set[int] = set()  # forks whose stand-in is gone
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        self.listener.listen(64)
        self.reader, self.writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.selector = selectors.DefaultSelector()
        for source in (self.listener, self.reader, 0):
            self.selector.register(source, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)

    def serve(self) -> dict[str, Any] | None:
        """Returns in a fork what was asked for; None when the owner has closed the pipe of the standard input."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj == 0:
                    for pid in self.children:
                        os.kill(pid, signal.SIGKILL)
                    return None
                if key.fileobj is self.listener:
                    if (asked := self._fork()) is not None:
                        return asked
                elif key.fileobj == self.reader:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.reader, 4096)
                    self._reap()
                else:
                    self._killed(key.fileobj)

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self.listener.accept()
        connection.settimeout(_ASKING_S)
        fds: array.array[int] = array.array("i")
        try:
            head, ancillary, flags, _ = connection.recvmsg(_LENGTH.size, socket.CMSG_SPACE(_MOST_FDS * fds.itemsize))
            for _, _, data in ancillary:
                fds.frombytes(data)
            length = _LENGTH.unpack(head)[0]
            body = b""
            while len(body) < length:
                if not (part := connection.recv(length - len(body))):
                    raise OSError("who asked is gone")
                body += part
            if flags & socket.MSG_CTRUNC:
                raise OSError(f"more than {_MOST_FDS} open files")
        except (OSError, struct.error) as error:
            sys.stderr.write(f"no fork: {error}\n")
            connection.close()
            return None
        asked: dict[str, Any] = json.loads(body)
        pid = os.fork()
        if pid == 0:
            self._become(asked, list(fds), connection)
            return asked
        for fd in fds:
            os.close(fd)
        self.children[pid] = connection
        self.selector.register(connection, selectors.EVENT_READ, pid)
        with contextlib.suppress(OSError):
            connection.sendall(f"{pid}\n".encode())
        return None

    def _become(self, asked: dict[str, Any], fds: list[int], connection: socket.socket) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        for one in (self.listener, connection, *self.children.values()):
            one.close()
        os.close(self.reader)
        os.close(self.writer)
        wanted: list[int] = asked["fds"]
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 600) for fd in fds]
        for fd in fds:
            os.close(fd)
        for fd, number in zip(high, wanted, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        os.nice(asked["nice"] - os.nice(0))
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["folder"])
        multiprocessing.spawn.set_executable(self.python)
        random.seed()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            connection = self.children.pop(pid, None)
            if connection is not None:
                if pid not in self.silent:
                    self.selector.unregister(connection)
                self.silent.discard(pid)
                with contextlib.suppress(OSError):
                    connection.sendall(f"{status}\n".encode())
                connection.close()

    def _killed(self, connection: Any) -> None:
        """The stand-in was killed: so is the fork. The answer comes from `_reap`."""
        pid = next((pid for pid, one in self.children.items() if one is connection), None)
        if pid is not None and not connection.recv(1):
            self.selector.unregister(connection)
            self.silent.add(pid)
            os.kill(pid, signal.SIGKILL)


def _run(arguments: list[str]) -> None:
    """What Python does with its arguments."""
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-c", "-m"):
        flag = rest.pop(0)
        if flag in _VALUED:
            rest.pop(0)
    if rest[0] == "-c":
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = module
        sys.argv = ["-c", *rest[2:]]
        exec(compile(rest[1], "<string>", "exec"), module.__dict__)
    elif rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        sys.path.insert(0, str(Path(rest[0]).resolve().parent))
        runpy.run_path(rest[0], run_name="__main__")


def main() -> None:
    """The process of a `Warm`: path of the socket, the executable, modules."""
    path, python, *modules = sys.argv[1:]
    # Ray reads its environment when it is imported, and every worker has one of its own
    sys.modules["ray"] = None  # type: ignore[assignment]
    for name in modules:
        importlib.import_module(name)
    del sys.modules["ray"]
    for name in _TAKE_RAY:
        if sys.modules.pop(name, None) is not None:
            delattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2])
    import setproctitle

    setproctitle.setproctitle(
        f"warm {' '.join(sys.argv[1:])}"
    )  # now: forks that replace their environment cannot start
    calm_nixl()
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"importing {modules} started threads: a fork would lack them"
    gc.collect()
    gc.freeze()
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    forker = _Forker(path, python)
    print("ready", flush=True)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    asked = forker.serve()
    if asked is None:
        os._exit(0)
    sys.path[:0] = [
        folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder and folder not in before
    ]
    _run(asked["arguments"])


if __name__ == "__main__":
    main()
