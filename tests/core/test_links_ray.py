"""What readers measure on real links between processes: one made slow on purpose is named, then refused, the fast one beside it
never; and what a piece costs decides how the next plan packs."""

from __future__ import annotations

import sys
import time
from functools import partial

import pytest
import torch

from rdt_core import report
from rdt_core.errors import RdtError
from rdt_core.replica import ModuleReplica, ModuleWorker
from rdt_core.sources.base import Shard
from rdt_core.wire import TensorMeta

pytestmark = pytest.mark.integration

ROWS = 4096  # of 16 KiB: 64 MiB, the least that is judged
FLOOR_GBPS = 0.1
SLOW_GBPS = 0.08


class Held:
    """A source rank with a tensor of its own."""

    def __init__(self, rank: int, device: str) -> None:
        self.rank = rank
        self.tensor = torch.zeros(ROWS, 4096, device=device)

    def metadata(self) -> list[TensorMeta]:
        return [TensorMeta(name=f"part{self.rank}", shape=(ROWS, 4096), dtype="float32")]

    def shards(self) -> list[Shard]:
        return [Shard(f"part{self.rank}", (0, 0), self.tensor)]

    def ignored(self) -> list[str]:
        return []


class Served(torch.nn.Module):
    def __init__(self, parts: int = 2, device: str = "cpu") -> None:
        super().__init__()
        for rank in range(parts):
            self.register_parameter(f"part{rank}", torch.nn.Parameter(torch.zeros(ROWS, 4096, device=device)))


class Trainer:
    def __init__(self, rank: int, device: str = "cpu") -> None:
        self.source = Held(rank, device)

    def join(self, group: str, options: dict, ranks: int = 2) -> None:
        from rdt_core.sync import WeightSync

        self.sync = WeightSync.join(
            group, source=self.source, rank=self.source.rank, world_size=ranks, timeout_s=60, **options
        )

    def attach(self, worker) -> None:
        self.sync.attach(ModuleReplica([worker]))

    def publish(self, version: int):
        """The report, or the error as text."""
        self.source.tensor.fill_(version + self.source.rank / 2)
        try:
            return self.sync.publish(version)
        except RdtError as error:
            return f"{type(error).__name__}: {error}"

    def leave(self) -> None:
        self.sync.leave()


class Throttled:
    """A reader's end of a real link, whose bytes count as landed only when the limit of its source rank allows it."""

    def __init__(self, inner, limits: dict[int, float]) -> None:
        self._inner, self._limits = inner, limits
        self.kind, self.register, self.close = inner.kind, inner.register, inner.close

    def connect(self, source, offer, refs) -> None:
        self._source = source.rank
        self._inner.connect(source, offer, refs)

    def prepare(self, index, copies, destinations):
        return Late(self._inner.prepare(index, copies, destinations), lambda: self._limits.get(self._source))


class Late:
    def __init__(self, inner, limit) -> None:
        self._inner, self._limit = inner, limit
        self.nbytes, self.turn, self.release = inner.nbytes, inner.turn, inner.release

    def post(self) -> None:
        gbps = self._limit()
        self._until = time.monotonic() + (self.nbytes / 1e9 / gbps if gbps else 0.0)
        self._inner.post()

    def poll(self) -> bool:
        return self._inner.poll() and time.monotonic() >= self._until

    def wait(self, deadline: float) -> None:
        assert self.poll()
        self._inner.wait(deadline)


class Worker(ModuleWorker):
    def __init__(self) -> None:
        from rdt_core import connector

        super().__init__(Served)
        make = connector.make_reader_endpoint
        self.limits: dict[int, float] = {}
        connector.make_reader_endpoint = lambda *args, **options: Throttled(make(*args, **options), self.limits)

    def limit(self, source: int, gbps: float) -> None:
        self.limits[source] = gbps

    def let_any_threshold_be_chosen(self, least: int) -> int:
        from rdt_core.transport import thresholds

        before, thresholds.LEAST = thresholds.LEAST, least
        return before

    def serves(self) -> list[float]:
        return self.call(lambda module: [float(part.min() + part.max()) / 2 for part in module.parameters()])


