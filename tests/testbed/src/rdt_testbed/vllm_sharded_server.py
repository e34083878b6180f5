"""The serving actor of vLLM's trainer side of `sharded_rdt`, on a CPU. A module of its own: it imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.weight_transfer import sharded_rdt_trainer as trainer

from . import vllm_sharded


class CpuProducerServer(trainer._RDTProducerServer):
    """Serves from host memory. Its class is found by name in the actor's process, and this module with it."""

    def __init__(self, **options: Any) -> None:
        torch.accelerator.current_device_index = lambda: 0
        trainer.rebuild_cuda_tensor = vllm_sharded.rebuild
        super().__init__(**options)
        self._serve_device = torch.device("cpu")

    def warmup_nixl(self) -> None:
        self._nixl_warmup_buf = torch.zeros(1 << 20, dtype=torch.uint8)
        with self._reg_lock:
            trainer.register_nixl_memory(self._nixl_warmup_buf)
