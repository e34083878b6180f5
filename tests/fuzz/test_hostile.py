"""Messages that declare what cannot be: refused by name, at once, and before any memory is spent on them."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rdt_core import wire
from rdt_core.columns import MAX_PIECES, to_rows
from rdt_core.errors import CoverageError, GeometryError, RdtError, TransportError, WireError
from rdt_core.geometry import Box, resolve
from rdt_core.layout import layer_of
from rdt_core.members import Members
from rdt_core.publisher import Publisher
from rdt_core.routing import Routing
from rdt_core.transport import LocalExchange, tables
from rdt_testbed.reference import manifest

from .data import Data
from .targets import VERSIONS, _engine, _Held

pytestmark = pytest.mark.unit


@contextmanager
def little(limit: int = 4 << 20, seconds: float = 20.0) -> Iterator[None]:
    began = time.monotonic()
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit
    assert time.monotonic() - began < seconds


def valid() -> wire.SourceManifest:
    return manifest(
        0,
        1,
        [wire.TensorMeta(name="layers.0.w", shape=(4, 1, 6), dtype="float32")],
        [wire.ShardMeta(0, (0, 0, 0), (4, 1, 6), 0, 0, (6, 6, 1))],
        {0: 96},
    )


def _set(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        for step in path[:-1]:
            message = message[step]
        message[path[-1]] = to

    return change


HUGE = [
    (_set("world_size", to=10**9), "a world of 1000000000 ranks; at most"),
    (_set("rounds", to=1 << 62), "rounds for 1 shards"),
    (_set("rounds", to=0), "0 rounds for 1 shards"),
    (_set("slots", to=0), "0 buckets at once"),
    (_set("slots", to=1 << 40), "1099511627776 buckets at once"),
    (_set("tensors", 0, "shape", to=[1 << 40, 1 << 40]), "has shape (1099511627776, 1099511627776)"),
    (_set("tensors", 0, "shape", to=[0, 1 << 63]), "has shape (0, 9223372036854775808)"),
    (_set("tensors", 0, "shape", to=[1] * 65), "has 65 axes"),
    (_set("shards", 0, 5, to=[6, 1 << 63, 1]), "has strides (6, 9223372036854775808, 1)"),
    (_set("shards", 0, 4, to=-4), "ends at byte 92"),
    (_set("regions", 0, "nbytes", to=1 << 63), "region 0: 9223372036854775808 bytes"),
    (_set("regions", 0, "id", to=-1), "region -1 at address 0"),
    (_set("regions", 0, "address", to=(1 << 64) - 1), "at address 18446744073709551615"),
]


@pytest.mark.parametrize(("change", "message"), HUGE, ids=[message for _, message in HUGE])
def test_a_manifest_that_declares_the_impossible_is_refused(change, message):
    built = msgspec.to_builtins(valid(), builtin_types=(bytes,))
    built["shards"] = [list(shard) for shard in built["shards"]]
    for key in ("tensors", "regions"):
        built[key] = [dict(one) for one in built[key]]
    change(built)
    with little(), pytest.raises(WireError) as caught:
        wire.decode(wire.sealed(msgspec.msgpack.encode(built)), wire.SourceManifest)
    assert message in str(caught.value)


def test_ranks_that_are_missing_are_counted_not_listed():
    built = msgspec.structs.replace(valid(), world_size=wire.MAX_RANKS)
    with little(1 << 20), pytest.raises(CoverageError, match=r"1, 2, 3, .* and 131063 more of 131072 has not declared"):
        Routing([built])


def test_a_model_beyond_what_is_counted_in_is_refused():
    tensors = [wire.TensorMeta(name=f"t{i}", shape=(1 << 55,), dtype="float32") for i in range(9)]
    shards = [wire.ShardMeta(i, (0,), (1 << 55,), 0, 0, (1,)) for i in range(9)]
    with little(), pytest.raises(CoverageError, match=r"9 checkpoint tensors have .* bytes; at most"):
        Routing([manifest(0, 1, tensors, shards, {0: 1 << 59})])


def test_a_tensor_split_along_many_axes_is_checked_in_little_memory():
    def routed(boxes: list[Box]) -> Routing:
        tensors = [wire.TensorMeta(name="t", shape=(2,) * 40, dtype="uint8")]
        shards = [wire.ShardMeta(0, box.offset, box.shape, 0, 0, (0,) * 40) for box in boxes]
        return Routing([manifest(0, 1, tensors, shards, {0: 1})])

    # halves of halves: the first axis cut once, the second half cut along the next, and so on
    boxes, offset, shape = [], [0] * 40, [2] * 40
    for axis in range(20):
        shape[axis] = 1
        boxes.append(Box(tuple(offset), tuple(shape)))
        offset[axis] = 1
    with little():
        assert len(routed([*boxes, Box(tuple(offset), tuple(shape))]).owners(0)) == 21
        with pytest.raises(CoverageError, match="no source rank holds elements"):
            routed(boxes)
        with pytest.raises(CoverageError, match="overlap without being equal"):
            routed([*boxes, Box(tuple(offset), tuple(shape)), Box((0,) * 40, (1,) * 40)])


def test_copies_that_fall_into_dust_are_refused_before_they_are_listed():
    shape = np.full((1, 3), 1 << 18, np.int64)
    strides = np.array([[1 << 40, 1 << 20, 2]], np.int64)
    with little(), pytest.raises(CoverageError, match=f"at most {MAX_PIECES} can be planned"):
        to_rows(shape, strides[:, ::-1].copy(), strides, np.ones(1, np.int64))


def test_an_engine_rank_of_a_billion_is_refused():
    built = msgspec.structs.replace(_engine(Data(b"")), world_size=10**9)
    with little(), pytest.raises(WireError, match="a world of 1000000000 ranks"):
        Members("policy", 1).connect(wire.encode(built), 0)
    box = wire.TakenBox(tensor=0, offset=(-1,), shape=(1,))
    with pytest.raises(WireError, match="takes the box"):
        wire.decode(wire.encode(msgspec.structs.replace(_engine(Data(b"")), boxes=(box,))), wire.EngineManifest)


def _transfer(reads: list[int] | None, packs: list[int] | None, round: int = 0) -> wire.Transfer:
    return wire.Transfer(
        chunk=0, round=round, count=int(reads is not None), columns=np.array(reads or [], "<i8").tobytes(),
        pack_count=int(packs is not None), pack_columns=np.array(packs or [], "<i8").tobytes(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pack_bytes", "kind", "transfer", "message"),
    [
        (1 << 40, "local", _transfer(None, None), "a pack arena of 1099511627776; it holds 128 bytes"),
        (64, "local", _transfer(None, [0, 0, 0, 1 << 60, 1, 0]), "at most 64 times as many"),
        (64, "local", _transfer([0, 0, 0, 1 << 62, 1 << 62], None), "at most 64 times as many"),
        (64, "local", _transfer(None, [0, 0, 8, 2, 8, 60]), "writes bytes 60 to 76 of a destination of 64"),
        (64, "local", _transfer(None, [0, -1, 8, 2, 8, 0]), "reads bytes -1 to"),
        (64, "local", _transfer(None, [7, 0, 8, 2, 8, 0]), "reads a region that is not among"),
        (0, "local", _transfer(None, [0, 0, 8, 2, 8, 0]), "packed into an arena of 0 bytes"),
        (0, "local", _transfer([0, 0, 8, 1, 8], None, round=5), "bytes of round 5; a sync has 1 rounds"),
        (0, "pigeon", _transfer(None, None), "a link of kind 'pigeon'"),
    ],
)
def test_an_owner_refuses_a_request_for_what_it_has_not(pack_bytes, kind, transfer, message):
    held = _Held()
    owner = Publisher(
        held, group="policy", rank=0, world_size=1, mode="live", kinds=("local",), exchange=LocalExchange()
    )
    request = wire.ReadRequest(
        reader="a/0", incarnation="i", source=0, kind=kind, digest="", pack_bytes=pack_bytes, transfers=(transfer,)
    )
    with little(), pytest.raises(TransportError) as caught:
        owner.serve([wire.decode(wire.encode(request), wire.ReadRequest)])
    assert message in str(caught.value)
    assert torch.equal(held.memory, held.before)


def test_ray_objects_are_made_of_a_bounded_number_of_rows():
    request = wire.ReadRequest(
        reader="a/0", incarnation="i", source=0, kind="ray", digest="", pack_bytes=0,
        transfers=(_transfer([0, 0, 1, 1 << 21, 1], None),),
    )  # fmt: skip
    with little(), pytest.raises(TransportError, match="more than 1048576 rows as Ray objects"):
        tables.check_request(request, 1 << 30, 1)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ((("unsqueeze", (0,)),) * 3000, "gets no more"),
        ((("__getitem__", ((None,) * 3000,)),), "gets no more"),
        ((("reshape", (1,) * 3000),), "at most 64 ints"),
        ((("narrow", (0, 0, 0)), ("reshape", (0, 1 << 62, 1 << 62))), "is not a shape"),
        ((("squeeze", (0, 0)),), "names an axis twice"),
        ((("to", ("quint8",)),), "'quint8' is not a dtype that travels"),
        ((("__getitem__", ((("slice", None, None, 1 << 40),),)),), r"below 2\*\*31"),
    ],
)
def test_a_chain_that_no_tensor_survives_is_refused(chain, message):
    with little(), pytest.raises(GeometryError, match=message):
        resolve((1, 4), chain)


def test_a_name_with_an_endless_number_has_no_layer():
    assert layer_of("layers." + "9" * 5000 + ".w") is None
    assert layer_of("layers.123.w") == ("layers", 123)


@pytest.mark.parametrize("kind", [wire.SourceManifest, wire.EngineManifest, wire.ReadRequest, wire.LinkOffer])
def test_what_is_no_message_is_refused(kind):
    for raw in (b"", b"\xc1", b"\x91" * 100_000, b"\x80", wire.encode({"group": VERSIONS})):
        with pytest.raises(RdtError):
            wire.decode(wire.sealed(raw), kind)
