"""A transfer's copies as the bytes that travel in `wire.Transfer`, and back: the one place that knows the columns.

Reads go from the owner's regions to wherever the reader wants them, so only their owner's half travels; packing stays
inside the owner and travels whole. Refuses bytes that are not as many numbers as the transfer declares. Pure numpy.
"""

from __future__ import annotations

import numpy as np

from .. import wire
from ..errors import TransportError
from ..memory import ALIGNMENT
from .base import Copies

_READ = 5
_PACK = 6

#: How many times the bytes that an owner holds one reader may ask for. A loader that takes a tensor twice asks twice, and
#: each bucket that exists at once has a pack arena of its own; nobody comes near this.
MOST_TIMES = 64
#: Rows that one reader may have as Ray objects: each is a tensor of its own at the owner.
MOST_OBJECTS = 1 << 20


def read_columns(copies: Copies) -> bytes:
    """Returns `wire.Transfer.columns` of copies from an owner's regions: region, offset, pitch, rows, row bytes."""
    return _bytes(copies.source_region, copies.source_offset, copies.source_pitch, copies.rows, copies.row_bytes)


def pack_columns(copies: Copies) -> bytes:
    """Returns `wire.Transfer.pack_columns` of copies into a pack arena, whose rows follow one another there."""
    return _bytes(
        copies.source_region, copies.source_offset, copies.source_pitch, copies.rows, copies.row_bytes,
        copies.destination_offset,
    )  # fmt: skip


def reads(transfer: wire.Transfer) -> Copies:
    """Returns what a transfer reads, as copies whose destinations are nowhere yet: number 0, offset 0.

    Raises:
        TransportError: `columns` has not five numbers for each read.
    """
    region, offset, pitch, rows, row_bytes = _numbers(transfer.columns, _READ, transfer.count, "reads")
    zero = np.zeros_like(rows)
    return Copies(region, offset, pitch, zero, zero, row_bytes, rows, row_bytes)


def packs(transfer: wire.Transfer) -> Copies:
    """Returns a transfer's packing as copies from regions into the pack arena (destination 0).

    Raises:
        TransportError: `pack_columns` has not six numbers for each copy.
    """
    columns = _numbers(transfer.pack_columns, _PACK, transfer.pack_count, "packs")
    region, offset, pitch, rows, row_bytes, pack_offset = columns
    return Copies(region, offset, pitch, np.zeros_like(rows), pack_offset, row_bytes, rows, row_bytes)


def check_request(request: wire.ReadRequest, held: int, rounds: int) -> None:
    """Refuses a request for more than its owner could mean: what it makes for it is bounded by what it holds.

    Args:
        request: of a reader.
        held: bytes of the boxes that the owner published.
        rounds: of a sync, as the owner declared.

    Raises:
        TransportError: names the reader and what it asked for.
    """
    who = f"{request.reader} asks source rank {request.source}"
    rows = 0
    total = np.float64(0)  # what wraps round in integers is far beyond the limit here
    for transfer in request.transfers:
        if transfer.round >= rounds:
            raise TransportError(f"{who} for bytes of round {transfer.round}; a sync has {rounds} rounds")
        for copies in (reads(transfer), packs(transfer)):
            total += (copies.rows.astype(np.float64) * copies.row_bytes).sum()
        rows += int(np.clip(reads(transfer).rows, 0, MOST_OBJECTS + 1).sum())
    most = MOST_TIMES * (held + ALIGNMENT * (1 + len(request.transfers)))
    if request.pack_bytes > most or total > most:
        raise TransportError(
            f"{who} for {total:.0f} bytes and a pack arena of {request.pack_bytes}; it holds {held} bytes, and at most "
            f"{MOST_TIMES} times as many are served to one reader; connect the reader again"
        )
    if request.kind == "ray" and rows > MOST_OBJECTS:
        raise TransportError(
            f"{who} for more than {MOST_OBJECTS} rows as Ray objects; pack them, or use kind 'prepared'"
        )


def _bytes(*columns: np.ndarray) -> bytes:
    return b"".join(np.ascontiguousarray(column, dtype="<i8").tobytes() for column in columns)


def _numbers(data: bytes, width: int, count: int, what: str) -> np.ndarray:
    if len(data) != 8 * width * count:
        raise TransportError(f"{len(data)} bytes describe {count} {what}, expected {width} numbers of 8 bytes each")
    return np.frombuffer(data, dtype="<i8").astype(np.int64).reshape(width, count)
