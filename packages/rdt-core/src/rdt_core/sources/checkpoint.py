"""`CheckpointSource`: a folder of safetensors files as one source rank, its tensors mapped from the files.

For comparing a running engine with what is on disk, and for publishing a checkpoint to engines that serve already. Nothing is
read before it is asked for; publish it in buckets, which need the least memory. Refused: files that are cut short, tensors
outside their file, and one name in two files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..errors import SourceError
from ..wire import DTYPE_BYTES, TensorMeta
from .base import Shard
from .dtypes import DtypeRule, check_rule, wire_dtype

INDEX = "model.safetensors.index.json"
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32", "I64": "int64", "U64": "uint64", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_MOST_HEADER_BYTES = 100 << 20


class CheckpointSource:
    """A checkpoint on disk as a `WeightSource`.

    Args:
        folder: with an index and its files, or with `*.safetensors` alone; or one such file.
        dtype: of floating-point tensors on the wire; default: as they are stored.
        ignored: names that engines need not take.

    Raises:
        SourceError: there is no checkpoint, or a file is not what it should be.
    """

    def __init__(self, folder: str | os.PathLike[str], *, dtype: DtypeRule | None = None, ignored: Sequence[str] = ()):
        check_rule(dtype)
        self._ignored = tuple(ignored)
        self._tensors: dict[str, torch.Tensor] = {}
        for path in _files(Path(folder)):
            for name, tensor in _mapped(path).items():
                if name in self._tensors:
                    raise SourceError(f"{path}: {name!r} is in another file of the checkpoint too")
                self._tensors[name] = tensor
        if not self._tensors:
            raise SourceError(f"{folder}: its files hold no tensor")
        self._metadata = tuple(
            TensorMeta(
                name=name, shape=tuple(tensor.shape), dtype=wire_dtype(dtype, name, tensor.dtype, is_buffer=False)
            )
            for name, tensor in sorted(self._tensors.items())
        )

    def metadata(self) -> Sequence[TensorMeta]:
        """See `WeightSource.metadata`."""
        return self._metadata

    def shards(self) -> Sequence[Shard]:
        """See `WeightSource.shards`: every tensor as a whole."""
        return [Shard(meta.name, (0,) * len(meta.shape), self._tensors[meta.name]) for meta in self._metadata]

    def ignored(self) -> Sequence[str]:
        """See `WeightSource.ignored`."""
        return self._ignored


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    index = folder / INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            files = [folder / name for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"{index} is no index of a checkpoint: {error}") from error
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [str(path) for path in files if not path.is_file()]
    if missing or not files:
        found = f"{', '.join(missing[:4])} is missing" if missing else "there is no *.safetensors file"
        raise SourceError(f"{folder} holds no checkpoint: {found}")
    return files


def _mapped(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file, as views of one mapping of it that nobody else sees writes to."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise SourceError(f"{path} is no safetensors file: {size} bytes, and a header of {length}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise SourceError(f"{path}: its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise SourceError(f"{path}: its header is no object")
    whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return {
        name: _tensor(path, name, entry, whole[8 + length :])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _tensor(path: Path, name: str, entry: Any, data: torch.Tensor) -> torch.Tensor:
    try:
        dtype, shape, (begin, end) = (
            _DTYPES[entry["dtype"]],
            [int(size) for size in entry["shape"]],
            entry["data_offsets"],
        )
        begin, end = int(begin), int(end)
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{path}: the header says of {name!r} what is not understood: {str(entry)[:200]}") from error
    wanted = prod(shape) * DTYPE_BYTES[dtype]
    if min(shape, default=0) < 0 or not 0 <= begin <= end <= data.numel() or end - begin != wanted:
        raise SourceError(
            f"{path}: {name!r} of shape {shape} and dtype {dtype} lies at bytes {begin} to {end} of {data.numel()}; expected "
            f"{wanted} bytes inside them"
        )
    span = data[begin:end]
    if int(span.storage_offset()) % DTYPE_BYTES[dtype]:
        span = span.clone()  # a header of odd length: no view can start there
    kind: torch.dtype = getattr(torch, dtype)
    return span.view(kind).view(shape)
