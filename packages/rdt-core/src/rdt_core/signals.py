"""SIGTERM as an exception, for commands that must end what they started before they end themselves.

By default the signal ends a process on the spot, and its engines and clusters outlive it. Main thread only, as Python wants it.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Lets SIGTERM unwind what runs inside as Ctrl-C does; the exit status is then 143."""
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SystemExit:
        if received:
            # inside a call of Ray's the status becomes 1
            raise SystemExit(128 + received[0]) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
