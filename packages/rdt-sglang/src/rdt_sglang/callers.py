"""Ways to call every scheduler of one engine: by the handles of its actors, or through SGLang's RPC to its processes.

Each call has a deadline, waits for all schedulers even when one failed, and reports what every one of them had to say.
Nothing is retried. What answers after its deadline is never taken for the answer to a later call.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rdt_core.errors import DeadlineError, EngineError, RdtError, death_of

from .protocol import CALLS, RPC_METHOD, WEIGHTS_GROUP, check_call

#: longest time between two looks at a socket, in seconds
_TICK_S = 1.0


class Caller(Protocol):
    """Reaches every scheduler of one engine."""

    def call(self, name: str, arguments: Mapping[str, Any], *, deadline: float) -> list[dict[str, Any]]:
        """Runs a call of `protocol.CALLS` on all schedulers at the same time.

        Args:
            name: of the call.
            arguments: by name.
            deadline: `time.monotonic()` by which all must have answered.

        Returns:
            One answer per scheduler; `{}` for a call that returns nothing.

        Raises:
            EngineError: a scheduler failed or died; tells of every one that did.
            DeadlineError: a scheduler did not answer in time.
        """
        ...


class ActorCaller:
    """Schedulers that are Ray actors.

    Args:
        handles: of all schedulers of the engine.
        who: the engine, for messages.
    """

    def __init__(self, handles: Sequence[Any], who: str) -> None:
        self.handles = list(handles)
        self.who = who
        if not self.handles:
            raise EngineError(f"{who} has no scheduler actors; was SGLang started with use_ray?")

    def call(self, name: str, arguments: Mapping[str, Any], *, deadline: float) -> list[dict[str, Any]]:
        """See `Caller.call`."""
        return self.answers(name, self.send(name, arguments), deadline=deadline)

    def send(self, name: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Sends a call to all schedulers and does not wait; each executes what one process sends in the order of sending.

        Args:
            name: see `Caller.call`.
            arguments: see there.

        Returns:
            What `answers` waits for.

        Raises:
            EngineError: they have no such method.
        """
        method, checked = check_call(name, arguments)
        # a process without SGLang knows the names of the methods, and not their group
        try:
            return [
                getattr(handle, method).options(concurrency_group=WEIGHTS_GROUP).remote(**checked)
                for handle in self.handles
            ]
        except AttributeError as error:
            raise EngineError(
                f"the scheduler actors of {self.who} have no {method}: rdt-sglang is not installed where they run, or "
                "SGLANG_PLUGINS leaves out the plugin rdt"
            ) from error

    def answers(self, name: str, refs: Sequence[Any], *, deadline: float) -> list[dict[str, Any]]:
        """Returns and raises what `Caller.call` does, for a call that was sent.

        Args:
            name: of the call.
            refs: of `send`.
            deadline: see `Caller.call`.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        method, _ = CALLS[name]
        answers: list[dict[str, Any]] = []
        failures: list[str] = []
        first: BaseException | None = None
        late = 0
        for index, ref in enumerate(refs):
            try:
                answers.append(ray.get(ref, timeout=max(deadline - time.monotonic(), 0.0)) or {})
                continue
            except GetTimeoutError as error:
                told, cause = "not done by the deadline", error
                late += 1
            except RayTaskError as error:
                cause = error.cause if isinstance(error.cause, BaseException) else error
                told = str(cause) if isinstance(cause, RdtError) else f"{type(cause).__name__}: {cause}"
                late += isinstance(cause, DeadlineError)
            except RayActorError as error:
                told, cause = f"died: {death_of(error)}", error
            failures.append(f"scheduler {index}: {told}")
            first = first or cause
        if failures:
            kind = DeadlineError if late == len(failures) else EngineError
            raise kind(
                f"{self.who}: {method} failed on {len(failures)} of {len(refs)} schedulers: " + "; ".join(failures)
            ) from first
        return answers


class RpcCaller:
    """Schedulers that are processes, behind the socket on which SGLang's own RPC runs. One call at a time.

    The schedulers answer in order and without a number, so that the answer to a call that was given up is awaited and
    dropped before the next call is answered.

    Args:
        socket: a bound DEALER socket, that of `Engine.send_to_rpc`.
        who: the engine, for messages.
    """

    def __init__(self, socket: Any, who: str) -> None:
        self.who = who
        self._socket = socket
        self._busy = threading.Lock()
        self._owed = 0  # answers to calls that were given up

    @classmethod
    def bind(cls, endpoint: str, who: str) -> RpcCaller:
        """Binds a socket where the schedulers look for one, as `Engine` does; for a process that has no `Engine`.

        Args:
            endpoint: `PortArgs.rpc_ipc_name`.
            who: see `RpcCaller`.
        """
        import zmq
        from sglang.srt.utils.network import get_zmq_socket

        return cls(get_zmq_socket(zmq.Context(1), zmq.DEALER, endpoint, True), who)

    def call(self, name: str, arguments: Mapping[str, Any], *, deadline: float) -> list[dict[str, Any]]:
        """See `Caller.call`."""
        from sglang.srt.managers.io_struct import RpcReqInput, sock_recv, sock_send

        _, checked = check_call(name, arguments)
        where = f"{self.who}: {name} through SGLang's RPC"
        if not self._busy.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise DeadlineError(f"{where} was not sent: the call before it is still running")
        try:
            import zmq

            request = RpcReqInput(method=RPC_METHOD, parameters={"call": name, "arguments": json.dumps(checked)})
            self._wait(zmq.POLLOUT, deadline, f"{where} was not sent: no scheduler listens")
            sock_send(self._socket, request, flags=zmq.NOBLOCK)
            self._owed += 1
            while True:
                self._wait(zmq.POLLIN, deadline, f"{where} was not answered by its deadline")
                answer = sock_recv(self._socket, flags=zmq.NOBLOCK)
                self._owed -= 1
                if self._owed == 0:
                    break
        finally:
            self._busy.release()
        if not answer.success:
            raise EngineError(f"{where} failed: {answer.message or 'no reason was given'}")
        try:
            answers = json.loads(answer.message)
        except ValueError as error:
            raise EngineError(f"{where} answered what is no JSON: {answer.message[:200]!r}") from error
        if not isinstance(answers, list):
            raise EngineError(f"{where} answered no list: {answer.message[:200]!r}")
        return [one or {} for one in answers]

    def _wait(self, event: int, deadline: float, late: str) -> None:
        while not self._socket.poll(min(max(deadline - time.monotonic(), 0.0), _TICK_S) * 1000, event):
            if time.monotonic() >= deadline:
                raise DeadlineError(late)
