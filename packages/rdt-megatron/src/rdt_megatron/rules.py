"""How Megatron's parameters hold checkpoint tensors: small rules, each one line of a family's table.

A rule names a parameter, says how tensor parallelism cuts it, and names the checkpoint tensors inside. It only computes
boxes and strides, so that a shard is a view of the parameter and nothing is gathered. In names, `{layer}` stands for the
layer's index in the whole model (whatever the pipeline), `{expert}` for an expert's index in the whole model, and
`{kind}` for `weight` or `bias`. A shape that a rule cannot explain is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol, runtime_checkable

from rdt_core.errors import SourceError

Shape = tuple[int, ...]

_FIELDS = {"layer": r"\d+", "expert": r"\d+", "kind": r"weight|bias"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a checkpoint tensor inside a local parameter.

    Attributes:
        tensor: the checkpoint tensor's name.
        full: its full shape.
        offset: of the box, in elements of the checkpoint tensor.
        shape: of the box.
        start: elements from the parameter's first element to the box's.
        strides: of the box in the parameter's memory, in elements.
    """

    tensor: str
    full: Shape
    offset: Shape
    shape: Shape
    start: int
    strides: Shape


@dataclass(frozen=True, slots=True)
class Local:
    """A parameter as one rank holds it.

    Attributes:
        name: Megatron's name with layers counted over the whole model.
        fields: what the placeholders of the rule stand for here, `expert` counted over the whole model.
        shape: of the local parameter.
        strides: of the local parameter, in elements.
        tp_size: ranks that share it, by expert or by ordinary tensor parallelism.
        tp_rank: this rank among them.
        experts: experts that this rank holds.
        config: Megatron's `TransformerConfig`.
        vocab_size: rows of the checkpoint's vocabulary, without Megatron's padding.
    """

    name: str
    fields: Mapping[str, str]
    shape: Shape
    strides: Shape
    tp_size: int
    tp_rank: int
    experts: int
    config: Any
    vocab_size: int

    def tensor(self, template: str) -> str:
        """Returns a checkpoint name with its placeholders filled in.

        Raises:
            SourceError: the rule's parameter has no such placeholder.
        """
        try:
            return template.format_map(self.fields)
        except (KeyError, ValueError) as error:
            raise self.refuse(
                f"its rule names {template!r}, of which {error} is no placeholder of the parameter"
            ) from None

    def rows(self, template: str, full: int, offset: int, start: int, count: int) -> Piece:
        """Returns rows of this parameter as rows of a checkpoint tensor with the same other axes.

        Args:
            template: the checkpoint tensor's name.
            full: its rows.
            offset: its first row that is here.
            start: the parameter's row where it lies.
            count: rows, 0 or more.
        """
        rest = self.shape[1:]
        return Piece(
            tensor=self.tensor(template),
            full=(full, *rest),
            offset=(offset, *(0 for _ in rest)),
            shape=(count, *rest),
            start=start * self.strides[0],
            strides=self.strides,
        )

    def refuse(self, found: str) -> SourceError:
        """Returns the error of a rule that cannot explain this parameter."""
        return SourceError(
            f"parameter {self.name!r} of shape {self.shape}, rank {self.tp_rank} of {self.tp_size} that share it: "
            f"{found}; pass a rule that fits in `rules`"
        )


@runtime_checkable
class Rule(Protocol):
    """What a family's table is made of. A class of one's own needs just these two."""

    @property
    def parameter(self) -> str:
        """Megatron's name of the parameter, with placeholders."""
        ...

    def pieces(self, local: Local) -> Sequence[Piece]:
        """Returns the boxes of checkpoint tensors that a local parameter holds.

        Raises:
            SourceError: the parameter's shape is not what the rule expects.
        """
        ...


@lru_cache(maxsize=4096)
def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", template)
    text = ""
    for index, part in enumerate(parts):
        if index % 2 == 0:
            text += re.escape(part)
        elif part not in _FIELDS:
            raise SourceError(f"rule for {template!r}: unknown placeholder {part!r}; known: {', '.join(_FIELDS)}")
        else:
            text += f"(?P<{part}>{_FIELDS[part]})"
    return re.compile(text)


