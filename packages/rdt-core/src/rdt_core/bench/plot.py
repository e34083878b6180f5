"""A picture of a bench: every combination split by phase beside its floors, and the peers beside the fastest of them.

Drawn with matplotlib, which is asked for before anything is measured. Combinations and peers have scales of their own,
because peers may take many times as long.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from pathlib import Path
from typing import Any

from ..notation import OptionError
from ..report import new_figure, save_figure, size
from .options import PLOTS
from .results import BenchReport, Cell, fastest, p50, ratio

log = logging.getLogger(__name__)

#: segments of a bar, in the order of a sync, with their colours
_PARTS = {
    "control before": "#b8c4d6", "filling arenas or buckets": "#e3a857", "transfer": "#2f6fb0", "landing": "#6fb07f",
    "digests": "#9a7fb8", "commit and stamp": "#c98b8b", "calls, and waiting": "#d9d9d9",
}  # fmt: skip
_FLOORS = {
    "copy": ("floor: one copy inside the reader", "|", "#c0392b", 220),
    "span": ("floor: one mapped span from each owner", "x", "#222222", 30),
    "nixl": ("raw NIXL, the same bytes", "D", "#8e44ad", 18),
}
#: parts of the longest bar that are too thin to be seen have no entry in the legend
_SEEN = 0.002


def check_plot(path: Path | None) -> None:
    """Refuses a picture that could not be drawn.

    Raises:
        OptionError: another suffix than those of `PLOTS`, or matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix.removeprefix(".") not in PLOTS:
        raise OptionError(f"--plot {path}: the suffix says the format; known: {', '.join(PLOTS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError(
            "--plot needs matplotlib, which is not installed; pip install matplotlib (or 'rdt-core[demo]')"
        )


def parts(cell: Cell) -> dict[str, float]:
    """The median sync of a cell split into what it does one after the other, in seconds; adds up to its p50."""
    reader, trainer = cell.reader_phases, cell.phases
    made = dict.fromkeys(_PARTS, 0.0)
    made["control before"] = sum(trainer.get(name, 0.0) for name in ("begin", "pause", "engine_begin"))
    made["filling arenas or buckets"] = min(trainer.get("write", 0.0), reader.get("wait", 0.0))
    made["transfer"], made["landing"] = reader.get("transfer", 0.0), reader.get("land", 0.0)
    made["digests"] = reader.get("verify", 0.0)
    # medians of parts may add up to more than the median of the whole
    made["commit and stamp"] = trainer.get("commit", 0.0) + trainer.get("stamp", 0.0)
    made["calls, and waiting"] = max(0.0, p50(cell.seconds) - sum(made.values()))
    return made


def draw(report: BenchReport, path: Path) -> None:
    """Draws what was measured so far into `path`; the suffix says the format. Where that is nothing, it draws nothing.

    Raises:
        RdtError: the file cannot be written.
    """
    cells = [cell for cell in report.cells if not cell.error]
    peers = [row for row in report.peers if row.seconds]
    if not cells and not peers:
        log.warning("nothing was measured: no picture is drawn into %s", path)
        return
    rows = len(cells) + (len(peers) + 1 if peers else 0)
    heights = [len(cells) + 1.5] * bool(cells) + [len(peers) + 2.5] * bool(peers)
    figure = new_figure(10, 2.6 + 0.34 * rows + (0.9 if peers else 0.0))
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    figure.suptitle(
        f"{report.model}, {size(report.bytes)}: {report.trainer} to {report.engine} on {report.device_name}; "
        f"p50 of {report.rounds} syncs", fontsize=11,
    )  # fmt: skip
    if cells:
        _cells(axes[0], cells)
        axes[0].set_title(
            "rdt: what a sync does, one after the other, and floors measured beside it", fontsize=10, loc="left"
        )
        figure.legend(loc="outside lower center", fontsize=8, ncols=3, frameon=False)
    if peers:
        best = fastest(report) or min(cells, key=lambda cell: p50(cell.seconds), default=None)
        labels = [row.label for row in peers]
        values = [1e3 * p50(row.seconds) for row in peers]
        if best is not None:
            labels, values = [f"rdt: {_label(best)}", *labels], [1e3 * p50(best.seconds), *values]
        colours = ["#2f6fb0" if label.startswith("rdt") else "#8c8c8c" for label in labels]
        bars = axes[-1].barh(labels, values, color=colours, height=0.65)
        axes[-1].bar_label(bars, [_number(value) for value in values], padding=3, fontsize=8)
        axes[-1].set_title("other ways to move the same bytes", fontsize=10, loc="left")
    for one in axes:
        one.invert_yaxis()
        one.set_xlabel("ms a sync", fontsize=9)
        one.tick_params(labelsize=8)
        one.grid(axis="x", alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
        one.margins(x=0.14)
    save_figure(path, figure, path.suffix.removeprefix("."))


def _cells(axes: Any, cells: list[Cell]) -> None:
    labels = [_label(cell) for cell in cells]
    split = [parts(cell) for cell in cells]
    start = [0.0] * len(cells)
    longest = max(1e3 * p50(cell.seconds) for cell in cells)
    for name, colour in _PARTS.items():
        widths = [1e3 * one[name] for one in split]
        if max(widths) > _SEEN * longest:
            axes.barh(labels, widths, left=start, height=0.65, color=colour, label=name)
            start = [at + width for at, width in zip(start, widths, strict=True)]
    for name, (said, marker, colour, area) in _FLOORS.items():
        held = [(1e3 * getattr(cell.floors, name), at) for at, cell in enumerate(cells)]
        held = [pair for pair in held if pair[0]]
        if held:
            axes.scatter(
                *zip(*held, strict=True), marker=marker, s=area, color=colour, label=said, zorder=3, linewidths=1.6
            )
    reach = 0.12 * max([*start, *(one for cell in cells for one in _markers(cell))], default=0.0)
    for at, (cell, end) in enumerate(zip(cells, start, strict=True)):
        # a marker just behind the bar would lie on its number
        end = max([end, *(one for one in _markers(cell) if end <= one < end + reach)])
        factor = f"  = {ratio(cell):.1f} x {cell.floor}" if math.isfinite(ratio(cell)) else ""
        axes.annotate(
            f"{_number(1e3 * p50(cell.seconds))}{factor}",
            (end, at), (5, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _markers(cell: Cell) -> list[float]:
    return [1e3 * getattr(cell.floors, name) for name in _FLOORS]


def _label(cell: Cell) -> str:
    extra = [cell.pack] * (cell.pack != "default") + [f"verify {cell.verify}"] * (cell.verify != "off")
    return ", ".join([cell.used_mode or cell.mode, "/".join(cell.used_kinds) or cell.kind, *extra])
