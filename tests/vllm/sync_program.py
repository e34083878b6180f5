"""Run by test_sync.py in a process of its own: two FSDP2 trainer actors feed one stock vLLM engine.

Prints one JSON object on its last line. The oracle for parameters is vLLM's own loader in the same engine; the oracle for
what the engine computes is the trainer's model in transformers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rdt_testbed import models, processes
from rdt_testbed.cluster import local_cluster
from rdt_testbed.trainers import WORLD, Trainer

PROMPTS = [[3, 4, 5, 6], [10, 11, 200, 57, 9]]
LONG = [(7 * index) % 250 + 3 for index in range(40)]  # more than one block of the prefix cache
BLOCK = 32
TOKENS = 6
LIMIT = 128


def die() -> None:
    """Ends this process in the middle of a sync: the reader has some of the bytes by then."""
    time.sleep(1.0)
    os._exit(1)


def make_trainers(folder: Path, name: str, settings: dict[str, Any]) -> list[Any]:
    import ray

    actor = ray.remote(Trainer).options(num_cpus=0)
    return [
        actor.remote(rank, str(folder / f"rendezvous-{name}"), settings["kind"], settings.get("changes", {}))
        for rank in range(WORLD)
    ]


def main(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    import ray

    from rdt_vllm import launch

    models.save(models.build(settings["kind"], seed=0, **settings.get("changes", {})), folder / "start")
    began = time.time()
    trainers = make_trainers(folder, "first", settings)
    server = launch(
        str(folder / "start"),
        env=settings.get("env", {}),
        dtype=settings.get("dtype", "float32"), enforce_eager=True, max_model_len=LIMIT, skip_tokenizer_init=True,
        max_num_seqs=4, enable_prefix_caching=True, block_size=BLOCK, **settings.get("engine", {}),
    )  # fmt: skip
    results: dict[str, Any] = {"engine": ray.get(server.ready.remote(), timeout=300), "errors": {}, "syncs": []}
    results["start_s"] = time.time() - began
    try:
        Run(settings, folder, trainers, server, results).all()
    finally:
        ray.get(server.shutdown.remote(), timeout=60)
    return results


class Run:
    """One engine and what is done to it, in the order of `all`."""

    def __init__(
        self, settings: dict[str, Any], folder: Path, trainers: list[Any], server: Any, results: dict[str, Any]
    ) -> None:
        self.settings, self.folder, self.trainers, self.server, self.results = (
            settings,
            folder,
            trainers,
            server,
            results,
        )
        self.version = 0
        self.groups = 0
        self.client: Any = None

    def all(self) -> None:
        import ray

        if self.settings.get("conformance"):
            self.conformance()
        groups = self.settings.get("groups", [{}])
        for group in groups:
            self.join(self.trainers, group.get("cache", "reset"), group.get("options", {}))
            for seed in (11, 12):
                self.sync(seed + 10 * self.groups)
            self.against_loader(12 + 10 * self.groups, again=group is groups[0])
            if group is groups[0]:
                self.verify(12 + 10 * self.groups)
            if group is not groups[-1]:
                ray.get([trainer.leave.remote() for trainer in self.trainers])
        if self.settings.get("in_flight"):
            self.in_flight()
        if self.settings.get("failures"):
            failures(self)
        if self.settings.get("faults"):
            self.trainer_dies()
            self.worker_dies()
        else:
            ray.get([trainer.leave.remote() for trainer in self.trainers])

    def conformance(self) -> None:
        """The client keeps its protocol, with a checkpoint on disk as the trainer."""
        from rdt_core import CheckpointSource, WeightSync
        from rdt_core.testing import check_engine_client
        from rdt_vllm import VllmRayEngine

        source = CheckpointSource(self.folder / "start", dtype=getattr(torch, self.settings.get("dtype", "float32")))
        began = time.time()
        sync = WeightSync.join("conformance", source=source, rank=0, world_size=1, mode="bucket")
        check_engine_client(VllmRayEngine(self.server, name="checked"), sync, sync.publish)
        sync.leave()
        self.results["conforms"] = time.time() - began

    def join(self, trainers: list[Any], cache: str, options: dict[str, Any]) -> None:
        import ray

        from rdt_vllm import VllmRayEngine

        self.trainers = trainers
        self.groups += 1
        self.client = VllmRayEngine(self.server, name=f"engine{self.groups}", cache=cache)
        modes = ray.get([trainer.join.remote(f"group{self.groups}", options) for trainer in trainers], timeout=120)
        self.results.setdefault("modes", []).append(modes[0])
        ray.get(trainers[0].attach.remote(self.client), timeout=120)

    def sync(self, seed: int) -> None:
        import ray

        self.version += 1
        ray.get([trainer.set.remote(seed) for trainer in self.trainers])
        began = time.time()
        report = ray.get([trainer.publish.remote(self.version) for trainer in self.trainers], timeout=180)[0]
        found = {
            "group": self.groups, "version": self.version, "seconds": time.time() - began, "bytes": report.bytes,
            "mode": report.mode, "verify": report.verify,
            "kinds": sorted({link.kind for link in report.links}), "phases": report.phases,
            "said": self.client.version(deadline=time.monotonic() + 10), "cache": self.client.cache,
        }  # fmt: skip
        if self.settings.get("generate", True):
            found |= compare(self.server, self.model(seed), self.settings.get("dtype", "float32"))
        self.results["syncs"].append(found)

    def model(self, seed: int) -> Any:
        return models.build(self.settings["kind"], seed=seed, **self.settings.get("changes", {}))

    def against_loader(self, seed: int, *, again: bool) -> None:
        """vLLM's own loader changes nothing with a checkpoint of that step, and nor does a sync of it `again`."""
        import ray

        before = self.checksums()
        if again:
            self.sync(seed)
            self.results["unchanged"] = self.checksums() == before
        models.save(self.model(seed), self.folder / f"step{seed}")
        weights = {"weights_path": str(self.folder / f"step{seed}")}
        ray.get(self.server.collective_rpc.remote("reload_weights", kwargs=weights), timeout=120)
        self.results.setdefault("equals_loader", []).append(self.checksums() == before)
        self.results["names"] = sorted(before)

    def verify(self, seed: int) -> None:
        """Digests against vLLM's loader and checksums: equal where it put that step, else different; nothing is written."""
        import ray

        before = self.checksums()
        found = [self.verified()]
        ray.get([trainer.set.remote(seed + 1000) for trainer in self.trainers])
        found.append(self.verified())
        ray.get([trainer.set.remote(seed) for trainer in self.trainers])
        models.save(self.model(seed + 1000), self.folder / "other")
        weights = {"weights_path": str(self.folder / "other")}
        ray.get(self.server.collective_rpc.remote("reload_weights", kwargs=weights), timeout=120)
        others = self.checksums()
        found.append(self.verified())
        same = [name for name in before if before[name] == others[name]]
        self.results["verified"] = {"found": found, "same": same}
        weights = {"weights_path": str(self.folder / f"step{seed}")}
        ray.get(self.server.collective_rpc.remote("reload_weights", kwargs=weights), timeout=120)
        self.results["verified"]["written"] = self.checksums() != before

    def verified(self) -> dict[str, str]:
        import ray

        report = ray.get([trainer.verify.remote() for trainer in self.trainers], timeout=60)[0]
        return {tensor.name: tensor.state for tensor in report.tensors}

    def checksums(self) -> dict[str, str]:
        import ray

        return ray.get(self.server.compute_weight_checksums.remote(), timeout=60)

    def in_flight(self) -> None:
        """A request that is being generated when a sync comes goes on and gets every token, of two versions."""
        import ray

        sampling = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}
        for attempt in range(20):
            request = self.server.generate.remote(PROMPTS[0], sampling)
            self.version += 1
            ray.get([trainer.publish.remote(self.version) for trainer in self.trainers], timeout=60)
            sample = ray.get(request, timeout=60)[0]
            if len(set(sample.versions)) == 2:
                self.results["in_flight"] = {
                    "attempts": attempt + 1, "tokens": len(sample.token_ids), "finish": sample.finish_reason,
                    "versions": sorted(set(sample.versions), key=int), "published": self.version,
                }  # fmt: skip
                return
        self.results["in_flight"] = {"attempts": 20}

    def trainer_dies(self) -> None:
        """In the middle of a sync; then another group of trainers heals the replica."""
        import ray

        ray.get([trainer.leave.remote() for trainer in self.trainers])
        doomed = make_trainers(self.folder, "doomed", self.settings)
        options = {"mode": "bucket", "bucket_bytes": 65536, "lookahead": 0, "timeout_s": 10.0}
        self.join(doomed, "reset", options)
        self.sync(41)
        before = self.checksums()
        ray.get([trainer.set.remote(42) for trainer in doomed])
        began = time.time()
        first, second = (
            doomed[0].publish.remote(self.version + 1),
            doomed[1].publish_until.remote(self.version + 1, 3, die),
        )
        self.results["errors"]["trainer_died"] = raised(lambda: ray.get(first, timeout=100))
        self.results["trainer_died_after_s"] = time.time() - began
        self.results["errors"]["dead_trainer"] = raised(lambda: ray.get(second, timeout=100))
        self.results["half_written"] = self.checksums() != before
        self.results["version_after_death"] = [self.version, self.client.version(deadline=time.monotonic() + 10)]
        self.results["paused_after_death"] = ray.get(self.server.is_paused.remote())
        ray.kill(doomed[0])
        self.version += 1
        self.join(make_trainers(self.folder, "healers", self.settings), "reset", {})
        self.sync(43)

    def worker_dies(self) -> None:
        """The process of the last engine rank is killed; the next sync fails within its deadline on every trainer."""
        import ray

        titles = {}
        for process in processes.descendants():
            title = " ".join(process.cmdline()).strip()
            if title.startswith(("VLLM::Worker", "VLLM::EngineCore")):
                titles[title] = process
        self.results["victim"], victim = max(titles.items())  # the last worker, or the core that is its only one
        victim.kill()
        began = time.time()
        self.version += 1
        publishes = [trainer.publish.remote(self.version) for trainer in self.trainers]
        self.results["errors"]["worker_died"] = [raised(lambda ref=ref: ray.get(ref, timeout=170)) for ref in publishes]
        self.results["worker_died_after_s"] = time.time() - began


def raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        cause = getattr(error, "cause", None) or error
        return f"{type(cause).__name__}: {cause}"
    return "nothing"


def failures(run: Run) -> None:
    """Everything that can go wrong in the order of calls; after each of them a whole sync must work again."""
    import ray

    from rdt_core.engines import ConnectInfo
    from rdt_core.rendezvous import open_coordinator
    from rdt_vllm import VllmRayEngine

    client, results, sync, server = run.client, run.results, run.sync, run.server

    def soon() -> float:
        return time.monotonic() + 60

    def leave(one: Any) -> None:
        """As a driver leaves the engine after a sync."""
        said = ray.get(server.get_weight_version.remote(), timeout=60)
        one._restamp(said, said, soon())
        one._before = said

    errors = results["errors"]
    client.begin(900, deadline=soon())
    errors["pull"] = raised(lambda: client.pull(900, deadline=soon()))
    errors["pull_abort"] = raised(lambda: client.abort(900, "the trainer gave up", deadline=soon()))
    sync(31)

    client.begin(901, deadline=soon())
    errors["finish"] = raised(lambda: client.finish(901, deadline=soon()))
    errors["finish_abort"] = raised(lambda: client.abort(901, "nothing was pulled", deadline=soon()))
    results["version_after_finish"] = client.version(deadline=soon())
    sync(32)

    client.begin(902, deadline=soon())
    errors["all_abort"] = raised(lambda: client.abort(902, "another replica failed", deadline=soon()))
    sync(33)

    # a sync for which the engine paused, and which could not begin
    leave(client)
    errors["ahead_sent"] = str(client.ahead.send())
    until = soon()
    while not ray.get(server.is_paused.remote(), timeout=60):
        assert time.monotonic() < until, "it never paused"
    errors["ahead_taken_back"] = str(client.ahead.take_back(deadline=soon()))
    results["ahead"] = {
        "version": run.version, **compare(server, run.model(33), run.settings.get("dtype", "float32"))
    }  # fmt: skip

    # drivers that die in the middle, and one that comes after them
    control = open_coordinator(f"group{run.groups}", create=False, timeout_s=30.0)

    def connect(one: Any) -> None:
        info = ConnectInfo(
            group=f"group{run.groups}",
            replica=client.name,
            namespace="rdt",
            address="",
            kinds=("mapped", "prepared", "ray"),
            timeout_s=30.0,
            attempt=control.expect(client.name),
        )
        one.connect(info, deadline=soon())

    for name, leave_open in {
        "ahead": lambda lost: (leave(lost), lost.ahead.send()),
        "open": lambda lost: lost.begin(903, deadline=soon()),
        "pull": lambda lost: (lost.begin(904, deadline=soon()), raised(lambda: lost.pull(904, deadline=soon()))),
        "finish": lambda lost: (lost.begin(905, deadline=soon()), raised(lambda: lost.finish(905, deadline=soon()))),
    }.items():
        leave_open(VllmRayEngine(server, name=client.name))
        errors[f"lost_{name}"] = raised(lambda: connect(VllmRayEngine(server, name=client.name)))
        sync(34)

    errors["bad_update"] = raised(lambda: ray.get(server.start_weight_update.remote())) + raised(
        lambda: client._update({"vers": 3}, soon())
    )
    errors["bad_abort"] = raised(lambda: client._end(False, "bad", soon()))
    sync(35)


def compare(server: Any, model: Any, dtype: str) -> dict[str, Any]:
    """The engine's own samples against the trainer's recomputation."""
    import ray

    model = model.to(getattr(torch, dtype)).eval()
    sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    prompts = [*PROMPTS, LONG]
    samples = ray.get([server.generate.remote(prompt, sampling) for prompt in prompts], timeout=60)
    errors, stamped = [], set()
    for prompt, (sample,) in zip(prompts, samples, strict=True):
        ids = [*prompt, *sample.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        theirs = [float(logits[len(prompt) + index - 1, token]) for index, token in enumerate(sample.token_ids)]
        errors.append(max(abs(a - b) for a, b in zip(sample.logprobs, theirs, strict=True)))
        stamped |= set(sample.versions)
    return {
        "max_abs_logprob_error": max(errors[:-1]), "long_prompt_error": errors[-1], "stamped": sorted(stamped),
    }  # fmt: skip


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as place, local_cluster(gpus=given.get("gpus", 0), cpus=4):
        result = main(given, Path(place))
    print(json.dumps(result), flush=True)
