"""Plans, executed by the reference executor and compared with what torch does with the whole tensors."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from rdt_core.columns import COLUMNS
from rdt_core.coverage import check_taken, untaken
from rdt_core.errors import CoverageError
from rdt_core.geometry import Box, Chain, row_major
from rdt_core.planning import Plan, make_plan
from rdt_core.routing import Routing
from rdt_core.tracing import Slice
from rdt_core.wire import DTYPE_BYTES, ShardMeta, SourceManifest, TensorMeta
from rdt_testbed.chains import apply_all, cases, chains, shapes
from rdt_testbed.reference import Sized, execute, manifest, trace_of, view_of

pytestmark = pytest.mark.unit

DTYPES = ["uint8", "bfloat16", "int16", "float32", "int64"]


class World:
    """Checkpoint tensors, the memory of source ranks that hold them, and destinations."""

    def __init__(self, tensors: list[TensorMeta], ranks: int, rounds: int = 1) -> None:
        self.tensors = tensors
        self.rounds = rounds
        self.shards: list[list[ShardMeta]] = [[] for _ in range(ranks)]
        self.sources: dict[tuple[int, int], np.ndarray] = {}
        self.destinations: dict[str, np.ndarray] = {}
        self.slices: list[Slice] = []
        self.values = [
            # values that differ from their neighbours in every dtype, none of which a cast would change
            (torch.arange(torch.Size(meta.shape).numel()).mul(7).add(3 * index) % 251)
            .reshape(meta.shape)
            .to(getattr(torch, meta.dtype))
            for index, meta in enumerate(tensors)
        ]

    def hold(
        self,
        rank: int,
        tensor: int,
        box: Box,
        region: int,
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
        round: int = 0,
    ) -> int:
        """Stores a box in a region of a rank from element `offset` on; returns the first element behind it."""
        meta = self.tensors[tensor]
        item = DTYPE_BYTES[meta.dtype]
        strides = row_major(box.shape) if strides is None else strides
        last = offset + 1 + sum((size - 1) * stride for size, stride in zip(box.shape, strides, strict=True))
        memory = self.sources.get((rank, region), np.zeros(0, np.uint8))
        needed = -(-last * item // 8) * 8
        if len(memory) < needed:
            memory = np.concatenate([memory, np.full(needed - len(memory), 0xEE, np.uint8)])
        self.sources[rank, region] = memory
        index = tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
        view_of(memory, meta.dtype, offset, box.shape, strides).copy_(self.values[tensor][index])
        self.shards[rank].append(ShardMeta(tensor, box.offset, box.shape, region, offset * item, strides, round))
        return last

    def land(
        self,
        tensor: int,
        chain: Chain,
        key: str,
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
        dtype: str | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> int:
        """Takes a chain of a tensor to element `offset` of a destination; returns the first element behind it."""
        meta = self.tensors[tensor]
        dtype = dtype or meta.dtype
        shape = tuple(apply_all(self.values[tensor], chain).shape) if shape is None else shape
        strides = row_major(shape) if strides is None else strides
        last = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        needed = -(-max(last, 1) * DTYPE_BYTES[dtype] // 8) * 8
        memory = self.destinations.get(key, np.zeros(0, np.uint8))
        if len(memory) < needed:
            self.destinations[key] = np.concatenate([memory, np.full(needed - len(memory), 0xDD, np.uint8)])
        self.slices.append(Slice(meta.name, chain, key, offset, shape, strides, dtype, meta.dtype))
        return last

    def manifests(self) -> list[SourceManifest]:
        return [
            manifest(
                rank,
                len(self.shards),
                self.tensors,
                shards,
                {region: len(memory) for (owner, region), memory in self.sources.items() if owner == rank},
                self.rounds,
            )
            for rank, shards in enumerate(self.shards)
        ]

    def plan(self, reader: int = 0, readers: int = 1) -> Plan:
        routing = Routing(self.manifests())
        sizes = {key: Sized(len(memory)) for key, memory in self.destinations.items()}
        return make_plan(trace_of(self.slices, self.tensors), sizes, routing, routing.choose(reader, readers))

    def check(self, plan: Plan) -> None:
        """Executes the plan and compares every byte of every destination with what torch gives."""
        expected = {key: memory.copy() for key, memory in self.destinations.items()}
        for part in self.slices:
            tensor = next(index for index, meta in enumerate(self.tensors) if meta.name == part.name)
            view = view_of(expected[part.destination], part.dtype, part.offset, part.shape, part.strides)
            view.copy_(apply_all(self.values[tensor], part.chain))
        found = {key: memory.copy() for key, memory in self.destinations.items()}
        execute(plan, self.sources, found)
        for key, memory in expected.items():
            assert np.array_equal(found[key], memory), f"{key}: bytes {np.flatnonzero(found[key] != memory)[:8]} differ"


def tensor(name: str, *shape: int, dtype: str = "float32") -> TensorMeta:
    return TensorMeta(name=name, shape=shape, dtype=dtype)


@st.composite
def tilings(draw: st.DrawFn, box: Box, depth: int = 2) -> list[Box]:
    """Cuts a box into uneven parts, the parts again along other axes, some of them empty."""
    if not depth or not box.shape or not draw(st.booleans()):
        return [box]
    axis = draw(st.integers(0, len(box.shape) - 1))
    cuts = sorted(draw(st.lists(st.integers(0, box.shape[axis]), min_size=1, max_size=3)))
    found = []
    for start, end in zip([0, *cuts], [*cuts, box.shape[axis]], strict=True):
        offset = (*box.offset[:axis], box.offset[axis] + start, *box.offset[axis + 1 :])
        part = Box(offset, (*box.shape[:axis], end - start, *box.shape[axis + 1 :]))
        found += draw(tilings(part, depth - 1))
    return found


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in any order of axes, with and without gaps."""
    order = list(range(len(shape)))
    if draw(st.integers(0, 2)) == 2:
        order = draw(st.permutations(order))
    gaps = draw(st.integers(0, 3)) == 3
    strides = [1] * len(shape)
    step = draw(st.sampled_from([1, 1, 1, 2])) if gaps else 1
    for axis in reversed(order):
        strides[axis] = step
        step = step * max(shape[axis], 1) + (draw(st.integers(0, 2)) if gaps else 0)
    return tuple(strides)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    count = draw(st.integers(1, 2))
    tensors = [
        TensorMeta(name=f"layers.{index}.w", shape=draw(shapes(max_axes=3)), dtype=draw(st.sampled_from(DTYPES)))
        for index in range(count)
    ]
    ranks, rounds = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 3]))
    world = World(tensors, ranks, rounds)
    ends: dict[tuple[int, int], int] = {}
    for index, meta in enumerate(tensors):
        boxes = dict.fromkeys(draw(tilings(Box.full(meta.shape))))
        views_of_one = draw(st.booleans())
        for box in boxes:
            owners = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=2, unique=True))
            for rank in owners:
                round = draw(st.integers(0, rounds - 1))
                if box.is_empty:
                    world.sources.setdefault((rank, index), np.zeros(8, np.uint8))
                    world.shards[rank].append(
                        ShardMeta(index, box.offset, box.shape, index, 0, row_major(box.shape), round)
                    )
                elif views_of_one:
                    # every shard a view of one whole tensor: neighbours continue each other
                    strides = row_major(meta.shape)
                    start = sum(o * s for o, s in zip(box.offset, strides, strict=True))
                    world.hold(rank, index, box, index, start, strides, round)
                else:
                    start = ends.get((rank, index), 0) + draw(st.integers(0, 2))
                    ends[rank, index] = world.hold(rank, index, box, index, start, draw(layouts(box.shape)), round)
    behind: dict[str, int] = {}
    for _ in range(draw(st.integers(1, 4))):
        index = draw(st.integers(0, count - 1))
        chain = draw(chains(tensors[index].shape, max_ops=4, casts=draw(st.integers(0, 3)) == 3))
        same = draw(st.integers(0, 4)) < 4
        dtype = tensors[index].dtype if same else draw(st.sampled_from(DTYPES))
        shape = tuple(apply_all(world.values[index], chain).shape)
        if 0 in shape:
            continue
        key = f"{dtype}.{draw(st.integers(0, 1))}"
        start = behind.get(key, 0) + draw(st.integers(0, 1))
        strides = draw(layouts(shape))
        if draw(st.integers(0, 7)) == 7:
            shape, strides = (1, *shape), (5, *strides)
        behind[key] = world.land(index, chain, key, start, strides, dtype, shape)
    return world


