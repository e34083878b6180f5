"""Shared memory that engines and Python's own helpers leave behind where their processes are killed, and its removal.

Only what appeared since a moment that the caller marks and that no process has mapped any more: another run beside this
one keeps its own.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_FOLDER = Path("/dev/shm")
#: of vLLM, of SGLang, and of Python's multiprocessing (shared memory and semaphores) in either of them
_PATTERNS = ("*cpushm*", "sgl_shm_mq_*", "sglang_loads_*", "psm_*", "sem.mp-*")


def present() -> set[Path]:
    """What is there now."""
    return {path for pattern in _PATTERNS for path in _FOLDER.glob(pattern)}


def remove_since(before: set[Path]) -> None:
    """Removes what is there beside `before`, unless a process still has it."""
    if not (new := present() - before):
        return  # the maps of all processes take seconds
    mapped = _mapped()
    for path in new:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino not in mapped:
                path.unlink()


def _mapped() -> set[int]:
    """By inode: who makes a semaphore has it mapped under another name, which is gone."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:  # the process has ended, or is not ours
            continue
        lines = text.splitlines() if f" {_FOLDER}/" in text else ()
        found |= {int(line.split(maxsplit=5)[4]) for line in lines if f" {_FOLDER}/" in line}
    return found
