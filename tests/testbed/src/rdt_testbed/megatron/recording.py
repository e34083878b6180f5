"""Counts what a piece of code costs: collectives that run in it, and tensors that it makes, in the thread that asks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Record(TorchDispatchMode):
    """While its block lasts, writes down every collective and the size of every storage that comes into being.

    Attributes:
        collectives: names of operators.
        made: bytes of each new storage; a view is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[str] = []
        self.made: list[int] = []

    @property
    def largest(self) -> int:
        """Bytes of the largest new storage, 0 without any."""
        return max(self.made, default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func).startswith("c10d"):
            self.collectives.append(str(func))
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs or {}))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                self.made.append(storage.nbytes())
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