def match(rule: Rule, name: str) -> dict[str, str] | None:
    """Returns what the placeholders of a rule stand for in a parameter's name, or None where it does not apply."""
    found = _pattern(rule.parameter).fullmatch(name)
    return None if found is None else found.groupdict()


@dataclass(frozen=True)
class Whole:
    """Every rank holds all of it (norms, routers, biases after a row-parallel product)."""

    parameter: str
    tensor: str

    def pieces(self, local: Local) -> Sequence[Piece]:
        """See `Rule.pieces`."""
        nowhere = (0,) * len(local.shape)
        return [Piece(local.tensor(self.tensor), local.shape, nowhere, local.shape, 0, local.strides)]


@dataclass(frozen=True)
class Rows:
    """Column-parallel: each rank holds an equal stretch of rows."""

    parameter: str
    tensor: str

    def pieces(self, local: Local) -> Sequence[Piece]:
        """See `Rule.pieces`."""
        count = local.shape[0]
        return [local.rows(self.tensor, count * local.tp_size, count * local.tp_rank, 0, count)]


@dataclass(frozen=True)
class RowsIfCut:
    """Rows like `Rows`, or all of it on every rank (MLA's down projections): which, its number of rows tells.

    No mark does: Transformer-Engine marks a weight as cut by tensor parallelism where Megatron asked for a duplicated one.
    """

    parameter: str
    tensor: str
    #: fields of Megatron's configuration whose sum is the rows of the checkpoint tensor
    sizes: tuple[str, ...] = field(metadata={"is_name": False})

    def pieces(self, local: Local) -> Sequence[Piece]:
        """See `Rule.pieces`."""
        count, full = local.shape[0], sum(int(getattr(local.config, name)) for name in self.sizes)
        if count == full:
            return Whole(self.parameter, self.tensor).pieces(local)
        if count * local.tp_size == full:
            return Rows(self.parameter, self.tensor).pieces(local)
        raise local.refuse(f"neither all nor an equal share of {full} rows ({' + '.join(self.sizes)})")


@dataclass(frozen=True)
class Columns:
    """Row-parallel: each rank holds an equal stretch of columns; a bias is whole on every rank."""

    parameter: str
    tensor: str

    def pieces(self, local: Local) -> Sequence[Piece]:
        """See `Rule.pieces`."""
        if len(local.shape) == 1:
            return Whole(self.parameter, self.tensor).pieces(local)
        if len(local.shape) != 2:
            raise local.refuse("only a matrix or a bias can be row-parallel")
        rows, columns = local.shape
        return [
            Piece(
                tensor=local.tensor(self.tensor),
                full=(rows, columns * local.tp_size),
                offset=(0, columns * local.tp_rank),
                shape=local.shape,
                start=0,
                strides=local.strides,
            )
        ]


@dataclass(frozen=True)
class Stacked:
    """Column-parallel, several tensors one after the other: each rank holds its rows of each (gate, then up)."""

    parameter: str
    tensors: tuple[str, ...]

    def pieces(self, local: Local) -> Sequence[Piece]:
        """See `Rule.pieces`."""
        count, rest = divmod(local.shape[0], len(self.tensors))
        if rest:
            raise local.refuse(f"its rows do not divide into {len(self.tensors)} tensors")
        return [
            local.rows(name, count * local.tp_size, count * local.tp_rank, count * index, count)
            for index, name in enumerate(self.tensors)
        ]


