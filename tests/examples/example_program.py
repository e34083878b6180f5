"""Run by test_examples.py in a process of its own: runs one example as a user would and collects what it prints.

Arguments: the example's file, then its own arguments; `torchrun` before them starts two ranks beside a Ray cluster that is
there already, and `torchrun-vllm` a vLLM server for them as well. Prints one JSON object on its last line.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rdt_testbed import warm
from rdt_testbed.cluster import local_cluster, workers_environment

EXAMPLES = Path(__file__).parents[2] / "examples"


def lines(command: list[str]) -> list[dict[str, Any]]:
    python = warm.python()  # for Ray's workers and torchrun's ranks as well
    job = json.dumps({"runtime_env": workers_environment()})
    environment = {**os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR": job, "PYTHON_EXEC": python}
    done = subprocess.run([python, *command], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{command} ended with status {done.returncode}:\n{done.stdout}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def under_torchrun(name: str, arguments: list[str], *, vllm: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place, local_cluster() as cluster, ExitStack() as stack:
        if vllm:  # started once the cluster is there: with it comes the token that its members need
            url = stack.enter_context(vllm_server(Path(place)))
            arguments = ["--model", f"{place}/model", "--engine", f"vllm={url}", *arguments]
        ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        return lines([*ranks, str(EXAMPLES / name), "--address", cluster.address, *arguments])


@contextmanager
def vllm_server(folder: Path) -> Iterator[str]:
    """A stock server of a tiny model; its URL, once it answers."""
    from rdt_core.errors import RdtError
    from rdt_testbed import models
    from rdt_vllm import VllmHttpEngine

    models.save(models.build("qwen3", seed=0), folder / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model"), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "64", "--skip-tokenizer-init",
        "--weight-transfer-config", json.dumps({"backend": "rdt"}),
    ]  # fmt: skip
    with (folder / "server.log").open("w") as log:
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
        server = subprocess.Popen([warm.python(), *command], env=environment, stdout=log, stderr=log)
    until = time.monotonic() + 200
    try:
        while True:
            try:
                VllmHttpEngine(url).health(deadline=time.monotonic() + 5)
                break
            except RdtError:
                if server.poll() is not None or time.monotonic() > until:
                    sys.stderr.write((folder / "server.log").read_text()[-6000:])
                    raise
                time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


if __name__ == "__main__":
    given = sys.argv[1:]
    if given[0] in ("torchrun", "torchrun-vllm"):
        found = under_torchrun(given[1], given[2:], vllm=given[0] == "torchrun-vllm")
    else:
        found = lines([str(EXAMPLES / given[0]), *given[1:]])
    print(json.dumps({"lines": found}), flush=True)
