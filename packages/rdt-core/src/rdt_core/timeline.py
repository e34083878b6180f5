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
from typing import TypeAlias

from . import wire

#: spans of one track that travel
MAX_SPANS = 64
#: seconds between two spans of one name that still are one
_GAP_S = 50e-6

#: start and end in seconds since a timeline began, name, bytes
Piece: TypeAlias = tuple[float, float, str, int]


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
        tracks: dict[str | int, list[Piece]] = {}
        zero = self.began
        for name, began, ended, where, nbytes in tuple(self._spans):
            tracks.setdefault(where, []).append((began - zero, ended - zero, name, nbytes))
        spans = [
            wire.Span(
                name=name,
                start=start,
                seconds=end - start,
                track=link_track(where) if isinstance(where, int) else where,
                bytes=nbytes,
            )
            for where, some in tracks.items()
            for start, end, name, nbytes in bounded(joined(some))
        ]
        return wire.Timeline(
            member=member, host=socket.gethostname(), pid=os.getpid(), began=self._clock, spans=tuple(spans)
        )


def link_track(source: int) -> str:
    """Returns the name of an engine rank's track for its link to a source rank."""
    return f"source {source}"


def joined(pieces: Iterable[Piece], gap_s: float = _GAP_S) -> list[Piece]:
    """Makes one of pieces of one name that follow each other or overlap. Returns them in order of time."""
    made: list[Piece] = []
    for piece in sorted(pieces):
        if made:
            start, end, name, nbytes = made[-1]
            if name == piece[2] and piece[0] <= end + gap_s:
                made[-1] = start, max(end, piece[1]), name, nbytes + piece[3]
                continue
        made.append(piece)
    return made


def bounded(pieces: list[Piece], most: int = MAX_SPANS) -> list[Piece]:
    """Makes fewer of too many pieces, which are `joined`: pauses of one name go, of several names the longest stay."""
    if len({piece[2] for piece in pieces}) == 1:
        gap_s = _GAP_S
        while len(pieces) > most:
            gap_s *= 4
            pieces = joined(pieces, gap_s)
    kept = sorted(range(len(pieces)), key=lambda at: pieces[at][1] - pieces[at][0], reverse=True)[:most]
    return [pieces[at] for at in sorted(kept)]
