"""Boxes and view-op chains: pure integer arithmetic, no tensors, no Ray.

A checkpoint tensor is treated as a virtual row-major array; a chain of view ops is stride arithmetic on it. `resolve`
turns a chain into the box of elements that must be transferred plus the order in which they are wanted, and what is
left of the chain to replay. Refused: ops outside `OPS`, and arguments that do not fit the shape they are applied to.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

from .errors import GeometryError

#: One view op: its name and the positional arguments after the tensor. A slice inside the arguments is written
#: `("slice", start, stop, step)`; ints, None and Ellipsis stand for themselves.
Op = tuple[str, tuple[Any, ...]]
Chain = tuple[Op, ...]
Shape = tuple[int, ...]

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class _State:
    """A strided view of the virtual row-major array, in elements. Strides mean nothing where the view is empty."""

    offset: int
    shape: Shape
    strides: Shape

    def narrowed(self, dim: int, start: int, length: int) -> _State:
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return _State(self.offset + start * self.strides[dim], shape, self.strides)

    def selected(self, dim: int, index: int) -> _State:
        return self.narrowed(dim, index, 1).without((dim,))

    def without(self, dims: Iterable[int]) -> _State:
        keep = [axis for axis in range(len(self.shape)) if axis not in set(dims)]
        return self.ordered(keep)

    def ordered(self, dims: Sequence[int]) -> _State:
        return _State(self.offset, tuple(self.shape[d] for d in dims), tuple(self.strides[d] for d in dims))

    def unsqueezed(self, dim: int) -> _State:
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        return _State(self.offset, shape, (*self.strides[:dim], 0, *self.strides[dim:]))

    def runs(self) -> list[tuple[int, int]]:
        """(size, stride) of the axes in order, without those of size 1, neighbours merged where they continue."""
        runs: list[tuple[int, int]] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size == 1:
                continue
            if runs and runs[-1][1] == size * stride:
                runs[-1] = (runs[-1][0] * size, stride)
            else:
                runs.append((size, stride))
        return runs

    def reshaped(self, shape: Shape) -> _State | None:
        """The same elements in another shape, or None where no strides can say that without a copy."""
        if 0 in shape:
            return _State(self.offset, shape, row_major(shape))
        runs = self.runs()
        strides = [0] * len(shape)
        left, stride = 1, 0
        for axis in reversed(range(len(shape))):
            if shape[axis] == 1:
                continue
            if left == 1:
                left, stride = runs.pop()
            if left % shape[axis]:
                return None
            strides[axis] = stride
            left //= shape[axis]
            stride *= shape[axis]
        return _State(self.offset, shape, tuple(strides))


def row_major(shape: Sequence[int]) -> Shape:
    """The strides, in elements, of a contiguous tensor of this shape."""
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


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
    states: list[_State] = [_State(0, full, row_major(full))]
    current, strided = full, True
    for position, op in enumerate(chain):
        try:
            after = _step(states[-1], op) if strided else None
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


def _as_box(state: _State, full: Shape) -> tuple[Box, tuple[int, ...]] | None:
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


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ints(name: str, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Arguments that may come one by one or as one sequence."""
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        args = tuple(args[0])
    if not all(map(_is_int, args)):
        raise GeometryError(f"{name} takes ints, found {args}")
    return args


def _fixed(name: str, args: tuple[Any, ...], low: int, high: int) -> tuple[int, ...]:
    if not low <= len(args) <= high or not all(map(_is_int, args)):
        expected = str(low) if low == high else f"{low} to {high}"
        raise GeometryError(f"{name} takes {expected} ints, found {args}")
    return args


def _dim(name: str, dim: int, rank: int) -> int:
    if not -rank <= dim < rank:
        raise GeometryError(f"{name}: dimension {dim} is out of range for {rank} axes")
    return dim % rank


def _dim_or_scalar(name: str, dim: int, rank: int) -> int:
    """As torch does, dimensions 0 and -1 of a tensor without axes are let through."""
    return _dim(name, dim, max(rank, 1))


def _narrow(state: _State, args: tuple[Any, ...]) -> _State:
    dim, start, length = _fixed("narrow", args, 3, 3)
    dim = _dim("narrow", dim, len(state.shape))
    size = state.shape[dim]
    first = start + size if start < 0 else start
    if not 0 <= first <= size or length < 0 or first + length > size:
        raise GeometryError(f"narrow: {length} elements from {start} leave axis {dim} of {size}")
    return state.narrowed(dim, first, length)


