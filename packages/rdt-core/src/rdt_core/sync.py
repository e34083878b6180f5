"""What a trainer calls: join a group, attach replicas, publish versions, leave.

Every source rank calls `join` once and `publish` for each version, like a collective; rank 0 also drives the engines that
were attached. A publish returns the same report on every rank, or raises the same failure on every rank. Nothing runs
between two calls: no thread, no port, no actor of the trainer's. A coordinator that died is opened again by the next one.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from . import wire
from .attaching import Attaching
from .checking import check
from .connector import DEFAULT_KINDS
from .control import Control
from .driver import Driver, Round, side_by_side
from .errors import (
    CoordinatorLostError,
    EngineError,
    MembershipError,
    RdtError,
    SyncError,
    TakenOverError,
    text_of,
)
from .metrics import RayMetrics
from .outcomes import Observer, Watch
from .publisher import DEFAULT_BUCKET_BYTES, Publisher
from .rates import SlowLinks, check_slow_links
from .record import POLICIES
from .rendezvous import ensure_ray, open_coordinator
from .report import log_line, to_the_end
from .sources.base import IterableWeightSource, WeightSource
from .transport import LocalExchange
from .verifying import check_mode

log = logging.getLogger(__name__)

NAMESPACE = "rdt"


class WeightSync(Attaching):
    """One source rank's membership in a sync group. Made by `join`.

    Attributes:
        group: the group's name.
        rank: of this source rank.
        world_size: source ranks of the group.
        version: last version that is committed as far as this rank knows, or None.
    """

    def __init__(
        self,
        control: Control,
        source: WeightSource | IterableWeightSource,
        *,
        group: str,
        rank: int,
        world_size: int,
        mode: str = "auto",
        kinds: Sequence[str] = DEFAULT_KINDS,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        lookahead: int = 1,
        timeout_s: float = 60.0,
        pack_threshold: int = 0,
        slow_links: SlowLinks = "refuse",
        policy: str = "require_all",
        verify: str = "off",
        takeover: bool = False,
        observers: Sequence[Observer] = (),
        namespace: str = NAMESPACE,
        address: str = "",
        exchange: LocalExchange | None = None,
        reopen: Callable[[float], Control] | None = None,
    ) -> None:
        _check_policy(policy)
        check_mode(verify)
        self._policy = policy
        self._verify = verify
        self._was_alone = False  # published without a replica, and said so
        self._watch = Watch(observers if rank == 0 else None, group)
        self._driver = Driver(
            {
                "group": group,
                "namespace": namespace,
                "address": address,
                "kinds": tuple(kinds),
                "timeout_s": timeout_s,
                "pack_threshold": pack_threshold,
                "slow_links": check_slow_links(slow_links),
            }
        )

        def publisher() -> Publisher:
            return Publisher(
                source, group=group, rank=rank, world_size=world_size, mode=mode, kinds=kinds, bucket_bytes=bucket_bytes,
                lookahead=lookahead, exchange=exchange,
            )  # fmt: skip

        super().__init__(
            control, publisher, group=group, rank=rank, world_size=world_size, timeout_s=timeout_s, takeover=takeover,
            reopen=reopen,
        )  # fmt: skip
        self._driver.token = self._token
        if self._publisher.mode_reason != "asked for":
            log.info("source rank %d publishes in mode %s: %s", rank, self.mode, self._publisher.mode_reason)

    @classmethod
    def join(
        cls,
        group: str,
        *,
        source: WeightSource | IterableWeightSource,
        rank: int,
        world_size: int,
        mode: str = "auto",
        kinds: Sequence[str] = DEFAULT_KINDS,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        lookahead: int = 1,
        timeout_s: float = 60.0,
        stall_timeout_s: float = 600.0,
        pack_threshold: int = 0,
        slow_links: SlowLinks = "refuse",
        policy: str = "require_all",
        verify: str = "off",
        takeover: bool = False,
        observers: Sequence[Observer] | None = None,
        namespace: str = NAMESPACE,
        address: str | None = None,
    ) -> WeightSync:
        """Joins a sync group; returns once all source ranks have joined.

        Args:
            group: name of the group; the same on every rank, unique in the namespace.
            source: this rank's weights.
            rank: this source rank, 0 to world_size - 1. Rank 0 drives the engines.
            world_size: number of source ranks.
            mode: "live" (readers read the parameters), "snapshot" (a copy in the wire dtype), "bucket" (fixed staging
                buckets), or "auto", which takes the first that works and says why.
            kinds: link kinds allowed, in order of preference: "mapped", "prepared", "ray".
            bucket_bytes: size of one bucket.
            lookahead: buckets filled ahead of the readers.
            timeout_s: deadline of every single wait, in seconds.
            stall_timeout_s: a sync in which no member calls or waits for so many seconds has failed, and says who was at
                what; at least three times `timeout_s`. Rank 0's word counts.
            pack_threshold: bytes of a row below which it is packed at its owner; 0: each link kind's own default.
            slow_links: a link far below what its path should do is always named in the report. "refuse": GPU to GPU, two syncs
                in a row below a floor that only a broken path reaches (1 GB/s, across nodes 0.1; links of 64 MiB and more)
                fail the second. "warn": it never fails. A number: the floor in GB/s of every link. Rank 0's word counts.
            policy: what becomes of a sync when a replica fails or is silent. "require_all": it fails for all. "best_effort":
                the replica is left out, the report says so, and the others get the version. Rank 0's word counts.
            verify: whether both ends digest the bytes where they lie, before the commit: "off", "sample" (about a 32nd, another
                part in each sync) or "full". A difference fails the sync. On a CPU a digest runs at about 5 GB/s a core, on a
                GPU near the rate of its memory; the reports say what it cost, phase "verify". The same on every rank.
            takeover: this process takes the place of a source rank that died; if that one lives after all, its calls are
                refused.
            observers: functions that are told what became of every sync, on rank 0 only, e.g. `JsonLines("syncs.jsonl")`.
                Default: `[RayMetrics(asked=False)]`, which is quiet where Ray exports none.
            namespace: Ray namespace of the coordinator.
            address: of the Ray cluster; default: the one this process is connected to, or RAY_ADDRESS.

        Raises:
            MembershipError: the rank is taken, the world size differs from the group's, or an unknown policy.
            DeadlineError: other ranks did not join in time; names them.
            SourceError: the mode cannot work with the source.
            VersionError: Ray or NIXL are missing or too old.
        """
        if not 0 <= rank < world_size:
            raise MembershipError(
                f"source rank {rank} is outside its world of {world_size}: source ranks count from 0 to world_size - 1, over all "
                "trainer processes"
            )
        ensure_ray(address, namespace)
        import ray

        def open(limit_s: float) -> Control:
            return open_coordinator(
                group, namespace=namespace, world_size=world_size, create=rank == 0, timeout_s=limit_s,
                stall_timeout_s=stall_timeout_s, is_source=True,
            )  # fmt: skip

        return cls(
            _open_living(open, timeout_s), source, group=group, rank=rank, world_size=world_size, mode=mode, kinds=kinds,
            bucket_bytes=bucket_bytes, lookahead=lookahead, timeout_s=timeout_s, pack_threshold=pack_threshold,
            slow_links=slow_links, policy=policy, verify=verify, takeover=takeover, namespace=namespace,
            observers=[RayMetrics(asked=False)] if observers is None else observers,
            address=ray.get_runtime_context().gcs_address, reopen=open,
        )  # fmt: skip

    @property
    def mode(self) -> str:
        """The publish mode in use: "live", "snapshot" or "bucket"."""
        return self._publisher.mode

    def publish(
        self, version: int, *, timeout_s: float | None = None, policy: str | None = None, verify: str | None = None
    ) -> wire.SyncReport:
        """Moves the present weights to every attached replica; returns when all of them serve `version`.

        Called by all source ranks with the same version, after the optimizer's step. Parameters must not change until it
        returns (mode `live`; in the other modes they must not change while it runs either).

        Args:
            version: the training step; never lower than the last one.
            timeout_s: deadline of each wait; default: as at `join`.
            policy: default: as at `join`.
            verify: default: as at `join`; the same on every rank.

        Returns:
            What the sync did, the same on every rank, but for the engine ranks and links of large groups (`MAX_TOLD_LINKS`), of
            which rank 0 alone is told, and for what comes after the commit: rank 0's `seconds` and `phases` go on until the
            replicas serve, those of the other ranks end where the commit begins. With policy "best_effort" its `failed` names
            replicas that were left out; one that could not be stamped or resumed after the commit is named on rank 0 only.

        Raises:
            SyncError: the sync failed; the same message on every rank. Where bytes that landed differ from their owner's it
                names tensor, rows, source and engine rank. Replicas that had received bytes are torn: they refuse to
                generate until a later publish succeeds.
            DeadlineError: a rank did not take part in time; names it.
            CoordinatorLostError: the coordinator died in the middle; publish again.
            EngineError: on rank 0, after the commit: a replica could not be stamped or resumed.
            MembershipError: this rank has left.
        """
        return self._publish(_number(version), None, timeout_s, policy, verify)

    def catch_up(
        self, *, timeout_s: float | None = None, policy: str | None = None, verify: str | None = None
    ) -> wire.SyncReport:
        """Brings the group's version to those attached replicas that do not serve it; the others are not disturbed.

        Called by all source ranks, after a replica was attached or came back. The weights must still be those of the group's
        version, as they are between two optimizer steps.

        Raises:
            SyncError: nothing was published yet; or as `publish`.
        """
        try:
            if self._is_lost:
                self._restore(self._timeout_s if timeout_s is None else timeout_s)
            version, _ = self._control.current()
            serves = {one.name: one.version for one in self._control.status().replicas}
        except CoordinatorLostError:
            self._is_lost = True
            raise
        if version is None:
            raise SyncError(f"group {self.group!r} has no version yet that a replica could catch up to; publish one")
        late = [name for name in self._driver.clients if serves.get(name) != version or name in self._driver.doubted]
        return self._publish(version, late, timeout_s, policy, verify)

    def verify(self, *, timeout_s: float | None = None) -> wire.CheckReport:
        """Compares every attached replica with the present weights, without a sync. Called by all source ranks.

        Nothing is moved: both sides digest what they hold, and engines go on generating meanwhile. In modes `snapshot` and
        `bucket` the arena is filled once.

        Args:
            timeout_s: deadline of each wait; default: as at `join`.

        Returns:
            A row for each tensor and replica: "equal", "differs" with its rows, "not comparable" where the engine keeps it in
            another form than it travels in, or "not taken". The same on every rank.

        Raises:
            SyncError: a rank or replica failed or did not answer in time; the same on every rank.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            if self._is_lost:
                self._restore(timeout_s)
            self._follow_memory()
            return check(
                self._control, self._publisher, self._token, self._driver, version=self.version, timeout_s=timeout_s
            )
        except CoordinatorLostError:
            self._is_lost = True
            raise

    def _publish(
        self,
        version: int,
        only: Sequence[str] | None,
        timeout_s: float | None,
        policy: str | None,
        verify: str | None,
    ) -> wire.SyncReport:
        timeout_s = self._timeout_s if timeout_s is None else float(timeout_s)
        policy = self._policy if policy is None else policy
        _check_policy(policy)
        mode = check_mode(self._verify if verify is None else verify)
        if self._has_left:
            raise MembershipError(f"source rank {self.rank} has left group {self.group!r}; join again to publish")
        with self._watch.sync(version, self.mode, self._states) as watched:
            self._timeline = watched.timeline
            try:
                watched.report = self._sync(version, only, timeout_s, policy, mode)
            except CoordinatorLostError:
                self._is_lost = True
                raise
        return watched.report.without_timelines()

    def _sync(
        self, version: int, only: Sequence[str] | None, timeout_s: float, policy: str, verify: wire.Verify
    ) -> wire.SyncReport:
        began = time.perf_counter()
        if self._is_lost:
            self._restore(timeout_s)
        try:
            self._follow_memory()
        except CoordinatorLostError:
            self._restore(timeout_s)
        except Exception as error:
            raise self._failed(None, "check", error, version) from error
        readable = self._publisher.readable()
        names = sorted(self._driver.clients if only is None else only) if self.rank == 0 else []
        out: dict[str, str] = {}
        again = self._driver.doubted | self._driver.outdated
        doubted = [name for name in names if name in again]
        if doubted:
            self._connect_again(version, doubted, names, out, timeout_s, policy)
        # one that waits for nobody; else replicas would stand still for the ranks that are late
        ahead: set[str] = set()
        try:
            if self.world_size == 1:
                self._driver.ahead((name for name in names if name not in out), ahead)
            sync, requests = self._begin(version, names, out, readable, timeout_s, policy, verify, ahead)
        except BaseException:  # also Ctrl-C: what serves is not to stand still
            self._driver.take_back(ahead, timeout_s)
            raise
        self._driver.serving.difference_update(names)
        phases = {"begin": time.perf_counter() - began}
        self._timeline.add("begin", began)
        clients = [self._driver.clients[name] for name in names if name not in out]
        drive = Round(
            self._control,
            sync,
            version,
            clients,
            policy=policy,
            timeout_s=timeout_s,
            caller=(self.rank, self._token),
            timeline=self._timeline,
        )
        tasks = drive.tasks()
        if requests or not readable or verify != "off":
            tasks.insert(0, partial(self._hold, sync, version, requests, timeout_s, phases, verify))
        failure = side_by_side(tasks)
        if failure is None and clients and len(drive.failed) == len(clients):
            failure = SyncError("; ".join(drive.failed.values()))
        if failure is not None:
            outcome = self._failed(sync, "publish", failure)
            drive.abort(str(outcome))
            self._driver.doubted.update(names)
            raise outcome from failure
        if self.rank != 0:
            report = self._control.outcome(sync, self.rank, timeout_s, self._told())
            self.version = version
            return report
        committing = time.perf_counter()
        phases |= {**drive.phases(), "total": committing - began}
        try:
            report = self._control.commit(
                sync, self.rank, phases["total"], phases, {**out, **drive.failed}, timeout_s=timeout_s
            )
        except Exception as error:
            self._failed(sync, "commit", error)  # a commit that is still on its way is refused then
            drive.abort(text_of(error))
            self._disown(drive, error)
            self._driver.doubted.update(names)
            raise
        self.version = version
        stamping = time.perf_counter()
        self._timeline.add("commit", committing, stamping)
        unreleased = drive.commit(report.failed)
        stamped = time.perf_counter()
        self._timeline.add("stamp", stamping, stamped)
        report = to_the_end(report, commit_s=stamping - committing, stamp_s=stamped - stamping, seconds=stamped - began)
        self._driver.doubted.update((*report.failed, *unreleased))
        self._driver.serving.update(name for name in drive.names if name not in {*report.failed, *unreleased})
        self._driver.outdated.update(report.outdated)
        log.info(log_line(report))
        if not self._driver.clients and not self._was_alone:
            self._was_alone = True
            log.warning(
                "version %d of %r went to nobody: no replica is attached. One that is attached from now on is paused until "
                "sync.catch_up() on every source rank, or the next publish",
                version, self.group,
            )  # fmt: skip
        if unreleased:
            told = "; ".join(f"replica {name!r}: {error}" for name, error in unreleased.items())
            if policy == "require_all":
                raise EngineError(f"version {version} is committed, but not every replica took it: {told}")
            log.warning("version %d is committed, but not every replica took it: %s", version, told)
            failed = {**report.failed, **{name: str(error) for name, error in unreleased.items()}}
            served = tuple(name for name in report.replicas if name not in unreleased)
            report = msgspec.structs.replace(report, failed=failed, replicas=served)
        return report

    def _disown(self, drive: Round, error: Exception) -> None:
        """The commit may have been taken although this rank did not hear of it; its replicas are torn now."""
        try:
            self._control.tear(drive.names, text_of(error), self._token)
        except RdtError as unheard:
            log.warning("source rank 0: the coordinator could not be told that replicas are torn: %s", unheard)

    def _begin(
        self,
        version: int,
        names: Sequence[str],
        out: dict[str, str],
        readable: int,
        timeout_s: float,
        policy: str,
        verify: wire.Verify,
        ahead: set[str],
    ) -> tuple[int, list[wire.ReadRequest]]:
        """Begins the sync on every rank; a coordinator that died and replicas that must plan again are mended once each.

        Args:
            version: of the sync.
            names: replicas that shall take part.
            out: filled with those that cannot, and why.
            readable: see `Coordinator.begin`.
            timeout_s: for the ranks to begin.
            policy, verify: see `publish`.
            ahead: replicas that have paused already; they go on while anything is mended.
        """
        mended: set[type[RdtError]] = set()
        while True:
            replicas = [name for name in names if name not in out] if self.rank == 0 else None
            # while one is mended, rank 0 may use up a deadline with its replicas before it begins
            limit_s = timeout_s * (1 + len(mended))
            try:
                sync, requests, (gone, terms) = self._control.begin(
                    self.rank, self._token, version, replicas, limit_s, readable=readable, policy=policy, verify=verify
                )
                self._publisher.forget(gone)
                self._terms.update(terms)
                return sync, requests
            except (CoordinatorLostError, MembershipError) as error:
                if type(error) in mended or isinstance(error, TakenOverError):
                    raise
                mended.add(type(error))
                self._driver.take_back(ahead, timeout_s)
                if isinstance(error, CoordinatorLostError):
                    self._restore(timeout_s)
                elif self.rank == 0:
                    self._connect_again(
                        version, [name for name in names if name not in out], names, out, timeout_s, policy
                    )


def _open_living(open: Callable[[float], Control], timeout_s: float) -> Control:
    """Opens a coordinator; one that an earlier run left behind may still answer once, and is not taken for this run's."""
    deadline = time.monotonic() + timeout_s
    while True:
        control = open(max(deadline - time.monotonic(), 1.0))
        try:
            control.status()
            return control
        except CoordinatorLostError:
            if time.monotonic() >= deadline:
                raise


def _number(version: object) -> int:
    try:
        number = operator.index(version)  # type: ignore[arg-type]
    except TypeError:
        raise SyncError(f"version {version!r} is a {type(version).__name__}; versions are integers") from None
    if not 0 <= number < 1 << 63:
        raise SyncError(f"version {number} is out of range; versions are integers from 0 to 2**63 - 1")
    return number


def _check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise MembershipError(f"policy {policy!r} is unknown; choose one of {', '.join(POLICIES)}")
