"""A whole sync group in one process: source ranks as threads, engine ranks as objects, bytes copied from place to place.

The real coordinator, planner, publisher and receiver; only Ray and the transports are left out (link kind `local`). For the
checks of this package. It refuses sources that need a process of their own for each rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from .. import wire
from ..control import LocalControl
from ..coordinator import Coordinator
from ..engines import ConnectInfo, EngineClient
from ..errors import EngineError, RdtError
from ..landing import Landing, ModuleLanding
from ..receiver import Receiver
from ..replica import ModuleReplica, Receiving
from ..sources.base import IterableWeightSource, Shard, WeightSource
from ..sync import WeightSync
from ..transport import LocalExchange

GROUP = "conformance"
TIMEOUT_S = 30.0


class WholeModel(torch.nn.Module):
    """Serves every checkpoint tensor as it is: a buffer of its shape and wire dtype for each.

    Args:
        tensors: the checkpoint tensors.
    """

    def __init__(self, tensors: Iterable[wire.TensorMeta]) -> None:
        super().__init__()
        self.places: dict[str, str] = {}
        for number, meta in enumerate(tensors):
            self.places[meta.name] = f"tensor{number}"
            empty = torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype))
            self.register_buffer(f"tensor{number}", empty)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies each tensor to its place."""
        for name, tensor in weights:
            self.get_buffer(self.places[name]).copy_(tensor)

    def tensor(self, name: str) -> torch.Tensor:
        """Returns what is served under a checkpoint tensor's name."""
        return self.get_buffer(self.places[name])


class LandingWorker(Receiving):
    """One engine rank over any landing, for `ModuleReplica`.

    Args:
        landing: of this rank.
        rank: in its replica.
        world_size: ranks of the replica.
        control: of the group.
        exchange: shared with the source ranks.
        device: where the model lies.
    """

    def __init__(
        self,
        landing: Landing,
        rank: int,
        world_size: int,
        control: LocalControl,
        exchange: LocalExchange,
        device: torch.device | str = "cpu",
    ) -> None:
        self.landing = landing
        self._made: dict[str, Any] = {
            "control": control, "exchange": exchange, "rank": rank, "world_size": world_size, "device": torch.device(device),
        }  # fmt: skip

    def connect(self, info: ConnectInfo) -> None:
        """See `Receiver.connect`."""
        if info.check:
            self._connected().check(info.check)
            return
        if self.receiver is None:
            self.receiver = Receiver(
                self.landing, group=info.group, replica=info.replica, kinds=info.kinds, timeout_s=info.timeout_s,
                pack_threshold=info.pack_threshold, **self._made,
            )  # fmt: skip
        self.receiver.connect(info.attempt)

    def _connected(self) -> Receiver:
        if self.receiver is None:
            raise EngineError("this engine rank was never connected to a group")
        return self.receiver


class LocalGroup:
    """Source ranks that joined a group in this process. A context manager.

    Args:
        sources: of rank 0, 1, …
        mode: publish mode.
        options: of `WeightSync`.

    Raises:
        RdtError: a rank could not join.
    """

    def __init__(
        self, sources: Sequence[WeightSource | IterableWeightSource], *, mode: str = "auto", **options: Any
    ) -> None:
        ranks = len(sources)
        self.exchange = LocalExchange()
        self.control = LocalControl(Coordinator(GROUP, ranks, TIMEOUT_S))
        self._pool = ThreadPoolExecutor(ranks, thread_name_prefix="rdt-conformance")
        options = {"kinds": ("local",), "timeout_s": TIMEOUT_S, "verify": "full", "bucket_bytes": 1 << 20, **options}
        self.syncs: list[WeightSync] = []

        def join(rank: int) -> WeightSync:
            return WeightSync(
                self.control, sources[rank], group=GROUP, rank=rank, world_size=ranks, mode=mode, exchange=self.exchange,
                **options,
            )  # fmt: skip

        try:
            self.syncs = self._all([partial(join, rank) for rank in range(ranks)])
        except BaseException:
            self.close()
            raise

    def _all(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs tasks side by side, waits for all, and raises what the first of them raised."""
        futures = [self._pool.submit(task) for task in tasks]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    def attach(self, client: EngineClient) -> None:
        """Adds a replica. See `WeightSync.attach`."""
        self.syncs[0].attach(client)

    def serve(
        self, landings: Sequence[Landing], name: str = "served", device: torch.device | str = "cpu"
    ) -> ModuleReplica:
        """Attaches a replica of these landings, one for each engine rank, and returns its client."""
        workers = [
            LandingWorker(landing, rank, len(landings), self.control, self.exchange, device)
            for rank, landing in enumerate(landings)
        ]
        replica = ModuleReplica(workers, name=name)
        self.attach(replica)
        return replica

    def serve_whole(self, tensors: Sequence[wire.TensorMeta], name: str = "served") -> tuple[WholeModel, ModuleReplica]:
        """Attaches a replica that serves every checkpoint tensor as it is."""
        model = WholeModel(tensors)
        return model, self.serve([ModuleLanding(model, model.load_weights)], name)

    def publish(self, version: int) -> wire.SyncReport:
        """Publishes on every rank, and returns the report of rank 0."""
        reports: list[wire.SyncReport] = self._all([partial(sync.publish, version) for sync in self.syncs])
        return reports[0]

    def failure(self, version: int) -> list[RdtError | None]:
        """Publishes, and returns what each rank raised."""

        def publish(sync: WeightSync) -> RdtError | None:
            try:
                sync.publish(version)
            except RdtError as error:
                return error
            return None

        found: list[RdtError | None] = self._all([partial(publish, sync) for sync in self.syncs])
        return found

    def version(self, replica: EngineClient) -> int | None:
        """The version that a replica says it serves."""
        return replica.version(deadline=time.monotonic() + TIMEOUT_S)

    def close(self) -> None:
        """Every rank leaves. Idempotent."""
        for sync in self.syncs:
            sync.leave()
        self.syncs = []
        self._pool.shutdown()
        self.control.close()

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class TensorSource:
    """Full tensors as one source rank, each where it lies.

    Args:
        tensors: by checkpoint name; their dtype is that on the wire.
        ignored: names that engines need not take.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], ignored: Sequence[str] = ()) -> None:
        self.tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        self._ignored = tuple(ignored)

    def metadata(self) -> list[wire.TensorMeta]:
        """See `WeightSource.metadata`."""
        return [
            wire.TensorMeta(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self.tensors.items()
        ]

    def shards(self) -> list[Shard]:
        """See `WeightSource.shards`."""
        return [Shard(name, (0,) * tensor.dim(), tensor) for name, tensor in self.tensors.items()]

    def ignored(self) -> Sequence[str]:
        """See `WeightSource.ignored`."""
        return self._ignored

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes other values into the same memory."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)
