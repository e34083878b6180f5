"""Sharded modules over real gloo ranks: their shards tile every tensor, alias the parameters, and gather nothing."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_core.sources.fsdp import axis_runs, held_flat, held_whole, row_major
from rdt_testbed.warm import Warm

RANKS = {
    "even": 2, "uneven": 4, "columns": 4, "hybrid": 4, "tied": 2, "ignored_by_fsdp": 2, "tensor_parallel": 4,
    "strided": 4, "off_mesh": 4, "experts": 4, "fsdp1_even": 2, "fsdp1_uneven": 4, "fsdp1_tied": 4,
    "fsdp1_hybrid": 4, "fsdp1_whole": 2, "ddp": 2,
}  # fmt: skip
REFUSALS = {
    "refuse_unsharded": 2, "refuse_fsdp1_flat": 2, "refuse_fsdp1_unsharded": 2, "refuse_partial": 2,
    "refuse_local_shape": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm_core: Warm | None) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    python = warm_core.python if warm_core else sys.executable
    script = Path(__file__).with_name("sources_ranks.py")
    for ranks in (2, 4):
        names = [name for name, wanted in {**RANKS, **REFUSALS}.items() if wanted == ranks]
        command = [python, str(script), str(folder), str(ranks), *names]
        done = subprocess.run(command, timeout=300, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return folder


def results(folder: Path, name: str) -> list[dict[str, Any]]:
    ranks = range({**RANKS, **REFUSALS}[name])
    failed = [folder / f"{name}.{rank}.txt" for rank in ranks]
    assert not any(file.exists() for file in failed), "".join(file.read_text() for file in failed if file.exists())
    return [torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for rank in ranks]


def assemble(ranks: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Puts the distinct boxes of all ranks together; returns tensors, and how many of them hold each element."""
    tensors: dict[str, torch.Tensor] = {}
    counts: dict[str, torch.Tensor] = {}
    boxes: dict[tuple, torch.Tensor] = {}
    for rank in ranks:
        for name, offset, value in rank["shards"]:
            box = (name, offset, tuple(value.shape))
            assert torch.equal(boxes.setdefault(box, value), value), f"replicas of {box} differ"
    for name, shape, _ in ranks[0]["metadata"]:
        counts[name] = torch.zeros(shape, dtype=torch.int)
    for (name, offset, shape), value in boxes.items():
        where = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
        tensors.setdefault(name, torch.full(counts[name].shape, torch.nan, dtype=value.dtype))[where] = value
        counts[name][where] += 1
    return tensors, counts


@pytest.mark.integration
@pytest.mark.parametrize("name", RANKS)
def test_shards_of_all_ranks_are_the_tensors(folder: Path, name: str) -> None:
    ranks = results(folder, name)
    tensors, counts = assemble(ranks)
    oracle = ranks[0]["full"]
    assert set(tensors) == set(oracle)
    for tensor, count in counts.items():
        assert bool((count == 1).all()), f"{tensor}: {count}"
        assert torch.equal(tensors[tensor], oracle[tensor]), tensor


@pytest.mark.integration
@pytest.mark.parametrize("name", RANKS)
def test_ranks_declare_the_same_without_a_collective_or_a_copy(folder: Path, name: str) -> None:
    ranks = results(folder, name)
    for rank in ranks:
        assert rank["metadata"] == ranks[0]["metadata"]
        assert rank["ops"] == []  # nothing but views ran: no collective, nothing allocated
        assert all(rank["aliases"])
        assert all(rank["same"])


def boxes(rank: dict[str, Any], name: str) -> list[tuple]:
    return [(offset, tuple(value.shape)) for tensor, offset, value in rank["shards"] if tensor == name]


@pytest.mark.integration
def test_uneven_shards_are_not_padded_and_empty_ones_not_declared(folder: Path) -> None:
    ranks = results(folder, "uneven")
    assert [boxes(rank, "embed.weight") for rank in ranks] == [
        [((0, 0), (2, 5))], [((2, 0), (2, 5))], [((4, 0), (2, 5))], [((6, 0), (1, 5))]
    ]  # fmt: skip
    assert [boxes(rank, "layers.0.up.weight") for rank in ranks] == [
        [((0, 0), (1, 5))], [((1, 0), (1, 5))], [((2, 0), (1, 5))], []
    ]  # fmt: skip


@pytest.mark.integration
def test_replicas_declare_equal_boxes(folder: Path) -> None:
    for name in ("hybrid", "fsdp1_hybrid"):
        declared = [[shard[:2] for shard in rank["shards"]] for rank in results(folder, name)]
        assert declared[0] == declared[2] != declared[1] == declared[3], name


