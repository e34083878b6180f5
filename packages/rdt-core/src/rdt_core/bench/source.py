"""A source rank of the bench: its row range of every tensor of a named model, as FSDP2 shards, in a Ray actor.

Values are arbitrary bit patterns that all change from sync to sync, so that anything stale, moved or missing shows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from .. import wire
from ..errors import SourceError
from ..memory import is_expandable, settle
from ..replica import ModuleReplica
from ..sources.base import Shard
from ..sources.watch import fingerprint
from ..sync import WeightSync
from . import peers
from .collectives import Background, Group, make_group
from .digests import Box, collect, digest
from .floors import Loan, Scratch

_STEP = 0x2F35  # odd: adding it changes every 16-bit word, and 65,536 additions go through all values


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
            tensor.view(torch.int16).random_(generator=generator)
            self.padded.append(whole)
            self._shards.append(Shard(meta.name, (start,) + (0,) * (len(meta.shape) - 1), tensor))

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
        return fingerprint(shard.tensor for shard in self._shards)

    def change(self) -> None:
        """Gives every 16-bit word of this rank another value."""
        for shard in self._shards:
            shard.tensor.view(torch.int16).add_(_STEP)

    def digests(self, boxes: Sequence[Box]) -> list[int]:
        """Sums of what this rank holds of each box; those of all ranks add up to the box's."""
        held = {shard.name: shard for shard in self._shards}
        sums = []
        for box in boxes:
            part, first = held[box.name].tensor, held[box.name].offset[0]
            if box.axis == 0:
                start = min(max(first, box.start), first + part.shape[0])
                end = min(first + part.shape[0], box.start + box.count)
                sums.append(digest(part.narrow(0, start - first, max(0, end - start)), start))
            else:
                sums.append(digest(part.narrow(1, box.start, box.count), first, box.start))
        return collect(sums)


class SourceRank:
    """A source rank of the bench, as a Ray actor.

    Args:
        tensors: of the checkpoint.
        rank: of this source rank.
        world_size: source ranks.
        device: "cpu" or "cuda".
    """

    def __init__(self, tensors: Sequence[wire.TensorMeta], rank: int, world_size: int, device: str) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.source = RowSharded(tensors, rank, world_size, str(self.device))
        self.sync: WeightSync | None = None
        self._scratch = Scratch(self.device)
        self._group: Group | None = None
        self._background: Background | None = None
        self._sender: peers.Sender | None = None

    def ready(self) -> tuple[int, str, bool]:
        """Process id, the device's name, and whether the weights lie in expandable segments."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        sample = next((shard.tensor for shard in self.source.shards() if shard.tensor.numel()), None)
        settle(self.device)
        return os.getpid(), name, sample is not None and is_expandable(sample)

    def join(self, group: str, mode: str, kinds: tuple[str, ...], settings: dict[str, Any]) -> None:
        """Joins a fresh sync group."""
        self.sync = WeightSync.join(
            group, source=self.source, rank=self.rank, world_size=self.world_size, mode=mode, kinds=kinds, **settings
        )

    def attach(self, workers: Sequence[Any]) -> None:
        """Attaches the replica (rank 0)."""
        self._joined().attach(ModuleReplica(workers))

    def change(self) -> None:
        """Gives the weights new values, as an optimiser's step would."""
        self.source.change()
        settle(self.device)

    def publish(self, version: int) -> tuple[float, wire.SyncReport]:
        """Publishes; returns the seconds that it took and the report. Collectives go on meanwhile if they were begun."""
        if self._background is not None:
            self._background.begin()
        started = time.perf_counter()
        report = self._joined().publish(version)
        seconds = time.perf_counter() - started
        if self._background is not None:
            self._background.end()
        return seconds, report

    def digests(self, boxes: Sequence[Box]) -> list[int]:
        """See `RowSharded.digests`."""
        return self.source.digests(boxes)

    def leave(self) -> None:
        """Leaves the sync group. Idempotent."""
        if self.sync is not None:
            self.sync.leave()
            self.sync = None

    def lend(self, nbytes: int, nixl: bool) -> Loan:
        """Makes `nbytes` of scratch memory readable by others, for a floor."""
        return self._scratch.lend(nbytes, nixl)

    def enter(self, rendezvous: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Joins a process group (see `collectives.make_group`); source ranks come first in it."""
        self._group = make_group(rendezvous, rank, world_size, self.world_size, self.device, timeout_s)
        self._sender = peers.Sender(self.source, self._group, self.rank, self.world_size, self.device, timeout_s)

    def collectives(self) -> None:
        """From here on the trainer's own collectives run while it publishes."""
        if self._group is None:
            raise SourceError("collectives need a process group; enter one first")
        self._background = Background(self._group, self.device)

    def exit(self) -> None:
        """Leaves the process group. Idempotent."""
        self._background = self._sender = None
        if self._group is not None:
            self._group.close()
            self._group = None

    def send(self, peer: str, arguments: dict[str, Any]) -> float:
        """This rank's part of a peer's sync; returns its seconds."""
        if self._sender is None:
            raise SourceError(f"peer {peer!r} needs a process group; enter one first")
        settle(self.device)
        started = time.perf_counter()
        getattr(self._sender, peer.replace("-", "_"))(**arguments)
        settle(self.device)
        return time.perf_counter() - started

    def _joined(self) -> WeightSync:
        if self.sync is None:
            raise SourceError("this source rank of the bench has not joined a group")
        return self.sync
