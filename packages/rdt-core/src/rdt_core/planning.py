"""Slices and shards make the plan: the table of byte copies that one engine rank executes at every sync.

`make_plan` resolves what the trace recorded to boxes, intersects them with the shards that the route picked, and turns
the intersections into merged 2-D copies, for all slices at once. Refused: a slice of a tensor that nobody holds, a copy
that changes its number of elements, bytes that leave their destination, and bytes that are written twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .columns import COLUMNS, Columns, merge, run_bytes, sort, to_rows
from .coverage import TakenBox
from .errors import CoverageError
from .geometry import Box, Chain, View, chain_shape, format_chain, resolve, row_major, subtract
from .overlap import find_overlap
from .pieces import Job, Pieces, intersect, padded
from .routing import Route, Routing
from .wire import DTYPE_BYTES

if TYPE_CHECKING:
    from .tracing import Slice, Trace

__all__ = ["COLUMNS", "Columns", "Plan", "Staged", "make_plan"]

Array = np.ndarray


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
        turns: [groups] when each group is to be read, where they are not all read at once: in the order of the model, or, where
            source ranks hold some groups only (`Routing.is_staged`), in one of the reader's own.
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
    turns: Array
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
                size
                for key, size in zip(self.destinations, self.destination_nbytes, strict=True)
                if key.startswith("staged:")
            ),
            "groups": len(self.groups),
            "sources": {str(source): nbytes for source, nbytes in sorted(self.bytes_by_source.items())},
            "digest": self.digest,
        }


@dataclass(slots=True)
class _Draft:
    """What is collected while the slices are looked at one by one."""

    routing: Routing
    keys: dict[str, int]
    sizes: list[int]
    jobs: list[Job] = field(default_factory=list)
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
            self.jobs.append(Job(tensor, view.box, self.keys[key], 0, strides))
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
    pieces = intersect(draft.jobs, routing, route)
    scattered = _scattered(draft, pieces)
    if scattered:
        draft = _look_at(slices, destinations, routing, route, scattered)
        pieces = intersect(draft.jobs, routing, route)
    _check_covered(draft, pieces, routing, route)

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
        group=routing.tensor_group[job_tensor[job]],
    )
    first_slice = np.array(draft.job_slices, np.int64)[job]
    _check_destinations(columns, first_slice, slices, draft, route)

    last_round = np.zeros(len(draft.jobs), np.int64)
    np.maximum.at(last_round, pieces.job, route.round[pieces.box])
    staged = tuple(
        _staged(slices[number], view, draft, draft.jobs[job], int(last_round[job]))
        for number, job, view in draft.replays
    )
    turns = _turns(len(routing.groups), route.reader_index if routing.is_staged else 0)
    return _finish(merge(sort(columns)), draft, staged, slices, turns)


def _turns(groups: int, reader: int) -> Array:
    """[groups] when a reader comes to each group: reader 0 in the order of the model, others in a scattered one of their own.

    Owners of some layers serve all readers at once where these walk through the model together, while the others' links
    are idle. An order that is only rotated would make readers meet for good that meet once.
    """
    if reader == 0:
        return np.arange(groups)
    # splitmix64: the same on every machine and in every version of numpy
    mixed = np.arange(groups, dtype=np.uint64) + np.uint64(1) + np.uint64(reader % (1 << 32)) * np.uint64(1 << 24)
    with np.errstate(over="ignore"):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return np.argsort(np.argsort(mixed, kind="stable"), kind="stable")


def _look_at(
    slices: Sequence[Slice],
    destinations: Mapping[str, SizedDestination],
    routing: Routing,
    route: Route,
    stage: frozenset[int] = frozenset(),
) -> _Draft:
    """Resolves every slice to a job; `stage` holds the numbers of slices that are to be staged in any case."""
    used = {part.destination for part in slices}
    keys = [key for key in destinations if key in used]
    draft = _Draft(
        routing=routing,
        keys={key: index for index, key in enumerate(keys)},
        sizes=[int(destinations[key].nbytes) for key in keys],
    )
    views: dict[tuple[tuple[int, ...], Chain], tuple[View, tuple[int, ...] | None]] = {}
    for number, part in enumerate(slices):
        tensor = routing.indices.get(part.name)
        if tensor is None:
            raise CoverageError(
                f"{route.reader} wants {part.name!r} for {part.destination!r}, but no source rank declares it; "
                f"closest of {len(routing.indices)} names: "
                + (", ".join(get_close_matches(part.name, routing.indices, 3, 0)) or "none")
            )
        if part.destination not in draft.keys:
            raise CoverageError(f"{route.reader}: {part.name!r} lands in {part.destination!r}, which is no destination")
        if part.dtype not in DTYPE_BYTES:
            raise CoverageError(
                f"{route.reader}: {part.name!r} lands in {part.destination!r} of dtype {part.dtype!r}; "
                f"known: {', '.join(DTYPE_BYTES)}"
            )
        meta = routing.tensors[tensor]
        found = views.get((meta.shape, part.chain))
        if found is None:
            view = resolve(meta.shape, part.chain)
            found = views[(meta.shape, part.chain)] = (view, _wide(_final_shape(view)))
        view, wide = found
        if _wide(part.shape) != wide:
            raise CoverageError(
                f"{route.reader}: {_name(part)} has shape {_final_shape(view)} and lands in shape {part.shape} of "
                f"{part.destination!r}; a copy that broadcasts or reshapes is refused, write exactly what was taken"
            )
        if 0 in part.shape:
            continue
        if view.direct and part.dtype == meta.dtype and number not in stage:
            item = DTYPE_BYTES[meta.dtype]
            axes = [axis for axis in view.dims() if axis is not None]
            strides = [0] * len(meta.shape)
            for axis, stride in zip(
                axes, [s for s, n in zip(part.strides, part.shape, strict=True) if n != 1], strict=True
            ):
                strides[axis] = stride * item
            draft.jobs.append(Job(tensor, view.box, draft.keys[part.destination], part.offset * item, tuple(strides)))
            draft.job_slices.append(number)
        else:
            draft.stage(number, tensor, view)
    return draft


def _name(part: Slice) -> str:
    return repr(part.name) + (format_chain(part.chain) if part.chain else "")


def _final_shape(view: View) -> tuple[int, ...]:
    return chain_shape(view.shape, view.rest)


def _wide(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _scattered(draft: _Draft, pieces: Pieces) -> frozenset[int]:
    """Slices that would travel element by element although their owner has longer runs of them."""
    several = pieces.shape > 1
    runs_at_source = (several & (pieces.source_strides == pieces.item[:, None])).any(axis=1)
    width = run_bytes(pieces.shape, pieces.source_strides, pieces.destination_strides, pieces.item)
    jobs = np.unique(pieces.job[runs_at_source & (width == pieces.item)])
    staging = set(draft.staging.values())
    return frozenset(draft.job_slices[job] for job in jobs.tolist() if job not in staging)


def _check_covered(draft: _Draft, pieces: Pieces, routing: Routing, route: Route) -> None:
    """Each job's box must be met by shards exactly once."""
    found = np.zeros(len(draft.jobs), np.int64)
    np.add.at(found, pieces.job, pieces.shape.prod(axis=1))
    expected = np.array([job.box.numel for job in draft.jobs], np.int64)
    wrong = np.flatnonzero(found != expected)
    if not len(wrong):
        return
    job = draft.jobs[int(wrong[0])]
    meta = routing.tensors[job.tensor]
    shards = [
        Box(tuple(route.offset[i, : len(meta.shape)].tolist()), tuple(route.shape[i, : len(meta.shape)].tolist()))
        for i in range(int(route.starts[job.tensor]), int(route.starts[job.tensor + 1]))
    ]
    missing = subtract(job.box, shards)
    what = f"elements {missing[0]} have no owner" if missing else "elements have more than one owner"
    raise CoverageError(
        f"{route.reader} wants {job.box} of {meta.name!r}, shape {meta.shape}: {what}; "
        f"expected {int(expected[wrong[0]])} elements, found {int(found[wrong[0]])} in {len(shards)} shards"
    )


