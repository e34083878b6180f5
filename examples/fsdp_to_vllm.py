"""A small RL loop with Ray actors: FSDP2 ranks learn, a stock vLLM samples, rdt moves the weights from one to the other.

Each step samples from the engine, gives every sample a reward, takes one policy-gradient step and publishes the new
weights. It prints one JSON object a version: what the engine serves, its mean reward, the loss, and how far the engine's
log-probabilities are from the trainer's own. Without --model it trains a tiny random model, on a CPU too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import Any

import ray
import torch
import torch.distributed as dist
from rollouts import Sample, make_parser, make_prompts, meeting_point, padded, policy_loss, rated, say, tiny_model

from rdt_core import EngineShape, ModuleSource, WeightSync, make_actor, place, server_options, trainer_options
from rdt_vllm import VllmRayEngine, launch

GPUS = torch.cuda.is_available()
DEVICE = "cuda" if GPUS else "cpu"


class Trainer:
    """One FSDP2 rank. Nothing in it knows of vLLM but the client that `attach` is given."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.world_size = world_size
        self.place = {"rank": rank, "world_size": world_size}

    def address(self) -> str:
        return meeting_point()

    def load(self, address: str, folder: str, args: argparse.Namespace) -> None:
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        dist.init_process_group("nccl" if GPUS else "gloo", init_method=address, **self.place)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)

        # the wire's dtype is the engine's; parameters of another one are cast on their way
        source = ModuleSource(self.model, dtype=getattr(torch, args.dtype))
        self.sync = WeightSync.join("policy", source=source, timeout_s=args.timeout, **self.place)

    def attach(self, client: VllmRayEngine) -> None:
        self.sync.attach(client)

    def learn(self, samples: list[Sample], tokens: int, step: bool) -> dict[str, float]:
        """Scores this rank's samples and, with `step`, takes an optimiser step over the samples of all ranks."""
        ids = padded(samples).to(DEVICE)
        with contextlib.nullcontext() if step else torch.no_grad():
            logprobs = self.model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
            loss, error = policy_loss(logprobs.gather(2, ids[:, 1:, None])[..., 0], samples)
            loss = loss * self.world_size / tokens  # FSDP averages gradients over ranks
        norm = 0.0
        if step:
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).full_tensor().item()
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.model.reshard()  # after a forward pass alone the root still holds whole parameters
        return {"loss": loss.item(), "grad_norm": norm, "error": error}

    def publish(self, version: int) -> Any:
        return self.sync.publish(version)

    def leave(self) -> None:
        self.sync.leave()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--trainers", type=int, default=2, help="FSDP2 ranks, one GPU each (default: 2)")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size of vLLM (default: 1)")
    args = parser.parse_args()

    say(f"starting Ray, {args.trainers} trainers and vLLM, which takes minutes on a CPU")
    ray.init(address=args.address, namespace="rdt", log_to_driver=False)
    folder = args.model or tiny_model()
    if GPUS:  # trainers first, then the engine, one rank a GPU
        placement = place(trainers=args.trainers, engines=[EngineShape(tp=args.tp)])
        actors = [make_actor(Trainer, trainer_options(placement, rank)) for rank in range(args.trainers)]
        beside = server_options(placement, 0, processes=True)
    else:
        actors = [make_actor(Trainer, {"num_cpus": 0, "enable_tensor_transport": True})] * args.trainers
        beside = {"num_cpus": 0}
    trainers = [actor.remote(rank, args.trainers) for rank, actor in enumerate(actors)]
    server = launch(
        str(folder), options=beside, tensor_parallel_size=args.tp, dtype=args.dtype, enforce_eager=not GPUS,
        skip_tokenizer_init=True, generation_config="vllm", max_model_len=64 + args.max_tokens,
    )  # fmt: skip

    def every(method: str, *arguments: Any) -> list[Any]:
        return ray.get([getattr(trainer, method).remote(*arguments) for trainer in trainers], timeout=args.timeout)

    try:
        every("load", ray.get(trainers[0].address.remote(), timeout=args.timeout), str(folder), args)
        ray.get(server.ready.remote(), timeout=args.timeout)
        client = VllmRayEngine(server, name="vllm")
        ray.get(trainers[0].attach.remote(client), timeout=args.timeout)

        say("trainers and engine are connected: the first version is the checkpoint")
        prompts = make_prompts(args.prompts)
        sampling = {"n": args.samples, "max_tokens": args.max_tokens, "temperature": 1.0, "ignore_eos": True}
        report = None
        for version in range(args.steps + 1):  # version 0 is the checkpoint
            calls = [server.generate.remote(prompt, sampling) for prompt in prompts]
            samples = rated(prompts, ray.get(calls, timeout=args.timeout))
            tokens, last = sum(len(one.tokens) for one in samples), version == args.steps
            parts = [samples[rank :: args.trainers] for rank in range(args.trainers)]
            pairs = zip(trainers, parts, strict=True)
            scores = ray.get([one.learn.remote(part, tokens, not last) for one, part in pairs], timeout=args.timeout)
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
            ray.get(server.shutdown.remote(), timeout=60)  # killing the actor alone would leave its workers for a while
        ray.shutdown()


if __name__ == "__main__":
    main()
