"""Source ranks that exist only on paper: the boxes that FSDP2 or Megatron would give each of them, as real manifests.

A layout says which parameters a rank holds and which boxes of checkpoint tensors lie in them (`trainers`); here they get
places in memory as a rank in mode `live` or `snapshot` would declare them. No tensor is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .. import wire
from ..geometry import row_major
from ..memory import ALIGNMENT
from ..shapes import Config
from ..trainers import Catalogue, Layout, Parameter, Piece, place

VERSIONS = wire.VersionMeta(
    rdt="plan", wire_major=wire.WIRE_MAJOR, wire_minor=wire.WIRE_MINOR, ray="", nixl="", torch="", python=""
)
GROUP = "plan"
MODES = ("live", "snapshot")


def make_manifests(
    layout: Layout,
    tensors: Sequence[wire.TensorMeta],
    config: Config,
    nodes: Sequence[wire.NodeMeta],
    *,
    mode: str = "live",
    kinds: tuple[str, ...] = ("mapped", "prepared"),
) -> list[wire.SourceManifest]:
    """Returns what every source rank would declare.

    Args:
        layout: of the trainer.
        tensors: of the checkpoint.
        config: their model's.
        nodes: where each rank runs.
        mode: "live" (readers read the parameters) or "snapshot" (an arena with a copy of every box).
        kinds: link kinds that ranks offer.

    Raises:
        SourceError: the layout cannot hold this model.
    """
    layout.check(config)
    catalogue = Catalogue(tensors, config)
    return [_manifest(rank, layout, catalogue, node, mode, kinds) for rank, node in enumerate(nodes)]


def _manifest(
    rank: int,
    layout: Layout,
    catalogue: Catalogue,
    node: wire.NodeMeta,
    mode: str,
    kinds: tuple[str, ...],
) -> wire.SourceManifest:
    parameters = list(layout.parameters(rank, catalogue))
    known: dict[str, int] = {}
    declared: list[wire.TensorMeta] = []
    for parameter in parameters:
        for piece in parameter.pieces:
            if piece.tensor.name not in known:
                known[piece.tensor.name] = len(declared)
                declared.append(piece.tensor)
    regions, places = (_live if mode == "live" else _snapshot)(parameters)
    shards = [
        wire.ShardMeta(
            tensor=known[piece.tensor.name], offset=piece.offset, shape=piece.shape, region=region, byte_offset=offset,
            strides=piece.strides if mode == "live" else row_major(piece.shape),
        )
        for piece, region, offset in places
    ]  # fmt: skip
    return wire.SourceManifest(
        group=GROUP,
        rank=rank,
        world_size=layout.ranks,
        versions=VERSIONS,
        node=node,
        mode=mode,
        mode_reason="planned",
        tensors=tuple(declared),
        shards=tuple(shards),
        regions=tuple(
            # addresses as far apart as they would be, so that messages have the length they would have
            wire.RegionMeta(id=number, nbytes=size, address=0x7F00_0000_0000 + (number << 32), device="cuda")
            for number, size in enumerate(regions)
        ),
        kinds=kinds,
    )


Place = tuple[Piece, int, int]  # region id, byte offset


def _live(parameters: Sequence[Parameter]) -> tuple[Sequence[int], list[Place]]:
    """Sizes of the regions, and where each piece lies."""
    placed = place(parameters)
    places = [
        (piece, region, base + piece.start * wire.DTYPE_BYTES[piece.tensor.dtype])
        for parameter, (region, base) in zip(parameters, placed.homes, strict=True)
        for piece in parameter.pieces
    ]
    return placed.regions, places


def _snapshot(parameters: Sequence[Parameter]) -> tuple[Sequence[int], list[Place]]:
    """The same for an arena with a copy of every box, one after the other."""
    used = 0
    places: list[Place] = []
    for parameter in parameters:
        for piece in parameter.pieces:
            used = -(-used // ALIGNMENT) * ALIGNMENT
            places.append((piece, 0, used))
            used += prod(piece.shape) * wire.DTYPE_BYTES[piece.tensor.dtype]
    return [used], places
