"""A process that has imported torch and rdt_core once and forks members of worlds, and what its owner sees of them.

A fork takes milliseconds where an import takes seconds. It must have no threads, so that a fork lacks none: libraries are
told to start none. Forks end with it, stopped or not, and it ends with its owner.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

_PDEATHSIG = 1
_MODULES = (
    "torch",
    "rdt_core.sync",
    "rdt_core.replica",
    "rdt_core.coordinator",
    "rdt_testbed.faults.members",
    "rdt_testbed.faults.mutations",
)


class Child:
    """A forked process, as its owner sees it.

    Attributes:
        name: of the member that it is.
        pid: of the process.
        sock: connected to it.
    """

    def __init__(self, name: str, pid: int, sock: socket.socket) -> None:
        self.name = name
        self.pid = pid
        self.sock = sock
        self._pidfd = os.pidfd_open(pid)

    @property
    def is_alive(self) -> bool:
        """Whether it runs (or is stopped)."""
        return self._pidfd >= 0 and not select.select([self._pidfd], [], [], 0)[0]

    @property
    def is_stopped(self) -> bool:
        """Whether a SIGSTOP holds it."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] == b"T"
        except OSError:
            return False

    def signal(self, number: int) -> None:
        """Sends a signal, if it is alive."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def wait_stopped(self, timeout_s: float = 5.0) -> None:
        """Returns when it is stopped or dead."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive and not self.is_stopped and time.monotonic() < deadline:
            time.sleep(0.001)

    def end(self) -> None:
        """Kills it and returns when it is gone. Idempotent."""
        if self._pidfd < 0:
            return
        self.signal(signal.SIGKILL)
        select.select([self._pidfd], [], [], 20)
        self.sock.close()
        os.close(self._pidfd)
        self._pidfd = -1


class Nursery:
    """Where members are forked. A context manager."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rdt_testbed.faults.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._sock = mine
        self._sock.settimeout(120)
        assert self._sock.recv(16) == b"ready", "the nursery could not import what its forks need"

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def fork(self, name: str, function: str, **options: Any) -> Child:
        """Runs `function(sock, **options)` of `members` in a fork; `sock` is the other end of `Child.sock`."""
        mine, theirs = socket.socketpair()
        with theirs:
            fds = array.array("i", [theirs.fileno()])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
            self._sock.sendmsg([pickle.dumps((function, options))], ancillary)
            pid = int(self._sock.recv(16))
        return Child(name, pid, mine)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """The process of a `Nursery`: forks for each message on the socket whose number it is given."""
    owner = socket.socket(fileno=int(sys.argv[1]))
    for module in _MODULES:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "imports started threads: a fork would lack them"
    gc.collect()
    gc.freeze()
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    owner.send(b"ready")
    while True:
        ready, _, _ = select.select([owner, reader], [], [])
        if reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 4096)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        if owner not in ready:
            continue
        data, ancillary, _, _ = owner.recvmsg(1 << 16, socket.CMSG_SPACE(4))
        if not data:
            os._exit(0)  # forks end with this process
        fds = array.array("i")
        fds.frombytes(ancillary[0][2])
        pid = os.fork()
        if pid:
            os.close(fds[0])
            owner.send(str(pid).encode())
            continue
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        owner.close()
        os.close(reader)
        os.close(writer)
        function, options = pickle.loads(data)
        run = getattr(sys.modules["rdt_testbed.faults.members"], function)
        try:
            run(socket.socket(fileno=fds[0]), **options)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)


if __name__ == "__main__":
    main()
