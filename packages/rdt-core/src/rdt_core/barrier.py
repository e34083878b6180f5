"""The barrier at the start of every sync: source ranks begin one version together, and then there is one sync or none.

The coordinator's half that decides what a sync is about: the version, the replicas that take part, the rounds that are
readable already. It refuses versions that differ or go back, replicas that are not connected, and plans made against
manifests that have changed since; whatever it refuses, it refuses for every rank that waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from .errors import DeadlineError, MembershipError, RdtError, SyncError, WireError
from .gates import Gate, member_name, member_names
from .members import Members, Reader
from .record import POLICIES, SyncRecord
from .syncs import Syncs, describe, late
from .wire import VERIFY


@dataclass(slots=True, eq=False)
class _Passage:
    """Source ranks that have begun and wait for the others: one passage of the barrier."""

    gate: Gate
    versions: dict[int, int] = field(default_factory=dict)
    readable: dict[int, int] = field(default_factory=dict)
    replicas: list[str] | None = None
    policy: str = "require_all"
    verify: str = "off"
    record: SyncRecord | None = None


@dataclass(slots=True)
class _Absent:
    """A version that a rank will not begin, and the ranks that have not heard of it."""

    version: int
    failure: str
    untold: set[int]


class Barrier:
    """Where source ranks wait for one another. For one event loop.

    Args:
        members: of the group.
        syncs: of the group; the sync that all ranks have begun is started there.
    """

    def __init__(self, members: Members, syncs: Syncs) -> None:
        self._members = members
        self._syncs = syncs
        self._absent: _Absent | None = None
        self._open()

    async def begin(
        self,
        rank: int,
        version: int,
        committed: int | None,
        replicas: list[str] | None,
        readable: int,
        policy: str,
        verify: str,
        timeout_s: float,
    ) -> SyncRecord:
        """Returns the sync once every source rank has begun it; see `Coordinator.begin`.

        Args:
            rank: source rank, a member.
            version: to be synced.
            committed: last committed version.
            replicas: who takes part; rank 0's word counts. None: every replica that is connected.
            readable: first rounds of this rank that are readable already.
            policy: what becomes of the sync when a replica fails; rank 0's word counts.
            verify: how much is compared by digests; the same on every rank.
            timeout_s: for all ranks to begin.
        """
        me = member_name(rank)
        declared = self._members.sources[rank].status.rounds
        if not 0 <= readable <= declared:
            raise WireError(f"{me} begins with {readable} readable rounds; it declared {declared} rounds")
        running = self._syncs.running
        if running is not None:
            # It has given up on that sync without a word; its next begin is as good as the others' next one.
            problem = f"it began version {version} while version {running.version} was running"
            self._syncs.fail(running, me, "begin", problem)
        here = self._here
        absent = self._absent
        if absent is not None and absent.version == version and rank in absent.untold:
            absent.untold.discard(rank)
            raise SyncError(absent.failure)
        if committed is not None and version < committed:
            self._reject(me, version, f"version {committed} is committed; versions never go back")
        for other, theirs in here.versions.items():
            if theirs != version:
                self._reject(
                    me, theirs, f"it publishes version {version}, but {member_name(other)} publishes version {theirs}"
                )
        if verify not in VERIFY:
            raise WireError(f"{me} begins with verify {verify!r}; known: {', '.join(VERIFY)}")
        if here.versions and verify != here.verify:
            first = member_name(next(iter(here.versions)))
            self._reject(me, version, f"it publishes with verify {verify!r}, but {first} with verify {here.verify!r}")
        here.verify = verify
        here.versions[rank] = version
        here.readable[rank] = readable
        if policy not in POLICIES:
            raise WireError(f"{me} begins with policy {policy!r}; known: {', '.join(POLICIES)}")
        if rank == 0:
            here.replicas, here.policy = replicas, policy
        if here.gate.missing == (rank,):
            try:
                here.record = self._start(version, here, timeout_s)
            except RdtError as error:
                self._give_up(here, error)
                raise
            self._absent = None
            self._open()
        here.gate.arrive(rank)
        try:
            await here.gate.wait(timeout_s)
        except TimeoutError:
            problem = late(timeout_s, f"every source rank to begin version {version}", here.gate.missing)
            message = describe(version, me, "begin", problem)
            self._give_up(here, SyncError(message))
            raise DeadlineError(message) from None
        if here.record is None:
            raise SyncError(describe(version, me, "begin", "the barrier opened without a sync"))
        return here.record

    def fail(self, member: str, phase: str, problem: str, absent: tuple[int, int] | None = None) -> str | None:
        """Sends away whoever waits, and whoever comes later for a version that a rank will not begin.

        Args:
            member: who failed.
            phase: in what.
            problem: why.
            absent: source rank and version that it does not begin.

        Returns:
            The failure that they see, or None if nobody waits and nobody will be told.
        """
        here = self._here
        known = self._absent
        if absent is not None and known is not None and known.version == absent[1] and absent[0] in known.untold:
            known.untold.discard(absent[0])  # it fails by itself where another did before
            return known.failure
        if not here.versions and (absent is None or self._members.world_size == 1):
            return None
        version = next(iter(here.versions.values()), absent[1] if absent is not None else 0)
        failure = describe(version, member, phase, problem)
        if absent is not None:
            untold = set(range(self._members.world_size)) - here.versions.keys() - {absent[0]}
            self._absent = _Absent(absent[1], failure, untold)
        self._give_up(here, SyncError(failure))
        return failure

    def _start(self, version: int, here: _Passage, timeout_s: float) -> SyncRecord:
        members = self._members
        connected = [one.name for one in members.replicas.values() if one.is_connected]
        names = connected if here.replicas is None else list(dict.fromkeys(here.replicas))
        readers: dict[str, Reader] = {}
        for name in names:
            replica = members.replicas.get(name)
            if replica is None or not replica.is_connected:
                missing = f", {member_names(replica.ready.missing)} not" if replica is not None else ""
                raise MembershipError(
                    f"version {version}: replica {name!r} is not connected to group {members.group!r}{missing}; "
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
        record = self._syncs.start(version, tuple(names), readers, here.policy, here.verify, timeout_s)
        for rank, count in here.readable.items():
            if rank not in record.unanswered:  # else packing for a new reader may still be to do
                for round in range(count):
                    record.publish(rank, round)
        return record

    def _open(self) -> None:
        self._here = _Passage(Gate(range(self._members.world_size)))

    def _reject(self, member: str, version: int, problem: str) -> NoReturn:
        error = SyncError(describe(version, member, "begin", problem))
        self._give_up(self._here, error)
        raise error

    def _give_up(self, here: _Passage, error: RdtError) -> None:
        """Raises `error` in every rank that waits; the next `begin` starts afresh."""
        self._syncs.last_failure = str(error)
        here.gate.wake(error)
        if self._here is here:
            self._open()
