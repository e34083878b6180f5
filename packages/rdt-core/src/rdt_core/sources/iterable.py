"""`IterableSource`: full tensors, one after the other, from a function (a conversion, a gathered export).

For trainers whose shards are not boxes of checkpoint tensors. Can only be published in buckets. A pass that yields
other names, another order or other shapes than were declared is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from ..errors import SourceError
from ..wire import TensorMeta


class IterableSource:
    """An `IterableWeightSource` over a function.

    Args:
        metadata: every checkpoint tensor, in the order in which a pass yields them; the same on every rank.
        iterate: starts a pass and returns its (name, full tensor) pairs. Called on every rank for each sync; it may
            run collectives, so every rank must exhaust it.
        ignored: names of checkpoint tensors that engines need not take.

    Raises:
        SourceError: a name is declared twice.
    """

    def __init__(
        self,
        metadata: Sequence[TensorMeta],
        iterate: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        ignored: Sequence[str] = (),
    ) -> None:
        self._metadata = tuple(metadata)
        self._iterate = iterate
        self._ignored = tuple(ignored)
        names = [tensor.name for tensor in self._metadata]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SourceError(f"checkpoint tensor {twice!r} is declared twice")

    def metadata(self) -> Sequence[TensorMeta]:
        """See `IterableWeightSource.metadata`."""
        return self._metadata

    def ignored(self) -> Sequence[str]:
        """See `IterableWeightSource.ignored`."""
        return self._ignored

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every (name, tensor) of a fresh pass.

        Raises:
            SourceError: the pass strays from the declaration, or ends early.
        """
        expected = iter(self._metadata)
        for position, (name, tensor) in enumerate(self._iterate()):
            meta = next(expected, None)
            if meta is None:
                raise SourceError(
                    f"the pass yields {name!r} after all {position} declared tensors; declare it in `metadata`"
                )
            shape = tuple(tensor.shape)
            if name != meta.name or shape != meta.shape:
                raise SourceError(
                    f"the pass yields {name!r} of shape {shape} at position {position}, where {meta.name!r} of shape "
                    f"{meta.shape} is declared; declare the tensors as they are yielded, in that order"
                )
            yield name, tensor
        missing = next(expected, None)
        if missing is not None:
            raise SourceError(f"the pass ends before {missing.name!r}, which is declared")
