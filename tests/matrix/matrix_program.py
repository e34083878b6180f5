"""Run by test_matrix.py in a process of its own: several trainers, one after the other, feed one stock engine.

Its argument is JSON: `engine`, `tp`, `kind`, and `trainers`, each with its name and layout. Prints one JSON object on its last
line. The oracle is the engine's own load of the checkpoint of the same step from disk: parameters and greedy generations.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import ray

from rdt_testbed import models
from rdt_testbed.cluster import local_cluster
from rdt_testbed.programs import SGLANG_ENVIRONMENT, VLLM_ENVIRONMENT

PROMPTS = [[3, 4, 5, 6], [10, 11, 200, 57, 9], [(7 * index) % 240 + 3 for index in range(40)]]
TOKENS = 8
#: of each group that a trainer makes, one after the other
GROUPS: list[dict[str, Any]] = [
    {"mode": "live", "kinds": ["mapped"]},
    {"mode": "bucket", "kinds": ["prepared"], "bucket_bytes": 65536},
]


class Engine(ABC):
    """One stock engine behind a server actor."""

    name: str
    environment: dict[str, str]
    server: Any

    @abstractmethod
    def start(self, folder: Path, tp: int) -> None: ...

    @abstractmethod
    def client(self, name: str) -> Any: ...

    @abstractmethod
    def sampling(self) -> dict[str, Any]: ...

    @abstractmethod
    def load(self, folder: Path) -> None:
        """The engine's own loader."""

    @abstractmethod
    def sums(self) -> Any:
        """Checksums of every parameter of every rank."""

    @abstractmethod
    def end(self) -> None: ...

    def call(self, method: str, *arguments: Any, timeout: float = 120, **named: Any) -> Any:
        return ray.get(getattr(self.server, method).remote(*arguments, **named), timeout=timeout)

    def generate(self) -> list[list[int]]:
        refs = [self.server.generate.remote(prompt, self.sampling()) for prompt in PROMPTS]
        return [list(sample.token_ids) for (sample,) in ray.get(refs, timeout=120)]


class Vllm(Engine):
    name, environment = "vllm", VLLM_ENVIRONMENT

    def start(self, folder: Path, tp: int) -> None:
        from rdt_vllm import launch

        self.server = launch(
            str(folder), dtype="float32", enforce_eager=True, max_model_len=128, skip_tokenizer_init=True, max_num_seqs=4,
            enable_prefix_caching=False, tensor_parallel_size=tp,
        )  # fmt: skip

    def client(self, name: str) -> Any:
        from rdt_vllm import VllmRayEngine

        return VllmRayEngine(self.server, name=name)

    def sampling(self) -> dict[str, Any]:
        return {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}

    def load(self, folder: Path) -> None:
        self.call("collective_rpc", "reload_weights", kwargs={"weights_path": str(folder)})

    def sums(self) -> Any:
        return self.call("compute_weight_checksums")

    def end(self) -> None:
        self.call("shutdown", timeout=60)


class Sglang(Engine):
    name, environment = "sglang", SGLANG_ENVIRONMENT

    def start(self, folder: Path, tp: int) -> None:
        from rdt_sglang import launch

        group = ray.util.placement_group([{"GPU": 1}] * tp)
        ray.get(group.ready(), timeout=60)
        self.server = launch(
            str(folder), placement_group=group, bundle_indices=list(range(tp)), timeout_s=300, tp_size=tp, device="cpu",
            attention_backend="torch_native", dtype="float32", skip_tokenizer_init=True, max_total_tokens=2048,
            max_running_requests=8, mem_fraction_static=0.6, random_seed=0, disable_cuda_graph=True, log_level="warning",
        )  # fmt: skip

    def client(self, name: str) -> Any:
        from rdt_sglang import SglangRayEngine

        return SglangRayEngine(self.server, name=name)

    def sampling(self) -> dict[str, Any]:
        return {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}

    def load(self, folder: Path) -> None:
        self.call("update_weights_from_disk", str(folder))
        self.sums()  # rank 0 answers for itself; another may still be at its post-load step

    def sums(self) -> Any:
        from rdt_core.web import Web

        web = Web(self.call("url"))
        return web.post("weights_checker", {"action": "checksum"}, deadline=time.monotonic() + 60)

    def end(self) -> None:
        from rdt_sglang.server import end

        end(self.server)


