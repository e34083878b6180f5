"""Trainers for the programs that feed a real engine: ranks on a CPU whose weights are those of `models.build`.

Made plainly for the tests: a seed stands for a training step. Ranks may be Ray actors or live in the test's own process.
`Trainer` holds its model with FSDP2; `megatron.trainer` has one that holds it as Megatron does. `Member` is what they share.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from . import models

WORLD = 2


class Member:
    """A trainer's rank as a member of sync groups: what programs call, whatever holds the weights.

    Attributes:
        rank: of this process.
        world: number of ranks.
    """

    rank: int
    world: int

    def source(self, dtype: torch.dtype | None) -> Any:
        """Returns this rank's weights for a sync, in `dtype` on the wire (None: as they are)."""
        raise NotImplementedError

    def set(self, seed: int) -> None:
        """Takes the weights, and the buffers, of a step."""
        raise NotImplementedError

    def join(self, group: str, options: dict[str, Any]) -> str:
        """Joins a sync group with these arguments of `WeightSync.join`, and `dtype` (on the wire); returns the mode."""
        from rdt_core import WeightSync

        options = dict(options)
        dtype = options.pop("dtype", None)
        self.sync = WeightSync.join(
            group, source=self.source(dtype and getattr(torch, dtype)), rank=self.rank,
            world_size=self.world, **{"timeout_s": 60.0, **options},
        )  # fmt: skip
        return self.sync.mode

    def attach(self, client: Any) -> None:
        self.sync.attach(client)

    def detach(self, name: str) -> None:
        self.sync.detach(name)

    def publish(self, version: int) -> Any:
        return self.sync.publish(version)

    def verify(self) -> Any:
        return self.sync.verify()

    def catch_up(self) -> Any:
        return self.sync.catch_up()

    def publish_until(self, version: int, rounds: int, then: Any) -> Any:
        """Publishes, and calls `then` when `rounds` rounds are readable: the reader has some of the bytes by then."""
        written = self.sync._publisher.rounds_written

        def some() -> Any:
            for number in written():
                if number == rounds:
                    then()
                yield number

        self.sync._publisher.rounds_written = some
        try:
            return self.sync.publish(version)
        finally:
            self.sync._publisher.rounds_written = written

    def leave(self) -> None:
        self.sync.leave()

    def imported(self, module: str) -> bool:
        """Whether this process has imported a module."""
        return module in sys.modules


class Trainer(Member):
    """One FSDP2 rank of a world of `WORLD`.

    Args:
        rank: of this process.
        rendezvous: a file that does not exist yet.
        kind: of model.
        changes: to its configuration.
    """

    def __init__(self, rank: int, rendezvous: str, kind: models.Kind, changes: dict[str, Any] | None = None) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
        self.rank, self.world, self.kind, self.changes = rank, WORLD, kind, changes or {}
        self.model = models.build(kind, seed=0, **self.changes)
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    @torch.no_grad()
    def set(self, seed: int) -> None:
        """Takes the weights, and the buffers, of a step."""
        from torch.distributed.tensor import distribute_tensor

        full = models.build(self.kind, seed=seed, **self.changes)
        values, buffers = dict(full.named_parameters()), dict(full.named_buffers())
        for name, parameter in self.model.named_parameters():
            value = distribute_tensor(values[name].data, parameter.device_mesh, parameter.placements)
            parameter.to_local().copy_(value.to_local())
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])

    def source(self, dtype: torch.dtype | None) -> Any:
        """See `Member.source`."""
        from rdt_core import ModuleSource

        return ModuleSource(self.model, dtype=dtype)
