"""Which processes a test run left behind: finds them even when their own parent is gone.

A runner of a test that is killed leaves its engine to `init`, where nobody can tell whose it was. So the test process
becomes the reaper of all its descendants (Linux), and every process that outlives its parent stays visible here.
Processes of others are never looked at, and nothing is ended that is not a descendant.
"""

from __future__ import annotations

import ctypes
import os
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36
# Python's own helper of `multiprocessing` ends with its parent and holds nothing else.
_HARMLESS = ("multiprocessing.resource_tracker",)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent dies, for the rest of its life.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


def descendants() -> list[psutil.Process]:
    """Returns the living descendants of this process, without zombies and Python's own helpers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() == psutil.STATUS_ZOMBIE or any(
                mark in " ".join(process.cmdline()) for mark in _HARMLESS
            ):
                continue
        except psutil.NoSuchProcess:
            continue
        found.append(process)
    return found


def describe(process: psutil.Process) -> str:
    """Returns one line: pid, name, age in seconds and the start of the command line."""
    try:
        with process.oneshot():
            age = time.time() - process.create_time()
            return f"{process.pid} {process.name()} ({age:.0f} s old): {' '.join(process.cmdline())[:160]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


def survivors(grace_s: float) -> list[psutil.Process]:
    """Returns the descendants that are still there when `grace_s` seconds have passed; at once when there are none."""
    deadline = time.monotonic() + grace_s
    while (left := descendants()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


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
