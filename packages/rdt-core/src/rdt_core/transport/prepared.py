"""Link kind `prepared`: NIXL reads on the agent that Ray owns, made once and posted again at each sync.

Memory is registered through Ray, once and for the life of the process, so that Ray's own transfers and these share
agent and registrations. Refuses CUDA memory from expandable segments, which NIXL would read very slowly and correctly.
A remote agent is never removed while something may be in flight: removal ends every pull from it, Ray's own included.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch

from .. import memory, wire
from ..errors import DeadlineError, TransportError
from . import ranges
from .base import Copies, PreparedTransfer, Region, Turn
from .memory_local import region_meta
from .nodes import boot_id

_SPIN_S = 100e-6
_SLEEP_S = (50e-6, 200e-6)


def unavailable() -> str | None:
    """Why this process has no NIXL agent of Ray; None if it has one (and then it exists afterwards)."""
    try:
        ray_agent()
    except TransportError as error:
        return str(error)
    return None


def ray_agent() -> Any:
    """Returns the NIXL agent of this process that Ray owns, creating it on first use.

    Raises:
        TransportError: Ray is not connected, NIXL is missing, or its backend does not start.
    """
    try:
        import ray
        from ray.experimental.rdt.util import get_tensor_transport_manager
    except ImportError as error:
        raise TransportError(f"Ray Direct Transport is not there: {error}; install ray>=2.56") from error
    if not ray.is_initialized():
        raise TransportError("this process is not connected to Ray; call ray.init(address=...) first")
    try:
        return get_tensor_transport_manager("NIXL").get_nixl_agent()
    except ImportError as error:
        raise TransportError(f"NIXL is not there: {error}; install it with: pip install nixl") from error
    except Exception as error:
        raise TransportError(f"Ray's NIXL agent does not start: {error}; UCX_LOG_LEVEL=debug says more") from error


def check_memory(tensor: torch.Tensor, what: str) -> None:
    """Refuses memory that NIXL would serve badly. Raises TransportError naming `what`."""
    if memory.is_expandable(tensor):
        raise TransportError(
            f"{what} ({tensor.numel()} bytes on {tensor.device}) lies in expandable segments, which NIXL reads at a "
            "fraction of the speed; use mode 'snapshot', or start without expandable_segments in "
            "PYTORCH_CUDA_ALLOC_CONF"
        )


#: Registered memory by address, kept for the life of the process, as Ray keeps the registrations: Ray finds them by address
#: alone and never takes them back here, so memory that was freed and handed out again would pass for registered and
#: readers would get what the old pages hold.
_KEPT: dict[int, torch.Tensor] = {}


class Registry:
    """Memory that one end of a link registers with Ray's agent: each storage once, for the life of the process."""

    def __init__(self) -> None:
        self._added: set[int] = set()

    def add(self, tensor: torch.Tensor, what: str) -> None:
        """Registers the storage below `tensor` unless it is already.

        Raises:
            TransportError: expandable segments, or NIXL refuses; names `what`.
        """
        address = tensor.untyped_storage().data_ptr()
        if not tensor.untyped_storage().nbytes():
            return
        self._added.add(address)
        if address in _KEPT:
            return
        check_memory(tensor, what)
        ray_agent()
        from ray.experimental import register_nixl_memory

        try:
            register_nixl_memory(tensor)
        except Exception as error:
            raise TransportError(
                f"{what} ({tensor.numel()} bytes on {tensor.device}) cannot be registered: {error}"
            ) from error
        _KEPT[address] = tensor
        memory.retain(tensor)

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether the storage below `tensor` was added."""
        return tensor.untyped_storage().data_ptr() in self._added


class NixlSource:
    """What the owner's halves of `prepared` and `ray` share: agent and registrations come with the first reader.

    A NIXL agent keeps a core busy and registering takes seconds for large memory; an owner whose readers all map its
    memory pays neither.
    """

    kind = ""

    def __init__(self) -> None:
        self._registry = Registry()
        self._regions: list[Region] = []
        self._serving = False

    def export(self, region: Region) -> wire.RegionMeta:
        """See `SourceEndpoint.export`. Registered when the first reader asks for this kind, or now if one has."""
        check_memory(region.tensor, f"region {region.id}")
        self._regions.append(region)
        if self._serving:
            self._serve()
        return region_meta(region)

    def agent(self) -> tuple[str, bytes]:
        """Name and metadata of Ray's agent, with all that is registered by now; empty before the first `offer`."""
        if not self._serving:
            return "", b""
        agent = ray_agent()
        return str(agent.name), bytes(agent.get_agent_metadata())

    def _serve(self) -> None:
        self._serving = True
        while self._regions:
            self._registry.add(self._regions[0].tensor, f"region {self._regions[0].id}")
            del self._regions[0]

    def close(self) -> None:
        """Keeps the registrations: taking one back would invalidate what every peer knows about this agent."""