@cases(1500)
@given(worlds(), st.integers(0, 3))
def test_executed_plan_equals_torch(world: World, reader: int) -> None:
    plan = world.plan(reader, 4)
    note(str(world.slices))
    note(str({name: getattr(plan.columns, name).tolist() for name in COLUMNS}))
    world.check(plan)
    assert plan.nbytes == plan.columns.nbytes == sum(plan.bytes_by_source.values())
    major = np.stack([plan.columns.round, plan.columns.group, plan.columns.source, plan.columns.destination], axis=1)
    assert major.tolist() == sorted(major.tolist())
    assert world.plan(reader, 4).digest == plan.digest


def two_halves(rows: int = 8, columns: int = 4, dtype: str = "float32") -> World:
    """One tensor of 2-D, its upper half on rank 0 and its lower half on rank 1."""
    world = World([tensor("layers.0.w", rows, columns, dtype=dtype)], 2)
    for rank in range(2):
        world.hold(rank, 0, Box((rank * rows // 2, 0), (rows // 2, columns)), 0)
    return world


def table(plan: Plan, *names: str) -> list[tuple[int, ...]]:
    return [tuple(row) for row in np.stack([getattr(plan.columns, name) for name in names], axis=1).tolist()]


def test_whole_tensor_is_one_copy_for_each_owner() -> None:
    world = two_halves()
    world.land(0, (), "w")
    plan = world.plan()
    assert table(plan, "source", "source_offset", "destination_offset", "rows", "row_bytes", "destination_pitch") == [
        (0, 0, 0, 1, 64, 64),
        (1, 0, 64, 1, 64, 64),
    ]
    assert plan.destinations == ("w",)
    assert plan.bytes_by_source == {0: 64, 1: 64}
    assert plan.taken == ("layers.0.w",)
    assert plan.taken_boxes == ((0, Box((0, 0), (8, 4))),)
    world.check(plan)


def test_columns_are_rows_with_pitches() -> None:
    world = two_halves()
    world.land(0, (("narrow", (1, 1, 2)),), "w", strides=(6, 1))
    plan = world.plan()
    assert table(
        plan, "source", "source_offset", "source_pitch", "destination_offset", "destination_pitch", "rows", "row_bytes"
    ) == [
        (0, 4, 16, 0, 24, 4, 8),
        (1, 4, 16, 96, 24, 4, 8),
    ]
    world.check(plan)


def test_shards_that_lie_side_by_side_on_both_ends_are_merged() -> None:
    """Query, key and value of one local tensor, taken whole by an engine that fuses them in the same order."""
    metas = [tensor(f"layers.0.{part}", 2, 4) for part in "qkv"]
    world = World(metas, 1)
    end, place = 0, 0
    for index in range(3):
        end = world.hold(0, index, Box.full((2, 4)), 0, end)
        place = world.land(index, (), "qkv", place)
    plan = world.plan()
    assert table(plan, "rows", "row_bytes") == [(1, 96)]
    world.check(plan)


def test_column_blocks_side_by_side_become_wider_rows() -> None:
    world = World([tensor("layers.0.w", 4, 6)], 1)
    for start in (0, 2, 4):
        world.hold(0, 0, Box((0, start), (4, 2)), 0, start, (6, 1))
    world.land(0, (), "w")
    plan = world.plan()
    assert table(plan, "rows", "row_bytes") == [(1, 96)]
    world.check(plan)


def test_copies_of_different_rounds_and_groups_stay_apart_and_sorted() -> None:
    world = World([tensor("layers.1.w", 4), tensor("layers.0.w", 4)], 1, rounds=2)
    world.hold(0, 0, Box((0,), (2,)), 0, 0, round=1)
    world.hold(0, 0, Box((2,), (2,)), 0, 2, round=0)
    world.hold(0, 1, Box((0,), (4,)), 0, 4, round=0)
    world.land(0, (), "both")
    world.land(1, (), "both", 4)
    plan = world.plan()
    assert plan.groups == (("layers.0.w",), ("layers.1.w",))
    assert table(plan, "round", "group", "destination_offset", "row_bytes") == [
        (0, 0, 16, 16),
        (0, 1, 8, 8),
        (1, 1, 0, 8),
    ]
    world.check(plan)


def test_change_of_dtype_is_staged_in_the_dtype_of_the_wire() -> None:
    world = two_halves(dtype="bfloat16")
    world.land(0, (("narrow", (0, 2, 4)),), "w", dtype="float32")
    world.land(0, (("narrow", (0, 2, 4)), ("to", ("int16",))), "other", dtype="int16")
    plan = world.plan()
    assert plan.destinations == ("w", "other", "staged:0")
    assert plan.destination_nbytes[2] == 4 * 4 * 2
    assert plan.nbytes == 4 * 4 * 2  # one staging destination serves both
    assert [(s.destination, s.target, s.dtype, s.target_dtype, s.box_shape) for s in plan.staged] == [
        (2, 0, "bfloat16", "float32", (4, 4)),
        (2, 1, "bfloat16", "int16", (4, 4)),
    ]
    world.check(plan)


def test_round_of_a_staged_box_is_its_last() -> None:
    world = World([tensor("layers.0.w", 4)], 1, rounds=3)
    for start, round in ((0, 2), (2, 1)):
        world.hold(0, 0, Box((start,), (2,)), 0, start, round=round)
    world.land(0, (), "w", dtype="int64")
    assert [entry.round for entry in world.plan().staged] == [2]


def test_transposed_copy_travels_in_runs_and_is_transposed_at_the_reader() -> None:
    world = two_halves(64, 32)
    world.land(0, (("t", ()),), "w")
    plan = world.plan()
    assert int(plan.columns.row_bytes.min()) == 32 * 32 * 4
    assert [entry.axes for entry in plan.staged] == [(1, 0)]
    world.check(plan)


def test_transposed_copy_of_a_transposed_shard_is_direct() -> None:
    world = World([tensor("layers.0.w", 64, 32)], 1)
    world.hold(0, 0, Box.full((64, 32)), 0, strides=(1, 64))
    world.land(0, (("t", ()),), "w")
    plan = world.plan()
    assert plan.staged == ()
    assert table(plan, "rows", "row_bytes") == [(1, 64 * 32 * 4)]
    world.check(plan)


def test_nothing_to_move_is_a_plan_without_copies() -> None:
    world = two_halves()
    world.land(0, (("narrow", (0, 0, 0)),), "w")
    plan = world.plan()
    assert (len(plan.columns), plan.nbytes, plan.taken_boxes) == (0, 0, ())
    assert plan.describe()["copies"] == 0


def test_the_same_slice_twice_is_taken_once() -> None:
    world = two_halves()
    world.land(0, (), "w")
    world.land(0, (), "w")
    assert world.plan().nbytes == 128


def test_digest_changes_with_all_that_matters() -> None:
    def made(**changes: Any) -> str:
        world = two_halves(dtype=changes.pop("tensor_dtype", "float32"))
        world.land(0, changes.pop("chain", ()), changes.pop("key", "w"), changes.pop("offset", 0), **changes)
        return world.plan().digest

    digests = [
        made(),
        made(key="v"),
        made(offset=1),
        made(chain=(("narrow", (0, 0, 7)),)),
        made(dtype="int32"),
        made(dtype="int64"),
        made(dtype="int64", chain=(("to", ("int16",)),)),
        made(tensor_dtype="int32", dtype="int32"),
    ]
    assert len(set(digests)) == len(digests)
    assert made() == digests[0]


def test_describe_is_for_people() -> None:
    world = two_halves()
    world.land(0, (), "w", dtype="int64")
    found = world.plan().describe()
    assert (found["bytes"], found["staged"], found["staged_bytes"], found["destinations"]) == (128, 1, 128, 1)
    assert found["sources"] == {"0": 64, "1": 64}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"name": "layers.0.x"},
            "reader 0 of 1 wants 'layers.0.x' for 'w', but no source rank declares it; closest of 1 names: layers.0.w",
        ),
        (
            {"shape": (8, 1, 5)},
            "'layers.0.w' has shape (8, 4) and lands in shape (8, 1, 5) of 'w'; a copy that broadcasts",
        ),
        ({"shape": (4, 8), "strides": (8, 1)}, "has shape (8, 4) and lands in shape (4, 8)"),
        ({"shape": (2, 8, 4), "strides": (0, 4, 1)}, "has shape (8, 4) and lands in shape (2, 8, 4)"),
        ({"offset": 1}, "'layers.0.w' would be written to bytes 68 to 132 of 'w', which has 128 bytes"),
        ({"offset": -1}, "would be written to bytes -4 to 60 of 'w'"),
        ({"dtype": "complex64"}, "lands in 'w' of dtype 'complex64'; known: bool"),
        ({"destination": "gone"}, "lands in 'gone', which is no destination"),
        ({"strides": (0, 1)}, "'layers.0.w' and 'layers.0.w' write the same bytes of 'w'"),
        ({"dtype": "int32", "strides": (3, 1)}, "'layers.0.w' and 'layers.0.w' write the same bytes of 'w'"),
        ({"dtype": "int64"}, "would be written to bytes 0 to 256 of 'w', which has 128 bytes"),
    ],
)
def test_refuses_slices_that_cannot_land(changes: dict[str, Any], text: str) -> None:
    world = two_halves()
    world.land(0, (), "w")
    world.slices = [dataclasses.replace(world.slices[0], **changes)]
    with pytest.raises(CoverageError, match=re.escape(text)):
        world.plan()


