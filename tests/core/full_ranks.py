"""Run by test_sources_full.py: gloo ranks that put full tensors together, forked in a process that has no other threads."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rdt_core.errors import SourceError
from rdt_core.sources import FullTensors
from rdt_testbed.halves import SHAPES, Halves, value

RANKS = 2


class Overlapping(Halves):
    """Every rank holds all of the norm as well, and the first one a part of the other's rows."""

    def __init__(self, rank: int, ranks: int, wire: str) -> None:
        super().__init__(rank, ranks, wire)
        self.rank = rank
        self.parts = [
            (name, *((0, torch.zeros(16)) if name == "norm" else (low, part))) for name, low, part in self.parts
        ]
        if rank == 0:
            self.parts = [(n, low, torch.zeros(25, 16) if n == "embed" else part) for n, low, part in self.parts]


def a_rank_that_cannot_go_on(rank: int) -> dict[str, bool]:
    """Every rank is told before the first tensor, and the pass after it is whole."""
    source = Halves(rank, RANKS, "float32")
    full = FullTensors(source, dist.group.WORLD)
    found = {}
    whole = source.shards
    for kind, broken in (("lost", lambda: list(whole())[1:]), ("failed", lambda: [][0])):
        if rank == 1:
            source.shards = broken
        try:
            next(iter(full))
            found[kind] = False
        except (SourceError, IndexError) as error:
            said = "no longer holds" if kind == "lost" else "list index out of range"
            alone = "rank 1 of the process group" in str(error)
            found[kind] = said in str(error) and alone == (rank == 0)
        source.shards = whole
        found[f"after {kind}"] = len(dict(full)) == len(SHAPES)
    return found


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    for kind in (Halves, Overlapping):
        for wire in ("float32", "bfloat16"):
            source = kind(rank, RANKS, wire)
            full = FullTensors(source, dist.group.WORLD)
            for version in (1, 2):
                source.fill(version)
                wanted = {name: value(name, version).to(getattr(torch, wire)) for name in SHAPES}
                gathered = dict(full)
                found[f"{kind.__name__} {wire} {version}"] = list(gathered) == list(wanted) and all(
                    torch.equal(gathered[name], wanted[name]) for name in wanted
                )
    found |= a_rank_that_cannot_go_on(rank)
    torch.save(found, Path(folder) / f"found.{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(rank_main, (sys.argv[1],), nprocs=RANKS, start_method="fork")
