"""`FullTensors`: the full checkpoint tensors of a sharded source, gathered one after the other.

For whoever takes nothing but full tensors: vLLM's own weight transfer backends, a checkpoint writer, a comparison by hand. Every
byte crosses to every rank of the process group, which is what a sync does without; and only one tensor is whole at a time. All
come in the order of the model's layers (`layout.groups`), whatever the source's own. It refuses tensors that the ranks of the
group do not hold as a whole, and a pass that one rank cannot make, on all ranks at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from ..declared import Declared
from ..errors import CoverageError, SourceError
from ..geometry import Box, subtract
from ..layout import groups
from ..wire import TensorMeta
from .base import IterableWeightSource, Shard, WeightSource

#: name, offset and shape of a shard
_Held = tuple[str, tuple[int, ...], tuple[int, ...]]


class FullTensors:
    """An `IterableWeightSource` over any source. Made and iterated by all ranks of the group alike.

    Args:
        source: of this rank.
        group: the `torch.distributed` process group of the source's ranks; None: this rank holds everything.
        device: where tensors are put together and given; default: where this rank's shards lie (the CPU if it holds none), or
            where an iterated source's tensors do. It must suit the group's backend.

    Raises:
        CoverageError: names a tensor that the ranks do not hold as a whole, or that they declare otherwise.
    """

    def __init__(
        self,
        source: WeightSource | IterableWeightSource,
        group: Any = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        self._source = source
        self._group = group
        held = source.shards() if isinstance(source, WeightSource) else ()
        found = next((shard.tensor.device for shard in held), torch.device("cpu"))
        self._asked = None if device is None else torch.device(device)
        self._device = self._asked or found
        mine = (
            tuple(source.metadata()),
            [(shard.name, tuple(shard.offset), tuple(shard.tensor.shape)) for shard in held],
            tuple(source.ignored()),
        )
        self._rank, ranks = 0, [mine]
        if group is not None:
            import torch.distributed as dist

            ranks = [mine] * dist.get_world_size(group)
            dist.all_gather_object(ranks, mine, group=group)
            self._rank = dist.get_rank(group)
        declared = Declared()
        for rank, (tensors, _, _) in enumerate(ranks):
            declared.add(rank, tensors)
        known = declared.tensors
        self._metadata = tuple(known[name] for name in chain.from_iterable(groups(tuple(known))))
        self._ignored = tuple(dict.fromkeys(name for _, _, names in ranks for name in names))
        self._is_whole = not isinstance(source, WeightSource)
        self._pieces = {} if self._is_whole else self._choose([boxes for _, boxes, _ in ranks])

    def _choose(self, ranks: Sequence[Sequence[_Held]]) -> dict[str, list[tuple[int, Box]]]:
        """For each tensor the boxes that make it up, and of whom each is taken."""
        owned: dict[str, list[tuple[int, Box]]] = {}
        for rank, boxes in enumerate(ranks):
            for name, offset, shape in boxes:
                owned.setdefault(name, []).append((rank, Box(offset, shape)))
        pieces: dict[str, list[tuple[int, Box]]] = {}
        for meta in self._metadata:
            left = [Box.full(meta.shape)]
            chosen = pieces.setdefault(meta.name, [])
            for rank, box in owned.get(meta.name, ()):
                rest = [part for one in left for part in subtract(one, [box])]
                if rest != left:
                    chosen.append((rank, box))
                left = rest
            if any(not box.is_empty for box in left):
                way_out = (
                    "give the process group of all source ranks"
                    if self._group is None
                    else "these are not all source ranks"
                )
                raise CoverageError(f"nobody holds {left[0]} of {meta.name!r} of shape {meta.shape}; {way_out}")
        return pieces

    def metadata(self) -> Sequence[TensorMeta]:
        """See `IterableWeightSource.metadata`: the whole model, layer after layer, the same on every rank."""
        return self._metadata

    def ignored(self) -> Sequence[str]:
        """See `IterableWeightSource.ignored`."""
        return self._ignored

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, full tensor in the wire dtype), in the order of `metadata`, to every rank; a collective at each step.

        What one rank holds alone, as a whole, in that dtype and on that device, is the parameter itself and no copy. Everything
        else is the caller's to keep. What a source that can only be iterated yields before its layer's turn is kept until then,
        so its order had better be that of the layers.

        Raises:
            SourceError: shards are other boxes than when this was made, on this rank or on another; all ranks raise, before any
                tensor. Or a source that can only be iterated strays from what it declared.
        """
        if self._is_whole:
            yield from self._sorted()
            return
        mine = self._look()
        for meta in self._metadata:
            alone = mine.get((meta.name, Box.full(meta.shape))) if self._group is None else None
            if (
                alone is not None
                and alone.tensor.dtype == getattr(torch, meta.dtype)
                and self._suits(alone.tensor.device)
            ):
                yield meta.name, alone.tensor.detach()
                continue
            whole = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=self._device)
            for owner, box in self._pieces[meta.name]:
                place = _cut(whole, box)
                if owner == self._rank:
                    place.copy_(mine[meta.name, box].tensor.detach())
                if self._group is not None:
                    self._share(place, owner)
            yield meta.name, whole

    def _suits(self, device: torch.device) -> bool:
        return device == self._device or (device.type == self._device.type and self._device.index is None)

    def _sorted(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A pass of a source that can only be iterated, in the order of `metadata`, in the declared dtypes."""
        assert not isinstance(self._source, WeightSource)
        left = {meta.name: meta for meta in self._metadata}
        turn = iter(self._metadata)
        awaited = next(turn, None)
        early: dict[str, torch.Tensor] = {}
        for name, tensor in self._source:
            meta = left.pop(name, None)
            shape = tuple(tensor.shape)
            if meta is None or shape != tuple(meta.shape):
                wrong = "it is not declared, or came before" if meta is None else f"{tuple(meta.shape)} is declared"
                raise SourceError(
                    f"the pass yields {name!r} of shape {shape}: {wrong}; declare in `metadata` exactly what a pass yields, each "
                    f"tensor once"
                )
            # a copy always: the source may write its next tensor where this one lies
            early[name] = tensor.detach().to(
                device=self._asked or tensor.device, dtype=getattr(torch, meta.dtype), copy=True
            )
            while awaited is not None and awaited.name in early:
                yield awaited.name, early.pop(awaited.name)
                awaited = next(turn, None)
        if left:
            raise SourceError(f"the pass ends before {next(iter(left))!r}, which is declared")

    def _look(self) -> dict[tuple[str, Box], Shard]:
        """This rank's shards by box, once all ranks have theirs: nobody waits in a collective for one that has not."""
        assert isinstance(self._source, WeightSource)
        mine: dict[tuple[str, Box], Shard] = {}
        failure: Exception | None = None
        try:
            for shard in self._source.shards():
                mine[shard.name, Box(tuple(shard.offset), tuple(shard.tensor.shape))] = shard
            for name, pieces in self._pieces.items():
                for owner, box in pieces:
                    if owner == self._rank and (name, box) not in mine:
                        raise SourceError(f"this rank no longer holds {name!r} {box}, which it declared")
        except Exception as error:  # whatever a source of anybody's own raises
            failure = error
        if self._group is not None:
            import torch.distributed as dist

            troubles = [""] * dist.get_world_size(self._group)
            dist.all_gather_object(
                troubles, f"{type(failure).__name__}: {failure}" if failure else "", group=self._group
            )
            told = [f"rank {rank} of the process group: {text}" for rank, text in enumerate(troubles) if text]
            if told and failure is None:
                raise SourceError(f"no pass without every rank; {'; '.join(told[:8])}")
        if failure is not None:
            raise failure
        return mine

    def _share(self, place: torch.Tensor, owner: int) -> None:
        import torch.distributed as dist

        piece = place.contiguous()
        # as bytes: not every backend knows every dtype
        flat = piece.reshape(-1).view(torch.uint8)
        dist.broadcast(flat, dist.get_global_rank(self._group, owner), group=self._group)
        if owner != self._rank and piece.data_ptr() != place.data_ptr():
            place.copy_(piece)


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for axis, (low, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(axis, low, size)
    return tensor
