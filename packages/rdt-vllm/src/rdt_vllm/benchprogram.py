"""The program behind peer `sharded_rdt`: one real vLLM, into which `rdt` and vLLM's own backend bring the same bytes in turn.

`python -m rdt_vllm.benchprogram REQUEST.json` prints rows of `rdt bench` as its last line. The engine starts once, with the
Ray executor that `sharded_rdt` needs; its workers change backends between the measurements, and each measurement has fresh
trainers. After each one vLLM's own checksums are compared with what the trainers hold. Refuses nothing: `bench` did.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from rdt_core import wire
from rdt_core.bench import PeerRow, layouts, p50
from rdt_core.bench.fleet import end_actors
from rdt_core.bench.results import medians
from rdt_core.bench.source import SourceRank
from rdt_core.bench.tensorfile import nbytes
from rdt_core.localcluster import Family
from rdt_core.shapes import Config, checkpoint_tensors, config_of

from .clients import VllmRayEngine
from .plugin import BACKEND
from .server import VllmServer

STOCK = "sharded_rdt"
_NAMESPACE = "rdt"
#: GiB that an engine gets on a GPU beside its weights
_BESIDE = 12 << 30


class Switch:
    """Extension of vLLM's workers: exchanges the weight transfer backend of a running one.

    Subclasses may know more of what a worker received than its parameters show: `watch` is called before the sync that
    is compared, and `received` after it.
    """

    def watch(self) -> None:
        """From here on what arrives is to be remembered for `received`."""

    def received(self) -> dict[str, str]:
        """SHA-256 by name of parameters whose bytes the engine has turned into something else since."""
        return {}

    def use_backend(self: Any, name: str) -> None:
        """Ends the present backend and makes another one, as the worker made its first."""
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        self.weight_transfer_engine.shutdown()
        config = replace(self.vllm_config.weight_transfer_config, backend=name)
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            config, self.vllm_config, self.device, self.model_runner.get_model()
        )


class BenchServer(VllmServer):
    """Hosts the engine; `VllmServer` itself takes no backend but `rdt`.

    Args:
        model: folder with the model's `config.json`.
        engine_args: of vLLM's `AsyncEngineArgs`.
    """

    def __init__(self, model: str, **engine_args: Any) -> None:
        import ray

        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._host(
            AsyncLLM.from_engine_args(
                AsyncEngineArgs(model=model, weight_transfer_config=WeightTransferConfig(backend=STOCK), **engine_args)
            )
        )


class Trainer(SourceRank):
    """A source rank of the bench that knows both ways into vLLM."""

    def attach_vllm(self, server: Any) -> None:
        """Attaches the replica to the sync group joined (rank 0)."""
        self._joined().attach(VllmRayEngine([server], name="vllm"))

    def connect_stock(self, server: Any, consumers: int, timeout_s: float, prepare: str) -> None:
        """Makes vLLM's own trainer side, with full tensors gathered one by one; a collective of all source ranks."""
        if prepare:
            module, _, function = prepare.partition(":")
            getattr(importlib.import_module(module), function)()
        from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

        info = ShardedRDTTrainerInitInfo(
            rank=self.rank, num_consumers=consumers, trainer_actor_namespace=_NAMESPACE, stall_timeout_s=timeout_s
        )
        self._timed: dict[str, float] = {}
        self._stock = WeightTransferTrainerFactory.trainer_init(
            info,
            client=_timed_client(RayVLLMWeightSyncClient(server), self._timed),
            source=_source(self.source.tensors, self._full),
        )

    def send_stock(self) -> tuple[float, dict[str, float]]:
        """One sync of vLLM's own backend: its seconds, and those of each call to the engine (rank 0)."""
        self._timed.clear()
        started = time.perf_counter()
        self._stock.send_weights()
        return time.perf_counter() - started, dict(self._timed)

    def end_stock(self) -> None:
        """Ends vLLM's trainer side with the actor that it started."""
        self._stock.shutdown()

    def expected(self, config: Config, tp: int) -> dict[str, str]:
        """SHA-256 of every parameter that the engine's ranks must hold, by `tp:name` (rank 0); a collective."""
        modules = [
            layouts.EngineModule(self.source.tensors, config, layouts.EngineRank("vllm", rank, tp), "cpu")
            for rank in range(tp if self.rank == 0 else 0)
        ]
        for name, full in self._full():
            for module in modules:
                module.load_weights([(name, full.cpu())])
        parameters = {
            f"{rank}:{name}": parameter.data.view(-1).view(torch.uint8).numpy().data
            for rank, module in enumerate(modules)
            for name, parameter in module.named_parameters()
        }
        with ThreadPoolExecutor(4) as pool:  # hashlib lets go of Python meanwhile
            digests = pool.map(lambda held: hashlib.sha256(held).hexdigest(), parameters.values())
            return dict(zip(parameters, digests, strict=True))

    def _full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta, padded in zip(self.source.tensors, self.source.padded, strict=True):
            yield meta.name, padded if self._group is None else self._group.gather(padded, meta.shape, self.world_size)