class PreparedSource(NixlSource):
    """The owner's half of `prepared`; see `SourceEndpoint`."""

    kind = "prepared"

    def offer(self, transfers: tuple[wire.Transfer, ...], regions: dict[int, Region]) -> list[Any]:
        """Registers every region exported so far; nothing travels beside the offer but `agent()`."""
        self._serve()
        return []


class PreparedReader:
    """The reader's half of `prepared`; see `ReaderEndpoint`."""

    kind = "prepared"

    def __init__(self) -> None:
        self._agent = ray_agent()
        self._registry = Registry()
        self._regions: dict[int, wire.RegionMeta] = {}
        self._remote = ""
        self._loaded = b""
        self._transfers: list[NixlTransfer] = []
        self._where = "link to an unknown source"

    def register(self, tensor: torch.Tensor) -> None:
        """See `ReaderEndpoint.register`."""
        self._registry.add(tensor, "a destination")

    def connect(self, source: wire.SourceManifest, offer: wire.LinkOffer, refs: list[Any]) -> None:
        """See `ReaderEndpoint.connect`."""
        self._where = f"prepared link from source rank {source.rank} (pid {source.node.pid} on {source.node.hostname})"
        self._regions = {meta.id: meta for meta in (*source.regions, *offer.regions)}
        metadata = offer.agent or source.agent
        if not metadata:
            raise TransportError(f"{self._where}: the offer carries no metadata of the source's NIXL agent")
        if source.node.pid == os.getpid() and source.node.boot_id == boot_id():
            self._remote = str(self._agent.name)  # owner and reader are one process: NIXL knows its own agent
        elif metadata != self._loaded:
            self._load(metadata)

    def _load(self, metadata: bytes) -> None:
        try:
            remote = self._agent.add_remote_agent(metadata)
        except Exception as first:
            # An actor that was restarted has its old name with new addresses, and NIXL does not replace one by the
            # other. Nothing can be in flight from an agent whose process is gone, so forgetting it here ends no pull.
            if not self._remote or any(transfer.in_flight for transfer in self._transfers):
                raise TransportError(f"{self._where}: its NIXL agent cannot be loaded: {first}") from first
            self._release_all()
            try:
                self._agent.remove_remote_agent(self._remote)
                remote = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise TransportError(f"{self._where}: its NIXL agent cannot be loaded again: {error}") from error
        self._remote = remote.decode() if isinstance(remote, bytes) else str(remote)
        self._loaded = metadata

    def prepare(self, index: int, copies: Copies, destinations: list[torch.Tensor]) -> PreparedTransfer:
        """See `ReaderEndpoint.prepare`. Rows that continue one another on both sides become one descriptor."""
        ranges.check(
            copies,
            {region: meta.nbytes for region, meta in self._regions.items()},
            [tensor.numel() for tensor in destinations],
            self._where,
        )
        handles: list[Any] = []
        if len(copies):
            used = [destinations[i] for i in sorted(set(copies.destination.tolist()))]
            for tensor in used:
                if not self._registry.covers(tensor):
                    raise TransportError(
                        f"{self._where}: a destination of {tensor.numel()} bytes on {tensor.device} was not registered"
                    )
            handles = self._handles(copies, destinations)
        transfer = NixlTransfer(self._agent, handles, copies.nbytes, destinations, self._where)
        self._transfers.append(transfer)
        return transfer

    def _handles(self, copies: Copies, destinations: list[torch.Tensor]) -> list[Any]:
        region, source, destination, target, nbytes = ranges.rows(copies)
        first = ranges.starts(region, source, destination, target, nbytes)
        nbytes = np.add.reduceat(nbytes, first)
        region, source, destination, target = region[first], source[first], destination[first], target[first]
        remote = _table(
            region, {i: (m.address, m.device_index, m.device) for i, m in self._regions.items()}, source, nbytes
        )
        places = {i: (t.data_ptr(), max(t.get_device(), 0), t.device.type) for i, t in enumerate(destinations)}
        local = _table(destination, places, target, nbytes)
        handles = []
        # one NIXL request has one memory type on each side
        for from_cuda in (False, True):
            for to_cuda in (False, True):
                mine = (remote[1] == from_cuda) & (local[1] == to_cuda)
                if not mine.any():
                    continue
                try:
                    handles.append(
                        self._agent.initialize_xfer(
                            "READ",
                            self._agent.get_xfer_descs(local[0][mine], mem_type="cuda" if to_cuda else "cpu"),
                            self._agent.get_xfer_descs(remote[0][mine], mem_type="cuda" if from_cuda else "cpu"),
                            self._remote,
                        )
                    )
                except Exception as error:
                    raise TransportError(
                        f"{self._where}: NIXL cannot prepare {int(mine.sum())} reads of "
                        f"{int(nbytes[mine].sum())} bytes: {error}"
                    ) from error
        return handles

    def close(self) -> None:
        """See `ReaderEndpoint.close`. The remote agent stays loaded: other links and Ray itself may be using it."""
        self._release_all()

    def _release_all(self) -> None:
        while self._transfers:
            self._transfers[-1].release()
            self._transfers.pop()


