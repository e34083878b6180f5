"""A transfer's columns: what is written is read, and bytes of another size are refused."""

from __future__ import annotations

import numpy as np
import pytest

from rdt_core import wire
from rdt_core.errors import TransportError
from rdt_core.transport import tables
from rdt_core.transport.base import Copies

pytestmark = pytest.mark.unit

COPIES = Copies(*(np.array(column, dtype=np.int64) for column in (
    [3, -1], [4096, 0], [64, 0], [5, 2], [10, 20], [32, 16], [7, 1], [32, 1 << 40],
)))  # fmt: skip


def test_reads_travel_without_the_readers_half() -> None:
    columns = tables.read_columns(COPIES)
    found = tables.reads(wire.Transfer(chunk=0, round=0, count=2, columns=columns))
    for name in ("source_region", "source_offset", "source_pitch", "rows", "row_bytes"):
        assert getattr(found, name).tolist() == getattr(COPIES, name).tolist()
    assert found.destination.tolist() == found.destination_offset.tolist() == [0, 0]
    assert found.nbytes == COPIES.nbytes


def test_packs_travel_with_their_place_in_the_arena_and_lie_close_there() -> None:
    columns = tables.pack_columns(COPIES)
    transfer = wire.Transfer(chunk=0, round=0, count=0, columns=b"", pack_count=2, pack_columns=columns)
    found = tables.packs(transfer)
    assert found.destination_offset.tolist() == [10, 20]
    assert found.destination_pitch.tolist() == found.row_bytes.tolist() == [32, 1 << 40]
    assert found.destination.tolist() == [0, 0]
    assert found.source_offset.tolist() == [4096, 0]


def test_other_sizes_are_refused() -> None:
    short = wire.Transfer(chunk=0, round=0, count=2, columns=bytes(79), pack_count=1, pack_columns=bytes(56))
    with pytest.raises(TransportError, match="79 bytes describe 2 reads, expected 5 numbers"):
        tables.reads(short)
    with pytest.raises(TransportError, match="56 bytes describe 1 packs, expected 6 numbers"):
        tables.packs(short)
