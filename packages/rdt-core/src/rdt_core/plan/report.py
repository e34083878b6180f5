"""A plan's numbers: made here out of the rooms of this folder, for a table, JSON and a picture."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import msgspec
import numpy as np

from .. import wire
from ..manifests import join
from ..routing import Routing
from ..shapes import tensors_of
from . import traffic
from .cluster import Seats, seat
from .links import Links, Nic, links_of, nics_of, summaries
from .options import PlanOptions
from .peers import Peer, compare
from .predict import Phase, landing_seconds, phases
from .readers import ReaderPlan, Transfers, plan_readers
from .simulate import simulate
from .traffic import Balance, Traffic, balance
from .trainers import make_manifests

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of a sync by kind of link, and by whether they are read by themselves or packed at their owner.

    Attributes:
        kind: "mapped" or "prepared".
        form: "direct" or "packed".
        links: that have any; a link can have both direct and packed ones.
        copies: 2-D copies.
        reads: pieces that travel by themselves; a packed span is one.
        bytes: moved.
    """

    kind: str
    form: str
    links: int
    copies: int
    reads: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory that a sync needs, most of all ranks.

    Attributes:
        source_registered: of a source rank, that readers may read: parameters, or the arena with their copy.
        source_arena: of a source rank, that exists only for rdt: the arena of mode snapshot.
        source_pack: of a source rank's pack arenas.
        reader_registered: of an engine rank's parameters that are written in place.
        reader_buffer: of an engine rank's receive buffer.
    """

    source_registered: int
    source_arena: int
    source_pack: int
    reader_registered: int
    reader_buffer: int


@dataclass(frozen=True, slots=True)
class ControlBytes:
    """Bytes of control messages when a group is made, all members together.

    Attributes:
        manifests: that source ranks declare.
        read: manifests that engine ranks read: all of them, each, as one message.
        requests: that engine ranks declare, and owners read.
    """

    manifests: int
    read: int
    requests: int


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan.

    Attributes:
        model, trainer, engine, placement, mode, landing, cluster: what was asked for.
        tensors, model_bytes: of the checkpoint.
        source_ranks, engine_ranks, replicas, nodes: that there are.
        bytes: that a sync moves in all.
        chunks: most of an engine rank.
        balances: how evenly bytes lie on NICs, NVLink, ranks.
        copies: by kind and form.
        memory: most of all ranks.
        control: bytes of messages.
        phases: of a sync after the first one.
        seconds: all phases together.
        simulated_s: of wire and landing, in the simulation; None where it did not run.
        peers: other designs.
        planning_s: what making this plan took: manifests, routing, engine ranks, seconds of this process.
        links: every link with its bytes.
        nics: every NIC with its bytes, in each direction.
    """

    model: str
    trainer: str
    engine: str
    placement: str
    mode: str
    landing: str
    cluster: dict[str, Any]
    tensors: int
    model_bytes: int
    source_ranks: int
    engine_ranks: int
    replicas: int
    nodes: int
    bytes: int
    chunks: int
    balances: tuple[Balance, ...]
    copies: tuple[Copies, ...]
    memory: Memory
    control: ControlBytes
    phases: tuple[Phase, ...]
    seconds: float
    simulated_s: float | None
    peers: tuple[Peer, ...]
    planning_s: dict[str, float]
    links: Links = field(repr=False)
    nics: tuple[Nic, ...] = field(repr=False)

    @property
    def wire_s(self) -> float:
        """Predicted seconds of wire and landing."""
        return next((phase.seconds for phase in self.phases if phase.name.startswith("wire")), 0.0)


def to_dict(report: PlanReport) -> dict[str, Any]:
    """The report as plain JSON types; balances with their ratio, links with a summary of each kind beside them."""
    plain = asdict(report)
    plain["links_by_kind"] = [asdict(one) for one in summaries(report.links)]
    for row, one in zip(plain["balances"], report.balances, strict=True):
        row["ratio"] = one.ratio
    return plain


