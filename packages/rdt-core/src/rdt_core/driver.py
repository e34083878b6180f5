"""The replicas of a group as source rank 0 drives them: connect, and the steps of one sync on every one of them.

`Driver` knows which replicas are attached. A `Round` takes those of one sync from the pause to the commit, side by side,
and says of each what went wrong. With policy "best_effort" a replica that fails is left out and the others go on. A
replica that failed is never resumed: it is told to abort, and stays as it is until a later sync is complete.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from .control import Control
from .coverage import check_taken
from .declared import ignored, merge
from .engines import STEPS, ConnectInfo, EngineClient, ahead_of, receive_of
from .errors import CoordinatorLostError, CoverageError, EngineError, RdtError, StepError, SyncError, text_of
from .geometry import Box
from .timeline import Recorder

log = logging.getLogger(__name__)


class Driver:
    """The attached replicas of a group.

    Args:
        info: fields of `ConnectInfo` that are the same for every replica.

    Attributes:
        token: of source rank 0: if its place is taken, nothing that it does counts any more.
        clients: by name of the replica.
        doubted: replicas whose last sync failed: they connect again before the next one, which ends what an engine still has
            open and costs a living one nothing else.
        outdated: replicas that plan again before the next sync, because of what was measured in the last one.
        serving: replicas that the latest sync of this driver stamped and resumed.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._info = dict(info)
        self.token: str | None = None
        self.clients: dict[str, EngineClient] = {}
        self.doubted: set[str] = set()
        self.outdated: set[str] = set()
        self.serving: set[str] = set()

    def remove(self, name: str) -> None:
        """Forgets a replica."""
        self.clients.pop(name, None)
        for some in (self.doubted, self.outdated, self.serving):
            some.discard(name)

    def ahead(self, names: Iterable[str], told: set[str]) -> None:
        """Lets replicas pause while the sync begins; those that serve, as nothing else is to be resumed if it cannot.

        Args:
            names: replicas that shall take part.
            told: filled with those that may have been told.
        """
        for name in sorted(self.serving.intersection(names) - self.doubted - self.outdated):
            ahead = ahead_of(self.clients[name])
            if ahead is not None:
                told.add(name)
                if not ahead.send():
                    told.discard(name)

    def take_back(self, told: set[str], timeout_s: float) -> None:
        """Replicas that were told `ahead` of a sync that could not begin go on; they hold what they held.

        Args:
            told: which; empty afterwards.
            timeout_s: for all of them.
        """
        names = sorted(told)
        told.clear()
        in_doubt = set(names) - self.doubted  # until they say that they go on
        self.doubted.update(names)
        deadline = time.monotonic() + timeout_s

        def undo(client: EngineClient) -> None:
            ahead = ahead_of(client)
            if ahead is None or not ahead.take_back(deadline=deadline):
                raise EngineError("it is not as it was left")

        failures = _each({name: partial(undo, self.clients[name]) for name in names})
        self.doubted -= in_doubt - failures.keys()
        self.serving.difference_update(failures)
        for name, error in failures.items():
            log.warning(
                "replica %r paused for a sync that could not begin, and may have stayed so until the next one: %s",
                name, error,
            )  # fmt: skip

    def connect(self, control: Control, client: EngineClient, timeout_s: float) -> None:
        """Connects every rank of a replica, and checks that what the source ranks hold is taken.

        Raises:
            CoverageError: the engine wants what no rank holds, or nobody takes what the source offers.
            EngineError: an engine rank failed to connect.
            DeadlineError: one did not answer in time.
        """
        info = ConnectInfo(replica=client.name, attempt=control.expect(client.name, self.token), **self._info)
        client.connect(info, deadline=time.monotonic() + timeout_s)
        ranks = control.replica_ready(client.name, timeout_s)
        _, manifests = control.sources(timeout_s)
        try:
            check_taken(
                [[(part.tensor, Box(part.offset, part.shape)) for part in rank.boxes] for rank in ranks],
                merge(manifests),
                ignored(manifests),
            )
        except CoverageError as error:
            raise CoverageError(f"replica {client.name!r}: {error}") from None

    def connect_all(self, control: Control, names: Iterable[str], timeout_s: float) -> dict[str, Exception]:
        """Connects replicas again, side by side. Returns what failed, by name."""
        failures = _each({name: partial(self.connect, control, self.clients[name], timeout_s) for name in names})
        self.doubted = (self.doubted - set(names)) | failures.keys()
        self.outdated.difference_update(names)
        return failures

    def connect_stale(self, control: Control, timeout_s: float) -> None:
        """Connects those replicas again that are not connected, or planned against source ranks as they are no more.

        Raises:
            RdtError: one could not be connected.
        """
        status = control.status()
        fresh = {
            one.name
            for one in status.replicas
            if len(one.readers) == one.world_size and all(reader.epoch == status.epoch for reader in one.readers)
        }
        for error in self.connect_all(
            control, [name for name in self.clients if name not in fresh], timeout_s
        ).values():
            raise error

    def check(self, check: int, timeout_s: float) -> None:
        """Every replica hands in digests of what it holds, side by side. They are not paused: nothing is written.

        Raises:
            RdtError: of a replica that could not.
        """
        deadline = time.monotonic() + timeout_s
        failures = _each(
            {
                name: partial(client.connect, ConnectInfo(replica=name, check=check, **self._info), deadline=deadline)
                for name, client in self.clients.items()
            }
        )
        for error in failures.values():
            raise error


