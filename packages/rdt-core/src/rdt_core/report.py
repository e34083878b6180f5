"""What a sync did, for people and for machines: a log line, a table, JSON, a picture.

Everything is computed from `wire.SyncReport`; nothing is measured here. Bytes are bytes, GB is 1e9 bytes, seconds are
wall-clock. A rate is bytes over the time in which the link had bytes in flight. The line itself, and how sizes and rates are
written, is `logline`.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import RdtError
from .logline import BESIDE, LEAST_S, rest, shown_phases
from .logline import LEAST_BYTES as LEAST_BYTES
from .logline import counted as counted
from .logline import link_name as link_name
from .logline import log_line as log_line
from .logline import one_line as one_line
from .logline import rate as rate
from .logline import size as size
from .logline import slow_links as slow_links
from .logline import slowest as slowest
from .notation import OptionError
from .wire import CheckReport, LinkReport, SyncReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group
    from rich.table import Table


def to_the_end(report: SyncReport, *, commit_s: float, stamp_s: float, seconds: float) -> SyncReport:
    """Returns a report that goes on until the replicas serve, as source rank 0 saw it.

    Args:
        report: as it was committed, with the phases before that.
        commit_s: seconds in which the coordinator committed.
        stamp_s: seconds in which the replicas were stamped and resumed.
        seconds: of the whole sync. What is in no phase is phase "rest", so that they add up to it.
    """
    phases = {**report.phases, "commit": commit_s, "stamp": stamp_s}
    phases |= {"rest": rest(phases, seconds), "total": seconds}
    return msgspec.structs.replace(report, seconds=seconds, phases=phases)


def by_kind(report: SyncReport) -> dict[str, LinkReport]:
    """Sums up the links of each kind: bytes added, seconds of the slowest (links of one kind run side by side)."""
    sizes: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for link in report.links:
        sizes[link.kind] = sizes.get(link.kind, 0) + link.bytes
        seconds[link.kind] = max(seconds.get(link.kind, 0.0), link.seconds)
    return {
        kind: LinkReport(source=-1, reader="", kind=kind, bytes=nbytes, seconds=seconds[kind])
        for kind, nbytes in sizes.items()
    }


def packing(report: SyncReport) -> list[str]:
    """Says which pieces are packed at their owners, on how many links, and whether that was set, measured or a default."""
    count: Counter[tuple[str, int, str]] = Counter()
    for reader in report.readers:
        for one in reader.packing:
            if one.bytes:
                count[one.kind, one.bytes, one.how] += one.links
    return [
        f"rows below {nbytes / 1024:g} KiB on {links} {kind} link{'s' if links > 1 else ''} ({how})"
        for (kind, nbytes, how), links in sorted(count.items())
    ]


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
        "slow": slow_links(report),
        "packed": packing(report),
    }


def table(reports: Iterable[SyncReport]) -> Table:
    """Returns a table with one row for each sync: phases in milliseconds, bytes, rate, and rate by link kind."""
    from rich.table import Table

    reports = list(reports)
    phases = list(dict.fromkeys(name for report in reports for name in shown_phases(report)))
    result = Table(title="syncs")
    slow = [slow_links(report) for report in reports]
    last = ("links", "slow") if any(slow) else ("links",)
    for heading in ("version", "mode", "ms", *(f"{name} ms" for name in phases), "bytes", "GB/s", *last):
        result.add_column(heading, justify="left" if heading in ("mode", *last) else "right")
    for report, told in zip(reports, slow, strict=True):
        kinds = ", ".join(f"{kind} {_gbps(total)} GB/s" for kind, total in sorted(by_kind(report).items()))
        result.add_row(
            str(report.version),
            report.mode,
            f"{report.seconds * 1e3:.1f}",
            *(f"{report.phases[name] * 1e3:.1f}" if name in report.phases else "" for name in phases),
            size(report.bytes),
            f"{rate(report.bytes, report.seconds):.2f}",
            kinds,
            *(["; ".join(told)] if any(slow) else []),
        )
    return result


def sync_table(report: SyncReport, most: int = 8) -> Group:
    """Returns one sync as a title, a table and notes: the driver's phases, engine ranks', bytes by link kind, single links.

    Args:
        report: of the sync.
        most: engine ranks and links to show, the slowest first.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    # titles and captions of a table are wrapped where the table ends, and read markup
    title = Text(f"version {report.version} of {report.group!r}, mode {report.mode} ({report.mode_reason})")
    result = Table()
    for heading in ("who", "what", "ms", "bytes", "GB/s"):
        result.add_column(heading, justify="left" if heading in ("who", "what") else "right", overflow="fold")

    def add(who: str, what: str, seconds: float, nbytes: int | None = None) -> None:
        moved = ("", "") if nbytes is None else (size(nbytes), f"{rate(nbytes, seconds):.2f}")
        result.add_row(who, what, f"{seconds * 1e3:.1f}", *moved)

    add("sync", "", report.seconds, report.bytes)
    for name, seconds in shown_phases(report).items():
        add("", f"{name}, beside" if name in BESIDE else name, seconds)
    readers = sorted(report.readers, key=lambda one: sum(one.phases.values()), reverse=True)
    for reader in readers[:most]:
        result.add_section()
        add(reader.reader, "", sum(reader.phases.values()), reader.bytes)
        for name, seconds in reader.phases.items():
            if seconds >= LEAST_S:
                add("", name, seconds)
    result.add_section()
    for kind, total in sorted(by_kind(report).items()):
        count = sum(link.kind == kind for link in report.links)
        add(f"{count} {kind} link{'s' if count > 1 else ''}", "slowest's time", total.seconds, total.bytes)
    links = sorted(report.links, key=lambda link: link.seconds, reverse=True)
    for link in links[:most]:
        add("", link_name(link), link.seconds, link.bytes)
    hidden = [f"{len(readers) - most} engine ranks"] if len(readers) > most else []
    hidden += [f"{len(links) - most} links"] if len(links) > most else []
    notes = [f"not shown: {' and '.join(hidden)} that were faster"] if hidden else []
    notes += [f"slow: {one}" for one in slow_links(report)[:most]]
    notes += [f"packed: {one}" for one in packing(report)]
    notes += [f"left out: {name}: {one_line(why)}" for name, why in report.failed.items()]
    return Group(title, result, *map(Text, notes))


