"""Ray options for the actors of a placement, each value with its reason beside it.

The options are for `ray.remote(**options)(Class)`. They are not for `Class.options(**options)`: Ray drops
`enable_tensor_transport` and `concurrency_groups` there without a word, which `make_actor` refuses. What is not set on
purpose: NCCL and Gloo variables (ranks of a trainer and of an engine share no process group with one another, so each
framework's own settings stand), restarts (a rank that comes back empty would serve nothing), and names (handles are passed).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import PlacementError
from .gpus import MASK, ORDER, PCI_ORDER
from .placement import Placement, Ranks, Seat
from .settings import ALLOCATORS, GET_ZCOPY

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
#: the concurrency group of calls that must get through while a rank trains or serves
CONTROL = "control"
#: the concurrency group of pulls, which last as long as a sync
WEIGHTS = "weights"


def trainer_options(
    placement: Placement,
    rank: int,
    *,
    role: str = "trainer",
    gpus: float | None = None,
    see_node: bool = False,
    threads: int | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Options of a source rank's actor (or of a rank of another role, such as a critic).

    Args:
        placement: made by `place`.
        rank: of the role.
        role: "trainer", or a key of `placement.others`.
        gpus: part of the GPU that Ray counts for this rank; default: all of it, or its part of a shared one.
        see_node: leave all GPUs of the node visible, for frameworks that choose their device by an index on the node;
            the actor then calls `own_device` and sets it. Otherwise Ray masks them, and the rank's GPU is device 0.
        threads: CPU threads for torch; default: the rank's CPUs, which is what Ray sets.
        env: further environment variables; they win.

    Raises:
        PlacementError: no such rank or role, or a part of a GPU that the placement does not give.
    """
    ranks = _ranks(placement, role)
    seat = _seat(ranks, rank)
    variables = {
        **_moving(),
        # Parameters in expandable segments cannot be exported to readers, so that mode `live` is refused and the trainer
        # pays for a copy. rdt's own arenas never come from torch's allocator and need no setting.
        # Under both names: a cluster may have set either, and which of them torch heeds depends on its version.
        **dict.fromkeys(ALLOCATORS, "expandable_segments:False"),
    }
    if see_node:
        variables[NOSET] = "1"
    if threads is not None:
        # without it the ranks of a node would each start a thread for every core once more than one CPU is theirs
        variables["OMP_NUM_THREADS"] = str(threads)
    return {
        **_reserved(placement, ranks, rank, seat, gpus),
        # `publish` holds the actor's only thread until every replica serves. Calls that must get through meanwhile
        # (health, status) are marked `@ray.method(concurrency_group="control")`. A larger `max_concurrency` instead
        # would run training calls in changing threads, and the current CUDA device belongs to a thread.
        "concurrency_groups": {CONTROL: 1},
        "runtime_env": {"env_vars": {**variables, **(env or {})}},
    }


