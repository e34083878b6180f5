"""The messages of the control plane: frozen `msgspec` structs, sent as msgpack, printable as JSON.

Sizes are bytes, offsets inside regions are bytes, strides are elements of the shard's own dtype. Unknown fields are
ignored, so that a newer minor version can talk to an older one; another major version is refused by `versions`.
No weights travel in these messages, but they say where weights lie: a seal shows that none was damaged. `decode` refuses
what was, what does not fit the struct and what is impossible inside it.
"""

from __future__ import annotations

import zlib
from math import prod
from typing import Any, Literal, TypeVar, get_args

import msgspec

from .errors import WireError
from .logline import log_line

WIRE_MAJOR = 1
WIRE_MINOR = 0
MAX_MESSAGE_BYTES = 1 << 30
#: What nothing real reaches, so that sums and products of what was let in stay far below 2**63, and so that a few bytes
#: cannot ask for memory that is counted by ranks, axes, rounds or slots.
MAX_BYTES = 1 << 60  # of a tensor, a region, a buffer
MAX_RANKS = 1 << 17
MAX_AXES = 64  # as torch
MAX_SLOTS = 1 << 10

#: How much of a sync's bytes is compared by digests before the commit: nothing, another part in each sync, or all.
Verify = Literal["off", "sample", "full"]
VERIFY: tuple[Verify, ...] = get_args(Verify)

#: bytes an element, by the dtype names that travel (torch's names without the `torch.` prefix)
DTYPE_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages: immutable, keyword-only."""


class TensorMeta(Struct, frozen=True):
    """A checkpoint tensor: Hugging Face name, full shape, dtype on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class NodeMeta(Struct, frozen=True):
    """Where a process runs: what decides which link kinds can work between two members."""

    node_id: str  # Ray's node id
    boot_id: str  # kernel boot id plus the pid namespace: equal where /proc and shared memory are common
    hostname: str
    pid: int
    device: str = "cpu"  # "cpu" or "cuda"
    device_uuid: str = ""  # UUID of the GPU, empty on CPU


class VersionMeta(Struct, frozen=True):
    """What a member runs, compared at join."""

    rdt: str
    wire_major: int
    wire_minor: int
    ray: str
    nixl: str  # empty where the module is missing
    torch: str
    python: str


class RegionMeta(Struct, frozen=True):
    """A stretch of a source rank's memory that readers read from: a parameter storage, an arena or a pack arena."""

    id: int
    nbytes: int
    address: int  # virtual address in the owner; NIXL reads from it
    device: str  # "cpu" or "cuda"
    device_index: int = 0  # the owner's own device index, as NIXL wants it
    mapped: bytes = b""  # how a process of the same node maps the region; empty where it cannot


class ShardMeta(Struct, frozen=True, array_like=True):
    """The box of a checkpoint tensor that a source rank publishes, and where it lies in one of its regions."""

    tensor: int  # index into SourceManifest.tensors
    offset: tuple[int, ...]  # box, in elements of the checkpoint tensor
    shape: tuple[int, ...]
    region: int  # RegionMeta.id
    byte_offset: int  # of the box's first element, inside the region
    strides: tuple[int, ...]  # elements, one per axis of the box
    round: int = 0  # the round of a sync in which these bytes are readable (0 unless the mode is `bucket`)


class SourceManifest(Struct, frozen=True):
    """What a source rank declares at join: what it publishes and where a reader finds it."""

    group: str
    rank: int
    world_size: int
    versions: VersionMeta
    node: NodeMeta
    mode: str  # "live", "snapshot" or "bucket"
    mode_reason: str
    tensors: tuple[TensorMeta, ...]  # that this rank knows: at least those of its shards
    shards: tuple[ShardMeta, ...]
    regions: tuple[RegionMeta, ...]
    kinds: tuple[str, ...]  # link kinds that this rank can serve
    rounds: int = 1
    slots: int = 1  # buckets that exist at once: round r lies in slot r % slots
    agent: bytes = b""  # NIXL agent metadata, empty where NIXL is not used
    agent_name: str = ""
    ignore: tuple[str, ...] = ()  # names that engines need not take (a rule of the source, e.g. a tied copy)


