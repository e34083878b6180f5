"""Blocks of random plans, moved by real copy programs: equal on both ends, unequal where a byte differs, named as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_core import verifying, wire
from rdt_core.blocks import Blocks
from rdt_core.digests import Digester
from rdt_core.errors import RdtError, TransportError
from rdt_core.geometry import Box, chain_shape, row_major
from rdt_core.landing import Destination
from rdt_core.linking import PACK_REGION, Program, make_program, request_digest
from rdt_core.naming import Names, describe, describe_blocks
from rdt_core.planning import Plan, make_plan
from rdt_core.proofs import OwnerProof
from rdt_core.routing import Routing
from rdt_core.tracing import Slice
from rdt_core.transport import tables
from rdt_core.transport.copying import CopyProgram
from rdt_core.verifying import LinkBlocks, choose, landed, link_blocks, unique
from rdt_testbed.reference import manifest, trace_of

pytestmark = pytest.mark.unit

DTYPES = ["uint8", "bfloat16", "float32", "int64"]


class World:
    """A random model on random ranks, and one engine rank that fuses, slices, transposes and casts it."""

    def __init__(self, seed: int, *, pack: int | None = None) -> None:
        pick = self.pick = np.random.default_rng(seed)
        ranks, rounds = int(pick.integers(1, 4)), int(pick.choice([1, 1, 3]))
        self.tensors = [
            wire.TensorMeta(
                name=f"layers.{index}.w",
                shape=tuple(int(size) for size in pick.integers(1, 9, int(pick.integers(1, 4)))),
                dtype=str(pick.choice(DTYPES)),
            )
            for index in range(int(pick.integers(1, 5)))
        ]
        shards: list[list[wire.ShardMeta]] = [[] for _ in range(ranks)]
        ends = [[0, 0] for _ in range(ranks)]
        for index, meta in enumerate(self.tensors):
            cuts = sorted(int(cut) for cut in pick.integers(0, meta.shape[0] + 1, ranks - 1))
            item = wire.DTYPE_BYTES[meta.dtype]
            for rank, (low, high) in enumerate(zip([0, *cuts], [*cuts, meta.shape[0]], strict=True)):
                if low == high:
                    continue
                shape = (high - low, *meta.shape[1:])
                strides = row_major(shape)
                if len(shape) == 2 and pick.integers(3) == 0:
                    strides = (1, shape[0])
                elif len(shape) > 1 and pick.integers(3) == 0:
                    strides = (strides[0] + int(pick.integers(0, 3)), *strides[1:])
                region = int(pick.integers(2))
                start = -(-ends[rank][region] // 8) * 8 if pick.integers(2) else -(-ends[rank][region] // item) * item
                offset = (low, *(0,) * (len(shape) - 1))
                # a rank has no more rounds than shards
                round = min(int(pick.integers(rounds)), len(shards[rank]))
                shards[rank].append(wire.ShardMeta(index, offset, shape, region, start, strides, round))
                span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
                ends[rank][region] = start + span * item
        self.manifests = [
            manifest(
                rank, ranks, self.tensors, some, {region: end + 8 for region, end in enumerate(ends[rank])},
                max((shard.round for shard in some), default=0) + 1,
            )
            for rank, some in enumerate(shards)
        ]  # fmt: skip
        self.memory = [{region.id: bytes_of(pick, region.nbytes) for region in one.regions} for one in self.manifests]
        self._land(pack)

    def _land(self, pack: int | None) -> None:
        pick = self.pick
        slices: list[Slice] = []
        behind: dict[str, int] = {}
        for meta in self.tensors:
            for _ in range(int(pick.integers(1, 3))):
                chain = ()
                if pick.integers(2):
                    start = int(pick.integers(meta.shape[-1]))
                    length = int(pick.integers(1, meta.shape[-1] - start + 1))
                    chain = (("narrow", (len(meta.shape) - 1, start, length)),)
                if len(meta.shape) == 2 and pick.integers(4) == 0:
                    chain = (*chain, ("t", ()))
                dtype = meta.dtype if pick.integers(5) else "float64"
                shape = chain_shape(meta.shape, chain)
                key = f"{dtype}.{int(pick.integers(2))}"
                start = behind.get(key, 0)
                behind[key] = start + int(np.prod(shape)) + int(pick.integers(2))
                slices.append(Slice(meta.name, chain, key, start, shape, row_major(shape), dtype, meta.dtype))
        self.destinations = {
            key: Destination(key, key, bool(pick.integers(2)), size * 8) for key, size in behind.items()
        }
        routing = Routing(self.manifests)
        route = routing.choose(int(pick.integers(3)), 3)
        self.plan: Plan = make_plan(trace_of(slices, self.tensors), self.destinations, routing, route)
        kinds = dict.fromkeys(range(len(self.manifests)), "local")
        pack = int(pick.choice([0, 5, 17, 1 << 20])) if pack is None else pack
        slots = int(pick.choice([1, 2]))
        thresholds = dict.fromkeys(kinds, pack)
        self.program: Program = make_program(
            self.plan, self.destinations, kinds, thresholds, slots=slots, chunk_bytes=int(pick.choice([1, 64, 1 << 20]))
        )
        self.requests = {
            source: wire.ReadRequest(
                reader="r/0", incarnation="1", source=source, kind="local", pack_bytes=self.program.pack_bytes[source],
                digest=request_digest(transfers, "local", self.program.pack_bytes[source]), transfers=transfers,
            )
            for source, transfers in self.program.requests.items()
        }  # fmt: skip
        buffer = bytes_of(pick, self.program.receive_bytes)
        places = self.program.places.tolist()
        self.tensors_there = [
            bytes_of(pick, size) if place < 0 else buffer[place : place + size]
            for place, size in zip(places, self.plan.destination_nbytes, strict=True)
        ]
        self.tensors_there.append(buffer)
        self.links = {source: link_blocks(request, self.manifests[source]) for source, request in self.requests.items()}

    def sync(self, spoil: tuple[int, int] | None = None) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Moves everything; digests at the owner, and at the reader after each chunk. `spoil`: (source, block) at the reader.

        Returns:
            For each source the digests of both ends.
        """
        arenas = {source: bytes_of(self.pick, request.pack_bytes) for source, request in self.requests.items()}
        theirs = {source: np.zeros(len(link), np.uint64) for source, link in self.links.items()}
        mine = {source: Digester(link.blocks, self.memory[source]).queue()() for source, link in self.links.items()}
        there = {source: landed(link, self.program, source) for source, link in self.links.items()}
        reach = dict(enumerate(self.tensors_there))
        for chunk in self.program.chunks:
            for link in chunk.links:
                transfer = self.requests[link.source].transfers[link.index]
                if transfer.pack_count:
                    CopyProgram(tables.packs(transfer), self.memory[link.source], [arenas[link.source]]).run()
                regions = {**self.memory[link.source], PACK_REGION: arenas[link.source]}
                CopyProgram(link.copies, regions, self.tensors_there).run()
            CopyProgram(chunk.scatter, {0: self.tensors_there[-1]}, self.tensors_there).run()
            for link in chunk.links:
                here = np.flatnonzero(self.links[link.source].transfer == link.index)
                blocks = there[link.source]
                if spoil is not None and spoil[0] == link.source and spoil[1] in here:
                    memory = self.tensors_there[int(blocks.memory[spoil[1]])]
                    place = int(blocks.offset[spoil[1]])
                    place += int(self.pick.integers(blocks.row_bytes[spoil[1]]))
                    memory[place] ^= 1 << int(self.pick.integers(8))
                theirs[link.source][here] = Digester(blocks.take(here), reach).queue()()
        return {source: (mine[source], theirs[source]) for source in self.links}


