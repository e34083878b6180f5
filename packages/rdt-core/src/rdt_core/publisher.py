"""A source rank at run time: publish modes, pack programs, and the answers to its readers.

`live` lets readers read the parameters themselves, `snapshot` an arena with a copy of this rank's shards in the wire
dtype, `bucket` a few fixed buckets that are filled round after round. Memory is allocated, registered and exported when
the manifest is made, never during a sync; a parameter that moved afterwards is followed, never read stale.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import versions, wire
from .errors import SourceError, TransportError
from .linking import PACK_REGION, request_digest
from .memory import Allocations, Arena, fingerprint, settle, share, storages
from .modes import MODES, choose_mode
from .sources.base import IterableWeightSource, Shard, WatchedSource, WeightSource
from .staging import Piece, split_pieces
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
        self._tensors = tuple(source.metadata())
        self._index = {tensor.name: number for number, tensor in enumerate(self._tensors)}
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
        self._arena: Arena | None = None
        self._pieces: list[list[Piece]] = []
        self._copies: list[torch.Tensor] = []  # in the arena, one for each shard
        self._write: Callable[[], None] | None = None
        self.mode, self.mode_reason = choose_mode(mode, source, shards, self._wire_dtype, self.device, rank)
        self.slots = lookahead + 1 if self.mode == "bucket" else 1
        self._endpoints = [make_source_endpoint(kind, exchange=exchange) for kind in kinds]
        shard_metas = getattr(self, f"_set_up_{self.mode}")(shards, bucket_bytes)
        self._boxes = _boxes(shards)
        self._allocations = Allocations(shard.tensor for shard in shards)
        self._fingerprint = self._marks()
        self.rounds = max(1, len(self._pieces))
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
            tensors=self._tensors,
            shards=tuple(shard_metas),
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
            if shard.name not in self._index:
                raise SourceError(
                    f"source rank {self.rank} holds a shard of {shard.name!r}, which its metadata does not name"
                )

    def _wire_dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._tensors[self._index[name]].dtype)
        return dtype

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

    def _set_up_live(self, shards: Sequence[Shard], bucket_bytes: int) -> list[wire.ShardMeta]:
        if self.device.type == "cpu" and any(endpoint.kind == "mapped" for endpoint in self._endpoints):
            for shard in shards:
                share(shard.tensor.untyped_storage())
        regions = {address: self._export(tensor) for address, tensor in storages(s.tensor for s in shards).items()}
        metas = []
        for shard in shards:
            tensor = shard.tensor
            metas.append(
                wire.ShardMeta(
                    tensor=self._index[shard.name],
                    offset=shard.offset,
                    shape=tuple(tensor.shape),
                    region=regions[tensor.untyped_storage().data_ptr()],
                    byte_offset=int(tensor.storage_offset()) * tensor.element_size(),
                    strides=tuple(tensor.stride()),
                )
            )
        return metas

    def _set_up_snapshot(self, shards: Sequence[Shard], bucket_bytes: int) -> list[wire.ShardMeta]:
        sizes = [shard.tensor.numel() * self._wire_dtype(shard.name).itemsize for shard in shards]
        # room for the alignment of every span
        self._arena = Arena(max(1, sum(sizes) + 256 * len(sizes)), self.device)
        region = self._export(self._arena.tensor, self._arena)
        metas = []
        for shard, size in zip(shards, sizes, strict=True):
            offset, span = self._arena.span(size)
            copy = span.view(self._wire_dtype(shard.name)).view(shard.tensor.shape)
            self._copies.append(copy)
            metas.append(
                wire.ShardMeta(
                    tensor=self._index[shard.name], offset=shard.offset, shape=tuple(copy.shape), region=region,
                    byte_offset=offset, strides=tuple(copy.stride()),
                )
            )  # fmt: skip
        self._bind(shards)
        return metas

    def _bind(self, shards: Sequence[Shard]) -> None:
        """Makes the copies that fill the arena, from where the parameters lie now."""
        pairs = [_as_bits(copy, shard.tensor) for copy, shard in zip(self._copies, shards, strict=True)]
        into, out = [copy for copy, _ in pairs], [parameter for _, parameter in pairs]

        def write() -> None:
            if into:
                torch._foreach_copy_(into, out)

        self._write = write

    def _set_up_bucket(self, shards: Sequence[Shard], bucket_bytes: int) -> list[wire.ShardMeta]:
        boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
        if isinstance(self._source, WeightSource):
            order = {tensor.name: number for number, tensor in enumerate(self._tensors)}
            ordered = sorted(range(len(shards)), key=lambda i: (order[shards[i].name], shards[i].offset))
            boxes = [(shards[i].name, shards[i].offset, tuple(shards[i].tensor.shape)) for i in ordered]
        elif self.rank == 0:
            boxes = [(tensor.name, (0,) * len(tensor.shape), tensor.shape) for tensor in self._tensors]
        else:
            boxes = []
        self._pieces = split_pieces(boxes, {t.name: wire.DTYPE_BYTES[t.dtype] for t in self._tensors}, bucket_bytes)
        size = max((piece.end for pieces in self._pieces for piece in pieces), default=1)
        size = -(-size // 256) * 256
        self._arena = Arena(size * self.slots, self.device)
        region = self._export(self._arena.tensor, self._arena)
        metas = []
        for number, pieces in enumerate(self._pieces):
            base = number % self.slots * size
            for piece in pieces:
                place = self._arena.tensor[base + piece.begin : base + piece.end]
                piece.memory = place.view(self._wire_dtype(piece.name)).view(piece.shape)
                metas.append(
                    wire.ShardMeta(
                        tensor=self._index[piece.name], offset=piece.offset, shape=piece.shape, region=region,
                        byte_offset=base + piece.begin, strides=tuple(piece.memory.stride()), round=number,
                    )
                )  # fmt: skip
        return metas

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
            old = self._served.pop(request.reader, None)
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
            del old
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
        if marks == self._fingerprint:
            return True
        if self.mode == "live" or not isinstance(self._source, WeightSource):
            return False
        shards = [shard for shard in self._source.shards() if shard.tensor.numel()]
        if _boxes(shards) != self._boxes:
            return False
        if self.mode == "snapshot":
            self._bind(shards)
        self._allocations = Allocations(shard.tensor for shard in shards)
        self._fingerprint = self._marks()
        return True

    def _marks(self) -> Any:
        try:
            ids = self._allocations.ids()
        except TransportError as error:
            raise SourceError(
                f"parameters of source rank {self.rank} lie where there is no memory ({error}): they are offloaded. Bring them "
                "back before publish"
            ) from error
        # what an arena is filled from may be any memory, as long as it is there
        held = ids if self.mode == "live" else ()
        if isinstance(self._source, WatchedSource):
            return held, self._source.fingerprint()
        if isinstance(self._source, WeightSource):
            return held, fingerprint(shard.tensor for shard in self._source.shards())
        return None

    def readable(self) -> int:
        """Rounds whose bytes are readable with no further work in a sync, once this returned: 0 or 1.

        That is the one round of mode `live`, where nothing is packed for any reader that asked so far.
        """
        if self.mode != "live" or any(served.packs for served in self._served.values()):
            return 0
        settle(self.device)
        return 1

    def rounds_written(self) -> Iterator[int]:
        """Writes round after round; each yield means that this round's bytes are readable, packed spans included.

        Before the next item is asked for, the caller makes sure that the bucket of that round is free again.
        """
        settle(self.device)
        if self.mode != "bucket":
            if self._write is not None:
                self._write()
            self._pack(0)
            yield 0
            return
        if not self._pieces:
            for _ in self._full_tensors():
                pass
            yield 0
            return
        stream = self._full_tensors()
        current: tuple[str, torch.Tensor] | None = None
        shards = {}
        if isinstance(self._source, WeightSource):
            shards = {(shard.name, shard.offset): shard.tensor for shard in self._source.shards()}
        for number, pieces in enumerate(self._pieces):
            targets: list[torch.Tensor] = []
            values: list[torch.Tensor] = []
            for piece in pieces:
                if shards:
                    whole = shards[(piece.name, piece.base)]
                else:
                    while current is None or current[0] != piece.name:
                        # an iterable may reuse its memory for the next tensor: copy before moving on
                        _copy(targets, values)
                        targets, values = [], []
                        current = next(stream, None)
                        if current is None:
                            raise SourceError(f"the source ended before {piece.name!r}, which its metadata names")
                    whole = current[1]
                index = tuple(
                    slice(o - b, o - b + n) for o, b, n in zip(piece.offset, piece.base, piece.shape, strict=True)
                )
                targets.append(piece.memory)
                values.append(whole[index] if index else whole)
            _copy(targets, values)
            self._pack(number)
            yield number
        for _ in stream:
            pass

    def _full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(self._source, WeightSource):
            return
        position = 0
        for name, tensor in self._source:
            if position >= len(self._tensors) or self._tensors[position].name != name:
                expected = self._tensors[position].name if position < len(self._tensors) else "nothing more"
                raise SourceError(f"the source yields {name!r} where its metadata says {expected!r}")
            meta = self._tensors[position]
            if tuple(tensor.shape) != meta.shape:
                raise SourceError(
                    f"the source yields {name!r} of shape {tuple(tensor.shape)}; its metadata says {meta.shape}"
                )
            position += 1
            yield name, tensor.detach()
        if position != len(self._tensors):
            raise SourceError(f"the source ended after {position} of {len(self._tensors)} tensors")

    def _pack(self, number: int) -> None:
        for served in self._served.values():
            for program in served.packs.get(number, ()):
                program.run()
        settle(self.device)

    def close(self) -> None:
        """Releases what links hold. Idempotent."""
        self._served.clear()
        for endpoint in self._endpoints:
            endpoint.close()


def _boxes(shards: Sequence[Shard]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(shard.name, tuple(shard.offset), tuple(shard.tensor.shape)) for shard in shards]


def _copy(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, value in map(_as_bits, targets, values):
            target.copy_(value)


#: integers by bytes of an element
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_bits(target: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as integers where no cast is wanted: CUDA's batched copy takes 16-bit floats through float32, which alters NaNs."""
    bits = _BITS.get(value.element_size())
    if target.dtype != value.dtype or bits is None:
        return target, value
    return target.view(bits), value.detach().view(bits)
