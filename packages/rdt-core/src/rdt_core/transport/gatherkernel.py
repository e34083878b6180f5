"""The Triton kernel behind `gathering`: every program instance copies blocks of spans, given by addresses.

Import it late: it needs Triton, which comes with torch's CUDA builds alone. It trusts its tables; `gathering` makes
them and refuses what a kernel could not reach.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

#: words that one instance moves at a time: 8 for each of its threads, so that enough loads are in flight for a link
#: with a microsecond of latency
WORDS = 2048
WARPS = 8
_TYPES = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def copy_blocks(
    table: tl.tensor,
    owners: tl.tensor,
    blocks: tl.tensor,
    block: tl.tensor,
    WORD: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    FLAT: tl.constexpr,
    COUNT: tl.constexpr,
) -> None:
    """Copies every block whose number is this instance's, modulo the instances; see `gathering.Launch` for the tables."""
    lane = tl.arange(0, COUNT)
    # the compiler joins words into 16-byte accesses only where it is told that addresses allow it
    NEIGHBOURS: tl.constexpr = WIDTH // SIZE
    for program in range(tl.program_id(0), blocks, tl.num_programs(0)):
        span = table + 8 * tl.load(owners + program).to(tl.int64)
        source, destination = tl.load(span), tl.load(span + 1)
        rows, row_bytes = tl.load(span + 4), tl.load(span + 5)
        part = tl.cast(program, tl.int64) - tl.load(span + 6)
        if FLAT:
            start = part * block
            words = tl.multiple_of((tl.minimum(row_bytes - start, block) // SIZE).to(tl.int32), NEIGHBOURS)
            read = (source + start).to(tl.pointer_type(WORD)) + lane
            write = (destination + start).to(tl.pointer_type(WORD)) + lane
            whole = words // COUNT * COUNT
            for at in range(0, whole, COUNT):
                into = tl.max_contiguous(tl.multiple_of(write + at, WIDTH), COUNT)
                tl.store(into, tl.load(tl.max_contiguous(tl.multiple_of(read + at, WIDTH), COUNT)))
            left = whole + lane < words
            into = tl.max_contiguous(tl.multiple_of(write + whole, WIDTH), COUNT)
            tl.store(into, tl.load(tl.max_contiguous(tl.multiple_of(read + whole, WIDTH), COUNT), mask=left), mask=left)
        else:
            source_pitch, destination_pitch = tl.load(span + 2), tl.load(span + 3)
            height = tl.load(span + 7)
            first = part * height
            row_words = tl.multiple_of((row_bytes // SIZE).to(tl.int32), NEIGHBOURS)
            words = tl.multiple_of(tl.minimum(rows - first, height).to(tl.int32) * row_words, NEIGHBOURS)
            for at in range(0, words, COUNT):
                word = at + lane
                row = word // row_words
                column = (word - row * row_words).to(tl.int64) * SIZE
                line = first + row
                read = (source + line * source_pitch + column).to(tl.pointer_type(WORD))
                write = (destination + line * destination_pitch + column).to(tl.pointer_type(WORD))
                inside = word < words
                into = tl.max_contiguous(tl.multiple_of(write, WIDTH), NEIGHBOURS)
                value = tl.load(tl.max_contiguous(tl.multiple_of(read, WIDTH), NEIGHBOURS), mask=inside)
                tl.store(into, value, mask=inside)


def constants(width: int, flat: bool, words: int = WORDS) -> dict[str, Any]:
    """The compile-time arguments of `copy_blocks` for spans of one width (bytes: 16, 8, 4, 2 or 1)."""
    return {"WORD": _TYPES[width], "SIZE": min(width, 8), "WIDTH": width, "FLAT": flat, "COUNT": words}


def launch(
    table: torch.Tensor,
    owners: torch.Tensor,
    block: int,
    width: int,
    flat: bool,
    *,
    words: int = WORDS,
    warps: int = WARPS,
    instances: int = 0,
) -> None:
    """Queues the copies on the current stream of the current device.

    Args:
        table: int64 [spans, 8], in memory of the device that copies.
        owners: int32 [blocks], likewise.
        block: bytes of a block.
        width: bytes that every address, length and pitch is a multiple of.
        flat: whether the spans are single rows.
        words: moved at a time by one instance, a power of two.
        warps: of one instance.
        instances: that run at most; 0: one for each block.
    """
    blocks = len(owners)
    grid = min(blocks, instances) if instances else blocks
    copy_blocks[(grid,)](table, owners, blocks, block, **constants(width, flat, words), num_warps=warps)