def bytes_of(pick: np.random.Generator, size: int) -> torch.Tensor:
    return torch.from_numpy(pick.integers(0, 256, size, dtype=np.uint8))


def elements(world: World, source: int, index: int) -> dict[int, set[tuple[int, ...]]]:
    """What a block holds, by looking at the address of every element of every shard."""
    link, manifest = world.links[source], world.manifests[source]
    blocks = link.blocks
    offset, pitch, rows, width = (
        int(getattr(blocks, name)[index]) for name in ("offset", "pitch", "rows", "row_bytes")
    )
    covered = {offset + row * pitch + byte for row in range(rows) for byte in range(width)}
    found: dict[int, set[tuple[int, ...]]] = {}
    for shard in manifest.shards:
        if shard.region != int(blocks.memory[index]) or shard.round != int(link.round[index]):
            continue
        item = wire.DTYPE_BYTES[manifest.tensors[shard.tensor].dtype]
        for place in np.ndindex(*shard.shape):
            start = shard.byte_offset + item * sum(i * s for i, s in zip(place, shard.strides, strict=True))
            if start in covered:
                element = tuple(i + o for i, o in zip(place, shard.offset, strict=True))
                found.setdefault(shard.tensor, set()).add(element)
    return found


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1))
def test_both_ends_digest_the_same_bytes_in_the_same_order(seed: int) -> None:
    world = World(seed)
    moved = 0
    for source, (mine, theirs) in world.sync().items():
        link = world.links[source]
        assert np.array_equal(mine, theirs)
        assert (np.diff(link.transfer) >= 0).all()
        rounds = [transfer.round for transfer in world.requests[source].transfers]
        assert link.round.tolist() == [rounds[number] for number in link.transfer.tolist()]
        moved += int(link.blocks.nbytes.sum())
    # every byte that is moved is in one block
    assert moved == world.plan.nbytes


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1))
def test_a_spoiled_byte_shows_in_its_block_alone_and_is_named(seed: int) -> None:
    world = World(seed)
    source = int(world.pick.choice(sorted(world.links)))
    link = world.links[source]
    index = int(world.pick.integers(len(link)))
    for other, (mine, theirs) in world.sync((source, index)).items():
        assert np.flatnonzero(mine != theirs).tolist() == ([index] if other == source else [])
    names = Names(world.manifests[source])
    expected = elements(world, source, index)
    round = int(link.round[index])
    assert names.tensors(link.blocks, round, index) == set(expected)
    parts = names.parts(link.blocks, round, index)
    assert {part.tensor for part in parts} == set(expected)
    for part in parts:
        low = tuple(min(axis) for axis in zip(*expected[part.tensor], strict=True))
        high = tuple(max(axis) + 1 for axis in zip(*expected[part.tensor], strict=True))
        assert part.box.offset == low
        assert part.box.end == high
    text = describe_blocks(names, link.blocks, link.round, [index])
    for tensor, places in expected.items():
        meta = world.tensors[tensor]
        rows = sorted({place[0] for place in places})
        assert f"{meta.name!r} rows {rows[0]} to {rows[-1]} of {meta.shape[0]}" in text