def _source(metas: Sequence[wire.TensorMeta], full: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> Any:
    """What vLLM's trainer side reads: full tensors, each gathered when its turn comes, as from a sharded module."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Full(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(meta.name, getattr(torch, meta.dtype), tuple(meta.shape)) for meta in metas]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return full()

    return Full()


def _timed_client(client: Any, seconds: dict[str, float]) -> Any:
    class Timed:
        def __getattr__(self, name: str) -> Any:
            method = getattr(client, name)

            def call(*arguments: Any) -> Any:
                started = time.perf_counter()
                try:
                    return method(*arguments)
                finally:
                    seconds[name] = time.perf_counter() - started

            return call

    return Timed()


class _Run:
    """One engine and its measurements, one after the other."""

    def __init__(self, request: dict[str, Any], folder: Path, family: Family) -> None:
        self.request, self.folder, self.family = request, folder, family
        self.ranks, self.tp, self.device = int(request["ranks"]), int(request["tp"]), str(request["device"])
        self.timeout_s, self.rounds = float(request["timeout_s"]), int(request["rounds"])
        self.config = config_of(request["model"], request["layers"])
        self.tensors = checkpoint_tensors(request["model"], layers=request["layers"])
        self.bytes = sum(map(nbytes, self.tensors))
        self.server: Any = None
        self.backend = STOCK
        self.version = 0
        self.pids: list[int] = []

    def all(self) -> list[PeerRow]:
        """Starts the engine and returns the rows; the peer's own comes first."""
        import ray

        (self.folder / "config.json").write_text(json.dumps(self.request["config"]))
        self.server = ray.remote(BenchServer).options(num_cpus=0, max_concurrency=1000).remote(
            str(self.folder), **self._engine_arguments()
        )  # fmt: skip
        name = self._get(self.server.ready.remote())
        # What makes no NIXL agent goes first: an agent keeps a core busy for as long as its process lives, the worker's too.
        # The stock backend goes last: it frees memory that Ray still takes for registered, which others would be given.
        rows: dict[str, PeerRow] = {}
        for key, measure in (("mapped", self._rdt), ("prepared", self._rdt), (STOCK, self._stock)):
            try:
                rows[key] = measure(key)
            except ray.exceptions.RayError as error:
                # what was measured before counts; the engine may be in any state now
                text = str(getattr(error, "cause", None) or error).strip()
                label = STOCK if key == STOCK else f"rdt, live, {key}"
                rows[key] = PeerRow(name=label, error=f"{type(error).__name__}: {text}")
                break
        else:
            self.family.note()  # an EngineCore that is killed leaves the shared memory of its queues behind
            self._get(self.server.shutdown.remote())
            times = p50(rows[STOCK].seconds) / p50(rows["mapped"].seconds)
            what = f"{rows[STOCK].what}; {times:.1f} x rdt's publish over mapped links"
            rows[STOCK] = msgspec.structs.replace(rows[STOCK], what=what)
        missing = PeerRow(name=STOCK, error="not tried: what was measured in the same engine before it failed")
        ordered = [rows.pop(STOCK, missing), *rows.values()]
        return [msgspec.structs.replace(row, inside=name) for row in ordered]

    def _engine_arguments(self) -> dict[str, Any]:
        given: dict[str, Any] = {
            "load_format": "dummy", "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4,
            "skip_tokenizer_init": True, "seed": 0, "tensor_parallel_size": self.tp, "distributed_executor_backend": "ray",
            "worker_extension_cls": self.request["extension"],
        }  # fmt: skip
        if self.device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            given["gpu_memory_utilization"] = min(0.9, (self.bytes + _BESIDE) / total)
        return given

    def _get(self, answer: Any) -> Any:
        import ray

        return ray.get(answer, timeout=3 * self.timeout_s)

    def _trainers(self) -> list[Any]:
        import ray

        actor = ray.remote(Trainer).options(num_cpus=0, max_concurrency=2, enable_tensor_transport=True)
        made = [actor.remote(self.tensors, rank, self.ranks, self.device) for rank in range(self.ranks)]
        self.pids = [pid for pid, *_ in self._get([one.ready.remote() for one in made])]
        if self.ranks > 1:
            rendezvous = str(self.folder / f"group-{uuid.uuid4().hex[:8]}")
            self._get([one.enter.remote(rendezvous, rank, self.ranks, self.timeout_s) for rank, one in enumerate(made)])
        return made

    def _use(self, backend: str) -> None:
        if backend != self.backend:
            self._get(self.server.collective_rpc.remote("use_backend", (backend,)))
            self.backend = backend

    def _watch(self, number: int) -> None:
        # the sync after the measured ones is the one that is compared
        if number > self.rounds:
            self._get(self.server.collective_rpc.remote("watch"))

    def _differing(self, trainers: list[Any]) -> list[str]:
        """Parameters that vLLM does not hold as the trainers have them."""
        made = [one.expected.remote(self.config, self.tp) for one in trainers]
        said = self.server.compute_weight_checksums.remote()  # at the same time: both digest every byte on a core
        wanted, said = self._get(made)[0], self._get(said)
        # vLLM's names are dp:pp:pcp:tp:name, and its experts lie one module deeper
        held = {_named(*name.rsplit(":", 2)[-2:]): digest for name, digest in said.items()}
        for rank, received in enumerate(self._get(self.server.collective_rpc.remote("received"))):
            held |= {_named(rank, name): digest for name, digest in received.items()}
        return sorted(name for name, digest in wanted.items() if held.get(name) != digest)

    def _rdt(self, kind: str) -> PeerRow:
        self._use(BACKEND)
        trainers = self._trainers()
        settings = {"timeout_s": self.timeout_s}
        group = f"bench-{uuid.uuid4().hex[:8]}"
        self._get([one.join.remote(group, "live", (kind,), settings) for one in trainers])
        self._get(trainers[0].attach_vllm.remote(self.server))
        seconds, reports = [], []
        for number in range(self.rounds + 2):
            self._watch(number)
            self.version += 1
            self._get([one.change.remote() for one in trainers])
            answers = self._get([one.publish.remote(self.version) for one in trainers])
            seconds.append(max(spent for spent, _ in answers))
            reports.append(answers[0][1])
        differing = self._differing(trainers)
        self._get([one.leave.remote() for one in trainers])
        end_actors(trainers, self.pids)
        return PeerRow(
            name=f"rdt, live, {kind}",
            what="a whole publish: pause, sync, stamp and its check, resumption",
            bytes=self.bytes,
            first_s=seconds[0],
            seconds=tuple(seconds[1:-1]),
            phases=medians(report.phases for report in reports[1:-1]),
            exact=not differing,
            notes=_notes(differing),
        )

    def _stock(self, name: str) -> PeerRow:
        self._use(STOCK)
        trainers = self._trainers()
        waits = (self.server, self.tp, self.timeout_s, self.request["prepare"])
        started = time.perf_counter()
        self._get([one.connect_stock.remote(*waits) for one in trainers])
        connected = time.perf_counter() - started
        seconds, calls = [], []
        for number in range(self.rounds + 2):
            self._watch(number)
            self._get([one.change.remote() for one in trainers])
            answers = self._get([one.send_stock.remote() for one in trainers])
            seconds.append(max(spent for spent, _ in answers))
            calls.append(answers[0][1])
        differing = self._differing(trainers)
        self._get([one.end_stock.remote() for one in trainers])
        end_actors(trainers, self.pids)
        return PeerRow(
            name=name,
            what=f"send_weights of vLLM's own backend: no pause, no stamp; connected in {connected:.1f} s before",
            bytes=self.bytes,
            first_s=seconds[0],
            seconds=tuple(seconds[1:-1]),
            phases=medians(calls[1:-1]),
            exact=not differing,
            notes=_notes(differing),
        )


def _named(rank: int | str, name: str) -> str:
    return f"{str(rank).removeprefix('tp')}:{name.replace('.routed_experts.', '.')}"


def _notes(differing: Sequence[str]) -> tuple[str, ...]:
    return (f"{len(differing)} parameters differ: {', '.join(differing[:3])}",) if differing else ()


def main(path: str) -> list[PeerRow]:
    """Measures what the request in a file asks for."""
    import ray

    request = json.loads(Path(path).read_text())
    gpus = torch.cuda.device_count() if request["device"] == "cuda" else int(request["tp"])
    family = Family()
    ray.init(
        address="local", num_cpus=8, num_gpus=gpus, object_store_memory=256 << 20, include_dashboard=False,
        namespace=_NAMESPACE, log_to_driver=False,
        runtime_env={"py_executable": request["python"]} if request["python"] else None,
    )  # fmt: skip
    try:
        with tempfile.TemporaryDirectory(prefix="rdt-bench-vllm-") as folder:
            return _Run(request, Path(folder), family).all()
    finally:
        family.note()
        ray.shutdown()
        family.end()


if __name__ == "__main__":
    # classes must be found by their module's name in other processes
    from . import benchprogram

    rows = benchprogram.main(sys.argv[1])
    print(json.dumps([msgspec.to_builtins(row) for row in rows]), flush=True)  # noqa: T201
