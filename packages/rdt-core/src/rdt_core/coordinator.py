"""The coordinator of one sync group: membership, epochs, barriers, deadlines, and the outcome of every sync.

Control only: no weights pass through it. The class is plain asyncio under one event loop; `control` runs it as a named
Ray actor or in a thread. It refuses a rank that is taken, a version that goes back, messages of a sync that is over, a
commit before every byte is accounted for. The first failure of a sync is the outcome for all of its members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from . import wire
from .errors import DeadlineError, MembershipError, RdtError, SyncError, WireError
from .gates import Gate, member_name, member_names
from .members import Members, Reader
from .record import SyncRecord

_HISTORY = 64


@dataclass(slots=True, eq=False)
class _Barrier:
    """The source ranks that have begun and wait for the others."""

    gate: Gate
    versions: dict[int, int] = field(default_factory=dict)
    replicas: list[str] | None = None
    record: SyncRecord | None = None


class Coordinator:
    """The shared state of one sync group. Every method is a coroutine of one event loop; messages are msgpack.

    Args:
        group: the group's name.
        world_size: number of source ranks.
        stall_timeout_s: a running sync in which nobody waits and nobody called for so many seconds has failed.
    """

    def __init__(self, group: str, world_size: int, stall_timeout_s: float) -> None:
        if world_size < 1:
            raise MembershipError(f"group {group!r} needs at least one source rank, not {world_size}")
        self.group = group
        self.world_size = world_size
        self.stall_timeout_s = stall_timeout_s
        self._members = Members(group, world_size)
        self._barrier = _Barrier(Gate(range(world_size)))
        self._record: SyncRecord | None = None
        self._syncs = 0
        self._failures: dict[int, str] = {}
        self._last_failure = ""
        self._version: int | None = None

    # --- source ranks

    async def join(self, manifest: bytes, token: str) -> None:
        """Adds a source rank, or replaces the manifest of one whose memory moved (same token, the epoch advances).

        Args:
            manifest: `SourceManifest`.
            token: secret of the process; proves later calls to come from the one that joined.

        Raises:
            MembershipError: another group or world size, or the rank is taken.
            VersionError: another major version of the wire format.
            CoverageError: its tensors differ from the other ranks'.
            WireError: the manifest is impossible.
        """
        replaced = self._members.join(manifest, token)
        running = self._running()
        if replaced is not None and running is not None:
            self._fail(running, member_name(replaced), "join", "it joined again while the sync was running")

    async def leave(self, rank: int, token: str) -> None:
        """Removes a source rank; fails what was running. Nothing happens if it is not a member.

        Raises:
            MembershipError: the rank was joined with another token.
        """
        if not self._members.leave(rank, token):
            return
        if self._record is not None:
            self._record.told.arrive(rank)
        await self.fail(None, member_name(rank), "leave", "it left the group")

    async def sources(self, timeout_s: float) -> tuple[int, list[bytes]]:
        """Returns the epoch and the `SourceManifest` of every rank, in order, once all have joined.

        Raises:
            DeadlineError: names the ranks that have not joined.
        """
        await self._wait(self._members.joined, timeout_s, f"all {self.world_size} source ranks to join")
        return self._members.epoch, [self._members.sources[rank].data for rank in range(self.world_size)]

    # --- engine ranks

    async def connect(self, manifest: bytes, epoch: int | None = None) -> None:
        """Adds an engine rank with its read requests; replaces an older incarnation of it.

        Args:
            manifest: `EngineManifest`.
            epoch: of the manifests that it planned against; None: the present one.

        Raises:
            MembershipError: another group, another world size inside the replica, or an epoch that is over.
            VersionError: another major version of the wire format.
            WireError: a request that is not this reader's own, names no source rank, or one twice.
        """
        self._lost(self._members.connect(manifest, epoch), "connect", "it connected again as another incarnation")

    async def disconnect(self, reader: str, incarnation: str) -> None:
        """Removes an engine rank; fails a sync that it takes part in. Nothing happens for another incarnation."""
        found = self._members.find(reader, incarnation)
        if found is not None:
            replica, one = found
            self._lost(self._members.drop(replica, one.manifest.rank), "disconnect", "it disconnected")
            if not replica.readers:
                replica.torn = ""
                self._members.prune(replica)

    async def detach(self, replica: str) -> None:
        """Removes every engine rank of a replica (the way out when it died); fails a sync that it takes part in."""
        found = self._members.replicas.pop(replica, None)
        if found is not None:
            for rank in tuple(found.readers):
                self._lost(self._members.drop(found, rank), "detach", "its replica was detached")
            found.ready.wake(MembershipError(f"replica {replica!r} was detached from group {self.group!r}"))

    async def replica_ready(self, replica: str, timeout_s: float) -> list[bytes]:
        """Returns the `EngineManifest` of every rank of a replica, in order, once all have connected.

        Raises:
            DeadlineError: names the ranks that have not connected.
            MembershipError: the replica was detached meanwhile.
        """
        found = self._members.replica(replica)
        try:
            await self._wait(found.ready, timeout_s, f"every engine rank of replica {replica!r} to connect")
        finally:
            self._members.prune(found)
        return [found.readers[rank].data for rank in range(found.world_size)]

    # --- a sync

    async def begin(
        self, rank: int, token: str, version: int, replicas: list[str] | None, timeout_s: float
    ) -> tuple[int, list[bytes]]:
        """Starts a sync: returns once every source rank has begun the same version. Fails a sync that still runs.

        Args:
            rank: source rank.
            token: as at `join`.
            version: greater than the last committed one, or equal to publish it again.
            replicas: who takes part; rank 0's word counts. None: every replica that is connected.
            timeout_s: for all ranks to begin.

        Returns:
            The sync's id, and each `ReadRequest` to this rank that it has not answered with an offer yet.

        Raises:
            MembershipError: this rank did not join; or, on every rank, a replica is not connected or planned against
                an older epoch: connect it (again), then begin again on every rank.
            SyncError: versions that differ or go back, or another rank failed; the same on every rank.
            DeadlineError: names the ranks that have not begun; the other ranks get a SyncError with the same message.
        """
        self._members.check_token(rank, token)
        me = member_name(rank)
        running = self._running()
        if running is not None:
            # It has given up on that sync without a word; its next begin is as good as the others' next one.
            self._fail(running, me, "begin", f"it began version {version} while version {running.version} was running")
        barrier = self._barrier
        if self._version is not None and version < self._version:
            self._reject(barrier, me, version, f"version {self._version} is committed; versions never go back")
        for other, theirs in barrier.versions.items():
            if theirs != version:
                problem = f"it publishes version {version}, but {member_name(other)} publishes version {theirs}"
                self._reject(barrier, me, theirs, problem)
        barrier.versions[rank] = version
        if rank == 0:
            barrier.replicas = replicas
        if barrier.gate.missing == (rank,):
            try:
                barrier.record = self._start(version, barrier.replicas)
            except RdtError as error:
                self._reset(barrier, error)
                raise
            self._barrier = _Barrier(Gate(range(self.world_size)))
        barrier.gate.arrive(rank)
        try:
            await barrier.gate.wait(timeout_s)
        except TimeoutError:
            problem = _late(timeout_s, f"every source rank to begin version {version}", barrier.gate.missing)
            message = _failure(version, me, "begin", problem)
            self._reset(barrier, SyncError(message))
            raise DeadlineError(message) from None
        record = barrier.record
        if record is None:
            raise SyncError(_failure(version, me, "begin", "the barrier opened without a sync"))
        requests = [
            wire.encode(request)
            for reader in record.readers.values()
            if rank not in reader.offers
            for request in reader.manifest.requests
            if request.source == rank
        ]
        return record.id, requests

    async def offer(self, rank: int, sync: int, offers: list[bytes], refs: list[list[Any]]) -> None:
        """Takes a source rank's answers to read requests.

        Args:
            rank: source rank.
            sync: id of the running sync.
            offers: `LinkOffer` messages.
            refs: for each offer the Ray object references that travel beside it; kept until the reader goes away.

        Raises:
            SyncError: the sync failed or is over.
            WireError: an offer that answers no request of a taking-part reader, or not as many lists as offers. None
                of the offers is taken then.
        """
        record = self._find(sync)
        if len(offers) != len(refs):
            raise WireError(f"source rank {rank} sent {len(offers)} offers with {len(refs)} lists of references")
        readers = [
            self._asked(record, rank, wire.decode(data, wire.LinkOffer), len(beside))
            for data, beside in zip(offers, refs, strict=True)
        ]
        for reader, data, beside in zip(readers, offers, refs, strict=True):
            reader.offers[rank] = data, beside
            reader.offered.arrive(rank)

    async def offers(self, reader: str, incarnation: str, timeout_s: float) -> tuple[list[bytes], list[list[Any]]]:
        """Returns all `LinkOffer`s for a reader and their references, by source rank, once every one has offered.

        Raises:
            MembershipError: the reader is not connected as this incarnation.
            SyncError: the sync that it takes part in failed.
            DeadlineError: names the source ranks that have not offered; fails the sync that the reader takes part in.
        """
        found = self._members.find(reader, incarnation)
        if found is None:
            raise MembershipError(f"{member_name(reader)} is not connected to group {self.group!r} as {incarnation!r}")
        one = found[1]
        record = self._record if self._record is not None and self._record.readers.get(reader) is one else None
        if record is not None and record.failure and not one.offered.is_open:
            raise SyncError(record.failure)
        await self._wait(one.offered, timeout_s, "the offers of source ranks", record, reader, "offers")
        ordered = [one.offers[source] for source in sorted(one.offers)]
        return [data for data, _ in ordered], [beside for _, beside in ordered]

    async def running(self, version: int) -> int:
        """Returns the id of the running sync, which must be of `version`.

        Raises:
            SyncError: no sync runs, or one of another version.
        """
        record = self._running()
        if record is None or record.version != version:
            found = f"version {record.version} is running" if record is not None else "no sync is running"
            failed = f"; the latest failure was: {self._last_failure}" if self._last_failure else ""
            raise SyncError(f"group {self.group!r} is not syncing version {version}: {found}{failed}")
        return record.id

    async def published(self, rank: int, sync: int, round: int) -> None:
        """A source rank's bytes of this round are readable and hold still. Raises SyncError if the sync is over."""
        record = self._find(sync)
        if not 0 <= round < record.rounds.get(rank, 0):
            declared = record.rounds.get(rank, 0)
            raise WireError(f"source rank {rank} published round {round}; it declared {declared} rounds")
        record.published(round).arrive(rank)

    async def await_round(self, reader: str, sync: int, round: int, timeout_s: float) -> None:
        """Returns when every source rank has published the round; from here on the reader may have received bytes.

        Raises:
            SyncError: the sync failed or is over, or the reader takes no part.
            DeadlineError: names the source ranks that have not published; fails the sync.
        """
        record = self._find(sync)
        gate = record.published(round)
        record.pulling.add(self._taking_part(record, reader).manifest.replica)
        what = f"round {round} of sync {sync} to be published"
        await self._wait(gate, timeout_s, what, record, reader, "await_round")

    async def read(self, reader: str, sync: int, round: int) -> None:
        """The reader has all its bytes of this round. Raises SyncError if the sync is over."""
        record = self._find(sync)
        self._taking_part(record, reader)
        record.read(round).arrive(reader)

    async def await_read(self, rank: int, sync: int, round: int, timeout_s: float) -> None:
        """Returns when every taking-part engine rank has read the round.

        Raises:
            SyncError: the sync failed or is over.
            DeadlineError: names the engine ranks that have not; fails the sync.
        """
        record = self._find(sync)
        what = f"round {round} of sync {sync} to be read"
        await self._wait(record.read(round), timeout_s, what, record, rank, "await_read")

    async def done(self, report: bytes, sync: int) -> None:
        """Takes an engine rank's account of the sync.

        Args:
            report: `ReaderReport`.
            sync: the sync's id.

        Raises:
            SyncError: bytes, digest or version are not what the reader's manifest and the sync say (this fails the
                sync), or the sync is over.
        """
        message = wire.decode(report, wire.ReaderReport)
        record = self._find(sync)
        manifest = self._taking_part(record, message.reader).manifest
        name = member_name(message.reader)
        if message.incarnation != manifest.incarnation:
            raise SyncError(f"{name} reports as incarnation {message.incarnation!r}, which is gone")
        if record.reports.get(message.reader) == message:
            return
        if not record.is_running:
            raise SyncError(f"{name} reports otherwise than before, after version {record.version} was committed")
        problem = ""
        if message.version != record.version:
            problem = f"it pulled version {message.version}"
        elif not message.bytes == message.expected_bytes == manifest.nbytes:
            problem = (
                f"{message.bytes} bytes arrived, {message.expected_bytes} were expected, and the plan that it "
                f"connected with has {manifest.nbytes}"
            )
        elif message.digest != manifest.digest:
            problem = f"it executed plan {message.digest}, but connected with plan {manifest.digest}"
        if problem:
            raise SyncError(self._fail(record, name, "accounting", problem))
        record.reports[message.reader] = message

    async def fail(self, sync: int | None, member: str, phase: str, message: str) -> str | None:
        """Fails a sync for all of its members; the first failure wins.

        Args:
            sync: id; None: the running sync and whoever waits in `begin`.
            member: who failed, as messages call it.
            phase: in what.
            message: why.

        Returns:
            The failure that every member sees, or None if there was nothing to fail.
        """
        if sync is not None:
            record = self._record
            if record is None or record.id != sync:
                return self._failures.get(sync)
            return self._fail(record, member, phase, message) or None
        running = self._running()
        if running is not None:
            return self._fail(running, member, phase, message)
        barrier = self._barrier
        if not barrier.versions:
            return None
        failure = _failure(next(iter(barrier.versions.values())), member, phase, message)
        self._reset(barrier, SyncError(failure))
        return failure

    async def commit(self, sync: int, rank: int, seconds: float, phases: dict[str, float]) -> bytes:
        """Stamps the version: every engine rank has accounted for its bytes and every replica serves it.

        Args:
            sync: the sync's id.
            rank: source rank that drives the sync.
            seconds: how long the sync took.
            phases: seconds by phase, as the driver saw them.

        Returns:
            `SyncReport`, the same for every rank; a repeated commit returns the first one's.

        Raises:
            SyncError: engine ranks that have not accounted (this fails the sync), or the sync failed or is over.
            MembershipError: the rank is not a member.
        """
        record = self._find(sync)
        source = self._members.sources.get(rank)
        if source is None:
            raise MembershipError(f"source rank {rank} is not a member of group {self.group!r}; it cannot commit")
        record.told.arrive(rank)
        if record.report:
            return record.report
        if record.unaccounted:
            raise SyncError(self._fail(record, member_name(rank), "commit", record.describe_silence()))
        reports = tuple(record.reports[reader] for reader in record.readers)
        report = wire.SyncReport(
            group=self.group,
            version=record.version,
            seconds=seconds,
            phases=phases,
            bytes=sum(one.bytes for one in reports),
            mode=source.status.mode,
            mode_reason=source.mode_reason,
            readers=reports,
            replicas=record.replicas,
        )
        self._version = record.version
        for name in record.replicas:
            replica = self._members.replicas[name]
            replica.version, replica.torn = record.version, ""
        record.end(report=wire.encode(report))
        return record.report

    async def outcome(self, sync: int, rank: int, timeout_s: float) -> bytes:
        """Returns the `SyncReport` once the driver committed.

        Raises:
            SyncError: the sync failed or is over.
            DeadlineError: says who has not accounted; fails the sync.
        """
        record = self._find(sync)
        what = f"the driver to commit version {record.version}"
        await self._wait(record.ended, timeout_s, what, record, rank, "outcome")
        record.told.arrive(rank)
        return record.report

    async def settled(self, timeout_s: float) -> None:
        """Returns when every source rank has the report of the latest sync, if that was committed, or has left.

        The process that the coordinator lives with waits for this before it ends.

        Raises:
            DeadlineError: names the ranks that have not asked.
        """
        if self._record is not None and self._record.report:
            what = f"every source rank to learn the outcome of version {self._record.version}"
            await self._wait(self._record.told, timeout_s, what)

    # --- what everybody may ask

    async def current(self) -> tuple[int | None, int | None]:
        """Returns the last committed version and the id of the running sync."""
        running = self._running()
        return self._version, running.id if running is not None else None

    async def status(self) -> bytes:
        """Returns a `GroupStatus`."""
        members = self._members
        running = self._running()
        pulling = running.pulling if running is not None else set()
        status = wire.GroupStatus(
            group=self.group,
            world_size=self.world_size,
            epoch=members.epoch,
            version=self._version,
            sync=running.id if running is not None else None,
            sync_version=running.version if running is not None else None,
            sources=tuple(members.sources[rank].status for rank in sorted(members.sources)),
            missing=tuple(rank for rank in range(self.world_size) if rank not in members.sources),
            replicas=tuple(one.status(one.name in pulling) for one in members.replicas.values() if one.readers),
            last_failure=self._last_failure,
        )
        return wire.encode(status)

    # --- inside

    def _running(self) -> SyncRecord | None:
        return self._record if self._record is not None and self._record.is_running else None

    def _start(self, version: int, names: list[str] | None) -> SyncRecord:
        """Makes the sync of a complete barrier. Raises MembershipError for replicas that cannot take part."""
        members = self._members
        connected = [one.name for one in members.replicas.values() if one.is_connected]
        names = connected if names is None else list(dict.fromkeys(names))
        readers: dict[str, Reader] = {}
        for name in names:
            replica = members.replicas.get(name)
            if replica is None or not replica.is_connected:
                missing = f", {member_names(replica.ready.missing)} not" if replica is not None else ""
                raise MembershipError(
                    f"version {version}: replica {name!r} is not connected to group {self.group!r}{missing}; "
                    f"connected replicas: {', '.join(connected) or 'none'}"
                )
            for _, reader in sorted(replica.readers.items()):
                if reader.epoch != members.epoch:
                    raise MembershipError(
                        f"version {version}: {member_name(reader.name)} planned against epoch {reader.epoch} of the "
                        f"source ranks, which are at epoch {members.epoch} since one of them joined again; connect "
                        f"replica {name!r} again, then begin again on every source rank"
                    )
                readers[reader.name] = reader
        self._syncs += 1
        rounds = {rank: source.status.rounds for rank, source in members.sources.items()}
        record = SyncRecord(self._syncs, version, rounds, tuple(names), readers, Gate(range(self.world_size)))
        self._record = record
        loop = asyncio.get_running_loop()
        record.touched = loop.time()
        record.watchdog = loop.call_later(self.stall_timeout_s, self._watch, record)
        return record

    def _find(self, sync: int) -> SyncRecord:
        """Returns the latest sync if this is its id and it did not fail."""
        record = self._record
        if record is None or record.id != sync:
            if sync in self._failures:
                raise SyncError(self._failures[sync])
            latest = f"the latest is sync {record.id} of version {record.version}" if record else "none has begun"
            raise SyncError(f"stale: sync {sync} of group {self.group!r} is over; {latest}")
        if record.failure:
            raise SyncError(record.failure)
        record.touched = asyncio.get_running_loop().time()
        return record

    def _taking_part(self, record: SyncRecord, reader: str) -> Reader:
        if reader not in record.readers:
            raise SyncError(
                f"{member_name(reader)} takes no part in sync {record.id} of version {record.version}; it does from "
                f"the next sync on, once its whole replica is connected"
            )
        return record.readers[reader]

    def _asked(self, record: SyncRecord, rank: int, offer: wire.LinkOffer, refs: int) -> Reader:
        """Returns the reader that an offer is for. Raises WireError if it did not ask this source rank."""
        where = f"the offer of source rank {rank} to {member_name(offer.reader)}"
        reader = record.readers.get(offer.reader)
        if reader is None or reader.manifest.incarnation != offer.incarnation:
            raise WireError(f"{where}, incarnation {offer.incarnation!r}, is for no reader of sync {record.id}")
        if offer.source != rank:
            raise WireError(f"{where} names source rank {offer.source}")
        if not any(request.source == rank for request in reader.manifest.requests):
            raise WireError(f"{where} answers no request")
        if offer.refs != refs:
            raise WireError(f"{where} declares {offer.refs} references, {refs} came with it")
        return reader

    def _lost(self, reader: Reader | None, phase: str, problem: str) -> None:
        """An engine rank went away: fails the running sync if it takes part."""
        running = self._running()
        if reader is not None and running is not None and running.readers.get(reader.name) is reader:
            self._fail(running, member_name(reader.name), phase, problem)

    async def _wait(
        self,
        gate: Gate,
        timeout_s: float,
        what: str,
        record: SyncRecord | None = None,
        member: Hashable = None,
        phase: str = "",
    ) -> None:
        """Waits at a gate; a deadline fails the sync `record` for everybody, in the name of `member`."""
        try:
            await gate.wait(timeout_s)
        except TimeoutError:
            if record is not None and gate is record.ended:
                problem = f"{_late(timeout_s, what, ())}; {record.describe_silence()}"
            else:
                problem = _late(timeout_s, what, gate.missing)
            if record is not None and record.is_running:
                raise DeadlineError(self._fail(record, member_name(member), phase, problem)) from None
            raise DeadlineError(f"group {self.group!r}: {problem}") from None

    def _fail(self, record: SyncRecord, member: str, phase: str, problem: str) -> str:
        """Fails a sync unless it has an outcome; returns the failure that counts (empty if it was committed)."""
        if not record.is_running:
            return record.failure
        failure = self._last_failure = self._failures[record.id] = _failure(record.version, member, phase, problem)
        while len(self._failures) > _HISTORY:
            del self._failures[next(iter(self._failures))]
        for name in record.pulling:
            replica = self._members.replicas.get(name)
            if replica is not None:
                replica.version, replica.torn = None, failure
        record.end(failure=failure)
        return failure

    def _watch(self, record: SyncRecord) -> None:
        """Fails a sync that everybody forgot: waits have deadlines of their own, so only idle time counts."""
        if not record.is_running:
            return
        loop = asyncio.get_running_loop()
        if record.has_waiters:
            record.touched = loop.time()
        left = record.touched + self.stall_timeout_s - loop.time()
        if left > 0:
            record.watchdog = loop.call_later(left, self._watch, record)
        else:
            problem = f"no member called for {self.stall_timeout_s:g} s; {record.describe_silence()}"
            self._fail(record, "the group", "stall", problem)

    def _reject(self, barrier: _Barrier, member: str, version: int, problem: str) -> NoReturn:
        error = SyncError(_failure(version, member, "begin", problem))
        self._reset(barrier, error)
        raise error

    def _reset(self, barrier: _Barrier, error: RdtError) -> None:
        """Raises `error` in every rank that waits in `begin`; the next `begin` starts afresh."""
        self._last_failure = str(error)
        barrier.gate.wake(error)
        if self._barrier is barrier:
            self._barrier = _Barrier(Gate(range(self.world_size)))


def _failure(version: int, member: str, phase: str, problem: str) -> str:
    return f"version {version}: {member} failed in {phase}: {problem}"


def _late(timeout_s: float, what: str, missing: tuple[Hashable, ...]) -> str:
    silent = f"; no answer from {member_names(missing)}" if missing else ""
    return f"waited {timeout_s:g} s for {what}{silent}"
