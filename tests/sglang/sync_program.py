"""Run by test_sync.py in a process of its own: two FSDP2 ranks feed one stock SGLang engine of this process.

Source rank 0 lives here, beside the engine object that its client drives; rank 1 is an actor. Prints one JSON object on its
last line. The oracle is SGLang's own `update_weights_from_disk` of the checkpoint of the same step.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sgl_engines as engines

from rdt_testbed import models
from rdt_testbed.cluster import local_cluster
from rdt_testbed.trainers import Trainer

LONG = 300  # tokens of a request that is still running when a sync comes


def fail() -> None:
    time.sleep(1.0)  # the readers have some of the bytes by then
    raise RuntimeError("the trainer ran into something")


class Run:
    """One engine and what is done to it."""

    def __init__(self, settings: dict[str, Any], folder: Path, engine: Any, results: dict[str, Any]) -> None:
        import ray

        self.settings, self.folder, self.engine, self.results = settings, folder, engine, results
        self.kind, self.changes = settings["kind"], settings.get("changes", {})
        self.plain = settings.get("plain", False)
        self.actors = [] if self.plain else engines.actors_of(engine)
        rendezvous = str(folder / "rendezvous")
        self.second = ray.remote(Trainer).options(num_cpus=0).remote(
            1, rendezvous, self.kind, self.changes
        )  # fmt: skip
        self.first = Trainer(0, rendezvous, self.kind, self.changes)
        self.version, self.groups = 0, 0
        self.client: Any = None

    def both(self, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Calls a method on both source ranks at the same time; what they raise is returned."""
        import ray

        ref = getattr(self.second, method).remote(*arguments)
        try:
            mine = getattr(self.first, method)(*arguments)
        except Exception as error:
            mine = error
        try:
            return mine, ray.get(ref, timeout=120)
        except Exception as error:
            return mine, error

    def all(self) -> None:
        self.generate()  # some names appear with the first forward pass
        if self.settings.get("conformance"):
            self.conformance()
        for group in self.settings.get("groups", [{}]):
            self.join(group)
            for seed in range(group.get("syncs", 2)):
                self.sync(seed + 10 * self.groups)
            self.against_disk(seed + 10 * self.groups, other=self.groups == 1)
            if self.groups == 1:
                self.verify(seed + 10 * self.groups)
            if group.get("torn"):
                self.torn()
            self.both("leave")

    def conformance(self) -> None:
        """The client keeps its protocol, with a checkpoint on disk as the trainer."""
        from rdt_core import CheckpointSource, WeightSync
        from rdt_core.testing import check_engine_client
        from rdt_sglang import SglangRayEngine

        source = CheckpointSource(self.folder / "start")
        began = time.time()
        sync = WeightSync.join("conformance", source=source, rank=0, world_size=1, mode="bucket")
        check_engine_client(SglangRayEngine(self.engine, name="checked"), sync, sync.publish)
        sync.leave()
        self.results["conforms"] = time.time() - began

    def join(self, group: dict[str, Any]) -> None:
        from rdt_sglang import SglangRayEngine

        self.groups += 1
        self.client = SglangRayEngine(self.engine, name=f"engine{self.groups}", **group.get("client", {}))
        modes = self.both("join", f"group{self.groups}", {"timeout_s": 150.0, **group.get("options", {})})
        self.results.setdefault("modes", []).append(raise_errors(modes)[0])
        self.first.sync.attach(self.client)
        self.results.setdefault("status", []).append(self.status())

    def status(self) -> list[dict[str, Any]]:
        return self.client.status(deadline=time.monotonic() + 20)

    def sync(self, seed: int) -> None:
        self.version += 1
        raise_errors(self.both("set", seed))
        before = self.fingerprints()
        began = time.time()
        report = raise_errors(self.both("publish", self.version))[0]
        self.results.setdefault("syncs", []).append(
            {
                "group": self.groups, "version": self.version, "seconds": time.time() - began, "bytes": report.bytes,
                "mode": report.mode, "verify": report.verify,
                "kinds": sorted({link.kind for link in report.links}), "phases": report.phases,
                "said": self.client.version(deadline=time.monotonic() + 10), "changed": self.fingerprints() != before,
                "status": [[one["version"], one["torn"], one["paused"], one["phase"]] for one in self.status()],
            }
        )  # fmt: skip

    def against_disk(self, seed: int, *, other: bool = False) -> None:
        """SGLang's own loader with a checkpoint of the same step changes nothing; an `other` step's does."""
        pulled = self.fingerprints(), self.generate()
        if other:
            self.disk(seed + 1000)
            different = self.fingerprints(), self.generate()
            self.results["other_differs"] = [one != two for one, two in zip(pulled, different, strict=True)]
        self.disk(seed)
        disk = self.fingerprints(), self.generate()
        self.results.setdefault("equals_disk", []).append(pulled[0] == disk[0])
        self.results.setdefault("differ", []).append(
            [
                sorted({*one, *two} - {name for name in one if one[name] == two.get(name)})
                for one, two in zip(pulled[0], disk[0], strict=True)
            ]
        )
        self.results.setdefault("generates_equal", []).append(pulled[1] == disk[1])
        self.results["names"] = sorted(disk[0][0])

    def verify(self, seed: int) -> None:
        """Digests against SGLang's own loader: equal to that step's, and different from another one's; nothing is written."""
        before = self.fingerprints()
        found = [self.verified()]
        self.disk(seed + 1000)
        found.append(self.verified())
        self.disk(seed)
        found.append(self.verified())
        self.results["verified"] = {"found": found, "written": self.fingerprints() != before}

    def verified(self) -> dict[str, str]:
        report = raise_errors(self.both("verify"))[0]
        return {tensor.name: tensor.state for tensor in report.tensors}

    def generate(self) -> Any:
        if self.settings.get("generate", True):
            return engines.generate(self.engine)
        return object()  # SGLang cannot run this layout on a CPU; equal to nothing else

    def disk(self, seed: int) -> None:
        folder = self.folder / f"step{seed}"
        if not folder.exists():
            models.save(models.build(self.kind, seed=seed, **self.changes), folder)
        engines.load_from_disk(self.engine, folder)

    def fingerprints(self) -> list[dict[str, str]]:
        if not self.plain:
            return engines.probe(self.actors, engines.fingerprints)
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        manager = self.engine.tokenizer_manager
        answer = engines.ask(self.engine, manager.check_weights(CheckWeightsReqInput(action="checksum")))
        return [{"checksums": str(answer)}]

    # ------------------------------------------------------------------ faults

    def torn(self) -> None:
        """A sync that fails half-way with a request in flight; what a torn replica does; healed by a sync, and by disk."""
        found: dict[str, Any] = {}
        self.results["torn"] = found
        self.sync(50)
        engines.generate(self.engine)
        before = self.fingerprints()
        request = Request(self.engine)
        time.sleep(0.5)
        self.version += 1
        raise_errors(self.both("set", 51))
        first, second = self.fail_half_way()
        found["errors"] = [f"{type(error).__name__}: {error}" for error in (first, second)]
        found["half_written"] = self.fingerprints() != before
        found["status"] = self.status()
        found["said"] = [self.version, self.client.version(deadline=time.monotonic() + 10)]
        found["in_flight_waits"] = not request.done()
        found["refusal"] = Request(self.engine).result(20.0)  # nobody has resumed anything
        found["again"] = Request(self.engine).result(20.0)
        found["after_refusal"] = [[one["torn"] is not None, one["paused"]] for one in self.status()]
        found["begin_of_its_own"] = self.foreign()
        self.version += 1
        raise_errors(self.both("set", 52))
        raise_errors(self.both("publish", self.version))
        found["healed"] = [[one["version"], one["torn"], one["paused"]] for one in self.status()]
        found["in_flight"] = request.result(60.0)
        self.against_disk(52)
        found["healed_equals_disk"] = self.results["equals_disk"][-1] and self.results["generates_equal"][-1]

        self.version += 1
        raise_errors(self.both("set", 53))
        self.fail_half_way()
        found["torn_again"] = [one["torn"] is not None for one in self.status()]
        self.disk(54)
        found["healed_by_disk"] = [[one["version"], one["torn"]] for one in self.status()]
        self.client.resume(deadline=time.monotonic() + 10)
        generated = engines.generate(self.engine)
        self.disk(54)
        found["healed_by_disk_generates"] = generated == engines.generate(self.engine)
        self.sync(55)
        self.against_disk(55)

    def fail_half_way(self) -> tuple[Any, Any]:
        import ray

        ref = self.second.publish_until.remote(self.version, 2, fail)
        try:
            mine: Any = self.first.publish(self.version)
        except Exception as error:
            mine = error
        try:
            return mine, ray.get(ref, timeout=120)
        except Exception as error:
            return mine, error

    def foreign(self) -> Any:
        """SGLang's own update may begin on a torn replica; it is ended at once.

        It is paused first: SGLang's tokenizer waits for requests in flight before any update, unless it is paused.
        """
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        manager = self.engine.tokenizer_manager
        self.client.pause(deadline=time.monotonic() + 10)
        begun = engines.ask(self.engine, manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
        refused = raised(lambda: self.client.begin(self.version + 100, deadline=time.monotonic() + 10))
        ended = engines.ask(self.engine, manager.end_weight_update(EndWeightUpdateReqInput(), None))
        return [list(begun), refused, list(ended)]


class Request:
    """A long request that is on its way."""

    def __init__(self, engine: Any) -> None:
        import asyncio

        params = {"max_new_tokens": LONG, "temperature": 0, "ignore_eos": True}
        work = engine.async_generate(input_ids=engines.PROMPTS[0], sampling_params=params)
        self._future = asyncio.run_coroutine_threadsafe(work, engine.loop)

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float) -> Any:
        """What came of it: number of tokens and why it ended, or the error as text."""
        try:
            found = self._future.result(timeout_s)
        except TimeoutError:
            return "nothing"
        except Exception as error:
            return f"{type(error).__name__}: {getattr(error, 'status_code', '')} {getattr(error, 'detail', error)}"
        return {"tokens": len(found["output_ids"]), "finish": found["meta_info"]["finish_reason"]["type"]}


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def raise_errors(outcomes: tuple[Any, Any]) -> tuple[Any, Any]:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def main(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    models.save(models.build(settings["kind"], seed=0, **settings.get("changes", {})), folder / "start")
    tp = settings.get("tp", 1)
    results: dict[str, Any] = {"kind": settings["kind"], "tp": tp}
    began = time.time()
    with (
        local_cluster(gpus=tp),
        engines.engine(
            folder / "start", tp, plain=settings.get("plain", False), **settings.get("engine", {})
        ) as engine,
    ):
        results["start_s"] = time.time() - began
        Run(settings, folder, engine, results).all()
    return results


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        outcome = main(json.loads(sys.argv[1]), Path(place))
    print(json.dumps(outcome), flush=True)
