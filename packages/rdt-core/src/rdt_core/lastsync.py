"""The latest sync of a group that is over, for those who ask how the group is doing.

What it costs is paid by whoever asks: a sync that ends only leaves its report here.
"""

from __future__ import annotations

import time

from . import wire


class LatestSync:
    """Remembers the latest sync that is over."""

    def __init__(self) -> None:
        self._report: wire.SyncReport | None = None
        self._told: wire.LastSync | None = None
        self._ended = 0.0

    def committed(self, report: wire.SyncReport) -> None:
        """A sync was committed."""
        self._report, self._told, self._ended = report, None, time.monotonic()

    def failed(self, version: int, seconds: float, error: str) -> None:
        """A sync of this version failed after so many seconds."""
        self._report, self._ended = None, time.monotonic()
        self._told = wire.LastSync(version=version, outcome="failed", seconds=seconds, ago_s=0.0, error=error)

    def told(self) -> wire.LastSync | None:
        """Returns what is known; None before the first sync is over."""
        report = self._report
        if report is not None and self._told is None:
            self._told = wire.LastSync(
                version=report.version,
                outcome="partial" if report.failed else "committed",
                seconds=report.seconds,
                ago_s=0.0,
                bytes=report.bytes,
                mode=report.mode,
                slowest=max(report.links, key=lambda link: link.seconds, default=None),
                failed=report.failed,
            )
        if self._told is None:
            return None
        return self._told.ended(time.monotonic() - self._ended)
