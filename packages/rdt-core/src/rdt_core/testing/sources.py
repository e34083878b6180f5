"""Checks that a weight source runs to prove itself: what it declares, what its shards are, and whole syncs out of it.

`check_source` runs them all. All ranks of the source must be able to live in one process; where they cannot, each rank hands
its `Holdings` to one that runs `check_coverage`. Every refusal names the rank, the tensor, and what is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from ..declared import Declared
from ..declared import check as check_declared
from ..errors import ConformanceError, CoverageError, RdtError, SourceError
from ..geometry import Box, subtract
from ..landing import ModuleLanding
from ..sources.base import IterableWeightSource, Shard, WatchedSource, WeightSource, check_methods
from ..wire import TensorMeta
from .comparing import compare, difference, refuse
from .local import LocalGroup, WholeModel

Source = WeightSource | IterableWeightSource
#: full checkpoint tensors by name, as they are at the time of the call
Expected = Callable[[], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one source rank declares, in a form that can be pickled and sent to another rank. Made by `holdings`.

    Attributes:
        rank: of the source.
        tensors: its `metadata()`.
        boxes: name, offset and shape of every shard.
        ignored: its `ignored()`.
    """

    rank: int
    tensors: tuple[TensorMeta, ...]
    boxes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    ignored: tuple[str, ...]


def check_source(
    make_source: Callable[[int, int], Source],
    *,
    world_size: int = 1,
    expected: Expected | None = None,
    change: Callable[[], Any] | None = None,
    move: Callable[[], Any] | None = None,
    modes: Sequence[str] | None = None,
) -> None:
    """Runs every check of a source.

    Args:
        make_source: makes the source of `(rank, world_size)`.
        world_size: source ranks, all in this process.
        expected: returns the full checkpoint tensors by name, as the trainer has them now, from somewhere else than the source
            (the model's `state_dict()`). Without it names and layouts are taken on the source's word.
        change: changes weights where they lie, as an optimizer's step does. Without it shards are written to.
        move: puts parameters into other memory, as offloading does. Without it that they moved is not checked.
        modes: publish modes that must work. Default: "auto", "snapshot" and "bucket", or "bucket" for full tensors.

    Raises:
        ConformanceError: the source does not keep its protocol.
        RdtError: rdt itself refused the source.
    """
    sources = [make_source(rank, world_size) for rank in range(world_size)]
    held = [holdings(source, rank) for rank, source in enumerate(sources)]
    if all(isinstance(source, WeightSource) for source in sources):
        check_coverage(held)
        check_shards(sources)
        check_replicas(sources)
        if expected is not None:
            compare(
                assembled(sources), _on_wire(expected(), sources), "shards put together are not the trainer's weights"
            )
    else:
        check_passes(sources)
    default = ("auto", "snapshot", "bucket") if isinstance(sources[0], WeightSource) else ("bucket",)
    for mode in default if modes is None else modes:
        check_syncs(sources, mode=mode, expected=expected, change=change, move=move)


def holdings(source: Source, rank: int = 0) -> Holdings:
    """Checks what one rank declares, alone, and returns it.

    Raises:
        ConformanceError: a tensor is declared twice or otherwise at a second call, or a shard is no box of its tensor.
    """
    who = f"source rank {rank}"
    try:
        check_methods(source, who)
        tensors = tuple(source.metadata())
        check_declared(tensors, who)
    except SourceError as error:
        raise ConformanceError(str(error)) from error
    known = {meta.name: meta for meta in tensors}
    if len(known) < len(tensors):
        names = [meta.name for meta in tensors]
        refuse(f"{who} declares {next(name for name in names if names.count(name) > 1)!r} twice")
    if tuple(source.metadata()) != tensors:
        refuse(
            f"{who}: metadata() says something else at its second call",
            "what is declared at join holds until the rank leaves",
        )
    boxes = []
    for shard in source.shards() if isinstance(source, WeightSource) else ():
        if shard.name not in known:
            refuse(f"{who} holds a shard of {shard.name!r}, which its metadata() does not declare")
        meta = known[shard.name]
        shape = tuple(shard.tensor.shape)
        inside = len(shape) == len(shard.offset) == len(meta.shape) and all(
            low >= 0 and low + size <= full for low, size, full in zip(shard.offset, shape, meta.shape, strict=True)
        )
        if not inside:
            refuse(
                f"{who} holds a shard of {shard.name!r} at offset {tuple(shard.offset)} of shape {shape}, which is no box of a "
                f"tensor of shape {meta.shape}"
            )
        boxes.append((shard.name, tuple(shard.offset), shape))
    return Holdings(rank, tensors, tuple(boxes), tuple(source.ignored()))


