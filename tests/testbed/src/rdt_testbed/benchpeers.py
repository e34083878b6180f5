"""Peer `sharded_rdt` of `rdt bench` on a CPU: vLLM's own backend with what it asks of CUDA replaced; see `vllm_sharded`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from rdt_core.bench import BenchOptions, PeerRow
from rdt_vllm.bench import ShardedRdt

from . import warm
from .programs import VLLM_ENVIRONMENT
from .vllm_sharded import SHARED, VARIABLE


class CpuShardedRdt(ShardedRdt):
    """Entry point of group `rdt.bench_peers`."""

    def reason(self, options: BenchOptions) -> str:
        if options.device != "cpu":
            return "the test bed's is for --device cpu"
        return self.lacking(options)

    def environment(self, options: BenchOptions) -> dict[str, str]:
        return {**VLLM_ENVIRONMENT, VARIABLE: self._prefix, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}

    @property
    def python(self) -> str:
        return warm.python()

    @property
    def prepare(self) -> str:
        return "rdt_testbed.vllm_sharded:prepare_trainer"

    @property
    def extension(self) -> str:
        return "rdt_testbed.vllm_received.CpuSwitch"

    def measure(self, options: BenchOptions) -> Sequence[PeerRow]:
        self._prefix = f"rdt-testbed-sharded-{uuid.uuid4().hex[:8]}-"
        try:
            return super().measure(options)
        finally:
            for left in SHARED.glob(f"{self._prefix}*"):
                left.unlink(missing_ok=True)
