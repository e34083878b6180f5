"""Boxes and view-op chains: pure integer arithmetic, no tensors, no Ray.

A checkpoint tensor is treated as a virtual row-major array; a chain of view ops is stride arithmetic on it. `resolve`
turns a chain into the box of elements that must be transferred plus the order in which they are wanted, and what is
left of the chain to replay. Refused: ops outside `OPS`, and arguments that do not fit the shape they are applied to.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from .errors import GeometryError
from .strided import OPS, Chain, Op, Shape, Strided, check_op, index_items, ints, is_slice, op_shape, row_major, step
from .wire import MAX_BYTES

__all__ = [
    "OPS",
    "Box",
    "Chain",
    "Op",
    "View",
    "chain_shape",
    "format_chain",
    "op_shape",
    "replay",
    "resolve",
    "row_major",
    "subtract",
]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of elements of a tensor: `shape` elements along each axis, from `offset` on.

    Raises:
        GeometryError: another number of axes in `offset` than in `shape`, or a negative value.
    """

    offset: Shape
    shape: Shape

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape) or any(v < 0 for v in self.offset) or any(v < 0 for v in self.shape):
            raise GeometryError(f"no box has offset {self.offset} and shape {self.shape}")

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """The box of every element of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a box without axes."""
        return prod(self.shape)

    @property
    def end(self) -> Shape:
        """The first index past the box, along each axis."""
        return tuple(map(operator.add, self.offset, self.shape))

    @property
    def is_empty(self) -> bool:
        """Whether the box holds no element."""
        return 0 in self.shape

    def intersect(self, other: Box) -> Box | None:
        """The elements in both boxes, or None if there is none.

        Raises:
            GeometryError: the boxes have different numbers of axes.
        """
        if len(self.shape) != len(other.shape):
            raise GeometryError(f"{self} and {other} have different numbers of axes")
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(map(operator.sub, map(min, self.end, other.end), start))
        return None if any(size <= 0 for size in shape) else Box(start, shape)

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box (true for an empty `other`)."""
        return other.is_empty or self.intersect(other) == other

    def __str__(self) -> str:
        return "[" + ", ".join(f"{start}:{end}" for start, end in zip(self.offset, self.end, strict=True)) + "]"


def subtract(box: Box, others: Iterable[Box]) -> list[Box]:
    """Returns disjoint boxes that hold exactly the elements of `box` that are in none of `others`."""
    left = [] if box.is_empty else [box]
    for other in others:
        if not left:
            break
        pieces: list[Box] = []
        for piece in left:
            common = piece.intersect(other)
            if common is None:
                pieces.append(piece)
                continue
            start, end = list(piece.offset), list(piece.end)
            for axis, (low, high) in enumerate(zip(common.offset, common.end, strict=True)):
                for first, last in ((start[axis], low), (high, end[axis])):
                    if first < last:
                        offset = (*start[:axis], first, *start[axis + 1 :])
                        stop = (*end[:axis], last, *end[axis + 1 :])
                        pieces.append(Box(offset, tuple(map(operator.sub, stop, offset))))
                start[axis], end[axis] = low, high
        left = pieces
    return left


@dataclass(frozen=True, slots=True)
class View:
    """What a chain takes of a tensor: `replay(tensor[box].permute(axes).reshape(shape), rest)`.

    Attributes:
        box: the elements to transfer.
        axes: order in which the box's axes are wanted.
        shape: shape after the part of the chain that was taken in.
        rest: the part of the chain that has to be replayed on the value.
    """

    box: Box
    axes: tuple[int, ...]
    shape: Shape
    rest: Chain

    @property
    def direct(self) -> bool:
        """Whether the value is the box with permuted axes: nothing to replay, only axes of size 1 added or removed."""
        return not self.rest and [self.box.shape[a] for a in self.axes if self.box.shape[a] != 1] == [
            size for size in self.shape if size != 1
        ]

    def dims(self) -> tuple[int | None, ...]:
        """For each axis of `shape`, the box axis that it runs along; None for an axis of size 1.

        Raises:
            GeometryError: the view is not direct.
        """
        if not self.direct:
            raise GeometryError(f"{self} is not direct: its axes do not run along axes of the box")
        wide = iter([axis for axis in self.axes if self.box.shape[axis] != 1])
        return tuple(None if size == 1 else next(wide) for size in self.shape)

    def value(self, elements: Any) -> Any:
        """The value of the whole chain, given a tensor that holds the elements of the box in the box's shape."""
        return replay(elements.permute(self.axes).reshape(self.shape), self.rest)


