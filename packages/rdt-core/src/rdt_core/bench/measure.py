"""Runs a bench: every combination of modes, link kinds and packing, each beside its floors, then raw NIXL and the peers.

A combination that fails is an error in its cell and hides no other; processes that may be in a bad state afterwards are
replaced. What was measured is handed out after every piece, so that an interrupted run is not lost.
"""

from __future__ import annotations

import itertools
import statistics
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from .. import wire
from ..connector import DEFAULT_KINDS
from ..errors import DeadlineError, RdtError
from ..logline import rest
from ..shapes import checkpoint_tensors
from . import digests
from .collectives import one_gpu_each
from .fleet import Fleet, Stuck
from .layouts import EngineModule
from .options import BenchOptions, pack_bytes
from .peering import KEPT_BYTES, Peers
from .placement import place
from .results import BenchReport, Cell, Floors, PeerRow, medians, over, p95
from .tensorfile import nbytes

_REPEATS = 5

#: bytes that each reader takes from each source rank
_Wanted = tuple[tuple[tuple[int, int], ...], ...]
Observe = Callable[[BenchReport, str], None]
Spoil = Callable[[EngineModule], None]


def run(
    options: BenchOptions,
    *,
    gpus: int = 0,
    observe: Observe = lambda report, doing: None,
    synced: Callable[[int], object] = lambda syncs: None,
    spoil: Spoil | None = None,
) -> BenchReport:
    """Measures all of it. The caller has connected this process to Ray.

    Args:
        options: what to measure.
        gpus: that this process sees.
        observe: told the report so far and what is measured next; after the last piece, "".
        synced: told how many of the syncs that `show.syncs_of` counts are done, after each, and after what was left out.
        spoil: called on every reader's module before its bytes are compared: shows that the comparison notices.

    Raises:
        OptionError: the options cannot work; nothing was started.
    """
    options = options.check(gpus)
    return _Run(options, gpus if options.device == "cuda" else 0, observe, synced, spoil).all()


def label(cell: Cell) -> str:
    """What is measured, in a few words: mode and links, packing and digests where they were asked for."""
    packed = [cell.pack] * (cell.pack != "default") + [f"verify {cell.verify}"] * (cell.verify != "off")
    return ", ".join((f"mode {cell.mode}", f"links {cell.kind}", *packed))


