"""A plan as a picture: bytes of owners' and of readers' NICs, the phases with their bottlenecks, and other designs beside it.

Every bar says its number where there is room for it, else the most loaded one and the mean do. Needs matplotlib, which is
an extra; refuses without it and for files that cannot be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report import counted, new_figure, save_figure
from .figures import bytes_text, seconds_text
from .report import PlanReport

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
#: NICs up to which every bar has its number
_FEW = 16
_OWNERS, _READERS, _PLAN, _OTHER = "tab:blue", "tab:orange", "mediumseagreen", "lightgrey"


def draw(path: Path, report: PlanReport) -> None:
    """Draws into a PNG.

    Raises:
        RdtError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(13, 9)
    (owners, readers), (phases, designs) = figure.subplots(2, 2)
    wire = next((phase for phase in report.phases if phase.name.startswith("wire")), None)
    slowest = f", bottleneck: {wire.bottleneck}" if wire is not None else ""
    figure.suptitle(
        f"{report.model}: {report.trainer} -> {report.engine}\n{bytes_text(report.bytes)} over "
        f"{counted(len(report.links), 'link')}; wire and landing {seconds_text(report.wire_s)}{slowest}"
    )
    for axes, color, side in zip((owners, readers), (_OWNERS, _READERS), sides(report), strict=True):
        _loads(axes, *side, color)
    _bars(
        phases, f"a sync, predicted: {seconds_text(report.seconds)}",
        [(one.name, one.seconds, f"{seconds_text(one.seconds)}: {one.bottleneck}", _PLAN) for one in report.phases],
    )  # fmt: skip
    others = [(one.name, one.seconds, f"{seconds_text(one.seconds)}: {one.bottleneck}", _OTHER) for one in report.peers]
    plan = ("this plan", report.seconds, seconds_text(report.seconds), _PLAN)
    _bars(designs, "beside other designs", [plan, *others])
    save_figure(path, figure)


def sides(report: PlanReport) -> list[tuple[str, str, list[tuple[str, str, int]]]]:
    """Title, name of the axis, and (tick, name, bytes) of each bar for both sides: NICs, or ranks where no NIC is passed."""
    if any(nic.bytes for nic in report.nics):
        return [
            (
                title,
                "node.NIC",
                [(f"{nic.node}.{nic.nic}", str(nic), nic.bytes) for nic in report.nics if nic.side == side],
            )
            for title, side in (("out of owners' NICs", "out"), ("into readers' NICs", "in"))
        ]
    links = report.links
    found = []
    for title, what, count, ranks in (
        ("out of source ranks, all inside nodes", "source rank", report.source_ranks, links.source_rank),
        ("into engine ranks, all inside nodes", "engine rank", report.engine_ranks, links.engine_rank),
    ):
        nbytes = [0] * count
        for rank, moved in zip(ranks, links.bytes, strict=True):
            nbytes[rank] += moved
        found.append((title, what, [(str(rank), f"{what} {rank}", size) for rank, size in enumerate(nbytes)]))
    return found


def _loads(axes: Any, title: str, what: str, rows: Sequence[tuple[str, str, int]], color: str) -> None:
    """A bar for each (tick, name, bytes)."""
    most, mean = max(rows, key=lambda row: row[2]), sum(row[2] for row in rows) / len(rows)
    few = len(rows) <= _FEW
    # GB read badly where there are only kB of them
    unit, scale = next(((name, size) for name, size in _UNITS if most[2] >= size), _UNITS[-1])
    bars = axes.bar(range(len(rows)), [row[2] / scale for row in rows], width=0.8 if few else 1.0, color=color)
    axes.axhline(mean / scale, color="black", linewidth=0.8, linestyle="--")
    ratio = most[2] / mean if mean else 1.0
    axes.set_title(
        f"{title}\nmost {bytes_text(most[2])} ({most[1]}), mean {bytes_text(mean)}, max/mean {ratio:.3f}",
        fontsize="small",
    )
    if few:
        axes.bar_label(bars, [f"{row[2] / scale:.3g}" for row in rows], fontsize="small")
    ticks = range(0, len(rows), 1 if few else -(-len(rows) // 8))
    axes.set_xticks(ticks, [rows[at][0] for at in ticks], fontsize="small")
    axes.set_xlabel(what if few else f"{what}, {len(rows):,} of them")
    axes.set_ylabel(f"{unit} a sync")
    axes.margins(x=0.01, y=0.12)
    axes.grid(axis="y", alpha=0.3)


def _bars(axes: Any, title: str, rows: Sequence[tuple[str, float, str, str]]) -> None:
    """Horizontal bars: name, seconds, what is written beside it, colour."""
    most = max(row[1] for row in rows)
    axes.barh([row[0] for row in rows], [row[1] for row in rows], color=[row[3] for row in rows])
    for at, (_, seconds, text, _) in enumerate(rows):
        # beside a short bar, inside a long one
        inside = seconds > most / 2
        place = most * 0.01 if inside else seconds + most * 0.01
        axes.text(place, at, text, va="center", fontsize="small")
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("seconds")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
