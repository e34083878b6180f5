"""A sync in one line, for the log and for `print`: rates, sizes, slow links, and what went wrong.

Computed from what a report holds; nothing is measured here. It stands below the reports (`wire`), which print themselves with
it, and knows them by their fields only. Bytes are bytes, GB is 1e9 bytes, seconds are wall-clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .wire import LinkReport, SyncReport

#: links that moved less in a sync are not called slow: their time is latency, not rate
LEAST_BYTES = 64 << 20
#: how many times faster the best link of a kind and path may be before another one is called slow
SPREAD = 10
#: phases of a sync on source rank 0 in their order: one after the other, and those that run beside them
SEQUENCE = ("begin", "pause", "engine_begin", "pull", "finish", "call", "commit", "stamp")
BESIDE = ("write", "verify")
#: what takes less, in seconds, would be shown as 0.0 ms
LEAST_S = 5e-5
_SHOWN = 3
_UNITS = ("B", "kB", "MB", "GB")


def size(nbytes: float) -> str:
    """Returns a number of bytes in the unit that suits it: "512 B", "82.5 kB", "538.1 MB", "16.381 GB"."""
    unit = next((power for power in (3, 2, 1) if abs(nbytes) >= 1000**power), 0)
    # rounded up to 1000 of a unit it is 1 of the next
    if unit in (1, 2) and round(abs(nbytes) / 1000**unit, 1) >= 1000:
        unit += 1
    return f"{nbytes / 1000**unit:.{(0, 1, 1, 3)[unit]}f} {_UNITS[unit]}"


def counted(number: int, what: str) -> str:
    """Returns a number of things: "1 replica", "2 replicas", "1,024 engine ranks"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def rate(nbytes: int, seconds: float) -> float:
    """Returns GB/s; infinite where no time was measured, 0 where nothing moved."""
    if nbytes == 0:
        return 0.0
    return nbytes / 1e9 / seconds if seconds > 0 else math.inf


def slowest(report: SyncReport) -> LinkReport | None:
    """Returns the link that had bytes in flight for the longest time, or None where there is no link."""
    return max(report.links, key=lambda link: link.seconds, default=None)


def slow_links(report: SyncReport, least_bytes: int = LEAST_BYTES) -> list[str]:
    """Names the slow links, each with its rate and its floor, the slowest first.

    Slow is a link that its reader found below its floor, or one at less than a tenth of the best link of its kind and path.
    Its rate is that of the time which the reader waited for it.

    Args:
        report: of one sync.
        least_bytes: links that moved less are not compared with others.
    """
    best: dict[tuple[str, str], float] = {}
    large = [link for link in report.links if link.bytes >= least_bytes and link.seconds > 0]
    for link in large:
        place = link.kind, link.path
        best[place] = max(best.get(place, 0.0), rate(link.bytes, link.seconds))
    floors = [(link, link.floor) for link in report.links if link.floor]
    floors += [(link, best[link.kind, link.path] / SPREAD) for link in large if not link.floor]
    found = [(rate(link.bytes, link.waited), floor, link) for link, floor in floors if link.waited > 0]
    slow = sorted((one for one in found if one[0] < one[1]), key=lambda one: one[0])
    return [f"{link_name(link)} {gbps:.2g} GB/s, floor {floor:.2g}" for gbps, floor, link in slow]


def log_line(report: SyncReport) -> str:
    """Returns the sync in one line: version, seconds, bytes, rate, mode, phases in ms, the slowest link, and what went wrong.

    Wrong are replicas that were left out, each with the reason, and links that are too slow.
    """
    link = slowest(report)
    verified = "" if report.verify == "off" else f", verified ({report.verify})"
    tail = (
        "no link"
        if link is None
        else f"slowest link {link_name(link)} {rate(link.bytes, link.seconds):.2f} GB/s in {link.seconds:.3f} s"
    )
    return (
        f"version {report.version} of {report.group!r}: {size(report.bytes)} to {counted(len(report.readers), 'engine rank')} "
        f"in {report.seconds:.3f} s ({rate(report.bytes, report.seconds):.2f} GB/s), mode {report.mode}{verified}, "
        f"{_phases(report)}{tail}{_told(slow_links(report))}{_left_out(report)}"
    )


def link_name(link: LinkReport) -> str:
    """Returns the two ends of a link and its kind."""
    return f"{link.source} -> {link.reader} ({link.kind})"


def one_line(text: str, most: int = 240) -> str:
    """Returns a message, which may have several lines and be long, in one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def rest(phases: Mapping[str, float], seconds: float) -> float:
    """Returns what of a sync's seconds is in no phase."""
    return max(0.0, seconds - sum(phases.get(name, 0.0) for name in SEQUENCE))


def shown_phases(report: SyncReport) -> dict[str, float]:
    """Returns seconds by phase in the order of a sync, those beside it last; without the total and what takes no time."""
    known = (*SEQUENCE, "rest", *BESIDE)
    names = [*(name for name in known if name in report.phases), *(name for name in report.phases if name not in known)]
    return {name: report.phases[name] for name in names if name != "total" and report.phases[name] >= LEAST_S}


def _phases(report: SyncReport) -> str:
    shown = [
        f"{'beside ' if name in BESIDE else ''}{name} {1e3 * seconds:.{0 if seconds >= 0.01 else 1}f}"
        for name, seconds in shown_phases(report).items()
    ]
    return f"{', '.join(shown)} ms, " if shown else ""


def _left_out(report: SyncReport) -> str:
    return "".join(f", left out {name!r}: {one_line(why)}" for name, why in report.failed.items())


def _told(slow: Sequence[str]) -> str:
    if not slow:
        return ""
    more = f"; and {len(slow) - _SHOWN} more" if len(slow) > _SHOWN else ""
    return f", slow: {'; '.join(slow[:_SHOWN])}{more}"
