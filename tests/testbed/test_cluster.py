"""The cluster fixture: logical GPUs, the namespace, actors of test modules, workers in the driver's environment."""

from __future__ import annotations

import sys

import pytest
import ray
from ray.actor import ActorHandle

from rdt_testbed.cluster import Cluster

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("ray_cluster", [2], indirect=True)]


@ray.remote(num_gpus=1, num_cpus=0)
class Probe:
    def where(self) -> tuple[str, str, list[str]]:
        context = ray.get_runtime_context()
        return sys.prefix, context.namespace, context.get_accelerator_ids()["GPU"]


def test_actors_share_logical_gpus_and_the_environment(ray_cluster: Cluster) -> None:
    probes: list[ActorHandle] = [Probe.remote() for _ in range(2)]
    answers = ray.get([probe.where.remote() for probe in probes], timeout=60)
    assert {prefix for prefix, _, _ in answers} == {sys.prefix}
    assert {namespace for _, namespace, _ in answers} == {ray_cluster.namespace}
    assert sorted(gpu for _, _, gpus in answers for gpu in gpus) == ["0", "1"]


def test_cluster_is_what_was_asked_for(ray_cluster: Cluster) -> None:
    assert ray.cluster_resources()["GPU"] == ray_cluster.gpus == 2
    assert ray.get_runtime_context().gcs_address == ray_cluster.address
