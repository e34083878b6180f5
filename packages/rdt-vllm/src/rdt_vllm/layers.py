"""One vLLM module between two states: the tensors it serves with, and the tensors its loaders write.

It is for the landing, which must bring a module into its load-time format, let bytes land there, and have vLLM's own
post-load step turn them into what the kernels use, in the memory that the kernels already know. It drives the helpers
of vLLM's layerwise reload and refuses a module that such a reload is busy with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _copy_and_restore_kernel_tensors,
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImplBase

from rdt_core.errors import EngineError

_PROCESSED = "_already_called_process_weights_after_loading"

is_deferred = is_deferred_attention_layer


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the module's own parameters and buffers by name, without those of its children."""
    return get_layer_tensors(module)


def post_load_is_idle(module: torch.nn.Module) -> bool:
    """Returns whether vLLM's post-load step is known to leave this module alone on this platform.

    An exact list, never a guess: a module without a quantisation method, a method that inherits the empty default, and
    the two unquantised methods where their step only acts on other platforms.
    """
    if is_deferred_attention_layer(module):
        return False
    method = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        return True
    kind = type(method)
    if kind.process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading:
        return True
    return kind in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod) and current_platform.is_cuda()


def makes_constants(module: torch.nn.Module) -> bool:
    """Returns whether a deferred module's post-load step makes nothing of weights: only what it made when the engine loaded.

    An exact list, never a guess: vLLM's own `Attention`, with a backend that inherits the empty default.
    """
    if not isinstance(module, Attention) or not isinstance(module.impl, AttentionImplBase):
        return False
    kept, inherited = type(module).process_weights_after_loading, type(module.impl).process_weights_after_loading
    return (
        kept is Attention.process_weights_after_loading and inherited is AttentionImplBase.process_weights_after_loading
    )


@contextmanager
def load_format(model: torch.nn.Module) -> Iterator[None]:
    """While it lasts every module of `model` has its load-time tensors on the meta device and its own loaders.

    The serving tensors are put back afterwards, whatever happened, and no loader of vLLM stays wrapped or unwrapped.

    Raises:
        EngineError: vLLM itself is in the middle of a layerwise reload of this model.
    """
    parked: list[tuple[torch.nn.Module, LayerReloadingInfo]] = []
    unwrapped: list[tuple[torch.Tensor, object]] = []
    torchao = getattr(model, "_do_torchao_reload", None)
    for name, module in model.named_modules():
        if get_layerwise_info(module).can_load():
            raise EngineError(
                f"module {name!r} is in the middle of a layerwise reload of vLLM; finish that weight update first"
            )
    try:
        if torchao is not None:
            model._do_torchao_reload = False  # type: ignore[assignment]
        for module in model.modules():
            info = _park(module)
            parked.append((module, info))
            restore_layer_on_meta(module, info)
            for tensor in get_layer_tensors(module).values():
                loader = getattr(tensor, "weight_loader", None)
                # online quantisation leaves vLLM's counting wrapper on the load-time tensors for life; outside a
                # reload that wrapper drops what it is given
                if loader is not None and (original := _get_original_loader(tensor)) is not loader:
                    unwrapped.append((tensor, loader))
                    tensor.weight_loader = original
        yield
    finally:
        for tensor, loader in unwrapped:
            tensor.weight_loader = loader  # type: ignore[attr-defined]
        for module, info in parked:
            _place_kernel_tensors(module, info)
            info.reset()
        if torchao is not None:
            model._do_torchao_reload = torchao


def _park(module: torch.nn.Module) -> LayerReloadingInfo:
    info = get_layerwise_info(module)
    info.kernel_tensors = get_layer_params_buffers(module)
    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    return info


def materialise(module: torch.nn.Module, memory: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Puts load-time tensors in real memory in place of the serving ones.

    Args:
        module: the module.
        memory: by the tensor's own name: a 1-D uint8 tensor that becomes its storage. Tensors that are not named get
            memory of their own.

    Returns:
        The serving tensors by name. Contents of the new tensors are whatever the memory holds.

    Raises:
        EngineError: the module is in load-time form already; its serving tensors would be lost.
    """
    if get_layerwise_info(module).kernel_tensors is not None:
        raise EngineError(f"a {type(module).__name__} was to be brought into load-time form while it is in it")
    info = _park(module)
    restore_layer_on_meta(module, info)
    for name, meta in get_layer_tensors(module).items():
        if meta.is_meta and name in memory:
            setattr(module, name, _over(memory[name], meta))
    materialize_layer(module, info)
    assert info.kernel_tensors is not None
    parameters, buffers = info.kernel_tensors
    return parameters | buffers


def _over(memory: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """A tensor with the geometry, class and attributes of `meta` whose elements lie in `memory`."""
    start, rest = divmod(int(memory.storage_offset()), meta.element_size())
    if rest:
        raise EngineError(f"receive memory at byte {memory.storage_offset()} is not aligned for {meta.dtype}")
    tensor = torch.empty(0, dtype=meta.dtype, device=memory.device).set_(
        memory.untyped_storage(), start, tuple(meta.shape), meta.stride()
    )
    # a Parameter is told by its class; the attributes carry the loaders and the quantisation's own marks
    tensor.__class__ = meta.__class__
    tensor.__dict__ = meta.__dict__.copy()
    return tensor


def process(module: torch.nn.Module) -> None:
    """Runs the post-load step of a materialised module and copies the result into the serving tensors."""
    info = get_layerwise_info(module)
    if hasattr(module, _PROCESSED):
        delattr(module, _PROCESSED)
    method = getattr(module, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(module)
        if hasattr(module, "update_param_tp_status"):
            module.update_param_tp_status()  # type: ignore[operator]
    _copy_and_restore_kernel_tensors(module, info)
    info.reset()


def put_back(module: torch.nn.Module) -> None:
    """Drops the load-time tensors of a materialised module and restores the serving ones, untouched."""
    info = get_layerwise_info(module)
    if info.kernel_tensors is not None:
        _place_kernel_tensors(module, info)
    info.reset()
