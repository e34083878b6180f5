"""How the checks of this package tell what is wrong: tensors compared bit by bit, by name, with the first difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch

from ..errors import ConformanceError


def refuse(what: str, way_out: str = "") -> NoReturn:
    """Raises ConformanceError."""
    raise ConformanceError(f"{what}; {way_out}" if way_out else what)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor as a 1-D uint8 tensor on the CPU; equal only where every bit is (NaN, -0.0)."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


def difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Says how two tensors differ, or "" where they do not: shape, dtype, or the first element that is not the same bits."""
    if tuple(found.shape) != tuple(expected.shape):
        return f"shape {tuple(found.shape)} where {tuple(expected.shape)} is expected"
    if found.dtype != expected.dtype:
        return f"dtype {found.dtype} where {expected.dtype} is expected"
    if torch.equal(bits(found), bits(expected)):
        return ""
    size = found.element_size()
    wrong = (bits(found).view(-1, size) != bits(expected).view(-1, size)).any(dim=1).nonzero().flatten()
    first = int(wrong[0])
    index = tuple(int(part) for part in torch.unravel_index(torch.tensor(first), tuple(found.shape)))
    here, there = (tensor.detach().reshape(-1)[first].item() for tensor in (found.cpu(), expected.cpu()))
    return f"{len(wrong)} of {found.numel()} elements differ, the first at {index}: {here} where {there} is expected"


def compare(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str) -> None:
    """Raises ConformanceError where two states differ in a name, a shape, a dtype or a bit; names up to eight tensors."""
    wrong = [f"{name!r} is missing" for name in expected if name not in found]
    wrong += [f"{name!r} is not expected" for name in found if name not in expected]
    for name, tensor in expected.items():
        if name in found:
            told = difference(found[name], tensor)
            if told:
                wrong.append(f"{name!r}: {told}")
    if wrong:
        more = f" (and {len(wrong) - 8} more)" if len(wrong) > 8 else ""
        refuse(f"{what}: " + "; ".join(wrong[:8]) + more)
