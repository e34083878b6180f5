"""`FullTensors`: whole tensors out of shards, in one process and over ranks, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
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


def test_layers_come_in_order_whatever_the_source_says() -> None:
    names = ["head", "layers.10.a", "layers.2.a", "norm", "layers.2.b", "embed"]
    tensors = {name: torch.full((2,), float(index)) for index, name in enumerate(names)}
    wanted = ["head", "layers.2.a", "layers.2.b", "layers.10.a", "norm", "embed"]
    metadata = [TensorMeta(name=name, shape=(2,), dtype="float32") for name in names]
    for source in (TensorSource(tensors), IterableSource(metadata, lambda: tensors.items())):
        full = FullTensors(source)
        assert [meta.name for meta in full.metadata()] == wanted
        assert equal(dict(full), {name: tensors[name] for name in wanted})


def test_what_can_only_be_iterated_is_given_as_it_was_declared() -> None:
    """Whatever its dtype, and though the source writes every tensor where the last one was."""
    metadata = [TensorMeta(name=name, shape=shape, dtype="bfloat16") for name, shape in SHAPES.items()]
    for dtype in (torch.float32, torch.bfloat16):
        buffer = torch.empty(1000, dtype=dtype)

        def iterate(buffer: torch.Tensor = buffer) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in full_of("float32").items():
                yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

        found = dict(FullTensors(IterableSource(metadata, iterate)))
        assert equal(found, full_of("bfloat16"))
        assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


class Stray:
    """Only iterated, by somebody who does not check what it yields."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(name=name, shape=(2,), dtype="float32") for name in ("a", "b")]

    def ignored(self) -> list[str]:
        return []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, torch.zeros(3 if name == "b" and "long" in self.names else 2)) for name in self.names)


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (["a"], "ends before 'b'"),
        (["a", "b", "a"], r"'a' of shape \(2,\): it is not declared, or came before"),
        (["a", "c", "b"], r"'c' of shape \(2,\): it is not declared, or came before"),
        (["a", "b", "long"], r"'b' of shape \(3,\): \(2,\) is declared"),
    ],
)
def test_a_pass_that_strays_is_refused(names: list[str], wrong: str) -> None:
    with pytest.raises(SourceError, match=wrong):
        list(FullTensors(Stray(names)))


def test_tensors_are_given_on_the_device_that_was_asked_for() -> None:
    """The device `meta` stands for a GPU: nothing is computed there, but tensors say where they are."""
    metadata = [TensorMeta(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()]
    for source in (TensorSource(full_of("float32")), IterableSource(metadata, lambda: full_of("float32").items())):
        assert {tensor.device.type for _, tensor in FullTensors(source, device="meta")} == {"meta"}
    source = TensorSource(full_of("float32"))
    own = {shard.name: shard.tensor.data_ptr() for shard in source.shards()}
    for device in (None, "cpu"):
        assert {name: one.data_ptr() for name, one in FullTensors(source, device=device)} == own


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
