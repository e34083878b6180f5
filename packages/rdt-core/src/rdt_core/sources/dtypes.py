"""The dtype in which a parameter travels, as a trainer asks for it.

Refused: dtypes that the wire does not know, and what is no dtype at all. A source that narrows its parameters says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from ..errors import SourceError
from ..wire import DTYPE_BYTES

log = logging.getLogger(__name__)

#: a dtype for floating-point parameters, or a function from (checkpoint name, own dtype) to one or None
DtypeRule = torch.dtype | Callable[[str, torch.dtype], torch.dtype | None]


def check_rule(rule: object) -> None:
    """Refuses what is neither a dtype nor a function that gives one.

    Raises:
        SourceError: says what is accepted.
    """
    if rule is None or isinstance(rule, torch.dtype) or (callable(rule) and not isinstance(rule, type)):
        return
    named = getattr(torch, rule, None) if isinstance(rule, str) else None
    wanted = f"write dtype={named}" if isinstance(named, torch.dtype) else "e.g. dtype=torch.bfloat16"
    raise SourceError(
        f"dtype={rule!r} is a {type(rule).__name__}; expected a torch.dtype, a function from (checkpoint name, own dtype) to one "
        f"or None, or None for each parameter's own: {wanted}"
    )


def wire_dtype(rule: DtypeRule | None, name: str, own: torch.dtype, *, is_buffer: bool) -> str:
    """Returns the name of the dtype in which a checkpoint tensor travels.

    Args:
        rule: what the trainer asked for; None: its own.
        name: of the checkpoint tensor.
        own: dtype of the parameter that holds it.
        is_buffer: whether it is a buffer; a plain dtype is for parameters only.

    Raises:
        SourceError: the wire does not know the dtype, or the function gave none.
    """
    dtype: object = own
    if isinstance(rule, torch.dtype):
        if own.is_floating_point and not is_buffer:
            dtype = rule
    elif rule is not None:
        found: object = rule(name, own)
        dtype = own if found is None else found
    if not isinstance(dtype, torch.dtype):
        raise SourceError(
            f"dtype= gave {dtype!r} for {name!r}, a {type(dtype).__name__}; expected a torch.dtype, or None for its own, {own}"
        )
    text = str(dtype).removeprefix("torch.")
    if text not in DTYPE_BYTES:
        raise SourceError(f"{name!r} would have dtype {text!r} on the wire; known: {', '.join(DTYPE_BYTES)}")
    return text


def tell_narrowed(pairs: Iterable[tuple[torch.dtype, str]]) -> None:
    """Logs how many tensors travel in fewer bits than their parameters have; a warning where that is float8 without scales.

    Whether anything is lost is known where they land (`precision`): an engine in the wire's dtype would round them itself.

    Args:
        pairs: for each checkpoint tensor its parameter's own dtype, and the name of that on the wire.
    """
    narrowed: dict[str, int] = {}
    for own, wire in pairs:
        if own.is_floating_point and DTYPE_BYTES[wire] < own.itemsize:
            change = f"{str(own).removeprefix('torch.')} -> {wire}"
            narrowed[change] = narrowed.get(change, 0) + 1
    for change, count in narrowed.items():
        is_unscaled = "-> float8" in change
        log.log(
            logging.WARNING if is_unscaled else logging.INFO,
            "%d tensors travel in fewer bits than their parameters have: %s%s",
            count, change, ", cast as they are, without scales" if is_unscaled else "",
        )  # fmt: skip
