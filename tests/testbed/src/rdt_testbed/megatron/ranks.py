"""Runs functions on Megatron ranks: one fresh process imports Megatron once and forks the ranks of every call from itself.

Importing takes seconds, a fork none, and the test runner's own process keeps torch as it is. Every wait has a deadline, and
no rank outlives its call. The other side is `rank_server`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from .layout import Layout

START_S = 120.0
#: what the server may take beyond a call's own deadline, to end ranks and answer
_ANSWER_S = 15.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONWARNINGS": "ignore",
}


class RankError(AssertionError):
    """Ranks raised, died, or were late; says which, with their tracebacks."""


class Ranks:
    """A process that forks Megatron ranks; ends with the block.

    Args:
        program: file of the functions that ranks may be asked to run. It is imported once, after Megatron.
    """

    def __init__(self, program: Path) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rdt_testbed.megatron.rank_server", str(theirs.fileno()), str(program)],
            pass_fds=[theirs.fileno()], env=os.environ | _ENVIRONMENT,
        )  # fmt: skip
        theirs.close()
        try:
            self._answer(START_S)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process that ranks are forked from."""
        return self._process.pid

    def run(self, function: str, layout: Layout, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Runs `function(layout, *args)` of the program on every rank of a layout, after `build.initialize`.

        Returns:
            What it returned on each rank; tensors are copies.

        Raises:
            RankError: a rank failed; the others were ended.
        """
        self._pipe.send_bytes(pickle.dumps((function, layout, args, timeout_s)))
        answers = self._answer(timeout_s + _ANSWER_S)
        failures = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        if failures:
            raise RankError(f"{function} in layout {layout.name}:\n" + "\n".join(failures))
        return [value for _, value in answers]

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RankError(f"the process that forks ranks gave no answer within {timeout_s:.0f} s")
        try:
            return pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            raise RankError("the process that forks ranks ended; its output says why") from None

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._pipe.close()
        try:
            self._process.wait(_ANSWER_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_ANSWER_S)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
