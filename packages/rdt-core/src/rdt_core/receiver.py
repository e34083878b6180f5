"""An engine rank at run time: trace, plan, pull, land, post-process, account.

`connect` does everything that can be done once; `pull` only posts prepared transfers, replays what could not be expressed
as copies and runs the engine's post-load steps while the next chunk is on its way. A pull that fails after its first byte
leaves the replica torn: it is never stamped and its landing refuses to generate until a complete sync.
"""

from __future__ import annotations

import logging
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from . import versions, wire
from .control import Control
from .errors import CoverageError, RdtError, SyncError, TransportError
from .geometry import replay
from .landing import Destination, Landing
from .linking import Chunk, Program, make_program, request_digest
from .memory import Arena, settle
from .planning import Plan, Staged, make_plan
from .routing import Routing
from .transport import LocalExchange, available, make_reader_endpoint, pack_threshold
from .transport.base import PreparedTransfer, ReaderEndpoint
from .transport.copying import CopyProgram
from .transport.nodes import node

log = logging.getLogger(__name__)

#: link kinds in order of preference
DEFAULT_KINDS = ("mapped", "prepared", "ray")


@dataclass(slots=True)
class _Step:
    """One chunk with everything made that its execution needs."""

    chunk: Chunk
    transfers: list[tuple[int, PreparedTransfer]]  # source rank, transfer
    scatter: CopyProgram | None
    replays: list[Callable[[], None]]
    memory: dict[str, torch.Tensor]
    ends_round: bool


@dataclass(slots=True)
class _Connection:
    """What `connect` made; replaced as a whole by the next `connect`."""

    epoch: int
    manifest: wire.EngineManifest
    sources: dict[int, wire.SourceManifest]
    plan: Plan
    program: Program
    destinations: dict[str, Destination]
    endpoints: dict[int, ReaderEndpoint]
    buffer: Arena | None
    tensors: list[torch.Tensor]
    steps: list[_Step] | None = None  # made at the first pull, when the owners have answered