def test_whatever_a_shard_starts_ends_a_block() -> None:
    """Neighbours that are merged into one copy are digested one by one, so that a fault is not blamed on all of them."""
    tensors = [wire.TensorMeta(name=f"w{index}", shape=(4, 6), dtype="float32") for index in range(3)]
    shards = [wire.ShardMeta(index, (0, 0), (4, 6), 0, 96 * index, (6, 1)) for index in range(3)]
    one = manifest(0, 1, tensors, shards, {0: 288})
    routing = Routing([one])
    slices = [Slice(f"w{index}", (), "all", 24 * index, (4, 6), (6, 1), "float32", "float32") for index in range(3)]
    destinations = {"all": Destination("all", "m", True, 288)}
    plan = make_plan(trace_of(slices, tensors), destinations, routing, routing.choose(0, 1))
    assert len(plan.columns) == 1
    program = make_program(plan, destinations, {0: "local"}, {0: 0})
    request = wire.ReadRequest(
        reader="r/0", incarnation="", source=0, kind="local", digest="", pack_bytes=0, transfers=program.requests[0]
    )
    link = link_blocks(request, one)
    assert link.blocks.offset.tolist() == [0, 96, 192]
    assert landed(link, program, 0).offset.tolist() == [0, 96, 192]
    assert [Names(one).tensors(link.blocks, 0, index) for index in range(3)] == [{0}, {1}, {2}]


def test_large_copies_are_cut_and_their_rows_named() -> None:
    tensors = [wire.TensorMeta(name="w", shape=(3000, 2048), dtype="bfloat16")]
    shards = [wire.ShardMeta(0, (0, 0), (3000, 2048), 0, 0, (2048, 1))]
    one = manifest(0, 1, tensors, shards, {0: 3000 * 4096})
    columns = np.array([[0, 0, 4096, 3000, 2048]], "<i8").T.tobytes()  # half of every row
    transfer = wire.Transfer(chunk=0, round=0, count=1, columns=columns, nbytes=3000 * 2048)
    request = wire.ReadRequest(
        reader="r/0", incarnation="", source=0, kind="local", digest="", pack_bytes=0, transfers=(transfer,)
    )
    link = link_blocks(request, one)
    assert link.blocks.rows.tolist() == [2048, 952]
    text = describe_blocks(Names(one), link.blocks, link.round, [1])
    assert text == "'w' rows 2048 to 2999 of 3000, columns 0 to 1023 of 2048"


def counted(count: int) -> LinkBlocks:
    zeros = np.zeros((9, count), np.int64)
    return LinkBlocks(zeros[0], zeros[1], Blocks(*zeros[:5]), zeros[6], zeros[7], zeros[8])


