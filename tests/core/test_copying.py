"""Copy programs against a row-by-row copy in numpy, on random layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_core.errors import TransportError
from rdt_core.transport import Copies, CopyProgram, ranges

pytestmark = pytest.mark.unit


def build(rows: list[tuple[int, ...]]) -> Copies:
    """Copies from tuples in the order of the columns of `Copies`."""
    return Copies(*np.array(rows, dtype=np.int64).reshape(-1, 8).T.copy())


def reference(copies: Copies, sources: dict[int, np.ndarray], destinations: list[np.ndarray]) -> None:
    """Copies one row after the other."""
    for i in range(len(copies)):
        for row in range(int(copies.rows[i])):
            source = int(copies.source_offset[i] + row * copies.source_pitch[i])
            target = int(copies.destination_offset[i] + row * copies.destination_pitch[i])
            size = int(copies.row_bytes[i])
            piece = sources[int(copies.source_region[i])][source : source + size]
            destinations[int(copies.destination[i])][target : target + size] = piece


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Copies, int, int]:
    """Disjoint 2-D copies, one after the other on both sides, with the sizes that both sides need."""
    source, target = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    table = []
    for _ in range(draw(st.integers(0, 12))):
        unit = draw(st.sampled_from([1, 2, 4, 8]))
        size, rows = unit * draw(st.integers(1, 20)), draw(st.integers(1, 9))
        pitch, to_pitch = (size + unit * draw(st.integers(0, 3)) for _ in range(2))
        table.append((0, source, pitch, 0, target, to_pitch, rows, size))
        # a gap of 0 lets neighbours be merged
        source += (rows - 1) * pitch + size + unit * draw(st.integers(0, 2))
        target += (rows - 1) * to_pitch + size + unit * draw(st.integers(0, 2))
    return build(table), source + draw(st.integers(0, 3)), target + draw(st.integers(0, 3))


@pytest.mark.parametrize("small", [0, 1 << 20], ids=["torch", "numpy"])
@given(layout=layouts(), shift=st.integers(0, 9))
def test_program_equals_row_by_row(small: int, layout: tuple[Copies, int, int], shift: int) -> None:
    copies, source_bytes, target_bytes = layout
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, source_bytes + shift + 1, dtype=np.uint8))
    source = data[shift : shift + source_bytes]
    target = torch.full((target_bytes + 1,), 9, dtype=torch.uint8)[1:]
    wanted = target.numpy().copy()
    reference(copies, {0: source.numpy()}, [wanted])
    untouched = data.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rdt_core.transport.copying._SMALL", small)
        program = CopyProgram(copies, {0: source}, [target])
    assert program.nbytes == copies.nbytes
    program.run()
    assert np.array_equal(target.numpy(), wanted)
    assert torch.equal(data, untouched)


@given(layout=layouts())
def test_rows_and_starts_describe_the_same_bytes(layout: tuple[Copies, int, int]) -> None:
    copies, source_bytes, target_bytes = layout
    region, source, destination, target, nbytes = ranges.rows(copies)
    first = ranges.starts(region, source, destination, target, nbytes)
    assert int(nbytes.sum()) == copies.nbytes
    pieces = np.add.reduceat(nbytes, first) if len(first) else nbytes
    moved = np.full(target_bytes, -1, dtype=np.int64)
    for start, to, size in zip(source[first], target[first], pieces, strict=True):
        moved[to : to + size] = np.arange(start, start + size)
    wanted = np.full(target_bytes, -1, dtype=np.int64)
    reference(copies, {0: np.arange(source_bytes)}, [wanted])
    assert np.array_equal(moved, wanted)
    assert len(first) == 0 or np.all((np.diff(source[first]) != pieces[:-1]) | (np.diff(target[first]) != pieces[:-1]))


def test_program_can_run_again_and_sees_new_bytes() -> None:
    source, target = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    program = CopyProgram(build([(5, 0, 8, 0, 0, 4, 8, 4)]), {5: source}, [target])
    for value in (1, 2):
        source.fill_(value)
        program.run()
        assert int(target.sum()) == 32 * value


def test_huge_numbers_do_not_wrap_into_range() -> None:
    tensors = {0: torch.zeros(64, dtype=torch.uint8)}, [torch.zeros(64, dtype=torch.uint8)]
    for bad in (
        (0, 0, 1 << 62, 0, 0, 8, 5, 8),
        (0, 1 << 62, 0, 0, 0, 0, 1, 1 << 62),
        (0, 0, 8, 0, 0, 1 << 61, 9, 8),
        (0, (1 << 63) - 1, 0, 0, 0, 0, 1, 8),
    ):
        with pytest.raises(TransportError, match="of 64 bytes"):
            CopyProgram(build([bad]), *tensors)


def test_columns_of_unequal_length_are_refused() -> None:
    one, two = np.ones(1, dtype=np.int64), np.ones(2, dtype=np.int64)
    with pytest.raises(TransportError, match="row_bytes has 2 entries"):
        ranges.check(Copies(one, one, one, one, one, one, one, two), {1: 9}, [9, 9], "here")
