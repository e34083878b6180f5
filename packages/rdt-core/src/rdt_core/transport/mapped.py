"""Link kind `mapped`: the owner's memory is mapped once into the reader, which then copies straight out of it.

On a CPU the owner's region lies in shared memory and the reader maps the owner's descriptor through `/proc`; nothing
has a name and nothing is left behind. On CUDA it is CUDA IPC, opened for the reader's own GPU, also where another one
holds the memory: one kernel then gathers the pieces, however small. Works on one node only, between processes that see each
other in one process namespace. Refuses memory that is not shared, expandable segments, and CUDA memory of the same
process.
"""

from __future__ import annotations

import mmap
import os
import warnings
from typing import Any

import torch

from .. import cudadriver, memory, wire
from ..errors import TransportError, WireError
from .base import Copies, PreparedTransfer, Region
from .copying import CopyProgram, Engine
from .direct import MemoryTransfer, stream_for
from .memory_local import region_meta
from .nodes import device_uuid, local_device, node, same_node, start_time


class _Mapping(wire.Struct, frozen=True, kw_only=True):
    """How a region is mapped. A file's device and inode, and a process's start time, tell a re-used number apart."""

    boot_id: str
    pid: int
    started: int
    nbytes: int
    offset: int  # of the region in the file, or in the CUDA allocation
    fd: int = -1
    file_device: int = 0
    file_inode: int = 0
    handle: bytes = b""  # CUDA IPC
    device_uuid: str = ""


class MappedSource:
    """The owner's half of `mapped`; see `SourceEndpoint`."""

    kind = "mapped"

    def __init__(self) -> None:
        self._node = node()
        self._kept: list[Region] = []

    def export(self, region: Region) -> wire.RegionMeta:
        """See `SourceEndpoint.export`. CPU memory must be shared already (`memory.Arena`, `memory.share`)."""
        tensor = region.tensor
        where = f"region {region.id} ({tensor.numel()} bytes on {tensor.device})"
        started = start_time(self._node.pid)
        if not self._node.boot_id or started is None:
            raise TransportError(f"{where} cannot be mapped by others: /proc of this process is not readable")
        common: dict[str, Any] = {
            "boot_id": self._node.boot_id,
            "pid": self._node.pid,
            "started": started,
            "nbytes": tensor.numel(),
        }
        if tensor.device.type == "cuda":
            if memory.is_expandable(tensor):
                raise TransportError(
                    f"{where} lies in expandable segments, which CUDA IPC cannot map; use mode 'snapshot', or start "
                    "without expandable_segments in PYTORCH_CUDA_ALLOC_CONF"
                )
            handle, offset = cudadriver.export(tensor.data_ptr(), tensor.get_device())
            uuid = str(torch.cuda.get_device_properties(tensor.get_device()).uuid)
            mapping = _Mapping(**common, offset=offset, handle=handle, device_uuid=uuid)
        elif tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            if not storage.is_shared():
                raise TransportError(
                    f"{where} is private memory; move it to shared memory first (memory.share, memory.Arena)"
                )
            fd, _ = memory.share(storage)
            file = os.fstat(fd)
            mapping = _Mapping(
                **common, offset=int(tensor.storage_offset()), fd=fd, file_device=file.st_dev, file_inode=file.st_ino
            )
        else:
            raise TransportError(f"{where}: this device's memory cannot be mapped; known: cpu, cuda")
        self._kept.append(region)
        return region_meta(region, mapped=wire.encode(mapping))

    def agent(self) -> tuple[str, bytes]:
        """There is no agent."""
        return "", b""

    def offer(self, transfers: tuple[wire.Transfer, ...], regions: dict[int, Region]) -> list[Any]:
        """Nothing travels beside the offer."""
        return []

    def close(self) -> None:
        """See `SourceEndpoint.close`."""
        self._kept.clear()


