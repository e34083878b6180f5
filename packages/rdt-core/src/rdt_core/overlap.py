"""Do 2-D blocks of bytes write the same byte? Exact, and cheap where blocks of many rows interleave.

Blocks are cut apart by sorting, first along their extents, then, where pitches are equal, along rows and columns; only
what cannot be cut apart so is compared in pairs. Nothing is refused here: the caller names what clashes.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def clusters(key: Array, low: Array, high: Array) -> Array:
    """Numbers the sets of intervals that are connected by overlap: [N] labels, equal within a set.

    Args:
        key: [N] intervals of different keys never meet.
        low: [N] first position.
        high: [N] first position past the interval, above `low`.
    """
    if not len(low):
        return np.zeros(0, np.int64)
    order = np.lexsort((low, key))
    sorted_key, sorted_low, sorted_high = key[order], low[order], high[order]
    # on one line for all keys: each key gets a stretch of its own, so that a running maximum never crosses
    fresh = np.concatenate([[True], sorted_key[1:] != sorted_key[:-1]])
    group = np.cumsum(fresh) - 1
    shift = int(sorted_high.max()) - int(sorted_low.min()) + 1
    reach = np.maximum.accumulate(sorted_high + group * shift)
    begins = np.concatenate([[True], sorted_low[1:] + group[1:] * shift >= reach[:-1]])
    labels = np.empty(len(low), np.int64)
    labels[order] = np.cumsum(begins) - 1
    return labels


def _lonely(labels: Array) -> Array:
    return np.bincount(labels)[labels] == 1 if len(labels) else np.zeros(0, bool)


def find_overlap(key: Array, offset: Array, pitch: Array, rows: Array, row_bytes: Array) -> tuple[int, int] | None:
    """Two blocks that write the same byte, or None. A block whose own rows overlap is returned as a pair with itself.

    Exact for any mixture of pitches: blocks whose extents overlap are compared as rectangles where their pitches are
    equal, row by row where they are not.

    Args:
        key: [N] destination.
        offset, pitch, rows, row_bytes: [N] of each block, in bytes.
    """
    own = np.flatnonzero((rows > 1) & (pitch < row_bytes))
    if len(own):
        return int(own[0]), int(own[0])
    end = offset + (rows - 1) * pitch + row_bytes
    labels = clusters(key, offset, end)
    left = np.flatnonzero(~_lonely(labels))
    if not len(left):
        return None
    labels = np.unique(labels[left], return_inverse=True)[1]
    number = int(labels.max()) + 1
    several = rows[left] > 1
    high, low = np.zeros(number, np.int64), np.full(number, np.iinfo(np.int64).max, np.int64)
    np.maximum.at(high, labels, np.where(several, pitch[left], 0))
    np.minimum.at(low, labels, np.where(several, pitch[left], np.iinfo(np.int64).max))
    widest = np.zeros(number, np.int64)
    np.maximum.at(widest, labels, row_bytes[left])
    regular = (high == low) & (widest <= high)
    in_regular = regular[labels]
    found = _overlap_of_rectangles(
        left[in_regular], labels[in_regular], high[labels[in_regular]], offset, rows, row_bytes
    )  # fmt: skip
    return found or _overlap_of_rows(left[~in_regular], labels[~in_regular], offset, pitch, rows, row_bytes)


def _overlap_of_rectangles(
    index: Array, labels: Array, pitch: Array, offset: Array, rows: Array, row_bytes: Array
) -> tuple[int, int] | None:
    """Blocks of one pitch within a label, seen as rectangles of rows and columns that wrap at the pitch."""
    if not len(index):
        return None
    base = np.full(int(labels.max()) + 1, np.iinfo(np.int64).max, np.int64)
    np.minimum.at(base, labels, offset[index])
    relative = offset[index] - base[labels]
    top, left = relative // pitch, relative % pitch
    right = left + row_bytes[index]
    wraps = right > pitch
    top = np.concatenate([top, top[wraps] + 1])
    left = np.concatenate([left, np.zeros(int(wraps.sum()), np.int64)])
    right = np.concatenate([np.minimum(right, pitch), right[wraps] - pitch[wraps]])
    index, labels = np.concatenate([index, index[wraps]]), np.concatenate([labels, labels[wraps]])
    bottom = top + rows[index]
    # cut apart along columns and rows in turn, until only rectangles that cannot be separated so are left
    stuck = 0
    while len(index) and stuck < 2:
        for low, high in ((left, right), (top, bottom)):
            before = len(np.unique(labels))
            labels = clusters(labels, low, high)
            stuck = stuck + 1 if len(np.unique(labels)) == before else 0
        keep = ~_lonely(labels)
        index, labels, left, right, top, bottom = (array[keep] for array in (index, labels, left, right, top, bottom))
    order = np.argsort(labels, kind="stable")
    index, labels, left, right, top, bottom = (array[order] for array in (index, labels, left, right, top, bottom))
    for members in np.split(np.arange(len(index)), np.flatnonzero(np.diff(labels)) + 1) if len(index) else []:
        for position, one in enumerate(members[:-1]):
            rest = members[position + 1 :]
            meets = (
                (left[rest] < right[one])
                & (left[one] < right[rest])
                & (top[rest] < bottom[one])
                & (top[one] < bottom[rest])
            )
            if meets.any():
                return int(index[one]), int(index[rest[meets.argmax()]])
    return None


def _overlap_of_rows(
    index: Array, labels: Array, offset: Array, pitch: Array, rows: Array, row_bytes: Array
) -> tuple[int, int] | None:
    if not len(index):
        return None
    repeats = rows[index]
    parent = np.repeat(np.arange(len(index)), repeats)
    local = np.arange(len(parent)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    low = offset[index][parent] + local * pitch[index][parent]
    order = np.lexsort((low, labels[parent]))
    high = low + row_bytes[index][parent]
    meets = (labels[parent][order][1:] == labels[parent][order][:-1]) & (low[order][1:] < high[order][:-1])
    if not meets.any():
        return None
    position = int(meets.argmax())
    return int(index[parent[order[position]]]), int(index[parent[order[position + 1]]])
