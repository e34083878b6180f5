"""Who holds what and who serves whom: merging of manifests, gates against gaps and overlaps, balance."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rdt_core.errors import CoverageError
from rdt_core.geometry import Box, row_major
from rdt_core.routing import Route, Routing
from rdt_core.wire import NodeMeta, ShardMeta, SourceManifest, TensorMeta
from rdt_testbed.chains import cases, shapes
from rdt_testbed.reference import manifest, node_meta

pytestmark = pytest.mark.unit

W = TensorMeta(name="w", shape=(8, 4), dtype="float32")
Held = tuple[int, tuple[int, ...], tuple[int, ...]]


def held(tensors: list[TensorMeta], *ranks: list[Held], nodes: list[NodeMeta] | None = None) -> list[SourceManifest]:
    """One manifest for each rank; a rank's boxes lie one after the other in its one region."""
    found = []
    for rank, boxes in enumerate(ranks):
        place, shards = 0, []
        for index, offset, shape in boxes:
            shards.append(ShardMeta(index, offset, shape, 7, place, row_major(shape)))
            place += 4 * int(np.prod(shape))
        found.append(manifest(rank, len(ranks), tensors, shards, {7: place}, node=nodes[rank] if nodes else None))
    return found


def rows(start: int, end: int) -> Held:
    return (0, (start, 0), (end - start, 4))


def chosen(route: Route) -> list[int]:
    return [int(rank) for rank in route.source]


def test_boxes_and_owners() -> None:
    routing = Routing(held([W], [rows(4, 8)], [rows(0, 4), (0, (2, 0), (0, 4))], [rows(4, 8)])[::-1])
    assert routing.owners(0) == [(Box((0, 0), (4, 4)), (1,)), (Box((4, 0), (4, 4)), (0, 2))]
    route = routing.choose(0, 1)
    assert route.offset.tolist() == [[0, 0], [4, 0]]
    assert route.shape.tolist() == [[4, 4], [4, 4]]
    assert route.stride.tolist() == [[4, 1], [4, 1]]
    assert (route.region.tolist(), route.byte_offset.tolist(), route.round.tolist()) == ([7, 7], [0, 0], [0, 0])
    assert route.reader == "reader 0 of 1"


def test_tensors_of_different_ranks_and_without_elements() -> None:
    tensors = [
        TensorMeta(name=n, shape=s, dtype="float32")
        for n, s in (("s", ()), ("v", (3,)), ("e", (0, 5)), ("c", (2, 1, 3, 1)))
    ]
    routing = Routing(held(tensors, [(0, (), ()), (3, (0, 0, 0, 0), (2, 1, 3, 1))], [(1, (0,), (3,))]))
    assert routing.choose(0, 1).starts.tolist() == [0, 1, 2, 2, 3]
    assert routing.owners(0) == [(Box((), ()), (0,))]
    assert routing.owners(2) == []


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (
            [[rows(0, 4)], [rows(5, 8)]],
            "no source rank holds elements [4:5, 0:4] of tensor 'w', shape (8, 4); 2 source ranks hold 2 boxes",
        ),
        ([[rows(0, 4)], []], "no source rank holds elements [4:8, 0:4] of tensor 'w'"),
        ([[], []], "no source rank holds elements [0:8, 0:4] of tensor 'w'"),
        (
            [[rows(0, 5)], [rows(3, 8)]],
            "overlap without being equal: [0:5, 0:4] of source rank 0 and [3:8, 0:4] of source rank 1",
        ),
        ([[rows(0, 8)], [rows(0, 8), rows(4, 8)]], "[0:8, 0:4] of source rank 0, 1 and [4:8, 0:4] of source rank 1"),
        # as many elements as the tensor has, but one part twice and one part not at all
        (
            [[rows(0, 4)], [(0, (0, 0), (8, 2))]],
            "overlap without being equal: [0:4, 0:4] of source rank 0 and [0:8, 0:2]",
        ),
    ],
)
def test_refuses_gaps_and_overlaps(ranks: list[list[Held]], text: str) -> None:
    with pytest.raises(CoverageError, match=re.escape(text)):
        Routing(held([W], *ranks))


def test_refuses_manifests_that_contradict_one_another() -> None:
    one, two = held([W], [rows(0, 4)], [rows(4, 8)])

    def changed(**changes: object) -> SourceManifest:
        return msgspec.structs.replace(two, **changes)

    more = TensorMeta(name="b", shape=(1,), dtype="float32")
    other = TensorMeta(name="w", shape=(8, 4), dtype="bfloat16")
    for manifests, text in [
        ([], "no source rank has joined"),
        ([one], "source rank 1 of 2 has not declared its shards"),
        ([one, one, two], "source rank 0 is declared more than once"),
        ([one, changed(world_size=3)], "source ranks 0 and 1 disagree about world_size: 2 and 3"),
        ([one, changed(group="other")], "disagree about group: 'policy' and 'other'"),
        (
            [one, changed(tensors=(other,))],
            "rank 1 declares checkpoint tensor 'w' [8, 4] bfloat16 and source rank 0 'w'",
        ),
        ([one, changed(tensors=(W, more))], "no source rank holds elements"),
    ]:
        with pytest.raises(CoverageError, match=re.escape(text)):
            Routing(manifests)


