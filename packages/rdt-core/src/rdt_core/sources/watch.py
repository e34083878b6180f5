"""Do parameters lie where they lay? Asked before every sync, of every parameter, so in columns and not one by one.

A source checks each parameter with care when it is declared and whenever something here differs; between two syncs mostly
nothing does, and a few passes in C over all of them say so. Nothing is kept alive: what was replaced may be freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from operator import attrgetter, getitem, not_
from typing import Any

import torch
from torch import nn


def fingerprint(tensors: Iterable[torch.Tensor]) -> Any:
    """Addresses and sizes of all tensors: differs from an earlier one when memory moved, was emptied or resized."""
    listed = list(tensors)  # one pass in C for each column: this runs in every sync, over every shard
    with _plainly():
        return tuple(map(torch.Tensor.data_ptr, listed)), tuple(map(attrgetter("nbytes"), listed))


def _plainly() -> Any:
    """While it is entered, classes of tensors with functions of their own (engines' parameters) are asked as tensors, in C."""
    return torch._C.DisableTorchFunctionSubclass()


class ParameterWatch:
    """Where parameters lie, and how.

    Args:
        owners: module of each parameter.
        keys: its name there.
        buffers: whether it is a buffer.
        sharded: whether it is a DTensor, whose local part is looked at.
        look: what a source does to look with care: it raises where something is wrong, and returns what differs from an earlier
            result when anything that matters did.
    """

    def __init__(
        self,
        owners: Sequence[nn.Module],
        keys: Sequence[str],
        buffers: Sequence[bool],
        sharded: Sequence[bool],
        look: Callable[[], Any],
    ) -> None:
        order = sorted(range(len(keys)), key=lambda number: (buffers[number], sharded[number]))
        self._parameters = [owners[number] for number in order if not buffers[number]]
        self._buffers = [owners[number] for number in order if buffers[number]]
        self._keys = [keys[number] for number in order]
        self._sharded = [sharded[number] for number in order]
        self._look = look
        self._columns: Any = None
        self._mark: Any = None

    def mark(self) -> Any:
        """Differs from an earlier one (`==`) when a parameter moved, was resized, laid out otherwise, replaced, or went.

        Raises:
            SourceError: what the source found when it looked with care, because something differed.
        """
        columns = self._now()
        if columns is None or columns != self._columns:
            self._mark = self._look()
            self._columns = columns
        return self._mark

    def _now(self) -> Any:
        tables = chain(map(attrgetter("_parameters"), self._parameters), map(attrgetter("_buffers"), self._buffers))
        try:
            tensors = list(map(getitem, tables, self._keys))
            local = tensors
            specs: tuple[int, ...] = ()
            if any(self._sharded):
                placed = list(compress(tensors, self._sharded))
                specs = tuple(map(id, map(attrgetter("_spec"), placed)))
                local = [
                    *compress(tensors, map(not_, self._sharded)),
                    *map(attrgetter("_local_tensor"), placed),
                ]
            with _plainly():
                plain = list(map(torch.Tensor.is_contiguous, local))
                bent = [tensor.stride() for tensor in compress(local, map(not_, plain))]
                forms = list(map(attrgetter("dtype", "shape"), local))
            return list(map(id, tensors)), specs, fingerprint(local), forms, plain, bent
        except (AttributeError, KeyError, TypeError):
            return None  # one is gone, or of another kind: the source says which


class TreeWatch:
    """Whether the modules below some others are those of before.

    Args:
        roots: whose modules are remembered.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._modules = [module for root in roots for module in root.modules()]
        self._children = self._now()

    def is_same(self) -> bool:
        """False once a module was added, taken away or replaced, or got or lost a parameter."""
        return self._now() == self._children

    def _now(self) -> tuple[list[int], list[int]]:
        children = chain.from_iterable(map(dict.values, map(attrgetter("_modules"), self._modules)))
        return list(map(id, children)), list(map(len, map(attrgetter("_parameters"), self._modules)))
