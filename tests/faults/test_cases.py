"""Faults that broke a promise once, each as a campaign found it, with what was wrong."""

from __future__ import annotations

import pytest

from rdt_core import wire
from rdt_core.errors import TakenOverError
from rdt_core.members import Members
from rdt_testbed.faults.campaign import Runner, Trial
from rdt_testbed.faults.summary import Heartbeat
from rdt_testbed.group import GROUP, source, token

pytestmark = pytest.mark.integration

CASES = {
    # a second begin of a sync that was over by then waited for the next one, under the old version
    "begin_twice": "sources=2 replicas=1+1 mode=snapshot policy=best_effort; publish; source0 control.begin 1 before duplicate",
    # its connect, sent late, took the place of the engine rank that had replaced it
    "zombie_connects": "sources=1 replicas=1 mode=snapshot; attach; replica0/0 landing.trace 1 before stop -1",
    # transfers that were posted and never waited for could not be posted again, until somebody reconnected
    "pull_broke_off": "sources=2 replicas=1+1 mode=bucket pack=1024; publish; replica0/0 transfer.wait 5 before fail",
    "pull_without_files": "sources=2 replicas=2 mode=snapshot; publish; replica0/1 transfer.wait 1 before handles",
    # one bit of a request: both ends disagreed for ever about what their link moves
    "request_damaged": (
        "sources=2 replicas=1+1 mode=bucket pack=1024; catch_up; replica1/0 control.connect 1 before corrupt 777514"
    ),
    "offer_damaged": "sources=3 replicas=1 mode=bucket; catch_up; source2 control.offer 1 before corrupt 261557",
    # one bit of where a shard lies: other bytes landed, all were accounted for, and the version was stamped
    "manifest_damaged": (
        "sources=3 replicas=2 mode=snapshot verify=full; coordinator; source1 control.join 1 before corrupt 2186"
    ),
    # the second pull read buckets that held later rounds, and the account of the first stood for it
    "pull_twice": (
        "sources=2 replicas=1+2 mode=bucket verify=full; move; source0 client.receive:replica1/0 1 before duplicate"
    ),
    # a source rank joined again while an engine rank planned: its connect was refused, and the sync failed with it
    "epoch_advanced": (
        "sources=3 replicas=1+1; publish; source1 control.outcome 1 before kill & source0 publisher.write 1 after delay 1"
    ),
    # not found by a campaign: the answer of an engine that goes on is lost, or it never hears that it may
    "take_back_unheard": "sources=1 replicas=1+2; refused; source0 client.take_back:replica1/0 1 before drop",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_holds_now(name, runner: Runner):
    trial = Trial.parse(CASES[name])
    runner.run(trial)
    assert runner.summary.faults, "the fault did not come to pass"


def test_who_took_over_stays_when_others_tell_of_earlier_ones():
    members = Members(GROUP, 2)
    members.join(wire.encode(source(0, 2)), token(0), takeover=True)
    members.learn({0: 2})
    members.check_token(0, token(0))
    with pytest.raises(TakenOverError):
        members.join(wire.encode(source(0, 2)), "of an earlier one", term=2)


@pytest.mark.thorough
def test_rank_0_dies_often(nursery):
    # a new rank 0 that came to a new coordinator before the others was thrown out when these told of earlier ones
    trials = [
        Trial.parse(f"sources=2 replicas=1; publish; source0 {phase} 1 before kill")
        for phase in ("control.begin", "control.commit")
    ]
    with Heartbeat() as heartbeat:
        runner = Runner(nursery, heartbeat, timeout_s=0.25)
        for number in range(10):
            runner.run(trials[number % 2])
        runner.close()
