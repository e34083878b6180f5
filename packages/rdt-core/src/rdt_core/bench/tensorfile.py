"""Files in the safetensors format, written and mapped without its library: what the peer on tmpfs reads and writes.

Eight bytes with the length of a JSON header, the header (dtype, shape and place of each tensor), then the tensors end to
end. Only the dtypes that the bench uses; a file is trusted, because the bench wrote it.
"""

from __future__ import annotations

import json
import mmap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from .. import wire

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def write_header(file: BinaryIO, tensors: Sequence[wire.TensorMeta]) -> None:
    """Writes the header; the tensors follow with `write_tensor`, in the same order."""
    header: dict[str, object] = {}
    offset = 0
    for meta in tensors:
        end = offset + nbytes(meta)
        header[meta.name] = {"dtype": _DTYPES[meta.dtype], "shape": list(meta.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)


def write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    """Writes one tensor's bytes."""
    file.write(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)


def read(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a file as views of its mapped pages."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    start = 8 + int.from_bytes(pages[:8], "little")
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so
        warnings.simplefilter("ignore", UserWarning)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
    known = {text: name for name, text in _DTYPES.items()}
    for name, entry in json.loads(pages[8:start]).items():
        begin, end = entry["data_offsets"]
        part = whole[start + begin : start + end]
        yield name, part.view(getattr(torch, known[entry["dtype"]])).view(entry["shape"])


def nbytes(meta: wire.TensorMeta) -> int:
    """Bytes of a checkpoint tensor."""
    count: int = getattr(torch, meta.dtype).itemsize
    for size in meta.shape:
        count *= size
    return count
