"""What a bench measured: one `Cell` for each way of syncing, one `PeerRow` for each other way to move the same weights.

Plain data with the few numbers that follow from it; nothing is measured here. Bytes are bytes, GB is 1e9 bytes, seconds
are wall-clock. A cell or row with an error holds no numbers; one that is not exact holds numbers that mean nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from .. import wire

#: a floor that is shorter, in seconds, is not what a sync is held against: its control messages take several times as long
#: whatever its bytes are, and the ratio would tell about them alone (`docs/performance.md` has the measurement)
LEAST_FLOOR_S = 1e-3


class Floors(wire.Struct, frozen=True):
    """Lower bounds measured beside a cell, in seconds; 0 where not measured.

    Attributes:
        copy: one copy of a reader's bytes inside its device.
        span: one mapped copy of the same bytes from each owner's memory, a single span a link, all links at once.
        nixl: the same by one NIXL transfer a link, posted and waited for without any call of Ray (raw NIXL).
    """

    copy: float = 0.0
    span: float = 0.0
    nixl: float = 0.0


class Cell(wire.Struct, frozen=True):
    """One measured way of syncing.

    Attributes:
        mode, kind, pack, verify: publish mode, link kind, packing and digests, as asked for.
        used_mode: that the trainer chose.
        used_kinds: of the links that were made.
        collectives: whether the trainer's own collectives ran at the same time.
        expandable: whether the trainer's memory lay in expandable segments.
        bytes: landed by all engine ranks in a sync.
        first_s: the first sync, set-up of the links included.
        seconds: the later ones, each the longest that a source rank took.
        floors: measured beside it, of the slowest reader.
        floor: which of them `ratio` is over.
        moving: of each later sync the time in which bytes moved: the slowest reader's transfer and landing, and the filling
            of arenas and buckets that it waited for.
        phases, phases_p95: of the trainer's rank 0, over the later syncs. "rest" is what no phase holds, of the longest that a
            source rank took.
        reader_phases, reader_phases_p95: of the slowest reader of each sync, likewise.
        slowest: the engine rank that most often was the slowest.
        sent, received: bytes a sync by source rank and by engine rank.
        links: of each link its source rank, its engine rank and its bytes a sync.
        exact: whether every reader held the trainer's bytes after the last sync.
        notes: floors that could not be measured, and why.
        error: why it could not run; empty otherwise.
    """

    mode: str
    kind: str
    pack: str = "default"
    verify: str = "off"
    used_mode: str = ""
    used_kinds: tuple[str, ...] = ()
    collectives: bool = False
    expandable: bool = False
    bytes: int = 0
    first_s: float = 0.0
    seconds: tuple[float, ...] = ()
    floors: Floors = Floors()
    floor: str = "copy"
    moving: tuple[float, ...] = ()
    phases: dict[str, float] = msgspec.field(default_factory=dict)
    phases_p95: dict[str, float] = msgspec.field(default_factory=dict)
    reader_phases: dict[str, float] = msgspec.field(default_factory=dict)
    reader_phases_p95: dict[str, float] = msgspec.field(default_factory=dict)
    slowest: int = 0
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    links: tuple[tuple[int, int, int], ...] = ()
    exact: bool = False
    notes: tuple[str, ...] = ()
    error: str = ""

    @property
    def overhead_s(self) -> float:
        """Median of what a later sync took beyond the moving of its bytes, in seconds; NaN without syncs."""
        return p50([total - moving for total, moving in zip(self.seconds, self.moving, strict=True)])

    @property
    def floor_s(self) -> float:
        """The floor that this cell is held against, in seconds."""
        return float(getattr(self.floors, self.floor))


class PeerRow(wire.Struct, frozen=True):
    """Another way to move the same weights into the same readers.

    Attributes:
        name: of the peer.
        what: that `seconds` holds, where it is not the move alone.
        inside: real engine that received, with its version; empty: the bench's own engine ranks.
        bytes: of the checkpoint, which every engine rank takes its part of.
        phases: medians over the later syncs, where the peer tells any.
        reason: why it cannot run here, or is left out; empty if it was measured. Nothing was tried then.
        first_s, seconds, exact, notes, error: as in `Cell`.
    """

    name: str
    what: str = ""
    inside: str = ""
    bytes: int = 0
    phases: dict[str, float] = msgspec.field(default_factory=dict)
    first_s: float = 0.0
    seconds: tuple[float, ...] = ()
    exact: bool = False
    notes: tuple[str, ...] = ()
    reason: str = ""
    error: str = ""

    @property
    def label(self) -> str:
        """The name, and the engine where it is a real one."""
        return f"{self.name}, in {self.inside}" if self.inside else self.name


class BenchReport(wire.Struct, frozen=True):
    """What `rdt bench` measured.

    Attributes:
        model, layers, tensors, bytes: whose shapes, how many layers of it (0: all), its checkpoint's tensors and bytes.
        trainer, engine: as asked for.
        device, device_name, gpus: where the weights lay.
        placement: GPU of each source rank, then of each engine rank; empty on a CPU.
        rounds: syncs after the first.
        cells, peers: what was measured so far.
    """

    model: str
    layers: int
    tensors: int
    bytes: int
    trainer: str
    engine: str
    device: str
    device_name: str
    gpus: str
    placement: tuple[tuple[int, ...], tuple[int, ...]]
    rounds: int
    cells: tuple[Cell, ...] = ()
    peers: tuple[PeerRow, ...] = ()

    @property
    def rows(self) -> tuple[Cell | PeerRow, ...]:
        """Cells and peers."""
        return (*self.cells, *self.peers)

    @property
    def exact(self) -> bool:
        """Whether everything that ran held the right bytes."""
        return all(row.exact or _silent(row) for row in self.rows)

    @property
    def failed(self) -> bool:
        """Whether nothing ran at all."""
        return all(_silent(row) for row in self.rows)


def _silent(row: Cell | PeerRow) -> bool:
    return bool(row.error or (isinstance(row, PeerRow) and row.reason))


def p50(seconds: Sequence[float]) -> float:
    """Median; NaN of nothing."""
    return statistics.median(seconds) if seconds else math.nan


def p95(seconds: Sequence[float]) -> float:
    """The 95th percentile, interpolated between the two values next to it; NaN of nothing."""
    if not seconds:
        return math.nan
    ordered = sorted(seconds)
    place = 0.95 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def ratio(row: Cell) -> float:
    """Median sync time over the cell's floor; NaN where either was not measured, or the floor is too short to say anything."""
    return p50(row.seconds) / row.floor_s if row.floor_s >= LEAST_FLOOR_S else math.nan


