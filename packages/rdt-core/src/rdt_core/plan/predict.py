"""How long a sync takes, phase by phase, from what it asks of each resource.

For the wire time the transfers of an engine rank's chunk are taken together where they are alike in size: one flow, through
the NICs of all their owners at the same pace. Control is calls after one another plus the coordinator's own time for all of
them. What is left out says `docs/plan.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cluster import Cluster
from .readers import Transfers
from .simulate import simulate
from .traffic import Traffic

Array = np.ndarray
#: control calls after one another in a sync whose bytes are readable at once: begin, pull, enter, finish, commit
CALLS = 5
#: transfers of a chunk are alike where they differ by less than about this factor; those of other sizes wait for other owners
ALIKE = 3.0
#: flows of a chunk at most: its large transfers, those about `ALIKE` times smaller, and all that are smaller still
CLASSES = 3
#: part of the time from which on the busiest resource is all that there is to say about it
_BUSY = 0.9


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
    """[readers, chunks] seconds of an engine rank's own GPU from a chunk's arrival on: scattering, and a post-load step."""
    copy = cluster.copy_gbs * 1e9
    seconds = transfers.packed_bytes / copy + transfers.packed_pieces * cluster.piece_us * 1e-6
    seconds = seconds + transfers.nbytes / copy if ring else seconds
    land = np.zeros((int(transfers.reader.max(initial=-1)) + 1, int(transfers.chunk.max(initial=-1)) + 1))
    np.add.at(land, (transfers.reader, transfers.chunk), seconds)
    return land


def wire_seconds(transfers: Transfers, traffic: Traffic, land: Array) -> tuple[float, str]:
    """Predicted seconds from the first post until the last chunk has landed, and what is busiest meanwhile, and for how long.

    Args:
        transfers: of all engine ranks.
        traffic: what they need.
        land: see `landing_seconds`.
    """
    if not len(transfers):
        return 0.0, "nothing"
    busy = traffic.busy()
    worst = int(busy.argmax())
    seconds = simulate(*_flows(transfers, traffic), land).seconds
    share = float(busy[worst]) / seconds
    idle = "" if share > _BUSY else "; then chunks wait for one another"
    return seconds, f"{traffic.resources[worst]}, busy {share:.0%} of it{idle}"


def _flows(transfers: Transfers, traffic: Traffic) -> tuple[Array, Array, Array, Traffic]:
    """Engine rank and chunk of each flow, the mean bytes of its transfers, and what it needs."""
    chunks, size = int(transfers.chunk.max()) + 1, len(traffic.resources)
    step = transfers.reader * chunks + transfers.chunk
    largest = np.zeros(int(step.max()) + 1)
    np.maximum.at(largest, step, transfers.nbytes)
    smaller = np.log(np.maximum(largest[step], 1) / np.maximum(transfers.nbytes, 1)) / np.log(ALIKE)
    alike = np.minimum(np.rint(smaller), CLASSES - 1).astype(np.int64)
    flow, home, parts = np.unique(step * CLASSES + alike, return_inverse=True, return_counts=True)
    home = home.ravel()
    used = traffic.need > 0
    pairs = np.broadcast_to(home[:, None], used.shape)[used] * size + traffic.way[used]
    passed, place = np.unique(pairs, return_inverse=True)
    seconds = np.bincount(place.ravel(), traffic.need[used], len(passed))
    owner = passed // size
    column = np.arange(len(passed)) - np.searchsorted(owner, owner)
    way = np.zeros((len(flow), int(column.max(initial=0)) + 1), np.int64)
    need = np.zeros(way.shape)
    way[owner, column], need[owner, column] = passed % size, seconds
    # bytes of one transfer: sharing is by transfers, so a flow of many takes as many shares where they all pass
    each = np.bincount(home, transfers.nbytes, len(flow)) / parts
    step = flow // CLASSES
    return step // chunks, step % chunks, each, Traffic(traffic.resources, way, need, traffic.nbytes)


def phases(
    transfers: Transfers,
    traffic: Traffic,
    cluster: Cluster,
    *,
    shards: int,
    snapshot_bytes: int,
    sources: int,
    readers: int,
    land: Array,
) -> list[Phase]:
    """Predicts every phase of a sync after the first one.

    Args:
        transfers: of all engine ranks.
        traffic: what they need.
        cluster: rates.
        shards: the most that a source rank holds.
        snapshot_bytes: the most that a source rank copies into an arena; 0 in mode live.
        sources, readers: ranks.
        land: see `landing_seconds`.
    """
    copy = cluster.copy_gbs * 1e9
    packing = np.bincount(transfers.source, transfers.packed_bytes / copy, sources)
    packing += np.bincount(transfers.source, transfers.packed_pieces * cluster.piece_us * 1e-6, sources)
    packs = bool(packing.max(initial=0.0) > 0)
    wire, busiest = wire_seconds(transfers, traffic, land)
    # begin, enter, done, outcome or commit; and where something is packed each source rank publishes by a call of its own
    calls = sources * (3 if packs or snapshot_bytes else 2) + readers * 2
    most = int(packing.argmax()) if len(packing) else 0
    found = [
        Phase("look at parameters", shards * cluster.tensor_us * 1e-6, f"the {shards:,} shards of a source rank"),
        Phase("snapshot", snapshot_bytes / copy, "copies inside a source rank's GPU"),
        Phase("pack", float(packing.max(initial=0.0)), f"copies inside the GPU of source rank {most}"),
        Phase("wire and landing", wire, busiest),
        Phase("control", CALLS * cluster.call_ms * 1e-3, f"{CALLS} calls after one another"),
        Phase("coordinator", calls * cluster.serve_ms * 1e-3, f"{calls:,} calls of {sources + readers:,} members"),
    ]
    return [phase for phase in found if phase.seconds > 0]
