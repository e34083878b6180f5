"""What a process holds that a leak would add to: memory, files, threads, shared memory, registrations, references.

Measured by the process itself, or from outside for one that cannot be asked; then registrations and references are 0.
Nothing is refused; a process that ends while it is looked at raises psutil's own error.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path

import msgspec
import psutil

from ..transport import prepared

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+)\s+(/dev/shm/\S+|/memfd:\S+)", re.MULTILINE)


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What one process holds at one moment.

    Attributes:
        rss: resident bytes of its own, without what it shares with others.
        files: open file descriptors.
        threads: of the process.
        segments: pieces of shared memory that are mapped: memory files, and files in /dev/shm.
        shared: their bytes.
        registrations: pieces of memory that are registered with NIXL.
        registered: their bytes.
        references: references to Ray objects that this process holds or borrows.
    """

    rss: int
    files: int
    threads: int
    segments: int
    shared: int
    registrations: int = 0
    registered: int = 0
    references: int = 0


FIELDS: tuple[str, ...] = Held.__struct_fields__


def measure(pid: int | None = None) -> Held:
    """Measures a process.

    Args:
        pid: another process, seen from outside; default: this one.
    """
    process = psutil.Process(pid)
    inside: dict[str, int] = {}
    if pid is None:
        gc.collect()  # what only waits for the collector is no leak
        inside = {
            "registrations": len(prepared._KEPT),
            "registered": sum(tensor.untyped_storage().nbytes() for tensor in prepared._KEPT.values()),
            "references": _references(),
        }
    segments, shared = _shared(process.pid)
    memory = process.memory_info()
    return Held(
        rss=memory.rss - memory.shared,
        files=process.num_fds(),
        threads=process.num_threads(),
        segments=segments,
        shared=shared,
        **inside,
    )


def _shared(pid: int) -> tuple[int, int]:
    """Number and bytes of the shared memory that a process maps, each file once however often it is mapped."""
    sizes: dict[tuple[str, str], int] = {}
    for low, high, device, inode, _ in _MAPPING.findall(Path(f"/proc/{pid}/maps").read_text()):
        sizes[device, inode] = sizes.get((device, inode), 0) + int(high, 16) - int(low, 16)
    return len(sizes), sum(sizes.values())


def _references() -> int:
    if "ray" not in sys.modules:
        return 0
    import ray

    if not ray.is_initialized():
        return 0
    # Ray's public state API asks its dashboard, which small clusters run without
    worker = ray._private.worker.global_worker.core_worker
    return len(worker.get_all_reference_counts())


def processes(root: int | None = None) -> dict[str, int]:
    """Ray's own processes below `root` (default: this one) that a soak looks at from outside: label -> pid."""
    found: dict[str, int] = {}
    for child in psutil.Process(root or os.getpid()).children(recursive=True):
        try:
            line = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        name = Path(line[0]).name if line else ""
        if name in ("raylet", "gcs_server"):
            found[name] = child.pid
        elif name.startswith("ray::Coordinator"):
            found["coordinator"] = child.pid
    return found
