"""Run by test_interplay.py in a process of its own: FSDP2 ranks feed a stock vLLM worker that runs vLLM's own `sharded_rdt`.

Nothing of rdt's runs in the engine; the trainer's side is vLLM's own over `vllm_source`. Prints one JSON object on its last line.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from rdt_testbed import models
from rdt_testbed.cluster import local_cluster
from rdt_testbed.trainers import WORLD, Trainer

PROMPTS = [[3, 4, 5, 6], [10, 11, 200, 57, 9]]
TOKENS = 6


class StockTrainer(Trainer):
    """A rank that speaks to the engine by vLLM's own trainer side."""

    def connect(self, server: Any) -> None:
        import torch.distributed as dist
        from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

        from rdt_testbed import vllm_sharded
        from rdt_vllm import vllm_source

        vllm_sharded.prepare_trainer()
        self.stock = WeightTransferTrainerFactory.trainer_init(
            ShardedRDTTrainerInitInfo(
                rank=self.rank, num_consumers=1, trainer_actor_namespace="rdt", stall_timeout_s=60.0
            ),
            client=RayVLLMWeightSyncClient(server),
            source=vllm_source(self.source(None), dist.group.WORLD),
        )

    def send(self) -> None:
        self.stock.send_weights()

    def end(self) -> None:
        self.stock.shutdown()


def main(kind: str, folder: Path) -> dict[str, Any]:
    import ray

    from rdt_vllm.benchprogram import BenchServer

    models.save(models.build(kind, seed=0), folder / "start")
    actor = ray.remote(StockTrainer).options(num_cpus=0, max_concurrency=2, enable_tensor_transport=True)
    trainers = [actor.remote(rank, str(folder / "rendezvous"), kind) for rank in range(WORLD)]
    server = ray.remote(BenchServer).options(num_cpus=0, max_concurrency=1000).remote(
        str(folder / "start"), dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True, max_num_seqs=4,
        enable_prefix_caching=False, distributed_executor_backend="ray",
    )  # fmt: skip
    found: dict[str, Any] = {"engine": ray.get(server.ready.remote(), timeout=300), "errors": []}
    try:
        ray.get([one.connect.remote(server) for one in trainers], timeout=120)
        found["before"] = difference(server, models.build(kind, seed=1))
        for seed in (1, 2):
            ray.get([one.set.remote(seed) for one in trainers], timeout=60)
            ray.get([one.send.remote() for one in trainers], timeout=120)
            found["errors"].append(difference(server, models.build(kind, seed=seed)))
        ray.get([one.end.remote() for one in trainers], timeout=60)
    finally:
        ray.get(server.shutdown.remote(), timeout=60)
    return found


def difference(server: Any, model: Any) -> float:
    """Largest difference between the engine's log-probabilities of its own samples and the model's."""
    import ray

    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    worst = 0.0
    for prompt in PROMPTS:
        (sample,) = ray.get(server.generate.remote(prompt, sampling), timeout=60)
        with torch.no_grad():
            logits = model.eval()(torch.tensor([[*prompt, *sample.token_ids]])).logits[0].float().log_softmax(-1)
        for index, token in enumerate(sample.token_ids):
            worst = max(worst, abs(sample.logprobs[index] - float(logits[len(prompt) + index - 1, token])))
    return worst


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, local_cluster(gpus=1, cpus=4):
        result = main(sys.argv[1], Path(place))
    print(json.dumps(result), flush=True)
