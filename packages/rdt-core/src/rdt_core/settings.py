"""Settings of a process that decide how NIXL moves device memory, and that must be right before its agent is made.

UCX reads them once, when Ray makes the process's NIXL agent; wrong ones cost a factor of a thousand and are never said.
rdt sets them where it makes the actors (`actoroptions`); here they are checked where it does not. The judgements are pure
functions of an environment; only `visible_nvlinks` asks the machine. Refuses to change the environment of a process.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

#: lets UCX read device memory of another process of the node directly, also where it sees no NVLink
GET_ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
#: the two names under which torch reads the settings of its allocator; the second is that of newer versions
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
#: GB/s of device memory read by NIXL where UCX emulates reads over TCP, and where it reads directly (one H200)
EMULATED_GBPS, DIRECT_GBPS = 0.55, 1240.0

_ON = ("on", "1", "y", "yes")
_OFF = ("off", "0", "n", "no")


def is_on(value: str) -> bool:
    """Whether UCX takes the value of a switch for "on"."""
    return value.strip().lower() in _ON


def is_off(value: str) -> bool:
    """Whether UCX takes the value of a switch for "off": somebody decided so."""
    return value.strip().lower() in _OFF


def nvml_module() -> Any:
    """Returns the module that asks the NVIDIA driver: `nvidia-ml-py`, or the copy of it that Ray carries; None without both."""
    for name in ("pynvml", "ray._private.thirdparty.pynvml"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def visible_nvlinks() -> int | None:
    """How many NVLinks UCX counts on this machine: those of its first GPU, or 0 unless the far end of each can be seen.

    Containers and virtual machines may hide them while they work.

    Returns:
        The number; None where there is no NVML or no driver that answers, so that nothing is known.
    """
    nvml = nvml_module()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        (field,) = nvml.nvmlDeviceGetFieldValues(device, [nvml.NVML_FI_DEV_NVLINK_LINK_COUNT])
        if field.nvmlReturn != nvml.NVML_SUCCESS:
            return 0
        for link in range(field.value.uiVal):
            nvml.nvmlDeviceGetNvLinkRemotePciInfo(device, link)
        return int(field.value.uiVal)
    except nvml.NVMLError:
        return 0
    finally:
        nvml.nvmlShutdown()


def slow_reads(environment: Mapping[str, str], nvlinks: int | None) -> str | None:
    """Why NIXL's reads of device memory within a node would go through TCP in a process; None if they would not.

    Args:
        environment: of the reading process, as it was when its agent was made.
        nvlinks: `visible_nvlinks`. Where nothing is known, nothing is claimed.
    """
    value = environment.get(GET_ZCOPY, "")
    if nvlinks is None or nvlinks > 0 or is_on(value):
        return None
    found = f"{GET_ZCOPY}={value}" if value else f"{GET_ZCOPY} is not set"
    return (
        f"{found} and no NVLink is visible to this process, so that UCX reads device memory over TCP, at "
        f"{EMULATED_GBPS:g} GB/s instead of {DIRECT_GBPS:,.0f}; start the process with {GET_ZCOPY}=on (actors that rdt makes "
        "have it)"
    )


def refused_reads(environment: Mapping[str, str] | None = None) -> str | None:
    """Why this process may not read device memory of its node by NIXL; None if it may. Asks the machine once.

    Whoever sets the variable to "off" has decided, and is not refused.

    Args:
        environment: default: this process's.
    """
    environment = os.environ if environment is None else environment
    if is_off(environment.get(GET_ZCOPY, "")) or is_on(environment.get(GET_ZCOPY, "")):
        return None
    return slow_reads(environment, _nvlinks())


def expandable(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that make torch's CUDA allocator hand out memory that no other process can map.

    Args:
        environment: of the process.

    Returns:
        Each such variable, with its value in which that part is switched off and all else kept; empty if there is none.
    """
    found = {}
    for name in ALLOCATORS:
        parts = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        changed = [_switched(part) for part in parts]
        if changed != parts:
            found[name] = ",".join(changed)
    return found


@lru_cache(maxsize=1)
def _nvlinks() -> int | None:
    return visible_nvlinks()


def _switched(part: str) -> str:
    key, _, value = part.partition(":")
    if key.strip().lower() == "expandable_segments" and value.strip().lower() == "true":
        return "expandable_segments:False"
    if key.strip().lower() == "backend" and value.strip().lower() == "cudamallocasync":
        return "backend:native"
    return part
