"""An engine rank at run time: pull, land, post-process, account.

What can be done once its `Connector` has done; `pull` only posts prepared transfers, replays what could not be expressed
as copies and runs the engine's post-load steps while the next chunk is on its way. A pull that fails after its first byte
leaves the replica torn: it is never stamped and its landing refuses to generate until a complete sync. A rank that has
finished says no version before `commit`, and an abort until then tears it as well.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache, partial

from . import wire
from .connection import Connection, Step
from .connector import Connector
from .errors import RdtError, SyncError, VerifyError, text_of
from .gates import member_name
from .memory import settle
from .proofs import ReaderProof
from .rates import Meter
from .timeline import Recorder
from .transport.thresholds import reports
from .transport.waiting import Flight, post_all, wait_all
from .verifying import check_mode

log = logging.getLogger(__name__)


class _RefusedError(Exception):
    """The coordinator refused a pull; whatever was posted before it said so has landed."""

    def __init__(self, error: RdtError) -> None:
        super().__init__(str(error))
        self.error = error


class Receiver(Connector):
    """Receives weights for one engine rank. See `Connector` for the arguments."""

    version: int | None = None  # that this rank serves
    torn: str | None = None
    _pulled: wire.ReaderReport | None = None
    #: waits until the coordinator took the account
    _taken: Callable[[], dict[int, list[int]]] | None = None
    _sync: int | None = None
    _is_verified = False  # the running sync
    _entered: int | None = None  # greatest version that the coordinator let it pull
    _landed: int | None = None  # version whose bytes are in the model, in part or whole, and not committed

    def pull(self, version: int, timeout_s: float | None = None) -> wire.ReaderReport:
        """Pulls and lands all bytes of the sync that runs now.

        Where parameters lie readable as soon as a sync has begun, bytes move while the coordinator is asked whether they may; a
        rank that it refuses is torn then.

        Args:
            version: that the driver asked for.
            timeout_s: deadline of each wait; default: the receiver's own.

        Returns:
            What was moved. It is on its way to the coordinator, which takes it before it commits.

        Raises:
            SyncError: the sync failed on another member, or nothing is being published.
            DeadlineError: a wait reached its deadline.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        connection = self._connection
        if connection is None:
            raise SyncError(
                f"{self.name} was asked to pull version {version} before it was connected to group {self.group}"
            )
        if self._is_doubted:
            raise SyncError(
                f"{self.name} was asked to pull version {version}, and has to be connected again first: its last pull broke off, "
                "and its links are in doubt"
            )
        self._sync, self._pulled, self._taken = None, None, None
        self._timeline = Recorder()
        phases = dict.fromkeys(("wait", "transfer", "land"), 0.0)
        # one that comes again, or late, must not touch what is served: it waits for the coordinator's word
        early = connection.is_readable_at_once and self._entered is not None and version > self._entered
        enter = cache(
            partial(self.control.enter, self.name, connection.manifest.incarnation, version, timeout_s, early=early)
        )
        if self.device.type == "cpu":
            enter()  # here the posts themselves move bytes; elsewhere they only take time that a device could move some

        def admit() -> ReaderProof | None:
            began = time.perf_counter()
            self._sync, verify = enter()()
            self._timeline.add("wait", began)
            is_moving = early and self.device.type != "cpu"
            phases["transfer" if is_moving else "wait"] += time.perf_counter() - began
            self._entered = version
            self._is_verified = verify != "off"
            if not self._is_verified:
                return None
            began = time.perf_counter()
            proof = connection.proof()
            proof.start(check_mode(verify), version)
            phases["prepare"] = time.perf_counter() - began
            return proof

        proof = None if early else admit()
        try:
            report, proof = self._pull(connection, version, timeout_s, phases, admit if early else lambda: proof)
            # nobody waits for the answer here: it arrives while the engine's driver goes on
            digests = proof.digests() if proof is not None else None
            if proof is not None:
                phases["verify"] = proof.seconds
            self._taken = self.control.done(report, self._running(), digests, timeout_s)
        except _RefusedError as refused:
            self.abort(version, f"version {version} failed half-way: {refused.error}")
            raise refused.error from None
        except Exception as error:
            self._is_doubted = True
            self.abort(version, f"version {version} failed half-way: {text_of(error)}")
            try:
                self._report_failure(enter()()[0] if self._sync is None else self._sync, "pull", error)
            except RdtError as refusal:
                log.debug("%s failed, and was refused as well: %s", self.name, refusal)
            raise
        self._pulled = report
        return report

    def _running(self) -> int:
        if self._sync is None:
            raise SyncError(f"{self.name} reads without the coordinator's word")
        return self._sync

    def _pull(
        self,
        connection: Connection,
        version: int,
        timeout_s: float,
        phases: dict[str, float],
        admit: Callable[[], ReaderProof | None],
    ) -> tuple[wire.ReaderReport, ReaderProof | None]:
        """Moves and lands everything. `admit` is called once, before anything is done with bytes that landed."""
        proof: ReaderProof | None = None
        is_admitted = False
        began = time.perf_counter()
        moved = 0
        meter = Meter()

        steps = connection.steps
        is_first = steps is None
        if steps is None:
            steps = connection.prepare(*self.control.offers(self.name, connection.manifest.incarnation, timeout_s))
            phases["prepare"] = phases.get("prepare", 0.0) + time.perf_counter() - began
            self._timeline.add("prepare", began)

        settle(self.device)  # no kernel that was queued before the pause may still read what is written now
        self._landed, self.version = version, None
        self.torn = f"version {version} is being received"
        self.landing.begin()
        readable = 0  # last round that is published; all before it are given back, those with nothing for this rank too
        pending: tuple[Step, list[Flight]] | None = None

        def process(step: Step, flights: list[Flight]) -> int:
            started = time.perf_counter()
            wait_all(flights, time.monotonic() + timeout_s)
            nbytes = meter.add(flights)
            waited = time.perf_counter()
            phases["transfer"] += waited - started
            self._timeline.add("transfer", started, waited)
            for one in flights:
                self._timeline.add("move", one.posted, one.landed, link=one.source, nbytes=one.transfer.nbytes)
            landing = waited
            if step.scatter is not None:
                step.scatter.run()
            if proof is not None:
                spent = proof.seconds
                proof.take(step.number)  # while everything lies where it landed: a module that closes uses it up
                waited += proof.seconds - spent  # a phase of its own
                self._timeline.add("verify", time.perf_counter() - (proof.seconds - spent))
            for run in step.replays:
                run()
            for module in step.chunk.closes:
                self.landing.close(module)
            if step.memory or step.scatter is not None or step.replays or step.ends_round:
                # receive memory is posted to again by a later chunk, which does not wait for kernels that still read it
                settle(self.device)
            phases["land"] += time.perf_counter() - waited
            self._timeline.add("land", landing)
            return nbytes

        for step in steps:
            if step.chunk.round > readable:
                # the rounds before may have to be read before their buckets are filled again
                if pending is not None:
                    moved += process(*pending)
                    pending = None
                waiting = time.perf_counter()
                readable = step.chunk.round
                self.control.await_round(self.name, self._running(), readable, timeout_s)
                phases["wait"] += time.perf_counter() - waiting
                self._timeline.add("wait", waiting)
            if step.chunk.opens:
                self.landing.open(step.chunk.opens, step.memory)
            posted = time.perf_counter()
            flights = post_all(step.transfers, self.device)
            phases["transfer"] += time.perf_counter() - posted
            self._timeline.add("transfer", posted)
            if not is_admitted:
                try:
                    proof, is_admitted = admit(), True
                except RdtError as refusal:
                    wait_all(flights, time.monotonic() + timeout_s)  # links stay as they are: nothing is on its way
                    raise _RefusedError(refusal) from refusal
            if pending is not None:
                moved += process(*pending)
            pending = (step, flights)
        if pending is not None:
            moved += process(*pending)
        for number in range(readable + 1, connection.rounds):
            self.control.await_round(self.name, self._running(), number, timeout_s)
        report = wire.ReaderReport(
            reader=self.name,
            incarnation=connection.manifest.incarnation,
            version=version,
            bytes=moved,
            expected_bytes=connection.plan.nbytes,
            digest=connection.plan.digest,
            phases=phases,
            links=self._rates.links(meter, connection.sources, connection.kinds, connection.pieces, is_first=is_first),
            packing=reports(connection.thresholds, connection.kinds),
            is_outdated=is_first and connection.is_outdated,
            timeline=self._timeline.timeline(member_name(self.name)),
        )
        return report, proof if is_admitted else admit()

    def finish(self, version: int) -> None:
        """Runs what remains of the post-load step. No version before `commit`, which waits until the account is taken.

        Raises:
            SyncError: no complete pull of this version precedes.
            VerifyError: the sync is verified, and digests differ.
        """
        report, sync, taken = self._pulled, self._sync, self._taken
        if report is None or sync is None or taken is None or report.version != version:
            self.abort(version, f"finish of version {version} without a complete pull of it")
            raise SyncError(f"{self.name} cannot finish version {version}: it was not pulled completely")
        try:
            # only this rank can say what differing digests stand for
            differing = taken() if self._is_verified else {}
            if differing and self._connection is not None:
                raise VerifyError(self._connection.proof().describe(differing))
            self.landing.finish()
            settle(self.device)
        except Exception as error:
            self._is_doubted = True
            self.abort(version, f"version {version} failed in its last step: {error}")
            self._report_failure(sync, "verify" if isinstance(error, VerifyError) else "finish", error)
            raise
        self._pulled = self._sync = self._taken = None
        self.torn = None

    @property
    def uncommitted(self) -> int | None:
        """The version whose bytes are in the model, in part or whole, and of which no commit is known; else None."""
        return self._landed

    def forget(self) -> None:
        """For an engine that is stamped as a whole, before another pull: what it holds was committed, or nobody claims it."""
        if self.torn is None:
            self._landed = None

    def commit(self, version: int) -> None:
        """The sync is committed: this rank serves the version.

        For landings whose engine is stamped as a whole this is the driver's business, and need not be called.

        Raises:
            SyncError: the version was not received completely, or its sync was aborted since.
        """
        if self.version == version and self._landed is None:
            return  # told twice
        if self._landed != version or self.torn is not None or self._pulled is not None:
            raise SyncError(
                f"{self.name} cannot take version {version}: {self.torn or 'it holds no complete and uncommitted version'}"
            )
        self._landed, self.version = None, version

    def abort(self, version: int, reason: str) -> None:
        """Ends the sync of a version that failed; a rank that began to land it becomes torn, finished or not. Idempotent."""
        self._pulled = self._taken = None
        if self._landed == version:
            self.torn = reason
            self.version = None
            self.landing.abort(reason)

    def check(self, check: int) -> None:
        """Hands in digests of what the model holds now, for a comparison without a sync. Nothing is written.

        Args:
            check: id of the check that runs.

        Raises:
            SyncError: not connected, bytes of a sync are being received, or the check is over.
        """
        connection = self._connection
        if connection is None:
            raise SyncError(f"{self.name} is asked for a check before it was connected to group {self.group}")
        if self._pulled is not None:
            raise SyncError(f"{self.name} is in the middle of a sync ({self.torn}); check it afterwards")
        settle(self.device)
        self.control.check_reader(self.name, connection.manifest.incarnation, check, connection.landed())

    def _report_failure(self, sync: int, phase: str, error: BaseException) -> None:
        try:
            self.control.fail(sync, self.name, phase, text_of(error), None, self.replica)
        except RdtError as failure:
            log.warning("%s could not tell the coordinator of its failure in %s: %s", self.name, phase, failure)
