"""2-D copies: from strided ones to rows, sorting, merging; each against byte positions counted one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_core.columns import COLUMNS, Columns, merge, sort, to_rows
from rdt_testbed.chains import cases

pytestmark = pytest.mark.unit


def columns(*rows: dict[str, int]) -> Columns:
    base = dict.fromkeys(COLUMNS, 0) | {"rows": 1, "row_bytes": 4, "source_pitch": 4, "destination_pitch": 4}
    return Columns(**{name: np.array([(base | row)[name] for row in rows], np.int64) for name in COLUMNS})


def moves(table: Columns) -> list[tuple[int, ...]]:
    """Every byte that is moved: (round, group, source, region, byte there, destination, byte there)."""
    found = []
    for values in zip(*(getattr(table, name).tolist() for name in COLUMNS), strict=True):
        c = dict(zip(COLUMNS, values, strict=True))
        for row, byte in itertools.product(range(c["rows"]), range(c["row_bytes"])):
            read = c["source_offset"] + row * c["source_pitch"] + byte
            write = c["destination_offset"] + row * c["destination_pitch"] + byte
            found.append((c["round"], c["group"], c["source"], c["region"], read, c["destination"], write))
    return sorted(found)


@cases(600)
@given(st.data())
def test_rows_move_the_bytes_of_the_strided_copies(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 4))
    number = data.draw(st.integers(1, 4))
    item = data.draw(st.sampled_from([1, 2, 4]))
    shape = np.array(
        [[data.draw(st.sampled_from([1, 1, 2, 3])) for _ in range(width)] for _ in range(number)], np.int64
    )
    sides = []
    for _ in range(2):
        strides = np.zeros((number, width), np.int64)
        for i in range(number):
            step = item * data.draw(st.sampled_from([1, 1, 1, 2]))
            for axis in data.draw(st.permutations(range(width))):
                strides[i, axis] = step
                step = step * int(shape[i, axis]) + item * data.draw(st.sampled_from([0, 0, 0, 1]))
        sides.append(strides)
    found = to_rows(shape, sides[0], sides[1], np.full(number, item))
    for i in range(number):
        expected = []
        for index in itertools.product(*map(range, shape[i].tolist())):
            read, write = (int((np.array(index) * side[i]).sum()) for side in sides)
            expected += [(read + byte, write + byte) for byte in range(item)]
        moved = []
        for k in np.flatnonzero(found.parent == i).tolist():
            for row, byte in itertools.product(range(found.rows[k]), range(found.row_bytes[k])):
                read = found.source_shift[k] + row * found.source_pitch[k] + byte
                moved.append((read, found.destination_shift[k] + row * found.destination_pitch[k] + byte))
        assert sorted(moved) == sorted(expected)
    single = found.rows == 1
    assert (found.source_pitch[single] == found.row_bytes[single]).all()
    assert (found.destination_pitch[single] == found.row_bytes[single]).all()


@cases(800)
@given(st.data())
def test_merging_keeps_every_byte(data: st.DataObject) -> None:
    """Blocks cut out of few strided sheets, so that neighbours are common; none writes a byte twice."""
    rows = []
    pitch = data.draw(st.sampled_from([8, 12]))
    cells = data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, pitch // 4 - 1)), unique=True, max_size=14))
    shift = data.draw(st.sampled_from([0, 4, 100]))
    for row, column in cells:
        where = row * pitch + column * 4
        jump = data.draw(st.sampled_from([0, 0, 0, 0, 8]))
        side = {name: data.draw(st.sampled_from([0, 0, 0, 1])) for name in ("source", "round")}
        rows.append({"source_offset": where + shift + jump, "destination_offset": where, **side})
    table = sort(columns(*rows))
    merged = merge(table)
    assert moves(merged) == moves(table)
    assert len(merged) <= len(table)


def test_merges_what_continues() -> None:
    def shape_of(*rows: dict[str, int]) -> list[tuple[int, int]]:
        table = merge(sort(columns(*rows)))
        return list(zip(table.rows.tolist(), table.row_bytes.tolist(), strict=True))

    flat = [{"source_offset": 4 * i + 100, "destination_offset": 4 * i} for i in range(5)]
    assert shape_of(*flat) == [(1, 20)]
    assert shape_of(*flat[::-1]) == [(1, 20)]
    for name in ("source", "region", "round", "group", "destination"):
        assert len(shape_of(*flat[:3], *({**row, name: 1} for row in flat[3:]))) == 2, name
    even = [{"source_offset": 8 * i, "destination_offset": 16 * i} for i in range(5)]
    assert shape_of(*even) == [(5, 4)]
    block = {"rows": 3, "source_pitch": 8, "destination_pitch": 16}
    assert shape_of(block, block | {"source_offset": 24, "destination_offset": 48, "rows": 2}) == [(5, 4)]
    assert shape_of(block, block | {"source_offset": 4, "destination_offset": 4}) == [(3, 8)]
    assert shape_of(block, block | {"source_offset": 4, "destination_offset": 8}) == [(3, 4), (3, 4)]
    assert shape_of(block, block | {"source_offset": 4, "destination_offset": 4, "rows": 2}) == [(3, 4), (2, 4)]
    solid = {"rows": 3, "source_pitch": 4, "destination_pitch": 4}
    assert shape_of(solid) == [(1, 12)]


def test_order_is_round_group_source_destination_offset() -> None:
    names = ("round", "group", "source", "destination", "destination_offset")
    rows = [
        dict(zip(names, values, strict=True)) for values in itertools.product((0, 3), (1, 2), (0, 9), (4, 5), (0, 40))
    ]
    table = sort(columns(*rows[::-1]))
    assert [tuple(row) for row in np.stack([getattr(table, n) for n in names], axis=1)] == [
        tuple(row.values()) for row in rows
    ]


def test_empty() -> None:
    empty = Columns.concatenate([])
    assert (len(merge(sort(empty))), empty.nbytes) == (0, 0)
    flat = np.zeros((0, 2), np.int64)
    assert len(to_rows(flat, flat, flat, np.zeros(0, np.int64)).rows) == 0
