"""Numbers, tables and files of the bench."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch

from rdt_core.bench import BenchReport, Cell, Floors, PeerRow, p50, p95, ratio, tensorfile, to_dict
from rdt_core.bench.peers import bucket_size, buckets
from rdt_core.bench.show import tables
from rdt_core.shapes import checkpoint_tensors

pytestmark = pytest.mark.unit

CELL = Cell(
    mode="live", kind="mapped", used_mode="live", used_kinds=("mapped",), bytes=2_000_000_000, first_s=1.0,
    seconds=(0.1, 0.2, 0.3), floors=Floors(copy=0.05, span=0.1), floor="span", phases={"begin": 0.01, "total": 0.2},
    reader_phases={"transfer": 0.1}, sent=(2_000_000_000,), received=(2_000_000_000,), exact=True, notes=("floor nixl: no",),
)  # fmt: skip
REPORT = BenchReport(
    model="tiny", layers=0, tensors=21, bytes=279_168, trainer="fsdp:ranks=1", engine="vllm:tp=1", device="cuda",
    device_name="a GPU", gpus="separate", placement=((0,), (1,)), rounds=3,
    cells=(CELL, Cell(mode="live", kind="ray", error="TransportError: no way")),
    peers=(PeerRow(name="broadcast", bytes=1, first_s=1, seconds=(0.5,), exact=True), PeerRow(name="disk", error="full")),
)  # fmt: skip


def test_percentiles_and_ratio() -> None:
    assert p50([3, 1, 2]) == 2
    assert p95([0.0, 1.0]) == pytest.approx(0.95)
    assert p95([4.0]) == 4.0
    assert math.isnan(p50([]))
    assert math.isnan(p95([]))
    assert ratio(CELL) == pytest.approx(2.0)
    assert math.isnan(ratio(Cell(mode="live", kind="ray")))


def test_errors_are_neither_exact_nor_wrong() -> None:
    assert REPORT.exact
    assert not REPORT.failed
    wrong = Cell(mode="live", kind="ray", seconds=(1.0,))
    assert not BenchReport(**{**_fields(), "cells": (CELL, wrong)}).exact
    assert BenchReport(**{**_fields(), "cells": REPORT.cells[1:], "peers": REPORT.peers[1:]}).failed


def _fields() -> dict:
    return {name: getattr(REPORT, name) for name in REPORT.__struct_fields__}


def test_json_carries_what_follows_and_no_nan() -> None:
    plain = json.loads(json.dumps(to_dict(REPORT), allow_nan=False))
    assert plain["cells"][0]["p50"] == 0.2
    assert plain["cells"][0]["gbps"] == pytest.approx(10.0)
    assert plain["cells"][0]["ratio"] == pytest.approx(2.0)
    assert plain["cells"][1]["p50"] is None
    assert plain["peers"][0]["p95"] == 0.5


def test_tables_show_errors_beside_the_rest() -> None:
    from rich.console import Console

    out = io.StringIO()
    for one in tables(REPORT):
        Console(file=out, width=200).print(one)
    text = out.getvalue()
    for words in ("no way", "2.00 x span", "full", "2.5 x", "engine ranks on GPU 1", "floor nixl: no", "yes"):
        assert words in text


def test_buckets_hold_every_tensor_once_and_split_none() -> None:
    tensors = checkpoint_tensors("tiny-mla")
    made = buckets(tensors, 20_000)
    assert [index for bucket in made for index, _ in bucket] == list(range(len(tensors)))
    assert len(made) > 5
    largest = max(map(tensorfile.nbytes, tensors))
    assert bucket_size(tensors, made) == max(largest, bucket_size(tensors, made))
    for bucket in made:
        end = 0
        for index, offset in bucket:
            assert offset >= end
            end = offset + tensorfile.nbytes(tensors[index])
        assert end <= 20_000 or len(bucket) == 1


def test_tensor_files_are_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = checkpoint_tensors("tiny-mla")
    weights = {meta.name: torch.randn(meta.shape).to(getattr(torch, meta.dtype)) for meta in tensors}
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        tensorfile.write_header(file, tensors)
        for value in weights.values():
            tensorfile.write_tensor(file, value)
    theirs = load_file(path)
    ours = dict(tensorfile.read(path))
    assert theirs.keys() == ours.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(theirs[name], value)
        assert torch.equal(ours[name], value)
