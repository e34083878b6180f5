"""The synchronous client of a group's coordinator, for publishers, receivers and drivers; `rendezvous` finds it.

`RayControl` speaks to the named Ray actor, `LocalControl` to a coordinator in a thread of this process. Both raise
rdt's own error classes with the coordinator's own messages. No call waits for ever, and none falls back to another
group, namespace or cluster.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from . import manifests, wire
from .checks import Landed
from .coordinator import Coordinator
from .errors import CoordinatorLostError, DeadlineError, RdtError, SyncError, WireError, death_of
from .synccalls import PLAIN


class Control(ABC):
    """`Coordinator`'s methods with plain Python values instead of messages; see there for what each does and raises.

    Args:
        group: the group's name.
        call_timeout_s: for calls that wait for nobody else.
        grace_s: how much longer than the coordinator's own deadline a call is given to answer.
    """

    def __init__(self, group: str, *, call_timeout_s: float = 60.0, grace_s: float = 10.0) -> None:
        self.group = group
        self._begun = itertools.count(1)
        self.call_timeout_s = call_timeout_s
        self.grace_s = grace_s

    @abstractmethod
    def _post(self, method: str, args: tuple[Any, ...]) -> Callable[[float], Any]:
        """Starts a method of the coordinator.

        Returns:
            What waits so many seconds for the result, and raises what the method raised, or DeadlineError.
        """

    def _call(self, method: str, args: tuple[Any, ...], limit_s: float) -> Any:
        """Runs a method of the coordinator; raises DeadlineError after `limit_s` seconds."""
        return self._post(method, args)(limit_s)

    @abstractmethod
    def close(self) -> None:
        """Lets go of the coordinator. Idempotent."""

    def _quick(self, method: str, *args: Any) -> Any:
        return self._call(method, args, self.call_timeout_s)

    def _long(self, method: str, *args: Any, timeout_s: float) -> Any:
        return self._call(method, (*args, timeout_s), timeout_s + self.grace_s)

    def join(
        self,
        manifest: wire.SourceManifest,
        token: str,
        *,
        version: int | None = None,
        takeover: bool = False,
        terms: Mapping[int, int] | None = None,
    ) -> int:
        """See `Coordinator.join`."""
        return int(self._quick("join", wire.encode(manifest), token, version, takeover, dict(terms or {})))

    def leave(self, rank: int, token: str) -> None:
        """See `Coordinator.leave`."""
        self._quick("leave", rank, token)

    def joined(self, timeout_s: float) -> None:
        """See `Coordinator.joined`."""
        self._long("joined", timeout_s=timeout_s)

    def sources(self, timeout_s: float) -> tuple[int, list[wire.SourceManifest]]:
        """See `Coordinator.sources`."""
        epoch, joined = self._long("sources", timeout_s=timeout_s)
        return epoch, manifests.split(joined)

    def connect(self, manifest: wire.EngineManifest, epoch: int | None = None) -> None:
        """See `Coordinator.connect`."""
        self._quick("connect", wire.encode(manifest), epoch)

    def expect(self, replica: str, token: str | None = None) -> str:
        """See `Coordinator.expect`."""
        return str(self._quick("expect", replica, token))

    def knows(self, reader: str, incarnation: str) -> bool:
        """See `Coordinator.knows`."""
        return bool(self._quick("knows", reader, incarnation))

    def disconnect(self, reader: str, incarnation: str) -> None:
        """See `Coordinator.disconnect`."""
        self._quick("disconnect", reader, incarnation)

    def detach(self, replica: str, token: str | None = None) -> None:
        """See `Coordinator.detach`."""
        self._quick("detach", replica, token)

    def replica_ready(self, replica: str, timeout_s: float) -> list[wire.EngineManifest]:
        """See `Coordinator.replica_ready`."""
        ranks = self._long("replica_ready", replica, timeout_s=timeout_s)
        return [wire.decode(one, wire.EngineManifest) for one in ranks]

    def begin(
        self,
        rank: int,
        token: str,
        version: int,
        replicas: Sequence[str] | None,
        timeout_s: float,
        *,
        readable: int = 0,
        policy: str = "require_all",
        verify: str = "off",
    ) -> tuple[int, list[wire.ReadRequest], tuple[list[tuple[str, str]], dict[int, int]]]:
        """See `Coordinator.begin`."""
        names = None if replicas is None else list(replicas)
        args = (rank, token, version, names, readable, policy, timeout_s, verify, next(self._begun))
        sync, requests, news = self._call("begin", args, timeout_s + self.grace_s)
        return sync, [wire.decode(request, wire.ReadRequest) for request in requests], news

    def offer(
        self, rank: int, sync: int, offers: Sequence[wire.LinkOffer], refs: Sequence[Sequence[Any]] | None = None
    ) -> None:
        """See `Coordinator.offer`. No `refs`: none beside any offer."""
        beside = [[] for _ in offers] if refs is None else [list(some) for some in refs]
        self._quick("offer", rank, sync, [wire.encode(offer) for offer in offers], beside)

    def offers(self, reader: str, incarnation: str, timeout_s: float) -> tuple[list[wire.LinkOffer], list[list[Any]]]:
        """See `Coordinator.offers`."""
        offers, refs = self._long("offers", reader, incarnation, timeout_s=timeout_s)
        return [wire.decode(offer, wire.LinkOffer) for offer in offers], refs

    def published(
        self,
        rank: int,
        sync: int,
        round: int,
        awaited: int | None,
        timeout_s: float,
        timeline: wire.Timeline | None = None,
    ) -> None:
        """See `Coordinator.published`."""
        line = None if timeline is None else wire.encode(timeline)
        self._call("published", (rank, sync, round, awaited, timeout_s, line), timeout_s + self.grace_s)

    def digests(self, rank: int, sync: int, digests: Mapping[str, bytes], seconds: float) -> None:
        """See `Coordinator.digests`."""
        self._quick("digests", rank, sync, dict(digests), seconds)

    def enter(
        self, reader: str, incarnation: str, version: int, timeout_s: float, *, early: bool = False
    ) -> Callable[[], tuple[int, str]]:
        """Starts a pull; see `Coordinator.enter`.

        Returns:
            What waits until the first round is published, and returns or raises what `Coordinator.enter` does.
        """
        entered = self._post("enter", (reader, incarnation, version, timeout_s, early))
        return lambda: tuple(entered(timeout_s + self.grace_s))

    def await_round(self, reader: str, sync: int, round: int, timeout_s: float) -> None:
        """See `Coordinator.await_round`."""
        self._long("await_round", reader, sync, round, timeout_s=timeout_s)

    def done(
        self,
        report: wire.ReaderReport,
        sync: int,
        digests: Mapping[int, bytes] | None = None,
        timeout_s: float = 0.0,
    ) -> Callable[[], dict[int, list[int]]]:
        """Hands in an engine rank's account; see `Coordinator.done`.

        Returns:
            What waits until the account is taken, and raises if it is not; the commit waits for that as well. Where it returns
            anything, digests differ and the account is not taken.
        """
        mine = None if digests is None else dict(digests)
        taken = self._post("done", (wire.encode(report), sync, mine, timeout_s))
        limit_s = max(self.call_timeout_s, timeout_s + self.grace_s)
        return lambda: taken(limit_s)

    def fail(
        self,
        sync: int | None,
        member: str,
        phase: str,
        message: str,
        absent: tuple[int, int] | None = None,
        replica: str | None = None,
        caller: tuple[int, str] | None = None,
    ) -> str | None:
        """See `Coordinator.fail`."""
        return self._quick("fail", sync, member, phase, message, absent, replica, caller)

    def tear(self, replicas: Sequence[str], reason: str, token: str | None = None) -> None:
        """See `Coordinator.tear`."""
        self._quick("tear", list(replicas), reason, token)

    def commit(
        self,
        sync: int,
        rank: int,
        seconds: float,
        phases: Mapping[str, float],
        failed: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> wire.SyncReport:
        """See `Coordinator.commit`."""
        report = self._long("commit", sync, rank, seconds, dict(phases), dict(failed or {}), timeout_s=timeout_s)
        return wire.decode(report, wire.SyncReport)

    def outcome(self, sync: int, rank: int, timeout_s: float, timeline: wire.Timeline | None = None) -> wire.SyncReport:
        """See `Coordinator.outcome`."""
        line = None if timeline is None else wire.encode(timeline)
        report = self._call("outcome", (sync, rank, timeout_s, line), 2 * timeout_s + self.grace_s)
        return wire.decode(report, wire.SyncReport)

    def settled(self, timeout_s: float) -> None:
        """See `Coordinator.settled`."""
        self._long("settled", timeout_s=timeout_s)

    def check_begin(self, rank: int, token: str, timeout_s: float) -> int:
        """See `Checks.begin`."""
        return int(self._long("check_begin", rank, token, timeout_s=timeout_s))

    def check_open(self, check: int, replicas: Sequence[str]) -> None:
        """See `Checks.open`."""
        self._quick("check_open", check, list(replicas))

    def check_requests(self, rank: int, check: int, timeout_s: float) -> list[wire.ReadRequest]:
        """See `Checks.requests`."""
        found = self._long("check_requests", rank, check, timeout_s=timeout_s)
        return [wire.decode(request, wire.ReadRequest) for request in found]

    def check_source(self, rank: int, check: int, digests: Mapping[str, bytes]) -> None:
        """See `Checks.source`."""
        self._quick("check_source", rank, check, dict(digests))

    def check_reader(self, reader: str, incarnation: str, check: int, digests: Mapping[int, Landed]) -> None:
        """See `Checks.reader`."""
        self._quick("check_reader", reader, incarnation, check, dict(digests))

    def check_result(
        self, check: int, timeout_s: float
    ) -> tuple[dict[int, dict[str, bytes]], dict[str, dict[int, Landed]]]:
        """See `Checks.result`."""
        held, landed = self._call("check_result", (check, timeout_s), 2 * timeout_s + self.grace_s)
        return held, landed

    def check_end(self, check: int, report: wire.CheckReport) -> None:
        """See `Checks.end`."""
        self._quick("check_end", check, wire.encode(report))

    def check_outcome(self, check: int, timeout_s: float) -> wire.CheckReport:
        """See `Checks.outcome`."""
        return wire.decode(self._long("check_outcome", check, timeout_s=timeout_s), wire.CheckReport)

    def check_fail(self, check: int, member: str, problem: str) -> str:
        """See `Checks.fail`."""
        return str(self._quick("check_fail", check, member, problem))

    def current(self) -> tuple[int | None, int | None]:
        """See `Coordinator.current`."""
        version, sync = self._quick("current")
        return version, sync

    def status(self, limit_s: float | None = None) -> wire.GroupStatus:
        """See `Coordinator.status`. `limit_s`: for the answer; default: as for every call that waits for nobody."""
        limit_s = self.call_timeout_s if limit_s is None else limit_s
        return wire.decode(self._call("status", (), limit_s), wire.GroupStatus)


class LocalControl(Control):
    """Runs a coordinator's event loop in a daemon thread of this process. Threads may share one.

    Args:
        coordinator: its group is the control's.
        call_timeout_s: see `Control`.
        grace_s: see `Control`.
    """

    def __init__(self, coordinator: Coordinator, *, call_timeout_s: float = 60.0, grace_s: float = 10.0) -> None:
        super().__init__(coordinator.group, call_timeout_s=call_timeout_s, grace_s=grace_s)
        self._coordinator = coordinator
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"rdt.{self.group}", daemon=True)
        self._thread.start()

    def _post(self, method: str, args: tuple[Any, ...]) -> Callable[[float], Any]:
        if self._loop.is_closed():
            raise CoordinatorLostError(f"the coordinator of group {self.group!r} is closed")
        future = asyncio.run_coroutine_threadsafe(getattr(self._coordinator, method)(*args), self._loop)

        def wait(limit_s: float) -> Any:
            try:
                return future.result(limit_s)
            except concurrent.futures.TimeoutError:
                future.cancel()
                raise _no_answer(self.group, method, limit_s) from None
            except concurrent.futures.CancelledError:
                raise CoordinatorLostError(
                    f"the coordinator of group {self.group!r} was closed while {method} was waiting"
                ) from None

        return wait

    def close(self) -> None:
        """Stops the event loop; calls that wait end with a SyncError. Idempotent."""
        with self._closing:
            if self._loop.is_closed():
                return
            asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result(self.call_timeout_s)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _cancel(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RayControl(Control):
    """Speaks to the coordinator actor. The actor ends when the control that created it is dropped, or its process.

    Args:
        group: the group's name.
        handle: of the actor.
        call_timeout_s: see `Control`.
        grace_s: see `Control`.
    """

    def __init__(self, group: str, handle: Any, *, call_timeout_s: float = 60.0, grace_s: float = 10.0) -> None:
        super().__init__(group, call_timeout_s=call_timeout_s, grace_s=grace_s)
        self._handle = handle

    def _post(self, method: str, args: tuple[Any, ...]) -> Callable[[float], Any]:
        if self._handle is None:
            raise SyncError(f"the control of group {self.group!r} is closed")
        if method in PLAIN:
            try:
                call = msgspec.msgpack.encode((method, args))
            except (TypeError, ValueError, OverflowError) as error:
                raise WireError(f"a call of {method} cannot be sent to the coordinator: {error}") from error
            plain = self._handle.plain.remote(call)
            return lambda limit_s: msgspec.msgpack.decode(self._answer(method, plain, limit_s))
        answer = getattr(self._handle, method).remote(*args)
        return lambda limit_s: self._answer(method, answer, limit_s)

    def _answer(self, method: str, answer: Any, limit_s: float) -> Any:
        import ray

        try:
            return ray.get(answer, timeout=limit_s)
        except ray.exceptions.GetTimeoutError:
            raise _no_answer(self.group, method, limit_s) from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RdtError):
                raise error.cause from None
            raise SyncError(f"the coordinator of group {self.group!r} broke in {method}: {error.cause!r}") from error
        except ray.exceptions.RayActorError as error:
            raise CoordinatorLostError(
                f"the coordinator of group {self.group!r} died (called for {method}): it was killed, or source rank 0, with "
                f"which it lives, has ended. The next publish on every rank opens a new one; if source rank 0 ended, start it "
                f"again. Ray says: {death_of(error)}"
            ) from error

    def close(self) -> None:
        """Drops the handle; the actor ends if this control created it. Idempotent."""
        self._handle = None


def _no_answer(group: str, method: str, limit_s: float) -> DeadlineError:
    return DeadlineError(f"the coordinator of group {group!r} did not answer {method} within {limit_s:g} s")
