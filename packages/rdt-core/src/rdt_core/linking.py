"""From a plan to programs: what each link moves in each chunk of a sync, and where in the receive buffer it lands.

A chunk is a run of groups that is pulled, landed and post-processed together. Pieces too small to be worth a descriptor
are packed at their owner into one span and scattered at the reader; everything else goes straight from where it lies to
where it lands. Destinations that do not live in place, staged boxes and packed spans get fixed places in one receive
buffer, shared by chunks whose lifetimes do not meet. All of it is static: a sync only executes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from . import wire
from .columns import Columns
from .landing import Destination
from .planning import Plan
from .transport import tables
from .transport.base import Copies

#: stands for the pack arena of a link wherever a region id is written
PACK_REGION = -1
ALIGNMENT = 256
#: receive-buffer bytes after which a chunk ends; groups that land in place do not count
CHUNK_BYTES = 256 << 20
#: chunks that a receiver has on their way at once
IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class LinkChunk:
    """What one link moves in one chunk; `index` is the position in the link's request."""

    source: int
    index: int
    copies: Copies
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of a sync. `scatter` reads from the receive buffer (region 0); module names are those of `Destination`."""

    round: int
    links: tuple[LinkChunk, ...]
    scatter: Copies
    opens: tuple[str, ...]
    replays: tuple[int, ...]  # indices into Plan.staged whose box is complete
    closes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that a receiver executes.

    Attributes:
        chunks: in the order of execution; rounds never decrease.
        requests: for each source rank that is read, the transfers that it must serve.
        receive_bytes: size of the receive buffer.
        places: byte offset in the receive buffer of each destination that is not in place, by its index in the plan;
            -1 for those in place.
    """

    chunks: tuple[Chunk, ...]
    requests: dict[int, tuple[wire.Transfer, ...]]
    pack_bytes: dict[int, int]
    receive_bytes: int
    places: np.ndarray


def request_digest(transfers: Sequence[wire.Transfer], kind: str, pack_bytes: int) -> str:
    """Digest of what one link moves, made by both ends from what they hold and compared before the first byte."""
    return hashlib.sha256(wire.encode((kind, pack_bytes, tuple(transfers)))).hexdigest()


def take(copies: Copies, index: np.ndarray) -> Copies:
    """Returns the copies at `index`, in that order."""
    return Copies(**{name: getattr(copies, name)[index] for name in Copies.__slots__})


