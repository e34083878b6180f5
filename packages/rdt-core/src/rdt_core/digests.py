"""Digests of bytes where they lie: 64 bits for each block of at most 4 MiB, the same on every device.

NH of RFC 4418 twice: 32-bit words of a 4 KiB page, each with a key added, multiplied in pairs and summed mod 2**64; then
the digests of a block's pages in the same way, with another key. It notices what linear checksums miss: words that changed
places, two signs that flipped. Keys are fixed: it finds faults, not forgeries. Refuses blocks that leave their memory.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from .errors import TransportError

log = logging.getLogger(__name__)

Array = np.ndarray

#: bytes of one block at most
BLOCK_BYTES = 4 << 20
PAGE_BYTES = 4096
#: a word of the first half of a page is multiplied with the word at the same place of the second half
HALF_WORDS = PAGE_BYTES // 8
PAGES = BLOCK_BYTES // PAGE_BYTES
#: more blocks than this are no model's, but a broken table's
MOST_BLOCKS = 1 << 26
#: pages that are worked on at once on a CPU: they and what is made of them stay in the cache of a core
_PAGES_AT_ONCE = 32
#: pages that are gathered before they are worked on; also the most bytes that are copied at once
_STAGED_PAGES = 128
_LENGTH_FACTOR = 0x9E3779B97F4A7C15

_key = hashlib.shake_256(b"rdt digest 1: words").digest(PAGE_BYTES)
#: [2, HALF_WORDS] uint32: added to the words of a page
WORD_KEYS: Array = np.frombuffer(_key, "<u4").astype(np.uint32).reshape(2, HALF_WORDS)
_key = hashlib.shake_256(b"rdt digest 1: pages").digest(8 * PAGES)
#: [PAGES, 2] uint32: added to the low and the high half of a page's digest
PAGE_KEYS: Array = np.frombuffer(_key, "<u4").astype(np.uint32).reshape(PAGES, 2)


@dataclass(frozen=True, slots=True)
class Blocks:
    """2-D blocks of bytes as int64 columns of one length.

    Block i is `rows[i]` rows of `row_bytes[i]` bytes, row j from byte `offset[i] + j * pitch[i]` of memory `memory[i]` on;
    `BLOCK_BYTES` at most, all together. Its digest is that of the rows, one after the other.
    """

    memory: Array
    offset: Array
    pitch: Array
    rows: Array
    row_bytes: Array

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> Array:
        """[N] bytes of each block."""
        return self.rows * self.row_bytes

    def take(self, index: Array) -> Blocks:
        """The blocks at `index` (positions or a mask)."""
        return Blocks(*(getattr(self, name)[index] for name in Blocks.__slots__))

    @classmethod
    def concatenate(cls, parts: list[Blocks]) -> Blocks:
        """All blocks of `parts`, one after the other."""
        if not parts:
            return cls(*(np.zeros(0, np.int64) for _ in Blocks.__slots__))
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in Blocks.__slots__))


@dataclass(frozen=True, slots=True)
class Cuts:
    """2-D copies cut into blocks, in order: int64 columns, one entry for each block.

    Attributes:
        parent: the copy that it is a part of.
        row: its first row in the copy.
        byte: its first byte in that row.
        rows, row_bytes: its size.
    """

    parent: Array
    row: Array
    byte: Array
    rows: Array
    row_bytes: Array

    def __len__(self) -> int:
        return len(self.parent)

    def shift(self, pitch: Array) -> Array:
        """[N] bytes from the first byte of the copy to the block's, where the copies' rows lie `pitch` apart."""
        return self.row * pitch[self.parent] + self.byte


def cut(rows: Array, row_bytes: Array, limit: int = BLOCK_BYTES) -> Cuts:
    """Cuts copies into blocks of whole rows, or of parts of a row where a row is larger than `limit`.

    Args:
        rows, row_bytes: [N] of each copy, at least 1.
        limit: bytes of a block at most.

    Raises:
        TransportError: more blocks than any model has.
    """
    wide = row_bytes > limit
    height = np.where(wide, 1, np.minimum(limit // np.maximum(row_bytes, 1), rows))
    across = np.where(wide, -(-row_bytes // limit), 1)
    down = -(-rows // np.maximum(height, 1))
    # as floats: a product past 2**63 must not wrap round into what is allowed
    total = float((across.astype(np.float64) * down).sum())
    if total > MOST_BLOCKS:
        raise TransportError(f"{len(rows)} copies make up {total:.3g} blocks to be verified; {MOST_BLOCKS} are allowed")
    count = across * down
    parent = np.repeat(np.arange(len(rows)), count)
    local = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count)
    row = local // across[parent] * height[parent]
    byte = local % across[parent] * limit
    return Cuts(
        parent=parent,
        row=row,
        byte=byte,
        rows=np.minimum(height[parent], rows[parent] - row),
        row_bytes=np.where(wide[parent], np.minimum(limit, row_bytes[parent] - byte), row_bytes[parent]),
    )


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
        self._parts: list[tuple[Array, _CpuPart | _TorchPart | _KernelPart]] = []
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


def _part(
    device: torch.device, blocks: Blocks, memories: Mapping[int, torch.Tensor], where: str
) -> _CpuPart | _TorchPart | _KernelPart:
    if device.type == "cpu":
        return _CpuPart(blocks, memories)
    if device.type == "cuda" and _has_kernel():
        return _KernelPart(blocks, memories, device, where)
    return _TorchPart(blocks, memories)


@lru_cache(maxsize=1)
def _has_kernel() -> bool:
    from .transport import gathering

    reason = gathering.unavailable()
    if reason is not None:
        log.warning("digests of CUDA memory are made by torch, many times slower than could be: %s", reason)
    return reason is None


# ---------------------------------------------------------------------- CPU


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


def fold(sums: Array, pages: Array, nbytes: Array) -> Array:
    """Makes the digests of blocks out of those of their pages.

    Args:
        sums: [pages of all blocks] uint64.
        pages: [N] number of each block's pages.
        nbytes: [N] of each block.

    Returns:
        [N] uint64.
    """
    if not len(pages):
        return np.zeros(0, np.uint64)
    starts = np.cumsum(pages) - pages
    key = PAGE_KEYS[np.arange(len(sums)) - np.repeat(starts, pages)]
    low = sums.astype(np.uint32) + key[:, 0]
    high = (sums >> np.uint64(32)).astype(np.uint32) + key[:, 1]
    return np.add.reduceat(np.multiply(low, high, dtype=np.uint64), starts) + _lengths(nbytes)


def _lengths(nbytes: Array) -> Array:
    return nbytes.astype(np.uint64) * np.uint64(_LENGTH_FACTOR)


# ---------------------------------------------------------------------- any device


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
            return stacked.cpu().numpy().view(np.uint64) + _lengths(blocks.nbytes)

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


# ---------------------------------------------------------------------- CUDA


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the kernel: blocks of one width and shape, cut into tiles of a few pages.

    Attributes:
        width: bytes (16, 4, 2 or 1) that addresses, lengths and pitches are multiples of.
        flat: the blocks are single rows.
        table: int64 [blocks, 8]: address, pitch, rows, bytes of a row, number of the block's first tile, its position
            among all digests, bytes, 0.
        owners: int32 [tiles]: the block that each tile belongs to.
    """

    width: int
    flat: bool
    table: Array
    owners: Array


