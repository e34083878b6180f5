"""Run by test_both.py in a process of its own: one FSDP2 trainer feeds a stock vLLM and a stock SGLang at the same time.

The SGLang replica, of another tensor-parallel size, joins while the vLLM one serves. Prints one JSON object on its last
line. The oracle is the trainer's model in transformers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import serving_trainers as serving
from serving_trainers import GREEDY, PROMPTS, TOKENS, Trainers, logprob_error, soon

from rdt_testbed import models
from rdt_testbed.cluster import local_cluster
from rdt_testbed.programs import VLLM_ENVIRONMENT

KIND: models.Kind = "qwen3"
FLIGHT = 300


def start_vllm(folder: Path) -> Any:
    from rdt_vllm import launch

    return launch(
        str(folder), options={"runtime_env": {"env_vars": VLLM_ENVIRONMENT}}, dtype="float32", enforce_eager=True,
        max_model_len=512, skip_tokenizer_init=True, max_num_seqs=4,
    )  # fmt: skip


def start_sglang(folder: Path) -> Any:
    import ray

    from rdt_sglang import launch

    group = ray.util.placement_group([{"GPU": 1}] * 2)
    ray.get(group.ready(), timeout=60)
    return launch(str(folder), placement_group=group, bundle_indices=[0, 1], timeout_s=300, tp_size=2, **serving.ENGINE)


class Run:
    def __init__(self, folder: Path, results: dict[str, Any]) -> None:
        self.results = results
        self.trainers = Trainers(folder, KIND)
        self.servers: dict[str, Any] = {}
        self.clients: dict[str, Any] = {}

    def attach(self, name: str, client: Any) -> None:
        self.clients[name] = client
        self.trainers.first("attach", client)

    def sample(self, name: str, tokens: int = TOKENS) -> list[Any]:
        """References to greedy samples of `PROMPTS`."""
        limit = "max_tokens" if name == "vllm" else "max_new_tokens"
        return [self.servers[name].generate.remote(prompt, {**GREEDY, limit: tokens}) for prompt in PROMPTS]

    def sync(self, version: int, seed: int, *, late: bool = False) -> None:
        import ray

        report = self.trainers.all("catch_up")[0] if late else self.trainers.publish(version, seed)
        model = self.trainers.model(seed)
        for name in self.servers:
            if name not in self.clients:
                continue
            samples = [one[0] for one in ray.get(self.sample(name), timeout=60)]
            errors = [
                logprob_error(model, prompt, sample.token_ids, sample.logprobs)
                for prompt, sample in zip(PROMPTS, samples, strict=True)
            ]
            self.results["syncs"].append(
                {
                    "engine": name, "version": version, "said": self.clients[name].version(deadline=soon()),
                    "stamped": sorted({one for sample in samples for one in sample.versions}), "error": max(errors),
                    "readers": sorted(reader.reader for reader in report.readers), "tokens": [list(s.token_ids) for s in samples],
                }
            )  # fmt: skip

    def all(self, folder: Path) -> None:
        import ray

        from rdt_sglang import SglangRayEngine
        from rdt_vllm import VllmRayEngine

        self.servers["vllm"] = start_vllm(folder)
        self.results["names"] = [ray.get(self.servers["vllm"].ready.remote(), timeout=300)]
        self.servers["sglang"] = start_sglang(folder)
        self.results["names"].append(ray.get(self.servers["sglang"].ready.remote(), timeout=320))
        self.trainers.all("join", "both", {})
        self.attach("vllm", VllmRayEngine(self.servers["vllm"], name="vllm"))
        self.sync(1, 11)
        # another engine, with two ranks, joins while the first one generates; it is paused until it has the version
        flight = self.sample("vllm", FLIGHT)
        self.attach("sglang", SglangRayEngine(self.servers["sglang"], name="sglang"))
        self.results["serving"] = [len(one[0].token_ids) for one in ray.get(flight, timeout=120)]
        self.results["newcomer"] = self.clients["sglang"].version(deadline=soon())
        self.sync(1, 11, late=True)  # for the newcomer alone
        self.sync(2, 12)
        self.sync(3, 13)
        self.trainers.all("leave")
        self.results["imported"] = self.trainers.imported("sglang")

    def end(self) -> None:
        import ray

        from rdt_sglang.server import end

        if "sglang" in self.servers:
            end(self.servers["sglang"])
        if "vllm" in self.servers:
            ray.get(self.servers["vllm"].shutdown.remote(), timeout=60)


def main() -> dict[str, Any]:
    results: dict[str, Any] = {"syncs": []}
    with tempfile.TemporaryDirectory() as place, local_cluster(gpus=2, cpus=4):
        folder = Path(place)
        models.save(models.build(KIND, seed=0, max_position_embeddings=512), folder / "start")
        run = Run(folder, results)
        try:
            run.all(folder / "start")
        finally:
            run.end()
    return results


if __name__ == "__main__":
    found = main()
    print(json.dumps(found), flush=True)
