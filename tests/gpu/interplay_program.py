"""A trainer on one GPU feeds the stock worker of vLLM beside it through vLLM's own backends. Run as a program.

`python interplay_program.py CONFIG_DIR` prints one line of JSON for each backend. The oracle is vLLM's own loader with a
checkpoint of the same step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from modeltrainer import ModelTrainer

BACKENDS = ("ipc", "sharded_rdt")


class Trainer(ModelTrainer):
    """One source rank that sends by a backend of vLLM's own."""

    def connect(self, server: Any, backend: str) -> None:
        from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from rdt_core import ModuleSource
        from rdt_vllm import vllm_source

        if backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            info = IPCTrainerInitInfo(rank=0, packed=True)
        else:
            from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

            info = ShardedRDTTrainerInitInfo(
                rank=0, num_consumers=1, trainer_actor_namespace="rdt", stall_timeout_s=120.0
            )
        self.stock = WeightTransferTrainerFactory.trainer_init(
            info, client=RayVLLMWeightSyncClient(server), source=vllm_source(ModuleSource(self.model))
        )

    def step(self, seed: int, folder: str) -> None:
        self.reroll(seed)
        self.save(folder)

    def send(self) -> float:
        started = time.perf_counter()
        self.stock.send_weights()
        return time.perf_counter() - started

    def end(self) -> None:
        self.stock.shutdown()


def main(config_dir: str, folder: Path) -> list[dict[str, Any]]:
    from rdt_vllm.benchprogram import STOCK, BenchServer

    # what `ipc` sends is no plain data, and vLLM wants to be told so
    env = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    shared = {"num_cpus": 0, "runtime_env": {"env_vars": env}}
    actor = ray.remote(Trainer).options(max_concurrency=2, enable_tensor_transport=True, **shared)
    # the oracle, vLLM's own reload, wants an engine that was loaded from a checkpoint
    first = actor.remote(config_dir)
    checkpoint = str(folder / "first")
    ray.get(first.step.remote(1, checkpoint), timeout=120)
    ray.kill(first)
    server = ray.remote(BenchServer).options(max_concurrency=1000, **shared).remote(
        checkpoint, load_format="auto", dtype="bfloat16", enforce_eager=True, max_model_len=128, max_num_seqs=4,
        skip_tokenizer_init=True, gpu_memory_utilization=0.3, distributed_executor_backend="ray",
        worker_extension_cls="rdt_vllm.benchprogram.Switch",
    )  # fmt: skip
    ray.get(server.ready.remote(), timeout=300)
    found = []
    backend = STOCK
    for number, wanted in enumerate(BACKENDS, 1):
        if wanted != backend:
            ray.get(server.collective_rpc.remote("use_backend", (wanted,)), timeout=120)
            backend = wanted
        trainer = actor.remote(config_dir)
        before = ray.get(server.compute_weight_checksums.remote(), timeout=60)
        ray.get(trainer.connect.remote(server, wanted), timeout=120)
        seconds = []
        for step in range(3):  # what an earlier one sent must not be served after a later one
            place = str(folder / f"{wanted}-{step}")
            ray.get(trainer.step.remote(10 * number + step, place), timeout=120)
            seconds.append(ray.get(trainer.send.remote(), timeout=120))
        sent = ray.get(server.compute_weight_checksums.remote(), timeout=60)
        ray.get(server.collective_rpc.remote("reload_weights", kwargs={"weights_path": place}), timeout=120)
        loaded = ray.get(server.compute_weight_checksums.remote(), timeout=60)
        ray.get(trainer.end.remote(), timeout=60)
        ray.kill(trainer)
        found.append({"backend": wanted, "changed": sent != before, "equal": sent == loaded, "seconds": seconds})
    ray.get(server.shutdown.remote(), timeout=60)
    return found


if __name__ == "__main__":
    ray.init(num_cpus=8, num_gpus=1, object_store_memory=256 << 20, include_dashboard=False, namespace="rdt")
    try:
        with tempfile.TemporaryDirectory() as place:
            for row in main(sys.argv[1], Path(place)):
                print("RESULT " + json.dumps(row), flush=True)
    finally:
        ray.shutdown()
