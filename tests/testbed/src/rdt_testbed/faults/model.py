"""The model of a world: its weights are a known function of the version, so that what a replica serves can be checked.

Every element of every tensor differs between versions. Source ranks hold uneven row ranges (and one tensor all of them);
engine ranks fuse tensors and split them, as real ones do.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch

from rdt_core.sources.base import Shard
from rdt_core.wire import TensorMeta

_LAYERS = 3
_VOCABULARY, _HIDDEN, _WIDE = 250, 64, 96
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (_VOCABULARY, _HIDDEN),
    **{
        f"layers.{layer}.{name}.weight": shape
        for layer in range(_LAYERS)
        for name, shape in {"q": (_HIDDEN, _HIDDEN), "k": (_HIDDEN // 2, _HIDDEN), "down": (_HIDDEN, _WIDE)}.items()
    },
    "norm.weight": (_HIDDEN,),
}
_PADDED = 256
#: what an engine holds before its first sync
_UNSET = -1


def whole(name: str, version: int) -> torch.Tensor:
    """Returns a checkpoint tensor of a version."""
    shape = SHAPES[name]
    count = torch.Size(shape).numel()
    mixed = torch.arange(count, dtype=torch.int64) * 2654435761 + zlib.crc32(name.encode()) + version * 0x9E3779B1
    return (mixed & 0x7FFFFFFF).to(torch.int32).reshape(shape)


class Source:
    """What a source rank holds: rows of every tensor, the norm in full.

    Args:
        rank: of the source rank.
        world_size: number of source ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rows: list[tuple[str, int, torch.Tensor]] = []
        for name, shape in SHAPES.items():
            size = -(-shape[0] // world_size)
            start, end = min(shape[0], rank * size), min(shape[0], (rank + 1) * size)
            if name == "norm.weight":
                start, end = 0, shape[0]
            self._rows.append((name, start, torch.zeros((end - start, *shape[1:]), dtype=torch.int32)))

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(name=name, shape=shape, dtype="int32") for name, shape in SHAPES.items()]

    def shards(self) -> list[Shard]:
        return [Shard(name, (start,) + (0,) * (tensor.dim() - 1), tensor) for name, start, tensor in self._rows]

    def ignored(self) -> list[str]:
        return []

    def fill(self, version: int) -> None:
        """Takes the weights of a version."""
        for name, start, tensor in self._rows:
            tensor.copy_(whole(name, version)[start : start + tensor.shape[0]])

    def move(self) -> None:
        """Re-allocates every parameter; the old memory then holds other values."""
        old = self._rows
        self._rows = [(name, start, tensor.clone()) for name, start, tensor in old]
        for _, _, tensor in old:
            tensor.fill_(-7)


class _Layer(torch.nn.Module):
    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.qk = _parameter((_HIDDEN + _HIDDEN // 2) // world_size, _HIDDEN)
        self.down = _parameter(_HIDDEN, _WIDE // world_size)


class Served(torch.nn.Module):
    """What an engine rank serves: fused and split.

    Args:
        rank: of the engine rank.
        world_size: engine ranks of the replica.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self.embed = _parameter(_PADDED // world_size, _HIDDEN)
        self.layers = torch.nn.ModuleList(_Layer(world_size) for _ in range(_LAYERS))
        self.norm = _parameter(_HIDDEN)


def load(module: Served, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """The engine's weight loaders."""
    rank, world = module.rank, module.world_size
    for name, tensor in weights:
        if name == "embed.weight":
            rows = _PADDED // world
            start = min(_VOCABULARY, rank * rows)
            count = min(_VOCABULARY, (rank + 1) * rows) - start
            module.embed.data[count:].fill_(0)
            module.embed.data[:count].copy_(tensor.narrow(0, start, count))
        elif name == "norm.weight":
            module.norm.data.copy_(tensor)
        else:
            layer = module.layers[int(name.split(".")[1])]
            if ".down." in name:
                layer.down.data.copy_(tensor.narrow(1, rank * _WIDE // world, _WIDE // world))
            else:
                size = tensor.shape[0] // world
                offset = 0 if ".q." in name else _HIDDEN // world
                layer.qk.data.narrow(0, offset, size).copy_(tensor.narrow(0, rank * size, size))


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """Returns a digest of names and bytes."""
    summed = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        summed.update(name.encode())
        summed.update(state[name].contiguous().numpy().tobytes())
    return summed.hexdigest()


@lru_cache(maxsize=256)
def expected(rank: int, world_size: int, version: int | None) -> str:
    """Returns the digest of an engine rank that serves a version; None: that was never written."""
    module = Served(rank, world_size)
    if version is not None:
        load(module, [(name, whole(name, version)) for name in SHAPES])
    return digest(module.state_dict())


def _parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, _UNSET, dtype=torch.int32), requires_grad=False)
