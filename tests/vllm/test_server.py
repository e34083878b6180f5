"""What `VllmServer` sends to its engine in a sync that it takes in one call, and in which order. No engine runs here.

vLLM's client sends a call before anything else runs, and EngineCore executes calls in the order in which they come: the engine
below does the same. That both are so in vLLM itself is seen by the syncs of test_sync.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from rdt_core.engines import STEPS
from rdt_core.errors import EngineError
from rdt_vllm.protocol import AT_STEP, RECEIVING
from rdt_vllm.server import VllmServer

pytestmark = pytest.mark.unit


class Engine:
    """Executes one call after the other.

    Attributes:
        calls: in the order of their execution, with the calls that were sent and not executed yet.
        fails: calls that fail.
        hangs: calls that take for ever, and all after them.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.fails: set[str] = set()
        self.hangs: set[str] = set()
        self.says = "6"
        self.on: dict[str, Callable[[], None]] = {}
        self._queue: list[tuple[str, asyncio.Future[Any], Callable[[], Any]]] = []
        self.engine_core = SimpleNamespace(pause_scheduler_async=lambda **_: self._send("pause"))
        self.renderer = SimpleNamespace(clear_mm_cache_async=lambda: asyncio.sleep(0))

    async def _send(self, name: str, run: Callable[[], Any] = lambda: None) -> Any:
        done = asyncio.get_running_loop().create_future()
        self._queue.append((name, done, run))
        if len(self._queue) == 1:
            asyncio.get_running_loop().call_later(0.001, self._execute)
        return await done

    def _execute(self) -> None:
        while self._queue:
            name, done, run = self._queue[0]
            if name in self.hangs:
                return
            self.calls.append((name, tuple(waiting for waiting, *_ in self._queue[1:])))
            self.on.get(name, lambda: None)()
            del self._queue[0]
            if done.cancelled():
                continue
            if name in self.fails:
                done.set_exception(RuntimeError(f"{name} broke"))
            else:
                done.set_result(run())

    def start_weight_update(self) -> Coroutine[Any, Any, None]:
        return self._send("start")

    def update_weights(self, request: Any) -> Coroutine[Any, Any, None]:
        return self._send("update")

    def finish_weight_update(self, weight_version: str | None = None) -> Coroutine[Any, Any, None]:
        return self._send("finish")

    def update_weight_version(self, version: str) -> Coroutine[Any, Any, None]:
        return self._send(f"stamp {version}", lambda: setattr(self, "says", version))

    def get_weight_version(self) -> Coroutine[Any, Any, str]:
        return self._send("ask", lambda: self.says)

    def resume_generation(self) -> Coroutine[Any, Any, None]:
        return self._send("resume")


@pytest.fixture
def made() -> tuple[VllmServer, Engine]:
    server, engine = VllmServer.__new__(VllmServer), Engine()
    server._llm = engine
    return server, engine


def receive(server: VllmServer, limit_s: float = 5.0) -> Coroutine[Any, Any, dict[str, float]]:
    return server.receive_version(7, mode="keep", clear_cache=True, limit_s=limit_s)


def test_a_sync_is_sent_in_two_parts_and_its_stamp_in_one(made):
    server, engine = made

    async def main() -> None:
        assert (await receive(server)).keys() == set(STEPS)
        assert await server.stamp_and_resume(f"{RECEIVING}7", "7") == (f"{RECEIVING}7", "7")

    asyncio.run(main())
    names = [name for name, _ in engine.calls]
    assert sorted(names[:2]) == ["pause", "start"]
    assert names[2:] == [f"stamp {RECEIVING}7", "update", "finish", "stamp 7", "resume", "ask"]
    assert engine.calls[2][1] == ("update", "finish")
    assert engine.calls[5][1] == ("resume", "ask")


def test_nothing_of_the_second_part_is_sent_before_the_engine_has_paused(made):
    server, engine = made
    engine.hangs = {"pause"}
    with pytest.raises(EngineError, match=f"{AT_STEP}pause; it was not done 0.05 s after"):
        asyncio.run(receive(server, 0.05))
    assert {name for name, _ in engine.calls} <= {"start"}


