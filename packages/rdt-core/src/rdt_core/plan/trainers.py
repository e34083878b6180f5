"""Source ranks that exist only on paper: the boxes that FSDP2 or Megatron would give each of them, as real manifests.

A layout says which parameters a rank holds and which boxes of checkpoint tensors lie in them; here they get places in
memory as a rank in mode `live` or `snapshot` would declare them. No tensor is made. Sizes that do not divide are refused as
the frameworks refuse them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from .. import wire
from ..errors import SourceError
from ..geometry import row_major
from ..layout import layer_of
from ..memory import ALIGNMENT
from ..shapes import Config

VERSIONS = wire.VersionMeta(
    rdt="plan", wire_major=wire.WIRE_MAJOR, wire_minor=wire.WIRE_MINOR, ray="", nixl="", torch="", python=""
)
GROUP = "plan"
MODES = ("live", "snapshot")
#: elements to which Megatron's buffers align the start of a parameter
_BUFFER_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a checkpoint tensor inside a parameter; `start` and `strides` in elements of the parameter's memory."""

    tensor: wire.TensorMeta
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a source rank.

    Attributes:
        name: as the framework calls it, or close to it.
        buffer: parameters of one buffer share an allocation; an empty name: one of its own.
        numel: elements in memory, padding included.
        pieces: what of the checkpoint lies in it.
    """

    name: str
    buffer: str
    numel: int
    pieces: tuple[Piece, ...]


class Catalogue:
    """The checkpoint tensors of a model where layouts look for them, so that no rank has to look at all.

    Args:
        tensors: in checkpoint order.
        config: their model's.

    Attributes:
        config: as given.
        outside: tensors of no layer.
        layers: tensors of each layer outside of its routed experts.
        experts: tensors of each layer's routed experts, by layer and expert.
    """

    def __init__(self, tensors: Sequence[wire.TensorMeta], config: Config) -> None:
        self.config = config
        self.outside: list[wire.TensorMeta] = []
        self.layers: dict[int, list[wire.TensorMeta]] = {}
        self.experts: dict[int, dict[int, list[wire.TensorMeta]]] = {}
        for meta in tensors:
            layer = layer_of(meta.name)
            if layer is None:
                self.outside.append(meta)
                continue
            expert = expert_of(meta.name)
            if expert < 0:
                self.layers.setdefault(layer[1], []).append(meta)
            else:
                self.experts.setdefault(layer[1], {}).setdefault(expert, []).append(meta)


class Layout(Protocol):
    """How a trainer spreads a model over its ranks."""

    @property
    def ranks(self) -> int:
        """Source ranks."""
        ...

    def check(self, config: Config) -> None:
        """Refuses a model that this layout cannot hold. Raises SourceError."""
        ...

    def parameters(self, rank: int, catalogue: Catalogue) -> Iterator[Parameter]:
        """What a rank holds, in the order in which the framework registers it."""
        ...


@dataclass(frozen=True, slots=True)
class FsdpLayout:
    """FSDP2, or HSDP with several replicas: each tensor's rows in equal stretches, the last ones shorter or empty.

    Attributes:
        ranks: source ranks, replicas included.
        replicas: times that the whole model is held; divides `ranks`.
        apart: whether each expert has parameters of its own; else the experts of a layer are one parameter, whose first axis is
            the expert (transformers from 5 on).
    """

    ranks: int
    replicas: int = 1
    apart: bool = False

    def check(self, config: Config) -> None:
        """See `Layout.check`."""
        if self.ranks % self.replicas:
            raise SourceError(f"{self.replicas} replicas do not divide {self.ranks} source ranks")

    def parameters(self, rank: int, catalogue: Catalogue) -> Iterator[Parameter]:
        """See `Layout.parameters`."""
        shards = self.ranks // self.replicas
        at = rank % shards
        apart = [meta for layer in catalogue.layers.values() for meta in layer]
        if self.apart:
            apart += [meta for experts in catalogue.experts.values() for expert in experts.values() for meta in expert]
        for meta in (*catalogue.outside, *apart):
            low, high = _stretch(meta.shape[0], shards, at)
            if high > low:
                shape = (high - low, *meta.shape[1:])
                piece = Piece(meta, (low, *(0,) * (len(shape) - 1)), shape, 0, row_major(shape))
                yield Parameter(meta.name, "", prod(shape), (piece,))
        for layer, experts in () if self.apart else catalogue.experts.items():
            low, high = _stretch(len(experts), shards, at)
            held = [meta for expert in range(low, high) for meta in experts[expert]]
            for name in ("gate_up_proj", "down_proj"):
                pieces, start = [], 0
                for meta in held:
                    if (".down_proj." in meta.name) == (name == "down_proj"):
                        pieces.append(Piece(meta, (0,) * len(meta.shape), meta.shape, start, row_major(meta.shape)))
                        start += prod(meta.shape)
                if pieces:
                    yield Parameter(f"layers.{layer}.experts.{name}", "", start, tuple(pieces))


def expert_of(name: str) -> int:
    """Index of the routed expert that a checkpoint tensor belongs to, or -1."""
    at = name.find(".experts.")
    return -1 if at < 0 else int(name[at + 9 : name.index(".", at + 9)])


def _stretch(count: int, ranks: int, rank: int) -> tuple[int, int]:
    each = -(-count // ranks)
    return min(count, rank * each), min(count, (rank + 1) * each)


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


def _live(parameters: Sequence[Parameter]) -> tuple[list[int], list[Place]]:
    """Sizes of the regions, and where each piece lies: parameters of a buffer from its end to its start, as DDP lays them."""
    regions: list[int] = []
    home: dict[str, tuple[int, int]] = {}  # region and offset by name of the parameter
    buffers: dict[tuple[str, str], int] = {}
    for parameter in reversed(parameters):
        item = wire.DTYPE_BYTES[parameter.pieces[0].tensor.dtype] if parameter.pieces else 2
        key = (parameter.buffer, parameter.pieces[0].tensor.dtype if parameter.pieces else "")
        if not parameter.buffer:
            home[parameter.name] = len(regions), 0
            regions.append(parameter.numel * item)
            continue
        region = buffers.setdefault(key, len(regions))
        if region == len(regions):
            regions.append(0)
        home[parameter.name] = region, regions[region]
        padded = -(-parameter.numel // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT
        regions[region] += padded * item
    places = []
    for parameter in parameters:
        region, base = home[parameter.name]
        places += [
            (piece, region, base + piece.start * wire.DTYPE_BYTES[piece.tensor.dtype]) for piece in parameter.pieces
        ]
    return regions, places


def _snapshot(parameters: Sequence[Parameter]) -> tuple[list[int], list[Place]]:
    """The same for an arena with a copy of every box, one after the other."""
    used = 0
    places: list[Place] = []
    for parameter in parameters:
        for piece in parameter.pieces:
            used = -(-used // ALIGNMENT) * ALIGNMENT
            places.append((piece, 0, used))
            used += prod(piece.shape) * wire.DTYPE_BYTES[piece.tensor.dtype]
    return [used], places