class Transfer(Struct, frozen=True):
    """One posted move of a link: the bytes of one chunk, `spans` of the owner's memory in the reader's order.

    `columns` holds int64 little-endian columns region, offset, pitch, rows, row_bytes, one after the other:
    the 2-D reads. Read in this order, their rows make up the bytes that land.
    """

    chunk: int
    round: int
    count: int  # number of 2-D reads
    columns: bytes
    pack_count: int = 0  # number of 2-D copies the owner makes into its pack arena before the round is published
    pack_columns: bytes = b""  # region, offset, pitch, rows, row_bytes, pack_offset
    nbytes: int = 0


class ReadRequest(Struct, frozen=True):
    """What one engine rank will read from one source rank, by which kind of link, for as long as it stays connected."""

    reader: str  # EngineManifest.reader
    incarnation: str  # of the reader; a reconnect has another
    source: int
    kind: str
    digest: str  # of the whole plan of this reader
    pack_bytes: int  # size of the pack arena that the owner makes for this link
    transfers: tuple[Transfer, ...]


class LinkOffer(Struct, frozen=True):
    """A source rank's answer to a ReadRequest: the regions made for it (the pack arena) and its agent's metadata."""

    reader: str
    incarnation: str
    source: int
    digest: str  # the owner's own digest over what it was asked to serve; the reader compares
    regions: tuple[RegionMeta, ...] = ()
    agent: bytes = b""
    refs: int = 0  # number of Ray object references that travel beside this message


class TakenBox(Struct, frozen=True, array_like=True):
    """A box of a checkpoint tensor that an engine rank takes."""

    tensor: int  # index into the tensors of the whole model, in the order of `declared.merge`
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class EngineManifest(Struct, frozen=True):
    """What an engine rank declares when it connects."""

    group: str
    replica: str
    rank: int
    world_size: int
    incarnation: str
    versions: VersionMeta
    node: NodeMeta
    engine: str  # "vllm 0.32.0"
    digest: str  # of the plan
    nbytes: int  # bytes that every sync moves to this rank
    taken: tuple[str, ...]  # names that this rank takes at least a part of
    requests: tuple[ReadRequest, ...]
    boxes: tuple[TakenBox, ...] = ()  # what it takes of each
    attempt: str = ""  # the connect of its replica that it answers

    @property
    def reader(self) -> str:
        """The name of this engine rank inside the group: `replica/rank`."""
        return f"{self.replica}/{self.rank}"


class LinkReport(Struct, frozen=True, omit_defaults=True):
    """What one link did in one sync."""

    source: int
    reader: str
    kind: str
    bytes: int
    seconds: float  # time in which this link had bytes in flight
    # seconds that the reader waited for this link, those for several at once shared by bytes; 0 in a connection's first sync
    waited: float = 0.0
    path: str = ""  # "device": both ends on one GPU; "node"; "network"
    floor: float = 0.0  # GB/s below which this link ran; 0: it did not


class Span(Struct, frozen=True, array_like=True):
    """Something that a member did in a sync."""

    name: str
    start: float  # seconds since its timeline began
    seconds: float
    track: str = ""  # what it belongs to beside the member's own phases: a replica, or a link
    bytes: int = 0


class Timeline(Struct, frozen=True):
    """When one member did what in one sync, by the clock of its own host."""

    member: str
    host: str
    pid: int
    began: float  # Unix time
    spans: tuple[Span, ...]


class PackReport(Struct, frozen=True):
    """How the links of one reader that are alike pack small pieces."""

    kind: str
    bytes: int  # of a row below which it is packed at its owner; 0: nothing is
    how: str  # "set", "measured" or "default"
    links: int  # that are so


class ReaderReport(Struct, frozen=True):
    """What one engine rank did in one sync."""

    reader: str
    incarnation: str
    version: int
    bytes: int
    expected_bytes: int
    digest: str
    phases: dict[str, float]  # seconds by phase
    links: tuple[LinkReport, ...]
    packing: tuple[PackReport, ...] = ()
    is_outdated: bool = False  # what was measured meanwhile would make another plan
    timeline: Timeline | None = None


