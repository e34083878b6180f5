"""What a trainer calls: join a group, attach replicas, publish versions, leave.

Every source rank calls `join` once and `publish` for each version, like a collective; rank 0 also drives the engines that
were attached. A publish returns the same report on every rank, or raises the same failure on every rank. Nothing runs
between two calls: no thread, no port, no actor of the trainer's.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from . import wire
from .control import Control, ensure_ray, open_coordinator
from .coverage import check_taken
from .declared import ignored, merge
from .engines import ConnectInfo, EngineClient
from .errors import CoverageError, MembershipError, RdtError, SourceError, SyncError
from .geometry import Box
from .publisher import DEFAULT_BUCKET_BYTES, Publisher
from .receiver import DEFAULT_KINDS
from .report import log_line
from .sources.base import IterableWeightSource, WeightSource
from .transport import LocalExchange

log = logging.getLogger(__name__)

NAMESPACE = "rdt"


class WeightSync:
    """One source rank's membership in a sync group. Made by `join`.

    Attributes:
        group: the group's name.
        rank: of this source rank.
        world_size: source ranks of the group.
        version: last version that was published, or None.
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
        namespace: str = NAMESPACE,
        address: str = "",
        exchange: LocalExchange | None = None,
    ) -> None:
        self.group = group
        self.rank = rank
        self.world_size = world_size
        self.version: int | None = None
        self._control = control
        self._source = source
        self._timeout_s = timeout_s
        self._token = uuid.uuid4().hex
        self._clients: dict[str, EngineClient] = {}
        self._connect_info = {
            "group": group,
            "namespace": namespace,
            "address": address,
            "kinds": tuple(kinds),
            "timeout_s": timeout_s,
            "pack_threshold": pack_threshold,
        }

        def publisher() -> Publisher:
            return Publisher(
                source, group=group, rank=rank, world_size=world_size, mode=mode, kinds=kinds, bucket_bytes=bucket_bytes,
                lookahead=lookahead, exchange=exchange,
            )  # fmt: skip

        self._make_publisher: Callable[[], Publisher] = publisher
        self._publisher = publisher()
        control.join(self._publisher.manifest, self._token)
        self._is_joined = True
        control.joined(timeout_s)
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
        pack_threshold: int = 0,
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
            pack_threshold: bytes of a row below which it is packed at its owner; 0: each link kind's own default.
            namespace: Ray namespace of the coordinator.
            address: of the Ray cluster; default: the one this process is connected to, or RAY_ADDRESS.

        Raises:
            MembershipError: the rank is taken, or the world size differs from the group's.
            DeadlineError: other ranks did not join in time; names them.
            SourceError: the mode cannot work with the source.
            VersionError: Ray or NIXL are missing or too old.
        """
        if not 0 <= rank < world_size:
            raise MembershipError(f"source rank {rank} is outside its world of {world_size}")
        ensure_ray(address, namespace)
        import ray

        control = open_coordinator(
            group, namespace=namespace, world_size=world_size, create=rank == 0, timeout_s=timeout_s
        )
        return cls(
            control, source, group=group, rank=rank, world_size=world_size, mode=mode, kinds=kinds,
            bucket_bytes=bucket_bytes, lookahead=lookahead, timeout_s=timeout_s, pack_threshold=pack_threshold,
            namespace=namespace, address=ray.get_runtime_context().gcs_address,
        )  # fmt: skip

    @property
    def mode(self) -> str:
        """The publish mode in use: "live", "snapshot" or "bucket"."""
        return self._publisher.mode

    def attach(self, client: EngineClient, *, timeout_s: float | None = None) -> None:
        """Adds a replica: it traces, plans, and takes part from the next publish on. On rank 0 only.

        Raises:
            MembershipError: another rank than 0, or the replica's name is taken.
            CoverageError: the engine wants what no rank holds, or nobody takes what the source offers.
            EngineError: an engine rank failed to connect.
        """
        if self.rank != 0:
            raise MembershipError(
                f"replicas are attached on source rank 0, which drives them; this is rank {self.rank}"
            )
        if client.name in self._clients:
            raise MembershipError(f"a replica named {client.name!r} is attached to group {self.group!r} already")
        self._connect(client, self._timeout_s if timeout_s is None else timeout_s)
        self._clients[client.name] = client

    def reconnect(self, client: EngineClient, *, timeout_s: float | None = None) -> None:
        """Connects an attached replica again, in place, e.g. after its engine was started again. On rank 0 only.

        A living engine keeps its links; one that was started again plans and takes its old place. It has no new weights
        before the next publish.

        Raises:
            MembershipError: the replica is not attached.
            CoverageError, EngineError: as `attach`.
        """
        if client.name not in self._clients:
            raise MembershipError(f"no replica named {client.name!r} is attached to group {self.group!r}; attach it")
        self._connect(client, self._timeout_s if timeout_s is None else timeout_s)
        self._clients[client.name] = client

    def detach(self, client: EngineClient | str) -> None:
        """Takes a replica out of the group (also one that died). The engine itself is left alone."""
        name = client if isinstance(client, str) else client.name
        self._clients.pop(name, None)
        self._control.detach(name)

    def _connect(self, client: EngineClient, timeout_s: float) -> None:
        info = ConnectInfo(replica=client.name, **self._connect_info)  # type: ignore[arg-type]
        client.connect(info, deadline=time.monotonic() + timeout_s)
        ranks = self._control.replica_ready(client.name, timeout_s)
        _, manifests = self._control.sources(timeout_s)
        try:
            check_taken(
                [[(part.tensor, Box(part.offset, part.shape)) for part in rank.boxes] for rank in ranks],
                merge(manifests),
                ignored(manifests),
            )
        except CoverageError as error:
            raise CoverageError(f"replica {client.name!r}: {error}") from None

    def publish(self, version: int, *, timeout_s: float | None = None) -> wire.SyncReport:
        """Moves the present weights to every attached replica; returns when all of them serve `version`.

        Called by all source ranks with the same version, after the optimizer's step. Parameters must not change until it
        returns (mode `live`; in the other modes they must not change while it runs either).

        Args:
            version: the training step; never lower than the last one.
            timeout_s: deadline of each wait; default: as at `join`.

        Raises:
            SyncError: the sync failed; the same message on every rank. Replicas that had received bytes are torn: they
                refuse to generate until a later publish succeeds.
            DeadlineError: a rank did not take part in time; names it.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        began = time.perf_counter()
        try:
            self._follow_memory()
        except Exception as error:
            raise self._failed(None, f"source rank {self.rank}", "check", error, version) from error
        readable = self._publisher.readable()
        sync, requests = self._begin(version, readable, timeout_s)
        phases = {"begin": time.perf_counter() - began}
        tasks = [partial(self._drive, one, version, sync, timeout_s, phases) for one in self._clients.values()]
        if requests or not readable:
            tasks.insert(0, partial(self._hold, sync, requests, timeout_s, phases))
        failure = side_by_side(tasks)
        if failure is not None:
            outcome = self._failed(sync, f"source rank {self.rank}", "publish", failure)
            self._abort(version, str(outcome), timeout_s)
            raise outcome from failure
        if self.rank == 0:
            phases["total"] = time.perf_counter() - began
            try:
                report = self._control.commit(sync, self.rank, phases["total"], phases)
            except RdtError as error:
                self._abort(version, str(error), timeout_s)
                raise
            self._resume(timeout_s)
            log.info(log_line(report))
        else:
            report = self._control.outcome(sync, self.rank, timeout_s)
        self.version = version
        return report

    def _follow_memory(self) -> None:
        """Joins again where parameters moved that readers read, so that they learn the new addresses first."""
        if not self._publisher.follow():
            log.info("source rank %d: parameters moved; the group learns their new addresses", self.rank)
            fresh = self._make_publisher()
            self._publisher.close()
            self._publisher, self._is_joined = fresh, False
        if not self._is_joined:  # nor after a join that failed: readers would go on with the old addresses
            self._control.join(self._publisher.manifest, self._token)
            self._is_joined = True

    def _begin(self, version: int, readable: int, timeout_s: float) -> tuple[int, list[wire.ReadRequest]]:
        replicas = sorted(self._clients) if self.rank == 0 else None
        try:
            return self._control.begin(self.rank, self._token, version, replicas, timeout_s, readable=readable)
        except MembershipError:
            # a rank joined again with new addresses: every replica plans again, once
            if self.rank == 0:
                for client in self._clients.values():
                    self._connect(client, timeout_s)
            return self._control.begin(self.rank, self._token, version, replicas, timeout_s, readable=readable)

    def _hold(
        self, sync: int, requests: Sequence[wire.ReadRequest], timeout_s: float, phases: dict[str, float]
    ) -> None:
        """Makes this rank's bytes readable, round after round, as fast as readers give back the buckets."""
        phase = "offer"
        try:
            if requests:
                offers, refs = self._publisher.serve(requests)
                self._control.offer(self.rank, sync, offers, refs)
            rounds = self._publisher.rounds_written()
            slots, total = self._publisher.slots, self._publisher.rounds
            writing = 0.0
            for number in range(total):
                phase = "write"
                started = time.perf_counter()
                next(rounds)
                writing += time.perf_counter() - started
                if number + 1 == total:
                    for _ in rounds:  # lets a source that is iterated run to its end (collectives)
                        raise SourceError(f"source rank {self.rank} wrote more than its {total} rounds")
                phase = "publish"
                # the next round is written into the bucket of this one
                freed = number + 1 - slots
                self._control.published(self.rank, sync, number, freed if freed >= 0 else None, timeout_s)
            phases["write"] = writing
        except Exception as error:
            raise self._failed(sync, f"source rank {self.rank}", phase, error) from error

    def _drive(self, client: EngineClient, version: int, sync: int, timeout_s: float, phases: dict[str, float]) -> None:
        """Takes one replica through the sync, up to the version's stamp. On rank 0."""
        for phase in ("pause", "begin", "pull", "finish"):
            started = time.perf_counter()
            deadline = time.monotonic() + timeout_s
            try:
                if phase == "pause":
                    client.pause(deadline=deadline)
                else:
                    getattr(client, phase)(version, deadline=deadline)
            except Exception as error:
                raise self._failed(sync, f"replica {client.name!r}", phase, error) from error
            name = "engine_begin" if phase == "begin" else phase
            phases[name] = max(phases.get(name, 0.0), time.perf_counter() - started)

    def _failed(
        self, sync: int | None, member: str, phase: str, error: BaseException, version: int | None = None
    ) -> RdtError:
        """Fails the sync for everybody; returns the failure that came first, which is the same on every rank.

        Before this rank has begun, `version` says what it does not begin.
        """
        own = error if isinstance(error, RdtError) else SyncError(str(error) or repr(error))
        try:
            absent = None if version is None else (self.rank, version)
            first = self._control.fail(sync, member, phase, str(own), absent)
        except RdtError as unheard:
            log.warning("%s failed in %s (%s), and the coordinator could not be told: %s", member, phase, own, unheard)
            return own
        return own if first is None or first == str(own) else SyncError(first)

    def _abort(self, version: int, reason: str, timeout_s: float) -> None:
        for client in self._clients.values():
            try:
                client.abort(version, reason, deadline=time.monotonic() + timeout_s)
            except Exception as error:  # the replica may be dead, which is why the sync failed
                log.warning("replica %r could not be told that version %d failed: %s", client.name, version, error)

    def _resume(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        failure = side_by_side([partial(client.resume, deadline=deadline) for client in self._clients.values()])
        if failure is not None:
            raise failure

    def leave(self) -> None:
        """Leaves the group and releases what links hold. The parameters are left alone. Idempotent."""
        try:
            if (
                self.rank == 0
            ):  # whose process keeps the coordinator: the other ranks may still ask for the last outcome
                self._control.settled(self._timeout_s)
            self._control.leave(self.rank, self._token)
        except RdtError as error:
            log.debug("source rank %d: the coordinator did not take the goodbye: %s", self.rank, error)
        self._publisher.close()


def side_by_side(tasks: Sequence[Callable[[], None]]) -> BaseException | None:
    """Runs tasks at once, the first in this thread, and waits for all. Each must have a deadline of its own.

    Returns:
        What the first of them, in the order given, raised; None if all succeeded.
    """
    if not tasks:
        return None
    first, *others = tasks
    failure: BaseException | None = None
    with ThreadPoolExecutor(max_workers=max(1, len(others)), thread_name_prefix="rdt-drive") as pool:
        running = [pool.submit(task) for task in others]
        try:
            first()
        except Exception as error:
            failure = error
        failures = [failure, *(one.exception() for one in running)]
    return next((one for one in failures if one is not None), None)
