"""A small RL loop with Ray actors: Megatron ranks learn, a stock SGLang samples, rdt moves the weights between them.

Each step samples from the engine, gives every sample a reward, takes one policy-gradient step and publishes the new
weights: each rank's shards as they are, nothing is gathered. It prints one JSON object a version: what the engine serves,
its mean reward, the loss, and how far its log-probabilities are from the trainer's own. Without --model it trains a tiny
random model. Checkpoints of Llama, Qwen2 and Qwen3 fit; other families need another TransformerConfig below.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import time
from typing import Any

import ray
import torch
import torch.distributed as dist
from rollouts import Sample, make_parser, make_prompts, meeting_point, padded, policy_loss, rated, say, tiny_model

from rdt_core import EngineShape, WeightSync, make_actor, place, server_options, trainer_options
from rdt_sglang import SglangRayEngine, launch

GPUS = torch.cuda.is_available()
DEVICE = "cuda" if GPUS else "cpu"
#: SGLang's way to run without a GPU
CPU = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True, "max_total_tokens": 4096}


def megatron_model(folder: str, tp: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """This rank's part of a checkpoint's model, with TransformerEngine where it is, and the checkpoint's weights."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = theirs.config
    normed = config.model_type.startswith("qwen3")  # queries and keys
    ours = TransformerConfig(
        num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads, num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        qk_layernorm=normed, add_qkv_bias=config.model_type == "qwen2", add_bias_linear=False, normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=tp, use_cpu_initialization=not GPUS,
        params_dtype=torch.float32,
    )  # fmt: skip
    if GPUS and importlib.util.find_spec("transformer_engine"):
        spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=normed)
    else:
        spec = specs.get_gpt_layer_local_spec(qk_layernorm=normed, normalization="RMSNorm")
    model = GPTModel(
        config=ours, transformer_layer_spec=spec, vocab_size=-(-config.vocab_size // (128 * tp)) * 128 * tp,
        max_sequence_length=config.max_position_embeddings, position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"], share_embeddings_and_output_weights=config.tie_word_embeddings,
    )  # fmt: skip
    return DistributedDataParallel(ours, DistributedDataParallelConfig(), model.to(DEVICE)), theirs.state_dict()


class Trainer:
    """One Megatron rank. Nothing in it knows of SGLang but the client that `attach` is given."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.place = {"rank": rank, "world_size": world_size}

    def address(self) -> str:
        return meeting_point()

    def load(self, address: str, folder: str, args: argparse.Namespace) -> None:
        if args.setup:
            module, _, function = args.setup.partition(":")
            getattr(importlib.import_module(module), function)()
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from rdt_megatron import MegatronSource

        dist.init_process_group("nccl" if GPUS else "gloo", init_method=address, **self.place)
        parallel_state.initialize_model_parallel(args.trainer_tp)
        if GPUS:
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        self.model, weights = megatron_model(folder, args.trainer_tp)
        # the wire's dtype is the engine's; parameters of another one are cast on their way
        source = MegatronSource(self.model, folder, dtype=getattr(torch, args.dtype))
        with torch.no_grad():  # the boxes that readers read say as well where a checkpoint's values go
            for shard in source.shards():
                box = [slice(low, low + size) for low, size in zip(shard.offset, shard.tensor.shape, strict=True)]
                shard.tensor.copy_(weights[shard.name][tuple(box)])
        options = OptimizerConfig(optimizer="adam", lr=args.lr, params_dtype=torch.float32, clip_grad=1.0)
        self.optimizer = get_megatron_optimizer(options, [self.model])
        self.sync = WeightSync.join("policy", source=source, timeout_s=args.timeout, **self.place)

    def attach(self, client: SglangRayEngine) -> None:
        self.sync.attach(client)

    def learn(self, samples: list[Sample], step: bool) -> dict[str, float]:
        """Scores this rank's part of the samples and, with `step`, takes an optimiser step over all of them."""
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads

        tokens = sum(len(sample.tokens) for sample in samples)
        dp, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        samples = samples[replica::dp]
        ids = padded(samples).to(DEVICE)
        width = ids.shape[1] - 1
        positions = torch.arange(width, device=DEVICE).expand(len(ids), -1).contiguous()
        mask = torch.ones(1, 1, width, width, dtype=torch.bool, device=DEVICE).triu(1)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        with contextlib.nullcontext() if step else torch.no_grad():
            # with labels Megatron computes their negative log-probabilities, over a vocabulary that ranks share
            losses = self.model(ids[:, :-1].contiguous(), positions, mask, labels=ids[:, 1:].contiguous())
            loss, error = policy_loss(-losses, samples)
            loss = loss * dp / tokens  # gradients are averaged over data parallel ranks
        norm = 0.0
        if step:
            loss.backward()
            finalize_model_grads([self.model])
            _, norm, _ = self.optimizer.step()
        return {"loss": loss.item(), "grad_norm": norm, "error": error}

    def publish(self, version: int) -> Any:
        return self.sync.publish(version)

    def leave(self) -> None:
        self.sync.leave()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--trainers", type=int, default=2, help="Megatron ranks, one GPU each (default: 2)")
    parser.add_argument("--trainer-tp", type=int, default=2, help="of them, tensor parallel ones (default: 2)")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size of SGLang (default: 1)")
    parser.add_argument(
        "--setup", metavar="MODULE:FUNCTION", help="called first in every trainer, e.g. to patch Megatron"
    )
    args = parser.parse_args()

    # SGLang's schedulers ask Ray for a GPU each; without real ones, logical ones do
    logical = {} if GPUS or args.address != "local" else {"num_gpus": args.tp}
    say(f"starting Ray, {args.trainers} trainers and SGLang, which takes minutes on a CPU")
    ray.init(address=args.address, namespace="rdt", log_to_driver=False, **logical)
    folder = args.model or tiny_model()
    if GPUS:  # trainers first, then the engine, one rank a GPU
        placement = place(trainers=args.trainers, engines=[EngineShape(tp=args.tp)])
        actors = [make_actor(Trainer, trainer_options(placement, rank)) for rank in range(args.trainers)]
        engine: dict[str, Any] = {
            "options": server_options(placement, 0), "placement_group": placement.group,
            "bundle_indices": placement.engines[0].bundles,
        }  # fmt: skip
    else:
        actors = [make_actor(Trainer, {"num_cpus": 0, "enable_tensor_transport": True})] * args.trainers
        engine = CPU
    trainers = [actor.remote(rank, args.trainers) for rank, actor in enumerate(actors)]
    server = launch(
        str(folder), tp_size=args.tp, dtype=args.dtype, context_length=64 + args.max_tokens, skip_tokenizer_init=True,
        sampling_defaults="openai", mem_fraction_static=0.8, random_seed=0, log_level="warning", **engine,
    )  # fmt: skip

    def every(method: str, *arguments: Any) -> list[Any]:
        return ray.get([getattr(trainer, method).remote(*arguments) for trainer in trainers], timeout=args.timeout)

    try:
        every("load", ray.get(trainers[0].address.remote(), timeout=args.timeout), str(folder), args)
        ray.get(server.ready.remote(), timeout=args.timeout)
        client = SglangRayEngine(server, name="sglang")
        ray.get(trainers[0].attach.remote(client), timeout=args.timeout)

        prompts = make_prompts(args.prompts)
        sampling = {"n": args.samples, "max_new_tokens": args.max_tokens, "temperature": 1.0, "ignore_eos": True}
        report = None
        for version in range(args.steps + 1):  # version 0 is the checkpoint
            calls = [server.generate.remote(prompt, sampling) for prompt in prompts]
            samples, last = rated(prompts, ray.get(calls, timeout=args.timeout)), version == args.steps
            scores = every("learn", samples, not last)
            line = {
                "version": version, "served": client.version(deadline=time.monotonic() + args.timeout),
                "reward": sum(one.reward for one in samples) / len(samples),
                "loss": sum(score["loss"] for score in scores) / len(scores),
                "grad_norm": scores[0]["grad_norm"], "logprob_error": max(score["error"] for score in scores),
            }  # fmt: skip
            if report is not None:
                line |= {"sync_s": report.seconds, "bytes": report.bytes, "mode": report.mode}
            print(json.dumps(line), flush=True)
            if not last:
                report = every("publish", version + 1)[0]
        every("leave")
    finally:
        with contextlib.suppress(Exception):
            ray.get(server.shutdown.remote(), timeout=60)  # killing the actor alone would leave processes for a while
        ray.shutdown()


if __name__ == "__main__":
    main()