ENGINES = {one.name: one for one in (Vllm, Sglang)}


def make_trainers(trainer: dict[str, Any], rendezvous: Path, kind: models.Kind, changes: dict[str, Any]) -> list[Any]:
    """Actors of all ranks."""
    if trainer["name"] == "megatron":
        from rdt_testbed.megatron import Layout
        from rdt_testbed.megatron.trainer import MegatronTrainer

        layout = Layout(**trainer["layout"])
        actor = ray.remote(MegatronTrainer).options(num_cpus=0)
        return [actor.remote(rank, str(rendezvous), kind, changes, layout) for rank in range(layout.world)]
    from rdt_testbed.trainers import WORLD, Trainer

    actor = ray.remote(Trainer).options(num_cpus=0)
    return [actor.remote(rank, str(rendezvous), kind, changes) for rank in range(WORLD)]


class Cell:
    """One trainer, from its start to its end, and what the engine made of its weights."""

    def __init__(self, settings: dict[str, Any], folder: Path, engine: Engine) -> None:
        self.kind, self.changes = settings["kind"], settings.get("changes", {})
        self.folder, self.engine = folder, engine

    def run(self, trainer: dict[str, Any], version: int) -> dict[str, Any]:
        name = trainer["name"]
        began = time.monotonic()
        ranks = make_trainers(trainer, self.folder / f"rendezvous-{name}", self.kind, self.changes)
        found: dict[str, Any] = {"syncs": [], "ranks": len(ranks)}
        for number, options in enumerate(GROUPS):
            modes = ray.get([rank.join.remote(f"{name}{number}", options) for rank in ranks], timeout=180)
            client = self.engine.client(f"{name}{number}")
            ray.get(ranks[0].attach.remote(client), timeout=120)
            version += 1
            seed = 10 * version
            ray.get([rank.set.remote(seed) for rank in ranks], timeout=60)
            report = ray.get([rank.publish.remote(version) for rank in ranks], timeout=120)[0]
            sync = {
                "version": version, "said": client.version(deadline=time.monotonic() + 10), "modes": sorted(set(modes)),
                "kinds": sorted({link.kind for link in report.links}), "sources": len({link.source for link in report.links}),
                "readers": len(report.readers), "seconds": report.seconds,
            }  # fmt: skip
            found["syncs"].append(sync | self.against_disk(seed))
            ray.get([rank.leave.remote() for rank in ranks], timeout=60)
        for rank in ranks:
            ray.kill(rank)
        found["seconds"] = time.monotonic() - began
        return found

    def against_disk(self, seed: int) -> dict[str, bool]:
        pulled = self.engine.sums(), self.engine.generate()
        other = self.disk(seed + 1)
        disk = self.disk(seed)
        return {
            "parameters_equal": pulled[0] == disk[0], "generates_equal": pulled[1] == disk[1],
            "other_differs": other[0] != disk[0] and other[1] != disk[1],
        }  # fmt: skip

    def disk(self, seed: int) -> tuple[Any, Any]:
        place = models.save(models.build(self.kind, seed=seed, **self.changes), self.folder / "step")
        self.engine.load(place)
        return self.engine.sums(), self.engine.generate()


def main(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    models.save(models.build(settings["kind"], seed=0, **settings.get("changes", {})), folder / "start")
    engine = ENGINES[settings["engine"]]()
    results: dict[str, Any] = {"cells": {}}
    began = time.monotonic()
    engine.start(folder / "start", settings["tp"])
    try:
        results["engine"] = engine.call("ready", timeout=320)
        results["start_s"] = time.monotonic() - began
        cell = Cell(settings, folder, engine)
        for number, trainer in enumerate(settings["trainers"]):
            results["cells"][trainer["name"]] = cell.run(trainer, 100 * number)
    finally:
        engine.end()
    return results


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as place, local_cluster(gpus=given["tp"], cpus=4):
        outcome = main(given, Path(place))
    print(json.dumps(outcome), flush=True)