class _Run:
    def __init__(
        self,
        options: BenchOptions,
        gpus: int,
        observe: Observe,
        synced: Callable[[int], object],
        spoil: Spoil | None,
    ) -> None:
        self.options = options
        self.tensors = checkpoint_tensors(options.model, layers=options.layers)
        placement = place(options.gpus, gpus, options.ranks, options.readers)
        self.fleet = Fleet(options, self.tensors, placement, gpus)
        self.observe, self.synced, self.spoil = observe, synced, spoil
        self.syncs = 0
        self.started = time.monotonic()
        self.wanted: dict[int, _Wanted] = {}
        self.report = BenchReport(
            model=options.model,
            layers=options.layers,
            tensors=len(self.tensors),
            bytes=sum(map(nbytes, self.tensors)),
            trainer=options.trainer,
            engine=options.layout,
            device=options.device,
            device_name=options.device,
            gpus=options.gpus if gpus else "",
            placement=(placement.sources, placement.readers),
            rounds=options.rounds,
        )

    def all(self) -> BenchReport:
        one = self.options
        try:
            for kind, pack, mode, verify in itertools.product(one.kinds, one.packs, one.modes, one.verifies):
                cell = Cell(mode=mode, kind=kind, pack=pack, verify=verify)
                done = self._piece(label(cell), cell, self._cell, syncs=one.rounds + 1)
                self.report = msgspec.structs.replace(self.report, cells=(*self.report.cells, done))
            self._raw()
            peers = Peers(one, self.fleet, self.report.bytes, self._exact, self._done)
            for name in one.peers:
                reason = peers.reason(name)
                row = PeerRow(name=name, reason=reason)
                if reason:
                    self._done(one.peer_rounds + 1)
                measured: Any = row
                if not reason:
                    measured = self._piece(
                        f"peer {name}", row, peers.measure, start=peers.ours(name), syncs=one.peer_rounds + 1
                    )
                rows = measured if isinstance(measured, tuple) else (measured,)
                self.report = msgspec.structs.replace(self.report, peers=(*self.report.peers, *rows))
            self.observe(self.report, "")
        finally:
            self.fleet.close()
        return self.report

    def _done(self, syncs: int = 1) -> None:
        self.syncs += syncs
        self.synced(self.syncs)

    def _piece(self, what: str, row: Any, measure: Callable[[Any], Any], *, syncs: int, start: bool = True) -> Any:
        """Measures one row, in the bench's own processes or (not `start`) without them; an error becomes a part of it."""
        self.observe(self.report, what)
        last = self.syncs + syncs
        try:
            return self._measured(row, measure, start)
        finally:
            # those of what failed, or is measured in a program of its own
            self._done(last - self.syncs)

    def _measured(self, row: Any, measure: Callable[[Any], Any], start: bool) -> Any:
        import ray

        elapsed, limit = time.monotonic() - self.started, self.options.limit_s
        if limit and elapsed > limit:
            return msgspec.structs.replace(
                row, error=f"not started: {elapsed:.0f} s had passed, the limit is {limit:.0f} s"
            )
        try:
            if start:
                self.fleet.start()
                self.report = msgspec.structs.replace(self.report, device_name=self.fleet.device_name)
            else:
                self.fleet.end()
            return measure(row)
        except (RdtError, ray.exceptions.RayError) as error:
            # whoever is in a process group may be waiting in a collective for a rank that failed
            if isinstance(error, Stuck) or not isinstance(error, RdtError) or self.fleet.in_group:
                self.fleet.end()
            else:
                self.fleet.end_readers()
            text = str(getattr(error, "cause", None) or error).strip()
            return msgspec.structs.replace(row, error=f"{type(error).__name__}: {text}")

    # ------------------------------------------------------------------ syncs

    def _cell(self, cell: Cell) -> Cell:
        one, fleet = self.options, self.fleet
        kinds = DEFAULT_KINDS if cell.kind == "auto" else (cell.kind,)
        settings = {
            "timeout_s": one.timeout_s, "pack_threshold": pack_bytes(cell.pack), "bucket_bytes": one.bucket_bytes,
            "verify": cell.verify,
        }  # fmt: skip
        if one.collectives:
            one_gpu_each(fleet.placement.sources, "source ranks with collectives")
            fleet.enter(readers=False)
            fleet.ask(fleet.sources, "collectives")
        group = f"bench-{uuid.uuid4().hex[:8]}"
        try:
            fleet.ask(fleet.sources, "join", group, cell.mode, kinds, settings)
            fleet.ask(fleet.sources[:1], "attach", fleet.readers)
            before = max(fleet.ask(fleet.readers, "copy_floor", _REPEATS))
            taken: list[tuple[float, wire.SyncReport]] = []
            for version in range(one.rounds + 1):
                fleet.ask(fleet.sources, "change")
                answers = fleet.ask(fleet.sources, "publish", version)
                # rank 0's report goes on after the commit
                taken.append((max(seconds for seconds, _ in answers), answers[0][1]))
                self._done()
            exact = self._exact()
            reports = [report for _, report in taken[1:]]
            floors, notes = self._floors(reports[-1], before)
        except RdtError as error:
            if not isinstance(error, Stuck):
                fleet.ask(fleet.sources, "leave")
            raise
        fleet.ask(fleet.readers, "close")
        fleet.ask(fleet.sources, "leave")
        links = reports[-1].links
        self.wanted[len(self.report.cells)] = _wanted(reports[-1])
        slowest = [max(report.readers, key=_busy) for report in reports]
        phases = [{**report.phases, "rest": rest(report.phases, seconds)} for seconds, report in taken[1:]]
        reader_phases = [reader.phases for reader in slowest]
        ranks = [_rank(reader) for reader in slowest]
        done = msgspec.structs.replace(
            cell,
            used_mode=reports[-1].mode,
            used_kinds=tuple(sorted({link.kind for link in links})),
            collectives=one.collectives,
            expandable=fleet.expandable,
            bytes=reports[-1].bytes,
            first_s=taken[0][0],
            seconds=tuple(seconds for seconds, _ in taken[1:]),
            floors=floors,
            floor="span" if one.device == "cuda" and one.gpus != "shared" else "copy",
            moving=tuple(_moving(*pair) for pair in zip(phases, reader_phases, strict=True)),
            phases=medians(phases),
            phases_p95=over(phases, p95),
            reader_phases=medians(reader_phases),
            reader_phases_p95=over(reader_phases, p95),
            slowest=max(set(ranks), key=ranks.count),
            sent=tuple(sum(link.bytes for link in links if link.source == rank) for rank in range(one.ranks)),
            received=tuple(reader.bytes for reader in reports[-1].readers),
            links=tuple(
                (source, reader, nbytes)
                for reader, taken_from in enumerate(self.wanted[len(self.report.cells)])
                for source, nbytes in taken_from
            ),
            exact=exact,
            notes=notes,
        )
        if set(done.used_kinds) != {"mapped"}:
            fleet.agents = True
        if set(done.used_kinds) - {"mapped"} and self.report.bytes > KEPT_BYTES:
            fleet.end()
        return done

    def _exact(self) -> bool:
        """Whether what every reader holds is what the source ranks hold."""
        fleet = self.fleet
        if self.spoil is not None:
            fleet.ask(fleet.readers, "apply", self.spoil)
        boxes = fleet.ask(fleet.readers, "boxes")
        held = fleet.ask(fleet.readers, "digests")
        return all(
            digests.add(fleet.ask(fleet.sources, "digests", its_boxes)) == its_sums
            for its_boxes, its_sums in zip(boxes, held, strict=True)
        )

    # ------------------------------------------------------------------ floors

    def _floors(self, report: wire.SyncReport, before: float) -> tuple[Floors, tuple[str, ...]]:
        """The copy and the span; raw NIXL as well where the processes have agents anyway."""
        after = max(self.fleet.ask(self.fleet.readers, "copy_floor", _REPEATS))
        found = {"copy": (before + after) / 2}
        notes = []
        # an agent keeps a core busy for as long as its process lives: on a CPU only where the links made one anyway
        agents = self.options.device == "cuda" or {link.kind for link in report.links} != {"mapped"}
        for name in ("span", *(("nixl",) if agents else ())):
            try:
                found[name] = self._floor(name, _wanted(report))
            except RdtError as error:
                if isinstance(error, Stuck):
                    raise
                notes.append(f"floor {name}: {error}")
        return Floors(**found), tuple(notes)

    def _floor(self, name: str, wanted: _Wanted) -> float:
        fleet = self.fleet
        largest = [max((dict(links).get(rank, 0) for links in wanted), default=0) for rank in range(self.options.ranks)]
        lent = fleet.wait(
            [
                source.lend.remote(nbytes, name == "nixl")
                for source, nbytes in zip(fleet.sources, largest, strict=True)
                if nbytes
            ],
            "lending scratch memory",
        )
        loans = dict(zip((rank for rank, nbytes in enumerate(largest) if nbytes), lent, strict=True))
        calls = []
        for reader, links in zip(fleet.readers, wanted, strict=True):
            given = [(loans[rank], nbytes) for rank, nbytes in links]
            if name == "nixl":
                calls.append(reader.nixl_floor.remote(given, _REPEATS, self.options.timeout_s))
            else:
                calls.append(reader.span_floor.remote(given, _REPEATS))
        return float(max(fleet.wait(calls, f"the floor {name}")))

    def _raw(self) -> None:
        """Gives every cell raw NIXL of its bytes: measured beside a cell of the same bytes, or now."""
        cells = list(self.report.cells)
        seen: dict[_Wanted, list[float]] = {}
        for number, wanted in self.wanted.items():
            if cells[number].floors.nixl:
                seen.setdefault(wanted, []).append(cells[number].floors.nixl)
        failed: dict[_Wanted, str] = {}
        for number, wanted in self.wanted.items():
            cell = cells[number]
            if cell.floors.nixl or cell.notes:
                continue
            if wanted not in seen and wanted not in failed:
                try:
                    seen[wanted] = [self._raw_nixl(wanted)]
                except RdtError as error:
                    failed[wanted] = f"floor nixl: {error}"
            if wanted in seen:
                floors = msgspec.structs.replace(cell.floors, nixl=statistics.median(seen[wanted]))
                cells[number] = msgspec.structs.replace(cell, floors=floors)
            else:
                cells[number] = msgspec.structs.replace(cell, notes=(failed[wanted],))
        self.report = msgspec.structs.replace(self.report, cells=tuple(cells))

    def _raw_nixl(self, wanted: _Wanted) -> float:
        elapsed, limit = time.monotonic() - self.started, self.options.limit_s
        if limit and elapsed > limit:
            raise DeadlineError(f"not started: {elapsed:.0f} s had passed, the limit is {limit:.0f} s")
        try:
            self.fleet.start()
            return self._floor("nixl", wanted)
        finally:
            # its agents would keep cores busy from here on
            self.fleet.end()


def _wanted(report: wire.SyncReport) -> _Wanted:
    readers = sorted(report.readers, key=_rank)
    return tuple(tuple(sorted((link.source, link.bytes) for link in reader.links)) for reader in readers)


def _rank(reader: wire.ReaderReport) -> int:
    return int(reader.reader.rpartition("/")[2])


def _busy(reader: wire.ReaderReport) -> float:
    return sum(seconds for name, seconds in reader.phases.items() if name != "wait")


def _moving(phases: dict[str, float], reader: dict[str, float]) -> float:
    # of the filling of arenas and buckets only what readers waited for: the rest runs beside their transfers
    filled = min(phases.get("write", 0.0), reader.get("wait", 0.0))
    return filled + reader.get("transfer", 0.0) + reader.get("land", 0.0)
