"""Replicas that pause while the sync begins: which are told, and what becomes of them where the sync cannot begin."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rdt_core import ModuleSource
from rdt_core.control import LocalControl
from rdt_core.coordinator import Coordinator
from rdt_core.engines import ahead_of
from rdt_core.errors import EngineError, SyncError
from rdt_core.replica import ModuleReplica, ModuleWorker
from rdt_core.sync import WeightSync
from rdt_core.transport import LocalExchange

pytestmark = pytest.mark.unit


class Pausing(ModuleReplica):
    """Writes down what it is told, and pauses ahead."""

    def __init__(self, workers: list[Any], name: str = "r") -> None:
        super().__init__(workers, name=name)
        self.told: list[str] = []
        self.fails = ""
        self.sends = True
        receive = self.receive
        assert receive is not None

        def noted(version: int, *, deadline: float) -> Any:
            self._tell(f"receive {version}")
            return receive(version, deadline=deadline)

        self.receive = noted
        self.ahead = Ahead(self)

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if what == self.fails:
            raise EngineError(f"{what} broke")

    def connect(self, info: Any, *, deadline: float) -> None:
        self._tell("connect")
        super().connect(info, deadline=deadline)

    def abort(self, version: int, reason: str, *, deadline: float) -> None:
        self._tell(f"abort {version}")
        super().abort(version, reason, deadline=deadline)

    def resume(self, *, deadline: float) -> None:
        self._tell("resume")


class Ahead:
    def __init__(self, replica: Pausing) -> None:
        self.replica = replica
        self.as_left = True

    def send(self) -> bool:
        if self.replica.sends:
            self.replica._tell("ahead")
        return self.replica.sends

    def take_back(self, *, deadline: float) -> bool:
        self.replica._tell("take back")
        return self.as_left


class Made:
    def __init__(self, ranks: int = 1, **options: Any) -> None:
        self.control = LocalControl(Coordinator("test", ranks, 30.0))
        self.exchange = LocalExchange()
        self.model = torch.nn.Linear(4, 4)
        self.pool = ThreadPoolExecutor(ranks)

        def join(rank: int) -> WeightSync:
            return WeightSync(
                self.control, ModuleSource(self.model), group="test", rank=rank, world_size=ranks, kinds=("local",),
                timeout_s=5.0, exchange=self.exchange, **options,
            )  # fmt: skip

        self.syncs = list(self.pool.map(join, range(ranks)))
        self.replica = self.attach("r")

    def attach(self, name: str) -> Pausing:
        worker = ModuleWorker(lambda: torch.nn.Linear(4, 4), control=self.control, exchange=self.exchange)
        replica = Pausing([worker], name)
        self.syncs[0].attach(replica)
        replica.told.clear()
        return replica

    def publish(self, version: int) -> list[str]:
        """Publishes other values, and returns what the replica was told meanwhile."""
        self.replica.told.clear()
        with torch.no_grad():
            self.model.weight.fill_(version)
        list(self.pool.map(lambda sync: sync.publish(version), self.syncs))
        return self.replica.told

    def served(self) -> float:
        return float(self.replica.workers[0].state()["weight"][0, 0])


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Made] = []

    def one(*args: Any, **options: Any) -> Made:
        made.append(Made(*args, **options))
        return made[-1]

    yield one
    for each in made:
        for sync in each.syncs:
            sync.leave()
        each.pool.shutdown()
        each.control.close()


def test_one_that_serves_is_told_before_the_sync_begins(make):
    made = make()
    assert made.publish(1) == ["receive 1", "resume"], "nobody knows yet whether it serves"
    assert made.publish(2) == ["ahead", "receive 2", "resume"]
    assert made.served() == 2


def test_it_is_as_before_where_the_sync_cannot_begin(make):
    made = make()
    made.publish(1)
    made.publish(2)
    with pytest.raises(SyncError, match="version 1"):
        made.publish(1)
    assert made.replica.told == ["ahead", "take back"]
    assert made.served() == 2
    assert made.syncs[0]._driver.doubted == set()
    assert made.publish(3) == ["ahead", "receive 3", "resume"], "it serves still"


@pytest.mark.parametrize(("fails", "why"), [("take back", "take back broke"), ("", "it is not as it was left")])
def test_one_that_may_stand_still_then_connects_again(make, fails, why, caplog):
    made = make()
    made.publish(2)
    made.replica.fails = fails
    made.replica.ahead.as_left = False
    with pytest.raises(SyncError, match="version 1"):
        made.publish(1)
    assert f"may have stayed so until the next one: {why}" in caplog.text
    made.replica.fails = ""
    assert made.publish(3) == ["connect", "receive 3", "resume"]
    assert made.served() == 3


def test_ranks_that_wait_for_others_let_no_engine_wait_with_them(make):
    made = make(2)
    for version in (1, 2, 3):
        assert made.publish(version) == [f"receive {version}", "resume"]


def test_one_whose_last_sync_failed_is_not_told_nor_one_that_was_connected_since(make):
    made = make()
    made.publish(1)
    made.replica.fails = "receive 2"
    with pytest.raises(SyncError, match="receive 2 broke"):
        made.publish(2)
    assert made.publish(3) == ["connect", "receive 3", "resume"]
    made.syncs[0].reconnect(made.replica)
    assert made.publish(4) == ["receive 4", "resume"]
    assert made.publish(5) == ["ahead", "receive 5", "resume"]


def test_one_that_has_to_plan_again_goes_on_from_there(make):
    made = make()
    made.publish(1)
    made.control.detach("r", made.syncs[0]._token)  # behind the driver's back
    assert made.publish(2) == ["ahead", "take back", "connect", "receive 2", "resume"], "it serves while it connects"
    assert made.served() == 2


def test_one_that_takes_no_part_after_all_is_resumed(make):
    made = make(policy="best_effort")
    other = made.attach("other")
    made.publish(1)
    made.control.detach("r", made.syncs[0]._token)
    made.replica.fails = "connect"
    assert made.publish(2) == ["ahead", "take back", "connect"]
    assert made.served() == 1
    assert other.told[-2:] == ["receive 2", "resume"]


def test_one_that_cannot_send_it_is_driven_as_ever(make):
    made = make()
    made.publish(1)
    made.replica.sends = False
    assert made.publish(2) == ["receive 2", "resume"]
    with pytest.raises(SyncError, match="version 1"):
        made.publish(1)
    assert made.replica.told == []


def test_who_is_driven_step_by_step_is_not_told():
    class Own(Pausing):
        pass

    replica = Own([ModuleWorker(lambda: torch.nn.Linear(2, 2))])
    assert ahead_of(replica) is not None
    replica.pull = lambda *_, **__: None  # type: ignore[method-assign]
    assert ahead_of(replica) is None
