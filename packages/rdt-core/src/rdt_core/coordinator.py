"""The coordinator of one sync group: membership, epochs, barriers, deadlines, and the outcome of every sync.

Control only: no weights pass through it. The class is plain asyncio under one event loop; `control` runs it as a named
Ray actor or in a thread. It refuses a rank that is taken, a version that goes back, messages of a sync that is over, a
commit before every byte is accounted for. The first failure of a sync is the outcome for all of its members.
"""

from __future__ import annotations

import time

from . import wire
from .checks import Checks, Landed
from .errors import CoverageError, MembershipError
from .gates import member_name
from .members import Members
from .synccalls import SyncCalls
from .syncs import Syncs


class Coordinator(SyncCalls):
    """The shared state of one sync group. Every method is a coroutine of one event loop; messages are msgpack.

    What is called during a sync is in `SyncCalls`.

    Args:
        group: the group's name.
        world_size: number of source ranks.
        stall_timeout_s: a running sync in which nobody waits and nobody called for so many seconds has failed.
    """

    def __init__(self, group: str, world_size: int, stall_timeout_s: float) -> None:
        if world_size < 1:
            raise MembershipError(f"group {group!r} needs at least one source rank, not {world_size}")
        members = Members(group, world_size)
        super().__init__(group, members, Syncs(members, stall_timeout_s))
        self.world_size = world_size
        self._checks = Checks(members)

    # --- source ranks

    async def join(
        self,
        manifest: bytes,
        token: str,
        version: int | None = None,
        takeover: bool = False,
        terms: dict[int, int] | None = None,
    ) -> int:
        """Adds a source rank, or replaces the manifest of one whose memory moved (same token, the epoch advances).

        Args:
            manifest: `SourceManifest`.
            token: secret of the process; proves later calls to come from the one that joined.
            version: last one that this rank saw committed, under this coordinator or one that died; versions go on from the
                greatest that any rank has seen.
            takeover: the rank is a new process in the place of one that is dead, whose calls are refused from here on.
            terms: by source rank, how often its place was taken over as far as this rank knows, its own term among them: a
                predecessor cannot come back through a coordinator that does not know of it.

        Returns:
            The rank's term.

        Raises:
            TakenOverError: another process has taken this rank's place.
            MembershipError: another group or world size, or the rank is taken.
            VersionError: another major version of the wire format.
            CoverageError: it contradicts another rank about a checkpoint tensor.
            WireError: the manifest is impossible.
        """
        known = dict(terms or {})
        rank = wire.decode(manifest, wire.SourceManifest).rank
        own = known.pop(rank, 0)
        self._members.learn(known)
        try:
            replaced = self._members.join(manifest, token, takeover, own)
        except CoverageError as error:
            # the rank belongs here, and will not come as it is: whoever waits for it is told why
            self._members.joined.wake(error)
            raise
        if version is not None and (self._version is None or version > self._version):
            self._version = version
        running = self._syncs.running
        if replaced is not None and running is not None:
            self._syncs.fail(running, member_name(replaced), "join", "it joined again while the sync was running")
        return self._members.sources[rank].term

    async def leave(self, rank: int, token: str) -> None:
        """Removes a source rank; fails what was running. Nothing happens if it is not a member.

        Raises:
            MembershipError: the rank was joined with another token.
        """
        if not self._members.leave(rank, token):
            return
        if self._syncs.latest is not None:
            self._syncs.latest.told.arrive(rank)
        await self.fail(None, member_name(rank), "leave", "it left the group")

    async def joined(self, timeout_s: float) -> None:
        """Returns once every source rank has joined.

        Raises:
            DeadlineError: names the ranks that have not joined.
        """
        everybody = (
            f"all {self.world_size} source ranks to join (every rank calls join at the same time, and world_size counts all of "
            "them, from rank 0 on)"
        )
        await self._syncs.wait(self._members.joined, timeout_s, everybody)

    async def sources(self, timeout_s: float) -> tuple[int, bytes]:
        """Returns the epoch and, once all have joined, the `SourceManifest`s of all ranks, in order, joined (`manifests.join`).

        Raises:
            DeadlineError: names the ranks that have not joined.
        """
        await self.joined(timeout_s)
        return self._members.epoch, self._members.manifests()

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
        self._syncs.lost(self._members.connect(manifest, epoch), "connect", "it connected again as another incarnation")

    async def expect(self, replica: str, token: str | None = None) -> str:
        """The driver connects a replica: returns what its engine ranks must bring, so that those of before are refused."""
        self._check_driver(token)
        return self._members.expect(replica)

    async def knows(self, reader: str, incarnation: str) -> bool:
        """Returns whether an engine rank is connected as this incarnation: not once its replica was detached."""
        return self._members.find(reader, incarnation) is not None

    async def disconnect(self, reader: str, incarnation: str) -> None:
        """Removes an engine rank; fails a sync that it takes part in. Nothing happens for another incarnation."""
        found = self._members.find(reader, incarnation)
        if found is not None:
            replica, one = found
            self._syncs.lost(self._members.drop(replica, one.manifest.rank), "disconnect", "it disconnected")
            if not replica.readers:
                replica.torn = ""
                self._members.prune(replica)

    async def detach(self, replica: str, token: str | None = None) -> None:
        """Removes every engine rank of a replica (the way out when it died); fails a sync that it takes part in.

        Args:
            replica: its name.
            token: of source rank 0, where that drives: one whose place was taken is refused.
        """
        self._check_driver(token)
        found = self._members.replicas.pop(replica, None)
        if found is not None:
            for rank in tuple(found.readers):
                self._syncs.lost(self._members.drop(found, rank), "detach", "its replica was detached")
            found.ready.wake(MembershipError(f"replica {replica!r} was detached from group {self.group!r}"))

    async def replica_ready(self, replica: str, timeout_s: float) -> list[bytes]:
        """Returns the `EngineManifest` of every rank of a replica, in order, once all have connected.

        Raises:
            DeadlineError: names the ranks that have not connected.
            MembershipError: the replica was detached meanwhile.
        """
        found = self._members.replica(replica)
        try:
            await self._syncs.wait(found.ready, timeout_s, f"every engine rank of replica {replica!r} to connect")
        finally:
            self._members.prune(found)
        return [found.readers[rank].data for rank in range(found.world_size)]

    # --- a comparison without a sync; see `Checks` for what each does

    async def check_begin(self, rank: int, token: str, timeout_s: float) -> int:
        """See `Checks.begin`. Raises MembershipError unless the rank joined with this token."""
        self._members.check_token(rank, token)
        return await self._checks.begin(rank, timeout_s)

    async def check_open(self, check: int, replicas: list[str]) -> None:
        """See `Checks.open`."""
        self._checks.open(check, replicas)

    async def check_requests(self, rank: int, check: int, timeout_s: float) -> list[bytes]:
        """See `Checks.requests`."""
        return await self._checks.requests(rank, check, timeout_s)

    async def check_source(self, rank: int, check: int, digests: dict[str, bytes]) -> None:
        """See `Checks.source`."""
        self._checks.source(rank, check, digests)

    async def check_reader(self, reader: str, incarnation: str, check: int, digests: dict[int, Landed]) -> None:
        """See `Checks.reader`."""
        self._checks.reader(reader, incarnation, check, digests)

    async def check_result(
        self, check: int, timeout_s: float
    ) -> tuple[dict[int, dict[str, bytes]], dict[str, dict[int, Landed]]]:
        """See `Checks.result`."""
        return await self._checks.result(check, timeout_s)

    async def check_end(self, check: int, report: bytes) -> None:
        """See `Checks.end`."""
        self._checks.end(check, report)

    async def check_outcome(self, check: int, timeout_s: float) -> bytes:
        """See `Checks.outcome`."""
        return await self._checks.outcome(check, timeout_s)

    async def check_fail(self, check: int, member: str, problem: str) -> str:
        """See `Checks.fail`."""
        return self._checks.fail(check, member, problem)

    # --- what everybody may ask

    async def current(self) -> tuple[int | None, int | None]:
        """Returns the last committed version and the id of the running sync."""
        running = self._syncs.running
        return self._version, running.id if running is not None else None

    async def status(self) -> bytes:
        """Returns a `GroupStatus`."""
        members = self._members
        running = self._syncs.running
        pulling = running.pulling if running is not None else set()
        status = wire.GroupStatus(
            group=self.group,
            world_size=self.world_size,
            epoch=members.epoch,
            version=self._version,
            sync=running.id if running is not None else None,
            sync_version=running.version if running is not None else None,
            sources=tuple(members.sources[rank].seen() for rank in sorted(members.sources)),
            missing=tuple(rank for rank in range(self.world_size) if rank not in members.sources),
            replicas=tuple(one.status(one.name in pulling) for one in members.replicas.values() if one.readers),
            last_failure=self._syncs.last_failure,
            sync_s=time.monotonic() - running.began if running is not None else 0.0,
            waits_for=" in ".join(running.stalled()) if running is not None else "",
            last=self._syncs.over.told(),
        )
        return wire.encode(status)