def _table(
    index: np.ndarray, places: dict[int, tuple[int, int, str]], offset: np.ndarray, nbytes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Descriptors (address, bytes, device index) as NIXL takes them, and which of them are CUDA memory."""
    known = np.array(sorted(places), dtype=np.int64)
    at = np.searchsorted(known, index)
    base = np.array([places[int(i)][0] for i in known], dtype=np.uint64)[at]
    device = np.array([places[int(i)][1] for i in known], dtype=np.uint64)[at]
    cuda = np.array([places[int(i)][2] == "cuda" for i in known], dtype=bool)[at]
    return np.stack([base + offset.astype(np.uint64), nbytes.astype(np.uint64), device], axis=1), cuda


class NixlTransfer:
    """One move by NIXL; see `PreparedTransfer`. Holds one request for each pair of memory types (mostly one)."""

    def __init__(
        self, agent: Any, handles: list[Any], nbytes: int, destinations: list[torch.Tensor], where: str
    ) -> None:
        self.nbytes = nbytes
        self.turn = Turn.AGENT
        self._agent = agent
        self._handles = handles
        self._pending: list[Any] = []
        self._destinations = destinations
        self._devices = {tensor.device for tensor in destinations if tensor.device.type == "cuda"}
        self._where = where
        self._posted = False
        self._released = False

    @property
    def in_flight(self) -> bool:
        """Whether bytes may still be landing."""
        return bool(self._pending)

    def post(self) -> None:
        """See `PreparedTransfer.post`. Waits for work already queued on the current stream: NIXL knows no streams."""
        if self._released:
            raise TransportError(f"{self._where}: a transfer of {self.nbytes} bytes was posted after its release")
        if self._posted or self._pending:
            raise TransportError(f"{self._where}: a transfer of {self.nbytes} bytes was posted twice without a wait")
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._posted = True
        for handle in self._handles:
            self._pending.append(handle)
            try:
                state = self._agent.transfer(handle)
            except Exception as error:
                self._pending.remove(handle)
                raise self._failed(str(error)) from error
            if state == "ERR":
                self._pending.remove(handle)
                raise self._failed("NIXL reported an error when the reads were posted")

    def poll(self) -> bool:
        """See `PreparedTransfer.poll`."""
        while self._pending:
            handle = self._pending[-1]
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as error:
                self._pending.remove(handle)
                raise self._failed(str(error)) from error
            if state == "ERR":
                self._pending.remove(handle)
                raise self._failed("NIXL reported an error")
            if state != "DONE":
                return False
            self._pending.pop()
        return True

    def wait(self, deadline: float) -> None:
        """See `PreparedTransfer.wait`.

        A NIXL read that is done has written device memory before it says so: kernels launched afterwards see the bytes,
        on any stream.
        """
        if not self._posted:
            raise TransportError(f"{self._where}: a transfer of {self.nbytes} bytes is waited for, but was not posted")
        started = time.monotonic()
        pause = _SLEEP_S[0]
        while not self.poll():
            now = time.monotonic()
            if now >= deadline:
                raise DeadlineError(f"{self._where}: {self.nbytes} bytes had not landed after {now - started:.1f} s")
            if now - started > _SPIN_S:
                time.sleep(min(pause, deadline - now))
                pause = min(pause * 1.2, _SLEEP_S[1])
        self._posted = False

    def _failed(self, reason: str) -> TransportError:
        return TransportError(
            f"{self._where}: reading {self.nbytes} bytes failed: {reason}; the source process may have ended, "
            "or its memory is no longer what it declared"
        )

    def release(self) -> None:
        """See `PreparedTransfer.release`.

        Raises:
            TransportError: bytes are still landing and NIXL cannot cancel them; the handles stay, for another try.
        """
        while self._handles:
            try:
                self._agent.release_xfer_handle(self._handles[-1])
            except Exception as error:
                raise TransportError(
                    f"{self._where}: a move of {self.nbytes} bytes cannot be cancelled yet: {error}"
                ) from error
            handle = self._handles.pop()
            if handle in self._pending:
                self._pending.remove(handle)
        self._released = True
        self._destinations = []
