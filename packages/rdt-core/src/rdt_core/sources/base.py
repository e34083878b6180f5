"""What a trainer gives rdt: the checkpoint tensors that this rank knows, and its shards of them as views.

A source never gathers. `shards` is called again before each sync, to notice memory that moved; it must be cheap. A source
that makes its views anew each time had better be a `WatchedSource` too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ..errors import SourceError
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


def check_methods(source: object, who: str) -> None:
    """Checks that something is a source at all.

    Args:
        source: of anybody's own.
        who: names the rank in the message.

    Raises:
        SourceError: names the methods that it lacks, and what makes a source of a module.
    """
    if isinstance(source, WeightSource | IterableWeightSource):
        return
    absent = [name for name in ("metadata", "ignored") if not callable(getattr(source, name, None))]
    if not callable(getattr(source, "shards", None)) and not callable(getattr(source, "__iter__", None)):
        absent.append("shards (or __iter__)")
    way_out = "ModuleSource(model) is one" if isinstance(source, torch.nn.Module) else "see WeightSource"
    raise SourceError(
        f"{who} is a {type(source).__name__}, which lacks methods of a source: {', '.join(absent)}; {way_out}"
    )
