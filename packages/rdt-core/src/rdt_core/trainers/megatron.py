"""How Megatron-Core spreads a checkpoint over its ranks, by name pattern: tensor, pipeline, expert and data parallelism.

The few rules that plans and benchmarks need, for models in the names of `shapes`; real modules are read by
`rdt_megatron`, whose boxes a test compares with these. Ranks are numbered as Megatron numbers them by default: tensor-parallel
ranks first, then context and data parallel ones, which hold equal boxes, then stages; experts over the same ranks as expert
tensor, expert, expert data. Layers for multi-token prediction are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ..errors import SourceError
from ..geometry import row_major
from ..shapes import Config
from ..wire import TensorMeta
from .base import Catalogue, Parameter, Piece

_QKV = ("q_proj", "k_proj", "v_proj")
_GATED = ("gate_proj", "up_proj")
_ROWS = ("q_b_proj", "kv_b_proj")
_COLUMNS = ("o_proj", "down_proj")
_LATENT_DOWN = ("q_a_proj", "kv_a_proj_with_mqa")
_VOCABULARY = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """Sizes of the parallel groups.

    Attributes:
        ranks: source ranks.
        tp, pp: tensor parallel ranks, pipeline stages.
        ep, etp: expert parallel ranks, tensor parallel ranks of the experts; they spread over a stage's ranks.
        cp: context parallel ranks.
        vpp: model chunks of a stage (interleaved pipeline).
        first, last: layers of the first and the last stage; 0: an even share. Where neither is given, layers that do not
            divide go to the first stages, as a pipeline layout written out for them would say.
        cut_latent: whether the down projections of latent attention are cut by rows (Megatron's local modules) or whole on
            every rank (Transformer Engine's).
        vocabulary_multiple: rows to which each rank's share of the vocabulary is padded.
    """

    ranks: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    vpp: int = 1
    first: int = 0
    last: int = 0
    cut_latent: bool = False
    vocabulary_multiple: int = 128

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.ranks // self.pp

    def check(self, config: Config) -> None:
        """See `Layout.check`."""
        groups = "tp x pp" if self.cp == 1 else "tp x cp x pp"
        for what, size in ((groups, self.tp * self.cp * self.pp), ("etp x ep x pp", self.etp * self.ep * self.pp)):
            if self.ranks % size:
                raise SourceError(f"{self.ranks} source ranks are no multiple of {what} = {size}")
        if config.heads % self.tp:
            raise SourceError(f"{self.tp} tensor parallel ranks do not divide the {config.heads} attention heads")
        if config.kv_heads % self.tp and self.tp % config.kv_heads:
            raise SourceError(
                f"tp={self.tp} neither divides the {config.kv_heads} query groups nor is a multiple of them"
            )
        if config.experts and config.experts % self.ep:
            raise SourceError(f"ep={self.ep} does not divide the {config.experts} experts of a layer")
        if self.ep > 1 and not config.experts:
            raise SourceError(f"ep={self.ep} spreads experts, and this model has none")
        self.layers(config.layers)

    def layers(self, count: int) -> list[list[int]]:
        """The decoder layers of each stage, in ascending order.

        Raises:
            SourceError: `count` layers cannot be spread so.
        """
        if self.first or self.last:
            middle = self.pp - bool(self.first) - bool(self.last)
            rest = count - self.first - self.last
            if rest < 0 or (middle and rest % middle) or (not middle and rest):
                raise SourceError(
                    f"{count} layers, {self.first} on the first and {self.last} on the last stage (0: no wish), leave "
                    f"{rest} for {middle} stages"
                )
            sizes = [rest // middle if middle else 0] * self.pp
            sizes[0], sizes[-1] = self.first or sizes[0], self.last or sizes[-1]
        else:
            sizes = [count // self.pp + (stage < count % self.pp) for stage in range(self.pp)]
        if not all(sizes):
            raise SourceError(f"{count} layers leave some of the {self.pp} stages without any")
        if self.vpp > 1:
            if self.pp == 1:
                raise SourceError(f"vpp={self.vpp} interleaves pipeline stages, and pp=1 has none")
            if len(set(sizes)) > 1 or sizes[0] % self.vpp:
                raise SourceError(f"{count} layers do not divide into {self.vpp} chunks on each of {self.pp} stages")
            each = sizes[0] // self.vpp
            return [
                [chunk * self.pp * each + stage * each + at for chunk in range(self.vpp) for at in range(each)]
                for stage in range(self.pp)
            ]
        begins = [sum(sizes[:stage]) for stage in range(self.pp)]
        return [list(range(begin, begin + size)) for begin, size in zip(begins, sizes, strict=True)]

    def parameters(self, rank: int, catalogue: Catalogue) -> Iterator[Parameter]:
        """See `Layout.parameters`."""
        config = catalogue.config
        stage, within = divmod(rank, self.stage_ranks)
        first, last = stage == 0, stage == self.pp - 1
        count = config.experts // self.ep
        experts = range(within // self.etp % self.ep * count, (within // self.etp % self.ep + 1) * count)
        dense: dict[str, list[TensorMeta]] = {}
        sparse: dict[str, list[TensorMeta]] = {}
        for meta in catalogue.outside:
            # of tied embeddings the last stage has a copy, which a source does not declare
            if first if ".embed_tokens." in meta.name else last:
                dense[meta.name] = [meta]
        for layer in self.layers(config.layers)[stage]:
            for meta in catalogue.layers[layer]:
                dense.setdefault(_home(meta.name), []).append(meta)
            held = catalogue.experts.get(layer, {})
            for meta in (one for expert in experts if expert in held for one in held[expert]):
                sparse.setdefault(_home(meta.name), []).append(meta)
        for name, members in dense.items():
            yield self._parameter(name, "dense", members, config, within % self.tp, self.tp)
        for name, members in sparse.items():
            yield self._parameter(name, "experts", members, config, within % self.etp, self.etp)

    def _parameter(
        self, name: str, buffer: str, members: Sequence[TensorMeta], config: Config, rank: int, tp: int
    ) -> Parameter:
        meta = members[0]
        module = meta.name.split(".")[-2]
        if module in _QKV and not config.kv_lora:
            return Parameter(name, buffer, *_queries_keys_values(members, config, rank, tp))
        if module in _VOCABULARY:
            multiple = self.vocabulary_multiple * tp
            count = -(-meta.shape[0] // multiple) * multiple // tp
            kept = max(0, min(count, meta.shape[0] - count * rank))
            piece = _rows(meta, count * rank, 0, kept)
            return Parameter(name, buffer, count * meta.shape[1], (piece,) if kept else ())
        if module in _GATED or module in _ROWS or (module in _LATENT_DOWN and self.cut_latent):
            pieces, start = [], 0
            for one in members:
                count = _share(one, one.shape[0], tp)
                pieces.append(_rows(one, count * rank, start, count))
                start += count
            return Parameter(name, buffer, start * prod(meta.shape[1:]), tuple(pieces))
        if module in _COLUMNS and len(meta.shape) == 2:
            count = _share(meta, meta.shape[1], tp)
            shape = (meta.shape[0], count)
            return Parameter(name, buffer, prod(shape), (Piece(meta, (0, count * rank), shape, 0, row_major(shape)),))
        nowhere = (0,) * len(meta.shape)
        # the router's correction bias is no parameter, and lies outside of the buffers
        buffer = "" if meta.dtype == "float32" else buffer
        return Parameter(name, buffer, prod(meta.shape), (Piece(meta, nowhere, meta.shape, 0, row_major(meta.shape)),))


def _home(name: str) -> str:
    """The parameter that holds a checkpoint tensor."""
    *path, module, kind = name.split(".")
    if module in _QKV:
        module = "qkv"
    elif module in _GATED:
        module = "gate_up"
    return ".".join([*path, module, kind])


def _share(meta: TensorMeta, size: int, tp: int) -> int:
    if size % tp:
        raise SourceError(f"{tp} tensor parallel ranks do not divide the {size} of {meta.name!r} {list(meta.shape)}")
    return size // tp


def _rows(meta: TensorMeta, first: int, start: int, count: int) -> Piece:
    """Rows of a tensor, from row `start` of its parameter on."""
    rest = meta.shape[1:]
    shape = (count, *rest)
    return Piece(meta, (first, *(0 for _ in rest)), shape, start * prod(rest), row_major(shape))


def _queries_keys_values(
    members: Sequence[TensorMeta], config: Config, rank: int, tp: int
) -> tuple[int, tuple[Piece, ...]]:
    """For each query group its queries, its key and its value; ranks hold equal stretches of these rows.

    Tensors without query groups of their own size are refused.
    """
    queries = config.heads // config.kv_heads * config.head_dim
    sizes = {"q_proj": queries, "k_proj": config.head_dim, "v_proj": config.head_dim}
    by_name = {meta.name.split(".")[-2]: meta for meta in members}
    each = queries + 2 * config.head_dim
    count = _share(members[0], config.kv_heads * each, tp)
    low, high = count * rank, count * (rank + 1)
    pieces = []
    for group in range(low // each, -(-high // each)):
        at = group * each
        for name in _QKV:
            first, last = max(at, low), min(at + sizes[name], high)
            if first < last:
                offset = group * sizes[name] + first - at
                pieces.append(_rows(by_name[name], offset, first - low, last - first))
            at += sizes[name]
    return count * prod(members[0].shape[1:]), tuple(pieces)