def _check_destinations(columns: Columns, owner: Array, slices: Sequence[Slice], draft: _Draft, route: Route) -> None:
    """Copies and replays must stay inside their destinations and write each byte at most once."""
    numbers = np.array([number for number, _, _ in draft.replays], np.int64)
    targets = [slices[number] for number in numbers.tolist()]
    width = max([1, *(len(part.shape) for part in targets)])
    item = np.array([DTYPE_BYTES[part.dtype] for part in targets], np.int64)
    strides = padded([part.strides for part in targets], width, 0) * item[:, None]
    rows = to_rows(padded([part.shape for part in targets], width, 1), strides, strides, item)
    keys = np.array([draft.keys[part.destination] for part in targets], np.int64)
    offsets = np.array([part.offset for part in targets], np.int64) * item
    key = np.concatenate([columns.destination, keys[rows.parent]])
    offset = np.concatenate([columns.destination_offset, offsets[rows.parent] + rows.destination_shift])
    pitch = np.concatenate([columns.destination_pitch, rows.destination_pitch])
    count = np.concatenate([columns.rows, rows.rows])
    row_bytes = np.concatenate([columns.row_bytes, rows.row_bytes])
    owner = np.concatenate([owner, numbers[rows.parent]])

    end = offset + (count - 1) * pitch + row_bytes
    outside = np.flatnonzero((offset < 0) | (end > np.array(draft.sizes, np.int64)[key]))
    if len(outside):
        part = slices[int(owner[outside[0]])]
        raise CoverageError(
            f"{route.reader}: {_name(part)} would be written to bytes {int(offset[outside[0]])} to "
            f"{int(end[outside[0]])} of {part.destination!r}, which has {draft.sizes[int(key[outside[0]])]} bytes"
        )
    clash = find_overlap(key, offset, pitch, count, row_bytes)
    if clash is not None:
        one, other = (slices[int(owner[index])] for index in clash)
        raise CoverageError(
            f"{route.reader}: {_name(one)} and {_name(other)} write the same bytes of {one.destination!r}, from byte "
            f"{max(int(offset[index]) for index in clash)} on; the loader must write each byte once, or the source "
            f"must leave one of the two out"
        )


