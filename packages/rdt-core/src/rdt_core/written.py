"""Which elements of a storage copies and fills write between them: each counted once, exactly, however they overlap.

Regions are strided, and a storage may have a billion elements; so they are marked in units of what all of them are multiples
of, which is a row where whole rows are written. Refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Protocol

import torch


class Region(Protocol):
    """A strided region of a storage, counted in elements: a slice's or a fill's destination."""

    @property
    def offset(self) -> int: ...  # noqa: D102

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def strides(self) -> tuple[int, ...]: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Place:
    """A `Region` of its own, e.g. a parameter inside a shared storage."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def count_written(regions: Iterable[Region], places: Sequence[Region], elements: int) -> list[int]:
    """Returns for each place how many of its elements the regions write.

    Args:
        regions: what is written.
        places: where it is counted.
        elements: of the storage, all of one size.
    """
    written = [_runs(region) for region in regions if 0 not in region.shape]
    asked = [_runs(place) for place in places]
    unit = gcd(elements, *(gcd(offset, run, *strides) for offset, run, _, strides in (*written, *asked)))
    unit = max(unit, 1)
    marks = torch.zeros(elements // unit, dtype=torch.bool)
    for one in written:
        _view(marks, one, unit).fill_(True)
    return [int(_view(marks, one, unit).sum()) * unit for one in asked]


def in_units(region: Region, times: int) -> Region:
    """A region in smaller elements, of which its own are so many each."""
    if times == 1:
        return region
    return Place(region.offset * times, (*region.shape, times), (*(stride * times for stride in region.strides), 1))


_Runs = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def _runs(region: Region) -> _Runs:
    """Offset, elements of a dense run, and sizes and strides of what repeats it."""
    axes = sorted((stride, size) for size, stride in zip(region.shape, region.strides, strict=True) if size > 1)
    run = 1
    while axes and axes[0][0] == run:
        run *= axes.pop(0)[1]
    return region.offset, run, tuple(size for _, size in axes), tuple(stride for stride, _ in axes)


def _view(marks: torch.Tensor, runs: _Runs, unit: int) -> torch.Tensor:
    offset, run, sizes, strides = runs
    return marks.as_strided((*sizes, run // unit), (*(stride // unit for stride in strides), 1), offset // unit)
