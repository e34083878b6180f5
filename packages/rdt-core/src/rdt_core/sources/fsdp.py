"""Which boxes of a parameter lie in this rank's memory: plain tensors, DTensors (FSDP2, HSDP, TP), FSDP1's flat shards.

Integer arithmetic on placements and shapes, done once, without a collective. What is refused: partial sums, memory
that is only temporarily unsharded, FSDP1 without `use_orig_params`, and layouts whose local shape is not what the
placements say.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from ..errors import SourceError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A box of a parameter and where it lies in the local tensor.

    Attributes:
        offset: of the box, in elements of the parameter.
        shape: of the box.
        start: elements from the local tensor's first element to the box's.
        strides: elements, in the local tensor's memory.
    """

    offset: Shape
    shape: Shape
    start: int
    strides: Shape


def row_major(shape: Sequence[int]) -> Shape:
    """Returns the strides, in elements, of a contiguous tensor."""
    strides = [1] * len(shape)
    for axis in reversed(range(len(shape) - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def split(runs: Sequence[tuple[int, int]], count: int, index: int) -> list[tuple[int, int]]:
    """Returns the chunk `index` of `count` of an axis, chunked as `torch.chunk` does.

    Args:
        runs: (first, end) of the stretches of the axis that are to be chunked, in the order in which they lie.
        count: number of chunks.
        index: which chunk.
    """
    total = sum(end - first for first, end in runs)
    size = -(-total // count)
    low, high = min(index * size, total), min((index + 1) * size, total)
    chunk = []
    at = 0
    for first, end in runs:
        start, stop = max(low, at), min(high, at + end - first)
        if start < stop:
            chunk.append((first + start - at, first + stop - at))
        at += end - first
    return chunk


def axis_runs(size: int, shardings: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Returns the stretches of an axis that a rank holds, in the order in which they lie in its memory.

    Args:
        size: of the axis.
        shardings: (count, index, split factor), one for each mesh axis that shards this axis, in mesh order. A split
            factor above 1 chunks the axis into that many pieces first and takes the same chunk of every piece.
    """
    runs = [(0, size)] if size else []
    for count, index, factor in shardings:
        runs = [run for piece in range(factor) for run in split(split(runs, factor, piece), count, index)]
    return runs


def held_whole(tensor: torch.Tensor) -> tuple[Held, ...]:
    """Returns the one box of a tensor that lies whole in this rank's memory; none if it has no elements."""
    if tensor.numel() == 0:
        return ()
    return (Held(offset=(0,) * tensor.ndim, shape=tuple(tensor.shape), start=0, strides=tuple(tensor.stride())),)


def _imported(module: str, name: str) -> type[Any] | None:
    """Returns a class if its module is imported already: only then can there be objects of it.

    Importing them takes seconds, which a trainer of a plain module should not pay.
    """
    return getattr(sys.modules.get(module), name, None)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a DTensor."""
    kind = _imported("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def held_dtensor(name: str, tensor: Any) -> tuple[Held, ...]:
    """Returns the boxes of a DTensor that this rank holds, as they lie in its local tensor.

    Args:
        name: for errors.
        tensor: a `torch.distributed.tensor.DTensor` of any mesh, with placements Shard, _StridedShard or Replicate.

    Raises:
        SourceError: a partial sum or an unknown placement, or a local tensor of another shape than these give.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    shape = tuple(tensor.shape)
    shardings: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if placement.is_partial() or dim is None:
            raise SourceError(
                f"parameter {name!r} has placement {placement!r} on axis {axis} of its mesh: only Shard and "
                f"Replicate hold values that can be read; redistribute it to Shard or Replicate first"
            )
        factor = int(getattr(placement, "split_factor", 1))
        shardings[dim % len(shape)].append((mesh.size(axis), coordinate[axis], factor))
    runs = [axis_runs(size, sharding) for size, sharding in zip(shape, shardings, strict=True)]
    local = local_tensor(tensor)
    expected = tuple(sum(end - first for first, end in axis) for axis in runs)
    if 0 in expected and local.numel() == 0:
        return ()
    if tuple(local.shape) != expected:
        raise SourceError(
            f"parameter {name!r} of shape {shape} with placements {tensor.placements} has a local tensor of shape "
            f"{tuple(local.shape)} at mesh coordinate {tuple(coordinate)}; expected {expected}. Shard it by "
            f"fully_shard, parallelize_module or distribute_tensor"
        )
    placed = [_placed(axis) for axis in runs]
    strides = tuple(local.stride())
    return tuple(
        Held(
            offset=tuple(run[0] for run in box),
            shape=tuple(run[1] for run in box),
            start=sum(run[2] * stride for run, stride in zip(box, strides, strict=True)),
            strides=strides,
        )
        for box in product(*placed)
    )


def _placed(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Returns (first, size, where it lies in the local tensor) of each stretch of an axis."""
    placed = []
    at = 0
    for first, end in runs:
        placed.append((first, end - first, at))
        at += end - first
    return placed


def local_tensor(tensor: Any) -> torch.Tensor:
    """Returns the local part of a DTensor, detached and sharing its memory."""
    with torch.no_grad():
        return tensor.to_local().detach()


def held_flat(shape: Shape, first: int, end: int) -> tuple[Held, ...]:
    """Returns the boxes that the elements `first` to `end` of a flattened tensor make up, as few as possible.

    At most two for each axis: what is left of a row, whole rows, and the beginning of a row. `start` counts from the
    element `first`.
    """
    if first >= end:
        return ()
    if not shape:
        return (Held(offset=(), shape=(), start=0, strides=()),)
    strides = row_major(shape)
    boxes: list[Held] = []

    def take(prefix: Shape, low: int, high: int, base: int) -> None:
        axis = len(prefix)
        inner = strides[axis]
        low_row, low_rest = divmod(low, inner)
        high_row, high_rest = divmod(high, inner)
        if low_row == high_row and low_rest:
            take((*prefix, low_row), low_rest, high_rest, base + low_row * inner)
            return
        if low_rest:
            take((*prefix, low_row), low_rest, inner, base + low_row * inner)
            low_row += 1
        if low_row < high_row:
            boxes.append(
                Held(
                    offset=(*prefix, low_row, *((0,) * (len(shape) - axis - 1))),
                    shape=(*((1,) * axis), high_row - low_row, *shape[axis + 1 :]),
                    start=base + low_row * inner - first,
                    strides=strides,
                )
            )
        if high_rest:
            take((*prefix, high_row), 0, high_rest, base + high_row * inner)

    take((), first, end, 0)
    return tuple(boxes)


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """An original parameter of FSDP1 inside its flat parameter."""

    handle: Any  # torch.distributed.fsdp._flat_param.FlatParamHandle
    shape: Shape
    first: int  # element of the flattened parameter where this rank's range starts
    count: int  # elements of the range
    at: int  # element of the local shard where the range lies

    def held(self) -> tuple[Held, ...]:
        """The boxes of the parameter that this rank holds."""
        return held_flat(self.shape, self.first, self.first + self.count)

    def local(self, name: str) -> torch.Tensor:
        """Returns the range, 1-D, sharing the flat parameter's memory.

        Raises:
            SourceError: the flat parameter is unsharded.
        """
        flat = self.handle.flat_param
        if not self.handle.is_sharded(flat):
            raise SourceError(
                f"parameter {name!r} is unsharded: its FSDP module holds all-gathered copies that do not last. Publish "
                f"after the backward pass, outside summon_full_params, or reshard the module first"
            )
        return flat.detach()[self.at : self.at + self.count]


def flat_parameters(module: nn.Module) -> dict[tuple[int, str], FlatParameter]:
    """Returns every original parameter that FSDP1 flattened, by (id of its module, its name in it).

    Raises:
        SourceError: FSDP1 without `use_orig_params`, or a parameter that it flattened out of row-major order.
    """
    kind = _imported("torch.distributed.fsdp", "FullyShardedDataParallel")
    if kind is None:
        return {}
    found: dict[tuple[int, str], FlatParameter] = {}
    for path, child in module.named_modules():
        if not isinstance(child, kind):
            continue
        handle = child._handle
        if handle is None:
            continue
        if not handle._use_orig_params:
            raise SourceError(
                f"the FSDP module {path or 'at the root'!r} keeps no original parameters, so that its shards have no "
                f"names; wrap it with FullyShardedDataParallel(..., use_orig_params=True), or use fully_shard (FSDP2)"
            )
        flat = handle.flat_param
        if not handle.uses_sharded_strategy:
            continue  # NO_SHARD: the parameters are whole
        for index, (info, shape) in enumerate(zip(flat._param_infos, flat._shapes, strict=True)):
            if not flat._contiguities[index]:
                raise SourceError(
                    f"FSDP flattened {flat._fqns[index]!r} of {path!r} with strides {flat._strides[index]}; make the "
                    f"parameter contiguous before it is wrapped"
                )
            shard = flat._shard_param_infos[index]
            found[id(info.module), info.param_name] = FlatParameter(
                handle=handle,
                shape=tuple(shape),
                first=shard.intra_param_start_idx or 0,
                count=shard.numel_in_shard or 0,
                at=shard.offset_in_shard or 0,
            )
        for shared in flat._shared_param_infos:
            found[id(shared.module), shared.param_name] = found[id(shared.prim_module), shared.prim_param_name]
    return found


def sharded_groups(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (path, parameter group) for each parameter group of each FSDP2 module below `module`."""
    kind = _imported("torch.distributed.fsdp", "FSDPModule")
    if kind is None:
        return
    for path, child in module.named_modules():
        if isinstance(child, kind):
            state: Any = child._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group]
            for group in groups:
                if group is not None:
                    yield path, group


def check_sharded(groups: Sequence[tuple[str, Any]]) -> None:
    """Refuses FSDP2 modules whose parameters are all-gathered copies at the moment.

    Raises:
        SourceError: names the first such module.
    """
    for path, group in groups:
        if not group.is_sharded:
            raise SourceError(
                f"the FSDP module {path or 'at the root'!r} is unsharded: its parameters are all-gathered copies that "
                f"do not last. Call reshard() on it before publish (a forward pass without a backward pass leaves the "
                f"root unsharded)"
            )
