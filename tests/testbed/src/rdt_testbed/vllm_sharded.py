"""vLLM's backend `sharded_rdt` on a machine without a GPU.

What the backend does with CUDA IPC, streams and events is done with shared files and nothing: the gather, the ring, the packed
serve buffers, NIXL and the layerwise load are vLLM's own, unchanged. Off unless `RDT_TESTBED_SHARDED_RDT` names a prefix for
the files in `/dev/shm`, which whoever set it removes. Never part of the product.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any

import torch

VARIABLE = "RDT_TESTBED_SHARDED_RDT"
SHARED = Path("/dev/shm")


class _NoEvent:
    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _NoStream:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass


class _NoCuda:
    """`torch.cuda` as far as the worker's side of the backend uses it."""

    Event = _NoEvent
    Stream = _NoStream

    @staticmethod
    def set_device(*_: Any) -> None:
        pass

    @staticmethod
    def device(*_: Any) -> Any:
        return contextlib.nullcontext()

    @staticmethod
    def stream(*_: Any) -> Any:
        return contextlib.nullcontext()


class _Torch:
    """The module `torch` with some names replaced, for one module of vLLM."""

    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def prepare_worker() -> None:
    """Lets the worker's side run on a CPU; called in every process of vLLM that loads plug-ins."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    def load() -> Any:
        from vllm.distributed.weight_transfer import sharded_rdt_engine

        sharded_rdt_engine.torch = _Torch(cuda=_NoCuda())
        return sharded_rdt_engine.ShardedRDTWeightTransferEngine

    # vLLM imports an engine when it makes one: earlier would be before its platform is known
    WeightTransferEngineFactory._registry["sharded_rdt"] = load


def prepare_trainer() -> None:
    """Lets the trainer's side run on a CPU in this process, and in the actor that it starts."""
    from vllm.distributed.weight_transfer import sharded_rdt_trainer

    from .vllm_sharded_server import CpuProducerServer

    sharded_rdt_trainer.torch = _Torch(empty=_empty)
    sharded_rdt_trainer.reduce_tensor = _export
    sharded_rdt_trainer._RDTProducerServer = CpuProducerServer
    torch.Tensor.cuda = lambda self, *_, **__: self


#: shared files by the address of the storage that maps them
_FILES: dict[int, str] = {}


def _shared(nbytes: int) -> torch.UntypedStorage:
    path = str(SHARED / f"{os.environ[VARIABLE]}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    storage = torch.UntypedStorage.from_file(path, True, nbytes)
    _FILES[storage.data_ptr()] = path
    return storage


def _empty(*arguments: Any, **options: Any) -> torch.Tensor:
    """`torch.empty`, in a shared file where it is a slot of the export ring."""
    made = torch.empty(*arguments, **options)
    if made.dtype != torch.uint8 or not made.numel():
        return made
    return made.set_(_shared(made.numel()), 0, (made.numel(),))


def _export(base: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
    """`reduce_tensor` for a shared file; any other storage is copied into one first, as its owner may free it."""
    storage = base.untyped_storage()
    path = _FILES.get(storage.data_ptr())
    if path is None:
        copied = _shared(storage.nbytes())
        copied.copy_(storage)
        path = _FILES.pop(copied.data_ptr())
    # the seventh is the device's index, which the other side replaces
    return None, (path, storage.nbytes(), 0, 0, 0, 0, 0)


def rebuild(path: str, nbytes: int, *_: Any) -> torch.Tensor:
    """The other side of `_export`."""
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage.from_file(path, True, nbytes), 0, (nbytes,))
