"""Syncs as a picture: a file in Chrome's trace format, which https://ui.perfetto.dev opens.

A process for the driver and each rank, with a track for its phases (of a source rank: how long it holds still) and one for each
link or replica; all from the outcomes of syncs (`outcomes`). Times are those of each host's clock. The clock of another host than
the driver's is shifted by the least that puts its ranks inside the driver's calls to them; how much is said in the file. Refuses
outcomes that hold no timeline.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from . import wire
from .errors import RdtError
from .outcomes import SyncOutcome
from .report import rate, write_whole
from .timeline import link_track

_DRIVER = "driver"
#: track of what source rank 0 does as a source, in the timeline of the driver, which is the same process
_SOURCE = "source"
#: host and process id of members, by group and name
_Homes = dict[tuple[str, str], tuple[str, int]]


@dataclass(frozen=True, slots=True)
class _Seen:
    """A timeline on the driver's clock.

    Attributes:
        timeline: as it was recorded.
        shift_s: added to its host's clock.
        links: by source rank, what its links moved.
    """

    timeline: wire.Timeline
    shift_s: float
    links: dict[str, wire.LinkReport]

    def after(self, base: float) -> float:
        """Seconds from `base` to the start of the timeline."""
        return self.timeline.began + self.shift_s - base


def make_trace(outcomes: Iterable[SyncOutcome]) -> dict[str, Any]:
    """Returns syncs as an object of Chrome's trace format: times in microseconds since the first of them began.

    Args:
        outcomes: of one or several groups, in any order.

    Raises:
        RdtError: none of them has a timeline.
    """
    syncs = sorted((one for one in outcomes if one.timeline is not None), key=lambda one: one.time)
    if not syncs:
        raise RdtError(
            "there is no sync to draw: no outcome with a timeline; expected what an observer of rdt-core is told, or the "
            "lines that JsonLines wrote"
        )
    homes = {
        (one.group, line.member): (line.host, line.pid)
        for one in syncs
        if one.report is not None
        for line in one.report.timelines
    }
    aligned = [(one, _aligned(one, homes)) for one in syncs]
    # a source rank may begin before the driver
    base = min(seen.after(0.0) for _, some in aligned for seen in some)
    pages = _Pages()
    shifts: dict[str, float] = {}
    for outcome, some in aligned:
        for seen in some:
            if seen.shift_s:
                shifts[seen.timeline.host] = seen.shift_s
            _draw(pages, outcome, seen, base)
    hosts = sorted({host for host in pages.hosts if host})
    return {
        "traceEvents": pages.events(),
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": "rdt",
            "began": f"{base:.6f} s, Unix time on the driver's host",
            "clocks": _clocks(hosts, shifts),
        },
    }


def write_trace(path: str | os.PathLike[str], outcomes: Iterable[SyncOutcome]) -> int:
    """Writes syncs for https://ui.perfetto.dev.

    Args:
        path: of the JSON file; folders above it are made.
        outcomes: see `make_trace`.

    Returns:
        The number of events.

    Raises:
        RdtError: see `make_trace`; or the file cannot be written.
    """
    made = make_trace(outcomes)
    write_whole(path, json.dumps(made, allow_nan=False, separators=(",", ":")))
    return len(made["traceEvents"])


class _Pages:
    """Processes and tracks, numbered as they come, and their events."""

    def __init__(self) -> None:
        self.hosts: set[str] = set()
        self._events: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}
        self._tracks: dict[tuple[int, str], int] = {}

    def process(self, name: str, order: int) -> int:
        if name not in self._processes:
            pid = self._processes[name] = len(self._processes) + 1
            self._name("process_name", pid, 0, name=name)
            self._name("process_sort_index", pid, 0, sort_index=order)
        return self._processes[name]

    def track(self, pid: int, name: str) -> int:
        key = pid, name
        if key not in self._tracks:
            tid = self._tracks[key] = sum(known == pid for known, _ in self._tracks) + 1
            self._name("thread_name", pid, tid, name=name)
            self._name("thread_sort_index", pid, tid, sort_index=tid)
        return self._tracks[key]

    def span(
        self, pid: int, tid: int, name: str, began: float, seconds: float, category: str, args: dict[str, Any]
    ) -> None:
        start, end = round(began * 1e6, 3), round((began + max(seconds, 0.0)) * 1e6, 3)
        self._events.append(
            {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": name,
                "cat": category,
                "ts": start,
                "dur": round(end - start, 3),
                "args": args,
            }
        )

    def events(self) -> list[dict[str, Any]]:
        return self._events

    def _name(self, what: str, pid: int, tid: int, **args: Any) -> None:
        self._events.append({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args})


def _draw(pages: _Pages, outcome: SyncOutcome, seen: _Seen, base: float) -> None:
    line = seen.timeline
    is_driver = line.member == _DRIVER
    pages.hosts.add(line.host)
    order = 0 if is_driver else 1 if line.member.startswith("source rank") else 2
    who = f"{line.member} of {outcome.group}" if is_driver else line.member
    pid = pages.process(f"{who}, {line.host}:{line.pid}" if line.host else who, order)
    if is_driver:
        whole: dict[str, Any] = {"outcome": outcome.outcome, "mode": outcome.mode, "bytes": outcome.bytes}
        if outcome.gbps is not None:
            whole["GB/s"] = outcome.gbps
        if outcome.error:
            whole["error"] = outcome.error
        if outcome.report is not None and outcome.report.failed:
            whole["left out"] = dict(outcome.report.failed)
        tid = pages.track(pid, "sync")
        pages.span(pid, tid, f"version {outcome.version}", line.began - base, outcome.seconds, "sync", whole)
    # the member's own phases first, links below them
    for span in sorted(line.spans, key=lambda one: (one.track != "", _natural(one.track), one.start, -one.seconds)):
        args: dict[str, Any] = {"version": outcome.version}
        link = seen.links.get(span.track)
        if span.bytes:
            args["bytes"] = span.bytes
        if link is not None:
            args |= {"kind": link.kind, "path": link.path, "GB/s": _finite(rate(span.bytes, span.seconds))}
            track = f"{span.track} ({link.kind})"
        else:
            track = span.track or "phases"
        name = f"{span.name} {span.bytes / 1e6:.1f} MB" if link is not None else span.name
        category = "link" if link is not None else "phase"
        # sums of small numbers: Unix times are too large to tell spans apart that touch each other
        pages.span(pid, pages.track(pid, track), name, seen.after(base) + span.start, span.seconds, category, args)


def _natural(track: str) -> tuple[str, int, str]:
    head, _, tail = track.rpartition(" ")
    return (head, int(tail), "") if tail.isdecimal() else (track, 0, "")


def _aligned(outcome: SyncOutcome, homes: _Homes) -> list[_Seen]:
    """Every timeline of a sync, those of other hosts shifted into the driver's calls."""
    told = outcome.timeline
    if told is None:
        return []
    report = outcome.report
    driver = msgspec.structs.replace(told, spans=tuple(one for one in told.spans if one.track != _SOURCE))
    first = msgspec.structs.replace(
        told, member=_source(0), spans=tuple(one for one in told.spans if one.track == _SOURCE)
    )
    found = [_Seen(driver, 0.0, {}), _holding(_Seen(first, 0.0, {}), outcome.seconds, outcome)]
    if report is None:
        return found
    calls = _calls(driver)
    bounds: list[tuple[wire.Timeline, dict[str, wire.LinkReport], float, float]] = [
        (line, {}, driver.began, driver.began + outcome.seconds) for line in report.timelines
    ]
    for reader in report.readers:
        start, end = calls.get(reader.reader.rpartition("/")[0], (0.0, outcome.seconds))
        if reader.timeline is None:
            continue
        links = {link_track(link.source): link for link in reader.links}
        bounds.append((reader.timeline, links, driver.began + start, driver.began + end))
    shifts = _shifts(driver.host, [(line, low, high) for line, _, low, high in bounds])
    seen = [_Seen(line, shifts.get(line.host, 0.0), links) for line, links, _, _ in bounds]
    # the others hold still until they hear of the commit
    ends = [span.start + span.seconds for span in driver.spans if span.name == "commit" and not span.track]
    until = driver.began + (ends[0] if ends else outcome.seconds)
    sources = {line.member for line in report.timelines}
    there = {one.timeline.member for one in seen} | {_source(0)}
    for member in sorted({_source(link.source) for link in report.links} - there, key=_natural):
        # what it did came too late for the driver to be told
        host, pid = homes.get((outcome.group, member), ("", 0))
        seen.append(_Seen(wire.Timeline(member=member, host=host, pid=pid, began=driver.began, spans=()), 0.0, {}))
        sources.add(member)
    return found + [
        _holding(one, until - one.after(0.0), outcome) if one.timeline.member in sources else one for one in seen
    ]


