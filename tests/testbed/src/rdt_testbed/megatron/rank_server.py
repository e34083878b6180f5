"""The process behind `ranks.Ranks`: `python -m rdt_testbed.megatron.rank_server DESCRIPTOR PROGRAM`.

Answers one request after the other over the inherited socket and ends when the other side closes it.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

from .build import initialize
from .layout import Layout
from .shim import cpu_megatron

#: what ranks would otherwise import one by one
_FIRST = (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "transformers.modeling_utils",
)
#: seconds that the other ranks get once one has failed: they may only be waiting for it
_GRACE_S = 2.0
#: seconds that a rank waits for the others at most, should the server be gone
_STAY_S = 120.0


def main(descriptor: int, program: str) -> None:
    pipe = Connection(descriptor)
    with cpu_megatron():
        for name in _FIRST:
            importlib.import_module(name)
        spec = importlib.util.spec_from_file_location("rank_program", program)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["rank_program"] = module
        spec.loader.exec_module(module)
        pipe.send_bytes(pickle.dumps("ready"))
        while True:
            try:
                function, layout, args, timeout_s = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            pipe.send_bytes(pickle.dumps(run(getattr(module, function), layout, args, timeout_s)))


def run(function: Any, layout: Layout, args: tuple, timeout_s: float) -> list[tuple[bool, Any]]:
    """Forks the ranks, waits until all have answered or time is up, and ends them."""
    answers: list[tuple[bool, Any]] = [(False, f"no answer within {timeout_s:.0f} s")] * layout.world
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        pipes, processes = [], []
        for rank in range(layout.world):
            ours, theirs = multiprocessing.Pipe()
            process = fork.Process(target=_rank, args=(theirs, function, layout, rank, f"{folder}/rendezvous", args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        deadline = time.monotonic() + timeout_s
        waiting = dict(zip(pipes, range(layout.world), strict=True))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    answers[rank] = (False, "the process ended without an answer")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        for pipe in pipes:
            try:
                pipe.send_bytes(b"leave")
            except OSError:
                pass  # it is gone
        for process in processes:
            process.join(_GRACE_S if not waiting else 0)
            if process.is_alive():
                process.kill()
                process.join()
    return answers


def _rank(pipe: Connection, function: Any, layout: Layout, rank: int, rendezvous: str, args: tuple) -> None:
    try:
        initialize(layout, rank, rendezvous)
        answer = (True, function(layout, *args))
        packed = pickle.dumps(answer)
    except BaseException:
        packed = pickle.dumps((False, traceback.format_exc()))
    try:
        pipe.send_bytes(packed)
        # a rank that leaves takes its connections along: stay until all have answered
        pipe.poll(_STAY_S)
    except OSError:
        pass  # the server gave up on this rank
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
