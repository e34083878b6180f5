"""The coordinator's half of a comparison without a sync: who takes part, whose digests have come, and what it found.

One check at a time, beside syncs, which it does not touch: nothing is torn and nothing is stamped. All source ranks begin it
together, rank 0 says which replicas it is about, both sides hand in digests, and rank 0 compares. It refuses calls that belong
to a check that is over, and replicas that are not connected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from . import wire
from .errors import DeadlineError, MembershipError, RdtError, SyncError, WireError
from .gates import Gate, member_name, member_names
from .members import Members

#: digests of one link, and which of its blocks they are of: one byte each, 0 where nothing could be compared
Landed = tuple[bytes, bytes]


@dataclass(slots=True, eq=False)
class _Check:
    id: int
    begun: Gate
    sources: Gate
    opened: Gate = field(default_factory=lambda: Gate((0,)))
    readers: Gate = field(default_factory=lambda: Gate(()))
    ended: Gate = field(default_factory=lambda: Gate((0,)))
    requests: dict[int, list[bytes]] = field(default_factory=dict)
    held: dict[int, dict[str, bytes]] = field(default_factory=dict)
    landed: dict[str, dict[int, Landed]] = field(default_factory=dict)
    failure: str = ""
    report: bytes = b""

    @property
    def gates(self) -> tuple[Gate, ...]:
        return self.begun, self.sources, self.opened, self.readers, self.ended


class Checks:
    """The checks of one group. For one event loop.

    Args:
        members: of the group.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._count = 0
        self._now: _Check | None = None

    async def begin(self, rank: int, timeout_s: float) -> int:
        """Returns the id of a check once every source rank has begun it.

        Raises:
            DeadlineError: names the ranks that have not begun; the others get a SyncError.
        """
        now = self._now
        if now is None or now.begun.is_open or now.failure or rank not in now.begun.missing:
            if now is not None and not now.report:
                self._fail(now, f"{member_name(rank)} began another check")
            ranks = range(self._members.world_size)
            self._count += 1
            now = self._now = _Check(self._count, Gate(ranks), Gate(ranks))
        now.begun.arrive(rank)
        await self._wait(now, now.begun, timeout_s, "every source rank to begin the check")
        return now.id

    def open(self, check: int, replicas: Sequence[str]) -> None:
        """Rank 0 says which replicas are compared; from here on source ranks know what to digest.

        Raises:
            MembershipError: a replica is not connected, or planned against an epoch that is over.
            SyncError: the check is over.
        """
        now = self._find(check)
        names = []
        for name in replicas:
            replica = self._members.replicas.get(name)
            if replica is None or not replica.is_connected:
                raise MembershipError(f"replica {name!r} is not connected to group {self._members.group!r}")
            for reader in replica.readers.values():
                if reader.epoch != self._members.epoch:
                    raise MembershipError(
                        f"{member_name(reader.name)} planned against epoch {reader.epoch} of the source ranks, which are at "
                        f"epoch {self._members.epoch}; connect replica {name!r} again"
                    )
                names.append(reader.name)
                for rank, request in reader.asked.items():
                    now.requests.setdefault(rank, []).append(wire.encode(request))
        now.readers = Gate(names)
        now.opened.arrive(0)

    async def requests(self, rank: int, check: int, timeout_s: float) -> list[bytes]:
        """Returns every `ReadRequest` of the compared replicas to this rank, once rank 0 has named them."""
        now = self._find(check)
        await self._wait(now, now.opened, timeout_s, "source rank 0 to name the replicas")
        return now.requests.get(rank, [])

    def source(self, rank: int, check: int, digests: dict[str, bytes]) -> None:
        """Takes what a source rank holds, by reader: uint64, little-endian, in the order of the request."""
        now = self._find(check)
        now.held[rank] = digests
        now.sources.arrive(rank)

    def reader(self, reader: str, incarnation: str, check: int, digests: dict[int, Landed]) -> None:
        """Takes what an engine rank holds, by source rank.

        Raises:
            WireError: the engine rank is not compared.
            SyncError: the check is over.
        """
        now = self._find(check)
        if self._members.find(reader, incarnation) is None or reader not in now.readers.missing:
            raise WireError(f"{member_name(reader)} takes no part in check {check} of group {self._members.group!r}")
        now.landed[reader] = digests
        now.readers.arrive(reader)

    async def result(
        self, check: int, timeout_s: float
    ) -> tuple[dict[int, dict[str, bytes]], dict[str, dict[int, Landed]]]:
        """Returns the digests of both sides once all have come."""
        now = self._find(check)
        await self._wait(now, now.sources, timeout_s, "every source rank to digest what it holds")
        await self._wait(now, now.readers, timeout_s, "every engine rank to digest what it holds")
        return now.held, now.landed

    def end(self, check: int, report: bytes) -> None:
        """Rank 0 has compared."""
        now = self._find(check)
        now.report = report
        now.ended.arrive(0)

    async def outcome(self, check: int, timeout_s: float) -> bytes:
        """Returns what rank 0 found."""
        now = self._find(check)
        await self._wait(now, now.ended, timeout_s, "source rank 0 to compare")
        return now.report

    def fail(self, check: int, member: str, problem: str) -> str:
        """Ends a check for everybody; returns the failure that counts: the first."""
        now = self._now
        if now is None or now.id != check:
            return problem
        return self._fail(now, f"check of {', '.join(self._names(now)) or 'no replica'}: {member}: {problem}")

    def _names(self, now: _Check) -> list[str]:
        return sorted({name.rpartition("/")[0] for name in (*now.landed, *map(str, now.readers.missing))})

    def _fail(self, now: _Check, failure: str) -> str:
        if not now.failure and not now.report:
            now.failure = failure
            for gate in now.gates:
                gate.wake(SyncError(failure))
        return now.failure

    def _find(self, check: int) -> _Check:
        now = self._now
        if now is None or now.id != check:
            raise SyncError(f"check {check} of group {self._members.group!r} is over")
        if now.failure:
            raise SyncError(now.failure)
        return now

    async def _wait(self, now: _Check, gate: Gate, timeout_s: float, what: str) -> None:
        try:
            await gate.wait(timeout_s)
        except TimeoutError:
            silent = f"; no answer from {member_names(gate.missing)}" if gate.missing else ""
            error: RdtError = DeadlineError(self._fail(now, f"waited {timeout_s:g} s for {what}{silent}"))
            raise error from None