def check_table(report: CheckReport, *, all_rows: bool = False) -> Table:
    """Returns a table of a comparison without a sync: what differs or cannot be compared, or every tensor.

    Args:
        report: of the comparison.
        all_rows: also tensors that are equal.
    """
    from rich.table import Table

    result = Table(title=f"{report.group} against {', '.join(report.replicas) or 'no replica'}")
    for heading in ("tensor", "replica", "state", "bytes compared", "where"):
        result.add_column(heading, justify="right" if heading == "bytes compared" else "left", overflow="fold")
    for tensor in report.tensors:
        if all_rows or tensor.state != "equal":
            style = "bold red" if tensor.state == "differs" else ""
            result.add_row(tensor.name, tensor.replica, tensor.state, size(tensor.bytes), tensor.detail, style=style)
    return result


def check_summary(report: CheckReport) -> str:
    """Returns a comparison in one line: how many tensors are in which state, and what it cost."""
    count = Counter(tensor.state for tensor in report.tensors)
    told = ", ".join(f"{count[state]} {state}" for state in ("equal", "differs", "not comparable", "not taken"))
    return (
        f"{told}; {size(report.bytes)} compared in {report.seconds:.2f} s ({rate(report.bytes, report.seconds):.2f} "
        f"GB/s)"
    )


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Writes `value` as JSON in one step: a reader sees the old file or the new one, never a part.

    Args:
        path: parent folders are made.
        value: plain JSON types or wire structs, nested as you like.

    Raises:
        ValueError: a number in it is not finite, which JSON cannot say.
        RdtError: the file cannot be written.
    """
    write_whole(path, json.dumps(msgspec.to_builtins(value), indent=2, allow_nan=False) + "\n")


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file in one step; what is no regular file (a pipe, a device) is written into and stays what it is.

    Args:
        path: folders above it are made; a link is followed.
        content: all of it; text becomes UTF-8.

    Raises:
        RdtError: the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name[:100]}.{os.getpid()}")
        try:
            draft.write_bytes(data)
            os.replace(draft, target)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise RdtError(f"{os.fspath(path)} cannot be written: {_why(error)}") from error


def try_path(path: str | os.PathLike[str], option: str) -> None:
    """Finds out whether `write_whole` could write a file there, before long work whose result goes into it.

    Args:
        path: folders above it are made; what is there is not touched.
        option: of a command, which said so.

    Raises:
        OptionError: it could not.
    """
    try:
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        kind = _kind(target)
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if kind and not stat.S_ISREG(kind):
            # not opened: a pipe would wait for its reader, or tell it that this was all
            if not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        with tempfile.NamedTemporaryFile(prefix=f".{target.name[:100]}.", dir=target.parent):
            pass
    except OSError as error:
        raise OptionError(f"{option} {os.fspath(path)} cannot be written: {_why(error)}") from error


def _why(error: OSError) -> str:
    # a folder cannot be made where a file is
    return os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror or str(error)


def _kind(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return 0


def save_figure(path: str | os.PathLike[str], figure: Figure, form: str = "png") -> None:
    """Writes a figure of matplotlib as `write_whole` writes text.

    Args:
        path: see `write_whole`.
        figure: with a canvas.
        form: "png", "svg" or "pdf".

    Raises:
        RdtError: the file cannot be written.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format=form)
    write_whole(path, drawn.getvalue())


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure, drawn without pyplot: no global state, no window system.

    Args:
        width, height: in inches.

    Raises:
        RdtError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RdtError("drawing needs matplotlib, which is not installed; pip install 'rdt-core[demo]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot(path: str | os.PathLike[str], steps: Sequence[Mapping[str, Any]]) -> None:
    """Draws reward and sync time over the versions into a PNG.

    Args:
        path: parent folders are made.
        steps: mappings with `version`, `reward` and `seconds`.

    Raises:
        RdtError: matplotlib is not installed, or the file cannot be written.
    """
    versions = [step["version"] for step in steps]
    figure = new_figure(8, 6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(versions, [step["reward"] for step in steps], marker="o", color="tab:blue")
    upper.set_ylabel("reward")
    lower.bar(versions, [step["seconds"] for step in steps], color="tab:orange")
    lower.set_ylabel("sync [s]")
    lower.set_xlabel("version")
    lower.xaxis.get_major_locator().set_params(integer=True)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    save_figure(path, figure)


def _gbps(link: LinkReport) -> str:
    return f"{rate(link.bytes, link.seconds):.2f}"


def _finite(link: LinkReport) -> float | None:
    value = rate(link.bytes, link.seconds)
    return value if math.isfinite(value) else None
