"""One sync as the coordinator remembers it: who takes part, which rounds are published and read, and its outcome.

State and the checks of what members say about it, without waiting. A record is running until it has either a report or a
failure; its gates are where members wait. It refuses rounds that nobody declared, offers that answer nothing, and
accounts that do not match what the reader connected with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import wire
from .errors import SyncError, WireError
from .gates import Gate, member_name, member_names
from .members import Reader

#: what becomes of a sync when a replica fails: it fails for all, or goes on without that replica
POLICIES = ("require_all", "best_effort")


@dataclass(slots=True, eq=False)
class SyncRecord:
    """One sync, from the moment that every source rank has begun it.

    Attributes:
        id: counts the group's syncs from 1.
        version: what is synced.
        rounds: number of rounds by source rank.
        replicas: names of the replicas that take part.
        readers: their engine ranks by name, as they were connected at the start.
        policy: of `POLICIES`: what becomes of the sync when a replica fails.
        verify: of `wire.VERIFY`: how much of the bytes is compared by digests.
        idle_s: seconds without a call or a waiter after which everybody has forgotten it.
        unanswered: by source rank, the read requests that it has not offered to when the sync starts.
        accounted: opens when every engine rank has accounted for its bytes.
        digested: opens when every source rank has handed in its digests.
        ended: opens at the commit.
        told: opens when every source rank has its outcome.
        reports: accounts of engine ranks.
        proofs: digests of what each source rank holds, by source rank and reader.
        proof_s: seconds that the slowest source rank spent on them.
        pulling: replicas that may have received bytes.
        dropped: replicas that failed while the sync goes on for the others, and why.
        failure: the first failure, empty if there was none.
        report: the `SyncReport`, empty until the commit.
        brief: the same for every source rank but the driver: without timelines, and without links where there are too many.
        entered: engine ranks that started to pull.
        timelines: of source ranks, by rank.
        began: reading of `time.monotonic` at the start.
        touched: event loop time of the last call.
        watchdog: ends a sync that everybody forgot.
    """

    id: int
    version: int
    rounds: Mapping[int, int]
    replicas: tuple[str, ...]
    readers: Mapping[str, Reader]
    idle_s: float
    policy: str = "require_all"
    verify: str = "off"
    unanswered: dict[int, list[wire.ReadRequest]] = field(init=False, default_factory=dict)
    accounted: Gate = field(init=False)
    digested: Gate = field(init=False)
    told: Gate = field(init=False)
    ended: Gate = field(init=False, default_factory=lambda: Gate((0,)))
    reports: dict[str, wire.ReaderReport] = field(init=False, default_factory=dict)
    proofs: dict[int, dict[str, bytes]] = field(init=False, default_factory=dict)
    proof_s: float = field(init=False, default=0.0)
    pulling: set[str] = field(init=False, default_factory=set)
    dropped: dict[str, str] = field(init=False, default_factory=dict)
    failure: str = field(init=False, default="")
    report: bytes = field(init=False, default=b"")
    brief: bytes = field(init=False, default=b"")
    entered: set[str] = field(init=False, default_factory=set)
    timelines: dict[int, wire.Timeline] = field(init=False, default_factory=dict)
    began: float = field(init=False, default_factory=time.monotonic)
    touched: float = field(init=False, default=0.0)
    watchdog: asyncio.TimerHandle | None = field(init=False, default=None)
    _published: dict[int, Gate] = field(init=False, default_factory=dict)
    _read: dict[int, Gate] = field(init=False, default_factory=dict)
    _acknowledged: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.accounted = Gate(self.readers)
        self.told = Gate(sorted(self.rounds))
        self.digested = Gate(sorted(self.rounds))
        for reader in self.readers.values():
            for rank in reader.offered.missing:
                if isinstance(rank, int):
                    self.unanswered.setdefault(rank, []).append(reader.asked[rank])

    @property
    def is_running(self) -> bool:
        """Whether it has no outcome yet."""
        return not self.failure and not self.report

    @property
    def has_waiters(self) -> bool:
        """Whether somebody waits for this sync."""
        return any(gate.waiting for gate in self._gates())

    # --- rounds

    def published(self, round: int) -> Gate:
        """Returns the gate that waits for each source rank which has this round. Raises WireError if none has."""
        if round not in self._published:
            self._check_round(round)
            self._published[round] = Gate(rank for rank in sorted(self.rounds) if self.rounds[rank] > round)
        return self._published[round]

    def publish(self, rank: int, round: int) -> None:
        """A source rank's bytes of this round are readable. Raises WireError if it did not declare the round."""
        declared = self.rounds.get(rank, 0)
        if not 0 <= round < declared:
            raise WireError(f"source rank {rank} published round {round}; it declared {declared} rounds")
        self.published(round).arrive(rank)

    def read(self, round: int) -> Gate:
        """Returns the gate that waits for every engine rank to have read this round. Raises as `published`."""
        if round not in self._read:
            self._check_round(round)
            self._read[round] = Gate(self.readers)
        return self._read[round]

    def tell(self, rank: int, timeline: bytes | None) -> None:
        """A source rank says when it did what, as far as it knows by now. Raises WireError for what is no timeline."""
        if timeline is not None and self.is_running:
            self.timelines[rank] = wire.decode(timeline, wire.Timeline)

    def acknowledge(self, reader: str, until: int) -> None:
        """An engine rank has all its bytes of every round before `until`."""
        for round in range(self._acknowledged.get(reader, 0), until):
            self.read(round).arrive(reader)
            self._acknowledged[reader] = round + 1

    def has_read(self, reader: str) -> bool:
        """Whether an engine rank has all its bytes of some round, whose bucket may hold another one since."""
        return self._acknowledged.get(reader, 0) > 0

    # --- engine ranks

    def taking_part(self, reader: str) -> Reader:
        """Returns an engine rank that takes part. Raises SyncError for others, and for those whose replica was dropped."""
        dropped = self.dropped.get(reader.rpartition("/")[0])
        if dropped is not None:
            raise SyncError(dropped)
        if reader not in self.readers:
            raise SyncError(
                f"{member_name(reader)} takes no part in sync {self.id} of version {self.version}; it does from "
                f"the next sync on, once its whole replica is connected"
            )
        return self.readers[reader]

    def asked(self, rank: int, offer: wire.LinkOffer, refs: int) -> Reader:
        """Returns the reader that an offer with so many references is for.

        Raises:
            WireError: the reader takes no part, or did not ask this source rank.
        """
        where = f"the offer of source rank {rank} to {member_name(offer.reader)}"
        reader = self.readers.get(offer.reader)
        if reader is None or reader.manifest.incarnation != offer.incarnation:
            raise WireError(f"{where}, incarnation {offer.incarnation!r}, is for no reader of sync {self.id}")
        if offer.source != rank:
            raise WireError(f"{where} names source rank {offer.source}")
        if rank not in reader.asked:
            raise WireError(f"{where} answers no request")
        if offer.refs != refs:
            raise WireError(f"{where} declares {offer.refs} references, {refs} came with it")
        return reader

    def prove(self, rank: int, digests: dict[str, bytes], seconds: float) -> None:
        """Takes the digests of what a source rank holds, by reader. Raises WireError for a rank that is no member."""
        if rank not in self.rounds:
            raise WireError(f"source rank {rank} hands in digests; the group has ranks {sorted(self.rounds)}")
        self.proofs[rank] = digests
        self.proof_s = max(self.proof_s, seconds)
        self.digested.arrive(rank)

    def compare(self, reader: str, digests: dict[int, bytes]) -> dict[int, list[int]]:
        """Compares an engine rank's digests with those of its source ranks, which have come.

        Returns:
            Positions of the digests that differ, by source rank, where any does.

        Raises:
            WireError: the two ends did not digest the same number of blocks.
        """
        differing = {}
        for rank in sorted(self.readers[reader].asked):
            theirs, mine = self.proofs[rank].get(reader, b""), digests.get(rank, b"")
            if len(theirs) != len(mine) or len(mine) % 8:
                raise WireError(
                    f"{member_name(reader)} digested {len(mine) / 8:g} blocks that it received of source rank {rank}, which "
                    f"digested {len(theirs) / 8:g}; both ends must run the same rdt version"
                )
            if theirs != mine:
                differing[rank] = [at // 8 for at in range(0, len(mine), 8) if mine[at : at + 8] != theirs[at : at + 8]]
        return differing

    def received(self, reader: str) -> None:
        """An engine rank has all its bytes: the buckets of the last rounds are free."""
        self.acknowledge(reader, max(self.rounds.values()))

    def account(self, report: wire.ReaderReport) -> str:
        """Takes an engine rank's account; it has read every round then.

        Returns:
            What does not match; empty if the account is taken.

        Raises:
            SyncError: it takes no part, is another incarnation, or contradicts its earlier account after the commit.
        """
        manifest = self.taking_part(report.reader).manifest
        name = member_name(report.reader)
        if report.incarnation != manifest.incarnation:
            raise SyncError(f"{name} reports as incarnation {report.incarnation!r}, which is gone")
        if self.reports.get(report.reader) == report:
            return ""
        if not self.is_running:
            raise SyncError(f"{name} reports otherwise than before, after version {self.version} was committed")
        if report.version != self.version:
            return f"it pulled version {report.version}"
        if not report.bytes == report.expected_bytes == manifest.nbytes:
            return (
                f"{report.bytes} bytes arrived, {report.expected_bytes} were expected, and the plan that it "
                f"connected with has {manifest.nbytes}"
            )
        if report.digest != manifest.digest:
            return f"it executed plan {report.digest}, but connected with plan {manifest.digest}"
        self.reports[report.reader] = report
        self._has_all(report.reader)
        return ""

    def drop(self, replica: str, failure: str) -> None:
        """A replica takes no part any more; nobody waits for it, and its engine ranks are told why."""
        self.dropped[replica] = failure
        for reader in self.of(replica):
            self.reports.pop(reader, None)
            self._has_all(reader)
            self.readers[reader].offered.wake(SyncError(failure))

    def of(self, replica: str) -> list[str]:
        """Returns the names of a replica's engine ranks."""
        return [name for name, reader in self.readers.items() if reader.manifest.replica == replica]

    def _has_all(self, reader: str) -> None:
        self.received(reader)
        self.accounted.arrive(reader)

    # --- the outcome

    def end(self, *, failure: str = "", report: bytes = b"") -> None:
        """Sets the outcome and tells everybody who waits."""
        self.failure, self.report = failure, report
        if self.watchdog is not None:
            self.watchdog.cancel()
            self.watchdog = None
        if report:
            self.ended.arrive(0)
        else:
            for gate in self._gates():
                gate.wake(SyncError(failure))

    def describe_silence(self) -> str:
        """Returns what keeps this sync from its commit."""
        late = self.accounted.missing
        return f"no account of the bytes from {member_names(late)}" if late else "the driver did not commit"

    def stalled(self) -> tuple[str, str]:
        """Returns the member that everybody waits for, as far as the coordinator can tell, and the phase that it is in."""
        for round, gate in sorted(self._published.items()):
            if gate.missing and gate.waiting:
                return member_names(gate.missing), f"write of round {round}"
        for reader in self.accounted.missing:
            offers = self.readers[str(reader)].offered
            if offers.missing and offers.waiting:
                return member_names(offers.missing), "offer"
        late = [str(reader) for reader in self.accounted.missing]
        if self.digested.waiting and self.digested.missing:
            return member_names(self.digested.missing), "verify"
        if not late:
            return "the driver, source rank 0", "finish or commit"
        away = [name for name in late if name not in self._acknowledged and name not in self.entered]
        return (member_names(away), "pause, begin or the start of the pull") if away else (member_names(late), "pull")

    def _gates(self) -> list[Gate]:
        offers = [reader.offered for reader in self.readers.values()]
        return [*self._published.values(), *self._read.values(), *offers, self.digested, self.accounted, self.ended]

    def _check_round(self, round: int) -> None:
        rounds = max(self.rounds.values())
        if not 0 <= round < rounds:
            raise WireError(
                f"round {round} of sync {self.id} does not exist; the source ranks declared {rounds} rounds"
            )
