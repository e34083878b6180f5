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

from . import processes, sharedmemory

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
}
GRACE_S = 20.0


def run(program: Path, *arguments: str, timeout_s: float, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Runs a Python program and returns the JSON object of its last line.

    Args:
        program: the file.
        arguments: of the program.
        timeout_s: seconds after which it and everything below it is ended.
        environment: added to this process's.

    Raises:
        AssertionError: it failed, took too long, printed no JSON, or left processes behind (which are ended).
    """
    before = {process.pid for process in processes.descendants()}
    shared = sharedmemory.present()
    child = subprocess.Popen(
        [sys.executable, str(program), *arguments],
        env={**os.environ, **(environment or {})},
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
        left = [process for process in processes.survivors(0 if late else GRACE_S) if process.pid not in before]
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
