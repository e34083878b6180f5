"""Plans, executed by the reference executor and compared with what torch does with the whole tensors."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from rdt_core.columns import COLUMNS
from rdt_core.errors import CoverageError
from rdt_core.geometry import Box, Chain, row_major
from rdt_core.planning import Plan, check_taken, make_plan, untaken
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
        boxes = {box: None for box in draw(tilings(Box.full(meta.shape)))}
        views_of_one = draw(st.booleans())
        for box in boxes:
            owners = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=2, unique=True))
            for rank in owners:
                round = draw(st.integers(0, rounds - 1))
                if box.is_empty:
                    world.sources.setdefault((rank, index), np.zeros(8, np.uint8))
                    world.shards[rank].append(ShardMeta(index, box.offset, box.shape, index, 0, row_major(box.shape), round))
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


@cases(5000)
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