@pytest.mark.parametrize("dtype", ["float32", "int32"], ids=["direct", "staged"])
def test_refuses_two_tensors_in_the_same_bytes(dtype: str) -> None:
    world = World([tensor("a", 4, 4), tensor("b", 4, 4)], 1)
    for index in range(2):
        world.hold(0, index, Box.full((4, 4)), index)
    world.land(0, (), "w", strides=(8, 1))
    world.land(1, (), "w", 3, strides=(8, 1), dtype=dtype)
    with pytest.raises(CoverageError, match=re.escape("'a' and 'b' write the same bytes of 'w', from byte 12 on")):
        world.plan()
    world.slices[1] = dataclasses.replace(world.slices[1], offset=4)
    world.check(world.plan())


def test_refuses_a_route_with_a_hole() -> None:
    world = two_halves()
    world.land(0, (), "w")
    routing = Routing(world.manifests())
    route = routing.choose(2, 5)
    shape = route.shape.copy()
    shape[1, 0] = 3
    with pytest.raises(
        CoverageError,
        match=re.escape("reader 2 of 5 wants [0:8, 0:4] of 'layers.0.w', shape (8, 4): elements [7:8, 0:4]"),
    ):
        make_plan(
            trace_of(world.slices, world.tensors), {"w": Sized(128)}, routing, dataclasses.replace(route, shape=shape)
        )


