"""The syncs of a group, one after the other: the one that runs, its waits and watchdog, and how the latest ones failed.

The coordinator's half that decides outcomes: the first failure of a sync is everybody's, a deadline that passes is a
failure, and so is a sync that everybody forgot. It refuses calls that belong to a sync that is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Mapping

from .errors import DeadlineError, SyncError, text_of
from .gates import Gate, member_name, member_names
from .lastsync import LatestSync
from .members import Members, Reader
from .record import SyncRecord

_HISTORY = 64


class Syncs:
    """The syncs of one group. For one event loop.

    Args:
        members: of the group; replicas of a sync that fails may become torn.
        stall_timeout_s: a running sync in which nobody waits and nobody called for so many seconds has failed.

    Attributes:
        latest: the last sync that was started, over or not.
        last_failure: of the latest sync that failed, empty if none did.
        over: the latest sync that is over.
    """

    def __init__(self, members: Members, stall_timeout_s: float) -> None:
        self.stall_timeout_s = stall_timeout_s
        self.latest: SyncRecord | None = None
        self.last_failure = ""
        self.over = LatestSync()
        self._members = members
        self._count = 0
        self._failures: dict[int, str] = {}

    @property
    def running(self) -> SyncRecord | None:
        """The sync that has no outcome yet."""
        return self.latest if self.latest is not None and self.latest.is_running else None

    def start(
        self,
        version: int,
        replicas: tuple[str, ...],
        readers: Mapping[str, Reader],
        policy: str,
        verify: str,
        timeout_s: float,
    ) -> SyncRecord:
        """Makes the running sync.

        Args:
            version: what is synced.
            replicas: that take part.
            readers: their engine ranks, by name.
            policy: of `POLICIES`.
            verify: of `wire.VERIFY`.
            timeout_s: deadline of the longest wait of its members, in seconds.
        """
        self._count += 1
        rounds = {rank: source.status.rounds for rank, source in self._members.sources.items()}
        # engines may take a deadline each to pause, to get ready and to start pulling before they call here
        idle_s = max(self.stall_timeout_s, 3 * timeout_s)
        record = self.latest = SyncRecord(self._count, version, rounds, replicas, readers, idle_s, policy, verify)
        loop = asyncio.get_running_loop()
        record.touched = loop.time()
        record.watchdog = loop.call_later(idle_s, self._watch, record)
        return record

    def find(self, sync: int) -> SyncRecord:
        """Returns the latest sync if this is its id and it did not fail; it counts as called for.

        Raises:
            SyncError: it failed, or is not the latest.
        """
        record = self.latest
        if record is None or record.id != sync:
            if sync in self._failures:
                raise SyncError(self._failures[sync])
            latest = f"the latest is sync {record.id} of version {record.version}" if record else "none has begun"
            raise SyncError(f"stale: sync {sync} of group {self._members.group!r} is over; {latest}")
        if record.failure:
            raise SyncError(record.failure)
        record.touched = asyncio.get_running_loop().time()
        return record

    def failure(self, sync: int) -> str | None:
        """Returns how a sync failed, as far as it is remembered."""
        return self._failures.get(sync)

    def fail(self, record: SyncRecord, member: str, phase: str, problem: str) -> str:
        """Fails a sync unless it has an outcome; returns the failure that counts (empty if it was committed)."""
        if not record.is_running:
            return record.failure
        failure = self.last_failure = self._failures[record.id] = describe(record.version, member, phase, problem)
        while len(self._failures) > _HISTORY:
            del self._failures[next(iter(self._failures))]
        for name in record.pulling - record.dropped.keys():
            self.tear(name, failure)
        record.end(failure=failure)
        self.over.failed(record.version, time.monotonic() - record.began, failure)
        return failure

    def lose(self, record: SyncRecord, replica: str, member: str, phase: str, problem: str) -> str:
        """A replica failed in a sync: the policy says whether the sync fails with it or goes on for the others.

        Returns:
            The failure that counts for this replica; empty if the sync was committed before.
        """
        if replica in record.dropped:
            return record.dropped[replica]
        if record.policy == "require_all" or not record.is_running or replica not in record.replicas:
            return self.fail(record, member, phase, problem)
        failure = self.last_failure = describe(record.version, member, phase, problem)
        record.drop(replica, failure)
        if replica in record.pulling:
            self.tear(replica, failure)
        if record.dropped.keys() >= set(record.replicas):
            self.fail(record, member, phase, f"{problem}; no replica is left in this sync")
        return failure

    def lost(self, reader: Reader | None, phase: str, problem: str) -> None:
        """An engine rank went away: fails the running sync, or what its replica has to do with it, if it takes part."""
        running = self.running
        if reader is not None and running is not None and running.readers.get(reader.name) is reader:
            self.lose(running, reader.manifest.replica, member_name(reader.name), phase, problem)

    def received(self, record: SyncRecord, replica: str) -> None:
        """A replica may have received bytes of a sync that is not committed, whether or not it asked for them before."""
        record.pulling.add(replica)
        failure = record.failure or record.dropped.get(replica)
        if failure:
            self.tear(replica, failure)

    def tear(self, name: str, failure: str) -> None:
        """A replica's version is unknown from here on; nothing happens if there is none of this name."""
        replica = self._members.replicas.get(name)
        if replica is not None:
            replica.version, replica.torn = None, text_of(failure)

    async def wait(
        self,
        gate: Gate,
        timeout_s: float,
        what: str,
        record: SyncRecord | None = None,
        member: Hashable = None,
        phase: str = "",
    ) -> None:
        """Waits at a gate; a deadline fails the sync `record` for everybody, in the name of `member`.

        With policy "best_effort" replicas whose engine ranks are missing are dropped, and the wait is over.

        Raises:
            DeadlineError: names who is missing.
            RdtError: what the gate's waiters were told meanwhile.
        """
        if record is not None and record.failure and not gate.is_open:
            raise SyncError(record.failure)  # it failed since the caller looked; nobody will open the gate
        try:
            await gate.wait(timeout_s)
        except TimeoutError:
            if record is not None and record.is_running and record.policy == "best_effort":
                for reader in gate.missing:
                    if isinstance(reader, str):
                        problem = late(timeout_s, what, (reader,))
                        replica = record.readers[reader].manifest.replica
                        self.lose(record, replica, member_name(reader), phase, problem)
                if gate.is_open and record.is_running:
                    return
                if record.failure:
                    raise DeadlineError(record.failure) from None
            if record is not None and gate is record.ended:
                problem = f"{late(timeout_s, what, ())}; {record.describe_silence()}"
            else:
                problem = late(timeout_s, what, gate.missing)
            if record is not None and record.is_running:
                raise DeadlineError(self.fail(record, member_name(member), phase, problem)) from None
            raise DeadlineError(f"group {self._members.group!r}: {problem}") from None

    def _watch(self, record: SyncRecord) -> None:
        """Fails a sync that everybody forgot: waits have deadlines of their own, so only idle time counts."""
        if not record.is_running:
            return
        loop = asyncio.get_running_loop()
        if record.has_waiters:
            record.touched = loop.time()
        left = record.touched + record.idle_s - loop.time()
        if left > 0:
            record.watchdog = loop.call_later(left, self._watch, record)
        else:
            member, phase = record.stalled()
            problem = f"no progress for {record.idle_s:g} s (nobody called or waited); {record.describe_silence()}"
            silent = [name for name in record.accounted.missing if isinstance(name, str)]
            if record.policy == "best_effort" and silent:
                for reader in silent:
                    self.lose(record, record.readers[reader].manifest.replica, member_name(reader), phase, problem)
                if record.is_running:  # the driver has as much time again to commit for the others
                    record.touched = loop.time()
                    record.watchdog = loop.call_later(record.idle_s, self._watch, record)
                return
            self.fail(record, member, phase, problem)


def describe(version: int, member: str, phase: str, problem: str) -> str:
    """Returns the message of a sync that failed."""
    return text_of(f"version {version}: {member} failed in {phase}: {problem}")


def late(timeout_s: float, what: str, missing: tuple[Hashable, ...]) -> str:
    """Returns the message of a deadline that passed."""
    silent = f"; no answer from {member_names(missing)}" if missing else ""
    return f"waited {timeout_s:g} s for {what}{silent}"
