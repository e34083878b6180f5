"""How a process finds the Ray cluster and in it the coordinator of its group: the first step of every member.

A coordinator is a named actor in an explicit namespace. Source rank 0 creates it, everybody else waits for it until a
deadline. Nothing is guessed: no cluster is started, no other group, namespace or address is taken, and an error says which
rdt actors the cluster has.
"""

from __future__ import annotations

import os
import socket
import time

from .control import RayControl
from .coordinator import Coordinator
from .errors import DeadlineError, MembershipError, death_of
from .rayauth import way_out

DEFAULT_NAMESPACE = "rdt"
#: before a group's name in that of its actor
PREFIX = "rdt."
_POLL_S = 0.1
_PROBE_S = 5.0


def open_coordinator(
    group: str,
    *,
    namespace: str = DEFAULT_NAMESPACE,
    world_size: int | None = None,
    create: bool,
    timeout_s: float,
    stall_timeout_s: float = 600.0,
    is_source: bool = False,
) -> RayControl:
    """Finds the coordinator of a group, an actor named `rdt.GROUP`, or creates it.

    Who creates it keeps it alive: the actor ends with that process, so that no run inherits another run's group. Let
    source rank 0 create it and everybody else wait for it.

    Args:
        group: the group's name.
        namespace: Ray namespace, always explicit.
        world_size: number of source ranks; needed to create.
        create: create it if it does not exist.
        timeout_s: to find it, or for it to start.
        stall_timeout_s: see `Coordinator`.
        is_source: a source rank asks, which decides the way out that an error names.

    Raises:
        MembershipError: this process is not connected to Ray, or `world_size` is missing.
        DeadlineError: not there in time; names the rdt actors that the cluster has.
    """
    import ray

    if not ray.is_initialized():
        raise MembershipError(
            f"cannot open group {group!r}: this process is not connected to Ray; call ensure_ray() first"
        )
    if create and world_size is None:
        raise MembershipError(f"cannot create group {group!r} without a world_size, the number of source ranks")
    name = f"{PREFIX}{group}"
    deadline = time.monotonic() + timeout_s
    trouble = "no such actor"
    while True:
        try:
            if create:
                handle = (
                    ray.remote(Coordinator)
                    .options(
                        name=name,
                        namespace=namespace,
                        get_if_exists=True,
                        num_cpus=0,
                        max_concurrency=10_000,
                        max_restarts=0,
                        max_task_retries=0,
                        enable_task_events=False,  # Ray's GCS would keep a record of every call
                    )
                    .remote(group, world_size, stall_timeout_s)
                )
            else:
                handle = ray.get_actor(name, namespace)
            ray.get(handle.current.remote(), timeout=max(deadline - time.monotonic(), _POLL_S))
            return RayControl(group, handle, call_timeout_s=timeout_s)
        except ValueError:
            trouble = "no such actor"
        except ray.exceptions.RayActorError as error:
            # The name may still point at the actor of a run that is ending.
            trouble = f"it died: {death_of(error)}"
        except ray.exceptions.GetTimeoutError:
            trouble = "it did not start or does not answer"
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    where = (
        "It is source rank 0 that opens it, and it has not joined: source ranks count from 0, and all of them join at the same "
        "time, with the same group, namespace and cluster address"
        if is_source
        else "Start the trainer first, and pass the same group, namespace and cluster address on both sides"
    )
    others = sorted(
        f"{actor['name']} in namespace {actor['namespace']!r}"
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(PREFIX)
    )
    raise DeadlineError(
        f"waited {timeout_s:g} s for the coordinator of group {group!r}, actor {name!r} in namespace {namespace!r} "
        f"of the cluster at {ray.get_runtime_context().gcs_address}: {trouble}. rdt actors there: "
        f"{'; '.join(others) or 'none'}. {where}"
    )


def ensure_ray(address: str | None = None, namespace: str = DEFAULT_NAMESPACE) -> None:
    """Connects this process to the Ray cluster unless it is connected.

    Args:
        address: of the cluster; default: the environment variable RAY_ADDRESS.
        namespace: for a new connection.

    Raises:
        MembershipError: no address is known, no cluster answers there, or it does not take this process's token.
    """
    import ray

    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS")
    if not address:
        raise MembershipError(
            "this process is not connected to Ray and knows no cluster: pass address= or set RAY_ADDRESS to the "
            "cluster's address (ray.get_runtime_context().gcs_address in a process that is connected)"
        )
    try:
        probe(address)
        ray.init(address=address, namespace=namespace, log_to_driver=False)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise MembershipError(f"no Ray cluster answers at {address!r}: {error}{way_out(error)}") from error


def probe(address: str) -> None:
    """Raises OSError unless something listens at an address of the form host:port: Ray would try for many minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "://" not in address:
        socket.create_connection((host, int(port)), _PROBE_S).close()