def engine_options(
    placement: Placement,
    replica: int,
    rank: int,
    *,
    gpus: float | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Options of the actor that is one engine rank (a worker or a scheduler).

    Args:
        placement: made by `place`.
        replica: index into `placement.engines`.
        rank: engine rank in the replica.
        gpus: see `trainer_options`.
        env: further environment variables; they win.

    Raises:
        PlacementError: no such replica or rank, or a part of a GPU that the placement does not give.
    """
    ranks = _engine(placement, replica)
    seat = _seat(ranks, rank)
    variables = {
        **_moving(),
        # Engines use the index that Ray names, which is the one on the node only while nothing is masked. `own_device`
        # tells it.
        NOSET: "1",
    }
    return {
        **_reserved(placement, ranks, rank, seat, gpus),
        # an engine's event loop never returns: a pull in the default group would queue behind it for ever
        "concurrency_groups": {WEIGHTS: 1, CONTROL: 1},
        "runtime_env": {"env_vars": {**variables, **(env or {})}},
    }


def server_options(
    placement: Placement,
    replica: int,
    *,
    processes: bool = False,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Options of the actor that hosts an engine and starts its ranks, beside the first of them.

    An engine that places its ranks as Ray actors is told `placement.group` and `placement.engines[replica].bundle_list`
    (vLLM and SGLang read the list from an environment variable); without the list it takes bundles from the front, which
    are the trainers'.

    Args:
        placement: made by `place`.
        replica: index into `placement.engines`.
        processes: the engine starts its ranks as processes of the actor's node rather than as Ray actors.
        env: further environment variables; they win.

    Raises:
        PlacementError: no such replica, or processes on more than one node.
    """
    ranks = _engine(placement, replica)
    variables = _moving()
    if processes:
        if len(ranks.nodes) > 1:
            raise PlacementError(
                f"{ranks.name} has ranks on {len(ranks.nodes)} nodes ({', '.join(ranks.nodes)}), and processes of an actor "
                "run on one; let the engine place its ranks as Ray actors, or use a smaller tp"
            )
        # Ray gives the actor no GPU, because an actor has one bundle only, and would hide them all.
        variables[NOSET] = "1"
        variables[MASK] = ",".join(ranks.gpus)
    return {
        # The bundles keep the GPUs free for the ranks; one asked for here would be missing there.
        "num_gpus": 0,
        "num_cpus": 0,
        "scheduling_strategy": _strategy(placement, ranks[0].bundle),
        # a pause has to get through while requests are being generated
        "max_concurrency": 1000,
        "runtime_env": {"env_vars": {**variables, **(env or {})}},
    }


def make_actor(cls: type, options: Mapping[str, Any]) -> Any:
    """Makes an actor class with these options; `.remote(…)` starts the actor.

    Args:
        cls: a plain class. Its methods are put in a concurrency group by `@ray.method(concurrency_group=…)`.
        options: from one of the functions here.

    Raises:
        PlacementError: `cls` is an actor class already: Ray would drop some of the options.
    """
    import ray

    if hasattr(cls, "__ray_metadata__"):
        raise PlacementError(
            f"{cls!r} is decorated with ray.remote already, and Ray takes enable_tensor_transport and concurrency_groups "
            "only there; pass the plain class"
        )
    return ray.remote(**options)(cls)


def _moving() -> dict[str, str]:
    """What a process needs before it makes its NIXL agent; later is too late."""
    return {
        # UCX reads device memory directly only where it sees NVLink, which containers may hide, and else sends it
        # through TCP at a thousandth of the rate. Where it does see NVLink this is what it does anyway.
        GET_ZCOPY: "on",
        # Indices then mean the same to CUDA, nvidia-smi and Ray where a node has GPUs of different models.
        ORDER: PCI_ORDER,
    }


def _reserved(placement: Placement, ranks: Ranks, rank: int, seat: Seat, gpus: float | None) -> dict[str, Any]:
    share = placement.share(seat.bundle)
    if gpus is None:
        gpus = share
    if not 0 < gpus <= share or (gpus != 1 and not placement.shared):
        reason = (
            f"the ranks on bundle {seat.bundle} have {share:g} of its GPU each: if one took more, another (0.4 and 1.0 on "
            "one GPU) would wait for ever for its part"
            if placement.shared
            else "a rank that leaves a part of its GPU lets another actor onto it; to share GPUs, place with shared=True"
        )
        raise PlacementError(f"{ranks.name} rank {rank} asks for {gpus:g} GPU; {reason}")
    cpus = seat.cpus * share
    return {
        "num_gpus": gpus,
        # all CPUs of the bundle, which Ray counts whole from one on; Ray sets OMP_NUM_THREADS to this number
        "num_cpus": cpus if cpus < 1 else int(cpus),
        "scheduling_strategy": _strategy(placement, seat.bundle),
        # lets Ray move and free tensors of the actor in threads of its own, beside a method that runs
        "enable_tensor_transport": True,
    }


def _strategy(placement: Placement, bundle: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if placement.group is None:
        raise PlacementError("this placement was only computed and has no placement group; make one with `place`")
    # What an actor starts is not captured into the group: its bundles are full, and the child would wait for ever.
    return PlacementGroupSchedulingStrategy(placement.group, bundle, placement_group_capture_child_tasks=False)


def _ranks(placement: Placement, role: str) -> Ranks:
    if role == "trainer":
        return placement.trainers
    if role not in placement.others:
        raise PlacementError(f"no role {role!r} was placed; there are trainer, {', '.join(placement.others)}")
    return placement.others[role]


def _engine(placement: Placement, replica: int) -> Ranks:
    if not 0 <= replica < len(placement.engines):
        raise PlacementError(f"engine {replica} was not placed; there are {len(placement.engines)} engines")
    return placement.engines[replica]


def _seat(ranks: Ranks, rank: int) -> Seat:
    if not 0 <= rank < len(ranks):
        raise PlacementError(f"{ranks.name} has {len(ranks)} ranks; rank {rank} was asked for")
    return ranks.seats[rank]
