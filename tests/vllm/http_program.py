"""Run by test_sync.py in a process of its own: two FSDP2 trainer actors feed `vllm serve` over its HTTP routes.

The server is no Ray process; its worker connects to the cluster by the address that comes with the init message. Prints
one JSON object on its last line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from rdt_testbed import models, warm
from rdt_testbed.cluster import local_cluster

# `vllm serve` itself asks for a distribution named vllm, which the CPU build is not; this is the same server
SERVE = ["-m", "vllm.entrypoints.openai.api_server", "--model"]


def sync_program() -> Any:
    spec = importlib.util.spec_from_file_location("sync_program", Path(__file__).with_name("sync_program.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sync_program"] = module
    spec.loader.exec_module(module)
    return module


def main(folder: Path, address: str) -> dict[str, Any]:
    import ray

    from rdt_core.engines import ConnectInfo
    from rdt_core.rendezvous import open_coordinator
    from rdt_vllm import VllmHttpEngine

    program = sync_program()
    models.save(models.build("qwen3", seed=0), folder / "start")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    arguments = [
        str(folder / "start"), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "64", "--max-num-seqs", "4", "--skip-tokenizer-init", "--generation-config", "vllm",
        "--weight-transfer-config", json.dumps({"backend": "rdt"}),
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    environment.pop("RAY_ADDRESS", None)
    log = (folder / "server.log").open("w")
    server = subprocess.Popen([warm.python(), *SERVE, *arguments], env=environment, stdout=log, stderr=log)
    results: dict[str, Any] = {"errors": {}, "syncs": []}
    try:
        trainers = program.make_trainers(folder, "http", {"kind": "qwen3"})
        client = VllmHttpEngine(url, name="http", headers={"X-Test": "1"})
        wait(client, server, folder / "server.log")
        results["version_before"] = client.version(deadline=soon())
        ray.get([trainer.join.remote("http", {}) for trainer in trainers], timeout=120)
        ray.get(trainers[0].attach.remote(client), timeout=120)
        for version, seed in ((1, 11), (2, 12)):
            ray.get([trainer.set.remote(seed) for trainer in trainers])
            report = ray.get([trainer.publish.remote(version) for trainer in trainers], timeout=120)[0]
            results["syncs"].append(
                {
                    "version": version,
                    "said": client.version(deadline=soon()),
                    "bytes": report.bytes,
                    "sums": checksums(url),
                }
            )
        models.save(models.build("qwen3", seed=12), folder / "step")
        post(url, "collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder / "step")}})
        results["equals_loader"] = checksums(url) == results["syncs"][-1]["sums"]
        results["syncs"][-1]["after"] = results["syncs"][-1]["sums"]
        results["differ"] = results["syncs"][0].pop("sums") != results["syncs"][1].pop("sums")

        results["verified"] = [verify(folder / step, url, address) for step in ("step", "start")]
        # the trainer's next publish connects the replica again
        ray.get([trainer.publish.remote(2) for trainer in trainers], timeout=120)
        results["after_verify"] = [client.version(deadline=soon()), checksums(url) == results["syncs"][-1]["after"]]

        client.begin(900, deadline=soon())
        results["errors"]["pull"] = program.raised(lambda: client.pull(900, deadline=soon()))
        results["errors"]["abort"] = program.raised(lambda: client.abort(900, "enough", deadline=soon()))
        VllmHttpEngine(url).begin(901, deadline=soon())  # a driver that goes away
        control = open_coordinator("http", create=False, timeout_s=30.0)
        info = ConnectInfo(
            group="http", replica="http", namespace="rdt", address=address, kinds=("mapped", "prepared"), timeout_s=30.0,
            attempt=control.expect("http"),
        )  # fmt: skip
        results["errors"]["connect"] = program.raised(lambda: client.connect(info, deadline=soon()))
        results["errors"]["no_group"] = program.raised(
            lambda: client.connect(
                ConnectInfo(
                    group="nobody", replica="http", namespace="rdt", address=address, kinds=("mapped",), timeout_s=2.0
                ),
                deadline=soon(),
            )
        )
        client.connect(info, deadline=soon())
        ray.get([trainer.publish.remote(3) for trainer in trainers], timeout=120)
        results["last"] = client.version(deadline=soon())
        client.health(deadline=soon())
        ray.get([trainer.leave.remote() for trainer in trainers])
    except BaseException:
        sys.stderr.write((folder / "server.log").read_text()[-6000:])
        raise
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
        log.close()
    results["errors"]["gone"] = program.raised(lambda: client.health(deadline=soon()))
    return results


def verify(folder: Path, url: str, address: str) -> dict[str, Any]:
    """`rdt verify` of the server and a checkpoint: exit status and the state of each tensor."""
    command = [
        "-m",
        "rdt_core.cli",
        "verify",
        "--checkpoint",
        str(folder),
        "--vllm",
        url,
        "--address",
        address,
        "--json",
    ]
    done = subprocess.run([warm.python(), *command], capture_output=True, text=True, timeout=120, check=False)
    states = {one["name"]: one["state"] for one in json.loads(done.stdout)["tensors"]} if done.stdout else {}
    return {"status": done.returncode, "states": states, "told": done.stderr[-2000:]}


def soon() -> float:
    return time.monotonic() + 60


def wait(client: Any, server: subprocess.Popen[bytes], log: Path) -> None:
    from rdt_core.errors import EngineError

    until = time.monotonic() + 300
    while True:
        try:
            client.health(deadline=time.monotonic() + 5)
            return
        except EngineError:
            if server.poll() is not None or time.monotonic() > until:
                raise
            time.sleep(1)


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def checksums(url: str) -> dict[str, str]:
    return post(url, "weight_checker", {"action": "checksum"})["checksums"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, local_cluster(cpus=4) as cluster:
        result = main(Path(place), cluster.address)
    print(json.dumps(result), flush=True)
