"""The engine client of a world: a replica of module workers that are reached over Unix sockets.

Everything but the way to a worker, and that it pauses, is `ModuleReplica`'s own. Messages can be dropped, doubled and left
unanswered.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from rdt_core.engines import Ahead, ConnectInfo
from rdt_core.errors import DeadlineError, EngineError
from rdt_core.replica import ModuleReplica

from . import channel
from .points import Injector


class ProcessReplica(ModuleReplica):
    """See `ModuleReplica`.

    Args:
        name: of the replica.
        paths: sockets of its engine ranks, in order.
        injector: of this process.
    """

    def __init__(self, name: str, paths: Sequence[str], injector: Injector) -> None:
        super().__init__([], name=name)
        self._paths = list(paths)
        self._injector = injector
        self._idle: dict[str, list[socket.socket]] = {path: [] for path in paths}
        self._lock = threading.Lock()
        #: names the stamp with which the engine was resumed last; empty: it has to be resumed once more before it pauses ahead
        self.stamp = ""
        self.receive = self._receive  # workers pause by themselves then
        self.ahead: Ahead = _Ahead(self)

    def connect(self, info: ConnectInfo, *, deadline: float) -> None:
        """See `EngineClient.connect`."""
        if not info.check:
            self.stamp = ""
        super().connect(info, deadline=deadline)

    def pause(self, *, deadline: float) -> None:
        """See `EngineClient.pause`."""
        self.stamp = ""
        self._all("pause", deadline=deadline)

    def _receive(self, version: int, *, deadline: float) -> dict[str, float]:
        self.stamp = ""
        return super()._receive(version, deadline=deadline)

    def resume(self, *, deadline: float) -> None:
        """See `EngineClient.resume`."""
        stamp = uuid.uuid4().hex
        self._all("resume", stamp, deadline=deadline)
        self.stamp = stamp

    def send_ahead(self, ticket: str) -> None:
        """Sends every worker word to pause. The answers are not read: nobody waits for them."""
        for rank, path in enumerate(self._paths):
            call = self._start(rank, path, "pause_ahead", (ticket, self.stamp))
            if call.sock is not None:
                call.sock.close()
            call.was_sent()

    def forget(self) -> None:
        """Drops the connections to workers: others took their places."""
        with self._lock:
            for socks in self._idle.values():
                while socks:
                    socks.pop().close()

    def _all(self, method: str, *args: Any, deadline: float) -> list[Any]:
        # as Ray does: the first failure ends the wait for the others
        calls = [self._start(rank, path, method, args) for rank, path in enumerate(self._paths)]
        results: dict[int, Any] = {}
        while len(results) < len(calls):
            waiting = [call for call in calls if call.rank not in results]
            ready = [call for call in waiting if call.is_over(deadline)]
            for call in ready or self._any(waiting, deadline):
                results[call.rank] = call.result(deadline)
        return [results[rank] for rank in range(len(calls))]

    @staticmethod
    def _any(calls: Sequence[_Call], deadline: float) -> list[_Call]:
        """Waits until an answer comes, or the deadline; returns those that need not be waited for."""
        socks = {call.sock: call for call in calls if call.sock is not None}
        left = max(0.0, deadline - time.monotonic())
        return [socks[sock] for sock in select.select(list(socks), [], [], left)[0]]

    def _start(self, rank: int, path: str, method: str, args: tuple[Any, ...]) -> _Call:
        who = f"{self.name}/{rank}"
        phase = f"client.{method}:{who}"
        fault = self._injector.at(phase)
        count = self._injector.passing(phase)
        call = _Call(self, rank, path, method, phase, count)
        if fault is not None and fault.kind == "drop":
            return call
        try:
            call.sock = self._send(path, method, args)
            if fault is not None and fault.kind == "duplicate":
                with contextlib.suppress(OSError):
                    self._send(path, method, args)
        except OSError as error:
            call.error = EngineError(f"a worker of replica {self.name!r} died (called for {method}): {error!r}")
        return call

    def _send(self, path: str, method: str, args: tuple[Any, ...]) -> socket.socket:
        with self._lock:
            sock = self._idle[path].pop() if self._idle[path] else None
        if sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(5)
            try:
                sock.connect(path)
            except OSError:
                sock.close()
                raise
        try:
            sock.settimeout(5)
            channel.send(sock, (method, args))
        except OSError:
            sock.close()
            raise
        return sock

    def keep(self, path: str, sock: socket.socket) -> None:
        """Takes back a connection whose answer was read."""
        with self._lock:
            self._idle[path].append(sock)

    def answered(self, phase: str, count: int) -> bool:
        """The answer to a call has come: whether it reaches the caller."""
        later = self._injector.at(phase, "after", count)
        return later is None or later.kind != "lose"


class _Ahead:
    """Implements `rdt_core.engines.Ahead`."""

    def __init__(self, replica: ProcessReplica) -> None:
        self._replica = replica
        self._ticket = ""

    def send(self) -> bool:
        if not self._replica.stamp:
            return False
        self._ticket = uuid.uuid4().hex
        self._replica.send_ahead(self._ticket)
        return True

    def take_back(self, *, deadline: float) -> bool:
        stamp, self._replica.stamp = self._replica.stamp, ""
        done = all(self._replica._all("take_back", self._ticket, deadline=deadline))
        if done:
            self._replica.stamp = stamp
        return done


class _Call:
    """One call of one worker. Without a connection and an error nothing was sent, and no answer will come."""

    def __init__(self, owner: ProcessReplica, rank: int, path: str, method: str, phase: str, count: int) -> None:
        self.rank = rank
        self.sock: socket.socket | None = None
        self.error: Exception | None = None
        self._owner, self._path, self._method, self._phase, self._count = owner, path, method, phase, count

    def was_sent(self) -> None:
        """Its answer will not be read."""
        self._owner.answered(self._phase, self._count)

    def is_over(self, deadline: float) -> bool:
        """Whether `result` need not wait."""
        return self.error is not None or time.monotonic() >= deadline

    def result(self, deadline: float) -> Any:
        """Returns what the worker answered, once there is something to read."""
        name, method = self._owner.name, self._method
        if self.error is not None:
            raise self.error
        late = DeadlineError(f"engine rank {self.rank} of replica {name!r} did not answer {method} in time")
        sock, self.sock = self.sock, None
        if sock is None:
            raise late
        try:
            ok, result = channel.receive(sock, deadline)
        except TimeoutError:
            sock.close()
            raise late from None
        except (EOFError, OSError) as error:
            sock.close()
            raise EngineError(f"a worker of replica {name!r} died (called for {method}): {error!r}") from None
        self._owner.keep(self._path, sock)
        if not self._owner.answered(self._phase, self._count):
            time.sleep(max(0.0, deadline - time.monotonic()))
            raise late
        if ok:
            return result
        error = channel.restored(result)
        raise EngineError(f"replica {name!r} failed in {method}: {error}") if isinstance(error, RuntimeError) else error
