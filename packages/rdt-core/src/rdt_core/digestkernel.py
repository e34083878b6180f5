"""The Triton kernel behind `digests`: every program instance digests a tile, a few pages of one block, given by address.

Import it late: it needs Triton, which comes with torch's CUDA builds alone. It trusts its tables; `digestcuda` makes them
from blocks that `digests` has checked. Digests of a block's tiles are added up, in any order, to the same value.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

#: pages of a tile: enough loads in flight for the memory of the largest devices
TILE_PAGES = 4
WARPS = 4


@triton.jit
def _load_words(
    address: tl.tensor,
    pitch: tl.tensor,
    row_bytes: tl.tensor,
    nbytes: tl.tensor,
    word: tl.tensor,
    WIDTH: tl.constexpr,
    FLAT: tl.constexpr,
) -> tl.tensor:
    """The 32-bit words at positions `word` of a block's bytes; zero past its end."""
    if WIDTH >= 4:
        NEIGHBOURS: tl.constexpr = WIDTH // 4
        # the compiler joins words into 16-byte accesses only where it is told that addresses allow it
        inside = word < tl.multiple_of(nbytes // 4, NEIGHBOURS)
        if FLAT:
            read = address.to(tl.pointer_type(tl.uint32)) + word
            read = tl.max_contiguous(tl.multiple_of(read, (4, WIDTH)), (1, 512))
            return tl.load(read, mask=inside, other=0)
        row_words = tl.multiple_of(row_bytes // 4, NEIGHBOURS)
        row = word // row_words
        column = word - row * row_words
        read = (address + row.to(tl.int64) * pitch).to(tl.pointer_type(tl.uint32)) + column
        read = tl.max_contiguous(tl.multiple_of(read, (4, WIDTH)), (1, NEIGHBOURS))
        return tl.load(read, mask=inside, other=0)
    result = tl.zeros(word.shape, tl.uint32)
    for part in tl.static_range(0, 4, WIDTH):
        byte = word * 4 + part
        row = byte // row_bytes
        column = byte - row * row_bytes
        place = address + row.to(tl.int64) * pitch + column
        if WIDTH == 2:
            value = tl.load(place.to(tl.pointer_type(tl.uint16)), mask=byte < nbytes, other=0)
        else:
            value = tl.load(place.to(tl.pointer_type(tl.uint8)), mask=byte < nbytes, other=0)
        result = result | (value.to(tl.uint32) << (8 * part))
    return result


@triton.jit
def digest_tiles(
    table: tl.tensor,
    owners: tl.tensor,
    word_keys: tl.tensor,
    page_keys: tl.tensor,
    result: tl.tensor,
    WIDTH: tl.constexpr,
    FLAT: tl.constexpr,
    COUNT: tl.constexpr,
) -> None:
    """Adds the digest of one tile to that of its block; see `digestcuda.Launch` for the tables."""
    program = tl.program_id(0)
    block = table + 8 * tl.load(owners + program).to(tl.int64)
    address, pitch = tl.load(block), tl.load(block + 1)
    row_bytes = tl.load(block + 3).to(tl.int32)
    nbytes = tl.load(block + 6).to(tl.int32)
    page = (program - tl.load(block + 4).to(tl.int32)) * COUNT + tl.arange(0, COUNT)
    lane = tl.arange(0, 512)
    word = page[:, None] * 1024 + lane[None, :]
    left = _load_words(address, pitch, row_bytes, nbytes, word, WIDTH, FLAT)
    right = _load_words(address, pitch, row_bytes, nbytes, word + 512, WIDTH, FLAT)
    left += tl.load(word_keys + lane).to(tl.uint32, bitcast=True)[None, :]
    right += tl.load(word_keys + 512 + lane).to(tl.uint32, bitcast=True)[None, :]
    sums = tl.sum(left.to(tl.uint64) * right.to(tl.uint64), axis=1)
    inside = page * 4096 < nbytes
    low = tl.load(page_keys + 2 * page, mask=inside, other=0).to(tl.uint32, bitcast=True) + sums.to(tl.uint32)
    high = tl.load(page_keys + 2 * page + 1, mask=inside, other=0).to(tl.uint32, bitcast=True)
    high += (sums >> 32).to(tl.uint32)
    value = tl.where(inside, low.to(tl.uint64) * high.to(tl.uint64), 0)
    total = tl.sum(value, axis=0).to(tl.int64, bitcast=True)
    tl.atomic_add(result + tl.load(block + 5), total, sem="relaxed")


def constants(width: int, flat: bool) -> dict[str, Any]:
    """The compile-time arguments of `digest_tiles` for blocks of one width (bytes: 16, 4, 2 or 1)."""
    return {"WIDTH": width, "FLAT": flat, "COUNT": TILE_PAGES}


def launch(
    table: torch.Tensor,
    owners: torch.Tensor,
    word_keys: torch.Tensor,
    page_keys: torch.Tensor,
    result: torch.Tensor,
    width: int,
    flat: bool,
) -> None:
    """Queues the digests on the current stream of the current device, whose memory all arguments are.

    Args:
        table: int64 [blocks, 8]; see `digestcuda.Launch`.
        owners: int32 [tiles].
        word_keys: int32 [2, 512].
        page_keys: int32 [1024, 2].
        result: int64, zeros: the digests are added to it, lengths left out.
        width: bytes that every address, length and pitch is a multiple of.
        flat: whether the blocks are single rows.
    """
    digest_tiles[(len(owners),)](table, owners, word_keys, page_keys, result, **constants(width, flat), num_warps=WARPS)