def launches(address: Array, blocks: Blocks, tile_pages: int) -> list[Launch]:
    """Groups blocks by how the kernel reads them.

    Args:
        address: [N] of each block's first byte.
        blocks: [N].
        tile_pages: pages that one instance of the kernel digests.
    """
    flat = (blocks.rows == 1) | (blocks.pitch == blocks.row_bytes)
    rows = np.where(flat, 1, blocks.rows)
    row_bytes = np.where(flat, blocks.nbytes, blocks.row_bytes)
    pitch = np.where(flat, 0, blocks.pitch)
    common = address | pitch | row_bytes
    width = np.minimum(common & -common, 16)
    width[width == 8] = 4
    result = []
    for one in (16, 4, 2, 1):
        for shape in (True, False):
            mine = np.flatnonzero((width == one) & (flat == shape))
            if not len(mine):
                continue
            tiles = -(-blocks.nbytes[mine] // (tile_pages * PAGE_BYTES))
            first = np.cumsum(tiles) - tiles
            columns = [
                address[mine],
                pitch[mine],
                rows[mine],
                row_bytes[mine],
                first,
                mine,
                blocks.nbytes[mine],
                0 * mine,
            ]
            table = np.ascontiguousarray(np.stack(columns, axis=1).astype(np.int64))
            result.append(Launch(one, shape, table, np.repeat(np.arange(len(mine), dtype=np.int32), tiles)))
    return result


class _KernelPart:
    """Digests of one CUDA device's memory by one Triton kernel over tables of addresses."""

    def __init__(self, blocks: Blocks, memories: Mapping[int, torch.Tensor], device: torch.device, where: str) -> None:
        from . import digestkernel

        self._kernel = digestkernel
        self._blocks = blocks
        self._keep = memories
        self._device = device
        numbers = sorted(memories)
        bases = np.array([memories[number].data_ptr() for number in numbers], np.int64)
        self._address = bases[np.searchsorted(numbers, blocks.memory)] + blocks.offset
        with torch.cuda.device(device):
            self._word_keys = torch.from_numpy(WORD_KEYS.view(np.int32).copy()).to(device)
            self._page_keys = torch.from_numpy(PAGE_KEYS.view(np.int32).copy()).to(device)
            self._whole = self._tables(self._address, blocks)
            for table, _, width, flat in self._whole:
                self._prime(table, width, flat, where)

    def _tables(self, address: Array, blocks: Blocks) -> list[tuple[torch.Tensor, torch.Tensor, int, bool]]:
        return [
            (
                torch.from_numpy(one.table).to(self._device),
                torch.from_numpy(one.owners).to(self._device),
                one.width,
                one.flat,
            )
            for one in launches(address, blocks, self._kernel.TILE_PAGES)
        ]

    def _prime(self, table: torch.Tensor, width: int, flat: bool, where: str) -> None:
        """Compiles and loads the kernel now, by a launch for one block without bytes: no sync pays for it."""
        empty = torch.zeros((1, 8), dtype=torch.int64, device=self._device)
        empty[0, 3] = width
        owners = torch.zeros(1, dtype=torch.int32, device=self._device)
        scratch = torch.zeros(1, dtype=torch.int64, device=self._device)
        try:
            self._kernel.launch(empty, owners, self._word_keys, self._page_keys, scratch, width, flat)
            torch.cuda.current_stream(self._device).synchronize()
        except Exception as error:  # Triton raises what its compiler, the C compiler or the driver raise
            raise TransportError(
                f"{where}: the digest kernel for {width}-byte words does not compile or start: {error}; Triton needs a C "
                "compiler (gcc) and a writable TRITON_CACHE_DIR"
            ) from error

    def queue(self, chosen: Array | None) -> Callable[[], Array]:
        blocks = self._blocks if chosen is None else self._blocks.take(chosen)
        with torch.cuda.device(self._device):
            tables = self._whole if chosen is None else self._tables(self._address[chosen], blocks)
            result = torch.zeros(len(blocks), dtype=torch.int64, device=self._device)
            stream = torch.cuda.current_stream()
            for table, owners, width, flat in tables:
                for tensor in (table, owners, self._word_keys, self._page_keys):
                    # torch may hand the memory out again only after the work that is queued here
                    tensor.record_stream(stream)
                self._kernel.launch(table, owners, self._word_keys, self._page_keys, result, width, flat)
            done = torch.cuda.Event()
            done.record(stream)

        def collect() -> Array:
            done.synchronize()
            return result.cpu().numpy().view(np.uint64) + _lengths(blocks.nbytes)

        return collect
