"""Position-sensitive sums of boxes of checkpoint tensors, made on two sides and compared without moving the tensors.

An element's weight is decided by its place in the *whole* tensor, so that sums of the boxes that several source ranks
hold add up to the sum of the box that an engine rank holds. A moved, swapped, stale or missing value changes the sum;
nothing here is a defence against an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from .. import wire

#: 16-bit words that are widened at a time
_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 26}
_MASK = 0x7FFFFFFF


class Box(wire.Struct, frozen=True):
    """A box of a checkpoint tensor that is cut along one axis at most.

    Attributes:
        name: of the tensor.
        axis: that is cut; 0 for a tensor taken whole.
        start, count: the part taken along it.
    """

    name: str
    axis: int
    start: int
    count: int


def digest(part: torch.Tensor, row: int = 0, column: int = 0) -> torch.Tensor:
    """Sum of the 16-bit words of `part`, each times the weight of its place in the tensor, modulo 2**64.

    Args:
        part: a box of a tensor of one or two axes, unit stride along the last one.
        row, column: place of its first element in the whole tensor; of one axis, `row` counts.

    Returns:
        A scalar int64 tensor on the device of `part`.
    """
    if part.ndim == 1:
        part, row, column = part[None], 0, row
    words = part.element_size() // 2
    values = part.view(torch.int16)
    columns = _weights(column * words, values.shape[1], 2_654_435_761, 0x9E37, part.device)
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    height = max(1, _CHUNK.get(part.device.type, 1 << 22) // max(1, values.shape[1]))
    for top in range(0, values.shape[0], height):
        block = values[top : top + height].to(torch.int64)
        rows = _weights(row + top, block.shape[0], 2_246_822_519, 0x85EB, part.device)
        total += (block.mul_(columns).sum(dim=1) * rows).sum()
    return total


def held(parts: Iterable[tuple[Sequence[int], torch.Tensor]], box: Box) -> torch.Tensor | None:
    """Sum of what a rank holds of a box.

    Args:
        parts: places of the tensor's boxes that this rank counts, with the views that store them.
        box: of the tensor.

    Returns:
        As `digest`; None where the rank holds nothing of it.
    """
    total = None
    for offset, part in parts:
        first = offset[box.axis]
        low = max(first, box.start)
        count = min(first + part.shape[box.axis], box.start + box.count) - low
        if count > 0 and part.numel():
            place = [low if axis == box.axis else at for axis, at in enumerate(offset)]
            one = digest(part.narrow(box.axis, low - first, count), *place)
            total = one if total is None else total.add_(one)
    return total


def sums(parts: Mapping[str, Sequence[tuple[Sequence[int], torch.Tensor]]], boxes: Sequence[Box]) -> list[int]:
    """Sums of what a rank holds of each box, 0 where that is nothing; those of all ranks add up to the box's.

    Args:
        parts: by name of the tensor, see `held`. Of equal boxes on several ranks one rank counts its own.
        boxes: asked for.
    """
    found = [held(parts.get(box.name, ()), box) for box in boxes]
    values = iter(collect(one for one in found if one is not None))
    return [0 if one is None else next(values) for one in found]


def _weights(start: int, count: int, factor: int, salt: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(start, start + count, dtype=torch.int64, device=device) + salt
    return ((places * factor) & _MASK) | 1


def collect(digests: Iterable[torch.Tensor]) -> list[int]:
    """Returns the sums as integers of 0 to 2**64 - 1, with one wait for the device."""
    listed = list(digests)
    return [value & (1 << 64) - 1 for value in torch.stack(listed).tolist()] if listed else []


def add(parts: Iterable[Sequence[int]]) -> list[int]:
    """Adds the sums that several ranks have of the same boxes, modulo 2**64."""
    return [sum(values) & (1 << 64) - 1 for values in zip(*parts, strict=True)]
