"""Starts a stock SGLang on this machine's CPU for `rdt demo`; entry point of group `rdt.demo_engines`.

The engine is an `SGLangServer`: SGLang in Ray mode, its schedulers as actors. Logical GPUs of the demo's cluster stand for
its ranks. It refuses an installation of SGLang without CPU kernels before anything is started.
"""

from __future__ import annotations

import importlib.util
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rdt_core.demo.engines import Completion, answers
from rdt_core.errors import EngineError

from .clients import SglangRayEngine
from .server import end, launch
from .versions import check_sglang

#: seconds that an engine gets to end its processes before its actor is killed
SHUTDOWN_S = 60.0
#: requests that are generated at the same time
MAX_RUNNING = 64


def environment(tp: int, threads: int) -> dict[str, str]:
    """Returns the environment of the actor that hosts the engine, which its schedulers inherit.

    Args:
        tp: tensor-parallel size.
        threads: of each engine rank.
    """
    cores = sorted(os.sched_getaffinity(0))
    # SGLang wants the cores of every rank, and more ranks than cores have to share
    bound = [",".join(str(core) for core in cores[rank::tp]) or str(cores[rank % len(cores)]) for rank in range(tp)]
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(bound),
        # without pinning nothing else limits the threads; Ray sets 1 for an actor that asks for less than a core
        "OMP_NUM_THREADS": str(threads),
        # a CUDA build of torch brings an NCCL that SGLang would load, and then ask for a GPU
        "SGLANG_NCCL_SO_PATH": "/nonexistent.so",
        # the checkpoint is a local directory; nothing is looked up anywhere
        "HF_HUB_OFFLINE": "1",
        # all ranks are on this machine, which may have no other network
        "GLOO_SOCKET_IFNAME": "lo",
    }


class SglangRollout:
    """One running SGLang, as `rdt_core.demo` uses an engine. Made by `start`."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle: Any = handle
        self.name = name
        self.client = SglangRayEngine(handle, name="sglang")

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
        """See `rdt_core.demo.engines.RolloutEngine`. `seed` has no effect: SGLang samples by the engine's own seed."""
        sampling = {
            "n": samples,
            "max_new_tokens": max_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "stop_token_ids": list(stop),
        }
        refs = [self._handle.generate.remote(list(prompt), sampling) for prompt in prompts]
        return [[Completion.of(sample) for sample in group] for group in answers(refs, "SGLang", "generate", timeout_s)]

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
) -> SglangRollout:
    """Starts SGLang in the Ray cluster that this process is connected to; returns when it can generate.

    Args:
        model_dir: checkpoint directory on this machine.
        tp: tensor-parallel size; the cluster must have as many GPUs, logical ones do.
        dtype: of weights and computation, "float32" or "bfloat16".
        max_model_len: tokens of the longest prompt and completion together.
        seed: of the engine.
        threads: of each engine rank.
        timeout_s: deadline of the start, in seconds.

    Raises:
        VersionError: SGLang is missing or was not tested.
        EngineError: it has no CPU kernels, or did not start.
        DeadlineError: not up within `timeout_s`.
    """
    found = check_sglang()
    if importlib.util.find_spec("sgl_kernel") is None:
        raise EngineError(
            f"SGLang {found} is installed without CPU kernels (no module sgl_kernel), and the demo runs on the CPU; build them "
            "as SGLang's page for CPU servers says, or use --engine vllm"
        )
    handle = launch(
        str(model_dir),
        name=f"rdt-demo-sglang-{uuid.uuid4().hex[:8]}",
        # the environment belongs to the whole process: parts of it are read before the actor's own code runs
        options={"runtime_env": {"env_vars": environment(tp, threads)}},
        timeout_s=timeout_s,
        tp_size=tp,
        device="cpu",
        attention_backend="torch_native",
        dtype=dtype,
        context_length=max_model_len,
        max_total_tokens=MAX_RUNNING * max_model_len,
        max_running_requests=MAX_RUNNING,
        # SGLang compares the machine's free memory before and after it loads, while trainers come and go; what it takes is
        # bounded by max_total_tokens
        mem_fraction_static=0.8,
        random_seed=seed,
        sampling_defaults="openai",  # the checkpoint's own may set a temperature or filters
        skip_tokenizer_init=True,  # token ids in, token ids out
        disable_cuda_graph=True,
        log_level="warning",
    )
    # an actor that fails here is left to the end of the cluster, which finds its processes as long as it lives
    name = answers([handle.ready.remote()], "SGLang", "start", timeout_s)[0]
    return SglangRollout(handle, name if tp == 1 else f"{name} tp={tp}")
