"""A source rank at run time: publish modes, pack programs, and the answers to its readers.

`live` lets readers read the parameters themselves, `snapshot` an arena with a copy of this rank's shards in the wire
dtype, `bucket` a few fixed buckets that are filled round after round. Memory is allocated, registered and exported when
the manifest is made, never during a sync; a parameter that moved afterwards is followed, never read stale.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from . import versions, wire
from .contents import Buckets, Contents, Declaration, Live, Snapshot
from .declared import check as check_declared
from .errors import SourceError, TransportError
from .linking import PACK_REGION, request_digest
from .memory import Allocations, Arena, give_back, settle
from .modes import MODES, choose_mode
from .proofs import OwnerProof
from .sources.base import IterableWeightSource, Shard, WatchedSource, WeightSource, check_methods
from .sources.watch import fingerprint
from .transport import LocalExchange, make_source_endpoint, tables
from .transport.base import Region, SourceEndpoint
from .transport.copying import CopyProgram
from .transport.nodes import node

__all__ = ["DEFAULT_BUCKET_BYTES", "MODES", "Publisher"]

log = logging.getLogger(__name__)

DEFAULT_BUCKET_BYTES = 512 << 20


@dataclass(slots=True)
class _Served:
    """One link that this rank serves: what must be packed before a round is published."""

    request: wire.ReadRequest
    arena: Arena | None
    packs: dict[int, list[CopyProgram]] = field(default_factory=dict)


class Publisher:
    """Publishes the weights of one source rank.

    Args:
        source: what this rank holds.
        group: name of the sync group.
        rank: of this source rank.
        world_size: source ranks of the group.
        mode: "auto", "live", "snapshot" or "bucket".
        kinds: link kinds offered to readers.
        bucket_bytes: size of one bucket, in bytes.
        lookahead: buckets filled ahead of the readers.
        exchange: shared with the readers, where kind "local" is offered.

    Raises:
        SourceError: the mode cannot work with this source, and says which can.
        VersionError: Ray or NIXL are missing or too old.
    """

    def __init__(
        self,
        source: WeightSource | IterableWeightSource,
        *,
        group: str,
        rank: int,
        world_size: int,
        mode: str = "auto",
        kinds: Sequence[str] = ("mapped", "prepared", "ray"),
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        lookahead: int = 1,
        exchange: LocalExchange | None = None,
    ) -> None:
        if bucket_bytes < 1 or lookahead < 0:
            raise SourceError(
                f"bucket_bytes must be at least 1 and lookahead at least 0; found {bucket_bytes} and {lookahead}"
            )
        self.rank = rank
        self._source = source
        self._versions = versions.check_local(need_nixl=any(kind in ("prepared", "ray") for kind in kinds))
        check_methods(source, f"the source of rank {rank}")
        tensors = tuple(source.metadata())
        check_declared(tensors, f"source rank {rank}")
        self._declaration = Declaration(tensors, {tensor.name: number for number, tensor in enumerate(tensors)})
        shards = (
            [shard for shard in source.shards() if shard.tensor.numel()] if isinstance(source, WeightSource) else []
        )
        self._check_shards(shards)
        devices = {shard.tensor.device for shard in shards}
        if len(devices) > 1:
            raise SourceError(
                f"source rank {rank} holds shards on {sorted(map(str, devices))}; one device a rank is supported"
            )
        self.device = devices.pop() if devices else torch.device("cpu")
        self._endpoints: list[SourceEndpoint] = []
        self._regions: dict[int, Region] = {}
        self._metas: dict[int, wire.RegionMeta] = {}
        self._served: dict[str, _Served] = {}
        self._proof: tuple[dict[str, wire.ReadRequest], OwnerProof] | None = None
        self.mode, self.mode_reason = choose_mode(
            mode, source, shards, self._declaration.dtype, self.device, rank, mapped="mapped" in kinds
        )
        self._endpoints = [make_source_endpoint(kind, exchange=exchange) for kind in kinds]
        self._contents = self._make_contents(shards, bucket_bytes, lookahead)
        self.rounds, self.slots = self._contents.rounds, self._contents.slots
        self._held = sum(
            prod(shard.shape) * wire.DTYPE_BYTES[tensors[shard.tensor].dtype] for shard in self._contents.shards
        )
        self._boxes = _boxes(shards)
        self._allocations = self._allocations_of(shards)
        self._fingerprint = self._marks()
        agents = [endpoint.agent() for endpoint in self._endpoints]
        name, agent = next((pair for pair in agents if pair[0]), ("", b""))
        self.manifest = wire.SourceManifest(
            group=group,
            rank=rank,
            world_size=world_size,
            versions=self._versions,
            node=node(self.device),
            mode=self.mode,
            mode_reason=self.mode_reason,
            tensors=tensors,
            shards=tuple(self._contents.shards),
            regions=tuple(self._metas.values()),
            kinds=tuple(kinds),
            rounds=self.rounds,
            slots=self.slots,
            agent=agent,
            agent_name=name,
            ignore=tuple(source.ignored()),
        )

    # ------------------------------------------------------------------ set-up

    def _check_shards(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            if shard.name not in self._declaration.index:
                raise SourceError(
                    f"source rank {self.rank} holds a shard of {shard.name!r}, which its metadata does not name"
                )

    def _export(self, tensor: torch.Tensor, keep: Any = None) -> int:
        """Makes memory readable by every offered kind; returns its region id."""
        region = Region(len(self._regions), tensor, keep)
        self._metas[region.id] = self._export_region(region)
        self._regions[region.id] = region
        return region.id

    def _export_region(self, region: Region) -> wire.RegionMeta:
        meta: wire.RegionMeta | None = None
        for endpoint in self._endpoints:
            try:
                exported = endpoint.export(region)
            except TransportError as error:
                if endpoint.kind != "mapped" or len(self._endpoints) == 1:
                    raise
                # readers of the same node see that this region cannot be mapped, and their links say which kind they got
                log.warning("source rank %d: memory cannot be mapped by its node: %s", self.rank, error)
                continue
            if meta is None:
                meta = exported
            elif exported.mapped:
                meta = wire.RegionMeta(
                    id=meta.id, nbytes=meta.nbytes, address=meta.address, device=meta.device,
                    device_index=meta.device_index, mapped=exported.mapped,
                )  # fmt: skip
        if meta is None:
            raise TransportError("no link kind is offered")
        return meta

    def _make_contents(self, shards: Sequence[Shard], bucket_bytes: int, lookahead: int) -> Contents:
        if self.mode == "live":
            mapped = any(endpoint.kind == "mapped" for endpoint in self._endpoints)
            return Live(shards, self._declaration, self._export, shared=mapped and self.device.type == "cpu")
        if self.mode == "snapshot":
            return Snapshot(shards, self._declaration, self._export, self.device)
        return Buckets(
            self._source, shards, self._declaration, self._export, self.device,
            rank=self.rank, bucket_bytes=bucket_bytes, slots=lookahead + 1,
        )  # fmt: skip

    # ------------------------------------------------------------------ readers

    def serve(self, requests: Sequence[wire.ReadRequest]) -> tuple[list[wire.LinkOffer], list[list[Any]]]:
        """Makes what new readers need: pack arenas, pack programs, references. Outside of any transfer.

        Returns:
            For each request the offer and the Ray references that travel beside it.

        Raises:
            TransportError: a request reads outside this rank's regions, or there is no memory for its pack arena.
        """
        offers, refs = [], []
        for request in requests:
            tables.check_request(request, self._held, self.rounds)
            self._drop(request.reader)
            arena = Arena(request.pack_bytes, self.device) if request.pack_bytes else None
            metas: tuple[wire.RegionMeta, ...] = ()
            regions = dict(self._regions)
            if arena is not None:
                regions[PACK_REGION] = Region(PACK_REGION, arena.tensor, arena)
                metas = (self._export_region(regions[PACK_REGION]),)
            served = _Served(request, arena)
            tensors = {key: region.tensor for key, region in self._regions.items()}
            for transfer in request.transfers:
                if transfer.pack_count:
                    if arena is None:
                        raise TransportError(f"{request.reader} wants pieces packed into an arena of 0 bytes")
                    program = CopyProgram(
                        tables.packs(transfer), tensors, [arena.tensor], f"packing for {request.reader}"
                    )
                    served.packs.setdefault(transfer.round, []).append(program)
            endpoint = next((e for e in self._endpoints if e.kind == request.kind), None)
            if endpoint is None:
                raise TransportError(
                    f"{request.reader} asks source rank {self.rank} for a link of kind {request.kind!r}; "
                    f"offered: {', '.join(e.kind for e in self._endpoints)}"
                )
            refs.append(list(endpoint.offer(request.transfers, regions)))
            self._served[request.reader] = served
            offers.append(
                wire.LinkOffer(
                    reader=request.reader,
                    incarnation=request.incarnation,
                    source=self.rank,
                    digest=request_digest(request.transfers, request.kind, request.pack_bytes),
                    regions=metas,
                    agent=endpoint.agent()[1],
                    refs=len(refs[-1]),
                )
            )
        return offers, refs

    def forget(self, gone: Iterable[tuple[str, str]]) -> None:
        """Gives back what was made for readers that are gone: nothing is packed for them any more.

        Args:
            gone: name and incarnation of each; one that has connected again since is not meant.
        """
        for reader, incarnation in gone:
            served = self._served.get(reader)
            if served is not None and served.request.incarnation == incarnation:
                self._drop(reader)

    def forget_all(self) -> None:
        """Gives back what was made for any reader."""
        for reader in tuple(self._served):
            self._drop(reader)

    def _drop(self, reader: str) -> None:
        served = self._served.pop(reader, None)
        if served is not None and served.arena is not None:
            give_back(served.arena.tensor)

    # ------------------------------------------------------------------ one sync

    def follow(self) -> bool:
        """Follows parameters that moved since the last sync (re-allocated, offloaded and brought back, wrapped again).

        Returns:
            Whether readers may go on as they are. Where they read an arena that is so: only the copies into it change.
            Where they read the parameters themselves this rank must join again, so that they learn the new addresses.

        Raises:
            SourceError: parameters are not there at the moment.
        """
        marks = self._marks()
        # a storage that was emptied has no address, though another may lie where it lay
        if marks == self._fingerprint and self._contents.is_bound():
            return True
        if self._contents.is_live or not isinstance(self._source, WeightSource):
            return False
        shards = [shard for shard in self._source.shards() if shard.tensor.numel()]
        if _boxes(shards) != self._boxes:
            return False
        self._contents.bind(shards)
        self._allocations = self._allocations_of(shards)
        self._fingerprint = self._marks()
        return True

    def _allocations_of(self, shards: Sequence[Shard]) -> Allocations:
        # readers of parameters are asked to account while the count is confirmed; an arena is filled from them at once
        return Allocations((shard.tensor for shard in shards), counted=self._contents.is_live)

    def confirm(self) -> None:
        """Makes sure, while readers read already, of what `follow` took for granted.

        Raises:
            SourceError: memory of parameters was given back since the last sync: what was read is another's.
        """
        try:
            same = self._allocations.confirm()
        except TransportError as error:
            raise SourceError(f"memory of source rank {self.rank} was given back before this sync: {error}") from error
        if not same:
            raise SourceError(
                f"memory of source rank {self.rank} was given back and taken again before this sync, unseen because the counters "
                "of torch's allocator were set back (torch.cuda.reset_accumulated_memory_stats); publish again"
            )

    def _marks(self) -> Any:
        try:
            ids = self._allocations.ids()
        except TransportError as error:
            raise SourceError(
                f"parameters of source rank {self.rank} lie where there is no memory ({error}): they are offloaded. Bring them "
                "back before publish"
            ) from error
        # what an arena is filled from may be any memory, as long as it is there
        held = ids if self._contents.is_live else ()
        if isinstance(self._source, WatchedSource):
            return held, self._source.fingerprint()
        if isinstance(self._source, WeightSource):
            # a source of one's own, of which nothing is known: it may name the same memory otherwise
            shards = self._source.shards()
            tensors = [shard.tensor for shard in shards]
            forms = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
            return held, [(shard.name, shard.offset) for shard in shards], forms, fingerprint(tensors)
        return None

    def readable(self) -> int:
        """Rounds whose bytes are readable with no further work in a sync, once this returned: 0 or 1.

        That is the one round of mode `live`, where nothing is packed for any reader that asked so far, and nothing is left to
        `confirm`. Readers for whom nothing is packed may read it as soon as the sync has begun, whatever this returns; they
        account for what they read once it is published.
        """
        if not self._contents.is_live:
            return 0
        settle(self.device)
        is_packed = any(served.packs for served in self._served.values())
        return 1 if self._allocations.is_confirmed and not is_packed else 0

    def rounds_written(self) -> Iterator[int]:
        """Writes round after round; each yield means that this round's bytes are readable, packed spans included.

        Before the next item is asked for, the caller makes sure that the bucket of that round is free again.
        """
        settle(self.device)
        for number in self._contents.write():
            self._pack(number)
            yield number

    def _pack(self, number: int) -> None:
        for served in self._served.values():
            for program in served.packs.get(number, ()):
                program.run()
        settle(self.device)

    def proof(self) -> OwnerProof:
        """What digests the bytes that readers are to read; made again after readers came, went or connected again."""
        requests = {reader: served.request for reader, served in self._served.items()}
        if self._proof is None or self._proof[0] != requests:
            self._proof = requests, self._prove(list(requests.values()))
        return self._proof[1]

    def present(self, requests: Sequence[wire.ReadRequest]) -> dict[str, bytes]:
        """Digests of this rank's weights as they are now, by reader, without a sync.

        Args:
            requests: say what each reader would read.
        """
        for request in requests:
            tables.check_request(request, self._held, self.rounds)
        proof = self._prove(requests)
        proof.start("full", 0)
        for number in self.rounds_written():
            proof.take(number)
        return proof.digests()

    def _prove(self, requests: Sequence[wire.ReadRequest]) -> OwnerProof:
        regions = {number: region.tensor for number, region in self._regions.items()}
        return OwnerProof(self.manifest, regions, requests)

    def close(self) -> None:
        """Releases what links hold. Idempotent."""
        arenas = [served.arena for served in self._served.values()]
        arenas += [region.keep for region in self._regions.values() if isinstance(region.keep, Arena)]
        self._served.clear()
        self._proof = None
        for endpoint in self._endpoints:
            endpoint.close()
        for arena in arenas:
            if arena is not None:
                give_back(arena.tensor)


def _boxes(shards: Sequence[Shard]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(shard.name, tuple(shard.offset), tuple(shard.tensor.shape)) for shard in shards]