def check_coverage(held: Sequence[Holdings]) -> None:
    """Checks that ranks agree on every tensor, and that the union of their boxes is the whole of it.

    Args:
        held: of every rank.

    Raises:
        ConformanceError: names the tensor, and the elements that nobody holds.
    """
    declared = Declared()
    for one in held:
        try:
            declared.add(one.rank, one.tensors)
        except CoverageError as error:
            raise ConformanceError(str(error)) from error
    boxes: dict[str, set[Box]] = {}
    for one in held:
        for name, offset, shape in one.boxes:
            boxes.setdefault(name, set()).add(Box(offset, shape))
    wrong = []
    for name, meta in declared.tensors.items():
        left = subtract(Box.full(meta.shape), sorted(boxes.get(name, ()), key=lambda box: (box.offset, box.shape)))
        if left:
            wrong.append(f"{name!r} of shape {meta.shape}: nobody holds {left[0] if name in boxes else 'any of it'}")
    if wrong:
        refuse(f"{len(wrong)} tensors are not held as a whole by all ranks together: " + "; ".join(wrong[:8]))
    for one in held:
        for name in one.ignored:
            if name not in declared.tensors:
                refuse(
                    f"source rank {one.rank} ignores {name!r}, which no rank declares",
                    "ignored() takes checkpoint names",
                )


def check_shards(sources: Sequence[Source]) -> None:
    """Checks that shards are views of memory that stays: the same at every call, with nothing made for it.

    Raises:
        ConformanceError: shards are copies, or a fingerprint says that they moved.
    """
    for rank, source in enumerate(sources):
        assert isinstance(source, WeightSource)
        before = fingerprint(source)
        first, second = list(source.shards()), list(source.shards())
        if _boxes(first) != _boxes(second):
            refuse(f"source rank {rank}: shards() gives other boxes at its second call")
        for one, other in zip(first, second, strict=True):
            if one.tensor.numel() and one.tensor.data_ptr() != other.tensor.data_ptr():
                refuse(
                    f"source rank {rank}: shards() gives {one.name!r} in other memory at its second call: it is a copy",
                    "a shard is a view of the parameter itself",
                )
        if fingerprint(source) != before:
            refuse(f"source rank {rank}: fingerprint() differs between two calls, and nothing moved meanwhile")


def check_replicas(sources: Sequence[Source]) -> None:
    """Checks that ranks which hold the same elements hold equal bytes: readers take any of them.

    Raises:
        ConformanceError: names the tensor, the ranks and the first element that differs.
    """
    by_name: dict[str, list[tuple[int, Shard]]] = {}
    for rank, source in enumerate(sources):
        assert isinstance(source, WeightSource)
        for shard in source.shards():
            by_name.setdefault(shard.name, []).append((rank, shard))
    for name, owners in by_name.items():
        for (rank, one), (other_rank, other) in combinations(owners, 2):
            here, there = (Box(tuple(part.offset), tuple(part.tensor.shape)) for part in (one, other))
            common = here.intersect(there)
            if common is None:
                continue
            told = difference(_cut(one.tensor, here, common), _cut(other.tensor, there, common))
            if told:
                refuse(f"source ranks {rank} and {other_rank} hold {name!r} {common} with other bytes: {told}")


def check_passes(sources: Sequence[Source]) -> None:
    """Checks that a source of full tensors can be iterated again and again, also after a pass that was given up.

    Raises:
        ConformanceError: a pass strays from what is declared, or a later one gives other tensors.
    """
    for rank, source in enumerate(sources):
        if not isinstance(source, IterableWeightSource):
            refuse(f"source rank {rank} has shards, and others can only be iterated", "all ranks are of one kind")
        declared = [(meta.name, meta.shape) for meta in source.metadata()]
        for number in range(2):
            given_up = iter(source)
            next(given_up, None)
            del given_up
            found = [(name, tuple(tensor.shape)) for name, tensor in source]
            if found != declared:
                wrong = next((pair for pair in zip(found, declared, strict=False) if pair[0] != pair[1]), None)
                told = (
                    f"{wrong[0]} where {wrong[1]} is declared" if wrong else f"{len(found)} of {len(declared)} tensors"
                )
                refuse(
                    f"source rank {rank}: pass {number + 1} gives {told}",
                    "every pass gives all tensors in the order of metadata()",
                )


