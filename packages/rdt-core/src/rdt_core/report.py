"""What a sync did, for people and for machines: a log line, a table, JSON, a picture.

Everything is computed from `wire.SyncReport`; nothing is measured here. Bytes are bytes, GB is 1e9 bytes, seconds are
wall-clock. A rate is bytes over the time in which the link had bytes in flight.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import RdtError
from .wire import CheckReport, LinkReport, SyncReport

if TYPE_CHECKING:
    from rich.table import Table

#: links that moved less than this are not held to a floor: their time is latency, not rate
FLOOR_BYTES = 1 << 20


def rate(nbytes: int, seconds: float) -> float:
    """Returns GB/s; infinite where no time was measured, 0 where nothing moved."""
    if nbytes == 0:
        return 0.0
    return nbytes / 1e9 / seconds if seconds > 0 else math.inf


def slowest(report: SyncReport) -> LinkReport | None:
    """Returns the link that had bytes in flight for the longest time, or None where there is no link."""
    return max(report.links, key=lambda link: link.seconds, default=None)


def by_kind(report: SyncReport) -> dict[str, LinkReport]:
    """Sums up the links of each kind: bytes added, seconds of the slowest (links of one kind run side by side)."""
    totals: dict[str, LinkReport] = {}
    for link in report.links:
        total = totals.get(link.kind, LinkReport(source=-1, reader="", kind=link.kind, bytes=0, seconds=0.0))
        totals[link.kind] = msgspec.structs.replace(
            total, bytes=total.bytes + link.bytes, seconds=max(total.seconds, link.seconds)
        )
    return totals


def slow_links(report: SyncReport, floors: Mapping[str, float], least_bytes: int = FLOOR_BYTES) -> list[str]:
    """Names the links that ran below their floor, each with its rate, its floor and its bytes.

    Args:
        report: of one sync.
        floors: GB/s by link kind; a kind without an entry has no floor.
        least_bytes: links that moved less are left out.
    """
    return [
        f"{_name(link)} ran at {_gbps(link)} GB/s, below its floor of {floors[link.kind]:g} GB/s ({link.bytes} bytes)"
        for link in report.links
        if link.bytes >= least_bytes and rate(link.bytes, link.seconds) < floors.get(link.kind, 0.0)
    ]


def log_line(report: SyncReport) -> str:
    """Returns the sync in one line: version, seconds, bytes, rate, mode and the slowest link."""
    link = slowest(report)
    verified = "" if report.verify == "off" else f", verified ({report.verify})"
    tail = "no link" if link is None else f"slowest link {_name(link)} {_gbps(link)} GB/s in {link.seconds:.3f} s"
    return (
        f"version {report.version} of {report.group!r}: {report.bytes / 1e9:.3f} GB to {len(report.readers)} engine "
        f"ranks in {report.seconds:.3f} s ({rate(report.bytes, report.seconds):.2f} GB/s), mode {report.mode}{verified}, {tail}"
    )


def to_dict(report: SyncReport) -> dict[str, Any]:
    """Returns the sync as plain JSON types: the report's own fields, every link, and what follows from them."""
    own: dict[str, Any] = msgspec.to_builtins(report)
    link = slowest(report)
    return {
        **own,
        "links": [{**msgspec.to_builtins(item), "gbps": _finite(item)} for item in report.links],
        "kinds": {
            kind: {"bytes": total.bytes, "seconds": total.seconds, "gbps": _finite(total)}
            for kind, total in by_kind(report).items()
        },
        "gbps": rate(report.bytes, report.seconds) if report.seconds > 0 else None,
        "slowest": None if link is None else msgspec.to_builtins(link),
    }


def table(reports: Iterable[SyncReport]) -> Table:
    """Returns a table with one row for each sync: phases in milliseconds, bytes, rate, and rate by link kind."""
    from rich.table import Table

    reports = list(reports)
    phases = list(dict.fromkeys(name for report in reports for name in report.phases))
    result = Table(title="syncs")
    for heading in ("version", "mode", "ms", *(f"{name} ms" for name in phases), "MB", "GB/s", "links"):
        result.add_column(heading, justify="left" if heading in ("mode", "links") else "right")
    for report in reports:
        kinds = ", ".join(f"{kind} {_gbps(total)} GB/s" for kind, total in sorted(by_kind(report).items()))
        result.add_row(
            str(report.version),
            report.mode,
            f"{report.seconds * 1e3:.1f}",
            *(f"{report.phases[name] * 1e3:.1f}" if name in report.phases else "" for name in phases),
            f"{report.bytes / 1e6:.1f}",
            f"{rate(report.bytes, report.seconds):.2f}",
            kinds,
        )
    return result


def check_table(report: CheckReport, *, all_rows: bool = False) -> Table:
    """Returns a table of a comparison without a sync: what differs or cannot be compared, or every tensor.

    Args:
        report: of the comparison.
        all_rows: also tensors that are equal.
    """
    from rich.table import Table

    result = Table(title=f"{report.group} against {', '.join(report.replicas) or 'no replica'}")
    for heading in ("tensor", "replica", "state", "MB compared", "where"):
        result.add_column(heading, justify="right" if heading == "MB compared" else "left", overflow="fold")
    for tensor in report.tensors:
        if all_rows or tensor.state != "equal":
            style = "bold red" if tensor.state == "differs" else ""
            result.add_row(
                tensor.name, tensor.replica, tensor.state, f"{tensor.bytes / 1e6:.3f}", tensor.detail, style=style
            )
    return result


def check_summary(report: CheckReport) -> str:
    """Returns a comparison in one line: how many tensors are in which state, and what it cost."""
    count = Counter(tensor.state for tensor in report.tensors)
    told = ", ".join(f"{count[state]} {state}" for state in ("equal", "differs", "not comparable", "not taken"))
    return (
        f"{told}; {report.bytes / 1e9:.3f} GB compared in {report.seconds:.2f} s ({rate(report.bytes, report.seconds):.2f} "
        f"GB/s)"
    )


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON in one step: a reader sees the old file or the new one, never a part.

    Args:
        path: parent folders are made.
        value: plain JSON types or wire structs, nested as you like.

    Raises:
        ValueError: a number in it is not finite, which JSON cannot say.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(msgspec.to_builtins(value), indent=2, allow_nan=False)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(text + "\n", encoding="utf-8")
    os.replace(draft, target)


def plot(path: str | os.PathLike[str], steps: Sequence[Mapping[str, Any]]) -> None:
    """Draws reward and sync time over the versions into a PNG.

    Args:
        path: parent folders are made.
        steps: mappings with `version`, `reward` and `seconds`.

    Raises:
        RdtError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RdtError("drawing needs matplotlib, which is not installed; pip install 'rdt-core[demo]'") from error
    versions = [step["version"] for step in steps]
    # figure and canvas without pyplot: no global state, no window system
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(versions, [step["reward"] for step in steps], marker="o", color="tab:blue")
    upper.set_ylabel("reward")
    lower.bar(versions, [step["seconds"] for step in steps], color="tab:orange")
    lower.set_ylabel("sync [s]")
    lower.set_xlabel("version")
    lower.xaxis.get_major_locator().set_params(integer=True)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")


def _name(link: LinkReport) -> str:
    return f"{link.source} -> {link.reader} ({link.kind})"


def _gbps(link: LinkReport) -> str:
    return f"{rate(link.bytes, link.seconds):.2f}"


def _finite(link: LinkReport) -> float | None:
    value = rate(link.bytes, link.seconds)
    return value if math.isfinite(value) else None
