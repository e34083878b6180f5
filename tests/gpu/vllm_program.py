"""A trainer and a stock vLLM worker on one GPU, through backend `rdt`: exactness, addresses, times. Run as a program.

`python vllm_program.py CONFIG_DIR --rounds 3` prints one line of JSON with what it saw; CONFIG_DIR holds a model's
config.json, weights are random. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator

import ray
import torch
from modeltrainer import ModelTrainer


class Probe:
    """Worker extension: where every parameter and buffer of the serving model lies."""

    def addresses(self) -> dict[str, int]:
        model = self.model_runner.get_model()
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return {name: tensor.data_ptr() for name, tensor in named}


class Trainer(ModelTrainer):
    """One source rank that publishes what it trains."""

    def join(self, mode: str, kinds: tuple[str, ...], verify: str, outcomes: str = "") -> str:
        from rdt_core.outcomes import JsonLines
        from rdt_core.sources import ModuleSource
        from rdt_core.sync import WeightSync

        self.sync = WeightSync.join(
            f"gpu-{mode}-{kinds[0]}-{verify}",
            source=ModuleSource(self.model),
            rank=0,
            world_size=1,
            mode=mode,
            kinds=kinds,
            verify=verify,
            timeout_s=120,
            observers=[JsonLines(outcomes)] if outcomes else None,
        )
        return self.sync.mode

    def attach(self, handle) -> float:
        from rdt_vllm.clients import VllmRayEngine

        started = time.perf_counter()
        self.sync.attach(VllmRayEngine([handle], name="vllm"))
        return time.perf_counter() - started

    def publish(self, version: int):
        torch.cuda.synchronize()
        started = time.perf_counter()
        report = self.sync.publish(version)
        return time.perf_counter() - started, report

    def leave(self) -> None:
        self.sync.leave()

    def copy_seconds(self) -> float:
        """One device copy of all parameters."""
        parameters = [parameter.data for parameter in self.model.parameters()]
        copies = [torch.empty_like(parameter) for parameter in parameters]
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            torch._foreach_copy_(copies, parameters)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        del copies
        torch.cuda.empty_cache()
        return statistics.median(seconds[1:])

    def checksums(self) -> dict[str, str]:
        """What vLLM's own checksums must be: SHA-256 of its fused parameters, made from this model."""
        return {name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in self._fused()}

    def _fused(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = {name: parameter.data for name, parameter in self.model.named_parameters()}
        for name, tensor in own.items():
            if name.endswith("q_proj.weight"):
                parts = [own[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
                yield name.replace("q_proj", "qkv_proj"), torch.cat(parts)
            elif name.endswith("mlp.gate_proj.weight"):
                yield (
                    name.replace("gate_proj", "gate_up_proj"),
                    torch.cat([tensor, own[name.replace("gate_proj", "up_proj")]]),
                )
            elif name.endswith("experts.gate_up_proj"):
                yield name.replace("gate_up_proj", "routed_experts.w13_weight"), tensor
            elif name.endswith("experts.down_proj"):
                yield name.replace("down_proj", "routed_experts.w2_weight"), tensor
            elif not name.endswith(("k_proj.weight", "v_proj.weight", "mlp.up_proj.weight")):
                yield name, tensor


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy()


def compare(trainer, server) -> list[str]:
    mine = ray.get(trainer.checksums.remote())
    theirs = {
        name.rpartition(":")[2]: digest for name, digest in ray.get(server.compute_weight_checksums.remote()).items()
    }
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))


def compare_with_reload(trainer, server, folder: str) -> list[str]:
    """What vLLM's own reload of a checkpoint of the same weights changes: nothing where a sync did all that it does."""
    ray.get(trainer.save.remote(folder))
    synced = ray.get(server.compute_weight_checksums.remote())
    ray.get(server.collective_rpc.remote("reload_weights", (), {"weights_path": folder}))
    loaded = ray.get(server.compute_weight_checksums.remote())
    shutil.rmtree(folder, ignore_errors=True)
    return sorted(name for name in synced.keys() | loaded.keys() if synced.get(name) != loaded.get(name))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--util", type=float, default=0.3)
    parser.add_argument("--cells", default="live:mapped", help="mode:kind, comma-separated")
    parser.add_argument("--quantization", default="", help="vLLM's own, e.g. fp8: compared with its reload from disk")
    parser.add_argument("--every", action="store_true", help="compare checksums after every sync, not only the last")
    parser.add_argument("--never", action="store_true", help="compare nothing: times only, and exit status 1")
    parser.add_argument("--outcomes", default="", help="file for what became of every sync, for `rdt trace`")
    parser.add_argument("--scratch", default="/dev/shm/rdt-checkpoints", help="folder for checkpoints")
    arguments = parser.parse_args()
    from rdt_vllm.server import launch

    env = {
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    ray.init(num_cpus=16, num_gpus=1, include_dashboard=False, namespace="rdt", runtime_env={"env_vars": env})
    result: dict = {"model": os.path.basename(arguments.config), "cells": []}
    try:
        started = time.perf_counter()
        trainer = ray.remote(Trainer).options(num_cpus=1, enable_tensor_transport=True).remote(arguments.config)
        folder, form = arguments.config, "dummy"
        if arguments.quantization:  # vLLM reloads from disk only what it loaded from disk
            folder, form = f"{arguments.scratch}/0", "auto"
            ray.get(trainer.save.remote(folder))
        server = launch(
            folder, load_format=form, dtype="bfloat16", enforce_eager=True, max_model_len=128,
            skip_tokenizer_init=True, gpu_memory_utilization=arguments.util, max_num_seqs=8, seed=0,
            worker_extension_cls="vllm_program.Probe",
            **({"quantization": arguments.quantization} if arguments.quantization else {}),
        )  # fmt: skip
        result["engine"] = ray.get(server.ready.remote())
        result["start_s"] = round(time.perf_counter() - started, 1)
        result["device_copy_ms"] = round(1e3 * ray.get(trainer.copy_seconds.remote()), 2)
        addresses = ray.get(server.collective_rpc.remote("addresses"))
        version = 0
        for cell in arguments.cells.split(","):
            mode, kind, *rest = cell.split(":")
            verify = rest[0] if rest else "off"
            entry: dict = {"mode": mode, "kind": kind, "verify": verify}
            result["cells"].append(entry)
            ray.get(trainer.join.remote(mode, (kind,), verify, arguments.outcomes))
            entry["attach_s"] = round(ray.get(trainer.attach.remote(server)), 2)
            seconds, differing = [], []
            for number in range(arguments.rounds):
                version += 1
                ray.get(trainer.reroll.remote(version))
                if version == 1 and not arguments.never:
                    before = ray.get(server.compute_weight_checksums.remote())
                    result["differing_before"] = (
                        len(before) if arguments.quantization else len(compare(trainer, server))
                    )
                spent, report = ray.get(trainer.publish.remote(version))
                seconds.append(spent)
                if (arguments.every or number + 1 == arguments.rounds) and not arguments.never:
                    if arguments.quantization:
                        differing.append(compare_with_reload(trainer, server, f"{arguments.scratch}/{version}"))
                        if version == 1:
                            now = ray.get(server.compute_weight_checksums.remote())
                            result["differing_before"] = sum(before[name] != digest for name, digest in now.items())
                    else:
                        differing.append(compare(trainer, server))
            entry["ms"] = [round(1e3 * value, 1) for value in seconds]
            entry["p50_ms"] = round(1e3 * statistics.median(seconds[1:] or seconds), 1)
            entry["bytes"] = report.bytes
            entry["phases_ms"] = {name: round(1e3 * value, 2) for name, value in report.phases.items()}
            entry["reader_ms"] = {name: round(1e3 * value, 2) for name, value in report.readers[0].phases.items()}
            entry["links"] = [link.kind for link in report.links]
            entry["differing"] = [names[:3] for names in differing if names]
            entry["compared"] = len(differing)
            ray.get(trainer.leave.remote())
        result["addresses_changed"] = ray.get(server.collective_rpc.remote("addresses")) != addresses
        ray.get(server.shutdown.remote())
    finally:
        shutil.rmtree(arguments.scratch, ignore_errors=True)
        print("RESULT " + json.dumps(result), flush=True)
        ray.shutdown()
    exact = result["cells"] and all(cell.get("compared") and not cell["differing"] for cell in result["cells"])
    return 0 if exact and not result["addresses_changed"] and result["differing_before"] else 1


if __name__ == "__main__":
    sys.exit(main())