def no_ratio(row: Cell) -> str:
    """Why `ratio` gives none of a floor that was measured; empty if it gives one, or where nothing was measured."""
    if not 0 < row.floor_s < LEAST_FLOOR_S:
        return ""
    return (
        f"no ratio: the {row.floor} of these bytes takes {1e3 * row.floor_s:.3f} ms; below {1e3 * LEAST_FLOOR_S:.0f} ms it would "
        f"tell about control messages, which take what they take whatever the bytes ({1e3 * row.overhead_s:.1f} ms here)"
    )


def fastest(report: BenchReport) -> Cell | None:
    """The cell with the smallest median of those with the right bytes, or None."""
    exact = [cell for cell in report.cells if cell.exact and cell.seconds]
    return min(exact, key=lambda cell: p50(cell.seconds), default=None)


def beside(report: BenchReport, row: PeerRow) -> tuple[str, float] | None:
    """What a peer is held against, by name and p50 in seconds: rdt over mapped links into the same engine, else the fastest cell.

    None where that was not measured, had wrong bytes, is the row itself, or is too short to say anything.
    """
    if row.inside:
        there = [one for one in report.peers if one.inside == row.inside and one.exact and one.seconds]
        ours = next((one for one in there if one.name.startswith("rdt") and "mapped" in one.name), None)
        return None if ours is None or ours.name == row.name else (ours.name, p50(ours.seconds))
    best = fastest(report)
    if best is None or no_ratio(best):
        return None
    return f"{best.used_mode}, {'/'.join(best.used_kinds)}", p50(best.seconds)


def medians(rows: Iterable[dict[str, float]]) -> dict[str, float]:
    """Median of each key; 0 stands where a row has none."""
    return over(rows, statistics.median)


def over(rows: Iterable[dict[str, float]], what: Callable[[list[float]], float]) -> dict[str, float]:
    """`what` of the values of each key; 0 stands where a row has none."""
    listed = list(rows)
    keys = dict.fromkeys(key for row in listed for key in row)
    return {key: what([row.get(key, 0.0) for row in listed]) for key in keys}


def to_dict(report: BenchReport) -> dict[str, Any]:
    """Returns the report as plain JSON types, with p50, p95, GB/s, ratio and overhead beside the numbers that they come from."""
    plain: dict[str, Any] = msgspec.to_builtins(report)
    for peer, one in zip(report.peers, plain["peers"], strict=True):
        against = beside(report, peer) if peer.seconds else None
        one["times_rdt"] = None if against is None else p50(peer.seconds) / against[1]
    for row, one in zip(report.rows, (*plain["cells"], *plain["peers"]), strict=True):
        one |= {"p50": _finite(p50(row.seconds)), "p95": _finite(p95(row.seconds))}
        one["gbps"] = None if one["p50"] is None else row.bytes / 1e9 / one["p50"]
        if isinstance(row, Cell):
            one |= {"ratio": _finite(ratio(row)), "no_ratio": no_ratio(row), "overhead": _finite(row.overhead_s)}
    return plain


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
