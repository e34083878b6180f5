"""The processes of a soak: a source rank that holds half of every row block, and an engine rank that also tells what it holds.

The model is small and of every sort: wide rows that travel directly, narrow ones that are packed, a cast in mode snapshot.
Every value of version N is N, so that a worker knows at a glance whether it serves what it says.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from .. import wire
from ..replica import ModuleReplica, ModuleWorker
from ..sources.base import Shard
from ..sync import WeightSync
from .options import SoakOptions
from .probe import Held, measure

#: rows divide by every small number of source ranks
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (840, 64),
    **{f"layers.{i}.wide": (12, 65536) for i in range(2)},
    **{f"layers.{i}.narrow": (420, 48) for i in range(4)},
    "norm": (840,),
}


class Rows:
    """A source: this rank's rows of every tensor."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.held: dict[str, tuple[int, torch.Tensor]] = {}
        for name, shape in SHAPES.items():
            first, last = shape[0] * rank // ranks, shape[0] * (rank + 1) // ranks
            self.held[name] = (first, torch.zeros(last - first, *shape[1:]))

    def fill(self, value: float) -> None:
        """Sets every element, as an optimizer's step would."""
        for _, tensor in self.held.values():
            tensor.fill_(value)

    def metadata(self) -> list[wire.TensorMeta]:
        """See `WeightSource.metadata`."""
        return [wire.TensorMeta(name=name, shape=shape, dtype="float32") for name, shape in SHAPES.items()]

    def shards(self) -> list[Shard]:
        """See `WeightSource.shards`."""
        return [Shard(name, (first, *(0,) * (tensor.dim() - 1)), tensor) for name, (first, tensor) in self.held.items()]

    def ignored(self) -> Sequence[str]:
        """See `WeightSource.ignored`."""
        return ()


class SoakRank:
    """A source rank, as a Ray actor."""

    def __init__(self, rank: int, options: SoakOptions) -> None:
        torch.set_num_threads(1)
        self.rank, self.options = rank, options
        self.source = Rows(rank, options.ranks)
        self.sync: WeightSync | None = None
        self.replica: ModuleReplica | None = None
        gc.freeze()

    def join(self, group: str) -> str:
        """Joins the group; returns the publish mode."""
        one = self.options
        self.sync = WeightSync.join(
            group, source=self.source, rank=self.rank, world_size=one.ranks, mode=one.mode, kinds=one.links,
            timeout_s=one.timeout_s, stall_timeout_s=max(600.0, 3 * one.timeout_s), bucket_bytes=1 << 20,
        )  # fmt: skip
        return self.sync.mode

    def attach(self, workers: Sequence[Any]) -> None:
        """Attaches the replica; on rank 0."""
        assert self.sync is not None
        self.replica = ModuleReplica(workers, name="soak")
        self.sync.attach(self.replica)

    def detach(self) -> None:
        """Detaches it again."""
        assert self.sync is not None
        if self.replica is not None:
            self.sync.detach(self.replica)
            self.replica = None

    def publish(self, version: int) -> tuple[float, tuple[str, ...]]:
        """Makes the weights of a version and publishes them; returns seconds and the kinds of the links."""
        assert self.sync is not None
        self.source.fill(version)
        report = self.sync.publish(version)
        return report.seconds, tuple(sorted({link.kind for link in report.links}))

    def leave(self) -> None:
        """Leaves the group."""
        if self.sync is not None:
            self.sync.leave()
            self.sync = None

    def held(self) -> Held:
        """What this process holds."""
        return measure()


class Served(torch.nn.Module):
    """The model that a worker serves."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(
                name.replace(".", "_"), torch.nn.Parameter(torch.full(shape, -1.0), requires_grad=False)
            )


def load(module: torch.nn.Module, weights: Any) -> None:
    """The model's loader."""
    for name, tensor in weights:
        getattr(module, name.replace(".", "_")).data.copy_(tensor)


class Leak:
    """Leaks on purpose, one of a sort in each call: to see that it is noticed."""

    def __init__(self, sort: str) -> None:
        self.sort, self.kept = sort, list[Any]()

    def __call__(self) -> None:
        """Leaks once."""
        if self.sort == "rss":
            self.kept.append(bytearray(os.urandom(1 << 20)))
        elif self.sort == "files":
            self.kept.append(os.open("/dev/null", os.O_RDONLY))
        elif self.sort == "threads":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        elif self.sort == "shared":
            from ..memory import Arena

            self.kept.append(Arena(1 << 16))
        elif self.sort == "references":
            import ray

            self.kept.append(ray.put(b"x"))


class SoakWorker(ModuleWorker):
    """An engine rank, as a Ray actor."""

    def __init__(self, rank: int, options: SoakOptions) -> None:
        torch.set_num_threads(1)
        super().__init__(Served, rank, options.workers, load)
        self._leak = Leak(options.leak if rank == 0 else "")
        gc.freeze()

    def serves(self) -> set[float]:
        """Every value that its parameters hold. Raises TornReplicaError while it may not serve."""
        self._leak()
        return self.call(
            lambda module: {float(end) for parameter in module.parameters() for end in parameter.detach().aminmax()}
        )

    def held(self) -> Held:
        """What this process holds."""
        return measure()
