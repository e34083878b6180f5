"""Boxes that are wanted, cut along the shards that hold them: strided N-D copies, for all boxes at once.

Candidates are found by binary search along the axis that a tensor is split on, then intersected exactly, in numpy.
Nothing is refused: whether the pieces make up the boxes is for `planning` to check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .geometry import Box
from .routing import Route, Routing
from .wire import DTYPE_BYTES

Array = np.ndarray

#: most pairs of (box, shard) that are intersected at once: bounds the memory, not the result
PAIRS_AT_ONCE = 1 << 20


@dataclass(slots=True)
class Job:
    """A box that lands in a strided region of a destination."""

    tensor: int
    box: Box
    destination: int
    offset: int  # bytes
    strides: tuple[int, ...]  # bytes, by axis of the box


@dataclass(frozen=True, slots=True)
class Pieces:
    """Intersections of jobs and shards, as N-D copies; [N] or [N, D] int64."""

    job: Array
    box: Array  # index into the route
    shape: Array
    source_offset: Array  # bytes
    source_strides: Array
    destination_offset: Array
    destination_strides: Array
    item: Array


def padded(rows: Sequence[Sequence[int]], width: int, fill: int) -> Array:
    """[N, width] int64: the rows, each filled up at its end."""
    return np.array([(*row, *(fill,) * (width - len(row))) for row in rows], np.int64).reshape(len(rows), width)


def intersect(jobs: Sequence[Job], routing: Routing, route: Route) -> Pieces:
    """Every job's box with every shard of its tensor that shares elements with it."""
    width = route.offset.shape[1]
    tensor = np.array([job.tensor for job in jobs], np.int64)
    low = padded([job.box.offset for job in jobs], width, 0)
    high = low + padded([job.box.shape for job in jobs], width, 1)
    base = np.array([job.offset for job in jobs], np.int64)
    pitch = padded([job.strides for job in jobs], width, 0)
    item = np.array([DTYPE_BYTES[meta.dtype] for meta in routing.tensors], np.int64)[tensor]
    first, last = _candidates(route, tensor, low, high)
    counts = np.maximum(last - first, 0)
    ends = np.cumsum(counts)
    parts: list[Pieces] = []
    start = 0
    while start < len(jobs):
        done = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + PAIRS_AT_ONCE, side="right")))
        number = counts[start:stop]
        job = np.repeat(np.arange(start, stop), number)
        box = np.arange(len(job)) - np.repeat(np.cumsum(number) - number, number) + first[job]
        begin = np.maximum(low[job], route.offset[box])
        shape = np.minimum(high[job], route.offset[box] + route.shape[box]) - begin
        meet = (shape > 0).all(axis=1)
        job, box, begin, shape = job[meet], box[meet], begin[meet], shape[meet]
        strides = route.stride[box] * item[job][:, None]
        parts.append(
            Pieces(
                job=job,
                box=box,
                shape=shape,
                source_offset=route.byte_offset[box] + ((begin - route.offset[box]) * strides).sum(axis=1),
                source_strides=strides,
                destination_offset=base[job] + ((begin - low[job]) * pitch[job]).sum(axis=1),
                destination_strides=pitch[job],
                item=item[job],
            )
        )
        start = stop
    if len(parts) == 1:
        return parts[0]
    none = np.zeros(0, np.int64)
    flat = np.zeros((0, width), np.int64)
    parts = parts or [Pieces(none, none, flat, none, flat, none, flat, none)]
    return Pieces(*(np.concatenate([getattr(part, name) for part in parts]) for name in Pieces.__slots__))


def _candidates(route: Route, tensor: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """The stretch of the route's boxes that can meet each job: exact where a tensor is split along one axis only."""
    axis = route.axis[route.tensor]
    every = np.arange(len(route.tensor))
    starts = route.offset[every, axis]
    stops = starts + route.shape[every, axis]
    # tensors on one line, each on a stretch of its own that no offset or end leaves
    length = np.ones(len(route.axis), np.int64)
    np.maximum.at(length, route.tensor, stops + 1)
    begin = np.cumsum(length) - length
    line = begin[route.tensor]
    reach = np.maximum.accumulate(line + stops)
    along = route.axis[tensor]
    mine = np.arange(len(tensor))
    first = np.searchsorted(reach, begin[tensor] + low[mine, along], side="right")
    last = np.searchsorted(line + starts, begin[tensor] + high[mine, along], side="left")
    return first, last
