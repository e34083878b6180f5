"""The routing table: which source rank holds which box, and which owner of a box serves which reader.

`Routing` merges the manifests of all source ranks, once for all readers; `choose` picks one owner for each box, near
owners first, balanced by bytes, readers starting at different owners. Refused: manifests that contradict one another,
boxes that overlap without being equal, and elements that nobody holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod

import numpy as np

from .declared import merge
from .errors import CoverageError, some
from .geometry import Box, subtract
from .layout import groups
from .wire import DTYPE_BYTES, MAX_BYTES, NodeMeta, SourceManifest, TensorMeta

Array = np.ndarray

#: axes that the boxes of one tensor may be split along to be checked at once; the work doubles with each
MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class Route:
    """The one shard that serves each distinct box, for one reader.

    All arrays are int64. N boxes, sorted by tensor, then by offset along the axis that the tensor is split on; D is the
    largest number of axes of any tensor, tensors with fewer have trailing axes of offset 0, size 1 and stride 0.

    Attributes:
        reader_index: which reader of how many this is for.
        reader_count: how many readers there are.
        starts: [T + 1]; the boxes of tensor t are `starts[t]` up to `starts[t + 1]`.
        tensor: [N] index of the box's tensor.
        offset: [N, D] in elements of the tensor.
        shape: [N, D] in elements.
        axis: [T] the axis along which the boxes of each tensor are sorted.
        source: [N] rank of the owner that was chosen.
        region: [N] region id at the owner.
        byte_offset: [N] of the box's first element in the region.
        stride: [N, D] strides in the region, in elements.
        round: [N] round in which the bytes are readable.
    """

    reader_index: int
    reader_count: int
    starts: Array
    tensor: Array
    offset: Array
    shape: Array
    axis: Array
    source: Array
    region: Array
    byte_offset: Array
    stride: Array
    round: Array

    @property
    def reader(self) -> str:
        """How errors call this reader."""
        return f"reader {self.reader_index} of {self.reader_count}"


class Routing:
    """Who holds what, over all source ranks.

    Args:
        manifests: of every source rank, in any order, already validated by `wire.decode`.

    Attributes:
        tensors: the checkpoint tensors of the whole model (see `declared`); their indices are those of plans.
        world_size: number of source ranks.
        rounds: number of rounds of a sync: the most that any rank needs (each fills its buckets on its own).

    Raises:
        CoverageError: ranks are missing or come twice, ranks disagree about the group or a tensor, boxes of a
            tensor overlap without being equal, or elements have no owner; names the tensor, boxes and ranks.
    """

    def __init__(self, manifests: Sequence[SourceManifest]) -> None:
        ordered = _agree(manifests)
        self.tensors: tuple[TensorMeta, ...] = merge(ordered)
        self.world_size = len(ordered)
        total = sum(prod(meta.shape) * DTYPE_BYTES[meta.dtype] for meta in self.tensors)
        if total > MAX_BYTES:
            raise CoverageError(
                f"{len(self.tensors)} checkpoint tensors have {total} bytes; at most {MAX_BYTES} can be planned"
            )
        self.rounds = max(manifest.rounds for manifest in ordered)
        self._nodes = [manifest.node for manifest in ordered]
        self._collect(ordered)
        self._check_tiling()

    def _collect(self, manifests: Sequence[SourceManifest]) -> None:
        """Fills the columns of shards and of distinct boxes, and the table of owners between them."""
        width = max([1, *(len(tensor.shape) for tensor in self.tensors)])
        # equal boxes of several ranks (HSDP, data parallel) become one box with several owners; the round is the
        # owner's affair, because ranks may fill their buckets in another order
        boxes: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
        shards: list[tuple[int, int, int, int, int]] = []
        strides: list[tuple[int, ...]] = []
        zeros, ones = (0,) * width, (1,) * width
        position_of = {meta.name: index for index, meta in enumerate(self.tensors)}
        for manifest in manifests:
            rank = manifest.rank
            indices = [position_of[meta.name] for meta in manifest.tensors]
            for shard in manifest.shards:
                if 0 in shard.shape:
                    continue
                box = boxes.setdefault((indices[shard.tensor], shard.offset, shard.shape), len(boxes))
                shards.append((box, rank, shard.region, shard.byte_offset, shard.round))
                strides.append(shard.strides + zeros[len(shard.strides) :])
        tensor = np.fromiter((key[0] for key in boxes), np.int64, len(boxes))
        offset = _matrix([key[1] + zeros[len(key[1]) :] for key in boxes], width)
        shape = _matrix([key[2] + ones[len(key[2]) :] for key in boxes], width)
        self._axis = _split_axis(tensor, offset, len(self.tensors))
        along = offset[np.arange(len(offset)), self._axis[tensor]] if len(offset) else offset[:, 0]
        order = np.lexsort([*(offset[:, axis] for axis in reversed(range(width))), along, tensor])
        self._tensor, self._offset, self._shape = tensor[order], offset[order], shape[order]
        self._starts = np.searchsorted(self._tensor, np.arange(len(self.tensors) + 1))
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))

        columns = _matrix(shards, 5)
        owned = position[columns[:, 0]] if len(columns) else columns[:, 0]
        by_box = np.lexsort((np.arange(len(owned)), columns[:, 1], owned))
        self._owners = np.searchsorted(owned[by_box], np.arange(len(order) + 1))
        self._rank, self._region, self._byte_offset, self._round = columns[by_box, 1:].T
        self._stride = _matrix(strides, width)[by_box]

        item = np.array([DTYPE_BYTES[meta.dtype] for meta in self.tensors], np.int64)
        self._nbytes = self._shape.prod(axis=1) * item[self._tensor] if len(order) else np.zeros(0, np.int64)

    # what every plan needs of the whole model, made once however many readers are planned for

    @cached_property
    def indices(self) -> Mapping[str, int]:
        """Positions in `tensors`, by name."""
        return {meta.name: index for index, meta in enumerate(self.tensors)}

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of the checkpoint tensors by group; see `layout.groups`."""
        return groups([meta.name for meta in self.tensors])

    @cached_property
    def tensor_group(self) -> Array:
        """[T] int64: index of each tensor's group."""
        found = np.zeros(len(self.tensors), np.int64)
        for group, members in enumerate(self.groups):
            found[[self.indices[name] for name in members]] = group
        return found

    @cached_property
    def is_staged(self) -> bool:
        """Whether many ranks hold nothing of a group, as in a pipeline: then its owners are asked by all readers at once."""
        holder = self.tensor_group[np.repeat(self._tensor, np.diff(self._owners))] * self.world_size + self._rank
        return 4 * len(np.unique(holder)) < 3 * len(self.groups) * self.world_size

    @cached_property
    def described(self) -> Mapping[str, str]:
        """JSON of `tensors` and `groups`, for digests."""
        tensors = [(meta.name, meta.shape, meta.dtype) for meta in self.tensors]
        return {
            key: json.dumps(value, separators=(",", ":"))
            for key, value in (("tensors", tensors), ("groups", self.groups))
        }

    def owners(self, tensor: int) -> list[tuple[Box, tuple[int, ...]]]:
        """The boxes of tensor number `tensor` and, for each, the ranks that hold it in ascending order."""
        rank = len(self.tensors[tensor].shape)
        return [
            (self._box(box, rank), tuple(int(r) for r in self._rank[self._owners[box] : self._owners[box + 1]]))
            for box in range(self._starts[tensor], self._starts[tensor + 1])
        ]

    def _box(self, index: int, rank: int) -> Box:
        return Box(tuple(self._offset[index, :rank].tolist()), tuple(self._shape[index, :rank].tolist()))

    def _check_tiling(self) -> None:
        """Every tensor's boxes must hold each element exactly once."""
        exact = _tiled(self._tensor, self._offset, self._shape, [meta.shape for meta in self.tensors])
        if exact.all():
            return
        index = int(np.flatnonzero(~exact)[0])
        meta = self.tensors[index]
        held = self.owners(index)
        more = f" ({int((~exact).sum())} tensors are not held exactly once)" if (~exact).sum() > 1 else ""
        clash = _overlap([box for box, _ in held])
        if clash is not None:
            (one, ranks), (other, others) = held[clash[0]], held[clash[1]]
            raise CoverageError(
                f"shards of {meta.name!r}, shape {meta.shape}, overlap without being equal: {one} of source "
                f"rank {_ranks(ranks)} and {other} of source rank {_ranks(others)}{more}; replicas must declare "
                f"equal boxes, and all others disjoint ones"
            )
        missing = subtract(Box.full(meta.shape), (box for box, _ in held))[0]
        raise CoverageError(
            f"no source rank holds elements {missing} of tensor {meta.name!r}, shape {meta.shape}; {self.world_size} "
            f"source ranks hold {len(held)} boxes of it{more}; declare the missing shard, or leave the tensor out"
        )

    def choose(self, reader_index: int, reader_count: int, node: NodeMeta | None = None) -> Route:
        """Picks one owner for each box.

        Owners on the reader's own machine come first: those with the same boot id if there is one, else those with
        the same Ray node id, else all. Among them bytes are balanced, the largest boxes first; equal owners are tried
        in an order that starts elsewhere for each reader. The same arguments give the same route on any machine.

        Args:
            reader_index: number of this reader. Replicas that do not know of one another may count on from any number.
            reader_count: number of engine ranks that read together.
            node: where the reader runs; None if that does not matter.

        Raises:
            CoverageError: a negative index, or no readers.
        """
        if reader_index < 0 or reader_count < 1:
            raise CoverageError(f"reader {reader_index} of {reader_count} is no reader")
        near = self._nearness(node)
        chosen = self._owners[:-1].copy()
        counts = np.diff(self._owners)
        load = np.zeros(self.world_size, np.int64)
        single = counts == 1
        np.add.at(load, self._rank[chosen[single]], self._nbytes[single])
        several = np.flatnonzero(~single)
        for box in several[np.argsort(-self._nbytes[several], kind="stable")].tolist():
            first, last = int(self._owners[box]), int(self._owners[box + 1])
            ranks = self._rank[first:last]
            candidates = np.flatnonzero(near[ranks] == near[ranks].min())
            candidates = np.roll(candidates, -(reader_index % len(candidates)))
            pick = candidates[int(np.argmin(load[ranks[candidates]]))]
            load[ranks[pick]] += self._nbytes[box]
            chosen[box] = first + pick
        return Route(
            reader_index=reader_index,
            reader_count=reader_count,
            starts=self._starts,
            tensor=self._tensor,
            offset=self._offset,
            shape=self._shape,
            axis=self._axis,
            source=self._rank[chosen],
            region=self._region[chosen],
            byte_offset=self._byte_offset[chosen],
            stride=self._stride[chosen],
            round=self._round[chosen],
        )

    def _nearness(self, node: NodeMeta | None) -> Array:
        """[ranks] 0 for ranks that share the reader's kernel, 1 for the same Ray node, 2 for all others."""
        far = [2] * self.world_size
        if node is not None:
            for rank, other in enumerate(self._nodes):
                if node.boot_id and other.boot_id == node.boot_id:
                    far[rank] = 0
                elif node.node_id and other.node_id == node.node_id:
                    far[rank] = 1
        return np.array(far, np.int64)


