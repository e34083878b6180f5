"""What a trainer gives rdt: the checkpoint tensors that this rank knows, and its shards of them as views.

A source never gathers. `shards` is called again before each sync, to notice memory that moved; it must be cheap. A source
that makes its views anew each time had better be a `WatchedSource` too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ..wire import TensorMeta


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a checkpoint tensor and the strided local view that stores it.

    `tensor` has exactly the box's shape, may have any strides and any dtype that can be cast to the wire dtype, and
    shares memory with the parameter: writing the parameter changes it.
    """

    name: str
    offset: tuple[int, ...]
    tensor: torch.Tensor


@runtime_checkable
class WeightSource(Protocol):
    """A source whose bytes lie in this rank's memory, shard by shard (modes `live`, `snapshot`, `bucket`)."""

    def metadata(self) -> Sequence[TensorMeta]:
        """The checkpoint tensors that this rank knows, with full shapes and the dtype on the wire; no gather, no copy.

        At least those of its shards; over all ranks, the whole model.
        """
        ...

    def shards(self) -> Sequence[Shard]:
        """What this rank holds. Ranks that hold the same box hold equal bytes; readers pick one owner for each."""
        ...

    def ignored(self) -> Sequence[str]:
        """Names that an engine need not take (a tied copy, a frozen head that engines do not have)."""
        ...


@runtime_checkable
class WatchedSource(Protocol):
    """A `WeightSource` that knows more cheaply than by its shards whether their memory is where it was."""

    def fingerprint(self) -> Any:
        """Differs from an earlier one (`==`) when any shard moved, was resized, appeared or went. Runs in every sync."""
        ...


@runtime_checkable
class IterableWeightSource(Protocol):
    """A source that can only be iterated as full tensors (conversions, gathered exports): mode `bucket` only."""

    def metadata(self) -> Sequence[TensorMeta]:
        """As `WeightSource.metadata`."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass in the order of `metadata`; may be a collective. Ranks other than 0 drop what they are given."""
        ...

    def ignored(self) -> Sequence[str]:
        """As `WeightSource.ignored`."""
        ...
