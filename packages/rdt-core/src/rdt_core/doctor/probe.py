"""The process at one end of a measured transfer: an actor that lends memory over a link, or reads it and says how long it took.

It goes through the same endpoints as a sync, in a fresh process whose environment is what Ray gives to actors of this node.
Every byte is compared. Nothing is left behind but with the process, which the measurement ends.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import memory, wire
from ..errors import TransportError
from ..memory import Arena, settle
from ..transport import make_reader_endpoint, make_source_endpoint, node
from ..transport.base import Copies, Region
from ..transport.tables import read_columns
from ..versions import current
from .collect import collect
from .facts import Facts
from .lanes import lane_of

#: moves after the first one, and seconds after which no further one is begun
_MOST, _BUDGET_S = 5, 2.0
_PATTERN_BYTES = 64 << 20


class Lent(wire.Struct, frozen=True):
    """Memory that a probe lends, as its reader needs it.

    Attributes:
        manifest: of a source with one region.
        offer: of that source.
        memory: see `Measured.memory`.
        expandable: see `Measured.expandable`.
    """

    manifest: wire.SourceManifest
    offer: wire.LinkOffer
    memory: str
    expandable: bool


class Taken(wire.Struct, frozen=True):
    """What a reader measured; see the attributes of `Measured`."""

    seconds: float
    first_seconds: float
    copy_seconds: float
    backend: str
    lane: str
    lane_unknown: str
    correct: bool


class Probe:
    """One end of measured transfers.

    Args:
        device: where its memory lies: "cpu", "cuda:0".
        nbytes: moved at a time.
    """

    def __init__(self, device: str, nbytes: int) -> None:
        # where `measure.environment` had UCX log from the start of this process: whoever loads it, it writes there
        self._log = Path(os.environ["UCX_LOG_FILE"].replace("%p", str(os.getpid())))
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._nbytes = nbytes // 8 * 8
        self._lent: tuple[torch.Tensor, Any, bool] | None = None
        self._target: torch.Tensor | None = None
        self._scratch: torch.Tensor | None = None
        self._copy_s = 0.0
        self._endpoints: dict[str, Any] = {}

    def ready(self) -> int:
        """Returns the pid, once the process is up."""
        return os.getpid()

    def lend(self, kind: str, seed: int) -> tuple[bytes, list[Any]]:
        """Makes memory with a known content readable.

        Args:
            kind: of the link.
            seed: of the content.

        Returns:
            An encoded `Lent`, and the references that travel beside it.
        """
        tensor, keep, expandable = self._memory()
        _fill(tensor, seed)
        settle(self._device)
        region = Region(0, tensor, keep)
        endpoint = self._endpoints.get(kind)
        if endpoint is None:
            endpoint = self._endpoints[kind] = make_source_endpoint(kind)
        meta = endpoint.export(region)
        columns = read_columns(_all_of(tensor))
        transfer = wire.Transfer(chunk=0, round=0, count=1, columns=columns, nbytes=tensor.numel())
        refs = endpoint.offer((transfer,), {0: region})
        name, agent = endpoint.agent()
        manifest = wire.SourceManifest(
            group="doctor", rank=0, world_size=1, versions=current(), node=node(self._device), mode="live", mode_reason="",
            tensors=(), shards=(), regions=(meta,), kinds=(kind,), agent=agent, agent_name=name,
        )  # fmt: skip
        offer = wire.LinkOffer(reader="", incarnation="", source=0, digest="", agent=agent, refs=len(refs))
        lent = Lent(
            manifest=manifest, offer=offer, memory="arena" if keep is not None else "parameters", expandable=expandable
        )
        return wire.encode(lent), refs

    def read(self, lent: bytes, refs: list[Any], kind: str, seed: int, timeout_s: float) -> bytes:
        """Reads what another probe lends, a few times, and compares it.

        Args:
            lent: from `lend`.
            refs: likewise.
            kind: of the link.
            seed: of the content.
            timeout_s: deadline of each move, in seconds.

        Returns:
            An encoded `Taken`.
        """
        given = wire.decode(lent, Lent)
        target = self._targets()
        endpoint = make_reader_endpoint(kind)
        endpoint.register(target)
        endpoint.connect(given.manifest, given.offer, refs)
        try:
            transfer = endpoint.prepare(0, _all_of(target), [target])
            target.zero_()

            def move() -> None:
                transfer.post()
                transfer.wait(time.monotonic() + timeout_s)

            seconds = self._timed(move)
            correct = _holds(target, seed)
        finally:
            endpoint.close()
        backend = _backend() if kind in ("prepared", "ray") else ""
        lane, unknown = self._lane(backend) if backend else ("", "")
        taken = Taken(
            seconds=statistics.median(seconds[1:] or seconds), first_seconds=seconds[0], copy_seconds=self._copy(),
            backend=backend, lane=lane, lane_unknown=unknown, correct=correct,
        )  # fmt: skip
        return wire.encode(taken)

    def end(self) -> None:
        """Removes what this process wrote."""
        self._log.unlink(missing_ok=True)

    # ------------------------------------------------------------------ inside

    def _memory(self) -> tuple[torch.Tensor, Any, bool]:
        """What is lent: a tensor of torch's allocator on a GPU, as parameters are, if others can read it; else an arena."""
        if self._lent is None:
            expandable = False
            if self._device.type == "cuda":
                tensor = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
                expandable = memory.is_expandable(tensor)
                if not expandable:
                    self._lent = tensor, None, False
                    return self._lent
                del tensor
                torch.cuda.empty_cache()
            arena = Arena(self._nbytes, self._device)
            self._lent = arena.tensor, arena, expandable
        return self._lent

    def _targets(self) -> torch.Tensor:
        if self._target is None:
            self._target = Arena(self._nbytes, self._device).tensor
        return self._target

    def _copy(self) -> float:
        """Seconds of one copy of the same bytes inside the device; measured once."""
        if not self._copy_s:
            target = self._targets()
            scratch = torch.ones(target.numel(), dtype=torch.uint8, device=self._device)
            seconds = self._timed(lambda: target.copy_(scratch))
            self._copy_s = statistics.median(seconds[1:] or seconds)
        return self._copy_s

    def _timed(self, move: Callable[[], Any]) -> list[float]:
        seconds: list[float] = []
        began = time.monotonic()
        while len(seconds) <= _MOST and (not seconds or time.monotonic() - began < _BUDGET_S):
            settle(self._device)
            started = time.perf_counter()
            move()
            settle(self._device)
            seconds.append(time.perf_counter() - started)
        return seconds

    def _lane(self, backend: str) -> tuple[str, str]:
        """The lane, and why it is unknown."""
        if backend != "UCX":
            return "", f"{backend} does not say"
        ctypes.CDLL(None).fflush(None)  # UCX writes through a buffer of the C library
        try:
            return lane_of(self._log.read_text(errors="replace"))
        except OSError:
            return lane_of(None)


