"""A small model in halves: source ranks with row ranges, engine ranks that fuse and slice it, a group of both in one process.

For tests of whole syncs that must be quick: threads as source ranks, plain modules as engine ranks, link kind `local`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from rdt_core.control import LocalControl
from rdt_core.coordinator import Coordinator
from rdt_core.errors import RdtError
from rdt_core.landing import Destination, ModuleLanding
from rdt_core.replica import ModuleReplica, ModuleWorker
from rdt_core.sources.base import Shard
from rdt_core.sync import WeightSync
from rdt_core.transport import LocalExchange
from rdt_core.wire import TensorMeta

SHAPES = {
    "embed": (40, 16),
    "layers.0.q": (16, 16),
    "layers.0.k": (8, 16),
    "layers.0.down": (16, 24),
    "layers.1.q": (16, 16),
    "layers.1.k": (8, 16),
    "layers.1.down": (16, 24),
    "norm": (16,),
}


def value(name: str, version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * version + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


class Halves:
    """A source whose ranks hold uneven row ranges, one after the other in one storage."""

    def __init__(self, rank: int, ranks: int, wire: str, ignored: tuple[str, ...] = ()) -> None:
        self.wire, self._ignored = wire, ignored
        self.parts: list[tuple[str, int, torch.Tensor]] = []
        for name, shape in SHAPES.items():
            size = -(-shape[0] // ranks)
            low, high = min(shape[0], rank * size), min(shape[0], (rank + 1) * size)
            self.parts.append((name, low, torch.zeros((high - low, *shape[1:]))))

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(name=name, shape=shape, dtype=self.wire) for name, shape in SHAPES.items()]

    def shards(self) -> list[Shard]:
        return [Shard(name, (low,) + (0,) * (part.dim() - 1), part) for name, low, part in self.parts]

    def ignored(self) -> list[str]:
        return list(self._ignored)

    def fill(self, version: int) -> None:
        for name, low, part in self.parts:
            part.copy_(value(name, version)[low : low + len(part)])


class _Layer(torch.nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(24 // ranks, 16))
        self.down = torch.nn.Parameter(torch.zeros(16, 24 // ranks))


class Served(torch.nn.Module):
    """What an engine rank serves: query and key fused, tensor-parallel."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.forget = ""
        self.embed = torch.nn.Parameter(torch.zeros(40, 16))
        self.layers = torch.nn.ModuleList(_Layer(ranks) for _ in range(2))
        self.norm = torch.nn.Parameter(torch.zeros(16))


