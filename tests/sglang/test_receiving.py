"""A sync in one call: what is sent beside what, what waits for what, and what ends it. The engine is a script; a real one that
fails in the same places: test_server.py."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from rdt_core.engines import STEPS
from rdt_core.errors import EngineError, StepError
from rdt_sglang import receiving
from rdt_sglang.callers import ActorCaller
from rdt_sglang.protocol import CALLS
from rdt_sglang.receiving import OneCall
from rdt_sglang.server import SGLangServer

pytestmark = pytest.mark.unit


class Engine:
    """Notes what is sent, in order. What is named in `held` is answered when the test says so; else at once.

    Attributes:
        sent: what was sent.
        fails: what each name fails with.
        said: the stamp.
    """

    def __init__(self, *held: str, said: str = "6") -> None:
        self.sent: list[str] = []
        self.said = said
        self.dead: str | None = None
        self.fails: dict[str, Exception] = {}
        self.timeouts: dict[str, float] = {}
        self._held = {name: asyncio.Event() for name in held}
        self.calls = OneCall(self, self._tell, self._check)

    async def _answer(self, name: str) -> None:
        if name in self._held:
            await self._held[name].wait()
        if name in self.fails:
            raise self.fails[name]

    async def note(self, name: str) -> None:
        self.sent.append(name)
        await self._answer(name)

    async def pause_generation(self, mode: str) -> None:
        await self.note(f"pause {mode}")

    async def continue_generation(self) -> None:
        await self.note("continue")

    async def flush_cache(self) -> tuple[bool, str]:
        await self.note("flush")
        return "no flush" not in self.fails, "Flush cache failed."

    async def update_weight_version(self, version: str) -> None:
        await self.note(f"stamp {version}")
        self.said = version

    async def get_weight_version(self) -> str:
        return self.said

    def _tell(self, call: str, arguments: Mapping[str, Any], timeout_s: float) -> asyncio.Future[list[dict[str, Any]]]:
        assert arguments["version"] == 7
        self.timeouts[call] = arguments["timeout_s"]
        self.sent.append(call)
        return asyncio.ensure_future(self._scheduled(call))

    async def _scheduled(self, call: str) -> list[dict[str, Any]]:
        await self._answer(call)
        return []

    def _check(self) -> None:
        if self.dead is not None:
            raise EngineError(self.dead)

    def answer(self, name: str) -> None:
        self._held[name].set()

    def sync(self, limit_s: float = 20.0, *, reset_cache: bool = True, mode: str = "retract") -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.calls.receive(7, mode=mode, reset_cache=reset_cache, limit_s=limit_s))


async def settled() -> None:
    """Everything that can go on without an answer has done so."""
    for _ in range(20):
        await asyncio.sleep(0)


BEGUN = ["pause retract", "begin", "stamp receiving 7"]
ALL = [*BEGUN, "pull", "finish", "flush"]


def test_a_whole_sync_and_its_commit():
    async def body() -> None:
        engine = Engine()
        seconds = await engine.sync()
        assert tuple(seconds) == STEPS
        assert engine.sent == ALL
        assert engine.said == "receiving 7"
        assert all(15 < timeout < 19.5 for timeout in engine.timeouts.values()), "a scheduler's own error comes first"
        engine.sent.clear()
        assert await engine.calls.stamp_and_resume("receiving 7", "7") == ("receiving 7", "7")
        assert engine.sent == ["stamp 7", "continue"]
        engine.sent.clear()
        await engine.sync(reset_cache=False, mode="in_place")
        assert engine.sent == ["pause in_place", *ALL[1:-1]]

    asyncio.run(body())


@pytest.mark.parametrize("last", ["begin", "stamp receiving 7"])
def test_no_byte_moves_before_every_scheduler_is_paused_and_the_stamp_is_off(last):
    async def body() -> None:
        engine = Engine("begin", "stamp receiving 7")
        sync = engine.sync()
        await settled()
        assert engine.sent == BEGUN, "neither waits for the other"
        for name in ("begin", "stamp receiving 7"):
            if name != last:
                engine.answer(name)
        await settled()
        assert engine.sent == BEGUN
        engine.answer(last)
        await sync
        assert engine.sent == ALL

    asyncio.run(body())


def test_no_token_is_counted_to_the_wrong_version():
    async def body() -> None:
        engine = Engine("pause retract")
        sync = engine.sync()
        await settled()
        assert engine.sent == ["pause retract", "begin"]
        engine.answer("pause retract")
        await sync

    asyncio.run(body())


def test_nobody_finishes_before_everybody_has_pulled():
    async def body() -> None:
        engine = Engine("pull", "finish")
        sync = engine.sync()
        await settled()
        assert engine.sent == [*BEGUN, "pull"]
        engine.answer("pull")
        await settled()
        assert engine.sent == ALL, "the cache is dropped beside the last step"
        assert not sync.done()
        engine.answer("finish")
        await sync

    asyncio.run(body())


@pytest.mark.parametrize(
    ("fails", "step", "sent"),
    [
        ("pause retract", "pause", 2),
        ("begin", "begin", 3),
        ("stamp receiving 7", "begin", 3),
        ("pull", "pull", 4),
        ("finish", "finish", 6),
        ("flush", "finish", 6),
        ("no flush", "finish", 6),
    ],
)
def test_the_step_that_failed_is_named_and_none_follows(fails, step, sent):
    async def body() -> None:
        engine = Engine()
        engine.fails[fails] = EngineError("scheduler 1: it broke")
        told = "Flush cache failed" if fails == "no flush" else "^scheduler 1: it broke$"
        with pytest.raises(StepError, match=told) as caught:
            await engine.sync()
        assert caught.value.step == step
        await settled()
        assert engine.sent == ALL[:sent]

    asyncio.run(body())


def test_who_died_is_told_and_not_who_was_ended_after_it():
    async def body() -> None:
        engine = Engine("pull")
        engine.fails["pull"] = EngineError("scheduler 0: was killed")
        sync = engine.sync()
        await settled()
        engine.dead = "scheduler 1 of 2 died"
        engine.answer("pull")
        with pytest.raises(StepError, match=r"^scheduler 1 of 2 died$") as caught:
            await sync
        assert caught.value.step == "pull"
        engine.sent.clear()
        with pytest.raises(EngineError, match="scheduler 1 of 2 died"):
            await engine.sync()
        assert engine.sent == []

    asyncio.run(body())


@pytest.mark.parametrize("held", ALL)
def test_a_step_that_is_not_done_in_time_is_named(held, monkeypatch):
    monkeypatch.setattr(receiving, "_GRACE_S", 0.01)

    async def body() -> None:
        engine = Engine(held)
        began = time.monotonic()
        with pytest.raises(StepError, match=r"was not done 0\.1 s after it began") as caught:
            await engine.sync(0.05)
        assert time.monotonic() - began < 5
        assert caught.value.step == {"stamp receiving 7": "begin", "flush": "finish", "pause retract": "pause"}.get(
            held, held
        )
        engine.answer(held)  # what was late is not taken for the answer to anything else
        sent = list(engine.sent)
        await settled()
        assert engine.sent == sent

    asyncio.run(body())


@pytest.mark.parametrize("held", ALL)
@pytest.mark.parametrize("by", ["abort", "restore", "another sync", "commit"])
def test_nothing_is_sent_for_a_sync_that_was_ended(held, by):
    async def body() -> None:
        engine = Engine(held)
        sync = engine.sync()
        await settled()
        assert not sync.done()
        sent = len(engine.sent)
        if by == "abort":
            engine.calls.ended()
        elif by == "restore":
            assert await engine.calls.restore(8) is False
        elif by == "commit":
            await engine.calls.stamp_and_resume("receiving 5", "5")
        else:
            engine.dead = "just now"
            with pytest.raises(EngineError, match="just now"):
                await engine.sync()
            engine.dead = None
        engine.answer(held)
        with pytest.raises(StepError, match="version 7 was ended by a later call before its"):
            await sync
        await settled()
        assert len(engine.sent) == sent, engine.sent[sent:]

    asyncio.run(body())


@pytest.mark.parametrize(("said", "restored"), [("receiving 7", "6"), ("6", "6"), ("5", "5"), ("default", "default")])
def test_the_stamp_from_before_is_given_back_to_the_engine_that_had_it(said, restored):
    async def body() -> None:
        engine = Engine()
        assert await engine.calls.restore(7) is False, "it took no sync"
        engine.fails["begin"] = EngineError("it is not connected")
        with pytest.raises(StepError):
            await engine.sync()
        engine.said = said  # "6": the stamp was on its way only; others: somebody has stamped it since
        assert await engine.calls.restore(8) is False
        assert await engine.calls.restore(7) is (said in ("receiving 7", "6"))
        assert engine.said == restored

    asyncio.run(body())


@pytest.mark.parametrize("said", ["default", "receiving 8", "7"])
def test_an_engine_that_is_another_one_is_neither_stamped_nor_resumed(said):
    async def body() -> None:
        engine = Engine(said=said)
        assert await engine.calls.stamp_and_resume("receiving 7", "7") == (said, said)
        assert engine.sent == []

    asyncio.run(body())


class Server(SGLangServer):
    """The server actor's own calls to its schedulers, without an engine: they are noted, and answered when `open` is set."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.open = threading.Event()
        self._pool = ThreadPoolExecutor(1)  # whatever needs a thread waits for the call before it
        self._engine = SimpleNamespace(handles=[self], check=lambda: None)  # type: ignore[assignment]
        self._syncs = OneCall(self, self._tell, lambda: None)

    def __getattr__(self, method: str) -> Any:
        if method not in {name for name, _ in CALLS.values()}:
            raise AttributeError(method)
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda **_: self.sent.append(method)))

    async def pause_generation(self, mode: str = "retract") -> None:
        pass

    async def update_weight_version(self, version: str) -> None:
        pass

    async def get_weight_version(self) -> str:
        return "6"


