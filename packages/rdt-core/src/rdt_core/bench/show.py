"""The command line's side of `rdt bench`: cluster, progress, tables, file, exit status.

The report goes to a file after every piece and the table is printed even when the run is interrupted. Progress is shown
on a terminal only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..report import try_path, write_json
from .measure import run
from .options import BenchOptions
from .plot import check_plot, draw
from .results import BenchReport, Cell, PeerRow, p50, p95, ratio, to_dict

log = logging.getLogger(__name__)

_WIDTH = 200
_ERROR = 400
_OVERHEAD = (
    "overhead: p50 of what a sync took beyond the moving of its bytes (the slowest reader's transfer and landing, and the "
    "filling of arenas that it waited for)"
)


def bench_command(target: Any, options: BenchOptions, json_file: str = "", plot: Path | None = None) -> int:
    """Starts Ray, measures, prints to `target`.

    Args:
        target: where the tables go, or the JSON.
        options: what to measure.
        json_file: where the report goes as JSON too; "-" prints it to `target` instead of tables; empty: nowhere.
        plot: where a picture of it goes; None draws none.

    Returns:
        Exit status: 1 if bytes were not exact or nothing ran, else 0.

    Raises:
        OptionError: an option that cannot work; nothing was started.
    """
    import ray
    import torch

    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    options = options.check(gpus)
    check_plot(plot)
    for option, path in (("--json", json_file if json_file != "-" else ""), ("--plot", plot)):
        if path:
            try_path(path, option)
    latest: list[BenchReport] = []
    try:
        with _progress(options) as advance:

            def observe(report: BenchReport, doing: str) -> None:
                latest[:] = [report]
                if json_file not in ("", "-"):
                    write_json(json_file, to_dict(report))
                advance(doing)

            ray.init(
                address="local", num_cpus=8, object_store_memory=256 << 20, include_dashboard=False, namespace="rdt",
                log_to_driver=False,
            )  # fmt: skip
            try:
                run(options, gpus=gpus, observe=observe)
            finally:
                ray.shutdown()
    except BaseException:
        try:
            _show(target, latest, json_file, plot)
        except Exception as second:
            # what stopped the bench is what its user has to read
            log.warning("what was measured before cannot be shown: %s", second)
        raise
    _show(target, latest, json_file, plot)
    return 0 if latest[0].exact and not latest[0].failed else 1


def _show(target: Any, latest: list[BenchReport], json_file: str, plot: Path | None) -> None:
    from rich.console import Console

    for report in latest:
        if json_file == "-":
            target.write(json.dumps(to_dict(report), allow_nan=False) + "\n")
        else:
            # a file has no width: a table that is wrapped for a terminal of 80 columns is hard to read in a log
            console = Console(file=target, width=None if target.isatty() else _WIDTH)
            for one in tables(report):
                console.print(one)
        if plot is not None:
            draw(report, plot)


@contextlib.contextmanager
def _progress(options: BenchOptions) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    pieces = math.prod(map(len, (options.modes, options.kinds, options.packs, options.verifies))) + len(options.peers)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting Ray", total=pieces)
        begun = [-1]

        def advance(doing: str) -> None:
            begun[0] += 1
            bar.update(task, completed=begun[0], description=doing or "done")

        yield advance


def tables(report: BenchReport) -> list[Any]:
    """The report as tables for people: the cells, their phases, and the peers next to the fastest cell."""
    made = [_cells(report)] if report.cells else []
    if any(cell.phases for cell in report.cells):
        made.append(_phases(report))
    if report.peers:
        made.append(_peers(report))
    return made


def _cells(report: BenchReport) -> Any:
    from rich.table import Table

    where = report.device_name
    if report.placement[0]:
        sources, readers = (", ".join(map(str, gpus)) for gpus in report.placement)
        where = f"{where}, {report.gpus}: source ranks on GPU {sources}, engine ranks on GPU {readers}"
    shape = f"{report.model}{f' cut to {report.layers} layers' if report.layers else ''}"
    made = Table(
        title=f"{shape}: {report.tensors} tensors, {report.bytes / 1e6:.1f} MB; {report.trainer} -> {report.engine} on {where}; "
        f"{report.rounds} syncs each"
    )
    _columns(
        made,
        ("mode", "links", "pack", "verify"),
        (
            "first ms",
            "p50 ms",
            "p95 ms",
            "MB",
            "GB/s",
            "copy ms",
            "span ms",
            "raw NIXL ms",
            "ratio",
            "overhead ms",
            "exact",
        ),
    )
    for cell in report.cells:
        head = (
            cell.mode if cell.used_mode in ("", cell.mode) else f"{cell.mode}: {cell.used_mode}",
            cell.kind if cell.used_kinds in ((), (cell.kind,)) else f"{cell.kind}: {', '.join(cell.used_kinds)}",
            cell.pack,
            cell.verify,
        )
        if cell.error:
            made.add_row(*head, _short(cell.error))
            continue
        floors = (cell.floors.copy, cell.floors.span, cell.floors.nixl)
        made.add_row(
            *head,
            *_times(cell),
            f"{cell.bytes / 1e6:.1f}",
            f"{cell.bytes / 1e9 / p50(cell.seconds):.1f}",
            *(_ms(value) if value else "" for value in floors),
            f"{ratio(cell):.2f} x {cell.floor}",
            _ms(cell.overhead_s),
            "yes" if cell.exact else "NO",
        )
    said = [_OVERHEAD]
    if any(cell.expandable for cell in report.cells):
        said.append("source ranks allocate in expandable segments")
    if any(cell.collectives for cell in report.cells):
        said.append("all-reduces of the source ranks run while they publish")
    made.caption = "\n".join(said)
    return made


def _phases(report: BenchReport) -> Any:
    from rich.table import Table

    trainer = list(dict.fromkeys(name for cell in report.cells for name in cell.phases if name != "total"))
    reader = list(dict.fromkeys(name for cell in report.cells for name in cell.reader_phases))
    made = Table(
        title="where the time goes, p50/p95 in ms: the trainer's phases, those of the slowest reader (r:) and its rank, "
        "MB sent and received by each rank"
    )
    names = (*trainer, *(f"r:{name}" for name in reader), "slowest", "sent", "received")
    _columns(made, ("mode", "links", "pack", "verify"), names)
    for cell in report.cells:
        if cell.error:
            continue
        made.add_row(
            cell.mode,
            cell.kind,
            cell.pack,
            cell.verify,
            *(_both(cell.phases, cell.phases_p95, name) for name in trainer),
            *(_both(cell.reader_phases, cell.reader_phases_p95, name) for name in reader),
            str(cell.slowest),
            " ".join(f"{nbytes / 1e6:.1f}" for nbytes in cell.sent),
            " ".join(f"{nbytes / 1e6:.1f}" for nbytes in cell.received),
        )
    notes = [f"{cell.mode}, {cell.kind}, {cell.pack}: {note}" for cell in report.cells for note in cell.notes]
    if notes:
        made.caption = "\n".join(notes)
    return made


def _peers(report: BenchReport) -> Any:
    from rich.table import Table

    best = min((p50(cell.seconds) for cell in report.cells if cell.exact and cell.seconds), default=0.0)
    made = Table(
        title="other ways, same bytes: into the same readers, or into the real engine named (rdt beside them there)"
    )
    made.add_column("peer")
    _columns(made, (), ("first ms", "p50 ms", "p95 ms", "GB/s", "over the fastest sync", "exact"))
    # reasons and what was measured are sentences
    made.add_column("what, or why not", overflow="fold")
    for row in report.peers:
        if row.error or row.reason:
            said = _short(row.error) if row.error else f"cannot run here: {row.reason}"
            made.add_row(row.label, *[""] * 6, said)
            continue
        phases = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in row.phases.items() if name != "total")
        made.add_row(
            row.label,
            *_times(row),
            f"{row.bytes / 1e9 / p50(row.seconds):.1f}",
            f"{p50(row.seconds) / best:.1f} x" if best and not row.inside else "",
            "yes" if row.exact else "NO",
            "; ".join(filter(None, (row.what, phases, *row.notes))),
        )
    return made


def _columns(made: Any, left: tuple[str, ...], right: tuple[str, ...]) -> None:
    for name in left:
        made.add_column(name)
    for name in right:
        # an error stands in the first column of numbers, whole
        made.add_column(name, justify="right", overflow="fold")


def _times(row: Cell | PeerRow) -> tuple[str, str, str]:
    return _ms(row.first_s), _ms(p50(row.seconds)), _ms(p95(row.seconds))


def _short(error: str) -> str:
    # the report has all of it
    return error if len(error) <= _ERROR else f"{error[:_ERROR]}…"


def _both(middle: dict[str, float], high: dict[str, float], name: str) -> str:
    if name not in middle:
        return ""
    # two numbers in a narrow column: a tenth of a millisecond says nothing beside hundreds
    pair = (1e3 * middle[name], 1e3 * high.get(name, 0.0))
    return "/".join(f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in pair)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
