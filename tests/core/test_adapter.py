"""The four calls of a weight update mode: with threads as ranks, and once over real Ray with an engine that dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rdt_core.adapter import SyncAdapter
from rdt_core.control import LocalControl
from rdt_core.coordinator import Coordinator
from rdt_core.engines import EngineClient
from rdt_core.errors import EngineError, MembershipError, RdtError, SyncError
from rdt_core.replica import ModuleReplica, ModuleWorker
from rdt_core.sources import ModuleSource
from rdt_core.sync import WeightSync
from rdt_core.transport import LocalExchange
from rdt_testbed.reports import are_alike

RANKS = 2


def model(value: float) -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8))
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + value + 100 * number)
    return made


def served() -> torch.nn.Module:
    return model(-1.0)


class Engine(ModuleReplica):
    """A replica that counts what is asked of it and can be made to fail."""

    def __init__(self, name: str, control: LocalControl, exchange: LocalExchange) -> None:
        self.worker = ModuleWorker(served, control=control, exchange=exchange)
        super().__init__([self.worker], name=name)
        self.calls: list[str] = []
        self.fails_in = ""
        self.says: int | None = None

    def _all(self, method: str, *args: Any, deadline: float) -> list[Any]:
        self.calls.append(method)
        if method == self.fails_in:
            raise EngineError(f"{self.name} does not {method}")
        return super()._all(method, *args, deadline=deadline)

    def pause(self, *, deadline: float) -> None:
        self.calls.append("pause")

    def resume(self, *, deadline: float) -> None:
        self.calls.append("resume")

    def version(self, *, deadline: float) -> int | None:
        return super().version(deadline=deadline) if self.says is None else self.says

    def serves(self, value: float) -> bool:
        want = model(value).state_dict()
        return all(torch.equal(tensor, want[name]) for name, tensor in self.worker.state().items())


class Local(SyncAdapter):
    """An adapter of a group inside this process; only how the group is found differs."""

    control: LocalControl
    exchange: LocalExchange

    def _join(self) -> WeightSync:
        return WeightSync(
            self.control, self._source(), group=self.group, rank=self.rank, world_size=self.world_size, kinds=("local",),
            exchange=self.exchange, timeout_s=self._timeout_s, **self._options,
        )  # fmt: skip


class Trainers:
    """The ranks of a trainer, which call the same at the same time."""

    def __init__(self, **options: Any) -> None:
        self.control = LocalControl(Coordinator("test", RANKS, 30.0))
        self.exchange = LocalExchange()
        self.models = [model(0.0) for _ in range(RANKS)]
        self.made: list[int] = []
        self.ranks = [self.adapter(rank, options) for rank in range(RANKS)]
        self.pool = ThreadPoolExecutor(RANKS)

    def adapter(self, rank: int, options: dict[str, Any]) -> Local:
        def source() -> ModuleSource:
            self.made.append(rank)
            return ModuleSource(self.models[rank])

        made = Local("test", source=source, rank=rank, world_size=RANKS, **{"timeout_s": 5.0, **options})
        made.control, made.exchange = self.control, self.exchange
        return made

    def engine(self, name: str) -> Engine:
        return Engine(name, self.control, self.exchange)

    def all(self, call: Callable[[SyncAdapter], Any]) -> list[Any]:
        """What each rank returned, or raised."""

        def one(adapter: SyncAdapter) -> Any:
            try:
                return call(adapter)
            except RdtError as error:
                return error

        return list(self.pool.map(one, self.ranks))

    def good(self, call: Callable[[SyncAdapter], Any]) -> list[Any]:
        found = self.all(call)
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found

    def connect(self, *engines: Any) -> None:
        self.good(lambda adapter: adapter.connect(engines))

    def fill(self, value: float) -> None:
        for one in self.models:
            one.load_state_dict(model(value).state_dict())

    def round(self, version: int) -> list[Any]:
        self.fill(version)
        self.good(lambda adapter: adapter.begin(version))
        self.good(lambda adapter: adapter.send())
        return self.good(lambda adapter: adapter.finalize())

    def close(self) -> None:
        self.all(lambda adapter: adapter.close())
        self.pool.shutdown()
        self.control.close()


@pytest.fixture
def trainers() -> Iterator[Callable[..., Trainers]]:
    made: list[Trainers] = []

    def make(**options: Any) -> Trainers:
        made.append(Trainers(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.unit
def test_rounds_bring_every_engine_to_the_version_and_connecting_again_changes_nothing(trainers):
    group = trainers()
    one, two = group.engine("one"), group.engine("two")
    group.connect(one, two)
    for version in (1, 2, 2):
        first, second = group.round(version)
        assert are_alike((first, second))
        assert (first.version, sorted(first.replicas)) == (version, ["one", "two"])
        assert one.serves(version)
        assert two.serves(version)
        group.connect(one, two)
    assert [adapter.version for adapter in group.ranks] == [2, 2]
    assert one.calls.count("connect") == 1
    assert sorted(group.made) == [0, 1], "a source is made once, by the first connect"
    assert {adapter.sync.mode for adapter in group.ranks} == {"live"}


@pytest.mark.unit
def test_engines_come_and_go(trainers):
    group = trainers()
    one, two = group.engine("one"), group.engine("two")
    group.connect(one)
    group.round(1)
    group.connect(one, two)
    assert not two.serves(1), "an engine that was attached has no new weights before the next send"
    group.round(2)
    assert two.serves(2)
    group.connect(two)
    assert group.round(3)[0].replicas == ("two",)
    assert one.serves(2)
    assert two.serves(3)
    assert two.calls.count("connect") == 1
    again = group.engine("one")  # another engine under the name of one that is gone
    group.connect(again, two)
    group.round(4)
    assert again.serves(4)


@pytest.mark.unit
def test_clients_are_made_once_for_each_engine(trainers):
    group: Trainers

    def client(engine: str) -> Engine:
        made.append(group.engine(engine))
        return made[-1]

    made: list[Engine] = []
    group = trainers(client=client)
    group.connect("a", "b", "a")
    group.round(1)
    group.connect("b", "c")
    group.round(2)
    assert [engine.name for engine in made] == ["a", "b", "c"]
    assert [engine.serves(2) for engine in made] == [False, True, True]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("before", "call", "found"),
    [
        ([], "begin", "it is not connected; call connect"),
        ([], "send", "it is not connected; call connect"),
        (["connect"], "send", "no round is open; the order is connect, then begin, send, finalize"),
        (["connect"], "finalize", "no round is open"),
        (["connect", "begin"], "finalize", "version 1 was begun and not sent"),
        (["connect", "begin", "send"], "begin", "version 1 was sent and not finalized"),
        (["connect", "begin", "send"], "send", "version 1 was sent and not finalized"),
        (["connect", "begin", "send", "finalize"], "send", "no round is open"),
    ],
)
def test_a_call_out_of_order_names_the_rank_and_leaves_the_adapter_usable(trainers, before, call, found):
    group = trainers()
    engine = group.engine("one")
    calls: dict[str, Callable[[SyncAdapter], Any]] = {
        "connect": lambda adapter: adapter.connect([engine]),
        "begin": lambda adapter: adapter.begin(1),
        "send": lambda adapter: adapter.send(),
        "finalize": lambda adapter: adapter.finalize(),
    }
    for name in before:
        group.good(calls[name])
    for rank, error in enumerate(group.all(calls[call])):
        assert isinstance(error, SyncError)
        assert f"source rank {rank} of group 'test'" in str(error)
        assert found in str(error)
    group.connect(engine)  # drops what was open
    group.round(2)
    assert engine.serves(2)


@pytest.mark.unit
def test_begin_replaces_a_round_that_was_not_sent_and_versions_never_go_back(trainers):
    group = trainers()
    engine = group.engine("one")
    group.connect(engine)
    group.good(lambda adapter: adapter.begin(3))
    group.round(4)
    assert engine.serves(4)
    for error in group.all(lambda adapter: adapter.begin(3)):
        assert isinstance(error, SyncError)
        assert "after version 4" in str(error)
    group.round(5)


@pytest.mark.unit
def test_ranks_that_begin_different_versions_fail_together(trainers):
    group = trainers()
    group.connect(group.engine("one"))
    group.good(lambda adapter: adapter.begin(1 + adapter.rank))
    one, two = group.all(lambda adapter: adapter.send())
    assert isinstance(one, SyncError)
    assert str(one) == str(two)
    assert "source rank" in str(one)
    group.round(5)


@pytest.mark.unit
@pytest.mark.parametrize("connects", [False, True])
def test_a_failed_send_fails_on_every_rank_and_the_next_one_heals(trainers, connects):
    group = trainers()
    good, bad = group.engine("good"), group.engine("bad")
    group.connect(good, bad)
    group.round(1)
    bad.fails_in = "pull"
    group.good(lambda adapter: adapter.begin(2))
    one, two = group.all(lambda adapter: adapter.send())
    assert str(one) == str(two)
    assert "bad" in str(one)
    assert all("no round is open" in str(error) for error in group.all(lambda adapter: adapter.finalize()))
    assert [adapter.version for adapter in group.ranks] == [1, 1]
    bad.fails_in = ""
    if connects:
        group.connect(good, bad)
    assert good.calls.count("connect") == (2 if connects else 1), "after a failure one may have been started again"
    group.round(3)
    assert good.serves(3)
    assert bad.serves(3)


@pytest.mark.unit
def test_no_round_follows_a_connect_that_failed(trainers):
    group = trainers()
    good, bad = group.engine("good"), group.engine("bad")
    bad.fails_in = "connect"
    first, second = group.all(lambda adapter: adapter.connect([good, bad]))
    assert isinstance(first, EngineError)
    assert second is None, "only rank 0 drives engines"
    with pytest.raises(SyncError, match=r"source rank 0 .* its last connect failed"):
        group.ranks[0].begin(1)
    group.connect(good)
    group.round(1)
    assert good.calls.count("connect") == 1
    assert good.serves(1)


@pytest.mark.unit
def test_two_engines_of_one_name_and_what_is_no_engine(trainers):
    group = trainers()
    first, _ = group.all(lambda adapter: adapter.connect([group.engine("one"), group.engine("one")]))
    assert isinstance(first, MembershipError)
    assert "'one'" in str(first)
    first, _ = group.all(lambda adapter: adapter.connect(["http://engine:8000"]))
    assert isinstance(first, MembershipError)
    assert "client=" in str(first)
    with pytest.raises(MembershipError, match="rdt, framework"):
        SyncAdapter("test", source=lambda: ModuleSource(served()), rank=0, world_size=1, paused_by="me")  # type: ignore[arg-type]


@pytest.mark.unit
def test_who_pauses(trainers):
    ours, theirs = trainers(), trainers(paused_by="framework")
    for group in (ours, theirs):
        engine = group.engine("one")
        group.connect(engine)
        group.round(1)
        assert engine.serves(1)
        assert isinstance(next(iter(group.ranks[0]._engines.values())), EngineClient)
        found = [call for call in engine.calls if call in ("pause", "pull", "resume")]
        assert found == (["pause", "pull", "resume"] if group is ours else ["pull"])


@pytest.mark.unit
def test_an_engine_that_says_another_version(trainers):
    group = trainers()
    engine = group.engine("one")
    group.connect(engine)
    group.round(1)
    engine.says = 7
    group.good(lambda adapter: adapter.begin(2))
    group.good(lambda adapter: adapter.send())
    first, second = group.all(lambda adapter: adapter.finalize())
    assert isinstance(first, EngineError)
    assert "says that it serves version 7; version 2 was sent" in str(first)
    assert second.version == 2
    engine.says = None
    group.round(3)
    assert engine.serves(3)


@pytest.mark.unit
def test_an_engine_that_was_started_again_behind_its_address(trainers):
    group = trainers()
    engine = group.engine("one")
    group.connect(engine)
    group.round(1)
    group.connect(engine)
    gone, engine.worker = (
        engine.worker,
        group.engine("one").worker,
    )  # another process answers, with no goodbye of the old one
    engine.workers[0] = engine.worker
    group.good(lambda adapter: adapter.begin(2))
    assert all(isinstance(error, RdtError) for error in group.all(lambda adapter: adapter.send()))
    group.connect(engine)
    group.round(3)
    assert engine.serves(3)
    gone.close()


@pytest.mark.unit
def test_close_leaves_and_connect_joins_again(trainers):
    group = trainers()
    engine = group.engine("one")
    group.connect(engine)
    group.round(1)
    group.good(lambda adapter: adapter.close())
    group.good(lambda adapter: adapter.close())
    with pytest.raises(SyncError, match="not connected"):
        group.ranks[1].begin(2)
    group.connect(engine)
    group.round(2)
    assert engine.serves(2)
    assert sorted(group.made) == [0, 0, 1, 1]


# ---------------------------------------------------------------------- over Ray


class Rank:
    """A trainer rank of a framework: an actor that is told which engines there are."""

    def __init__(self, rank: int) -> None:
        self.model = model(0.0)
        self.adapter = SyncAdapter(
            "framework",
            source=lambda: ModuleSource(self.model),
            rank=rank,
            world_size=RANKS,
            client=lambda handle: ModuleReplica([handle], name=f"engine-{handle._actor_id.hex()}"),
            timeout_s=20.0,
        )

    def update(self, version: int, engines: list[Any] | None) -> Any:
        if engines is not None:
            self.adapter.connect(engines)
        self.model.load_state_dict(model(version).state_dict())
        self.adapter.begin(version)
        self.adapter.send()
        return self.adapter.finalize()

    def close(self) -> None:
        self.adapter.close()


@pytest.mark.integration
def test_actors_and_an_engine_that_dies(ray_cluster):
    import ray

    start = ray.remote(ModuleWorker).options(num_cpus=0, enable_tensor_transport=True).remote
    ranks = [ray.remote(Rank).options(num_cpus=0, enable_tensor_transport=True).remote(rank) for rank in range(RANKS)]
    engines = [start(served), start(served)]

    def update(version: int, new: list[Any] | None = None) -> list[Any]:
        return ray.get([rank.update.remote(version, new) for rank in ranks], timeout=120)

    def serve(version: int) -> bool:
        want = model(version).state_dict()
        states = ray.get([engine.state.remote() for engine in engines], timeout=60)
        return all(torch.equal(state[name], want[name]) for state in states for name in want)

    try:
        reports = update(1, engines)
        assert are_alike(reports)
        assert len(reports[0].readers) == 2
        assert serve(1)
        update(2, list(engines))  # the same handles, in another list
        assert serve(2)
        ray.kill(engines[1])
        refs = [rank.update.remote(3, None) for rank in ranks]
        errors = []
        for ref in refs:
            with pytest.raises(ray.exceptions.RayTaskError) as raised:
                ray.get(ref, timeout=120)
            errors.append(str(raised.value.cause))
        assert errors[0] == errors[1]
        assert "died" in errors[0]
        engines[1] = start(served)
        update(4, engines)
        assert serve(4)
    finally:
        ray.get([rank.close.remote() for rank in ranks], timeout=60)
        for actor in (*ranks, *engines):
            ray.kill(actor)
