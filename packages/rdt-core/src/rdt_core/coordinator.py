"""The coordinator of one sync group: membership, epochs, barriers, deadlines, and the outcome of every sync.

Control only: no weights pass through it. The class is plain asyncio under one event loop; `control` runs it as a named
Ray actor or in a thread. It refuses a rank that is taken, a version that goes back, messages of a sync that is over, a
commit before every byte is accounted for. The first failure of a sync is the outcome for all of its members.
"""

from __future__ import annotations

import time
from typing import Any

from . import wire
from .barrier import Barrier
from .checks import Checks, Landed
from .errors import CoverageError, MembershipError, RdtError, SyncError, WireError
from .gates import member_name
from .members import Members
from .syncs import Syncs

#: links that every source rank is told of after a sync; of more than these only the driver learns each
MAX_TOLD_LINKS = 4096


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
        self._members = Members(group, world_size)
        self._syncs = Syncs(self._members, stall_timeout_s)
        self._barrier = Barrier(self._members, self._syncs)
        self._checks = Checks(self._members)
        self._version: int | None = None

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
        await self._syncs.wait(self._members.joined, timeout_s, f"all {self.world_size} source ranks to join")

    async def sources(self, timeout_s: float) -> tuple[int, list[bytes]]:
        """Returns the epoch and the `SourceManifest` of every rank, in order, once all have joined.

        Raises:
            DeadlineError: names the ranks that have not joined.
        """
        await self.joined(timeout_s)
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

    # --- a sync

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
            if early and found is not None:
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
        self._version = record.version
        for name in record.dropped:
            left = self._members.replicas.get(name)
            if left is not None and left.version == record.version:  # published again, and this one has not got it
                left.version = None
        for name in replicas:
            replica = self._members.replicas[name]
            replica.version, replica.torn = record.version, ""
        record.end(report=wire.encode(report))
        self._syncs.over.committed(report)
        brief = report.without_timelines()
        if len(report.links) > MAX_TOLD_LINKS:
            brief = brief.without_links()
        record.brief = wire.encode(brief)
        return record.report

    async def outcome(self, sync: int, rank: int, timeout_s: float, timeline: bytes | None = None) -> bytes:
        """Returns the `SyncReport` once every engine rank has accounted for its bytes and the driver committed.

        Without timelines, and without its links where there are more than `MAX_TOLD_LINKS`: they grow with readers times
        source ranks, and all source ranks ask.

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
