"""A stock vLLM model as the receiver sees it: what its loaders take, where that lands, and the post-load step.

The trace runs the model's own `load_weights` over stand-ins while every module shows its load-time tensors on the meta
device, as in vLLM's own reload; nothing is written. A tensor whose load-time and serving form are the same and that no
post-load step touches receives its bytes in place; every other module is brought into load-time form in the receiver's
memory, and vLLM's post-load step turns it into what the kernels use, at the addresses that they know.
It refuses a model of which a parameter would stay stale, and any change of an address.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from rdt_core.errors import CoverageError, EngineError, RdtError, TracingError, some
from rdt_core.landing import Destination, check_places, foreign_names, megatron_names, storage_bytes, with_index
from rdt_core.sources.watch import AddressWatch, Places, place
from rdt_core.tracing import Destinations, Trace, trace
from rdt_core.wire import TensorMeta
from rdt_core.written import Place, count_written

from . import layers
from .guard import TornGuard
from .versions import check_vllm


@dataclass(frozen=True, slots=True)
class _Format:
    """Load-time form of one tensor: what the loaders write."""

    module: str
    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int  # of the storage
    wanted: int  # elements that a checkpoint gives; padding that vLLM declares is not counted
    parameter: bool
    live: bool  # the loaders write the serving tensor itself, vLLM never moves it to the meta device

    def equals(self, tensor: torch.Tensor | None, device: torch.device) -> bool:
        """Whether `tensor` has this form, at the start of a storage of just its size, on `device`."""
        return (
            tensor is not None
            and tensor.device == device
            and tensor.dtype == self.dtype
            and tuple(tensor.shape) == self.shape
            and tuple(tensor.stride()) == self.strides
            and tensor.storage_offset() == 0
            and tensor.untyped_storage().nbytes() == self.nbytes
        )


class VllmLanding:
    """Lands in a model that a vLLM worker serves. Implements `rdt_core.landing.Landing`.

    Args:
        model: the worker's model, loaded and post-processed by vLLM.
        model_config: its `ModelConfig`.
        device: where it serves, e.g. `cuda:0`.
        vllm_config: the worker's `VllmConfig`, current while vLLM's code runs; None: whatever is current already.
        who: names the engine rank in errors.

    Raises:
        VersionError: this vLLM was not tested.
        EngineError: parameters that are no plain tensors (TorchAO, uninitialised GGUF).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: Any,
        device: torch.device | str,
        vllm_config: VllmConfig | None = None,
        *,
        who: str = "this engine rank",
    ) -> None:
        self.engine = f"vllm {check_vllm()}"
        self.who = who
        self._model = model
        self._model_config = model_config
        self._device = with_index(device)
        self._vllm_config = vllm_config
        self._modules = dict(model.named_modules())
        self._guard = TornGuard(model)
        self._formats: dict[str, _Format] = {}
        self._destinations: dict[str, Destination] = {}
        self._fills: dict[str, list[Any]] = {}
        self._padded: set[str] = set()  # destinations with elements that neither a slice nor a fill writes
        self._idle: set[str] = set()  # modules that land in place and have no post-load step
        self._ties: dict[str, list[tuple[str, str, str]]] = {}  # owner module -> (its tensor, tied module, its tensor)
        self._connected = Places({}, {})
        self._storages: dict[str, torch.Tensor] = {}
        self._opened: set[str] = set()
        self._refuse_strange_parameters()

    @property
    def torn(self) -> str | None:
        """Why the model must not generate now; None while it may."""
        return self._guard.reason

    # ------------------------------------------------------------------ set-up

    def trace(self, tensors: Sequence[TensorMeta]) -> Trace:
        """See `Landing.trace`.

        Raises:
            TracingError: a loader needs data, or fails.
            CoverageError: parameters of the model that the offered tensors do not reach, or a tensor for a place that
                cannot be updated.
        """
        with self._vllm(), layers.load_format(self._model):
            targets = Destinations()
            self._formats = {}
            for key, form, tensor in self._scan():
                self._formats[key] = form
                targets.add(key, tensor)
            try:
                load: Any = self._model.load_weights
                result = trace(load, tensors, targets, device=self._device)
            except RdtError:
                raise
            except Exception as error:
                raise TracingError(
                    f"load_weights of {type(self._model).__name__} failed over stand-ins for {len(tensors)} tensors: "
                    f"{type(error).__name__}: {error}{megatron_names(meta.name for meta in tensors)}"
                ) from error
        self._settle(result)
        return result

    def destinations(self) -> Mapping[str, Destination]:
        """See `Landing.destinations`."""
        return self._destinations

    def _scan(self) -> Iterator[tuple[str, _Format, torch.Tensor]]:
        for module_name, module in self._modules.items():
            for name, tensor in layers.tensors(module).items():
                form = _Format(
                    module=module_name,
                    name=name,
                    shape=tuple(tensor.shape),
                    strides=tuple(tensor.stride()),
                    dtype=tensor.dtype,
                    nbytes=tensor.untyped_storage().nbytes(),
                    wanted=get_tensor_load_numel(tensor),
                    parameter=name in module._parameters,
                    live=not tensor.is_meta,
                )
                yield _key(module_name, name), form, tensor

    def _settle(self, result: Trace) -> None:
        """Decides from a fresh trace where everything lands, and refuses what would stay stale."""
        landed: dict[str, int] = defaultdict(int)
        for piece in result.slices:
            landed[piece.destination] += math.prod(piece.shape)
        self._fills = defaultdict(list)
        filled: dict[str, None] = {}
        for fill in result.fills:
            self._fills[fill.destination].append(fill)
            if fill.destination in landed:
                filled.setdefault(fill.destination)
        for key in filled:  # what is filled first and loaded then counts once
            elements = self._formats[key].nbytes // getattr(torch, self._fills[key][0].dtype).itemsize
            regions = [*self._fills[key], *(one for one in result.slices if one.destination == key)]
            (landed[key],) = count_written(regions, [Place(0, (elements,), (1,))], elements)
        self._refuse_attention(landed)
        self._ties, shared = self._find_ties(landed)
        self._refuse_uncovered(landed, shared, result)

        touched: dict[str, list[_Format]] = defaultdict(list)
        for key in landed:
            touched[self._formats[key].module].append(self._formats[key])
        self._idle = {
            name
            for name, forms in touched.items()
            if layers.post_load_is_idle(self._modules[name])
            and all(form.equals(self._serving(form), self._device) for form in forms)
        }
        self._destinations = {}
        self._storages = {}
        self._padded = set()
        for key, count in landed.items():
            form = self._formats[key]
            in_place = form.live or form.module in self._idle
            if in_place:
                serving = self._serving(form)
                if serving is None or not form.equals(serving, self._device):
                    raise EngineError(
                        f"{self.who}: {key} cannot be written in place: it is a view, or not on {self._device}"
                    )
                self._storages[key] = storage_bytes(serving)
            elif count < math.prod(form.shape):
                self._padded.add(key)
            self._destinations[key] = Destination(key=key, module=form.module, in_place=in_place, nbytes=form.nbytes)
        self._refuse_shared()
        attention = [module for module in self._modules.values() if layers.is_deferred(module)]
        self._deferred = [module for module in attention if not layers.makes_constants(module)]
        self._watch = AddressWatch(self._model)
        self._connected = self._watch.now()

    def _serving(self, form: _Format) -> torch.Tensor | None:
        return layers.tensors(self._modules[form.module]).get(form.name)

    # ------------------------------------------------------------------ a sync

    def begin(self) -> None:
        """See `Landing.begin`. From here the model refuses to generate.

        Raises:
            EngineError: a serving tensor moved since the trace.
        """
        self._guard.close("a sync is running", self.who)
        self._check_addresses("since it connected; connect it again")
        for module in self._opened:
            layers.put_back(self._modules[module])
        self._opened.clear()
        with torch.no_grad():
            for key, storage in self._storages.items():
                self._fill(key, storage)

    def open(self, modules: Iterable[str], memory: Mapping[str, torch.Tensor]) -> None:
        """See `Landing.open`."""
        fresh = [name for name in modules if name not in self._idle and name not in self._opened]
        if not fresh:
            return
        own: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for key, span in memory.items():
            form = self._formats[key]
            own[form.module][form.name] = span
        with self._vllm(), torch.no_grad():
            for name in fresh:
                self._opened.add(name)
                for tensor, span in own[name].items():
                    if (key := _key(name, tensor)) in self._padded:
                        span.zero_()
                    self._fill(key, span)
                self._materialise(name, own[name])

    def _materialise(self, name: str, memory: Mapping[str, torch.Tensor]) -> None:
        """Brings a module into load-time form; tensors that get no bytes keep what they serve with."""
        module = self._modules[name]
        serving = layers.materialise(module, memory)
        for tensor_name, tensor in layers.tensors(module).items():
            kept = serving.get(tensor_name)
            if tensor is kept or _key(name, tensor_name) in self._destinations:
                continue
            if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
                tensor.data.copy_(kept.data)
            else:
                tensor.data.zero_()

    def storage(self, key: str) -> torch.Tensor:
        """See `Landing.storage`."""
        return self._storages[key]

    def close(self, module: str) -> None:
        """See `Landing.close`."""
        if module not in self._opened and module not in self._ties:
            return  # most modules: what landed is what they serve with
        with self._vllm(), torch.no_grad():
            for tensor, tied, tied_tensor in self._ties.get(module, ()):
                self._close_tied(tied, tied_tensor, layers.tensors(self._modules[module])[tensor])
            if module in self._opened:
                layers.process(self._modules[module])
                self._opened.discard(module)

    def _close_tied(self, name: str, tensor: str, loaded: torch.Tensor) -> None:
        """Runs the post-load step of a module that shares another one's weights and keeps something derived of them."""
        module = self._modules[name]
        if layers.post_load_is_idle(module):
            return
        self._materialise(name, {})
        layers.tensors(module)[tensor].data.copy_(loaded.data)
        layers.process(module)

    def finish(self) -> None:
        """See `Landing.finish`.

        Raises:
            EngineError: a module is still open, or a serving tensor has another address than before.
        """
        if self._opened:
            raise EngineError(f"{self.who}: modules {some(sorted(self._opened))} never received all their bytes")
        with self._vllm(), torch.no_grad():
            # derived matrices (MLA's) are made from other modules' serving tensors, so they come last
            for module in self._deferred:
                module.process_weights_after_loading(self._model_config.dtype)
        self._check_addresses("while its post-load step ran; captured CUDA graphs would read freed memory")
        self._guard.open()

    def abort(self, reason: str) -> None:
        """See `Landing.abort`. Serving tensors are put back, so that a later sync can start."""
        self._guard.close(reason, self.who)
        for module in self._opened:
            layers.put_back(self._modules[module])
        self._opened.clear()

    # ------------------------------------------------------------------ inside

    @contextmanager
    def _vllm(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.device(self._device))
            if self._vllm_config is not None:
                stack.enter_context(set_current_vllm_config(self._vllm_config))
            yield

    def _fill(self, key: str, storage: torch.Tensor) -> None:
        """Writes again the constants that the loader wrote (vocabulary padding)."""
        for fill in self._fills.get(key, ()):
            form = self._formats[key]
            whole = storage.view(form.dtype)
            whole.as_strided(fill.shape, fill.strides, whole.storage_offset() + fill.offset).fill_(fill.value)

    def _find_ties(self, landed: Mapping[str, int]) -> tuple[dict[str, list[tuple[str, str, str]]], set[str]]:
        """Parameters that get no bytes of their own because they share the serving memory of one that does.

        Returns:
            Those whose module has to be post-processed when the owner of the memory closes (see `_ties`), and the keys of
            all of them.
        """
        owners = {}
        for key in landed:
            form = self._formats[key]
            serving = self._serving(form)
            if serving is not None and serving.numel():
                owners[place(serving)] = form
        receiving = {self._formats[key].module for key in landed}
        ties: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
        shared = set()
        for key, form in self._formats.items():
            serving = self._serving(form)
            if key in landed or not form.parameter or serving is None or not serving.numel():
                continue
            owner = owners.get(place(serving))
            if owner is None or owner.shape != form.shape or owner.dtype != form.dtype:
                continue
            shared.add(key)
            if form.module not in receiving:
                ties[owner.module].append((owner.name, form.module, form.name))
            elif not form.live and not layers.post_load_is_idle(self._modules[form.module]):
                raise EngineError(
                    f"{self.who}: {key} shares the memory of {_key(owner.module, owner.name)}, but the other tensors of "
                    f"{form.module or 'its module'} are loaded on their own, so that its post-load step cannot follow both; "
                    "this model cannot be updated"
                )
            # else its module's own post-load step comes with its own bytes, and never touches a tensor that vLLM keeps
            # live: the router's correction bias, which the gate loads and the experts hold as well
        return dict(ties), shared

    def _refuse_uncovered(self, landed: Mapping[str, int], shared: Collection[str], result: Trace) -> None:
        missing = []
        for key, form in self._formats.items():
            if not form.parameter or key in shared or layers.is_deferred(self._modules[form.module]):
                continue
            if landed.get(key, 0) < form.wanted:
                missing.append(f"{key} ({landed.get(key, 0)} of {form.wanted} elements)")
        if missing:
            raise CoverageError(
                f"{self.who}: {len(missing)} parameters of {type(self._model).__name__} are not reached by what the trainer "
                f"offers and would stay stale: {some(sorted(missing))}. Give the trainer's source the checkpoint tensors that "
                f"these are loaded from{foreign_names(result)}"
            )

    def _refuse_attention(self, landed: Iterable[str]) -> None:
        scales = [key for key in landed if layers.is_deferred(self._modules[self._formats[key].module])]
        if scales:
            raise CoverageError(
                f"{self.who}: the trainer offers tensors for {some(sorted(scales))}, which attention layers take only when the "
                "engine starts (KV cache scales); leave them out of the trainer's source"
            )

    def _refuse_shared(self) -> None:
        """Two checkpoint tensors in one memory: vLLM ties an `lm_head` that was equal to the embeddings at start."""
        seen: dict[tuple[int, int], str] = {}
        for key in self._destinations:
            serving = self._serving(self._formats[key])
            if serving is None or not serving.numel():
                continue
            first = seen.setdefault(place(serving), key)
            if first != key:
                raise CoverageError(
                    f"{self.who}: {first} and {key} are loaded from different checkpoint tensors but share their memory, "
                    "because they were equal when the engine started; start it with load_format='dummy', or from a "
                    "checkpoint in which they differ"
                )

    def _refuse_strange_parameters(self) -> None:
        for name, tensor in self._model.named_parameters():
            if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
                raise EngineError(f"{self.who}: parameter {name} is uninitialised; GGUF checkpoints cannot be updated")
            if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
                raise EngineError(
                    f"{self.who}: parameter {name} is a {type(tensor).__name__}, which keeps its bytes in tensors of its own; "
                    "TorchAO quantisation cannot be updated, use vLLM's own quantisation"
                )

    def _check_addresses(self, when: str) -> None:
        check_places(self._connected.tensors, self._watch.now().tensors, self.who, when)


def _key(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
