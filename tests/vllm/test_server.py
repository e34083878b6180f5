"""What `VllmServer` sends to its engine in a sync that it takes in one call, and in which order. No engine runs here."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from rdt_core.engines import STEPS
from rdt_core.errors import EngineError
from rdt_testbed.vllm_calls import Engine
from rdt_vllm.protocol import AT_STEP, RECEIVING
from rdt_vllm.server import VllmServer

pytestmark = pytest.mark.unit


@pytest.fixture
def made() -> tuple[VllmServer, Engine]:
    server, engine = VllmServer.__new__(VllmServer), Engine()
    server._host(engine)
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


def test_an_engine_that_another_sync_uses_meanwhile_is_not_stamped(made):
    server, engine = made

    async def main() -> None:
        engine.says = f"{RECEIVING}7"  # a predecessor's, or its successor's
        late = asyncio.ensure_future(server.stamp_and_resume(f"{RECEIVING}7", "7"))
        await asyncio.sleep(0)
        theirs = asyncio.ensure_future(receive(server))
        with pytest.raises(EngineError, match="not stamped with version 7: another call of a sync came meanwhile"):
            await late
        await theirs

    asyncio.run(main())
    assert "resume" not in engine.names


def test_an_engine_that_was_stamped_since_is_asked_and_left_alone(made):
    server, engine = made

    async def main() -> None:
        await receive(server)
        await server.update_weight_version("3")
        engine.calls.clear()
        assert await server.stamp_and_resume(f"{RECEIVING}7", "7") == ("3", "3")

    asyncio.run(main())
    assert [name for name, _ in engine.calls] == ["ask"]
