"""Transfers posted together: each is timed by itself, whatever is behind or before it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from rdt_core.errors import DeadlineError
from rdt_core.transport.base import PreparedTransfer, Turn
from rdt_core.transport.memory_local import LocalReader
from rdt_core.transport.waiting import post_all, wait_all
from rdt_testbed.halves import Group

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")


class Timed:
    """A transfer that has landed so many seconds after it was posted."""

    def __init__(self, log: list[str], name: str, seconds: float, nbytes: int = 1000, turn: Turn = Turn.AGENT) -> None:
        self.nbytes, self.turn = nbytes, turn
        self._log, self._name, self._seconds = log, name, seconds
        self._at = float("inf")

    def post(self) -> None:
        self._log.append(f"post {self._name}")
        if self.turn is Turn.BLOCKING:
            time.sleep(self._seconds)
        self._at = time.perf_counter() + (0.0 if self.turn is Turn.BLOCKING else self._seconds)

    def poll(self) -> bool:
        return time.perf_counter() >= self._at

    def wait(self, deadline: float) -> None:
        left = self._at - time.perf_counter()
        if left > 0:
            if time.monotonic() + left > deadline:
                raise DeadlineError(f"{self._name} had not landed")
            threading.Event().wait(left)
        self._log.append(f"wait {self._name}")

    def release(self) -> None:
        pass


def test_all_are_posted_before_any_is_waited_for() -> None:
    log: list[str] = []
    wait_all(post_all([(n, Timed(log, str(n), 0.01)) for n in range(4)], CPU), time.monotonic() + 5)
    assert log == [f"{verb} {n}" for verb in ("post", "wait") for n in range(4)]


def test_a_slow_one_in_front_does_not_make_the_others_slow() -> None:
    log: list[str] = []
    flights = post_all([(0, Timed(log, "slow", 0.4)), (1, Timed(log, "fast", 0.02))], CPU)
    began = time.perf_counter()
    wait_all(flights, time.monotonic() + 5)
    spent = time.perf_counter() - began
    slow, fast = flights
    assert fast.landed - fast.posted < 0.2 < 0.4 <= slow.landed - slow.posted
    assert fast.waited < 0.1 < 0.35 < slow.waited
    assert slow.waited + fast.waited <= spent + 0.01


def test_time_that_several_take_is_shared_by_bytes() -> None:
    log: list[str] = []
    flights = post_all([(0, Timed(log, "large", 0.2, nbytes=9000)), (1, Timed(log, "small", 0.2, nbytes=1000))], CPU)
    wait_all(flights, time.monotonic() + 5)
    assert flights[0].waited == pytest.approx(9 * flights[1].waited, rel=0.3)


def test_what_landed_meanwhile_was_not_waited_for() -> None:
    log: list[str] = []
    flights = post_all([(0, Timed(log, "one", 0.1))], CPU)
    threading.Event().wait(0.2)  # the reader lands another chunk
    wait_all(flights, time.monotonic() + 5)
    assert flights[0].waited < 0.05


@pytest.mark.parametrize("turn", [Turn.BLOCKING, Turn.WAITED])
def test_those_that_move_inside_a_call_are_charged_for_it(turn: Turn) -> None:
    log: list[str] = []
    flights = post_all([(0, Timed(log, "one", 0.1, turn=turn)), (1, Timed(log, "two", 0.0))], CPU)
    wait_all(flights, time.monotonic() + 5)
    assert flights[0].waited >= 0.09
    assert flights[1].waited < 0.05
    assert sorted(log) == ["post one", "post two", "wait one", "wait two"]


@pytest.mark.parametrize("turn", [Turn.AGENT, Turn.WAITED])
def test_a_deadline_names_what_did_not_land(turn: Turn) -> None:
    log: list[str] = []
    flights = post_all([(0, Timed(log, "fast", 0.0)), (1, Timed(log, "stuck", 9.0, turn=turn))], CPU)
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="stuck had not landed"):
        wait_all(flights, began + 0.2)
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("mode", ["live", "snapshot"])
def test_a_sync_posts_to_all_owners_before_it_waits_for_any(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    log: list[tuple[str, int]] = []

    class Logged:
        def __init__(self, inner: PreparedTransfer, source: int) -> None:
            self._inner, self._source = inner, source
            self.nbytes, self.turn, self.release = inner.nbytes, inner.turn, inner.release

        def post(self) -> None:
            log.append(("post", self._source))
            self._inner.post()

        def poll(self) -> bool:
            log.append(("poll", self._source))
            return self._inner.poll()

        def wait(self, deadline: float) -> None:
            log.append(("wait", self._source))
            self._inner.wait(deadline)

    prepare = LocalReader.prepare

    def logged(self: LocalReader, *args: Any) -> Logged:
        return Logged(prepare(self, *args), int(self._where.rpartition(" ")[2]))

    monkeypatch.setattr(LocalReader, "prepare", logged)
    made = Group(4, 1, mode=mode)
    try:
        for version in (1, 2):
            log.clear()
            made.publish(version)
            assert log[:4] == [("post", source) for source in range(4)]
            assert {verb for verb, _ in log[4:]} == {"poll", "wait"}
            assert sorted(log[-4:]) == [("wait", source) for source in range(4)]
    finally:
        made.close()