@pytest.fixture
def slow_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(caller: ActorCaller, name: str, refs: Sequence[Any], *, deadline: float) -> list[dict[str, Any]]:
        assert caller.handles[0].open.wait(20)
        return [{}]

    monkeypatch.setattr(ActorCaller, "answers", answers)


@pytest.mark.parametrize("call", ["begin", "pull", "finish", "abort", "close", "status", "prepare"])
def test_a_call_to_the_schedulers_comes_after_what_was_sent_and_ends_the_sync_if_it_steps(slow_answers, call):
    async def body() -> None:
        server = Server()
        sync = asyncio.ensure_future(server.receive_version(7, mode="retract", reset_cache=False, limit_s=20.0))
        await settled()
        method, wanted = CALLS[call]
        found = {"version": 7, "timeout_s": 1.0, "reason": "why", "info": {}}
        asked = asyncio.ensure_future(server.weights(call, {name: found[name] for name in wanted}, 20.0))
        await settled()
        assert server.sent == ["begin_weights", method], "in the order in which it was asked, before any answer"
        server.open.set()
        await asked
        if call in ("status", "prepare"):
            await sync
            assert server.sent == ["begin_weights", method, "pull_weights", "finish_weights"]
        else:
            with pytest.raises(StepError, match="ended by a later call before its pull"):
                await sync
            assert server.sent == ["begin_weights", method]

    asyncio.run(body())
