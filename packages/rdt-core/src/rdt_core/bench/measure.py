"""Runs a bench: every combination of modes, link kinds and packing, each beside its floors, then the peers.

A combination that fails is an error in its cell and hides no other; processes that may be in a bad state afterwards are
replaced. What was measured is handed out after every piece, so that an interrupted run is not lost.
"""

from __future__ import annotations

import itertools
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .. import wire
from ..errors import RdtError
from ..receiver import DEFAULT_KINDS
from ..shapes import checkpoint_tensors
from . import digests
from .collectives import one_gpu_each
from .fleet import Fleet, Stuck
from .layouts import EngineModule
from .options import BenchOptions, pack_bytes
from .placement import place
from .results import BenchReport, Cell, Floors, PeerRow, medians
from .tensorfile import nbytes

_REPEATS = 5
#: processes that hold more are made anew after a piece that may have left registered memory behind
_KEPT_BYTES = 1 << 30

Observe = Callable[[BenchReport, str], None]
Spoil = Callable[[EngineModule], None]


def run(
    options: BenchOptions,
    *,
    gpus: int = 0,
    observe: Observe = lambda report, doing: None,
    spoil: Spoil | None = None,
) -> BenchReport:
    """Measures all of it. The caller has connected this process to Ray.

    Args:
        options: what to measure.
        gpus: that this process sees.
        observe: told the report so far and what is measured next; after the last piece, "".
        spoil: called on every reader's module before its bytes are compared: shows that the comparison notices.

    Raises:
        OptionError: the options cannot work; nothing was started.
    """
    options = options.check(gpus)
    return _Run(options, gpus if options.device == "cuda" else 0, observe, spoil).all()


