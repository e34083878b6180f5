"""What a CPU worker of vLLM received: its linear layers pack their weights for the kernels and drop them.

So vLLM's checksums cannot tell what arrived there; it is digested just before it is packed, in one sync that nobody times.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.model_executor.layers import utils

from rdt_vllm.benchprogram import Switch

_stock = utils.dispatch_cpu_unquantized_gemm
#: SHA-256 by layer, of what was packed since `watch`
_RECEIVED: dict[int, str] = {}


def _digesting(layer: torch.nn.Module, remove_weight: bool) -> None:
    if not layer.weight.is_meta:
        seen = layer.weight.data.contiguous().view(-1).view(torch.uint8).numpy()
        _RECEIVED[id(layer)] = hashlib.sha256(seen).hexdigest()
    _stock(layer, remove_weight)


class CpuSwitch(Switch):
    """Extension of vLLM's workers."""

    def watch(self) -> None:
        _RECEIVED.clear()
        utils.dispatch_cpu_unquantized_gemm = _digesting

    def received(self: Any) -> dict[str, str]:
        utils.dispatch_cpu_unquantized_gemm = _stock
        modules = self.model_runner.get_model().named_modules()
        return {f"{name}.weight": _RECEIVED[id(module)] for name, module in modules if id(module) in _RECEIVED}