def check_syncs(
    sources: Sequence[Source],
    *,
    mode: str = "auto",
    expected: Expected | None = None,
    change: Callable[[], Any] | None = None,
    move: Callable[[], Any] | None = None,
) -> None:
    """Checks syncs into a model that serves every tensor as it is: the first, after a change, a failure, and a move.

    Args:
        sources: of every rank.
        mode: publish mode.
        expected, change, move: see `check_source`.

    Raises:
        ConformanceError: what is served is not what the trainer has, or memory that moved was not noticed.
        RdtError: a sync failed.
    """
    where = f"mode {mode!r}"
    with LocalGroup(sources, mode=mode) as group:
        tensors = tuple(group.control.sources(30.0)[1])
        declared = Declared()
        for manifest in tensors:
            declared.add(manifest.rank, manifest.tensors)
        model = WholeModel(declared.ordered())
        landing = _Failing(model, model.load_weights)
        replica = group.serve([landing])

        def published(version: int, when: str) -> None:
            group.publish(version)
            served = {name: model.tensor(name) for name in model.places}
            wanted = _on_wire(expected(), sources) if expected is not None else assembled(sources)
            compare(served, wanted, f"{where}, {when}: what is served is not what the trainer has")
            if group.version(replica) != version:
                refuse(
                    f"{where}, {when}: the replica says version {group.version(replica)} where {version} is expected"
                )

        published(1, "in the first sync")
        (change or (lambda: _write(sources)))()
        published(2, "after weights changed where they lie")
        landing.fails = True
        if None in group.failure(3):
            refuse(f"{where}: a sync whose reader failed did not fail on every rank")
        landing.fails = False
        published(4, "in the sync after one that failed")
        if move is not None:
            marks = [fingerprint(source) for source in sources]
            move()
            for rank, source in enumerate(sources):
                if isinstance(source, WatchedSource) and fingerprint(source) == marks[rank]:
                    refuse(
                        f"source rank {rank}: fingerprint() is the same after parameters moved",
                        "it tells moved memory by `==`",
                    )
            published(5, "after parameters moved")


def assembled(sources: Sequence[Source]) -> dict[str, torch.Tensor]:
    """Returns full tensors on the CPU in the wire dtype, put together from all ranks' shards, or out of a pass of rank 0."""
    whole: dict[str, torch.Tensor] = {}
    for rank, source in enumerate(sources):
        for meta in source.metadata():
            whole.setdefault(meta.name, torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype)))
        if isinstance(source, WeightSource):
            for shard in source.shards():
                box = Box(tuple(shard.offset), tuple(shard.tensor.shape))
                _cut(whole[shard.name], Box.full(whole[shard.name].shape), box).copy_(shard.tensor.detach())
        else:
            for name, tensor in source:
                if rank == 0:
                    whole[name].copy_(tensor.detach())
    return whole


def fingerprint(source: Source) -> Any:
    """Returns the source's fingerprint, or None where it has none."""
    return source.fingerprint() if isinstance(source, WatchedSource) else None


class _Failing(ModuleLanding):
    """A landing that can be made to fail after bytes have landed."""

    fails = False

    def finish(self) -> None:
        if self.fails:
            raise RdtError("this landing was told to fail; a check of the conformance suite wants that, all is well")
        super().finish()


def _boxes(shards: Sequence[Shard]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(shard.name, tuple(shard.offset), tuple(shard.tensor.shape)) for shard in shards]


def _cut(tensor: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The elements of `part` in a tensor that holds `box`."""
    for axis, (low, size) in enumerate(zip(part.offset, part.shape, strict=True)):
        tensor = tensor.narrow(axis, low - box.offset[axis], size)
    return tensor


def _on_wire(tensors: Mapping[str, torch.Tensor], sources: Sequence[Source]) -> dict[str, torch.Tensor]:
    """Full tensors in the dtypes that were declared."""
    dtypes = {meta.name: getattr(torch, meta.dtype) for source in sources for meta in source.metadata()}
    return {name: tensor.detach().cpu().to(dtypes.get(name, tensor.dtype)) for name, tensor in tensors.items()}


def _write(sources: Sequence[Source]) -> None:
    """Changes every element of each piece of memory once, by its own value alone, so that replicas stay equal."""
    done: set[tuple[Any, ...]] = set()
    for source in sources:
        for shard in source.shards() if isinstance(source, WeightSource) else ():
            tensor = shard.tensor.detach()
            place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
            if place in done:
                continue
            done.add(place)
            if tensor.is_floating_point():
                tensor.copy_(1 - tensor.double())
            else:
                tensor.bitwise_not_()


__all__ = [
    "Holdings",
    "assembled",
    "check_coverage",
    "check_passes",
    "check_replicas",
    "check_shards",
    "check_source",
    "check_syncs",
    "holdings",
]
