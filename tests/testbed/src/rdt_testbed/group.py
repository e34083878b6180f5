"""Small messages of a sync group: manifests, requests, offers and reports that are valid and carry no weights."""

from __future__ import annotations

from typing import Any

from rdt_core import wire

GROUP = "policy"
TENSORS = (
    wire.TensorMeta(name="model.embed.weight", shape=(8, 4), dtype="bfloat16"),
    wire.TensorMeta(name="model.norm.weight", shape=(4,), dtype="bfloat16"),
)
NODE = wire.NodeMeta(node_id="n0", boot_id="b0", hostname="host-a", pid=11)
VERSIONS = wire.VersionMeta(
    rdt="0.1.0",
    wire_major=wire.WIRE_MAJOR,
    wire_minor=wire.WIRE_MINOR,
    ray="2.60.0",
    nixl="1.5.1",
    torch="2.13.0",
    python="3.11",
)
NBYTES = 72


def token(rank: int) -> str:
    """Returns the token that source rank `rank` joins with."""
    return f"token-{rank}"


def source(rank: int, world_size: int, **changes: Any) -> wire.SourceManifest:
    """Returns a source rank's manifest: with a shard in each of its rounds, if there are several."""
    rounds, first = changes.get("rounds", 1), TENSORS[0]
    fields: dict[str, Any] = {
        "group": GROUP,
        "rank": rank,
        "world_size": world_size,
        "versions": VERSIONS,
        "node": NODE,
        "mode": "live",
        "mode_reason": "as asked",
        "tensors": TENSORS,
        "shards": (),
        "regions": (),
        "kinds": ("local",),
    }
    if rounds > 1:
        empty = (0,) * len(first.shape)
        fields["regions"] = (wire.RegionMeta(id=0, nbytes=64, address=0, device="cpu"),)
        fields["shards"] = tuple(
            wire.ShardMeta(tensor=0, offset=empty, shape=empty, region=0, byte_offset=0, strides=empty, round=round)
            for round in range(rounds)
        )
    return wire.SourceManifest(**fields | changes)


def request(reader: str, incarnation: str, rank: int) -> wire.ReadRequest:
    """Returns what `reader` asks of source rank `rank`."""
    return wire.ReadRequest(
        reader=reader, incarnation=incarnation, source=rank, kind="local", digest="plan", pack_bytes=0, transfers=()
    )


def engine(
    replica: str, rank: int, world_size: int, *, sources: int = 2, incarnation: str = "first", **changes: Any
) -> wire.EngineManifest:
    """Returns an engine rank's manifest that asks source ranks 0 to `sources` - 1."""
    fields: dict[str, Any] = {
        "group": GROUP,
        "replica": replica,
        "rank": rank,
        "world_size": world_size,
        "incarnation": incarnation,
        "versions": VERSIONS,
        "node": NODE,
        "engine": "torch",
        "digest": "plan",
        "nbytes": NBYTES,
        "taken": tuple(tensor.name for tensor in TENSORS),
        "requests": tuple(request(f"{replica}/{rank}", incarnation, one) for one in range(sources)),
    }
    return wire.EngineManifest(**fields | changes)


def offer(asked: wire.ReadRequest, **changes: Any) -> wire.LinkOffer:
    """Returns the answer to a request."""
    fields = {"reader": asked.reader, "incarnation": asked.incarnation, "source": asked.source, "digest": "served"}
    return wire.LinkOffer(**fields | changes)


def report(reader: str, version: int, *, incarnation: str = "first", **changes: Any) -> wire.ReaderReport:
    """Returns an account that the coordinator accepts."""
    fields: dict[str, Any] = {
        "reader": reader,
        "incarnation": incarnation,
        "version": version,
        "bytes": NBYTES,
        "expected_bytes": NBYTES,
        "digest": "plan",
        "phases": {"pull": 0.5},
        "links": (),
    }
    return wire.ReaderReport(**fields | changes)
