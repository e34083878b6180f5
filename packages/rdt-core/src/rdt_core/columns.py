"""2-D byte copies as columns of int64: from strided N-D copies to rows with pitches, merged, checked, sorted.

Every function works on whole arrays of copies at once; nothing here loops over copies in Python. Refused: copies that fall
into more pieces than anybody would move. What may not be written is found by `overlap`, and named by `planning`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .errors import CoverageError

Array = np.ndarray

#: Most 2-D copies that are made at once. The plan of a trillion parameters has some millions; one of more than this would
#: take longer to execute than to move its bytes in any other way, and its table more memory than it is worth.
MAX_PIECES = 1 << 25


@dataclass(frozen=True, slots=True)
class Columns:
    """Copies as columns, all int64 arrays of one length.

    Copy i moves `rows[i]` rows of `row_bytes[i]` bytes: row j from byte `source_offset[i] + j * source_pitch[i]` of
    region `region[i]` of source rank `source[i]` to byte `destination_offset[i] + j * destination_pitch[i]` of
    destination `destination[i]`. Where there is one row both pitches equal `row_bytes`.

    Attributes:
        source: source rank.
        region: region id at that rank.
        source_offset: bytes inside the region.
        source_pitch: bytes from one row to the next.
        destination: index into the plan's destinations.
        destination_offset: bytes inside the destination.
        destination_pitch: bytes from one row to the next.
        rows: at least 1.
        row_bytes: at least 1.
        round: round of the sync in which the source bytes are readable.
        group: index into the plan's groups.
    """

    source: Array
    region: Array
    source_offset: Array
    source_pitch: Array
    destination: Array
    destination_offset: Array
    destination_pitch: Array
    rows: Array
    row_bytes: Array
    round: Array
    group: Array

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes moved by all copies together."""
        return int((self.rows * self.row_bytes).sum())

    def take(self, index: Any) -> Columns:
        """The copies that a numpy index (positions or a mask) selects."""
        return Columns(**{name: getattr(self, name)[index] for name in COLUMNS})

    @classmethod
    def concatenate(cls, parts: list[Columns]) -> Columns:
        """All copies of `parts`, one after the other."""
        if not parts:
            return cls(**{name: np.zeros(0, np.int64) for name in COLUMNS})
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS})


#: Names of the columns, in the order in which digests read them.
COLUMNS: tuple[str, ...] = tuple(field.name for field in fields(Columns))


@dataclass(frozen=True, slots=True)
class Rows:
    """What `to_rows` makes of N-D copies: int64 arrays with one entry for each 2-D copy.

    Attributes:
        parent: which N-D copy it is a part of.
        source_shift: bytes to add to the source offset of the N-D copy.
        destination_shift: bytes to add to its destination offset.
        rows, row_bytes, source_pitch, destination_pitch: as in `Columns`.
    """

    parent: Array
    source_shift: Array
    destination_shift: Array
    rows: Array
    row_bytes: Array
    source_pitch: Array
    destination_pitch: Array


@dataclass(frozen=True, slots=True)
class _Levels:
    """N-D copies with the contiguous part taken out: `width` bytes in a row, then at most D levels of repetition."""

    width: Array  # [N] bytes that are contiguous on both sides
    count: Array  # [N] number of levels
    size: Array  # [N, D]; innermost first, 1 from `count` on
    source: Array  # [N, D] strides in bytes
    destination: Array  # [N, D] strides in bytes


