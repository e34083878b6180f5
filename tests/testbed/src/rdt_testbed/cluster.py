"""A Ray cluster of this process alone, small enough for a test machine, gone when the block ends.

Logical GPUs stand for engine ranks; no device is behind them. It never joins a cluster that somebody else left running.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from .processes import descendants
from .warm import VARIABLE

NAMESPACE = "rdt-test"
_END_S = 20.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that this process is connected to.

    Attributes:
        address: for `ray.init(address=…)` or `RAY_ADDRESS` of other processes.
        namespace: the one that named actors of tests live in.
        gpus: logical GPUs that it declares.
    """

    address: str
    namespace: str
    gpus: int


def quiet_ray() -> None:
    """Sets what Ray reads from the environment when it is imported, here and in every process below.

    Under `uv run` Ray would otherwise upload the working directory and make a new environment for each worker.
    """
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def workers_environment() -> dict[str, str]:
    """The runtime environment for `ray.init`: the workers of a program that was forked are forked as well; see `warm`."""
    python = os.environ.get(VARIABLE)
    return {"py_executable": python} if python else {}


@contextmanager
def local_cluster(gpus: int = 0, cpus: int = 4) -> Iterator[Cluster]:
    """Runs a cluster for the length of a `with` block and waits until its processes are gone.

    Args:
        gpus: logical GPUs.
        cpus: logical CPUs; Ray starts as many workers ahead.
    """
    quiet_ray()
    import ray

    before = {process.pid for process in descendants()}
    try:
        context = ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=gpus,
            namespace=NAMESPACE,
            include_dashboard=False,
            object_store_memory=256 << 20,
            log_to_driver=False,
            runtime_env=workers_environment(),
        )
        yield Cluster(address=context.address_info["gcs_address"], namespace=NAMESPACE, gpus=gpus)
    finally:
        ray.shutdown()
        forget_nixl()
        # the next cluster must not compete with this one's dying workers
        psutil.wait_procs([process for process in descendants() if process.pid not in before], timeout=_END_S)


def forget_nixl() -> None:
    """Ends the NIXL agent that this process may have made: its progress thread keeps a whole core busy, tests or not."""
    util = sys.modules.get("ray.experimental.rdt.util")
    if util is None:
        return
    manager = util.get_tensor_transport_manager("NIXL")
    manager._nixl_agent = None
    manager._tensor_desc_cache.clear()
    prepared = sys.modules.get("rdt_core.transport.prepared")
    if prepared is not None:
        prepared._KEPT.clear()
    gc.collect()
