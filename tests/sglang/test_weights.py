"""The order of a sync's steps on one scheduler, and what each refuses. Without an engine: the receiver is a script."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rdt_core.errors import DeadlineError, EngineError, SyncError, WireError
from rdt_sglang import weights as module
from rdt_sglang.guard import state_of
from rdt_sglang.weights import SchedulerWeights

pytestmark = pytest.mark.unit


class Receiver:
    """Does what it is told: writes, fails before or after its first byte, fails in its last step."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin
        self.fails = ""
        self.calls: list[str] = []
        self.written: int | None = None
        self.torn: str | None = None

    def pull(self, version: int, timeout_s: float) -> Any:
        if self.fails == "early":
            raise SyncError("nothing is published")
        self.begin()
        self.written, self.torn = version, None
        if self.fails == "late":
            raise SyncError("the trainer died")
        return SimpleNamespace(bytes=12)

    def forget(self) -> None:
        self.calls.append("forget")

    def finish(self, version: int) -> None:
        if self.fails == "finish":
            raise EngineError("an address changed")

    def abort(self, version: int, reason: str) -> None:
        self.calls.append("abort")
        if self.written == version:
            self.torn = reason

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def scheduler() -> Any:
    updater = SimpleNamespace(_session=None, offload_tags=set())
    return SimpleNamespace(device="cpu", weight_updater=updater)


