"""Blocks that write the same byte, against a count of every byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_core.overlap import clusters, find_overlap
from rdt_testbed.chains import cases

pytestmark = pytest.mark.unit

Block = tuple[int, int, int, int, int]  # key, offset, pitch, rows, row bytes


def found(blocks: list[Block]) -> tuple[int, int] | None:
    return find_overlap(*np.array(blocks, np.int64).reshape(-1, 5).T)


def bytes_of(block: Block) -> list[tuple[int, int]]:
    key, offset, pitch, rows, width = block
    return [(key, offset + row * pitch + byte) for row in range(rows) for byte in range(width)]


blocks = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 40),
        st.sampled_from([6, 6, 6, 6, 9]),
        st.sampled_from([1, 1, 2, 3]),
        st.integers(1, 3),
    ),
    max_size=6,
)


@cases(2500)
@given(blocks)
def test_finds_a_clash_exactly_where_a_byte_is_written_twice(blocks: list[Block]) -> None:
    written = [byte for block in blocks for byte in bytes_of(block)]
    clash = found(blocks)
    assert (clash is not None) == (len(set(written)) < len(written))
    if clash is not None:
        one, two = clash
        assert one != two
        assert set(bytes_of(blocks[one])) & set(bytes_of(blocks[two]))


def test_interleaved_columns_do_not_clash() -> None:
    assert found([(0, 0, 12, 1000, 4), (0, 4, 12, 1000, 4), (0, 8, 12, 1000, 4)]) is None
    assert found([(0, 0, 12, 1000, 4), (0, 3, 12, 1000, 4)]) is not None
    # a block that wraps around the pitch, and one that fits between its ends
    assert found([(0, 0, 12, 3, 2), (0, 10, 12, 3, 2), (0, 4, 12, 3, 4)]) is None


def test_rectangles_that_no_cut_separates() -> None:
    # four around a hole: neither a row nor a column parts them
    pinwheel = [(0, 0, 100, 1, 2), (0, 2, 100, 2, 1), (0, 201, 100, 1, 2), (0, 100, 100, 2, 1)]
    assert found(pinwheel) is None
    assert found([*pinwheel, (0, 101, 100, 1, 1)]) is None
    assert found([*pinwheel, (0, 101, 100, 1, 2)]) == (1, 4)


def test_rows_of_one_block_that_overlap() -> None:
    assert found([(0, 0, 8, 2, 8), (1, 0, 3, 2, 4)]) == (1, 1)
    assert found([(0, 0, 0, 2, 1)]) == (0, 0)
    assert found([]) is None


def test_many_blocks_are_cheap() -> None:
    """64 owners interleave their columns in each of 400 destinations of 4,096 rows: 105 million rows in all."""
    key, owner = (grid.ravel() for grid in np.meshgrid(np.arange(400), np.arange(64), indexing="ij"))
    same = np.ones(len(key), np.int64)
    assert find_overlap(key, owner * 128, same * 8192, same * 4096, same * 128) is None
    owner[-1] = 62
    assert find_overlap(key, owner * 128, same * 8192, same * 4096, same * 128) == (len(key) - 2, len(key) - 1)


def test_clusters() -> None:
    key, low, high = np.array([[0, 0, 2], [0, 3, 5], [0, 1, 4], [0, 5, 6], [1, 0, 9]], np.int64).T
    labels = clusters(key, low, high)
    assert labels[0] == labels[1] == labels[2]
    assert len({int(labels[0]), int(labels[3]), int(labels[4])}) == 3