def _select(state: _State, args: tuple[Any, ...]) -> _State:
    dim, index = _fixed("select", args, 2, 2)
    dim = _dim("select", dim, len(state.shape))
    return state.selected(dim, _index("select", index, dim, state.shape[dim]))


def _index(name: str, index: int, dim: int, size: int) -> int:
    if not -size <= index < size:
        raise GeometryError(f"{name}: index {index} is out of range for axis {dim} of {size}")
    return index % size


def _new_shape(name: str, shape: Shape, args: tuple[Any, ...]) -> Shape:
    wanted = _ints(name, args)
    numel, known = prod(shape), prod(size for size in wanted if size != -1)
    if any(size < -1 for size in wanted) or wanted.count(-1) > 1:
        raise GeometryError(f"{name}: {wanted} is not a shape")
    if -1 in wanted:
        if known == 0 or numel % known:
            raise GeometryError(f"{name}: {numel} elements do not fit the shape {wanted}")
        return tuple(numel // known if size == -1 else size for size in wanted)
    if known != numel:
        raise GeometryError(f"{name}: {numel} elements do not fit the shape {wanted}")
    return wanted


def _reshape(state: _State, args: tuple[Any, ...]) -> _State | None:
    return state.reshaped(_new_shape("reshape", state.shape, args))


def _flat_shape(shape: Shape, args: tuple[Any, ...]) -> Shape:
    given = _fixed("flatten", args, 0, 2)
    rank = len(shape)
    first = _dim_or_scalar("flatten", given[0] if given else 0, rank)
    last = _dim_or_scalar("flatten", given[1] if len(given) == 2 else -1, rank)
    if first > last:
        raise GeometryError(f"flatten: the first dimension {first} comes after the last, {last}")
    return (*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :])


def _flatten(state: _State, args: tuple[Any, ...]) -> _State | None:
    return state.reshaped(_flat_shape(state.shape, args))


def _unsqueeze(state: _State, args: tuple[Any, ...]) -> _State:
    (dim,) = _fixed("unsqueeze", args, 1, 1)
    return state.unsqueezed(_dim("unsqueeze", dim, len(state.shape) + 1))


def _squeeze(state: _State, args: tuple[Any, ...]) -> _State:
    rank = len(state.shape)
    dims = [_dim_or_scalar("squeeze", dim, rank) for dim in _ints("squeeze", args)] if args else range(rank)
    return state.without([dim for dim in dims if dim < rank and state.shape[dim] == 1])


def _transpose(state: _State, args: tuple[Any, ...]) -> _State:
    rank = len(state.shape)
    first, second = (_dim_or_scalar("transpose", dim, rank) for dim in _fixed("transpose", args, 2, 2))
    order = list(range(rank))
    if rank:
        order[first], order[second] = order[second], order[first]
    return state.ordered(order)


def _t(state: _State, args: tuple[Any, ...]) -> _State:
    _fixed("t", args, 0, 0)
    if len(state.shape) > 2:
        raise GeometryError(f"t takes a tensor of at most 2 axes, found shape {state.shape}")
    return state.ordered(range(len(state.shape))[::-1])


def _permute(state: _State, args: tuple[Any, ...]) -> _State:
    rank = len(state.shape)
    dims = [_dim("permute", dim, rank) for dim in _ints("permute", args)]
    if sorted(dims) != list(range(rank)):
        raise GeometryError(f"permute: {args} is not an order of {rank} axes")
    return state.ordered(dims)


def _contiguous(state: _State, args: tuple[Any, ...]) -> _State:
    # the elements and their order stay; a later view of the copy is `reshaped`, which ends the prefix if it must
    _fixed("contiguous", args, 0, 0)
    return state


def _to(state: _State, args: tuple[Any, ...]) -> None:
    if len(args) != 1 or not isinstance(args[0], str):
        raise GeometryError(f"to takes the name of a dtype, found {args}")


