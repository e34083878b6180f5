"""The row below which packing pays on a link of kind `prepared`: set, measured on the link itself, or a default.

A piece costs a prepared transfer a fixed time, packed it costs its bytes two more ways through memory. Both are measured once
for each place that owners are at, when the first link to it is made, and hold for every plan after that one. What is
measured is a matter of the machines alone, so a process keeps it for its life. Refuses nothing: where nothing can be
measured the default stays, and says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch

from .. import wire
from ..memory import settle
from .base import Copies, ReaderEndpoint
from .copying import CopyProgram

log = logging.getLogger(__name__)

How: TypeAlias = Literal["set", "measured", "default"]
#: host of the owners, their device, the reader's device
Place: TypeAlias = tuple[str, str, str]

#: Bytes of a row below which packing at the owner beats reading the row by itself, by kind and device of the source.
#: A piece costs a prepared NIXL transfer about 10 us over cuda_ipc, 6 to 8 us over NVLink and 2 to 5 us on a CPU (cma),
#: whatever its size. Packed, it costs 0.46 us on a GPU, and its bytes go through memory twice more, at 1,880 GB/s (GPU)
#: or some 10 GB/s (CPU). The two meet near 64 KiB on a CPU and at some MiB on a GPU. A tensor in a Ray object costs
#: 27 us and more, hence the higher numbers there. Copies out of mapped memory are batched already: packing them gains
#: nothing.
DEFAULT: dict[tuple[str, str], int] = {
    ("local", "cpu"): 0,
    ("local", "cuda"): 0,
    ("mapped", "cpu"): 0,
    ("mapped", "cuda"): 0,
    ("prepared", "cpu"): 64 << 10,
    ("prepared", "cuda"): 4 << 20,
    ("ray", "cpu"): 1 << 20,
    ("ray", "cuda"): 8 << 20,
}
#: what a measurement may choose: outside, a moment on a busy machine would decide
LEAST, MOST = 64 << 10, 16 << 20
#: how many times off a threshold must be for a plan to be made anew
FAR_OFF = 4

_PIECES = 64
_PIECE_BYTES = 4 << 10
_GAP = 64  # so that no two pieces become one
SCRATCH_BYTES = _PIECES * _PIECE_BYTES
_PACKED = 1024  # pieces of a local copy
_COPIED = {"cpu": 16 << 20, "cuda": 64 << 20}  # more than caches hold
_TIMES = 6
_SOUND_S = 100e-6  # a piece takes so long only on a path that is broken, or a machine that does other things
_PATIENCE_S = 60.0  # the first transfer between two agents takes a second


@dataclass(frozen=True, slots=True)
class Measured:
    """What a piece costs between one reader and the owners at one place.

    Attributes:
        direct_s: seconds that a piece costs a prepared transfer, besides its bytes.
        packed_s: seconds that a piece costs one batched copy, besides its bytes.
        copied: bytes that a copy on the reader's device moves in a second.
    """

    direct_s: float
    packed_s: float
    copied: float

    @property
    def threshold(self) -> int:
        """Bytes of a row below which it is packed, a power of two.

        Packing and unpacking break even where a piece saves what its bytes cost twice; half of it is taken, since packing
        needs memory as well, and is done before anybody can read.
        """
        even = (self.direct_s - 2 * self.packed_s) * self.copied / 2
        return min(max(1 << max(int(even / 2), 1).bit_length() - 1, LEAST), MOST)


@dataclass(frozen=True, slots=True)
class Threshold:
    """Bytes of a row below which it is packed on one link, and how that was chosen."""

    nbytes: int
    how: How


_MEASURED: dict[Place, Measured | None] = {}  # None: it could not be measured


def place_of(mine: wire.NodeMeta, theirs: wire.NodeMeta) -> Place:
    """Returns what makes links alike: the owners' host and device, and the reader's device."""
    return theirs.boot_id or theirs.hostname, theirs.device, mine.device_uuid or mine.device


def choose(kind: str, device: str, place: Place, wanted: int = 0) -> Threshold:
    """Returns the threshold of one link.

    Args:
        kind: of the link.
        device: "cpu" or "cuda", where the source's bytes lie.
        place: of the link.
        wanted: bytes that were asked for; 0: whatever is best.
    """
    if wanted:
        return Threshold(wanted, "set")
    found = _MEASURED.get(place) if kind == "prepared" else None
    return Threshold(DEFAULT[kind, device], "default") if found is None else Threshold(found.threshold, "measured")


def is_unknown(kind: str, place: Place, wanted: int = 0) -> bool:
    """Whether a link should be measured."""
    return kind == "prepared" and not wanted and place not in _MEASURED


def is_far_off(used: Threshold, kind: str, place: Place) -> bool:
    """Whether a plan that packs otherwise would be made now."""
    found = _MEASURED.get(place) if kind == "prepared" and used.how != "set" else None
    if found is None:
        return False
    smaller, larger = sorted((used.nbytes, found.threshold))
    return larger >= FAR_OFF * smaller


def measure(
    endpoint: ReaderEndpoint, source: wire.SourceManifest, place: Place, scratch: torch.Tensor
) -> Measured | None:
    """Measures a link that is connected, unless its place is known. Nothing but `scratch` is written to.

    Args:
        endpoint: the reader's end.
        source: whose regions are read.
        place: of the link.
        scratch: `SCRATCH_BYTES` of the reader's memory, registered with `endpoint`.

    Returns:
        What was measured, or None where the owner's regions are too small, the device has no memory left, or a piece takes
        longer than on any path that is sound.

    Raises:
        TransportError: the link does not work.
        DeadlineError: nothing arrived in a minute.
    """
    if place in _MEASURED:
        return _MEASURED[place]
    _MEASURED[place] = None
    region = max(source.regions, key=lambda one: one.nbytes, default=None)
    if region is None or region.nbytes < _PIECES * (_PIECE_BYTES + _GAP):
        return None
    began = time.perf_counter()
    span = _read(endpoint, region.id, scratch, 1, SCRATCH_BYTES)
    pieces = _read(endpoint, region.id, scratch, _PIECES, _PIECE_BYTES)
    try:
        packed_s, copied = _local(scratch.device)
    except torch.OutOfMemoryError as error:
        log.info("what packing costs on %s cannot be measured: %s", scratch.device, error)
        return None
    found = Measured(max(pieces - span, 0.0) / (_PIECES - 1), packed_s, copied)
    if found.direct_s > _SOUND_S:
        log.info("links to %s: %.0f us a piece say nothing about packing", source.node.hostname, found.direct_s * 1e6)
        return None
    _MEASURED[place] = found
    log.info(
        "links to %s (%s): %.1f us a piece read, %.2f us a piece packed, copies at %.0f GB/s; rows below %d KiB are packed from "
        "the next plan on; measured in %.0f ms",
        source.node.hostname, source.node.device, found.direct_s * 1e6, packed_s * 1e6, copied / 1e9,
        found.threshold >> 10, (time.perf_counter() - began) * 1e3,
    )  # fmt: skip
    return found


def reports(used: Mapping[int, Threshold], kinds: Mapping[int, str]) -> tuple[wire.PackReport, ...]:
    """Returns how the links of one reader pack, links that are alike as one."""
    count: dict[tuple[str, int, str], int] = {}
    for source, one in used.items():
        key = kinds[source], one.nbytes, one.how
        count[key] = count.get(key, 0) + 1
    return tuple(
        wire.PackReport(kind=kind, bytes=nbytes, how=how, links=links)
        for (kind, nbytes, how), links in sorted(count.items())
    )


def _copies(count: int, nbytes: int, region: int = 0) -> Copies:
    zero, one = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.int64)
    index = np.arange(count, dtype=np.int64)
    return Copies(zero + region, index * (nbytes + _GAP), zero, zero, index * nbytes, zero, one, one * nbytes)


def _read(endpoint: ReaderEndpoint, region: int, scratch: torch.Tensor, count: int, nbytes: int) -> float:
    """Seconds of the fastest of some reads of `count` pieces."""
    transfer = endpoint.prepare(0, _copies(count, nbytes, region), [scratch])
    deadline = time.monotonic() + _PATIENCE_S
    best = float("inf")
    for _ in range(_TIMES):
        began = time.perf_counter()
        transfer.post()
        while not transfer.poll() and time.monotonic() < deadline:
            pass  # a sleep would be longer than what is measured
        best = min(best, time.perf_counter() - began)
        transfer.wait(deadline)
    transfer.release()
    return best


def _local(device: torch.device) -> tuple[float, float]:
    """Seconds that a piece costs a batched copy, and bytes that a large copy moves in a second."""
    memory = torch.empty(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(memory)
    small = _fastest(CopyProgram(_copies(_PACKED, _PIECE_BYTES), {0: memory}, [target]), device)
    large = _fastest(CopyProgram(_copies(1, memory.numel()), {0: memory}, [target]), device)
    copied = memory.numel() / large
    return max(small - _PACKED * _PIECE_BYTES / copied, 0.0) / _PACKED, copied


def _fastest(program: CopyProgram, device: torch.device) -> float:
    best = float("inf")
    for _ in range(_TIMES):
        settle(device)
        began = time.perf_counter()
        program.run()
        settle(device)
        best = min(best, time.perf_counter() - began)
    return best