class Round:
    """One sync of some replicas.

    Args:
        control: of the group.
        sync: its id.
        version: that it brings.
        clients: of the replicas that take part.
        policy: "require_all" or "best_effort".
        timeout_s: deadline of each step of each replica, in seconds.
        caller: source rank and token of the driver.
        timeline: filled with each step of each replica.

    Attributes:
        failed: replicas that were left out, and why.
    """

    def __init__(
        self,
        control: Control,
        sync: int,
        version: int,
        clients: Sequence[EngineClient],
        *,
        policy: str,
        timeout_s: float,
        caller: tuple[int, str],
        timeline: Recorder,
    ) -> None:
        self._caller = caller
        self._timeline = timeline
        self._control = control
        self._sync = sync
        self._version = version
        self._clients = list(clients)
        self._policy = policy
        self._timeout_s = timeout_s
        self._steps: dict[str, dict[str, float]] = {client.name: {} for client in clients}
        self.failed: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """Replicas of this sync."""
        return [client.name for client in self._clients]

    def phases(self) -> dict[str, float]:
        """Seconds by phase of the replica that took longest; "call" is what a call took beside the steps that it took.

        Of one replica, since the longest of each phase would add up to more than the sync took.
        """
        return max(self._steps.values(), key=lambda steps: sum(steps.values()), default={})

    def tasks(self) -> list[Callable[[], None]]:
        """One task for each replica: pause, begin, pull, finish. They may run side by side.

        A task raises the failure of the sync, as every member sees it; with "best_effort" none does.
        """
        return [partial(self._drive, client) for client in self._clients]

    def _drive(self, client: EngineClient) -> None:
        step = STEPS[0]
        started = time.perf_counter()
        try:
            receive = receive_of(client)
            if receive is not None:
                step = "receive"  # where the engine does not say which
                deadline = time.monotonic() + self._timeout_s
                began = started
                for step, seconds in receive(self._version, deadline=deadline).items():
                    began = self._took(client, step, began, began + float(seconds))
                self._took(client, "call", began, max(began, time.perf_counter()))
                return
            for step in STEPS:
                started = time.perf_counter()
                deadline = time.monotonic() + self._timeout_s
                if step == "pause":
                    client.pause(deadline=deadline)
                else:
                    getattr(client, step)(self._version, deadline=deadline)
                self._took(client, step, started, time.perf_counter())
        except Exception as error:
            step = error.step if isinstance(error, StepError) else step
            self._timeline.add("engine_begin" if step == "begin" else step, started, track=client.name)
            failure = self._tell(client.name, step, error)
            if self._policy == "require_all":
                raise failure from error
            log.warning("replica %r is left out of version %d: %s", client.name, self._version, failure)
            self.failed[client.name] = text_of(failure)  # it is told after the others: it may not answer

    def _took(self, client: EngineClient, step: str, began: float, ended: float) -> float:
        name = "engine_begin" if step == "begin" else step
        self._timeline.add(name, began, ended, track=client.name)
        self._steps[client.name][name] = ended - began
        return ended

    def _tell(self, replica: str, phase: str, error: Exception) -> RdtError:
        """Fails the sync, or with "best_effort" this replica's part of it; returns the failure that came first."""
        own = error if isinstance(error, RdtError) else SyncError(text_of(error))
        if isinstance(own, StepError):  # `phase` says which
            own = SyncError(text_of(own))
        try:
            first = self._control.fail(self._sync, f"replica {replica!r}", phase, str(own), None, replica, self._caller)
        except CoordinatorLostError:
            raise
        except RdtError as unheard:
            log.warning(
                "replica %r failed in %s (%s), and the coordinator could not be told: %s", replica, phase, own, unheard
            )
            return own
        return own if first is None or first == str(own) else SyncError(first)

    def abort(self, reason: str) -> None:
        """Tells every replica that the sync failed."""
        self._told(_each({client.name: self._abort(client, reason) for client in self._clients}))

    def _abort(self, client: EngineClient, reason: str) -> Callable[[], None]:
        deadline = time.monotonic() + self._timeout_s
        return partial(client.abort, self._version, self.failed.get(client.name, reason), deadline=deadline)

    def _told(self, failures: Mapping[str, Exception]) -> None:
        for name, error in failures.items():  # it may be dead, which is why it failed
            log.warning("replica %r could not be told that version %d failed: %s", name, self._version, error)

    def commit(self, failed: Iterable[str]) -> dict[str, Exception]:
        """After the coordinator's commit: stamps every replica that is still in the sync, and lets it generate again.

        Args:
            failed: replicas that the coordinator has left out.

        Returns:
            What failed, by name: such a replica is not stamped, or not resumed.
        """
        out = {*failed, *self.failed}
        # side by side: one that is silent must not keep the others from going on
        outcome = _each(
            {
                client.name: self._abort(client, "the sync went on without it")
                if client.name in out
                else partial(self._release, client)
                for client in self._clients
            }
        )
        self._told({name: error for name, error in outcome.items() if name in out})
        failures = {name: error for name, error in outcome.items() if name not in out}
        if failures:
            told = "; ".join(map(text_of, failures.values()))
            try:
                self._control.tear(list(failures), told, self._caller[1])
            except RdtError as unheard:
                log.warning("the coordinator could not be told that replicas were not released (%s): %s", told, unheard)
        return failures

    def _release(self, client: EngineClient) -> None:
        deadline = time.monotonic() + self._timeout_s
        client.commit(self._version, deadline=deadline)
        client.resume(deadline=deadline)


def _each(tasks: Mapping[str, Callable[[], None]]) -> dict[str, Exception]:
    """Runs tasks side by side, waits for all, and returns what each raised."""
    failures: dict[str, Exception] = {}

    def run(name: str, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:
            failures[name] = error

    side_by_side([partial(run, name, task) for name, task in tasks.items()])
    return {name: failures[name] for name in tasks if name in failures}


def side_by_side(tasks: Sequence[Callable[[], None]]) -> BaseException | None:
    """Runs tasks at once, the first in this thread, and waits for all. Each must have a deadline of its own.

    Returns:
        What the first of them, in the order given, raised; None if all succeeded.
    """
    if not tasks:
        return None
    first, *others = tasks
    failure: BaseException | None = None
    with ThreadPoolExecutor(max_workers=max(1, len(others)), thread_name_prefix="rdt-drive") as pool:
        running = [pool.submit(task) for task in others]
        try:
            first()
        except Exception as error:
            failure = error
        failures = [failure, *(one.exception() for one in running)]
    return next((one for one in failures if one is not None), None)
