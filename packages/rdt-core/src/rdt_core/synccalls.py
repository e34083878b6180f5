"""The coordinator's calls that make up one sync, from the barrier of the source ranks to the outcome that all are told.

One half of `Coordinator`, apart only to be readable; the other half knows who the members are. It refuses messages of a sync that
is over, a commit before every byte is accounted for, and a pull that comes twice.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from . import wire
from .barrier import Barrier
from .errors import MembershipError, RdtError, SyncError, WireError
from .gates import member_name
from .members import Members
from .syncs import Syncs

#: links with whose readers' accounts every source rank is told of a sync; of more than these only the driver is
MAX_TOLD_LINKS = 1024
#: calls that every sync makes, whose arguments and results msgpack can carry; see `SyncCalls.plain`
PLAIN = frozenset({"begin", "published", "enter", "await_round", "done", "commit", "outcome"})
#: phases of a replica in which none of its ranks has received anything
_BEFORE_BYTES = ("pause", "begin")


class SyncCalls:
    """What members of a group call during a sync. For one event loop.

    Args:
        group: the group's name.
        members: of the group.
        syncs: of the group.
    """

    def __init__(self, group: str, members: Members, syncs: Syncs) -> None:
        self.group = group
        self._members = members
        self._syncs = syncs
        self._barrier = Barrier(members, syncs)
        self._version: int | None = None  # last one that was committed

    async def plain(self, call: bytes) -> bytes:
        """One of the calls `PLAIN` as one message: Ray serializes each argument of a call by itself, a fifth of its time.

        Args:
            call: msgpack of the method's name and its arguments.

        Returns:
            msgpack of what the method returns, tuples as lists.

        Raises:
            WireError: no such call. Else what the method raises.
        """
        name, arguments = msgspec.msgpack.decode(call)
        if name not in PLAIN:
            raise WireError(f"{name!r} is no call that travels as one message; these do: {', '.join(sorted(PLAIN))}")
        return msgspec.msgpack.encode(await getattr(self, name)(*arguments))

    async def begin(
        self,
        rank: int,
        token: str,
        version: int,
        replicas: list[str] | None,
        readable: int,
        policy: str,
        timeout_s: float,
        verify: str = "off",
        attempt: int | None = None,
    ) -> tuple[int, list[bytes], tuple[list[tuple[str, str]], dict[int, int]]]:
        """Starts a sync: returns once every source rank has begun the same version. Fails a sync that still runs.

        Args:
            rank: source rank.
            token: as at `join`.
            version: greater than the last committed one, or equal to publish it again.
            replicas: who takes part; rank 0's word counts. None: every replica that is connected.
            readable: how many of this rank's first rounds are readable already and hold still. They are published with
                the start of the sync, unless this rank has read requests to answer.
            policy: "require_all": a replica that fails, fails the sync. "best_effort": it is dropped, and the sync goes on
                for the others. Rank 0's word counts.
            timeout_s: for all ranks to begin.
            verify: "off", "sample" or "full": how much is compared by digests before the commit; the same on every rank.
            attempt: greater with each begin of this rank; one that comes twice, or late, is refused and changes nothing.

        Returns:
            The sync's id; each `ReadRequest` to this rank that it has not answered with an offer yet; and the news: name and
            incarnation of each reader that it made an offer to and that is gone, and the terms of source ranks (see `join`).

        Raises:
            MembershipError: this rank did not join; or, on every rank, a replica is not connected or planned against
                an older epoch: connect it (again), then begin again on every rank.
            SyncError: versions or `verify` that differ, versions that go back, or another rank failed; the same on every rank.
            DeadlineError: names the ranks that have not begun; the other ranks get a SyncError with the same message.
            WireError: more readable rounds than this rank declared.
        """
        self._members.check_token(rank, token)
        if attempt is not None:
            self._members.sources[rank].begins(attempt)
        record = await self._barrier.begin(rank, version, self._version, replicas, readable, policy, verify, timeout_s)
        source = self._members.sources.get(rank)
        gone: list[tuple[str, str]] = []
        if source is not None:
            gone, source.gone = source.gone, gone
        terms = {other: term for other, term in self._members.terms.items() if term}
        return record.id, [wire.encode(request) for request in record.unanswered.get(rank, ())], (gone, terms)

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
        record = self._syncs.find(sync)
        if len(offers) != len(refs):
            raise WireError(f"source rank {rank} sent {len(offers)} offers with {len(refs)} lists of references")
        readers = [
            record.asked(rank, wire.decode(data, wire.LinkOffer), len(beside))
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
        latest = self._syncs.latest
        record = latest if latest is not None and latest.readers.get(reader) is one else None
        if record is not None and record.failure and not one.offered.is_open:
            raise SyncError(record.failure)
        await self._syncs.wait(one.offered, timeout_s, "the offers of source ranks", record, reader, "offers")
        ordered = [one.offers[source] for source in sorted(one.offers)]
        return [data for data, _ in ordered], [beside for _, beside in ordered]

    async def published(
        self, rank: int, sync: int, round: int, awaited: int | None, timeout_s: float, timeline: bytes | None = None
    ) -> None:
        """A source rank's bytes of this round are readable and hold still.

        Args:
            rank: source rank.
            sync: id of the running sync.
            round: that is readable now.
            awaited: return only when every engine rank has read this round (its bucket is free then); None: at once.
            timeout_s: for that.
            timeline: as in `outcome`, which may come too late.

        Raises:
            SyncError: the sync failed or is over.
            DeadlineError: names the engine ranks that have not read it; fails the sync.
            WireError: a round that this rank did not declare.
        """
        record = self._syncs.find(sync)
        record.publish(rank, round)
        record.tell(rank, timeline)
        if awaited is not None:
            what = f"round {awaited} of sync {sync} to be read"
            # readers wait for this rank meanwhile: one that is silent is dropped in time for the others
            limit_s = timeout_s / 2 if record.policy == "best_effort" else timeout_s
            await self._syncs.wait(record.read(awaited), limit_s, what, record, rank, "await_read")

    async def digests(self, rank: int, sync: int, digests: dict[str, bytes], seconds: float) -> None:
        """Takes a source rank's digests of all that was to be verified in this sync.

        Args:
            rank: source rank.
            sync: id of the running sync.
            digests: by reader, in the order of its request: uint64, little-endian.
            seconds: that the rank spent on them.

        Raises:
            SyncError: the sync failed or is over.
        """
        self._syncs.find(sync).prove(rank, digests, seconds)

    async def enter(
        self, reader: str, incarnation: str, version: int, timeout_s: float, early: bool = False
    ) -> tuple[int, str]:
        """An engine rank starts to pull: returns once the first round is published.

        From here on the reader may have received bytes.

        Args:
            reader: the engine rank's name.
            incarnation: that it connected as.
            version: that it was asked for.
            timeout_s: for every source rank to publish.
            early: it reads already, because parameters hold still from the moment on that every source rank has begun, and it is
                asked to pull no earlier. If it is refused, its replica is torn.

        Returns:
            The id of the running sync, and how much of it is verified.

        Raises:
            SyncError: no sync runs, or one of another version, the reader takes no part or has pulled already, or the sync
                failed.
            DeadlineError: names the source ranks that have not published; fails the sync.
        """
        try:
            return await self._entered(reader, incarnation, version, timeout_s)
        except RdtError as error:
            found = self._members.find(reader, incarnation)
            # none reads early for a version that it was let pull before: this is a copy of the call that let it
            if early and found is not None and (found[0].version is None or found[0].version < version):
                self._syncs.tear(found[0].name, str(error))
            raise

    async def _entered(self, reader: str, incarnation: str, version: int, timeout_s: float) -> tuple[int, str]:
        latest, record = self._syncs.latest, self._syncs.running
        if latest is not None and latest.version == version and latest.failure:
            raise SyncError(latest.failure)
        if record is None or record.version != version:
            found = f"version {record.version} is running" if record is not None else "no sync is running"
            last = self._syncs.last_failure
            failed = f"; the latest failure was: {last}" if last else ""
            raise SyncError(f"group {self.group!r} is not syncing version {version}: {found}{failed}")
        if record.taking_part(reader).manifest.incarnation != incarnation:
            raise SyncError(f"{member_name(reader)} pulls as incarnation {incarnation!r}, which is gone")
        if record.has_read(reader):
            # what it reads now may be a later round in the same bucket, and the account of the first time be taken for it
            raise SyncError(
                f"{member_name(reader)} was told twice to pull version {version}; a sync can be pulled once"
            )
        record.entered.add(reader)
        record.readers[reader].heard = time.monotonic()
        await self.await_round(reader, record.id, 0, timeout_s)
        return record.id, record.verify

    async def await_round(self, reader: str, sync: int, round: int, timeout_s: float) -> None:
        """Returns when every source rank has published the round. The reader has all its bytes of the rounds before.

        Raises:
            SyncError: the sync failed or is over, or the reader takes no part.
            DeadlineError: names the source ranks that have not published; fails the sync.
        """
        record = self._syncs.find(sync)
        gate = record.published(round)
        record.pulling.add(record.taking_part(reader).manifest.replica)
        record.acknowledge(reader, round)
        what = f"round {round} of sync {sync} to be published"
        await self._syncs.wait(gate, timeout_s, what, record, reader, "await_round")

    async def done(
        self, report: bytes, sync: int, digests: dict[int, bytes] | None = None, timeout_s: float = 0.0
    ) -> dict[int, list[int]]:
        """Takes an engine rank's account of the sync: every byte has landed, and every round is read.

        Args:
            report: `ReaderReport`.
            sync: the sync's id.
            digests: where the sync is verified: by source rank, in the order of the request: uint64, little-endian.
            timeout_s: for the digests of the source ranks.

        Returns:
            Empty if the account is taken. Else it is not: the positions of digests that differ, by source rank. The reader
            knows what they stand for, and fails the sync.

        Raises:
            DeadlineError: names the source ranks that have not digested; fails the sync.
            SyncError: bytes, digest or version are not what the reader's manifest and the sync say (this fails the
                sync), or the sync is over.
        """
        message = wire.decode(report, wire.ReaderReport)
        record = self._syncs.find(sync)
        replica = record.taking_part(message.reader).manifest.replica
        name = member_name(message.reader)
        if record.verify != "off" and message.reader not in record.reports:
            # before the wait: source ranks digest their last rounds while these are read
            record.received(message.reader)
            what = f"the digests of version {record.version}"
            await self._syncs.wait(record.digested, timeout_s, what, record, message.reader, "verify")
            record.taking_part(message.reader)
            try:
                differing = record.compare(message.reader, digests or {})
            except WireError as error:
                raise SyncError(self._syncs.lose(record, replica, name, "verify", str(error))) from None
            if differing:
                return differing
        problem = record.account(message)
        if problem:
            raise SyncError(self._syncs.lose(record, replica, name, "accounting", problem))
        return {}

    async def fail(
        self,
        sync: int | None,
        member: str,
        phase: str,
        message: str,
        absent: tuple[int, int] | None = None,
        replica: str | None = None,
        caller: tuple[int, str] | None = None,
    ) -> str | None:
        """Fails a sync for all of its members; the first failure wins. With policy "best_effort" a replica fails alone.

        Args:
            sync: id; None: the running sync and whoever waits in `begin`.
            member: who failed, as messages call it.
            phase: in what.
            message: why.
            absent: source rank and version that it does not begin; ranks that begin it later are told at once.
            replica: whose failure it is; None: a source rank's.
            caller: source rank and token of who says so: one whose place was taken is refused.

        Returns:
            The failure that every member sees (of that replica), or None if there was nothing to fail.
        """
        if caller is not None and caller[0] in self._members.sources:
            self._members.check_token(*caller)
        if sync is not None:
            record = self._syncs.latest
            if record is None or record.id != sync:
                return self._syncs.failure(sync)
            if replica is not None:
                if phase not in _BEFORE_BYTES:
                    self._syncs.received(record, replica)
                return self._syncs.lose(record, replica, member, phase, message) or None
            return self._syncs.fail(record, member, phase, message) or None
        running = self._syncs.running
        if running is not None:
            return self._syncs.fail(running, member, phase, message)
        return self._barrier.fail(member, phase, message, absent)

    def _check_driver(self, token: str | None) -> None:
        if token is not None and 0 in self._members.sources:
            self._members.check_token(0, token)

    async def tear(self, replicas: list[str], reason: str, token: str | None = None) -> None:
        """The driver found that replicas do not serve what was committed: their version is unknown, and they are torn."""
        self._check_driver(token)
        for name in replicas:
            self._syncs.tear(name, reason)

    async def commit(
        self,
        sync: int,
        rank: int,
        seconds: float,
        phases: dict[str, float],
        failed: dict[str, str] | None = None,
        timeout_s: float = 0.0,
    ) -> bytes:
        """Stamps the version, once every engine rank has accounted for its bytes; their replicas have finished before.

        Args:
            sync: the sync's id.
            rank: source rank that drives the sync.
            seconds: how long the sync took.
            phases: seconds by phase, as the driver saw them.
            failed: replicas that the driver could not let take part, and why.
            timeout_s: for accounts that are on their way still.

        Returns:
            `SyncReport`, with timelines; a repeated commit returns the first one's.

        Raises:
            SyncError: an account was refused, or the sync failed or is over.
            DeadlineError: names the engine ranks that have not accounted; fails the sync.
            MembershipError: the rank is not a member.
        """
        record = self._syncs.find(sync)
        source = self._members.sources.get(rank)
        if source is None:
            raise MembershipError(f"source rank {rank} is not a member of group {self.group!r}; it cannot commit")
        record.told.arrive(rank)
        if record.report:
            return record.report
        for name, problem in (failed or {}).items():
            if name in record.replicas and record.policy == "best_effort":
                self._syncs.lose(record, name, f"replica {name!r}", "drive", problem)
        what = f"every engine rank to account for the bytes of version {record.version}"
        await self._syncs.wait(record.accounted, timeout_s, what, record, rank, "commit")
        if record.failure:
            raise SyncError(record.failure)
        if record.report:
            return record.report  # of a commit that came twice, and waited as well
        replicas = tuple(name for name in record.replicas if name not in record.dropped)
        reports = tuple(record.reports[reader] for reader in record.readers if reader in record.reports)
        report = wire.SyncReport(
            group=self.group,
            version=record.version,
            seconds=seconds,
            phases=phases if record.verify == "off" else {**phases, "verify": record.proof_s},
            bytes=sum(one.bytes for one in reports),
            mode=source.status.mode,
            mode_reason=source.mode_reason,
            readers=reports,
            replicas=replicas,
            failed={**(failed or {}), **record.dropped},
            verify=record.verify,
            timelines=tuple(line for _, line in sorted(record.timelines.items())),
        )
        encoded = wire.encode(report)
        brief = report.without_timelines()
        if len(report.links) > MAX_TOLD_LINKS:
            brief = brief.in_short()
        record.brief = wire.encode(brief)
        self._version = record.version
        for name in record.dropped:
            left = self._members.replicas.get(name)
            if left is not None and left.version == record.version:  # published again, and this one has not got it
                left.version = None
        for name in replicas:
            replica = self._members.replicas[name]
            replica.version, replica.torn = record.version, ""
        record.end(report=encoded)
        self._syncs.over.committed(report)
        return record.report

    async def outcome(self, sync: int, rank: int, timeout_s: float, timeline: bytes | None = None) -> bytes:
        """Returns the `SyncReport` once every engine rank has accounted for its bytes and the driver committed.

        Without timelines, and without the accounts of engine ranks where these have more than `MAX_TOLD_LINKS` links: they grow
        with engine ranks times source ranks, and all source ranks ask.

        Args:
            sync: the sync's id.
            rank: source rank.
            timeout_s: for the accounts, and again for the commit.
            timeline: `Timeline` of what the rank did; the driver is told if it comes before the commit.

        Raises:
            SyncError: the sync failed or is over.
            DeadlineError: says who has not accounted; fails the sync.
        """
        record = self._syncs.find(sync)
        what = f"every engine rank to account for the bytes of version {record.version}"
        record.tell(rank, timeline)
        await self._syncs.wait(record.accounted, timeout_s, what, record, rank, "outcome")
        what = f"the driver to commit version {record.version}"
        await self._syncs.wait(record.ended, timeout_s, what, record, rank, "outcome")
        record.told.arrive(rank)
        return record.brief or record.report

    async def settled(self, timeout_s: float) -> None:
        """Returns when every source rank has the report of the latest sync, if that was committed, or has left.

        The process that the coordinator lives with waits for this before it ends.

        Raises:
            DeadlineError: names the ranks that have not asked.
        """
        latest = self._syncs.latest
        if latest is not None and latest.report:
            what = f"every source rank to learn the outcome of version {latest.version}"
            await self._syncs.wait(latest.told, timeout_s, what)
