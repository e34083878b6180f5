"""Batched byte copies inside what one process can address: local memory, and memory of others mapped into it.

A program is made once from `Copies` (views, widths and batches are chosen then) and run as often as wanted. On a CPU
`run` returns when the bytes have moved; on CUDA it enqueues on the current stream. The caller may name the engine that
copies between CUDA memory; one that cannot work here is an error. Refuses copies out of bounds.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from operator import setitem
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from ..errors import TransportError
from . import gathering, ranges
from .base import Copies

log = logging.getLogger(__name__)

#: How bytes move between CUDA memory: `gather` is the kernel of `gathering`, `foreach` torch's batched copy.
Engine: TypeAlias = Literal["foreach", "gather"]

_WIDTHS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
#: bytes below which the lower cost of a memory view (0.2 us, an array 0.3 us) beats torch's threads (1 us) on a CPU
_SMALL = 256 << 10
_SET: Callable[[Any, Any, Any], None] = setitem
#: rows up to which a strided copy is cheaper on CUDA as batched rows (0.46 us a piece) than as a kernel of its own
_FEW_ROWS = 8


class CopyProgram:
    """Copies between byte tensors, prepared once.

    Args:
        copies: what to copy.
        sources: 1-D uint8 tensors by region id.
        destinations: 1-D uint8 tensors, indexed by `copies.destination`.
        where: names the copies in errors.
        engine: between CUDA memory; default: `default_engine()`. Without effect where a side lies on a CPU.
        far: whether the sources are another GPU's memory, opened for this one.

    Raises:
        TransportError: a copy leaves its source or destination, or the engine cannot work here.
    """

    def __init__(
        self,
        copies: Copies,
        sources: Mapping[int, torch.Tensor],
        destinations: Sequence[torch.Tensor],
        where: str = "local copies",
        *,
        engine: Engine | None = None,
        far: bool = False,
    ) -> None:
        if engine is not None and engine not in get_args(Engine):
            raise TransportError(f"{where}: no copy engine is named {engine!r}; known: {', '.join(get_args(Engine))}")
        ranges.check(
            copies,
            {region: tensor.numel() for region, tensor in sources.items()},
            [tensor.numel() for tensor in destinations],
            where,
        )
        self.nbytes = copies.nbytes
        self._lines: tuple[list[memoryview], list[memoryview]] = ([], [])
        self._blocks: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        self._torch: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._batches: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._gathered: list[gathering.GatherProgram] = []
        if not len(copies):
            return
        gathered: dict[torch.device, list[tuple[int, ...]]] = {}
        batches: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        arrays: dict[int, np.ndarray] = {}
        for region, offset, pitch, index, to, to_pitch, count, nbytes in _compact(copies):
            source, destination = sources[region], destinations[index]
            on_cpu = source.device.type == destination.device.type == "cpu"
            if on_cpu and count * nbytes <= _SMALL:
                written = _array(arrays, destination, to, to_pitch, count, nbytes)
                read = _array(arrays, source, offset, pitch, count, nbytes)
                if count == 1:
                    self._lines[0].append(written.data)
                    self._lines[1].append(read.data)
                else:
                    self._blocks[0].append(written)
                    self._blocks[1].append(read)
                continue
            if _engine(source, destination, engine) == "gather":
                row = (region, offset, pitch, index, to, to_pitch, count, nbytes)
                gathered.setdefault(destination.device, []).append(row)
                continue
            width, dtype = _width(source, offset, destination, to, pitch, to_pitch, count, nbytes)
            pieces = [(offset, to, count)]
            batched = source.device == destination.device and not on_cpu and count <= _FEW_ROWS
            if batched:
                pieces = [(offset + row * pitch, to + row * to_pitch, 1) for row in range(count)]
            for start, end, height in pieces:
                left = _view(destination, end, to_pitch, height, nbytes, width, dtype)
                right = _view(source, start, pitch, height, nbytes, width, dtype)
                if batched:
                    into, out = batches.setdefault((source.device, dtype), ([], []))
                    into.append(left)
                    out.append(right)
                else:
                    self._torch.append((left, right))
        self._batches = list(batches.values())
        self._gathered = [_gather(device, rows, sources, destinations, where, far) for device, rows in gathered.items()]

    def run(self) -> None:
        """Copies. On CUDA the work is queued on the current stream of the destinations' device."""
        # loops in C: there may be tens of thousands
        deque(map(_SET, self._lines[0], repeat(slice(None)), self._lines[1]), maxlen=0)
        deque(map(_SET, self._blocks[0], repeat(...), self._blocks[1]), maxlen=0)
        for left, right in self._torch:
            left.copy_(right, non_blocking=True)
        for lefts, rights in self._batches:
            torch._foreach_copy_(lefts, rights)
        for program in self._gathered:
            program.run()


