"""The training side of the demo: FSDP2 ranks over gloo, each an actor, that learn by policy gradient and publish.

Parameters are float32 and sharded layer by layer. One batch gives one optimiser step: log-probabilities of the sampled
tokens, weighted by advantages, averaged over all tokens of all ranks. The same forward pass says how far the engine's
log-probabilities are from the trainer's. Nothing here gathers weights to publish them: `WeightSync` takes the shards
where they are.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SourceError
from ..wire import SyncReport

if TYPE_CHECKING:
    import torch

    from ..engines import EngineClient

MICRO_BATCH = 8
BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion to learn from; `logprobs` are the engine's, one for each token of `response`."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float


@dataclass(frozen=True, slots=True)
class Score:
    """How a rank's own log-probabilities compare with the engine's over its samples."""

    tokens: int
    max_abs_logprob_error: float


class FsdpTrainer:
    """One FSDP2 rank; a plain class, made an actor by `loop`.

    Args:
        rank: of this process.
        world_size: number of ranks.
        rendezvous: a path of the local file system that does not exist yet, the same on every rank.
        model_dir: checkpoint that transformers loads as a causal language model.
        learning_rate: of AdamW.
        seed: of this process's random numbers; the same on every rank.

    Raises:
        SourceError: the checkpoint's layers are not where a decoder's layers are expected.
    """

    def __init__(
        self, rank: int, world_size: int, rendezvous: str, model_dir: Path, learning_rate: float, seed: int
    ) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        self.rank = rank
        self.world_size = world_size
        torch.manual_seed(seed)
        random.seed(seed)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        model.train()
        layers = getattr(getattr(model, "model", None), "layers", None)
        if not isinstance(layers, torch.nn.ModuleList):
            raise SourceError(
                f"{type(model).__name__} has no `model.layers`; the demo shards decoder models layer by layer, "
                "give --model another architecture"
            )
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._model: Any = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=0.0)
        self._sync: Any = None

    def ready(self) -> int:
        """Returns the number of weights of the whole model, once the rank is up."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def join(self, group: str, mode: str, kinds: tuple[str, ...] | None, dtype: str, timeout_s: float) -> None:
        """Joins the sync group with this rank's shards. Errors as `WeightSync.join`."""
        import torch

        from ..connector import DEFAULT_KINDS
        from ..sources import ModuleSource
        from ..sync import WeightSync

        source = ModuleSource(self._model, dtype=getattr(torch, dtype))
        self._sync = WeightSync.join(
            group,
            source=source,
            rank=self.rank,
            world_size=self.world_size,
            mode=mode,
            kinds=DEFAULT_KINDS if kinds is None else kinds,
            timeout_s=timeout_s,
        )

    def attach(self, client: EngineClient) -> None:
        """Adds the engine's replica to the group; on rank 0 only. Errors as `WeightSync.attach`."""
        self._sync.attach(client)

    def publish(self, version: int) -> SyncReport:
        """Publishes the present weights as `version`. Errors as `WeightSync.publish`."""
        return self._sync.publish(version=version)

    def leave(self) -> None:
        """Leaves the sync group, if this rank is in one."""
        if self._sync is not None:
            sync, self._sync = self._sync, None
            sync.leave()

    def score(self, samples: Sequence[Sample]) -> Score:
        """Compares the engine's log-probabilities with this model's. Every rank calls it with equally many samples."""
        import torch

        with torch.no_grad():
            errors = [self._errors(batch, self._logprobs(batch)) for batch in self._batches(samples)]
        self._reshard()
        return Score(sum(len(sample.response) for sample in samples), max(errors))

    def learn(self, samples: Sequence[Sample], total_tokens: int) -> Score:
        """Adds up the gradients of one batch and compares log-probabilities as `score` does; weights stay as they are.

        Args:
            samples: this rank's part; every rank gives equally many.
            total_tokens: response tokens of all ranks together, which the loss is averaged over.
        """
        errors = []
        batches = self._batches(samples)
        for index, batch in enumerate(batches):
            # gradients travel once, with the last micro batch
            self._model.set_requires_gradient_sync(index == len(batches) - 1)
            logprobs = self._logprobs(batch)
            errors.append(self._errors(batch, [values.detach() for values in logprobs]))
            terms = [-sample.advantage * values.sum() for sample, values in zip(batch, logprobs, strict=True)]
            # FSDP averages gradients over ranks, the loss is a mean over all ranks' tokens
            loss = sum(terms[1:], terms[0]) * (self.world_size / total_tokens)
            loss.backward()
        self._reshard()
        return Score(sum(len(sample.response) for sample in samples), max(errors))

    def step(self) -> float:
        """Applies the gradients of `learn`, clipped; returns their norm."""
        import torch

        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _reshard(self) -> None:
        # the root keeps its parameters gathered after a forward pass, and gathered copies are not what is published
        for module in self._model.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    def _batches(self, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
        # equally many on every rank, whatever the lengths: each forward pass is a collective
        return [samples[start : start + MICRO_BATCH] for start in range(0, len(samples), MICRO_BATCH)]

    def _logprobs(self, batch: Sequence[Sample]) -> list[torch.Tensor]:
        """Returns, for each sample, the log-probability of each response token, float32 `[len(response)]`."""
        import torch

        width = max(len(sample.prompt) + len(sample.response) for sample in batch)
        # padded behind, so that under a causal mask no real token sees the padding and no mask is needed
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)
        for row, sample in enumerate(batch):
            sequence = torch.tensor(sample.prompt + sample.response)
            tokens[row, : len(sequence)] = sequence
        # the vocabulary is large beside the model: logits only from the first position that predicts a response
        first = min(len(sample.prompt) for sample in batch) - 1
        logits = self._model(input_ids=tokens, logits_to_keep=width - first, use_cache=False).logits
        result = []
        for row, sample in enumerate(batch):
            start = len(sample.prompt) - 1 - first
            rows = logits[row, start : start + len(sample.response)].float()
            chosen = torch.tensor(sample.response)[:, None]
            result.append(rows.gather(1, chosen)[:, 0] - rows.logsumexp(1))
        return result

    def _errors(self, batch: Sequence[Sample], logprobs: Sequence[torch.Tensor]) -> float:
        import torch

        worst = 0.0
        for sample, own in zip(batch, logprobs, strict=True):
            difference = (own - torch.tensor(sample.logprobs)).abs().max().item()
            # a NaN compares as no error at all with `max`
            worst = max(worst, difference if difference == difference else float("inf"))
        return worst
