"""What each view op does to a strided view: stride arithmetic in integers, and the closed list of ops.

A `Strided` is a view of the virtual row-major array that a checkpoint tensor is taken for. An op gives the next one, or
None where the value is no view of that array any more (a reshape that copies, a step, a cast). Refused: ops outside
`OPS`, and arguments that do not fit the shape they are applied to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from .errors import GeometryError
from .wire import DTYPE_BYTES, MAX_AXES, MAX_BYTES

#: One view op: its name and the positional arguments after the tensor. A slice inside the arguments is written
#: `("slice", start, stop, step)`; ints, None and Ellipsis stand for themselves.
Op = tuple[str, tuple[Any, ...]]
Chain = tuple[Op, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Strided:
    """A strided view of the virtual row-major array, in elements. Strides mean nothing where the view is empty."""

    offset: int
    shape: Shape
    strides: Shape

    def narrowed(self, dim: int, start: int, length: int) -> Strided:
        """`length` positions from `start` along axis `dim`."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return Strided(self.offset + start * self.strides[dim], shape, self.strides)

    def selected(self, dim: int, index: int) -> Strided:
        """Position `index` along axis `dim`, which goes away."""
        return self.narrowed(dim, index, 1).without((dim,))

    def without(self, dims: Collection[int]) -> Strided:
        """Without the axes `dims`."""
        return self.ordered([axis for axis in range(len(self.shape)) if axis not in dims])

    def ordered(self, dims: Sequence[int]) -> Strided:
        """The axes `dims`, in that order, and no others."""
        return Strided(self.offset, tuple(self.shape[d] for d in dims), tuple(self.strides[d] for d in dims))

    def unsqueezed(self, dim: int) -> Strided:
        """With one more axis of size 1 before axis `dim`. Raises GeometryError beyond what torch can have."""
        if len(self.shape) >= MAX_AXES:
            raise GeometryError(f"a tensor of {len(self.shape)} axes gets no more")
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        return Strided(self.offset, shape, (*self.strides[:dim], 0, *self.strides[dim:]))

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

    def reshaped(self, shape: Shape) -> Strided | None:
        """The same elements in another shape, or None where no strides can say that without a copy."""
        if 0 in shape:
            return Strided(self.offset, shape, row_major(shape))
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
        return Strided(self.offset, shape, tuple(strides))