@dataclass(frozen=True)
class QueryKeyValue:
    """Attention's input projection: for each query group its queries, its key and its value, one after the other.

    Ranks hold equal stretches of these rows. With fewer groups than ranks a stretch begins and ends inside a group.
    """

    parameter: str
    query: str
    key: str
    value: str

    def pieces(self, local: Local) -> Sequence[Piece]:
        """See `Rule.pieces`."""
        config = local.config
        size, groups = int(config.kv_channels), int(config.num_query_groups)
        queries = int(config.num_attention_heads) // groups * size
        each = queries + 2 * size
        count = local.shape[0]
        if count * local.tp_size != groups * each:
            raise local.refuse(
                f"{groups} groups of {queries} query rows and {size} rows of key and of value make {groups * each} rows"
            )
        first, end = count * local.tp_rank, count * (local.tp_rank + 1)
        pieces = []
        for group in range(first // each, -(-end // each)):
            at = group * each
            for name, rows in ((self.query, queries), (self.key, size), (self.value, size)):
                low, high = max(at, first), min(at + rows, end)
                if low < high:
                    offset = group * rows + low - at
                    pieces.append(local.rows(name, groups * rows, offset, low - first, high - low))
                at += rows
        return pieces


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the vocabulary: equal stretches of the padded table, of which the padding is in no checkpoint."""

    parameter: str
    tensor: str

    def pieces(self, local: Local) -> Sequence[Piece]:
        """See `Rule.pieces`. A rank that holds nothing but padding holds no piece."""
        count = local.shape[0]
        if count * local.tp_size < local.vocab_size:
            raise local.refuse(f"all ranks hold {count * local.tp_size} rows of a vocabulary of {local.vocab_size}")
        first = count * local.tp_rank
        kept = min(count, local.vocab_size - first)
        return [local.rows(self.tensor, local.vocab_size, first, 0, kept)] if kept > 0 else []


@dataclass(frozen=True)
class GroupedRows:
    """`weight1` of Megatron's own grouped GEMM: for each expert of this rank a transposed stack, as in `Stacked`."""

    parameter: str
    tensors: tuple[str, ...]  # with {expert}

    def pieces(self, local: Local) -> Sequence[Piece]:
        """See `Rule.pieces`."""
        hidden, columns = _grouped(local)
        count = columns // len(self.tensors)
        return [
            Piece(
                tensor=_expert(local, name, expert),
                full=(count * local.tp_size, hidden),
                offset=(count * local.tp_rank, 0),
                shape=(count, hidden),
                start=expert * hidden * columns + index * count,
                strides=(1, columns),
            )
            for expert in range(local.experts)
            for index, name in enumerate(self.tensors)
        ]

    #: the rank's first expert is needed, though the parameter's name has no {expert}
    is_expert: ClassVar[bool] = True


@dataclass(frozen=True)
class GroupedColumns:
    """`weight2` of Megatron's own grouped GEMM: for each expert of this rank a transposed matrix, cut as in `Columns`."""

    parameter: str
    tensor: str  # with {expert}

    def pieces(self, local: Local) -> Sequence[Piece]:
        """See `Rule.pieces`."""
        rows, hidden = local.shape[0] // local.experts, local.shape[1]
        return [
            Piece(
                tensor=_expert(local, self.tensor, expert),
                full=(hidden, rows * local.tp_size),
                offset=(0, rows * local.tp_rank),
                shape=(hidden, rows),
                start=expert * rows * hidden,
                strides=(1, hidden),
            )
            for expert in range(local.experts)
        ]

    is_expert: ClassVar[bool] = True


@dataclass(frozen=True)
class Skip:
    """A parameter that no checkpoint holds; it is left out, and no engine gets it."""

    parameter: str

    def pieces(self, local: Local) -> Sequence[Piece]:
        """See `Rule.pieces`."""
        return []


def is_expert(rule: Rule) -> bool:
    """Whether the rule's parameters are cut by expert tensor parallelism, and spread by expert parallelism."""
    return bool(getattr(rule, "is_expert", "{expert}" in rule.parameter))


def _grouped(local: Local) -> Shape:
    # declared as [hidden, experts * columns], used as [experts, hidden, columns]
    return local.shape[0], local.shape[1] // local.experts


def _expert(local: Local, template: str, index: int) -> str:
    at = replace(local, fields={**local.fields, "expert": str(int(local.fields["expert"]) + index)})
    return at.tensor(template)
