"""Peers that other packages supply to `rdt bench`: engines' own ways to receive weights, found by entry point.

A package names a `PeerProvider` in the group `rdt.bench_peers`, under the peer's name; it is imported only when that peer was
asked for. Several may supply one name (for a GPU, for a CPU): the first that can run is taken. A provider measures in a
program of its own, because a real engine ends its whole process tree when it fails; that program and everything below it
is ended here, whatever happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

import psutil

from ..errors import DeadlineError, EngineError
from .options import BenchOptions
from .results import PeerRow

GROUP = "rdt.bench_peers"
_TAIL = 1500
_GONE_S = 10.0
#: in the environment of a program and of all that it starts
_MARK = "RDT_BENCH_PROGRAM"


class PeerProvider(Protocol):
    """One way to receive weights, as `rdt bench` measures it."""

    def reason(self, options: BenchOptions) -> str:
        """Why it cannot run with these options on this machine, in one line; empty if it can. Starts nothing."""
        ...

    def measure(self, options: BenchOptions) -> Sequence[PeerRow]:
        """Measures; rows for comparison in the same engine may follow the peer's own.

        Raises:
            RdtError: it failed.
        """
        ...


def installed_peers() -> dict[str, list[EntryPoint]]:
    """Returns the entry points of the group by peer; nothing is imported."""
    found: dict[str, list[EntryPoint]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.value):
        found.setdefault(point.name, []).append(point)
    return found


def provider(name: str, options: BenchOptions) -> tuple[PeerProvider | None, str]:
    """Returns who can measure a peer with these options, or None and why nobody can.

    Args:
        name: of the peer.
        options: checked.
    """
    reasons: list[str] = []
    for point in installed_peers().get(name, []):
        try:
            one: PeerProvider = point.load()()
        except ImportError as error:
            reasons.append(f"{point.value} cannot be imported: {error}")
            continue
        reason = one.reason(options)
        if not reason:
            return one, ""
        reasons.append(reason)
    return None, "; ".join(reasons) or f"no installed package supplies it (entry point group {GROUP})"


def run_program(
    module: str, request: Any, *, environment: Mapping[str, str], timeout_s: float, python: str = sys.executable
) -> Any:
    """Runs `python -m module` with a request and returns its answer; both are JSON.

    Args:
        module: reads the request from the file that its first argument names, and prints the answer as its last line.
        request: plain data.
        environment: added to this process's.
        timeout_s: of the whole run.
        python: that runs it.

    Raises:
        DeadlineError: not done within `timeout_s`.
        EngineError: it failed; tells the end of what it wrote.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="rdt-bench-") as folder:
        path = os.path.join(folder, "request.json")
        with open(path, "w") as file:
            json.dump(request, file)
        with open(os.path.join(folder, "log"), "w+") as log:
            child = subprocess.Popen(
                [python, "-m", module, path],
                env={**os.environ, **environment, _MARK: mark}, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip
            try:
                out, _ = child.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise DeadlineError(f"{module} was not done after {timeout_s:.0f} s: {_tail(log)}") from None
            finally:
                _end(child, mark)
            if child.returncode:
                raise EngineError(f"{module} ended with status {child.returncode}: {_tail(log)}")
    try:
        return json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise EngineError(f"{module} gave no answer: {out[-_TAIL:]!r}") from error


def _end(child: subprocess.Popen[str], mark: str) -> None:
    """Ends the program with everything that it started, and waits until that is gone."""
    # its children while it lives; what it left behind has its mark or is in its session
    left: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        left = {one.pid: one for one in psutil.Process(child.pid).children(recursive=True)}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark:
                left[process.pid] = process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for process in left.values():
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(list(left.values()), timeout=_GONE_S)


def _tail(log: Any) -> str:
    """The last line of what a program wrote, which mostly says why it failed, and then what came before it."""
    log.seek(0)
    text = log.read()[-_TAIL:].strip()
    return f"{text.rpartition(chr(10))[2]}\n{text}" if "\n" in text else text
