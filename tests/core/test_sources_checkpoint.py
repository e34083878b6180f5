"""Checkpoints on disk as sources: the tensors of real safetensors files, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rdt_core.errors import SourceError
from rdt_core.publisher import Publisher
from rdt_core.sources import CheckpointSource, WeightSource
from rdt_core.transport import LocalExchange

pytestmark = pytest.mark.unit


def tensors() -> dict[str, torch.Tensor]:
    return {
        "model.embed.weight": torch.randn(7, 5),
        "model.layers.0.w": torch.randn(3, 4).bfloat16(),
        "model.layers.0.scale": torch.randn(()).double(),
        "model.layers.1.w": torch.randn(3, 4).to(torch.float8_e4m3fn),
        "model.ids": torch.arange(6),
        "model.empty": torch.zeros(0, 4),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("split", [False, True], ids=["one file", "several files"])
def test_tensors_are_those_of_the_files(tmp_path: Path, split: bool) -> None:
    wanted = tensors()
    if split:
        files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(wanted)}
        for file in set(files.values()):
            save_file({name: wanted[name] for name in wanted if files[name] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
        save_file({"consolidated": torch.zeros(1)}, tmp_path / "consolidated.safetensors")  # not in the index
    else:
        save_file(wanted, tmp_path / "model.safetensors")
    source = CheckpointSource(tmp_path, ignored=["model.ids"])
    assert isinstance(source, WeightSource)
    shards = {shard.name: shard for shard in source.shards()}
    assert [meta.name for meta in source.metadata()] == sorted(wanted) == list(shards)
    for meta in source.metadata():
        tensor = wanted[meta.name]
        assert (meta.shape, meta.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        assert bits(shards[meta.name].tensor) == bits(tensor)
        assert shards[meta.name].offset == (0,) * tensor.dim()
    assert source.ignored() == ("model.ids",)


def test_writes_to_a_tensor_stay_in_this_process(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    source = CheckpointSource(folder)
    source.shards()[0].tensor.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_dtype_for_the_wire_and_one_file(folder: Path) -> None:
    source = CheckpointSource(folder / "model.safetensors", dtype=torch.bfloat16)
    dtypes = {meta.name: meta.dtype for meta in source.metadata()}
    assert dtypes["model.embed.weight"] == "bfloat16"
    assert dtypes["model.ids"] == "int64"
    publisher = Publisher(
        source,
        group="g",
        rank=0,
        world_size=1,
        mode="bucket",
        kinds=("local",),
        bucket_bytes=64,
        exchange=LocalExchange(),
    )
    assert publisher.rounds > 1
    assert list(publisher.rounds_written()) == list(range(publisher.rounds))
    publisher.close()


def test_a_header_of_odd_length(tmp_path: Path) -> None:
    value = torch.arange(3, dtype=torch.float32)
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    header += b" " * (1 - len(header) % 2)
    assert len(header) % 2
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + value.numpy().tobytes())
    assert torch.equal(CheckpointSource(tmp_path).shards()[0].tensor, value)


def entry(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (entry(data_offsets=[0, 12]), "lies at bytes 0 to 12 of 8; expected 8 bytes inside"),
        (entry(data_offsets=[4, 12]), "lies at bytes 4 to 12 of 8"),
        (entry(data_offsets=[-4, 4]), "lies at bytes -4 to 4 of 8"),
        (entry(shape=[-2]), r"of shape \[-2\]"),
        (entry(shape=[1 << 62, 4]), "expected 73786976294838206464 bytes"),
        (entry(dtype="F4"), "what is not understood"),
        (entry(data_offsets=[0]), "what is not understood"),
        ({"x": 3}, "what is not understood"),
        ([], "its header is no object"),
        ({}, "hold no tensor"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, header: object, told: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(SourceError, match=told):
        CheckpointSource(tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"there is no \*\.safetensors file"):
        CheckpointSource(tmp_path)
    path = tmp_path / "x.safetensors"
    for data, told in (
        (b"ab", "2 bytes, and a header of"),
        (bytes([255] * 16), "header of"),
        (b"\x02" + bytes(9), "no JSON"),
    ):
        path.write_bytes(data)
        with pytest.raises(SourceError, match=told):
            CheckpointSource(tmp_path)
    save_file({"x": torch.zeros(1)}, path)
    save_file({"x": torch.zeros(1)}, tmp_path / "y.safetensors")
    with pytest.raises(SourceError, match=r"y\.safetensors: 'x' is in another file"):
        CheckpointSource(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text, told in (("{", "is no index"), ("{}", "is no index"), ('{"weight_map": {"x": "z"}}', "z is missing")):
        index.write_text(text)
        with pytest.raises(SourceError, match=told):
            CheckpointSource(tmp_path)
