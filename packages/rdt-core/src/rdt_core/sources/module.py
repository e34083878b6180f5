"""`ModuleSource`: what a `torch.nn.Module` holds, plain or sharded by FSDP2, HSDP, TP or FSDP1, under checkpoint names.

Every shard is a view of the parameter's own memory: nothing is gathered, copied or cast. The wire dtype is declared;
whoever publishes casts. Refused: memory that is unsharded for the moment, meta tensors, tensor subclasses that hide
their memory, fused experts of unknown layout, and two parameters under one checkpoint name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import SourceError
from ..wire import TensorMeta
from .base import Shard
from .dtypes import DtypeRule, check_rule, tell_narrowed, wire_dtype
from .fsdp import (
    FlatParameter,
    Held,
    check_sharded,
    flat_parameters,
    held_dtensor,
    held_whole,
    is_dtensor,
    local_tensor,
    sharded_groups,
)
from .names import NameRule, Part, Rename, parts_of, renamer, rules_for, strip_wrappers
from .presence import check_hidden, check_present
from .watch import ParameterWatch, TreeWatch

log = logging.getLogger(__name__)

_MEGATRON = "megatron.core."


@dataclass(frozen=True, slots=True)
class _Piece:
    """A shard before it is a view: a box of a checkpoint tensor and where it lies in the local tensor."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]


@dataclass(slots=True)
class _Entry:
    """A parameter or buffer of the module."""

    name: str  # in the module, without wrappers
    owner: nn.Module
    key: str
    buffer: bool
    parts: Sequence[Part]
    shape: tuple[int, ...]
    dtype: torch.dtype
    flat: FlatParameter | None
    sharded: bool  # a DTensor
    layout: tuple[Any, ...] = ()  # what `pieces` were cut for
    pieces: list[_Piece] = field(default_factory=list)

    def tensor(self) -> torch.Tensor:
        """The parameter as the module has it now."""
        table = self.owner._buffers if self.buffer else self.owner._parameters
        tensor = table.get(self.key)
        if tensor is None:
            raise SourceError(
                f"{self.name!r} was declared, but its module no longer has it; make a new source and join again"
            )
        return tensor


