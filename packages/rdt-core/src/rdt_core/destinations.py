"""The tensors of an engine's model that weight loaders may write to, found back from any view of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch

from .errors import TracingError


class Destinations(Mapping[str, torch.Tensor]):
    """The storages that loaders may write, each under one key, found back from any view of them.

    Works by identity of the storage, so that meta tensors are told apart too. Keeps the tensors alive.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._keys: dict[int, str] = {}
        self._homes: list[tuple[dict[str, Any], str, str, torch.Tensor]] = []
        self._modules: list[torch.nn.Module] = []
        self._columns: Any = None

    @classmethod
    def of(cls, module: torch.nn.Module) -> Destinations:
        """Every parameter and buffer of `module`, under its first qualified name where several names share a storage.

        Tensors without a storage of their own (lazy parameters, sparse tensors) are left out.
        """
        self = cls()
        for prefix, child in module.named_modules():
            for own in (child._parameters, child._buffers):
                for name, tensor in own.items():
                    if tensor is not None and _storage(tensor) is not None:
                        key = f"{prefix}.{name}" if prefix else name
                        self.add(key, tensor)
                        self._homes.append((own, name, key, tensor))
        self._modules = list(module.modules())
        self._columns = self._now()
        return self

    def is_same(self) -> bool:
        """Whether `of` would find the same tensors in its module, at the same addresses.

        Asked in every sync, over every parameter: a few passes in C, and no Python loop.
        """
        return bool(self._now() == self._columns)

    def _now(self) -> Any:
        tables = [
            list(chain.from_iterable(map(dict.values, map(attrgetter(table), self._modules))))
            for table in ("_modules", "_parameters", "_buffers")
        ]
        addresses = list(map(torch.Tensor.data_ptr, map(itemgetter(3), self._homes)))
        return [list(map(id, table)) for table in tables], addresses

    def add(self, key: str, tensor: torch.Tensor) -> str:
        """Adds the storage of `tensor` and returns the key that it is known by, which is the first it was added under.

        Raises:
            TracingError: the key already names another storage, or the tensor has no storage.
        """
        storage = _storage(tensor)
        if storage is None:
            raise TracingError(f"destination {key!r} has no storage: {type(tensor).__name__}")
        if storage in self._keys:
            return self._keys[storage]
        if key in self._tensors:
            raise TracingError(f"destination {key!r} names two different storages")
        self._keys[storage] = key
        self._tensors[key] = tensor
        return key

    def find(self, view: torch.Tensor) -> str | None:
        """Returns the key of the storage that `view` lies in, or None where it is not known."""
        storage = _storage(view)
        return None if storage is None else self._keys.get(storage)

    def rebound(self) -> list[str]:
        """Puts back the parameters and buffers that no longer are the tensors found by `of`, and names them."""
        changed = []
        for home, name, key, tensor in self._homes:
            if home.get(name) is not tensor:
                home[name] = tensor
                changed.append(key)
        return changed

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError, ValueError, AttributeError):
        return None
