"""An engine rank on its way into a group: it reads the manifests, traces, plans, and posts what it will read.

Everything that can be done once is done here; `receiver` executes it in every sync. A rank whose links are in doubt, or that
planned against source ranks as they are no more, makes all of it anew.
"""

from __future__ import annotations

import logging
import uuid
import zlib
from collections.abc import Sequence

import torch

from . import versions, wire
from .connection import Connection, memory_of
from .control import Control
from .errors import MembershipError, RdtError, TransportError
from .landing import Landing
from .linking import make_program, request_digest
from .memory import Arena
from .planning import make_plan
from .precision import check_float8, narrowed
from .rates import LinkRates, SlowLinks
from .routing import Routing
from .transport import LocalExchange, available, make_reader_endpoint
from .transport.base import ReaderEndpoint
from .transport.nodes import node
from .transport.thresholds import SCRATCH_BYTES, choose, is_unknown, place_of

log = logging.getLogger(__name__)

#: link kinds in order of preference
DEFAULT_KINDS = ("mapped", "prepared", "ray")


class Connector:
    """One engine rank of a replica, and its connection to a group.

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
        slow_links: what becomes of links that are far too slow; see `WeightSync.join`.
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
        slow_links: SlowLinks = "refuse",
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
        self.name = f"{replica}/{rank}"
        self._exchange = exchange
        self._rates = LinkRates(self.name, node(self.device), slow_links)
        self._connection: Connection | None = None
        # a pull broke off: transfers may be in flight, or disagree with their owners; the next connect makes all links anew
        self._is_doubted = False

    def connect(self, attempt: str = "") -> wire.EngineManifest:
        """Reads the manifests, traces the loaders, plans, and posts the read requests. Again after an epoch: replaces all.

        Args:
            attempt: the connect of the replica that this answers (`ConnectInfo.attempt`).

        Raises:
            CoverageError: something the engine wants has no owner, or copies overlap.
            TracingError: a loader needs the data of a tensor.
            TransportError: no allowed link kind works with an owner.
            VersionError: the other side runs what cannot work with this one.
        """
        epoch, manifests = self.control.sources(self.timeout_s)
        known = None if self._is_doubted else self._connection
        if known is not None and known.is_outdated:
            known = None
        if known is not None and known.epoch == epoch and self.control.knows(self.name, known.manifest.incarnation):
            return known.manifest
        mine = versions.check_local(need_nixl=any(kind in ("prepared", "ray") for kind in self.kinds))
        for manifest in manifests:
            versions.check_peer(mine, manifest.versions, f"source rank {manifest.rank}")
        self._disconnect()
        here = node(self.device)
        routing = Routing(manifests)
        route = routing.choose(self.rank + zlib.crc32(self.replica.encode()), self.world_size, here)
        trace = self.landing.trace(routing.tensors)
        check_float8(trace.slices, self.name)
        destinations = dict(self.landing.destinations())
        plan = make_plan(trace, destinations, routing, route)
        sources = {manifest.rank: manifest for manifest in manifests}
        used = sorted(set(plan.columns.source.tolist()))
        kinds = {source: self._choose_kind(here, sources[source]) for source in used}
        places = {source: place_of(here, sources[source].node) for source in used}
        thresholds = {
            source: choose(kind, self.device.type, places[source], self.pack_threshold)
            for source, kind in kinds.items()
        }
        program = make_program(
            plan,
            destinations,
            kinds,
            {source: one.nbytes for source, one in thresholds.items()},
            slots=max((manifest.slots for manifest in manifests), default=1),
        )
        tensors, written = memory_of(plan, program, destinations, self.landing, self.device)
        scratch = None
        if any(is_unknown(kind, places[source], self.pack_threshold) for source, kind in kinds.items()):
            scratch = Arena(SCRATCH_BYTES, self.device).tensor
            written.append(scratch)
        endpoints: dict[int, ReaderEndpoint] = {}
        for source, kind in kinds.items():
            endpoint = make_reader_endpoint(kind, exchange=self._exchange)
            for tensor in written:
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
            attempt=attempt,
            boxes=tuple(
                wire.TakenBox(tensor=tensor, offset=box.offset, shape=box.shape) for tensor, box in plan.taken_boxes
            ),
            requests=requests,
        )
        try:
            self.control.connect(declared, epoch)
        except RdtError as error:
            for endpoint in endpoints.values():
                endpoint.close()
            if isinstance(error, MembershipError) and self.control.sources(self.timeout_s)[0] != epoch:
                # a source rank joined again meanwhile: what it declares now makes another plan
                return self.connect(attempt)
            raise
        self._is_doubted = False
        self._connection = Connection(
            epoch, declared, sources, plan, program, destinations, endpoints, tensors, thresholds, here, scratch
        )
        log.info(
            "%s connected to group %s: %d tensors, %.3f GB a sync, %d chunks, links %s",
            self.name, self.group, len(plan.taken), plan.nbytes / 1e9, len(program.chunks), kinds,
        )  # fmt: skip
        if any(manifest.mode != "live" for manifest in manifests):  # live: they travel in the trainer's own dtype
            for line in narrowed(trace.slices):
                log.warning("%s: %s", self.name, line)
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
        if connection is not None:
            connection.close()