def make_plan_report(options: PlanOptions, advance: Callable[[str], None] = lambda what: None) -> PlanReport:
    """Plans every rank and predicts a sync.

    Args:
        options: already checked.
        advance: told what was done after each step: "manifests", "routing", "reader" for each engine rank, "prediction".

    Raises:
        SourceError, CoverageError: the layouts do not fit the model, or each other.
    """
    config, engine, cluster = options.config, options.engine, options.cluster
    tensors = tensors_of(config)
    seats = seat(cluster, options.trainer.ranks, engine.replicas, engine.ranks, options.placement)
    clock = _Clock()
    manifests = make_manifests(
        options.trainer, tensors, config, [gpu.meta() for gpu in seats.sources], mode=options.mode
    )
    clock.lap("manifests")
    advance("manifests")
    routing = Routing(manifests)
    clock.lap("routing")
    advance("routing")
    plans, transfers, taken = plan_readers(
        routing,
        engine,
        config,
        seats.sources,
        seats.readers,
        device=cluster.device,
        each=lambda manifest: advance("reader"),
    )
    clock.lap("engine ranks")
    ways = traffic.measure(transfers, cluster, seats)
    registered = [sum(region.nbytes for region in manifest.regions) for manifest in manifests]
    is_snapshot = options.mode == "snapshot"
    ring = engine.landing == "ring"
    land = landing_seconds(transfers, cluster, ring)
    found = phases(
        transfers, ways, cluster, shards=max(len(manifest.shards) for manifest in manifests),
        snapshot_bytes=max(registered) if is_snapshot else 0, sources=len(manifests), readers=len(plans), land=land,
    )  # fmt: skip
    simulated = None
    if options.simulate:
        simulated = simulate(transfers.reader, transfers.chunk, transfers.nbytes, ways, land).seconds
    advance("prediction")
    clock.lap("prediction")
    model_bytes = sum(prod(meta.shape) * wire.DTYPE_BYTES[meta.dtype] for meta in tensors)
    packs = np.zeros(len(manifests), np.int64)
    for plan in plans:
        for source, size in plan.pack_bytes.items():
            packs[source] += size
    declared = sum(len(wire.encode(manifest)) for manifest in manifests)
    read = len(join(manifests)) * len(plans)
    return PlanReport(
        model=options.model,
        trainer=options.trainer_text,
        engine=options.engine_text,
        placement=options.placement,
        mode=options.mode,
        landing=engine.landing,
        cluster=msgspec.to_builtins(cluster),
        tensors=len(tensors),
        model_bytes=model_bytes,
        source_ranks=len(manifests),
        engine_ranks=len(plans),
        replicas=engine.replicas,
        nodes=seats.nodes,
        bytes=int(transfers.nbytes.sum()),
        chunks=max(plan.chunks for plan in plans),
        balances=_balances(plans, transfers, ways, routing, taken, seats, options),
        copies=_copies(transfers),
        memory=Memory(
            source_registered=max(registered),
            source_arena=max(registered) if is_snapshot else 0,
            source_pack=int(packs.max(initial=0)),
            reader_registered=0 if ring else max(plan.parameter_bytes for plan in plans),
            reader_buffer=max(plan.receive_bytes for plan in plans),
        ),
        control=ControlBytes(declared, read, sum(plan.control_bytes for plan in plans)),
        phases=tuple(found),
        seconds=sum(phase.seconds for phase in found),
        simulated_s=simulated,
        peers=tuple(compare(model_bytes, len(tensors), options.stages, cluster, seats)),
        planning_s=clock.laps,
        links=links_of(transfers),
        nics=nics_of(ways),
    )


class _Clock:
    """Seconds of this process between laps."""

    def __init__(self) -> None:
        gc.collect()
        self.laps: dict[str, float] = {}
        self._last = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.laps[name] = now - self._last
        self._last = now


def _balances(
    plans: list[ReaderPlan],
    transfers: Transfers,
    ways: Traffic,
    routing: Routing,
    taken: Array,
    seats: Seats,
    options: PlanOptions,
) -> tuple[Balance, ...]:
    served = traffic.by_source(transfers, len(seats.sources))
    everybody = list(range(len(seats.sources)))
    found = [
        balance("source ranks", served, _floor(routing, taken, everybody)),
        balance("engine ranks", np.array([plan.nbytes for plan in plans])),
    ]
    labels = {"nic out": "NICs of owners", "nic in": "NICs of readers", "copy": "copies inside GPUs"}
    for kind in ("nic out", "nic in", "nvlink out", "nvlink in", "copy"):
        nbytes = ways.nbytes[ways.of(kind)]
        if not nbytes.any():
            continue
        floor = 1.0
        if kind == "nic out" and options.placement == "separate":
            places = [gpu.nic(options.cluster) for gpu in seats.sources]
            numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
            floor = _floor(routing, taken, [numbers[place] for place in places])
        found.append(balance(labels.get(kind, kind.replace("nvlink", "NVLink")), nbytes, floor))
    return tuple(found)


def _floor(routing: Routing, taken: Array, place: list[int]) -> float:
    """Max over mean that no choice of owners could be below, with each source rank at a place."""
    demand: dict[frozenset[int], float] = {}
    for tensor in np.flatnonzero(taken).tolist():
        # finer than by tensor it cannot be told from what was taken; it is a bound all the same
        owners = frozenset(place[rank] for _, ranks in routing.owners(tensor) for rank in ranks)
        demand[owners] = demand.get(owners, 0.0) + float(taken[tensor])
    return traffic.owner_floor([(nbytes, owners) for owners, nbytes in demand.items()], len(set(place)))


def _copies(transfers: Transfers) -> tuple[Copies, ...]:
    rows = []
    for flag, kind in ((1, "mapped"), (0, "prepared")):
        mine = transfers.mapped == flag
        packed = mine & (transfers.packed_bytes > 0)
        direct = mine & (transfers.nbytes > transfers.packed_bytes)
        for form, chosen in (("direct", direct), ("packed", packed)):
            if not chosen.any():
                continue
            pairs = {*zip(transfers.reader[chosen].tolist(), transfers.source[chosen].tolist(), strict=True)}
            spans = int(packed[chosen].sum())
            is_packed = form == "packed"
            own = transfers.packed_bytes[chosen] if is_packed else (transfers.nbytes - transfers.packed_bytes)[chosen]
            rows.append(
                Copies(
                    kind=kind,
                    form=form,
                    links=len(pairs),
                    copies=int((transfers.packed_pieces if is_packed else transfers.copies)[chosen].sum())
                    - (0 if is_packed else spans),
                    reads=spans if is_packed else int(transfers.reads[chosen].sum()) - spans,
                    bytes=int(own.sum()),
                )
            )
    return tuple(rows)
