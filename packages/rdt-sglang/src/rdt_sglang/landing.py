"""The models that an SGLang scheduler serves, as the receiver sees them: what their loaders take and where it lands.

The trace runs `load_weights` of the target model (and of draft models, where selected) over stand-ins on the live
parameters; nothing is written. Everything lands in place. What SGLang derives from parameters (MLA's `w_kc` and `w_vc`)
is made by its own post-load step when all bytes have landed. It refuses modules whose weights SGLang repacks, a model of
which a parameter would stay stale, and any change of an address.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from rdt_core.errors import CoverageError, EngineError, RdtError, TracingError, some
from rdt_core.landing import Destination, check_places, foreign_names, megatron_names, storage_bytes, with_index
from rdt_core.sources.watch import AddressWatch, Places
from rdt_core.tracing import Destinations, Fill, Slice, Trace, trace
from rdt_core.wire import TensorMeta

from .layers import check_modules, without_post_load
from .versions import check_sglang


class SglangLanding:
    """Lands in the models that one scheduler serves. Implements `rdt_core.landing.Landing`.

    Args:
        runners: `(role, runner)` pairs as SGLang's `weight_update_runners()` gives them: objects with the attributes
            `model` and `weight_updater`. Keys of destinations begin with the role where there is more than one.
        device: where the models serve, e.g. `cuda:0`.
        who: names the engine rank in errors.
        on_begin: called before the first byte is written, after everything was checked.
        on_abort: called with the reason when a sync failed.

    Raises:
        VersionError: this SGLang was not tested.
        EngineError: a module whose weights SGLang repacks.
    """

    def __init__(
        self,
        runners: Sequence[tuple[str, Any]],
        device: torch.device | str,
        *,
        who: str = "this engine rank",
        on_begin: Callable[[], None] | None = None,
        on_abort: Callable[[str], None] | None = None,
    ) -> None:
        self.engine = f"sglang {check_sglang()}"
        self.who = who
        self.slices = 0
        self._runners = _with_roles(runners)
        if not self._runners:
            raise EngineError(f"{who}: there is no model to update")
        self._device = with_index(device)
        self._on_begin = on_begin
        self._on_abort = on_abort
        self._root = self._as_one()
        self._targets = Destinations()
        self._destinations: dict[str, Destination] = {}
        self._storages: dict[str, torch.Tensor] = {}
        self._fills: dict[str, list[Fill]] = {}
        self._connected = self._begun = Places({}, {})
        for _, runner in self._runners:
            check_modules(runner.model, who)

    @property
    def roles(self) -> frozenset[str]:
        """Which of the scheduler's models it lands in."""
        return frozenset(role for role, _ in self._runners)

    # ------------------------------------------------------------------ set-up

    def trace(self, tensors: Sequence[TensorMeta]) -> Trace:
        """See `Landing.trace`. The engine may go on generating meanwhile.

        Raises:
            TracingError: a loader needs data, or fails.
            CoverageError: parameters of the models that the offered tensors do not reach.
        """
        self._root = self._as_one()
        self._targets = Destinations.of(self._root)
        traces = [self._trace(role, runner.model, tensors) for role, runner in self._runners]
        # a draft model shares embeddings with the target: the same bytes in the same place, once
        slices: dict[Slice, None] = {piece: None for one in traces for piece in one.slices}
        fills: dict[Fill, None] = {fill: None for one in traces for fill in one.fills}
        taken = {name for one in traces for name in one.taken}
        result = Trace(
            slices=tuple(slices),
            offered=traces[0].offered,
            taken=tuple(meta.name for meta in tensors if meta.name in taken),
            tensors=tuple(tensors),
            fills=tuple(fills),
        )
        self._settle(result)
        return result

    def destinations(self) -> Mapping[str, Destination]:
        """See `Landing.destinations`."""
        return self._destinations

    def _trace(self, role: str, model: Any, tensors: Sequence[TensorMeta]) -> Trace:
        with without_post_load(model):
            try:
                return trace(model.load_weights, tensors, self._targets, device=self._device)
            except RdtError:
                raise
            except Exception as error:
                raise TracingError(
                    f"{self.who}: load_weights of {type(model).__name__} ({role}) failed over stand-ins for {len(tensors)} "
                    f"tensors: {type(error).__name__}: {error}{megatron_names(meta.name for meta in tensors)}"
                ) from error

    def _settle(self, result: Trace) -> None:
        """Decides from a fresh trace where everything lands, and refuses what would stay stale."""
        landed: dict[str, int] = defaultdict(int)
        for piece in result.slices:
            landed[piece.destination] += math.prod(piece.shape)
        self._fills = defaultdict(list)
        for fill in result.fills:
            if fill.destination in landed:
                landed[fill.destination] += math.prod(fill.shape)
                self._fills[fill.destination].append(fill)
        self._refuse_uncovered(landed, result)
        self._destinations, self._storages = {}, {}
        for key in landed:
            tensor = self._targets[key]
            if tensor.device != self._device:
                raise EngineError(
                    f"{self.who}: {key} lies on {tensor.device}, but the model serves on {self._device}; weights that are "
                    "offloaded cannot be updated (start SGLang without --cpu-offload-gb)"
                )
            self._storages[key] = storage_bytes(tensor)
            self._destinations[key] = Destination(
                key=key, module=key.rpartition(".")[0], in_place=True, nbytes=self._storages[key].numel()
            )
        self.slices = len(result.slices)
        # post-load steps and first forward passes make tensors, which stay plain attributes of modules
        self._watch = AddressWatch(self._root, attributes=True)
        self._connected = self._watch.now()

    def _refuse_uncovered(self, landed: Mapping[str, int], result: Trace) -> None:
        wanted: dict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
        for name, parameter in self._root.named_parameters(remove_duplicate=False):
            key = self._targets.find(parameter)
            if key is None:
                raise EngineError(f"{self.who}: parameter {name} has no memory that could be written")
            view = (parameter.storage_offset(), *parameter.shape, *parameter.stride())
            wanted[key][view] = parameter.numel()
        missing = [
            f"{key} ({landed.get(key, 0)} of {count} elements)"
            for key, views in wanted.items()
            if landed.get(key, 0) < (count := sum(views.values()))
        ]
        if missing:
            raise CoverageError(
                f"{self.who}: {len(missing)} parameters are not reached by what the trainer offers and would stay stale: "
                f"{some(sorted(missing))}. Give the trainer's source the checkpoint tensors that these are loaded from"
                f"{foreign_names(result)}"
            )

    # ------------------------------------------------------------------ a sync

    def prepare_models(self) -> None:
        """SGLang's own begin of a weight update, on every model."""
        with torch.no_grad():
            for _, runner in self._runners:
                runner.weight_updater.begin_weight_update()

    def begin(self) -> None:
        """See `Landing.begin`.

        Raises:
            EngineError: a parameter moved since the trace.
        """
        now = self._watch.now()
        check_places(self._connected.parameters, now.parameters, self.who, "since it connected; connect it again")
        self._begun = now
        if self._on_begin is not None:
            self._on_begin()
        with torch.no_grad():
            for key, fills in self._fills.items():
                for fill in fills:  # the padding of a vocabulary
                    whole = self._storages[key].view(getattr(torch, fill.dtype))
                    whole.as_strided(fill.shape, fill.strides, fill.offset).fill_(fill.value)

    def open(self, modules: Iterable[str], memory: Mapping[str, torch.Tensor]) -> None:
        """See `Landing.open`: everything is in place already."""

    def storage(self, key: str) -> torch.Tensor:
        """See `Landing.storage`."""
        return self._storages[key]

    def close(self, module: str) -> None:
        """See `Landing.close`: SGLang's post-load step works on whole models."""

    def finish(self) -> None:
        """See `Landing.finish`: SGLang's own post-load step on every model.

        Raises:
            EngineError: a parameter, a buffer or a derived tensor has another address than before.
        """
        with torch.no_grad():
            for _, runner in self._runners:
                runner.weight_updater.end_weight_update(run_post_load=True)
        check_places(
            self._begun.tensors,
            self._watch.now().tensors,
            self.who,
            "while its post-load step ran; captured CUDA graphs would read stale memory",
        )

    def abort(self, reason: str) -> None:
        """See `Landing.abort`."""
        if self._on_abort is not None:
            self._on_abort(reason)

    # ------------------------------------------------------------------ inside

    def _as_one(self) -> torch.nn.Module:
        """The models under one root, so that every tensor has one name. They are not changed by it."""
        if len(self._runners) == 1:
            return self._runners[0][1].model
        return torch.nn.ModuleDict({role: runner.model for role, runner in self._runners})


def _with_roles(runners: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The pairs with roles that differ: SGLang calls several draft runners the same."""
    seen: dict[str, int] = defaultdict(int)
    named = []
    for role, runner in runners:
        seen[role] += 1
        named.append((role if seen[role] == 1 else f"{role}_{seen[role] - 1}", runner))
    return named
