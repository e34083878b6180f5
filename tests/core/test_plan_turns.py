"""Readers that begin at different layers: in what order chunks come, and that all bytes land all the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rdt_core.bench.layouts import EngineModule, EngineRank
from rdt_core.landing import Destination, storage_bytes
from rdt_core.linking import PACK_REGION, Program, make_program
from rdt_core.plan.cluster import Gpu
from rdt_core.plan.trainers import make_manifests
from rdt_core.planning import Plan, make_plan
from rdt_core.routing import Routing
from rdt_core.shapes import Config, tensors_of
from rdt_core.tracing import Destinations, trace
from rdt_core.trainers import FsdpLayout, Layout, MegatronLayout
from rdt_core.transport import tables
from rdt_core.transport.base import Copies
from rdt_core.wire import DTYPE_BYTES, SourceManifest

pytestmark = pytest.mark.unit

CONFIG = Config(8, 32, 64, 4, 2, 8, 96, qk_norm=True, experts=4, expert_intermediate=16)
TENSORS = tensors_of(CONFIG)
Memory = dict[tuple[int, int], np.ndarray]


def manifests(layout: Layout) -> list[SourceManifest]:
    return make_manifests(layout, TENSORS, CONFIG, [Gpu(rank, 0).meta() for rank in range(layout.ranks)])


def planned(layout: Layout, reader: int, in_place: bool = False) -> tuple[Plan, dict[str, Destination], EngineModule]:
    routing = Routing(manifests(layout))
    module = EngineModule(TENSORS, CONFIG, EngineRank("vllm", reader % 2, 2), "cpu")
    targets = Destinations.of(module)
    found = trace(module.load_weights, routing.tensors, targets)
    destinations = {
        key: Destination(key, key.rpartition(".")[0], in_place, one.untyped_storage().nbytes())
        for key, one in targets.items()
    }
    return make_plan(found, destinations, routing, routing.choose(reader, 2)), destinations, module


def program_of(plan: Plan, destinations: dict[str, Destination], chunk_bytes: int) -> Program:
    sources = dict.fromkeys(plan.bytes_by_source, "prepared")
    return make_program(plan, destinations, sources, dict.fromkeys(sources, 64), chunk_bytes=chunk_bytes)


def layers(plan: Plan, program: Program) -> list[list[int]]:
    """Layers of the destinations that each chunk opens."""
    return [
        sorted({int(name.split(".")[2]) for name in chunk.opens if name.startswith("model.layers.")})
        for chunk in program.chunks
    ]


PIPELINE = MegatronLayout(8, tp=2, pp=4, ep=2)


def test_readers_of_a_pipeline_begin_at_different_layers() -> None:
    orders = []
    for reader in range(4):
        plan, destinations, _ = planned(PIPELINE, reader)
        assert sorted(plan.turns.tolist()) == list(range(len(plan.groups)))
        program = program_of(plan, destinations, 1)
        assert len(program.chunks) == len(plan.groups)
        orders.append([layer for chunk in layers(plan, program) for layer in chunk])
        assert sorted(orders[-1]) == list(range(8))
    assert orders[0] == list(range(8)), "the first reader goes through the model as it is"
    assert len({tuple(order) for order in orders}) == 4
    assert len({order[0] for order in orders}) > 1


def test_where_nothing_waits_or_every_rank_holds_a_part_the_order_is_the_models() -> None:
    plan, destinations, _ = planned(PIPELINE, 3)
    whole = program_of(plan, destinations, 1 << 40)
    assert len(whole.chunks) == 1
    half = program_of(plan, destinations, plan.nbytes * 2 // 3)
    assert len(half.chunks) == 2
    assert [layer for chunk in layers(plan, half) for layer in chunk] == list(range(8))
    spread, destinations, _ = planned(FsdpLayout(4), 3)
    assert spread.turns.tolist() == list(range(len(spread.groups)))
    assert len(program_of(spread, destinations, 1).chunks) == len(spread.groups)


def filled(found: list[SourceManifest], weights: dict[str, torch.Tensor]) -> Memory:
    """The regions of all source ranks with the weights in their places."""
    memory: Memory = {}
    for one in found:
        for region in one.regions:
            memory[one.rank, region.id] = np.zeros(-(-region.nbytes // 8) * 8, np.uint8)
        for shard in one.shards:
            meta = one.tensors[shard.tensor]
            flat = torch.from_numpy(memory[one.rank, shard.region]).view(getattr(torch, meta.dtype))
            start = shard.byte_offset // DTYPE_BYTES[meta.dtype]
            box = tuple(slice(low, low + size) for low, size in zip(shard.offset, shard.shape, strict=True))
            torch.as_strided(flat, shard.shape, shard.strides, start).copy_(weights[meta.name][box])
    return memory


def move(copies: Copies, regions: dict[int, np.ndarray], targets: list[np.ndarray]) -> None:
    for at in range(len(copies)):
        for row in range(int(copies.rows[at])):
            begin = int(copies.source_offset[at] + row * copies.source_pitch[at])
            end = int(copies.destination_offset[at] + row * copies.destination_pitch[at])
            width = int(copies.row_bytes[at])
            part = regions[int(copies.source_region[at])][begin : begin + width]
            assert len(part) == width
            targets[int(copies.destination[at])][end : end + width] = part


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 1 << 40])
@pytest.mark.parametrize("reader", [0, 3, 1 << 31])
def test_programs_move_the_same_bytes_in_any_order(reader: int, chunk_bytes: int, in_place: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    weights = {
        meta.name: torch.randn(meta.shape, generator=generator).to(getattr(torch, meta.dtype)) for meta in TENSORS
    }
    memory = filled(manifests(PIPELINE), weights)
    plan, destinations, module = planned(PIPELINE, reader, in_place)
    program = program_of(plan, destinations, chunk_bytes)
    assert sum(link.nbytes for chunk in program.chunks for link in chunk.links) == plan.nbytes
    landed = {
        key: np.zeros(size, np.uint8) for key, size in zip(plan.destinations, plan.destination_nbytes, strict=True)
    }
    arenas = {source: np.zeros(size, np.uint8) for source, size in program.pack_bytes.items()}
    for source, transfers in program.requests.items():
        own = {region: one for (rank, region), one in memory.items() if rank == source}
        for transfer in transfers:
            move(tables.packs(transfer), own, [arenas[source]])
    buffer = np.zeros(program.receive_bytes, np.uint8)
    targets = [
        landed[key] if place < 0 else buffer[place : place + size]
        for key, place, size in zip(plan.destinations, program.places.tolist(), plan.destination_nbytes, strict=True)
    ] + [buffer]
    for chunk in program.chunks:
        for link in chunk.links:
            own = {region: one for (rank, region), one in memory.items() if rank == link.source}
            move(link.copies, own | {PACK_REGION: arenas[link.source]}, targets)
        move(chunk.scatter, {0: buffer}, targets)
        for number, key in enumerate(plan.destinations):
            if destinations[key].module in chunk.closes and program.places[number] >= 0:
                landed[key][:] = targets[number]
    module.load_weights(weights.items())
    for key, parameter in module.named_parameters():
        assert np.array_equal(landed[key], storage_bytes(parameter.data).numpy()), key
