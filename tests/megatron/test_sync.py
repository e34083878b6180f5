"""Whole syncs over Ray: four Megatron ranks as actors feed a plain module, byte for byte, in every publish mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from rdt_testbed import models
from rdt_testbed.megatron import Layout
from rdt_testbed.megatron.recording import Record
from rdt_testbed.megatron.trainer import MegatronTrainer, checkpoint
from rdt_testbed.warm import Warm

pytestmark = pytest.mark.integration

# biases, a buffer, shared and routed experts, a dense layer
KIND = "glm4-moe"
CHANGES = {"vocab_size": 250}
LAYOUT = Layout(tp=2, pp=2, ep=2, etp=1)


class Trainer(MegatronTrainer):
    """Says what publishing cost: collectives, and bytes of the largest tensor that was made."""

    def publish_counted(self, version: int) -> tuple[Any, list[str], int]:
        with Record() as record:
            report = self.publish(version)
        return report, record.collectives, record.largest


class Served(torch.nn.Module):
    """One parameter for each checkpoint tensor."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.index = {name: number for number, name in enumerate(tensors)}
        self.held = torch.nn.ParameterList(torch.nn.Parameter(torch.full_like(one, -1)) for one in tensors.values())


def build_served() -> Served:
    return Served(checkpoint(KIND, 0, **CHANGES))


def load(module: Served, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, weight in weights:
        module.held[module.index[name]].data.copy_(weight)


def held(module: Served) -> dict[str, torch.Tensor]:
    return {name: module.held[number].detach().clone() for name, number in module.index.items()}


@pytest.fixture(scope="module")
def warm_core(warm_sglang: Warm | None) -> Warm | None:
    """It has imported Megatron as well, 3 seconds in each rank."""
    return warm_sglang


@pytest.fixture(scope="module")
def trainers(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    import ray

    rendezvous = str(tmp_path_factory.mktemp("rendezvous") / "file")
    actor = ray.remote(Trainer).options(num_cpus=0, enable_tensor_transport=True)
    actors = [actor.remote(rank, rendezvous, KIND, CHANGES, LAYOUT) for rank in range(LAYOUT.world)]
    yield actors
    for one in actors:
        ray.kill(one)


def test_the_trainers_compute_what_their_checkpoint_says(trainers: list[Any]) -> None:
    """Else a mistake that the source makes in writing and in reading would not be seen below."""
    import ray

    tokens = torch.arange(32).view(2, 16)
    ray.get([one.set.remote(3) for one in trainers])
    found = ray.get([one.logits.remote(tokens) for one in trainers])
    assert [logits is None for logits in found] == [True, True, False, False]
    with torch.no_grad():
        want = models.build(KIND, seed=3, **CHANGES)(tokens).logits
    assert all(torch.allclose(logits, want, rtol=0, atol=1e-5) for logits in found[2:])


@pytest.mark.parametrize("mode", ["live", "snapshot", "bucket"])
def test_two_syncs_are_exact(trainers: list[Any], mode: str) -> None:
    import ray

    from rdt_core.replica import ModuleReplica, ModuleWorker

    options = {"mode": mode, "bucket_bytes": 50_000, "timeout_s": 120.0}
    assert ray.get([one.join.remote(f"megatron-{mode}", options) for one in trainers]) == [mode] * LAYOUT.world
    worker = ray.remote(ModuleWorker).options(num_cpus=0, enable_tensor_transport=True)
    worker = worker.remote(build_served, 0, 1, load)
    try:
        ray.get(trainers[0].attach.remote(ModuleReplica([worker])))
        for version in (1, 2):
            ray.get([one.set.remote(version) for one in trainers])
            reports = ray.get([one.publish_counted.remote(version) for one in trainers])
            want, have = checkpoint(KIND, version, **CHANGES), ray.get(worker.call.remote(held))
            assert want.keys() == have.keys()
            assert [name for name in want if not torch.equal(want[name], have[name])] == []
            assert {tuple(collectives) for _, collectives, _ in reports} == {()}
            assert mode != "live" or max(largest for *_, largest in reports) == 0
            report = reports[0][0]
            assert report.bytes == sum(value.nbytes for value in want.values())
            assert {link.source for link in report.links} == set(range(LAYOUT.world)), "every rank owns some of it"
    finally:
        ray.get([one.leave.remote() for one in trainers])
        ray.kill(worker)
