"""The fuzz targets on what was found before and on cases that hypothesis makes: they come back, in memory bounded by the input.

A file in `corpus/TARGET/` is an input that once broke something, and is replayed for ever. `run.py` finds new ones.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_testbed.chains import cases

from .targets import TARGETS

pytestmark = pytest.mark.unit

CORPUS = Path(__file__).parent / "corpus"
FOUND = sorted(path for path in CORPUS.glob("*/*") if path.is_file())
#: what a target may take at most: a constant for its own small models, and so much for each byte of input
BASE, PER_BYTE = 8 << 20, 16 << 10


def _bounded(name: str, data: bytes) -> None:
    tracemalloc.start()
    try:
        TARGETS[name](data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= BASE + PER_BYTE * len(data), f"{peak} bytes for an input of {len(data)}"


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}/{path.name[:24]}")
def test_what_was_found_stays_mended(path: Path) -> None:
    _bounded(path.parent.name, path.read_bytes())


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_targets_come_back(name: str) -> None:
    @cases(60)
    @given(st.binary(min_size=1, max_size=300))
    def property_(data: bytes) -> None:
        _bounded(name, data)

    property_()
