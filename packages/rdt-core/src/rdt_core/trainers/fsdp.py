"""How FSDP2 and HSDP spread a checkpoint over their ranks: by rows, experts by themselves or stacked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ..errors import SourceError
from ..geometry import row_major
from ..shapes import Config
from .base import Catalogue, Parameter, Piece


@dataclass(frozen=True, slots=True)
class FsdpLayout:
    """FSDP2, or HSDP with several replicas: each tensor's rows in equal stretches, the last ones shorter or empty.

    Attributes:
        ranks: source ranks, replicas included.
        replicas: times that the whole model is held; divides `ranks`.
        apart: whether each expert has parameters of its own; else the experts of a layer are one parameter, whose first axis is
            the expert (transformers from 5 on).
    """

    ranks: int
    replicas: int = 1
    apart: bool = False

    def check(self, config: Config) -> None:
        """See `Layout.check`."""
        if self.ranks % self.replicas:
            raise SourceError(f"{self.replicas} replicas do not divide {self.ranks} source ranks")

    def parameters(self, rank: int, catalogue: Catalogue) -> Iterator[Parameter]:
        """See `Layout.parameters`."""
        shards = self.ranks // self.replicas
        at = rank % shards
        apart = [meta for layer in catalogue.layers.values() for meta in layer]
        if self.apart:
            apart += [meta for experts in catalogue.experts.values() for expert in experts.values() for meta in expert]
        for meta in (*catalogue.outside, *apart):
            low, high = _stretch(meta.shape[0], shards, at)
            if high > low:
                shape = (high - low, *meta.shape[1:])
                piece = Piece(meta, (low, *(0,) * (len(shape) - 1)), shape, 0, row_major(shape))
                yield Parameter(meta.name, "", prod(shape), (piece,))
        for layer, experts in () if self.apart else catalogue.experts.items():
            low, high = _stretch(len(experts), shards, at)
            held = [meta for expert in range(low, high) for meta in experts[expert]]
            for name in ("gate_up_proj", "down_proj"):
                pieces, start = [], 0
                for meta in held:
                    if (".down_proj." in meta.name) == (name == "down_proj"):
                        pieces.append(Piece(meta, (0,) * len(meta.shape), meta.shape, start, row_major(meta.shape)))
                        start += prod(meta.shape)
                if pieces:
                    yield Parameter(f"layers.{layer}.experts.{name}", "", start, tuple(pieces))


def _stretch(count: int, ranks: int, rank: int) -> tuple[int, int]:
    each = -(-count // ranks)
    return min(count, rank * each), min(count, (rank + 1) * each)