def row_major(shape: Sequence[int]) -> Shape:
    """The strides, in elements, of a contiguous tensor of this shape."""
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def ints(name: str, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Arguments that may come one by one or as one sequence."""
    if len(args) == 1 and isinstance(args[0], (tuple, list)):
        args = tuple(args[0])
    if not all(map(_is_int, args)):
        raise GeometryError(f"{name} takes ints, found {args}")
    if len(args) > MAX_AXES:
        raise GeometryError(f"{name} takes at most {MAX_AXES} ints, found {len(args)}")
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


def _narrow(state: Strided, args: tuple[Any, ...]) -> Strided:
    dim, start, length = _fixed("narrow", args, 3, 3)
    dim = _dim("narrow", dim, len(state.shape))
    size = state.shape[dim]
    first = start + size if start < 0 else start
    if not 0 <= first <= size or length < 0 or first + length > size:
        raise GeometryError(f"narrow: {length} elements from {start} leave axis {dim} of {size}")
    return state.narrowed(dim, first, length)


def _select(state: Strided, args: tuple[Any, ...]) -> Strided:
    dim, index = _fixed("select", args, 2, 2)
    dim = _dim("select", dim, len(state.shape))
    return state.selected(dim, _index("select", index, dim, state.shape[dim]))


def _index(name: str, index: int, dim: int, size: int) -> int:
    if not -size <= index < size:
        raise GeometryError(f"{name}: index {index} is out of range for axis {dim} of {size}")
    return index % size


def _new_shape(name: str, shape: Shape, args: tuple[Any, ...]) -> Shape:
    wanted = ints(name, args)
    numel, known = prod(shape), prod(size for size in wanted if size != -1)
    if any(size < -1 for size in wanted) or wanted.count(-1) > 1 or prod(abs(size) or 1 for size in wanted) > MAX_BYTES:
        raise GeometryError(f"{name}: {wanted} is not a shape")
    if -1 in wanted:
        if known == 0 or numel % known:
            raise GeometryError(f"{name}: {numel} elements do not fit the shape {wanted}")
        return tuple(numel // known if size == -1 else size for size in wanted)
    if known != numel:
        raise GeometryError(f"{name}: {numel} elements do not fit the shape {wanted}")
    return wanted


def _reshape(state: Strided, args: tuple[Any, ...]) -> Strided | None:
    return state.reshaped(_new_shape("reshape", state.shape, args))


def _flat_shape(shape: Shape, args: tuple[Any, ...]) -> Shape:
    given = _fixed("flatten", args, 0, 2)
    rank = len(shape)
    first = _dim_or_scalar("flatten", given[0] if given else 0, rank)
    last = _dim_or_scalar("flatten", given[1] if len(given) == 2 else -1, rank)
    if first > last:
        raise GeometryError(f"flatten: the first dimension {first} comes after the last, {last}")
    return (*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :])


def _flatten(state: Strided, args: tuple[Any, ...]) -> Strided | None:
    return state.reshaped(_flat_shape(state.shape, args))


def _unsqueeze(state: Strided, args: tuple[Any, ...]) -> Strided:
    (dim,) = _fixed("unsqueeze", args, 1, 1)
    return state.unsqueezed(_dim("unsqueeze", dim, len(state.shape) + 1))


def _squeeze(state: Strided, args: tuple[Any, ...]) -> Strided:
    rank = len(state.shape)
    dims = [_dim_or_scalar("squeeze", dim, rank) for dim in ints("squeeze", args)] if args else [*range(rank)]
    if len(set(dims)) < len(dims):
        raise GeometryError(f"squeeze: {args} names an axis twice")
    return state.without([dim for dim in dims if dim < rank and state.shape[dim] == 1])


def _transpose(state: Strided, args: tuple[Any, ...]) -> Strided:
    rank = len(state.shape)
    first, second = (_dim_or_scalar("transpose", dim, rank) for dim in _fixed("transpose", args, 2, 2))
    order = list(range(rank))
    if rank:
        order[first], order[second] = order[second], order[first]
    return state.ordered(order)


def _t(state: Strided, args: tuple[Any, ...]) -> Strided:
    _fixed("t", args, 0, 0)
    if len(state.shape) > 2:
        raise GeometryError(f"t takes a tensor of at most 2 axes, found shape {state.shape}")
    return state.ordered(range(len(state.shape))[::-1])


def _permute(state: Strided, args: tuple[Any, ...]) -> Strided:
    rank = len(state.shape)
    dims = [_dim("permute", dim, rank) for dim in ints("permute", args)]
    if sorted(dims) != list(range(rank)):
        raise GeometryError(f"permute: {args} is not an order of {rank} axes")
    return state.ordered(dims)


def _contiguous(state: Strided, args: tuple[Any, ...]) -> Strided:
    # the elements and their order stay; a later view of the copy is `reshaped`, which ends the prefix if it must
    _fixed("contiguous", args, 0, 0)
    return state


def _to(state: Strided, args: tuple[Any, ...]) -> None:
    if len(args) != 1 or not isinstance(args[0], str):
        raise GeometryError(f"to takes the name of a dtype, found {args}")
    if args[0] not in DTYPE_BYTES:
        raise GeometryError(f"to: {args[0]!r} is not a dtype that travels; known: {', '.join(DTYPE_BYTES)}")


def is_slice(item: Any) -> bool:
    """Whether an index item is an encoded slice, `("slice", start, stop, step)`."""
    return isinstance(item, tuple) and len(item) == 4 and item[0] == "slice"


def index_items(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The index items of `__getitem__`, whether recorded one by one or as the one tuple that Python hands over."""
    if len(args) == 1 and isinstance(args[0], tuple) and not is_slice(args[0]):
        return args[0]
    return args


def _getitem(state: Strided, args: tuple[Any, ...]) -> Strided | None:
    items = index_items(args)
    for item in items:
        if not (item is None or item is Ellipsis or _is_int(item) or is_slice(item)):
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


class _Stepped(Strided):
    """A state of which only the shape is right, because a slice with a step was taken."""

    __slots__ = ()


def _bounds(item: tuple[Any, ...], size: int) -> tuple[int, int, int]:
    """First index, number of elements and step of an encoded slice on an axis of `size`."""
    if not all(value is None or _is_int(value) for value in item[1:]):
        raise GeometryError(f"a slice takes ints or None, found {item}")
    if item[3] is not None and not 0 < item[3] < 1 << 31:  # torch multiplies it with strides
        raise GeometryError(f"a slice takes a step of at least 1 and below 2**31, found {item}")
    first, last, width = slice(*item[1:]).indices(size)
    return (min(first, size), max(-((first - last) // width), 0), width)


_STEPS: dict[str, Callable[[Strided, tuple[Any, ...]], Strided | None]] = {
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


def check_op(op: Op) -> Op:
    """Returns `op` if it is a name out of `OPS` and a tuple of arguments; raises GeometryError else."""
    if not (isinstance(op, tuple) and len(op) == 2 and isinstance(op[0], str) and isinstance(op[1], tuple)):
        raise GeometryError(f"an op is a name and a tuple of arguments, found {op!r}")
    if op[0] not in OPS:
        raise GeometryError(f"{op[0]!r} is not a view op; known: {', '.join(sorted(OPS))}")
    return op


def step(state: Strided, op: Op) -> Strided | None:
    """The state after one op, or None where it is not strided over the array any more."""
    name, args = check_op(op)
    after = _STEPS[name](state, args)
    return None if isinstance(after, _Stepped) else after


def op_shape(shape: Sequence[int], op: Op) -> Shape:
    """The shape after one op, as torch gives it.

    Raises:
        GeometryError: the op is not in `OPS`, or its arguments do not fit `shape`.
    """
    name, args = check_op(op)
    before = tuple(shape)
    if name in ("view", "reshape"):
        return _new_shape(name, before, args)
    if name == "flatten":
        return _flat_shape(before, args)
    after = _STEPS[name](Strided(0, before, row_major(before)), args)
    return before if after is None else after.shape