class ModuleSource:
    """A `WeightSource` over a module's parameters.

    Ranks that hold the same box (replicas of HSDP or DDP, parameters that are not sharded) all declare it. A parameter
    with several names (tied) is declared once, under the name that its checkpoint has.

    Args:
        module: the model as it trains: plain, wrapped by DDP or FSDP1 (`use_orig_params=True`), sharded by
            `fully_shard` or `parallelize_module`, compiled. Its parameters may lie on several devices.
        dtype: dtype on the wire of floating-point parameters, or a function from (checkpoint name, own dtype) to one,
            asked for buffers too (None: its own). Default: each its own.
        rename: from a parameter's name to its name in the checkpoint (None: not declared), as a function or as a
            mapping of prefixes. Sees names without the prefixes of FSDP, `torch.compile` and activation checkpointing.
        rules: how parameters map to checkpoint tensors where one is not simply the other; tried before the built-in
            ones of the model's type. See `FusedExperts` and `Renamed`.
        include_buffers: whether persistent buffers are declared (they are part of a checkpoint), or patterns
            (`fnmatch`) of the names of those that are.
        ignored: names, or patterns (`fnmatch`), of checkpoint tensors that engines need not take.

    Raises:
        SourceError: the module cannot be declared; names the parameter and the way out.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: DtypeRule | None = None,
        rename: Rename | None = None,
        rules: Sequence[NameRule] = (),
        include_buffers: bool | Sequence[str] = True,
        ignored: Sequence[str] = (),
    ) -> None:
        while isinstance(module, DistributedDataParallel):
            module = module.module
        check_rule(dtype)
        self.module = module
        self._dtype = dtype
        self._rename = renamer(rename)
        if rename is None and not rules and any(type(one).__module__.startswith(_MEGATRON) for one in module.modules()):
            log.warning(
                "this module is Megatron's, and offers Megatron's own names, which engines do not know: "
                "rdt_megatron.MegatronSource declares such a model as its checkpoint"
            )
        self._model_type: str | None = getattr(getattr(module, "config", None), "model_type", None)
        self._rules = (*rules, *rules_for(self._model_type))
        self._groups = tuple(sharded_groups(module))
        check_sharded(self._groups)
        self._include = include_buffers
        self._entries = list(self._find(include_buffers))
        self._tree = TreeWatch([module])
        self._watch = ParameterWatch(
            [entry.owner for entry in self._entries],
            [entry.key for entry in self._entries],
            [entry.buffer for entry in self._entries],
            [entry.sharded for entry in self._entries],
            self._look,
        )
        self._metadata = self._declare()
        self._ignored = tuple(_expand(ignored, [tensor.name for tensor in self._metadata]))

    def metadata(self) -> Sequence[TensorMeta]:
        """See `WeightSource.metadata`. Found once, when the source is made."""
        return self._metadata

    def ignored(self) -> Sequence[str]:
        """See `WeightSource.ignored`."""
        return self._ignored

    def shards(self) -> Sequence[Shard]:
        """See `WeightSource.shards`: views of the parameters as the module has them now.

        Raises:
            SourceError: a parameter that is unsharded for the moment, that is gone, or of another shape, dtype or
                kind than when the source was made.
        """
        self._check_tree()
        check_sharded(self._groups)
        shards: list[Shard] = []
        for entry in self._entries:
            local = self._local(entry)
            layout = _layout(entry, local)
            if entry.layout != layout:
                entry.pieces = _pieces(entry.parts, self._held(entry, local))
                entry.layout = layout
            base = local.storage_offset()
            for piece in entry.pieces:
                view = local.as_strided(piece.shape, piece.strides, base + piece.start)
                shards.append(Shard(piece.name, piece.offset, view))
        return shards

    def fingerprint(self) -> Any:
        """See `WatchedSource.fingerprint`: where each parameter lies, and how; no view is made.

        Raises:
            SourceError: as `shards`.
        """
        self._check_tree()
        check_sharded(self._groups)
        if any(entry.flat is not None for entry in self._entries):
            return self._look()  # FSDP1 makes its views of one flat parameter anew
        return self._watch.mark()

    def _check_tree(self) -> None:
        """Refuses modules that were replaced, added or taken away: the parameters of others would be published."""
        if self._tree.is_same():
            return
        now = list(self._find(self._include))
        known = [(entry.name, id(entry.owner), entry.key) for entry in self._entries]
        found = [(entry.name, id(entry.owner), entry.key) for entry in now]
        if found != known:
            differing = sorted({name for name, *_ in set(found) ^ set(known)})
            shown = ", ".join(map(repr, differing[:8])) + (" and more" if len(differing) > 8 else "")
            raise SourceError(
                f"modules were replaced, added or taken away since the source was made: {shown or 'their order'}; make a new "
                "source and join again"
            )
        self._tree = TreeWatch([self.module])  # wrappers and modules without parameters

    def _look(self) -> list[Any]:
        marks = []
        for entry in self._entries:
            local = self._local(entry)
            marks.append((local.data_ptr(), _layout(entry, local)))
        return marks

    def _find(self, include_buffers: bool | Sequence[str]) -> Iterator[_Entry]:
        flat = flat_parameters(self.module)
        for tensor, name, owner, key, buffer in _tensors(self.module):
            if buffer and not _wanted(name, include_buffers):
                continue
            declared = self._rename(name)
            if declared is None:
                continue
            inside = flat.get((id(owner), key)) if not buffer else None
            shape = inside.shape if inside is not None else tuple(tensor.shape)
            sharded = is_dtensor(tensor)
            if not sharded:
                check_hidden(name, tensor)
            yield _Entry(
                name=name,
                owner=owner,
                key=key,
                buffer=buffer,
                parts=parts_of(declared, shape, self._rules, self._model_type),
                shape=shape,
                dtype=tensor.dtype,
                flat=inside,
                sharded=sharded,
            )

    def _declare(self) -> tuple[TensorMeta, ...]:
        found: dict[str, str] = {}
        metadata = []
        own = []
        for entry in self._entries:
            for part in entry.parts:
                if part.name in found:
                    raise SourceError(
                        f"{entry.name!r} and {found[part.name]!r} would both be checkpoint tensor {part.name!r}; "
                        f"tell them apart with `rename` or `rules`"
                    )
                found[part.name] = entry.name
                dtype = wire_dtype(self._dtype, part.name, entry.dtype, is_buffer=entry.buffer)
                metadata.append(TensorMeta(name=part.name, shape=part.full_shape, dtype=dtype))
                own.append((entry.dtype, dtype))
        tell_narrowed(own)
        return tuple(metadata)

    def _local(self, entry: _Entry) -> torch.Tensor:
        tensor = entry.tensor()
        if tensor.dtype != entry.dtype:
            raise SourceError(
                f"{entry.name!r} has dtype {tensor.dtype}, and had {entry.dtype} when the source was made; make a new "
                f"source and join again"
            )
        if entry.flat is not None:
            local = entry.flat.local(entry.name)
        elif is_dtensor(tensor) != entry.sharded or tuple(tensor.shape) != entry.shape:
            raise SourceError(
                f"{entry.name!r} is a {type(tensor).__name__} of shape {tuple(tensor.shape)}, and was "
                f"{'a DTensor' if entry.sharded else 'a plain tensor'} of shape {entry.shape} when the source was "
                f"made. If FSDP holds it unsharded, call reshard(); else make a new source and join again"
            )
        else:
            local = local_tensor(tensor) if entry.sharded else tensor.detach()
        check_present(entry.name, local)
        return local

    @staticmethod
    def _held(entry: _Entry, local: torch.Tensor) -> Sequence[Held]:
        if entry.flat is not None:
            return entry.flat.held()
        return held_dtensor(entry.name, entry.tensor()) if entry.sharded else held_whole(local)


def _layout(entry: _Entry, local: torch.Tensor) -> tuple[Any, ...]:
    """Returns what the pieces of an entry depend on."""
    layout = (local.shape, local.stride())
    if not entry.sharded:
        return layout
    tensor: Any = entry.tensor()
    return (*layout, tensor.placements, tensor.device_mesh)


def _wanted(name: str, include: bool | Sequence[str]) -> bool:
    return include if isinstance(include, bool) else any(fnmatchcase(name, pattern) for pattern in include)


def _expand(patterns: Sequence[str], names: Sequence[str]) -> dict[str, None]:
    """Returns the names that the patterns match, each once; a pattern that matches none stays as it is."""
    found: dict[str, None] = {}
    for pattern in patterns:
        found |= dict.fromkeys([name for name in names if fnmatchcase(name, pattern)] or [pattern])
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[torch.Tensor, str, nn.Module, str, bool]]:
    """Yields (tensor, name, owner, key in it, is a buffer): what a checkpoint of the module holds, each once."""
    tied = set(getattr(module, "all_tied_weights_keys", None) or ())  # names that transformers ties to another
    left_out = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    found: dict[int, tuple[torch.Tensor, str, nn.Module, str, bool]] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        transient = owner._non_persistent_buffers_set
        tables = ((owner._parameters, False), (owner._buffers, True))
        for table, buffer in tables:
            for key, tensor in table.items():
                name = strip_wrappers(prefix + key)
                if tensor is None or name in left_out or (buffer and key in transient):
                    continue
                # Where a tensor has several names, the first that is not tied to another is the checkpoint's.
                if id(tensor) not in found or (found[id(tensor)][1] in tied and name not in tied):
                    found[id(tensor)] = (tensor, name, owner, key, buffer)
    yield from found.values()


def _pieces(parts: Sequence[Part], held: Sequence[Held]) -> list[_Piece]:
    """Cuts the boxes that a rank holds along the parts of the parameter."""
    pieces = []
    for box in held:
        for part in parts:
            low = tuple(map(max, box.offset, part.offset))
            high = tuple(
                min(a + n, b + m) for a, n, b, m in zip(box.offset, box.shape, part.offset, part.shape, strict=True)
            )
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            start = box.start + sum((a - b) * s for a, b, s in zip(low, box.offset, box.strides, strict=True))
            pieces.append(
                _Piece(
                    name=part.name,
                    offset=tuple(low[axis] - part.offset[axis] for axis in part.axes),
                    shape=tuple(high[axis] - low[axis] for axis in part.axes),
                    start=start,
                    strides=tuple(box.strides[axis] for axis in part.axes),
                )
            )
    return pieces
