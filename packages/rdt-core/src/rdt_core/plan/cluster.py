"""The machines of a plan: GPUs, links between them and their rates, what a call costs, and where each rank runs.

All rates are those that a transfer reaches, not those on a data sheet. The defaults are a common node of eight GPUs; what of
them was measured and what was assumed says `docs/plan.md`. A description is JSON with any of the fields of `Cluster`;
unknown fields and values that no machine has are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import SourceError
from ..wire import NodeMeta

PLACEMENTS = ("separate", "together", "beside")
DEVICES = ("cuda", "cpu")


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of node, as many of them as there are ranks for.

    Attributes:
        device: "cuda", or "cpu", where a node has processes in the place of GPUs; decides what is packed.
        gpus: of a node; each holds one source rank, one engine rank, or one of both.
        nics: of a node; GPUs share them in equal stretches.
        nic_gbs: GB/s of a NIC in each direction.
        nvlink_gbs: GB/s of a GPU to the others of its node together, in each direction.
        copy_gbs: GB/s of batched copies inside a GPU, in bytes copied.
        call_ms: a control call, from the one who makes it.
        serve_ms: what the coordinator is busy with for each call.
        read_us: a read of its own in a NIXL transfer, whatever its size.
        piece_us: a piece in a batched copy, whatever its size.
        tensor_us: a look at where a parameter lies, for each shard and sync.
        collective_us: a tensor in a design that handles tensors one by one (a collective, the engine's loader).
        collective_gbs: GB/s of a collective inside a node, for each GPU.
    """

    device: str = "cuda"
    gpus: int = 8
    nics: int = 8
    nic_gbs: float = 50.0
    nvlink_gbs: float = 450.0
    copy_gbs: float = 1400.0
    call_ms: float = 2.5
    serve_ms: float = 0.3
    read_us: float = 1.0
    piece_us: float = 0.5
    tensor_us: float = 0.7
    collective_us: float = 100.0
    collective_gbs: float = 370.0

    def check(self) -> Cluster:
        """Returns itself. Raises SourceError for values that no machine has."""
        if self.device not in DEVICES:
            raise SourceError(f"cluster: device {self.device!r} is unknown; known: {', '.join(DEVICES)}")
        for name in ("gpus", "nics", "nic_gbs", "nvlink_gbs", "copy_gbs", "collective_gbs"):
            if not getattr(self, name) > 0:
                raise SourceError(f"cluster: {name} is {getattr(self, name)}; it must be more than 0")
        for name in ("call_ms", "serve_ms", "read_us", "piece_us", "tensor_us", "collective_us"):
            if not getattr(self, name) >= 0:
                raise SourceError(f"cluster: {name} is {getattr(self, name)}; it must not be negative")
        return self


def read_cluster(path: Path | None) -> Cluster:
    """Reads a description; None is the default.

    Raises:
        SourceError: no such file, no such fields, or impossible values.
    """
    if path is None:
        return Cluster()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Cluster).check()
    except (OSError, msgspec.DecodeError) as error:
        raise SourceError(
            f"no cluster description can be read from {str(path)!r}: {error}; it is JSON with any of the fields "
            f"{', '.join(Cluster.__struct_fields__)}"
        ) from error


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by the number of its node and its own number there."""

    node: int
    index: int

    def nic(self, cluster: Cluster) -> tuple[int, int]:
        """Node and number of the NIC that is its own, or the one it shares."""
        return self.node, self.index * cluster.nics // cluster.gpus

    def meta(self) -> NodeMeta:
        """How a process on it describes itself."""
        name = f"node{self.node}"
        return NodeMeta(
            node_id=name,
            boot_id=name,
            hostname=name,
            pid=self.index + 1,
            device="cuda",
            device_uuid=f"{name}-{self.index}",
        )


@dataclass(frozen=True, slots=True)
class Seats:
    """The GPU of each rank.

    Attributes:
        sources: by source rank.
        readers: by engine rank, replica after replica.
        nodes: in all.
    """

    sources: tuple[Gpu, ...]
    readers: tuple[Gpu, ...]
    nodes: int


def seat(cluster: Cluster, sources: int, replicas: int, ranks: int, placement: str) -> Seats:
    """Fills nodes with ranks in order.

    Args:
        cluster: how many GPUs a node has.
        sources: source ranks.
        replicas: of the engine; each begins on a fresh node unless whole replicas fit on one.
        ranks: engine ranks of a replica.
        placement: "separate" (engines on nodes of their own), "together" (engines on the trainer's GPUs, from the first on) or
            "beside" (engines on the GPUs that follow the trainer's).

    Raises:
        SourceError: an unknown placement, or more engine ranks than GPUs that they are to share.
    """
    if placement not in PLACEMENTS:
        raise SourceError(f"placement {placement!r} is unknown; known: {', '.join(PLACEMENTS)}")
    per = cluster.gpus
    mine = tuple(Gpu(rank // per, rank % per) for rank in range(sources))
    nodes = -(-sources // per)
    each = ranks if per % ranks == 0 or placement == "beside" else -(-ranks // per) * per
    first = {"together": 0, "beside": sources, "separate": nodes * per}[placement]
    theirs = tuple(
        Gpu((first + replica * each + rank) // per, (first + replica * each + rank) % per)
        for replica in range(replicas)
        for rank in range(ranks)
    )
    last = max(gpu.node for gpu in theirs) + 1
    if placement == "together" and any(gpu.node * per + gpu.index >= sources for gpu in theirs):
        raise SourceError(f"{replicas} x {ranks} engine ranks do not fit on the {sources} GPUs of the trainer")
    return Seats(mine, theirs, max(nodes, last))