def _agree(manifests: Sequence[SourceManifest]) -> list[SourceManifest]:
    """The manifests in order of rank, after checking that they speak of the same model and world."""
    if not manifests:
        raise CoverageError("no source rank has joined: there is nothing to route")
    ordered = sorted(manifests, key=lambda manifest: manifest.rank)
    first = ordered[0]
    present = [manifest.rank for manifest in ordered]
    twice = sorted({rank for rank in present if present.count(rank) > 1}) if len(set(present)) < len(present) else []
    if twice:
        raise CoverageError(f"source rank {_ranks(twice)} is declared more than once")
    for manifest in ordered[1:]:
        for field in ("group", "world_size"):
            if getattr(manifest, field) != getattr(first, field):
                raise CoverageError(
                    f"source ranks {first.rank} and {manifest.rank} disagree about {field}: "
                    f"{getattr(first, field)!r} and {getattr(manifest, field)!r}"
                )
    if len(present) != first.world_size:
        here = set(present)
        shown = _ranks(list(islice((rank for rank in range(first.world_size) if rank not in here), 8)))
        more = first.world_size - len(present) - 8
        shown += f" and {more} more" if more > 0 else ""
        raise CoverageError(f"source rank {shown} of {first.world_size} has not declared its shards")
    return ordered