def _is_slice(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 4 and item[0] == "slice"


def _items(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The index items of `__getitem__`, whether recorded one by one or as the one tuple that Python hands over."""
    if len(args) == 1 and isinstance(args[0], tuple) and not _is_slice(args[0]):
        return args[0]
    return args


def _getitem(state: _State, args: tuple[Any, ...]) -> _State | None:
    items = _items(args)
    for item in items:
        if not (item is None or item is Ellipsis or _is_int(item) or _is_slice(item)):
            raise GeometryError(f"indexing takes ints, slices, None and one Ellipsis, found {item!r}")
    rank, used = len(state.shape), sum(1 for item in items if item is not None and item is not Ellipsis)
    gaps = sum(1 for item in items if item is Ellipsis)
    if used > rank or gaps > 1:
        raise GeometryError(f"the index {items} does not fit the shape {state.shape}")
    stepped = False
    axis = 0
    for item in items:
        if item is None:
            state = state.unsqueezed(axis)
            axis += 1
        elif item is Ellipsis:
            axis += rank - used
        elif _is_int(item):
            state = state.selected(axis, _index("indexing", item, axis, state.shape[axis]))
        else:
            start, length, step = _bounds(item, state.shape[axis])
            stepped |= step != 1
            # with a step only the shape is meant, never the offset: the caller ends the prefix here
            state = state.narrowed(axis, start, length)
            axis += 1
    return _Stepped(state.offset, state.shape, state.strides) if stepped else state


class _Stepped(_State):
    """A state of which only the shape is right, because a slice with a step was taken."""

    __slots__ = ()


def _bounds(item: tuple[Any, ...], size: int) -> tuple[int, int, int]:
    """First index, number of elements and step of an encoded slice on an axis of `size`."""
    if not all(value is None or _is_int(value) for value in item[1:]):
        raise GeometryError(f"a slice takes ints or None, found {item}")
    if item[3] is not None and item[3] <= 0:
        raise GeometryError(f"a slice takes a step of at least 1, found {item}")
    indices = range(*slice(*item[1:]).indices(size))
    return (min(indices.start, size), len(indices), indices.step)


_STEPS: dict[str, Callable[[_State, tuple[Any, ...]], _State | None]] = {
    "narrow": _narrow,
    "view": _reshape,
    "reshape": _reshape,
    "__getitem__": _getitem,
    "select": _select,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "t": _t,
    "permute": _permute,
    "flatten": _flatten,
    "contiguous": _contiguous,
    "to": _to,
}

#: The closed list of ops that a chain may hold. `to` stands for casts only: its one argument names a dtype.
OPS: frozenset[str] = frozenset(_STEPS)


def _check(op: Op) -> tuple[str, tuple[Any, ...]]:
    if not (isinstance(op, tuple) and len(op) == 2 and isinstance(op[0], str) and isinstance(op[1], tuple)):
        raise GeometryError(f"an op is a name and a tuple of arguments, found {op!r}")
    if op[0] not in OPS:
        raise GeometryError(f"{op[0]!r} is not a view op; known: {', '.join(sorted(OPS))}")
    return op


def _step(state: _State, op: Op) -> _State | None:
    """The state after one op, or None where it is not strided over the array any more."""
    name, args = _check(op)
    after = _STEPS[name](state, args)
    return None if isinstance(after, _Stepped) else after


def op_shape(shape: Sequence[int], op: Op) -> Shape:
    """The shape after one op, as torch gives it.

    Raises:
        GeometryError: the op is not in `OPS`, or its arguments do not fit `shape`.
    """
    name, args = _check(op)
    before = tuple(shape)
    if name in ("view", "reshape"):
        return _new_shape(name, before, args)
    if name == "flatten":
        return _flat_shape(before, args)
    after = _STEPS[name](_State(0, before, row_major(before)), args)
    return before if after is None else after.shape


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
        name, args = _check(op)
        shape = op_shape(tensor.shape, op)
        if name in ("view", "reshape", "flatten"):
            # the recorded tensor may have been contiguous where this one is not, so a plain `view` could fail
            tensor = tensor.reshape(shape)
        elif name == "__getitem__":
            tensor = tensor[tuple(slice(*item[1:]) if _is_slice(item) else item for item in _items(args))]
        elif name == "permute":
            tensor = tensor.permute(_ints(name, args))
        elif name == "to":
            tensor = tensor.to(_dtype(args[0]))
        else:
            tensor = getattr(tensor, name)(*args)
    return tensor


def _dtype(name: str) -> Any:
    import torch  # only a cast needs it; everything else here works without

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise GeometryError(f"{name!r} is not a dtype of torch")
    return dtype
