"""Runs a test's program in a process of its own and reads what it found, with nothing of it left running afterwards.

An inference engine ends its whole process tree when it fails, and its helpers may outlive their parent; so a test that
uses one never does so in the test runner itself. A program prints one JSON object as its last line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import cluster, processes, sharedmemory, warm

#: both engines compile small functions of their samplers with a C++ compiler, 8 CPU seconds in each process
_NO_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
#: what every vLLM process of a test needs on a machine without a GPU
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "RDT_TESTBED_CPU_MOE": "1",
    "RDT_TESTBED_RAY_CPU": "1",
    # a worker that was connected to Ray ends when it is told to, not by itself
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    **_NO_COMPILER,
}
#: what every SGLang process of a test needs on a machine without a GPU, with one or two tensor parallel ranks
SGLANG_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    "OMP_NUM_THREADS": "1",
    # a CUDA build of torch brings an NCCL that SGLang would load, and then ask for a GPU
    "SGLANG_NCCL_SO_PATH": "/nonexistent.so",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    **_NO_COMPILER,
}
#: what Ray and its workers import beside Ray itself, which every process imports anew
_RAY_MODULES = (
    "google.protobuf.descriptor_pb2",
    "google.protobuf.internal.builder",
    "google.protobuf.text_format",
    "filelock",
    "jsonschema",
    "msgpack",
    "msgspec",
    "psutil",
    "requests",
    "uvloop",
    "yaml",
)
#: imported once for all of Ray's workers of tests without an engine; see `warm`
CORE_MODULES = (*_RAY_MODULES, "torch", "torch.distributed.fsdp", "rdt_core.replica", "rdt_core.sync")
#: imported once for all programs of an engine
TRAINER_MODULES = (
    *_RAY_MODULES,
    "torch",
    "transformers",
    "torch.distributed.fsdp",
    "rdt_testbed.models",
    "megatron.core.models.gpt.gpt_layer_specs",
)
VLLM_MODULES = (
    *TRAINER_MODULES,
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.qwen3_moe",
)
SGLANG_MODULES = (
    *TRAINER_MODULES,
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.qwen3_moe",
    "sglang.srt.models.deepseek_v2",
)
GRACE_S = 20.0


def run(
    program: Path,
    *arguments: str,
    timeout_s: float,
    environment: dict[str, str] | None = None,
    fork: warm.Warm | None = None,
) -> dict[str, Any]:
    """Runs a Python program and returns the JSON object of its last line.

    Args:
        program: the file.
        arguments: of the program.
        timeout_s: seconds after which it and everything below it is ended.
        environment: added to this process's.
        fork: where the program, its Ray workers and its `multiprocessing` children are forked from; None: each starts anew,
            and so does the Ray cluster.

    Raises:
        AssertionError: it failed, took too long, printed no JSON, or left processes behind (which are ended).
    """
    before = {process.pid for process in processes.descendants()}
    shared = sharedmemory.present()
    variables = {**os.environ, **(environment or {})}
    if fork:
        variables[warm.VARIABLE] = fork.python
        variables[cluster.VARIABLES] = " ".join(environment or {})
    else:
        variables.pop(cluster.STANDING, None)
    child = subprocess.Popen(
        [fork.python if fork else sys.executable, str(program), *arguments],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    late = False
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
    finally:
        left = processes.survivors(0 if late else GRACE_S, known=before)
        lines = [processes.describe(process) for process in left]
        processes.end(left)
        sharedmemory.remove_since(shared)
    what = f"{program.name} {' '.join(arguments)}"
    if late:
        raise AssertionError(f"{what} was not done after {timeout_s:.0f} s:\n{err[-6000:]}")
    if child.returncode != 0:
        raise AssertionError(f"{what} ended with status {child.returncode}:\n{err[-6000:]}")
    if lines:
        raise AssertionError(f"{what} left processes behind:\n" + "\n".join(lines))
    try:
        return json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise AssertionError(f"{what} printed no JSON:\n{out[-2000:]}\n{err[-4000:]}") from error
