"""A Ray cluster for tests, small enough for a test machine, gone when the block ends.

Logical GPUs stand for engine ranks; no device is behind them. `local_cluster` connects to one, in a job of its own: to the
`Standing` one that the whole run shares, or to one that it starts, when there is none or it has too few GPUs. It never joins a
cluster that somebody else left running.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from .processes import descendants
from .warm import VARIABLE

NAMESPACE = "rdt-test"
#: address and GPUs of the cluster that stands, for this process and all below
STANDING = "RDT_TESTBED_CLUSTER"
#: names of what a program has in its environment and that cluster has not
VARIABLES = "RDT_TESTBED_VARIABLES"
_END_S = 20.0
#: for `ray.cluster_utils.Cluster`: what no test looks at takes 6 CPU seconds
LEAN = {
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
    "setup_worker_path": str(Path(__file__).with_name("startworker.py")),
}


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
    # starting one cluster turns tokens on for the process, and another one that has none then refuses its drivers
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def workers_environment(python: str = "") -> dict[str, Any]:
    """The runtime environment for `ray.init`: the workers of a program that was forked are forked as well; see `warm`.

    Args:
        python: the executable of the workers; that of this program without one.
    """
    python = python or os.environ.get(VARIABLE, "")
    found: dict[str, Any] = {"py_executable": python} if python else {}
    names = os.environ.get(VARIABLES, "").split() if STANDING in os.environ else []
    if names:  # workers have the environment of the cluster, which is older than the program
        found["env_vars"] = {name: os.environ[name] for name in names}
    return found


class Standing:
    """A cluster that nobody is connected to, for the jobs of many tests one after the other. A context manager.

    Args:
        gpus: logical GPUs.
        cpus: logical CPUs.
    """

    def __init__(self, gpus: int, cpus: int) -> None:
        quiet_ray()
        from ray.cluster_utils import Cluster as Nodes

        self._before = {process.pid for process in descendants()}
        # not written down where any `ray.init()` of this machine would find it and connect
        with mock.patch("ray._private.utils.write_ray_address"):
            self._nodes = Nodes(
                initialize_head=True,
                head_node_args={
                    "num_cpus": cpus,
                    "num_gpus": gpus,
                    "object_store_memory": 256 << 20,
                    # they would be no forks
                    "_system_config": {"prestart_worker_first_driver": False},
                    **LEAN,
                },
            )
        os.environ[STANDING] = f"{self._nodes.address} {gpus}"

    def __enter__(self) -> Standing:
        return self

    def __exit__(self, *_: object) -> None:
        del os.environ[STANDING]
        self._nodes.shutdown()
        psutil.wait_procs([one for one in descendants() if one.pid not in self._before], timeout=_END_S)


@contextmanager
def local_cluster(gpus: int = 0, cpus: int = 4, python: str = "") -> Iterator[Cluster]:
    """Connects to a cluster for the length of a `with` block and waits until the processes of it are gone.

    Args:
        gpus: logical GPUs that it must have; a cluster that is shared may have more.
        cpus: logical CPUs, if it is started here.
        python: the executable of its workers; see `workers_environment`.
    """
    quiet_ray()
    import ray

    address, _, most = os.environ.get(STANDING, "").partition(" ")
    started: dict[str, Any] = {"address": address}
    if not address or gpus > int(most):
        started = {
            "address": "local", "num_cpus": cpus, "num_gpus": gpus, "include_dashboard": False,
            "object_store_memory": 256 << 20,
        }  # fmt: skip
    before = {process.pid for process in descendants()}
    try:
        context = ray.init(**started, namespace=NAMESPACE, log_to_driver=False, runtime_env=workers_environment(python))
        yield Cluster(address=context.address_info["gcs_address"], namespace=NAMESPACE, gpus=gpus)
    finally:
        ray.shutdown()
        forget_nixl()
        # the next job must not compete with this one's dying workers, nor find its actors
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
