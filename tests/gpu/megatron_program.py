"""Megatron trainers with NCCL at work feed tensor-parallel readers, on one GPU or several. Run as a program.

Every GPU holds a trainer rank and an engine rank, each a process of its own. Between syncs the trainers take real steps
(forward, backward, distributed optimiser); while a sync runs a thread of every trainer keeps NCCL collectives going. After
each sync the digest of every checkpoint tensor is compared between trainers and readers. Prints one JSON object as its
last line, and writes it into the folder `OUT` names. Needs rdt-core, rdt-megatron, megatron-core and Ray on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

COLLECTIVES = 100  # while one sync runs
LENGTH = 64


def hugging_face(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe" if args.experts else "qwen3",
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 128,
        "num_key_value_heads": max(args.hidden // 512, args.world),
        "head_dim": 128,
        "tie_word_embeddings": False,
        **({"num_experts": args.experts} if args.experts else {}),
    }


class Trainer:
    """One Megatron rank on one GPU."""

    def __init__(self, args: argparse.Namespace, rank: int, rendezvous: str) -> None:
        import torch
        import torch.distributed as dist
        import torch.nn.functional as F
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=args.world,
            device_id=torch.device("cuda", rank),
        )
        ep = args.world if args.experts else 1
        parallel_state.initialize_model_parallel(
            args.tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1 if args.experts else None
        )
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        self.args, self.rank = args, rank
        hf = hugging_face(args)
        moe: dict[str, Any] = {}
        if args.experts:
            moe = {
                "num_moe_experts": args.experts, "moe_router_topk": 2, "moe_ffn_hidden_size": args.hidden // 2,
                "expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall",
                "moe_router_load_balancing_type": "none", "sequence_parallel": args.tp > 1,
            }  # fmt: skip
        config = TransformerConfig(
            num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=hf["num_attention_heads"],
            num_query_groups=hf["num_key_value_heads"], kv_channels=128, ffn_hidden_size=args.hidden * 3,
            normalization="RMSNorm", qk_layernorm=True, gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
            hidden_dropout=0.0, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
            tensor_model_parallel_size=args.tp, transformer_impl="local", masked_softmax_fusion=False,
            bias_dropout_fusion=False, bias_activation_fusion=False, gradient_accumulation_fusion=False,
            persist_layer_norm=False, apply_rope_fusion=False,
            **moe,
        )  # fmt: skip
        spec = get_gpt_layer_local_spec(num_experts=args.experts or None, qk_layernorm=True, normalization="RMSNorm")
        model: Any = GPTModel(
            config=config, transformer_layer_spec=spec, vocab_size=-(-args.vocab // (128 * args.tp)) * 128 * args.tp,
            max_sequence_length=LENGTH,
            share_embeddings_and_output_weights=False, position_embedding_type="rope", parallel_output=True,
        ).cuda()  # fmt: skip
        model = Float16Module(config, model)
        distributed = args.world > args.tp
        self.model = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model
        )
        self.model.broadcast_params()
        options = OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=distributed,
            clip_grad=1.0,
        )
        self.optimizer = get_megatron_optimizer(options, [self.model]) if args.optimizer else None
        config.finalize_model_grads_func = finalize_model_grads
        self.hf = hf

    def step(self, seed: int) -> float:
        """One training step on random tokens; without an optimiser, the parameters are moved by hand."""
        import torch
        from megatron.core.pipeline_parallel import get_forward_backward_func

        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, self.args.vocab, (2, LENGTH), generator=generator).cuda()
        positions = torch.arange(LENGTH, device="cuda").expand(2, -1)
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)

        def forward(iterator: Any, model: Any) -> Any:
            losses = model(tokens, positions, mask, labels=tokens.roll(-1, 1))

            def loss(output: Any) -> Any:
                value = output.float().mean()
                return value, {"loss": value.detach()}

            return losses, loss

        self.model.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        (out,) = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter([None]), model=self.model, num_microbatches=1, seq_length=LENGTH,
            micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(parameter, alpha=0.01)
        return float(out["loss"])

    def join(self, group: str, mode: str, kind: str) -> str:
        from rdt_core import WeightSync
        from rdt_megatron import MegatronSource

        self.source = MegatronSource([self.model], self.hf)
        self.sync = WeightSync.join(
            group,
            source=self.source,
            rank=self.rank,
            world_size=self.args.world,
            mode=mode,
            kinds=(kind,),
            timeout_s=120,
        )
        return self.sync.mode

    def attach(self, workers: list[Any]) -> None:
        from rdt_core.replica import ModuleReplica

        self.sync.attach(ModuleReplica(workers))

    def publish(self, version: int, collectives: int) -> dict[str, Any]:
        """Publishes while a thread runs NCCL collectives; returns the report and how many of them were done meanwhile."""
        import torch
        import torch.distributed as dist

        done, ended = [], threading.Event()
        began = time.perf_counter()

        def run() -> None:
            torch.cuda.set_device(self.rank)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                value = torch.ones(4 << 20, device="cuda")
                for _ in range(collectives):
                    dist.all_reduce(value)
                    value.mul_(1 / self.args.world)
                    stream.synchronize()
                    done.append(ended.is_set())

        thread = threading.Thread(target=run)
        thread.start()
        report = self.sync.publish(version)
        ended.set()
        seconds = time.perf_counter() - began
        thread.join(60)
        assert not thread.is_alive(), "the collectives hang"
        return {
            "seconds": seconds, "bytes": report.bytes, "mode": report.mode, "kinds": sorted({link.kind for link in report.links}),
            "collectives_meanwhile": done.count(False), "phases": report.phases,
        }  # fmt: skip

    def digests(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...], int]]:
        from rdt_core.bench.digests import collect, digest

        shards = list(self.source.shards())
        sums = collect(digest(shard.tensor, *(*shard.offset, 0)[:2]) for shard in shards)
        return [
            (shard.name, tuple(shard.offset), tuple(shard.tensor.shape), value)
            for shard, value in zip(shards, sums, strict=True)
        ]

    def leave(self) -> None:
        self.sync.leave()


def make_served(args: argparse.Namespace, rank: int) -> Any:
    """An engine rank's module: fused projections, cut over tensor-parallel ranks, as engines keep them."""
    import torch

    torch.cuda.set_device(rank)
    hf, world = hugging_face(args), args.world
    hidden, heads, groups = hf["hidden_size"], hf["num_attention_heads"], hf["num_key_value_heads"]
    module = torch.nn.Module()
    #: checkpoint tensor: (parameter, rows or an expert's rows before it, axis of the cut or None, its size in the checkpoint)
    module.takes = {}

    def parameter(name: str, *shape: int) -> None:
        value = torch.zeros(shape, dtype=torch.bfloat16, device=f"cuda:{rank}")
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(value, requires_grad=False))

    def take(tensor: str, name: str, at: Any, axis: int | None, size: int) -> None:
        module.takes[tensor] = (name.replace(".", "_"), at, axis, size)

    for name in ("model.embed_tokens", "lm_head"):
        rows = -(-args.vocab // world)
        parameter(name, rows, hidden)
        take(f"{name}.weight", name, 0, 0, args.vocab)
    parameter("model.norm", hidden)
    take("model.norm.weight", "model.norm", 0, None, hidden)
    for layer in range(args.layers):
        prefix = f"model.layers.{layer}."
        for name, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", 128),
            ("self_attn.k_norm", 128),
        ):
            parameter(prefix + name, size)
            take(f"{prefix}{name}.weight", prefix + name, 0, None, size)
        parameter(prefix + "qkv", (heads + 2 * groups) * 128 // world, hidden)
        at = 0
        for name, count in (("q", heads), ("k", groups), ("v", groups)):
            take(f"{prefix}self_attn.{name}_proj.weight", prefix + "qkv", at, 0, count * 128)
            at += count * 128 // world
        parameter(prefix + "o", hidden, heads * 128 // world)
        take(f"{prefix}self_attn.o_proj.weight", prefix + "o", 0, 1, heads * 128)
        experts = range(args.experts) if args.experts else [None]
        width = hidden // 2 if args.experts else hidden * 3
        lead = (args.experts,) if args.experts else ()
        parameter(prefix + "w13", *lead, 2 * width // world, hidden)
        parameter(prefix + "w2", *lead, hidden, width // world)
        for expert in experts:
            inner = f"{prefix}mlp." if expert is None else f"{prefix}mlp.experts.{expert}."
            pick = () if expert is None else (expert,)
            take(f"{inner}gate_proj.weight", prefix + "w13", (*pick, 0), 0, width)
            take(f"{inner}up_proj.weight", prefix + "w13", (*pick, width // world), 0, width)
            take(f"{inner}down_proj.weight", prefix + "w2", (*pick, 0), 1, width)
        if args.experts:
            parameter(prefix + "router", args.experts, hidden)
            take(f"{prefix}mlp.gate.weight", prefix + "router", 0, None, args.experts)
    return module


def engine_rank(args: argparse.Namespace, rank: int) -> tuple[Any, ...]:
    """The arguments of a `ModuleWorker`."""

    def load(module: Any, weights: Any) -> None:
        for name, value in weights:
            view, axis, first, count = part(module, name, rank, args.world)
            view.data.copy_(value if axis is None else value.narrow(axis, first, count))

    return partial(make_served, args, rank), rank, args.world, load


def part(module: Any, tensor: str, rank: int, world: int) -> tuple[Any, int | None, int, int]:
    """Where a checkpoint tensor lands here: view, axis of its cut, first index and number of indices along that axis."""
    name, at, axis, size = module.takes[tensor]
    value = getattr(module, name)
    *pick, at = at if isinstance(at, tuple) else (at,)
    for index in pick:
        value = value[index]
    if axis is None:
        return value, None, 0, size
    each = -(-size // world)
    count = min(each, size - rank * each)
    return (value.narrow(0, at, count) if axis == 0 else value), axis, rank * each, count


def served_digests(module: Any, rank: int, world: int) -> dict[str, int]:
    from rdt_core.bench.digests import collect, digest

    names, sums = [], []
    for tensor in module.takes:
        view, axis, first, _ = part(module, tensor, rank, world)
        if axis is not None or rank == 0:
            names.append(tensor)
            sums.append(digest(view, first if axis == 0 else 0, first if axis == 1 else 0))
    return dict(zip(names, collect(sums), strict=True))


def main(args: argparse.Namespace) -> dict[str, Any]:
    import ray

    from rdt_core.replica import ModuleWorker

    ray.init(address="local", num_cpus=16, num_gpus=0, include_dashboard=False, log_to_driver=True)
    results: dict[str, Any] = {"world": args.world, "tp": args.tp, "experts": args.experts, "cells": []}
    with tempfile.TemporaryDirectory() as folder:
        actor = ray.remote(Trainer).options(num_cpus=0, max_concurrency=1)
        trainers = [actor.remote(args, rank, f"{folder}/rendezvous") for rank in range(args.world)]
        results["loss"] = [ray.get([trainer.step.remote(0) for trainer in trainers], timeout=200)[0]]
        version = 0
        for cell in args.cells.split(","):
            mode, kind = cell.split(":")
            ray.get([trainer.join.remote(cell, mode, kind) for trainer in trainers], timeout=200)

            workers = [
                ray.remote(ModuleWorker).options(num_cpus=0).remote(*engine_rank(args, rank))
                for rank in range(args.world)
            ]
            ray.get(trainers[0].attach.remote(workers), timeout=200)
            syncs = []
            for _ in range(args.steps):
                version += 1
                results["loss"].append(ray.get([trainer.step.remote(version) for trainer in trainers], timeout=200)[0])
                # the first syncs with collectives beside them, the last without: their times can be compared
                busy = COLLECTIVES if len(syncs) < args.steps // 2 else 0
                found = ray.get([trainer.publish.remote(version, busy) for trainer in trainers], timeout=200)[0]
                found["exact"], found["tensors"], found["replicas"] = compare(trainers, workers, args.world)
                syncs.append(found)
            results["cells"].append({"mode": mode, "kind": kind, "syncs": syncs})
            ray.get([trainer.leave.remote() for trainer in trainers], timeout=60)
            for worker in workers:
                ray.kill(worker)
    ray.shutdown()
    return results


def compare(trainers: list[Any], workers: list[Any], world: int) -> tuple[bool, int, int]:
    """Whether all checkpoint tensors are equal on both sides; how many; and how many boxes several trainers hold, equally."""
    import ray

    boxes: dict[tuple, int] = {}
    replicas = 0
    for rank in ray.get([trainer.digests.remote() for trainer in trainers], timeout=100):
        for name, offset, shape, value in rank:
            earlier = boxes.setdefault((name, offset, shape), value)
            replicas += earlier is not value
            if earlier != value:
                raise AssertionError(f"replicas of {name} {offset}+{shape} differ")
    want: dict[str, int] = {}
    for (name, _, _), value in boxes.items():
        want[name] = (want.get(name, 0) + value) & (1 << 64) - 1
    have: dict[str, int] = {}
    for rank, one in enumerate(ray.get([
        worker.call.remote(lambda module, rank=rank: served_digests(module, rank, world)) for rank, worker in enumerate(workers)
    ], timeout=100)):  # fmt: skip
        del rank
        for name, value in one.items():
            have[name] = (have.get(name, 0) + value) & (1 << 64) - 1
    return want == have, len(want), replicas


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel trainer ranks; the others are data parallel")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cells", default="live:mapped,live:prepared,live:ray,snapshot:prepared")
    parser.add_argument("--optimizer", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    import torch

    args.world = torch.cuda.device_count()
    return args


if __name__ == "__main__":
    os.environ.setdefault("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
    found = main(parse())
    text = json.dumps(found)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], f"megatron-tp{found['tp']}-e{found['experts']}.json").write_text(text)
    print(text, flush=True)
    sys.exit(0 if all(sync["exact"] for cell in found["cells"] for sync in cell["syncs"]) else 1)