def resolve(shape: Sequence[int], chain: Chain) -> View:
    """Finds what a chain takes of a tensor.

    The longest prefix of the chain whose value is a box with permuted axes and a new shape is taken in; a state in
    between that is no box (an axis split and cut inside) does no harm if a later op makes it one again. A reshape that
    needs a copy, a slice with a step and a cast end the prefix.

    Args:
        shape: of the whole checkpoint tensor.
        chain: what was done to it.

    Raises:
        GeometryError: an op that is not in `OPS`, or arguments that do not fit; names the op and its position.
    """
    full = tuple(shape)
    states: list[Strided] = [Strided(0, full, row_major(full))]
    current, strided = full, True
    for position, op in enumerate(chain):
        try:
            after = step(states[-1], op) if strided else None
            if after is None:
                strided = False
                current = op_shape(current, op)
            else:
                states.append(after)
                current = after.shape
        except GeometryError as error:
            raise GeometryError(f"op {position} of the chain {format_chain(chain)} on shape {full}: {error}") from None
    for taken in reversed(range(len(states))):
        found = _as_box(states[taken], full)
        if found is not None:
            return View(*found, states[taken].shape, tuple(chain[taken:]))
    raise AssertionError("the empty prefix is always a box")


def chain_shape(shape: Sequence[int], chain: Chain) -> Shape:
    """The shape after a whole chain. Raises GeometryError as `op_shape` does."""
    current = tuple(shape)
    for op in chain:
        current = op_shape(current, op)
    return current


def format_chain(chain: Chain) -> str:
    """A chain as one would write it: `.narrow(0, 2, 3).t()`."""
    return "".join(f".{name}({', '.join(map(str, args))})" for name, args in chain) or "(no op)"


def _as_box(state: Strided, full: Shape) -> tuple[Box, tuple[int, ...]] | None:
    """The box and axis order that give the state's elements in its order, or None if there are none such."""
    rank = len(full)
    if 0 in state.shape:
        # an empty selection of a tensor without axes has no box of its own: every box of that tensor has one element
        return (Box((0,) * rank, (0,) * rank), tuple(range(rank))) if rank else None
    strides = row_major(full)
    offset = tuple((state.offset // stride) % max(size, 1) for size, stride in zip(full, strides, strict=True))
    extent = [1] * rank
    axis_of = {strides[axis]: axis for axis in range(rank) if full[axis] > 1}
    order: list[int] = []
    for count, stride in state.runs():
        axis = axis_of.get(stride)
        members: list[int] = []
        while axis is not None and count > full[axis] and offset[axis] == 0 and count % full[axis] == 0:
            extent[axis] = full[axis]
            members.append(axis)
            count //= full[axis]
            axis = axis_of.get(strides[axis] * full[axis])
        if axis is None or offset[axis] + count > full[axis]:
            return None
        extent[axis] = count
        members.append(axis)
        order.extend(reversed(members))
    if len(set(order)) != len(order):
        return None
    # axes of one element may stand anywhere: behind their neighbour an unpermuted box keeps its natural order
    for axis in range(rank):
        if axis not in order:
            order.insert(order.index(axis - 1) + 1 if axis else 0, axis)
    return Box(offset, tuple(extent)), tuple(order)


def replay(tensor: Any, chain: Chain) -> Any:
    """Applies a chain with the tensor's own methods.

    Args:
        tensor: a torch tensor (or anything with its methods) of the shape that the chain was recorded on.
        chain: ops out of `OPS`.

    Returns:
        A tensor; a view of `tensor` where its strides allow that.

    Raises:
        GeometryError: an op that is not in `OPS`, or does not fit the tensor's shape.
    """
    for op in chain:
        name, args = check_op(op)
        shape = op_shape(tensor.shape, op)
        if name in ("view", "reshape", "flatten"):
            # the recorded tensor may have been contiguous where this one is not, so a plain `view` could fail
            tensor = tensor.reshape(shape)
        elif name == "__getitem__":
            tensor = tensor[tuple(_slice(item) if is_slice(item) else item for item in index_items(args))]
        elif name == "permute":
            tensor = tensor.permute(ints(name, args))
        elif name == "to":
            tensor = tensor.to(_dtype(args[0]))
        else:
            tensor = getattr(tensor, name)(*args)
    return tensor


def _slice(item: tuple[Any, ...]) -> slice:
    # no axis is as long as this; torch truncates longer numbers with a warning
    return slice(*(None if value is None else max(min(value, MAX_BYTES), -MAX_BYTES) for value in item[1:]))


def _dtype(name: str) -> Any:
    import torch  # only a cast needs it; everything else here works without

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise GeometryError(f"{name!r} is not a dtype of torch")
    return dtype