def test_samples_are_alike_on_both_ends_and_others_at_every_version() -> None:
    many = counted(50_000)
    many.round[40_000:] = 1
    many.round[49_999] = 2
    assert choose(many, "off", 1, "d").tolist() == []
    assert choose(many, "full", 1, "d").tolist() == list(range(50_000))
    first = choose(many, "sample", 1, "d")
    assert first.tolist() == sorted(set(first.tolist())) == choose(many, "sample", 1, "d").tolist()
    assert 0.8 * 50_000 / 32 < len(first) < 1.2 * 50_000 / 32
    assert set(many.round[first].tolist()) == {0, 1, 2}, "every round has at least one"
    assert first.tolist() != choose(many, "sample", 2, "d").tolist() != choose(many, "sample", 2, "e").tolist()
    seen = np.zeros(50_000, bool)
    for version in range(200):
        seen[choose(many, "sample", version, "d")] = True
    assert seen.mean() > 0.99
    taken = {tuple(choose(counted(3), "sample", version, "d").tolist()) for version in range(60)}
    assert {(0,), (1,), (2,)} <= taken
    assert choose(counted(0), "sample", 1, "d").tolist() == []


def test_blocks_that_several_readers_read_are_digested_once() -> None:
    links = [link for seed in range(6) for link in World(seed, pack=0).links.values()]
    twice = [*links, *links]
    blocks, rounds, places = unique(twice)
    once = unique(links)
    assert len(blocks) == len(once[0])
    for link, place in zip(twice, places, strict=True):
        for name in ("memory", "offset", "pitch", "rows", "row_bytes"):
            assert np.array_equal(getattr(blocks, name)[place], getattr(link.blocks, name))
        assert np.array_equal(rounds[place], link.round)
    assert [len(part) for part in (unique([])[0], unique([])[1], unique([])[2])] == [0, 0, 0]


def test_a_program_of_another_request_is_refused() -> None:
    one, other = World(11), World(12)
    source = next(iter(one.links))
    with pytest.raises(TransportError, match=rf"of source rank {source} in .* copies, but its request says \d+ bytes"):
        landed(one.links[source], other.program, source)


NUMBERS = st.one_of(st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**31, 2**40, 2**62]))


@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.integers(-1, 2), *[NUMBERS] * 4), max_size=4), st.lists(st.tuples(*[NUMBERS] * 6), max_size=2)
)
def test_requests_that_lie_are_refused_or_digested_inside_the_regions(reads, packs) -> None:
    tensors = [wire.TensorMeta(name=f"w{index}", shape=(5, 3), dtype="float32") for index in range(2)]
    shards = [wire.ShardMeta(index, (0, 0), (5, 3), 0, 64 * index, (3, 1)) for index in range(2)]
    one = manifest(0, 1, tensors, shards, {0: 130, 1: 7})
    transfer = wire.Transfer(
        chunk=0, round=0, count=len(reads), columns=np.array(reads, "<i8").T.tobytes(),
        pack_count=len(packs), pack_columns=np.array(packs, "<i8").T.tobytes(),
    )  # fmt: skip
    request = wire.ReadRequest(
        reader="r/0", incarnation="", source=0, kind="local", digest="", pack_bytes=0, transfers=(transfer,)
    )
    memory = {0: torch.zeros(130, dtype=torch.uint8), 1: torch.zeros(7, dtype=torch.uint8)}
    try:
        tables.check_request(request, 120, 1)
        proof = OwnerProof(one, memory, [request])
    except TransportError:
        return
    proof.start("full", 1)
    proof.take(0)
    assert set(proof.digests()) == {"r/0"}


def test_modes_are_known() -> None:
    assert [verifying.check_mode(mode) for mode in ("off", "sample", "full")] == ["off", "sample", "full"]
    with pytest.raises(RdtError, match="verify must be one of off, sample, full; found 'yes'"):
        verifying.check_mode("yes")


def test_descriptions() -> None:
    assert describe("x", (), [Box((), ())]) == "'x'"
    assert describe("x", (9,), [Box((1,), (2,)), Box((3,), (1,)), Box((7,), (2,))]) == "'x' rows 1 to 3, 7 to 8 of 9"
    text = describe("x", (9, 4, 4), [Box((0, 0, 1), (1, 4, 2))])
    assert text == "'x' rows 0 to 0 of 9, axis 2 1 to 2 of 4"
