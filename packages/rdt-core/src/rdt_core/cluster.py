"""Placing trainers and engines in a Ray cluster: one placement group, one GPU a rank, and each rank where it was said to be.

`place` makes the group, or takes one that exists, finds the node and GPU behind every bundle by running a task in each, and
assigns ranks to them (`placement`). Options for the actors come from `actoroptions`. Nothing is detached, nothing is made
twice, and every wait has a deadline whose error says what was asked for and what the cluster has.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from . import gpus
from .errors import DeadlineError, PlacementError
from .placement import EngineShape, Placement, Seat, assign, demand

log = logging.getLogger(__name__)

# Enough for a probe to be told its GPU, little enough to fit beside any rank on a shared bundle.
_SHARED_PROBE = 0.001


class Found(msgspec.Struct, frozen=True):
    """What a probe saw in its bundle.

    Attributes:
        node_id: Ray's node id.
        address: of the node, as Ray knows it.
        gpu: the GPU as Ray names it.
        uuid: of the GPU; empty where the machine has no NVIDIA driver, so that the GPU is only a logical one.
    """

    node_id: str
    address: str
    gpu: str
    uuid: str


def place(
    *,
    trainers: int = 0,
    engines: Sequence[EngineShape] = (),
    others: Mapping[str, int] | None = None,
    group: Any = None,
    cpus: float = 1.0,
    shared: bool = False,
    timeout_s: float = 120.0,
) -> Placement:
    """Reserves GPUs for trainers and engines and says which rank runs where.

    Args:
        trainers: source ranks, one GPU each.
        engines: shapes of the engines.
        others: ranks of further roles by name, e.g. `{"critic": 4}`, one GPU each.
        group: a Ray placement group to use; its bundles have one GPU each (those without a GPU are left alone). None:
            one is made, which lives as long as this process or job, or until `release`.
        cpus: CPUs of each bundle that is made; a rank gets all of them.
        shared: let trainers, others and engines have the same GPUs. It costs memory and time, see the placement's notes.
        timeout_s: deadline of the whole call, in seconds.

    Returns:
        The placement. A group made here is removed again if anything fails.

    Raises:
        PlacementError: this process is not connected to Ray, or the ranks cannot be assigned.
        DeadlineError: the group was not placed, or a bundle did not answer in time; says what was asked for, and what
            each node has and has free.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if not ray.is_initialized():
        raise PlacementError("this process is not connected to Ray; call ray.init(address=…) before placing ranks")
    needed = demand(trainers, engines, others, shared=shared)
    deadline = time.monotonic() + timeout_s
    if group is not None:
        return _assigned(group, False, trainers, engines, others, shared, deadline, timeout_s)
    # No lifetime: a detached group would outlive a job that dies, and hold its GPUs.
    made = placement_group([{"GPU": 1.0, "CPU": cpus} if cpus else {"GPU": 1.0}] * needed, strategy="PACK")
    try:
        return _assigned(made, True, trainers, engines, others, shared, deadline, timeout_s)
    except BaseException:
        remove_placement_group(made)
        raise


def release(placement: Placement) -> None:
    """Removes the placement group if `place` made it, which ends the actors in it. A group that existed before is left."""
    if placement.created:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(placement.group)


def own_device() -> int:
    """The CUDA index, in this process, of the GPU that Ray gave to its actor or task.

    It is 0 where Ray masked all other GPUs, and another where the process sees its whole node. Threads start on device 0:
    call `torch.cuda.set_device` with it in every thread that touches the GPU.

    Raises:
        PlacementError: Ray gave this process no GPU or several, only a logical one, or the process does not see it.
    """
    import ray

    given = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    if len(given) != 1:
        raise PlacementError(f"this process has {len(given)} GPUs from Ray ({given}); a rank has exactly one")
    present = gpus.inventory()
    if not present:
        raise PlacementError(f"GPU {given[0]} of Ray is only a logical one: this machine has no NVIDIA driver")
    return gpus.local_index(str(given[0]), os.environ.get(gpus.MASK), present, device_order=os.environ.get(gpus.ORDER))


def probe() -> Found:
    """What this process, in a task or actor of one GPU, sees of its place.

    Raises:
        PlacementError: Ray gave no GPU or several, or one that this machine does not have.
    """
    import ray
    from ray.util import get_node_ip_address

    context = ray.get_runtime_context()
    given = [str(name) for name in context.get_accelerator_ids()["GPU"]]
    if len(given) != 1:
        raise PlacementError(f"a bundle holds the GPUs {given}; expected exactly one")
    present = gpus.inventory()
    try:
        uuid = gpus.find(given[0], present).uuid if present else ""
    except PlacementError as error:
        raise PlacementError(f"Ray counts a GPU on {get_node_ip_address()} that is not there: {error}") from error
    return Found(context.get_node_id(), get_node_ip_address(), given[0], uuid)


def _assigned(
    group: Any,
    created: bool,
    trainers: int,
    engines: Sequence[EngineShape],
    others: Mapping[str, int] | None,
    shared: bool,
    deadline: float,
    timeout_s: float,
) -> Placement:
    specs = _bundles(group)
    if not group.wait(max(0.0, deadline - time.monotonic())):
        raise DeadlineError(
            f"a placement group of {len(group.bundle_specs)} bundles ({_bundle_text(group.bundle_specs)}) was not placed "
            f"within {timeout_s:g} s. {_cluster_text(group.bundle_specs)}"
        )
    found = _probe_all(group, list(specs), shared, deadline, timeout_s)
    seats = [
        Seat(index, one.node_id, one.address, one.gpu, one.uuid, specs[index].get("CPU", 0.0))
        for index, one in found.items()
    ]
    placement = assign(seats, trainers=trainers, engines=engines, others=others, shared=shared)
    for note in placement.notes:
        log.warning("placement: %s", note)
    return dataclasses.replace(placement, group=group, created=created)


