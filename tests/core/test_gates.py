"""Gates: who is missing, who is woken, and how."""

from __future__ import annotations

import asyncio

import pytest

from rdt_core.errors import MembershipError, SyncError
from rdt_core.gates import Gate, member_name, member_names
from rdt_testbed.clock import Deadlock, run

pytestmark = pytest.mark.unit


def test_a_gate_opens_when_the_last_member_arrives_and_counts_each_once() -> None:
    gate = Gate(("a/0", "a/1"))
    gate.arrive("a/0")
    gate.arrive("a/0")
    gate.arrive("somebody else")
    assert gate.missing == ("a/1",)
    assert not gate.is_open
    gate.arrive("a/1")
    assert gate.is_open


def test_a_gate_without_members_is_open() -> None:
    assert Gate().is_open


def test_expect_closes_an_open_gate_and_reset_replaces_the_members() -> None:
    gate = Gate((0,))
    gate.arrive(0)
    gate.expect((0, 1))
    assert gate.missing == (0, 1)
    gate.reset((2,))
    assert gate.missing == (2,)


def test_waiters_return_when_the_gate_opens() -> None:
    async def main() -> None:
        gate = Gate((0, 1))
        waiters = [asyncio.create_task(gate.wait(60)) for _ in range(3)]
        await asyncio.sleep(0)
        assert gate.waiting == 3
        gate.arrive(1)
        await asyncio.sleep(1)
        assert not any(waiter.done() for waiter in waiters)
        gate.arrive(0)
        await asyncio.gather(*waiters)
        assert gate.waiting == 0
        assert asyncio.get_running_loop().time() < 60

    run(main())


def test_a_deadline_ends_the_wait_at_its_time() -> None:
    async def main() -> None:
        gate = Gate((0,))
        with pytest.raises(TimeoutError):
            await gate.wait(60)
        assert asyncio.get_running_loop().time() == pytest.approx(60)
        with pytest.raises(TimeoutError):
            await gate.wait(-1)
        assert gate.waiting == 0

    run(main())


def test_wake_raises_the_same_class_and_text_in_every_waiter_and_leaves_the_gate_usable() -> None:
    async def main() -> None:
        gate = Gate((0,))
        waiters = [asyncio.create_task(gate.wait(60)) for _ in range(2)]
        await asyncio.sleep(0)
        error = MembershipError("gone")
        gate.wake(error)
        found = await asyncio.gather(*waiters, return_exceptions=True)
        assert [type(one) for one in found] == [MembershipError] * 2
        assert [str(one) for one in found] == ["gone"] * 2
        assert found[0] is not found[1]
        gate.arrive(0)
        gate.wake(SyncError("nobody hears this"))
        await gate.wait(0)

    run(main())


def test_what_was_decided_first_counts_for_a_waiter() -> None:
    async def main() -> None:
        gate = Gate((0,))
        waiter = asyncio.create_task(gate.wait(60))
        await asyncio.sleep(0)
        gate.wake(SyncError("first"))
        gate.arrive(0)
        with pytest.raises(SyncError, match="first"):
            await waiter

    run(main())


def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    async def main() -> None:
        gate = Gate((0,))
        waiter = asyncio.create_task(gate.wait(60))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert gate.waiting == 0

    run(main())


def test_names_of_members() -> None:
    assert member_name(3) == "source rank 3"
    assert member_name("a/0") == "engine rank a/0"
    assert member_names((0, "a/1")) == "source rank 0, engine rank a/1"
    assert member_names(range(18)).endswith("source rank 15 and 2 more")


def test_the_jumping_clock_reports_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main())
