"""Slices and shards make the plan: the table of byte copies that one engine rank executes at every sync.

`make_plan` resolves what the trace recorded to boxes, intersects them with the shards that the route picked, and turns
the intersections into merged 2-D copies, for all slices at once. Refused: a slice of a tensor that nobody holds, a copy
that changes its number of elements, bytes that leave their destination, and bytes that are written twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .columns import COLUMNS, Columns, find_overlap, merge, run_bytes, sort, to_rows
from .errors import CoverageError
from .geometry import Box, Chain, View, format_chain, resolve, row_major, subtract
from .layout import groups
from .routing import Route, Routing
from .wire import DTYPE_BYTES, TensorMeta

if TYPE_CHECKING:
    from .tracing import Slice, Trace

__all__ = ["COLUMNS", "Columns", "Plan", "Staged", "check_taken", "make_plan", "untaken"]

Array = np.ndarray
TakenBox = tuple[int, Box]

#: most pairs of (slice, shard) that are intersected at once: bounds the memory, not the result
PAIRS_AT_ONCE = 1 << 20


class SizedDestination(Protocol):
    """What planning must know of a destination (see `landing.Destination`)."""

    @property
    def nbytes(self) -> int:
        """Bytes of its storage."""
        ...


@dataclass(frozen=True, slots=True)
class Staged:
    """A slice that cannot land as it travels: its box lands in a staging destination and is replayed from there.

    The reader does `replay(staging.view(box_shape).permute(axes).reshape(shape), rest)` and copies the value into the
    target view. Offsets and strides are in elements; the target's offset counts from the start of its storage.

    Attributes:
        name: checkpoint tensor.
        box: what is transferred of it.
        destination: index of the staging destination, contiguous.
        dtype: of the box on the wire.
        axes, shape, rest: as in `geometry.View`.
        target: index of the destination that the value is copied into.
        target_offset, target_shape, target_strides, target_dtype: the view of it that the loader wrote.
        group: index of the plan's group that the tensor belongs to.
        round: last round that brings bytes of the box.
    """

    name: str
    box: Box
    destination: int
    dtype: str
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    rest: Chain
    target: int
    target_offset: int
    target_shape: tuple[int, ...]
    target_strides: tuple[int, ...]
    target_dtype: str
    group: int
    round: int

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape of the staging destination."""
        return self.box.shape


@dataclass(frozen=True, slots=True)
class Plan:
    """The byte copies of one engine rank.

    Attributes:
        columns: the copies, sorted by round, group, source, destination and destination offset.
        destinations: keys of the trace's destinations that are written, then of the staging destinations.
        destination_nbytes: size of each.
        staged: the slices that are replayed.
        groups: names of the checkpoint tensors by group (see `layout`).
        taken: names that this rank takes at least a part of, in the model's order.
        taken_boxes: what it takes: (index of the tensor, box). A box that is replayed counts as a whole.
        nbytes: bytes that every sync moves.
        bytes_by_source: the same by source rank.
        digest: SHA-256, in hex, over all of this.
    """

    columns: Columns
    destinations: tuple[str, ...]
    destination_nbytes: tuple[int, ...]
    staged: tuple[Staged, ...]
    groups: tuple[tuple[str, ...], ...]
    taken: tuple[str, ...]
    taken_boxes: tuple[TakenBox, ...]
    nbytes: int
    bytes_by_source: Mapping[int, int]
    digest: str

    def describe(self) -> dict[str, Any]:
        """A few numbers for people."""
        rows = int(self.columns.rows.sum())
        return {
            "tensors": len(self.taken),
            "bytes": self.nbytes,
            "copies": len(self.columns),
            "rows": rows,
            "mean_row_bytes": round(self.nbytes / rows) if rows else 0,
            "destinations": sum(1 for key in self.destinations if not key.startswith("staged:")),
            "staged": len(self.staged),
            "staged_bytes": sum(
                size for key, size in zip(self.destinations, self.destination_nbytes, strict=True) if key.startswith("staged:")
            ),
            "groups": len(self.groups),
            "sources": {str(source): nbytes for source, nbytes in sorted(self.bytes_by_source.items())},
            "digest": self.digest,
        }