class SyncReport(Struct, frozen=True):
    """What a sync did, the same on every source rank, but for time: that of rank 0 goes on until the replicas serve.

    Prints itself as one line; everything is in its fields and `to_json`.
    """

    group: str
    version: int
    seconds: float
    phases: dict[str, float]
    bytes: int
    mode: str
    mode_reason: str
    readers: tuple[ReaderReport, ...]
    replicas: tuple[str, ...]  # that serve the version now
    failed: dict[str, str] = {}  # replicas that were dropped from the sync, and why (policy "best_effort")
    verify: str = "off"  # how much was compared by digests before the commit: "off", "sample" or "full"
    timelines: tuple[Timeline, ...] = ()  # of source ranks but the driver, which alone is told when everybody did what

    def __str__(self) -> str:
        return log_line(self)

    def __repr__(self) -> str:
        return f"<SyncReport: {log_line(self)}>"

    def in_short(self) -> SyncReport:
        """The same report without what grows with the engine ranks: their accounts, with their links."""
        return msgspec.structs.replace(self, readers=())

    def without_timelines(self) -> SyncReport:
        """The same report, in which nobody says when it did what."""
        readers = tuple(msgspec.structs.replace(reader, timeline=None) for reader in self.readers)
        return msgspec.structs.replace(self, readers=readers, timelines=())

    @property
    def outdated(self) -> tuple[str, ...]:
        """Replicas that serve the version, and of which an engine rank would plan otherwise now."""
        replicas = {reader.reader.rpartition("/")[0] for reader in self.readers if reader.is_outdated}
        return tuple(name for name in self.replicas if name in replicas)

    @property
    def links(self) -> tuple[LinkReport, ...]:
        """Every link of every reader."""
        return tuple(link for reader in self.readers for link in reader.links)


class TensorCheck(Struct, frozen=True):
    """A checkpoint tensor in one replica, compared with what the source ranks hold."""

    name: str
    replica: str
    state: str  # "equal", "differs", "not comparable" (the engine's load changed its form) or "not taken"
    bytes: int  # that were compared, over all engine ranks
    detail: str = ""


class CheckReport(Struct, frozen=True):
    """What a comparison without a sync found, the same on every source rank."""

    group: str
    version: int | None  # last committed of the group
    replicas: tuple[str, ...]
    seconds: float
    bytes: int  # that were compared
    tensors: tuple[TensorCheck, ...]

    @property
    def is_equal(self) -> bool:
        """Whether nothing that could be compared differs."""
        return all(tensor.state != "differs" for tensor in self.tensors)


T = TypeVar("T")

_SEAL_BYTES = 4
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: Any) -> bytes:
    """Returns `message` as sealed msgpack."""
    return sealed(_encoder.encode(message))


def sealed(packed: bytes) -> bytes:
    """Returns bytes with their CRC-32 behind them, by which `decode` sees that none was damaged on the way."""
    return packed + zlib.crc32(packed).to_bytes(_SEAL_BYTES, "little")