def _levels(shape: Array, source: Array, destination: Array, item: Array) -> _Levels:
    number, width = shape.shape
    # outermost first by where bytes land; axes of size 1 go to the outside, where they are skipped
    key = np.where(shape == 1, np.iinfo(np.int64).max, destination)
    order = np.lexsort((-source, -key), axis=1) if number else np.zeros((0, width), np.int64)
    shape = np.take_along_axis(shape, order, axis=1)
    source = np.take_along_axis(source, order, axis=1)
    destination = np.take_along_axis(destination, order, axis=1)
    run = item.copy()
    count = np.zeros(number, np.int64)
    sizes = np.ones((number, width), np.int64)
    sources, destinations = np.zeros((number, width), np.int64), np.zeros((number, width), np.int64)
    every = np.arange(number)
    for axis in reversed(range(width)):
        size, step, pitch = shape[:, axis], source[:, axis], destination[:, axis]
        wide = size > 1
        joins = wide & (count == 0) & (step == run) & (pitch == run)
        run = np.where(joins, run * size, run)
        last = np.maximum(count - 1, 0)
        continues = (
            wide
            & (count > 0)
            & (step == sources[every, last] * sizes[every, last])
            & (pitch == destinations[every, last] * sizes[every, last])
        )
        sizes[every[continues], last[continues]] *= size[continues]
        fresh = wide & ~joins & ~continues
        sizes[every[fresh], count[fresh]] = size[fresh]
        sources[every[fresh], count[fresh]] = step[fresh]
        destinations[every[fresh], count[fresh]] = pitch[fresh]
        count[fresh] += 1
    return _Levels(run, count, sizes, sources, destinations)


def run_bytes(shape: Array, source: Array, destination: Array, item: Array) -> Array:
    """[N] bytes of the longest rows that are contiguous on both sides (arguments as for `to_rows`)."""
    return _levels(shape, source, destination, item).width