@dataclass(slots=True)
class _Job:
    """A box that lands in a strided region of a destination."""

    tensor: int
    box: Box
    destination: int
    offset: int  # bytes
    strides: tuple[int, ...]  # bytes, by axis of the box


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Intersections of jobs and shards, as N-D copies; [N] or [N, D] int64."""

    job: Array
    box: Array  # index into the route
    shape: Array
    source_offset: Array  # bytes
    source_strides: Array
    destination_offset: Array
    destination_strides: Array
    item: Array


@dataclass(slots=True)
class _Draft:
    """What is collected while the slices are looked at one by one."""

    routing: Routing
    indices: dict[str, int]
    keys: dict[str, int]
    sizes: list[int]
    jobs: list[_Job] = field(default_factory=list)
    job_slices: list[int] = field(default_factory=list)  # first slice that each job serves
    staging: dict[TakenBox, int] = field(default_factory=dict)  # job number
    replays: list[tuple[int, int, View]] = field(default_factory=list)  # (slice, job, view)

    def stage(self, number: int, tensor: int, view: View) -> None:
        meta = self.routing.tensors[tensor]
        job = self.staging.get((tensor, view.box))
        if job is None:
            item = DTYPE_BYTES[meta.dtype]
            key = f"staged:{len(self.staging)}"
            job = self.staging[(tensor, view.box)] = len(self.jobs)
            self.keys[key] = len(self.sizes)
            self.sizes.append(view.box.numel * item)
            strides = tuple(stride * item for stride in row_major(view.box.shape))
            self.jobs.append(_Job(tensor, view.box, self.keys[key], 0, strides))
            self.job_slices.append(number)
        self.replays.append((number, job, view))


def make_plan(trace: Trace, destinations: Mapping[str, SizedDestination], routing: Routing, route: Route) -> Plan:
    """Makes the plan of one engine rank.

    A slice whose value is a box with permuted axes, in the tensor's own dtype, is copied straight to where the loader
    put it. Others are staged: those with ops to replay, those that change dtype, and those that would travel element
    by element although their owner stores them in longer runs (a transposed copy).

    Args:
        trace: what the engine rank takes.
        destinations: by the keys that the trace recorded, with their sizes.
        routing: all source ranks.
        route: the owners chosen for this reader.

    Raises:
        CoverageError: a slice of a tensor that is not declared; a slice with another number of elements than where it
            lands; a slice that leaves the tensor's shards or its destination; two slices that write the same byte.
        GeometryError: a recorded chain does not fit the declared shape.
    """
    slices = tuple(dict.fromkeys(trace.slices))
    draft = _look_at(slices, destinations, routing, route)
    pieces = _intersect(draft.jobs, routing, route)
    pieces = _stage_scattered(slices, draft, pieces, routing, route)
    _check_covered(draft, pieces, routing, route)

    names = groups([meta.name for meta in routing.tensors])
    group_of = {name: index for index, members in enumerate(names) for name in members}
    tensor_group = np.array([group_of[meta.name] for meta in routing.tensors], np.int64)
    job_tensor = np.array([job.tensor for job in draft.jobs], np.int64)
    job_destination = np.array([job.destination for job in draft.jobs], np.int64)

    rows = to_rows(pieces.shape, pieces.source_strides, pieces.destination_strides, pieces.item)
    job, box = pieces.job[rows.parent], pieces.box[rows.parent]
    columns = Columns(
        source=route.source[box],
        region=route.region[box],
        source_offset=pieces.source_offset[rows.parent] + rows.source_shift,
        source_pitch=rows.source_pitch,
        destination=job_destination[job],
        destination_offset=pieces.destination_offset[rows.parent] + rows.destination_shift,
        destination_pitch=rows.destination_pitch,
        rows=rows.rows,
        row_bytes=rows.row_bytes,
        round=route.round[box],
        group=tensor_group[job_tensor[job]],
    )
    first_slice = np.array(draft.job_slices, np.int64)[job]
    _check_destinations(columns, first_slice, slices, draft, route)

    last_round = np.zeros(len(draft.jobs), np.int64)
    np.maximum.at(last_round, pieces.job, route.round[pieces.box])
    staged = tuple(
        _staged(slices[number], view, draft, draft.jobs[job], group_of, int(last_round[job]))
        for number, job, view in draft.replays
    )
    return _finish(merge(sort(columns)), draft, staged, names, routing)


def _look_at(
    slices: Sequence[Slice], destinations: Mapping[str, SizedDestination], routing: Routing, route: Route
) -> _Draft:
    used = {part.destination for part in slices}
    keys = [key for key in destinations if key in used]
    draft = _Draft(
        routing=routing,
        indices={meta.name: index for index, meta in enumerate(routing.tensors)},
        keys={key: index for index, key in enumerate(keys)},
        sizes=[int(destinations[key].nbytes) for key in keys],
    )
    views: dict[tuple[tuple[int, ...], Chain], tuple[View, tuple[int, ...] | None]] = {}
    for number, part in enumerate(slices):
        tensor = draft.indices.get(part.name)
        if tensor is None:
            raise CoverageError(
                f"{route.reader} wants {part.name!r} for {part.destination!r}, but no source rank declares that tensor; "
                f"known are {len(draft.indices)} names, such as {_sample(draft.indices)}"
            )
        if part.destination not in draft.keys:
            raise CoverageError(f"{route.reader}: {part.name!r} lands in {part.destination!r}, which is no destination")
        if part.dtype not in DTYPE_BYTES:
            raise CoverageError(
                f"{route.reader}: {part.name!r} lands in {part.destination!r} of dtype {part.dtype!r}; known: {', '.join(DTYPE_BYTES)}"
            )
        meta = routing.tensors[tensor]
        found = views.get((meta.shape, part.chain))
        if found is None:
            view = resolve(meta.shape, part.chain)
            found = views[(meta.shape, part.chain)] = (view, _wide(_final_shape(view)))
        view, wide = found
        if _wide(part.shape) != wide:
            raise CoverageError(
                f"{route.reader}: {part.name!r}{format_chain(part.chain)} has shape {_final_shape(view)} and lands in shape "
                f"{part.shape} of {part.destination!r}; a copy that broadcasts or reshapes is refused, write exactly what was taken"
            )
        if 0 in part.shape:
            continue
        if view.direct and part.dtype == meta.dtype:
            item = DTYPE_BYTES[meta.dtype]
            axes = [axis for axis in view.dims() if axis is not None]
            strides = [0] * len(meta.shape)
            for axis, stride in zip(axes, [s for s, n in zip(part.strides, part.shape, strict=True) if n != 1], strict=True):
                strides[axis] = stride * item
            draft.jobs.append(_Job(tensor, view.box, draft.keys[part.destination], part.offset * item, tuple(strides)))
            draft.job_slices.append(number)
        else:
            draft.stage(number, tensor, view)
    return draft
