"""Run by test_sync.py in a process of its own: two FSDP2 trainer actors feed one stock vLLM engine.

Prints one JSON object on its last line. The oracle for parameters is vLLM's own loader in the same engine; the oracle for
what the engine computes is the trainer's model in transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rdt_testbed import models
from rdt_testbed.cluster import local_cluster

PROMPTS = [[3, 4, 5, 6], [10, 11, 200, 57, 9]]
TOKENS = 6
WORLD = 2


class Trainer:
    """One FSDP2 rank whose weights are those of `models.build(kind, seed)`."""

    def __init__(self, rank: int, rendezvous: str, kind: models.Kind, changes: dict[str, Any]) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
        self.rank, self.kind, self.changes = rank, kind, changes
        self.model = models.build(kind, seed=0, **changes)
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    @torch.no_grad()
    def set(self, seed: int) -> None:
        from torch.distributed.tensor import distribute_tensor

        full = dict(models.build(self.kind, seed=seed, **self.changes).named_parameters())
        for name, parameter in self.model.named_parameters():
            value = distribute_tensor(full[name].data, parameter.device_mesh, parameter.placements)
            parameter.to_local().copy_(value.to_local())

    def join(self, group: str, options: dict[str, Any]) -> str:
        from rdt_core.sources import ModuleSource
        from rdt_core.sync import WeightSync

        options = dict(options)
        dtype = options.pop("dtype", None)
        self.sync = WeightSync.join(
            group, source=ModuleSource(self.model, dtype=dtype and getattr(torch, dtype)), rank=self.rank,
            world_size=WORLD, **{"timeout_s": 60.0, **options},
        )  # fmt: skip
        return self.sync.mode

    def attach(self, client: Any) -> None:
        self.sync.attach(client)

    def publish(self, version: int) -> Any:
        return self.sync.publish(version)

    def leave(self) -> None:
        self.sync.leave()


def main(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    import ray
    from rdt_vllm import VllmRayEngine, launch

    kind, changes = settings["kind"], settings.get("changes", {})
    models.save(models.build(kind, seed=0, **changes), folder / "start")
    began = time.time()
    trainers = [
        ray.remote(Trainer).options(num_cpus=0, enable_tensor_transport=True).remote(
            rank, str(folder / "rendezvous"), kind, changes
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    server = launch(
        str(folder / "start"),
        env=settings.get("env", {}),
        dtype=settings.get("dtype", "float32"), enforce_eager=True, max_model_len=64, skip_tokenizer_init=True,
        max_num_seqs=4, load_format=settings.get("load_format", "auto"), enable_prefix_caching=True,
        **settings.get("engine", {}),
    )  # fmt: skip
    results: dict[str, Any] = {"engine": ray.get(server.ready.remote(), timeout=240)}
    results["start_s"] = time.time() - began
    try:
        results |= scenario(settings, folder, trainers, server, VllmRayEngine)
    finally:
        ray.get(server.shutdown.remote(), timeout=60)
    return results


def scenario(settings: dict[str, Any], folder: Path, trainers: list[Any], server: Any, client_class: Any) -> dict[str, Any]:
    import ray

    kind, changes = settings["kind"], settings.get("changes", {})
    results: dict[str, Any] = {"syncs": [], "errors": {}}
    versions = iter(range(1, 1000))
    client = client_class(server, name="engine", cache=settings.get("cache", "reset"))

    def sync(seed: int) -> dict[str, Any]:
        version = next(versions)
        ray.get([trainer.set.remote(seed) for trainer in trainers])
        began = time.time()
        report = ray.get([trainer.publish.remote(version) for trainer in trainers], timeout=180)[0]
        found = {
            "version": version, "seconds": time.time() - began, "bytes": report.bytes, "mode": report.mode,
            "kinds": sorted({link.kind for link in report.links}), "phases": report.phases,
            "said": client.version(deadline=time.monotonic() + 10),
        }  # fmt: skip
        found |= compare(server, models.build(kind, seed=seed, **changes), version, settings.get("dtype", "float32"))
        results["syncs"].append(found)
        return found

    def checksums() -> dict[str, str]:
        return ray.get(server.compute_weight_checksums.remote(), timeout=60)

    for number, options in enumerate(settings.get("groups", [{}])):
        results.setdefault("modes", []).append(ray.get([t.join.remote(f"group{number}", options) for t in trainers])[0])
        ray.get(trainers[0].attach.remote(client), timeout=120)
        for seed in (11, 12, 13):
            sync(seed + 10 * number)
        before = checksums()
        sync(13 + 10 * number)
        results.setdefault("unchanged", []).append(checksums() == before)
        models.save(models.build(kind, seed=13 + 10 * number, **changes), folder / f"step{number}")
        weights = {"weights_path": str(folder / f"step{number}")}
        ray.get(server.collective_rpc.remote("reload_weights", kwargs=weights), timeout=120)
        results.setdefault("equals_loader", []).append(checksums() == before)
        if number + 1 < len(settings.get("groups", [{}])):
            ray.get([trainer.leave.remote() for trainer in trainers])
            client.name = f"engine{number + 1}"
    if settings.get("failures"):
        failures(results, sync, client_class, client, server, len(settings.get("groups", [{}])) - 1)
    ray.get([trainer.leave.remote() for trainer in trainers])
    return results


def failures(results: dict[str, Any], sync: Any, client_class: Any, client: Any, server: Any, number: int) -> None:
    """Everything that can go wrong in the order of calls; after each of them a whole sync must work again."""
    import ray
    from rdt_core.engines import ConnectInfo

    def soon() -> float:
        return time.monotonic() + 60

    def raised(call: Any) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    errors = results["errors"]
    client.begin(900, deadline=soon())
    errors["pull"] = raised(lambda: client.pull(900, deadline=soon()))
    errors["pull_abort"] = raised(lambda: client.abort(900, "the trainer gave up", deadline=soon()))
    sync(31)

    client.begin(901, deadline=soon())
    errors["finish"] = raised(lambda: client.finish(901, deadline=soon()))
    errors["finish_abort"] = raised(lambda: client.abort(901, "nothing was pulled", deadline=soon()))
    results["version_after_finish"] = client.version(deadline=soon())
    sync(32)

    client.begin(902, deadline=soon())
    errors["all_abort"] = raised(lambda: client.abort(902, "another replica failed", deadline=soon()))
    sync(33)

    # drivers that die in the middle, and one that comes after them
    info = ConnectInfo(
        group=f"group{number}", replica=client.name, namespace="rdt", address="", kinds=("mapped", "prepared", "ray"), timeout_s=30
    )
    for name, leave_open in {
        "open": lambda lost: lost.begin(903, deadline=soon()),
        "pull": lambda lost: (lost.begin(904, deadline=soon()), raised(lambda: lost.pull(904, deadline=soon()))),
        "finish": lambda lost: (lost.begin(905, deadline=soon()), raised(lambda: lost.finish(905, deadline=soon()))),
    }.items():
        leave_open(client_class(server, name=client.name))
        errors[f"lost_{name}"] = raised(lambda: client_class(server, name=client.name).connect(info, deadline=soon()))
        sync(34)

    errors["bad_update"] = raised(lambda: ray.get(server.start_weight_update.remote())) + raised(
        lambda: client._update({"vers": 3}, soon())
    )
    errors["bad_abort"] = raised(lambda: client._end(False, "bad", soon()))
    sync(35)


def compare(server: Any, model: Any, version: int, dtype: str) -> dict[str, Any]:
    """The engine's own samples against the trainer's recomputation."""
    import ray

    model = model.to(getattr(torch, dtype)).eval()
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    samples = ray.get([server.generate.remote(prompt, sampling) for prompt in PROMPTS], timeout=60)
    worst, stamped = 0.0, set()
    for prompt, (sample,) in zip(PROMPTS, samples, strict=True):
        ids = [*prompt, *sample.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        for index, token in enumerate(sample.token_ids):
            worst = max(worst, abs(sample.logprobs[index] - float(logits[len(prompt) + index - 1, token])))
        stamped |= set(sample.versions)
    return {"max_abs_logprob_error": worst, "stamped": sorted(stamped)}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as place, local_cluster(gpus=given.get("gpus", 0), cpus=4):
        result = main(given, Path(place))
    print(json.dumps(result), flush=True)
