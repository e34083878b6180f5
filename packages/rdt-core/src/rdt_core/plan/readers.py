"""The plan of every engine rank of a model, made by the rooms that make it in a run: tracing, routing, planning, linking.

Engine ranks are the bench's modules on the meta device. Replicas share traces, because their ranks take the same; each
rank has a route of its own. What is kept of a plan are numbers: one row for each transfer of a link.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .. import wire
from ..bench.layouts import EngineModule, EngineRank
from ..landing import Destination
from ..linking import Program, make_program
from ..planning import Plan, make_plan
from ..routing import Routing
from ..shapes import Config
from ..tracing import Destinations, Trace, trace
from ..transport import pack_threshold, tables
from .cluster import Gpu
from .trainers import GROUP, VERSIONS

Array = np.ndarray
LANDINGS = ("in_place", "ring")


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """An engine's replicas, each spread alike.

    Attributes:
        engine: "vllm" or "sglang".
        tp, ep, pp: of a replica (see `bench.layouts.EngineRank`).
        replicas: how many.
        landing: "in_place" (bytes go straight into parameters) or "ring" (through receive buffers and a post-load step).
    """

    engine: str
    tp: int = 1
    ep: int = 1
    pp: int = 1
    replicas: int = 1
    landing: str = "in_place"

    @property
    def ranks(self) -> int:
        """Engine ranks of a replica."""
        return self.tp * self.pp

    def at(self, rank: int) -> EngineRank:
        """One rank of a replica."""
        return EngineRank(self.engine, rank, self.tp, self.ep, self.pp)


@dataclass(frozen=True, slots=True)
class Transfers:
    """One row for each transfer of a link in a sync, of all engine ranks. int64, [N].

    Attributes:
        reader: number of the engine rank, replica after replica.
        chunk: position in the reader's sync.
        source: source rank.
        mapped: 1 where the link is mapped, 0 where it is prepared.
        nbytes: that travel, packed ones included.
        reads: pieces that are read by themselves; a packed span is one.
        packed_bytes, packed_pieces: what the owner packs for it before, and the reader scatters afterwards, in 2-D copies.
        copies: 2-D copies that are read by themselves.
    """

    reader: Array
    chunk: Array
    source: Array
    mapped: Array
    nbytes: Array
    reads: Array
    packed_bytes: Array
    packed_pieces: Array
    copies: Array

    def __len__(self) -> int:
        return len(self.reader)


@dataclass(frozen=True, slots=True)
class ReaderPlan:
    """What one engine rank's plan comes to.

    Attributes:
        nbytes: moved by every sync.
        copies, chunks, links: of its plan and program.
        pack_bytes: of the arenas that owners make for it, by source rank.
        receive_bytes: of its receive buffer.
        parameter_bytes: of its model.
        control_bytes: of what it declares when it connects.
    """

    nbytes: int
    copies: int
    chunks: int
    links: int
    pack_bytes: dict[int, int]
    receive_bytes: int
    parameter_bytes: int
    control_bytes: int


@dataclass(frozen=True, slots=True)
class _Traced:
    """What the ranks of equal number in all replicas share."""

    trace: Trace
    destinations: dict[str, Destination]


def plan_readers(
    routing: Routing,
    engine: EngineLayout,
    config: Config,
    sources: Sequence[Gpu],
    readers: Sequence[Gpu],
    *,
    device: str = "cuda",
    each: Callable[[wire.EngineManifest], None] = lambda manifest: None,
) -> tuple[list[ReaderPlan], Transfers, Array]:
    """Plans every engine rank.

    Args:
        routing: of all source ranks.
        engine: the replicas.
        config: of the model.
        sources, readers: the GPU of each rank.
        device: "cuda" or "cpu": decides what is packed.
        each: is given what each engine rank would declare.

    Returns:
        A summary for each engine rank, all of their transfers, and for each checkpoint tensor the bytes that they take of it.

    Raises:
        SourceError: the engine layout does not divide the model.
        CoverageError: the source ranks do not hold what the engine takes.
    """
    plans: list[ReaderPlan] = []
    rows: list[tuple[int, ...]] = []
    taken = np.zeros(len(routing.tensors), np.int64)
    for rank in range(engine.ranks):
        traced = _trace(routing, engine, config, rank)
        for replica in range(engine.replicas):
            number = replica * engine.ranks + rank
            plan, program, kinds = _plan(routing, traced, engine, replica, rank, sources, readers[number], device)
            manifest = _declared(replica, rank, engine, plan, program, kinds)
            own, its_rows = _summary(number, plan, program, kinds, traced, len(wire.encode(manifest)))
            plans.append(own)
            rows += its_rows
            each(manifest)
            for tensor, box in plan.taken_boxes:
                taken[tensor] += box.numel * wire.DTYPE_BYTES[routing.tensors[tensor].dtype]
    # ranks came number by number over the replicas; readers are counted replica after replica
    order = [rank * engine.replicas + replica for replica in range(engine.replicas) for rank in range(engine.ranks)]
    table = np.array(sorted(rows), np.int64).reshape(-1, len(Transfers.__slots__)).T
    return [plans[at] for at in order], Transfers(*map(np.ascontiguousarray, table)), taken


def _trace(routing: Routing, engine: EngineLayout, config: Config, rank: int) -> _Traced:
    module = EngineModule(routing.tensors, config, engine.at(rank), "meta")
    targets = Destinations.of(module)
    found = trace(module.load_weights, routing.tensors, targets, "cuda")
    return _Traced(
        found,
        {
            key: Destination(
                key, key.rpartition(".")[0], engine.landing == "in_place", tensor.untyped_storage().nbytes()
            )
            for key, tensor in targets.items()
        },
    )


def _plan(
    routing: Routing,
    traced: _Traced,
    engine: EngineLayout,
    replica: int,
    rank: int,
    sources: Sequence[Gpu],
    here: Gpu,
    device: str,
) -> tuple[Plan, Program, dict[int, str]]:
    """As `Receiver.connect` does it."""
    route = routing.choose(rank + zlib.crc32(_name(replica).encode()), engine.ranks, here.meta())
    plan = make_plan(traced.trace, traced.destinations, routing, route)
    kinds = {
        source: "mapped" if sources[source].node == here.node else "prepared" for source in sorted(plan.bytes_by_source)
    }
    thresholds = {source: pack_threshold(kind, device) for source, kind in kinds.items()}
    return plan, make_program(plan, traced.destinations, kinds, thresholds), kinds


def _name(replica: int) -> str:
    return f"replica-{replica}"


def _declared(
    replica: int, rank: int, engine: EngineLayout, plan: Plan, program: Program, kinds: dict[int, str]
) -> wire.EngineManifest:
    name, incarnation = f"{_name(replica)}/{rank}", "0" * 32
    return wire.EngineManifest(
        group=GROUP, replica=_name(replica), rank=rank, world_size=engine.ranks, incarnation=incarnation, versions=VERSIONS,
        node=Gpu(0, 0).meta(), engine=engine.engine, digest=plan.digest, nbytes=plan.nbytes, taken=plan.taken,
        boxes=tuple(wire.TakenBox(tensor=t, offset=box.offset, shape=box.shape) for t, box in plan.taken_boxes),
        requests=tuple(
            wire.ReadRequest(
                reader=name, incarnation=incarnation, source=source, kind=kinds[source], digest=plan.digest,
                pack_bytes=program.pack_bytes[source], transfers=transfers,
            )
            for source, transfers in sorted(program.requests.items())
        ),
    )  # fmt: skip


def _summary(
    number: int, plan: Plan, program: Program, kinds: dict[int, str], traced: _Traced, control_bytes: int
) -> tuple[ReaderPlan, list[tuple[int, ...]]]:
    rows: list[tuple[int, ...]] = []
    for source, transfers in program.requests.items():
        for transfer in transfers:
            reads, packs = tables.reads(transfer), tables.packs(transfer)
            rows.append(
                (
                    number, transfer.chunk, source, int(kinds[source] == "mapped"), transfer.nbytes, int(reads.rows.sum()),
                    packs.nbytes, len(packs), len(reads),
                )
            )  # fmt: skip
    return (
        ReaderPlan(
            nbytes=plan.nbytes,
            copies=len(plan.columns),
            chunks=len(program.chunks),
            links=len(program.requests),
            pack_bytes={source: size for source, size in program.pack_bytes.items() if size},
            receive_bytes=program.receive_bytes,
            parameter_bytes=sum(one.nbytes for one in traced.destinations.values()),
            control_bytes=control_bytes,
        ),
        rows,
    )
