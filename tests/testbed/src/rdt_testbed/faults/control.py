"""The coordinator as a process of its own behind a Unix socket, and its client: what RayControl is over Ray.

Calls start when they are posted and end on the coordinator's side whether or not somebody still waits; errors arrive by
class; a coordinator that is gone is a CoordinatorLostError. Messages can be dropped, doubled, corrupted and left unanswered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from rdt_core.control import Control
from rdt_core.coordinator import Coordinator
from rdt_core.errors import CoordinatorLostError, DeadlineError, SyncError

from . import channel
from .faults import CORRUPT
from .points import Injector, corrupted

_LENGTH = struct.Struct("!I")


async def serve(coordinator: Coordinator, path: str, injector: Injector, ready: Callable[[], None]) -> None:
    """Serves a coordinator's methods on a Unix socket for ever; `ready` is called when callers may come."""

    async def answer(method: str, args: tuple[Any, ...]) -> tuple[bool, Any]:
        try:
            injector.at(f"coordinator.{method}")
            count = injector.passing(f"coordinator.{method}")
            result = await getattr(coordinator, method)(*args)
            injector.at(f"coordinator.{method}", "after", count)
            return True, result
        except Exception as error:
            return False, channel.describe(error)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
                method, args = pickle.loads(await reader.readexactly(size))
                data = pickle.dumps(await answer(method, args))
                writer.write(_LENGTH.pack(len(data)) + data)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # who asked is gone, or waits no longer
        finally:
            writer.close()

    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    server = await asyncio.start_unix_server(talk, path, backlog=128)
    ready()
    async with server:
        await server.serve_forever()


class SocketControl(Control):
    """Speaks to a coordinator behind a Unix socket. Threads may share one.

    Args:
        group: the group's name.
        path: of the socket.
        injector: of this process.
        call_timeout_s: see `Control`.
        grace_s: see `Control`.
    """

    def __init__(self, group: str, path: str, injector: Injector, *, call_timeout_s: float, grace_s: float) -> None:
        super().__init__(group, call_timeout_s=call_timeout_s, grace_s=grace_s)
        self._path = path
        self._injector = injector
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        self._born: tuple[int, int] | None = None  # the socket file that it was opened for, as a handle names one actor
        self._lost = ""

    def find(self, timeout_s: float) -> None:
        """Returns once the coordinator answers, as `open_coordinator` does.

        Raises:
            DeadlineError: it does not in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                found = os.stat(self._path)
                self._born = found.st_ino, found.st_mtime_ns
                self._start("current", ())(max(deadline - time.monotonic(), 0.0))
                return
            except (OSError, CoordinatorLostError, DeadlineError) as error:
                if time.monotonic() >= deadline:
                    raise DeadlineError(f"waited {timeout_s:g} s for the coordinator: {error}") from None
                self._lost = ""
                time.sleep(0.02)

    def _post(self, method: str, args: tuple[Any, ...]) -> Callable[[float], Any]:
        phase = f"control.{method}"
        fault = self._injector.at(phase)
        count = self._injector.passing(phase)
        kind = fault.kind if fault is not None else ""
        if kind == "drop":
            return lambda limit_s: self._silence(method, limit_s)
        if fault is not None and kind == CORRUPT:
            args = corrupted(args, int(fault.value))
        answer = self._start(method, args)
        if kind == "duplicate":
            with contextlib.suppress(CoordinatorLostError):
                self._start(method, args)

        def wait(limit_s: float) -> Any:
            result = answer(limit_s)
            later = self._injector.at(phase, "after", count)
            if kind == "lose" or (later is not None and later.kind == "lose"):
                return self._silence(method, limit_s)
            if later is not None and later.kind == CORRUPT:
                return corrupted(result, int(later.value))
            return result

        return wait

    def _silence(self, method: str, limit_s: float) -> Any:
        time.sleep(limit_s)
        raise DeadlineError(f"the coordinator of group {self.group!r} did not answer {method} within {limit_s:g} s")

    def _start(self, method: str, args: tuple[Any, ...]) -> Callable[[float], Any]:
        """Sends a call; returns what waits for its answer."""
        sock = self._connection(method)
        try:
            sock.settimeout(5)
            channel.send(sock, (method, args))
        except OSError as error:
            sock.close()
            raise self._gone(method, error) from None

        def wait(limit_s: float) -> Any:
            try:
                ok, result = channel.receive(sock, time.monotonic() + limit_s)
            except TimeoutError:
                sock.close()
                raise DeadlineError(
                    f"the coordinator of group {self.group!r} did not answer {method} within {limit_s:g} s"
                ) from None
            except (EOFError, OSError) as error:
                sock.close()
                raise self._gone(method, error) from None
            with self._lock:
                self._idle.append(sock)
            if ok:
                return result
            error = channel.restored(result)
            if isinstance(error, RuntimeError):
                raise SyncError(f"the coordinator of group {self.group!r} broke in {method}: {error}")
            raise error

        return wait

    def _connection(self, method: str) -> socket.socket:
        if self._lost:
            raise CoordinatorLostError(self._lost)
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            found = os.stat(self._path)
            if self._born is not None and (found.st_ino, found.st_mtime_ns) != self._born:
                raise FileNotFoundError(self._path)  # another coordinator took its place
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except FileNotFoundError as error:
            raise self._gone(method, error) from None
        except OSError as error:
            raise SyncError(
                f"the coordinator of group {self.group!r} cannot be reached for {method}: {error}"
            ) from None
        try:
            sock.settimeout(5)
            sock.connect(self._path)
        except OSError as error:
            sock.close()
            raise self._gone(method, error) from None
        return sock

    def _gone(self, method: str, error: BaseException) -> CoordinatorLostError:
        self._lost = f"the coordinator of group {self.group!r} died (called for {method}): {error!r}"
        return CoordinatorLostError(self._lost)

    def close(self) -> None:
        """Drops the connections. Idempotent."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()
