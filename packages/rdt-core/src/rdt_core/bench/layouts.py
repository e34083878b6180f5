"""A named model's parameters as one tensor-parallel rank of an engine holds them, with a loader like the engines' own.

Queries, keys and values lie in one parameter, gate and up in one, all experts of a layer in two; rows or columns are
split over the ranks as column- and row-parallel layers split them, norms and routers are whole on every rank. For these
models vLLM and SGLang hold the same layout and differ in names. Nothing here computes; post-load steps are not imitated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from .. import wire
from ..errors import SourceError
from ..shapes import Config
from .digests import Box, digest

#: how both engines fuse checkpoint tensors: part, fused name, order in it
_FUSED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
}  # fmt: skip
_EXPERT = {"gate_proj": ("w13_weight", 0), "up_proj": ("w13_weight", 1), "down_proj": ("w2_weight", 0)}
_LATENT = {"vllm": "fused_qkv_a_proj", "sglang": "fused_qkv_a_proj_with_mqa"}


@dataclass(frozen=True, slots=True)
class Slice:
    """What a rank takes of one checkpoint tensor, and where it lies.

    Attributes:
        meta: the tensor.
        parameter: qualified name.
        expert: index along the parameter's first axis, or -1.
        row: first row of the place, inside the expert.
        axis, start, count: the part of the tensor that is taken.
    """

    meta: wire.TensorMeta
    parameter: str
    expert: int
    row: int
    axis: int
    start: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(self.count if axis == self.axis else size for axis, size in enumerate(self.meta.shape))


def plan_layout(
    tensors: Iterable[wire.TensorMeta], config: Config, engine: str, rank: int, tp: int
) -> tuple[dict[str, tuple[tuple[int, ...], str]], tuple[Slice, ...]]:
    """Returns each parameter's shape and dtype, and the slices in checkpoint order.

    Args:
        tensors: of the checkpoint.
        config: their model's.
        engine: "vllm" or "sglang".
        rank: engine rank.
        tp: engine ranks.

    Raises:
        SourceError: a size that `tp` does not divide.
    """
    groups: dict[str, list[tuple[int, wire.TensorMeta, int]]] = {}
    for meta in tensors:
        name, order, expert = _home(meta.name, engine)
        groups.setdefault(name, []).append((order, meta, expert))
    parameters: dict[str, tuple[tuple[int, ...], str]] = {}
    slices: dict[str, Slice] = {}
    for name, members in groups.items():
        members.sort(key=lambda member: (member[2], member[0]))
        row, expert = 0, -1
        shape: tuple[int, ...] = ()
        for _, meta, its_expert in members:
            row = row if its_expert == expert else 0
            expert = its_expert
            axis, start, count = _part(meta, config, rank, tp)
            one = Slice(meta, name, expert, row, axis, start, count)
            slices[meta.name] = one
            row += one.shape[0]
            shape = (row, *one.shape[1:])
        parameters[name] = (shape if expert < 0 else (expert + 1, *shape), members[0][1].dtype)
    return parameters, tuple(slices[meta.name] for meta in tensors)


def _home(name: str, engine: str) -> tuple[str, int, int]:
    """The parameter that holds a checkpoint tensor, the tensor's order in it, and its expert or -1."""
    pieces = name.split(".")
    if "experts" in pieces:
        at = pieces.index("experts")
        fused, order = _EXPERT[pieces[-2]]
        return ".".join([*pieces[: at + 1], fused]), order, int(pieces[at + 1])
    if pieces[-2] in ("q_a_proj", "kv_a_proj_with_mqa"):
        return ".".join([*pieces[:-2], _LATENT[engine], pieces[-1]]), int(pieces[-2] != "q_a_proj"), -1
    fused, order = _FUSED.get(pieces[-2], (pieces[-2], 0))
    return ".".join([*pieces[:-2], fused, pieces[-1]]), order, -1


def _part(meta: wire.TensorMeta, config: Config, rank: int, tp: int) -> tuple[int, int, int]:
    """Axis, first index and length of what a rank takes."""
    module = meta.name.split(".")[-2]
    rows = meta.shape[0]
    if module in ("embed_tokens", "lm_head"):
        each = -(-rows // tp)
        start = min(rows, rank * each)
        return 0, start, min(rows, start + each) - start
    if module in ("k_proj", "v_proj") and config.kv_heads < tp:
        # fewer heads than ranks: several ranks hold the same one
        return 0, rank * config.kv_heads // tp * config.head_dim, config.head_dim
    if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj"):
        return 0, rank * _share(meta, rows, tp), _share(meta, rows, tp)
    if module in ("o_proj", "down_proj") and len(meta.shape) > 1:
        return 1, rank * _share(meta, meta.shape[1], tp), _share(meta, meta.shape[1], tp)
    return 0, 0, rows


def _share(meta: wire.TensorMeta, size: int, tp: int) -> int:
    if size % tp:
        raise SourceError(f"{tp} engine ranks do not divide the {size} of {meta.name} {list(meta.shape)}")
    return size // tp


class EngineModule(torch.nn.Module):
    """One engine rank's parameters, zero at first.

    Args:
        tensors: of the checkpoint.
        config: their model's.
        engine: "vllm" or "sglang".
        rank: engine rank.
        tp: engine ranks.
        device: of all parameters.
    """

    def __init__(
        self, tensors: Iterable[wire.TensorMeta], config: Config, engine: str, rank: int, tp: int, device: str
    ) -> None:
        super().__init__()
        parameters, slices = plan_layout(tuple(tensors), config, engine, rank, tp)
        self.slices = {one.meta.name: one for one in slices}
        self._flat: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in parameters.items():
            self._flat[name] = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            *path, last = name.split(".")
            parent: torch.nn.Module = self
            for piece in path:
                if piece not in parent._modules:
                    parent.add_module(piece, torch.nn.Module())
                parent = parent.get_submodule(piece)
            parent.register_parameter(last, torch.nn.Parameter(self._flat[name], requires_grad=False))

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(tensor.nbytes for tensor in self._flat.values())

    def part(self, name: str) -> torch.Tensor:
        """The view of a parameter that holds what this rank takes of a checkpoint tensor."""
        one = self.slices[name]
        whole = self._flat[one.parameter]
        whole = whole if one.expert < 0 else whole[one.expert]
        return whole.narrow(0, one.row, one.shape[0])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies what this rank takes of each full checkpoint tensor to its place, as engines' loaders do."""
        for name, tensor in weights:
            one = self.slices[name]
            self.part(name).copy_(tensor.narrow(one.axis, one.start, one.count))

    def boxes(self) -> list[Box]:
        """What this rank takes of each checkpoint tensor, in checkpoint order."""
        return [Box(name=name, axis=s.axis, start=s.start, count=s.count) for name, s in self.slices.items()]

    def digests(self) -> Iterator[torch.Tensor]:
        """The sum of each of `boxes`, from what the parameters hold now."""
        for name, one in self.slices.items():
            yield digest(self.part(name), *((one.start, 0) if one.axis == 0 else (0, one.start)))
