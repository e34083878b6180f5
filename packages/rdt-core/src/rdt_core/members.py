"""Who belongs to a sync group: source ranks with their manifests, replicas with their engine ranks and requests.

State and its checks, without waiting: the coordinator's half that syncs stand on. It refuses a rank that is taken,
another group, world size, wire format, shape or dtype of a checkpoint tensor, and plans made against manifests that have changed
since.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from . import wire
from .declared import Declared
from .errors import MembershipError, SyncError, TakenOverError, VersionError, WireError
from .gates import Gate, member_name
from .manifests import join as joined_manifests


@dataclass(slots=True, eq=False)
class Source:
    """A source rank that joined."""

    token: str
    data: bytes
    status: wire.SourceStatus
    mode_reason: str
    tensors: tuple[wire.TensorMeta, ...]
    term: int = 0  # how many processes had this place before
    attempt: int = 0  # greatest of its begins
    took_over: bool = False  # it joined this coordinator in the place of another process
    gone: list[tuple[str, str]] = field(default_factory=list)  # readers that it serves for nothing: name, incarnation
    joined: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)

    def seen(self) -> wire.SourceStatus:
        """Returns what is known about this source rank."""
        now = time.monotonic()
        return msgspec.structs.replace(self.status, since_s=now - self.joined, heard_s=now - self.heard)

    def begins(self, attempt: int) -> None:
        """Counts a begin of this rank. Raises SyncError for one that came before, or is older than one that did."""
        if attempt <= self.attempt:
            raise SyncError(
                f"stale: {member_name(self.status.rank)} has begun {self.attempt} times, and this is number {attempt}"
            )
        self.attempt = attempt
        self.heard = time.monotonic()


@dataclass(slots=True, eq=False)
class Reader:
    """An engine rank that connected: its requests by source rank, and the offers made to it, message and references."""

    manifest: wire.EngineManifest
    data: bytes
    epoch: int
    offered: Gate
    asked: dict[int, wire.ReadRequest]
    offers: dict[int, tuple[bytes, list[Any]]] = field(default_factory=dict)
    joined: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """The reader's name in the group."""
        return self.manifest.reader

    def status(self) -> wire.ReaderStatus:
        """Returns what is known about this engine rank."""
        now = time.monotonic()
        return wire.ReaderStatus(
            reader=self.name,
            incarnation=self.manifest.incarnation,
            hostname=self.manifest.node.hostname,
            pid=self.manifest.node.pid,
            engine=self.manifest.engine,
            epoch=self.epoch,
            nbytes=self.manifest.nbytes,
            requested=len(self.manifest.requests),
            offered=len(self.offers),
            since_s=now - self.joined,
            heard_s=now - self.heard,
        )


@dataclass(slots=True, eq=False)
class Replica:
    """A replica: its engine ranks, and the version it serves as far as syncs decided it."""

    name: str
    ready: Gate
    world_size: int = 0
    readers: dict[int, Reader] = field(default_factory=dict)
    version: int | None = None
    torn: str = ""
    attempt: str = ""  # the latest connect that its driver began

    @property
    def is_connected(self) -> bool:
        """Whether every engine rank is connected."""
        return bool(self.readers) and self.ready.is_open

    def status(self, is_updating: bool) -> wire.ReplicaStatus:
        """Returns what is known about this replica."""
        if self.torn and not is_updating:
            state = "torn"
        elif not self.is_connected:
            state = "connecting"
        elif is_updating:
            state = "updating"
        else:
            state = "connected" if self.version is None else "serving"
        return wire.ReplicaStatus(
            name=self.name,
            world_size=self.world_size,
            state=state,
            version=self.version,
            torn=self.torn,
            readers=tuple(reader.status() for _, reader in sorted(self.readers.items())),
        )


