"""One rank of the trainer's test: scores, learns and steps on its part of a batch, and saves what came of it.

Arguments: rank, number of ranks, rendezvous, checkpoint, file with the samples (torch), file to save.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from rdt_core.demo.trainer import FsdpTrainer

LEARNING_RATE = 1e-3


def main() -> None:
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    trainer = FsdpTrainer(rank, ranks, sys.argv[3], Path(sys.argv[4]), LEARNING_RATE, seed=0)
    samples = torch.load(sys.argv[5], weights_only=False)
    mine = samples[rank::ranks]
    total = sum(len(sample.response) for sample in samples)
    before = trainer.score(mine)
    learnt = trainer.learn(mine, total)
    norm = trainer.step()
    # every module is sharded again, or these would be plain tensors
    weights = {name: parameter.full_tensor() for name, parameter in trainer._model.named_parameters()}
    torch.save({"before": before, "learnt": learnt, "norm": norm, "weights": weights}, sys.argv[6])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # torch now and then aborts in its own destructors, when all is done ("terminate called without ...")


if __name__ == "__main__":
    main()
