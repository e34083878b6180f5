"""A named model's parameters as one rank of an engine holds them, with a loader like the engines' own.

Queries, keys and values lie in one parameter, gate and up in one, all experts of a layer in two; rows or columns are
split over the ranks as column- and row-parallel layers split them, experts go to expert parallel ranks in stretches, layers
to pipeline stages, norms and routers are whole. For these models vLLM and SGLang hold the same layout and differ in names and
in uneven pipelines. Nothing here computes; post-load steps are not imitated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from .. import wire
from ..errors import SourceError
from ..layout import layer_of
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
class EngineRank:
    """One rank of an engine among its others.

    Attributes:
        engine: "vllm" or "sglang".
        rank: 0 up to `tp * pp` - 1; tensor-parallel ranks of one stage follow one another.
        tp: tensor-parallel ranks of a stage.
        ep: stretches that a layer's experts are split into; divides `tp`. Each is split by rows or columns over `tp / ep`
            ranks.
        pp: pipeline stages.
    """

    engine: str
    rank: int = 0
    tp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def stage(self) -> int:
        """Pipeline stage."""
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        """Rank inside the stage."""
        return self.rank % self.tp

    @property
    def expert_tp(self) -> int:
        """Ranks that split an expert."""
        return self.tp // self.ep

    def layers(self, count: int) -> range:
        """Decoder layers of this rank's stage, as the engine spreads `count` layers that may not divide evenly."""
        each, rest = divmod(count, self.pp)
        sizes = [each] * self.pp
        for extra in range(rest):
            # vLLM spares the last stage (and the first, if it can), SGLang gives the last ones more
            sizes[-(extra + (2 if self.engine == "vllm" else 1))] += 1
        first = sum(sizes[: self.stage])
        return range(first, first + sizes[self.stage])

    def experts(self, count: int) -> range:
        """Experts of a layer that this rank holds.

        Raises:
            SourceError: `count` that `ep` does not divide.
        """
        if count % self.ep:
            raise SourceError(f"{self.ep} expert parallel ranks do not divide {count} experts")
        each = count // self.ep
        first = self.tp_rank // self.expert_tp * each
        return range(first, first + each)

    def holds(self, name: str, config: Config) -> bool:
        """Whether this rank holds a part of the checkpoint tensor `name`."""
        expert = _expert(name)
        if expert >= 0 and expert not in self.experts(config.experts):
            return False
        layer = layer_of(name)
        if layer is not None:
            return layer[1] in self.layers(config.layers)
        first, last = self.stage == 0, self.stage == self.pp - 1
        # where embeddings are tied the last stage needs them for its output
        return first or (last and config.tied) if ".embed_tokens." in name else last


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
    tensors: Iterable[wire.TensorMeta], config: Config, at: EngineRank
) -> tuple[dict[str, tuple[tuple[int, ...], str]], tuple[Slice, ...]]:
    """Returns each parameter's shape and dtype, and the slices in checkpoint order.

    Args:
        tensors: of the checkpoint.
        config: their model's.
        at: the engine rank.

    Raises:
        SourceError: a size that the parallel ranks do not divide.
    """
    groups: dict[str, list[tuple[int, wire.TensorMeta, int]]] = {}
    held = [meta for meta in tensors if at.holds(meta.name, config)]
    first_expert = at.experts(config.experts).start if config.experts else 0
    for meta in held:
        name, order, expert = _home(meta.name, at.engine)
        groups.setdefault(name, []).append((order, meta, expert - first_expert if expert >= 0 else -1))
    parameters: dict[str, tuple[tuple[int, ...], str]] = {}
    slices: dict[str, Slice] = {}
    for name, members in groups.items():
        members.sort(key=lambda member: (member[2], member[0]))
        row, expert = 0, -1
        shape: tuple[int, ...] = ()
        for _, meta, its_expert in members:
            row = row if its_expert == expert else 0
            expert = its_expert
            if expert < 0:
                axis, start, count = _part(meta, config, at.tp_rank, at.tp)
            else:
                axis, start, count = _part(meta, config, at.tp_rank % at.expert_tp, at.expert_tp)
            one = Slice(meta, name, expert, row, axis, start, count)
            slices[meta.name] = one
            row += one.shape[0]
            shape = (row, *one.shape[1:])
        parameters[name] = (shape if expert < 0 else (expert + 1, *shape), members[0][1].dtype)
    return parameters, tuple(slices[meta.name] for meta in held)


def _expert(name: str) -> int:
    """Index of the expert that a checkpoint tensor belongs to, or -1."""
    at = name.find(".experts.")
    return -1 if at < 0 else int(name[at + 9 : name.index(".", at + 9)])


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
        at: the engine rank.
        device: of all parameters; "meta" for a plan.
    """

    def __init__(self, tensors: Iterable[wire.TensorMeta], config: Config, at: EngineRank, device: str) -> None:
        super().__init__()
        tensors = tuple(tensors)
        parameters, slices = plan_layout(tensors, config, at)
        self.slices = {one.meta.name: one for one in slices}
        self._elsewhere = {meta.name for meta in tensors} - self.slices.keys()
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
            if name in self._elsewhere:
                continue
            one = self.slices[name]
            self.part(name).copy_(tensor.narrow(one.axis, one.start, one.count))

    def boxes(self) -> list[Box]:
        """What this rank takes of each checkpoint tensor, in checkpoint order."""
        return [Box(name=name, axis=s.axis, start=s.start, count=s.count) for name, s in self.slices.items()]

    def digests(self) -> Iterator[torch.Tensor]:
        """The sum of each of `boxes`, from what the parameters hold now."""
        for name, one in self.slices.items():
            yield digest(self.part(name), *((one.start, 0) if one.axis == 0 else (0, one.start)))
