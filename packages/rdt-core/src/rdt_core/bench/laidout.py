"""A source rank of the bench that holds the parameters which a layout gives it, as a Megatron rank does.

Fused parameters, padding and replicas are where the layout says: memory is allocated buffer by buffer and handed out as
the views that a source of the real modules would hand out. Values are decided by the box of the checkpoint tensor that they
belong to, so that ranks that hold the same box hold equal bytes; padding holds other ones on every rank. Sums are made
from memory by the layout, not from the views that were handed out. Other designs cannot be measured with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import wire
from ..shapes import Config
from ..sources.base import Shard
from ..sources.watch import fingerprint
from ..trainers import Catalogue, Layout, Parameter, Piece, place
from .digests import Box, sums
from .rank import Rank, advance, draw


class LaidOut:
    """A source of one rank of a layout.

    Args:
        tensors: of the checkpoint.
        config: their model's.
        layout: of the trainer; fits the model.
        rank: of this source rank.
        device: of the parameters.

    Attributes:
        parameters: what the rank holds, as the layout says.
        flat: the memory of each, without axes; padding included.
    """

    def __init__(
        self, tensors: Sequence[wire.TensorMeta], config: Config, layout: Layout, rank: int, device: str
    ) -> None:
        catalogue = Catalogue(tensors, config)
        self.parameters: tuple[Parameter, ...] = tuple(layout.parameters(rank, catalogue))
        placed = place(self.parameters)
        memory = [torch.empty(nbytes, dtype=torch.uint8, device=device) for nbytes in placed.regions]
        for number, one in enumerate(memory):
            one.random_(generator=torch.Generator(one.device).manual_seed(1_000_003 * rank + number))
        self.flat: list[torch.Tensor] = []
        for parameter, (region, base), dtype in zip(self.parameters, placed.homes, placed.dtypes, strict=True):
            end = base + parameter.numel * wire.DTYPE_BYTES[dtype]
            self.flat.append(memory[region][base:end].view(getattr(torch, dtype)))
        for piece, view in self._pieces():
            words = torch.empty_like(view, memory_format=torch.contiguous_format).view(torch.int16)
            seed = zlib.crc32(f"{piece.tensor.name} {piece.offset}".encode())
            draw(words, torch.Generator(words.device).manual_seed(seed))
            view.copy_(words.view(view.dtype))
        self._metadata = tuple({piece.tensor.name: piece.tensor for piece, _ in self._pieces()}.values())
        self._shards = [Shard(piece.tensor.name, piece.offset, view) for piece, view in self._pieces()]
        first = first_holders(layout, catalogue)
        self._counts = {key for key, holder in first.items() if holder == rank}

    def _pieces(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        for parameter, flat in zip(self.parameters, self.flat, strict=True):
            for piece in parameter.pieces:
                yield piece, flat.as_strided(piece.shape, piece.strides, flat.storage_offset() + piece.start)

    def metadata(self) -> Sequence[wire.TensorMeta]:
        """See `WeightSource.metadata`: a rank knows the tensors that it holds a part of."""
        return self._metadata

    def shards(self) -> Sequence[Shard]:
        """See `WeightSource.shards`."""
        return self._shards

    def ignored(self) -> Sequence[str]:
        """See `WeightSource.ignored`."""
        return ()

    def fingerprint(self) -> Any:
        """See `WatchedSource.fingerprint`: of the parameters, which are fewer than their pieces."""
        return fingerprint(self.flat)

    def change(self) -> None:
        """See `rank.Held.change`."""
        for flat in self.flat:
            advance(flat.view(torch.int16))

    def digests(self, boxes: Sequence[Box]) -> list[int]:
        """See `rank.Held.digests`; of a box that several ranks hold the first of them counts it."""
        parts: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = {}
        for piece, view in self._pieces():
            if (piece.tensor.name, piece.offset) in self._counts:
                parts.setdefault(piece.tensor.name, []).append((piece.offset, view))
        return sums(parts, boxes)


def first_holders(layout: Layout, catalogue: Catalogue) -> dict[tuple[str, tuple[int, ...]], int]:
    """The first rank that holds each box of a checkpoint tensor, by the tensor's name and the box's place."""
    found: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank in range(layout.ranks):
        for parameter in layout.parameters(rank, catalogue):
            for piece in parameter.pieces:
                found.setdefault((piece.tensor.name, piece.offset), rank)
    return found


class LaidOutRank(Rank):
    """A source rank of the bench with the parameters of a layout, as a Ray actor.

    Args:
        tensors, config, layout: see `LaidOut`.
        rank, device: see `Rank`.
    """

    def __init__(
        self, tensors: Sequence[wire.TensorMeta], config: Config, layout: Layout, rank: int, device: str
    ) -> None:
        super().__init__(rank, layout.ranks, device)
        self.source = LaidOut(tensors, config, layout, rank, str(self.device))

    def held(self) -> LaidOut:
        """See `Rank.held`."""
        return self.source