def test_readers_of_replicated_shards_read_from_different_owners() -> None:
    world = World([tensor("layers.0.w", 8)], 2)
    for rank in range(2):
        world.hold(rank, 0, Box.full((8,)), 0)
    world.land(0, (), "w")
    assert [world.plan(reader, 2).bytes_by_source for reader in range(2)] == [{0: 32}, {1: 32}]


def test_names_and_rows_that_nobody_takes() -> None:
    tensors = [tensor("a", 4, 2), tensor("b", 4), tensor("c", 4), tensor("none", 0)]
    assert untaken([["a"], ["c"]], tensors) == ["b"]
    assert untaken([["a"], ["c"]], tensors, ["b"]) == []
    halves = [[(0, Box((0, 0), (2, 2)))], [(0, Box((2, 0), (2, 2))), (1, Box((0,), (4,))), (2, Box((0,), (4,)))]]
    check_taken(halves, tensors)
    check_taken(halves[:1], tensors, ["a", "b", "c"])
    halves[1][0] = (0, Box((2, 0), (2, 1)))
    with pytest.raises(
        CoverageError, match=re.escape("takes 1 of 4 checkpoint tensors: 'a' (elements [2:4, 1:2] of shape (4, 2))")
    ):
        check_taken(halves, tensors)
    with pytest.raises(CoverageError, match="'b', 'c'; if the engine has no use for them, name them in `ignored`"):
        check_taken(halves[:1], tensors, ["a"])