def _bundles(group: Any) -> dict[int, dict[str, float]]:
    """The bundles that have a GPU, by index."""
    specs = {index: dict(spec) for index, spec in enumerate(group.bundle_specs) if spec.get("GPU", 0)}
    wrong = {index: spec["GPU"] for index, spec in specs.items() if spec["GPU"] != 1}
    if wrong:
        raise PlacementError(
            f"bundles of the placement group have another number of GPUs than one: {wrong}. A rank is placed by its "
            "bundle, which only says which GPU it gets when the bundle has one; make the group with one bundle a GPU"
        )
    if not specs:
        raise PlacementError("no bundle of the placement group has a GPU")
    return specs


def _probe_all(group: Any, indices: Sequence[int], shared: bool, deadline: float, timeout_s: float) -> dict[int, Found]:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # asked before probes run, which take the bundles themselves
    taken = _taken(group, indices, shared)
    # The whole GPU unless it is shared: that the probe runs then says that nobody else has a part of it. No `max_calls`:
    # a process that ran a probe never used the GPU, and may serve again.
    task = ray.remote(num_cpus=0, num_gpus=_SHARED_PROBE if shared else 1, max_calls=0, max_retries=0)(probe)
    refs = {
        task.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote(): index
        for index in indices
    }
    done, late = ray.wait(list(refs), num_returns=len(refs), timeout=max(0.0, deadline - time.monotonic()))
    if late:
        for ref in late:
            ray.cancel(ref, force=True)
        missing = sorted(refs[ref] for ref in late)
        raise DeadlineError(_late_text(missing, sorted(taken.intersection(missing)), shared, timeout_s))
    try:
        answers = dict(zip((refs[ref] for ref in done), ray.get(done), strict=True))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PlacementError):
            raise error.cause from error
        raise PlacementError(f"a probe of the placement group failed: {error}") from error
    return {index: answers[index] for index in indices}


def _taken(group: Any, indices: Sequence[int], shared: bool) -> set[int]:
    """The bundles in which somebody else has what a probe needs. Those that Ray does not report yet are left out."""
    from ray._private.state import total_resources_per_node

    total, free = _merged(total_resources_per_node()), _merged(_free())
    names = {index: f"GPU_group_{index}_{group.id.hex()}" for index in indices}
    need = _SHARED_PROBE if shared else 1.0
    return {index for index, name in names.items() if name in total and free.get(name, 0.0) < need}


def _late_text(late: Sequence[int], taken: Sequence[int], shared: bool, timeout_s: float) -> str:
    text = f"waited {timeout_s:g} s for a probe of each bundle; no answer from bundles {list(late)}. "
    if taken:
        return text + (
            f"Bundles {list(taken)} were taken by other actors or tasks before: a second rank on a GPU waits for its part "
            "for ever. Use bundles that nobody has, end what runs in them, or place all roles in one call"
            + ("" if shared else " with shared=True")
        )
    return text + "Their nodes are slow to start a worker, or went away; `ray status` tells"


def _bundle_text(specs: Sequence[Mapping[str, float]]) -> str:
    kinds: dict[str, int] = {}
    for spec in specs:
        kind = " and ".join(f"{amount:g} {name}" for name, amount in sorted(spec.items(), reverse=True))
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} of {kind}" for kind, count in kinds.items())


def _cluster_text(specs: Sequence[Mapping[str, float]]) -> str:
    """What the cluster has, by node, against what the bundles need."""
    import ray

    free = _free()
    nodes, total, unused = [], {"GPU": 0.0, "CPU": 0.0}, {"GPU": 0.0, "CPU": 0.0}
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        parts = []
        for name in ("GPU", "CPU"):
            has, left = node["Resources"].get(name, 0.0), free.get(node["NodeID"], {}).get(name, 0.0)
            total[name] += has
            unused[name] += left
            parts.append(f"{has:g} {name} ({left:g} free)")
        nodes.append(f"{node['NodeManagerAddress']} (node {node['NodeID'][:12]}): {', '.join(parts)}")
    short = []
    for name in ("GPU", "CPU"):
        need = sum(spec.get(name, 0.0) for spec in specs)
        if need > unused[name]:
            short.append(f"{need:g} {name} needed, {total[name]:g} in the cluster, {unused[name]:g} free")
    why = "; ".join(short) or "enough is free in all, but not on nodes where whole bundles fit"
    return f"{why}. Nodes: {'; '.join(nodes)}. Add nodes, end what holds their GPUs, or ask for fewer ranks or CPUs a bundle"


def _free() -> dict[str, dict[str, float]]:
    """Free resources by node id and name; Ray has no public call for one node's."""
    from ray._private.state import available_resources_per_node

    return available_resources_per_node()


def _merged(nodes: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Resources of all nodes by name: those of a bundle are on one node, under a name of their own."""
    return {name: amount for node in nodes.values() for name, amount in node.items()}
