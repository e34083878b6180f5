"""The closed list of torch functions that work on stand-ins, as steps on chains of view ops.

Chains come out canonical: dimensions and starts not negative, `view` and `flatten` as `reshape`, `chunk`, `split` and
`unbind` as `narrow` and `select`, basic indices as single steps, casts after all views. Torch itself computes each
shape and decides which views are allowed, on the stand-in's meta twin. What is not in here is refused by `standins`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .geometry import Op
from .standins import HANDLERS, StandIn, dtype_name, handles
from .wire import DTYPE_BYTES

# ---- steps: what every handler is made of; each works on one tensor and on a concatenation ----


def _same(x: StandIn, twin: torch.Tensor, **changes: Any) -> StandIn:
    origin = replace(x.origin, **changes) if changes else x.origin
    return StandIn.make(x.recorder, origin, twin, x.device)


def _step(x: StandIn, twin: torch.Tensor, op: Op) -> StandIn:
    return _same(x, twin, views=(*x.origin.views, op))


def _join(parts: Sequence[StandIn], axis: int, twin: torch.Tensor) -> StandIn:
    first = parts[0]
    if len(parts) == 1:
        # The one part that is left still has the strides of the whole, as it would have in torch.
        return StandIn.make(first.recorder, first.origin, twin, first.device, first.parts, first.axis)
    return StandIn.make(first.recorder, first.origin, twin, first.device, tuple(parts), axis)


def _axis(x: StandIn, dim: Any) -> int:
    dim, rank = _int(dim), max(x.twin.dim(), 1)
    if not -rank <= dim < rank:
        raise IndexError(f"dimension {dim} is outside a shape of {x.twin.dim()} axes")
    return dim % rank


def _int(value: Any) -> int:
    if isinstance(value, bool | StandIn):
        raise TypeError(f"{type(value).__name__} where an integer is expected")
    return operator.index(value)


def _ints(values: tuple[Any, ...]) -> tuple[int, ...]:
    if len(values) == 1 and isinstance(values[0], list | tuple):
        values = tuple(values[0])
    return tuple(_int(value) for value in values)


def _narrow(x: StandIn, dim: int, start: int, length: int) -> StandIn:
    twin = x.twin.narrow(dim, start, length)
    size = x.twin.shape[dim]
    start = start + size if start < 0 else start
    if length == size:
        return x
    if not x.parts:
        return _step(x, twin, ("narrow", (dim, start, length)))
    if dim != x.axis:
        return _join([_narrow(part, dim, start, length) for part in x.parts], x.axis, twin)
    kept: list[StandIn] = []
    begin = 0
    for part in x.parts:
        size = part.twin.shape[dim]
        low, high = max(start, begin), min(start + length, begin + size)
        if high > low:
            kept.append(_narrow(part, dim, low - begin, high - low))
        begin += size
    return _join(kept or [_narrow(x.parts[0], dim, 0, 0)], x.axis, twin)


def _select(x: StandIn, dim: int, index: int) -> StandIn:
    twin = x.twin.select(dim, index)
    index %= x.twin.shape[dim]
    if not x.parts:
        return _step(x, twin, ("select", (dim, index)))
    if dim == x.axis:
        return _select(_narrow(x, dim, index, 1), dim, 0)
    return _join([_select(part, dim, index) for part in x.parts], x.axis - (dim < x.axis), twin)


def _unsqueeze(x: StandIn, dim: int) -> StandIn:
    twin = x.twin.unsqueeze(dim)
    if not x.parts:
        return _step(x, twin, ("unsqueeze", (dim,)))
    return _join([_unsqueeze(part, dim) for part in x.parts], x.axis + (dim <= x.axis), twin)


def _permute(x: StandIn, dims: tuple[int, ...]) -> StandIn:
    twin = x.twin.permute(dims)
    dims = tuple(dim % max(len(dims), 1) for dim in dims)
    if dims == tuple(range(len(dims))):
        return x
    if not x.parts:
        return _step(x, twin, ("permute", dims))
    return _join([_permute(part, dims) for part in x.parts], dims.index(x.axis), twin)


def _reshape(x: StandIn, twin: torch.Tensor) -> StandIn:
    if twin.shape == x.twin.shape:
        return x if twin.stride() == x.twin.stride() else _laid_out(x, twin)
    if x.parts:
        raise ValueError("a concatenation keeps its shape; reshape before concatenating")
    return _step(x, twin, ("reshape", tuple(twin.shape)))


def _laid_out(x: StandIn, twin: torch.Tensor) -> StandIn:
    """The same elements in a copy with other strides, which decide what views torch would allow later."""
    return StandIn.make(x.recorder, x.origin, twin, x.device, x.parts, x.axis)


def _cast(x: StandIn, dtype: torch.dtype) -> StandIn:
    if dtype == x.twin.dtype:
        return x
    if (name := dtype_name(dtype)) not in DTYPE_BYTES:
        raise ValueError(f"dtype {name} is not one that travels: {', '.join(DTYPE_BYTES)}")
    twin = x.twin.to(dtype)
    if x.parts:
        return _join([_cast(part, dtype) for part in x.parts], x.axis, twin)
    return _same(x, twin, casts=(*x.origin.casts, name))


def _move(x: StandIn, device: torch.device | str | int) -> StandIn:
    device = torch.device(device)
    if device == x.device:
        return x
    parts = tuple(_move(part, device) for part in x.parts)
    return StandIn.make(x.recorder, x.origin, x.twin, device, parts, x.axis)


# ---- handlers: torch's functions and methods in terms of the steps ----


@handles("narrow")
def _on_narrow(x: StandIn, dim: int, start: int, length: int) -> StandIn:
    return _narrow(x, _axis(x, dim), _int(start), _int(length))


@handles("select")
def _on_select(x: StandIn, dim: int, index: int) -> StandIn:
    return _select(x, _axis(x, dim), _int(index))


@handles("unsqueeze")
def _on_unsqueeze(x: StandIn, dim: int) -> StandIn:
    return _unsqueeze(x, _int(dim) % (x.twin.dim() + 1) if -x.twin.dim() - 1 <= dim <= x.twin.dim() else dim)


@handles("squeeze")
def _on_squeeze(x: StandIn, dim: int | tuple[int, ...] | None = None) -> StandIn:
    if dim is not None:
        x.twin.squeeze(dim)  # torch's own checks, of axes named twice too
    dims = range(x.twin.dim()) if dim is None else dim if isinstance(dim, tuple) else (dim,)
    for axis in sorted({_axis(x, d) for d in dims}, reverse=True):
        if axis < x.twin.dim() and x.twin.shape[axis] == 1:
            x = _select(x, axis, 0)
    return x


@handles("transpose", "swapaxes", "swapdims")
def _on_transpose(x: StandIn, dim0: int, dim1: int) -> StandIn:
    dims = list(range(x.twin.dim()))
    if dims:
        a, b = _axis(x, dim0), _axis(x, dim1)
        dims[a], dims[b] = dims[b], dims[a]
    return _permute(x, tuple(dims))


@handles("T")
def _on_reverse(x: StandIn) -> StandIn:
    return _permute(x, tuple(reversed(range(x.twin.dim()))))


@handles("t")
def _on_t(x: StandIn) -> StandIn:
    if x.twin.dim() > 2:
        raise ValueError(f"t() is for at most 2 axes, not for {x.twin.dim()}")
    return _on_reverse(x)


@handles("mT")
def _on_matrix_transpose(x: StandIn) -> StandIn:
    return _on_transpose(x, -2, -1)


@handles("permute")
def _on_permute(x: StandIn, *dims: Any, **named: Any) -> StandIn:
    return _permute(x, _ints(dims or (named["dims"],)))


@handles("view")
def _on_view(x: StandIn, *shape: Any, **named: Any) -> StandIn:
    shape = shape or tuple(named.values())
    if isinstance(shape[0], torch.dtype):
        if shape[0] == x.twin.dtype:
            return x
        raise ValueError("bytes cannot be seen as another dtype; cast, or declare the tensor with the other dtype")
    return _reshape(x, x.twin.view(_ints(shape)))


@handles("reshape")
def _on_reshape(x: StandIn, *shape: Any, **named: Any) -> StandIn:
    return _reshape(x, x.twin.reshape(_ints(shape or (named["shape"],))))


@handles("view_as")
def _on_view_as(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return x.view(other.shape)


@handles("reshape_as")
def _on_reshape_as(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return x.reshape(other.shape)


@handles("flatten")
def _on_flatten(x: StandIn, start_dim: int = 0, end_dim: int = -1) -> StandIn:
    return _reshape(x, x.twin.flatten(_int(start_dim), _int(end_dim)))


@handles("unflatten")
def _on_unflatten(x: StandIn, dim: int, sizes: Sequence[int]) -> StandIn:
    return _reshape(x, x.twin.unflatten(_int(dim), _ints(tuple(sizes))))


@handles("contiguous")
def _on_contiguous(x: StandIn, memory_format: torch.memory_format = torch.contiguous_format) -> StandIn:
    if memory_format is not torch.contiguous_format:
        raise ValueError(f"memory format {memory_format}")
    return x if x.twin.is_contiguous() else _laid_out(x, x.twin.contiguous())


@handles("clone")
def _on_clone(x: StandIn, *, memory_format: torch.memory_format = torch.preserve_format) -> StandIn:
    return _laid_out(x, x.twin.clone(memory_format=memory_format))


@handles("detach")
def _on_detach(x: StandIn) -> StandIn:
    return x


@handles("requires_grad_")
def _on_requires_grad(x: StandIn, requires_grad: bool = True) -> StandIn:
    if requires_grad:
        raise ValueError("a stand-in takes part in no gradient")
    return x


def _cut(x: StandIn, sizes: Iterable[int], dim: int) -> tuple[StandIn, ...]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(_narrow(x, dim, start, size))
        start += size
    return tuple(pieces)


@handles("chunk")
def _on_chunk(x: StandIn, chunks: int, dim: int = 0) -> tuple[StandIn, ...]:
    dim = _axis(x, dim)
    return _cut(x, [piece.shape[dim] for piece in x.twin.chunk(_int(chunks), dim)], dim)


@handles("tensor_split")
def _on_tensor_split(x: StandIn, indices_or_sections: int | Sequence[int], dim: int = 0) -> tuple[StandIn, ...]:
    dim = _axis(x, dim)
    return _cut(x, [piece.shape[dim] for piece in x.twin.tensor_split(indices_or_sections, dim)], dim)


@handles("split", "split_with_sizes")
def _on_split(x: StandIn, split_size: int | Sequence[int], dim: int = 0) -> tuple[StandIn, ...]:
    dim = _axis(x, dim)
    sizes: Any = [_int(size) for size in split_size] if isinstance(split_size, list | tuple) else _int(split_size)
    return _cut(x, [piece.shape[dim] for piece in x.twin.split(sizes, dim)], dim)


@handles("unbind")
def _on_unbind(x: StandIn, dim: int = 0) -> tuple[StandIn, ...]:
    dim = _axis(x, dim)
    return tuple(_select(x, dim, index) for index in range(x.twin.shape[dim]))


@handles("__getitem__")
def _on_getitem(x: StandIn, index: Any) -> StandIn:
    items = basic_index(index)
    axes = sum(item is not None and item is not Ellipsis for item in items)
    if axes > x.twin.dim():
        raise IndexError(f"{axes} indices for a shape of {x.twin.dim()} axes")
    axis = 0
    for item in items:
        if item is Ellipsis:
            axis += x.twin.dim() - axis - sum(i is not None for i in items[items.index(Ellipsis) + 1 :])
        elif item is None:
            x, axis = _unsqueeze(x, axis), axis + 1
        elif isinstance(item, slice):
            x, axis = _slice(x, axis, item), axis + 1
        else:
            x = _select(x, axis, item)
    return x


def basic_index(index: Any) -> tuple[Any, ...]:
    """Returns an index as a tuple of ints, slices, None and at most one Ellipsis.

    Raises:
        TypeError: masks, index tensors and lists: which elements they take depends on data.
    """
    items: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        if item is None or item is Ellipsis:
            items.append(item)
        elif isinstance(item, slice):
            items.append(slice(*(None if v is None else _int(v) for v in (item.start, item.stop, item.step))))
        elif isinstance(item, torch.Tensor | list | bool):
            raise TypeError(f"an index of type {type(item).__name__}; only ints, slices, None and ... are views")
        else:
            items.append(_int(item))
    if items.count(Ellipsis) > 1:
        raise IndexError("more than one ellipsis")
    return tuple(items)


def _slice(x: StandIn, axis: int, item: slice) -> StandIn:
    start, stop, step = item.indices(x.twin.shape[axis])
    if step == 1:
        return _narrow(x, axis, start, max(stop - start, 0))
    if step < 1:
        raise ValueError("the step of a slice must be positive")
    if x.parts:
        raise ValueError("a concatenation takes no slices with a step")
    index = (slice(None),) * axis + (slice(start, stop, step),)
    encoded = tuple(("slice", s.start, s.stop, s.step) for s in index)
    return _step(x, x.twin[index], ("__getitem__", (encoded,)))


@handles("to")
def _on_to(x: StandIn, *args: Any, copy: bool = False, **kwargs: Any) -> StandIn:
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise ValueError(f"memory format {memory_format}")
    x = x if dtype is None else _cast(x, dtype)
    return x if device is None else _move(x, device)


@handles("type")
def _on_type(x: StandIn, dtype: torch.dtype | None = None, non_blocking: bool = False) -> StandIn | str:
    if dtype is None:
        return x.twin.type().replace("torch.meta.", "torch.")
    if not isinstance(dtype, torch.dtype):
        raise TypeError("type() takes a torch.dtype here")
    return _cast(x, dtype)


@handles("type_as")
def _on_type_as(x: StandIn, other: torch.Tensor) -> StandIn:
    return _move(_cast(x, other.dtype), other.device)


def _caster(dtype: torch.dtype) -> Callable[..., StandIn]:
    return lambda x, memory_format=torch.preserve_format: _cast(x, dtype)


for _name in ("float", "double", "half", "bfloat16", "int", "long", "short", "bool"):
    HANDLERS[getattr(torch.Tensor, _name)] = _caster(getattr(torch, _name))
HANDLERS[torch.Tensor.char], HANDLERS[torch.Tensor.byte] = _caster(torch.int8), _caster(torch.uint8)


@handles("cpu")
def _on_cpu(x: StandIn, memory_format: torch.memory_format = torch.preserve_format) -> StandIn:
    return _move(x, "cpu")


@handles("cuda")
def _on_cuda(x: StandIn, device: Any = None, non_blocking: bool = False) -> StandIn:
    return _move(x, "cuda" if device is None else device)


@handles("cat", "concat", "concatenate")
def _on_cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> StandIn:
    parts = [part for part in tensors if isinstance(part, StandIn)]
    if len(parts) != len(tensors):
        raise TypeError("only stand-ins can be concatenated with a stand-in")
    if len({part.twin.dtype for part in parts}) > 1:
        raise TypeError("the parts of a concatenation have different dtypes")
    return _join(parts, _axis(parts[0], dim), torch.cat([part.twin for part in parts], dim))


@handles("stack")
def _on_stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> StandIn:
    return _on_cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


@handles("__setitem__")
def _on_setitem(destination: torch.Tensor, index: Any, value: torch.Tensor) -> None:
    if isinstance(destination, StandIn) or not isinstance(value, StandIn):
        raise TypeError("a stand-in cannot be written to")
    view = destination[basic_index(index)]
    while value.twin.dim() > view.dim() and value.twin.shape[0] == 1:
        value = _select(value, 0, 0)
    view.copy_(value)


@handles("copy_")
def _on_copy(destination: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(destination, StandIn):
        raise TypeError("a stand-in cannot be written to")
    # On to the dispatcher, where the recorder and any counter that the engine has put on top see the copy.
    with torch._C.DisableTorchFunctionSubclass():
        return destination.copy_(src, non_blocking)
