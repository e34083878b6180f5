"""What other designs would need on the same machines: broadcast of full tensors, and a bucketed gather that engines pull from.

Formulas, not plans, and kind to them: their steps overlap perfectly, collectives reach the full rate of every NIC of a node,
and no memory is short. Each pays for every tensor by itself, which is what the measured ones do (see `docs/performance.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .cluster import Cluster, Seats


@dataclass(frozen=True, slots=True)
class Peer:
    """Another design's sync.

    Attributes:
        name: of the design.
        seconds: of a sync.
        bottleneck: what most of it is spent on.
        formula: how it was found.
    """

    name: str
    seconds: float
    bottleneck: str
    formula: str


def compare(nbytes: int, tensors: int, stages: int, cluster: Cluster, seats: Seats) -> list[Peer]:
    """Returns the designs.

    Args:
        nbytes: of the checkpoint.
        tensors: of the checkpoint.
        stages: of the trainer's pipeline; each gathers and sends its own part, side by side with the others.
        cluster: rates.
        seats: where ranks are.
    """
    trainers = {gpu.node for gpu in seats.sources}
    engines = {gpu.node for gpu in seats.readers}
    node_gbs = cluster.nics * cluster.nic_gbs * 1e9
    inside = cluster.collective_gbs * 1e9
    one_node = trainers == engines and len(trainers) == 1
    stage_bytes, stage_ranks = nbytes / stages, max(1, len(seats.sources) // stages)
    stage_nodes = max(1, len(trainers) // stages)
    gather = max(
        stage_bytes * (1 - 1 / stage_nodes) / node_gbs,
        stage_bytes * (1 - 1 / stage_ranks) / inside,
    )
    each = tensors * cluster.collective_us * 1e-6
    receive = nbytes / inside if one_node else max(nbytes / node_gbs, nbytes / inside)
    # an engine rank has its NIC for itself, or shares it with the other GPUs of its node
    share = cluster.nic_gbs * 1e9 * min(1.0, cluster.nics / cluster.gpus)
    pull = nbytes / (cluster.nvlink_gbs * 1e9) if one_node else nbytes / share
    serve = 0.0 if one_node else nbytes * len(seats.readers) / (len(seats.sources) * share)
    return [
        _peer(
            "broadcast, then load",
            {"gather on the trainer": gather, "every engine node receives every tensor": receive},
            each,
            "max(gather, model / a node's NICs, model / collective rate) + tensors x cost of one",
        ),
        _peer(
            "bucketed gather, pulled",
            {"gather on the trainer": gather, "every engine rank pulls every tensor": pull, "owners' NICs": serve},
            each,
            "max(gather, model / a GPU's NIC, model x engine ranks / trainers' NICs) + tensors x cost of one",
        ),
    ]


def _peer(name: str, parts: dict[str, float], each: float, formula: str) -> Peer:
    slowest = max(parts, key=lambda part: parts[part])
    bottleneck = slowest if parts[slowest] >= each else "the cost of every single tensor"
    return Peer(name, parts[slowest] + each, bottleneck, formula)
