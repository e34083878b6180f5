"""What readers read from a source rank, by publish mode: the parameters, an arena with a copy of them, or buckets.

Each class here exports its memory once, says where every shard lies in it, and writes it in every sync. Memory is never
allocated or exported later. It refuses a full-tensor pass that strays from what was declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from . import wire
from .errors import SourceError
from .memory import ALIGNMENT, Arena, share, storages
from .sources.base import IterableWeightSource, Shard, WeightSource
from .staging import split_pieces


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a rank declared of its checkpoint tensors.

    Attributes:
        tensors: in the order of its manifest.
        index: their positions, by name.
    """

    tensors: tuple[wire.TensorMeta, ...]
    index: Mapping[str, int]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor travels."""
        dtype: torch.dtype = getattr(torch, self.tensors[self.index[name]].dtype)
        return dtype


#: makes memory readable (a 1-D uint8 tensor, and what keeps it alive); returns its region id
Export = Callable[[torch.Tensor, Any], int]


class Contents(Protocol):
    """The readable memory of one source rank.

    Attributes:
        shards: where every box lies.
        rounds: of a sync, at least 1.
        slots: buckets that exist at once.
        is_live: whether readers read the parameters themselves: nothing is written, and a moved parameter is a new region.
    """

    shards: list[wire.ShardMeta]
    rounds: int
    slots: int
    is_live: bool

    def is_bound(self) -> bool:
        """Whether what was bound last is still there to be copied: its memory may have been emptied, and given to others."""
        ...

    def bind(self, shards: Sequence[Shard]) -> None:
        """Follows parameters that lie elsewhere now; the boxes are those of before. Not for `is_live`."""
        ...

    def write(self) -> Iterator[int]:
        """Writes round after round: each yield means that this round's bytes are queued to be in their place.

        Before the next item is asked for, the caller makes sure that the bucket of that round is free again.
        """
        ...


class Live:
    """The parameters themselves.

    Args:
        shards: that have elements.
        declaration: of the rank.
        export: makes memory readable.
        shared: whether CPU memory is moved to shared memory first, so that others can map it.
    """

    rounds = slots = 1
    is_live = True

    def __init__(self, shards: Sequence[Shard], declaration: Declaration, export: Export, *, shared: bool) -> None:
        if shared:
            for shard in shards:
                share(shard.tensor.untyped_storage())
        found = storages(shard.tensor for shard in shards)
        self._memory = list(found.values())
        self._places = list(found)
        regions = {address: export(tensor, None) for address, tensor in found.items()}
        self.shards = [
            wire.ShardMeta(
                tensor=declaration.index[shard.name],
                offset=shard.offset,
                shape=tuple(shard.tensor.shape),
                region=regions[shard.tensor.untyped_storage().data_ptr()],
                byte_offset=int(shard.tensor.storage_offset()) * shard.tensor.element_size(),
                strides=tuple(shard.tensor.stride()),
            )
            for shard in shards
        ]

    def is_bound(self) -> bool:
        """See `Contents.is_bound`: packing and digests read what was exported."""
        return self._places == list(map(torch.Tensor.data_ptr, self._memory))

    def bind(self, shards: Sequence[Shard]) -> None:
        """See `Contents.bind`. Raises SourceError: readers must learn the new addresses."""
        raise SourceError("parameters that readers read themselves moved; join again")

    def write(self) -> Iterator[int]:
        """See `Contents.write`."""
        yield 0


class Snapshot:
    """An arena with a copy of every shard in the dtype on the wire.

    Args:
        shards: that have elements.
        declaration: of the rank.
        export: makes memory readable.
        device: of the arena.
    """

    rounds = slots = 1
    is_live = False

    def __init__(self, shards: Sequence[Shard], declaration: Declaration, export: Export, device: torch.device) -> None:
        sizes = [shard.tensor.numel() * declaration.dtype(shard.name).itemsize for shard in shards]
        # room for the alignment of every span
        arena = Arena(max(1, sum(sizes) + ALIGNMENT * len(sizes)), device)
        region = export(arena.tensor, arena)
        self.shards = []
        self._copies: list[torch.Tensor] = []
        for shard, size in zip(shards, sizes, strict=True):
            offset, span = arena.span(size)
            copy = span.view(declaration.dtype(shard.name)).view(shard.tensor.shape)
            self._copies.append(copy)
            self.shards.append(
                wire.ShardMeta(
                    tensor=declaration.index[shard.name], offset=shard.offset, shape=tuple(copy.shape), region=region,
                    byte_offset=offset, strides=tuple(copy.stride()),
                )
            )  # fmt: skip
        self.bind(shards)

    def is_bound(self) -> bool:
        """See `Contents.is_bound`."""
        return self._places == list(map(torch.Tensor.data_ptr, self._out))

    def bind(self, shards: Sequence[Shard]) -> None:
        """See `Contents.bind`."""
        pairs = [as_bits(copy, shard.tensor) for copy, shard in zip(self._copies, shards, strict=True)]
        self._into, self._out = [copy for copy, _ in pairs], [parameter for _, parameter in pairs]
        self._places = list(map(torch.Tensor.data_ptr, self._out))

    def write(self) -> Iterator[int]:
        """See `Contents.write`."""
        if self._into:
            torch._foreach_copy_(self._into, self._out)
        yield 0


class Buckets:
    """A few buckets, filled round after round from shards or from a pass of full tensors.

    Args:
        source: of the rank.
        shards: that have elements; none where the source is iterated.
        declaration: of the rank.
        export: makes memory readable.
        device: of the buckets.
        rank: of the source; rank 0 alone publishes what is iterated.
        bucket_bytes: limit of one bucket.
        slots: buckets that exist at once.
    """

    is_live = False

    def __init__(
        self,
        source: WeightSource | IterableWeightSource,
        shards: Sequence[Shard],
        declaration: Declaration,
        export: Export,
        device: torch.device,
        *,
        rank: int,
        bucket_bytes: int,
        slots: int,
    ) -> None:
        self.slots = slots
        self._source = source
        self._tensors = declaration.tensors
        boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
        if isinstance(source, WeightSource):
            boxes = [(shard.name, shard.offset, tuple(shard.tensor.shape)) for shard in shards]
            boxes.sort(key=lambda box: (declaration.index[box[0]], box[1]))
        elif rank == 0:
            boxes = [(tensor.name, (0,) * len(tensor.shape), tensor.shape) for tensor in self._tensors]
        else:
            boxes = []
        self._pieces = split_pieces(boxes, {t.name: wire.DTYPE_BYTES[t.dtype] for t in self._tensors}, bucket_bytes)
        self.rounds = max(1, len(self._pieces))
        size = max((piece.end for pieces in self._pieces for piece in pieces), default=1)
        size = -(-size // ALIGNMENT) * ALIGNMENT
        arena = Arena(size * slots, device)
        region = export(arena.tensor, arena)
        self.shards = []
        for number, pieces in enumerate(self._pieces):
            base = number % slots * size
            for piece in pieces:
                place = arena.tensor[base + piece.begin : base + piece.end]
                piece.memory = place.view(declaration.dtype(piece.name)).view(piece.shape)
                self.shards.append(
                    wire.ShardMeta(
                        tensor=declaration.index[piece.name], offset=piece.offset, shape=piece.shape, region=region,
                        byte_offset=base + piece.begin, strides=tuple(piece.memory.stride()), round=number,
                    )
                )  # fmt: skip

    def is_bound(self) -> bool:
        """See `Contents.is_bound`: every sync asks the source anew."""
        return True

    def bind(self, shards: Sequence[Shard]) -> None:
        """See `Contents.bind`: every sync asks the source anew."""

    def write(self) -> Iterator[int]:
        """See `Contents.write`."""
        stream = self._full_tensors()
        if not self._pieces:
            for _ in stream:
                pass
            yield 0
            return
        shards = {}
        if isinstance(self._source, WeightSource):
            shards = {(shard.name, shard.offset): shard.tensor for shard in self._source.shards()}
        current: tuple[str, torch.Tensor] | None = None
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


def _copy(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, value in map(as_bits, targets, values):
            target.copy_(value)


#: integers by bytes of an element
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(target: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as integers where no cast is wanted: CUDA's batched copy takes 16-bit floats through float32, which alters NaNs."""
    bits = _BITS.get(value.element_size())
    if target.dtype != value.dtype or bits is None:
        return target, value
    return target.view(bits), value.detach().view(bits)
