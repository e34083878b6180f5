"""`MegatronSource`: what one rank of a Megatron-Core model holds, under the names of its Hugging Face checkpoint.

Every shard is a view of a local parameter: nothing is gathered, copied or cast, no collective runs, and each rank
declares only what it holds a part of. Ranks that hold equal boxes (data, context and expert data parallelism, what tensor
parallelism replicates) all declare them, and readers share the reading among them. Refused: parameters without a rule,
parameters that hide their memory or were offloaded, and parameters that Megatron has not gathered yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import is_not
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rdt_core.errors import SourceError
from rdt_core.sources import Shard
from rdt_core.sources.dtypes import DtypeRule, check_rule, tell_narrowed, wire_dtype
from rdt_core.sources.presence import check_present
from rdt_core.sources.watch import ParameterWatch, TreeWatch
from rdt_core.wire import TensorMeta

from .chunks import Found, Parallel, check_gathered, chunks_of, find, owners
from .families import Family
from .model import ModelFacts, facts
from .rules import Local, Piece, Rule, is_expert, match
from .versions import check_megatron


@dataclass(slots=True)
class _Entry:
    """A parameter and the pieces of checkpoint tensors in it."""

    found: Found
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)


class MegatronSource:
    """A `WeightSource` over the model chunks of one rank.

    Args:
        model: Megatron's GPTModel, or the list of its chunks where pipelines are interleaved; wrapped by Megatron's
            DistributedDataParallel and Float16Module or not.
        config: the model's Hugging Face configuration (an object of transformers, a mapping, or the folder of a
            checkpoint), from which come family, vocabulary and ties; or Megatron's own `TransformerConfig`, with `family`
            and `vocab_size` beside it.
        family: a transformers `model_type` whose checkpoints are named alike, or a `Family` of one's own. Default: the
            configuration's.
        vocab_size: rows of the checkpoint's vocabulary. Default: the configuration's.
        tied: whether the checkpoint has no output layer of its own. Default: the configuration's.
        rules: rules that are tried before the family's, with full names: `Rows("decoder.layers.{layer}.x.weight",
            "model.layers.{layer}.x_proj.weight")`.
        dtype: dtype on the wire of floating-point parameters, or a function from (checkpoint name, own dtype) to one
            (None: its own), asked for buffers too. Default: each its own. Parameters in float32 travel in bfloat16 with
            `dtype=torch.bfloat16`; masters that an optimiser keeps beside bfloat16 parameters do not matter.
        ignored: names, or patterns (`fnmatch`), of checkpoint tensors that engines need not take. The prediction layers
            (MTP) are always among them: engines take them only where they speculate.
        parallel: where this rank stands. Default: what Megatron's `parallel_state` says.

    Raises:
        SourceError: the model cannot be declared; names the parameter and the way out.
        MissingMegatronError: Megatron-Core is missing, or a release that was not tested.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        *,
        family: str | Family | None = None,
        vocab_size: int | None = None,
        tied: bool | None = None,
        rules: Sequence[Rule] = (),
        dtype: DtypeRule | None = None,
        ignored: Sequence[str] = (),
        parallel: Parallel | None = None,
    ) -> None:
        check_megatron()
        chunks, self._wrappers = chunks_of(model)
        self._chunks = chunks
        check_gathered(chunks, self._wrappers)
        first: Any = chunks[0]
        self._config = first.config
        check_rule(dtype)
        self._dtype = dtype
        self._parallel = parallel or Parallel.here()
        shares = bool(getattr(first, "share_embeddings_and_output_weights", False))
        self._facts = facts(config, self._config, shares=shares, family=family, vocab_size=vocab_size, tied=tied)
        self._rules = (*rules, *self._facts.family.rules)
        self._prediction = tuple(
            str(int(self._config.num_layers) + index) for index in range(int(self._config.mtp_num_layers or 0))
        )
        self._entries = list(self._read(chunks))
        self._owners = owners(chunks)
        self._tree = TreeWatch(chunks)
        self._watch = ParameterWatch(
            [entry.found.owner for entry in self._entries],
            [entry.found.key for entry in self._entries],
            [entry.found.is_buffer for entry in self._entries],
            [False] * len(self._entries),
            self._look,
        )
        self._metadata = self._declare()
        self._ignored = tuple(self._expand(ignored))

    @property
    def facts(self) -> ModelFacts:
        """What was found out about the checkpoint: family, vocabulary, ties."""
        return self._facts

    def metadata(self) -> Sequence[TensorMeta]:
        """See `WeightSource.metadata`: the tensors that this rank holds a part of. Found once, when the source is made."""
        return self._metadata

    def ignored(self) -> Sequence[str]:
        """See `WeightSource.ignored`."""
        return self._ignored

    def shards(self) -> Sequence[Shard]:
        """See `WeightSource.shards`: views of the parameters as the model has them now.

        Raises:
            SourceError: a parameter is gone, offloaded, not gathered yet, of another shape or dtype than when the source was
                made, or modules were replaced since.
        """
        self._check_model()
        shards = []
        for entry in self._entries:
            local = _local(entry)
            base = local.storage_offset()
            for piece in entry.pieces:
                view = local.as_strided(piece.shape, piece.strides, base + piece.start)
                shards.append(Shard(piece.tensor, piece.offset, view))
        return shards

    def fingerprint(self) -> Any:
        """See `WatchedSource.fingerprint`: where each parameter lies; no view is made.

        Raises:
            SourceError: as `shards`.
        """
        self._check_model()
        return self._watch.mark()

    def _look(self) -> list[Any]:
        return [(local.data_ptr(), local.device) for local in map(_local, self._entries)]

    def _check_model(self) -> None:
        check_gathered(self._chunks, self._wrappers)
        if self._tree.is_same():
            return
        now = owners(self._chunks)
        if len(now) != len(self._owners) or any(map(is_not, now, self._owners)):
            raise SourceError(
                "modules of the model were replaced, added or taken away since the source was made (adapters, another copy of a "
                "layer); make a new source and join again"
            )

    def _read(self, chunks: Sequence[Any]) -> Iterator[_Entry]:
        names: set[str] = set()
        for found in find(chunks, tied=self._facts.tied):
            if found.name in names:
                raise SourceError(
                    f"two of the model's chunks hold {found.name!r}: either their layers are not numbered over the whole model "
                    f"(build each chunk with its vp_stage), or chunks of two models were passed"
                )
            names.add(found.name)
            if found.is_buffer:
                _settle(found.owner)
            tensor = found.tensor()
            entry = _Entry(found, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
            _local(entry)
            entry.pieces = [copy for piece in self._pieces(found, tensor) for copy in self._copies(piece)]
            if entry.pieces:
                yield entry

    def _pieces(self, found: Found, tensor: torch.Tensor) -> Sequence[Piece]:
        for rule in self._rules:
            fields = match(rule, found.name)
            if fields is not None:
                pieces = rule.pieces(self._place(rule, found, tensor, fields))
                _check(found.name, tuple(tensor.shape), pieces)
                return pieces
        raise SourceError(self._unmapped(found, tensor))

    def _place(self, rule: Rule, found: Found, tensor: torch.Tensor, fields: dict[str, str]) -> Local:
        at = self._parallel
        expert = is_expert(rule)
        experts = int(self._config.num_moe_experts or 0) // at.ep_size
        if expert:
            fields["expert"] = str(at.ep_rank * experts + int(fields.get("expert", 0)))
        return Local(
            name=found.name,
            fields=fields,
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            tp_size=at.etp_size if expert else at.tp_size,
            tp_rank=at.etp_rank if expert else at.tp_rank,
            experts=experts,
            config=self._config,
            vocab_size=self._facts.vocab_size,
        )

    def _copies(self, piece: Piece) -> Iterator[Piece]:
        """The piece, and the same memory under the names of copies that checkpoints hold for prediction layers."""
        yield piece
        template = self._facts.family.copies.get(piece.tensor)
        if template is not None:
            for layer in self._prediction:
                name = template.format(layer=layer)
                yield Piece(name, piece.full, piece.offset, piece.shape, piece.start, piece.strides)

    def _unmapped(self, found: Found, tensor: torch.Tensor) -> str:
        cut = getattr(tensor, "partition_dim", None) if getattr(tensor, "tensor_model_parallel", False) else None
        kind = {0: "Rows", 1: "Columns"}.get(-1 if cut is None else int(cut), "Whole")
        parts = found.name.split(".")
        layer = parts[:2] in (["decoder", "layers"], ["mtp", "layers"])
        name = ".".join([*parts[:2], "{layer}", *parts[3:]]) if layer else found.name
        target = f"model.layers.{{layer}}.NAME.{parts[-1]}" if layer else f"NAME.{parts[-1]}"
        return (
            f"{'buffer' if found.is_buffer else 'parameter'} {found.name!r} of shape {tuple(tensor.shape)} has no rule in "
            f"family {self._facts.family.name!r}; say which checkpoint tensor it is, e.g. "
            f"rules=[{kind}({name!r}, {target!r})], or leave it out with rules=[Skip({name!r})]"
        )

    def _declare(self) -> tuple[TensorMeta, ...]:
        found: dict[str, TensorMeta] = {}
        owner: dict[str, str] = {}
        own: list[tuple[torch.dtype, str]] = []
        for entry in self._entries:
            for piece in entry.pieces:
                dtype = wire_dtype(self._dtype, piece.tensor, entry.dtype, is_buffer=entry.found.is_buffer)
                meta = TensorMeta(name=piece.tensor, shape=piece.full, dtype=dtype)
                earlier = found.setdefault(piece.tensor, meta)
                if owner.setdefault(piece.tensor, entry.found.name) != entry.found.name or earlier != meta:
                    raise SourceError(
                        f"{entry.found.name!r} and {owner[piece.tensor]!r} would both be checkpoint tensor "
                        f"{piece.tensor!r}; change one of their rules"
                    )
                if earlier is meta:
                    own.append((entry.dtype, dtype))
        tell_narrowed(own)
        return tuple(found.values())

    def _expand(self, patterns: Sequence[str]) -> dict[str, None]:
        names = [meta.name for meta in self._metadata]
        wanted: dict[str, None] = {}
        for pattern in patterns:
            wanted |= dict.fromkeys(name for name in names if fnmatchcase(name, pattern))
        for layer in self._prediction:
            wanted |= dict.fromkeys(name for name in names if name.startswith(f"model.layers.{layer}."))
        return wanted


def _settle(owner: Any) -> None:
    """Brings buffers to the dtype in which Megatron keeps them.

    Float16Module casts a router's bias too, and the router casts it back in its first forward pass, which may come after join.
    """
    keep = getattr(owner, "_maintain_float32_expert_bias", None)
    if keep is not None:
        keep()


def _local(entry: _Entry) -> torch.Tensor:
    """The parameter as it is now, detached, after checking that it is what was declared and has memory."""
    tensor = entry.found.tensor().detach()
    _check_whole(entry.found.name, tensor)
    check_present(entry.found.name, tensor)
    if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape or tuple(tensor.stride()) != entry.strides:
        raise SourceError(
            f"{entry.found.name!r} has shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())} and dtype "
            f"{tensor.dtype}, and had {entry.shape}, {entry.strides} and {entry.dtype} when the source was made. If it was "
            f"offloaded, bring it back before publish; else make a new source and join again"
        )
    return tensor


def _check_whole(name: str, tensor: torch.Tensor) -> None:
    """Refuses a part that another framework cut."""
    if isinstance(tensor, DTensor):
        raise SourceError(
            f"{name!r} is a DTensor, cut by FSDP; of Megatron's models only those without FSDP can be declared: use its "
            f"DistributedDataParallel, with or without the distributed optimiser"
        )


def _check(name: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
    """Pieces must lie inside the parameter; a rule of a user's own can be wrong."""
    volume = 1
    for size in shape:
        volume *= size
    for piece in pieces:
        if not len(piece.full) == len(piece.offset) == len(piece.shape) == len(piece.strides):
            raise SourceError(
                f"the rule for {name!r} gives {piece.tensor!r} boxes with different numbers of axes: {piece}"
            )
        outside = any(
            low < 0 or size < 0 or low + size > full
            for low, size, full in zip(piece.offset, piece.shape, piece.full, strict=True)
        )
        last = piece.start + sum((size - 1) * stride for size, stride in zip(piece.shape, piece.strides, strict=True))
        if outside or (0 not in piece.shape and not 0 <= piece.start <= last < volume):
            raise SourceError(
                f"the rule for {name!r} of shape {shape} puts {piece.tensor!r} outside of it, or outside of its own shape "
                f"{piece.full}: box {piece.offset}+{piece.shape} at element {piece.start} with strides {piece.strides}"
            )