def load(module: Served, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in weights:
        if name == module.forget:
            continue
        if not name.startswith("layers."):
            module.get_parameter(name).data.copy_(tensor)
            continue
        layer = module.layers[int(name.split(".")[1])]
        if name.endswith("down"):
            layer.down.data.copy_(tensor.narrow(1, module.rank * 24 // module.ranks, 24 // module.ranks))
        else:
            size = tensor.shape[0] // module.ranks
            offset = 0 if name.endswith("q") else 16 // module.ranks
            layer.qk.data.narrow(0, offset, size).copy_(tensor.narrow(0, module.rank * size, size))


class Elsewhere(ModuleLanding):
    """Nothing lands in place: each module's bytes are used up when it closes, as quantisation does."""

    def destinations(self) -> dict[str, Destination]:
        found = super().destinations()
        return {key: Destination(one.key, one.module, False, one.nbytes) for key, one in found.items()}

    def open(self, modules: Iterable[str], memory: dict[str, torch.Tensor]) -> None:
        self.lent = getattr(self, "lent", {}) | dict(memory)

    def close(self, module: str) -> None:
        for key in [key for key in self.lent if key.rpartition(".")[0] == module]:
            lent = self.lent.pop(key)
            self._storages[key].copy_(lent)
            lent.zero_()


class Spoiled:
    """A transfer that is done when its bytes have landed and something has happened to them."""

    def __init__(self, inner, spoil: Callable[[], None]) -> None:
        self._inner, self._spoil = inner, spoil
        self.nbytes, self.turn = inner.nbytes, inner.turn

    def post(self) -> None:
        self._inner.post()

    def poll(self) -> bool:
        return self._inner.poll()

    def wait(self, deadline: float) -> None:
        self._inner.wait(deadline)
        self._spoil()

    def release(self) -> None:
        self._inner.release()


class Group:
    """Source ranks in threads and replicas of plain modules, over one coordinator.

    Args:
        ranks: source ranks.
        engine_ranks: of each replica.
        names: of the replicas.
        options: of `WeightSync`, and `wire` (dtype), `ignored` (names), `landing` (class).
    """

    def __init__(self, ranks: int = 2, engine_ranks: int = 2, names: tuple[str, ...] = ("a",), **options) -> None:
        self.control = LocalControl(Coordinator("test", ranks, 30.0))
        exchange = LocalExchange()
        self.wire = options.pop("wire", "float32")
        ignored = options.pop("ignored", ())
        landing = options.pop("landing", None)
        options = {"kinds": ("local",), "timeout_s": 10.0, "bucket_bytes": 1000, **options}
        self.sources = [Halves(rank, ranks, self.wire, ignored) for rank in range(ranks)]
        self.pool = ThreadPoolExecutor(ranks)

        def join(rank: int) -> WeightSync:
            return WeightSync(
                self.control,
                self.sources[rank],
                group="test",
                rank=rank,
                world_size=ranks,
                exchange=exchange,
                **options,
            )

        self.syncs = list(self.pool.map(join, range(ranks)))
        self.exchange, self.engine_ranks, self.landing = exchange, engine_ranks, landing
        self.replicas: dict[str, ModuleReplica] = {}
        for name in names:
            self.attach(name)

    def attach(self, name: str, forget: str = "") -> None:
        """Adds a replica; its loader leaves out the tensor named `forget`."""

        def make(rank: int) -> Served:
            module = Served(rank, self.engine_ranks)
            module.forget = forget
            return module

        workers = [
            ModuleWorker(
                lambda rank=rank: make(rank),
                rank,
                self.engine_ranks,
                load,
                self.control,
                self.exchange,
                kept=(forget,) if forget else (),
            )
            for rank in range(self.engine_ranks)
        ]
        for worker in workers:
            if self.landing is not None:
                worker.landing = self.landing(worker.module, lambda weights, one=worker.module: load(one, weights))
        self.replicas[name] = ModuleReplica(workers, name=name)
        self.syncs[0].attach(self.replicas[name])

    def worker(self, rank: int, name: str = "a") -> ModuleWorker:
        return self.replicas[name].workers[rank]

    def publish(self, version: int, **options):
        for source in self.sources:
            source.fill(version)
        return list(self.pool.map(lambda sync: sync.publish(version, **options), self.syncs))

    def fails(self, version: int, **options) -> list[RdtError]:
        """Publishes, and returns what every rank raised."""
        for source in self.sources:
            source.fill(version)
        futures = [self.pool.submit(sync.publish, version, **options) for sync in self.syncs]
        errors = [future.exception(30) for future in futures]
        assert all(isinstance(error, RdtError) for error in errors), errors
        assert len({str(error) for error in errors}) == 1
        return errors

    def spoil(self, spoil: Callable[[], None], rank: int = 0, name: str = "a") -> None:
        """From here on something happens to what one engine rank receives, after each transfer."""
        connection = self.worker(rank, name).receiver._connection
        for step in connection.steps:
            step.transfers = [(source, Spoiled(transfer, spoil)) for source, transfer in step.transfers]

    def heal(self, rank: int = 0, name: str = "a") -> None:
        for step in self.worker(rank, name).receiver._connection.steps:
            step.transfers = [(source, transfer._inner) for source, transfer in step.transfers]

    def serves(self, version: int, name: str = "a") -> None:
        for worker in self.replicas[name].workers:
            wanted = Served(worker.rank, worker.world_size)
            with torch.no_grad():
                dtype = getattr(torch, self.wire)
                load(wanted, [(name, value(name, version).to(dtype).float()) for name in SHAPES])
            for key, tensor in worker.state().items():
                assert torch.equal(tensor, wanted.state_dict()[key]), key
        assert self.replicas[name].version(deadline=float("inf")) == version

    def close(self) -> None:
        for sync in self.syncs:
            sync.leave()
        self.pool.shutdown()
        self.control.close()
