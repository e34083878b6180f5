"""The record that a scheduler's event loop and its sync share: who may do what in which phase. Threads, no engine."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from rdt_core.errors import DeadlineError, EngineError
from rdt_sglang import guard
from rdt_sglang.guard import SyncState, state_of

pytestmark = pytest.mark.unit


@pytest.fixture
def state() -> SyncState:
    made = SyncState()
    made.acknowledge("retract")
    return made


def test_nothing_opens_before_the_pause_is_acknowledged():
    state = SyncState()
    with pytest.raises(DeadlineError, match=r"acknowledged no pause within 0\.1 s"):
        state.open(1, 0.1)
    assert state.phase == "idle"
    thread = threading.Thread(target=state.acknowledge, args=("in_place",))
    thread.start()
    state.open(1, 10.0)
    thread.join()
    assert (state.phase, state.paused) == ("open", "in_place")


def test_a_resume_takes_the_acknowledgement_back(state):
    assert state.leave_pause() is None
    with pytest.raises(DeadlineError):
        state.open(1, 0.0)


def test_no_resume_once_a_sync_is_open(state):
    state.open(1, 5.0)
    assert state.leave_pause() == "version 1 is being received"
    assert state.paused == "retract"


def continuing(state: SyncState, monkeypatch: pytest.MonkeyPatch, others: list[str | None]) -> tuple[bool, list[bool]]:
    """Runs the hook with ranks that say `others`; whether it went on, and whether a sync could begin meanwhile."""
    begun, went_on = [], []

    def gather(own: str | None) -> list[str | None]:
        begun.append(can_open(state))
        return [own, *others]

    monkeypatch.setattr(guard, "_control", lambda: SimpleNamespace(gather=gather))
    scheduler = SimpleNamespace(_rdt_sync_state=state)
    guard.around_continue(lambda *_: went_on.append(can_open(state)), scheduler, None)
    return bool(went_on), begun + went_on


def can_open(state: SyncState) -> bool:
    try:
        state.open(9, 0.0)
    except DeadlineError:
        return False
    return True


def test_no_sync_begins_while_ranks_agree_to_go_on(state, monkeypatch):
    assert continuing(state, monkeypatch, [None]) == (True, [False, False])
    assert state.paused is None


def test_no_rank_goes_on_if_another_must_not(state, monkeypatch):
    assert continuing(state, monkeypatch, ["its weights are torn"]) == (False, [False])
    assert state.paused == "retract"
    assert can_open(state)


def test_a_complete_sync(state):
    assert state.held() is None
    state.open(4, 5.0)
    assert state.held() == "version 4 is being received"
    state.writing()
    assert state.torn() is None
    state.received(5.0)
    state.finishing(4)
    assert state.held() is not None
    state.done()
    assert (state.phase, state.held(), state.version) == ("idle", None, None)


def test_a_failure_before_the_first_byte_leaves_the_scheduler_as_it_was(state):
    state.open(4, 5.0)
    state.fail("the trainer died")
    assert (state.phase, state.held(), state.torn()) == ("idle", None, None)


@pytest.mark.parametrize("received", [False, True])
def test_a_failure_after_the_first_byte_tears(state, received):
    state.open(4, 5.0)
    state.writing()
    if received:
        state.received(5.0)
    state.fail("the trainer died")
    assert state.torn() == "the trainer died"
    assert state.held() == "its weights are torn (the trainer died)"
    state.fail("again")
    assert state.torn() == "the trainer died"


def test_only_a_complete_sync_or_a_reload_heals(state):
    state.open(4, 5.0)
    state.writing()
    state.fail("first")
    assert state.open(5, 5.0)  # it was torn
    state.fail("second, before a byte")
    assert state.torn() == "first"
    state.open(6, 5.0)
    state.writing()
    state.received(5.0)
    state.finishing(6)
    state.done()
    assert state.held() is None
    state.open(7, 5.0)
    state.writing()
    state.fail("third")
    healed = []
    state.on_healed = lambda: healed.append(True)
    state.heal()
    assert (state.held(), healed) == (None, [True])
    state.heal()
    assert healed == [True]


def test_bytes_after_the_end_of_a_sync_are_refused(state):
    state.open(4, 5.0)
    state.fail("aborted")
    with pytest.raises(EngineError, match="closed before its first byte"):
        state.writing()
    with pytest.raises(EngineError, match="ended meanwhile"):
        state.received(5.0)
    with pytest.raises(EngineError, match=r"version 4 cannot be finished.*idle"):
        state.finishing(4)


def test_another_version_cannot_be_finished(state):
    state.open(4, 5.0)
    state.writing()
    state.received(5.0)
    with pytest.raises(EngineError, match="version 5 cannot be finished"):
        state.finishing(5)


def test_a_running_sync_keeps_others_out(state):
    state.open(4, 5.0)
    state.open(5, 5.0)  # nothing was written: begun again
    state.writing()
    with pytest.raises(EngineError, match="version 5 is still being received"):
        state.open(6, 5.0)
    assert not state.reserve()


def test_an_update_of_the_engine_keeps_a_sync_out(state):
    assert state.reserve()
    with pytest.raises(EngineError, match="weight update of its own"):
        state.open(4, 5.0)
    state.release()
    state.open(4, 5.0)


def test_a_driver_that_never_comes_back(state, monkeypatch):
    monkeypatch.setattr(guard, "SLACK_S", 0.0)
    state.open(4, 0.0)
    assert (state.held(), state.phase) == (None, "idle")  # nothing was written
    state.open(5, 5.0)
    state.writing()
    state.received(0.0)
    assert "version 5 was received, but the driver" in str(state.torn())


def test_a_driver_has_the_time_it_named(state):
    state.open(4, 5.0)
    state.writing()
    state.received(5.0)
    assert state.torn() is None
    assert state._expires > time.monotonic() + 5.0


def test_one_record_for_each_scheduler():
    class Scheduler:
        pass

    one, other = Scheduler(), Scheduler()
    assert state_of(one) is state_of(one)
    assert state_of(one) is not state_of(other)


def test_a_paused_loop_rests_while_weights_are_written(monkeypatch):
    rests = []
    monkeypatch.setattr(guard.time, "sleep", rests.append)

    class Scheduler:
        pass

    scheduler = Scheduler()
    state = guard.state_of(scheduler)

    def turn():
        before = len(rests)
        assert guard.around_requests(lambda scheduler, requests: "handled", scheduler, []) == "handled"
        return len(rests) > before

    assert not turn()  # it generates
    state.acknowledge("retract")
    assert not turn()  # paused by somebody else
    state.open(1, 5)
    state.writing()
    assert turn()
    assert rests == [guard.REST_S]
