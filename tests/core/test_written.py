"""count_written against marks made one element at a time."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies

from rdt_core.written import Place, count_written, in_units

pytestmark = pytest.mark.unit


def place(view: torch.Tensor) -> Place:
    return Place(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()))


def test_padding_of_rows_of_columns_and_in_parts() -> None:
    whole = torch.zeros(10, 6)
    for parts, count in (
        ([whole[:8], whole[8:]], 60),
        ([whole[:8], whole], 60),
        ([whole[:, :1], whole[:, 1:]], 60),
        ([whole[4:8], whole[:6]], 48),
        ([whole[:5], whole[:5]], 30),
        ([], 0),
    ):
        assert count_written([place(part) for part in parts], [place(whole)], 60) == [count]


def test_each_parameter_of_one_storage_is_counted_by_itself() -> None:
    flat = torch.zeros(20)
    first, second = place(flat[:12].view(3, 4)), place(flat[12:])
    assert count_written([place(flat[2:14])], [first, second], 20) == [10, 2]


def test_elements_of_other_sizes() -> None:
    assert in_units(Place(3, (2, 2), (4, 1)), 2) == Place(6, (2, 2, 2), (8, 2, 1))
    assert in_units(Place(3, (2,), (1,)), 1) == Place(3, (2,), (1,))


@hypothesis.given(strategies.data())
def test_equals_marks_made_one_by_one(data: strategies.DataObject) -> None:
    rows, columns = data.draw(strategies.integers(1, 6)), data.draw(strategies.integers(1, 6))
    scale = data.draw(strategies.sampled_from([1, 3]))  # all in multiples of something, as real rows are
    whole = torch.zeros(rows * scale, columns)

    def draw() -> torch.Tensor:
        top, left = data.draw(strategies.integers(0, rows - 1)), data.draw(strategies.integers(0, columns - 1))
        view = whole[
            top * scale : data.draw(strategies.integers(top + 1, rows)) * scale,
            left : data.draw(strategies.integers(left + 1, columns)),
        ]
        return view.t() if data.draw(strategies.booleans()) else view

    parts = [draw() for _ in range(data.draw(strategies.integers(0, 4)))]
    asked = draw()
    marks = torch.zeros_like(whole)
    for part in parts:
        marks.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(1)
    expected = int(marks.as_strided(asked.shape, asked.stride(), asked.storage_offset()).sum())
    assert count_written(map(place, parts), [place(asked)], whole.numel()) == [expected]
