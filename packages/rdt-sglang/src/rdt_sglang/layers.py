"""Which of SGLang's modules may be written in place: those whose post-load step is known to leave their weights alone.

SGLang repacks weights for some kernels, at start and after each of its own updates, mostly in ways that cannot be undone.
Bytes that land in a repacked tensor would be nonsense, so such modules are refused by name, with the way out. The list
of harmless methods is exact, never a guess.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rdt_core.errors import EngineError, some

#: attributes by which a module tells that its weights were repacked, and what to do about it
_REPACKED = {
    "use_intel_amx_backend": "its weight is packed for AMX; serve on a GPU, or on a CPU without AMX",
    "w13_swiglu_interleaved": "its rows are interleaved; start SGLang with SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED=0",
    "use_flashinfer_trtllm_moe": "its experts are in TensorRT-LLM's block layout; start SGLang with --moe-runner-backend triton",
}


def refusal(module: torch.nn.Module) -> str | None:
    """Returns why the weights of one module cannot be written in place; None if they can."""
    from sglang.srt.layers.quantization import unquant
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    if isinstance(module, BaseLayerWithLoRA):
        return None  # forwards the method of the layer that it wraps, which is looked at by itself
    method = getattr(module, "quant_method", None)
    for owner in (module, method):
        for name, why in _REPACKED.items():
            if getattr(owner, name, False) is True:
                return why
    if method is None:
        return None
    kind = type(method)
    if not isinstance(method, QuantizeMethodBase):
        return f"{kind.__name__} is a wrapper with a post-load step of its own; {_WAY_OUT}"
    if kind.process_weights_after_loading is QuantizeMethodBase.process_weights_after_loading:
        return None
    if kind is unquant.UnquantizedLinearMethod:
        return None  # acts on AMX alone, which the attribute above tells
    if kind is unquant.UnquantizedFusedMoEMethod:
        if unquant._is_npu or unquant._use_aiter:
            return "its experts are shuffled for this platform's kernels; only CUDA and CPU are supported"
        return None  # otherwise sets up its dispatcher, the same each time
    return f"{kind.__name__} repacks or requantises weights after loading; {_WAY_OUT}"


_WAY_OUT = "serve a checkpoint that is not quantised, in the dtype that the trainer publishes"


def check_modules(model: torch.nn.Module, who: str) -> None:
    """Refuses a model with weights that cannot be written in place.

    Raises:
        EngineError: names the modules and the way out.
    """
    reasons: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        why = refusal(module)
        if why is not None:
            reasons.setdefault(why, []).append(name)
    for name, tensor in model.named_parameters():
        if isinstance(tensor, torch.nn.parameter.UninitializedParameter):
            reasons.setdefault("it is not initialised; GGUF checkpoints cannot be updated", []).append(name)
        elif torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
            why = f"it is a {type(tensor).__name__}, which keeps its bytes in tensors of its own; {_WAY_OUT}"
            reasons.setdefault(why, []).append(name)
    if reasons:
        told = "; ".join(f"{some(sorted(names))}: {why}" for why, names in reasons.items())
        raise EngineError(f"{who}: weights of {type(model).__name__} cannot be written in place. {told}")


@contextmanager
def without_post_load(model: torch.nn.Module) -> Iterator[None]:
    """While it lasts, `post_load_weights` of `model` and its parts does nothing in this thread.

    Some loaders end with it. It would compute from weights that are being served, while they are being served.
    """
    thread = threading.get_ident()
    quiet: list[torch.nn.Module] = []

    def silenced(original: Any) -> Any:
        def post_load_weights(*args: Any, **kwargs: Any) -> Any:
            return None if threading.get_ident() == thread else original(*args, **kwargs)

        return post_load_weights

    try:
        for module in model.modules():
            original = getattr(module, "post_load_weights", None)
            if callable(original) and "post_load_weights" not in module.__dict__:
                module.__dict__["post_load_weights"] = silenced(original)
                quiet.append(module)
        yield
    finally:
        for module in quiet:
            module.__dict__.pop("post_load_weights", None)
