"""What a layout says: parameters that a rank holds, the boxes of checkpoint tensors in them, and where they lie in memory.

A layout is pure arithmetic over the tensors of a configuration; no tensor is made and no framework imported. Who wants
memory allocates regions of the sizes that `place` gives, and cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .. import wire
from ..layout import layer_of
from ..shapes import Config

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


def expert_of(name: str) -> int:
    """Index of the routed expert that a checkpoint tensor belongs to, or -1."""
    at = name.find(".experts.")
    return -1 if at < 0 else int(name[at + 9 : name.index(".", at + 9)])


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parameters of a rank lie.

    Attributes:
        regions: bytes of each allocation.
        homes: of each parameter the number of its allocation and its first byte there.
        dtypes: of each parameter, as its pieces have it; bfloat16 where it holds nothing of the checkpoint.
    """

    regions: tuple[int, ...]
    homes: tuple[tuple[int, int], ...]
    dtypes: tuple[str, ...]


def place(parameters: Sequence[Parameter]) -> Places:
    """Lays parameters out as frameworks do: those of a buffer from its end to its start, as DDP does; others apart."""
    regions: list[int] = []
    homes: list[tuple[int, int]] = []
    dtypes = [one.pieces[0].tensor.dtype if one.pieces else "bfloat16" for one in parameters]
    buffers: dict[tuple[str, str], int] = {}
    for parameter, dtype in zip(reversed(parameters), reversed(dtypes), strict=True):
        item = wire.DTYPE_BYTES[dtype]
        if not parameter.buffer:
            homes.append((len(regions), 0))
            regions.append(parameter.numel * item)
            continue
        region = buffers.setdefault((parameter.buffer, dtype), len(regions))
        if region == len(regions):
            regions.append(0)
        homes.append((region, regions[region]))
        padded = -(-parameter.numel // _BUFFER_ALIGNMENT) * _BUFFER_ALIGNMENT
        regions[region] += padded * item
    return Places(tuple(regions), tuple(reversed(homes)), tuple(dtypes))
