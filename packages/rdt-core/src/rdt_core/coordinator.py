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
from .errors import (
    CoverageError,
    DeadlineError,
    MembershipError,
    RdtError,
    SyncError,
    VersionError,
    WireError,
)
from .gates import Gate, member_name, member_names

_HISTORY = 64


@dataclass(slots=True, eq=False)
class _Source:
    """A source rank that joined."""

    token: str
    data: bytes
    status: wire.SourceStatus
    mode_reason: str


@dataclass(slots=True, eq=False)
class _Reader:
    """An engine rank that connected, and the offers made to it."""

    manifest: wire.EngineManifest
    data: bytes
    epoch: int
    offered: Gate
    offers: dict[int, tuple[bytes, list[Any]]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica: its engine ranks and what it serves."""

    name: str
    ready: Gate
    world_size: int = 0
    readers: dict[int, _Reader] = field(default_factory=dict)
    version: int | None = None
    torn: str = ""


@dataclass(slots=True, eq=False)
class _Barrier:
    """The ranks that began and wait for the others."""

    gate: Gate
    versions: dict[int, int] = field(default_factory=dict)
    replicas: list[str] | None = None
    sync: _Sync | None = None


@dataclass(slots=True, eq=False)
class _Sync:
    """One sync, from the barrier of `begin` to its outcome."""

    id: int
    version: int
    rounds: dict[int, int]
    replicas: tuple[str, ...]
    readers: dict[str, _Reader]
    published: dict[int, Gate] = field(default_factory=dict)
    read: dict[int, Gate] = field(default_factory=dict)
    ended: Gate = field(default_factory=lambda: Gate((0,)))
    reports: dict[str, wire.ReaderReport] = field(default_factory=dict)
    pulling: set[str] = field(default_factory=set)
    failure: str = ""
    report: bytes = b""
    touched: float = 0.0
    watchdog: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return not self.failure and not self.report

    def gates(self) -> list[Gate]:
        """Every gate at which somebody may wait for this sync."""
        offers = [reader.offered for reader in self.readers.values()]
        return [*self.published.values(), *self.read.values(), *offers, self.ended]


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
        self._epoch = 0
        self._sources: dict[int, _Source] = {}
        self._joined = Gate(range(world_size))
        self._ever_joined: set[int] = set()
        self._tensors: tuple[int, tuple[wire.TensorMeta, ...]] | None = None
        self._replicas: dict[str, _Replica] = {}
        self._barrier = _Barrier(Gate(range(world_size)))
        self._sync: _Sync | None = None
        self._syncs = 0
        self._failures: dict[int, str] = {}
        self._last_failure = ""
        self._version: int | None = None

    # --- source ranks

    async def join(self, manifest: bytes, token: str) -> None:
        """Adds a source rank, or replaces the manifest of one whose memory moved (same token).

        Args:
            manifest: `SourceManifest`.
            token: secret of the process; proves later calls to come from the one that joined.

        Raises:
            MembershipError: another group or world size, or the rank is taken.
            VersionError: another major version of the wire format.
            CoverageError: its tensors differ from the other ranks'.
            WireError: the manifest is impossible.
        """
        message = wire.decode(manifest, wire.SourceManifest)
        rank = message.rank
        self._check_wire(member_name(rank), message.versions)
        self._check_group(member_name(rank), message.group)
        if message.world_size != self.world_size:
            raise MembershipError(
                f"source rank {rank} joins group {self.group!r} with a world of {message.world_size} source ranks; the "
                f"group was opened for {self.world_size}; every rank must pass the same world_size"
            )
        previous = self._sources.get(rank)
        if previous is not None and previous.token != token:
            raise MembershipError(
                f"two joins under one rank: source rank {rank} of group {self.group!r} is taken by process "
                f"{previous.status.pid} on {previous.status.hostname}, and process {message.node.pid} on "
                f"{message.node.hostname} joins as the same; give each trainer its own rank, or if the first one is "
                f"dead restart the whole group"
            )
        self._check_tensors(message)
        if previous is not None and previous.data == manifest:
            return
        if rank in self._ever_joined:
            self._epoch += 1
            if self._sync is not None and self._sync.is_running:
                self._fail(self._sync, member_name(rank), "join", "it joined again while the sync was running")
        if self._tensors is None or self._tensors[0] == rank:
            self._tensors = rank, message.tensors
        self._ever_joined.add(rank)
        self._sources[rank] = _Source(
            token,
            manifest,
            wire.SourceStatus(
                rank=rank,
                hostname=message.node.hostname,
                pid=message.node.pid,
                mode=message.mode,
                rounds=message.rounds,
            ),
            message.mode_reason,
        )
        self._joined.arrive(rank)

    async def leave(self, rank: int, token: str) -> None:
        """Removes a source rank; fails what was running. Nothing happens if it is not a member.

        Raises:
            MembershipError: the rank was joined with another token.
        """
        if rank not in self._sources:
            return
        self._check_token(rank, token)
        del self._sources[rank]
        if not self._sources:
            self._tensors = None
        elif self._tensors is not None and self._tensors[0] == rank:
            self._tensors = min(self._sources), self._tensors[1]
        self._joined.expect((rank,))
        self._interrupt(member_name(rank), "leave", "it left the group")

    async def sources(self, timeout_s: float) -> tuple[int, list[bytes]]:
        """Returns the epoch and the `SourceManifest` of every rank, in order, once all have joined.

        Raises:
            DeadlineError: names the ranks that have not joined.
        """
        what = f"all {self.world_size} source ranks to join"
        await self._wait(self._joined, timeout_s, what)
        return self._epoch, [self._sources[rank].data for rank in range(self.world_size)]

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
        message = wire.decode(manifest, wire.EngineManifest)
        name = member_name(message.reader)
        self._check_wire(name, message.versions)
        self._check_group(name, message.group)
        epoch = self._epoch if epoch is None else epoch
        if epoch != self._epoch:
            raise MembershipError(
                f"{name} planned against epoch {epoch} of group {self.group!r}, whose source ranks are at epoch "
                f"{self._epoch} since one of them joined again; read their manifests and plan again"
            )
        wanted: set[int] = set()
        for request in message.requests:
            if request.reader != message.reader or request.incarnation != message.incarnation:
                raise WireError(f"{name} sent a request of {request.reader!r}, incarnation {request.incarnation!r}")
            if not 0 <= request.source < self.world_size or request.source in wanted:
                raise WireError(
                    f"{name}: source rank {request.source} of {self.world_size} does not exist or is repeated"
                )
            wanted.add(request.source)
        replica = self._replica(message.replica)
        if replica.readers and replica.world_size != message.world_size:
            raise MembershipError(
                f"{name} connects with a world of {message.world_size} engine ranks; replica {replica.name!r} of group "
                f"{self.group!r} has {replica.world_size}; detach the old replica first, or give the new one another name"
            )
        previous = replica.readers.get(message.rank)
        if previous is not None:
            if previous.data == manifest and previous.epoch == epoch:
                return
            self._drop(replica, message.rank, "connect", "it connected again as another incarnation")
        if not replica.readers:
            replica.ready.reset(f"{replica.name}/{rank}" for rank in range(message.world_size))
            replica.world_size = message.world_size
        replica.readers[message.rank] = _Reader(message, manifest, epoch, Gate(sorted(wanted)))
        replica.ready.arrive(message.reader)

    async def disconnect(self, reader: str, incarnation: str) -> None:
        """Removes an engine rank; fails a sync that it takes part in. Nothing happens for another incarnation."""
        replica, rank = self._find_rank(reader)
        if replica is not None and replica.readers[rank].manifest.incarnation == incarnation:
            self._drop(replica, rank, "disconnect", "it disconnected")
            if not replica.readers:
                replica.torn = ""
                self._prune(replica)

    async def detach(self, replica: str) -> None:
        """Removes every engine rank of a replica (the way out when it died); fails a sync that it takes part in."""
        found = self._replicas.pop(replica, None)
        if found is not None:
            for rank in tuple(found.readers):
                self._drop(found, rank, "detach", "its replica was detached")
            found.ready.wake(MembershipError(f"replica {replica!r} was detached from group {self.group!r}"))

    async def replica_ready(self, replica: str, timeout_s: float) -> list[bytes]:
        """Returns the `EngineManifest` of every rank of a replica, in order, once all have connected.

        Raises:
            DeadlineError: names the ranks that have not connected.
            MembershipError: the replica was detached meanwhile.
        """
        found = self._replica(replica)
        try:
            await self._wait(found.ready, timeout_s, f"every engine rank of replica {replica!r} to connect")
        finally:
            self._prune(found)
        return [found.readers[rank].data for rank in range(found.world_size)]

    # --- a sync

    async def begin(
        self, rank: int, token: str, version: int, replicas: list[str] | None, timeout_s: float
    ) -> tuple[int, list[bytes]]:
        """Starts a sync: returns once every source rank has begun the same version.

        Args:
            rank: source rank.
            token: as at `join`.
            version: greater than the last committed one, or equal to publish it again.
            replicas: who takes part; rank 0's word counts. None: every replica that is connected.
            timeout_s: for all ranks to begin.

        Returns:
            The sync's id, and each `ReadRequest` to this rank that it has not answered with an offer yet.

        Raises:
            MembershipError: a rank that did not join, or replicas that are not connected or planned against an older
                epoch. In the latter case every rank gets this error and may begin again after they reconnected.
            SyncError: versions that differ or go back, or another rank failed; the same on every rank.
            DeadlineError: names the ranks that have not begun; the other ranks get a SyncError with the same message.
        """
        self._check_token(rank, token)
        me = member_name(rank)
        barrier = self._barrier
        if self._sync is not None and self._sync.is_running:
            problem = f"it began version {version} while version {self._sync.version} was running"
            raise SyncError(self._fail(self._sync, me, "begin", problem))
        if self._version is not None and version < self._version:
            self._reject(barrier, me, version, f"version {self._version} is committed already; versions never go back")
        for other, theirs in barrier.versions.items():
            if theirs != version:
                problem = f"it publishes version {version}, but source rank {other} publishes version {theirs}"
                self._reject(barrier, me, theirs, problem)
        barrier.versions[rank] = version
        if rank == 0:
            barrier.replicas = replicas
        if not barrier.gate.missing or barrier.gate.missing == (rank,):
            try:
                barrier.sync = self._start(version, barrier.replicas)
            except RdtError as error:
                self._reset(barrier, error)
                raise
            self._barrier = _Barrier(Gate(range(self.world_size)))
        barrier.gate.arrive(rank)
        try:
            await barrier.gate.wait(timeout_s)
        except TimeoutError:
            problem = self._late(timeout_s, f"every source rank to begin version {version}", barrier.gate.missing)
            message = _failure(version, me, "begin", problem)
            self._reset(barrier, SyncError(message))
            raise DeadlineError(message) from None
        sync = barrier.sync
        assert sync is not None
        requests = [
            wire.encode(request)
            for reader in sync.readers.values()
            if rank not in reader.offers
            for request in reader.manifest.requests
            if request.source == rank
        ]
        return sync.id, requests

    async def offer(self, rank: int, sync: int, offers: list[bytes], refs: list[list[Any]]) -> None:
        """Takes a source rank's answers to read requests.

        Args:
            rank: source rank.
            sync: id of the running sync.
            offers: `LinkOffer` messages.
            refs: for each offer the Ray object references that travel beside it; kept until the reader goes away.

        Raises:
            SyncError: the sync failed or is over.
            WireError: an offer that answers no request of a taking-part reader, or not as many lists as offers.
        """
        record = self._find(sync)
        if len(offers) != len(refs):
            raise WireError(f"source rank {rank} sent {len(offers)} offers with {len(refs)} lists of references")
        for data, beside in zip(offers, refs, strict=True):
            offer = wire.decode(data, wire.LinkOffer)
            reader = record.readers.get(offer.reader)
            if reader is None or reader.manifest.incarnation != offer.incarnation or offer.source != rank:
                raise WireError(
                    f"source rank {rank} offers as source rank {offer.source} to {member_name(offer.reader)}, incarnation "
                    f"{offer.incarnation!r}, which is not a reader of this sync"
                )
            if not any(request.source == rank for request in reader.manifest.requests):
                raise WireError(f"source rank {rank} offers to {member_name(offer.reader)}, which did not ask it")
            if offer.refs != len(beside):
                raise WireError(
                    f"source rank {rank}: {len(beside)} references beside an offer to {member_name(offer.reader)} that "
                    f"declares {offer.refs}"
                )
            reader.offers[rank] = data, beside
            reader.offered.arrive(rank)

    async def offers(self, reader: str, incarnation: str, timeout_s: float) -> tuple[list[bytes], list[list[Any]]]:
        """Returns all `LinkOffer`s for a reader and their references, by source rank, once every one has offered.

        Raises:
            MembershipError: the reader is not connected as this incarnation.
            SyncError: the sync that it takes part in failed.
            DeadlineError: names the source ranks that have not offered; fails the sync that the reader takes part in.
        """
        replica, rank = self._find_rank(reader)
        if replica is None or replica.readers[rank].manifest.incarnation != incarnation:
            raise MembershipError(f"{member_name(reader)} is not connected to group {self.group!r} as {incarnation!r}")
        found = replica.readers[rank]
        latest = self._sync if self._sync is not None and self._sync.readers.get(reader) is found else None
        if not found.offered.is_open and latest is not None and latest.failure:
            raise SyncError(latest.failure)
        await self._wait(found.offered, timeout_s, "the offers of source ranks", latest, reader, "offers")
        ordered = [found.offers[source] for source in sorted(found.offers)]
        return [data for data, _ in ordered], [beside for _, beside in ordered]

    async def running(self, version: int) -> int:
        """Returns the id of the running sync, which must be of `version`.

        Raises:
            SyncError: no sync runs, or one of another version.
        """
        record = self._sync
        if record is None or not record.is_running or record.version != version:
            found = f"version {record.version}" if record is not None and record.is_running else "nothing"
            failed = f"; the latest failure was: {self._last_failure}" if self._last_failure else ""
            raise SyncError(f"group {self.group!r} is not syncing version {version} but {found}{failed}")
        return record.id

    async def published(self, rank: int, sync: int, round: int) -> None:
        """A source rank's bytes of this round are readable and hold still. Raises SyncError if the sync is over."""
        record = self._find(sync)
        if not 0 <= round < record.rounds.get(rank, 0):
            raise WireError(
                f"source rank {rank} published round {round}; it declared {record.rounds.get(rank, 0)} rounds"
            )
        self._published(record, round).arrive(rank)

    async def await_round(self, reader: str, sync: int, round: int, timeout_s: float) -> None:
        """Returns when every source rank has published the round; from here on the reader may have received bytes.

        Raises:
            SyncError: the sync failed or is over.
            DeadlineError: names the source ranks that have not published; fails the sync.
        """
        record = self._find(sync)
        self._check_taking_part(record, reader)
        record.pulling.add(record.readers[reader].manifest.replica)
        what = f"round {round} of sync {sync} to be published"
        await self._wait(self._published(record, round), timeout_s, what, record, reader, "await_round")

    async def read(self, reader: str, sync: int, round: int) -> None:
        """The reader has all its bytes of this round. Raises SyncError if the sync is over."""
        record = self._find(sync)
        self._check_taking_part(record, reader)
        self._read(record, round).arrive(reader)

    async def await_read(self, rank: int, sync: int, round: int, timeout_s: float) -> None:
        """Returns when every taking-part engine rank has read the round.

        Raises:
            SyncError: the sync failed or is over.
            DeadlineError: names the engine ranks that have not; fails the sync.
        """
        record = self._find(sync)
        what = f"round {round} of sync {sync} to be read"
        await self._wait(self._read(record, round), timeout_s, what, record, rank, "await_read")

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
        self._check_taking_part(record, message.reader)
        manifest = record.readers[message.reader].manifest
        if message.incarnation != manifest.incarnation:
            raise SyncError(f"{member_name(message.reader)} reports as an incarnation that is gone")
        if not record.is_running:
            if record.reports.get(message.reader) != message:
                raise SyncError(
                    f"{member_name(message.reader)} reports again after version {record.version} was committed"
                )
            return
        problem = ""
        if message.version != record.version:
            problem = f"it pulled version {message.version}"
        elif not message.bytes == message.expected_bytes == manifest.nbytes:
            problem = f"{message.bytes} bytes arrived; it expected {message.expected_bytes} and its plan has {manifest.nbytes}"
        elif message.digest != manifest.digest:
            problem = f"it executed plan {message.digest}, but connected with plan {manifest.digest}"
        if problem:
            raise SyncError(self._fail(record, member_name(message.reader), "accounting", problem))
        record.reports[message.reader] = message

    async def fail(self, sync: int | None, member: str, phase: str, message: str) -> str | None:
        """Fails a sync for all of its members; the first failure wins.

        Args:
            sync: id; None: the running sync, else the ranks that wait in `begin`.
            member: who failed, as messages call it.
            phase: in what.
            message: why.

        Returns:
            The failure that every member sees, or None if there was nothing to fail.
        """
        record = self._sync
        if sync is not None and (record is None or record.id != sync):
            return self._failures.get(sync)
        if record is not None and (record.is_running or sync is not None):
            return self._fail(record, member, phase, message) or None
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
            `SyncReport`, the same for every rank.

        Raises:
            SyncError: engine ranks that have not accounted (this fails the sync), or the sync failed or is over.
        """
        record = self._find(sync)
        if record.report:
            return record.report
        missing = [reader for reader in record.readers if reader not in record.reports]
        if missing:
            problem = f"no account of the bytes from {member_names(missing)}"
            raise SyncError(self._fail(record, member_name(rank), "commit", problem))
        source = self._sources.get(rank)
        if source is None:
            raise MembershipError(f"source rank {rank} is not a member of group {self.group!r}; it cannot commit")
        reports = tuple(record.reports[reader] for reader in record.readers)
        record.report = wire.encode(
            wire.SyncReport(
                group=self.group,
                version=record.version,
                seconds=seconds,
                phases=phases,
                bytes=sum(report.bytes for report in reports),
                mode=source.status.mode,
                mode_reason=source.mode_reason,
                readers=reports,
                replicas=record.replicas,
            )
        )
        self._version = record.version
        for name in record.replicas:
            self._replicas[name].version, self._replicas[name].torn = record.version, ""
        self._end(record)
        record.ended.arrive(0)
        return record.report

    async def outcome(self, sync: int, rank: int, timeout_s: float) -> bytes:
        """Returns the `SyncReport` once the driver committed.

        Raises:
            SyncError: the sync failed or is over.
            DeadlineError: names the engine ranks that have not accounted; fails the sync.
        """
        record = self._find(sync)
        waiting = [reader for reader in record.readers if reader not in record.reports]
        what = f"the driver to commit version {record.version}"
        if waiting:
            what += f" (at the start of the wait not accounted: {member_names(waiting)})"
        await self._wait(record.ended, timeout_s, what, record, rank, "outcome")
        return record.report

    # --- what everybody may ask

    async def current(self) -> tuple[int | None, int | None]:
        """Returns the last committed version and the id of the running sync."""
        return self._version, self._sync.id if self._sync is not None and self._sync.is_running else None

    async def status(self) -> bytes:
        """Returns a `GroupStatus`."""
        running = self._sync if self._sync is not None and self._sync.is_running else None
        return wire.encode(
            wire.GroupStatus(
                group=self.group,
                world_size=self.world_size,
                epoch=self._epoch,
                version=self._version,
                sync=running.id if running else None,
                sync_version=running.version if running else None,
                sources=tuple(self._sources[rank].status for rank in sorted(self._sources)),
                missing=tuple(rank for rank in range(self.world_size) if rank not in self._sources),
                replicas=tuple(self._replica_status(one) for one in self._replicas.values() if one.readers),
                last_failure=self._last_failure,
            )
        )

    # --- inside

    def _check_wire(self, name: str, versions: wire.VersionMeta) -> None:
        if versions.wire_major != wire.WIRE_MAJOR:
            raise VersionError(
                f"{name} speaks wire format {versions.wire_major}.{versions.wire_minor} (rdt {versions.rdt}); the "
                f"coordinator of group {self.group!r} needs {wire.WIRE_MAJOR}.x; install the same rdt-core on both sides"
            )

    def _check_group(self, name: str, group: str) -> None:
        if group != self.group:
            raise MembershipError(f"{name} belongs to group {group!r}, this is the coordinator of {self.group!r}")

    def _check_token(self, rank: int, token: str) -> None:
        source = self._sources.get(rank)
        if source is None:
            raise MembershipError(f"source rank {rank} is not a member of group {self.group!r}; it must join first")
        if source.token != token:
            raise MembershipError(
                f"source rank {rank} of group {self.group!r} was joined by process {source.status.pid} on "
                f"{source.status.hostname}, not by the caller"
            )

    def _check_tensors(self, message: wire.SourceManifest) -> None:
        if self._tensors is None or self._sources.keys() == {message.rank} or self._tensors[1] == message.tensors:
            return
        reference, expected = self._tensors
        where = f"source rank {message.rank} declares other checkpoint tensors than source rank {reference}"
        for index, (mine, theirs) in enumerate(zip(message.tensors, expected, strict=False)):
            if mine != theirs:
                raise CoverageError(
                    f"{where}: tensor {index} is {_describe(mine)} here and {_describe(theirs)} there; every rank must "
                    f"declare the whole model in one order"
                )
        longer = message.tensors if len(message.tensors) > len(expected) else expected
        first = longer[min(len(message.tensors), len(expected))]
        raise CoverageError(
            f"{where}: {len(message.tensors)} tensors here, {len(expected)} there; {_describe(first)} is on one side only"
        )

    def _check_taking_part(self, record: _Sync, reader: str) -> None:
        if reader not in record.readers:
            raise SyncError(
                f"{member_name(reader)} does not take part in sync {record.id} of version {record.version}; it does from "
                f"the next sync on once its whole replica is connected"
            )

    def _replica(self, name: str) -> _Replica:
        if name not in self._replicas:
            self._replicas[name] = _Replica(name, Gate((f"{name}/0",)))
        return self._replicas[name]

    def _prune(self, replica: _Replica) -> None:
        if not replica.readers and not replica.ready.waiting and self._replicas.get(replica.name) is replica:
            del self._replicas[replica.name]

    def _find_rank(self, reader: str) -> tuple[_Replica | None, int]:
        name, _, rank = reader.rpartition("/")
        replica = self._replicas.get(name)
        if replica is None or not rank.isdigit() or int(rank) not in replica.readers:
            return None, -1
        return replica, int(rank)

    def _drop(self, replica: _Replica, rank: int, phase: str, problem: str) -> None:
        """Removes an engine rank; its replica's version is unknown from now on, and torn stays torn."""
        found = replica.readers.pop(rank)
        reader = found.manifest.reader
        replica.version = None
        replica.ready.expect((reader,))
        found.offered.wake(MembershipError(f"{member_name(reader)} is gone: {problem}"))
        record = self._sync
        if record is not None and record.is_running and record.readers.get(reader) is found:
            self._fail(record, member_name(reader), phase, problem)

    def _start(self, version: int, names: list[str] | None) -> _Sync:
        """Makes the sync of a complete barrier. Raises MembershipError for replicas that cannot take part."""
        connected = [one.name for one in self._replicas.values() if one.readers and one.ready.is_open]
        names = connected if names is None else list(dict.fromkeys(names))
        readers: dict[str, _Reader] = {}
        for name in names:
            replica = self._replicas.get(name)
            if replica is None or not replica.ready.is_open:
                missing = f": no {member_names(replica.ready.missing)}" if replica is not None else ""
                raise MembershipError(
                    f"version {version}: replica {name!r} is not connected to group {self.group!r}{missing}; connected: "
                    f"{', '.join(connected) or 'none'}"
                )
            for rank in sorted(replica.readers):
                reader = replica.readers[rank]
                if reader.epoch != self._epoch:
                    raise MembershipError(
                        f"version {version}: {member_name(reader.manifest.reader)} planned against epoch {reader.epoch} of "
                        f"the source ranks, which are at epoch {self._epoch} since one of them joined again; connect replica "
                        f"{name!r} again, then begin again on every source rank"
                    )
                readers[reader.manifest.reader] = reader
        self._syncs += 1
        rounds = {rank: source.status.rounds for rank, source in self._sources.items()}
        record = _Sync(self._syncs, version, rounds, tuple(names), readers)
        self._sync = record
        loop = asyncio.get_running_loop()
        record.touched = loop.time()
        record.watchdog = loop.call_later(self.stall_timeout_s, self._watch, record)
        return record

    def _find(self, sync: int) -> _Sync:
        """Returns the latest sync if this is its id and it did not fail."""
        record = self._sync
        if record is None or record.id != sync:
            if sync in self._failures:
                raise SyncError(self._failures[sync])
            latest = f"the latest is sync {record.id} of version {record.version}" if record else "none has begun"
            raise SyncError(f"stale: sync {sync} of group {self.group!r} is over; {latest}")
        if record.failure:
            raise SyncError(record.failure)
        record.touched = asyncio.get_running_loop().time()
        return record

    def _published(self, record: _Sync, round: int) -> Gate:
        if round not in record.published:
            self._check_round(record, round)
            record.published[round] = Gate(rank for rank in sorted(record.rounds) if record.rounds[rank] > round)
        return record.published[round]

    def _read(self, record: _Sync, round: int) -> Gate:
        if round not in record.read:
            self._check_round(record, round)
            record.read[round] = Gate(record.readers)
        return record.read[round]

    def _check_round(self, record: _Sync, round: int) -> None:
        rounds = max(record.rounds.values())
        if not 0 <= round < rounds:
            raise WireError(
                f"round {round} of sync {record.id} does not exist; the source ranks declared {rounds} rounds"
            )

    async def _wait(
        self,
        gate: Gate,
        timeout_s: float,
        what: str,
        record: _Sync | None = None,
        member: Hashable = None,
        phase: str = "",
    ) -> None:
        """Waits at a gate; a deadline fails the sync `record` for everybody, in the name of `member`."""
        try:
            await gate.wait(timeout_s)
        except TimeoutError:
            problem = self._late(timeout_s, what, gate.missing if gate is not getattr(record, "ended", None) else ())
            if record is not None and record.is_running:
                raise DeadlineError(self._fail(record, member_name(member), phase, problem)) from None
            raise DeadlineError(f"group {self.group!r}: {problem}") from None

    def _late(self, timeout_s: float, what: str, missing: tuple[Hashable, ...]) -> str:
        silent = f"; no answer from {member_names(missing)}" if missing else ""
        return f"waited {timeout_s:g} s for {what}{silent}"

    def _fail(self, record: _Sync, member: str, phase: str, problem: str) -> str:
        """Fails a sync unless it has an outcome; returns the failure that counts (empty if it was committed)."""
        if not record.is_running:
            return record.failure
        record.failure = self._last_failure = _failure(record.version, member, phase, problem)
        self._failures[record.id] = record.failure
        while len(self._failures) > _HISTORY:
            del self._failures[next(iter(self._failures))]
        for name in record.pulling:
            if name in self._replicas:
                self._replicas[name].torn = record.failure
        self._end(record)
        for gate in record.gates():
            gate.wake(SyncError(record.failure))
        return record.failure

    def _end(self, record: _Sync) -> None:
        if record.watchdog is not None:
            record.watchdog.cancel()
            record.watchdog = None

    def _watch(self, record: _Sync) -> None:
        """Fails a sync that everybody forgot: waits have deadlines of their own, so only idle time counts."""
        if not record.is_running:
            return
        loop = asyncio.get_running_loop()
        if any(gate.waiting for gate in record.gates()):
            record.touched = loop.time()
        left = record.touched + self.stall_timeout_s - loop.time()
        if left > 0:
            record.watchdog = loop.call_later(left, self._watch, record)
            return
        missing = [reader for reader in record.readers if reader not in record.reports]
        behind = f"no account of the bytes from {member_names(missing)}" if missing else "the driver did not commit"
        self._fail(record, "the group", "stall", f"no member called for {self.stall_timeout_s:g} s; {behind}")

    def _reject(self, barrier: _Barrier, member: str, version: int, problem: str) -> NoReturn:
        error = SyncError(_failure(version, member, "begin", problem))
        self._reset(barrier, error)
        raise error

    def _reset(self, barrier: _Barrier, error: RdtError) -> None:
        """Raises `error` in every rank that waits in `begin`; the next `begin` starts afresh."""
        if isinstance(error, SyncError):
            self._last_failure = str(error)
        barrier.gate.wake(error)
        if self._barrier is barrier:
            self._barrier = _Barrier(Gate(range(self.world_size)))

    def _interrupt(self, member: str, phase: str, problem: str) -> None:
        """A source rank went away: fails the running sync, and the ranks that wait in `begin`."""
        if self._sync is not None and self._sync.is_running:
            self._fail(self._sync, member, phase, problem)
        if self._barrier.versions:
            version = next(iter(self._barrier.versions.values()))
            self._reset(self._barrier, SyncError(_failure(version, member, phase, problem)))

    def _replica_status(self, replica: _Replica) -> wire.ReplicaStatus:
        updating = self._sync is not None and self._sync.is_running and replica.name in self._sync.pulling
        if replica.torn and not updating:
            state = "torn"
        elif not replica.ready.is_open:
            state = "connecting"
        elif updating:
            state = "updating"
        else:
            state = "connected" if replica.version is None else "serving"
        return wire.ReplicaStatus(
            name=replica.name,
            world_size=replica.world_size,
            state=state,
            version=replica.version,
            torn=replica.torn,
            readers=tuple(
                wire.ReaderStatus(
                    reader=reader.manifest.reader,
                    incarnation=reader.manifest.incarnation,
                    hostname=reader.manifest.node.hostname,
                    pid=reader.manifest.node.pid,
                    engine=reader.manifest.engine,
                    epoch=reader.epoch,
                    nbytes=reader.manifest.nbytes,
                    requested=len(reader.manifest.requests),
                    offered=len(reader.offers),
                )
                for _, reader in sorted(replica.readers.items())
            ),
        )


def _failure(version: int, member: str, phase: str, problem: str) -> str:
    return f"version {version}: {member} failed in {phase}: {problem}"


def _describe(tensor: wire.TensorMeta) -> str:
    return f"{tensor.name!r} {list(tensor.shape)} {tensor.dtype}"
