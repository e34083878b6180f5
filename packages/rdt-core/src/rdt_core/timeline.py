"""When a member did what in a sync, for a picture of it: spans, recorded while the sync runs.

Recording a span costs a microsecond and no call. What travels is bounded: spans of one name that follow each other become
one, transfers of a link that overlap become one, and of too many the longest are kept. Times are offsets from one reading of
the host's clock; how the clocks of hosts relate is left to whoever draws the picture.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable

from . import wire

#: spans of one track that travel
MAX_SPANS = 64
#: seconds between two spans of one name that still are one
_GAP_S = 50e-6


class Recorder:
    """Records the spans of one member in one sync. Threads may add at once.

    Attributes:
        began: reading of `time.perf_counter` at which it was made.
    """

    def __init__(self) -> None:
        self._clock = time.time()
        self.began = time.perf_counter()
        self._spans: list[tuple[str, float, float, str | int, int]] = []

    def add(
        self,
        name: str,
        began: float,
        ended: float | None = None,
        *,
        track: str = "",
        link: int | None = None,
        nbytes: int = 0,
    ) -> None:
        """Records a span.

        Args:
            name: the phase.
            began: reading of `time.perf_counter` at its start.
            ended: at its end; None: now.
            track: what it belongs to beside the member's own phases, e.g. a replica.
            link: the source rank at the other end of the link that it belongs to.
            nbytes: that were moved in it.
        """
        where = track if link is None else link
        self._spans.append((name, began, time.perf_counter() if ended is None else ended, where, nbytes))

    def timeline(self, member: str) -> wire.Timeline:
        """Returns what was recorded so far, bounded.

        Args:
            member: who recorded it, as messages call it.
        """
        tracks: dict[str | int, list[wire.Span]] = {}
        for name, began, ended, where, nbytes in tuple(self._spans):
            track = link_track(where) if isinstance(where, int) else where
            span = wire.Span(name=name, start=began - self.began, seconds=ended - began, track=track, bytes=nbytes)
            tracks.setdefault(where, []).append(span)
        spans = [span for some in tracks.values() for span in bounded(joined(some))]
        return wire.Timeline(
            member=member, host=socket.gethostname(), pid=os.getpid(), began=self._clock, spans=tuple(spans)
        )


def link_track(source: int) -> str:
    """Returns the name of an engine rank's track for its link to a source rank."""
    return f"source {source}"


def joined(spans: Iterable[wire.Span], gap_s: float = _GAP_S) -> list[wire.Span]:
    """Makes one of spans of one name that follow each other or overlap. Returns them in order of time."""
    made: list[wire.Span] = []
    for span in sorted(spans, key=lambda one: one.start):
        last = made[-1] if made else None
        if last is None or last.name != span.name or span.start > last.start + last.seconds + gap_s:
            made.append(span)
            continue
        end = max(last.start + last.seconds, span.start + span.seconds)
        made[-1] = wire.Span(
            name=span.name,
            start=last.start,
            seconds=end - last.start,
            track=span.track,
            bytes=last.bytes + span.bytes,
        )
    return made


def bounded(spans: list[wire.Span], most: int = MAX_SPANS) -> list[wire.Span]:
    """Makes fewer of too many spans, which are `joined`: pauses of one name go, of several names the longest spans stay."""
    if len({span.name for span in spans}) == 1:
        gap_s = _GAP_S
        while len(spans) > most:
            gap_s *= 4
            spans = joined(spans, gap_s)
    kept = sorted(range(len(spans)), key=lambda at: spans[at].seconds, reverse=True)[:most]
    return [spans[at] for at in sorted(kept)]
