"""Standard output for results alone: what libraries of this process and its children write there goes to standard error.

UCX logs into file descriptor 1 as soon as it is loaded, below Python's `sys.stdout`: with UCX_LOG_LEVEL=debug a report in
JSON would not parse and exports would be no shell. Refuses nothing: a target that is not descriptor 1 is used as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Iterator
from typing import TextIO

_STDOUT, _STDERR = 1, 2


@contextlib.contextmanager
def only_results(target: TextIO) -> Iterator[TextIO]:
    """Keeps standard output for what is written to the stream that this yields; all else inside goes to standard error.

    Args:
        target: where results go: the process's standard output, or any other stream, which is then yielded itself.
    """
    if _number(target) != _STDOUT:
        yield target
        return
    target.flush()
    # children do not inherit it, and it takes no number of a standard stream that is closed
    kept = fcntl.fcntl(_STDOUT, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
    with os.fdopen(kept, "w", encoding=target.encoding, errors=target.errors) as own:
        _to_stderr()
        try:
            yield own
        finally:
            ctypes.CDLL(None).fflush(None)  # the C library holds back what it writes to a pipe
            os.dup2(kept, _STDOUT)


def _number(target: TextIO) -> int:
    try:
        return target.fileno()
    except (OSError, ValueError, AttributeError):  # a stream in memory has none
        return -1


def _to_stderr() -> None:
    try:
        os.dup2(_STDERR, _STDOUT)
    except OSError:  # standard error is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDOUT)
        os.close(nowhere)
