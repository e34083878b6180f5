"""Calls to every scheduler: over real actors, and over the real socket and messages of SGLang's RPC."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import pytest

from rdt_core.errors import DeadlineError, EngineError, WireError
from rdt_sglang.callers import ActorCaller, RpcCaller

pytestmark = pytest.mark.integration


def soon(seconds: float = 30) -> float:
    return time.monotonic() + seconds


class Scheduler:
    """The methods that a scheduler's actor has, beside a default group that never comes back."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pulled: list[int] = []

    def run_event_loop(self) -> None:
        threading.Event().wait()

    def weights_status(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def release_weights(self) -> None:
        pass

    def pull_weights(self, version: int, timeout_s: float) -> dict[str, Any]:
        if version == 1:
            raise EngineError(f"rank {self.rank} has enough")
        if version == 2 and self.rank == 1:
            os._exit(1)
        if version == 3:
            time.sleep(1.0 + 4.0 * self.rank)
        if version == 4:
            raise ValueError("odd")
        if version >= 10:
            time.sleep(0.01)
        self.pulled.append(version)
        return {"bytes": 7}

    def begin_weights(self, version: int, timeout_s: float) -> dict[str, Any]:
        return {"pulled": [one for one in self.pulled if one >= 10]}


@pytest.fixture(scope="module")
def handles(ray_cluster: Any) -> list[Any]:
    import ray

    # the methods bear no group of their own, as in a process that cannot import the actor's class
    actor = ray.remote(concurrency_groups={"weights": 1})(Scheduler).options(num_cpus=0)
    made = [actor.remote(rank) for rank in range(2)]
    for handle in made:
        handle.run_event_loop.remote()
    return made


def test_actors_answer_beside_their_event_loop(handles):
    caller = ActorCaller(handles, "the engine")
    assert caller.call("status", {}, deadline=soon()) == [{"rank": 0}, {"rank": 1}]
    assert caller.call("close", {}, deadline=soon()) == [{}, {}]


def test_what_one_process_sends_is_executed_in_that_order(handles):
    # an abort relies on it: whatever was sent before it has been done when it comes
    caller = ActorCaller(handles, "the engine")
    sent = [caller.send("pull", {"version": 10 + number, "timeout_s": 1}) for number in range(20)]
    asked = caller.send("begin", {"version": 0, "timeout_s": 1})
    assert caller.answers("begin", asked, deadline=soon()) == [{"pulled": list(range(10, 30))}] * 2
    assert caller.answers("pull", sent[0], deadline=soon()) == [{"bytes": 7}] * 2


def test_every_rank_is_heard(handles):
    caller = ActorCaller(handles, "the engine")
    with pytest.raises(EngineError, match="scheduler 0: rank 0 has enough; scheduler 1: rank 1 has enough"):
        caller.call("pull", {"version": 1, "timeout_s": 1}, deadline=soon())
    with pytest.raises(EngineError, match="scheduler 0: ValueError: odd"):
        caller.call("pull", {"version": 4, "timeout_s": 1}, deadline=soon())
    with pytest.raises(WireError):
        caller.call("pull", {"version": 4}, deadline=soon())


def test_who_is_late_is_named_and_who_is_not_is_not(handles):
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="failed on 1 of 2 schedulers: scheduler 1: not done by the deadline"):
        ActorCaller(handles, "the engine").call("pull", {"version": 3, "timeout_s": 1}, deadline=soon(2.5))
    assert time.monotonic() - began < 4


def test_stock_actors_are_explained(handles):
    class Stock:
        pass

    with pytest.raises(EngineError, match="rdt-sglang is not installed where they run"):
        ActorCaller([Stock()], "the engine").call("status", {}, deadline=soon())


def test_a_rank_that_dies_fails_the_call_and_the_others_are_heard(handles):
    with pytest.raises(EngineError, match="failed on 1 of 2 schedulers: scheduler 1: died") as raised:
        ActorCaller(handles, "the engine").call("pull", {"version": 2, "timeout_s": 1}, deadline=soon())
    assert "scheduler 0" not in str(raised.value)


class Rank0:
    """The scheduler's end of SGLang's RPC: answers what it is told to, in order."""

    def __init__(self, endpoint: str) -> None:
        import zmq

        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)

    def take(self) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import sock_recv

        assert self.socket.poll(20_000)
        request = sock_recv(self.socket)
        assert request.method == "rdt_weights"
        return {"call": request.parameters["call"], **json.loads(request.parameters["arguments"])}

    def give(self, success: bool, message: str) -> None:
        from sglang.srt.managers.io_struct import RpcReqOutput, sock_send

        sock_send(self.socket, RpcReqOutput(success=success, message=message))


def test_rpc(tmp_path):
    endpoint = f"ipc://{tmp_path}/rpc"
    caller = RpcCaller.bind(endpoint, "the engine")
    with pytest.raises(DeadlineError, match="no scheduler listens"):
        caller.call("status", {}, deadline=soon(0.3))
    rank0 = Rank0(endpoint)

    def call(name: str, arguments: dict[str, Any], seconds: float = 20) -> Any:
        found: list[Any] = []

        def work() -> None:
            try:
                found.append(caller.call(name, arguments, deadline=soon(seconds)))
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        return thread, found

    thread, found = call("begin", {"version": 7, "timeout_s": 1.5})
    assert rank0.take() == {"call": "begin", "version": 7, "timeout_s": 1.5}
    rank0.give(True, json.dumps([None, None]))
    thread.join()
    assert found == [[{}, {}]]

    thread, found = call("status", {})
    rank0.take()
    rank0.give(False, "rank 1: no")
    thread.join()
    assert isinstance(found[0], EngineError)
    assert "rank 1: no" in str(found[0])

    # an answer that comes too late is never taken for the answer to the next call
    thread, found = call("pull", {"version": 7, "timeout_s": 1}, seconds=0.3)
    rank0.take()
    thread.join()
    assert isinstance(found[0], DeadlineError)
    thread, found = call("status", {})
    rank0.take()
    rank0.give(True, json.dumps([{"late": True}]))
    rank0.give(True, json.dumps([{"rank": 0}]))
    thread.join()
    assert found == [[{"rank": 0}]]

    # one call at a time
    first, slow = call("status", {})
    rank0.take()
    second, refused = call("status", {}, seconds=0.3)
    second.join()
    assert "the call before it is still running" in str(refused[0])
    rank0.give(True, "no JSON")
    first.join()
    assert "no JSON" in str(slow[0])
    rank0.socket.close()