def _ranks(ranks: Sequence[int]) -> str:
    return some(map(str, ranks))


def _matrix(rows: Sequence[tuple[int, ...]], width: int) -> Array:
    return np.array(rows, np.int64).reshape(len(rows), width)


def _split_axis(tensor: Array, offset: Array, count: int) -> Array:
    """[count] the first axis along which the offsets of a tensor's boxes differ; 0 where none does."""
    axis = np.zeros(count, np.int64)
    for candidate in reversed(range(offset.shape[1])):
        high, low = np.full(count, -1, np.int64), np.full(count, np.iinfo(np.int64).max, np.int64)
        np.maximum.at(high, tensor, offset[:, candidate])
        np.minimum.at(low, tensor, offset[:, candidate])
        axis[high > low] = candidate
    return axis


def _tiled(tensor: Array, offset: Array, shape: Array, full: Sequence[tuple[int, ...]]) -> Array:
    """Which tensors have each of their elements in exactly one box: [T] bool.

    A sum of boxes is the full box exactly if the signed corners of all boxes cancel out to those of the full box:
    taking mixed differences loses nothing. That costs one sort of the corners, however the boxes lie.
    """
    count, width = len(full), offset.shape[1]
    sizes = np.ones((count, width), np.int64)
    for index, dims in enumerate(full):
        sizes[index, : len(dims)] = dims
    empty = (sizes == 0).any(axis=1)
    ones = np.flatnonzero(~empty)
    owner = np.concatenate([tensor, ones])
    low = np.concatenate([offset, np.zeros((len(ones), width), np.int64)])
    high = np.concatenate([offset + shape, sizes[ones]])
    sign = np.concatenate([np.ones(len(tensor), np.int64), np.full(len(ones), -1, np.int64)])
    # an axis that every box of the tensor spans from end to end adds nothing, and would double the corners
    partial = np.zeros((count, width), bool)
    np.logical_or.at(partial, tensor, (offset != 0) | (shape != sizes[tensor]))
    exact = np.ones(count, bool)
    splits = partial.sum(axis=1)
    for index in np.flatnonzero(splits > MAX_SPLITS).tolist():
        exact[index] = _tiled_slowly(offset[tensor == index], shape[tensor == index], full[index])
        splits[index] = -1
    for number in np.unique(splits[owner][splits[owner] >= 0]).tolist():
        rows = np.flatnonzero(splits[owner] == number)
        axes = np.argsort(~partial[owner[rows]], axis=1, kind="stable")[:, :number]
        lows = np.take_along_axis(low[rows], axes, axis=1)
        highs = np.take_along_axis(high[rows], axes, axis=1)
        corners, signs = [], []
        for mask in range(1 << number):
            ends = np.array([bool(mask >> bit & 1) for bit in range(number)], bool)
            corners.append(np.column_stack([owner[rows], np.where(ends, highs, lows)]))
            signs.append(sign[rows] * (-1 if int(ends.sum()) % 2 else 1))
        keys, weights = np.concatenate(corners), np.concatenate(signs)
        order = np.lexsort(keys.T[::-1])
        keys, weights = keys[order], weights[order]
        fresh = np.concatenate([[True], (keys[1:] != keys[:-1]).any(axis=1)])
        totals = np.add.reduceat(weights, np.flatnonzero(fresh))
        exact[keys[fresh][totals != 0, 0]] = False
    return exact


def _tiled_slowly(offset: Array, shape: Array, full: tuple[int, ...]) -> bool:
    rank = len(full)
    boxes = [
        Box(tuple(low), tuple(size))
        for low, size in zip(offset[:, :rank].tolist(), shape[:, :rank].tolist(), strict=True)
    ]
    return sum(box.numel for box in boxes) == prod(full) and _overlap(boxes) is None


def _overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two of the boxes that share an element, or None. Only for saying what is wrong: it may be slow."""
    order = sorted(range(len(boxes)), key=lambda index: boxes[index].offset)
    if not order or not boxes[0].shape:
        return (0, 1) if len(boxes) > 1 else None
    active: list[int] = []
    for index in order:
        active = [other for other in active if boxes[other].end[0] > boxes[index].offset[0]]
        for other in active:
            if boxes[other].intersect(boxes[index]) is not None:
                return (other, index)
        active.append(index)
    return None
