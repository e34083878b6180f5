"""An engine rank of the bench: a worker of plain modules around an engine's parameter layout, in a Ray actor.

Syncs go through the real receiver; the peers load full tensors with the layout's own `load_weights`. What it holds is
told by sums of boxes, never by tensors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import wire
from ..errors import EngineError
from ..memory import settle
from ..replica import ModuleWorker
from ..shapes import Config
from . import checkpointengine, layouts
from .collectives import Group, make_group
from .digests import Box, collect
from .floors import Loan, Scratch
from .layouts import EngineModule
from .peers import Taker


def _load(module: torch.nn.Module, weights: Any) -> None:
    assert isinstance(module, EngineModule)
    module.load_weights(weights)


class EngineRank(ModuleWorker):
    """An engine rank of the bench, as a Ray actor.

    Args:
        tensors: of the checkpoint.
        config: their model's.
        at: the engine rank among its others.
        device: "cpu" or "cuda".
        timeout_s: of every wait of a peer.
    """

    def __init__(
        self,
        tensors: Sequence[wire.TensorMeta],
        config: Config,
        at: layouts.EngineRank,
        device: str,
        timeout_s: float,
    ) -> None:
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.layout = EngineModule(tensors, config, at, str(self.device))
        super().__init__(lambda: self.layout, at.rank, at.tp * at.pp, _load)
        self._scratch = Scratch(self.device)
        self._taker = Taker(self.layout, tensors, self.device, timeout_s)
        self._group: Group | None = None

    def ready(self) -> int:
        """Process id, once the parameters are there."""
        settle(self.device)
        return os.getpid()

    def boxes(self) -> list[Box]:
        """See `EngineModule.boxes`."""
        return self.layout.boxes()

    def digests(self) -> list[int]:
        """The sum of each box, from what the parameters hold now."""
        settle(self.device)
        return collect(self.layout.digests())

    def apply(self, function: Callable[[EngineModule], None]) -> None:
        """Calls `function` with the module: for tests that spoil it."""
        function(self.layout)
        settle(self.device)

    def copy_floor(self, repeats: int) -> float:
        """See `Scratch.copy`; of as many bytes as this rank holds."""
        return self._scratch.copy(self.layout.nbytes, repeats)

    def span_floor(self, loans: Sequence[tuple[Loan, int]], repeats: int) -> float:
        """See `Scratch.span`."""
        return self._scratch.span(loans, repeats)

    def nixl_floor(self, loans: Sequence[tuple[Loan, int]], repeats: int, timeout_s: float) -> float:
        """See `Scratch.nixl`."""
        return self._scratch.nixl(loans, repeats, timeout_s)

    def enter(self, rendezvous: str, rank: int, world_size: int, trainers: int, timeout_s: float) -> None:
        """Joins the process group of trainers and engine ranks (see `collectives.make_group`)."""
        self._group = make_group(rendezvous, rank, world_size, trainers, self.device, timeout_s)

    def exit(self) -> None:
        """Leaves the process group. Idempotent."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def receive_broadcast(self) -> float:
        """See `Taker.broadcast`; returns its seconds."""
        if self._group is None:
            raise EngineError("this engine rank of the bench has not entered a process group")
        started = time.perf_counter()
        self._taker.broadcast(self._group)
        settle(self.device)
        return time.perf_counter() - started

    def receive_disk(self, path: str) -> float:
        """See `Taker.disk`; returns its seconds."""
        started = time.perf_counter()
        self._taker.disk(path)
        settle(self.device)
        return time.perf_counter() - started

    def take_bucket(self, refs: Sequence[Any], number: int, bucket_bytes: int) -> None:
        """See `Taker.bucket`."""
        self._taker.bucket(refs, number, bucket_bytes)

    def take_checkpoint_engine(self, handles: dict[str, str]) -> None:
        """See `checkpointengine.receive`."""
        checkpointengine.receive(handles, self.device, self.layout.load_weights)

    def take_objects(self, refs: Sequence[Any], numbers: Sequence[int]) -> None:
        """See `Taker.objects`."""
        self._taker.objects(refs, numbers)
