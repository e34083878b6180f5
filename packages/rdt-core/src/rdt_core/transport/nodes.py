"""Where this process runs, as far as it decides which link kinds can work.

Two processes can map each other's memory when they run on one kernel and in one process namespace; that is what
`NodeMeta.boot_id` identifies, not the hostname, which containers make up.
"""

from __future__ import annotations

import os
import socket
import sys

import torch

from .. import wire
from ..errors import TransportError


def node(device: torch.device | str = "cpu") -> wire.NodeMeta:
    """Describes this process.

    Args:
        device: where this member's weights live; a CUDA device is identified by its UUID, because its index differs
            between processes that see different devices.
    """
    device = torch.device(device)
    return wire.NodeMeta(
        node_id=_ray_node_id(),
        boot_id=boot_id(),
        hostname=socket.gethostname(),
        pid=os.getpid(),
        device=device.type,
        device_uuid=device_uuid(device),
    )


def device_uuid(device: torch.device) -> str:
    """UUID of a CUDA device (current device without an index); empty for a CPU."""
    if device.type != "cuda":
        return ""
    index = torch.cuda.current_device() if device.index is None else device.index
    return str(torch.cuda.get_device_properties(index).uuid)


def local_device(uuid: str) -> int:
    """Index, in this process, of the CUDA device with this UUID.

    Raises:
        TransportError: this process does not see it.
    """
    seen = [device_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise TransportError(
            f"GPU {uuid} is not visible to this process, which sees {seen}; check CUDA_VISIBLE_DEVICES"
        )
    return seen.index(uuid)


def start_time(pid: int) -> int | None:
    """Start of a process of this node in clock ticks since boot; None once it has ended (zombies included).

    A pid is used again; together with its start time it names one process.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def same_node(mine: wire.NodeMeta, theirs: wire.NodeMeta) -> bool:
    """Whether the two processes share a kernel and a process namespace."""
    return bool(mine.boot_id) and mine.boot_id == theirs.boot_id


def boot_id() -> str:
    """Identifies the kernel and the process namespace of this process; empty where `/proc` does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _ray_node_id() -> str:
    # a process that has not imported Ray is not connected to it, and asking must not cost it the import
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().get_node_id())
