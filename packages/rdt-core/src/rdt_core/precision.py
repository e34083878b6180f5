"""What the wire's dtype does to an engine's parameters: where it is narrower than they are, and where it must not be.

A trainer says in which dtype its tensors travel, an engine rank has parameters of its own; both are known once its loaders
are traced. Refused: float8 on the wire into parameters of another dtype, since without its scales a cast gives other weights.
A narrower dtype may be right (the trainer's own, or weights that are rounded anyway), and is told once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .errors import CoverageError, some
from .tracing import Slice
from .wire import DTYPE_BYTES

_SHOWN = 4
#: float8 that holds scaled numbers; `float8_e8m0fnu` holds scales, powers of two, which every wider dtype holds exactly
_SCALED = ("float8_e4m3", "float8_e5m2")


def check_float8(slices: Sequence[Slice], who: str) -> None:
    """Float8 that travels must land in float8 of the same kind.

    Args:
        slices: what the engine rank's loaders take, and where it lands.
        who: names the engine rank.

    Raises:
        CoverageError: names the tensors, what they travel as and the dtype of the parameters.
    """
    wrong = {
        one.name: f"{one.name!r} ({one.source_dtype} into {one.destination!r} of {one.dtype})"
        for one in slices
        if one.source_dtype.startswith(_SCALED) and one.dtype != one.source_dtype
    }
    if wrong:
        raise CoverageError(
            f"{who}: {len(wrong)} tensors travel in float8 and land in parameters of another dtype, where a cast without their "
            f"scales gives other weights: {some(wrong.values(), _SHOWN)}. Leave float8 out of the source's dtype="
        )


def narrowed(slices: Iterable[Slice]) -> list[str]:
    """Returns a line for each pair of dtypes in which floating-point tensors travel in fewer bits than where they land."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for one in slices:
        is_narrower = DTYPE_BYTES[one.source_dtype] < DTYPE_BYTES.get(one.dtype, 0)
        if is_narrower and "float" in one.source_dtype and "float" in one.dtype and "e8m0" not in one.source_dtype:
            found.setdefault((one.source_dtype, one.dtype), {})[one.name] = None
    return [
        f"{len(names)} tensors travel as {wire} and land in parameters of {own} ({some(map(repr, names), _SHOWN)}): whatever the "
        f"trainer's parameters hold beyond {wire} is lost on the wire. Where they hold more, give the source the engine's dtype "
        "(dtype=), or none"
        for (wire, own), names in found.items()
    ]
