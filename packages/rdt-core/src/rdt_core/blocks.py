"""What a digest is: blocks of bytes, the keys, and how the digests of a block's pages become one. Pure numpy.

NH of RFC 4418 twice: 32-bit words of a 4 KiB page, each with a key added, multiplied in pairs and summed mod 2**64; then
the digests of a block's pages in the same way, with another key. It notices what linear checksums miss: words that changed
places, two signs that flipped. Keys are fixed: it finds faults, not forgeries. Both ends of a link must agree on all of this.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from .errors import TransportError

Array = np.ndarray

#: bytes of one block at most
BLOCK_BYTES = 4 << 20
PAGE_BYTES = 4096
#: a word of the first half of a page is multiplied with the word at the same place of the second half
HALF_WORDS = PAGE_BYTES // 8
PAGES = BLOCK_BYTES // PAGE_BYTES
#: more blocks than this are no model's, but a broken table's
MOST_BLOCKS = 1 << 26
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
        TransportError: a copy without bytes, or more blocks than any model has.
    """
    if (rows < 1).any() or (row_bytes < 1).any():
        at = int(np.flatnonzero((rows < 1) | (row_bytes < 1))[0])
        raise TransportError(f"copy {at} to be verified has {int(rows[at])} rows of {int(row_bytes[at])} bytes")
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
    return np.add.reduceat(np.multiply(low, high, dtype=np.uint64), starts) + lengths(nbytes)


def lengths(nbytes: Array) -> Array:
    """[N] uint64: what the length of each block adds to its digest."""
    return nbytes.astype(np.uint64) * np.uint64(_LENGTH_FACTOR)
