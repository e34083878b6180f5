"""Where bytes land in an engine rank: the protocol that engine adapters implement, and the one for plain modules.

A destination is one storage of the engine's model, known by a key (its first qualified name). `in_place` destinations
have one address for life and receive bytes directly; the others exist only between `open` and `close` of their module,
because the engine's own post-load step (repacking, quantisation) turns them into something else. Their memory is the
receiver's (a fixed place in its receive buffer), so that prepared transfers land in them without another copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import torch

from .errors import CoverageError, EngineError, some
from .memory import whole
from .tracing import Destinations, Fill, Slice, Trace, trace
from .wire import TensorMeta
from .written import Place, count_written, in_units


@dataclass(frozen=True, slots=True)
class Destination:
    """One storage that slices land in.

    Attributes:
        key: the name under which the trace recorded it.
        module: the module whose post-load step needs it; a module closes when its last slice has landed.
        in_place: whether bytes may go straight into the live storage.
        nbytes: size of the storage.
    """

    key: str
    module: str
    in_place: bool
    nbytes: int


@runtime_checkable
class Landing(Protocol):
    """An engine's model as the receiver sees it. All calls come from one thread, in the order given here."""

    engine: str  # name and version, for manifests and errors

    def trace(self, tensors: Sequence[TensorMeta]) -> Trace:
        """Runs the engine's own loaders over stand-ins; nothing is written."""
        ...

    def destinations(self) -> Mapping[str, Destination]:
        """Every destination that the trace recorded. Called after `trace`."""
        ...

    def begin(self) -> None:
        """A sync starts: from here to `finish` the model is being written."""
        ...

    def open(self, modules: Iterable[str], memory: Mapping[str, torch.Tensor]) -> None:
        """Makes the destinations of these modules exist.

        Args:
            modules: names as in `Destination.module`.
            memory: for every destination of these modules that is not in place, by key: a 1-D uint8 tensor of
                `Destination.nbytes` (zeroed before its first use in a process) that becomes its storage until `close`.
        """
        ...

    def storage(self, key: str) -> torch.Tensor:
        """The whole storage of an `in_place` destination as a 1-D uint8 tensor: the same memory for ever."""
        ...

    def close(self, module: str) -> None:
        """Every slice of this module has landed: runs its post-load step. The memory given to `open` is free afterwards."""
        ...

    def finish(self) -> None:
        """Every module is closed: what remains of the post-load step; checks that no live address changed."""
        ...

    def abort(self, reason: str) -> None:
        """The sync failed after `begin`, or after `finish`: the model is torn, and refuses to generate until a `finish`."""
        ...


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole storage of `tensor` as a 1-D uint8 tensor that shares its memory."""
    return whole(tensor.untyped_storage())


def with_index(device: torch.device | str) -> torch.device:
    """Returns `device` as tensors tell theirs: `cuda` is the current one, by its index."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_places(
    before: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]], who: str, when: str
) -> None:
    """Refuses a model of which a tensor no longer lies where it lay. Tensors that came since are not looked at.

    Args:
        before: by name: address and bytes, as `sources.watch.AddressWatch` tells them.
        now: the same, later; the same object where nothing changed.
        who: names the engine rank.
        when: ends the error: since or while what.

    Raises:
        EngineError: names the tensors that moved, were resized, or are gone.
    """
    if now is before:
        return
    moved = [name for name, place in before.items() if now.get(name) != place]
    if moved:
        raise EngineError(f"{who}: the address of {some(sorted(moved))} changed {when}")


#: parts of the names that Megatron gives its parameters, and checkpoints do not
_MEGATRON = (".linear_qkv.", ".linear_fc1.", ".linear_proj.", "word_embeddings.", "output_layer.")


def megatron_names(names: Iterable[str]) -> str:
    """What to add to a refusal of tensors by these names where they are those of Megatron's parameters; else ""."""
    if not any(part in name for name in names for part in _MEGATRON):
        return ""
    return ": these are Megatron's own names; rdt_megatron.MegatronSource declares such a model as its checkpoint"


def foreign_names(result: Trace) -> str:
    """What to add to a refusal where the names that are offered may be no checkpoint's; "" where the loaders take them all.

    Args:
        result: a trace of the engine's loaders.
    """
    taken = set(result.taken)
    others = [name for name in result.offered if name not in taken]
    if not others:
        return ""
    shown = some(map(repr, others), 4)
    told = f". Of {len(result.offered)} tensors that are offered its loaders take {len(taken)}, and not {shown}"
    if known := megatron_names(others):
        return told + known
    return told if taken else f"{told}: they are no names of its checkpoint; rename= of the source maps them"


