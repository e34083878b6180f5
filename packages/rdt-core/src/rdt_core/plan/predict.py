"""How long a sync takes, phase by phase, from what it asks of each resource.

For the wire time of large plans engine ranks are taken together in cohorts, each as wide as all of its ranks and as slow as the
busiest: what a cohort reads of a source rank in a chunk is one flow. Control is calls after one another plus the coordinator's
own time for all of them. What is left out says `docs/plan.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cluster import Cluster
from .readers import Transfers
from .simulate import simulate
from .traffic import WAY, Traffic

Array = np.ndarray
#: control calls after one another in a sync whose bytes are readable at once: begin, pull, enter, finish, commit
CALLS = 5
#: transfers that are looked at one by one; where there are more, engine ranks are taken together in cohorts
TRANSFERS = 10_000
#: cohorts at least
COHORTS = 8
#: resources that belong to engine ranks
_READERS = ("nic in", "nvlink in", "copy", "agent")


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
    """Predicted seconds from the first post until the last chunk has landed, and what is busiest meanwhile.

    Args:
        transfers: of all engine ranks.
        traffic: what they need.
        land: see `landing_seconds`.
    """
    if not len(transfers):
        return 0.0, "nothing"
    busy = traffic.busy()
    worst = traffic.resources[int(busy.argmax())]
    readers = int(transfers.reader.max()) + 1
    cohorts = min(readers, max(COHORTS, TRANSFERS * readers // len(transfers)))
    cohort = transfers.reader * cohorts // readers
    # resources of engine ranks become one of each kind and cohort, as busy as the busiest of them
    size = len(traffic.resources)
    mine = np.array([one.kind in _READERS for one in traffic.resources])
    kind = np.array([_READERS.index(one.kind) if one.kind in _READERS else 0 for one in traffic.resources])
    place = np.where(mine[traffic.way], size + kind[traffic.way] + len(_READERS) * cohort[:, None], traffic.way)
    everything = size + len(_READERS) * cohorts
    total = np.bincount(place.ravel(), traffic.need.ravel(), everything)
    most = np.zeros(everything)
    np.maximum.at(most, place.ravel(), np.where(mine[traffic.way], busy[traffic.way], total[place]).ravel())
    width = np.where(total > 0, most / np.where(total > 0, total, 1.0), 1.0)
    # a flow for each cohort, chunk, source rank and way
    keys = np.column_stack([cohort, transfers.chunk, transfers.source, place * (traffic.need > 0)])
    flows, home = np.unique(keys, axis=0, return_inverse=True)
    home = home.ravel()
    nbytes = np.bincount(home, transfers.nbytes, len(flows))
    need = np.zeros((len(flows), WAY))
    np.add.at(need, home, traffic.need * width[place])
    landed = np.zeros((cohorts, land.shape[1]))
    np.maximum.at(landed, np.arange(readers) * cohorts // readers, land)
    lumped = Traffic((worst,) * everything, flows[:, 3:], need, nbytes)
    return simulate(flows[:, 0], flows[:, 1], nbytes, lumped, landed).seconds, str(worst)


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
        Phase("look at parameters", shards * cluster.tensor_us * 1e-6, f"the {shards} shards of a source rank"),
        Phase("snapshot", snapshot_bytes / copy, "copies inside a source rank's GPU"),
        Phase("pack", float(packing.max(initial=0.0)), f"copies inside the GPU of source rank {most}"),
        Phase("wire and landing", wire, busiest),
        Phase("control", CALLS * cluster.call_ms * 1e-3, f"{CALLS} calls after one another"),
        Phase("coordinator", calls * cluster.serve_ms * 1e-3, f"{calls} calls of {sources + readers} members"),
    ]
    return [phase for phase in found if phase.seconds > 0]