def to_rows(shape: Array, source: Array, destination: Array, item: Array) -> Rows:
    """Turns strided N-D copies into 2-D ones.

    Axes of size 1 are dropped and axes that continue each other on both sides are merged. The innermost contiguous run
    is the row; where there is none the row is one element. The level with the most repetitions gives rows and pitches;
    the others are enumerated.

    Args:
        shape: [N, D] elements along each axis, at least 1.
        source: [N, D] strides in bytes.
        destination: [N, D] strides in bytes.
        item: [N] bytes of an element.

    Raises:
        CoverageError: more than `MAX_PIECES` copies.
    """
    found = _levels(shape, source, destination, item)
    number = len(item)
    every = np.arange(number)
    chosen = found.size.argmax(axis=1) if number else np.zeros(0, np.int64)
    rows = found.size[every, chosen]
    single = rows == 1
    source_pitch = np.where(single, found.width, found.source[every, chosen])
    destination_pitch = np.where(single, found.width, found.destination[every, chosen])
    others = found.size.copy()
    others[every, chosen] = 1
    # in floats first: a product beyond 2**63 wraps round
    pieces = others.astype(np.float64).prod(axis=1)
    if number and pieces.sum() > MAX_PIECES:
        worst = int(pieces.argmax())
        raise CoverageError(
            f"{number} copies fall into {pieces.sum():.0f} pieces of rows, one of them (shape {shape[worst].tolist()}, strides "
            f"{source[worst].tolist()} and {destination[worst].tolist()} bytes) into {pieces[worst]:.0f}; at most "
            f"{MAX_PIECES} can be planned"
        )
    repeats = others.prod(axis=1)
    parent = np.repeat(every, repeats)
    local = np.arange(len(parent)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    source_shift, destination_shift = np.zeros(len(parent), np.int64), np.zeros(len(parent), np.int64)
    for level in range(others.shape[1]):
        if (others[:, level] == 1).all():
            continue
        size = others[parent, level]
        position = local % size
        local = local // size
        source_shift += position * found.source[parent, level]
        destination_shift += position * found.destination[parent, level]
    return Rows(
        parent,
        source_shift,
        destination_shift,
        rows[parent],
        found.width[parent],
        source_pitch[parent],
        destination_pitch[parent],
    )


def sort(columns: Columns) -> Columns:
    """In the order round, group, source, destination, destination offset.

    No two copies may write the same byte (see `overlap`), so that order is complete.
    """
    major = np.zeros(len(columns), np.int64)
    for name in ("round", "group", "source", "destination"):
        column = getattr(columns, name)
        # dense numbers keep the combined key far below 2**63: their product is at most the number of combinations
        values, dense = np.unique(column, return_inverse=True)
        major = np.unique(major * len(values) + dense, return_inverse=True)[1]
    return columns.take(np.lexsort((columns.destination_offset, major)))


def merge(columns: Columns) -> Columns:
    """Joins neighbours that continue each other on both sides, in sorted columns; the bytes moved stay the same.

    Side by side: equal numbers of rows with equal pitches become wider rows. Below each other: blocks of equal rows
    and pitches, or single rows at equal distances, become more rows. Blocks without gaps become one row.
    """
    while True:
        before = len(columns)
        columns = _flatten(_join_below(_flatten(_join_beside(columns))))
        if len(columns) == before:
            return columns


def _joinable(columns: Columns) -> Array:
    """[N - 1] whether a copy and the next one have the same ends."""
    same = np.ones(max(len(columns) - 1, 0), bool)
    for name in ("source", "region", "destination", "round", "group"):
        column = getattr(columns, name)
        same &= column[1:] == column[:-1]
    return same


def _flatten(columns: Columns) -> Columns:
    solid = (
        (columns.rows > 1)
        & (columns.source_pitch == columns.row_bytes)
        & (columns.destination_pitch == columns.row_bytes)
    )
    width = np.where(solid, columns.rows * columns.row_bytes, columns.row_bytes)
    rows = np.where(solid, 1, columns.rows)
    pitches = {
        name: np.where(rows == 1, width, getattr(columns, name)) for name in ("source_pitch", "destination_pitch")
    }
    kept = {name: getattr(columns, name) for name in COLUMNS}
    return Columns(**(kept | pitches | {"rows": rows, "row_bytes": width}))


def _join_beside(columns: Columns) -> Columns:
    if len(columns) < 2:
        return columns
    one, two = columns.take(slice(None, -1)), columns.take(slice(1, None))
    single = one.rows == 1
    joins = (
        _joinable(columns)
        & (one.rows == two.rows)
        & (single | ((one.source_pitch == two.source_pitch) & (one.destination_pitch == two.destination_pitch)))
        & (two.source_offset == one.source_offset + one.row_bytes)
        & (two.destination_offset == one.destination_offset + one.row_bytes)
    )
    starts = np.flatnonzero(np.concatenate([[True], ~joins]))
    width = np.add.reduceat(columns.row_bytes, starts)
    first = columns.take(starts)
    kept = {name: getattr(first, name) for name in COLUMNS} | {"row_bytes": width}
    for name in ("source_pitch", "destination_pitch"):
        kept[name] = np.where(first.rows == 1, width, kept[name])
    return Columns(**kept)


def _join_below(columns: Columns) -> Columns:
    if len(columns) < 2:
        return columns
    one, two = columns.take(slice(None, -1)), columns.take(slice(1, None))
    # a single row has no pitch of its own: the distance to the next one gives it
    step_source, step_destination = (
        two.source_offset - one.source_offset,
        two.destination_offset - one.destination_offset,
    )
    block = one.rows > 1
    pair = _joinable(columns) & (one.row_bytes == two.row_bytes) & (block == (two.rows > 1))
    pair &= np.where(
        block,
        (one.source_pitch == two.source_pitch)
        & (one.destination_pitch == two.destination_pitch)
        & (step_source == one.rows * one.source_pitch)
        & (step_destination == one.rows * one.destination_pitch),
        (step_source >= one.row_bytes) & (step_destination >= one.row_bytes),
    )
    # of single rows only a run of equal steps is joined; a change of step starts a new block at the row in between
    even = pair.copy()
    change = ~block[1:] & pair[1:] & pair[:-1]
    change &= (step_source[1:] != step_source[:-1]) | (step_destination[1:] != step_destination[:-1])
    even[1:][change] = False
    starts = np.flatnonzero(np.concatenate([[True], ~even]))
    first = columns.take(starts)
    length = np.diff(np.append(starts, len(columns)))
    joined = length > 1
    step = np.minimum(starts, len(columns) - 2)
    single = first.rows == 1
    kept = {name: getattr(first, name) for name in COLUMNS}
    kept["rows"] = np.add.reduceat(columns.rows, starts)
    kept["source_pitch"] = np.where(joined & single, step_source[step], first.source_pitch)
    kept["destination_pitch"] = np.where(joined & single, step_destination[step], first.destination_pitch)
    return Columns(**kept)
