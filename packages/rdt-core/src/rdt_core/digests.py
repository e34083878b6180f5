"""Digests of bytes where they lie: 64 bits for each block of at most 4 MiB, the same on every device.

On a CPU by numpy in pieces that stay in the cache, about 5 GB/s a core; on CUDA by one kernel (`digestcuda`), or by torch
where Triton is missing. What a digest is, is in `blocks`. Refuses blocks that leave their memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch

from .blocks import BLOCK_BYTES, HALF_WORDS, PAGE_BYTES, PAGE_KEYS, PAGES, WORD_KEYS, Array, Blocks, fold, lengths
from .errors import TransportError

log = logging.getLogger(__name__)

#: pages that are worked on at once on a CPU: they and what is made of them stay in the cache of a core
_PAGES_AT_ONCE = 32
#: pages that are gathered before they are worked on; also the most bytes that are copied at once
_STAGED_PAGES = 128


class Part(Protocol):
    """Digests of the blocks that lie on one device."""

    def queue(self, chosen: Array | None) -> Callable[[], Array]:
        """See `Digester.queue`."""
        ...


class Digester:
    """Digests of blocks of given memory, as often as wanted.

    Args:
        blocks: what to digest.
        memories: 1-D uint8 tensors by the number that `Blocks.memory` says; on CPUs and CUDA devices. Kept alive.
        where: names the blocks in errors.

    Raises:
        TransportError: a block leaves its memory or is larger than allowed, or the kernel does not compile.
    """

    def __init__(self, blocks: Blocks, memories: Mapping[int, torch.Tensor], where: str = "digests") -> None:
        self.blocks = blocks
        self._parts: list[tuple[Array, Part]] = []
        used = np.unique(blocks.memory)
        missing = [number for number in used.tolist() if number not in memories]
        if missing:
            raise TransportError(f"{where}: blocks lie in memory {missing}; known: {sorted(memories)[:8]}")
        _check(blocks, {number: memories[number].numel() for number in used.tolist()}, where)
        devices: dict[torch.device, list[int]] = {}
        for number in used.tolist():
            devices.setdefault(memories[number].device, []).append(number)
        for device, numbers in devices.items():
            index = np.flatnonzero(np.isin(blocks.memory, numbers))
            mine = {number: memories[number] for number in numbers}
            self._parts.append((index, _part(device, blocks.take(index), mine, where)))

    def queue(self, chosen: Array | None = None) -> Callable[[], Array]:
        """Digests now on a CPU; on CUDA the work is queued on the device's current stream.

        Args:
            chosen: positions of the blocks that are wanted, ascending; None: all.

        Returns:
            What waits for the digests: uint64, one for each block that was wanted.
        """
        running: list[tuple[Array | slice, Callable[[], Array]]] = []
        for index, part in self._parts:
            if chosen is None:
                running.append((index, part.queue(None)))
                continue
            place = np.flatnonzero(np.isin(chosen, index))
            if len(place):
                running.append((place, part.queue(np.searchsorted(index, chosen[place]))))
        count = len(self.blocks) if chosen is None else len(chosen)

        def collect() -> Array:
            result = np.zeros(count, np.uint64)
            for place, values in running:
                result[place] = values()
            return result

        return collect


def _check(blocks: Blocks, sizes: Mapping[int, int], where: str) -> None:
    if not len(blocks):
        return
    known = np.array(sorted(sizes), np.int64)
    size = np.array([sizes[number] for number in known.tolist()], np.int64)[np.searchsorted(known, blocks.memory)]
    offset, pitch, rows, row_bytes = (getattr(blocks, name) for name in Blocks.__slots__[1:])
    # a product beyond 2**63 must not wrap round into the allowed range
    last = offset.astype(np.float64) + (rows - 1).astype(np.float64) * pitch + row_bytes
    bad = (offset < 0) | (pitch < 0) | (rows < 1) | (row_bytes < 1) | (last > size)
    bad |= rows.astype(np.float64) * row_bytes > BLOCK_BYTES
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise TransportError(
            f"{where}: block {i} of {len(blocks)} is {int(rows[i])} rows of {int(row_bytes[i])} bytes at byte "
            f"{int(offset[i])}, pitch {int(pitch[i])}, of memory {int(blocks.memory[i])} of {int(size[i])} bytes; blocks "
            f"lie inside their memory and have 1 to {BLOCK_BYTES} bytes"
        )


def _part(device: torch.device, blocks: Blocks, memories: Mapping[int, torch.Tensor], where: str) -> Part:
    if device.type == "cpu":
        return _CpuPart(blocks, memories)
    if device.type == "cuda" and _has_kernel():
        from .digestcuda import KernelPart

        return KernelPart(blocks, memories, device, where)
    return _TorchPart(blocks, memories)


@lru_cache(maxsize=1)
def _has_kernel() -> bool:
    from .transport import gathering

    reason = gathering.unavailable()
    if reason is not None:
        log.warning("digests of CUDA memory are made by torch, many times slower than could be: %s", reason)
    return reason is None


class _CpuPart:
    """Digests of CPU memory by numpy, about 5 GB/s a core."""

    def __init__(self, blocks: Blocks, memories: Mapping[int, torch.Tensor]) -> None:
        self._blocks = blocks
        self._keep = memories
        self._arrays = {number: memory.detach().numpy() for number, memory in memories.items()}

    def queue(self, chosen: Array | None) -> Callable[[], Array]:
        blocks = self._blocks if chosen is None else self._blocks.take(chosen)
        pages = -(-blocks.nbytes // PAGE_BYTES)
        result = np.zeros(len(blocks), np.uint64)
        line = _PageLine()
        columns = [getattr(blocks, name).tolist() for name in Blocks.__slots__]
        start = 0
        for number, (memory, offset, pitch, rows, row_bytes) in enumerate(zip(*columns, strict=True)):
            line.feed(self._arrays[memory], offset, pitch, rows, row_bytes)
            if line.count >= PAGES or number + 1 == len(blocks):
                stop = number + 1
                result[start:stop] = fold(line.take(), pages[start:stop], blocks.nbytes[start:stop])
                start = stop
        return lambda: result


class _PageLine:
    """Digests of pages, in the order in which bytes are fed; small pieces are gathered and worked on together."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[Array] = []
        self._staged = np.zeros(_STAGED_PAGES * PAGE_BYTES, np.uint8)
        self._filled = 0
        self._halves = [np.empty((_PAGES_AT_ONCE, HALF_WORDS), np.uint32) for _ in range(2)]
        self._products = np.empty((_PAGES_AT_ONCE, HALF_WORDS), np.uint64)

    def feed(self, memory: Array, offset: int, pitch: int, rows: int, row_bytes: int) -> None:
        """Adds one block; its last page ends with zeros."""
        nbytes = rows * row_bytes
        self.count += -(-nbytes // PAGE_BYTES)
        if rows == 1 or pitch == row_bytes:
            self._feed_line(memory[offset : offset + nbytes])
        else:
            done = 0
            while done < rows:
                room = len(self._staged) - self._filled
                height = min(rows - done, room // row_bytes)
                first = offset + done * pitch
                if height:
                    self._feed_rows(memory, first, pitch, height, row_bytes)
                else:
                    height = 1
                    self._feed_line(memory[first : first + row_bytes])
                done += height
        rest = -self._filled % PAGE_BYTES
        if rest:
            self._staged[self._filled : self._filled + rest] = 0
            self._filled += rest
            self._flush_full()

    def take(self) -> Array:
        """Returns the digests of all pages since the last call."""
        self._flush()
        sums = np.concatenate(self._sums) if self._sums else np.zeros(0, np.uint64)
        self._sums, self.count = [], 0
        return sums

    def _feed_line(self, line: Array) -> None:
        whole = len(line) // PAGE_BYTES * PAGE_BYTES
        at = 0
        if whole >= PAGE_BYTES * _PAGES_AT_ONCE and self._filled % PAGE_BYTES == 0:
            self._flush()
            self._work(line[:whole])
            at = whole
        while at < len(line):
            size = min(len(line) - at, len(self._staged) - self._filled)
            self._staged[self._filled : self._filled + size] = line[at : at + size]
            self._filled += size
            at += size
            self._flush_full()

    def _feed_rows(self, memory: Array, offset: int, pitch: int, rows: int, row_bytes: int) -> None:
        into = self._staged[self._filled : self._filled + rows * row_bytes]
        if row_bytes in (2, 4, 8):  # as numbers: a copy of many short rows is slow
            into.view(f"u{row_bytes}")[...] = np.ndarray((rows,), f"u{row_bytes}", memory, offset, (pitch,))
        else:
            into.reshape(rows, row_bytes)[...] = np.ndarray((rows, row_bytes), np.uint8, memory, offset, (pitch, 1))
        self._filled += rows * row_bytes
        self._flush_full()

    def _flush_full(self) -> None:
        if self._filled == len(self._staged):
            self._flush()

    def _flush(self) -> None:
        """Works on the whole pages that are gathered; what is left of one goes to the front."""
        whole = self._filled // PAGE_BYTES * PAGE_BYTES
        if whole:
            self._work(self._staged[:whole])
            rest = self._filled - whole
            self._staged[:rest] = self._staged[whole : self._filled]
            self._filled = rest

    def _work(self, line: Array) -> None:
        words = line.view(np.uint32).reshape(-1, 2, HALF_WORDS)
        sums = np.empty(len(words), np.uint64)
        for start in range(0, len(words), _PAGES_AT_ONCE):
            part = words[start : start + _PAGES_AT_ONCE]
            left, right, products = (
                self._halves[0][: len(part)],
                self._halves[1][: len(part)],
                self._products[: len(part)],
            )
            np.add(part[:, 0], WORD_KEYS[0], out=left)
            np.add(part[:, 1], WORD_KEYS[1], out=right)
            np.multiply(left, right, out=products, dtype=np.uint64)
            np.add.reduce(products, axis=1, out=sums[start : start + len(part)])
        self._sums.append(sums)


class _TorchPart:
    """The same by torch's operations, block after block: for devices that have no kernel."""

    def __init__(self, blocks: Blocks, memories: Mapping[int, torch.Tensor]) -> None:
        self._blocks = blocks
        self._memories = memories
        device = next(iter(memories.values())).device
        self._word_keys = torch.from_numpy(WORD_KEYS.view(np.int32)).to(device)
        self._page_keys = torch.from_numpy(PAGE_KEYS.astype(np.int64)).to(device)

    def queue(self, chosen: Array | None) -> Callable[[], Array]:
        blocks = self._blocks if chosen is None else self._blocks.take(chosen)
        columns = [getattr(blocks, name).tolist() for name in Blocks.__slots__]
        values = [self._digest(*row) for row in zip(*columns, strict=True)]
        stacked = torch.stack(values)

        def collect() -> Array:
            return stacked.cpu().numpy().view(np.uint64) + lengths(blocks.nbytes)

        return collect

    def _digest(self, number: int, offset: int, pitch: int, rows: int, row_bytes: int) -> torch.Tensor:
        memory = self._memories[number]
        nbytes = rows * row_bytes
        pages = -(-nbytes // PAGE_BYTES)
        padded = torch.zeros(pages * PAGE_BYTES, dtype=torch.uint8, device=memory.device)
        view = memory.as_strided((rows, row_bytes), (pitch, 1), int(memory.storage_offset()) + offset)
        padded[:nbytes].view(rows, row_bytes).copy_(view)
        words = padded.view(torch.int32).view(pages, 2, HALF_WORDS) + self._word_keys
        halves = words.to(torch.int64).bitwise_and_(0xFFFFFFFF)
        # int64 wraps round as uint64 does
        sums = (halves[:, 0] * halves[:, 1]).sum(dim=1)
        split = torch.stack([sums, sums >> 32], dim=1).bitwise_and_(0xFFFFFFFF)
        keyed = (split + self._page_keys[:pages]).bitwise_and_(0xFFFFFFFF)
        return (keyed[:, 0] * keyed[:, 1]).sum()