@pytest.mark.parametrize(
    ("broken", "step"), [("pause", "pause"), ("start", "begin"), ("update", "pull"), ("finish", "finish")]
)
def test_the_first_step_that_fails_is_named(made, broken, step):
    server, engine = made
    engine.fails = {broken, "finish"}

    async def main() -> None:
        with pytest.raises(EngineError, match=f"{AT_STEP}{step}; RuntimeError: {broken} broke"):
            await receive(server)
        engine.calls.clear()
        assert await server.stamp_and_resume(f"{RECEIVING}7", "7") != (f"{RECEIVING}7", "7") or step in STEPS[2:]
        assert engine.calls[0][0] == "ask", "what a sync that failed left is not known"

    asyncio.run(main())


@pytest.mark.parametrize("call", ["resume_generation", "update_weights", "update_weight_version"])
def test_a_call_that_ends_a_sync_keeps_its_second_part_from_being_sent(made, call):
    server, engine = made

    async def main() -> None:
        ended: list[asyncio.Task[Any]] = []
        arguments = {"update_weights": (SimpleNamespace(),), "update_weight_version": ("6",)}.get(call, ())
        engine.on["pause"] = lambda: ended.append(asyncio.ensure_future(getattr(server, call)(*arguments)))
        with pytest.raises(EngineError, match=f"{AT_STEP}pull; its sync was ended by a later call"):
            await receive(server)
        await asyncio.gather(*ended)

    asyncio.run(main())
    assert not {name for name, _ in engine.calls} & {"finish", f"stamp {RECEIVING}7"}


async def stamped(server: VllmServer, engine: Engine, version: str = "6") -> None:
    engine.says = "receiving"
    assert await server.stamp_and_resume("receiving", version) == ("receiving", version)
    engine.calls.clear()


async def ahead(server: VllmServer, version: str = "6") -> None:
    await server.pause_ahead("mine", version, mode="keep", clear_cache=True)


def test_a_sync_goes_on_from_what_was_sent_ahead_of_it(made):
    server, engine = made

    async def main() -> None:
        await stamped(server, engine)
        await ahead(server)
        await asyncio.sleep(0.01)
        assert sorted(name for name, _ in engine.calls) == ["pause", "start"]
        assert (await receive(server)).keys() == set(STEPS)
        await server.stamp_and_resume(f"{RECEIVING}7", "7")
        assert (await receive(server)).keys() == set(STEPS)

    asyncio.run(main())
    names = [name for name, _ in engine.calls]
    first = [f"stamp {RECEIVING}7", "update", "finish", "stamp 7", "resume", "ask"]
    assert names[2:8] == first
    assert sorted(names[8:10]) == ["pause", "start"], "the next one begins by itself"


@pytest.mark.parametrize(("broken", "step"), [("pause", "pause"), ("start", "begin")])
def test_what_failed_ahead_is_told_by_the_sync(made, broken, step):
    server, engine = made
    engine.fails = {broken}

    async def main() -> None:
        await stamped(server, engine)
        await ahead(server)
        with pytest.raises(EngineError, match=f"{AT_STEP}{step}; RuntimeError: {broken} broke"):
            await receive(server)

    asyncio.run(main())
    assert {name for name, _ in engine.calls} <= {"pause", "start"}


def test_what_was_sent_ahead_is_taken_back_only_after_it_was_done(made):
    server, engine = made
    engine.renderer = SimpleNamespace(clear_mm_cache_async=lambda: asyncio.sleep(0.05))
    engine.fails = {"update"}  # as vLLM's does when it is told to abort

    async def main() -> None:
        for _ in range(2):  # and the engine is as it was left
            await stamped(server, engine)
            await ahead(server)
            assert await server.take_back("mine")
            assert [name for name, _ in engine.calls] == ["start", "pause", "update", "finish", "resume"]
            assert not await server.take_back("mine")
        engine.calls.clear()
        await ahead(server)
        assert await server.take_back("mine")
        assert len(engine.calls) == 5

    asyncio.run(main())


