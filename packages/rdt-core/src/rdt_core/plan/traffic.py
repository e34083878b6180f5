"""What a sync asks of every link, NIC and process: seconds of each, by transfer, and how evenly they are spread.

A resource is anything that can be full: a NIC in one direction, a GPU's NVLink in one direction, copies inside a GPU, the
NIXL agent of an engine rank. A transfer needs some seconds of each resource on its way if it had it for itself. The
prediction and the simulation both start from this table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .cluster import Cluster, Seats
from .readers import Transfers

Array = np.ndarray
#: resources on the way of one transfer at most
WAY = 3
KINDS = ("nic out", "nic in", "nvlink out", "nvlink in", "copy", "agent")


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that can be full: one of `KINDS` at a node, and the NIC, GPU or engine rank there."""

    kind: str
    node: int
    index: int

    def __str__(self) -> str:
        gpu = f"GPU {self.index} of node {self.node}"
        return {
            "nic out": f"out of NIC {self.index} of node {self.node}",
            "nic in": f"into NIC {self.index} of node {self.node}",
            "nvlink out": f"NVLink out of {gpu}",
            "nvlink in": f"NVLink into {gpu}",
            "copy": f"copies inside {gpu}",
            "agent": f"NIXL agent of engine rank {self.index}",
        }[self.kind]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What transfers need of resources.

    Attributes:
        resources: all of them, those that nothing uses included.
        way: [N, K] index of each resource on the way of each transfer; 0 where there is none.
        need: [N, K] seconds of it; 0 where there is none.
        nbytes: [R] bytes through each resource.
    """

    resources: tuple[Resource, ...]
    way: Array
    need: Array
    nbytes: Array

    def busy(self) -> Array:
        """[R] seconds that each resource works."""
        return np.bincount(self.way.ravel(), self.need.ravel(), len(self.resources))

    def of(self, kind: str) -> Array:
        """Indices of the resources of a kind."""
        return np.array([index for index, one in enumerate(self.resources) if one.kind == kind], np.int64)


def measure(transfers: Transfers, cluster: Cluster, seats: Seats) -> Traffic:
    """Finds the way of every transfer."""
    resources: dict[Resource, int] = {}

    def number(kind: str, node: int, index: int) -> int:
        return resources.setdefault(Resource(kind, node, index), len(resources))

    for side, gpus in (("out", seats.sources), ("in", seats.readers)):
        for gpu in gpus:
            number(f"nic {side}", *gpu.nic(cluster))
    rates = {"nic": cluster.nic_gbs * 1e9, "nvlink": cluster.nvlink_gbs * 1e9, "copy": cluster.copy_gbs * 1e9}
    way, need = np.zeros((len(transfers), WAY), np.int64), np.zeros((len(transfers), WAY))
    rows = zip(
        transfers.reader.tolist(), transfers.source.tolist(), transfers.mapped.tolist(), transfers.nbytes.tolist(),
        transfers.reads.tolist(), strict=True,
    )  # fmt: skip
    for at, (reader, source, mapped, nbytes, reads) in enumerate(rows):
        ours, theirs = seats.sources[source], seats.readers[reader]
        if ours == theirs:
            way[at, 0], need[at, 0] = number("copy", ours.node, ours.index), nbytes / rates["copy"]
        else:
            near = ours.node == theirs.node
            link = "nvlink" if near else "nic"
            places = [(gpu.node, gpu.index) if near else gpu.nic(cluster) for gpu in (ours, theirs)]
            way[at, :2] = [number(f"{link} {side}", *place) for side, place in zip(("out", "in"), places, strict=True)]
            need[at, :2] = nbytes / rates[link]
        if not mapped:
            way[at, 2], need[at, 2] = number("agent", theirs.node, reader), reads * cluster.read_us * 1e-6
    used = (need > 0) & (np.arange(WAY) < 2)
    moved = np.bincount(way[used], np.broadcast_to(transfers.nbytes[:, None], way.shape)[used], len(resources))
    return Traffic(tuple(resources), way, need, moved)


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly bytes are spread.

    Attributes:
        what: over which things.
        count: of them.
        total, largest, mean: bytes.
        floor: max over mean that no choice of owners could be below; 1 where that is not known to be more.
    """

    what: str
    count: int
    total: int
    largest: int
    mean: float
    floor: float = 1.0

    @property
    def ratio(self) -> float:
        """Max over mean; 1 where nothing moves."""
        return self.largest / self.mean if self.mean else 1.0


def balance(what: str, nbytes: Array, floor: float = 1.0) -> Balance:
    """Sums up bytes of several things."""
    total = int(nbytes.sum())
    return Balance(what, len(nbytes), total, int(nbytes.max(initial=0)), total / max(1, len(nbytes)), floor)


def by_source(transfers: Transfers, ranks: int) -> Array:
    """[ranks] bytes that each source rank serves."""
    return np.bincount(transfers.source, transfers.nbytes, ranks)


def owner_floor(demand: Sequence[tuple[float, frozenset[int]]], count: int) -> float:
    """Max over mean that no choice among owners could be below.

    Args:
        demand: bytes that are wanted of all boxes with the same owners, and these owners, as numbers of things to balance over.
        count: of the things.

    Returns:
        The largest load that a set of owners cannot share with others, over the mean: of each single set, and of each
        set with all that lie inside it.
    """
    total = sum(nbytes for nbytes, _ in demand)
    if not total:
        return 1.0
    sets = {owners for _, owners in demand}
    worst = max(sum(nbytes for nbytes, inner in demand if inner <= owners) / len(owners) for owners in sets)
    return max(1.0, worst * count / total)