class Receiver:
    """Receives weights for one engine rank.

    Args:
        landing: the engine's model.
        control: the group's coordinator.
        group: name of the sync group.
        replica: name of the replica, unique in the group.
        rank: of this engine rank in its replica.
        world_size: engine ranks of the replica.
        device: where the model lives.
        kinds: link kinds allowed, in order of preference.
        timeout_s: deadline of every single wait, in seconds.
        pack_threshold: bytes of a row below which it is packed; 0 takes the kind's own default.
        exchange: shared with the owners, where kind "local" is allowed.
    """

    def __init__(
        self,
        landing: Landing,
        *,
        control: Control,
        group: str,
        replica: str,
        rank: int,
        world_size: int,
        device: torch.device,
        kinds: Sequence[str] = DEFAULT_KINDS,
        timeout_s: float = 60.0,
        pack_threshold: int = 0,
        exchange: LocalExchange | None = None,
    ) -> None:
        self.landing = landing
        self.control = control
        self.group = group
        self.replica = replica
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.kinds = tuple(kinds)
        self.timeout_s = timeout_s
        self.pack_threshold = pack_threshold
        self._exchange = exchange
        self.name = f"{replica}/{rank}"
        self.version: int | None = None
        self.torn: str | None = None
        self._connection: _Connection | None = None
        self._pulled: wire.ReaderReport | None = None
        self._sync: int | None = None
        self._landing_began = False

    # ------------------------------------------------------------------ set-up

    def connect(self) -> wire.EngineManifest:
        """Reads the manifests, traces the loaders, plans, and posts the read requests. Again after an epoch: replaces all.

        Raises:
            CoverageError: something the engine wants has no owner, or copies overlap.
            TracingError: a loader needs the data of a tensor.
            TransportError: no allowed link kind works with an owner.
            VersionError: the other side runs what cannot work with this one.
        """
        epoch, manifests = self.control.sources(self.timeout_s)
        if self._connection is not None and self._connection.epoch == epoch:
            return self._connection.manifest
        mine = versions.check_local(need_nixl=any(kind in ("prepared", "ray") for kind in self.kinds))
        for manifest in manifests:
            versions.check_peer(mine, manifest.versions, f"source rank {manifest.rank}")
        self._disconnect()
        here = node(self.device)
        routing = Routing(manifests)
        route = routing.choose(self.rank + zlib.crc32(self.replica.encode()), self.world_size, here)
        trace = self.landing.trace(routing.tensors)
        destinations = dict(self.landing.destinations())
        plan = make_plan(trace, destinations, routing, route)
        sources = {manifest.rank: manifest for manifest in manifests}
        used = sorted(set(plan.columns.source.tolist()))
        kinds = {source: self._choose_kind(here, sources[source]) for source in used}
        program = make_program(
            plan,
            destinations,
            kinds,
            {source: self.pack_threshold or pack_threshold(kind, self.device.type) for source, kind in kinds.items()},
            slots=max((manifest.slots for manifest in manifests), default=1),
        )
        buffer = Arena(program.receive_bytes, self.device) if program.receive_bytes else None
        tensors = self._tensors(plan, program, destinations, buffer)
        endpoints: dict[int, ReaderEndpoint] = {}
        for source, kind in kinds.items():
            endpoint = make_reader_endpoint(kind, exchange=self._exchange)
            for tensor in self._registered(plan, program, tensors, buffer):
                endpoint.register(tensor)
            endpoints[source] = endpoint
        incarnation = uuid.uuid4().hex
        requests = tuple(
            wire.ReadRequest(
                reader=self.name,
                incarnation=incarnation,
                source=source,
                kind=kinds[source],
                digest=request_digest(transfers, kinds[source], program.pack_bytes[source]),
                pack_bytes=program.pack_bytes[source],
                transfers=transfers,
            )
            for source, transfers in sorted(program.requests.items())
        )
        declared = wire.EngineManifest(
            group=self.group,
            replica=self.replica,
            rank=self.rank,
            world_size=self.world_size,
            incarnation=incarnation,
            versions=mine,
            node=here,
            engine=self.landing.engine,
            digest=plan.digest,
            nbytes=plan.nbytes,
            taken=tuple(plan.taken),
            boxes=tuple(
                wire.TakenBox(tensor=tensor, offset=box.offset, shape=box.shape) for tensor, box in plan.taken_boxes
            ),
            requests=requests,
        )
        self.control.connect(declared, epoch)
        self._connection = _Connection(
            epoch, declared, sources, plan, program, destinations, endpoints, buffer, tensors
        )
        log.info(
            "%s connected to group %s: %d tensors, %.3f GB a sync, %d chunks, links %s",
            self.name, self.group, len(plan.taken), plan.nbytes / 1e9, len(program.chunks), kinds,
        )  # fmt: skip
        return declared

    def _choose_kind(self, here: wire.NodeMeta, source: wire.SourceManifest) -> str:
        reasons = []
        for kind in self.kinds:
            reason = available(kind, here, source)
            if reason is None:
                return kind
            reasons.append(f"{kind}: {reason}")
        raise TransportError(
            f"no link kind works between {self.name} and source rank {source.rank} of group {self.group}: "
            + "; ".join(reasons)
        )

    def _tensors(
        self, plan: Plan, program: Program, destinations: dict[str, Destination], buffer: Arena | None
    ) -> list[torch.Tensor]:
        """The memory of each destination of the plan, then the receive buffer itself."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        tensors = []
        for index, key in enumerate(plan.destinations):
            place = int(program.places[index])
            if key in destinations and destinations[key].in_place:
                tensors.append(self.landing.storage(key))
            elif place < 0 or buffer is None:
                tensors.append(empty)
            else:
                tensors.append(buffer.tensor[place : place + int(plan.destination_nbytes[index])])
        tensors.append(buffer.tensor if buffer is not None else empty)
        return tensors

    def _registered(
        self, plan: Plan, program: Program, tensors: list[torch.Tensor], buffer: Arena | None
    ) -> Iterable[torch.Tensor]:
        for index in range(len(plan.destinations)):
            if int(program.places[index]) < 0 and tensors[index].numel():
                yield tensors[index]
        if buffer is not None:
            yield buffer.tensor

    def _prepare(self, connection: _Connection, timeout_s: float) -> list[_Step]:
        """Makes every transfer, once the owners have answered the requests."""
        manifest = connection.manifest
        offers, refs = self.control.offers(self.name, manifest.incarnation, timeout_s)
        for offer, its_refs in zip(offers, refs, strict=True):
            request = next(r for r in manifest.requests if r.source == offer.source)
            if offer.digest != request.digest:
                raise CoverageError(
                    f"{self.name} and source rank {offer.source} disagree about what their link moves "
                    f"(digests {request.digest[:12]} and {offer.digest[:12]}); both ends must run the same rdt version"
                )
            connection.endpoints[offer.source].connect(connection.sources[offer.source], offer, its_refs)
        plan, program, tensors = connection.plan, connection.program, connection.tensors
        steps = []
        for number, chunk in enumerate(program.chunks):
            transfers = [
                (link.source, connection.endpoints[link.source].prepare(link.index, link.copies, tensors))
                for link in chunk.links
            ]
            scatter = CopyProgram(chunk.scatter, {0: tensors[-1]}, tensors) if len(chunk.scatter) else None
            memory = {
                key: tensors[index]
                for index, key in enumerate(plan.destinations)
                if key in connection.destinations
                and connection.destinations[key].module in chunk.opens
                and not connection.destinations[key].in_place
            }
            replays = [self._replayer(plan.staged[index], tensors) for index in chunk.replays]
            last = number + 1 == len(program.chunks) or program.chunks[number + 1].round != chunk.round
            steps.append(_Step(chunk, transfers, scatter, replays, memory, last))
        return steps

    def _replayer(self, staged: Staged, tensors: list[torch.Tensor]) -> Callable[[], None]:
        box = typed_view(tensors[staged.destination], staged.dtype, 0, staged.box_shape, None)
        target = typed_view(
            tensors[staged.target],
            staged.target_dtype,
            staged.target_offset,
            staged.target_shape,
            staged.target_strides,
        )

        def run() -> None:
            value = replay(box.permute(staged.axes).reshape(staged.shape), staged.rest)
            target.copy_(value.reshape(target.shape))

        return run

    # ------------------------------------------------------------------ one sync

    def pull(self, version: int, timeout_s: float | None = None) -> wire.ReaderReport:
        """Pulls and lands all bytes of the sync that runs now.

        Args:
            version: that the driver asked for.
            timeout_s: deadline of each wait; default: the receiver's own.

        Returns:
            What was moved; handed to the coordinator by `finish`.

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
        sync = self.control.running(version)
        self._sync, self._pulled = sync, None
        try:
            self._pulled = self._pull(connection, version, sync, timeout_s)
        except Exception as error:
            self.abort(f"version {version} failed half-way: {error}")
            self._report_failure(sync, "pull", error)
            raise
        return self._pulled

    def _pull(self, connection: _Connection, version: int, sync: int, timeout_s: float) -> wire.ReaderReport:
        phases = dict.fromkeys(("wait", "transfer", "land"), 0.0)
        began = time.perf_counter()
        moved = 0
        seconds: dict[int, float] = {}
        link_bytes: dict[int, int] = {}

        self.control.await_round(self.name, sync, 0, timeout_s)
        if connection.steps is None:
            connection.steps = self._prepare(connection, timeout_s)
            phases["prepare"] = time.perf_counter() - began
        else:
            phases["wait"] += time.perf_counter() - began

        settle(self.device)  # no kernel that was queued before the pause may still read what is written now
        self._landing_began = True
        self.torn = f"version {version} is being received"
        self.landing.begin()
        readable, unread = 0, 0  # last round that is published, first one that is not acknowledged
        pending: tuple[_Step, float] | None = None

        def acknowledge(until: int) -> None:
            """Gives back every round before `until`; those with nothing for this rank too, or their buckets stay taken."""
            nonlocal unread
            for number in range(unread, until):
                self.control.read(self.name, sync, number)
            unread = max(unread, until)

        def process(step: _Step, posted: float) -> int:
            started = time.perf_counter()
            deadline = time.monotonic() + timeout_s
            nbytes = 0
            for source, transfer in step.transfers:
                transfer.wait(deadline)
                nbytes += transfer.nbytes
                link_bytes[source] = link_bytes.get(source, 0) + transfer.nbytes
                seconds[source] = seconds.get(source, 0.0) + time.perf_counter() - posted
            waited = time.perf_counter()
            phases["transfer"] += waited - started
            if step.scatter is not None:
                step.scatter.run()
            for run in step.replays:
                run()
            for module in step.chunk.closes:
                self.landing.close(module)
            if step.memory or step.scatter is not None or step.replays or step.ends_round:
                # receive memory is posted to again by a later chunk, which does not wait for kernels that still read it
                settle(self.device)
            if step.ends_round:
                acknowledge(step.chunk.round + 1)
            phases["land"] += time.perf_counter() - waited
            return nbytes

        for step in connection.steps:
            if step.chunk.round > readable:
                # the rounds before may have to be read before their buckets are filled again
                if pending is not None:
                    moved += process(*pending)
                    pending = None
                waiting = time.perf_counter()
                readable = step.chunk.round
                acknowledge(readable)
                self.control.await_round(self.name, sync, readable, timeout_s)
                phases["wait"] += time.perf_counter() - waiting
            if step.chunk.opens:
                self.landing.open(step.chunk.opens, step.memory)
            posted = time.perf_counter()
            for _, transfer in step.transfers:
                transfer.post()
            phases["transfer"] += time.perf_counter() - posted
            if pending is not None:
                moved += process(*pending)
            pending = (step, posted)
        if pending is not None:
            moved += process(*pending)
        rounds = max((manifest.rounds for manifest in connection.sources.values()), default=1)
        for number in range(unread, rounds):
            self.control.await_round(self.name, sync, number, timeout_s)
            acknowledge(number + 1)
        return wire.ReaderReport(
            reader=self.name,
            incarnation=connection.manifest.incarnation,
            version=version,
            bytes=moved,
            expected_bytes=connection.plan.nbytes,
            digest=connection.plan.digest,
            phases=phases,
            links=tuple(
                wire.LinkReport(
                    source=source,
                    reader=self.name,
                    kind=connection.endpoints[source].kind,
                    bytes=link_bytes[source],
                    seconds=seconds[source],
                )
                for source in sorted(link_bytes)
            ),
        )

    def finish(self, version: int) -> None:
        """Runs what remains of the post-load step, hands the account to the coordinator, and takes the version.

        Raises:
            SyncError: no complete pull of this version precedes, or the accounts do not match.
        """
        report, sync = self._pulled, self._sync
        if report is None or sync is None or report.version != version:
            self.abort(f"finish of version {version} without a complete pull of it")
            raise SyncError(f"{self.name} cannot finish version {version}: it was not pulled completely")
        started = time.perf_counter()
        try:
            self.landing.finish()
            settle(self.device)
            report.phases["finish"] = time.perf_counter() - started
            self.control.done(report, sync)
        except Exception as error:
            self.abort(f"version {version} failed in its last step: {error}")
            self._report_failure(sync, "finish", error)
            raise
        self._pulled = self._sync = None
        self._landing_began = False
        self.torn = None
        self.version = version

    def abort(self, reason: str) -> None:
        """Ends a sync that failed; a rank that began to land becomes torn. Idempotent."""
        self._pulled = None
        if self._landing_began:
            self.torn = reason
            self.landing.abort(reason)

    def close(self) -> None:
        """Leaves the group and releases every link. Idempotent; errors of a group that is gone are not raised."""
        if self._connection is not None:
            try:
                self.control.disconnect(self.name, self._connection.manifest.incarnation)
            except RdtError as error:
                log.debug("%s: the coordinator did not take the goodbye: %s", self.name, error)
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        for step in connection.steps or ():
            for _, transfer in step.transfers:
                transfer.release()
        for endpoint in connection.endpoints.values():
            endpoint.close()

    def _report_failure(self, sync: int, phase: str, error: BaseException) -> None:
        try:
            self.control.fail(sync, self.name, phase, str(error))
        except RdtError as failure:
            log.warning("%s could not tell the coordinator of its failure in %s: %s", self.name, phase, failure)


def typed_view(
    memory: torch.Tensor, dtype: str, offset: int, shape: Sequence[int], strides: Sequence[int] | None
) -> torch.Tensor:
    """Returns a strided view of raw memory.

    Args:
        memory: 1-D uint8 tensor.
        dtype: name of the view's dtype.
        offset: of the first element from the start of `memory`, in elements.
        shape: of the view.
        strides: in elements; None for contiguous.
    """
    kind: torch.dtype = getattr(torch, dtype)
    if strides is None:
        strides = torch.empty(tuple(shape), device="meta").stride()
    start, rest = divmod(int(memory.storage_offset()), kind.itemsize)
    if rest:
        raise TransportError(f"memory at byte {memory.storage_offset()} is not aligned for {dtype}")
    return torch.empty(0, dtype=kind, device=memory.device).set_(
        memory.untyped_storage(), start + offset, tuple(shape), tuple(strides)
    )