def _staged(part: Slice, view: View, draft: _Draft, job: Job, last_round: int) -> Staged:
    return Staged(
        name=part.name,
        box=view.box,
        destination=job.destination,
        dtype=draft.routing.tensors[job.tensor].dtype,
        axes=view.axes,
        shape=view.shape,
        rest=view.rest,
        target=draft.keys[part.destination],
        target_offset=part.offset,
        target_shape=part.shape,
        target_strides=part.strides,
        target_dtype=part.dtype,
        group=int(draft.routing.tensor_group[job.tensor]),
        round=last_round,
    )


def _finish(
    columns: Columns,
    draft: _Draft,
    staged: tuple[Staged, ...],
    slices: Sequence[Slice],
    turns: Array,
) -> Plan:
    tensors = draft.routing.tensors
    nbytes = columns.rows * columns.row_bytes
    sources, position = np.unique(columns.source, return_inverse=True)
    totals = np.zeros(len(sources), np.int64)
    np.add.at(totals, position, nbytes)
    wanted = {part.name for part in slices}
    taken = tuple(meta.name for meta in tensors if meta.name in wanted)
    boxes = sorted({(job.tensor, job.box.offset, job.box.shape) for job in draft.jobs})
    destinations = tuple(draft.keys)
    head = {
        "destinations": list(zip(destinations, draft.sizes, strict=True)),
        "staged": [repr(entry) for entry in staged],
        "taken": taken,
        "copies": len(columns),
    }
    digest = hashlib.sha256(json.dumps(head, separators=(",", ":")).encode())
    for text in draft.routing.described.values():
        digest.update(text.encode())
    for name in COLUMNS:
        digest.update(np.ascontiguousarray(getattr(columns, name), "<i8").tobytes())
    digest.update(np.ascontiguousarray(turns, "<i8").tobytes())
    return Plan(
        columns=columns,
        destinations=destinations,
        destination_nbytes=tuple(draft.sizes),
        staged=staged,
        groups=draft.routing.groups,
        taken=taken,
        taken_boxes=tuple((tensor, Box(offset, shape)) for tensor, offset, shape in boxes),
        nbytes=int(nbytes.sum()),
        bytes_by_source=dict(zip(sources.tolist(), totals.tolist(), strict=True)),
        turns=turns,
        digest=digest.hexdigest(),
    )
