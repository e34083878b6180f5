"""Run by test_server.py in a process of its own: `SGLangServer` over two nodes, killed in the middle, started again.

Two logical nodes of one GPU each. Prints one JSON object on its last line. The oracle is the trainer's model in
transformers.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import serving_trainers as serving
from serving_trainers import GREEDY, PROMPTS, TOKENS, Trainers, logprob_error, raised, soon

from rdt_testbed import models
from rdt_testbed.cluster import NAMESPACE, forget_nixl, workers_environment

LONG = 160
KIND: models.Kind = "qwen3"


class Run:
    def __init__(self, folder: Path, results: dict[str, Any]) -> None:
        import ray

        self.folder, self.results = folder, results
        self.group = ray.util.placement_group([{"GPU": 1}] * 2, strategy="STRICT_SPREAD")
        ray.get(self.group.ready(), timeout=60)
        self.trainers = Trainers(folder, KIND)
        self.version = 0
        self.server: Any = None

    def launch(self, bundles: list[int], tp: int) -> None:
        import ray

        from rdt_sglang import launch

        began = time.monotonic()
        self.server = launch(
            str(self.folder / "start"), placement_group=self.group, bundle_indices=bundles, timeout_s=400, tp_size=tp,
            **serving.ENGINE,
        )  # fmt: skip
        self.results.setdefault("names", []).append(ray.get(self.server.ready.remote(), timeout=420))
        self.results.setdefault("start_s", []).append(time.monotonic() - began)

    def attach(self, name: str, *, steps: bool = False, **options: Any) -> Any:
        from rdt_sglang import SglangRayEngine

        client = SglangRayEngine(self.server, name=name, **options)
        assert client.receive is not None
        if steps:
            client.receive = None
        self.trainers.first("attach", client)
        return client

    def sync(self, client: Any, seed: int) -> None:
        import ray

        self.version += 1
        report = self.trainers.publish(self.version, seed)
        refs = [self.server.generate.remote(prompt, {**GREEDY, "max_new_tokens": TOKENS}) for prompt in PROMPTS]
        samples = [one[0] for one in ray.get(refs, timeout=60)]
        model = self.trainers.model(seed)
        self.results.setdefault("syncs", []).append(
            {
                "version": self.version, "said": client.version(deadline=soon()), "bytes": report.bytes,
                "readers": len(report.readers), "stamped": sorted({one for sample in samples for one in sample.versions}),
                "error": max(
                    logprob_error(model, prompt, sample.token_ids, sample.logprobs)
                    for prompt, sample in zip(PROMPTS, samples, strict=True)
                ),
            }
        )  # fmt: skip

    def in_flight(self, client: Any, seed: int) -> dict[str, Any]:
        """A request that is being generated when a sync comes gets every token, the later ones from the new weights."""
        import ray

        for _ in range(10):
            request = self.server.generate.remote(PROMPTS[0], {**GREEDY, "max_new_tokens": LONG})
            self.version += 1
            self.trainers.publish(self.version, seed)
            paused = not ray.wait([request], timeout=0)[0]
            sample = ray.get(request, timeout=60)[0]
            if len(set(sample.versions)) == 2:
                start = sample.versions.index(str(self.version))
                return {
                    "tokens": len(sample.token_ids), "finish": sample.finish_reason, "switch": start, "live": paused,
                    "error": logprob_error(self.trainers.model(seed), PROMPTS[0], sample.token_ids, sample.logprobs, start),
                    "said": client.version(deadline=soon()) == self.version,
                }  # fmt: skip
            seed += 100
        return {}

    def all(self) -> None:
        import ray

        results = self.results
        self.launch([0, 1], 2)
        results["url"] = ray.get(self.server.url.remote())
        results["files"] = self.files()
        self.trainers.all("join", "group", {"mode": "bucket", "bucket_bytes": 65536, "lookahead": 1})
        retracting = self.attach("retracting")
        results["before"] = retracting.version(deadline=soon())
        self.sync(retracting, 11)
        self.sync(retracting, 12)
        results["retract"] = self.in_flight(retracting, 21)
        began = time.monotonic()
        self.faults(retracting)
        results["faults_s"] = time.monotonic() - began
        self.trainers.first("detach", "retracting")
        freezing = self.attach("freezing", pause="in_place", cache="keep")
        results["in_place"] = self.in_flight(freezing, 22)
        freezing.health(deadline=soon())
        results["imported"] = self.trainers.imported("sglang")
        self.killed()
        self.restart()

    def faults(self, client: Any) -> None:
        """A sync fails before a byte moves, and one half-way; the next one is whole."""
        import ray

        from rdt_core.web import Web

        found = self.results["faults"] = {}
        web = Web(ray.get(self.server.url.remote(), timeout=30))
        web.post("begin_weight_update", {}, deadline=soon())  # SGLang's own: no sync begins beside it
        found["refused"] = self.failing(client, "publish", self.version + 1)
        web.post("end_weight_update", {}, deadline=soon())
        found["half_way"] = self.failing(client, "publish_until", self.version + 1, 2, fail)
        found["generates"] = raised(lambda: ray.get(self.server.generate.remote(PROMPTS[0], GREEDY), timeout=60))
        self.sync(client, 25)

    def failing(self, client: Any, method: str, *arguments: Any) -> dict[str, Any]:
        """Publishes what fails, on the second rank by a method of its own. What it leaves, and what the engine says before it."""
        import ray

        before = client.version(deadline=soon())
        self.trainers.all("set", 24)
        self.version += 1
        first, second = self.trainers.ranks
        refs = [first.publish.remote(self.version), getattr(second, method).remote(*arguments)]
        return {
            "errors": [raised(lambda ref=ref: ray.get(ref, timeout=170)) for ref in refs], "before": before,
            "said": client.version(deadline=soon()), "status": client.status(deadline=soon()),
            "stamp": ray.get(self.server.get_weight_version.remote(), timeout=30), "version": self.version,
        }  # fmt: skip

    def killed(self) -> None:
        """The scheduler of rank 1 is killed when it has some of a sync's bytes."""
        import ray
        from ray._private.state import actors

        mark = self.folder / "mark"
        victim = actors(ray.get(self.server.actors.remote(), timeout=30)[1]._actor_id.hex())["Pid"]
        waiting = self.server.generate.remote(PROMPTS[0], {**GREEDY, "max_new_tokens": 500})
        self.trainers.all("set", 31)
        publishes = [
            self.trainers.ranks[0].publish_until.remote(self.version + 1, 3, functools.partial(wait_here, mark)),
            self.trainers.ranks[1].publish.remote(self.version + 1),
        ]  # fmt: skip
        until = time.monotonic() + 60
        while not mark.exists():
            assert time.monotonic() < until, "the sync did not get under way"
            time.sleep(0.05)
        psutil.Process(victim).kill()
        began = time.monotonic()
        time.sleep(0.5)
        mark.unlink()
        self.results["killed"] = [raised(lambda ref=ref: ray.get(ref, timeout=170)) for ref in publishes]
        self.results["killed_after_s"] = time.monotonic() - began
        self.results["waiting"] = raised(lambda: ray.get(waiting, timeout=30))
        self.results["alive"] = ray.get(self.server.is_alive.remote(), timeout=30)
        self.results["reason"] = raised(lambda: ray.get(self.server.ready.remote(), timeout=30))

    def restart(self) -> None:
        from rdt_sglang.server import end

        end(self.server)
        self.results["left_by_crash"] = [one for one in self.results["files"] if Path(one).exists()]
        self.trainers.first("detach", "freezing")
        self.launch([1], 1)
        self.results["files"] += self.files()
        client = self.attach("again", steps=True)
        self.results["before_again"] = client.version(deadline=soon())
        self.version += 1
        self.sync(client, 41)
        self.trainers.all("leave")
        end(self.server)
        end(self.server)  # twice is no error
        self.results["left"] = [one for one in self.results["files"] if Path(one).exists()]

    def files(self) -> list[str]:
        """Shared memory and sockets of SGLang that the schedulers use now."""
        import ray
        from ray._private.state import actors

        found = set()
        for handle in ray.get(self.server.actors.remote(), timeout=30):
            process = psutil.Process(actors(handle._actor_id.hex())["Pid"])
            found |= {one.path for one in process.memory_maps() if one.path.startswith("/dev/shm/sgl")}
            found |= {one.path for one in process.open_files() if one.path.startswith("/dev/shm/sgl")}
        return sorted(found)


def fail() -> None:
    time.sleep(1.0)  # the readers have some of the bytes by then
    raise RuntimeError("the trainer ran into something")


def wait_here(mark: Path) -> None:
    """Makes a file and returns once it is gone."""
    mark.touch()
    until = time.monotonic() + 30
    while mark.exists() and time.monotonic() < until:
        time.sleep(0.05)


def main() -> dict[str, Any]:
    import ray
    from ray.cluster_utils import Cluster

    results: dict[str, Any] = {}
    nodes = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 3,
            "num_gpus": 1,
            "include_dashboard": False,
            "object_store_memory": 128 << 20,
        },
    )
    try:
        nodes.add_node(num_cpus=1, num_gpus=1, object_store_memory=128 << 20)
        ray.init(
            address=nodes.address, namespace=NAMESPACE, log_to_driver=bool(os.environ.get("RDT_TEST_LOGS")),
            runtime_env=workers_environment(),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            models.save(models.build(KIND, seed=0, max_position_embeddings=512), folder / "start")
            Run(folder, results).all()
    finally:
        ray.shutdown()
        forget_nixl()
        nodes.shutdown()
    return results


if __name__ == "__main__":
    found = main()
    print(json.dumps(found), flush=True)
