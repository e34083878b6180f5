"""Two FSDP2 ranks as actors, and checks of what an engine generates, for the programs that drive a whole server."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from rdt_testbed import models

WORLD = 2
PROMPTS = [[3, 4, 5, 6], [10, 11, 200, 57, 9]]
TOKENS = 6
GREEDY = {"temperature": 0, "ignore_eos": True}
#: settings of every engine of these programs
ENGINE = {
    "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "skip_tokenizer_init": True,
    "max_total_tokens": 2048, "max_running_requests": 8, "mem_fraction_static": 0.8, "random_seed": 0,
    "disable_cuda_graph": True, "log_level": "warning",
}  # fmt: skip


class Trainer:
    """One FSDP2 rank whose weights are those of `models.build(kind, seed)`."""

    def __init__(self, rank: int, rendezvous: str, kind: models.Kind) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
        self.rank, self.kind = rank, kind
        self.model = models.build(kind, seed=0)
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    @torch.no_grad()
    def set(self, seed: int) -> None:
        from torch.distributed.tensor import distribute_tensor

        full = dict(models.build(self.kind, seed=seed).named_parameters())
        for name, parameter in self.model.named_parameters():
            value = distribute_tensor(full[name].data, parameter.device_mesh, parameter.placements)
            parameter.to_local().copy_(value.to_local())

    def join(self, group: str, options: dict[str, Any]) -> None:
        from rdt_core import ModuleSource, WeightSync

        self.sync = WeightSync.join(
            group, source=ModuleSource(self.model), rank=self.rank, world_size=WORLD, **{"timeout_s": 60.0, **options}
        )

    def attach(self, client: Any) -> None:
        self.sync.attach(client)

    def detach(self, name: str) -> None:
        self.sync.detach(name)

    def publish(self, version: int) -> Any:
        return self.sync.publish(version)

    def publish_slowly(self, version: int, rounds: int, mark: str) -> Any:
        """Makes a file when `rounds` rounds are readable, and goes on once it is gone."""
        written = self.sync._publisher.rounds_written

        def some() -> Any:
            for number in written():
                if number == rounds:
                    Path(mark).touch()
                    until = time.monotonic() + 30
                    while Path(mark).exists() and time.monotonic() < until:
                        time.sleep(0.05)
                yield number

        self.sync._publisher.rounds_written = some
        try:
            return self.sync.publish(version)
        finally:
            self.sync._publisher.rounds_written = written

    def leave(self) -> None:
        self.sync.leave()

    def imported(self) -> bool:
        return "sglang" in sys.modules


class Trainers:
    """The ranks of one trainer, called together."""

    def __init__(self, folder: Path, kind: models.Kind) -> None:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors have no path to it
        self.kind = kind
        actor = ray.remote(Trainer).options(num_cpus=0, enable_tensor_transport=True)
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
