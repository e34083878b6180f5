"""What is fuzzed: one function for each way in from outside. Each takes bytes and must come back.

A target raises only where the code under test is wrong: an error that is no RdtError, a copy outside of its region or
destination, a value that differs from torch's or from plain Python's. Messages are valid ones with values changed, so
that the checks behind the decoder are reached. `run.py` drives these for hours, `test_targets.py` replays what was found.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np
import torch

from rdt_core import wire
from rdt_core.errors import RdtError
from rdt_core.geometry import OPS, Box, Chain, Op, chain_shape, replay, resolve, row_major, subtract
from rdt_core.landing import Destination
from rdt_core.linking import make_program
from rdt_core.members import Members
from rdt_core.planning import Plan, make_plan
from rdt_core.publisher import Publisher
from rdt_core.routing import Routing
from rdt_core.sources.base import Shard
from rdt_core.tracing import Slice, Trace
from rdt_core.transport import LocalExchange, tables
from rdt_core.transport.base import Copies
from rdt_core.transport.copying import CopyProgram

from .data import Data, mutate

MESSAGES: tuple[type, ...] = (
    wire.SourceManifest, wire.EngineManifest, wire.ReadRequest, wire.LinkOffer, wire.ReaderReport, wire.SyncReport,
    wire.GroupStatus, wire.Transfer,
)  # fmt: skip
VERSIONS = wire.VersionMeta(rdt="0", wire_major=1, wire_minor=0, ray="2.56", nixl="1", torch="2", python="3.11")
NODE = wire.NodeMeta(node_id="node", boot_id="boot", hostname="host", pid=1)
GUARD = 64  # bytes around memory that nothing may write to


# ---------------------------------------------------------------- messages


def messages(data: bytes) -> None:
    """Any bytes as any message: refused, or the same again after another trip over the wire."""
    source = Data(data)
    kind = source.pick(MESSAGES)
    raw = source.take(source.left)
    try:
        message = wire.decode(wire.sealed(raw), kind)
    except RdtError:
        return
    assert wire.decode(wire.encode(message), kind) == message
    wire.to_json(message)


def _manifest(source: Data, rank: int, world: int) -> wire.SourceManifest:
    """A valid manifest of a small model that is cut along its first axis."""
    tensors, shards, at = [], [], 0
    rounds = 1 + source.below(3)
    for number in range(1 + source.below(3)):
        dtype = source.pick(["float32", "bfloat16", "uint8"])
        shape = (world * (1 + source.below(3)), *source.shape(3, 4))
        tensors.append(wire.TensorMeta(name=f"model.layers.{number}.w", shape=shape, dtype=dtype))
        piece = (shape[0] // world, *shape[1:])
        nbytes = prod(piece) * wire.DTYPE_BYTES[dtype]
        shards.append(
            wire.ShardMeta(
                tensor=number, offset=(rank * piece[0], *(0,) * (len(shape) - 1)), shape=piece, region=0,
                byte_offset=at, strides=row_major(piece), round=number % rounds,
            )
        )  # fmt: skip
        at += nbytes + nbytes % 8
    return wire.SourceManifest(
        group="policy", rank=rank, world_size=world, versions=VERSIONS, node=NODE, mode="live", mode_reason="fuzz",
        tensors=tuple(tensors), shards=tuple(shards), kinds=("local",), rounds=max(s.round for s in shards) + 1,
        regions=(wire.RegionMeta(id=0, nbytes=at, address=4096, device="cpu"),), slots=1 + source.below(2),
    )  # fmt: skip


def _changed(source: Data, message: Any) -> bytes:
    """The message as it travels, with none to three of its values changed."""
    built = msgspec.to_builtins(message, builtin_types=(bytes,))
    for _ in range(source.below(4)):
        built = mutate(source, built)
    try:
        return wire.sealed(msgspec.msgpack.encode(built))
    except OverflowError:  # more than 64 bits: no msgpack at all
        return wire.encode(message)


def manifests(data: bytes) -> None:
    """Manifests of source ranks as far as the programs of a reader: no copy leaves the region or box it was declared in."""
    source = Data(data)
    world = 1 + source.below(2)
    shape_data = source.take(24)
    try:
        ranks = [
            wire.decode(_changed(source, _manifest(Data(shape_data), rank, world)), wire.SourceManifest)
            for rank in range(world)
        ]
        routing = Routing(ranks)
        owners = [routing.owners(number) for number in range(len(routing.tensors))]
        route = routing.choose(source.below(3), 1 + source.below(3), NODE)
    except RdtError:
        return
    for meta, held in zip(routing.tensors, owners, strict=True):
        assert sum(box.numel for box, _ in held) == prod(meta.shape)
    destinations, slices = {}, []
    for number, meta in enumerate(routing.tensors):
        item = wire.DTYPE_BYTES[meta.dtype]
        key = f"t{number}"
        chain = _chain(source, meta.shape, 3) if source.chance() else ()
        try:
            shape = chain_shape(meta.shape, chain)
        except RdtError:
            chain, shape = (), meta.shape
        dtype = meta.dtype if source.below(4) else "float32"
        nbytes = max(prod(shape), 1) * max(item, wire.DTYPE_BYTES[dtype])
        destinations[key] = Destination(key=key, module=key, in_place=source.below(4) > 0, nbytes=nbytes)
        slices.append(Slice(meta.name, chain, key, 0, shape, row_major(shape), dtype, meta.dtype))
    names = tuple(meta.name for meta in routing.tensors)
    try:
        plan = make_plan(Trace(tuple(slices), names, names, routing.tensors), destinations, routing, route)
    except RdtError:
        return
    _check_plan(plan, ranks)
    kinds = dict.fromkeys(range(world), "local")
    pack = source.pick([0, 4, 1 << 20])
    slots = max(manifest.slots for manifest in ranks)
    program = make_program(plan, destinations, kinds, dict.fromkeys(kinds, pack), slots=slots, chunk_bytes=64)
    for manifest in ranks:
        sizes = {region.id: region.nbytes for region in manifest.regions}
        transfers = program.requests.get(manifest.rank, ())
        request = wire.ReadRequest(
            reader="r/0", incarnation="1", source=manifest.rank, kind="local", digest="",
            pack_bytes=program.pack_bytes.get(manifest.rank, 0), transfers=transfers,
        )  # fmt: skip
        wire.validate(request)
        for transfer in transfers:
            _check_copies(tables.reads(transfer), {**sizes, -1: request.pack_bytes})
            _check_copies(tables.packs(transfer), sizes, [request.pack_bytes])


def _check_plan(plan: Plan, ranks: Sequence[wire.SourceManifest]) -> None:
    columns = {name: getattr(plan.columns, name).tolist() for name in plan.columns.__slots__}
    for i in range(len(plan.columns)):
        row = {name: values[i] for name, values in columns.items()}
        region = next(r for r in ranks[row["source"]].regions if r.id == row["region"])
        assert row["rows"] >= 1
        assert row["row_bytes"] >= 1
        for offset, pitch, size in (
            (row["source_offset"], row["source_pitch"], region.nbytes),
            (row["destination_offset"], row["destination_pitch"], plan.destination_nbytes[row["destination"]]),
        ):
            assert offset >= 0
            assert pitch >= 0
            assert offset + (row["rows"] - 1) * pitch + row["row_bytes"] <= size
    assert plan.nbytes == sum(map(int.__mul__, columns["rows"], columns["row_bytes"]))


def _check_copies(copies: Copies, regions: Mapping[int, int], destinations: Sequence[int] = ()) -> None:
    columns = {name: getattr(copies, name).tolist() for name in Copies.__slots__}
    for i in range(len(copies)):
        row = {name: values[i] for name, values in columns.items()}
        assert row["source_offset"] >= 0
        reach = (row["rows"] - 1) * row["source_pitch"] + row["row_bytes"]
        assert row["source_offset"] + reach <= regions[row["source_region"]]
        if destinations:
            reach = (row["rows"] - 1) * row["destination_pitch"] + row["row_bytes"]
            assert row["destination_offset"] + reach <= destinations[row["destination"]]


def members(data: bytes) -> None:
    """Joins and connects with any values: the coordinator's state takes or refuses them."""
    source = Data(data)
    world = 1 + source.below(2)
    group = Members("policy", world)
    for _ in range(1 + source.below(5)):
        try:
            if source.chance(3):
                group.connect(_changed(source, _engine(source)), group.epoch)
            else:
                manifest = _manifest(source, source.below(world), world)
                group.join(_changed(source, manifest), "token")
        except RdtError:
            continue
    for replica in group.replicas.values():
        wire.to_json(replica.status(False))


