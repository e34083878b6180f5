"""What a CPU worker of vLLM received: its linear and expert layers pack their weights for the kernels and drop them.

So vLLM's checksums cannot tell what arrived there; it is digested just before it is packed, in one sync that nobody times.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Experts

from rdt_vllm.benchprogram import Switch

#: SHA-256 by layer and parameter, of what was packed since `watch`
_RECEIVED: dict[tuple[int, str], str] = {}


def _see(layer: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_meta:
        seen = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        _RECEIVED[id(layer), name] = hashlib.sha256(seen).hexdigest()


class CpuSwitch(Switch):
    """Extension of vLLM's workers."""

    def watch(self) -> None:
        linear, experts = utils.dispatch_cpu_unquantized_gemm, Experts._setup_kernel

        def see_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
            _see(layer, "weight", layer.weight)
            linear(layer, remove_weight)

        def see_experts(method: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
            _see(layer, "w13_weight", w13)
            _see(layer, "w2_weight", w2)
            experts(method, layer=layer, w13=w13, w2=w2)

        def restore() -> None:
            utils.dispatch_cpu_unquantized_gemm, Experts._setup_kernel = linear, experts

        _RECEIVED.clear()
        utils.dispatch_cpu_unquantized_gemm, Experts._setup_kernel = see_linear, see_experts
        self._restore = restore

    def received(self: Any) -> dict[str, str]:
        self._restore()
        names = {id(module): name for name, module in self.model_runner.get_model().named_modules()}
        return {f"{names[layer]}.{name}": digest for (layer, name), digest in _RECEIVED.items() if layer in names}
