"""A source rank as a member of its group: joined, holding still while readers read, failing for all, leaving.

What `sync` builds on: the control, the publisher and the version of one rank, and what has to be done again when memory
moved or the coordinator died. Nothing here knows of engines. It refuses to wait without a deadline.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence

from . import wire
from .control import Control
from .errors import CoordinatorLostError, RdtError, SourceError, SyncError, TakenOverError, text_of
from .publisher import Publisher
from .timeline import Recorder

log = logging.getLogger(__name__)

#: track of what a source rank does for its readers, beside what the driver does on rank 0
_OWN = "source"


class Membership:
    """One source rank's membership. The constructor joins, and returns once all source ranks have.

    Args:
        control: of the group.
        publisher: makes this rank's publisher; again when its memory moved.
        group: the group's name.
        rank: this source rank.
        world_size: source ranks of the group.
        timeout_s: deadline of every single wait, in seconds.
        takeover: this process takes the place of a source rank that died.
        reopen: opens or finds a coordinator within so many seconds, when the present one died; None: nobody can.
    """

    def __init__(
        self,
        control: Control,
        publisher: Callable[[], Publisher],
        *,
        group: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        takeover: bool,
        reopen: Callable[[float], Control] | None,
    ) -> None:
        self.group = group
        self.rank = rank
        self.world_size = world_size
        self.version: int | None = None
        self._control = control
        self._reopen = reopen
        self._is_lost = False  # the coordinator died
        self._has_left = False
        self._timeout_s = float(timeout_s)
        self._timeline = Recorder()  # of the running sync
        self._token = uuid.uuid4().hex
        self._terms: dict[int, int] = {}  # how often the place of each source rank was taken over, its own among them
        self._make_publisher = publisher
        self._publisher = publisher()
        try:
            self._terms[rank] = control.join(self._publisher.manifest, self._token, takeover=takeover)
            self._is_joined = True
            control.joined(timeout_s)
            self.version, _ = control.current()
        except BaseException:
            self._give_up()  # else the place stays taken by a process that has no membership
            raise

    def _give_up(self) -> None:
        try:
            self._control.leave(self.rank, self._token)
        except RdtError as error:
            log.debug("source rank %d: the coordinator did not take the goodbye: %s", self.rank, error)
        self._publisher.close()

    def _follow_memory(self) -> None:
        """Joins again where parameters moved that readers read, so that they learn the new addresses first."""
        if not self._publisher.follow():
            log.info("source rank %d: parameters moved; the group learns their new addresses", self.rank)
            fresh = self._make_publisher()
            self._publisher.close()
            self._publisher, self._is_joined = fresh, False
        if not self._is_joined:  # nor after a join that failed: readers would go on with the old addresses
            self._control.join(self._publisher.manifest, self._token, terms=self._terms)
            self._is_joined = True

    def _restore(self, timeout_s: float) -> None:
        """Opens a new coordinator in the place of one that died, and joins it with what this rank knows."""
        if self._reopen is None:
            raise CoordinatorLostError(
                f"the coordinator of group {self.group!r} died, and nobody here can open another"
            )
        log.warning("source rank %d: the coordinator of group %r died; the group is built again", self.rank, self.group)
        self._is_lost = True
        self._control.close()
        self._control = self._reopen(timeout_s)
        self._publisher.forget_all()  # every reader connects anew
        self._control.join(self._publisher.manifest, self._token, version=self.version, terms=self._terms)
        self._is_lost, self._is_joined = False, True
        self._control.joined(timeout_s)

    def _hold(
        self,
        sync: int,
        version: int,
        requests: Sequence[wire.ReadRequest],
        timeout_s: float,
        phases: dict[str, float],
        verify: wire.Verify,
    ) -> None:
        """Makes this rank's bytes readable, round after round, as fast as readers give back the buckets."""
        phase = "offer"
        try:
            if requests:
                started = time.perf_counter()
                offers, refs = self._publisher.serve(requests)
                self._control.offer(self.rank, sync, offers, refs)
                self._timeline.add("offer", started, track=_OWN)
            phase = "check"
            self._publisher.confirm()  # before anything is published, which every account and so the commit waits for
            proof = None
            if verify != "off":
                phase = "verify"
                started = time.perf_counter()
                proof = self._publisher.proof()
                proof.start(verify, version)
                self._timeline.add("verify", started, track=_OWN)
            rounds = self._publisher.rounds_written()
            slots, total = self._publisher.slots, self._publisher.rounds
            writing = 0.0
            for number in range(total):
                phase = "write"
                started = time.perf_counter()
                next(rounds)
                writing += time.perf_counter() - started
                self._timeline.add("write", started, track=_OWN)
                if number + 1 == total:
                    for _ in rounds:  # lets a source that is iterated run to its end (collectives)
                        raise SourceError(f"source rank {self.rank} wrote more than its {total} rounds")
                phase = "publish"
                line = self._told() if number + 1 == total else None
                if proof is not None:
                    # while readers read it, and before its bucket is written again
                    started = time.perf_counter()
                    self._control.published(self.rank, sync, number, None, timeout_s, line)
                    self._timeline.add("publish", started, track=_OWN)
                    started = time.perf_counter()
                    proof.take(number)
                    self._timeline.add("verify", started, track=_OWN)
                # the next round is written into the bucket of this one
                freed = number + 1 - slots
                if proof is None or freed >= 0:
                    started = time.perf_counter()
                    self._control.published(self.rank, sync, number, freed if freed >= 0 else None, timeout_s, line)
                    self._timeline.add("publish" if freed < 0 else "await_read", started, track=_OWN)
            phases["write"] = writing
            if proof is not None:
                phase = "verify"
                self._control.digests(self.rank, sync, proof.digests(), proof.seconds)
        except Exception as error:
            raise self._failed(sync, phase, error) from error

    def _told(self) -> wire.Timeline | None:
        """What this rank did so far. The driver keeps its own, which goes on after the commit."""
        return self._timeline.timeline(f"source rank {self.rank}") if self.rank else None

    def _failed(
        self,
        sync: int | None,
        phase: str,
        error: BaseException,
        version: int | None = None,
        member: str | None = None,
    ) -> RdtError:
        """Fails the sync for everybody; returns the failure that came first, which is the same on every rank.

        Before this rank has begun, `version` says what it does not begin.
        """
        own = error if isinstance(error, RdtError) else SyncError(text_of(error))
        member = member or f"source rank {self.rank}"
        try:
            absent = None if version is None else (self.rank, version)
            first = self._control.fail(sync, member, phase, str(own), absent, None, (self.rank, self._token))
        except TakenOverError as out:
            return out
        except RdtError as unheard:
            self._is_lost = self._is_lost or isinstance(unheard, CoordinatorLostError)
            log.warning("%s failed in %s (%s), and the coordinator could not be told: %s", member, phase, own, unheard)
            return own
        return own if first is None or first == str(own) else SyncError(first)

    def leave(self) -> None:
        """Leaves the group and releases what links hold. The parameters are left alone. Idempotent."""
        self._has_left = True
        try:
            if self.rank == 0:
                # its process keeps the coordinator, and the other ranks may still ask it for the last outcome
                self._control.settled(self._timeout_s)
            self._control.leave(self.rank, self._token)
        except RdtError as error:
            log.debug("source rank %d: the coordinator did not take the goodbye: %s", self.rank, error)
        self._publisher.close()
