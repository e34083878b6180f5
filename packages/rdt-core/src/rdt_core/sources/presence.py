"""Is a parameter's memory there? Refused: meta tensors, subclasses that hide their memory, storages that were emptied.

Trainers offload parameters between steps, by moving them or by resizing their storage to nothing; a view of such a
parameter would be read as garbage, or not at all.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import SourceError


def check_hidden(name: str, tensor: torch.Tensor) -> None:
    """Refuses tensor subclasses that hide their memory (quantised parameters); a DTensor's local part is looked at instead.

    Raises:
        SourceError: names the parameter and its class.
    """
    # not every class that wraps others says so by `__tensor_flatten__`; all of them decide what their operations do
    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wraps or is_traceable_wrapper_subclass(tensor):
        raise SourceError(
            f"{name!r} is a {type(tensor).__name__}, which hides its memory (a quantised parameter); only plain tensors and "
            f"DTensors can be declared: keep parameters in the dtype of the checkpoint (in Megatron, no fp8_param_gather)"
        )


def check_present(name: str, tensor: torch.Tensor) -> None:
    """Refuses a parameter whose bytes cannot be read where it says that they are.

    Args:
        name: for errors.
        tensor: plain, or the local part of a DTensor.

    Raises:
        SourceError: it has no memory, or hides it.
    """
    check_hidden(name, tensor)
    if tensor.is_meta:
        raise SourceError(f"{name!r} is on the meta device and has no bytes to publish; materialise the module first")
    if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        raise SourceError(
            f"{name!r} of shape {tuple(tensor.shape)} has an empty storage: it is offloaded. Bring it back before publish"
        )