def decode(data: bytes, kind: type[T]) -> T:
    """Reads one message.

    Args:
        data: sealed msgpack, at most `MAX_MESSAGE_BYTES`.
        kind: the struct (or a list of one) that is expected.

    Raises:
        WireError: too large, damaged, not msgpack, a missing or mistyped field, or values that are impossible.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    data, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if zlib.crc32(data).to_bytes(_SEAL_BYTES, "little") != seal:
        raise WireError(f"a message that should be {kind}, of {len(data)} bytes, was damaged or cut on the way")
    decoder = _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    try:
        message = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a message that should be {kind} does not decode: {error}") from error
    validate(message)
    return message


def to_json(message: Any) -> str:
    """Returns `message` as JSON (bytes as base64)."""
    return msgspec.json.encode(message).decode()


def validate(message: Any) -> None:
    """Refuses messages whose values contradict one another. Raises WireError naming the field."""
    if isinstance(message, SourceManifest):
        _validate_source(message)
    elif isinstance(message, EngineManifest):
        _check_rank(f"engine rank {message.reader}", message.rank, message.world_size)
        _check_size(f"the plan of engine rank {message.reader}", message.nbytes)
        for box in message.boxes:
            if len(box.offset) != len(box.shape) or len(box.shape) > MAX_AXES:
                raise WireError(
                    f"engine rank {message.reader} takes a box of {len(box.offset)} and {len(box.shape)} axes"
                )
            if min((box.tensor, *box.offset, *box.shape)) < 0 or max((0, *box.offset, *box.shape)) > MAX_BYTES:
                raise WireError(
                    f"engine rank {message.reader} takes the box {box.offset}+{box.shape} of tensor {box.tensor}"
                )
        for request in message.requests:
            validate(request)
    elif isinstance(message, LinkOffer):
        _check_regions(f"offer of source rank {message.source}", message.regions, lowest=-1)
    elif isinstance(message, ReadRequest):
        _check_size(f"pack arena for {message.reader}", message.pack_bytes)
        for transfer in message.transfers:
            if transfer.round < 0 or transfer.chunk < 0:
                raise WireError(f"transfer of {message.reader} in chunk {transfer.chunk} of round {transfer.round}")
            if len(transfer.columns) != 8 * 5 * transfer.count:
                raise WireError(
                    f"transfer of {message.reader}: {len(transfer.columns)} bytes for {transfer.count} reads"
                )
            if len(transfer.pack_columns) != 8 * 6 * transfer.pack_count:
                raise WireError(
                    f"transfer of {message.reader}: {len(transfer.pack_columns)} bytes for {transfer.pack_count} packs"
                )


def _check_rank(where: str, rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise WireError(f"{where}: outside its world of {world_size}")
    if world_size > MAX_RANKS:
        raise WireError(f"{where}: a world of {world_size} ranks; at most {MAX_RANKS} are possible")


def _check_size(what: str, nbytes: int) -> None:
    if not 0 <= nbytes <= MAX_BYTES:
        raise WireError(f"{what}: {nbytes} bytes; expected 0 to {MAX_BYTES}")


def _check_regions(where: str, regions: tuple[RegionMeta, ...], lowest: int = 0) -> None:
    for region in regions:
        _check_size(f"{where}, region {region.id}", region.nbytes)
        if (
            not lowest <= region.id < 1 << 31
            or not 0 <= region.address < 1 << 62
            or not 0 <= region.device_index < 1 << 31
        ):
            raise WireError(
                f"{where}: region {region.id} at address {region.address} of device {region.device_index} is impossible"
            )
    if len({region.id for region in regions}) != len(regions):
        raise WireError(f"{where}: two regions share one id")


def _validate_source(message: SourceManifest) -> None:
    where = f"manifest of source rank {message.rank}"
    _check_rank(where, message.rank, message.world_size)
    if not 1 <= message.rounds <= MAX_SLOTS + len(message.shards):  # each round brings a box; readers count all rounds
        raise WireError(f"{where}: {message.rounds} rounds for {len(message.shards)} shards")
    if not 1 <= message.slots <= MAX_SLOTS:
        raise WireError(f"{where}: {message.slots} buckets at once; expected 1 to {MAX_SLOTS}")
    _check_regions(where, message.regions)
    names = set()
    for tensor in message.tensors:
        if tensor.name in names:
            raise WireError(f"{where}: checkpoint tensor {tensor.name!r} is declared twice")
        names.add(tensor.name)
        if tensor.dtype not in DTYPE_BYTES:
            raise WireError(f"{where}: {tensor.name!r} has dtype {tensor.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if len(tensor.shape) > MAX_AXES:
            raise WireError(f"{where}: {tensor.name!r} has {len(tensor.shape)} axes; at most {MAX_AXES} are possible")
        # sizes of 0 count as 1: strides are made of the others
        if any(size < 0 for size in tensor.shape) or prod(max(size, 1) for size in tensor.shape) > MAX_BYTES // 8:
            raise WireError(f"{where}: {tensor.name!r} has shape {tensor.shape}")
    regions = {region.id: region for region in message.regions}
    for shard in message.shards:
        if not 0 <= shard.tensor < len(message.tensors):
            raise WireError(f"{where}: a shard names tensor {shard.tensor} of {len(message.tensors)}")
        tensor = message.tensors[shard.tensor]
        rank = len(tensor.shape)
        if not len(shard.offset) == len(shard.shape) == len(shard.strides) == rank:
            raise WireError(
                f"{where}: a shard of {tensor.name!r} has another number of axes than its shape {tensor.shape}"
            )
        for offset, size, full in zip(shard.offset, shard.shape, tensor.shape, strict=True):
            if offset < 0 or size < 0 or offset + size > full:
                raise WireError(
                    f"{where}: the box {shard.offset}+{shard.shape} leaves {tensor.name!r} of shape {tensor.shape}"
                )
        if not all(0 <= stride <= MAX_BYTES for stride in shard.strides):
            raise WireError(f"{where}: a shard of {tensor.name!r} has strides {shard.strides}")
        region = regions.get(shard.region)
        if region is None:
            raise WireError(f"{where}: a shard of {tensor.name!r} lies in region {shard.region}, which is not declared")
        if not 0 <= shard.round < message.rounds:
            raise WireError(f"{where}: a shard of {tensor.name!r} belongs to round {shard.round} of {message.rounds}")
        if 0 not in shard.shape:
            item = DTYPE_BYTES[tensor.dtype]
            last = shard.byte_offset + item * (
                1 + sum((size - 1) * stride for size, stride in zip(shard.shape, shard.strides, strict=True))
            )
            if shard.byte_offset < 0 or last > region.nbytes:
                raise WireError(
                    f"{where}: a shard of {tensor.name!r} ends at byte {last} of region {shard.region}, which has {region.nbytes}"
                )


class ReaderStatus(Struct, frozen=True):
    """An engine rank as the coordinator sees it."""

    reader: str
    incarnation: str
    hostname: str
    pid: int
    engine: str
    epoch: int  # of the sources it planned against
    nbytes: int
    requested: int  # source ranks it reads from
    offered: int  # how many of them have answered
    since_s: float = 0.0  # seconds since it connected
    heard_s: float = 0.0  # seconds since it began to pull, or since it connected


class ReplicaStatus(Struct, frozen=True):
    """A replica as the coordinator sees it."""

    name: str
    world_size: int
    state: str  # "connecting", "connected", "updating", "serving" or "torn"
    version: int | None  # that it serves, as far as syncs of this group decided it
    torn: str  # why, empty unless torn
    readers: tuple[ReaderStatus, ...]


class SourceStatus(Struct, frozen=True):
    """A source rank as the coordinator sees it."""

    rank: int
    hostname: str
    pid: int
    mode: str
    rounds: int
    since_s: float = 0.0  # seconds since it joined
    heard_s: float = 0.0  # seconds since it began a sync, or since it joined


class LastSync(Struct, frozen=True):
    """The latest sync that is over."""

    version: int
    outcome: str  # "committed", "partial" (replicas were left out) or "failed"
    seconds: float
    ago_s: float  # seconds since its end
    bytes: int = 0
    mode: str = ""
    slowest: LinkReport | None = None
    failed: dict[str, str] = {}  # replicas that were left out, and why
    error: str = ""

    def ended(self, ago_s: float) -> LastSync:
        """The same sync, so many seconds after its end."""
        return msgspec.structs.replace(self, ago_s=ago_s)


class GroupStatus(Struct, frozen=True):
    """A sync group as its coordinator sees it."""

    group: str
    world_size: int
    epoch: int
    version: int | None  # last committed
    sync: int | None  # the running sync
    sync_version: int | None
    sources: tuple[SourceStatus, ...]
    missing: tuple[int, ...]  # source ranks that have not joined
    replicas: tuple[ReplicaStatus, ...]
    last_failure: str  # of the latest sync that failed, empty if none did
    sync_s: float = 0.0  # seconds since the running sync began
    waits_for: str = ""  # whom the running sync waits for, and in which phase, as far as the coordinator can tell
    last: LastSync | None = None
