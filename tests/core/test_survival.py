"""Members that come, go, fail and come back while versions go on: commit, policies, takeover, a coordinator that died."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rdt_core.control import Control, LocalControl
from rdt_core.coordinator import Coordinator
from rdt_core.errors import (
    CoordinatorLostError,
    DeadlineError,
    EngineError,
    MembershipError,
    RdtError,
    SyncError,
    TakenOverError,
    TornReplicaError,
)
from rdt_core.replica import ModuleReplica, ModuleWorker
from rdt_core.sources import ModuleSource
from rdt_core.sync import WeightSync
from rdt_core.transport import LocalExchange
from rdt_testbed.reports import are_alike

pytestmark = pytest.mark.unit

GROUP = "survival"
TIMEOUT_S = 5.0
BUCKETS: dict[str, dict[str, int]] = {"bucket": {"bucket_bytes": 128}, "snapshot": {}}


def build(value: float = 0.0) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


class Replica(ModuleReplica):
    """A replica that counts pauses and resumes, and in which a step can be made to fail."""

    def __init__(self, workers: list[ModuleWorker], name: str) -> None:
        super().__init__(workers, name=name)
        self.paused = False
        self.breaks: dict[str, Callable[[], None]] = {}

    def _all(self, method: str, *args: Any, deadline: float) -> list[Any]:
        if method in self.breaks:
            self.breaks[method]()
        return super()._all(method, *args, deadline=deadline)

    def pause(self, *, deadline: float) -> None:
        self.paused = True

    def resume(self, *, deadline: float) -> None:
        if "resume" in self.breaks:
            self.breaks["resume"]()
        self.paused = False


class World:
    """Source ranks in threads, any number of replicas, and a coordinator that can be killed."""

    def __init__(self, ranks: int = 2, **options: Any) -> None:
        self.ranks, self.options = (
            ranks,
            {"policy": "require_all", "stall_timeout_s": 30.0, "timeout_s": TIMEOUT_S} | options,
        )
        self.stall_s = self.options.pop("stall_timeout_s")
        self.exchange = LocalExchange()
        self._lock = threading.Lock()
        self._control: LocalControl | None = None
        self.models = [build() for _ in range(ranks)]
        self.pool = ThreadPoolExecutor(ranks)
        self.syncs = list(self.pool.map(self.join, range(ranks)))

    def control(self) -> Control:
        """Opens the coordinator, or finds the one that somebody else opened."""
        with self._lock:
            if self._control is None:
                self._control = LocalControl(Coordinator(GROUP, self.ranks, self.stall_s))
            return self._control

    def kill_coordinator(self) -> None:
        with self._lock:
            control, self._control = self._control, None
        assert control is not None
        control.close()

    def join(self, rank: int, takeover: bool = False) -> WeightSync:
        return WeightSync(
            self.control(), ModuleSource(self.models[rank]), group=GROUP, rank=rank, world_size=self.ranks,
            kinds=("local",), exchange=self.exchange, reopen=lambda _: self.control(), takeover=takeover,
            **self.options,
        )  # fmt: skip

    def replica(self, name: str, workers: int = 1, *, attach: bool = True) -> Replica:
        """Makes a replica and attaches it."""
        made = Replica(
            [ModuleWorker(build, rank, workers, None, self.control, self.exchange) for rank in range(workers)], name
        )
        if attach:
            self.syncs[0].attach(made)
        return made

    def fill(self, value: float) -> None:
        for model in self.models:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(value)

    def all(self, call: Callable[[WeightSync], Any]) -> list[Any]:
        """Calls on every rank at once; errors are returned."""

        def guarded(sync: WeightSync) -> Any:
            try:
                return call(sync)
            except RdtError as error:
                return error

        return list(self.pool.map(guarded, self.syncs))

    def publish(self, version: int, **options: Any) -> list[Any]:
        self.fill(float(version))
        return self.all(lambda sync: sync.publish(version, **options))

    def good(self, version: int, **options: Any) -> Any:
        """Publishes; all ranks must have the same report."""
        reports = self.publish(version, **options)
        assert not [one for one in reports if isinstance(one, Exception)], reports
        assert are_alike(reports)
        return reports[0]

    def states(self) -> dict[str, tuple[str, int | None]]:
        return {one.name: (one.state, one.version) for one in self.control().status().replicas}

    def close(self) -> None:
        for sync in self.syncs:
            sync.leave()
        self.pool.shutdown()
        if self._control is not None:
            self._control.close()


@pytest.fixture
def world(request):
    made: list[World] = []

    def make(*args: Any, **options: Any) -> World:
        made.append(World(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def served(replica: Replica) -> tuple[set[int | None], set[float]]:
    """What the workers say that they serve, and what they hold."""
    values = {float(one) for worker in replica.workers for value in worker.state().values() for one in value.unique()}
    return {worker.version() for worker in replica.workers}, values


def failing(message: str, kind: type[RdtError] = EngineError) -> Callable[[], None]:
    def fail() -> None:
        raise kind(message)

    return fail


# --- the commit


def test_a_replica_that_finished_is_not_stamped_when_another_one_fails(world):
    made = world()
    good, bad = made.replica("good", 2), made.replica("bad")
    made.good(1)

    def fail() -> None:
        waiting = time.monotonic() + TIMEOUT_S
        while any(one.receiver.uncommitted != 2 or one.receiver.torn is not None for one in good.workers):
            assert time.monotonic() < waiting
            time.sleep(0.01)
        raise EngineError("the last step broke")

    bad.breaks["finish"] = fail
    errors = made.publish(2)
    assert {str(one) for one in errors} == {str(errors[0])}
    assert "the last step broke" in str(errors[0])
    for worker in (*good.workers, *bad.workers):
        assert worker.version() is None
        with pytest.raises(TornReplicaError):
            worker.state()
        assert "the last step broke" in str(worker.landing.torn)
    assert good.paused
    assert made.control().current()[0] == 1
    bad.breaks.clear()
    made.good(3)
    assert served(good) == ({3}, {3.0})
    assert served(bad) == ({3}, {3.0})
    assert not good.paused


def test_nothing_is_served_between_finish_and_commit(world):
    made = world()
    replica = made.replica("a")
    made.good(1)
    seen: list[Any] = []

    def look() -> None:
        seen.append(replica.workers[0].version())
        with pytest.raises(TornReplicaError, match="not committed"):
            replica.workers[0].state()

    replica.breaks["commit"] = look
    made.good(2)
    assert seen == [None]
    assert served(replica) == ({2}, {2.0})


def test_a_commit_that_the_coordinator_refuses_tears_every_replica(world, monkeypatch):
    made = world()
    replica = made.replica("a")
    made.good(1)
    commit, late = made.control().commit, []

    def lost(*args: Any, **rest: Any) -> Any:
        late.append(lambda: commit(*args, **rest))
        raise DeadlineError("no answer to commit")

    monkeypatch.setattr(made.control(), "commit", lost)
    errors = made.publish(2, timeout_s=1.0)
    assert "no answer to commit" in str(errors[0])
    assert replica.version(deadline=0) is None
    assert "no answer to commit" in str(replica.workers[0].landing.torn)
    assert made.states() == {"a": ("torn", None)}
    with pytest.raises(SyncError, match="no answer to commit"):
        late[0]()  # it arrives when everybody was told that the sync failed
    assert made.states() == {"a": ("torn", None)}
    assert made.control().current() == (1, None)
    monkeypatch.undo()
    made.good(3)
    assert served(replica) == ({3}, {3.0})


def test_a_late_replica_that_cannot_be_paused_is_let_go_and_never_resumed(world):
    made = world()
    made.replica("a")
    made.good(1)
    late = made.replica("late", attach=False)
    calls = []

    def pause(*, deadline):
        calls.append("pause")
        raise DeadlineError("no answer to pause")

    late.pause, late.resume = pause, lambda *, deadline: calls.append("resume")
    with pytest.raises(EngineError, match=r"replica 'late': no answer to pause. It is not attached, and may be paused"):
        made.syncs[0].attach(late)
    assert calls == ["pause"]
    assert made.states() == {"a": ("serving", 1)}
    made.good(2)


def test_a_replica_that_cannot_be_stamped_or_resumed_is_said(world):
    made = world()
    first, second = made.replica("first"), made.replica("second")
    made.good(1)
    second.breaks["resume"] = failing("it does not resume")
    reports = made.publish(2)
    assert isinstance(reports[0], EngineError)
    assert "replica 'second': it does not resume" in str(reports[0])
    assert reports[1].version == 2
    assert served(first) == ({2}, {2.0})
    assert made.states() == {"first": ("serving", 2), "second": ("torn", None)}
    report = made.publish(3, policy="best_effort")[0]
    assert report.replicas == ("first",)
    assert "does not resume" in report.failed["second"]


# --- policies


@pytest.mark.parametrize("step", ["connect", "pause", "begin", "pull", "finish"])
def test_best_effort_goes_on_without_a_replica_that_fails(world, step):
    made = world(policy="best_effort")
    good, bad = made.replica("good", 2), made.replica("bad", 2)
    assert made.good(1).failed == {}
    if step == "connect":
        made.all(lambda sync: sync._publisher.manifest)
        made.models[1] = build()
        made.syncs[1]._publisher._source.__init__(made.models[1])  # its parameters moved: every replica plans again
    # a name of a file, as Python gives one whose bytes are no UTF-8
    dead = failing("it is dead: \udcff.bin")
    if step in ("pause", "begin"):
        setattr(bad, step, lambda *args, **options: dead())
    else:
        bad.breaks[step] = dead
    report = made.good(2)
    assert report.replicas == ("good",)
    assert set(report.failed) == {"bad"}
    assert r"it is dead: \udcff.bin" in report.failed["bad"]
    assert served(good) == ({2}, {2.0})
    assert not good.paused
    if step == "finish":
        assert {worker.version() for worker in bad.workers} == {None}
        with pytest.raises(TornReplicaError):
            bad.workers[0].state()
    bad.breaks.clear()
    for name in ("pause", "begin"):
        bad.__dict__.pop(name, None)
    assert made.good(3).failed == {}
    assert served(bad) == ({3}, {3.0})


def test_best_effort_fails_where_no_replica_is_left(world):
    made = world(policy="best_effort")
    one, other = made.replica("one"), made.replica("other")
    made.good(1)
    one.breaks["pull"] = other.breaks["pull"] = failing("dead")
    errors = made.publish(2)
    assert all(isinstance(error, SyncError) for error in errors), errors
    assert "no replica is left" in str(errors[1])
    assert made.control().current()[0] == 1


def test_a_source_rank_that_fails_ends_the_sync_under_either_policy(world, monkeypatch):
    made = world(policy="best_effort")
    replica = made.replica("a")
    made.good(1)
    monkeypatch.setattr(made.syncs[1]._publisher, "follow", failing("the parameters are gone"))
    errors = made.publish(2)
    assert all("the parameters are gone" in str(error) for error in errors), errors
    assert served(replica)[0] == {1}


def test_require_all_is_the_default_and_a_policy_that_is_unknown_is_refused(world):
    made = world()
    good, bad = made.replica("good"), made.replica("bad")
    made.good(1)
    bad.breaks["pull"] = failing("dead")
    assert all("dead" in str(one) for one in made.publish(2))
    assert good.workers[0].version() in (None, 1)
    with pytest.raises(MembershipError, match="choose one of require_all, best_effort"):
        made.syncs[0].publish(3, policy="most")


# --- replicas that come late


def test_a_late_replica_is_paused_until_it_has_the_version(world):
    made = world()
    first = made.replica("first")
    made.good(1)
    late = made.replica("late", 2)
    assert late.paused
    resumed: list[str] = []
    first.breaks["pull"] = lambda: resumed.append("first was disturbed")
    reports = made.all(lambda sync: sync.catch_up())
    assert [one.replicas for one in reports] == [("late",), ("late",)]
    assert not resumed
    assert served(late) == ({1}, {1.0})
    assert not late.paused
    assert made.states() == {"first": ("serving", 1), "late": ("serving", 1)}
    first.breaks.clear()
    made.good(2)
    assert served(late) == ({2}, {2.0})


def test_the_first_replicas_of_a_group_serve_on_until_the_first_version(world):
    made = world()
    assert not made.replica("first").paused
    errors = made.all(lambda sync: sync.catch_up())
    assert all("no version yet" in str(error) for error in errors)


def test_catching_up_disturbs_nobody_where_nobody_is_late(world):
    made = world()
    replica = made.replica("a")
    made.good(1)
    replica.breaks["pull"] = failing("it was disturbed")
    reports = made.all(lambda sync: sync.catch_up())
    assert [one.replicas for one in reports] == [(), ()]
    assert served(replica) == ({1}, {1.0})


# --- source ranks and the coordinator


def test_a_source_rank_that_was_started_again_takes_its_place(world):
    made = world()
    replica = made.replica("a")
    made.good(1)
    dead = made.syncs[1]
    with pytest.raises(MembershipError, match="takeover=True"):
        made.join(1)
    made.models[1] = build(1.0)
    made.syncs[1] = made.join(1, takeover=True)
    assert made.syncs[1].version == 1
    made.good(2)
    assert served(replica) == ({2}, {2.0})
    for call in (lambda: dead.publish(3), lambda: dead._control.leave(1, dead._token)):
        with pytest.raises(MembershipError):
            call()
    made.good(3)
    assert served(replica) == ({3}, {3.0})


@pytest.mark.parametrize("moment", ["between", "begin", "pull", "commit"])
def test_a_coordinator_that_died_is_built_again(world, moment):
    made = world()
    replica = made.replica("a", 2)
    made.good(4)
    if moment == "between":
        made.kill_coordinator()
    elif moment == "begin":
        waiting = made.pool.submit(lambda: made.syncs[1].publish(5))
        while not made.control()._coordinator._barrier._here.versions:  # type: ignore[attr-defined]
            pass
        made.fill(5.0)
        made.kill_coordinator()
        report = made.syncs[0].publish(5)
        assert are_alike((report, waiting.result()))
    else:
        kill = threading.Event()

        def die() -> None:
            if not kill.is_set():
                kill.set()
                made.kill_coordinator()

        replica.breaks["pull" if moment == "pull" else "abort"] = die
        if moment == "commit":
            replica.breaks.clear()
            commit = made.control().commit

            def lost(*args: Any, **rest: Any) -> Any:
                die()
                return commit(*args, **rest)

            made.control().commit = lost  # type: ignore[method-assign]
        errors = made.publish(5)
        assert all(isinstance(error, RdtError) for error in errors), errors
        assert {worker.version() for worker in replica.workers} <= {None, 4}
    if moment != "begin":
        assert all("versions never go back" in str(error) for error in made.publish(3))
    made.good(6)
    assert served(replica) == ({6}, {6.0})
    assert made.control().current()[0] == 6
    assert made.states() == {"a": ("serving", 6)}
    with pytest.raises(SyncError, match="versions never go back"):
        made.syncs[0].publish(3)


def test_without_a_way_to_open_another_coordinator_it_says_so(world):
    made = world(1)
    made.good(1)
    made.syncs[0]._reopen = None
    made.kill_coordinator()
    with pytest.raises(CoordinatorLostError, match="nobody here can open another"):
        made.syncs[0].publish(2)
    made.syncs[0]._reopen = lambda _: made.control()
    made.good(2)


# --- stalls


def test_a_stall_names_who_was_at_what(world):
    made = world(1, stall_timeout_s=0.1)
    made.replica("a")
    made.good(1)
    control = made.control()
    control.begin(0, made.syncs[0]._token, 2, ["a"], 0.1, readable=1)
    waiting = time.monotonic() + 10.0
    while control.current()[1] is not None:
        assert time.monotonic() < waiting
        time.sleep(0.02)
    told = control.status().last_failure
    assert told.startswith(
        "version 2: engine rank a/0 failed in pause, begin or the start of the pull: no progress for 0.3 s"
    )


def test_a_replica_whose_sync_failed_connects_again_before_the_next_one(world):
    made = world()
    good, bad = made.replica("good"), made.replica("bad")
    made.good(1)
    connects: list[str] = []
    for one in (good, bad):
        one.breaks["connect"] = lambda one=one: connects.append(one.name)
    made.good(2)
    assert connects == []
    bad.breaks["pull"] = failing("a moment's trouble")
    made.publish(3)
    bad.breaks.pop("pull")
    made.good(4)
    assert sorted(connects) == ["bad", "good"]
    made.good(5)
    assert len(connects) == 2


def test_a_replica_that_cannot_connect_again_fails_the_sync_at_once_for_every_rank(world):
    made = world()
    bad = made.replica("bad")
    made.good(1)
    bad.breaks["pull"] = failing("dead")
    made.publish(2)
    bad.breaks["connect"] = failing("still dead")
    began = time.monotonic()
    errors = made.publish(3)
    assert all("replica 'bad' failed in connect: still dead" in str(error) for error in errors), errors
    assert time.monotonic() - began < TIMEOUT_S


# --- messages that come twice, or late


def test_a_begin_that_comes_twice_or_late_changes_nothing(world):
    made = world()
    replica = made.replica("a")
    made.good(1)
    control, token = made.control(), made.syncs[0]._token
    posted: list[tuple[Any, ...]] = []
    post = control._post

    def twice(method: str, args: tuple[Any, ...]) -> Any:
        if method == "begin":
            posted.append(args)
        return post(method, args)

    control._post = twice  # type: ignore[method-assign]
    made.good(2)
    mine = next(args for args in posted if args[1] == token)
    with pytest.raises(SyncError, match="stale: source rank 0 has begun"):
        post("begin", mine)(5.0)
    made.good(3)
    assert served(replica) == ({3}, {3.0})


def test_an_engine_rank_that_connects_after_it_was_replaced_is_refused(world):
    made = world()
    replica = made.replica("a")
    made.good(1)
    zombie = replica.workers[0]
    manifest = zombie.receiver._connection.manifest
    replica.workers[0] = ModuleWorker(build, 0, 1, None, made.control, made.exchange)
    made.syncs[0].reconnect(replica)
    with pytest.raises(MembershipError, match="comes too late"):
        made.control().connect(manifest)
    made.good(2)
    assert served(replica) == ({2}, {2.0})


def test_replicas_are_not_attached_to_a_group_whose_coordinator_died(world):
    made = world()
    made.replica("a")
    made.good(1)
    made.kill_coordinator()
    with pytest.raises(CoordinatorLostError, match="publish first"):
        made.replica("b")
    made.good(2)
    late = made.replica("b")
    made.good(3)
    assert served(late) == ({3}, {3.0})


# --- silence, and answers that were lost


@pytest.mark.parametrize(("mode", "verify"), [("bucket", "off"), ("snapshot", "off"), ("snapshot", "full")])
def test_best_effort_goes_on_without_a_replica_that_is_silent(world, mode, verify):
    made = world(policy="best_effort", mode=mode, verify=verify, **BUCKETS[mode])
    good, silent = made.replica("good"), made.replica("silent")
    made.good(1)

    def hang(*args: Any, deadline: float) -> None:
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise DeadlineError("it does not answer")

    silent.pause = silent.abort = hang  # type: ignore[method-assign]
    report = made.good(2, timeout_s=1.0)
    assert report.replicas == ("good",)
    assert "it does not answer" in report.failed["silent"] or "no answer from" in report.failed["silent"]
    assert served(good) == ({2}, {2.0})


def test_a_replica_that_its_driver_lost_unheard_is_no_part_of_the_version(world):
    made = world(policy="best_effort")
    good, bad = made.replica("good"), made.replica("bad")
    made.good(1)
    bad.breaks["finish"] = failing("dead")
    control = made.control()
    fail = control.fail
    control.fail = lambda *args: failing("no answer", DeadlineError)()  # type: ignore[method-assign]
    report = made.publish(2)[0]
    control.fail = fail  # type: ignore[method-assign]
    assert (report.replicas, set(report.failed)) == (("good",), {"bad"})
    assert made.states() == {"good": ("serving", 2), "bad": ("torn", None)}
    assert "dead" in str(bad.workers[0].landing.torn)
    bad.breaks.clear()
    assert made.all(lambda sync: sync.catch_up())[0].replicas == ("bad",)
    assert served(good) == served(bad) == ({2}, {2.0})


def test_a_replica_that_was_dropped_after_it_finished_is_told(world):
    made = world(policy="best_effort")
    good, bad = made.replica("good"), made.replica("bad")
    made.good(1)
    finish = bad.finish

    def drop(version: int, *, deadline: float) -> None:
        finish(version, deadline=deadline)
        made.control().disconnect("bad/0", bad.workers[0].receiver._connection.manifest.incarnation)

    bad.finish = drop  # type: ignore[method-assign]
    report = made.good(2)
    assert set(report.failed) == {"bad"}
    assert bad.workers[0].landing.torn is not None
    assert bad.workers[0].version() is None
    assert served(good) == ({2}, {2.0})


def test_a_late_replica_is_paused_also_where_rank_0_did_not_hear_of_the_version(world):
    made = world()
    made.good(1)
    made.syncs[0].version = None
    assert made.replica("late").paused


def test_catching_up_works_after_the_coordinator_died(world):
    made = world()
    replica = made.replica("a")
    made.good(1)
    made.kill_coordinator()
    made.all(lambda sync: sync.catch_up())
    reports = made.all(lambda sync: sync.catch_up())
    assert [one.version for one in reports] == [1, 1]
    assert served(replica) == ({1}, {1.0})


def test_replicas_that_a_failed_sync_left_paused_are_released_by_catching_up(world):
    made = world()
    one, other = made.replica("one"), made.replica("other")
    made.good(1)
    other.__dict__["pause"] = lambda *, deadline: failing("a moment's trouble")()
    made.publish(2)
    del other.__dict__["pause"]
    made.fill(1.0)
    made.all(lambda sync: sync.catch_up())
    assert not one.paused
    assert not other.paused
    assert served(one) == served(other) == ({1}, {1.0})


def test_a_join_that_was_not_answered_leaves_its_place_free(world):
    control = LocalControl(Coordinator("alone", 2, 30.0))

    def join() -> WeightSync:
        return WeightSync(
            control, ModuleSource(build()), group="alone", rank=0, world_size=2, kinds=("local",), timeout_s=0.1,
            exchange=LocalExchange(),
        )  # fmt: skip

    for _ in range(2):
        with pytest.raises(DeadlineError, match="no answer from source rank 1"):
            join()
    control.close()


# --- those whose place was taken


def test_a_predecessor_does_not_come_back_through_another_coordinator(world):
    made = world()
    replica = made.replica("a")
    made.good(1)
    dead = made.syncs[1]
    made.models[1] = build(1.0)
    made.syncs[1] = made.join(1, takeover=True)
    made.good(2)
    made.kill_coordinator()
    made.fill(3.0)
    with ThreadPoolExecutor(3) as pool:
        lost = pool.submit(lambda: dead.publish(3))
        first, second = [pool.submit(lambda sync=sync: sync.publish(3)) for sync in made.syncs]
        with pytest.raises(TakenOverError):
            lost.result()
        assert are_alike((first.result(), second.result()))
    assert served(replica) == ({3}, {3.0})


def test_a_replica_that_cannot_be_attached_goes_on_and_one_that_is_attached_late_is_paused(world, caplog):
    made = world()
    made.good(1)
    workers = [ModuleWorker(build, 0, 1, None, made.control, made.exchange)]
    late = Replica(workers, "late")
    late.breaks["connect"] = failing("nothing listens")
    with caplog.at_level("INFO", "rdt_core.attaching"):
        with pytest.raises(EngineError, match=r"replica 'late': nothing listens$"):
            made.syncs[0].attach(late)
        assert not late.paused
        assert not [line for line in caplog.messages if line.startswith("replica")]
        late.breaks.clear()
        made.syncs[0].attach(late)
    assert late.paused
    (line,) = [line for line in caplog.messages if line.startswith("replica")]
    assert line == (
        f"replica 'late' is paused until it has version 1 of {GROUP!r}: sync.catch_up() on every source rank brings it there, "
        "or the next publish"
    )
    assert not [error for error in made.all(lambda sync: sync.catch_up()) if isinstance(error, RdtError)]
    assert not late.paused


def test_a_member_that_cannot_be_connected_again_stays_paused_and_the_error_says_so(world):
    made = world()
    replica = made.replica("a")
    made.good(1)
    replica.breaks["connect"] = failing("nothing listens")
    with pytest.raises(
        EngineError, match=f"replica 'a': nothing listens. It is paused until it has version 1 of {GROUP!r}"
    ):
        made.syncs[0].reconnect(replica)
    assert replica.paused
    replica.breaks.clear()
    made.syncs[0].reconnect(replica)
    assert not replica.paused  # it serves the group's version


def test_a_predecessor_neither_fails_a_sync_nor_touches_an_engine(world):
    made = world()
    replica = made.replica("a")
    made.good(1)
    dead = made.syncs[0]
    made.models[0] = build(1.0)
    made.syncs[0] = made.join(0, takeover=True)
    made.syncs[0].attach(replica)
    made.good(2)
    connects: list[int] = []
    replica.breaks["connect"] = lambda: connects.append(1)
    control, token = made.control(), dead._token
    for call in (
        lambda: dead.publish(3),
        lambda: control.fail(None, "source rank 0", "check", "its parameters moved", None, None, (0, token)),
        lambda: control.tear(["a"], "no", token),
        lambda: control.detach("a", token),
        lambda: control.expect("a", token),
    ):
        with pytest.raises(TakenOverError):
            call()
    assert not connects
    made.good(3)
    assert served(replica) == ({3}, {3.0})