class ModuleLanding:
    """Lands in the parameters and buffers of a plain `torch.nn.Module`, all in place.

    Args:
        module: the model that serves.
        load_weights: runs the model's loaders over `(name, tensor)` pairs; default: copy each tensor into the
            parameter or buffer of that name.
        engine: what the reports call this engine.
        kept: names of parameters, or shell patterns of them, that keep their values: no checkpoint tensor need reach them.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Any] | None = None,
        engine: str = "torch",
        kept: Iterable[str] = (),
    ) -> None:
        self.engine = engine
        self.kept = tuple(kept)
        self.module = module
        self.torn: str | None = None
        self._load = load_weights or self._copy_by_name
        self._fills: tuple[Fill, ...] = ()
        self._find()

    def _find(self) -> None:
        self._targets = Destinations.of(self.module)
        self._storages = {key: storage_bytes(tensor) for key, tensor in self._targets.items()}

    def _check_found(self) -> None:
        """Raises EngineError where the module has other memory than it had: bytes would land where nobody looks."""
        if self._targets.is_same():
            return
        now = Destinations.of(self.module)
        moved = [
            key
            for key, storage in self._storages.items()
            if key not in now or now[key].untyped_storage().data_ptr() != storage.data_ptr()
        ]
        moved += [key for key in now if key not in self._storages]
        if moved:
            shown = some(map(repr, moved))
            raise EngineError(
                f"parameters or buffers of the served module are not where they were when it was connected: {shown}; "
                f"they were replaced or moved. The replica finds them when it is connected again, as the next publish does"
            )

    def _copy_by_name(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.module.named_parameters(remove_duplicate=False)) | dict(
            self.module.named_buffers(remove_duplicate=False)
        )
        with torch.no_grad():
            for name, tensor in weights:
                if name in own:
                    own[name].data.copy_(tensor)

    def trace(self, tensors: Sequence[TensorMeta]) -> Trace:
        """See `Landing.trace`. From here on the module's memory is where it is now.

        Raises:
            CoverageError: parameters that nothing reaches, or only in part; they would stay stale.
        """
        self._find()
        result = trace(self._load, tensors, self._targets)
        self._refuse_stale(result)
        self._fills = result.fills
        return result

    def _refuse_stale(self, result: Trace) -> None:
        regions: dict[int, list[Slice | Fill]] = defaultdict(list)  # by address of the storage
        written: list[Slice | Fill] = [*result.slices, *result.fills]
        for part in written:
            regions[self._storages[part.destination].data_ptr()].append(part)
        named: dict[int, dict[str, torch.nn.Parameter]] = defaultdict(dict)
        for name, parameter in self.module.named_parameters():
            if parameter.numel():
                named[parameter.untyped_storage().data_ptr()][name] = parameter
        stale = []
        for address, parameters in named.items():
            parts = [(part, getattr(torch, part.dtype).itemsize) for part in regions[address]]
            places = [(_place_of(one), one.element_size()) for one in parameters.values()]
            unit = min(size for _, size in (*parts, *places))
            counts = count_written(
                [in_units(part, size // unit) for part, size in parts],
                [in_units(place, size // unit) for place, size in places],
                next(iter(parameters.values())).untyped_storage().nbytes() // unit,
            )
            for (name, parameter), count in zip(parameters.items(), counts, strict=True):
                if count * unit < parameter.nbytes and not any(fnmatchcase(name, pattern) for pattern in self.kept):
                    stale.append(f"{name!r} ({count * unit} of {parameter.nbytes} bytes)")
        if stale:
            raise CoverageError(
                f"{len(stale)} parameters of the served module are not reached by what the source offers, or not all of them, "
                f"and would keep their values: {some(stale)}. Let the source offer them, or name them in kept="
                f"{foreign_names(result)}"
            )

    def destinations(self) -> Mapping[str, Destination]:
        """See `Landing.destinations`."""
        return {
            key: Destination(key=key, module=key.rpartition(".")[0], in_place=True, nbytes=storage.numel())
            for key, storage in self._storages.items()
        }

    def begin(self) -> None:
        """See `Landing.begin`. Raises EngineError where the module's memory was replaced since `trace`."""
        self._check_found()
        self.torn = "a sync is running"
        with torch.no_grad():
            for fill in self._fills:  # what the loaders set to a number, such as the padding of a vocabulary
                whole_storage = self._storages[fill.destination].view(getattr(torch, fill.dtype))
                whole_storage.as_strided(fill.shape, fill.strides, fill.offset).fill_(fill.value)

    def open(self, modules: Iterable[str], memory: Mapping[str, torch.Tensor]) -> None:
        """See `Landing.open`: everything is in place already."""

    def storage(self, key: str) -> torch.Tensor:
        """See `Landing.storage`."""
        return self._storages[key]

    def close(self, module: str) -> None:
        """See `Landing.close`: a plain module has no post-load step."""

    def finish(self) -> None:
        """See `Landing.finish`. Raises EngineError as `begin` does."""
        self._check_found()
        self.torn = None

    def abort(self, reason: str) -> None:
        """See `Landing.abort`."""
        self.torn = reason


def _place_of(tensor: torch.Tensor) -> Place:
    return Place(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
