"""The tool itself: what it draws can be written down, replayed and drawn again."""

from __future__ import annotations

import random

import hypothesis
import pytest
from hypothesis import strategies as st

from rdt_testbed.faults import plan
from rdt_testbed.faults.faults import KINDS, Fault, Trial
from rdt_testbed.faults.points import corrupted

pytestmark = pytest.mark.unit

PASSED = {
    "source0": {
        "control.begin": 1,
        "control.join": 1,
        "client.pull:replica0/0": 1,
        "publisher.write": 4,
        "memory.available": 1,
    },
    "replica0/0": {"control.done": 1, "transfer.post": 3, "landing.open": 2, "control.offers": 1},
    "coordinator": {"coordinator.begin": 1},
}


def trials(seed: int, count: int) -> list[Trial]:
    rng = random.Random(seed)
    return [plan.draw(rng, plan.draw_setup(rng), plan.draw_action(rng), PASSED, timeout_s=1.0) for _ in range(count)]


def test_the_same_seed_draws_the_same_trials_and_another_one_others():
    assert trials(3, 50) == trials(3, 50) != trials(4, 50)


def test_a_trial_can_be_written_down():
    for trial in trials(1, 500):
        assert Trial.parse(str(trial)) == trial


def test_every_kind_is_drawn():
    drawn = {fault.kind for trial in trials(2, 2000) for fault in trial.faults}
    assert drawn == set(KINDS)


def test_faults_are_drawn_where_they_can_strike():
    for trial in trials(5, 2000):
        for fault in trial.faults:
            room = fault.phase.partition(".")[0]
            assert fault.kind != "flip" or (fault.phase == "transfer.post" and trial.setup.verify == "full")
            assert fault.kind not in ("drop", "duplicate", "lose") or room in ("control", "client")
            assert (room == "memory") == (fault.kind == "fill")


@pytest.mark.parametrize(
    "text", ["source0 control.begin 1 before", "a b 1 later kill", "a b 1 before explode", "a b x before kill"]
)
def test_what_is_no_fault_is_refused(text):
    with pytest.raises(ValueError, match="no fault"):
        Fault.parse(text)


@hypothesis.given(st.binary(min_size=1, max_size=40), st.integers(0, 1 << 20))
def test_corruption_changes_one_bit(data, salt):
    ((first, rest),) = corrupted([(data, 7)], salt)
    assert rest == 7
    assert sum((one ^ other).bit_count() for one, other in zip(data, first, strict=True)) == 1
