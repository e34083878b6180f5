"""An asyncio event loop whose clock jumps: deadlines of minutes pass in no time, and a deadlock is an error.

Whenever every coroutine waits, the clock is set to the next timer. If there is no timer either, nothing could ever
happen again, and `Deadlock` is raised instead of hanging. For coordinators and the like: no sockets, no threads.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Every coroutine waits, and no timer will ever wake one."""


class _Selector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("every coroutine waits without a deadline")
        self.now += max(timeout, 0.0)
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """The event loop; `time` starts at 0 seconds."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        """Returns the seconds that have passed on the jumping clock."""
        return self._clock.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end on a jumping clock. Raises Deadlock if it can never end."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)
