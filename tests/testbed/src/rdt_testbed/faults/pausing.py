"""What an engine's server knows besides its weights: whether it generates, and for whom it paused ahead of a sync.

A module worker runs one call at a time and has nothing to pause. In a world it stands for an engine: it pauses ahead only if
nobody used it since the stamp that a driver names, goes on from there, or takes it back. Nothing is refused that a server takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rdt_core.engines import ConnectInfo
from rdt_core.replica import ModuleWorker


class Pausing:
    """Around one engine rank.

    Args:
        made: the engine rank.

    Attributes:
        is_paused: whether it generates nothing.
        ahead: ticket of the driver for which it paused ahead of a sync, as long as nothing followed.
    """

    def __init__(self, made: ModuleWorker) -> None:
        self.is_paused = False
        self.ahead = ""
        self._made = made
        self._stamped = ""  # named by the driver that resumed it last; empty: somebody used it since
        self._before = ""

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """Calls of engine clients that it takes itself."""
        names = ("connect", "pause", "pause_ahead", "take_back", "receive", "abort", "resume")
        return {name: getattr(self, name) for name in names}

    def connect(self, info: ConnectInfo) -> None:
        """A sync that is open is ended; the engine stays paused."""
        if not info.check:
            self._use()
        self._made.connect(info)

    def pause(self) -> None:
        self._use()
        self.is_paused = True

    def pause_ahead(self, ticket: str, stamp: str) -> None:
        """Pauses if `stamp` was the last that happened to it."""
        if self._stamped == stamp:
            self._use()
            self.is_paused, self.ahead, self._before = True, ticket, stamp

    def take_back(self, ticket: str) -> bool:
        """Goes on as before, if nothing followed what was sent with this ticket."""
        if not ticket or self.ahead != ticket:
            return False
        self.is_paused, self.ahead, self._stamped = False, "", self._before
        return True

    def receive(self, version: int, timeout_s: float) -> dict[str, float]:
        self.pause()
        return self._made.receive(version, timeout_s)

    def abort(self, version: int, reason: str) -> None:
        self._use()
        self._made.abort(version, reason)

    def resume(self, stamp: str) -> None:
        self._use()
        self.is_paused, self._stamped = False, stamp

    def _use(self) -> None:
        self.ahead = self._stamped = ""