def make_program(
    plan: Plan,
    destinations: Mapping[str, Destination],
    kinds: Mapping[int, str],
    thresholds: Mapping[int, int],
    *,
    slots: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
) -> Program:
    """Turns a plan into programs.

    Args:
        plan: of this engine rank.
        destinations: what the landing said about each destination of the plan.
        kinds: link kind by source rank.
        thresholds: bytes of a row below which it is packed, by source rank; 0 packs nothing.
        slots: buckets that exist at once at the owners (see `wire.SourceManifest.slots`).
        chunk_bytes: bytes of receive buffer after which a new chunk starts.
    """
    in_place = np.array([key in destinations and destinations[key].in_place for key in plan.destinations], dtype=bool)
    sizes = np.asarray(plan.destination_nbytes, dtype=np.int64)
    threshold = np.zeros(max(kinds, default=0) + 1, dtype=np.int64)
    for source, value in thresholds.items():
        threshold[source] = value

    def cut(columns: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bytes of each copy, whether it is packed, and its chunk."""
        nbytes = columns.rows * columns.row_bytes
        packed = columns.row_bytes < threshold[columns.source] if len(nbytes) else np.zeros(0, dtype=bool)
        buffered = np.where(packed | ~in_place[columns.destination], nbytes, 0)
        return nbytes, packed, _chunks(columns.round, columns.group, buffered, chunk_bytes)

    columns = plan.columns
    nbytes, packed, chunk = cut(columns)
    if len(chunk) and chunk[-1] >= IN_FLIGHT:
        # chunks wait for one another: readers that all began with the same groups would wait for the owners of these
        columns = columns.take(np.lexsort((plan.turns[columns.group], columns.round)))
        nbytes, packed, chunk = cut(columns)
    count = len(columns)
    chunk_count = int(chunk[-1]) + 1 if count else 0

    # when each destination is written: [first, last] chunk; staged boxes count for the target that they are replayed into
    first = np.full(len(plan.destinations), chunk_count, dtype=np.int64)
    last = np.full(len(plan.destinations), -1, dtype=np.int64)
    np.minimum.at(first, columns.destination, chunk)
    np.maximum.at(last, columns.destination, chunk)
    replays: list[list[int]] = [[] for _ in range(chunk_count)]
    for index, staged in enumerate(plan.staged):
        done = int(last[staged.destination])
        if done < 0:  # a box without elements: nothing travels and nothing is replayed
            continue
        replays[done].append(index)
        first[staged.target] = min(first[staged.target], done)
        last[staged.target] = max(last[staged.target], done)
    modules = _module_lifetimes(plan, destinations, first, last)
    opens: list[list[str]] = [[] for _ in range(chunk_count)]
    closes: list[list[str]] = [[] for _ in range(chunk_count)]
    for module, (start, end, needs_memory) in modules.items():
        if needs_memory:
            opens[start].append(module)
        closes[end].append(module)

    # packed spans: one for each (source, chunk); rows follow one another in table order
    pack_within, spans = _spans(columns.source, chunk, nbytes, np.flatnonzero(packed))
    rounds = _first_of(chunk, columns.round, chunk_count)
    pack_base, pack_bytes = _pack_places(spans, rounds, slots)

    # the receive buffer
    items: list[tuple[int, int, int]] = []  # bytes, first chunk, last chunk
    owners: list[int | tuple[int, int]] = []  # index of a destination, or (source, chunk) of a packed span
    for index in range(len(plan.destinations)):
        if in_place[index] or last[index] < 0:
            continue
        span = (int(first[index]), int(last[index]))
        if plan.destinations[index] in destinations:
            span = modules[destinations[plan.destinations[index]].module][:2]
        items.append((int(sizes[index]), *span))
        owners.append(index)
    for key, size in spans.items():
        items.append((size, key[1], key[1]))
        owners.append(key)
    offsets, receive_bytes = _allocate(items)
    places = np.full(len(plan.destinations), -1, dtype=np.int64)
    landing_places: dict[tuple[int, int], int] = {}
    for owner, offset in zip(owners, offsets, strict=True):
        if isinstance(owner, int):
            places[owner] = offset
        else:
            landing_places[owner] = offset

    # one transfer for each (source, chunk)
    requests: dict[int, list[wire.Transfer]] = {}
    links: list[list[LinkChunk]] = [[] for _ in range(chunk_count)]
    scatter: list[np.ndarray] = [np.zeros(0, dtype=np.int64) for _ in range(chunk_count)]
    boundaries = np.searchsorted(chunk, np.arange(chunk_count + 1))
    receive_index = len(plan.destinations)
    for number in range(chunk_count):
        here = np.arange(boundaries[number], boundaries[number + 1])
        scatter[number] = here[packed[here]]
        for source in np.unique(columns.source[here]).tolist():
            mine = here[columns.source[here] == source]
            straight, small = mine[~packed[mine]], mine[packed[mine]]
            table = [
                columns.region[straight], columns.source_offset[straight], columns.source_pitch[straight],
                columns.destination[straight], columns.destination_offset[straight],
                columns.destination_pitch[straight], columns.rows[straight], columns.row_bytes[straight],
            ]  # fmt: skip
            pack_columns = b""
            if len(small):
                size, base = spans[(source, number)], pack_base[(source, number)]
                row = (PACK_REGION, base, 0, receive_index, landing_places[(source, number)], 0, 1, size)
                table = [np.append(column, value) for column, value in zip(table, row, strict=True)]
                pack_columns = tables.pack_columns(
                    Copies(
                        columns.region[small], columns.source_offset[small], columns.source_pitch[small],
                        np.zeros(len(small), dtype=np.int64), base + pack_within[small], columns.row_bytes[small],
                        columns.rows[small], columns.row_bytes[small],
                    )
                )  # fmt: skip
            copies = Copies(*(np.ascontiguousarray(column, dtype=np.int64) for column in table))
            mine_requests = requests.setdefault(source, [])
            mine_requests.append(
                wire.Transfer(
                    chunk=number,
                    round=int(rounds[number]),
                    count=len(copies),
                    columns=tables.read_columns(copies),
                    pack_count=len(small),
                    pack_columns=pack_columns,
                    nbytes=copies.nbytes,
                )
            )
            links[number].append(LinkChunk(source, len(mine_requests) - 1, copies, copies.nbytes))

    chunks = []
    for number in range(chunk_count):
        small = scatter[number]
        starts = np.array(
            [landing_places[(int(columns.source[i]), number)] + int(pack_within[i]) for i in small.tolist()],
            dtype=np.int64,
        )
        chunks.append(
            Chunk(
                round=int(rounds[number]),
                links=tuple(links[number]),
                scatter=Copies(
                    source_region=np.zeros(len(small), dtype=np.int64),
                    source_offset=starts,
                    source_pitch=columns.row_bytes[small],
                    destination=columns.destination[small],
                    destination_offset=columns.destination_offset[small],
                    destination_pitch=columns.destination_pitch[small],
                    rows=columns.rows[small],
                    row_bytes=columns.row_bytes[small],
                ),
                opens=tuple(opens[number]),
                replays=tuple(replays[number]),
                closes=tuple(closes[number]),
            )
        )
    return Program(
        chunks=tuple(chunks),
        requests={source: tuple(transfers) for source, transfers in requests.items()},
        pack_bytes={source: pack_bytes.get(source, 0) for source in requests},
        receive_bytes=receive_bytes,
        places=places,
    )


def _chunks(rounds: np.ndarray, groups: np.ndarray, receive: np.ndarray, limit: int) -> np.ndarray:
    """Chunk number of each copy: a new chunk at a new round, or at a new group once the buffered bytes exceed `limit`."""
    count = len(rounds)
    if not count:
        return np.zeros(0, dtype=np.int64)
    edge = np.flatnonzero((np.diff(rounds) != 0) | (np.diff(groups) != 0)) + 1
    starts = np.concatenate([[0], edge])
    totals = np.add.reduceat(receive, starts)
    number, filled = 0, 0
    numbers: list[int] = []
    for position, total in zip(starts.tolist(), totals.tolist(), strict=True):
        new_round = position > 0 and rounds[position] != rounds[position - 1]
        if numbers and (new_round or (filled and filled + total > limit)):
            number, filled = number + 1, 0
        filled += total
        numbers.append(number)
    return np.repeat(np.array(numbers, dtype=np.int64), np.diff(np.append(starts, count)))


def _first_of(chunk: np.ndarray, values: np.ndarray, count: int) -> np.ndarray:
    return values[np.searchsorted(chunk, np.arange(count))] if count else np.zeros(0, dtype=np.int64)


def _module_lifetimes(
    plan: Plan, destinations: Mapping[str, Destination], first: np.ndarray, last: np.ndarray
) -> dict[str, tuple[int, int, bool]]:
    """First and last chunk of each module, and whether any of its destinations needs memory of the receive buffer."""
    modules: dict[str, tuple[int, int, bool]] = {}
    for index, key in enumerate(plan.destinations):
        destination = destinations.get(key)
        if destination is None or last[index] < 0:
            continue
        start, end, needs = modules.get(destination.module, (int(first[index]), int(last[index]), False))
        modules[destination.module] = (
            min(start, int(first[index])),
            max(end, int(last[index])),
            needs or not destination.in_place,
        )
    return modules


def _spans(
    source: np.ndarray, chunk: np.ndarray, nbytes: np.ndarray, packed: np.ndarray
) -> tuple[np.ndarray, dict[tuple[int, int], int]]:
    """Offset of each packed copy inside the span of its (source, chunk), in table order, and the size of each span."""
    within = np.zeros(len(source), dtype=np.int64)
    if not len(packed):
        return within, {}
    order = packed[np.lexsort((packed, chunk[packed], source[packed]))]
    edge = np.flatnonzero((np.diff(source[order]) != 0) | (np.diff(chunk[order]) != 0)) + 1
    starts = np.concatenate([[0], edge])
    ends = np.cumsum(nbytes[order])
    begins = ends - nbytes[order]
    within[order] = begins - np.repeat(begins[starts], np.diff(np.append(starts, len(order))))
    sizes = np.add.reduceat(nbytes[order], starts)
    keys = zip(source[order][starts].tolist(), chunk[order][starts].tolist(), sizes.tolist(), strict=True)
    return within, {(owner, number): size for owner, number, size in keys}


def _pack_places(
    spans: Mapping[tuple[int, int], int], rounds: np.ndarray, slots: int
) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
    """Offset of each span in its link's pack arena, and the arena's size by source.

    Rounds that share a bucket share pack memory: a round is packed only after the one before it in the same slot was read.
    """
    filled: dict[tuple[int, int], int] = {}
    within: dict[tuple[int, int], int] = {}
    for (source, number), size in spans.items():
        key = (source, int(rounds[number]))
        within[(source, number)] = filled.get(key, 0)
        filled[key] = _align(within[(source, number)] + size)
    largest: dict[int, int] = {}
    for (source, _), size in filled.items():
        largest[source] = max(largest.get(source, 0), size)
    base = {
        (source, number): within[(source, number)] + int(rounds[number]) % slots * largest[source]
        for source, number in spans
    }
    used = min(slots, int(rounds.max()) + 1) if len(rounds) else 1
    return base, {source: size * used for source, size in largest.items()}


def _align(value: int) -> int:
    return -(-value // ALIGNMENT) * ALIGNMENT


def _allocate(items: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Places `(bytes, first chunk, last chunk)` items so that no two alive at once overlap; first fit.

    A place is free again one chunk after its last: the next chunk's bytes are already on their way while a chunk is
    scattered and post-processed.
    """
    offsets = [0] * len(items)
    top = 0
    alive: list[tuple[int, int, int]] = []  # offset, end offset, last chunk + 1
    for index in sorted(range(len(items)), key=lambda i: (items[i][1], -items[i][0], i)):
        size, start, end = items[index]
        alive = [place for place in alive if place[2] >= start]
        offset = 0
        for low, high, _ in alive:
            if offset + size <= low:
                break
            offset = max(offset, _align(high))
        offsets[index] = offset
        alive.append((offset, offset + size, end + 1))
        alive.sort()
        top = max(top, offset + size)
    return offsets, _align(top)
