"""Lower bounds of a sync, measured in the processes that sync, on scratch memory of their own.

`copy` is one copy inside the reader; `span` one copy out of each owner's memory, mapped as CUDA IPC or shared memory, a
single span; `nixl` one prepared NIXL transfer of a single span. Scratch memory is limited: what is larger is moved as
several spans of that size, which costs nothing that could be seen. Nothing here goes through a plan.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .. import cudadriver, memory, wire
from ..errors import TransportError
from ..memory import Arena, settle
from ..transport.base import Copies, Region
from ..transport.nodes import local_device, node
from ..transport.prepared import PreparedReader, PreparedSource

_CAP = {"cpu": 512 << 20, "cuda": 4 << 30}
_COPY_CAP = {"cpu": 512 << 20, "cuda": 1 << 30}
_VERSIONS = wire.VersionMeta(rdt="", wire_major=1, wire_minor=0, ray="", nixl="", torch="", python="")


class Loan(wire.Struct, frozen=True):
    """Scratch memory of an owner that others may read.

    Attributes:
        nbytes: of one span.
        pid, fd: of the memory file, on a CPU.
        handle, offset, uuid: CUDA IPC handle, place in the allocation, and GPU.
        manifest: for NIXL, an encoded `wire.SourceManifest`; empty where not asked for.
    """

    nbytes: int
    pid: int
    fd: int = -1
    handle: bytes = b""
    offset: int = 0
    uuid: str = ""
    manifest: bytes = b""


class Scratch:
    """Scratch memory of one process, made when first needed and kept.

    Args:
        device: where it lies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._arenas: list[Arena] = []

    def _arena(self, number: int, nbytes: int) -> Arena:
        nbytes = min(nbytes, _CAP[self.device.type])
        while len(self._arenas) <= number:
            self._arenas.append(Arena(nbytes, self.device))
        if self._arenas[number].nbytes < nbytes:
            self._arenas[number] = Arena(nbytes, self.device)
        return self._arenas[number]

    def lend(self, nbytes: int, nixl: bool) -> Loan:
        """Makes one span of `nbytes`, or as much as scratch memory may have, readable by others.

        Args:
            nbytes: wanted.
            nixl: whether by NIXL too, which makes this process's agent.
        """
        arena = self._arena(0, nbytes)
        settle(self.device)
        manifest = b""
        if nixl:
            source = PreparedSource()
            region = source.export(Region(0, arena.tensor, arena))
            source.offer((), {})
            name, agent = source.agent()
            manifest = wire.encode(
                wire.SourceManifest(
                    group="floor", rank=0, world_size=1, versions=_VERSIONS, node=node(self.device), mode="live",
                    mode_reason="", tensors=(), shards=(), regions=(region,), kinds=("prepared",), agent=agent,
                    agent_name=name,
                )
            )  # fmt: skip
        size = min(nbytes, arena.nbytes)
        if self.device.type == "cpu":
            fd, _ = memory.share(arena.tensor.untyped_storage())
            return Loan(nbytes=size, pid=os.getpid(), fd=fd, manifest=manifest)
        handle, offset = cudadriver.export(arena.tensor.data_ptr(), arena.tensor.get_device())
        uuid = str(torch.cuda.get_device_properties(arena.tensor.get_device()).uuid)
        return Loan(nbytes=size, pid=os.getpid(), handle=handle, offset=offset, uuid=uuid, manifest=manifest)

    def copy(self, nbytes: int, repeats: int) -> float:
        """Median seconds of one copy of `nbytes` inside this process's device."""
        size = min(nbytes, _COPY_CAP[self.device.type])
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)

        def once() -> None:
            for taken in _spans(nbytes, size):
                target[:taken].copy_(source[:taken])
            settle(self.device)

        return self._median(once, repeats)

    def span(self, loans: Sequence[tuple[Loan, int]], repeats: int) -> float:
        """Median seconds of copying out of mapped memory, all owners at once.

        Args:
            loans: of each owner, with the bytes to take from it.
            repeats: measurements.
        """
        sources = [self._map(loan) for loan, _ in loans]
        targets = [self._arena(number, nbytes).tensor for number, (_, nbytes) in enumerate(loans)]
        streams = [torch.cuda.Stream(self.device) if self.device.type == "cuda" else None for _ in loans]

        def once() -> None:
            for (loan, nbytes), source, target, stream in zip(loans, sources, targets, streams, strict=True):
                with torch.cuda.stream(stream):
                    for taken in _spans(nbytes, loan.nbytes):
                        target[:taken].copy_(source[:taken], non_blocking=True)
            settle(self.device)

        return self._median(once, repeats)

    def nixl(self, loans: Sequence[tuple[Loan, int]], repeats: int, timeout_s: float) -> float:
        """As `span`, by prepared NIXL transfers of one span each."""
        readers, rounds = [], []
        for number, (loan, nbytes) in enumerate(loans):
            target = self._arena(number, nbytes).tensor
            reader = PreparedReader()
            reader.register(target)
            manifest = wire.decode(loan.manifest, wire.SourceManifest)
            offer = wire.LinkOffer(reader="", incarnation="", source=0, digest="", agent=manifest.agent)
            reader.connect(manifest, offer, [])
            made: dict[int, Any] = {}
            spans = list(_spans(nbytes, loan.nbytes))
            for taken in set(spans):
                made[taken] = reader.prepare(0, _one(taken), [target])
            readers.append(reader)
            rounds.append([made[taken] for taken in spans])

        def once() -> None:
            deadline = time.monotonic() + timeout_s
            for step in range(max(map(len, rounds))):
                moves = [one[step] for one in rounds if step < len(one)]
                for move in moves:
                    move.post()
                for move in moves:
                    move.wait(deadline)

        try:
            return self._median(once, repeats)
        finally:
            for reader in readers:
                reader.close()

    def _median(self, once: Callable[[], None], repeats: int) -> float:
        seconds = []
        for _ in range(repeats + 1):
            settle(self.device)
            started = time.perf_counter()
            once()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])

    def _map(self, loan: Loan) -> torch.Tensor:
        if loan.handle:
            return cudadriver.open_exported(loan.handle, loan.offset, loan.nbytes, local_device(loan.uuid)).tensor()
        try:
            fd = os.open(f"/proc/{loan.pid}/fd/{loan.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(f"scratch memory of process {loan.pid} cannot be opened: {error}") from error
        try:
            view = mmap.mmap(fd, loan.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so
            warnings.simplefilter("ignore", UserWarning)
            return torch.frombuffer(view, dtype=torch.uint8)


def _spans(nbytes: int, size: int) -> Sequence[int]:
    whole, rest = divmod(nbytes, size)
    return [size] * whole + [rest] * bool(rest)


def _one(nbytes: int) -> Copies:
    zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    return Copies(zero, zero, zero, zero, zero, zero, one, one * nbytes)
