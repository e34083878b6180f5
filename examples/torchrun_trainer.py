"""Trainers that torchrun starts and that only connect to a Ray cluster, feeding an engine that somebody else started.

    torchrun --nproc-per-node 2 examples/torchrun_trainer.py --address HOST:6379 --engine vllm=http://HOST:8000

The engine is a vLLM or SGLang server, of which only the URL is needed, or `module`: a copy of the model in a Ray actor, for a
machine without an engine. The training is a stand-in: next-token loss on random tokens. Rank 0 prints one JSON object a
version: what the engine serves, the loss, and for `module` how far its logits are from the trainer's own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from rollouts import VOCABULARY, say, tiny_model

from rdt_core import EngineClient, ModuleReplica, ModuleSource, ModuleWorker, WeightSync


def make_client(engine: str, folder: Path) -> tuple[EngineClient, Any]:
    """The client of an engine; beside it the actor that holds the model, where there is one."""
    kind, _, url = engine.partition("=")
    if kind == "vllm" and url:
        from rdt_vllm import VllmHttpEngine

        return VllmHttpEngine(url), None
    if kind == "sglang" and url:
        from rdt_sglang import SglangHttpEngine

        return SglangHttpEngine(url), None
    if engine != "module":
        raise SystemExit(f"--engine {engine}: give vllm=URL, sglang=URL or module")

    def make_module() -> torch.nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        # values are random: what it computes later came through a sync
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()

    worker = ray.remote(enable_tensor_transport=True, num_cpus=0)(ModuleWorker).remote(make_module)
    return ModuleReplica([worker], name="module"), worker


def train(model: Any, optimizer: torch.optim.Optimizer, seed: int, device: torch.device) -> float:
    ids = torch.randint(VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(seed)).to(device)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def difference(model: Any, worker: Any, device: torch.device) -> float | None:
    """On every rank, since the forward pass is a collective: the largest difference between both models' logits."""
    ids = torch.arange(32)[None]
    with torch.no_grad():
        own = model(input_ids=ids.to(device), use_cache=False).logits.float().cpu()
    model.reshard()  # after a forward pass alone the root still holds whole parameters, which are not what is published
    if worker is None:
        return None
    theirs = ray.get(worker.call.remote(lambda module: module(input_ids=ids).logits.detach()), timeout=60)
    return (own - theirs).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=lambda text: Path(text).resolve(), help="folder of a checkpoint; default: a tiny random model"
    )
    parser.add_argument("--address", default="auto", help="of the Ray cluster (default: the one of this machine)")
    parser.add_argument("--engine", default="module", help="vllm=URL, sglang=URL or module (default: module)")
    parser.add_argument("--group", default="torchrun", help="name of the sync group, unique in the cluster")
    parser.add_argument("--dtype", default="float32", help="of the engine and of the wire (default: float32)")
    parser.add_argument("--steps", type=int, default=3, help="training steps, each published (default: 3)")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("start this with torchrun, which says to each rank which one it is")

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if rank == 0:
        say(f"connecting to the Ray cluster ({args.address}), then {world_size} trainers and the engine")
    # each rank is a driver of its own in the cluster; no actor, no port and no thread of rdt's run beside it
    ray.init(address=args.address, namespace="rdt", log_to_driver=False)

    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    shared = [args.model or tiny_model() if rank == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(str(shared[0]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    source = ModuleSource(model, dtype=getattr(torch, args.dtype))
    sync = WeightSync.join(args.group, source=source, rank=rank, world_size=world_size)
    client = worker = None
    if rank == 0:
        client, worker = make_client(args.engine, folder)
        sync.attach(client)
    for version in range(1, args.steps + 1):
        loss = train(model, optimizer, seed=world_size * version + rank, device=device)
        report = sync.publish(version)
        apart = difference(model, worker, device)
        if client is not None:
            line = {
                "version": version, "served": client.version(deadline=time.monotonic() + 60), "loss": loss,
                "sync_s": report.seconds, "bytes": report.bytes, "mode": report.mode,
            }  # fmt: skip
            if apart is not None:
                line["difference"] = apart
            print(json.dumps(line), flush=True)
    sync.leave()
    dist.destroy_process_group()
    ray.shutdown()


if __name__ == "__main__":
    main()