def _source(rank: int) -> str:
    return f"source rank {rank}"


def _holding(seen: _Seen, seconds: float, outcome: SyncOutcome) -> _Seen:
    """A source rank's timeline with the time in which its weights may be read: from its call of `publish` until the outcome."""
    line = seen.timeline
    links = outcome.report.links if outcome.report is not None else ()
    moved = sum(link.bytes for link in links if _source(link.source) == line.member)
    hold = wire.Span(name="holds still", start=0.0, seconds=max(0.0, seconds), bytes=moved)
    return replace(seen, timeline=msgspec.structs.replace(line, spans=(hold, *line.spans)))


def _calls(driver: wire.Timeline) -> dict[str, tuple[float, float]]:
    """By replica, from when until when a pull of it may have run: where one call takes all steps, until that was back."""
    starts = {span.track: span.start for span in driver.spans if span.name == "pull"}
    ends = {
        span.track: span.start + span.seconds for name in ("pull", "call") for span in driver.spans if span.name == name
    }
    return {track: (start, ends[track]) for track, start in starts.items()}


def _shifts(host: str, bounds: Sequence[tuple[wire.Timeline, float, float]]) -> dict[str, float]:
    """By host other than the driver's, the least shift of its clock that puts its timelines between their bounds."""
    limits: dict[str, tuple[float, float]] = {}
    for line, first, last in bounds:
        if line.host != host and line.spans:
            began = line.began + min(span.start for span in line.spans)
            ended = line.began + max(span.start + span.seconds for span in line.spans)
            low, high = limits.get(line.host, (-math.inf, math.inf))
            limits[line.host] = max(low, first - began), min(high, last - ended)
    shifts = {}
    for other, (low, high) in limits.items():
        if low > high:  # its clock is read less precisely than the calls are long
            shifts[other] = (low + high) / 2
        elif not low <= 0 <= high:
            shifts[other] = low if low > 0 else high
    return shifts


def _clocks(hosts: Sequence[str], shifts: dict[str, float]) -> str:
    if len(hosts) < 2:
        return f"all times are of one clock, {hosts[0] if hosts else 'unknown'}"
    moved = ", ".join(f"{host} by {1e3 * shift:+.3f} ms" for host, shift in sorted(shifts.items()))
    return (
        f"each host's own clock ({', '.join(hosts)}); a host's is shifted by the least that puts its ranks inside the driver's "
        f"calls to them: {moved or 'none had to be'}"
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