class Members:
    """The members of one group.

    Args:
        group: the group's name.
        world_size: number of source ranks.
    """

    def __init__(self, group: str, world_size: int) -> None:
        self.group = group
        self.world_size = world_size
        self.epoch = 0
        self.sources: dict[int, Source] = {}
        self.joined = Gate(range(world_size))
        self.replicas: dict[str, Replica] = {}
        self.terms: dict[int, int] = {}  # by source rank, where a process took another one's place
        self._ever_joined: set[int] = set()
        self._declared: Declared | None = Declared()  # None until made again, after a rank left or changed
        self._manifests: tuple[list[bytes], bytes] | None = None  # each rank's, and all joined

    def learn(self, terms: Mapping[int, int]) -> None:
        """Takes what a rank knows about who took whose place; a process of an earlier term is a member no more."""
        for rank, term in terms.items():
            if term <= self.terms.get(rank, 0):
                continue
            self.terms[rank] = term
            source = self.sources.get(rank)
            if source is not None and source.took_over:
                # it came after all whose place was taken before, to a coordinator that had not heard of them yet
                self.terms[rank] = source.term = term + 1
            elif source is not None and source.term < term:
                del self.sources[rank]
                self._declared = None
                self.joined.expect((rank,))

    def _term(self, rank: int, token: str, takeover: bool, term: int) -> int:
        """Returns the term that a process joins in. Raises TakenOverError for one whose place was taken."""
        known, previous = self.terms.get(rank, 0), self.sources.get(rank)
        if previous is not None and previous.token == token:
            return previous.term
        if takeover:
            return known + 1
        if term < known:
            raise TakenOverError(
                f"source rank {rank} of group {self.group!r} has been taken over by another process; this one is out. A process "
                "that is to take its place in turn joins with takeover=True"
            )
        return term

    def join(self, manifest: bytes, token: str, takeover: bool = False, term: int = 0) -> int | None:
        """Adds a source rank or replaces its manifest; see `Coordinator.join`.

        Returns:
            The rank if its manifest took an earlier one's place, so that the epoch has advanced; else None.
        """
        message = wire.decode(manifest, wire.SourceManifest)
        rank = message.rank
        self._check(member_name(rank), message.group, message.versions)
        if message.world_size != self.world_size:
            raise MembershipError(
                f"source rank {rank} joins group {self.group!r} with a world of {message.world_size} source ranks; "
                f"the group was opened for {self.world_size}; every rank must pass the same world_size"
            )
        previous = self.sources.get(rank)
        term = self._term(rank, token, takeover, term)
        if previous is not None and previous.token != token and term <= previous.term:
            raise MembershipError(
                f"two joins under one rank: source rank {rank} of group {self.group!r} is taken by process "
                f"{previous.status.pid} on {previous.status.hostname}, and process {message.node.pid} on "
                f"{message.node.hostname} joins as the same; give each trainer its own rank, or if the first one is "
                f"dead and this one takes its place, join with takeover=True"
            )
        if previous is not None and previous.data == manifest and previous.token == token:
            return None
        if self._declared is None or previous is None or previous.tensors != message.tensors:
            self._declare(message)
        status = wire.SourceStatus(
            rank=rank,
            hostname=message.node.hostname,
            pid=message.node.pid,
            mode=message.mode,
            rounds=message.rounds,
        )
        attempt = previous.attempt if previous is not None and previous.token == token else 0
        self.terms[rank] = max(term, self.terms.get(rank, 0))
        took_over = takeover or (previous is not None and previous.token == token and previous.took_over)
        self.sources[rank] = Source(
            token, manifest, status, message.mode_reason, message.tensors, term, attempt, took_over
        )
        self.joined.arrive(rank)
        if rank not in self._ever_joined:
            self._ever_joined.add(rank)
            return None
        self.epoch += 1
        return rank

    def manifests(self) -> bytes:
        """The manifests of all source ranks, which have joined, as `manifests.join` makes one message of them."""
        data = [self.sources[rank].data for rank in range(self.world_size)]
        if self._manifests is None or self._manifests[0] != data:
            self._manifests = data, joined_manifests([wire.decode(one, wire.SourceManifest) for one in data])
        return self._manifests[1]

    def leave(self, rank: int, token: str) -> bool:
        """Removes a source rank. Returns False if it is not a member. Raises MembershipError for another's token."""
        if rank not in self.sources:
            return False
        self.check_token(rank, token)
        del self.sources[rank]
        self._declared = None
        self.joined.expect((rank,))
        return True

    def check_token(self, rank: int, token: str) -> None:
        """Raises MembershipError unless the rank joined with this token."""
        source = self.sources.get(rank)
        if source is None:
            raise MembershipError(f"source rank {rank} is not a member of group {self.group!r}; it must join first")
        if source.token != token:
            kind = TakenOverError if source.term else MembershipError
            raise kind(
                f"source rank {rank} of group {self.group!r} was joined by process {source.status.pid} on "
                f"{source.status.hostname}, not by the caller"
            )

    def connect(self, manifest: bytes, epoch: int | None) -> Reader | None:
        """Adds an engine rank, taking the place of an older incarnation; see `Coordinator.connect`.

        Returns:
            The older incarnation if there was one.
        """
        message = wire.decode(manifest, wire.EngineManifest)
        name = member_name(message.reader)
        self._check(name, message.group, message.versions)
        epoch = self.epoch if epoch is None else epoch
        if epoch != self.epoch:
            raise MembershipError(
                f"{name} planned against epoch {epoch} of group {self.group!r}, whose source ranks are at epoch "
                f"{self.epoch} since one of them joined again; read their manifests and plan again"
            )
        wanted = self._wanted(message)
        replica = self.replica(message.replica)
        if replica.attempt and message.attempt != replica.attempt:
            raise MembershipError(
                f"{name}, process {message.node.pid} on {message.node.hostname}, comes too late: replica {replica.name!r} of "
                f"group {self.group!r} has been connected again since it was asked to connect"
            )
        if replica.readers and replica.world_size != message.world_size:
            raise MembershipError(
                f"{name} connects with a world of {message.world_size} engine ranks; replica {replica.name!r} of group "
                f"{self.group!r} has {replica.world_size}; detach the old replica or give the new one another name"
            )
        previous = replica.readers.get(message.rank)
        if previous is not None:
            if previous.data == manifest and previous.epoch == epoch:
                return None
            self.drop(replica, message.rank)
        if not replica.readers:
            replica.ready.reset(f"{replica.name}/{rank}" for rank in range(message.world_size))
            replica.world_size = message.world_size
        replica.readers[message.rank] = Reader(message, manifest, epoch, Gate(sorted(wanted)), wanted)
        replica.ready.arrive(message.reader)
        return previous

    def expect(self, name: str) -> str:
        """From now on only engine ranks that come with the name that is returned may connect for this replica."""
        replica = self.replica(name)
        replica.attempt = uuid.uuid4().hex
        return replica.attempt

    def drop(self, replica: Replica, rank: int) -> Reader:
        """Removes an engine rank. From now on the version of its replica is unknown; a torn replica stays torn."""
        reader = replica.readers.pop(rank)
        replica.version = None
        replica.ready.expect((reader.name,))
        for source in reader.offers:
            if source in self.sources:
                self.sources[source].gone.append((reader.name, reader.manifest.incarnation))
        reader.offered.wake(MembershipError(f"{member_name(reader.name)} disconnected from group {self.group!r}"))
        return reader

    def replica(self, name: str) -> Replica:
        """Returns the replica of this name, a new one without engine ranks if there is none."""
        if name not in self.replicas:
            self.replicas[name] = Replica(name, Gate((f"{name}/0",)))
        return self.replicas[name]

    def prune(self, replica: Replica) -> None:
        """Forgets a replica that has no engine rank, that nobody waits for and nobody connects."""
        if (
            not replica.readers
            and not replica.attempt
            and not replica.ready.waiting
            and self.replicas.get(replica.name) is replica
        ):
            del self.replicas[replica.name]

    def find(self, reader: str, incarnation: str) -> tuple[Replica, Reader] | None:
        """Returns a connected engine rank and its replica."""
        replica = self.replicas.get(reader.rpartition("/")[0])
        if replica is not None:
            for one in replica.readers.values():
                if one.name == reader and one.manifest.incarnation == incarnation:
                    return replica, one
        return None

    def _check(self, name: str, group: str, versions: wire.VersionMeta) -> None:
        if versions.wire_major != wire.WIRE_MAJOR:
            raise VersionError(
                f"{name} speaks wire format {versions.wire_major}.{versions.wire_minor} (rdt {versions.rdt}); the "
                f"coordinator of group {self.group!r} needs {wire.WIRE_MAJOR}.x; install one rdt-core on both sides"
            )
        if group != self.group:
            raise MembershipError(f"{name} belongs to group {group!r}, this is the coordinator of {self.group!r}")

    def _declare(self, message: wire.SourceManifest) -> None:
        """Refuses a manifest that contradicts another rank's about a tensor."""
        declared = self._declared
        if declared is None or message.rank in self.sources:
            declared = Declared()
            for rank, source in self.sources.items():
                if rank != message.rank:
                    declared.add(rank, source.tensors)
        declared.add(message.rank, message.tensors)
        self._declared = declared

    def _wanted(self, message: wire.EngineManifest) -> dict[int, wire.ReadRequest]:
        wanted: dict[int, wire.ReadRequest] = {}
        for request in message.requests:
            if request.reader != message.reader or request.incarnation != message.incarnation:
                raise WireError(
                    f"{member_name(message.reader)}, incarnation {message.incarnation!r}, sent a request of "
                    f"{request.reader!r}, incarnation {request.incarnation!r}"
                )
            if not 0 <= request.source < self.world_size or request.source in wanted:
                raise WireError(
                    f"{member_name(message.reader)} requests from source rank {request.source}, which is repeated or "
                    f"outside the world of {self.world_size} source ranks"
                )
            wanted[request.source] = request
        return wanted
