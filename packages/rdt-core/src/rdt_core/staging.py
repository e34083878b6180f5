"""How shards are cut into the rounds of bucket mode: pure arithmetic over boxes.

A bucket never grows past its limit and no element is too large for one: a box that does not fit into the room that is
left is split along its outermost axis, and a single slab that exceeds a whole bucket along the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from .errors import SourceError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 256


@dataclass(slots=True)
class Piece:
    """A box of a checkpoint tensor that is staged in one round.

    `base` is the offset of the shard that it was cut from; `begin` and `end` are bytes in the bucket; `memory` is the
    view of the bucket that holds it, set by the publisher.
    """

    name: str
    base: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    end: int
    memory: torch.Tensor = None  # type: ignore[assignment]


def split_pieces(
    boxes: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]], itemsize: Mapping[str, int], bucket_bytes: int
) -> list[list[Piece]]:
    """Cuts boxes into rounds, in the order given.

    Args:
        boxes: name, offset and shape of each box.
        itemsize: bytes an element, by name.
        bucket_bytes: limit of one bucket, at least the largest element.

    Returns:
        The pieces of each round; no round is empty.

    Raises:
        SourceError: the limit is below one element.
    """
    rounds: list[list[Piece]] = []
    used = bucket_bytes
    for name, base, whole in boxes:
        item = itemsize[name]
        if item > bucket_bytes:
            raise SourceError(
                f"a bucket of {bucket_bytes} bytes is smaller than one element of {name!r} ({item} bytes)"
            )
        todo = [(base, whole)]
        while todo:
            offset, shape = todo.pop()
            size = prod(shape) * item
            if size == 0:
                continue
            start = -(-used // ALIGNMENT) * ALIGNMENT
            if start + size <= bucket_bytes:
                rounds[-1].append(Piece(name, base, offset, shape, start, start + size))
                used = start + size
                continue
            axis = next((axis for axis, length in enumerate(shape) if length > 1), 0)
            slab = size // max(1, shape[axis] if shape else 1)
            fit = max(0, bucket_bytes - start) // slab
            if fit:
                todo.append((_moved(offset, axis, fit), _resized(shape, axis, shape[axis] - fit)))
                todo.append((offset, _resized(shape, axis, fit)))
            elif used:
                rounds.append([])
                used = 0
                todo.append((offset, shape))
            else:  # not even one slab fits into an empty bucket: the slabs themselves are cut
                slabs = range(shape[axis])
                todo.extend((_moved(offset, axis, index), _resized(shape, axis, 1)) for index in reversed(slabs))
    return rounds


def _moved(offset: tuple[int, ...], axis: int, by: int) -> tuple[int, ...]:
    return (*offset[:axis], offset[axis] + by, *offset[axis + 1 :])


def _resized(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    return (*shape[:axis], length, *shape[axis + 1 :])
