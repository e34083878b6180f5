"""Which blocks both ends of a link digest, in which order, which of them a sample takes, and what they hold by name.

An owner knows where the bytes of a link lie before they move, packed pieces at their original place; a reader knows where
they landed. Both cut the same copies into the same blocks, so that a digest stands for the same bytes on both ends. It
refuses a program that does not belong to its requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import wire
from .blocks import MOST_BLOCKS, Blocks, cut
from .errors import RdtError, TransportError
from .linking import PACK_REGION, Program, take
from .transport import tables
from .transport.base import Copies
from .wire import VERIFY, Verify

Array = np.ndarray

#: `sample` digests about one byte of so many
SAMPLED = 32


def check_mode(verify: str) -> Verify:
    """Returns `verify` if it is a mode; raises RdtError otherwise."""
    for mode in VERIFY:
        if verify == mode:
            return mode
    raise RdtError(f"verify must be one of {', '.join(VERIFY)}; found {verify!r}")


@dataclass(frozen=True, slots=True)
class LinkBlocks:
    """What one link moves, cut into blocks, in the order of its request: a transfer's direct reads, then its packed pieces.

    Attributes:
        transfer: [N] position of the block's transfer in the request.
        round: [N] round of a sync in which its bytes are readable.
        blocks: where they lie at the owner: `memory` is the region, packed pieces are where they are packed from.
        parent: [N] the copy that the block is a part of, counted over all transfers.
        row: [N] its first row in the copy.
        byte: [N] its first byte in that row.
    """

    transfer: Array
    round: Array
    blocks: Blocks
    parent: Array
    row: Array
    byte: Array

    def __len__(self) -> int:
        return len(self.parent)


def link_blocks(request: wire.ReadRequest, manifest: wire.SourceManifest) -> LinkBlocks:
    """Cuts what a link moves: at the starts of shards, so that few blocks hold more than one tensor, and at the limit.

    Args:
        request: of the reader.
        manifest: of the owner, as it was when the reader planned.

    Raises:
        TransportError: a transfer does not decode, or makes up more blocks than any model has.
    """
    parts, transfer, rounds = [], [], []
    for number, one in enumerate(request.transfers):
        direct = tables.reads(one)
        copies = _join([take(direct, np.flatnonzero(direct.source_region != PACK_REGION)), tables.packs(one)])
        parts.append(copies)
        transfer.append(np.full(len(copies), number, np.int64))
        rounds.append(np.full(len(copies), one.round, np.int64))
    copies = _join(parts)
    of_transfer, of_round = _concatenate(transfer), _concatenate(rounds)
    if len(copies) and min(int(column.min()) for column in (copies.source_offset, copies.source_pitch)) < 0:
        raise TransportError(
            f"{request.reader} asks source rank {request.source} for bytes before the start of a region"
        )
    segment = _at_shards(copies, of_round, manifest)
    cuts = cut(segment.rows, segment.row_bytes)
    parent = segment.parent[cuts.parent]
    row, byte = segment.row[cuts.parent] + cuts.row, segment.byte[cuts.parent] + cuts.byte
    blocks = Blocks(
        memory=copies.source_region[parent],
        offset=copies.source_offset[parent] + row * copies.source_pitch[parent] + byte,
        # rows that stand alone have no pitch: the same bytes are one block, whichever copy they come from
        pitch=np.where(cuts.rows == 1, 0, copies.source_pitch[parent]),
        rows=cuts.rows,
        row_bytes=cuts.row_bytes,
    )
    return LinkBlocks(of_transfer[parent], of_round[parent], blocks, parent, row, byte)


@dataclass(frozen=True, slots=True)
class _Segments:
    parent: Array
    row: Array
    byte: Array
    rows: Array
    row_bytes: Array


def _at_shards(copies: Copies, rounds: Array, manifest: wire.SourceManifest) -> _Segments:
    """Cuts copies where a shard starts inside them: single rows at the byte, others before the first row past it."""
    every = np.arange(len(copies))
    zero = np.zeros(len(copies), np.int64)
    whole = _Segments(every, zero, zero, copies.rows, copies.row_bytes)
    starts = np.array([(s.round, s.region, s.byte_offset) for s in manifest.shards], np.int64).reshape(-1, 3)
    if not len(starts) or not len(copies):
        return whole
    single = copies.rows == 1
    step = np.where(single, 1, np.maximum(copies.source_pitch, 1))
    length = np.where(single, copies.row_bytes, copies.rows)
    # all regions and rounds on one line, each on a stretch of its own
    stretch = max(region.nbytes for region in manifest.regions) + 1
    pairs = np.concatenate([starts[:, :2], np.stack([rounds, copies.source_region], axis=1)])
    key = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    if float(stretch) * float(key.max() + 1) > 2.0**62:
        return whole
    line = np.unique(key[: len(starts)] * stretch + starts[:, 2])
    begin = key[len(starts) :] * stretch + copies.source_offset
    first = np.searchsorted(line, begin, side="right")
    # the end of what may be cut; never past the stretch, whatever the table says
    reach = np.clip(length.astype(np.float64) * step, 0.0, float(stretch)).astype(np.int64)
    last = np.searchsorted(line, begin + reach, side="left")
    count = np.maximum(last - first, 0)
    if float(count.sum(dtype=np.float64)) > MOST_BLOCKS:
        return whole
    parent = np.repeat(every, count)
    place = np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count) + first[parent]
    position = -(-(line[place] - begin[parent]) // step[parent])
    inside = (position > 0) & (position < length[parent])
    parent = np.concatenate([every, parent[inside]])
    position = np.concatenate([zero, position[inside]])
    order = np.lexsort((position, parent))
    parent, position = parent[order], position[order]
    fresh = np.concatenate([[True], (parent[1:] != parent[:-1]) | (position[1:] != position[:-1])])
    parent, position = parent[fresh], position[fresh]
    following = np.append(position[1:], 0)
    end = np.where(np.append(parent[1:] == parent[:-1], False), following, length[parent])
    alone = single[parent]
    return _Segments(
        parent=parent,
        row=np.where(alone, 0, position),
        byte=np.where(alone, position, 0),
        rows=np.where(alone, 1, end - position),
        row_bytes=np.where(alone, end - position, copies.row_bytes[parent]),
    )


def landed(link: LinkBlocks, program: Program, source: int) -> Blocks:
    """Where the blocks of a link lie at its reader, once their chunk is scattered: `memory` is the destination's index.

    Args:
        link: as the reader's own request says.
        program: of the reader.
        source: the owner.

    Raises:
        TransportError: the program does not move what the request says.
    """
    parts = []
    for chunk in program.chunks:
        for one in chunk.links:
            if one.source != source:
                continue
            packed = np.flatnonzero(one.copies.source_region == PACK_REGION)
            parts.append(take(one.copies, np.flatnonzero(one.copies.source_region != PACK_REGION)))
            for index in packed.tolist():
                # what this link brought is scattered out of its own place in the receive buffer
                low = int(one.copies.destination_offset[index])
                high = low + int(one.copies.row_bytes[index])
                start = chunk.scatter.source_offset
                parts.append(take(chunk.scatter, np.flatnonzero((start >= low) & (start < high))))
    copies = _join(parts)
    parent = link.parent
    sizes = link.blocks.rows * link.blocks.row_bytes
    fits = not len(link) or int(parent[-1]) + 1 == len(copies)
    if not fits or int(sizes.sum()) != copies.nbytes:
        raise TransportError(
            f"the program moves {copies.nbytes} bytes of source rank {source} in {len(copies)} copies, but its request "
            f"says {int(sizes.sum())} bytes"
        )
    return Blocks(
        memory=copies.destination[parent],
        offset=copies.destination_offset[parent] + link.row * copies.destination_pitch[parent] + link.byte,
        pitch=np.where(link.blocks.rows == 1, 0, copies.destination_pitch[parent]),
        rows=link.blocks.rows,
        row_bytes=link.blocks.row_bytes,
    )


def choose(link: LinkBlocks, verify: Verify, version: int, digest: str) -> Array:
    """[M] ascending positions of the blocks that are digested in one sync; the same at both ends.

    Args:
        link: what it moves.
        verify: "sample" takes about one of `SAMPLED` blocks, at least one of each round, others for each version.
        version: of the sync.
        digest: of the read request.
    """
    count = len(link)
    if verify == "off" or not count:
        return np.zeros(0, np.int64)
    if verify == "full":
        return np.arange(count)
    seed = hashlib.sha256(f"{version} {digest}".encode()).digest()
    score = _mixed(np.arange(count, dtype=np.uint64) + np.uint64(int.from_bytes(seed[:7], "little")))
    chosen = score < np.uint64((1 << 64) // SAMPLED)
    order = np.lexsort((score, link.round))
    rounds = link.round[order]
    chosen[order[np.concatenate([[True], rounds[1:] != rounds[:-1]])]] = True
    return np.flatnonzero(chosen)


def _mixed(value: Array) -> Array:
    """[N] uint64 that look random, whatever was counted: the finaliser of splitmix64."""
    value = value * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def unique(parts: Sequence[LinkBlocks]) -> tuple[Blocks, Array, list[Array]]:
    """Blocks of several links of one owner, each once.

    Returns:
        The blocks, the round of each, and for each link the positions of its blocks among them.
    """
    columns = [
        np.stack([*(getattr(one.blocks, name) for name in Blocks.__slots__), one.round], axis=1) for one in parts
    ]
    table = np.concatenate([*columns, np.zeros((0, len(Blocks.__slots__) + 1), np.int64)])
    found, position = np.unique(table, axis=0, return_inverse=True)
    ends = np.cumsum([len(one) for one in parts])
    places = np.split(position.reshape(-1), ends[:-1]) if parts else []
    return Blocks(*np.ascontiguousarray(found[:, :-1].T)), found[:, -1], places


def _join(parts: Sequence[Copies]) -> Copies:
    return Copies(*(_concatenate([getattr(part, name) for part in parts]) for name in Copies.__slots__))


def _concatenate(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if len(parts) else np.zeros(0, np.int64)


def packed(digests: Array) -> bytes:
    """Digests as they travel: uint64, little-endian, one after the other."""
    return np.ascontiguousarray(digests, "<u8").tobytes()
