"""Does a replica take everything that the source ranks hold? The other half of the coverage gate, over all its ranks.

`planning` makes sure that all that is wanted has an owner; here, that all that is held is wanted by somebody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .errors import CoverageError, some
from .geometry import Box, subtract
from .wire import TensorMeta

#: what an engine rank takes: (index of the tensor, box)
TakenBox = tuple[int, Box]


def untaken(
    plans_taken: Iterable[Iterable[str]], tensors: Sequence[TensorMeta], ignored: Iterable[str] = ()
) -> list[str]:
    """Names that no rank of a replica takes anything of.

    Args:
        plans_taken: `Plan.taken` of every rank of one replica.
        tensors: of the whole model.
        ignored: names that need not be taken.
    """
    known = {name for taken in plans_taken for name in taken} | set(ignored)
    return [meta.name for meta in tensors if meta.name not in known and 0 not in meta.shape]


def check_taken(
    boxes: Iterable[Iterable[TakenBox]], tensors: Sequence[TensorMeta], ignored: Iterable[str] = ()
) -> None:
    """Every element of every tensor must be taken by some rank of a replica.

    Args:
        boxes: `Plan.taken_boxes` of every rank of one replica.
        tensors: of the whole model.
        ignored: names that need not be taken.

    Raises:
        CoverageError: names the tensors that are not taken, and of those that are taken in part a box that is not.
    """
    by_tensor: dict[int, set[Box]] = {}
    for taken in boxes:
        for tensor, box in taken:
            by_tensor.setdefault(tensor, set()).add(box)
    skip = set(ignored)
    wrong: list[str] = []
    for index, meta in enumerate(tensors):
        if meta.name in skip or 0 in meta.shape:
            continue
        held = by_tensor.get(index, set())
        full = Box.full(meta.shape)
        if full in held:
            continue
        left = subtract(full, sorted(held, key=lambda box: (box.offset, box.shape)))
        if left:
            wrong.append(f"{meta.name!r} (elements {left[0]} of shape {meta.shape})" if held else repr(meta.name))
    if wrong:
        raise CoverageError(
            f"no engine rank of the replica takes {len(wrong)} of {len(tensors)} checkpoint tensors: {some(wrong, 20)}; "
            f"if the engine has no use for them, name them in `ignored`"
        )
