"""Ranks that do what `test_ranks.py` says they must not be able to hang a test with."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from rdt_testbed.megatron import Layout


def sizes(layout: Layout) -> dict[str, int]:
    from megatron.core import parallel_state

    return {
        "rank": torch.distributed.get_rank(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }


def filled(layout: Layout) -> dict[str, Any]:
    from rdt_testbed.megatron.build import build, fill

    _, chunks = build("qwen3-moe", layout)
    fill(chunks, seed=1)
    return {name: parameter.detach().clone() for chunk in chunks for name, parameter in chunk.named_parameters()}


def raises(layout: Layout) -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("the second rank fails")
    torch.distributed.barrier()


def dies(layout: Layout) -> None:
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def hangs(layout: Layout) -> None:
    time.sleep(300)