@lru_cache(maxsize=1)
def default_engine() -> Engine:
    """`gather` wherever Triton is installed: it is faster for pieces of every size, and most for the smallest."""
    reason = gathering.unavailable()
    if reason is None:
        return "gather"
    log.warning(
        "copies between CUDA memory are made by torch, small pieces several times slower than could be: %s", reason
    )
    return "foreach"


def _engine(source: torch.Tensor, destination: torch.Tensor, wanted: Engine | None) -> Engine:
    if not source.device.type == destination.device.type == "cuda":
        return "foreach"
    return wanted or default_engine()


def _gather(
    device: torch.device,
    rows: list[tuple[int, ...]],
    sources: Mapping[int, torch.Tensor],
    destinations: Sequence[torch.Tensor],
    where: str,
    far: bool,
) -> gathering.GatherProgram:
    """Makes the kernel's program for rows as from `_compact`, all into memory of `device`."""
    region, offset, pitch, index, to, to_pitch, count, nbytes = np.array(rows, dtype=np.int64).T
    used, written = sorted(set(region.tolist())), sorted(set(index.tolist()))
    read_from = np.array([sources[one].data_ptr() for one in used], dtype=np.int64)
    written_to = np.array([destinations[one].data_ptr() for one in written], dtype=np.int64)
    spans = gathering.Spans(
        source=read_from[np.searchsorted(used, region)] + offset,
        destination=written_to[np.searchsorted(written, index)] + to,
        source_pitch=pitch,
        destination_pitch=to_pitch,
        rows=count,
        row_bytes=nbytes,
    )
    return gathering.GatherProgram(
        spans, device, [sources[one] for one in used], [destinations[one] for one in written], where,
        instances=gathering.far_instances(device) if far else 0,
    )  # fmt: skip


def _compact(copies: Copies) -> list[tuple[int, ...]]:
    """Copies as tuples of the columns; rows that touch on both sides become one, and so do neighbours of one row."""
    dense = (copies.source_pitch == copies.row_bytes) & (copies.destination_pitch == copies.row_bytes)
    nbytes = np.where(dense, copies.rows * copies.row_bytes, copies.row_bytes)
    count = np.where(dense, 1, copies.rows)
    first = ranges.starts(
        copies.source_region, copies.source_offset, copies.destination, copies.destination_offset, nbytes, count == 1
    )
    columns = (
        copies.source_region, copies.source_offset, copies.source_pitch, copies.destination,
        copies.destination_offset, copies.destination_pitch, count,
    )  # fmt: skip
    lists = [column[first].tolist() for column in columns]
    return list(zip(*lists, np.add.reduceat(nbytes, first).tolist(), strict=True))


def _width(
    source: torch.Tensor,
    offset: int,
    destination: torch.Tensor,
    to: int,
    pitch: int,
    to_pitch: int,
    count: int,
    nbytes: int,
) -> tuple[int, torch.dtype]:
    """The widest integer that both sides can be read as: address, place in the storage, pitch and length allow it."""
    common = nbytes
    for tensor, start in ((source, offset), (destination, to)):
        common |= (tensor.data_ptr() + start) | (int(tensor.storage_offset()) + start)
    if count > 1:
        common |= pitch | to_pitch
    for width, dtype in _WIDTHS:
        if common % width == 0:
            return width, dtype
    raise AssertionError("every number is a multiple of 1")


def _view(
    tensor: torch.Tensor, offset: int, pitch: int, count: int, nbytes: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    line = tensor[offset : offset + nbytes]
    if count == 1:
        return line.view(dtype)
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(
        tensor.untyped_storage(), line.storage_offset() // width, (count, nbytes // width), (pitch // width, 1)
    )


def _array(
    arrays: dict[int, np.ndarray], tensor: torch.Tensor, offset: int, pitch: int, count: int, nbytes: int
) -> np.ndarray:
    base = arrays.get(id(tensor))
    if base is None:
        base = arrays[id(tensor)] = tensor.detach().numpy()
    if count == 1:
        return base[offset : offset + nbytes]
    return np.lib.stride_tricks.as_strided(base[offset:], (count, nbytes), (pitch, 1))
