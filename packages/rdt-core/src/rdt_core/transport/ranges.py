"""Checks and expansions of `Copies` that every link kind needs: pure numpy, no memory is touched.

No byte is moved before `check` has seen its copy: a read outside a region or a write outside a destination is an error
that names the copy, never a move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import TransportError
from .base import Copies


def check(copies: Copies, regions: Mapping[int, int], destinations: Sequence[int], where: str) -> None:
    """Refuses copies that leave their region or destination.

    Args:
        copies: what would be moved.
        regions: size in bytes of each source region, by id.
        destinations: size in bytes of each destination, by index.
        where: names the link in the error.

    Raises:
        TransportError: names the first copy that does not fit, its bytes and the limit.
    """
    count = len(copies)
    for name in Copies.__slots__:
        column = getattr(copies, name)
        if len(column) != count:
            raise TransportError(f"{where}: column {name} has {len(column)} entries, expected {count}")
    if not count:
        return
    _refuse(copies, (copies.rows < 1) | (copies.row_bytes < 1), where, "has no bytes")
    known = np.array(sorted(regions), dtype=np.int64)
    place = np.minimum(np.searchsorted(known, copies.source_region), max(len(known) - 1, 0))
    if not len(known):
        raise TransportError(f"{where}: {count} copies, but the source declares no region")
    _refuse(
        copies, known[place] != copies.source_region, where, f"reads a region that is not among {known.tolist()[:8]}"
    )
    sizes = np.array([regions[int(region)] for region in known], dtype=np.int64)[place]
    _extent(copies, copies.source_offset, copies.source_pitch, sizes, where, "reads", "region")
    _refuse(
        copies,
        (copies.destination < 0) | (copies.destination >= len(destinations)),
        where,
        f"writes a destination that is not one of {len(destinations)}",
    )
    sizes = np.array(destinations, dtype=np.int64)[copies.destination]
    _extent(copies, copies.destination_offset, copies.destination_pitch, sizes, where, "writes", "destination")
    overlapping = (copies.rows > 1) & (copies.destination_pitch < copies.row_bytes)
    _refuse(copies, overlapping, where, "writes rows that overlap")


def _extent(
    copies: Copies, offset: np.ndarray, pitch: np.ndarray, sizes: np.ndarray, where: str, verb: str, noun: str
) -> None:
    # the end is at most the sum of these terms; a product beyond 2**63 must not wrap round into the allowed range
    bound = offset.astype(np.float64) + (copies.rows - 1).astype(np.float64) * pitch + copies.row_bytes
    last = offset + (copies.rows - 1) * pitch + copies.row_bytes
    bad = (offset < 0) | (pitch < 0) | (bound > sizes.astype(np.float64) + 4096) | (last > sizes)
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        _refuse(
            copies,
            bad,
            where,
            f"{verb} bytes {int(offset[first])} to {bound[first]:.0f} of a {noun} of {int(sizes[first])} bytes",
        )


def _refuse(copies: Copies, bad: np.ndarray, where: str, what: str) -> None:
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise TransportError(
            f"{where}: copy {i} of {len(copies)} {what} (region {int(copies.source_region[i])}"
            f"+{int(copies.source_offset[i])}, destination {int(copies.destination[i])}"
            f"+{int(copies.destination_offset[i])}, {int(copies.rows[i])} rows of {int(copies.row_bytes[i])} bytes, "
            f"pitches {int(copies.source_pitch[i])} and {int(copies.destination_pitch[i])}); "
            "the plan and the memory of the two ends do not belong together: connect again"
        )


def rows(copies: Copies) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Expands copies to one entry for each row, in order.

    Returns:
        Columns region, source offset, destination, destination offset, bytes.
    """
    count = copies.rows
    row = np.arange(int(count.sum()), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    return (
        np.repeat(copies.source_region, count),
        np.repeat(copies.source_offset, count) + row * np.repeat(copies.source_pitch, count),
        np.repeat(copies.destination, count),
        np.repeat(copies.destination_offset, count) + row * np.repeat(copies.destination_pitch, count),
        np.repeat(copies.row_bytes, count),
    )


def starts(
    region: np.ndarray,
    source: np.ndarray,
    destination: np.ndarray,
    target: np.ndarray,
    nbytes: np.ndarray,
    single: np.ndarray | None = None,
) -> np.ndarray:
    """Where a new piece starts among rows (as from `rows`): all others continue the one before them on both sides.

    Args:
        region, source, destination, target, nbytes: columns of one length.
        single: entries that may be joined; default all.

    Returns:
        Indices of the first row of each piece; `np.add.reduceat(nbytes, indices)` are the pieces' sizes.
    """
    if not len(nbytes):
        return np.zeros(0, dtype=np.int64)
    new = (
        (region[1:] != region[:-1])
        | (destination[1:] != destination[:-1])
        | (source[1:] != source[:-1] + nbytes[:-1])
        | (target[1:] != target[:-1] + nbytes[:-1])
    )
    if single is not None:
        new |= ~(single[1:] & single[:-1])
    return np.flatnonzero(np.concatenate([[True], new]))