def test_each_rank_has_its_own_number_of_rounds() -> None:
    one, two = held([W], [rows(0, 4)], [rows(4, 8)])
    assert Routing([one, msgspec.structs.replace(two, rounds=3)]).rounds == 3


def test_replicated_boxes_are_balanced_and_readers_start_apart() -> None:
    tensors = [
        TensorMeta(name=f"t{i}", shape=(size,), dtype="float32") for i, size in enumerate([100, 60, 50, 50, 40, 10, 10])
    ]
    everything: list[Held] = [(i, (0,), meta.shape) for i, meta in enumerate(tensors)]
    routing = Routing(held(tensors, everything, everything, everything, everything))
    routes = [routing.choose(reader, 4) for reader in range(4)]
    assert len({chosen(route)[0] for route in routes}) == 4  # the largest tensor is read from four owners
    for route in routes:
        load = Counter[int]()
        for index, rank in enumerate(chosen(route)):
            load[rank] += tensors[index].shape[0]
        assert max(load.values()) <= 100
    assert chosen(routing.choose(1, 4)) == chosen(routes[1])
    assert chosen(routing.choose(4001, 4)) == chosen(routes[1])
    with pytest.raises(CoverageError, match="reader -1 of 4 is no reader"):
        routing.choose(-1, 4)


def test_what_only_one_rank_holds_counts_in_the_balance() -> None:
    tensors = [TensorMeta(name="own", shape=(10,), dtype="float32")]
    tensors += [TensorMeta(name=f"t{i}", shape=(5,), dtype="float32") for i in range(2)]
    both: list[Held] = [(1, (0,), (5,)), (2, (0,), (5,))]
    routing = Routing(held(tensors, [(0, (0,), (10,)), *both], both))
    assert chosen(routing.choose(0, 1)) == [0, 1, 1]


def test_near_owners_come_first() -> None:
    nodes = [node_meta("n0", "b0"), node_meta("n1", "b1"), node_meta("n1", "b2"), node_meta("n2", "")]
    routing = Routing(held([W], *[[rows(0, 8)]] * 4, nodes=nodes))
    for reader in range(4):
        assert chosen(routing.choose(reader, 4, node_meta("n1", "b2"))) == [2]
        assert chosen(routing.choose(reader, 4, node_meta("n0", "elsewhere"))) == [0]
    assert {chosen(routing.choose(reader, 4, node_meta("n1", "b9")))[0] for reader in range(4)} == {1, 2}
    # an unknown boot id is nobody's neighbour
    assert {chosen(routing.choose(reader, 4, node_meta("n9", "")))[0] for reader in range(4)} == {0, 1, 2, 3}


def test_owner_brings_its_own_round() -> None:
    one, two = held([W], [rows(0, 8)], [rows(0, 8)])
    one = msgspec.structs.replace(one, rounds=2)
    shard = msgspec.structs.replace(two.shards[0], round=1)
    routing = Routing([one, msgspec.structs.replace(two, rounds=2, shards=(shard,))])
    assert [(chosen(r), r.round.tolist()) for r in (routing.choose(0, 2), routing.choose(1, 2))] == [
        ([0], [0]),
        ([1], [1]),
    ]


@cases(1500)
@given(st.data())
def test_gate_accepts_exactly_the_tilings(data: st.DataObject) -> None:
    """Boxes from random cuts, then perhaps one lost, moved or resized; a count of every element is the oracle."""
    shape = data.draw(shapes(max_axes=3, empty=False))
    boxes = [Box.full(shape)]
    for _ in range(data.draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        axis = data.draw(st.integers(0, len(shape) - 1))
        cut = data.draw(st.integers(0, box.shape[axis]))
        for start, size in ((0, cut), (cut, box.shape[axis] - cut)):
            offset, part = list(box.offset), list(box.shape)
            offset[axis] += start
            part[axis] = size
            boxes.append(Box(tuple(offset), tuple(part)))
    harm = data.draw(st.sampled_from(["", "", "lose", "change", "add"]))
    if harm == "lose":
        boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    elif harm:
        offset = [data.draw(st.integers(0, size)) for size in shape]
        extra = Box(tuple(offset), tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)))
        if harm == "change":
            boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        boxes.append(extra)
    count = torch.zeros(shape, dtype=torch.int32)
    for box in set(boxes):
        count[tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))] += 1
    # a second, well covered tensor must not hide or cause anything
    tensors = [
        TensorMeta(name="first", shape=(2, 2), dtype="float32"),
        TensorMeta(name="w", shape=shape, dtype="float32"),
    ]
    assume(boxes or shape == ())
    made = held(tensors, [(0, (0, 0), (2, 2)), *((1, box.offset, box.shape) for box in boxes)])
    if bool((count == 1).all()):
        assert len(Routing(made).owners(1)) == len({box for box in boxes if not box.is_empty})
    else:
        with pytest.raises(CoverageError, match="'w'"):
            Routing(made)


def test_route_is_plain_data() -> None:
    route = Routing(held([W], [rows(0, 8)])).choose(0, 1)
    assert all(
        getattr(route, f.name).dtype == np.int64
        for f in dataclasses.fields(Route)
        if f.name not in ("reader_index", "reader_count")
    )
