"""The record of one sync: whom each round waits for, and that an outcome reaches everybody."""

from __future__ import annotations

import asyncio

import pytest

from rdt_core import wire
from rdt_core.errors import SyncError, WireError
from rdt_core.members import Members
from rdt_core.record import SyncRecord
from rdt_testbed.clock import run
from rdt_testbed.group import GROUP, engine, report

pytestmark = pytest.mark.unit


def record(rounds: dict[int, int]) -> SyncRecord:
    members = Members(GROUP, len(rounds))
    readers = {}
    for rank in range(2):
        members.connect(wire.encode(engine("a", rank, 2, sources=1)), None)
        readers[f"a/{rank}"] = members.replicas["a"].readers[rank]
    return SyncRecord(1, 5, rounds, ("a",), readers, 600.0)


def test_a_round_waits_for_the_source_ranks_that_have_it_and_for_every_reader() -> None:
    sync = record({0: 3, 1: 1})
    assert sync.published(0).missing == (0, 1)
    assert sync.published(2).missing == (0,)
    assert sync.read(2).missing == ("a/0", "a/1")
    assert sync.published(2) is sync.published(2)


@pytest.mark.parametrize("round", [-1, 3])
def test_rounds_that_nobody_declared_are_refused(round: int) -> None:
    sync = record({0: 3, 1: 1})
    with pytest.raises(WireError, match="declared 3 rounds"):
        sync.published(round)
    with pytest.raises(WireError, match="declared 3 rounds"):
        sync.read(round)


def test_a_failure_wakes_whoever_waits_for_the_sync() -> None:
    async def main() -> None:
        sync = record({0: 1, 1: 1})
        gates = [sync.published(0), sync.read(0), sync.accounted, sync.ended, sync.readers["a/1"].offered]
        waiters = [asyncio.create_task(gate.wait(60)) for gate in gates]
        await asyncio.sleep(0)
        assert sync.has_waiters
        sync.end(failure="it broke")
        found = await asyncio.gather(*waiters, return_exceptions=True)
        assert [(type(one), str(one)) for one in found] == [(SyncError, "it broke")] * 5
        assert not sync.is_running
        assert not sync.has_waiters

    run(main())


def test_a_report_opens_the_end_and_stops_the_watchdog() -> None:
    async def main() -> None:
        sync = record({0: 1, 1: 1})
        loop = asyncio.get_running_loop()
        sync.watchdog = loop.call_later(5, pytest.fail, "the watchdog rang")
        waiter = asyncio.create_task(sync.ended.wait(60))
        await asyncio.sleep(0)
        sync.end(report=b"report")
        await waiter
        assert sync.watchdog is None
        await asyncio.sleep(10)

    run(main())


def test_what_keeps_a_sync_from_its_commit() -> None:
    sync = record({0: 1, 1: 1})
    assert sync.account(report("a/0", 5)) == ""
    assert sync.describe_silence() == "no account of the bytes from engine rank a/1"
    assert not sync.accounted.is_open
    assert sync.account(report("a/1", 5)) == ""
    assert sync.describe_silence() == "the driver did not commit"
    assert sync.accounted.is_open


def test_an_account_that_does_not_match_is_not_counted() -> None:
    sync = record({0: 1, 1: 1})
    assert "1 bytes arrived" in sync.account(report("a/0", 5, bytes=1))
    assert "it pulled version 4" in sync.account(report("a/0", 4))
    assert not sync.reports
    assert sync.accounted.missing == sync.read(0).missing == ("a/0", "a/1")


def test_an_account_gives_back_every_round() -> None:
    sync = record({0: 3, 1: 1})
    sync.acknowledge("a/0", 1)
    sync.acknowledge("a/1", 3)
    assert [sync.read(round).missing for round in range(3)] == [(), ("a/0",), ("a/0",)]
    sync.account(report("a/0", 5))
    assert all(sync.read(round).is_open for round in range(3))


def test_requests_without_an_offer_are_the_source_ranks_to_answer() -> None:
    readers = record({0: 1, 1: 1}).readers
    readers["a/0"].offered.arrive(0)
    again = SyncRecord(2, 6, {0: 1, 1: 1}, ("a",), readers, 600.0)
    assert {rank: [one.reader for one in asked] for rank, asked in again.unanswered.items()} == {0: ["a/1"]}