class Collector:
    """Reads the facts of the node that it runs on."""

    def facts(self) -> Facts:
        """See `collect`."""
        return collect()


def _backend() -> str:
    """The backend that Ray's agent of this process was made with."""
    try:
        from ray.experimental.rdt.util import get_tensor_transport_manager

        return str(getattr(get_tensor_transport_manager("NIXL"), "_backend", "") or "")
    except Exception as error:
        raise TransportError(f"Ray does not say which NIXL backend it uses: {error}") from error


def _all_of(tensor: torch.Tensor) -> Copies:
    """One copy of a whole region into a whole destination."""
    zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    return Copies(zero, zero, zero, zero, zero, zero, one, one * tensor.numel())


def _content(count: int, seed: int, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """The known content, piece by piece: first word, and the words."""
    step = _PATTERN_BYTES // 8
    for first in range(0, count, step):
        last = min(first + step, count)
        yield first, torch.arange(first, last, dtype=torch.int64, device=device) * 0x9E3779B1 + seed


def _fill(tensor: torch.Tensor, seed: int) -> None:
    words = tensor.view(torch.int64)
    for first, piece in _content(words.numel(), seed, tensor.device):
        words[first : first + piece.numel()] = piece


def _holds(tensor: torch.Tensor, seed: int) -> bool:
    words = tensor.view(torch.int64)
    pieces = _content(words.numel(), seed, tensor.device)
    return all(torch.equal(words[first : first + piece.numel()], piece) for first, piece in pieces)
