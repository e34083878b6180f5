"""The command line's side of `rdt bench`: cluster, progress, tables, file, exit status.

The report goes to a file after every piece and the table is printed even when the run is interrupted. Progress is shown
on a terminal only.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

from ..report import write_json
from .measure import run
from .options import BenchOptions
from .results import BenchReport, Cell, PeerRow, p50, p95, ratio, to_dict

_WIDTH = 200
_ERROR = 400


def bench_command(target: Any, options: BenchOptions, json_file: str = "") -> int:
    """Starts Ray, measures, prints to `target`.

    Args:
        target: where the tables go, or the JSON.
        options: what to measure.
        json_file: where the report goes as JSON too; "-" prints it to `target` instead of tables; empty: nowhere.

    Returns:
        Exit status: 1 if bytes were not exact or nothing ran, else 0.

    Raises:
        OptionError: an option that cannot work; nothing was started.
    """
    import ray
    import torch
    from rich.console import Console

    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    options = options.check(gpus)
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
    finally:
        if latest and json_file == "-":
            target.write(json.dumps(to_dict(latest[0]), allow_nan=False) + "\n")
        elif latest:
            # a file has no width: a table that is wrapped for a terminal of 80 columns is hard to read in a log
            console = Console(file=target, width=None if target.isatty() else _WIDTH)
            for one in tables(latest[0]):
                console.print(one)
    return 0 if latest[0].exact and not latest[0].failed else 1


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
        ("first ms", "p50 ms", "p95 ms", "MB", "GB/s", "copy ms", "span ms", "nixl ms", "ratio", "exact"),
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
            "yes" if cell.exact else "NO",
        )
    if any(cell.expandable for cell in report.cells):
        made.caption = "source ranks allocate in expandable segments"
    if any(cell.collectives for cell in report.cells):
        made.caption = f"{made.caption or ''} all-reduces of the source ranks run while they publish".strip()
    return made


def _phases(report: BenchReport) -> Any:
    from rich.table import Table

    trainer = list(dict.fromkeys(name for cell in report.cells for name in cell.phases if name != "total"))
    reader = list(dict.fromkeys(name for cell in report.cells for name in cell.reader_phases))
    made = Table(title="where the time goes, p50 in ms: the trainer's phases, the slowest reader's (r:), MB a rank")
    _columns(
        made, ("mode", "links", "pack", "verify"), (*trainer, *(f"r:{name}" for name in reader), "sent", "received")
    )
    for cell in report.cells:
        if cell.error:
            continue
        made.add_row(
            cell.mode,
            cell.kind,
            cell.pack,
            cell.verify,
            *(_ms(cell.phases[name]) if name in cell.phases else "" for name in trainer),
            *(_ms(cell.reader_phases[name]) if name in cell.reader_phases else "" for name in reader),
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
    made = Table(title="other ways, same bytes, same readers")
    _columns(made, ("peer",), ("first ms", "p50 ms", "p95 ms", "GB/s", "over the fastest sync", "exact"))
    for row in report.peers:
        if row.error:
            made.add_row(row.name, _short(row.error))
            continue
        made.add_row(
            row.name,
            *_times(row),
            f"{row.bytes / 1e9 / p50(row.seconds):.1f}",
            f"{p50(row.seconds) / best:.1f} x" if best else "",
            "yes" if row.exact else "NO",
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


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