def test_planning_is_fast() -> None:
    """20,000 experts on 64 owners: columns and arrays, so seconds at most, however slow the machine."""
    count, ranks = 20_000, 64
    world = World([], ranks)
    world.tensors = [tensor(f"layers.{i // 100}.experts.{i % 100}.w", 1024, 64, dtype="bfloat16") for i in range(count)]
    for index in range(count):
        for half in range(2):
            rank = (index + half) % ranks
            place = len(world.shards[rank]) * 65536
            world.shards[rank].append(ShardMeta(index, (512 * half, 0), (512, 64), 0, place, (64, 1)))
    for rank in range(ranks):
        world.sources[rank, 0] = np.zeros(len(world.shards[rank]) * 65536, np.uint8)
    world.slices = [
        Slice(
            meta.name,
            (("narrow", (0, 256, 512)),),
            f"layer{index // 100}",
            (index % 100) * 32768,
            (512, 64),
            (64, 1),
            meta.dtype,
            meta.dtype,
        )
        for index, meta in enumerate(world.tensors)
    ]
    routing = Routing(world.manifests())
    sizes = {f"layer{i}": Sized(100 * 65536) for i in range(count // 100)}
    start = time.process_time()
    plan = make_plan(trace_of(world.slices, world.tensors), sizes, routing, routing.choose(0, 1))
    assert time.process_time() - start < 5.0
    assert plan.nbytes == count * 512 * 64 * 2