@pytest.mark.integration
def test_tied_head_is_declared_once(folder: Path) -> None:
    for name in ("tied", "fsdp1_tied"):
        names = [tensor for tensor, _, _ in results(folder, name)[0]["metadata"]]
        assert "embed.weight" in names
        assert "head.weight" not in names


@pytest.mark.integration
def test_fsdp_over_tp_really_deals_rows_out_twice(folder: Path) -> None:
    ranks = results(folder, "tensor_parallel")
    assert "StridedShard" in ranks[0]["placements"]
    assert any(len(boxes(rank, "weight")) > 1 for rank in results(folder, "strided"))


@pytest.mark.integration
def test_flat_shards_cut_rows(folder: Path) -> None:
    ranks = results(folder, "fsdp1_tied")
    assert max(len(boxes(rank, name)) for rank in ranks for name, _, _ in rank["metadata"]) == 3


@pytest.mark.integration
def test_fused_experts_have_checkpoint_names_and_the_wire_dtype(folder: Path) -> None:
    ranks = results(folder, "experts")
    metadata = {name: (shape, dtype) for name, shape, dtype in ranks[0]["metadata"]}
    assert metadata["model.layers.1.mlp.experts.4.up_proj.weight"] == ((12, 16), "bfloat16")
    assert all(value.dtype == torch.float32 for rank in ranks for _, _, value in rank["shards"])


@pytest.mark.integration
def test_a_rank_outside_the_mesh_declares_names_only(folder: Path) -> None:
    assert [len(rank["shards"]) for rank in results(folder, "off_mesh")] == [1, 1, 0, 0]


@pytest.mark.integration
def test_refuses_what_is_unsharded_for_the_moment(folder: Path) -> None:
    for rank in results(folder, "refuse_unsharded"):
        assert "reshard()" in rank["late"]["error"]
        assert "reshard()" in rank["early"]["error"]
        assert rank["after"]["error"] == ""
        assert "'layers.1' is unsharded" in rank["child"]["error"]
    for rank in results(folder, "refuse_fsdp1_unsharded"):
        assert "is unsharded" in rank["error"]
        assert rank["after"]["error"] == ""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("refuse_fsdp1_flat", ["use_orig_params=True"]),
        ("refuse_partial", ["'weight'", "Partial"]),
        ("refuse_local_shape", ["'weight'", "expected (2, 3)"]),
    ],
)
def test_refuses_layouts_that_have_no_boxes(folder: Path, name: str, texts: list[str]) -> None:
    for rank in results(folder, name):
        assert all(text in rank["error"] for text in texts), rank["error"]


shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@pytest.mark.unit
@given(shape=shapes, data=st.data())
def test_a_flat_range_is_few_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    first = data.draw(st.integers(0, values.numel()))
    end = data.draw(st.integers(first, values.numel()))
    flat = values.flatten()[first:end]
    got = torch.full(shape, -1)
    held = held_flat(shape, first, end)
    assert len(held) <= max(2 * len(shape) - 1, 1)
    for box in held:
        where = tuple(slice(offset, offset + size) for offset, size in zip(box.offset, box.shape, strict=True))
        assert bool((got[where] == -1).all())
        got[where] = flat.as_strided(box.shape, box.strides, flat.storage_offset() + box.start)
    expected = torch.where((values >= first) & (values < end), values, -1)
    assert torch.equal(got, expected)


def chunk(values: torch.Tensor, count: int, index: int) -> torch.Tensor:
    chunks = values.chunk(count)
    return chunks[index] if index < len(chunks) else values[:0]


@pytest.mark.unit
@given(size=st.integers(0, 30), data=st.data())
def test_axis_runs_are_what_torch_chunk_gives(size: int, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=3))
    shardings = [(count, data.draw(st.integers(0, count - 1)), factor) for count, factor in counts]
    values = torch.arange(size)
    for count, index, factor in shardings:
        values = torch.cat([chunk(chunk(values, factor, piece), count, index) for piece in range(factor)])
    runs = axis_runs(size, shardings)
    assert [value for first, end in runs for value in range(first, end)] == values.tolist()
    assert all(first < end for first, end in runs)


@pytest.mark.unit
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_strides_and_whole_boxes(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    if 0 in shape:
        assert held_whole(tensor) == ()
    else:
        assert row_major(shape) == tensor.stride()
        assert [(box.offset, box.shape) for box in held_whole(tensor)] == [((0,) * len(shape), shape)]


@pytest.mark.unit
def test_every_row_range_of_a_matrix() -> None:
    for first, end in product(range(13), repeat=2):
        volume = sum(torch.Size(box.shape).numel() for box in held_flat((3, 4), first, min(end, 12)))
        assert volume == max(0, min(end, 12) - first)
