"""What `VllmServer` sends ahead of a sync: who may, who goes on from it, who takes it back. No engine runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rdt_core.engines import STEPS
from rdt_core.errors import EngineError
from rdt_testbed.vllm_calls import Engine
from rdt_vllm.ahead import Ahead
from rdt_vllm.protocol import AT_STEP, RECEIVING
from rdt_vllm.server import VllmServer

pytestmark = pytest.mark.unit

#: of the driver that stamped the engine
MARK = "its mark"
BACK = ["abort", "finish", "resume"]


class Made:
    """A server whose engine serves version 6, as its driver left it; to be made in the event loop."""

    def __init__(self, *, slow: float = 0.0, limit_s: float = 60.0) -> None:
        self.engine = Engine()
        self.engine.renderer = SimpleNamespace(clear_mm_cache_async=lambda: asyncio.sleep(slow))
        self.server = VllmServer.__new__(VllmServer)
        self.server._host(self.engine)
        self.server._ahead = Ahead(self.engine, limit_s)
        self._tickets = 0

    async def stamped(self, mark: str = MARK, version: str = "6") -> None:
        self.engine.says = "receiving"
        await self.server.update_weight_version("receiving")
        assert await self.server.stamp_and_resume("receiving", version, mark) == ("receiving", version)
        self.engine.calls.clear()

    async def send(self, mark: str = MARK) -> str:
        self._tickets += 1
        ticket = f"ticket {self._tickets}"
        await self.server.pause_ahead(ticket, mark, mode="keep", clear_cache=True)
        return ticket

    async def receive(self, clear_cache: bool = True) -> None:
        told = await self.server.receive_version(7, mode="keep", clear_cache=clear_cache, limit_s=5.0)
        assert told.keys() == set(STEPS)

    def back(self, ticket: str, mark: str = MARK) -> Awaitable[bool]:
        return self.server.take_back(ticket, mark)


def run(what: Callable[[Made], Awaitable[None]], **options: Any) -> list[str]:
    """Returns what the engine was told since it was stamped."""

    async def main() -> list[str]:
        made = Made(**options)
        await made.stamped()
        await what(made)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert len(left) <= 1, "at most one that waits for its time to be over"
        return made.engine.names

    return asyncio.run(main())


def test_a_sync_goes_on_from_what_was_sent_ahead_of_it() -> None:
    async def what(made: Made) -> None:
        await made.send()
        await asyncio.sleep(0.01)
        assert made.engine.names == ["start", "pause"]
        await made.receive()
        await made.server.stamp_and_resume(f"{RECEIVING}7", "7")
        await made.receive()

    told = run(what)
    assert told[2:8] == [f"stamp {RECEIVING}7", "update", "finish", "stamp 7", "resume", "ask"]
    assert told[8:10] == ["start", "pause"], "the next one begins by itself"


def test_a_sync_with_another_policy_begins_anew() -> None:
    async def what(made: Made) -> None:
        await made.send()
        await made.receive(clear_cache=False)

    told = run(what)
    assert told[:4] == ["start", "pause", "abort", "finish"]
    assert sorted(told[4:6]) == ["pause", "start"]
    assert told[6:] == [f"stamp {RECEIVING}7", "update", "finish"]


@pytest.mark.parametrize(("broken", "step"), [("pause", "pause"), ("start", "begin")])
def test_what_failed_ahead_is_told_by_the_sync(broken: str, step: str) -> None:
    async def what(made: Made) -> None:
        made.engine.fails = {broken}
        await made.send()
        with pytest.raises(EngineError, match=f"{AT_STEP}{step}; RuntimeError: {broken} broke"):
            await made.receive()

    assert run(what) == ["start", "pause"]


def test_it_is_taken_back_only_once_it_was_done_and_the_engine_is_as_it_was_left() -> None:
    async def what(made: Made) -> None:
        for _ in range(2):
            ticket = await made.send()
            assert await made.back(ticket)
            assert await made.back(ticket), "nothing is left to be done"

    assert run(what, slow=0.02) == 2 * ["start", "pause", *BACK]


@pytest.mark.parametrize("broken", ["pause", "start"])
def test_what_failed_ahead_is_left_alone(broken: str) -> None:
    async def what(made: Made) -> None:
        made.engine.fails = {broken}
        assert not await made.back(await made.send())
        await made.send()

    assert run(what) == ["start", "pause"]


@pytest.mark.parametrize("broken", ["abort", "finish", "resume"])
def test_what_could_not_be_undone_is_not_called_undone(broken: str) -> None:
    async def what(made: Made) -> None:
        made.engine.fails = {broken}
        ticket = await made.send()
        if broken == "resume":
            with pytest.raises(RuntimeError, match="resume broke"):
                await made.back(ticket)
        else:
            assert not await made.back(ticket)
        await made.send()

    assert run(what) == ["start", "pause", *BACK], "and is not sent again"


def test_a_worker_of_which_the_update_is_closed_already_is_no_failure() -> None:
    async def what(made: Made) -> None:
        made.engine.fails = {"finish"}
        made.engine.text = "finish_weight_update without a matching start_weight_update"
        assert await made.back(await made.send())

    run(what)


def test_what_comes_after_it_was_taken_back_is_not_sent() -> None:
    async def what(made: Made) -> None:
        assert not await made.back("late")
        await made.server.pause_ahead("late", MARK, mode="keep", clear_cache=True)

    assert run(what) == []


def test_without_a_sync_the_engine_goes_on_by_itself() -> None:
    async def what(made: Made) -> None:
        late = await made.send()
        resumed = asyncio.Event()
        made.engine.on["resume"] = resumed.set
        await asyncio.wait_for(resumed.wait(), 5.0)
        await asyncio.sleep(0.01)
        assert await made.back(late), "its driver lives after all"
        ticket = await made.send()
        made.engine.on.clear()
        assert await made.back(ticket), "and the next sync may begin ahead again"
        await asyncio.sleep(0.1)

    assert run(what, limit_s=0.05) == 2 * ["start", "pause", *BACK]


def test_a_sync_that_came_in_time_is_not_ended_by_that_time() -> None:
    async def what(made: Made) -> None:
        await made.send()
        await made.receive()
        await asyncio.sleep(0.1)

    assert run(what, limit_s=0.05)[2:] == [f"stamp {RECEIVING}7", "update", "finish"]


USES: dict[str, Callable[[Made], Awaitable[Any]]] = {
    "sync": lambda made: made.receive(),
    "stamp": lambda made: made.server.update_weight_version("6"),
    "resume": lambda made: made.server.resume_generation(),
    "update": lambda made: made.server.update_weights(SimpleNamespace()),
    "start": lambda made: made.server.start_weight_update(),
    "connect": lambda made: made.server.init_weight_transfer_engine(SimpleNamespace()),
    "pause": lambda made: made.server.pause_generation(),
    "another driver's stamp of the same version": lambda made: made.stamped("another mark"),
}


@pytest.mark.parametrize("use", USES)
def test_an_engine_that_was_used_since_is_left_alone(use: str) -> None:
    """A driver whose place was taken finds out only when its sync begins."""

    async def what(made: Made) -> None:
        await USES[use](made)
        made.engine.calls.clear()
        assert await made.back(await made.send()), "nothing was sent: whoever has it now goes on"

    assert run(what) == []


@pytest.mark.parametrize(
    "use", [use for use in USES if use not in ("sync", "another driver's stamp of the same version")]
)
@pytest.mark.parametrize("when", ["before", "while"])
def test_who_uses_an_engine_comes_after_what_was_sent_ahead_and_that_is_closed(use: str, when: str) -> None:
    async def what(made: Made) -> None:
        ticket = await made.send()
        back = None
        if when == "while":
            back = asyncio.ensure_future(made.back(ticket))
            await asyncio.sleep(0)
        await USES[use](made)
        assert not await (back or made.back(ticket))
        await made.send()

    told = run(what, slow=0.02)
    assert told[:4] == ["start", "pause", "abort", "finish"]
    assert len(told) == 5


def test_a_driver_takes_back_nothing_of_anothers_sync() -> None:
    async def what(made: Made) -> None:
        ticket = await made.send()
        theirs = asyncio.ensure_future(made.receive())  # it goes on from there
        await asyncio.sleep(0)
        assert not await made.back(ticket)
        await theirs
        assert not await made.back(ticket)

    assert run(what) == ["start", "pause", f"stamp {RECEIVING}7", "update", "finish"]


def test_a_sync_that_comes_while_it_is_taken_back_goes_on_from_there() -> None:
    async def what(made: Made) -> None:
        back = asyncio.ensure_future(made.back(await made.send()))
        await asyncio.sleep(0)
        await made.receive()
        assert not await back

    assert run(what, slow=0.02) == ["start", "pause", f"stamp {RECEIVING}7", "update", "finish"]


def test_a_call_that_waits_for_it_to_be_closed_is_not_overtaken_by_a_sync() -> None:
    async def what(made: Made) -> None:
        await made.send()
        resuming = asyncio.ensure_future(made.server.resume_generation())
        await asyncio.sleep(0)
        await made.receive()
        await resuming

    told = run(what, slow=0.02)
    assert told[:5] == ["start", "pause", "abort", "finish", "resume"]
    assert sorted(told[5:7]) == ["pause", "start"]
    assert told[7:] == [f"stamp {RECEIVING}7", "update", "finish"]


@pytest.mark.parametrize("pauses", [True, False])
def test_a_pause_right_after_the_stamp_counts(pauses: bool) -> None:
    async def what(made: Made) -> None:
        await made.server.update_weight_version("receiving")
        stamping = asyncio.ensure_future(made.server.stamp_and_resume("receiving", "6", MARK))
        await asyncio.sleep(0)
        if pauses:
            await made.server.pause_generation()
        await stamping
        made.engine.calls.clear()
        await made.send()
        await asyncio.sleep(0.01)

    assert run(what) == ([] if pauses else ["start", "pause"])
