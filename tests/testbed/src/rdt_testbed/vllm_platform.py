"""What stock vLLM needs to run the tests on a machine without a GPU; found by vLLM through entry points.

Three things, each off unless its environment variable is set: a CPU platform that admits Ray executors
(`RDT_TESTBED_RAY_CPU`), a mend for vLLM's CPU mixture-of-experts layers, which drop the experts' repacking on every
weight update, its own `reload_weights` included (`RDT_TESTBED_CPU_MOE`), and vLLM's backend `sharded_rdt` on a CPU
(`vllm_sharded`). Never part of the product.
"""

from __future__ import annotations

import os
from typing import Any

from . import vllm_sharded

RAY_CPU = "RDT_TESTBED_RAY_CPU"
CPU_MOE = "RDT_TESTBED_CPU_MOE"


def platform() -> str | None:
    """Entry point of group `vllm.platform_plugins`: the qualified name of a platform class, or None to stay out."""
    # in a module of its own: vLLM imports the platform's class while `vllm.platforms` is still being set up
    return __name__.rpartition(".")[0] + ".vllm_ray_cpu.RayCpuPlatform" if os.environ.get(RAY_CPU) == "1" else None


def register() -> None:
    """Entry point of group `vllm.general_plugins`, called in every process of vLLM, some of them twice."""
    if os.environ.get(CPU_MOE) == "1":
        _repack_experts_on_updates()
    if os.environ.get(vllm_sharded.VARIABLE):
        vllm_sharded.prepare_worker()


def _repack_experts_on_updates() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or hasattr(Method._setup_kernel, "rdt_testbed"):
        return
    stock = Method._setup_kernel

    def setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        update = self.moe_kernel is not None
        stock(self, layer=layer, w13=w13, w2=w2)
        if update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setup_kernel.rdt_testbed = True  # type: ignore[attr-defined]
    Method._setup_kernel = setup_kernel
