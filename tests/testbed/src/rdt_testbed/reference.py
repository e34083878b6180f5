"""A plan executed as simply as can be: numpy slices for the columns, torch for the replays. Slow, easy to believe.

Also small builders of manifests and traces for tests that need no trainer and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rdt_core.geometry import replay
from rdt_core.planning import Plan
from rdt_core.tracing import Slice, Trace
from rdt_core.wire import NodeMeta, RegionMeta, ShardMeta, SourceManifest, TensorMeta, VersionMeta, decode, encode

VERSIONS = VersionMeta(rdt="0", wire_major=1, wire_minor=0, ray="2.56", nixl="1", torch="2", python="3.11")


def node_meta(node_id: str = "node", boot_id: str = "boot") -> NodeMeta:
    """Where a made-up process runs."""
    return NodeMeta(node_id=node_id, boot_id=boot_id, hostname="host", pid=1)


def manifest(
    rank: int,
    world_size: int,
    tensors: Sequence[TensorMeta],
    shards: Sequence[ShardMeta],
    regions: Mapping[int, int],
    rounds: int = 1,
    node: NodeMeta | None = None,
) -> SourceManifest:
    """A manifest that went over the wire, so that it is valid. `regions` maps ids to sizes in bytes."""
    made = SourceManifest(
        group="policy",
        rank=rank,
        world_size=world_size,
        versions=VERSIONS,
        node=node or node_meta(),
        mode="live",
        mode_reason="test",
        tensors=tuple(tensors),
        shards=tuple(shards),
        regions=tuple(RegionMeta(id=i, nbytes=n, address=0, device="cpu") for i, n in regions.items()),
        kinds=("memory",),
        rounds=rounds,
    )
    return decode(encode(made), SourceManifest)


@dataclass(frozen=True, slots=True)
class Sized:
    """A destination of which only the size matters."""

    nbytes: int


def trace_of(slices: Sequence[Slice], tensors: Sequence[TensorMeta]) -> Trace:
    """A trace that holds just these slices."""
    taken = {part.name for part in slices}
    names = tuple(meta.name for meta in tensors)
    return Trace(
        slices=tuple(slices),
        offered=names,
        taken=tuple(n for n in names if n in taken),
        tensors=tuple(tensors),
        fills=(),
    )


def view_of(memory: np.ndarray, dtype: str, offset: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A strided torch view of a uint8 array; offset and strides in elements."""
    flat = torch.from_numpy(memory).view(getattr(torch, dtype))
    return torch.as_strided(flat, tuple(shape), tuple(strides), offset)


def execute(plan: Plan, sources: Mapping[tuple[int, int], np.ndarray], destinations: Mapping[str, np.ndarray]) -> None:
    """Runs a plan.

    Args:
        plan: of one engine rank.
        sources: memory of every region by (rank, region id), uint8.
        destinations: memory by key, uint8, whole multiples of 8 bytes; written.
    """
    memory = [
        destinations[key] if key in destinations else np.zeros(-(-size // 8) * 8, np.uint8)
        for key, size in zip(plan.destinations, plan.destination_nbytes, strict=True)
    ]
    columns = plan.columns
    for i in range(len(columns)):
        source = sources[int(columns.source[i]), int(columns.region[i])]
        target = memory[int(columns.destination[i])]
        for row in range(int(columns.rows[i])):
            read = int(columns.source_offset[i] + row * columns.source_pitch[i])
            write = int(columns.destination_offset[i] + row * columns.destination_pitch[i])
            width = int(columns.row_bytes[i])
            assert 0 <= read <= read + width <= len(source)
            assert 0 <= write <= write + width <= plan.destination_nbytes[int(columns.destination[i])]
            target[write : write + width] = source[read : read + width]
    for staged in plan.staged:
        box = view_of(
            memory[staged.destination],
            staged.dtype,
            0,
            staged.box_shape,
            torch.empty(staged.box_shape, device="meta").stride(),
        )
        value = replay(box.permute(staged.axes).reshape(staged.shape), staged.rest)
        view_of(
            memory[staged.target], staged.target_dtype, staged.target_offset, staged.target_shape, staged.target_strides
        ).copy_(value)
