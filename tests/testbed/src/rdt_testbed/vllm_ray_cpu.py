"""vLLM's CPU platform with the one attribute that its Ray executors ask for."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """Workers take Ray's logical `GPU` resource, which `ray.init(num_gpus=N)` grants without a device behind it."""

    ray_device_key = "GPU"