class _Run:
    def __init__(self, options: BenchOptions, gpus: int, observe: Observe, spoil: Spoil | None) -> None:
        self.options = options
        self.tensors = checkpoint_tensors(options.model, layers=options.layers)
        placement = place(options.gpus, gpus, options.ranks, options.tp)
        self.fleet = Fleet(options, self.tensors, placement, gpus)
        self.observe, self.spoil = observe, spoil
        self.started = time.monotonic()
        self.report = BenchReport(
            model=options.model,
            layers=options.layers,
            tensors=len(self.tensors),
            bytes=sum(map(nbytes, self.tensors)),
            trainer=f"fsdp:ranks={options.ranks}",
            engine=f"{options.engine}:tp={options.tp}",
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
                done = self._piece(f"mode {mode}, links {kind}, {pack}, verify {verify}", cell, self._cell)
                self.report = msgspec.structs.replace(self.report, cells=(*self.report.cells, done))
            for name in one.peers:
                row = self._piece(f"peer {name}", PeerRow(name=name), self._peer)
                self.report = msgspec.structs.replace(self.report, peers=(*self.report.peers, row))
            self.observe(self.report, "")
        finally:
            self.fleet.close()
        return self.report

    def _piece(self, what: str, row: Any, measure: Callable[[Any], Any]) -> Any:
        """Measures one row; an error becomes a part of it."""
        import ray

        self.observe(self.report, what)
        elapsed, limit = time.monotonic() - self.started, self.options.limit_s
        if limit and elapsed > limit:
            return msgspec.structs.replace(
                row, error=f"not started: {elapsed:.0f} s had passed, the limit is {limit:.0f} s"
            )
        try:
            self.fleet.start()
            self.report = msgspec.structs.replace(self.report, device_name=self.fleet.device_name)
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
                taken.append(max(fleet.ask(fleet.sources, "publish", version), key=lambda answer: answer[0]))
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
            phases=medians(report.phases for report in reports),
            reader_phases=medians(max(report.readers, key=_busy).phases for report in reports),
            sent=tuple(sum(link.bytes for link in links if link.source == rank) for rank in range(one.ranks)),
            received=tuple(reader.bytes for reader in reports[-1].readers),
            exact=exact,
            notes=notes,
        )
        if set(done.used_kinds) - {"mapped"} and self.report.bytes > _KEPT_BYTES:
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

    def _floors(self, report: wire.SyncReport, before: float) -> tuple[Floors, tuple[str, ...]]:
        fleet = self.fleet
        notes = []
        after = max(fleet.ask(fleet.readers, "copy_floor", _REPEATS))
        found = {"copy": (before + after) / 2, "span": 0.0, "nixl": 0.0}
        wanted = [{link.source: link.bytes for link in reader.links} for reader in _by_rank(report.readers)]
        largest = [max((links.get(rank, 0) for links in wanted), default=0) for rank in range(self.options.ranks)]
        # an agent keeps a core busy for as long as its process lives: on a CPU only where the links made one anyway
        agents = self.options.device == "cuda" or {link.kind for link in report.links} != {"mapped"}
        for name in ("span", *(("nixl",) if agents else ())):
            try:
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
                    given = [(loans[rank], nbytes) for rank, nbytes in sorted(links.items())]
                    if name == "nixl":
                        calls.append(reader.nixl_floor.remote(given, _REPEATS, self.options.timeout_s))
                    else:
                        calls.append(reader.span_floor.remote(given, _REPEATS))
                found[name] = max(fleet.wait(calls, f"the floor {name}"))
            except RdtError as error:
                if isinstance(error, Stuck):
                    raise
                notes.append(f"floor {name}: {error}")
        return Floors(**found), tuple(notes)

    # ------------------------------------------------------------------ peers

    def _peer(self, row: PeerRow) -> PeerRow:
        one, fleet = self.options, self.fleet
        sources, readers = fleet.placement.sources, fleet.placement.readers
        if row.name == "broadcast":
            one_gpu_each((*sources, *readers), "source ranks and engine ranks")
        elif one.ranks > 1:
            one_gpu_each(sources, "source ranks, whose shards must be gathered,")
        fleet.enter(readers=row.name == "broadcast")
        seconds = []
        for _ in range(one.peer_rounds + 1):
            fleet.ask(fleet.sources, "change")
            seconds.append(getattr(self, f"_{row.name}")())
        done = msgspec.structs.replace(
            row, bytes=self.report.bytes, first_s=seconds[0], seconds=tuple(seconds[1:]), exact=self._exact()
        )
        fleet.exit()
        if self.report.bytes > _KEPT_BYTES:
            fleet.end()
        return done

    def _send(self, name: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        return [source.send.remote(name, given) for source, given in zip(self.fleet.sources, arguments, strict=True)]

    def _broadcast(self) -> float:
        calls = self._send("broadcast", [{}] * self.options.ranks)
        calls += [reader.receive_broadcast.remote() for reader in self.fleet.readers]
        return float(max(self.fleet.wait(calls, "broadcast")))

    def _pullers(self) -> list[dict[str, Any]]:
        """Which engine ranks pull from which source rank: in turn, so that all source ranks serve."""
        ranks = self.options.ranks
        return [{"readers": self.fleet.readers[rank::ranks]} for rank in range(ranks)]

    def _gather(self) -> float:
        arguments = [given | {"bucket_bytes": self.options.bucket_bytes} for given in self._pullers()]
        return float(max(self.fleet.wait(self._send("gather", arguments), "gather")))

    def _objects(self) -> float:
        return float(max(self.fleet.wait(self._send("objects", self._pullers()), "objects")))

    def _disk(self) -> float:
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(prefix="rdt-bench-", dir=folder) as made:
            path = str(Path(made) / "model.safetensors")
            written = max(self.fleet.wait(self._send("disk", [{"path": path}] * self.options.ranks), "disk"))
            return float(written + max(self.fleet.ask(self.fleet.readers, "receive_disk", path)))


def _by_rank(readers: Sequence[wire.ReaderReport]) -> list[wire.ReaderReport]:
    return sorted(readers, key=lambda reader: int(reader.reader.rpartition("/")[2]))


def _busy(reader: wire.ReaderReport) -> float:
    return sum(seconds for name, seconds in reader.phases.items() if name != "wait")
