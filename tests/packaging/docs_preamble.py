"""What the Python blocks of the documentation take for granted: the reader's own model, ranks and loop. Never run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
import torch.distributed as dist

import rdt_sglang
import rdt_vllm
from rdt_core import ModuleSource, SyncAdapter, SyncReport, WeightSync
from rdt_core.landing import Landing
from rdt_megatron import MegatronSource
from rdt_sglang import SglangHttpEngine, SglangRayEngine
from rdt_vllm import VllmHttpEngine, VllmRayEngine

__all__ = [
    "MODEL", "Any", "Callable", "ConnStatusManager", "Iterable", "Iterator", "Mapping", "MegatronSource",
    "ModuleSource", "RdtWeightUpdater", "RowSource", "Sequence", "SglangHttpEngine", "SglangRayEngine",
    "SyncAdapter", "SyncReport", "Trainer", "VllmHttpEngine", "VllmRayEngine", "WeightSync", "args",
    "can_generate", "client", "config", "dist", "engines", "gather", "group", "hf_config", "init_info",
    "make_landing", "model", "rank", "ray", "rdt_sglang", "rdt_vllm", "run_id", "self", "server", "shapes",
    "step", "steps", "sync", "token_ids", "torch", "train_step", "version", "workers", "world_size",
]  # fmt: skip

MODEL: str
model: torch.nn.Module
config: Any
hf_config: Any
rank: int
world_size: int
step: int
steps: int
version: int
sync: WeightSync
train_step: Callable[[], None]
token_ids: list[int]
# of a framework that rdt is put into
args: Any
self: Any
engines: list[Any]
run_id: str
ConnStatusManager: Any
RdtWeightUpdater: Any
# of a Ray program
Trainer: type[Any]
group: Any
# of the pages about sources and adapters
gather: Callable[[torch.Tensor], torch.Tensor]
shapes: Mapping[str, tuple[int, ...]]
server: Any
workers: list[Any]
client: Any
can_generate: Callable[[Any], bool]
make_landing: Callable[[int, int], Landing]
RowSource: Any
# of vLLM
init_info: Any