@pytest.mark.parametrize("broken", ["pause", "start"])
def test_what_failed_ahead_is_left_alone(made, broken):
    server, engine = made
    engine.fails = {broken}

    async def main() -> None:
        await stamped(server, engine)
        await ahead(server)
        assert not await server.take_back("mine")

    asyncio.run(main())
    assert sorted(name for name, _ in engine.calls) == ["pause", "start"]


@pytest.mark.parametrize("use", ["sync", "stamp", "resume", "abort", "pause", "other stamp"])
def test_an_engine_that_was_used_since_is_not_paused_ahead(made, use):
    """A driver whose place was taken finds out only when its sync begins."""
    server, engine = made

    async def main() -> None:
        await stamped(server, engine)
        if use == "sync":
            await receive(server)
        elif use == "stamp":
            await server.update_weight_version("6")
        elif use == "resume":
            await server.resume_generation()
        elif use == "abort":
            await server.update_weights(SimpleNamespace())
        elif use == "pause":
            server._llm.pause_generation = lambda **_: asyncio.sleep(0)
            await server.pause_generation()
        else:
            await stamped(server, engine, "7")
        engine.calls.clear()
        await ahead(server)
        assert not await server.take_back("mine")

    asyncio.run(main())
    assert engine.calls == []


@pytest.mark.parametrize("when", ["before it is taken back", "while it is"])
def test_an_engine_that_somebody_paused_since_stays_paused(made, when):
    server, engine = made
    engine.renderer = SimpleNamespace(clear_mm_cache_async=lambda: asyncio.sleep(0.02))
    engine.pause_generation = lambda **_: engine._send("their pause")

    async def main() -> None:
        await stamped(server, engine)
        await ahead(server)
        back: asyncio.Task[bool] | None = None
        if when == "while it is":
            back = asyncio.ensure_future(server.take_back("mine"))
            await asyncio.sleep(0)
        await server.pause_generation()
        assert not await (back or server.take_back("mine"))
        await server.start_weight_update()
        await ahead(server)

    asyncio.run(main())
    names = [name for name, _ in engine.calls]
    assert "resume" not in names
    assert names[-2:] == ["their pause", "start"]
    assert names.count("update") == names.count("finish") == 1, "what was opened ahead is closed"


@pytest.mark.parametrize("pauses", [True, False])
def test_a_pause_right_after_the_stamp_counts(made, pauses):
    server, engine = made
    engine.pause_generation = lambda **_: engine._send("their pause")

    async def main() -> None:
        engine.says = "receiving"
        stamping = asyncio.ensure_future(server.stamp_and_resume("receiving", "6"))
        await asyncio.sleep(0)
        if pauses:
            await server.pause_generation()
        await stamping
        await ahead(server)

    asyncio.run(main())
    assert (server._opening is None) is pauses


def test_a_driver_takes_back_nothing_of_anothers_sync(made):
    server, engine = made

    async def main() -> None:
        await stamped(server, engine)
        await ahead(server)
        theirs = asyncio.ensure_future(receive(server))  # it goes on from there
        assert not await server.take_back("mine")
        await theirs
        assert not await server.take_back("mine")
        assert await server.stamp_and_resume(f"{RECEIVING}7", "7") == (f"{RECEIVING}7", "7")

    asyncio.run(main())
    assert [name for name, _ in engine.calls].count("resume") == 1


def test_a_sync_that_comes_while_it_is_taken_back_goes_on_from_there(made):
    server, engine = made
    engine.renderer = SimpleNamespace(clear_mm_cache_async=lambda: asyncio.sleep(0.02))

    async def main() -> None:
        await stamped(server, engine)
        await ahead(server)
        back = asyncio.ensure_future(server.take_back("mine"))
        await asyncio.sleep(0)
        await receive(server)
        assert not await back

    asyncio.run(main())
    assert [name for name, _ in engine.calls] == ["start", "pause", f"stamp {RECEIVING}7", "update", "finish"]


def test_an_engine_that_was_stamped_since_is_asked_and_left_alone(made):
    server, engine = made

    async def main() -> None:
        await receive(server)
        await server.update_weight_version("3")
        engine.calls.clear()
        assert await server.stamp_and_resume(f"{RECEIVING}7", "7") == ("3", "3")

    asyncio.run(main())
    assert [name for name, _ in engine.calls] == ["ask"]
