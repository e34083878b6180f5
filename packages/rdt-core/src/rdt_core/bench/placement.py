"""Which GPU each rank of a bench has, and the environment that gives it to the rank's process.

Every process sees every GPU, its own first, so that it can map what lies on another one and so that whatever thread
allocates, copies or launches there uses the rank's own GPU without being told. Ray is kept from masking GPUs. NVLink
multicast is off: its set-up belongs to who owns the host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """GPU index of each rank, counted as this process sees them; empty on a CPU.

    Attributes:
        sources: by source rank.
        readers: by engine rank.
    """

    sources: tuple[int, ...] = ()
    readers: tuple[int, ...] = ()


def place(gpus: str, count: int, ranks: int, tp: int) -> Placement:
    """Returns where each rank goes.

    Args:
        gpus: "separate" (trainers on the first half of the GPUs, engine ranks on the others), "together" (both from the
            first GPU on) or "shared" (all on the first GPU).
        count: GPUs; 0 on a CPU.
        ranks: source ranks.
        tp: engine ranks.
    """
    if not count:
        return Placement()
    if gpus == "shared":
        return Placement((0,) * ranks, (0,) * tp)
    if gpus == "together":
        return Placement(tuple(r % count for r in range(ranks)), tuple(r % count for r in range(tp)))
    half = count // 2
    return Placement(tuple(r % half for r in range(ranks)), tuple(half + r % (count - half) for r in range(tp)))


def environment(
    gpu: int, count: int, *, expandable: bool = False, given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of a rank's process on a GPU.

    Args:
        gpu: index of its GPU, as this process counts.
        count: GPUs that this process sees.
        expandable: whether torch allocates in expandable segments.
        given: the environment of this process; default: `os.environ`.
    """
    given = os.environ if given is None else given
    mask = [part.strip() for part in given.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    seen = mask[:count] if mask else [str(index) for index in range(count)]
    result = {
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "CUDA_VISIBLE_DEVICES": ",".join([seen[gpu], *(one for index, one in enumerate(seen) if index != gpu)]),
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    if "CUDA_DEVICE_ORDER" in given:
        result["CUDA_DEVICE_ORDER"] = given["CUDA_DEVICE_ORDER"]
    if expandable:
        # the second name is the one of newer versions of torch
        result["PYTORCH_CUDA_ALLOC_CONF"] = result["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return result
