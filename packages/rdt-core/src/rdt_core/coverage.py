"""The gate towards the trainer: everything that it offers is taken by every replica, entirely.

The gate towards the engine (everything that it wants has an owner) is `planning`'s. Refuses names and elements that no
rank of a replica takes, unless the source says that engines need not take them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from . import wire
from .errors import CoverageError

_SHOWN = 10


def check_taken(
    replica: str, ranks: Sequence[wire.EngineManifest], tensors: Sequence[wire.TensorMeta], ignored: Collection[str]
) -> None:
    """Refuses a replica that leaves checkpoint tensors, or parts of them, to nobody.

    Args:
        replica: its name.
        ranks: the manifests of all its engine ranks.
        tensors: what the source offers.
        ignored: names that engines need not take.

    Raises:
        CoverageError: lists the tensors.
    """
    taken: dict[str, int] = {}
    for manifest in ranks:
        for name, elements in zip(manifest.taken, manifest.taken_elements, strict=True):
            taken[name] = taken.get(name, 0) + elements
    skip = set(ignored)
    left = []
    for tensor in tensors:
        if tensor.name in skip:
            continue
        total = 1
        for size in tensor.shape:
            total *= size
        if tensor.name not in taken and total:
            left.append(tensor.name)
        elif taken.get(tensor.name, 0) < total:
            left.append(f"{tensor.name} ({taken.get(tensor.name, 0)} of {total} elements)")
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        raise CoverageError(
            f"replica {replica!r} takes nothing of {len(left)} checkpoint tensor(s) that the trainer offers: "
            f"{', '.join(left[:_SHOWN])}{more}; if engines need not have them, name them in the source's `ignored`"
        )
