"""How long a sync takes, phase by phase, from what it asks of each resource, in closed form.

The wire time is a recursion over chunks: a chunk is posted when the one two before it has landed, and queues at each resource
on its way behind what was posted there before; the engine ranks are taken to go from chunk to chunk together. Control is
calls after one another plus the coordinator's own time for all of them. What is left out says `docs/plan.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cluster import Cluster
from .readers import Transfers
from .traffic import WAY, Resource, Traffic

Array = np.ndarray
#: control calls after one another in a sync whose bytes are readable at once: begin, pull, enter, finish, commit
CALLS = 5


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a sync.

    Attributes:
        name: of the phase.
        seconds: that it adds.
        bottleneck: what it waits for.
    """

    name: str
    seconds: float
    bottleneck: str


def landing_seconds(transfers: Transfers, cluster: Cluster, ring: bool) -> Array:
    """[N] seconds that an engine rank's own GPU spends on a transfer after it arrived: scattering, and a post-load step."""
    seconds = transfers.packed_bytes / (cluster.copy_gbs * 1e9) + transfers.packed_pieces * cluster.piece_us * 1e-6
    return seconds + transfers.nbytes / (cluster.copy_gbs * 1e9) if ring else seconds


def wire_seconds(transfers: Transfers, traffic: Traffic, cluster: Cluster, ring: bool) -> tuple[float, Resource | None]:
    """Predicted seconds from the first post until the last chunk has landed, and the resource that is busiest meanwhile."""
    if not len(transfers):
        return 0.0, None
    chunks, resources = int(transfers.chunk.max()) + 1, len(traffic.resources)
    load = np.zeros((chunks, resources))
    np.add.at(load, (np.repeat(transfers.chunk, WAY), traffic.way.ravel()), traffic.need.ravel())
    land = np.zeros((chunks, int(transfers.reader.max()) + 1))
    np.add.at(land, (transfers.chunk, transfers.reader), landing_seconds(transfers, cluster, ring))
    free = np.zeros(resources)
    landed = [0.0, 0.0]  # when the chunks one and two before this one had landed
    for chunk in range(chunks):
        used = load[chunk] > 0
        free[used] = np.maximum(free[used], landed[1]) + load[chunk][used]
        done = max(float(free[used].max(initial=0.0)), landed[0]) + float(land[chunk].max())
        landed = [done, landed[0]]
    busy = traffic.busy()
    return landed[0], traffic.resources[int(busy.argmax())]


def phases(
    transfers: Transfers,
    traffic: Traffic,
    cluster: Cluster,
    *,
    shards: int,
    snapshot_bytes: int,
    sources: int,
    readers: int,
    ring: bool,
) -> list[Phase]:
    """Predicts every phase of a sync after the first one.

    Args:
        transfers: of all engine ranks.
        traffic: what they need.
        cluster: rates.
        shards: the most that a source rank holds.
        snapshot_bytes: the most that a source rank copies into an arena; 0 in mode live.
        sources, readers: ranks.
        ring: whether bytes go through receive buffers and a post-load step.
    """
    copy = cluster.copy_gbs * 1e9
    packing = np.bincount(transfers.source, transfers.packed_bytes / copy, sources)
    packing += np.bincount(transfers.source, transfers.packed_pieces * cluster.piece_us * 1e-6, sources)
    packs = bool(packing.max(initial=0.0) > 0)
    wire, busiest = wire_seconds(transfers, traffic, cluster, ring)
    # begin, enter, done, outcome or commit; and where something is packed each source rank publishes by a call of its own
    calls = sources * (3 if packs or snapshot_bytes else 2) + readers * 2
    most = int(packing.argmax()) if len(packing) else 0
    found = [
        Phase("look at parameters", shards * cluster.tensor_us * 1e-6, f"the {shards} shards of a source rank"),
        Phase("snapshot", snapshot_bytes / copy, "copies inside a source rank's GPU"),
        Phase("pack", float(packing.max(initial=0.0)), f"copies inside the GPU of source rank {most}"),
        Phase("wire and landing", wire, str(busiest) if busiest is not None else "nothing"),
        Phase("control", CALLS * cluster.call_ms * 1e-3, f"{CALLS} calls after one another"),
        Phase("coordinator", calls * cluster.serve_ms * 1e-3, f"{calls} calls of {sources + readers} members"),
    ]
    return [phase for phase in found if phase.seconds > 0]