@pytest.fixture
def weights(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> SchedulerWeights:
    monkeypatch.setattr(module, "_place", lambda plain: (1, 1, 2))
    made = SchedulerWeights(scheduler)
    made._receiver = Receiver(made._writing)  # type: ignore[assignment]
    made._landing = SimpleNamespace(who="r/1 of group g", roles=frozenset({"target"}), prepare_models=lambda: None)
    state_of(scheduler).acknowledge("retract")
    return made


def phase(weights: SchedulerWeights) -> tuple[Any, ...]:
    status = weights.status()
    return status["phase"], status["version"], status["torn"]


def test_a_whole_sync(weights):
    assert weights.rank == 1
    weights.begin(3, 5.0)
    assert phase(weights) == ("open", None, None)
    assert weights.pull(3, 5.0)["bytes"] == 12
    assert phase(weights) == ("received", None, None)
    weights.finish(3, 5.0)
    assert phase(weights) == ("idle", 3, None)


def test_nothing_before_it_is_connected(scheduler, monkeypatch):
    monkeypatch.setattr(module, "_place", lambda plain: (0, 0, 1))
    made = SchedulerWeights(scheduler)
    for step in (lambda: made.begin(1, 1.0), lambda: made.pull(1, 1.0), lambda: made.finish(1, 1.0)):
        with pytest.raises(EngineError, match="not connected to a sync group; prepare it first"):
            step()
    assert made.status()["connected"] is False


def test_begin_waits_for_this_schedulers_own_pause(weights, scheduler):
    state_of(scheduler).leave_pause()
    with pytest.raises(DeadlineError, match="acknowledged no pause"):
        weights.begin(3, 0.05)
    assert phase(weights) == ("idle", None, None)


def test_begin_lets_the_event_loop_take_in_the_pause_where_it_blocks_it(scheduler, monkeypatch):
    monkeypatch.setattr(module, "_place", lambda plain: (0, 0, 1))
    pumped = []

    def pump(deadline: float) -> bool:
        pumped.append(deadline)
        if len(pumped) == 3:
            state_of(scheduler).acknowledge("in_place")
        return True

    made = SchedulerWeights(scheduler, plain_processes=True, pump=pump)
    made._receiver = Receiver(made._writing)  # type: ignore[assignment]
    made._landing = SimpleNamespace(who="r/0", roles=frozenset({"target"}), prepare_models=lambda: None)
    made.begin(3, 5.0)
    assert len(pumped) == 3
    assert made.status()["paused"] == "in_place"


@pytest.mark.parametrize(
    ("session", "tags", "says"),
    [(object(), set(), "end_weight_update first"), (None, {"weights"}, "resume_memory_occupation first")],
)
def test_begin_refuses_what_sglang_is_busy_with(weights, scheduler, session, tags, says):
    scheduler.weight_updater._session, scheduler.weight_updater.offload_tags = session, tags
    with pytest.raises(EngineError, match=says):
        weights.begin(3, 5.0)
    assert phase(weights) == ("idle", None, None)


def test_a_begin_that_fails_leaves_the_scheduler_as_it_was(weights):
    def broken() -> None:
        raise RuntimeError("no room to unpack")

    weights._landing.prepare_models = broken
    with pytest.raises(RuntimeError):
        weights.begin(3, 5.0)
    assert phase(weights) == ("idle", None, None)


def test_only_what_was_begun_is_pulled_and_only_what_was_pulled_is_finished(weights):
    with pytest.raises(EngineError, match="version 3 was not begun"):
        weights.pull(3, 5.0)
    weights.begin(3, 5.0)
    with pytest.raises(EngineError, match="version 4 was not begun"):
        weights.pull(4, 5.0)
    with pytest.raises(EngineError, match="version 3 cannot be finished"):
        weights.finish(3, 5.0)
    weights.pull(3, 5.0)
    with pytest.raises(EngineError, match="version 3 was not begun"):
        weights.pull(3, 5.0)


def test_a_pull_that_fails_before_its_first_byte_leaves_the_old_version(weights):
    weights.begin(3, 5.0)
    weights.pull(3, 5.0)
    weights.finish(3, 5.0)
    weights._receiver.fails = "early"
    weights.begin(4, 5.0)
    with pytest.raises(SyncError):
        weights.pull(4, 5.0)
    weights.abort(4, "everybody stops")
    assert phase(weights) == ("idle", 3, None)


@pytest.mark.parametrize("fails", ["late", "finish"])
def test_a_failure_after_the_first_byte_tears_and_a_complete_sync_heals(weights, fails):
    weights._receiver.fails = fails
    weights.begin(4, 5.0)

    def rest() -> None:
        weights.pull(4, 5.0)
        weights.finish(4, 5.0)

    with pytest.raises((SyncError, EngineError)):
        rest()
    found, version, torn = phase(weights)
    assert (found, version) == ("torn", None)
    assert "version 4 failed" in torn
    weights.abort(4, "everybody stops")
    assert phase(weights)[2] == torn, "the first reason stays"
    weights._receiver.fails = ""
    weights.begin(5, 5.0)
    weights.pull(5, 5.0)
    weights.finish(5, 5.0)
    assert phase(weights) == ("idle", 5, None)


def test_a_sync_of_fewer_models_than_are_torn_does_not_heal(weights):
    weights._landing.roles = frozenset({"target", "draft"})
    weights._receiver.fails = "late"
    weights.begin(4, 5.0)
    with pytest.raises(SyncError):
        weights.pull(4, 5.0)
    weights._landing.roles = frozenset({"target"})
    with pytest.raises(EngineError, match="draft is torn too"):
        weights.begin(5, 5.0)
    assert phase(weights)[0] == "torn"


def test_an_abort_between_pull_and_finish_tears(weights):
    weights.begin(4, 5.0)
    weights.pull(4, 5.0)
    weights.abort(4, "another rank failed")
    assert phase(weights) == ("torn", None, "another rank failed")
    with pytest.raises(EngineError, match="torn: another rank failed"):
        weights.finish(4, 5.0)


def test_an_abort_after_finish_tears_and_one_of_another_version_does_not(weights):
    weights.begin(4, 5.0)
    weights.pull(4, 5.0)
    weights.finish(4, 5.0)
    weights.abort(5, "the next sync failed before it reached this engine")
    assert phase(weights) == ("idle", 4, None)
    weights.abort(4, "another replica failed")
    assert phase(weights) == ("torn", None, "another replica failed")


def test_leaving_in_the_middle_tears_and_leaving_again_is_harmless(weights):
    weights.begin(4, 5.0)
    weights.pull(4, 5.0)
    receiver = weights._receiver
    weights.close()
    weights.close()
    assert receiver.calls == ["forget", "close"]
    assert phase(weights)[0] == "torn"


def test_what_does_not_fit_is_refused_before_anything_else(weights):
    with pytest.raises(WireError, match="replica"):
        weights.prepare({"group": "g"})


def test_no_new_connection_in_the_middle_of_a_sync(weights):
    weights.begin(4, 5.0)
    info = {"group": "g", "replica": "r", "namespace": "n", "address": "", "kinds": ["mapped"], "timeout_s": 1.0}
    with pytest.raises(EngineError, match="end that sync before connecting again"):
        weights.prepare(info)
