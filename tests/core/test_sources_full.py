"""`FullTensors`: whole tensors out of shards, in one process and over ranks, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rdt_core.errors import CoverageError, SourceError
from rdt_core.sources import FullTensors, IterableSource
from rdt_core.sources.base import Shard
from rdt_core.testing import TensorSource, check_source
from rdt_core.wire import TensorMeta
from rdt_testbed.halves import SHAPES, Halves, value

pytestmark = pytest.mark.unit


def full_of(wire: str, version: int = 1) -> dict[str, torch.Tensor]:
    return {name: value(name, version).to(getattr(torch, wire)) for name in SHAPES}


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_one_rank_gives_what_it_holds_in_the_wire_dtype() -> None:
    source = Halves(0, 1, "bfloat16")
    source.fill(1)
    full = FullTensors(source)
    assert [meta.name for meta in full.metadata()] == list(SHAPES)
    assert equal(dict(full), full_of("bfloat16"))
    source.fill(2)
    assert equal(dict(full), full_of("bfloat16", 2))


def test_it_is_a_source_itself() -> None:
    tensors = full_of("float32") | {"count": torch.arange(3), "scale": torch.tensor(2.0), "empty": torch.zeros(0, 3)}
    check_source(lambda rank, ranks: FullTensors(TensorSource(tensors, ["norm"])), expected=lambda: tensors)
    assert FullTensors(TensorSource(tensors, ["norm"])).ignored() == ("norm",)


def test_what_can_only_be_iterated_passes_through() -> None:
    metadata = [TensorMeta(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()]
    assert equal(dict(FullTensors(IterableSource(metadata, lambda: full_of("float32").items()))), full_of("float32"))


def test_one_rank_of_several_is_refused_by_name() -> None:
    with pytest.raises(CoverageError, match=r"nobody holds \[20:40, 0:16\] of 'embed'.*give the process group"):
        FullTensors(Halves(0, 2, "float32"))


def test_boxes_that_changed_since_are_refused() -> None:
    source = TensorSource(full_of("float32"))
    full = FullTensors(source)
    source.shards = lambda: [Shard("embed", (0, 0), torch.zeros(20, 16))]
    with pytest.raises(SourceError, match="no longer holds 'embed'"):
        dict(full)


@pytest.mark.integration
def test_ranks_of_a_group_gather_every_tensor(tmp_path: Path) -> None:
    program = Path(__file__).with_name("full_ranks.py")
    done = subprocess.run([sys.executable, program, tmp_path], timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = torch.load(tmp_path / f"found.{rank}")
        assert len(found) == 8 + 4
        assert all(found.values()), found
