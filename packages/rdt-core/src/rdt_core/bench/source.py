"""A source rank of the bench that holds its row range of every tensor of a named model, as FSDP2 shards.

It is the one that other designs can be measured with: each begins with a gather of these rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from .. import wire
from ..errors import SourceError
from ..memory import settle
from ..sources.base import Shard
from ..sources.watch import fingerprint
from . import peers
from .digests import Box, sums
from .rank import Rank, advance, draw


class RowSharded:
    """A source that holds its row range of every tensor, uneven where rows do not divide, padded in memory as FSDP2 pads.

    Args:
        tensors: of the checkpoint.
        rank: of this source rank.
        world_size: source ranks.
        device: of the shards.

    Attributes:
        tensors: of the checkpoint.
        padded: each tensor's local storage with its padding, equally long on every rank.
    """

    def __init__(self, tensors: Sequence[wire.TensorMeta], rank: int, world_size: int, device: str) -> None:
        self.tensors = tuple(tensors)
        self.padded: list[torch.Tensor] = []
        self._shards: list[Shard] = []
        for number, meta in enumerate(self.tensors):
            rows = meta.shape[0]
            size = -(-rows // world_size)
            start, end = min(rows, rank * size), min(rows, (rank + 1) * size)
            whole = torch.zeros((size, *meta.shape[1:]), dtype=getattr(torch, meta.dtype), device=device)
            generator = torch.Generator(whole.device).manual_seed(1_000_003 * rank + number)
            tensor = whole.narrow(0, 0, end - start)
            draw(tensor.view(torch.int16), generator)
            self.padded.append(whole)
            self._shards.append(Shard(meta.name, (start,) + (0,) * (len(meta.shape) - 1), tensor))
        self._held = [shard.tensor for shard in self._shards]

    def metadata(self) -> Sequence[wire.TensorMeta]:
        """See `WeightSource.metadata`."""
        return self.tensors

    def shards(self) -> Sequence[Shard]:
        """See `WeightSource.shards`."""
        return self._shards

    def ignored(self) -> Sequence[str]:
        """See `WeightSource.ignored`."""
        return ()

    def fingerprint(self) -> Any:
        """See `WatchedSource.fingerprint`: the shards are made once."""
        return fingerprint(self._held)

    def change(self) -> None:
        """See `rank.Held.change`."""
        for tensor in self._held:
            advance(tensor.view(torch.int16))

    def digests(self, boxes: Sequence[Box]) -> list[int]:
        """See `rank.Held.digests`."""
        return sums({shard.name: ((shard.offset, shard.tensor),) for shard in self._shards}, boxes)


class SourceRank(Rank):
    """A source rank of the bench with row shards, as a Ray actor.

    Args:
        tensors: of the checkpoint.
        rank, world_size, device: see `Rank`.
    """

    def __init__(self, tensors: Sequence[wire.TensorMeta], rank: int, world_size: int, device: str) -> None:
        super().__init__(rank, world_size, device)
        self.source = RowSharded(tensors, rank, world_size, str(self.device))
        self._sender: peers.Sender | None = None

    def held(self) -> RowSharded:
        """See `Rank.held`."""
        return self.source

    def enter(self, rendezvous: str, rank: int, world_size: int, timeout_s: float) -> None:
        """See `Rank.enter`; from here on it can send."""
        super().enter(rendezvous, rank, world_size, timeout_s)
        self._sender = peers.Sender(self.source, self._entered(), self.rank, self.world_size, self.device, timeout_s)

    def exit(self) -> None:
        """See `Rank.exit`."""
        self._sender = None
        super().exit()

    def send(self, peer: str, arguments: dict[str, Any]) -> float:
        """This rank's part of a peer's sync; returns its seconds."""
        if self._sender is None:
            raise SourceError(f"peer {peer!r} needs a process group; enter one first")
        settle(self.device)
        started = time.perf_counter()
        getattr(self._sender, peer.replace("-", "_"))(**arguments)
        settle(self.device)
        return time.perf_counter() - started
