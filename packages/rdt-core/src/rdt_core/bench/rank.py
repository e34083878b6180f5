"""A source rank of the bench as a Ray actor: it joins, changes its weights, publishes, and says what it holds by sums.

What it holds and how, a class below says; values are arbitrary finite bit patterns that all change from sync to sync, so
that anything stale, moved or missing shows.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .. import wire
from ..errors import SourceError
from ..memory import is_expandable, settle
from ..replica import ModuleReplica
from ..sources.base import WeightSource
from ..sync import WeightSync
from .collectives import Background, Group, make_group
from .digests import Box
from .floors import Loan, Scratch

#: odd, so that adding it changes every 16-bit word; a word comes back after 16,384 additions
_STEP = 0x2F35
#: bits of a 16-bit word that are used. Without the missing one no float is infinite or a NaN, whose bits an engine's own loader
#: need not keep: a copy by way of float32 makes one NaN of all
_USED = ~0x4000


def draw(words: torch.Tensor, generator: torch.Generator) -> None:
    """Fills 16-bit words with arbitrary patterns, all of them finite as floats."""
    words.random_(generator=generator).bitwise_and_(_USED)


def advance(words: torch.Tensor) -> None:
    """Gives every 16-bit word another value, equal ones to equal ones."""
    words.add_(_STEP).bitwise_and_(_USED)


class Held(WeightSource, Protocol):
    """A source whose values the bench can change and check."""

    def change(self) -> None:
        """Gives every 16-bit word of this rank another value, equal ones on ranks that hold the same."""
        ...

    def digests(self, boxes: Sequence[Box]) -> list[int]:
        """Sums of what this rank holds of each box; those of all ranks add up to the box's."""
        ...


class Rank(ABC):
    """A source rank of the bench, as a Ray actor; a class below it says what it holds.

    Args:
        rank: of this source rank.
        world_size: source ranks.
        device: "cpu" or "cuda".
    """

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        self.rank, self.world_size = rank, world_size
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.sync: WeightSync | None = None
        self._scratch = Scratch(self.device)
        self._group: Group | None = None
        self._background: Background | None = None

    @abstractmethod
    def held(self) -> Held:
        """What this rank holds."""

    def ready(self) -> tuple[int, str, bool]:
        """Process id, the device's name, and whether the weights lie in expandable segments."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        sample = next((shard.tensor for shard in self.held().shards() if shard.tensor.numel()), None)
        settle(self.device)
        return os.getpid(), name, sample is not None and is_expandable(sample)

    def join(self, group: str, mode: str, kinds: tuple[str, ...], settings: dict[str, Any]) -> None:
        """Joins a fresh sync group."""
        self.sync = WeightSync.join(
            group, source=self.held(), rank=self.rank, world_size=self.world_size, mode=mode, kinds=kinds, **settings
        )

    def attach(self, workers: Sequence[Any]) -> None:
        """Attaches the replica (rank 0)."""
        # readers with equal owners take turns by the replica's name: this one is what `rdt plan` calls its first
        self._joined().attach(ModuleReplica(workers, name="replica-0"))

    def change(self) -> None:
        """Gives the weights new values, as an optimiser's step would."""
        self.held().change()
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
        """See `Held.digests`."""
        return self.held().digests(boxes)

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

    def collectives(self) -> None:
        """From here on the trainer's own collectives run while it publishes."""
        self._background = Background(self._entered(), self.device)

    def exit(self) -> None:
        """Leaves the process group. Idempotent."""
        self._background = None
        if self._group is not None:
            self._group.close()
            self._group = None

    def _entered(self) -> Group:
        if self._group is None:
            raise SourceError("this source rank of the bench has not entered a process group")
        return self._group

    def _joined(self) -> WeightSync:
        if self.sync is None:
            raise SourceError("this source rank of the bench has not joined a group")
        return self.sync
