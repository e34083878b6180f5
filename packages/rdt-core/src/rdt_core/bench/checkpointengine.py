"""Peer `checkpoint-engine`: the package of that name between the bench's own trainers and engine ranks.

Each source rank is one of its parameter servers, on the GPU of the engine rank that it serves, as the package wants them:
full tensors are copied to pinned host memory, and go from there through a broadcast and a CUDA IPC buffer into the engine
rank's own `load_weights`. It moves nothing without CUDA, and from one GPU to another only by its optional P2P store, which
is not measured here; `reason` says so.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .options import BenchOptions

_NAME = "rdt-bench"


def reason(options: BenchOptions) -> str:
    """Why it cannot run with these options; empty if it can. Imports nothing of it."""
    if options.device != "cuda":
        return "the package moves weights through CUDA IPC and refuses other devices; --device cuda runs it"
    if importlib.util.find_spec("checkpoint_engine") is None:
        return "the package is not installed; pip install checkpoint-engine"
    if options.gpus == "separate" or options.ranks != options.readers:
        return "its servers share the GPUs of the engine ranks, one each: --gpus shared with one rank a side, or --gpus together"
    return ""


class Parameters:
    """One parameter server of the package, in a source rank that is in a process group of all source ranks.

    Args:
        rank, world_size: of this source rank.
        port: of the package's store, on this machine.
    """

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        from checkpoint_engine.ps import ParameterServer

        # its constructor takes rank 0 for none given, and asks the environment
        os.environ["RANK"] = str(rank)
        self._server = ParameterServer(
            rank=rank, world_size=world_size, auto_pg=False, gpu_count=1, master_addr="127.0.0.1", master_port=port
        )

    def update(self, tensors: dict[str, torch.Tensor], reader: Any, timeout_s: float) -> None:
        """One sync; a collective of all servers.

        Args:
            tensors: this rank's share of the checkpoint, full.
            reader: handle of the engine rank on this GPU.
            timeout_s: of its side.
        """
        import ray

        failed: list[BaseException] = []

        def ask(handles: list[tuple[str, str]]) -> None:
            try:
                ray.get(reader.take_checkpoint_engine.remote(dict(handles)), timeout=timeout_s)
            except BaseException as error:
                failed.append(error)

        self._server.register_checkpoint(_NAME, named_tensors=tensors, use_shared_memory_pool=True)
        try:
            self._server.gather_metas(_NAME)
            self._server.update(_NAME, ask)
        finally:
            self._server.unregister_checkpoint(_NAME)
        if failed:
            raise failed[0]


def receive(
    handles: dict[str, str], device: torch.device, load: Callable[[Iterable[tuple[str, torch.Tensor]]], None]
) -> None:
    """The engine rank's side: loads what the server on this GPU hands over.

    Args:
        handles: socket of each GPU's server.
        device: of the engine rank.
        load: takes full checkpoint tensors.
    """
    import zmq
    from checkpoint_engine.worker import update_weights_from_ipc

    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    update_weights_from_ipc(zmq.Context.instance(), handles[uuid], device.index or 0, run=load)
