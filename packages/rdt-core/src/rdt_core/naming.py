"""What lies in a block of a source rank's memory, by name: checkpoint tensors, and the boxes of them that it holds.

For messages and tables, after the digests of a block differed; a sync that goes well never comes here. A block may hold
parts of several tensors (neighbours are moved together) and a tensor may be known by several names.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from . import wire
from .blocks import Blocks
from .geometry import Box

#: blocks whose elements are looked at one by one for a message
LOOKED_AT = 64
#: tensors that a message names
NAMED = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a checkpoint tensor: its index in the manifest and the smallest box that holds it."""

    tensor: int
    box: Box


@dataclass(slots=True)
class _Line:
    """Shards of one region and round, by the bytes that they reach over."""

    low: list[int]
    reach: list[int]  # largest end so far
    shards: list[wire.ShardMeta]


class Names:
    """Finds names for blocks of one source rank.

    Args:
        manifest: of the rank.
    """

    def __init__(self, manifest: wire.SourceManifest) -> None:
        self.manifest = manifest
        found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for number, shard in enumerate(manifest.shards):
            if 0 in shard.shape:
                continue
            span = 1 + sum((size - 1) * stride for size, stride in zip(shard.shape, shard.strides, strict=True))
            end = shard.byte_offset + span * self._item(shard)
            found.setdefault((shard.round, shard.region), []).append((shard.byte_offset, end, number))
        self._lines: dict[tuple[int, int], _Line] = {}
        for key, entries in found.items():
            entries.sort()
            reach = np.maximum.accumulate([end for _, end, _ in entries]).tolist()
            self._lines[key] = _Line(
                [low for low, _, _ in entries], reach, [manifest.shards[number] for _, _, number in entries]
            )

    def _item(self, shard: wire.ShardMeta) -> int:
        return wire.DTYPE_BYTES[self.manifest.tensors[shard.tensor].dtype]

    def tensors(self, blocks: Blocks, round: int, index: int) -> set[int]:
        """The tensors that block `index` holds elements of, as indices into the manifest's."""
        candidates = self._candidates(blocks, round, index)
        if len(candidates) == 1:
            return {candidates[0].tensor}
        return {part.tensor for part in self.parts(blocks, round, index)}

    def parts(self, blocks: Blocks, round: int, index: int) -> list[Part]:
        """What block `index` holds, in the order of its memory. Looks at every element."""
        result = []
        for shard in self._candidates(blocks, round, index):
            box = _covered(shard, self._item(shard), _bytes(blocks, index))
            if box is not None:
                result.append(Part(shard.tensor, box))
        return result

    def _candidates(self, blocks: Blocks, round: int, index: int) -> list[wire.ShardMeta]:
        line = self._lines.get((round, int(blocks.memory[index])))
        if line is None:
            return []
        low = int(blocks.offset[index])
        high = low + int(blocks.rows[index] - 1) * int(blocks.pitch[index]) + int(blocks.row_bytes[index])
        return line.shards[bisect_right(line.reach, low) : bisect_left(line.low, high)]


def _bytes(blocks: Blocks, index: int) -> tuple[int, int, int, int]:
    """Offset, pitch, rows and bytes of a row."""
    return (
        int(blocks.offset[index]), int(blocks.pitch[index]), int(blocks.rows[index]), int(blocks.row_bytes[index]),
    )  # fmt: skip


def _covered(shard: wire.ShardMeta, item: int, block: tuple[int, int, int, int]) -> Box | None:
    """The smallest box, in the checkpoint tensor, of the shard's elements in a block; None if there is none."""
    offset, pitch, rows, row_bytes = block
    place = offset - shard.byte_offset + pitch * np.arange(rows)[:, None] + np.arange(0, row_bytes, item)[None, :]
    element = (place // item).reshape(-1)
    inside = element >= 0
    axes = sorted(range(len(shard.shape)), key=lambda axis: (-shard.strides[axis], axis))
    index: dict[int, np.ndarray] = {}
    for axis in axes:
        size, stride = shard.shape[axis], shard.strides[axis]
        if size == 1 or stride == 0:
            index[axis] = np.zeros_like(element)
            continue
        index[axis] = element // stride
        element = element - index[axis] * stride
        inside &= index[axis] < size
    inside &= element == 0
    if not inside.any():
        return None
    low = [int(index[axis][inside].min()) for axis in range(len(shard.shape))]
    high = [int(index[axis][inside].max()) + 1 for axis in range(len(shard.shape))]
    for axis, stride in enumerate(shard.strides):
        if stride == 0:  # one element stands for all
            low[axis], high[axis] = 0, shard.shape[axis]
    return Box(
        tuple(start + begin for start, begin in zip(shard.offset, low, strict=True)),
        tuple(end - begin for begin, end in zip(low, high, strict=True)),
    )


def describe(name: str, shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """Returns a tensor's name with the rows that boxes of it reach over, and the columns where not all."""
    ranges = sorted({(box.offset, box.shape) for box in boxes})
    if not shape or not ranges:
        return repr(name)
    rows: list[list[int]] = []
    for offset, size in ranges:
        if rows and offset[0] <= rows[-1][1]:
            rows[-1][1] = max(rows[-1][1], offset[0] + size[0])
        else:
            rows.append([offset[0], offset[0] + size[0]])
    shown = ", ".join(f"{low} to {high - 1}" for low, high in rows[:NAMED])
    more = f" and {len(rows) - NAMED} more stretches" if len(rows) > NAMED else ""
    text = f"{name!r} rows {shown}{more} of {shape[0]}"
    for axis in range(1, len(shape)):
        low = min(offset[axis] for offset, _ in ranges)
        high = max(offset[axis] + size[axis] for offset, size in ranges)
        if high - low < shape[axis]:
            noun = "columns" if len(shape) == 2 else f"axis {axis}"
            text += f", {noun} {low} to {high - 1} of {shape[axis]}"
    return text


def describe_blocks(names: Names, blocks: Blocks, rounds: np.ndarray, chosen: Sequence[int]) -> str:
    """Returns what blocks hold, for a message: the first tensors by name and rows.

    Args:
        names: of the source rank.
        blocks: of a link.
        rounds: round of each.
        chosen: positions of those that are to be named.
    """
    boxes: dict[int, list[Box]] = {}
    for index in chosen[:LOOKED_AT]:
        for part in names.parts(blocks, int(rounds[index]), index):
            boxes.setdefault(part.tensor, []).append(part.box)
    tensors = names.manifest.tensors
    listed = [describe(tensors[one].name, tensors[one].shape, some) for one, some in list(boxes.items())[:NAMED]]
    if len(boxes) > NAMED or len(chosen) > LOOKED_AT:
        listed.append("more")
    return "; ".join(listed) or "bytes that no checkpoint tensor has"
