"""The dtype in which a parameter travels, as a trainer asks for it. Refused: dtypes that the wire does not know."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import SourceError
from ..wire import DTYPE_BYTES

#: a dtype for floating-point parameters, or a function from (checkpoint name, own dtype) to one or None
DtypeRule = torch.dtype | Callable[[str, torch.dtype], torch.dtype | None]


def wire_dtype(rule: DtypeRule | None, name: str, own: torch.dtype, *, is_buffer: bool) -> str:
    """Returns the name of the dtype in which a checkpoint tensor travels.

    Args:
        rule: what the trainer asked for; None: its own.
        name: of the checkpoint tensor.
        own: dtype of the parameter that holds it.
        is_buffer: whether it is a buffer; a plain dtype is for parameters only.

    Raises:
        SourceError: the wire does not know the dtype.
    """
    dtype: torch.dtype | None = own
    if isinstance(rule, torch.dtype):
        if own.is_floating_point and not is_buffer:
            dtype = rule
    elif rule is not None:
        dtype = rule(name, own)
    text = str(dtype or own).removeprefix("torch.")
    if text not in DTYPE_BYTES:
        raise SourceError(f"{name!r} would have dtype {text!r} on the wire; known: {', '.join(DTYPE_BYTES)}")
    return text
