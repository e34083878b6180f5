"""Do parameters lie where they lay? Asked in every sync, of every parameter, so in columns and not one by one.

A source checks each parameter with care when it is declared and whenever something here differs; an engine's landing takes
the names and addresses of its model again. Between two syncs mostly nothing does, and a few passes in C over all of them say
so. No tensor is kept alive: what was replaced may be freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        """False once a module was added, taken away, replaced or renamed, or got or lost a parameter."""
        return self._now() == self._children

    def _now(self) -> tuple[list[int], list[str], list[int]]:
        tables = list(map(attrgetter("_modules"), self._modules))
        children = chain.from_iterable(map(dict.values, tables))
        counts = list(map(len, map(attrgetter("_parameters"), self._modules)))
        return list(map(id, children)), list(chain.from_iterable(tables)), counts

    def tables(self, attributes: Iterable[str]) -> list[dict[str, Any]]:
        """Returns dictionaries of all modules: the first of these attributes of each of them, then the next."""
        return list(chain.from_iterable(map(attrgetter(attribute), self._modules) for attribute in attributes))


def place(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the address of the first element, and the bytes of all of them."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def attribute_tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors that modules keep as plain attributes, by name: what post-load steps make of parameters."""
    # engines are traced while they generate, and a forward pass may add attributes meanwhile: so it goes over lists
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in root.named_modules()
        for name, value in list(vars(module).items())
        if isinstance(value, torch.Tensor)
    }


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tensors of a model lie: (address, bytes) by qualified name, tied tensors under each of theirs.

    Attributes:
        parameters: of its parameters.
        tensors: of these, its buffers and, where they are watched, the tensors that modules keep as plain attributes.
    """

    parameters: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, tuple[int, int]]


class AddressWatch:
    """Where the tensors of a model that serves lie: what the landing of an engine compares before and after a sync.

    Args:
        root: the model.
        attributes: whether tensors that modules keep as plain attributes are watched too.
    """

    def __init__(self, root: nn.Module, *, attributes: bool = False) -> None:
        self._root = root
        self._tables = ("_parameters", "_buffers", *(["__dict__"] if attributes else []))
        self._types: list[type] = []
        self._owners: list[int] = []  # of each tensor, the number of the table that it is in
        self._names: list[str] = []  # and its name there
        self._tree = TreeWatch([root])
        self._columns = self._look()
        self._places = self._take()

    def now(self) -> Places:
        """Returns where all of them lie now, those that came since included.

        Names are made only where something differs from the last call. A mapping that is equal to the last one is that one, so
        that `is` tells at once that nothing moved.
        """
        is_same = self._tree.is_same()
        if not is_same:
            self._tree = TreeWatch([self._root])
        columns = self._look()
        if not is_same or columns != self._columns:
            last, found = self._places, self._take()
            self._places = Places(
                last.parameters if found.parameters == last.parameters else found.parameters,
                last.tensors if found.tensors == last.tensors else found.tensors,
            )
            self._columns = columns
        return self._places

    def _look(self) -> Any:
        """What `_take` depends on while the tree is the same: which entries of the modules' tables are tensors, and where."""
        tables = self._tree.tables(self._tables)
        types = list(map(type, chain.from_iterable(map(dict.values, tables))))
        if types != self._types:
            self._types = types
            self._find(tables)
        try:
            places = self._where(tables)
        except (KeyError, TypeError):  # as many tensors as before, but one has another name or is another module's
            self._find(tables)
            places = self._where(tables)
        return self._owners, self._names, places

    def _find(self, tables: Sequence[dict[str, Any]]) -> None:
        found = [
            (number, name)
            for number, table in enumerate(tables)
            for name, value in list(table.items())
            if isinstance(value, torch.Tensor)
        ]
        self._owners, self._names = [number for number, _ in found], [name for _, name in found]

    def _where(self, tables: Sequence[dict[str, Any]]) -> Any:
        return fingerprint(map(getitem, map(tables.__getitem__, self._owners), self._names))

    def _take(self) -> Places:
        parameters = dict(self._root.named_parameters(remove_duplicate=False))
        tensors = parameters | dict(self._root.named_buffers(remove_duplicate=False))
        if "__dict__" in self._tables:
            tensors |= attribute_tensors(self._root)
        with _plainly():
            return Places(
                {name: place(tensor) for name, tensor in parameters.items()},
                {name: place(tensor) for name, tensor in tensors.items()},
            )
