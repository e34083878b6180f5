"""Ranks agree in real gloo groups, and a rank that died keeps nobody beyond the deadline."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from rdt_core.errors import EngineError
from rdt_sglang import rpc
from rdt_sglang.ranks import Ranks

pytestmark = pytest.mark.integration


class Weights:
    """Stands for a scheduler's side of a sync: fails where it is told to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def begin(self, version: int, timeout_s: float) -> None:
        if self.rank == version:
            raise EngineError(f"no pause on {self.rank}")

    def status(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def abort(self, version: int, reason: str) -> None:
        if self.rank == 1 and reason == "die":
            import os

            os._exit(0)


class Scheduler:
    pass


def member(rank: int, rendezvous: str, results: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    ranks = Ranks(rank, [dist.group.WORLD])
    scheduler = Scheduler()
    scheduler.__dict__["_rdt_weights"] = Weights(rank)

    def answer(call: str, arguments: str) -> tuple[bool, str]:
        return rpc.answer(scheduler, {"call": call, "arguments": arguments}, ranks)

    results.put(("gathered", rank, sorted(ranks.gather(rank))))
    results.put(("status", rank, answer("status", "{}")))
    results.put(("one", rank, answer("begin", json.dumps({"version": 1, "timeout_s": 1.0}))))
    results.put(("none", rank, answer("begin", json.dumps({"version": 7, "timeout_s": 1.0}))))
    results.put(("unknown", rank, answer("format_disk", "{}")))
    results.put(("not json", rank, answer("status", "{")))
    if rank == 0:
        rpc.GRACE_S = 3.0
        began = time.monotonic()
        told = rpc.answer(scheduler, {"call": "abort", "arguments": json.dumps({"version": 1, "reason": "die"})}, ranks)
        results.put(("died", rank, (told, time.monotonic() - began)))
    else:
        results.close()
        results.join_thread()
        answer("abort", json.dumps({"version": 1, "reason": "die"}))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    rendezvous = str(Path(tmp_path_factory.mktemp("ranks")) / "rendezvous")
    members = [context.Process(target=member, args=(rank, rendezvous, results)) for rank in range(2)]
    for process in members:
        process.start()
    try:
        entries = [results.get(timeout=120) for _ in range(13)]
    finally:
        for process in members:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()
    return {(name, rank): value for name, rank, value in entries}


def test_every_rank_learns_what_all_say(found):
    for rank in range(2):
        assert found["gathered", rank] == [0, 1]
        assert found["status", rank] == (True, json.dumps([{"rank": 0}, {"rank": 1}]))
        assert found["none", rank] == (True, "[null, null]")


def test_the_failure_of_one_rank_is_the_answer_of_all(found):
    for rank in range(2):
        assert found["one", rank] == (False, "rank 1: EngineError: no pause on 1")


def test_what_is_no_call_is_refused_by_all_ranks(found):
    for rank in range(2):
        assert found["unknown", rank][0] is False
        assert "rank 0: WireError" in found["unknown", rank][1]
        assert "rank 1: WireError" in found["not json", rank][1]


def test_a_dead_rank_is_said_within_the_deadline(found):
    (success, message), seconds = found["died", 0]
    assert not success
    assert message.startswith("DeadlineError: rank 0 waited")
    assert seconds < 10.0


def test_one_rank_needs_no_group():
    assert Ranks(0).gather("alone") == ["alone"]
