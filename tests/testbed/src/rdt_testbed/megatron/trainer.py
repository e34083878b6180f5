"""A Megatron rank that takes the weights of `models.build` and publishes them, with `trainers.Trainer`'s interface."""

from __future__ import annotations

from typing import Any

import torch

from .. import models
from ..trainers import Member
from .layout import Layout


class MegatronTrainer(Member):
    """One rank of stock megatron-core on a CPU.

    Args:
        rank: of this process.
        rendezvous: a file that does not exist yet.
        kind: of model.
        changes: to its configuration.
        layout: of the world; `layout.world` ranks. Without layers for multi-token prediction, which `models.build` has none
            of.
    """

    def __init__(
        self,
        rank: int,
        rendezvous: str,
        kind: models.Kind,
        changes: dict[str, Any] | None = None,
        layout: Layout = Layout(tp=2),  # noqa: B008 it is frozen
    ) -> None:
        from .build import build, initialize
        from .shim import cpu_megatron

        if layout.mtp:
            raise ValueError(f"layout {layout.name} predicts more tokens, for which models.build has no weights")
        self.rank, self.world, self.kind, self.changes, self.layout = rank, layout.world, kind, changes or {}, layout
        with cpu_megatron():
            initialize(layout, rank, rendezvous)
            self.config, self.chunks = build(kind, layout, **self.changes)
        self.set(0)

    def source(self, dtype: torch.dtype | None) -> Any:
        """See `Member.source`."""
        from rdt_megatron import MegatronSource

        return MegatronSource(self.chunks, models.config(self.kind, **self.changes), dtype=dtype)

    @torch.no_grad()
    def set(self, seed: int) -> None:
        """Takes the weights, and the buffers, of a step: writes the part of each checkpoint tensor that this rank holds.

        It writes where the source says; `logits` tells whether that was right.
        """
        full = checkpoint(self.kind, seed, **self.changes)
        for shard in self.source(None).shards():
            box = tuple(
                slice(start, start + size) for start, size in zip(shard.offset, shard.tensor.shape, strict=True)
            )
            shard.tensor.copy_(full[shard.name][box])

    def logits(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Returns what Megatron computes, on ranks of the last stage; all ranks must be asked at once. See `forward`."""
        from .forward import forward
        from .shim import cpu_megatron

        vocabulary = models.config(self.kind, **self.changes).vocab_size
        with cpu_megatron():
            found = forward(self.config, self.chunks, self.layout, tokens, vocabulary)
        return found and found[0]


def checkpoint(kind: models.Kind, seed: int, **changes: Any) -> dict[str, torch.Tensor]:
    """Returns the checkpoint tensors of `models.build(kind, seed=seed, **changes)` by their names in a saved checkpoint."""
    from rdt_core import ModuleSource

    return {shard.name: shard.tensor for shard in ModuleSource(models.build(kind, seed=seed, **changes)).shards()}
