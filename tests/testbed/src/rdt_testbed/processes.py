"""Which processes a test run left behind: finds them even when their own parent is gone.

A test's process that is killed leaves its engine to `init`, where nobody can tell whose it was. So a run marks its
environment, which every process below inherits, and looks for the mark in the whole process table. Processes of others
are never ended. (Reaping orphans instead would not do: Ray's workers leave only once `init` is their parent.)
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Collection

import psutil

_MARK = "RDT_TEST_RUN"
# Python's own helper of `multiprocessing` ends with its parent and holds nothing else.
_HARMLESS = ("multiprocessing.resource_tracker",)


def mark() -> None:
    """Marks this process's environment, once, for all processes that are started below it from now on."""
    os.environ[_MARK] = uuid.uuid4().hex
    # Ray's workers and engines rename themselves, by default over the environment that `/proc` shows.
    os.environ["SPT_NOENV"] = "1"


def descendants() -> list[psutil.Process]:
    """Returns the living processes below this one, orphans included, without zombies and Python's own helpers."""
    run = os.environ.get(_MARK)
    below = {process.pid for process in psutil.Process().children(recursive=True)}
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.pid not in below and (run is None or process.environ().get(_MARK) != run):
                continue
            command = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not any(harmless in command for harmless in _HARMLESS):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def describe(process: psutil.Process) -> str:
    """Returns one line: pid, name, age in seconds and the start of the command line."""
    try:
        with process.oneshot():
            age = time.time() - process.create_time()
            return f"{process.pid} {process.name()} ({age:.0f} s old): {' '.join(process.cmdline()).strip()[:160]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


def survivors(grace_s: float, known: Collection[int] = ()) -> list[psutil.Process]:
    """Returns the descendants that are still there when `grace_s` seconds have passed; at once when there are none.

    Args:
        grace_s: in seconds.
        known: numbers of processes that may be there.
    """
    deadline = time.monotonic() + grace_s
    while True:
        left = [process for process in descendants() if process.pid not in known]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def end(processes: list[psutil.Process], grace_s: float = 5.0) -> None:
    """Ends these processes: asks, waits `grace_s` seconds, kills."""
    for process in processes:
        try:
            process.terminate()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=grace_s)
