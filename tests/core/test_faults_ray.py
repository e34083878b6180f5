"""Members that die or never come, over real Ray: a clear error on every side within its deadline, never a mixture."""

from __future__ import annotations

import time

import pytest
import torch

from rdt_core.errors import DeadlineError, EngineError, MembershipError, SyncError, TransportError
from rdt_core.replica import ModuleReplica, ModuleWorker
from rdt_core.sources import ModuleSource
from rdt_core.sync import WeightSync

pytestmark = pytest.mark.integration

TIMEOUT_S = 8.0
#: what a loaded machine may take on top of a deadline
SLACK_S = 40.0


def build(value: float = 0.0) -> torch.nn.Module:
    model = torch.nn.Linear(32, 16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


class Rank:
    """A source rank: an actor around a plain module; every call says what was raised instead of raising it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.model = build(1.0)

    def join(self, group: str, timeout_s: float = 60.0) -> None:
        source = ModuleSource(self.model)
        self.sync = WeightSync.join(
            group, source=source, rank=self.rank, world_size=self.world_size, timeout_s=timeout_s
        )
        self.sync._timeout_s = TIMEOUT_S

    def attach(self, workers) -> None:
        self.sync.attach(ModuleReplica(workers), timeout_s=60.0)

    def publish(self, version: int) -> tuple[str, str, float]:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float(version))
        started = time.monotonic()
        try:
            self.sync.publish(version)
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - started
        return "", "", time.monotonic() - started


@pytest.fixture
def group(ray_cluster, request):
    import ray

    made = []

    def make(ranks: int, workers: int = 1):
        name = f"{request.node.name}"
        options = {"num_cpus": 0, "enable_tensor_transport": True}
        sources = [ray.remote(Rank).options(**options).remote(rank, ranks) for rank in range(ranks)]
        engines = [ray.remote(ModuleWorker).options(**options).remote(build, rank, workers) for rank in range(workers)]
        made.extend([*sources, *engines])
        ray.get([source.join.remote(name) for source in sources])
        ray.get(sources[0].attach.remote(engines))
        return sources, engines

    yield make
    for actor in made:
        ray.kill(actor)


def values(worker) -> set[float]:
    import ray

    return {float(one) for value in ray.get(worker.state.remote()).values() for one in value.unique()}


def test_a_dead_source_rank_is_named_and_the_engine_keeps_its_weights(group):
    import ray

    sources, engines = group(2)
    assert [outcome[0] for outcome in ray.get([source.publish.remote(1) for source in sources])] == ["", ""]
    ray.kill(sources[1])
    kind, message, seconds = ray.get(sources[0].publish.remote(2))
    assert kind == DeadlineError.__name__
    assert "source rank 1" in message
    assert seconds < TIMEOUT_S + SLACK_S
    assert values(engines[0]) == {1.0}
    assert ray.get(engines[0].version.remote()) == 1


def test_a_dead_engine_worker_fails_the_sync_on_every_rank_and_the_rest_is_torn_or_old(group):
    import ray

    sources, engines = group(2, 2)
    assert [outcome[0] for outcome in ray.get([source.publish.remote(1) for source in sources])] == ["", ""]
    ray.kill(engines[1])
    outcomes = ray.get([source.publish.remote(2) for source in sources])
    for kind, message, seconds in outcomes:
        assert kind in (SyncError.__name__, EngineError.__name__)
        assert "replica 'module'" in message
        assert "died" in message
        assert seconds < TIMEOUT_S + SLACK_S
    assert outcomes[0][1] == outcomes[1][1]
    assert ray.get(engines[0].version.remote()) in (None, 1)


def test_a_source_rank_that_dies_while_it_is_read_never_leaves_a_version(group):
    import ray

    sources, engines = group(2)
    assert [outcome[0] for outcome in ray.get([source.publish.remote(1) for source in sources])] == ["", ""]
    first = sources[0].publish.remote(2)
    time.sleep(1.0)  # rank 0 waits at the barrier
    ray.kill(sources[1])
    kind, message, seconds = ray.get(first)
    assert kind == DeadlineError.__name__
    assert "source rank 1" in message
    assert seconds < TIMEOUT_S + SLACK_S
    assert values(engines[0]) == {1.0}


def test_a_group_that_lacks_a_rank_says_which(ray_cluster):
    import ray

    rank = ray.remote(Rank).options(num_cpus=0, enable_tensor_transport=True).remote(0, 2)
    try:
        with pytest.raises(DeadlineError, match="source rank 1"):
            ray.get(rank.join.remote("lonely", 6.0))
    finally:
        ray.kill(rank)


def test_two_joins_under_one_rank(group):
    import ray

    sources, _ = group(1)
    other = ray.remote(Rank).options(num_cpus=0, enable_tensor_transport=True).remote(0, 1)
    try:
        with pytest.raises(MembershipError, match="rank 0"):
            ray.get(other.join.remote("test_two_joins_under_one_rank"))
        assert ray.get(sources[0].publish.remote(1))[0] == ""
    finally:
        ray.kill(other)


def test_an_engine_that_allows_no_kind_that_works(ray_cluster):
    import ray

    rank = ray.remote(Rank).options(num_cpus=0, enable_tensor_transport=True).remote(0, 1)
    worker = ray.remote(ModuleWorker).options(num_cpus=0).remote(build)
    try:
        ray.get(rank.join.remote("kinds"))
        info = {"group": "kinds", "replica": "module", "namespace": "rdt", "address": "", "timeout_s": 10.0}
        from rdt_core.engines import ConnectInfo

        with pytest.raises(TransportError, match="local: source rank 0 does not serve"):
            ray.get(worker.connect.remote(ConnectInfo(kinds=("local",), **info)))
    finally:
        ray.kill(rank)
        ray.kill(worker)
