"""Whole syncs over Ray: two FSDP2 ranks as actors, tensor-parallel plain modules as actors, every link kind and mode."""

from __future__ import annotations

import sys

import pytest
import torch

pytestmark = pytest.mark.integration

HIDDEN, LAYERS = 64, 3


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(101, HIDDEN)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(HIDDEN, HIDDEN + 32 * i, bias=i % 2 == 0) for i in range(LAYERS)
        )


def build_trained() -> Model:
    torch.manual_seed(0)
    return Model()


def build_served() -> Model:
    model = build_trained()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1)
    return model


class Trainer:
    def __init__(self, rank: int, world_size: int, rendezvous: str) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        self.rank, self.world_size = rank, world_size
        self.model = build_trained()
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def join(self, group: str, options: dict) -> str:
        from rdt_core.sources import ModuleSource
        from rdt_core.sync import WeightSync

        dtype = options.pop("dtype", None)
        source = ModuleSource(self.model, dtype=dtype)
        self.sync = WeightSync.join(
            group, source=source, rank=self.rank, world_size=self.world_size, timeout_s=120, **options
        )
        return self.sync.mode

    def attach(self, workers) -> None:
        from rdt_core.replica import ModuleReplica

        self.sync.attach(ModuleReplica(workers))

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.grad = torch.distributed.tensor.DTensor.from_local(
                torch.randn(parameter.to_local().shape, generator=generator),
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        self.optimizer.step()

    def publish(self, version: int, verify: str = "off"):
        return self.sync.publish(version, verify=verify)

    def verify(self):
        return self.sync.verify()

    def full(self) -> dict[str, torch.Tensor]:
        return {name: parameter.full_tensor().detach().clone() for name, parameter in self.model.named_parameters()}

    def leave(self) -> None:
        self.sync.leave()


@pytest.fixture(scope="module")
def trainers(ray_cluster, tmp_path_factory):
    import ray

    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    actors = [
        ray.remote(Trainer).options(num_cpus=0, enable_tensor_transport=True).remote(rank, 2, str(rendezvous))
        for rank in range(2)
    ]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.mark.parametrize("kind", ["mapped", "prepared", "ray"])
@pytest.mark.parametrize("mode", ["live", "snapshot", "bucket"])
def test_three_syncs_are_exact(trainers, mode, kind):
    import ray

    from rdt_core.replica import ModuleWorker

    options = {"mode": mode, "kinds": (kind,), "bucket_bytes": 20_000}
    group = f"{mode}-{kind}"
    assert ray.get([trainer.join.remote(group, dict(options)) for trainer in trainers]) == [mode, mode]
    workers = [ray.remote(ModuleWorker).options(num_cpus=0, enable_tensor_transport=True).remote(build_served)]
    try:
        ray.get(trainers[0].attach.remote(workers))
        for version, verify in enumerate(("off", "sample", "full"), start=1):
            ray.get([trainer.step.remote(version) for trainer in trainers])
            reports = ray.get([trainer.publish.remote(version, verify) for trainer in trainers])
            want = ray.get([trainer.full.remote() for trainer in trainers])[0]
            have = ray.get(workers[0].state.remote())
            assert want.keys() == have.keys()
            assert all(torch.equal(want[name], have[name]) for name in want)
            assert {link.kind for link in reports[0].links} == {kind}
            assert reports[0].bytes == sum(value.nbytes for value in want.values())
            assert reports[0].verify == verify
        checked = ray.get([trainer.verify.remote() for trainer in trainers])
        assert checked[0] == checked[1]
        assert {tensor.state for tensor in checked[0].tensors} == {"equal"}
        assert checked[0].bytes == reports[0].bytes
    finally:
        ray.get([trainer.leave.remote() for trainer in trainers])
        for worker in workers:
            ray.kill(worker)


def test_a_cast_snapshot_lands_in_another_dtype(trainers):
    import ray

    from rdt_core.replica import ModuleWorker

    ray.get([trainer.join.remote("cast", {"dtype": torch.bfloat16}) for trainer in trainers])
    worker = ray.remote(ModuleWorker).options(num_cpus=0, enable_tensor_transport=True).remote(build_served)
    try:
        ray.get(trainers[0].attach.remote([worker]))
        report = ray.get([trainer.publish.remote(1) for trainer in trainers])[0]
        want = ray.get([trainer.full.remote() for trainer in trainers])[0]
        have = ray.get(worker.state.remote())
        assert report.mode == "snapshot"
        assert all(torch.equal(value.bfloat16().float(), have[name]) for name, value in want.items())
    finally:
        ray.get([trainer.leave.remote() for trainer in trainers])
        ray.kill(worker)


def test_the_coordinator_imports_neither_torch_nor_nixl(trainers):
    import ray

    from rdt_core.rendezvous import open_coordinator
    from rdt_core.replica import ModuleWorker

    class Opener:
        def __init__(self) -> None:
            self.control = open_coordinator("lean", namespace="rdt", world_size=2, create=True, timeout_s=60)

        def imported(self) -> set[str]:
            handle = self.control._handle
            return ray.get(handle.__ray_call__.remote(lambda _: set(sys.modules) & {"torch", "nixl", "msgspec"}))

    # its actor is no fork of a process that has imported them
    opener = ray.remote(Opener).options(num_cpus=0, runtime_env={"py_executable": sys.executable}).remote()
    assert ray.get(opener.imported.remote()) == {"msgspec"}
    ray.get([trainer.join.remote("lean", {"kinds": ("ray",)}) for trainer in trainers])
    worker = ray.remote(ModuleWorker).options(num_cpus=0, enable_tensor_transport=True).remote(build_served)
    try:
        ray.get(trainers[0].attach.remote([worker]))
        for version, verify in enumerate(("off", "sample", "full"), start=1):
            ray.get([trainer.publish.remote(version, verify) for trainer in trainers])
        ray.get([trainer.verify.remote() for trainer in trainers])
        found = ray.get(opener.imported.remote())
        assert found == {"msgspec"}, "importing them takes a fresh process long enough to be felt in the first sync"
    finally:
        ray.get([trainer.leave.remote() for trainer in trainers])
        for actor in (worker, opener):
            ray.kill(actor)
