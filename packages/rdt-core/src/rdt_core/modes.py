"""Which publish mode a source rank can use, and why not the others.

`live` wants parameters in the wire dtype, in memory that can be exported; `snapshot` wants room for a copy; `bucket`
works always. `auto` takes the first that works. A mode that was asked for and cannot work is refused with the reason,
never replaced.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence

import psutil
import torch

from .errors import SourceError
from .memory import can_share, is_expandable
from .sources.base import IterableWeightSource, Shard, WeightSource

MODES = ("auto", "live", "snapshot", "bucket")
SHARED_MEMORY = "/dev/shm"
#: open files that a trainer has besides
_OTHER_FILES = 512
_ITERATED = "the source can only be iterated as full tensors"


def choose_mode(
    mode: str,
    source: WeightSource | IterableWeightSource,
    shards: Sequence[Shard],
    wire_dtype: Callable[[str], torch.dtype],
    device: torch.device,
    rank: int,
    mapped: bool,
) -> tuple[str, str]:
    """Returns the mode and why: the first of live, snapshot, bucket that works, or a refusal of the one asked for.

    Args:
        mode: one of `MODES`.
        source: what the rank holds.
        shards: its shards that have elements.
        wire_dtype: of a checkpoint tensor, by name.
        device: of the shards.
        rank: names the source rank in errors.
        mapped: whether readers may map its memory.

    Raises:
        SourceError: the mode is unknown, or cannot work with this source.
    """
    if mode not in MODES:
        raise SourceError(f"mode {mode!r} is unknown; known: {', '.join(MODES)}")
    sharded = isinstance(source, WeightSource)
    nbytes = sum(shard.tensor.numel() * wire_dtype(shard.name).itemsize for shard in shards)
    obstacles = {
        "live": _why_not_live(shards, wire_dtype, mapped) if sharded else _ITERATED,
        "snapshot": _why_not_snapshot(nbytes, device) if sharded else _ITERATED,
        "bucket": None,
    }
    if mode != "auto":
        if (obstacle := obstacles[mode]) is not None:
            raise SourceError(f"source rank {rank} cannot publish in mode {mode!r}: {obstacle}")
        return mode, "asked for"
    chosen = next(name for name, obstacle in obstacles.items() if obstacle is None)
    refused = "; ".join(f"not {other}: {why}" for other, why in obstacles.items() if why and other != chosen)
    return chosen, refused or "parameters have the wire dtype and can be read where they are"


def _why_not_live(shards: Sequence[Shard], wire_dtype: Callable[[str], torch.dtype], mapped: bool) -> str | None:
    if mapped:
        storages = {
            storage.data_ptr(): storage.nbytes()
            for shard in shards
            if not (storage := shard.tensor.untyped_storage()).is_shared() and shard.tensor.device.type == "cpu"
        }
        room = _shared_memory()
        if room is not None and sum(storages.values()) > room:
            return (
                f"sharing the parameters needs {sum(storages.values())} bytes of shared memory, and {SHARED_MEMORY} has {room} "
                "(docker: --shm-size)"
            )
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and len(storages) + _OTHER_FILES > limit:
            return (
                f"sharing {len(storages)} tensors of their own memory takes as many open files, and this process may have "
                f"{limit} (raise it with ulimit -n)"
            )
    for shard in shards:
        wanted = wire_dtype(shard.name)
        if shard.tensor.dtype != wanted:
            return f"{shard.name!r} is stored as {shard.tensor.dtype} and travels as {wanted}"
        if shard.tensor.device.type == "cuda" and is_expandable(shard.tensor):
            return (
                f"{shard.name!r} lies in an expandable segment, which moves at a thousandth of the speed; "
                "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            )
        if mapped and shard.tensor.device.type == "cpu" and not can_share(shard.tensor.untyped_storage()):
            return f"{shard.name!r} is mapped from a file that is closed, and cannot be given to others"
        if shard.tensor.is_conj() or shard.tensor.is_neg():
            return f"{shard.name!r} is a lazily conjugated or negated view"
    return None


def _shared_memory() -> int | None:
    """Bytes that are free where shared memory is made; None where that cannot be known."""
    if not os.path.isdir(SHARED_MEMORY):
        return None
    found = os.statvfs(SHARED_MEMORY)
    return found.f_bavail * found.f_frsize


def _why_not_snapshot(nbytes: int, device: torch.device) -> str | None:
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
    if nbytes > free:
        return f"an arena of {nbytes} bytes does not fit into the {free} bytes that are free on {device}"
    return None