def _engine(source: Data) -> wire.EngineManifest:
    columns = np.array([0, 0, 16, 2, 8], "<i8").tobytes()
    request = wire.ReadRequest(
        reader="a/0", incarnation="i", source=0, kind="local", digest="d", pack_bytes=16,
        transfers=(wire.Transfer(chunk=0, round=0, count=1, columns=columns, nbytes=16),),
    )  # fmt: skip
    return wire.EngineManifest(
        group="policy", replica="a", rank=0, world_size=1 + source.below(2), incarnation="i", versions=VERSIONS,
        node=NODE, engine="torch", digest="d", nbytes=16, taken=("model.layers.0.w",), requests=(request,),
        boxes=(wire.TakenBox(tensor=0, offset=(0, 0), shape=(1, 2)),),
    )  # fmt: skip


# ---------------------------------------------------------------- chains and boxes


def _argument(source: Data, rank: int) -> Any:
    kind = source.below(8)
    if kind < 6:
        return source.below(2 * rank + 3) - rank - 1
    return source.number() if kind < 7 else source.pick([None, Ellipsis, True, "float32", 0.5, (), (1, 2)])


def _op(source: Data, shape: Sequence[int]) -> Op:
    name = (
        source.pick(sorted(OPS))
        if source.below(32) < 31
        else source.pick(["", "data_ptr", "set_", "item", "__class__"])
    )
    rank = len(shape)
    if name == "to":
        return name, (source.pick(["float32", "bfloat16", "int8", "quint8", "no", "Tensor", "bits8", "complex32"]),)
    if name in ("view", "reshape") and source.below(8) < 7:
        numel = prod(shape)
        first = source.pick([d for d in range(1, 13) if numel % d == 0] or [1])
        wanted = (first, -1) if numel and source.chance() else (numel // first, first)
        return name, wanted if source.chance() else (wanted,)
    if name == "__getitem__":
        items = [
            ("slice", *(None if source.chance() else source.below(2 * rank + 6) - rank for _ in range(3)))
            if source.chance()
            else ("slice", source.number(), source.number(), source.number())
            if source.chance(8)
            else _argument(source, rank)
            for _ in range(source.below(rank + 2))
        ]
        return name, (tuple(items),)
    if name == "narrow" and rank and source.below(8) < 7:
        axis = source.below(rank)
        start = source.below(min(shape[axis], 65535) + 1)
        return name, (axis, start, source.below(min(shape[axis], 65535) - start + 1))
    if name == "permute" and source.chance():
        return name, (tuple(sorted(range(rank), key=lambda _: source.below(8))),)
    count = {"narrow": 3, "select": 2, "transpose": 2, "unsqueeze": 1}.get(name, source.below(rank + 1))
    return name, tuple(_argument(source, rank) for _ in range(count))


def _chain(source: Data, shape: Sequence[int], most: int) -> Chain:
    chain, now = [], tuple(shape)
    for _ in range(source.below(most + 1)):
        op = _op(source, now)
        chain.append(op)
        try:
            now = chain_shape(now, (op,))
        except RdtError:
            if source.below(8):
                chain.pop()
    return tuple(chain)


def chains(data: bytes) -> None:
    """Op chains on small tensors: what is resolved gives what torch gives, or both refuse."""
    source = Data(data)
    shape = source.shape()
    chain = _chain(source, shape, 6)
    tensor = torch.arange(prod(shape), dtype=torch.int32).reshape(shape)
    try:
        view = resolve(shape, chain)
    except RdtError:
        try:
            replay(tensor, chain)
        except RdtError:
            return
        raise AssertionError(f"{chain} on {shape} is replayed, but not resolved") from None
    assert Box.full(shape).contains(view.box) or view.box.is_empty
    assert sorted(view.axes) == list(range(len(shape)))
    index = tuple(slice(low, high) for low, high in zip(view.box.offset, view.box.end, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # casts of what does not fit
        whole, part = replay(tensor, chain), view.value(tensor[index])
    assert whole.shape == part.shape == chain_shape(shape, chain)
    assert whole.dtype == part.dtype
    assert torch.equal(whole.double().nan_to_num(), part.double().nan_to_num())
    view.direct and view.dims()


def hostile_chains(data: bytes) -> None:
    """Op chains with any numbers on tensors of any size, which exist nowhere: boxes stay inside, nothing is allocated."""
    source = Data(data)
    shape = tuple(abs(source.number()) for _ in range(source.below(6)))
    chain = tuple(_op(source, shape) for _ in range(source.below(300)))
    try:
        view = resolve(shape, chain)
    except RdtError:
        return
    assert view.box.is_empty or Box.full(shape).contains(view.box)
    if view.direct:
        assert prod(view.shape) == view.box.numel
    try:
        assert chain_shape(view.shape, view.rest) == chain_shape(shape, chain)
    except RdtError as error:
        raise AssertionError("resolved, but of no shape") from error


def boxes(data: bytes) -> None:
    """Boxes taken out of boxes: what is left is disjoint, and is what is in none of them."""
    source = Data(data)
    rank = source.below(4)

    def box() -> Box:
        return Box(tuple(source.below(6) for _ in range(rank)), tuple(source.below(6) for _ in range(rank)))

    whole, others = box(), [box() for _ in range(source.below(6))]
    grid = np.zeros((12,) * rank, np.int64)

    def index(one: Box) -> tuple[slice, ...]:
        return tuple(slice(low, high) for low, high in zip(one.offset, one.end, strict=True))

    grid[index(whole)] = 1
    for one in others:
        grid[index(one)] = 0
    for one in subtract(whole, others):
        grid[index(one)] -= 1
    assert not grid.any()


# ---------------------------------------------------------------- copies and what owners serve


def copies(data: bytes) -> None:
    """Tables of copies with any numbers: refused, or they move what plain Python says and nothing beside it."""
    source = Data(data)
    sizes = [source.below(40) for _ in range(1 + source.below(3))]
    count, width = source.below(4), len(Copies.__slots__)
    table = np.array([[_signed(source.number()) for _ in range(width)] for _ in range(count)], np.int64).reshape(
        count, width
    )
    guarded = [torch.randint(0, 255, (size + 2 * GUARD,), dtype=torch.uint8) for size in sizes]
    target = torch.full((source.below(40) + 2 * GUARD,), 255, dtype=torch.uint8)
    expected = bytearray(target.numpy().tobytes())
    program = Copies(*(np.ascontiguousarray(column) for column in table.T)) if count else None
    if program is None:
        return
    limits = [tensor.numel() - 2 * GUARD for tensor in guarded]
    rows = [dict(zip(Copies.__slots__, row, strict=True)) for row in table.tolist()]
    allowed = all(_inside(row, limits, target.numel() - 2 * GUARD) for row in rows)
    inner = {number: tensor[GUARD : len(tensor) - GUARD] for number, tensor in enumerate(guarded)}
    try:
        made = CopyProgram(program, inner, [target[GUARD : len(target) - GUARD]], "fuzz")
    except RdtError:
        assert not allowed
        return
    assert allowed
    made.run()
    for row in rows:
        memory = guarded[row["source_region"]].numpy().tobytes()
        for number in range(row["rows"]):
            read = GUARD + row["source_offset"] + number * row["source_pitch"]
            write = GUARD + row["destination_offset"] + number * row["destination_pitch"]
            expected[write : write + row["row_bytes"]] = memory[read : read + row["row_bytes"]]
    assert target.numpy().tobytes() == bytes(expected)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _inside(row: Mapping[str, int], regions: Sequence[int], destination: int) -> bool:
    if row["rows"] < 1 or row["row_bytes"] < 1 or not 0 <= row["source_region"] < len(regions) or row["destination"]:
        return False
    sides = (("source", regions[row["source_region"]]), ("destination", destination))
    inside = all(
        row[f"{side}_offset"] >= 0
        and row[f"{side}_pitch"] >= 0
        and row[f"{side}_offset"] + (row["rows"] - 1) * row[f"{side}_pitch"] + row["row_bytes"] <= size
        for side, size in sides
    )
    return inside and (row["rows"] == 1 or row["destination_pitch"] >= row["row_bytes"])


class _Held:
    """A source of two tensors in guarded memory."""

    def __init__(self) -> None:
        self.memory = torch.arange(512, dtype=torch.int64).to(torch.uint8)
        self.before = self.memory.clone()
        inner = self.memory[GUARD : GUARD + 256]
        self.held = {"layers.0.a": inner[:96].view(4, 24), "layers.1.b": inner[128:160]}

    def metadata(self) -> list[wire.TensorMeta]:
        return [wire.TensorMeta(name=n, shape=tuple(t.shape), dtype="uint8") for n, t in self.held.items()]

    def shards(self) -> list[Shard]:
        return [Shard(name, (0,) * tensor.dim(), tensor) for name, tensor in self.held.items()]

    def ignored(self) -> tuple[str, ...]:
        return ()


def requests(data: bytes) -> None:
    """Read requests with any values, served by an owner: refused, or packed as asked, and what it holds stays as it was."""
    source = Data(data)
    held = _Held()
    mode = source.pick(["live", "snapshot", "bucket"])
    publisher = Publisher(
        held, group="policy", rank=0, world_size=1, mode=mode, kinds=("local",), bucket_bytes=64, exchange=LocalExchange()
    )  # fmt: skip
    size = max(region.nbytes for region in publisher.manifest.regions)
    for _ in range(1 + source.below(3)):
        transfers = []
        for chunk in range(source.below(3)):
            tables_ = []
            for width in (5, 6):
                count = source.below(3)
                rows = [
                    [
                        0,
                        source.below(size + 1),
                        source.below(32),
                        1 + source.below(4),
                        1 + source.below(24),
                        source.below(64),
                    ]
                    if source.below(4)
                    else [_signed(source.number()) for _ in range(6)]
                    for _ in range(count)
                ]
                table = np.array(rows, np.int64).reshape(count, 6)[:, :width]
                tables_.append((count, b"".join(np.ascontiguousarray(c, "<i8").tobytes() for c in table.T)))
            (reads, columns), (packs, pack_columns) = tables_
            transfers.append(
                wire.Transfer(
                    chunk=chunk, round=source.below(2), count=reads, columns=columns, pack_count=packs,
                    pack_columns=pack_columns, nbytes=source.below(64),
                )
            )  # fmt: skip
        request = wire.ReadRequest(
            reader=source.pick(["a/0", "b/0"]), incarnation="i", source=0, kind=source.pick(["local", "local", "ray"]),
            digest="d", pack_bytes=source.pick([0, 64, 128, 512]), transfers=tuple(transfers),
        )  # fmt: skip
        try:
            publisher.serve([wire.decode(_changed(source, request), wire.ReadRequest)])
        except RdtError:
            continue
    for _ in publisher.rounds_written():
        pass
    publisher.close()
    assert torch.equal(held.memory, held.before)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (messages, manifests, members, chains, hostile_chains, boxes, copies, requests)
}