class MappedReader:
    """The reader's half of `mapped`; see `ReaderEndpoint`.

    Args:
        engine: that copies between CUDA memory; default: as `CopyProgram`.
    """

    kind = "mapped"

    def __init__(self, engine: Engine | None = None) -> None:
        self._node = node()
        self._engine = engine
        self._regions: dict[int, tuple[bytes, torch.Tensor]] = {}
        self._owner: tuple[int, int] | None = None
        self._device: int | None = None
        self._far = False
        self._transfers: list[MemoryTransfer] = []
        self._where = "link to an unknown source"

    def register(self, tensor: torch.Tensor) -> None:
        """See `ReaderEndpoint.register`. Any local memory is a possible destination; that of a GPU says which one reads."""
        if tensor.device.type == "cuda":
            self._device = tensor.get_device()

    def connect(self, source: wire.SourceManifest, offer: wire.LinkOffer, refs: list[Any]) -> None:
        """See `ReaderEndpoint.connect`."""
        self._where = f"mapped link from source rank {source.rank} (pid {source.node.pid} on {source.node.hostname})"
        for meta in (*source.regions, *offer.regions):
            known = self._regions.get(meta.id)
            if known is None or known[0] != meta.mapped:
                self._regions[meta.id] = (meta.mapped, self._map(meta))

    def _map(self, meta: wire.RegionMeta) -> torch.Tensor:
        where = f"{self._where}: region {meta.id} of {meta.nbytes} bytes on {meta.device}"
        if not meta.mapped:
            raise TransportError(f"{where} was not exported for mapping")
        try:
            mapping = wire.decode(meta.mapped, _Mapping)
        except WireError as error:
            raise TransportError(f"{where}: what describes the mapping does not decode: {error}") from error
        if mapping.boot_id != self._node.boot_id:
            raise TransportError(
                f"{where} is on another node or in another process namespace (found {mapping.boot_id!r}, here "
                f"{self._node.boot_id!r}); let the containers share the host's process namespace, or use another kind"
            )
        if mapping.nbytes != meta.nbytes:
            raise TransportError(f"{where}: the mapping has {mapping.nbytes} bytes")
        self._owner = (mapping.pid, mapping.started)
        reason = _gone(mapping.pid, mapping.started)
        if reason is not None:
            raise TransportError(f"{where} cannot be mapped: {reason}")
        if meta.device == "cuda":
            if mapping.pid == self._node.pid:
                raise TransportError(
                    f"{where} belongs to this very process, and CUDA cannot map memory into its own process; "
                    "use kind 'local' when trainer and engine share a process"
                )
            device = local_device(mapping.device_uuid) if self._device is None else self._device
            self._far = mapping.device_uuid != device_uuid(torch.device("cuda", device))
            return cudadriver.open_exported(mapping.handle, mapping.offset, mapping.nbytes, device).tensor()
        return _map_file(mapping, where)

    def prepare(self, index: int, copies: Copies, destinations: list[torch.Tensor]) -> PreparedTransfer:
        """See `ReaderEndpoint.prepare`."""
        regions = {region: tensor for region, (_, tensor) in self._regions.items()}
        program = CopyProgram(copies, regions, destinations, self._where, engine=self._engine, far=self._far)
        owner = self._owner

        def gone() -> str | None:
            return _gone(*owner) if owner is not None else None

        stream = stream_for(copies, regions, destinations) if len(copies) else None
        transfer = MemoryTransfer(program, destinations, self._where, gone, stream, self._far)
        self._transfers.append(transfer)
        return transfer

    def close(self) -> None:
        """See `ReaderEndpoint.close`. The mappings end with the last transfer that uses them."""
        while self._transfers:
            self._transfers.pop().release()
        self._regions.clear()


def _gone(pid: int, started: int) -> str | None:
    return None if start_time(pid) == started else f"its owner, process {pid}, has ended"


def _map_file(mapping: _Mapping, where: str) -> torch.Tensor:
    path = f"/proc/{mapping.pid}/fd/{mapping.fd}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(
            f"{where} cannot be opened at {path}: {error}; owner and reader must run as the same user, in containers "
            "that share the process namespace"
        ) from error
    try:
        file = os.fstat(fd)
        if (file.st_dev, file.st_ino) != (mapping.file_device, mapping.file_inode):
            raise TransportError(
                f"{where}: {path} is another file than the one exported; the owner must export it again"
            )
        if mapping.offset < 0 or file.st_size < mapping.offset + mapping.nbytes:
            raise TransportError(
                f"{where}: {path} has {file.st_size} bytes, expected at least {mapping.offset + mapping.nbytes}"
            )
        page = mapping.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        inside = mapping.offset - page
        # read-only pages: whatever goes wrong in a reader, the owner's weights stay what they are. Mapped in full
        # now, so that no sync pays for page faults
        view = mmap.mmap(
            fd, inside + mapping.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ, offset=page
        )
    except OSError as error:
        raise TransportError(f"{where} cannot be mapped: {error}") from error
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        # torch has no read-only tensors and says so
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(view, dtype=torch.uint8, offset=inside, count=mapping.nbytes)


def can_map(mine: wire.NodeMeta, theirs: wire.NodeMeta, region: wire.RegionMeta) -> str | None:
    """Why this process cannot read `region` by mapping it; None if it can.

    Args:
        mine: of the reader.
        theirs: of the owner.
        region: of the owner.
    """
    if not region.mapped:
        return f"region {region.id} of {region.nbytes} bytes is not exported for mapping"
    if not same_node(mine, theirs):
        return f"{theirs.hostname} is another node, or another process namespace, than {mine.hostname}"
    if region.device == "cuda":
        if mine.pid == theirs.pid:
            return "the memory belongs to the same process, and CUDA cannot map it there"
        if mine.device_uuid != theirs.device_uuid:
            reason = _cannot_reach(mine.device_uuid, theirs.device_uuid, region)
            if reason is not None:
                return f"it lies on GPU {theirs.device_uuid}, the reader's is {mine.device_uuid or 'none'}: {reason}"
    return None


def _cannot_reach(mine: str, theirs: str, region: wire.RegionMeta) -> str | None:
    """Why the GPU `mine` cannot read memory of the GPU `theirs`; None if it can."""
    seen = {device_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    if mine not in seen:
        return "the reader has no GPU that could map it"
    if theirs in seen:
        reachable = torch.cuda.can_device_access_peer(seen[mine], seen[theirs])
        return None if reachable else "the two have no peer access"
    # the owner's GPU is hidden from this process (CUDA_VISIBLE_DEVICES), so that only opening its memory can tell
    try:
        mapping = wire.decode(region.mapped, _Mapping)
        cudadriver.open_exported(mapping.handle, mapping.offset, mapping.nbytes, seen[mine])
    except (TransportError, WireError) as error:
        return f"this process does not see the owner's, and mapping it failed: {error}"
    return None