@pytest.fixture(scope="module")
def actors(ray_cluster):
    import cloudpickle
    import ray

    cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def make(kind: type, *args):
        return ray.remote(kind).options(num_cpus=0, enable_tensor_transport=True).remote(*args)

    made = make(Trainer, 0), make(Trainer, 1), make(Worker)
    yield made[:2], made[2]
    for actor in made:
        ray.kill(actor)
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_what_a_link_measures_holds_from_the_next_plan_on(actors) -> None:
    import ray

    trainers, worker = actors

    def publish(version: int):
        return ray.get([trainer.publish.remote(version) for trainer in trainers])[0]

    ray.get([trainer.join.remote("measured", {"mode": "live", "kinds": ("prepared",)}) for trainer in trainers])
    least = ray.get(worker.let_any_threshold_be_chosen.remote(1))
    try:
        ray.get(trainers[0].attach.remote(worker))
        told = [publish(version) for version in (1, 2, 3)]
        (first,), (second,), (third,) = (one.readers for one in told)
        ((used,), (chosen,)) = first.packing, second.packing
        assert (used.kind, used.bytes, used.how, used.links) == ("prepared", 64 << 10, "default", 2)
        assert chosen.how == "measured"
        assert 1 <= chosen.bytes <= 16 << 10, "a CPU's agents read a small piece in microseconds"
        assert first.incarnation != second.incarnation == third.incarnation
        assert [one.outdated for one in told] == [("module",), (), ()]
        assert ray.get(worker.serves.remote()) == [3, 3.5]
    finally:
        ray.get(worker.let_any_threshold_be_chosen.remote(least))
        ray.get(worker.close.remote())
        ray.get([trainer.leave.remote() for trainer in trainers])


@pytest.mark.parametrize("kind", [pytest.param("mapped", marks=pytest.mark.thorough), "prepared"])
def test_named_and_refused(actors, kind: str) -> None:
    import ray

    trainers, worker = actors

    def publish(version: int):
        return ray.get([trainer.publish.remote(version) for trainer in trainers])[0]

    options = {"mode": "live", "kinds": (kind,), "slow_links": FLOOR_GBPS}
    ray.get([trainer.join.remote(kind, options) for trainer in trainers])
    ray.get(trainers[0].attach.remote(worker))
    try:
        for version in (1, 2, 3):  # as fast as they are
            told = publish(version)
            assert report.slow_links(told) == []
            assert ray.get(worker.serves.remote()) == [version, version + 0.5]
        ray.get(worker.limit.remote(1, SLOW_GBPS))
        told = publish(5)
        (line,) = report.slow_links(told)
        assert line.startswith(f"1 -> module/0 ({kind}) 0.0")
        assert line.endswith(" GB/s, floor 0.1")
        assert line in report.log_line(told)
        assert ray.get(worker.serves.remote()) == [5, 5.5]
        told = publish(6)
        assert f"slow link: 1 -> module/0 ({kind}) moved 67108864 bytes at 0.0" in told
        assert "rdt doctor" in told
        ray.get(worker.limit.remote(1, 0.0))
        for version in (7, 8):
            assert publish(version).version == version
            assert ray.get(worker.serves.remote()) == [version, version + 0.5]
    finally:
        ray.get(worker.limit.remote(1, 0.0))
        ray.get(worker.close.remote())
        ray.get([trainer.leave.remote() for trainer in trainers])


def measured(_) -> str:
    from rdt_core.transport import thresholds

    return "; ".join(f"{one} -> {one.threshold}" for one in thresholds._MEASURED.values() if one)


@pytest.mark.gpu
@pytest.mark.parametrize("zcopy", ["on", "off"])
def test_a_gpu_whose_memory_is_read_over_tcp(actors, zcopy: str) -> None:
    """The floor that nobody set: a real path that is broken falls below it, the same path mended does not."""
    import ray

    from rdt_core.settings import GET_ZCOPY

    environment = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", GET_ZCOPY: zcopy}

    def make(kind, *args):
        options = {"num_cpus": 0, "enable_tensor_transport": True, "runtime_env": {"env_vars": environment}}
        return ray.remote(kind).options(**options).remote(*args)

    trainer, worker = make(Trainer, 0, "cuda"), make(ModuleWorker, partial(Served, 1, "cuda"))
    try:
        ray.get(trainer.join.remote(f"zcopy-{zcopy}", {"mode": "live", "kinds": ("prepared",)}, 1))
        ray.get(trainer.attach.remote(worker))
        told = [ray.get(trainer.publish.remote(version)) for version in range(1, 5)]
        for one in told:
            print(zcopy, one if isinstance(one, str) else (one.links, one.readers[0].packing))
        print(zcopy, ray.get(worker.__ray_call__.remote(measured)))
        if zcopy == "on":
            assert [one.version for one in told] == [1, 2, 3, 4]
            assert [report.slow_links(one) for one in told] == [[]] * 4
        else:
            # what packing costs is measured in the first sync, and may make the second a first one of another plan
            number = next(number for number, one in enumerate(told) if isinstance(one, str))
            (line,) = report.slow_links(told[number - 1])
            assert line.startswith("0 -> module/0 (prepared) 0.")
            assert line.endswith(" GB/s, floor 1")
            assert "slow link: 0 -> module/0 (prepared)" in told[number]
            assert GET_ZCOPY in told[number]
        ray.get(worker.close.remote())
        ray.get(trainer.leave.remote())
    finally:
        ray.kill(trainer)
        ray.kill(worker)
