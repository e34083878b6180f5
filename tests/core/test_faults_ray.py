"""Members that die or never come, over real Ray: a clear error on every side within its deadline, never a mixture."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from rdt_core.errors import CoordinatorLostError, DeadlineError, EngineError, MembershipError, SyncError, TransportError
from rdt_core.rendezvous import open_coordinator
from rdt_core.replica import ModuleReplica, ModuleWorker
from rdt_core.sources import ModuleSource
from rdt_core.sync import WeightSync

pytestmark = pytest.mark.integration

#: of what is to fail, where somebody waits for it; what is to work has more than a loaded machine can take
TIMEOUT_S = 2.0
ENOUGH_S = 60.0
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

    def join(self, group: str, timeout_s: float = ENOUGH_S, takeover: bool = False) -> None:
        source = ModuleSource(self.model)
        self.sync = WeightSync.join(
            group, source=source, rank=self.rank, world_size=self.world_size, timeout_s=timeout_s, takeover=takeover
        )

    def attach(self, workers) -> None:
        self.sync.attach(ModuleReplica(workers), timeout_s=ENOUGH_S)

    def publish(self, version: int, timeout_s: float = ENOUGH_S) -> tuple[str, str, float]:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float(version))
        started = time.monotonic()
        try:
            self.sync.publish(version, timeout_s=timeout_s)
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
    kind, message, seconds = ray.get(sources[0].publish.remote(2, TIMEOUT_S))
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
    first = sources[0].publish.remote(2, TIMEOUT_S)
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
            ray.get(rank.join.remote("lonely", TIMEOUT_S))
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


def test_a_source_rank_that_is_started_again_goes_on_in_its_place(group, request):
    import ray

    sources, engines = group(2)
    assert [outcome[0] for outcome in ray.get([source.publish.remote(1) for source in sources])] == ["", ""]
    ray.kill(sources[1])
    again = ray.remote(Rank).options(num_cpus=0, enable_tensor_transport=True).remote(1, 2)
    try:
        with pytest.raises(MembershipError, match="takeover=True"):
            ray.get(again.join.remote(request.node.name))
        ray.get(again.join.remote(request.node.name, ENOUGH_S, True))
        assert [outcome[0] for outcome in ray.get([one.publish.remote(2) for one in (sources[0], again)])] == ["", ""]
        assert values(engines[0]) == {2.0}
        assert ray.get(engines[0].version.remote()) == 2
    finally:
        ray.kill(again)


def test_a_coordinator_that_was_killed_is_opened_again_and_the_version_goes_on(group, request):
    import ray

    sources, engines = group(2, 2)
    assert [outcome[0] for outcome in ray.get([source.publish.remote(5) for source in sources])] == ["", ""]
    dead = ray.get_actor(f"rdt.{request.node.name}", namespace="rdt")
    ray.kill(dead)
    # in the middle of a sync its death would be an error: only the sync after it opens another one
    until = time.monotonic() + ENOUGH_S
    with contextlib.suppress(ray.exceptions.RayActorError):
        while True:
            ray.get(dead.status.remote(), timeout=max(0.0, until - time.monotonic()))
    assert [outcome[:2] for outcome in ray.get([source.publish.remote(6) for source in sources])] == [("", "")] * 2
    assert values(engines[0]) == values(engines[1]) == {6.0}
    status = open_coordinator(request.node.name, create=False, timeout_s=10.0).status()
    assert [(one.state, one.version) for one in status.replicas] == [("serving", 6)]
    kind, message, _ = ray.get(sources[0].publish.remote(4))
    assert (kind, "never go back" in message) == (SyncError.__name__, True)


def test_a_driver_that_dies_in_the_middle_leaves_no_version_and_its_successor_goes_on(group, request):
    import ray

    sources, engines = group(2)
    assert [outcome[0] for outcome in ray.get([source.publish.remote(5) for source in sources])] == ["", ""]
    waiting = sources[1].publish.remote(6, TIMEOUT_S)
    ray.kill(sources[0])
    kind, message, seconds = ray.get(waiting)
    assert kind in (CoordinatorLostError.__name__, DeadlineError.__name__), message
    assert seconds < TIMEOUT_S + SLACK_S
    assert ray.get(engines[0].version.remote()) == 5
    again = ray.remote(Rank).options(num_cpus=0, enable_tensor_transport=True).remote(0, 2)
    try:
        joined = again.join.remote(request.node.name)
        other = sources[1].publish.remote(7)  # it opens nothing itself, and finds what the successor has opened
        ray.get(joined)
        ray.get(again.attach.remote(engines))
        assert ray.get(again.publish.remote(7))[:2] == ("", "")
        assert ray.get(other)[:2] == ("", "")
        assert values(engines[0]) == {7.0}
    finally:
        ray.kill(again)


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
