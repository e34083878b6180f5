"""Two FSDP2 ranks as actors, and checks of what an engine generates, for the programs that drive a whole server."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from rdt_testbed import models
from rdt_testbed.trainers import WORLD, Trainer

PROMPTS = [[3, 4, 5, 6], [10, 11, 200, 57, 9]]
TOKENS = 6
GREEDY = {"temperature": 0, "ignore_eos": True}
#: settings of every engine of these programs
ENGINE = {
    "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "skip_tokenizer_init": True,
    "max_total_tokens": 2048, "max_running_requests": 8, "mem_fraction_static": 0.8, "random_seed": 0,
    "disable_cuda_graph": True, "log_level": "warning",
}  # fmt: skip


class Trainers:
    """The ranks of one trainer, called together.

    Args:
        folder: where they meet.
        kind: of model.
        python: runs them. None of a process that has imported SGLang: whether they import it is one of the questions.
    """

    def __init__(self, folder: Path, kind: models.Kind, python: str = sys.executable) -> None:
        import ray

        self.kind = kind
        actor = ray.remote(Trainer).options(num_cpus=0, runtime_env={"py_executable": python})
        self.ranks = [actor.remote(rank, str(folder / "rendezvous"), kind) for rank in range(WORLD)]

    def all(self, method: str, *arguments: Any, timeout: float = 180) -> list[Any]:
        import ray

        return ray.get([getattr(rank, method).remote(*arguments) for rank in self.ranks], timeout=timeout)

    def first(self, method: str, *arguments: Any) -> Any:
        import ray

        return ray.get(getattr(self.ranks[0], method).remote(*arguments), timeout=180)

    def publish(self, version: int, seed: int) -> Any:
        self.all("set", seed)
        return self.all("publish", version)[0]

    def imported(self, module: str) -> list[bool]:
        return self.all("imported", module)

    def model(self, seed: int) -> Any:
        return models.build(self.kind, seed=seed).float().eval()


def logprob_error(model: Any, prompt: list[int], tokens: Any, logprobs: Any, start: int = 0) -> float:
    """Largest difference from the trainer's model of the log-probabilities of `tokens[start:]`."""
    with torch.no_grad():
        found = model(torch.tensor([[*prompt, *tokens]])).logits[0].float().log_softmax(-1)
    places = range(start, len(tokens))
    return max(abs(float(found[len(prompt) + place - 1, tokens[place]]) - logprobs[place]) for place in places)


def raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        cause = getattr(error, "cause", None) or error
        return f"{type(cause).__name__}: {cause}"
    return "nothing"


def soon(seconds: float = 60) -> float:
    return time.monotonic() + seconds
