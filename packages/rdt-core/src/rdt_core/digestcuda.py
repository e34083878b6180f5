"""Digests of one CUDA device's memory: tables of addresses for the Triton kernel in `digestkernel`, made once.

Blocks are grouped by how wide they can be read and cut into tiles, a few pages for each instance of the kernel. Refuses to go
on where the kernel does not compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from .blocks import PAGE_BYTES, PAGE_KEYS, WORD_KEYS, Array, Blocks, lengths
from .errors import TransportError


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


class KernelPart:
    """Digests of blocks of one CUDA device.

    Args:
        blocks: checked.
        memories: by the number that `Blocks.memory` says.
        device: where they lie.
        where: names the blocks in errors.

    Raises:
        TransportError: the kernel does not compile or start.
    """

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
        """See `Digester.queue`."""
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
            return result.cpu().numpy().view(np.uint64) + lengths(blocks.nbytes)

        return collect
