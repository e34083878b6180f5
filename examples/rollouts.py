"""What the examples have in common and what is not about weights: options, a tiny model, rewards, the loss.

Everything works on token ids, so that any checkpoint will do, also one without a tokenizer. The reward is a stand-in.
"""

from __future__ import annotations

import argparse
import atexit
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 256
BEGAN = time.monotonic()


def say(what: str) -> None:
    """Tells on standard error what a program does that takes a while."""
    print(f"[{time.monotonic() - BEGAN:4.0f} s] {what}", file=sys.stderr, flush=True)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every loop."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=lambda text: Path(text).resolve(), help="folder of a checkpoint; default: a tiny random model"
    )
    parser.add_argument("--address", default="local", help="of a Ray cluster; default: one of this run's own")
    parser.add_argument("--dtype", default="float32", help="of the engine and of the wire (default: float32)")
    parser.add_argument("--steps", type=int, default=10, help="policy-gradient steps (default: 10)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step (default: 8)")
    parser.add_argument("--samples", type=int, default=16, help="samples of each prompt (default: 16)")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens of each sample (default: 16)")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate (default: 0.01, for the tiny model)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for every wait (default: 600)")
    return parser


def tiny_model() -> Path:
    """A checkpoint of a random model with the structure of a real one, in a folder that goes with this process."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="rdt-example-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def meeting_point() -> str:
    """Where ranks meet, for `init_process_group`: this machine and a port that is free now."""
    import ray

    with socket.create_server(("", 0)) as server:
        return f"tcp://{ray.util.get_node_ip_address()}:{server.getsockname()[1]}"


def make_prompts(count: int, length: int = 8) -> list[list[int]]:
    numbers = random.Random(0)
    return [[numbers.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


def reward(tokens: Sequence[int]) -> float:
    """The share of even token ids: a policy learns it soon. Put your own here."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


@dataclass(frozen=True)
class Sample:
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]  # the engine's, one for each token
    reward: float
    advantage: float


def rated(prompts: Sequence[list[int]], groups: Sequence[Sequence[Any]]) -> list[Sample]:
    """What an engine generated for each prompt, with rewards; advantages are relative to the prompt's other samples."""
    samples = []
    for prompt, group in zip(prompts, groups, strict=True):
        rewards = [reward(one.token_ids) for one in group]
        mean = sum(rewards) / len(rewards)
        for one, value in zip(group, rewards, strict=True):
            samples.append(Sample(prompt, list(one.token_ids), list(one.logprobs), value, value - mean))
    return samples


def padded(samples: Sequence[Sample]) -> torch.Tensor:
    """Token ids [samples, longest], padded behind, where no token of a causal model looks."""
    ids = torch.zeros(len(samples), max(len(one.prompt) + len(one.tokens) for one in samples), dtype=torch.int64)
    for row, one in enumerate(samples):
        ids[row, : len(one.prompt) + len(one.tokens)] = torch.tensor(one.prompt + one.tokens)
    return ids


def policy_loss(logprobs: torch.Tensor, samples: Sequence[Sample]) -> tuple[torch.Tensor, float]:
    """The policy-gradient loss, summed over tokens, and the largest difference from the engine's log-probabilities.

    Args:
        logprobs: [samples, longest - 1]; at i the log-probability of token i + 1.
        samples: in the same order.
    """
    loss, error = logprobs.new_zeros(()), 0.0
    for row, one in enumerate(samples):
        start = len(one.prompt) - 1
        own = logprobs[row, start : start + len(one.tokens)]
        loss = loss - one.advantage * own.sum()
        difference = (own.detach().cpu() - torch.tensor(one.logprobs)).abs().max().item()
        error = max(error, difference if difference == difference else float("inf"))  # a NaN is no small difference
    return loss, error
